"""
Who still needs records of the log: groups that have not acknowledged them, and dead letters that do not hold their event.

One answer for all who drop segments: compaction, the node's retention and ``tidings log retention``, when they plan and again
when they drop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from tidings.log.embedded.disk import Disk
from tidings.log.retention import Needs

from .cursor_keeper import in_thread
from .dead_letters import DeadLetterStore
from .offsets import OffsetStore

__all__ = ["BusHolders"]


class BusHolders:
    """
    The groups and dead letters of one workspace, as ``Log.drop`` asks for them.

    Args:
        disk: Where they are.
        offsets: The groups' places.
        letters: Their dead letters.
        moving: Held by whoever creates a group or sets its place: what is needed grows under this lock only.
        flush: Stores how far running groups have come.
    """

    def __init__(
        self,
        disk: Disk,
        offsets: OffsetStore,
        letters: DeadLetterStore,
        *,
        moving: asyncio.Lock | None = None,
        flush: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._disk = disk
        self._offsets = offsets
        self._letters = letters
        self._moving = moving or asyncio.Lock()
        self._flush = flush

    async def needs(self) -> Needs:
        """Who needs what of all topics now, to plan with."""
        if self._flush is not None:
            await self._flush()
        return await in_thread(self._disk, lambda: self._look(None))

    @contextlib.asynccontextmanager
    async def needs_of(self, topic: str) -> AsyncIterator[Needs]:
        """Who needs what of a topic; while the context is open nobody begins to need more."""

        def look() -> Needs:
            needs = self._look(topic)
            self._offsets.sync_names()  # a power cut must not take groups back behind what is dropped because of this
            return needs

        async with self._moving:
            yield await in_thread(self._disk, look)

    def _look(self, topic: str | None) -> Needs:
        # Groups before letters. A letter is on the disk before its group passes the event; the other way round, a letter
        # that is written between the two looks would be missed, and its group already be past the event.
        groups = self._offsets.acknowledged(topic)
        topics = self._letters.topics() if topic is None else [topic]
        return Needs(groups, {each: self._letters.needed(each) for each in topics})
