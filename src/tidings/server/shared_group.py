"""
One durable group and those who share its events: who gets which, and what becomes of an event whose member is lost.

The bus knows one handler a group. ``SharedGroup.handle`` is that handler, and a clerk: it takes an event, finds a member with a free
place, hands the event over and waits for the answer, which the bus then counts like any handler's.

- A member never has more unanswered events than it asked for.
- A deadline begins when an event is handed over, not while it waits for a free member; the place of a member that missed it stays
  taken until it answers after all.
- Nothing is handed over before the access book has seen every record up to the event (``reached``), and permission is looked at
  last: what was committed after a revocation does not reach the one who lost it.
- An event goes to a member that may see its space. One that none of the members may see waits for somebody who may: passing over it
  would lose it for the group, in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from tidings.bus.errors import HandlerTimeout
from tidings.bus.events import ReceivedEvent
from tidings.bus.outcomes import NotTried, ProcessEnding, ends_process
from tidings.bus.subscription import Subscription
from tidings.core.clock import Clock
from tidings.core.errors import TidingsError
from tidings.wire.groups import GroupOptions

__all__ = ["Delivery", "Member", "Reply", "SharedGroup"]

logger = logging.getLogger(__name__)


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

    def may_see(self, event: ReceivedEvent) -> bool:
        """Whether it may have this event of the topic; that it may not is no reason to go."""
        ...

    def give(self, delivery: Delivery) -> None:
        """Hand an event over. Never waits."""
        ...

    def withdraw(self, delivery: Delivery, reason: str) -> None:
        """Nobody waits for the answer to this any more."""
        ...


class _Turn:
    """An event that waits for a member."""

    __slots__ = ("come", "event")

    def __init__(self, event: ReceivedEvent) -> None:
        self.event = event
        self.come: asyncio.Future[None] = asyncio.get_running_loop().create_future()


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
        self._waiting: deque[_Turn] = deque()
        self._has_warned = False
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
        for stuck in self._stuck:
            if not stuck.done():
                stuck.set_exception(NotTried())
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    def let_waiting_go(self) -> None:
        """
        The group is about to stop, or to be started anew from another place: what waits for a member does not hold that up.

        Nothing of it counts as tried. A group that goes on all the same hands it out again.
        """
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            if not turn.come.done():
                turn.come.set_exception(NotTried())

    def join(self, member: Member) -> None:
        """One more to share with."""
        self.members.append(member)
        self.wake()

    def leave(self, member: Member) -> None:
        """It gets nothing more. What it has not answered is its own business to settle."""
        if member in self.members:
            self.members.remove(member)

    def wake(self) -> None:
        """A place has become free, or may have: the first that waits for such a one goes on."""
        if not self._waiting:
            return
        free = [member for member in self.members if member.has_room]
        for place, turn in enumerate(self._waiting):
            # One that was cancelled is in the line until its task has noticed.
            if not turn.come.done() and any(member.may_see(turn.event) for member in free):
                del self._waiting[place]
                turn.come.set_result(None)
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
            member = self._pick(event)
            if member is None:
                await self._turn(event, is_first=is_first)
                is_first = False
                continue
            if not member.may_receive():
                continue
            answer = await self._give(member, event)
            if isinstance(answer, BaseException):
                raise answer
            if answer is not Reply.RETURNED:
                return answer

    async def _turn(self, event: ReceivedEvent, *, is_first: bool) -> None:
        if self._is_stopped:
            raise NotTried  # as for those that waited when it stopped
        self._warn_if_nobody_may_see(event)
        turn = _Turn(event)
        # Whoever waited before and was overtaken goes to the head of the line again.
        (self._waiting.append if is_first else self._waiting.appendleft)(turn)
        try:
            await turn.come
        except asyncio.CancelledError:
            if turn.come.done() and not turn.come.cancelled():
                self.wake()  # its turn had come: it goes to the next
            else:
                with contextlib.suppress(ValueError):  # if all were let go it is not in the line any more
                    self._waiting.remove(turn)
            raise

    def _warn_if_nobody_may_see(self, event: ReceivedEvent) -> None:
        if self._has_warned or not self.members or any(member.may_see(event) for member in self.members):
            return
        self._has_warned = True  # once is enough: the group's lag says the rest
        logger.warning(
            "group %s of topic %s: no member may see the event at offset %d (space %r, partitions %r); such events wait",
            self.group,
            self.topic,
            event.offset,
            event.record.meta.space_id,
            event.record.meta.partitions,
        )

    def _pass_on(self) -> None:
        if self._waiting and any(member.has_room for member in self.members):
            self.wake()

    def _pick(self, event: ReceivedEvent) -> Member | None:
        """The next in turn that has room, and may see the event."""
        count = len(self.members)
        for step in range(count):
            member = self.members[(self._next + step) % count]
            if member.has_room and member.may_see(event):
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
            if ends_process(delivery.answer):
                raise ProcessEnding from None
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
