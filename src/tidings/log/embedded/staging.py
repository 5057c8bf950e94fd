"""
Staging: events that were accepted get their places and wait, in batches, for a commit.

A batch is what one commit takes: lines in seq order, and their shares by topic. All who wait for a batch wait on
one future, which costs a third less than one each. The price is that cancelling one waiter cancels the future for
all; the others then find that they were not meant, and wait on its replacement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidings.core.errors import TidingsError

from .index import IndexEntry
from .state import TopicState

__all__ = ["Batch", "Share"]


class Share:
    """A topic's part of a batch."""

    __slots__ = ("first_offset", "first_seq", "last_seq", "lines", "named", "spaces", "topic")

    def __init__(self, topic: TopicState, first_offset: int, first_seq: int) -> None:
        self.topic = topic
        self.first_offset = first_offset
        self.first_seq = self.last_seq = first_seq
        self.lines: list[bytes] = []
        self.named: list[tuple[int, tuple[str, ...]]] = []
        """The seqs of records that name partitions, with those names."""
        self.spaces: list[str] = []
        """The space of each line, in the ``space`` layout only."""


class Batch:
    """What one commit takes."""

    __slots__ = ("entries", "failure", "first_seq", "future", "lines", "shares", "size", "written_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, first_seq: int, written_at: bytes) -> None:
        self.first_seq = first_seq
        self.written_at = written_at
        self.lines: list[bytes] = []
        self.shares: dict[TopicState, Share] = {}
        self.entries: list[IndexEntry] = []
        self.size = 0
        self.failure: Callable[[], TidingsError] | None = None
        self.future: asyncio.Future[None] = loop.create_future()

    @property
    def last_seq(self) -> int:
        """The seq of the last event in it."""
        return self.first_seq + len(self.lines) - 1

    async def wait(self) -> None:
        """Wait until the batch is committed; raise if it was not."""
        try:
            await self.future
        except asyncio.CancelledError:
            await self.wait_on()
        if self.failure is not None:
            raise self.failure()

    async def wait_on(self) -> None:
        """Wait on after the future was cancelled: for this waiter, or for another."""
        task = asyncio.current_task()
        while task is None or not task.cancelling():
            # Another waiter was cancelled, and the future with it.
            if self.future.cancelled():
                self.future = self.future.get_loop().create_future()
            try:
                await self.future
            except asyncio.CancelledError:
                continue
            return
        raise asyncio.CancelledError

    def finish(self, failure: Callable[[], TidingsError] | None = None) -> None:
        """Tell all who wait."""
        self.failure = failure
        if self.future.done():  # cancelled by a waiter in this very tick
            self.future = self.future.get_loop().create_future()
        self.future.set_result(None)
