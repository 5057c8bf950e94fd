"""
The bus: publish to the log, hand on to durable groups.

    bus = EventBus(workspace="./workspace")
    await bus.subscribe(topic="actions", group="learner", handler=learn)
    await bus.publish(Event(meta=EventMeta(...), payload={...}))
    await bus.close()

Starting is implicit. Every event is on disk before ``publish`` returns, and before any group sees it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from tidings.core.actors import Capability
from tidings.core.clock import SYSTEM_CLOCK, Clock, datetime_of
from tidings.core.errors import InvalidTimestamp, TidingsError
from tidings.core.events import Event
from tidings.core.names import check_topic, check_topic_and_group
from tidings.core.settings import checked
from tidings.log.embedded import open_log
from tidings.log.embedded.disk import Disk, OsDisk
from tidings.log.embedded.layout import Layout
from tidings.log.embedded.reserve import KEPT_FROM_LETTERS, Reserve, ReserveDisk
from tidings.log.encryption import Encryptor
from tidings.log.errors import StorageFull
from tidings.log.interface import Appended, Duplicate, Health, Log, Query, Verdict
from tidings.log.reading import records
from tidings.log.retention import RetentionPlan, plan_retention
from tidings.log.settings import LogSettings, TopicRetention

from .audit import AUDITED_COUNT_MAX, Audit, told_drops
from .back_pressure import append_when_there_is_room
from .claims import Claims, FileClaims, claims_file
from .cursor_keeper import CursorKeeper
from .errors import BusClosed, SubscriptionExists, TopicMismatch, UnknownGroup
from .events import ReceivedEvent
from .group import Group
from .holders import BusHolders
from .hosting import GroupHost
from .letters import OPEN, DeadLetter, LetterFilter, LetterState, Reason
from .list_publishing import ListPublishing
from .middleware import (
    FeatureFlags,
    MetricsMiddleware,
    Middleware,
    MiddlewareChain,
    MiddlewareError,
    PublishContext,
)
from .offsets import GroupPlace
from .pipeline import Handler
from .places import bounds, plan_move
from .redrives import Redrives
from .settings import BusSettings, SubscriptionSettings
from .subscription import Subscription, SubscriptionRegistry
from .worker import is_in_handler

__all__ = ["EventBus", "EventBusState"]

logger = logging.getLogger(__name__)


class EventBusState(enum.StrEnum):
    """Whether the bus takes events."""

    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


class EventBus:
    """
    Publishing and durable subscriptions for one workspace.

    Args:
        middlewares: What stands around publishing and handling; by position or by name.
        workspace: Where the log is. A relative path is meant from where the process is when the bus is made.
        settings: How the bus behaves.
        log_settings: How its log behaves.
        registry: Subscriptions to take over at the start.
        log: A log to use instead of opening the workspace's; it is not closed with the bus.
        clock, disk, rng, claims: The world; the real one if left out.
        encryptor: Seals payloads at rest.
        flags: Switches middlewares on and off by name, also while the bus runs.
        offsets_key: Seals the groups' offset files, so that an edit by other hands is noticed.
    """

    def __init__(
        self,
        middlewares: Sequence[Middleware] = (),
        *,
        workspace: Path | str = "./workspace",
        settings: BusSettings | None = None,
        log_settings: LogSettings | None = None,
        registry: SubscriptionRegistry | None = None,
        log: Log | None = None,
        clock: Clock = SYSTEM_CLOCK,
        disk: Disk | None = None,
        rng: random.Random | None = None,
        claims: Callable[[str, str], Claims] | None = None,
        encryptor: Encryptor | None = None,
        flags: FeatureFlags | None = None,
        offsets_key: bytes | None = None,
    ) -> None:
        self._settings = checked(settings or BusSettings())
        self._log_settings = log_settings
        self._registry = registry or SubscriptionRegistry()
        self._given_log = log
        self._log: Log | None = None
        self._clock = clock
        self._disk: Disk = disk or OsDisk()
        self._encryptor = encryptor
        self._chain = MiddlewareChain(middlewares, flags)
        self._metrics = [member for member in middlewares if isinstance(member, MetricsMiddleware)]
        self._starting: asyncio.Lock | None = None
        self._leaving: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._is_closed = False
        """Closed by somebody, not only never started."""
        self._stopping: asyncio.Task[None] | None = None
        self._is_told_full = False
        self._layout = Layout(workspace)
        # What saves the groups' progress goes on when the disk is full.
        self._reserve = Reserve(self._disk, self._layout.reserve)
        progress_disk = ReserveDisk(self._disk, self._reserve)
        self._cursors = CursorKeeper(
            disk=progress_disk,
            folder=self._layout.offsets,
            clock=clock,
            settings=self._settings,
            log=lambda: self.log,
            key=offsets_key,
        )
        self._redrives = Redrives(
            disk=progress_disk,
            letter_disk=ReserveDisk(self._disk, Reserve(self._disk, self._layout.reserve, keeps=KEPT_FROM_LETTERS)),
            folder=self._layout.dlq,
            clock=clock,
            log=lambda: self.log,
            registry=self._registry,
            encryptor=encryptor,
            on_bury=self._tell_buried,
        )
        self._host = GroupHost(
            settings=self._settings,
            chain=self._chain,
            cursors=self._cursors,
            redrives=self._redrives,
            claims=claims or self._file_claims,
            clock=clock,
            rng=rng or random.Random(),
        )
        self._topics = self._host.topics
        self._lists = ListPublishing(
            topics=self._topics,
            chain=self._chain,
            tell_after=self._tell_after_publish,
            store=self._store,
            on_stored=self._note_stored,
            is_running=lambda: self.state is EventBusState.RUNNING,
            clock=clock,
            timeout_s=self._settings.publish_timeout_s,
        )
        self.state = EventBusState.STOPPED
        self.published_count = 0

    # Life

    holders: BusHolders
    """Who needs records of the log, for ``Log.drop``. There from the start of the bus."""

    async def start(self) -> None:
        """Open the log and take up all subscriptions. Starting twice is fine, and so is starting again after closing."""
        if self.state is EventBusState.RUNNING:
            return
        if self.state is EventBusState.STOPPING:
            raise BusClosed
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._log is not None:
                return
            self.state = EventBusState.STARTING
            try:
                self._log = self._given_log or await open_log(
                    self._layout.workspace,
                    self._log_settings,
                    clock=self._clock,
                    disk=self._disk,
                    encryptor=self._encryptor,
                )
            except BaseException:
                self.state = EventBusState.STOPPED
                raise
            self._redrives.start()
            self._is_closed = False
            self._host.start()
            self._cursors.start(self._log.position.epoch)
            self.holders = BusHolders(
                self._disk,
                self._cursors.offsets,
                self._redrives.letters,
                moving=self._cursors.moving,
                flush=self._cursors.flush,
            )
            self.state = EventBusState.RUNNING
            try:
                for subscription in self._registry.list():
                    await self._host.run(self.log, subscription)
            except BaseException:
                await self.close()  # all of them or none: a group left out would not be missed for a long time
                raise

    async def close(self, timeout_s: float | None = None) -> None:
        """
        Stop: publish nothing more, let handlers that are at work finish within the time, store the cursors.

        What is not acknowledged is delivered again when the group is next subscribed. Closing twice is fine.
        """
        if self.state is EventBusState.STARTING and self._starting is not None:
            async with self._starting:  # what is being opened is closed once it is open
                pass
        self._is_closed = True
        if self.state is EventBusState.RUNNING:
            self.state = EventBusState.STOPPING
            limit_s = self._settings.close_timeout_s if timeout_s is None else timeout_s
            self._stopping = asyncio.create_task(self._stop(limit_s), name="bus closing")
        if self._stopping is not None:
            # Whoever loses patience leaves: a bus that is closed by half could be neither used nor closed again.
            await asyncio.shield(self._stopping)

    async def _stop(self, timeout_s: float) -> None:
        try:
            await self._host.stop(timeout_s)
            if self._leaving:  # what is done to a group that has been stopped ends soon
                await asyncio.wait(self._leaving.values())
            for subscription in self._registry.list():
                subscription.group_state = None
        finally:
            log, self._log = self._log, None
            try:
                if self._given_log is None and log is not None:
                    await log.close()
            finally:
                self.state = EventBusState.STOPPED
                self._stopping = None

    async def __aenter__(self) -> EventBus:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _started(self) -> Log:
        if self._log is None or self.state is not EventBusState.RUNNING:
            if self._is_closed:
                raise BusClosed  # only ``start`` opens it again: a late publisher must not
            await self.start()
        assert self._log is not None
        return self._log

    @property
    def log(self) -> Log:
        """The log that the bus stands on; the bus must have been started."""
        if self._log is None:
            raise BusClosed
        return self._log

    def health(self) -> Health:
        """Whether events can be published, and whether they reach their groups: ``problem`` names one that stands still."""
        health = self.log.health()
        if health.problem is not None:
            return health
        for name, topic in self._topics.items():
            if topic.feed.problem is not None:
                return msgspec.structs.replace(health, problem=f"topic {name!r}: {topic.feed.problem}")
        for subscription in self._registry.list():
            group = subscription.group_state
            if group is not None and (problem := group.problem) is not None:
                where = f"group {group.name!r} of topic {group.topic!r}"
                return msgspec.structs.replace(health, problem=f"{where}: {problem}")
        return health

    # Publishing

    async def publish(
        self, event: Event, topic: str | None = None, *, timeout_s: float | None = None
    ) -> Appended | Duplicate:
        """
        Store an event; returns when it is durable.

        Waits while a live subscription of the topic has its window full, and while the disk is. ``timeout_s`` (else the
        setting ``publish_timeout_s``) limits both waits together; without either it waits for as long as it takes.

        Raises:
            InvalidEvent, IdConflict: It cannot be stored.
            TopicMismatch: ``topic`` is given, and is not the event's.
            PublishTimeout: A window stayed full for too long; the event was not stored.
            StorageFull: The disk stayed full for too long; the event was not stored.
        """
        log = self._log if self._log is not None else await self._started()
        if self.state is not EventBusState.RUNNING:
            raise BusClosed
        own = event.meta.topic
        if topic is not None and topic != own:
            raise TopicMismatch(_shown(topic), _shown(own))
        if self._chain.publish_hooks:
            return await self._publish_in_chain(log, event, timeout_s)
        return await self._store(log, event, timeout_s)

    async def _publish_in_chain(self, log: Log, event: Event, timeout_s: float | None) -> Appended | Duplicate:
        context = PublishContext(event, check_topic(event.meta.topic), clock=self._clock)
        try:
            if (rest := self._chain.run_before_publish(context)) is not None:
                await rest
            verdict = await self._store(log, context.event, timeout_s)
        except Exception as error:
            await self._tell_after_publish(context, error)
            raise
        await self._tell_after_publish(context, verdict)
        return verdict

    async def _tell_after_publish(self, context: PublishContext, verdict: Verdict | Exception) -> None:
        try:
            if (rest := self._chain.run_after_publish(context, verdict)) is not None:
                await rest
        except MiddlewareError as error:
            # What is committed stays committed: this must not look like a failed publish.
            logger.error("after a publish to %s: %s", context.topic, error)

    async def _store(self, log: Log, event: Event, timeout_s: float | None) -> Appended | Duplicate:
        try:
            known = self._topics.get(event.meta.topic)
        except TypeError:  # no name at all: the log will say so
            known = None
        limit_s = self._settings.publish_timeout_s if timeout_s is None else timeout_s
        started = self._clock.monotonic() if limit_s is not None else 0.0
        if known is not None:
            if not known.has_room() and not is_in_handler():
                await known.wait_for_windows(event.meta.topic, self._clock, limit_s)
            known.publishing += 1
        try:
            appended = await log.append(event)
        except StorageFull as error:
            left_s = None if limit_s is None else limit_s - (self._clock.monotonic() - started)
            appended = await self._append_when_there_is_room(log, event, error, left_s)
        finally:
            if known is not None:
                known.publishing -= 1
        if known is not None and appended.offset >= known.end:
            known.end = appended.offset + 1
        if self._is_told_full:
            self._tell_storage_full(False)
        self.published_count += 1
        return appended

    async def _append_when_there_is_room(
        self, log: Log, event: Event, error: StorageFull, left_s: float | None
    ) -> Appended | Duplicate:
        limits_s = [limit for limit in (left_s, self._settings.storage_full_timeout_s) if limit is not None]
        return await append_when_there_is_room(
            log,
            event,
            error,
            clock=self._clock,
            timeout_s=min(limits_s, default=None),
            is_running=lambda: self.state is EventBusState.RUNNING,
            tell=self._tell_storage_full,
        )

    def _tell_storage_full(self, is_full: bool) -> None:
        self._is_told_full = is_full
        for metrics in self._metrics:
            metrics.set_storage_full(is_full)

    async def publish_many(self, events: Sequence[Event], *, timeout_s: float | None = None) -> list[Verdict]:
        """
        Store events in order; one verdict each. A refused one does not keep the others from being stored.

        Waits as ``publish`` does, for all of them together no longer than ``timeout_s``. Events that fit into all windows are stored together, which costs far less than one by one.

        Raises:
            PublishTimeout: A window stayed full for too long; that event and those after it were not stored.
            StorageFull: The disk stayed full for too long; the same.
            BusClosed: The bus was closed meanwhile; the same.
        """
        return await self._lists.publish(await self._started(), events, timeout_s)

    def _note_stored(self, count: int) -> None:
        if self._is_told_full:
            self._tell_storage_full(False)
        self.published_count += count

    # Subscribing

    async def subscribe(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        advanced_filters: Sequence[Any] = (),
        capabilities: Iterable[Capability] = (),
        key_of: Callable[[Event], object] | None = None,
        settings: SubscriptionSettings | None = None,
        **options: Any,
    ) -> Subscription:
        """
        Start handling a topic for a group, from where the group stands.

        Args:
            topic, group: Together they name the group; a new one begins at the start of the topic unless told otherwise.
            handler: Gets each event, and answers with ``Ack()`` or ``Nack()``, or raises. Returning nothing is an ``Ack()``.
            advanced_filters: Only events that pass all of these reach the handler; the others are done with.
            capabilities: What the subscriber may see, for access middleware.
            key_of: The key for ``order="key"``; the space if left out.
            settings: All options at once; or singly, as keywords: ``workers``, ``max_inflight``, ``max_inflight_bytes``,
                ``waiting_retries_max``, ``stall_timeout_s``, ``backoff_base``,
                ``backoff_mult``, ``backoff_max``, ``max_retries``, ``start``, ``order``, ``by_priority``,
                ``batch_count_max``, ``ack_deadline_ms``.

        Raises:
            InvalidName: A name breaks the grammar.
            SubscriptionExists: The group has a subscription on this bus.
            CursorDamaged, EpochMismatch: The group's place is not known, or of another history.
            PositionTrimmed: Events that the group has not seen were dropped; ``seek`` says where to go on.
            SettingsError: An option is out of its range.
        """
        topic, group = check_topic_and_group(topic, group)
        await self._started()
        await self._wait_until_left(topic, group)
        _, subscription = self._registry.register_subscription(
            topic,
            handler,
            group=group,
            advanced_filters=advanced_filters,
            capabilities=tuple(capabilities),
            key_of=key_of,
            settings=settings,
            **options,
        )
        try:
            await self._host.run(self.log, subscription)
        except BaseException:
            self._registry.remove(subscription.subscription_id)
            raise
        return subscription

    async def _wait_until_left(self, topic: str, group: str) -> None:
        """One that leaves may still finish events, and has yet to store its place."""
        while (leaving := self._leaving.get((topic, group))) is not None:
            await asyncio.wait([leaving])

    async def _leave(self, topic: str, group: str, work: Coroutine[Any, Any, None]) -> None:
        """
        Stop a group and do what follows from that, while others who want the group wait.

        It goes on without a caller that gives up waiting: a group that is left by half would neither run nor have its place.
        """
        key = (topic, group)
        self._leaving[key] = leaving = asyncio.create_task(work, name=f"{topic}/{group} leaving")
        leaving.add_done_callback(lambda _: self._leaving.pop(key))
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            leaving.add_done_callback(_log_failure)
            raise

    async def unsubscribe(self, subscription: Subscription | str, timeout_s: float | None = None) -> bool:
        """
        Stop a subscription, given itself or its id; whether it was there. The group keeps its place.

        It is stopped also if the caller gives up waiting.
        """
        found = self._registry.get(subscription) if isinstance(subscription, str) else subscription
        if found is None:
            return False
        await self._wait_until_left(found.topic, found.group)
        if self._registry.get(found.subscription_id) is None:
            return False
        self._registry.remove(found.subscription_id)
        group, found.group_state = found.group_state, None
        if group is not None:
            limit_s = self._settings.close_timeout_s if timeout_s is None else timeout_s
            await self._leave(found.topic, found.group, self._host.let_go(group, limit_s))
        return True

    def get_subscriptions(self, topic: str | None = None) -> list[Subscription]:
        """The subscriptions of this bus."""
        return self._registry.list(topic)

    def _file_claims(self, topic: str, name: str) -> Claims:
        return FileClaims(claims_file(self._layout.claims, topic, name), self._reserve)

    # Dead letters

    def _tell_buried(self, letter: DeadLetter) -> None:
        for metrics in self._metrics:
            if metrics.enabled and self._chain.flags.is_enabled(metrics.name):
                metrics.observe_dead_letter(letter.topic)

    async def dead_letters(
        self,
        topic: str,
        group: str | None = None,
        *,
        states: tuple[LetterState, ...] = OPEN,
        reason: Reason | None = None,
        error_contains: str | None = None,
    ) -> list[DeadLetter]:
        """The events that groups of a topic have given up on: those that fit all that is given, in their order."""
        wanted = LetterFilter(states=states, group=group, reason=reason, error_contains=error_contains)
        return await self.choose_dead_letters(topic, None, wanted)

    async def choose_dead_letters(
        self, topic: str, letter_ids: Sequence[str] | None, wanted: LetterFilter
    ) -> list[DeadLetter]:
        """
        The dead letters of a topic that fit, among those named or among all.

        Raises:
            UnknownDeadLetter: A letter is named that does not exist. One that does not fit is passed over.
        """
        await self._started()
        return await self._redrives.choose(topic, letter_ids, wanted)

    async def dead_letter(self, topic: str, letter_id: str) -> DeadLetter:
        """One dead letter, whatever became of it."""
        await self._started()
        return await self._redrives.letter(topic, letter_id)

    async def redrive(
        self,
        topic: str,
        letter_ids: Sequence[str] | None = None,
        *,
        group: str | None = None,
        dry_run: bool = False,
        audit: Audit | None = None,
    ) -> list[DeadLetter]:
        """
        Try dead letters again, once: those named, or all (of a group). ``audit`` says who asks for it.

        They go to the group that failed, beside its other work; a group without a subscription gets them when it has one.
        Asking twice is asking once, and what was asked for survives a crash.

        Returns:
            The letters that are (with ``dry_run``: would be) tried again.
        """
        log = await self._started()
        chosen = await self._redrives.redrive(topic, letter_ids, group=group, dry_run=True)
        if dry_run or not chosen:
            return chosen
        ids = [letter.id for letter in chosen]
        async with (audit or Audit()).of(log, "dlq.redrive", _told_letters(topic, ids)):
            return await self._redrives.redrive(topic, ids, group=group, dry_run=False)

    async def drop_dead_letters(self, topic: str, letter_ids: Sequence[str], *, audit: Audit | None = None) -> None:
        """Give dead letters up for good. ``audit`` says who asks for it."""
        log = await self._started()
        async with (audit or Audit()).of(log, "dlq.drop", _told_letters(topic, letter_ids), frees_space=True):
            await self._redrives.drop(topic, letter_ids)

    # Looking and moving

    async def replay(
        self,
        topic: str,
        *,
        from_offset: int | None = None,
        to_offset: int | None = None,
        from_time: datetime | None = None,
        to_time: datetime | None = None,
        happened_from: datetime | None = None,
        happened_to: datetime | None = None,
    ) -> AsyncIterator[ReceivedEvent]:
        """
        Read a topic again, in the order of its offsets. No group moves.

        Args:
            topic: Which.
            from_offset, to_offset: Offsets, the first included, the second not.
            from_time, to_time: When the events were written, found without reading what was written earlier.
            happened_from, happened_to: When the events happened, by their ``meta.ts``. An event may have been written at any time
                after, so all of what the other bounds leave is looked at.

        Raises:
            InvalidTimestamp: A bound on when events happened has no time zone.
        """
        log = await self._started()
        for name, bound in (("happened_from", happened_from), ("happened_to", happened_to)):
            if bound is not None and bound.utcoffset() is None:
                raise InvalidTimestamp(name, f"{bound.isoformat()} has no time zone")
        query = Query(
            topic=check_topic(topic), from_offset=from_offset, to_offset=to_offset, from_time=from_time, to_time=to_time
        )
        async for record in records(log, query):
            if happened_from is not None and record.meta.time < happened_from:
                continue
            if happened_to is not None and record.meta.time >= happened_to:
                continue
            yield ReceivedEvent(record, "", 1)

    async def place_of(self, topic: str, group: str) -> GroupPlace | TidingsError:
        """Where a group stands, a running one as it is now, another as it was last stored; or why that is not known."""
        subscription = self._registry.find(topic, group)
        if subscription is not None and (state := subscription.group_state) is not None:
            return GroupPlace(state.cursor.copy(), dict(state.attempts), state.is_paused)
        await self._started()
        return await self._cursors.place_of(topic, group)

    def lag(self, topic: str, group: str) -> int:
        """How many events of the topic the group has not acknowledged."""
        state = self._state_of(topic, group)
        _, end = bounds(self.log, topic)
        return end - (state.cursor.committed + 1) - state.cursor.early_count

    async def pause(self, topic: str, group: str, *, audit: Audit | None = None) -> None:
        """Hand out nothing more to a group until it is resumed, also after a restart. ``audit`` says who asks for it."""
        self._state_of(topic, group)
        async with (audit or Audit()).of(self.log, "group.pause", {"topic": topic, "group": group}):
            state = self._state_of(topic, group)
            state.pause()
            self._host.changed(state)  # a group that stands still on purpose holds no publisher up

    async def resume(self, topic: str, group: str, *, audit: Audit | None = None) -> None:
        """Go on handing out to a group. ``audit`` says who asks for it."""
        self._state_of(topic, group)
        async with (audit or Audit()).of(self.log, "group.resume", {"topic": topic, "group": group}):
            state = self._state_of(topic, group)
            state.resume()
            self._host.changed(state)
            self._redrives.spawn(state)

    async def seek(self, topic: str, group: str, offset: int, *, audit: Audit | None = None) -> None:
        """
        Set a group's place: ``offset`` is the next it will get. Its subscription, if it has one, starts anew from there,
        after handlers that are at work have finished or were cancelled (``close_timeout_s``); also if the caller gives up waiting.

        ``audit`` says who asks for it.
        """
        log = await self._started()
        topic, group = check_topic_and_group(topic, group)
        self._cursors.check_offset("offset", topic, offset)
        await self._wait_until_left(topic, group)
        if self._registry.find(topic, group) is None:
            await self._cursors.check_known(topic, group)
        plan = plan_move(await self.place_of(topic, group), offset)
        told = {"topic": topic, "group": group, **msgspec.structs.asdict(plan)}

        async def seek() -> None:
            async with (audit or Audit()).of(log, "group.seek", told, frees_space=True):
                await self._seek(topic, group, offset)

        await self._wait_until_left(topic, group)
        await self._leave(topic, group, seek())

    async def delete_group(self, topic: str, group: str, *, audit: Audit | None = None) -> None:
        """
        Forget a group's place. Its events stay in the log, its dead letters in their file. ``audit`` says who asks for it.

        Raises:
            UnknownGroup: There is none.
            SubscriptionExists: It has a subscription; end that first.
        """
        log = await self._started()
        topic, group = check_topic_and_group(topic, group)
        await self._wait_until_left(topic, group)
        if self._registry.find(topic, group) is not None:
            raise SubscriptionExists(topic, group)
        await self._cursors.check_known(topic, group)
        async with (audit or Audit()).of(log, "group.delete", {"topic": topic, "group": group}, frees_space=True):
            if self._registry.find(topic, group) is not None:
                raise SubscriptionExists(topic, group)
            # Claims first: what a crash left in them must not be counted against a new group of the same name.
            await self._cursors.remove(topic, group, claims_file(self._layout.claims, topic, group))

    async def _seek(self, topic: str, group: str, offset: int) -> None:
        subscription = self._registry.find(topic, group)
        is_paused = False
        if subscription is not None:
            state, subscription.group_state = subscription.group_state, None
            is_paused = state is not None and state.is_paused
            if subscription.on_restart is not None:
                # Called after the first step of what follows, in which the group is closed.
                asyncio.get_running_loop().call_soon(subscription.on_restart)
            if state is not None:
                await self._host.let_go(state, self._settings.close_timeout_s)
        else:
            await self._cursors.check_known(topic, group)
            is_paused = await self._cursors.is_paused(topic, group)
        try:
            await self._cursors.move(topic, group, offset, is_paused=is_paused)
        finally:  # also from where it was, if the place was dropped meanwhile
            if subscription is not None:
                await self._host.run(self.log, subscription)

    async def compact(
        self,
        *topics: str,
        archived_through: Mapping[str, int] | None = None,
        keep_ids: bool = True,
        dry_run: bool = False,
        audit: Audit | None = None,
    ) -> RetentionPlan:
        """
        Drop the sealed segments that every group of their topic is through with, and that no dead letter needs.

        Args:
            topics: Only these; all of them if none is named.
            archived_through: For each topic the highest offset in the lake, where one is kept: what it lacks stays.
            keep_ids: Go on recognising duplicates of what is dropped. That takes some 300 bytes an event, so that with tiny payloads
                little is gained.
            dry_run: Decide only.
            audit: Who asks for it.

        Returns:
            What went (or would go), and why the rest stays.
        """
        log = await self._started()
        known = log.topics()
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
            async with (audit or Audit()).of(log, "log.compact", told_drops(plan), frees_space=True):
                plan = await log.drop(plan, self.holders)
        return plan

    def groups(self, topic: str | None = None) -> list[tuple[str, str]]:
        """Topic and name of every group that has a place in this workspace; the bus must have been started."""
        if self._log is None:
            raise BusClosed
        return [key for key in self._cursors.groups() if topic in (None, key[0])]

    def _state_of(self, topic: str, group: str) -> Group:
        subscription = self._registry.find(topic, group)
        if subscription is None or subscription.group_state is None:
            raise UnknownGroup(topic, group)
        return subscription.group_state


def _told_letters(topic: str, ids: Sequence[str]) -> dict[str, object]:
    return {"topic": topic, "count": len(ids), "ids": list(ids[:AUDITED_COUNT_MAX])}


def _log_failure(task: asyncio.Task[None]) -> None:
    """Nobody waits for the task any more who could be told."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed: %s", task.get_name(), error)


def _shown(topic: object) -> str:
    """A topic's name; of what is no name, what it is."""
    return str.__str__(topic) if isinstance(topic, str) else repr(topic)
