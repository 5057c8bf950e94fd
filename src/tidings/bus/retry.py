"""
Retries: what to do after an attempt has failed, and which events wait to be tried again.

An event of an unordered group that waits is kept as its offset and when it is due, and nothing else of it. It holds no place in
the group's window: what is due is read from the log again, one after another, as the window has room.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable

from tidings.core.clock import Clock, within
from tidings.log.errors import PositionTrimmed
from tidings.log.interface import Log, Query
from tidings.log.record import Record

from .settings import Backoff


def delay_cap_s(backoff: Backoff, failures: int) -> float:
    """The longest delay after ``failures`` failures: ``min(base * mult**(failures - 1), max)``."""
    try:
        return min(backoff.base_s * backoff.mult ** (failures - 1), backoff.max_s)
    except OverflowError:
        # A float ends long before it matters; the cap is what would be taken anyway.
        return backoff.max_s if backoff.base_s else 0.0


def next_retry_s(backoff: Backoff, failures: int, rng: random.Random, delay_s: float | None = None) -> float | None:
    """
    After which delay to try again after ``failures`` failures (at least 1); ``None`` if the event is a dead letter now.

    Full jitter: the delay is drawn evenly from zero to the cap, so that what failed together does not return together.
    ``delay_s`` is the handler's own wish and is taken as it is.
    """
    if failures > backoff.retries_max:
        return None
    return rng.uniform(0.0, delay_cap_s(backoff, failures)) if delay_s is None else max(0.0, delay_s)


class WaitingRetries:
    """
    The offsets that wait, by the time they are due.

    Args:
        clock: What time it is.
        hand_back: Takes one offset back into the group, however long that takes.
    """

    def __init__(self, clock: Clock, hand_back: Callable[[int], Awaitable[None]]) -> None:
        self._clock = clock
        self._hand_back = hand_back
        self._due: list[tuple[float, int]] = []
        self._added: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._due)

    def add(self, offset: int, delay_s: float) -> None:
        """Let an event wait."""
        heapq.heappush(self._due, (self._clock.monotonic() + delay_s, offset))
        if self._due[0][1] == offset and self._added is not None and not self._added.done():
            self._added.set_result(None)  # it is the next

    async def run(self) -> None:
        """Hand back what is due, for as long as the group runs."""
        while True:
            left_s = self._due[0][0] - self._clock.monotonic() if self._due else None
            if left_s is not None and left_s <= 0:
                _, offset = heapq.heappop(self._due)
                await self._hand_back(offset)
                continue
            self._added = asyncio.get_running_loop().create_future()
            if left_s is None:
                await self._added
            else:
                await within(self._clock, left_s, self._added)


async def record_at(log: Log, topic: str, offset: int) -> Record | None:
    """The record at an offset of a topic; ``None`` if it was dropped."""
    try:
        page = await log.read(Query(topic=topic, from_offset=offset, to_offset=offset + 1), limit=1)
    except PositionTrimmed:
        return None
    return page.records[0] if page.records and page.records[0].offset == offset else None
