"""
Handlers in tasks of their own, and deadlines for them.

A handler that runs in its own task can be cancelled without touching the worker that waits for it, whatever the handler makes of
that. One timer watches all of a group: a timeout for each event would cost more than the event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tidings.core.clock import Clock

from .errors import HandlerTimeout
from .outcomes import ProcessEnding, ends_process, outcome_of

__all__ = ["Deadlines"]


class Deadlines:
    """
    How long each handler of a group has been at work.

    Args:
        clock: What time it is.
        deadline_ms: How long a handler may take; without it, as long as it likes.
        on_timeout: Told of each that took longer.
    """

    def __init__(self, clock: Clock, deadline_ms: int | None, on_timeout: Callable[[], None]) -> None:
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._on_timeout = on_timeout
        self._started: dict[asyncio.Task[object], float] = {}
        self._overdue: set[asyncio.Task[object]] = set()

    async def run(self, running: Coroutine[Any, Any, object]) -> object:
        """
        What became of one delivery; errors are values here, and so is running out of time.

        A handler that goes on after it was cancelled is waited for: a worker has one handler at work and no more. Its answer
        comes too late all the same.
        """
        handler = asyncio.create_task(running)
        self._started[handler] = self._clock.monotonic()
        try:
            outcome = await outcome_of(handler)
        except asyncio.CancelledError:
            if ends_process(handler):
                raise ProcessEnding from None
            raise
        finally:
            is_overdue = handler in self._overdue
            del self._started[handler]
            self._overdue.discard(handler)
        if not is_overdue:
            return outcome
        self._on_timeout()
        assert self._deadline_ms is not None
        return HandlerTimeout(self._deadline_ms)

    async def watch(self, deadline_ms: int) -> None:
        """Cancel the handlers that are past their deadline, for as long as the group runs."""
        while True:
            await self._clock.sleep(deadline_ms / 4000)
            latest = self._clock.monotonic() - deadline_ms / 1000
            for handler, started in list(self._started.items()):
                if started <= latest and handler not in self._overdue:
                    self._overdue.add(handler)
                    handler.cancel()
