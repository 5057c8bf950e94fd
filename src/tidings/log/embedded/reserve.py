"""
The reserve: room that is kept back for work that saves progress or frees space.

``.bus/reserve`` is a file that holds nothing but its place on the disk. Where such work finds the disk full, part of the file is cut
off and the work is done again: cursors, dead letters, seals, checkpoints, the ids of dropped records, the index, audit records.
Publishing gets nothing of it: while the reserve is not whole the log says that the disk is full, and it is made whole again before
events are accepted.

The file's length is all there is to know, so every part of a process that has the workspace may use it without telling the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from .disk import Disk, File, FolderLock, Threads, is_full, size_of

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


class Reserve:
    """
    The reserve of one workspace. Its methods block, and may be called from several threads.

    Args:
        disk, path: Where it is.
        keeps: This share of it is not given up here: it is for others. It is a share of the largest size that was found here, so
            a reserve that there was no room to make whole is shared out too.
    """

    def __init__(self, disk: Disk, path: Path, *, keeps: float = 0.0) -> None:
        self._disk = disk
        self._keeps = keeps
        self._largest_bytes = 0
        self._lock = disk.threads.lock()
        self.path = path

    def run(self, job: Callable[[], _T], size: int = 0) -> _T:
        """
        Do a job that may be done again; for as long as it finds the disk full, with room from the reserve.

        Args:
            job: What to do.
            size: How many bytes it wants to write, if that is known.

        Raises:
            OSError: The job's own error; one that says the disk is full if the reserve is used up.
        """
        while True:
            try:
                return job()
            except OSError as error:
                if not is_full(error) or not self._give_up(size + _STEP_BYTES):
                    raise

    def is_used_up(self) -> bool:
        """Whether less is left than is kept for others."""
        with self._lock:
            left, keeps_bytes = self._look()
            return left < keeps_bytes

    def _look(self) -> tuple[int, int]:
        """How many bytes are left, and how many of them are kept for others."""
        left = size_of(self._disk, self.path) or 0
        self._largest_bytes = max(self._largest_bytes, left)
        return left, int(self._largest_bytes * self._keeps)

    def _give_up(self, size: int) -> bool:
        """Cut off that many bytes, or what is left; whether there was anything to cut."""
        with self._lock:
            left, keeps_bytes = self._look()
            if left <= keeps_bytes:
                return False
            file = self._disk.open(self.path, write=True)
            try:
                file.truncate(max(keeps_bytes, left - size))
                file.sync()
            finally:
                file.close()
            return True

    def make_whole(self, size: int) -> bool:
        """Have the file hold ``size`` bytes again, as far as there is room; whether it does."""
        with self._lock:
            held = size_of(self._disk, self.path)
            if held == size or (held is None and not size):
                return True
            try:
                file = self._disk.open(self.path, create=True)
                try:
                    held = file.size()
                    if held > size:
                        file.truncate(size)
                    while held < size:
                        grown = min(size, held + _GROW_BYTES)
                        file.allocate(grown)
                        held = grown
                    file.sync()
                finally:
                    file.close()
                self._disk.sync_folder(self.path.parent)
            except OSError as error:
                if not is_full(error):
                    raise
                return False
            return True


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
