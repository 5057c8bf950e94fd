"""
Where a log is read: a workspace of this machine, beside whoever writes it, or a copy of one in an object store.

A copy is the folder ``.bus`` of a workspace, or as much of it as reading needs: ``meta.json``, ``checkpoint.json``, ``seals`` and
``wal``. It is read as it is; nothing is written to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from tidings.log.embedded.disk import Disk, File, OsDisk
from tidings.log.embedded.inspect import read_checkpoint
from tidings.log.embedded.layout import Layout

from .errors import SegmentMissing
from .storage import Storage


@dataclass(frozen=True, slots=True)
class LogPlace:
    """A log's place; it can be sent to Spark's executors."""

    storage: Storage
    """The workspace."""

    @property
    def layout(self) -> Layout:
        """The paths of the log, for ``disk``."""
        return Layout(self.storage.path if self.storage.is_local else "/")

    @property
    def disk(self) -> Disk:
        """How the log's files are read here."""
        return OsDisk() if self.storage.is_local else _StorageDisk(self.storage)

    def open(self, segment: str) -> IO[bytes]:
        """
        A segment, by its path relative to the folder of the segments.

        Raises:
            SegmentMissing: It is not there.
        """
        path = self.layout.wal / segment
        try:
            if self.storage.is_local:
                return path.open("rb", buffering=0)
            found: IO[bytes] = self.storage.filesystem().open_input_file(_name(path))
            return found
        except FileNotFoundError:
            raise SegmentMissing(segment) from None

    def check_copy(self) -> None:
        """
        Make sure that a copy holds what its checkpoint speaks of: the files may have been copied at different moments.

        Raises:
            SegmentMissing: An open segment is not there, or shorter than it must be.
        """
        if self.storage.is_local:
            return
        layout, disk = self.layout, self.disk
        streams = read_checkpoint(disk, layout).streams
        for key in layout.segments(disk):
            if (mark := streams.pop(key.path, None)) is None or not mark.bytes:
                continue
            path = layout.segment(key, mark.segment)
            if not disk.exists(path) or disk.open(path).size() < mark.bytes:
                raise SegmentMissing(_name(path))
        if missing := sorted(path for path, mark in streams.items() if mark.bytes):
            raise SegmentMissing(missing[0])


def _name(path: Path) -> str:
    return str(PurePosixPath(path).relative_to("/"))


class _StorageDisk(OsDisk):
    """The reading half of a disk, over a storage whose root is ``/``."""

    __slots__ = ("_files",)

    def __init__(self, storage: Storage) -> None:
        self._files = storage.filesystem()

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        if create or write:
            raise PermissionError(f"{path}: a copy of a log is only read")
        return _StorageFile(self._files.open_input_file(_name(path)))

    def names(self, folder: Path) -> list[str]:
        from pyarrow.fs import FileSelector  # type: ignore[import-untyped]

        return sorted(
            each.base_name for each in self._files.get_file_info(FileSelector(_name(folder), allow_not_found=True))
        )

    def exists(self, path: Path) -> bool:
        return bool(self._files.get_file_info(_name(path)).is_file)


class _StorageFile:
    """An open file of a storage, as the log reads its own."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, byte_offset: int, size: int) -> bytes:
        return bytes(self._file.read_at(size, byte_offset))

    def size(self) -> int:
        return int(self._file.size())

    def close(self) -> None:
        self._file.close()

    def write(self, byte_offset: int, data: bytes) -> None:
        raise PermissionError("a copy of a log is only read")

    def allocate(self, size: int) -> None:
        raise PermissionError("a copy of a log is only read")

    def truncate(self, size: int) -> None:
        raise PermissionError("a copy of a log is only read")

    def sync(self) -> None:
        """Nothing was written."""
