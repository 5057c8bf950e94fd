"""
Without sync before acknowledgement: what is committed and not synced yet waits here, and is synced now and then.

Segments are written from synced commits only, so these lines are settled after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from ..settings import LogSettings
from .stream import Chunk

__all__ = ["LateSync"]

_UNPROMISED_INTERVAL_S: Final = 1.0


class LateSync:
    """
    The lines that a sync is still due for.

    Args:
        loop, settings: When a sync is due.
        on_due: Told when it is.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: LogSettings, on_due: Callable[[], None]) -> None:
        is_promised = settings.durability == "interval"
        self._interval_s = settings.sync_interval_ms / 1000 if is_promised else _UNPROMISED_INTERVAL_S
        self._loop = loop
        self._on_due = on_due
        self._is_timer_set = False
        self.chunks: list[Chunk] = []
        self.is_wanted = False
        """Whether the next job of the commit lane is to be a sync."""

    def add(self, chunks: list[Chunk]) -> None:
        """Lines that were committed."""
        self.chunks += chunks
        if not self._is_timer_set:
            self._is_timer_set = True
            self._loop.call_later(self._interval_s, self._ring)

    def _ring(self) -> None:
        self._is_timer_set = False
        self.is_wanted = True
        self._on_due()

    def take(self) -> tuple[list[Chunk], int]:
        """All lines, which are synced now, and their size in bytes."""
        chunks, self.chunks = self.chunks, []
        return chunks, sum(len(line) for chunk in chunks for line in chunk.lines)
