"""
A group whose handler gets lists of events.

What failed before comes alone: if it fails for all, or ends the process, nobody else is counted for it again.
"""

from __future__ import annotations

import asyncio

from tidings.log.record import Record

from .events import Ack, ReceivedEvent
from .group import HANDLING, Group, ProcessEnded
from .lane import Lane

__all__ = ["BatchGroup"]


class BatchGroup(Group):
    """The runtime of a subscription with a ``batch_count_max`` of more than one. A worker has as many slots for claims."""

    async def _work(self, slot: int, lane: Lane) -> None:
        HANDLING.set(self.name)
        count_max = self.settings.batch_count_max
        slots = range(slot * count_max, (slot + 1) * count_max)
        while not self._is_closing:
            if not lane.items or self.is_paused:
                await lane.wait()
                continue
            records = self._pop_batch(lane, count_max)
            self._handling += len(records)
            try:
                await self._deliver_batch(slot, slots, records)
            finally:
                self._handling -= len(records)
            await asyncio.sleep(0)

    def _pop_batch(self, lane: Lane, count_max: int) -> list[Record]:
        """What to hand out together."""
        records = [lane.pop()]
        if self.attempts and records[0].offset in self.attempts:
            return records
        while lane.items and len(records) < count_max and lane.first.offset not in self.attempts:
            records.append(lane.pop())
        return records

    async def _deliver_batch(self, worker: int, slots: range, records: list[Record]) -> None:
        batches = [records]
        while batches:
            again = await self._try_batch(worker, slots, batches.pop(0))
            if not again:
                continue
            # Only in order: what comes after waits too, and what failed comes again one by one.
            if not await self._rest(max(delay_s for _, delay_s in again)):
                return
            batches[:0] = [[record] for record, _ in again]

    async def _try_batch(self, worker: int, slots: range, records: list[Record]) -> list[tuple[Record, float]]:
        """Hand out a batch once; what must come again in place, and after what delay."""
        if 1 + self.attempts.get(records[0].offset, 0) > self.settings.backoff.retries_max + 1:
            # It comes alone, like all that was counted before.
            await self._give_up(records[0], ProcessEnded(), "retries")
            return []
        events = [ReceivedEvent(record, self.name, 1 + self.attempts.get(record.offset, 0)) for record in records]
        is_alone = records[0].offset in self._suspects and await self._wait_to_be_alone()
        try:
            for slot, event in zip(slots, events, strict=False):
                self._claims.take(slot, event.offset, event.attempt)
            self.stats.delivered += len(events)
            given = await self._deadlines.run(worker, self._pipeline.run_batch(events))
        except asyncio.CancelledError:
            self._clear(slots)
            raise
        finally:
            if is_alone:
                self._alone.release()
        self._clear(slots)
        answers = given if isinstance(given, list) else [given] * len(events)
        again: list[tuple[Record, float]] = []
        for event, each in zip(events, answers, strict=True):
            answer = self._judge(each)
            if isinstance(answer, Ack):
                self._done(event.offset)
                continue
            delay_s = await self._failed(event.record, event.attempt, answer)
            if delay_s is not None:
                again.append((event.record, delay_s))
        return again

    def _clear(self, slots: range) -> None:
        for slot in slots:
            self._claims.clear(slot)

    async def _hand_out(self, event: ReceivedEvent) -> object:
        return (await self._pipeline.run_batch([event], is_redrive=True))[0]
