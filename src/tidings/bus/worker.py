"""
A worker of a group: a long-lived task that takes the next events of its lane, has them handled, and has the group conclude.

Nothing that a handler does ends a worker for good. If the task ends all the same (somebody cancelled it, or there is a fault in
this code) the group starts another one, which first concludes what the last had at hand.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from tidings.log.record import Record

from .events import Ack, ReceivedEvent
from .lane import Lane
from .outcomes import ProcessEnding, is_failure

if TYPE_CHECKING:
    from .group import Group

__all__ = ["HANDLING", "Worker", "WorkerStopped", "is_in_handler"]

HANDLING: Final[contextvars.ContextVar[ReceivedEvent | None]] = contextvars.ContextVar("tidings_handling", default=None)
"""The event whose handler this code was started by; of a list, the first."""

_TURN: Final = 64
"""A worker that never had to wait lets others run after this many events."""


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


class Worker:
    """One place of a group where events are handled."""

    def __init__(self, group: Group, slot: int, lane: Lane) -> None:
        self.lane = lane
        self.task: asyncio.Task[None]
        self._group = group
        count_max = group.settings.batch_count_max
        self._slot = slot * count_max
        self._count_max = count_max
        self._at_hand: deque[tuple[ReceivedEvent, object]] = deque()
        """Events that were handed out and are not concluded yet, with what became of them. Outlives the task."""
        self._in_place: deque[list[Record]] = deque()
        """What comes next, before anything of the lane: in order, what failed; in lists as they are to be handed out."""
        self.handling = 0
        """How many events are with the handler."""

    def start(self) -> None:
        """Begin, or begin again after the task has ended."""
        group = self._group
        self.task = asyncio.create_task(self._work(), name=f"{group.topic}/{group.name}#{self._slot}")
        self.task.add_done_callback(lambda _: group.worker_ended(self))

    async def _work(self) -> None:
        group, lane = self._group, self.lane
        task = asyncio.current_task()
        assert task is not None
        is_quick = group.deadline_ms is None and self._count_max == 1
        await self._conclude()
        while not group.is_closing:
            if self._in_place and not group.is_paused:
                await self._attempt(self._in_place.popleft())
            elif not lane.items or group.is_paused:
                HANDLING.set(None)
                await lane.wait()
                continue
            elif is_quick and not group.attempts:
                await self._run_on(task)
            else:
                await self._attempt(self._pop())
            group.worker_problem = None
            if task.cancelling():
                # Somebody wanted it to end, and a handler has swallowed that; or a handler has cancelled the task it runs in.
                raise asyncio.CancelledError
            if lane.items:
                await asyncio.sleep(0)

    def _pop(self) -> list[Record]:
        """What to hand out together. What failed before comes alone: nobody else is counted for it again."""
        lane, attempts = self.lane, self._group.attempts
        records = [lane.pop()]
        if attempts and records[0].offset in attempts:
            return records
        while lane.items and len(records) < self._count_max and lane.first.offset not in attempts:
            records.append(lane.pop())
        return records

    async def _run_on(self, task: asyncio.Task[None]) -> None:
        """
        Hand out events until one is not acknowledged, the lane is empty, or it is others' turn: what ``_attempt`` comes
        to while nothing has failed. A busy group spends its time here.

        The next claim takes the place of the last; so a process that is killed between two events leaves a claim of one
        that it has handled. That counts an attempt that there was.
        """
        group, lane = self._group, self.lane
        items, name, pipeline, stats, ack = lane.items, group.name, group.pipeline, group.stats, group.cursor.ack
        handler, run, is_bare = pipeline.handler, pipeline.run, pipeline.is_bare_for_good
        pop = items.popleft if isinstance(items, deque) else lane.pop
        take, enter, cancelling = group.claims.taker(self._slot), HANDLING.set, task.cancelling
        self.handling = 1
        for _ in range(_TURN):
            if not items or group.attempts or group.is_paused or group.is_closing:
                break
            record = pop()
            offset = record.offset
            take(offset, 1)
            stats.delivered += 1
            event = ReceivedEvent(record, name, 1)
            enter(event)
            try:
                is_plain = record.known_plain or record.is_plain
                answer = await (handler(event) if is_bare and is_plain else run(event))
            except BaseException as error:
                if not is_failure(error) or asyncio.current_task() is not task:
                    self._interrupted([event], error)
                    raise
                answer = error  # whatever a handler raises is a failed attempt
            event.is_at_work = False
            if type(answer) is not Ack or cancelling():
                self._answered([event])
                await self._conclude([(event, answer)])
                return
            # As in ``Group.done``, of an event that has not failed.
            ack(offset)
            stats.acked += 1
            group.pending -= 1
            group.pending_bytes -= len(record.payload_json)
            if group.pending <= group.wake_at:
                group.wake_for_room()
            if group.is_change_wanted:
                group.on_change(group)
        self.handling = 0
        group.claims.clear(self._slot)

    async def _attempt(self, records: list[Record]) -> None:
        """Hand events out together, once."""
        group = self._group
        try:
            if await group.is_used_up(records[0]):  # it comes alone, like all that was counted before
                return
        except BaseException:
            self._in_place.appendleft(records)
            raise
        events = [ReceivedEvent(record, group.name, group.attempt_of(record)) for record in records]
        self.handling = len(events)
        HANDLING.set(events[0])
        try:
            async with group.alone_if_suspect(records[0]):
                for slot, event in enumerate(events, self._slot):
                    group.claims.take(slot, event.offset, event.attempt)
                group.stats.delivered += len(events)
                answers = await group.hand_out(events)
        except BaseException as error:
            self._interrupted(events, error)
            raise
        self._answered(events)
        await self._conclude(zip(events, answers, strict=True))

    def _interrupted(self, events: Sequence[ReceivedEvent], error: BaseException) -> None:
        """The task is about to end while these are with the handler."""
        why = error if isinstance(error, Exception) else WorkerStopped()
        self._at_hand.extend((event, why) for event in events)
        if isinstance(error, asyncio.CancelledError) and not isinstance(error, ProcessEnding):
            self._answered(events)
        # Else the process ends: the claim stays, and counts.

    def _answered(self, events: Sequence[ReceivedEvent]) -> None:
        self.handling = 0
        for event in events:
            event.is_at_work = False
        if self._group.is_closed:
            raise asyncio.CancelledError  # it was left behind: the group's place is stored, and may be with others
        for slot in range(self._slot, self._slot + len(events)):
            self._group.claims.clear(slot)

    async def _conclude(self, answered: Iterable[tuple[ReceivedEvent, object]] = ()) -> None:
        """
        Have the group count what became of events. In order, what failed comes again here, one by one, after a rest; what
        comes after waits too.
        """
        at_hand = self._at_hand
        at_hand.extend(answered)
        again: list[tuple[Record, float]] = []
        try:
            while at_hand:
                event, answer = at_hand[0]
                delay_s = await self._group.conclude(event, answer)
                at_hand.popleft()
                if delay_s is not None:
                    again.append((event.record, delay_s))
        finally:
            self._in_place.extendleft([record] for record, _ in reversed(again))
        if again:
            await self._group.rest(max(delay_s for _, delay_s in again))
