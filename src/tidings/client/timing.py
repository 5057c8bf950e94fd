"""Waiting with a limit, in the time of a ``Clock``; and how long to wait before another attempt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from tidings.core.clock import Clock, within

__all__ = ["Alarm", "full_jitter", "within"]


def full_jitter(attempt: int, seconds_min: float, seconds_max: float, rng: random.Random) -> float:
    """
    How long to wait before the next attempt: anything between nothing and a bound that doubles from attempt to attempt.

    The whole range is random, so that clients that lost their server at the same moment do not come back at the same moment.
    """
    return rng.uniform(0.0, min(seconds_max, seconds_min * 2.0 ** min(attempt, 32)))


class Alarm:
    """Calls ``ring`` when a moment comes. Setting it to a later moment costs nothing."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._due: float | None = None
        self._sleeps_until = 0.0
        self._task: asyncio.Task[None] | None = None

    def set(self, due: float | None) -> None:
        """Ring at ``due`` on the clock's monotonic time; ``None`` for never."""
        self._due = due
        if due is None:
            return
        if self._task is not None and not self._task.done() and self._sleeps_until <= due:
            return  # it wakes before, looks again and goes back to sleep
        self.cancel()
        self._due = due
        self._sleeps_until = due
        self._task = asyncio.create_task(self._sleep(), name="tidings-client-alarm")

    async def _sleep(self) -> None:
        while self._due is not None:
            now = self._clock.monotonic()
            if now >= self._due:
                self._due = None
                self._ring()
                return
            self._sleeps_until = self._due
            await self._clock.sleep(self._due - now)

    def cancel(self) -> None:
        """Never mind."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
