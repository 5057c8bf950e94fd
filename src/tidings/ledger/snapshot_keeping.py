"""
When snapshots of the ledger's state are taken, and which are kept.

One is due when so many records have come since the last. It is stored by a task of its own while commands go on: what it holds was
frozen before. A snapshot that cannot be stored costs nothing but a longer opening, so it is tried again later. The last ``KEPT`` stay.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from .snapshots import KEPT, FrozenPart, SnapshotHeader, SnapshotStore, blocks_of

logger = logging.getLogger(__name__)

_CLOSING_RECORDS_MAX: Final = 1000
"""A ledger that is closed with more records than this since the last snapshot takes one; one that never had any, in any case."""


class SnapshotKeeper:
    """
    The snapshots of one ledger.

    Args:
        store: Where they are kept.
        records_max: With so many records since the last one, the next is due.
    """

    def __init__(self, store: SnapshotStore, *, records_max: int) -> None:
        self.store = store
        self._records_max = records_max
        self._offsets: tuple[int, ...] = ()
        """The last record that each one covers, the newest first."""
        self._due_at = records_max
        self._one_at_a_time = asyncio.Lock()
        self._saving: asyncio.Task[None] | None = None

    def found(self, offsets: Sequence[int]) -> None:
        """Go on from the snapshots that recovery could use, the newest first."""
        self._offsets = tuple(offsets)
        self._due_at = self.covered_offset + self._records_max

    def undisturbed(self) -> AbstractAsyncContextManager[None]:
        """While this is open no snapshot is stored, and none is removed."""
        return self._one_at_a_time

    @property
    def covered_offset(self) -> int:
        """The offset of the last record that the newest one covers; -1 if there is none."""
        return self._offsets[0] if self._offsets else -1

    @property
    def released_offset(self) -> int:
        """The offset up to which every snapshot that should be there covers the records; -1 if there are too few."""
        return self._offsets[-1] if len(self._offsets) == KEPT else -1

    def is_due(self, next_offset: int) -> bool:
        """Whether it is time for another one, and none is under way."""
        return next_offset >= self._due_at and self._saving is None

    def is_worth_closing(self, next_offset: int) -> bool:
        """Whether a ledger that is closed now would open much later without another one."""
        records_max = _CLOSING_RECORDS_MAX if self._offsets else 0
        return next_offset > self.covered_offset + 1 + records_max

    def begin(self, header: SnapshotHeader, frozen: list[FrozenPart]) -> None:
        """Store one in the background."""
        self._due_at = header.offset + 1 + self._records_max
        self._saving = asyncio.get_running_loop().create_task(self._try_to_save(header, frozen), name="ledger snapshot")

    async def save(self, header: SnapshotHeader, frozen: list[FrozenPart]) -> None:
        """
        Store one, unless a newer one is there, and remove those that are no longer kept.

        Raises:
            OSError: It could not be stored.
        """
        async with self._one_at_a_time:
            if header.offset <= self.covered_offset:
                return
            kept = (header.offset, *self._offsets)[:KEPT]
            await self.store.run(functools.partial(_replace, self.store, header, frozen, kept))
            self._offsets = kept

    async def finished(self) -> None:
        """Wait for the one that is under way, if one is."""
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)

    async def _try_to_save(self, header: SnapshotHeader, frozen: list[FrozenPart]) -> None:
        try:
            await self.save(header, frozen)
        except OSError as error:
            logger.warning("no snapshot of the ledger could be stored; it is tried again later: %s", error)
        except Exception:
            logger.exception("no snapshot of the ledger could be made; it is tried again later")
        finally:
            self._saving = None


def _replace(store: SnapshotStore, header: SnapshotHeader, frozen: list[FrozenPart], kept: tuple[int, ...]) -> None:
    store.save(header.offset, blocks_of(header, frozen))
    for offset in store.offsets():
        if offset not in kept:
            store.remove(offset)
