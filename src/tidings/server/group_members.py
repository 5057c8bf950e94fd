"""
Members of durable groups, wherever they live: in this process, or at the other end of a connection.

The bus knows one subscription a group; ``SharedGroup`` is its handler and divides the events. So retries, order, dead letters and
the cursor are the bus's own. Here groups are started for their first member and stopped after their last: a group that has no
members left is not run, and its cursor stays where it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from tidings.bus.eventbus import EventBus
from tidings.bus.events import ReceivedEvent
from tidings.bus.handler_threads import Handler, HandlerThreads, as_async
from tidings.bus.outcomes import outcome_of
from tidings.bus.settings import BusSettings, SubscriptionSettings, TopicPolicy
from tidings.bus.subscription import make_settings
from tidings.core.clock import Clock
from tidings.core.names import check_topic_and_group
from tidings.wire.groups import GroupOptions

from .group_settings import GroupsSettings
from .shared_claims import GroupClaims, SharedClaims
from .shared_group import Delivery, Member, Reply, SharedGroup

__all__ = ["GroupMembers", "GroupsSettings", "LocalMember", "SharedClaims", "SharedGroup"]

_NO_DEADLINE_MS: Final = 1 << 40
"""For the bus, where the deadline is kept here: its own would run while an event waits for a free member."""


class LocalMember:
    """A handler in the node's own process that shares a group with members elsewhere."""

    def __init__(self, members: GroupMembers, topic: str, group: str, handler: Handler, workers: int) -> None:
        self.topic = topic
        self.group = group
        self._members = members
        self._handler = as_async(handler, HandlerThreads(f"tidings-{topic}-{group}", workers))
        self._workers = workers
        self._running: dict[Delivery, asyncio.Task[None]] = {}
        self._is_leaving = False

    @property
    def has_room(self) -> bool:
        return not self._is_leaving and len(self._running) < self._workers

    def may_receive(self) -> bool:
        return True

    def may_see(self, event: ReceivedEvent) -> bool:
        return True

    def give(self, delivery: Delivery) -> None:
        self._running[delivery] = asyncio.create_task(self._run(delivery), name=f"{self.topic}/{self.group} local")

    def withdraw(self, delivery: Delivery, reason: str) -> None:
        if (task := self._running.get(delivery)) is not None:
            delivery.settle(Reply.RETURNED)
            task.cancel(reason)

    async def _run(self, delivery: Delivery) -> None:
        event, claims = delivery.event, self._members.claims_of(self.topic, self.group)
        if claims is not None:
            claims.expose(event.offset)
        try:
            delivery.settle(await outcome_of(self._handler(event)))
        except asyncio.CancelledError as error:
            delivery.settle(error)  # if nobody has taken the event back, the handler has cancelled itself
        except (SystemExit, KeyboardInterrupt) as error:
            if not delivery.answer.done():  # told to the worker too, which leaves its claim then
                delivery.answer.set_exception(error)
            raise
        finally:
            del self._running[delivery]
            self._members.wake(self.topic, self.group)

    async def leave(self, timeout_s: float = 10.0) -> None:
        """Take nothing more, finish what is at hand within the time, and go. Leaving twice is fine."""
        self._is_leaving = True
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=timeout_s)
        for delivery in list(self._running):
            self.withdraw(delivery, "the member leaves")
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._members.leave(self.topic, self.group, self)


class _Entry:
    """A group's place in the hub; the lock keeps starting and stopping it apart."""

    __slots__ = ("lock", "shared", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.shared: SharedGroup | None = None
        self.users = 0


class GroupMembers:
    """
    All shared groups of one bus.

    Args:
        bus: The bus that owns cursors, retries and dead letters.
        clock: What time it is.
        settings: Bounds.
        bus_settings: Where topics' policies say a deadline.
        reached: Called with an event's seq before it is handed out: ``None`` if the access book has seen that far, else
            something to wait for. It raises if the book will never get there.
        claims: The factory that the bus was given too, so that waiting events do not count as tried when the node is killed.
    """

    def __init__(
        self,
        bus: EventBus,
        *,
        clock: Clock,
        settings: GroupsSettings | None = None,
        bus_settings: BusSettings | None = None,
        reached: Callable[[int], Awaitable[None] | None] = lambda _: None,
        claims: SharedClaims | None = None,
    ) -> None:
        self.settings = settings or GroupsSettings()
        self._bus = bus
        self._clock = clock
        self._bus_settings = bus_settings or BusSettings()
        self._reached = reached
        self._claims = claims
        self._entries: dict[tuple[str, str], _Entry] = {}

    async def join(self, topic: str, group: str, member: Member, options: GroupOptions) -> SharedGroup:
        """
        Make somebody a member; the group is started if it is the first. Its options are those of the first member.

        Raises:
            InvalidName: A name breaks the grammar.
            SubscriptionExists: A handler in the node's own process has the group to itself.
            CursorDamaged, EpochMismatch, PositionTrimmed, SettingsError: as ``EventBus.subscribe``.
        """
        key = check_topic_and_group(topic, group)
        entry = self._entries.setdefault(key, _Entry())
        entry.users += 1
        try:
            async with entry.lock:
                if entry.shared is None:
                    entry.shared = await self._start(*key, options)
                entry.shared.join(member)
                return entry.shared
        finally:
            self._let_go(key, entry)

    async def leave(self, topic: str, group: str, member: Member) -> None:
        """A member goes; the group is stopped if it was the last."""
        entry = self._entries.get((topic, group))
        if entry is None or entry.shared is None:
            return
        entry.shared.leave(member)
        entry.users += 1
        try:
            async with entry.lock:
                shared = entry.shared
                if shared is not None and not shared.members:
                    entry.shared = None
                    await self._stop(shared)
        finally:
            self._let_go((topic, group), entry)

    async def subscribe(
        self, topic: str, group: str, handler: Handler, *, workers: int = 1, options: GroupOptions | None = None
    ) -> LocalMember:
        """A handler of this process as one more member; see ``join``. ``leave`` of what is returned ends it."""
        member = LocalMember(self, *check_topic_and_group(topic, group), handler, workers)
        await self.join(topic, group, member, options or GroupOptions())
        return member

    def wake(self, topic: str, group: str) -> None:
        """A member of the group has room again."""
        entry = self._entries.get((topic, group))
        if entry is not None and entry.shared is not None:
            entry.shared.wake()

    def counts(self) -> dict[tuple[str, str], int]:
        """Members by topic and group."""
        return {key: len(entry.shared.members) for key, entry in self._entries.items() if entry.shared is not None}

    def claims_of(self, topic: str, group: str) -> GroupClaims | None:
        """The claims of a shared group, where a local handler notes what it is at."""
        return None if self._claims is None else self._claims.shared.get((topic, group))

    async def _start(self, topic: str, group: str, options: GroupOptions) -> SharedGroup:
        policies = self._bus_settings.topics
        policy = policies.get(topic) or policies.get("*") or TopicPolicy()
        deadline_ms = options.ack_deadline_ms or policy.ack_deadline_ms
        settings = _settings_of(
            options, self.settings.deliveries_count_max, has_policy=policy.ack_deadline_ms is not None
        )
        in_effect = _options_of(settings, deadline_ms)
        shared = SharedGroup(topic, group, in_effect, deadline_ms=deadline_ms, clock=self._clock, reached=self._reached)
        if self._claims is not None:
            self._claims.share(topic, group)
        try:
            shared.subscription = await self._bus.subscribe(topic, group, shared.handle, settings=settings)
            shared.subscription.on_restart = shared.let_waiting_go
        except BaseException:
            if self._claims is not None:
                self._claims.unshare(topic, group)
            raise
        shared.start()
        return shared

    async def _stop(self, shared: SharedGroup) -> None:
        await shared.stop()
        assert shared.subscription is not None
        try:
            await self._bus.unsubscribe(shared.subscription)
        finally:
            if self._claims is not None:
                self._claims.unshare(shared.topic, shared.group)

    def _let_go(self, key: tuple[str, str], entry: _Entry) -> None:
        entry.users -= 1
        if entry.users == 0 and entry.shared is None and self._entries.get(key) is entry:
            del self._entries[key]


def _settings_of(options: GroupOptions, workers: int, *, has_policy: bool) -> SubscriptionSettings:
    given = {
        name: value
        for name in (
            "start",
            "max_inflight",
            "backoff_base",
            "backoff_mult",
            "backoff_max",
            "max_retries",
            "order",
            "by_priority",
        )
        if (value := getattr(options, name)) is not None
    }
    if has_policy:
        given["ack_deadline_ms"] = _NO_DEADLINE_MS
    return make_settings(workers=workers, **given)


def _options_of(settings: SubscriptionSettings, deadline_ms: int | None) -> GroupOptions:
    backoff = settings.backoff
    return GroupOptions(
        start=settings.start,
        max_inflight=settings.max_inflight,
        backoff_base=backoff.base_s,
        backoff_mult=backoff.mult,
        backoff_max=backoff.max_s,
        max_retries=backoff.retries_max,
        order=settings.order,
        by_priority=settings.by_priority,
        ack_deadline_ms=deadline_ms,
    )
