"""
The reserve: room that is kept back for work that saves progress or frees space.

``.bus/reserve`` is a file that holds nothing but its place on the disk. Where such work finds the disk full, part of the file is cut
off and the work is done again: cursors, dead letters, seals, checkpoints, the ids of dropped records, the index, audit records.
Publishing gets nothing of it: while the reserve is not whole the log says that the disk is full, and it is made whole again before
events are accepted.

Any part of a process that has the workspace may use the reserve. In one process all ``Reserve`` objects of a path share one lock
and one account; between processes the file itself is locked. The file is only ever cut shorter, or allocated from its start: its
length never promises room that the disk does not hold.

``SegmentRoom`` keeps the promise that each acknowledged commit can be moved from the journal to the segments, whatever happens to the
disk: room for it is there before the commit is made, in the reserve or in a second file, ``.bus/room``.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from ..errors import StorageFull
from .disk import Disk, DiskSpace, File, FileRoom, FolderLock, Threads, is_full

_T = TypeVar("_T")
KEPT_FROM_LETTERS: Final = 7 / 8
"""Dead letters are as many and as large as events: they get the first eighth, and wait for room when that is used."""
KEPT_FROM_RECORDS: Final = 6 / 8
"""Records that may use the reserve come again and again too: they get the next eighth, and are refused when that is used."""
KEPT_FROM_SEGMENTS: Final = 2 / 8
"""What the journal holds gets one half."""
KEPT_FROM_INDEX: Final = 1 / 8
"""The index, and the ids of dropped records, get all but the last eighth, which is for what is small."""
_STEP_BYTES: Final = 64 << 10
"""Given up beside what a write asks for: a name, and a file's own bookkeeping, take room too."""
_GROW_BYTES: Final = 1 << 20
_FREE_FILES_MIN: Final = 16
"""New segments are refused below this number of free files: checkpoints and cursors need one each."""


def out_of_room(disk: Disk, path: Path, purpose: str, size: int, hint: str | None = None) -> StorageFull:
    """The error that names what room is missing for, and how much the file system has."""
    space = disk.space(path.parent)
    problem = f"{purpose} takes {size:,} bytes more; {space.free_bytes:,} of {space.total_bytes:,} are free"
    return StorageFull(str(path), problem) if hint is None else StorageFull(str(path), problem, hint)


def out_of_files(folder: Path, free_files: int) -> StorageFull:
    """The error for a file system that has room, and can hold no more files."""
    problem = f"the file system can hold only {free_files} more files (inodes)"
    return StorageFull(str(folder), problem, "remove files that are not needed; room alone does not help")


class _Account:
    """What all ``Reserve`` objects of one file in one process share."""

    __slots__ = ("__weakref__", "largest_bytes", "left_bytes", "lock", "threads", "whole")

    def __init__(self, threads: Threads) -> None:
        self.threads = threads  # kept alive: its identity is part of the key
        self.lock = threads.lock()
        self.left_bytes = 0
        self.largest_bytes = 0
        self.whole: FileRoom | None = None
        """The file after it was last made whole."""


_ACCOUNTS: Final[WeakValueDictionary[tuple[int, str], _Account]] = WeakValueDictionary()
_ACCOUNTS_LOCK: Final = threading.Lock()


def _account_of(disk: Disk, path: Path) -> _Account:
    key = (id(disk.threads), os.path.realpath(path))
    with _ACCOUNTS_LOCK:
        account = _ACCOUNTS.get(key)
        if account is None:
            account = _ACCOUNTS[key] = _Account(disk.threads)
        return account


class Reserve:
    """
    The reserve of one workspace. Its methods block, and may be called from several threads.

    Args:
        disk, path: Where it is.
        keeps: This share of it is not given up here: it is for others. It is a share of the largest size that was found here, so
            a reserve that there was no room to make whole is shared out too.
        first: A reserve that is given up before this one.
    """

    def __init__(self, disk: Disk, path: Path, *, keeps: float = 0.0, first: Reserve | None = None) -> None:
        self._disk = disk
        self._keeps = keeps
        self._first = first
        self._account = _account_of(disk, path)
        self.path = path

    @property
    def left_bytes(self) -> int:
        """The room left in it when this process last looked."""
        return self._account.left_bytes

    def run(self, job: Callable[[], _T], size: int = 0) -> _T:
        """
        Do a job that may be done again; for as long as it finds the disk full, with room from the reserve.

        Args:
            job: What to do.
            size: How many bytes it wants to write, if that is known.

        Raises:
            OSError: The job's own error; one that says the disk is full if the reserve is used up or cannot help.
        """
        while True:
            try:
                return job()
            except OSError as error:
                if not is_full(error) or self._is_out_of_files(error, size) or not self._give_up(size + _STEP_BYTES):
                    raise

    def _is_out_of_files(self, error: OSError, size: int) -> bool:
        """Whether what is missing is not room but one more file (an inode), which no room can replace."""
        if error.errno != errno.ENOSPC:
            return False
        space = self._disk.space(self.path.parent)
        return space.free_files == 0 and space.free_bytes >= size + _STEP_BYTES

    def is_used_up(self) -> bool:
        """Whether less is left than is kept for others."""
        with self._account.lock:
            left, keeps_bytes = self._look()
            return left < keeps_bytes

    def look(self) -> None:
        """Look how much is left."""
        with self._account.lock:
            self._look()

    def for_segments(self) -> int:
        """The room left that nothing but segments can use up, as this process last saw it."""
        left, largest = self._account.left_bytes, self._account.largest_bytes
        return max(0, min(left, int(largest * KEPT_FROM_RECORDS)) - int(largest * KEPT_FROM_SEGMENTS))

    def _look(self) -> tuple[int, int]:
        """Return how many bytes are left, and how many of them are kept for others."""
        account, room = self._account, self._disk.room_of(self.path)
        left = account.left_bytes = 0 if room is None else min(room)
        account.largest_bytes = max(account.largest_bytes, left)
        return left, int(account.largest_bytes * self._keeps)

    def _give_up(self, size: int) -> bool:
        """Cut off that many bytes, or what is left; whether there was anything to cut."""
        if self._first is not None and self._first._give_up(size):
            return True
        with self._account.lock:
            if self._look()[0] == 0:
                return False
            file = self._disk.open(self.path, write=True)
            try:
                with self._disk.exclusive(self.path):
                    left, keeps_bytes = self._look()  # another process may have cut it meanwhile
                    if left <= keeps_bytes:
                        return False
                    file.truncate(max(keeps_bytes, left - size))
                    file.sync()
                    self._look()
            finally:
                file.close()
            return True

    def make_whole(self, size: int) -> bool:
        """Have the file hold ``size`` bytes again, as far as there is room; whether it does."""
        account = self._account
        with account.lock:
            room = self._disk.room_of(self.path)
            if room is None and not size:
                return True
            # Less room than there was after the last allocation: the file has holes. (More than that cannot be asked for: a file
            # system that compresses holds next to nothing for zeros.)
            if account.whole is not None and room is not None and room.length == size == account.whole.length:
                if room.allocated_bytes >= account.whole.allocated_bytes:
                    return True
                account.whole = None
            try:
                self._resize(size)
            except OSError as error:
                if not is_full(error):
                    raise
                account.whole = None
                self._look()
                return False
            account.whole = self._disk.room_of(self.path)
            account.largest_bytes = 0
            self._look()
            return True

    def _resize(self, size: int) -> None:
        file = self._disk.open(self.path, create=True)
        try:
            with self._disk.exclusive(self.path):
                held = file.size()
                if held > size:
                    file.truncate(size)
                    held = size
                if size:
                    _allocate(file, held, size)
                file.sync()
        finally:
            file.close()
        self._disk.sync_folder(self.path.parent)


def _allocate(file: File, held: int, size: int) -> None:
    """Allocate a file of ``held`` bytes up to ``size``; where there is no room for that, as far as there is."""
    try:
        file.allocate(size)
    except OSError as error:
        if not is_full(error):
            raise
        while held < size:
            held = min(size, held + _GROW_BYTES)
            file.allocate(held)
        if held == size:
            file.allocate(size)


class SegmentRoom:
    """
    Promises room in the segments to commits, before they are acknowledged.

    What was promised and is not written yet is at most what the reserve has for segments, and ``.bus/room`` beside it. Used by
    several threads.

    Args:
        disk, path: Where the second file is.
        reserve: The reserve.
        owed: Promised already.
    """

    def __init__(self, disk: Disk, path: Path, reserve: Reserve, *, owed: int = 0) -> None:
        self._disk = disk
        self._reserve = reserve
        self._extra = Reserve(disk, path)
        self._lock = disk.threads.lock()
        self._promised = self._peak = owed
        if not owed:
            self.remove()
        self._extra.look()

    def promise(self, size: int, files: int) -> None:
        """
        Set room aside for ``size`` bytes, in whole blocks, and for ``files`` new files.

        Raises:
            StorageFull: There is none; nothing is promised.
        """
        if files:
            free_files = self._disk.space(self._extra.path.parent).free_files
            if free_files is not None and free_files < files + _FREE_FILES_MIN:
                raise out_of_files(self._extra.path.parent, free_files)
        with self._lock:
            missing = self._promised + size - self._reserve.for_segments()
            held = self._extra.left_bytes
            if missing > held and not self._grow(missing, held):
                raise out_of_room(self._disk, self._extra.path, "moving the journal to the segments", missing - held)
            self._promised += size
            self._peak = max(self._peak, self._promised)

    def _grow(self, size: int, held: int) -> bool:
        step = _GROW_BYTES if size >= _GROW_BYTES else _STEP_BYTES
        block = self._disk.space(self._extra.path.parent).block_bytes
        for unit in dict.fromkeys((min(step, step * block), block)):
            if self._extra.make_whole(-(-size // unit) * unit):
                return True
        self._extra.make_whole(held)
        return False

    def settle(self, size: int) -> None:
        """Note that lines of so many bytes are in the segments, or will never be."""
        with self._lock:
            self._promised -= size

    def give_back(self, *, is_tight: bool = False) -> bool:
        """
        Release what no promise has needed since the last call; with ``is_tight`` all that none needs now.

        Returns:
            Whether there is more free room on the disk.
        """
        with self._lock:
            held, spare = self._extra.left_bytes, self._reserve.for_segments()
            needed = max(0, (self._promised if is_tight else self._peak) - spare)
            self._peak = self._promised
            if not held or needed > held // 2:
                return False
            return self._extra.make_whole(needed)

    def remove(self) -> None:
        """Release everything: nothing is promised any more."""
        with self._lock:
            self._promised = self._peak = 0
            if self._disk.exists(self._extra.path):
                self._disk.remove(self._extra.path)
            self._extra.look()


class _ReserveFile:
    """A file whose writes may have room from the reserve."""

    __slots__ = ("_reserve", "inner")

    def __init__(self, file: File, reserve: Reserve) -> None:
        self.inner = file
        self._reserve = reserve

    def read(self, byte_offset: int, size: int) -> bytes:
        return self.inner.read(byte_offset, size)

    def write(self, byte_offset: int, data: bytes) -> None:
        self._reserve.run(lambda: self.inner.write(byte_offset, data), len(data))

    def allocate(self, size: int) -> None:
        self._reserve.run(lambda: self.inner.allocate(size), size)

    def size(self) -> int:
        return self.inner.size()

    def truncate(self, size: int) -> None:
        self.inner.truncate(size)

    def sync(self) -> None:
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()


class ReserveDisk:
    """
    A disk for the work that the reserve is for. (Removing and syncing ask for no room.)

    Args:
        disk: The disk itself.
        reserve: What is given up where that is full.
    """

    def __init__(self, disk: Disk, reserve: Reserve) -> None:
        self.inner = disk
        self._reserve = reserve

    @property
    def threads(self) -> Threads:
        return self.inner.threads

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        if not create and not write:
            return self.inner.open(path)
        return _ReserveFile(self._reserve.run(lambda: self.inner.open(path, create=create, write=write)), self._reserve)

    def names(self, folder: Path) -> list[str]:
        return self.inner.names(folder)

    def exists(self, path: Path) -> bool:
        return self.inner.exists(path)

    def make_folder(self, path: Path) -> None:
        self._reserve.run(lambda: self.inner.make_folder(path))

    def rename(self, source: Path, target: Path) -> None:
        self._reserve.run(lambda: self.inner.rename(source, target))

    def remove(self, path: Path) -> None:
        self.inner.remove(path)

    def sync_files(self, files: Sequence[File]) -> None:
        self.inner.sync_files([file.inner if isinstance(file, _ReserveFile) else file for file in files])

    def sync_folder(self, folder: Path) -> None:
        self.inner.sync_folder(folder)

    def lock(self, path: Path, *, shared: bool = False) -> FolderLock | str:
        return self.inner.lock(path, shared=shared)

    def exclusive(self, path: Path) -> AbstractContextManager[object]:
        return self.inner.exclusive(path)

    def room_of(self, path: Path) -> FileRoom | None:
        return self.inner.room_of(path)

    def space(self, path: Path) -> DiskSpace:
        return self.inner.space(path)
