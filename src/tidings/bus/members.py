"""
Members of a group: those who handle its events, in this process or elsewhere.

A group hands each event to one member that has a free slot and may see the event; it does not care where the member lives.
``LocalMember`` is a handler of this process; a node has another one for connections. An event that no member may see waits
for somebody who may: skipping it would lose it for the group, in silence.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, ClassVar

from tidings.core.clock import Clock, within
from tidings.log.record import Record

from .events import ReceivedEvent
from .handlers import Handler, HandlerThreads, NotTried, as_async

if TYPE_CHECKING:
    from .group import Group
    from .subscription import Subscription

logger = logging.getLogger(__name__)


class Member(abc.ABC):
    """
    Somebody who handles events of a group, so many at once as it has slots.

    The group takes a slot when it chooses the member for an event. From the beginning of ``handle`` on the slot is the
    member's to give back (``release``); it may keep it for longer than anybody waits for the answer.
    """

    is_local: ClassVar[bool] = False
    """Whether events are handled in this process, which they may end: only then are they claimed."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.taken = 0
        self.is_leaving = False
        """Whether it takes nothing more."""
        self.subscription: Subscription | None = None
        """What it is a member of, once it has joined."""
        self._idle: asyncio.Future[None] | None = None

    @property
    def room(self) -> int:
        """How many more events it takes now."""
        return 0 if self.is_leaving else self.slots - self.taken

    def may_receive(self) -> bool:
        """Whether it may have anything at all; asked last, right before an event is handed over."""
        return not self.is_leaving

    def may_see(self, record: Record) -> bool:
        """Whether it may have this event of the topic; that it may not is no reason to go."""
        return True

    def reached(self, seq: int) -> Awaitable[None] | None:
        """
        What has to happen before an event of this seq may be handed over; ``None`` if it may be now.

        Raises:
            TidingsError: Here, or when it is awaited: it will never be. The event waits then, and counts as not tried.
        """
        return None

    @abc.abstractmethod
    async def handle(self, event: ReceivedEvent) -> object:
        """
        The answer to an event, as a handler's. If this is cancelled, nobody waits for the answer any more.

        Raises:
            NotTried: The member gives the event back.
        """

    def release(self, *, is_returned: bool = False) -> None:
        """A slot is free again; of an event that was given back, which is handed out before others."""
        self.taken -= 1
        if self.taken == 0 and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        if not is_returned:  # else when the group has the event back
            self.wake()

    def wake(self) -> None:
        """It has more room, or may see more, or may."""
        if self.subscription is not None:
            self.subscription.members.wake()

    async def finish(self, clock: Clock, timeout_s: float) -> None:
        """Take nothing more, and be done with what is at hand within the time; what is not is given back untried."""
        self.is_leaving = True


class LocalMember(Member):
    """A handler of this process."""

    is_local = True

    def __init__(self, handler: Handler, workers: int = 1, name: str = "handler") -> None:
        super().__init__(workers)
        self._threads = HandlerThreads(name, workers)
        self.handler = as_async(handler, self._threads)

    @property
    def is_in_thread(self) -> bool:
        """Whether its handler, a plain function, is at work in a thread."""
        return self._threads.is_at_work

    async def handle(self, event: ReceivedEvent) -> object:
        try:
            return await self.handler(event)
        finally:
            self.release()

    async def finish(self, clock: Clock, timeout_s: float) -> None:
        self.is_leaving = True
        self._idle = asyncio.get_running_loop().create_future()
        if self.taken and not await within(clock, timeout_s, self._idle):
            if self.subscription is not None and (group := self.subscription.group_state) is not None:
                group.withdraw(self)
            await self._idle
        self.stop()

    def stop(self) -> None:
        """Have its threads end."""
        self._threads.stop()


class Handover:
    """One event's way to the member that was chosen for it. The pipeline calls this as it would call a handler."""

    __slots__ = ("_has_begun", "member")

    def __init__(self, member: Member) -> None:
        self.member = member
        self._has_begun = False

    async def __call__(self, event: ReceivedEvent) -> object:
        if not self.member.may_receive():
            raise NotTried
        self._has_begun = True
        return await self.member.handle(event)

    def end(self) -> None:
        """The delivery is over. The slot of a member that never got the event is free again."""
        if not self._has_begun:
            self.member.release()


class Members:
    """
    The members of one group. They stay while the group is started anew, from another place for instance.

    Args:
        sole: A handler that has the group to itself. Its slots are the group's workers, and are not counted.
    """

    def __init__(self, sole: LocalMember | None = None) -> None:
        self.sole = sole
        self.group: Group | None = None
        """The group, while it runs."""
        self._members: list[Member] = [] if sole is None else [sole]
        self._next = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def add(self, member: Member) -> None:
        """One more to share with."""
        self._members.append(member)
        self.wake()

    def remove(self, member: Member) -> None:
        """It gets nothing more."""
        if member in self._members:
            self._members.remove(member)

    @property
    def room(self) -> int:
        """How many events could be handed over now."""
        return sum(max(0, member.room) for member in self._members)

    def could_take(self, record: Record) -> bool:
        """Whether there is a member with room that may see this event."""
        return any(member.room > 0 and member.may_see(record) for member in self._members)

    def choose(self, record: Record) -> Member | None:
        """The next in turn that has room and may see the event; its slot is taken."""
        count = len(self._members)
        for step in range(count):
            member = self._members[(self._next + step) % count]
            if member.room > 0 and member.may_see(record):
                self._next = (self._next + step + 1) % count
                member.taken += 1
                return member
        return None

    async def changed(self) -> None:
        """Return when a choice may come out differently: somebody has more room, may see more, or has joined."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def wake(self) -> None:
        """Somebody has more room, or may see more: what waits for a member looks again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self.group is not None:
            self.group.wake()

    def warn_if_nobody_may_see(self, record: Record, group: str) -> None:
        """Say in the log that an event waits for somebody who may see it. Once: the group's lag says the rest."""
        if self._has_warned or not self._members or any(member.may_see(record) for member in self._members):
            return
        self._has_warned = True
        meta = record.meta
        logger.warning(
            "group %s of topic %s: no member may see the event at offset %d (space %r, partitions %r); such events wait",
            group,
            record.topic,
            record.offset,
            meta.space_id,
            meta.partitions,
        )
