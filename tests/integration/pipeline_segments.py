"""Very many segments of one record each, made in little time; and a disk that counts what is read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.embedded.disk import File, OsDisk
from tidings.log.embedded.index import MemoryIndex
from tidings.log.embedded.layout import Layout, StreamKey
from tidings.log.embedded.segment_writer import SegmentWriter
from tidings.log.embedded.state import Stream
from tidings.log.segment import Head, encode_line
from tidings.log.settings import LogSettings

__all__ = ["CountingDisk", "fill_tiny_segments"]

_LOT = 500
_TIME = "2026-11-15T10:00:00.000000Z"


class _Wrapped:
    """A file, with one thing about it that is different."""

    def __init__(self, file: File, disk: CountingDisk | None = None) -> None:
        self._file = file
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Counted(_Wrapped):
    def read(self, at: int, size: int) -> bytes:
        data = self._file.read(at, size)
        assert self._disk is not None
        self._disk.bytes += len(data)
        return data


class _Unsynced(_Wrapped):
    def sync(self) -> None:
        """Nobody waits."""


class CountingDisk(OsDisk):
    """Counts what is opened and how much is read."""

    __slots__ = ("bytes", "opened")

    def __init__(self) -> None:
        self.opened = 0
        self.bytes = 0

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        """As any disk does."""
        self.opened += 1
        counted: Any = _Counted(super().open(path, create=create, write=write), self)
        file: File = counted
        return file


class _HastyDisk(OsDisk):
    """Never waits for the disk: twenty thousand seals would take minutes."""

    __slots__ = ()

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        unsynced: Any = _Unsynced(super().open(path, create=create, write=write))
        file: File = unsynced
        return file

    def sync_folder(self, folder: Path) -> None:
        pass


def fill_tiny_segments(workspace: Path, count: int) -> None:
    """Make a log of so many segments with one record each."""
    layout, disk, settings = Layout(workspace), _HastyDisk(), LogSettings()
    disk.make_folder(layout.root)
    layout.create(disk, SYSTEM_CLOCK, "flat")
    segment_writer = SegmentWriter(disk, layout, MemoryIndex())
    stream = Stream(StreamKey("tiny"), lines_max=1, bytes_max=settings.segment_bytes_max)
    try:
        for first in range(1, count + 1, _LOT):
            seqs = range(first, min(first + _LOT, count + 1))
            lines = [_line(seq) for seq in seqs]
            heads = [Head(seq - 1, seq, _TIME) for seq in (seqs[0], seqs[-1])]
            segment_writer.write(stream.place(lines, sum(map(len, lines)), heads[0], heads[1]))
        segment_writer.checkpoint(count)
    finally:
        segment_writer.close()


def _line(seq: int) -> bytes:
    time = _TIME.encode()
    return encode_line(
        b'"offset":%d,"seq":%d,"meta":{"written_at":"%b","topic":"tiny","type":"MADE","space_id":"s","event_id":"t%d",'
        b'"ts":"%b"},"payload":{}}' % (seq - 1, seq, time, seq, time)
    )
