"""
Workers of a group, and the lanes where its events wait for them.

A worker is a long-lived task that takes the next events of its lane, has them handled, and has the group count what became of
them. Nothing that a handler does ends a worker for good. If the task ends all the same (somebody cancelled it, or there is a
fault in this code) the group starts another one, which first concludes what the last had at hand.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from tidings.log.record import Record

from .events import Ack, ReceivedEvent
from .handlers import HANDLING, ProcessEnding, is_failure
from .members import Handover

if TYPE_CHECKING:
    from .group import Group

_YIELD_COUNT: Final = 64
"""A worker that never had to wait lets others run after this many events."""

_T = TypeVar("_T")


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
        """Hand out what comes, until the group closes."""
        group, lane, cancelling = self._group, self.lane, self.task.cancelling
        is_one_by_one = group.members.sole is not None and self._count_max == 1
        await self._conclude()
        count = 0
        while not group.is_closing:
            if group.is_paused or not lane:
                size = 0
            elif is_one_by_one and not (lane.held or group.attempts):
                size = await self._run_on()
            else:
                size = await self._deliver()
            if size == 0:
                self.handling = 0
                self._clear_claims()
                HANDLING.set(None)
                await lane.wait()
                count = 0
                continue
            group.worker_problem = None
            if cancelling():
                # Somebody wanted it to end, and a handler has swallowed that; or a handler has cancelled the task it runs in.
                raise asyncio.CancelledError
            count += size
            if count >= _YIELD_COUNT and lane.items:
                count = self.handling = 0
                await asyncio.sleep(0)
        self._clear_claims()

    async def _run_on(self) -> int:
        """
        Hand events to the one handler, one by one, until one is not acknowledged, none is left, or others are to run: what
        ``_deliver`` comes to while nothing has failed. A busy group spends its time here.

        The next claim takes the place of the last; so a process that is killed between two events leaves a claim of one that
        it has handled. That counts an attempt that there was.

        Returns:
            How many events were handed out.
        """
        group, lane, task = self._group, self.lane, self.task
        items, held, name, attempts, stats = lane.items, lane.held, group.name, group.attempts, group.stats
        pop = items.popleft if isinstance(items, deque) else lane.pop
        claim, enter, direct = group.claims.taker(self._slot), HANDLING.set, group.direct_handler
        ack, cancelling = group.cursor.ack, task.cancelling
        self.handling = self._claimed = 1
        for count in range(1, _YIELD_COUNT + 1):
            record = pop()
            offset = record.offset
            event = ReceivedEvent(record, name, 1)
            enter(event)
            claim(offset, 1)
            stats.delivered += 1
            try:
                if direct is not None and (record.known_plain or record.is_plain):
                    try:
                        answer = await direct(event)
                    except BaseException as error:
                        if not is_failure(error) or asyncio.current_task() is not task:
                            raise  # in another task, or none: the coroutine is being closed
                        answer = error
                else:
                    answer = (await group.hand_out([event], None))[0]
            except BaseException as error:
                self._interrupted([event], error)
                raise
            event.is_at_work = False
            if group.is_closed:
                raise asyncio.CancelledError  # it was left behind: the group's place is stored, and may be with others
            if type(answer) is not Ack and answer is not None:
                self.handling = 0
                self._clear_claims()
                await self._conclude(((event, answer),))
                return count
            # As in ``Group.done``, of an event that has not failed.
            ack(offset)
            stats.acked += 1
            group.pending -= 1
            group.pending_bytes -= len(record.payload_json)
            if group.pending <= group.wake_at:
                group.wake_for_room()
            if group.is_change_wanted:
                group.on_change(group)
            if not items or held or attempts or group.is_paused or group.is_closing or cancelling():
                return count
        return _YIELD_COUNT

    async def _deliver(self) -> int:
        """
        Hand out the next event, or list of events, to the handler or to a member.

        Returns:
            How many events were handed out, or done with instead; 0 if no member may have any.
        """
        group, handover = self._group, None
        if group.members.sole is not None:
            first = self.lane.pop()
        elif (found := self._take_for_a_member()) is not None:
            first, handover = found
        else:
            return 0
        is_alone = False
        if handover is not None or first.offset in group.attempts:
            is_alone, is_over = await self._prepare(first, handover)
            if is_over:
                return 1
        events = [ReceivedEvent(first, group.name, 1 + group.attempts.get(first.offset, 0))]
        if self._count_max > 1:
            events += [ReceivedEvent(record, group.name, 1) for record in self._take_more(first)]
        self.handling = len(events)
        HANDLING.set(events[0])
        try:
            self._claim(events if handover is None or handover.member.is_local else ())
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
        for event in events:
            event.is_at_work = False
        if group.is_closed:
            raise asyncio.CancelledError  # it was left behind: the group's place is stored, and may be with others
        for answer in answers:
            if type(answer) is not Ack and answer is not None:
                self.handling = 0
                self._clear_claims()
                await self._conclude(zip(events, answers, strict=True))
                break
        else:
            for event in events:
                group.done(event.record)
        return len(events)

    def _take_for_a_member(self) -> tuple[Record, Handover] | None:
        """The next event that a member with a free slot may see, and its way to that member."""
        group = self._group
        found = self.lane.pop_for(group.members.choose, 1 if group.is_ordered else group.settings.workers)
        if found is None:
            group.members.warn_if_nobody_may_see(self.lane.first, group.name)
            return None
        record, member = found
        return record, Handover(member)

    def _take_more(self, first: Record) -> Sequence[Record]:
        """What to hand out together with the first. What failed before comes alone: nobody else is counted for it again."""
        lane, attempts = self.lane, self._group.attempts
        records: list[Record] = []
        if first.offset not in attempts:
            while lane and len(records) < self._count_max - 1 and lane.first.offset not in attempts:
                records.append(lane.pop())
        return records

    async def _prepare(self, record: Record, handover: Handover | None) -> tuple[bool, bool]:
        """
        Wait until an event may be handed over that goes to a member, or was counted before.

        Returns:
            Whether other suspects wait for it, and whether it is done with already.
        """
        group = self._group
        try:
            if await group.is_used_up(record):
                if handover is not None:
                    handover.end()
                return False, True
            if handover is not None:
                await group.until_reached(handover.member, record)
            return await group.alone_if_suspect(record), False
        except BaseException:
            self.lane.hold(record)  # alone, like all that was counted before
            if handover is not None:
                handover.end()
            raise

    def _claim(self, events: Sequence[ReceivedEvent]) -> None:
        """Claim these, in the place of those that were claimed before."""
        claims = self._group.claims
        for slot, event in enumerate(events, self._slot):
            claims.take(slot, event.offset, event.attempt)
        for slot in range(self._slot + len(events), self._slot + self._claimed):
            claims.clear(slot)
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
            self.handling = 0
            for event in events:
                event.is_at_work = False
            self._clear_claims()
        # Else the process ends: the claim stays, and counts.

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
