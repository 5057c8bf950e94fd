"""
Group status and administration: pause, resume, seek, delete; dead letters: redrive, drop; compaction.

Works on a log and a store, with a running bus or without one: what a group that runs holds in memory counts, else what is stored.
Every change is recorded in the topic ``audit``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from tidings.core.clock import Clock, datetime_of, ns_of
from tidings.core.errors import TidingsError
from tidings.core.names import check_topic, check_topic_and_group
from tidings.log.errors import EpochMismatch, PositionTrimmed
from tidings.log.interface import Log, Query
from tidings.log.retention import RetentionPlan, plan_retention
from tidings.log.settings import TopicRetention

from .audit import Audit, audited_dead_letters, audited_drops
from .cursors import bounds, check_offset
from .errors import CursorDamaged, SubscriptionExists, UnknownGroup
from .store import Cursor, DeadLetter, DeadLetterFilter, GroupPosition, GroupStore
from .store.interface import RecordHolders

if TYPE_CHECKING:
    from .running import RunningBus

__all__ = ["GroupAdmin", "GroupStatus", "Obstacle", "SeekPlan", "SeekTarget", "offset_of", "plan_seek"]

Obstacle = Literal["damaged", "other_epoch", "trimmed"]
"""``damaged`` and ``other_epoch``: the group cannot start. ``trimmed``: records it had yet to see were dropped."""
SeekTarget = int | datetime | Literal["earliest", "latest"]
"""Where to go on: at an offset, at the first event written at this time or later, at the oldest kept, at the next new one."""

_NAMED_COUNT_MAX: Final = 10


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One group, for operators. What cannot be known is ``None``."""

    topic: str
    group: str
    position: GroupPosition | None
    next_offset: int
    """The topic's: the offset that its next event will get."""
    oldest_unacked_age_s: float | None = None
    """Since the oldest event that is not acknowledged was written; ``None`` if there is none."""
    obstacle: Obstacle | None = None
    error: TidingsError | None = None
    """What the obstacle is."""

    @property
    def committed(self) -> int | None:
        """The last offset up to which everything is acknowledged."""
        return None if self.position is None else self.position.cursor.committed

    @property
    def lag(self) -> int | None:
        """How many events are not acknowledged."""
        if self.position is None:
            return None
        # The cursor may have moved after the log was read.
        return max(0, self.next_offset - (self.position.cursor.committed + 1) - self.acknowledged_early)

    @property
    def acknowledged_early(self) -> int:
        """How many events are acknowledged beyond the first that is not."""
        return 0 if self.position is None else self.position.cursor.early_count

    @property
    def acknowledged_ranges(self) -> list[tuple[int, int]]:
        """The offsets of those, as ranges."""
        return [] if self.position is None else self.position.cursor.ranges

    @property
    def attempts(self) -> dict[int, int]:
        """Failed attempts by offset, of events that will be tried again."""
        return {} if self.position is None else self.position.attempts

    @property
    def failed_attempts(self) -> int:
        """How many attempts those are."""
        return sum(self.attempts.values())

    @property
    def is_paused(self) -> bool:
        """Whether it was paused."""
        return self.position is not None and self.position.paused


class SeekPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a seek would do. What cannot be known is ``None``."""

    committed: int | None
    """The last offset up to which everything is acknowledged before it."""
    next_offset: int
    """The next event that the group gets."""
    redelivered: int | None
    """Acknowledged events that are delivered again."""
    skipped: int | None
    """Events that are not acknowledged, and will not be delivered."""


def plan_seek(before: GroupPosition | TidingsError, target: int) -> SeekPlan:
    """What a seek to an offset would do, from a position, or from one that cannot be read."""
    committed = redelivered = skipped = None
    if isinstance(before, GroupPosition):
        committed, early_count = before.cursor.committed, before.cursor.early_count
        early = sum(max(0, min(last, target - 1) - first + 1) for first, last in before.cursor.ranges)
        redelivered = max(0, committed + 1 - target) + early_count - early
        skipped = max(0, target - (committed + 1)) - early
    return SeekPlan(committed=committed, next_offset=target, redelivered=redelivered, skipped=skipped)


async def offset_of(log: Log, topic: str, target: SeekTarget) -> int | None:
    """The offset that a target means; ``None`` if the topic has no such offset (``bounds`` says which it has)."""
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
            return target if first <= target <= end else None


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
            return GroupPosition(running.cursor.copy(), dict(running.attempts), running.is_paused)
        try:
            return await self._store.load(topic, group) or GroupPosition(Cursor(), {})
        except (CursorDamaged, EpochMismatch) as error:
            return error

    async def status(self, topic: str, group: str) -> GroupStatus:
        """One group's status."""
        position = await self.position(topic, group)
        _, next_offset = bounds(self._log, topic)
        if isinstance(position, TidingsError):
            return GroupStatus(
                topic=topic,
                group=group,
                position=None,
                next_offset=next_offset,
                obstacle="other_epoch" if isinstance(position, EpochMismatch) else "damaged",
                error=position,
            )
        status = GroupStatus(topic=topic, group=group, position=position, next_offset=next_offset)
        try:
            query = Query(topic=topic, from_offset=position.cursor.committed + 1)
            records = (await self._log.read(query, limit=1)).records
        except PositionTrimmed as error:
            return msgspec.structs.replace(status, obstacle="trimmed", error=error)
        if not records:
            return status
        age_s = max(0.0, (self._clock.now_ns() - ns_of(records[0].meta.written_time)) / 1e9)
        return msgspec.structs.replace(status, oldest_unacked_age_s=age_s)

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

    async def pause(self, topic: str, group: str, *, audit: Audit | None = None) -> None:
        """Deliver nothing more to a group until it is resumed, also after a restart."""
        await self._set_paused(topic, group, audit or Audit(), is_paused=True)

    async def resume(self, topic: str, group: str, *, audit: Audit | None = None) -> None:
        """Go on delivering to a group."""
        await self._set_paused(topic, group, audit or Audit(), is_paused=False)

    async def _set_paused(self, topic: str, group: str, audit: Audit, *, is_paused: bool) -> None:
        await self.check_known(topic, group)
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
                    return

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

    async def seek(self, topic: str, group: str, offset: int, *, audit: Audit | None = None) -> None:
        """
        Set a group's position: ``offset`` is the next it will get. A running group starts again from there, after handlers that
        are at work have finished or were cancelled (``close_timeout_s``); also if the caller gives up waiting.

        Raises:
            UnknownGroup: There is none.
            SettingsError, PositionTrimmed: The topic has no such offset.
        """
        topic, group = check_topic_and_group(topic, group)
        check_offset(self._log, "offset", topic, offset)
        running = self._running
        if running is None:
            await self._seek(topic, group, offset, audit or Audit())
            return
        await running.released(topic, group)
        await self.check_known(topic, group)
        await running.released(topic, group)
        await running.release(topic, group, self._seek(topic, group, offset, audit or Audit()))

    async def _seek(self, topic: str, group: str, offset: int, audit: Audit) -> None:
        await self.check_known(topic, group)
        plan = plan_seek(await self.position(topic, group), offset)
        details = {"topic": topic, "group": group, **msgspec.structs.asdict(plan)}
        async with audit.of(self._log, "group.seek", details, frees_space=True):
            running = self._running
            subscription = None if running is None else running.registry.find(topic, group)
            if running is not None and subscription is not None:
                await running.restart_group(subscription, offset)
            else:
                await self.check_known(topic, group)
                await self.move(topic, group, offset, is_paused=await self._store.is_paused(topic, group))

    async def move(self, topic: str, group: str, offset: int, *, is_paused: bool) -> None:
        """Set the position of a group that is not running, without a record. Raises as ``seek`` does."""
        async with self._store.changing:
            check_offset(self._log, "offset", topic, offset)
            await self._store.save(topic, group, GroupPosition(Cursor(offset - 1), {}, is_paused))

    async def delete(self, topic: str, group: str, *, audit: Audit | None = None) -> None:
        """
        Forget a group's position. Its events stay in the log, its dead letters are kept.

        Raises:
            UnknownGroup: There is none.
            SubscriptionExists: It has a subscription; end that first.
        """
        topic, group = check_topic_and_group(topic, group)
        if self._running is not None:
            await self._running.released(topic, group)
        self._check_not_subscribed(topic, group)
        await self.check_known(topic, group)
        async with (audit or Audit()).of(self._log, "group.delete", {"topic": topic, "group": group}, frees_space=True):
            self._check_not_subscribed(topic, group)
            async with self._store.changing:  # who subscribes meanwhile waits, and makes a new one
                await self._store.remove(topic, group)

    def _check_not_subscribed(self, topic: str, group: str) -> None:
        if self._running is not None and self._running.registry.find(topic, group) is not None:
            raise SubscriptionExists(topic, group)

    # Dead letters

    async def redrive(
        self,
        topic: str,
        ids: Sequence[str] | None = None,
        *,
        group: str | None = None,
        dry_run: bool = False,
        audit: Audit | None = None,
    ) -> list[DeadLetter]:
        """Ask for dead letters to be redriven: those named, or all (of a group). Returns those that are, or would be."""
        chosen = await self._store.dead_letters(topic, ids, DeadLetterFilter(group=group))
        if dry_run or not chosen:
            return chosen
        names = [letter.id for letter in chosen]
        async with (audit or Audit()).of(self._log, "dlq.redrive", audited_dead_letters(topic, names)):
            requested = await self._store.request_redrive(topic, names)
            if self._running is not None:
                for subscription in self._running.registry.list(topic):
                    if subscription.group_state is not None:
                        self._running.dead_letters.redrive(subscription.group_state)
            return requested

    async def drop_dead_letters(self, topic: str, ids: Sequence[str], *, audit: Audit | None = None) -> None:
        """Give dead letters up for good."""
        details = audited_dead_letters(topic, ids)
        async with (audit or Audit()).of(self._log, "dlq.drop", details, frees_space=True):
            await self._store.drop_dead_letters(topic, ids)

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
