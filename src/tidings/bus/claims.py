"""
Claims: which events are being handled right now, kept where a killed process leaves it.

Each worker has a slot in a small file that is mapped into memory: the offset it is at and the number of the attempt. Writing
it is a store to memory, no system call; the page belongs to the kernel, so it outlives the process. After a crash the slots
name the events that may have caused it, with the attempts they have had; so a handler that kills the process is counted
like any other failure, and its event becomes a dead letter instead of a crash loop.

A power cut may lose the slots. Then nothing was counted for the events in them, which is the safe side: they are tried again.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from tidings.log.embedded.reserve import Reserve

__all__ = ["Claims", "FileClaims", "MemoryClaims", "claims_file"]

_SLOT: Final = struct.Struct("<qI")
"""Offset (-1 when the worker is idle) and attempt."""
_SLOT_BYTES: Final = 16
_IDLE: Final = _SLOT.pack(-1, 0)


def claims_file(folder: Path, topic: str, group: str) -> Path:
    """Where the slots of a group are."""
    return folder / f"{topic}__{group}.slots"


class Claims(Protocol):
    """The slots of one group."""

    def take(self, slot: int, offset: int, attempt: int) -> None:
        """The worker of this slot is about to handle an event."""
        ...

    def taker(self, slot: int) -> Callable[[int, int], object]:
        """``take`` for one slot: what a busy worker calls for every event, with offset and attempt."""
        ...

    def clear(self, slot: int) -> None:
        """The worker of this slot has finished, one way or another."""
        ...

    def left_over(self) -> dict[int, int]:
        """What was being handled when the last process ended: attempts by offset."""
        ...

    def begin(self, slots: int) -> None:
        """Forget what was left over, which the caller has stored, and make so many slots."""
        ...

    def close(self) -> None:
        """All workers have stopped, and have cleared their slots; a slot that is still taken names what stopped its worker."""
        ...


class MemoryClaims:
    """Slots that a simulated world keeps across a simulated crash."""

    def __init__(self, slots: dict[int, tuple[int, int]] | None = None) -> None:
        self.slots: dict[int, tuple[int, int]] = {} if slots is None else slots

    def take(self, slot: int, offset: int, attempt: int) -> None:
        self.slots[slot] = (offset, attempt)

    def taker(self, slot: int) -> Callable[[int, int], object]:
        return functools.partial(self.take, slot)

    def clear(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def left_over(self) -> dict[int, int]:
        return dict(self.slots.values())

    def begin(self, slots: int) -> None:
        self.slots.clear()

    def close(self) -> None:
        pass


class FileClaims:
    """
    Slots in a mapped file.

    Args:
        path: Where.
        reserve: Gives room for it where the disk is full.
    """

    def __init__(self, path: Path, reserve: Reserve | None = None) -> None:
        self._path = path
        self._reserve = reserve
        self._map: mmap.mmap | None = None
        self._pack = _SLOT.pack_into

    def begin(self, slots: int) -> None:
        if self._reserve is None:
            self._make(slots)
        else:
            self._reserve.run(lambda: self._make(slots), slots * _SLOT_BYTES)

    def _make(self, slots: int) -> None:
        self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            # Written out, not truncated to size: a hole in a full file system would kill us at the first store.
            data = _IDLE.ljust(_SLOT_BYTES, b"\0") * slots
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], done)
            os.ftruncate(fd, slots * _SLOT_BYTES)
            self._map = mmap.mmap(fd, slots * _SLOT_BYTES)
        finally:
            os.close(fd)

    def take(self, slot: int, offset: int, attempt: int) -> None:
        assert self._map is not None
        self._pack(self._map, slot * _SLOT_BYTES, offset, attempt)

    def taker(self, slot: int) -> Callable[[int, int], object]:
        assert self._map is not None
        return functools.partial(self._pack, self._map, slot * _SLOT_BYTES)

    def clear(self, slot: int) -> None:
        assert self._map is not None
        self._pack(self._map, slot * _SLOT_BYTES, -1, 0)

    def left_over(self) -> dict[int, int]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        slots = (_SLOT.unpack_from(data, at) for at in range(0, len(data) - _SLOT.size + 1, _SLOT_BYTES))
        return {offset: attempt for offset, attempt in slots if offset >= 0 and attempt > 0}

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
