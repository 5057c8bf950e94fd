"""
Group status and administration: pause, resume, seek, delete; dead letters: redrive, drop; compaction.

Works on a log and a store, with a running bus or without one: what a group that runs holds in memory counts, else what is stored.
Every change is recorded in the topic ``audit``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from tidings.access.audit import Audit, audited_dead_letters, audited_drops
from tidings.core.clock import Clock, datetime_of, format_utc, ns_of
from tidings.core.errors import SettingsError, TidingsError
from tidings.core.names import check_topic, check_topic_and_group
from tidings.log.errors import EpochMismatch, PositionTrimmed
from tidings.log.interface import Log, Query
from tidings.log.retention import RecordHolders, RetentionPlan, plan_retention
from tidings.log.settings import TopicRetention

from .cursors import bounds, check_offset
from .errors import CursorDamaged, SubscriptionExists, UnknownGroup
from .reserved import SCHEDULE_TOPIC, check_not_reserved
from .store import Cursor, DeadLetter, DeadLetterFilter, GroupPosition, GroupStore
from .store.dead_letters import OPEN, DeadLetterState

if TYPE_CHECKING:
    from .running import RunningBus
    from .subscription import Subscription

GroupState = Literal["running", "idle", "ready", "paused", "damaged", "other_epoch", "trimmed", "stalled"]
"""
``idle``: the bus that was asked does not run it. ``ready``: no bus was asked; nothing keeps it from running. ``damaged``, ``other_epoch``:
it cannot start as it is. ``trimmed``: records it had yet to see were dropped. ``stalled``: a worker of it has ended.
"""
SeekTarget = int | datetime | Literal["earliest", "latest"]
"""Where to go on: at an offset, at the first event written at this time or later, at the oldest kept, at the next new one."""

_NAMED_COUNT_MAX: Final = 10


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """
    One group, for operators: what HTTP answers and the command line shows. What cannot be known is ``None``.

    Its counts are of all events of the topic, so a node gives none of them to a caller who may not read all of the topic.
    """

    topic: str
    group: str
    state: GroupState
    committed: int | None
    """The last offset up to which everything is acknowledged."""
    next_offset: int | None
    """The topic's: the offset that its next event will get."""
    lag: int | None
    """How many events are not acknowledged."""
    acknowledged_early: int | None
    """How many events are acknowledged beyond the first that is not."""
    failed_attempts: int | None
    """Of events that will be tried again."""
    paused: bool
    oldest_unacked_age_s: float | None
    """Since the oldest event that is not acknowledged was written."""
    dead_letters: int | None
    """How many of its events were given up on, and neither redriven nor dropped since."""
    problem: str | None
    members: int | None = None
    """Who shares it, here and at the other end of connections; unknown if a handler has it to itself, or no bus is looked at."""
    handling: int | None = 0
    """Events that are with a handler, here or at the other end of a connection."""
    delivered: int | None = 0
    acked: int | None = 0
    retried: int | None = 0
    dead_lettered: int | None = 0
    """Counted since the group was last started."""


class GroupDetails(GroupReport, frozen=True, kw_only=True):
    """One group with the offsets that its counts are of."""

    acknowledged_ranges: list[tuple[int, int]]
    """What is acknowledged early, both ends included."""
    failed_attempts_by_offset: dict[int, int]


class GroupChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a change to a group does, or would do. What cannot be known, or does not apply, is ``None``."""

    topic: str
    group: str
    carried_out: bool = False
    changes: bool = True
    """Whether there is anything to change: a paused group cannot be paused."""
    committed: int | None = None
    """The last offset up to which everything was acknowledged before it."""
    acknowledged_early: int | None = None
    next_offset: int | None = None
    """Of a seek: the next event that the group gets."""
    redelivered: int | None = None
    """Of a seek: acknowledged events that are delivered again."""
    skipped: int | None = None
    """Of a seek: events that are not acknowledged, and will not be delivered."""
    problem: str | None = None
    """Why the position before it cannot be read."""
    audit_seq: int | None = None
    """The record of the topic ``audit`` that says so."""


class DeadLetterChange(NamedTuple):
    """What a change to dead letters did, or would do."""

    letters: list[DeadLetter]
    carried_out: bool = False
    has_more: bool = False
    """More match than are changed at once."""
    audit_seq: int | None = None


DeadLetterVerb = Literal["redrive", "drop"]
CHANGEABLE: Final[Mapping[DeadLetterVerb, tuple[DeadLetterState, ...]]] = {"redrive": ("dead",), "drop": OPEN}
"""The states of dead letters to which each verb does something."""

_Report = TypeVar("_Report", bound=GroupReport)


async def offset_of(log: Log, topic: str, target: SeekTarget) -> int:
    """
    The offset that a target means.

    Raises:
        SettingsError, PositionTrimmed: The topic has no such offset.
    """
    first, end = bounds(log, topic)
    match target:
        case "earliest":
            return first
        case "latest":
            return end
        case datetime():
            page = await log.read(Query(topic=topic, from_time=target), limit=1)
            return page.records[0].offset if page.records else end
        case _:
            check_offset(log, "offset", topic, target)
            return target


def _member_count(subscription: Subscription | None) -> int | None:
    if subscription is None:
        return 0
    return len(subscription.members) if subscription.is_shared else None


class GroupAdmin:
    """
    Operations on the groups of a log and their dead letters.

    Args:
        log, store, clock: What they are about, and what time it is.
        running: The bus that runs groups here, if there is one.
    """

    def __init__(self, log: Log, store: GroupStore, clock: Clock, running: RunningBus | None = None) -> None:
        self._log = log
        self._store = store
        self._clock = clock
        self._running = running
        self.holders: RecordHolders = store if running is None else running.cursors
        """Who needs records of the log, for ``Log.drop``."""

    # Status

    async def position(self, topic: str, group: str) -> GroupPosition | TidingsError:
        """A group's position, a running one's as it is now, another's as it was last stored; or why it cannot be read."""
        if self._running is not None and (running := self._running.find_group(topic, group)) is not None:
            return GroupPosition(running.cursor.copy(), dict(running.attempts), running.is_paused, running.set_at)
        try:
            return await self._store.load(topic, group) or GroupPosition(Cursor(), {})
        except (CursorDamaged, EpochMismatch) as error:
            return error

    async def reports(
        self, topic: str | None = None, *, may_read: Callable[[str], bool] = lambda _: True
    ) -> list[GroupReport]:
        """Every group, or those of one topic, sorted; of topics that may be read."""
        groups = [key for key in await self.groups(topic) if may_read(key[0])]
        given_up: Counter[tuple[str, str]] = Counter()
        for each in {name for name, _ in groups}:  # a topic's dead letters are read once, however many groups it has
            given_up.update((each, letter.group) for letter in await self._store.dead_letters(each))
        return [await self._report(GroupReport, *key, given_up[key]) for key in groups]

    async def report(self, topic: str, group: str) -> GroupDetails:
        """
        One group.

        Raises:
            UnknownGroup: There is none; the hint names some that there are.
        """
        await self.check_known(topic, group)
        letters = await self._store.dead_letters(topic, None, DeadLetterFilter(group=group))
        return await self._report(GroupDetails, topic, group, len(letters))

    async def _report(self, kind: type[_Report], topic: str, group: str, dead_letters: int) -> _Report:
        position = await self.position(topic, group)
        subscription = None if self._running is None else self._running.registry.find(topic, group)
        running = None if subscription is None else subscription.group_state
        error: TidingsError | None = None
        age_s: float | None = None
        state: GroupState = "ready" if self._running is None else "idle" if running is None else "running"
        if isinstance(position, TidingsError):
            state, error = "other_epoch" if isinstance(position, EpochMismatch) else "damaged", position
            position = GroupPosition(Cursor(), {})
        else:
            state = "paused" if position.paused else state
            try:
                age_s = await self._oldest_age_s(topic, position.cursor.committed + 1)
            except PositionTrimmed as trimmed:
                state, error = "trimmed", trimmed
        problem = None if error is None else self._text_of(error)
        if running is not None and running.problem is not None:
            state, problem = "stalled", str(running.problem)
        is_known, cursor = error is None or state == "trimmed", position.cursor
        _, end = bounds(self._log, topic)
        details: dict[str, Any] = {}
        if issubclass(kind, GroupDetails):
            attempts = dict(sorted(position.attempts.items()))
            details = {"acknowledged_ranges": cursor.ranges, "failed_attempts_by_offset": attempts}
        return kind(
            topic=topic,
            group=group,
            state=state,
            committed=cursor.committed if is_known else None,
            next_offset=end,
            # The cursor may have moved after the log was read.
            lag=max(0, end - (cursor.committed + 1) - cursor.early_count) if is_known else None,
            acknowledged_early=cursor.early_count,
            failed_attempts=sum(position.attempts.values()),
            paused=position.paused,
            oldest_unacked_age_s=age_s,
            dead_letters=dead_letters,
            problem=problem,
            members=_member_count(subscription) if self._running is not None else None,
            handling=0 if running is None else running.handling,
            delivered=0 if running is None else running.stats.delivered,
            acked=0 if running is None else running.stats.acked,
            retried=0 if running is None else running.stats.retried,
            dead_lettered=0 if running is None else running.stats.dead_lettered,
            **details,
        )

    def _text_of(self, error: TidingsError) -> str:
        """A node shows problems to whoever may read the topic; files are looked at by who owns them."""
        return error.describe() if self._running is None else error.public_text

    async def _oldest_age_s(self, topic: str, offset: int) -> float | None:
        records = (await self._log.read(Query(topic=topic, from_offset=offset), limit=1)).records
        if not records:
            return None
        return max(0.0, (self._clock.now_ns() - ns_of(records[0].meta.written_time)) / 1e9)

    async def groups(self, topic: str | None = None) -> list[tuple[str, str]]:
        """Topic and name of every group that is stored or runs here, sorted."""
        found = set(await self._store.groups(topic))
        if self._running is not None:
            found |= {(each.topic, each.group) for each in self._running.registry.list(topic)}
        return sorted(found)

    async def check_known(self, topic: str, group: str) -> None:
        """
        Make sure that there is such a group.

        Raises:
            UnknownGroup: There is not; the hint names some that there are, those of the topic if it has any.
        """
        known = await self.groups()
        if (topic, group) not in known:
            names = [name for each, name in known if each == topic] or [f"{name} of {each}" for each, name in known]
            error = UnknownGroup(topic, group)
            error.hint = f"there are: {', '.join(names[:_NAMED_COUNT_MAX])}" if names else "there are no groups yet"
            raise error

    # Groups

    def _planned(
        self, topic: str, group: str, before: GroupPosition | TidingsError, target: int | None = None
    ) -> GroupChange:
        """What a change does to a position, or to one that cannot be read; a seek if there is a target."""
        if isinstance(before, TidingsError):
            return GroupChange(topic=topic, group=group, next_offset=target, problem=self._text_of(before))
        committed, early_count = before.cursor.committed, before.cursor.early_count
        change = GroupChange(topic=topic, group=group, committed=committed, acknowledged_early=early_count)
        if target is None:
            return change
        early = sum(max(0, min(last, target - 1) - first + 1) for first, last in before.cursor.ranges)
        return msgspec.structs.replace(
            change,
            next_offset=target,
            redelivered=max(0, committed + 1 - target) + early_count - early,
            skipped=max(0, target - (committed + 1)) - early,
        )

    async def pause(self, topic: str, group: str, *, dry_run: bool = False, audit: Audit | None = None) -> GroupChange:
        """
        Deliver nothing more to a group until it is resumed, also after a restart; or say only what that would change.

        Raises:
            UnknownGroup: There is none.
            CursorDamaged, EpochMismatch: Its position cannot be read.
        """
        return await self._set_paused(topic, group, audit or Audit(), is_paused=True, dry_run=dry_run)

    async def resume(self, topic: str, group: str, *, dry_run: bool = False, audit: Audit | None = None) -> GroupChange:
        """Go on delivering to a group; or say only what that would change. Raises as ``pause`` does."""
        return await self._set_paused(topic, group, audit or Audit(), is_paused=False, dry_run=dry_run)

    async def _set_paused(self, topic: str, group: str, audit: Audit, *, is_paused: bool, dry_run: bool) -> GroupChange:
        topic, group = check_topic_and_group(topic, group)
        check_not_reserved(topic, group)
        await self.check_known(topic, group)
        before = await self.position(topic, group)
        if isinstance(before, TidingsError):
            raise before
        change = msgspec.structs.replace(self._planned(topic, group, before), changes=before.paused != is_paused)
        if dry_run or not change.changes:
            return change
        verb = "group.pause" if is_paused else "group.resume"
        async with audit.of(self._log, verb, {"topic": topic, "group": group}):
            while True:
                if self._running is not None:
                    await self._running.released(topic, group)
                async with self._store.changing:
                    if self._running is not None and self._running.is_releasing(topic, group):
                        continue
                    if not self._set_running_paused(topic, group, is_paused=is_paused):
                        position = await self._store.load(topic, group)
                        if position is None:
                            raise UnknownGroup(topic, group)
                        await self._store.save(topic, group, position._replace(paused=is_paused))
                    return msgspec.structs.replace(change, carried_out=True, audit_seq=audit.seq)

    def _set_running_paused(self, topic: str, name: str, *, is_paused: bool) -> bool:
        """Pause or resume a group that runs here; whether it does."""
        running = self._running
        group = None if running is None else running.find_group(topic, name)
        if running is None or group is None:
            return False
        if is_paused:
            group.pause()
        else:
            group.resume()
            running.dead_letters.redrive(group)
        running.group_changed(group)  # a paused group makes no publisher wait
        return True

    async def seek(
        self, topic: str, group: str, target: SeekTarget, *, dry_run: bool = False, audit: Audit | None = None
    ) -> GroupChange:
        """
        Set a group's position, also one that cannot be read; or say only what that would change. A running group starts again from
        there, after handlers that are at work have finished or were cancelled (``close_timeout_s``); also if the caller gives up waiting.

        Raises:
            UnknownGroup: There is none.
            ReservedGroup: It is the bus's own.
            SettingsError, PositionTrimmed: The topic has no such offset.
        """
        topic, group = check_topic_and_group(topic, group)
        check_not_reserved(topic, group)
        offset = await offset_of(self._log, topic, target)
        if dry_run:
            await self.check_known(topic, group)
            return self._planned(topic, group, await self.position(topic, group), offset)
        running = self._running
        if running is None:
            return await self._seek(topic, group, offset, audit or Audit())
        await running.released(topic, group)
        await self.check_known(topic, group)
        await running.released(topic, group)
        return await running.release(topic, group, self._seek(topic, group, offset, audit or Audit()))

    async def _seek(self, topic: str, group: str, offset: int, audit: Audit) -> GroupChange:
        await self.check_known(topic, group)
        change = self._planned(topic, group, await self.position(topic, group), offset)
        fields = ("topic", "group", "committed", "next_offset", "redelivered", "skipped")
        details = {name: getattr(change, name) for name in fields}
        async with audit.of(self._log, "group.seek", details, frees_space=True):
            running = self._running
            subscription = None if running is None else running.registry.find(topic, group)
            if running is not None and subscription is not None:
                await running.restart_group(subscription, offset)
            else:
                await self.check_known(topic, group)
                await self.move(topic, group, offset, is_paused=await self._store.is_paused(topic, group))
        return msgspec.structs.replace(change, carried_out=True, audit_seq=audit.seq)

    async def move(self, topic: str, group: str, offset: int, *, is_paused: bool) -> None:
        """Set the position of a group that is not running, without a record. Raises as ``seek`` does."""
        async with self._store.changing:
            check_offset(self._log, "offset", topic, offset)
            now = format_utc(self._clock.now_ns()).decode()
            await self._store.save(topic, group, GroupPosition(Cursor(offset - 1), {}, is_paused, now))

    async def delete(self, topic: str, group: str, *, dry_run: bool = False, audit: Audit | None = None) -> GroupChange:
        """
        Forget a group's position; or say only what that would change. Its events stay in the log, its dead letters are kept.

        Raises:
            UnknownGroup: There is none.
            ReservedGroup: It is the bus's own, and delayed events wait.
            SubscriptionExists: It has a subscription; end that first.
        """
        topic, group = check_topic_and_group(topic, group)
        if topic == SCHEDULE_TOPIC and not await self._is_consumed(topic, group):
            check_not_reserved(topic, group)
        if self._running is not None:
            await self._running.released(topic, group)
        self._check_not_subscribed(topic, group)
        await self.check_known(topic, group)
        change = self._planned(topic, group, await self.position(topic, group))
        if dry_run:
            return change
        audit = audit or Audit()
        async with audit.of(self._log, "group.delete", {"topic": topic, "group": group}, frees_space=True):
            self._check_not_subscribed(topic, group)
            async with self._store.changing:  # who subscribes meanwhile waits, and makes a new one
                await self._store.remove(topic, group)
        return msgspec.structs.replace(change, carried_out=True, audit_seq=audit.seq)

    async def _is_consumed(self, topic: str, group: str) -> bool:
        position = await self.position(topic, group)
        return isinstance(position, GroupPosition) and position.cursor.committed + 1 >= bounds(self._log, topic)[1]

    def _check_not_subscribed(self, topic: str, group: str) -> None:
        if self._running is not None and self._running.registry.find(topic, group) is not None:
            error = SubscriptionExists(topic, group)
            error.hint = "end its subscription, and let its members leave, before it is deleted"
            raise error

    # Dead letters

    async def redrive(
        self,
        topic: str,
        ids: Sequence[str] | None = None,
        wanted: DeadLetterFilter | None = None,
        *,
        dry_run: bool = False,
        count_max: int | None = None,
        require: Callable[[str], None] | None = None,
        audit: Audit | None = None,
    ) -> DeadLetterChange:
        """
        Ask for dead letters to be redriven, those named or those that match; or say only which those are. Asking twice is asking once.

        Args:
            topic: Their topic.
            ids: Only these.
            wanted: Only those that match, whatever states it names.
            dry_run: Change nothing.
            count_max: How many at once.
            require: Called with the group of each; raises if that must not be done to it.
            audit: Who asks for it.

        Raises:
            UnknownDeadLetter: One of the ids does not exist.
        """
        chosen = await self._choose("redrive", topic, ids, wanted, count_max, require)
        if dry_run or not chosen.letters:
            return chosen
        names, audit = [letter.id for letter in chosen.letters], audit or Audit()
        async with audit.of(self._log, "dlq.redrive", audited_dead_letters(topic, names)):
            requested = await self._store.request_redrive(topic, names)
            if self._running is not None:
                for subscription in self._running.registry.list(topic):
                    if subscription.group_state is not None:
                        self._running.dead_letters.redrive(subscription.group_state)
        return chosen._replace(letters=requested, carried_out=True, audit_seq=audit.seq)

    async def drop(
        self,
        topic: str,
        ids: Sequence[str] | None = None,
        wanted: DeadLetterFilter | None = None,
        *,
        dry_run: bool = False,
        count_max: int | None = None,
        require: Callable[[str], None] | None = None,
        audit: Audit | None = None,
    ) -> DeadLetterChange:
        """Give dead letters up for good; arguments as for ``redrive``."""
        chosen = await self._choose("drop", topic, ids, wanted, count_max, require)
        if dry_run or not chosen.letters:
            return chosen
        names, audit = [letter.id for letter in chosen.letters], audit or Audit()
        async with audit.of(self._log, "dlq.drop", audited_dead_letters(topic, names), frees_space=True):
            await self._store.drop_dead_letters(topic, names)
        return chosen._replace(carried_out=True, audit_seq=audit.seq)

    async def _choose(
        self,
        verb: DeadLetterVerb,
        topic: str,
        ids: Sequence[str] | None,
        wanted: DeadLetterFilter | None,
        count_max: int | None,
        require: Callable[[str], None] | None,
    ) -> DeadLetterChange:
        if isinstance(ids, str):
            raise SettingsError("ids", "must be a list of ids, not one", f"give [{ids!r}]")
        wanted = msgspec.structs.replace(wanted or DeadLetterFilter(), states=CHANGEABLE[verb])
        letters = await self._store.dead_letters(topic, ids, wanted)
        if require is not None:
            for group in sorted({letter.group for letter in letters}):
                require(group)
        return DeadLetterChange(letters[:count_max], has_more=count_max is not None and len(letters) > count_max)

    # Retention

    async def compact(
        self,
        *topics: str,
        archived_through: Mapping[str, int] | None = None,
        keep_ids: bool = True,
        dry_run: bool = False,
        audit: Audit | None = None,
    ) -> RetentionPlan:
        """Drop the sealed segments that every group of their topic has acknowledged, and that no dead letter needs."""
        known = self._log.topics()
        chosen = [check_topic(topic) for topic in topics] or list(known)
        plan = plan_retention(
            [segment for topic in chosen if topic in known for segment in known[topic].segments],
            {"*": TopicRetention(consumed=True, keep_ids=keep_ids)},
            now=datetime_of(self._clock.now_ns()),
            needs=await self.holders.needs(),
            partition_floors={},  # what sync clients may still ask for stays
            archived_through=archived_through,
        )
        if plan.drops and not dry_run:
            async with (audit or Audit()).of(self._log, "log.compact", audited_drops(plan), frees_space=True):
                plan = await self._log.drop(plan, self.holders)
        return plan
