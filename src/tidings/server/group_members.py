"""
Several members of one durable group, wherever they live: in this process, or at the other end of a connection.

The bus knows one subscription a group. Here its handler is a clerk: it takes an event, finds a member with a free place, hands
the event over and waits for the answer, which the bus then counts like any handler's. So retries, order, dead letters and the
cursor are the bus's own; what is added is who handles what:

- a member never has more unanswered events than it asked for;
- an event whose member is lost is a failed attempt, and goes to another member without delay;
- an event that is not answered within the deadline is a failed attempt; the deadline begins when the event is handed over, not
  while it waits for a free member, and the slow member's place stays taken until it answers after all;
- nothing is handed over before the access book has seen every record up to the event (``reached``), and permission is looked at
  last: what was committed after a revocation does not reach the one who lost it.

A group that has no members left is not run; its cursor stays where it is.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec

from tidings.bus.claims import Claims, FileClaims
from tidings.bus.errors import HandlerTimeout
from tidings.bus.eventbus import EventBus
from tidings.bus.events import ReceivedEvent
from tidings.bus.pipeline import Handler
from tidings.bus.settings import BusSettings, SubscriptionSettings, TopicPolicy
from tidings.bus.subscription import Subscription, make_settings
from tidings.core.clock import Clock
from tidings.core.errors import TidingsError
from tidings.core.names import check_group, check_topic
from tidings.wire.groups import GroupOptions

__all__ = ["Delivery", "GroupMembers", "GroupsSettings", "LocalMember", "Member", "Reply", "SharedClaims"]

logger = logging.getLogger(__name__)

_NO_DEADLINE_MS: Final = 1 << 40
"""For the bus, where the deadline is kept here: its own would run while an event waits for a free member."""


class GroupsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the door ``/groups``."""

    deliveries_count_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 256
    """Events of one group that are with its members or wait for one of them, over all members."""
    memberships_count_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 64
    """Memberships of one connection."""
    member_inflight_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1_000
    """Unanswered events of one membership; who asks for more gets this."""
    publishes_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    """Publishes of one connection that wait to be durable; with more, nothing more is read from it."""
    buffered_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=1 << 30)] = 4 << 20
    """What one connection may have waiting to be sent; with more, its members get nothing until it has drained."""
    hello_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    """A connection that has not said hello by then is closed."""
    publish_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 30.0
    """How long a publish waits for the full window of a group; then it is refused, and may be tried again."""


class Reply(enum.Enum):
    """What can become of a delivery beside an answer."""

    RETURNED = "the member gave it back untried"


class Delivery:
    """One event, handed to one member."""

    __slots__ = ("answer", "event", "member", "started")

    def __init__(self, event: ReceivedEvent, member: Member, started: float) -> None:
        self.event = event
        self.member = member
        self.started = started
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def settle(self, answer: object) -> None:
        """The member has answered, or is lost; what comes later does not count."""
        if not self.answer.done():
            self.answer.set_result(answer)


class Member(Protocol):
    """Somebody who handles events of a group."""

    @property
    def has_room(self) -> bool:
        """Whether it takes one more event now."""
        ...

    def may_receive(self) -> bool:
        """Whether it is still allowed to. If not, it takes itself out."""
        ...

    def give(self, delivery: Delivery) -> None:
        """Hand an event over. Never waits."""
        ...

    def withdraw(self, delivery: Delivery, reason: str) -> None:
        """Nobody waits for the answer to this any more."""
        ...


class SharedGroup:
    """The members of one group, and the events that wait for one of them."""

    def __init__(
        self,
        topic: str,
        group: str,
        options: GroupOptions,
        *,
        deadline_ms: int | None,
        clock: Clock,
        reached: Callable[[int], Awaitable[None] | None],
    ) -> None:
        self.topic = topic
        self.group = group
        self.options = options
        self.deadline_ms = deadline_ms
        self.subscription: Subscription | None = None
        self.members: list[Member] = []
        self._clock = clock
        self._reached = reached
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._stuck: list[asyncio.Future[None]] = []
        self._is_stopped = False
        self._open: set[Delivery] = set()
        self._next = 0
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch the deadline, if there is one."""
        if self.deadline_ms is not None:
            self._watcher = asyncio.create_task(
                self._watch(self.deadline_ms), name=f"deadline-{self.topic}/{self.group}"
            )

    async def stop(self) -> None:
        """Let go of all that waits; nothing of it counts as tried."""
        self._is_stopped = True
        self.let_waiting_go()
        for turn in self._stuck:
            turn.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    def let_waiting_go(self) -> None:
        """
        The group is about to be started anew, from another place: what waits for a member does not hold that up.

        Their workers end; call it only once the bus has told the group to close.
        """
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            turn.cancel()

    def join(self, member: Member) -> None:
        """One more to share with."""
        self.members.append(member)
        self.wake()

    def leave(self, member: Member) -> None:
        """It gets nothing more. What it has not answered is its own business to settle."""
        if member in self.members:
            self.members.remove(member)

    def wake(self) -> None:
        """A place has become free, or may have."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def handle(self, event: ReceivedEvent) -> object:
        """The handler that the bus knows: whatever the chosen member answers."""
        try:
            waiting = self._reached(event.seq)
            if waiting is not None:
                await waiting
        except TidingsError as error:
            # Nobody can say any more who may see what. That is not the event's fault: it waits until the node starts anew.
            logger.error("group %s of topic %s stands still: %s", self.group, self.topic, error)
            self._stuck.append(asyncio.get_running_loop().create_future())
            await self._stuck[-1]
        is_first = True
        while True:
            member = self._pick()
            if member is None:
                await self._turn(is_first=is_first)
                is_first = False
                continue
            if not member.may_receive():
                continue
            answer = await self._give(member, event)
            if answer is not Reply.RETURNED:
                return answer

    async def _turn(self, *, is_first: bool) -> None:
        if self._is_stopped:
            raise asyncio.CancelledError  # as for those that waited when it stopped: the worker ends, nothing is counted
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whoever waited before and was overtaken goes to the head of the line again.
        (self._waiting.append if is_first else self._waiting.appendleft)(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.wake()  # its turn had come: it goes to the next
            raise

    def _pass_on(self) -> None:
        if self._waiting and any(member.has_room for member in self.members):
            self.wake()

    def _pick(self) -> Member | None:
        """The next in turn that has room."""
        count = len(self.members)
        for step in range(count):
            member = self.members[(self._next + step) % count]
            if member.has_room:
                self._next = (self._next + step + 1) % count
                return member
        return None

    async def _give(self, member: Member, event: ReceivedEvent) -> object:
        delivery = Delivery(event, member, self._clock.monotonic())
        self._open.add(delivery)
        try:
            member.give(delivery)
            self._pass_on()
            return await delivery.answer
        except asyncio.CancelledError:
            member.withdraw(delivery, "the group stops or was moved")
            raise
        finally:
            self._open.discard(delivery)

    async def _watch(self, deadline_ms: int) -> None:
        """One timer for all deliveries, as fine as a quarter of the deadline."""
        while True:
            await self._clock.sleep(deadline_ms / 4000)
            latest = self._clock.monotonic() - deadline_ms / 1000
            for delivery in [each for each in self._open if each.started <= latest]:
                if not delivery.answer.done():
                    delivery.answer.set_exception(HandlerTimeout(deadline_ms))
                    delivery.member.withdraw(delivery, f"not answered within {deadline_ms} ms")


class LocalMember:
    """A handler in the node's own process that shares a group with members elsewhere."""

    def __init__(self, members: GroupMembers, topic: str, group: str, handler: Handler, workers: int) -> None:
        self.topic = topic
        self.group = group
        self._members = members
        self._handler = handler
        call = getattr(handler, "__call__", handler)  # noqa: B004 - an object with an async __call__ is a handler too
        self._is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)
        """A plain function runs in a thread: it must not hold up everybody else."""
        self._workers = workers
        self._running: dict[Delivery, asyncio.Task[None]] = {}
        self._is_leaving = False

    @property
    def has_room(self) -> bool:
        return not self._is_leaving and len(self._running) < self._workers

    def may_receive(self) -> bool:
        return True

    def give(self, delivery: Delivery) -> None:
        self._running[delivery] = asyncio.create_task(self._run(delivery), name=f"{self.topic}/{self.group} local")

    def withdraw(self, delivery: Delivery, reason: str) -> None:
        if (task := self._running.get(delivery)) is not None:
            task.cancel(reason)

    async def _run(self, delivery: Delivery) -> None:
        event, claims = delivery.event, self._members.claims_of(self.topic, self.group)
        if claims is not None:
            claims.expose(event.offset)
        try:
            answer = self._handler(event) if self._is_async else await asyncio.to_thread(self._handler, event)
            delivery.settle(await answer if inspect.isawaitable(answer) else answer)
        except asyncio.CancelledError:
            delivery.settle(Reply.RETURNED)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is its answer
            if not delivery.answer.done():
                delivery.answer.set_exception(error)
        finally:
            del self._running[delivery]
            self._members.wake(self.topic, self.group)

    async def leave(self, timeout_s: float = 10.0) -> None:
        """Take nothing more, finish what is at hand within the time, and go. Leaving twice is fine."""
        self._is_leaving = True
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=timeout_s)
        for task in list(self._running.values()):
            task.cancel()
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
        key = (check_topic(topic), check_group(group))
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
        member = LocalMember(self, check_topic(topic), check_group(group), handler, workers)
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

    def claims_of(self, topic: str, group: str) -> _SharedClaims | None:
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


class SharedClaims:
    """
    Makes the claims of a bus's groups; pass it as ``EventBus(claims=...)``.

    A group that the bus runs by itself notes every event that a handler has, in a file, so that a handler that ends the process
    is counted. The handlers of a shared group are mostly elsewhere: an event that waits for a member, or is with one at the other
    end of a connection, cannot have ended this process and is not counted if the node is killed. What a local member is at is.
    """

    def __init__(self, workspace: Path) -> None:
        self._folder = workspace / ".bus" / "claims"
        self.shared: dict[tuple[str, str], _SharedClaims] = {}

    def __call__(self, topic: str, group: str) -> Claims:
        shared = self.shared.get((topic, group))
        return shared if shared is not None else FileClaims(self._path(topic, group))

    def share(self, topic: str, group: str) -> None:
        """The group is about to be subscribed for members."""
        self.shared[topic, group] = _SharedClaims(FileClaims(self._path(topic, group)))

    def unshare(self, topic: str, group: str) -> None:
        """It no longer is."""
        self.shared.pop((topic, group), None)

    def _path(self, topic: str, group: str) -> Path:
        return self._folder / f"{topic}__{group}.slots"


class _SharedClaims:
    """The claims of one shared group: kept in memory, and in the file where a local handler is at work."""

    def __init__(self, file: FileClaims) -> None:
        self._file = file
        self._at: dict[int, tuple[int, int]] = {}
        self._slots: dict[int, int] = {}
        self._exposed: set[int] = set()

    def take(self, slot: int, offset: int, attempt: int) -> None:
        self.clear(slot)
        self._at[offset] = (slot, attempt)
        self._slots[slot] = offset

    def taker(self, slot: int) -> Callable[[int, int], object]:
        return functools.partial(self.take, slot)

    def expose(self, offset: int) -> None:
        """A handler of this process is about to get the event."""
        if (found := self._at.get(offset)) is not None:
            slot, attempt = found
            self._exposed.add(slot)
            self._file.take(slot, offset, attempt)

    def clear(self, slot: int) -> None:
        offset = self._slots.pop(slot, None)
        if offset is not None:
            self._at.pop(offset, None)
        if slot in self._exposed:
            self._exposed.discard(slot)
            self._file.clear(slot)

    def left_over(self) -> dict[int, int]:
        return self._file.left_over()

    def begin(self, slots: int) -> None:
        self._file.begin(slots)

    def close(self) -> None:
        self._file.close()
