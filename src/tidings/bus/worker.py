"""
Workers of a group, and the lanes where its events wait for them.

A worker is a long-lived task that takes the next events of its lane, has them handled, and has the group count what became of
them. Nothing that a handler does ends a worker for good. If the task ends all the same (somebody cancelled it, or there is a
fault in this code) the group starts another one, which first concludes what the last had at hand.
"""

from __future__ import annotations

import asyncio
import bisect
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from tidings.log.record import Record

from .events import Ack, ReceivedEvent
from .handlers import ProcessEnding
from .members import Handover, Member

if TYPE_CHECKING:
    from .group import Group

__all__ = ["HANDLING", "Lane", "Worker", "WorkerStopped", "is_in_handler", "priority_of"]

HANDLING: Final[contextvars.ContextVar[ReceivedEvent | None]] = contextvars.ContextVar("tidings_handling", default=None)
"""The event whose handler this code was started by; of a list, the first."""

_YIELD_COUNT: Final = 64
"""A worker that never had to wait lets others run after this many events."""

_T = TypeVar("_T")


def is_in_handler() -> bool:
    """
    Whether this code runs for a handler that somebody waits for: its own publishing must not wait for handlers.

    A task that a handler has started is part of it for as long as the handler is at work, and no longer.
    """
    event = HANDLING.get()
    return event is not None and event.is_at_work


class WorkerStopped(Exception):
    """Stands for what cancelled a worker from outside."""

    def __str__(self) -> str:
        return "a worker was cancelled by somebody else"


class Lane:
    """Records that wait for a worker, in the order they came or by priority, and workers that wait for records."""

    __slots__ = ("_priority", "_sleepers", "held", "items")

    def __init__(self, *, by_priority: bool, priority: int = 5) -> None:
        self._priority = priority
        self.items: deque[Record] | list[tuple[int, int, Record]] = [] if by_priority else deque()
        self.held: list[Record] = []
        """What comes before all others, by offset: it was taken before, and was given back or is tried again in its place."""
        self._sleepers: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self.held) + len(self.items)

    def add(self, records: Iterable[Record]) -> None:
        """Add records that were not here before."""
        if isinstance(self.items, deque):
            self.items.extend(records)
        else:
            for record in records:
                heapq.heappush(self.items, (-priority_of(record, self._priority), record.offset, record))

    def hold(self, record: Record) -> None:
        """Put a record back, before all that were not taken yet."""
        bisect.insort(self.held, record, key=lambda each: each.offset)

    @property
    def first(self) -> Record:
        """The one that ``pop`` gives next."""
        if self.held:
            return self.held[0]
        head = self.items[0]
        return head[2] if isinstance(head, tuple) else head

    def pop(self) -> Record:
        """Take the one that is next."""
        if self.held:
            return self.held.pop(0)
        if isinstance(self.items, deque):
            return self.items.popleft()
        return heapq.heappop(self.items)[2]

    def pop_for(self, choose: Callable[[Record], _T | None], scan_count_max: int) -> tuple[Record, _T] | None:
        """Take the first record that somebody is chosen for, among so many that are next; with whom."""
        for at, record in enumerate(itertools.islice(self._in_order(), scan_count_max)):
            if (chosen := choose(record)) is None:
                continue
            if at == 0:
                self.pop()
            elif at < len(self.held):
                del self.held[at]
            elif isinstance(self.items, deque):
                del self.items[at - len(self.held)]
            else:
                self.items[:] = [item for item in self.items if item[2] is not record]
                heapq.heapify(self.items)
            return record, chosen
        return None

    def _in_order(self) -> Iterator[Record]:
        yield from self.held
        if isinstance(self.items, deque):
            yield from self.items
        elif self.items:
            yield self.items[0][2]
            yield from (record for _, _, record in sorted(self.items)[1:])

    async def wait(self) -> None:
        """Sleep until woken."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append(waiter)
        await waiter

    def wake(self, count: int) -> int:
        """Wake up to this many workers; how many there were."""
        woken = 0
        while woken < count and self._sleepers:
            waiter = self._sleepers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                woken += 1
        return woken

    def wake_all(self) -> None:
        """Wake all workers."""
        self.wake(len(self._sleepers))


_WORDS: Final = {"low": 2, "normal": 5, "high": 8, "critical": 10}


def priority_of(record: Record, default: int = 5) -> int:
    """1 to 10; the topic's if the event says nothing, or nothing that is known."""
    priority = record.meta.priority
    if isinstance(priority, int):
        return priority
    if isinstance(priority, str):
        return _WORDS.get(priority.lower(), default)
    qos = record.meta.qos
    urgency = qos.get("priority", default) if qos else default
    return urgency if isinstance(urgency, int) else _WORDS.get(str(urgency).lower(), default)


class Worker:
    """A task of a group that has events handled, one delivery after another."""

    def __init__(self, group: Group, slot: int, lane: Lane) -> None:
        self.lane = lane
        self.task: asyncio.Task[None]
        self._group = group
        self._count_max = group.settings.batch_count_max
        self._slot = slot * self._count_max
        self._claimed = 0
        """How many claims are taken, from the first slot on."""
        self._at_hand: deque[tuple[ReceivedEvent, object]] = deque()
        """Events that were handed out and are not concluded yet, with what became of them. Outlives the task."""
        self.handling = 0
        """How many events are with a member."""

    def start(self) -> None:
        """Begin, or begin again after the task has ended."""
        group = self._group
        self.task = asyncio.create_task(self._work(), name=f"{group.topic}/{group.name}#{self._slot}")
        self.task.add_done_callback(lambda _: group.worker_ended(self))

    async def _work(self) -> None:
        group, lane = self._group, self.lane
        task = asyncio.current_task()
        assert task is not None
        await self._conclude()
        count = 0
        while not group.is_closing:
            taken = self._take() if lane and not group.is_paused else None
            if taken is None:
                self._clear_claims()
                HANDLING.set(None)
                await lane.wait()
                count = 0
                continue
            records, member = taken
            await self._deliver(records, member)
            group.worker_problem = None
            if task.cancelling():
                # Somebody wanted it to end, and a handler has swallowed that; or a handler has cancelled the task it runs in.
                raise asyncio.CancelledError
            count += len(records)
            if count >= _YIELD_COUNT and lane:
                count = 0
                await asyncio.sleep(0)
        self._clear_claims()

    def _take(self) -> tuple[list[Record], Member | None] | None:
        """
        What to hand out together, and to whom; without a member, to the handler that has the group to itself.

        What failed before comes alone: nobody else is counted for it again.
        """
        group, lane = self._group, self.lane
        if group.members.sole is None:
            found = lane.pop_for(group.members.choose, 1 if group.is_ordered else group.settings.workers)
            if found is None:
                group.members.warn_if_nobody_may_see(lane.first, group.name)
                return None
            return [found[0]], found[1]
        records = [lane.pop()]
        if self._count_max > 1 and records[0].offset not in group.attempts:
            while lane and len(records) < self._count_max and lane.first.offset not in group.attempts:
                records.append(lane.pop())
        return records, None

    async def _deliver(self, records: list[Record], member: Member | None) -> None:
        """
        Hand events out together, once.

        The next claim takes the place of the last; so a process that is killed between two events leaves a claim of one that
        it has handled. That counts an attempt that there was.
        """
        group, name = self._group, self._group.name
        attempts = group.attempts
        handover = None if member is None else Handover(member)
        is_alone = False
        try:
            if handover is not None or (attempts and records[0].offset in attempts):
                try:
                    if await group.is_used_up(records[0]):
                        return
                    if handover is not None:
                        await group.until_reached(handover.member, records[0])
                    is_alone = await group.alone_if_suspect(records[0])
                except BaseException:
                    self.lane.hold(records[0])  # it comes alone, like all that was counted before
                    raise
            if attempts:
                events = [ReceivedEvent(record, name, 1 + attempts.get(record.offset, 0)) for record in records]
            else:
                events = [ReceivedEvent(record, name, 1) for record in records]
            self.handling = len(events)
            HANDLING.set(events[0])
            try:
                if member is None or member.is_local:
                    self._claim(events)
                else:
                    self._clear_claims()
                group.stats.delivered += len(events)
                answers = await group.hand_out(events, handover)
            except BaseException as error:
                self._interrupted(events, error)
                raise
        finally:
            if is_alone:
                group.no_longer_alone()
            if handover is not None:
                handover.end()
        self._answered(events)
        for answer in answers:
            if type(answer) is not Ack and answer is not None:
                self._clear_claims()
                await self._conclude(zip(events, answers, strict=True))
                return
        for record in records:
            group.done(record)

    def _claim(self, events: Sequence[ReceivedEvent]) -> None:
        claims = self._group.claims
        if self._claimed > len(events):
            self._clear_claims()
        for slot, event in enumerate(events, self._slot):
            claims.take(slot, event.offset, event.attempt)
        self._claimed = len(events)

    def _clear_claims(self) -> None:
        if self._group.is_closed:
            return
        for slot in range(self._slot, self._slot + self._claimed):
            self._group.claims.clear(slot)
        self._claimed = 0

    def _interrupted(self, events: Sequence[ReceivedEvent], error: BaseException) -> None:
        """The task is about to end while these are with the handler."""
        why = error if isinstance(error, Exception) else WorkerStopped()
        self._at_hand.extend((event, why) for event in events)
        if isinstance(error, asyncio.CancelledError) and not isinstance(error, ProcessEnding):
            self._answered(events)
            self._clear_claims()
        # Else the process ends: the claim stays, and counts.

    def _answered(self, events: Sequence[ReceivedEvent]) -> None:
        self.handling = 0
        for event in events:
            event.is_at_work = False
        if self._group.is_closed:
            raise asyncio.CancelledError  # it was left behind: the group's place is stored, and may be with others

    async def _conclude(self, answered: Iterable[tuple[ReceivedEvent, object]] = ()) -> None:
        """
        Have the group count what became of events. In order, what failed comes again here, one by one, after a rest; what
        comes after waits too.
        """
        at_hand = self._at_hand
        at_hand.extend(answered)
        rest_s: float | None = None
        while at_hand:
            event, answer = at_hand[0]
            delay_s = await self._group.conclude(event, answer, self.lane)
            at_hand.popleft()
            if delay_s is not None:
                self.lane.hold(event.record)
                rest_s = max(delay_s, rest_s or 0.0)
        if rest_s is not None:
            await self._group.rest(rest_s)
