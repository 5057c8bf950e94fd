"""Ending tasks, and waiting until they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from .clock import Clock, within


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
