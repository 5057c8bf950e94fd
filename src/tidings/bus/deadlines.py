"""
Deadlines of handlers: one timer for all workers of a group, which cancels those that take too long.

A timeout for each event would cost more than the event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tidings.core.clock import Clock

from .cancelling import is_being_cancelled
from .errors import HandlerTimeout

__all__ = ["Deadlines"]


class Deadlines:
    """
    How long each worker of a group has been at what it is doing.

    Args:
        clock: What time it is.
        deadline_ms: How long a handler may take; without it, as long as it likes.
        on_timeout: Told of each that took longer.
    """

    def __init__(self, clock: Clock, deadline_ms: int | None, on_timeout: Callable[[], None]) -> None:
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._on_timeout = on_timeout
        self._started: dict[int, float] = {}
        self._overdue: set[int] = set()
        self.is_closing = False
        """From then on a worker that is cancelled is meant to end."""

    async def run(self, worker: int, running: Coroutine[Any, Any, object]) -> object:
        """What became of one delivery; errors are values here, and so is running out of time."""
        if self._deadline_ms is not None:
            self._started[worker] = self._clock.monotonic()
        try:
            return await running
        except asyncio.CancelledError as error:
            if not is_being_cancelled():
                return error  # something that the handler awaited was cancelled, not the worker
            if worker not in self._overdue or self.is_closing:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            self._on_timeout()
            assert self._deadline_ms is not None
            return HandlerTimeout(self._deadline_ms)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is a failed attempt
            return error
        finally:
            if self._deadline_ms is not None:
                self._started.pop(worker, None)
                self._overdue.discard(worker)

    async def watch(self, workers: Sequence[asyncio.Task[None]], deadline_ms: int) -> None:
        """Cancel the workers that are past their deadline, for as long as the group runs."""
        while True:
            await self._clock.sleep(deadline_ms / 4000)
            latest = self._clock.monotonic() - deadline_ms / 1000
            for slot, started in list(self._started.items()):
                if started <= latest and slot not in self._overdue and slot < len(workers):
                    self._overdue.add(slot)
                    workers[slot].cancel()
