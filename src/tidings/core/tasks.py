"""End tasks and wait for their end, and do long work in slices."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

from .clock import Clock, within

_T = TypeVar("_T")


async def cancel_and_wait(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks, and wait until they have ended. What they raise is dropped; one that there is not, or that has ended, is fine."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def finish_or_cancel(clock: Clock, seconds: float, tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Let tasks end within so long, and cancel those that do not. What they raise is dropped."""
    working = list(tasks)
    if working and not await within(clock, seconds, asyncio.gather(*working, return_exceptions=True)):
        await cancel_and_wait(*working)


async def in_slices(steps: Generator[None, None, _T]) -> _T:
    """Run a generator to its end, with other callbacks of the event loop after each ``yield``. Return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result
        await asyncio.sleep(0)


def finish(steps: Generator[None, None, _T]) -> _T:
    """Run a generator to its end, in one go. Return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result
