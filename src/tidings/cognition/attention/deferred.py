"""
Events that wait for their second hearing, by the time it is due. Bounded: a full queue takes no more and says so.

What was put off because the gate was busy is work that presses, until its time comes. What was put off for being of little
interest, or because its own actor was in haste, presses on nobody: however much of it waits, others are not held up by it.
"""

from __future__ import annotations

import heapq

from tidings.core.events import Event

__all__ = ["DeferredQueue"]


class DeferredQueue:
    """A priority queue of events by retry time; at the same time, in the order they came."""

    __slots__ = ("_added", "_count_max", "_heap", "_ids", "_pressing_until_s")

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._heap: list[tuple[float, int, Event]] = []
        self._ids: set[str] = set()
        self._pressing_until_s: list[float] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, event_id: object) -> bool:
        return event_id in self._ids

    def add(self, event: Event, retry_at_s: float, *, is_pressing: bool) -> int | None:
        """
        Keep an event until ``retry_at_s``.

        Returns:
            Its place in the queue from 1, or ``None`` when the queue is full. An event that waits already stays where
            it is.
        """
        event_id = event.meta.event_id
        if event_id in self._ids:
            return self._place(event_id)
        if len(self._heap) >= self._count_max:
            return None
        self._added += 1
        heapq.heappush(self._heap, (retry_at_s, self._added, event))
        self._ids.add(event_id)
        if is_pressing:
            heapq.heappush(self._pressing_until_s, retry_at_s)
        return self._place(event_id)

    def remove(self, event_id: str) -> None:
        """Let go of an event, if it waits."""
        if event_id in self._ids:
            self._ids.discard(event_id)
            self._heap = [entry for entry in self._heap if entry[2].meta.event_id != event_id]
            heapq.heapify(self._heap)

    def take_due(self, now_s: float) -> list[Event]:
        """Take out the events whose time has come, earliest first."""
        due: list[Event] = []
        while self._heap and self._heap[0][0] <= now_s:
            event = heapq.heappop(self._heap)[2]
            self._ids.discard(event.meta.event_id)
            due.append(event)
        return due

    def pressing_count(self, now_s: float) -> int:
        """How many wait because the gate was busy, and are not due yet."""
        while self._pressing_until_s and self._pressing_until_s[0] <= now_s:
            heapq.heappop(self._pressing_until_s)
        return len(self._pressing_until_s)

    def next_at_s(self) -> float | None:
        """When the next event is due."""
        return self._heap[0][0] if self._heap else None

    def _place(self, event_id: str) -> int:
        mine = next(entry for entry in self._heap if entry[2].meta.event_id == event_id)
        return 1 + sum(entry[:2] < mine[:2] for entry in self._heap)
