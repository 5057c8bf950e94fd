"""
Checkpoint and seals: what is known about the segments without reading them.

The checkpoint says up to which seq the segments are on disk, and how long each stream's open segment
was then. It is written after those files were synced and before a journal file is used again. The seals
are lines, one a sealed segment, each with the segment's SHA-256 and a digest over that and the digest
before: altering, removing or swapping a sealed segment breaks the chain from there on. A segment that
retention dropped keeps its seal, and a line that says it was dropped.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from ..segment import Head, encode_line, whole_end
from .disk import Disk, File, replace_file, sync_for_good
from .layout import Layout, StreamKey
from .state import Segment

CHAIN_START: Final = "0" * 64


class StreamMark(msgspec.Struct, frozen=True):
    """A stream's open segment at the checkpoint, and how many of its bytes were on disk."""

    segment: int
    bytes: int


class Checkpoint(msgspec.Struct, frozen=True):
    """Up to ``seq`` everything is in the segments and on disk."""

    seq: int
    streams: dict[str, StreamMark]


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """One sealed segment, without reading it."""

    segment: int
    first_offset: int
    last_offset: int
    first_seq: int
    last_seq: int
    first_written_at: str
    last_written_at: str
    lines: int
    bytes: int
    sha256: str
    chain: str
    partitions: dict[str, int] = {}

    @property
    def first(self) -> Head:
        """Its first record."""
        return Head(self.first_offset, self.first_seq, self.first_written_at)

    @property
    def last(self) -> Head:
        """Its last record."""
        return Head(self.last_offset, self.last_seq, self.last_written_at)

    def to_segment(self) -> Segment:
        """The segment's bounds as the engine keeps them."""
        segment = Segment(self.segment)
        segment.grow(self.lines, self.bytes, self.first, self.last, ())
        segment.flushed_bytes = self.bytes
        segment.is_sealed = True
        segment.digest = self.chain
        segment.partitions = dict(self.partitions)
        return segment


class _Dropped(msgspec.Struct, frozen=True):
    dropped: int


def chained(previous: str, sha256: str) -> str:
    """The digest that ties a segment to all before it."""
    return hashlib.sha256(f"{previous}:{sha256}".encode()).hexdigest()


def make_seal(
    number: int,
    first: Head,
    last: Head,
    *,
    lines: int,
    size: int,
    sha256: str,
    chain: str = "",
    partitions: dict[str, int] | None = None,
) -> Seal:
    """The seal of a segment that begins and ends with these records."""
    return Seal(
        segment=number,
        first_offset=first.offset,
        last_offset=last.offset,
        first_seq=first.seq,
        last_seq=last.seq,
        first_written_at=first.written_at,
        last_written_at=last.written_at,
        lines=lines,
        bytes=size,
        sha256=sha256,
        chain=chain,
        partitions=partitions or {},
    )


def encode_seal(segment: Segment, sha256: str, previous: str) -> tuple[bytes, str]:
    """The line that seals a segment, and its digest in the chain."""
    chain = chained(previous, sha256)
    seal = make_seal(
        segment.number,
        Head(segment.first_offset, segment.first_seq, segment.first_written_at),
        Head(segment.last_offset, segment.last_seq, segment.last_written_at),
        lines=segment.lines,
        size=segment.size_bytes,
        sha256=sha256,
        chain=chain,
        partitions=segment.partitions,
    )
    return encode_line(msgspec.json.encode(seal)[1:]), chain


def encode_segment_drop(number: int) -> bytes:
    """The line that says a sealed segment was dropped on purpose."""
    return encode_line(msgspec.json.encode(_Dropped(number))[1:])


def append_seal_line(disk: Disk, layout: Layout, key: StreamKey, line: bytes) -> None:
    """Add a line to a stream's seals, on disk when this returns."""
    path = layout.seal_file(key)
    if not disk.exists(path):
        disk.make_folder(path.parent)
    file = disk.open(path, create=True)
    try:
        at = _append_whole(file, line)
        sync_for_good(disk, [file], path)
    finally:
        file.close()
    if at == 0:
        disk.sync_folder(path.parent)
        disk.sync_folder(layout.seals)


def _append_whole(file: File, line: bytes) -> int:
    """Append after the last whole line (a crash may have left part of one); where it begins."""
    size = file.size()
    data = file.read(0, size)
    end = whole_end(data)
    if end < size:
        file.truncate(end)
    # A try that failed after writing left the line itself: then it is written again, in its place.
    at = end - len(line) if data[:end].endswith(line) else end
    file.write(at, line)
    return at


def renew_last_seal_line(disk: Disk, layout: Layout, key: StreamKey) -> None:
    """Write a stream's last seal line again and sync it: after a failed sync the disk may never have got it."""
    path = layout.seal_file(key)
    file = disk.open(path, write=True)
    try:
        data = file.read(0, file.size())
        end = whole_end(data)
        begin = data.rfind(b"\n", 0, max(0, end - 1)) + 1
        file.write(begin, data[begin:end])
        sync_for_good(disk, [file], path)
    finally:
        file.close()


def save_checkpoint(disk: Disk, layout: Layout, seq: int, streams: dict[StreamKey, tuple[int, int]]) -> None:
    """Write the checkpoint; the files it speaks of are on disk already."""
    marks = {key.path: StreamMark(segment, size) for key, (segment, size) in streams.items()}
    replace_file(disk, layout.checkpoint, encode_line(msgspec.json.encode(Checkpoint(seq, marks))[1:]))
