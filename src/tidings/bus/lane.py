"""A lane of a group: records that wait for a worker, in the order they came or by priority, and workers that wait for records."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Sequence
from typing import Final

from tidings.log.record import Record

__all__ = ["Lane", "priority_of"]


class Lane:
    """Records that wait for a worker, and workers that wait for records."""

    __slots__ = ("_priority", "_sleepers", "items")

    def __init__(self, *, by_priority: bool, priority: int = 5) -> None:
        self._priority = priority
        self.items: deque[Record] | list[tuple[int, int, Record]] = [] if by_priority else deque()
        self._sleepers: deque[asyncio.Future[None]] = deque()

    def extend(self, records: Sequence[Record]) -> None:
        """Add records, and wake as many workers."""
        if isinstance(self.items, deque):
            self.items.extend(records)
        else:
            for record in records:
                heapq.heappush(self.items, (-priority_of(record, self._priority), record.offset, record))
        if self._sleepers:
            self.wake(len(records))

    def put_back(self, record: Record) -> None:
        """Put back what was taken last."""
        if isinstance(self.items, deque):
            self.items.appendleft(record)
            self.wake(1)
        else:
            self.extend((record,))

    def pop(self) -> Record:
        """Take the one that is next."""
        if isinstance(self.items, deque):
            return self.items.popleft()
        return heapq.heappop(self.items)[2]

    @property
    def first(self) -> Record:
        """The one that ``pop`` gives next."""
        head = self.items[0]
        return head[2] if isinstance(head, tuple) else head

    async def wait(self) -> None:
        """Sleep until woken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append(turn)
        await turn

    def wake(self, count: int) -> None:
        """Wake up to this many workers."""
        while count > 0 and self._sleepers:
            turn = self._sleepers.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

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
