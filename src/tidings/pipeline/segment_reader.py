"""
The lines of byte ranges of segments, checked: what a task does with its part of the log before anything is made of them.

A sealed segment is checked as a whole against the digest in its seal, which costs a tenth of checking line by line; the open
ones, and a sealed one that fails, are checked line by line.

Runs on executors: no Spark, no loop, no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from tidings.log.segment import HEAD_BYTES_MAX, head_of

from .line_conversion import BadLine, event_tables, flawed_lines
from .log_place import LogPlace
from .source import SegmentRange


class MisplacedLine(NamedTuple):
    """A line that is no record, and where it stands."""

    path: str
    """Of its segment, relative to the folder of the segments."""
    byte_offset: int
    topic: str
    line: BadLine


class _Part(NamedTuple):
    begin: int
    """Where the part begins in the joined data."""
    source: SegmentRange
    byte_offset: int
    """Which byte of the segment that is."""


@dataclass(frozen=True, slots=True)
class RangeLines:
    """The whole lines of some ranges, and those among them that were found to be damaged."""

    data: bytes
    parts: Sequence[_Part]
    damaged: Sequence[MisplacedLine]

    def tables(self, *, memory_mb: int) -> Iterator[tuple[pa.Table, list[MisplacedLine]]]:
        """The records as tables in the columns of bronze, and beside each table the lines that are no records."""
        for table, bad in event_tables(self.data, memory_mb=memory_mb):
            yield table, [self._placed(line) for line in bad]

    def _placed(self, line: BadLine) -> MisplacedLine:
        part = next(part for part in reversed(self.parts) if part.begin <= line.at)
        at = part.byte_offset + line.at - part.begin
        return MisplacedLine(part.source.path, at, part.source.topic, line)


def read_ranges(place: LogPlace, ranges: Iterable[SegmentRange], since: int, until: int) -> RangeLines:
    """
    Read and check the lines of ranges that are after ``since`` and not after ``until``.

    Raises:
        SegmentMissing: A segment was dropped since the ranges were planned.
    """
    pieces: list[bytes] = []
    parts: list[_Part] = []
    damaged: list[MisplacedLine] = []
    total = 0
    for each in ranges:
        with place.open(each.path) as file:
            start, data, is_checked = _within(*_read_slice(file, each), since, until)
        flawed = [] if is_checked else flawed_lines(data)
        damaged += [MisplacedLine(each.path, start + line.at, each.topic, line) for line in flawed]
        for begin, piece in _around(data, flawed):
            pieces.append(piece)
            parts.append(_Part(total, each, start + begin))
            total += len(piece)
    return RangeLines(pieces[0] if len(pieces) == 1 else b"".join(pieces), parts, damaged)


def _read_slice(file: IO[bytes], each: SegmentRange) -> tuple[int, bytes, bool]:
    """The lines of a slice, the byte where they begin, and whether they passed the check of their whole segment."""
    # Reading the whole segment is worth it unless the slice is a small part of it.
    if each.sha256 is None or each.file_bytes > 2 * each.size:
        start, data = _read_range(file, each.start, each.end)
        return start, data, False
    whole = _read_all(file, each.file_bytes)
    is_checked = hashlib.sha256(whole).hexdigest() == each.sha256
    start, end = _aligned(whole, each.start, each.end)
    return start, whole if (start, end) == (0, len(whole)) else whole[start:end], is_checked


def _read_all(file: IO[bytes], size: int) -> bytes:
    parts = []
    while size > 0 and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _aligned(data: bytes, start: int, end: int) -> tuple[int, int]:
    """The same range, moved to where lines begin: a line belongs to the range that its first byte is in."""
    return _line_start(data, start), _line_start(data, min(end, len(data)))


def _line_start(data: bytes, at: int) -> int:
    if at == 0 or at >= len(data):
        return min(at, len(data))
    found = data.find(b"\n", at - 1)
    return len(data) if found < 0 else found + 1


def _read_range(file: IO[bytes], start: int, end: int) -> tuple[int, bytes]:
    """The lines that begin in a range of a file's bytes."""
    begin = max(0, start - 1)
    file.seek(begin)
    data = _read_all(file, end - begin)
    # The last line may go on behind the range.
    while data and not data.endswith(b"\n") and (more := file.read(1 << 16)):
        found = more.find(b"\n")
        data += more if found < 0 else more[: found + 1]
    first = _line_start(data, start - begin)
    last = data.rfind(b"\n") + 1
    return begin + first, data[first:last]


def _within(start: int, data: bytes, is_checked: bool, since: int, until: int) -> tuple[int, bytes, bool]:
    """Of lines in the order of their seqs, those after ``since`` and up to ``until``."""
    if not data:
        return start, data, True
    first, last = head_of(data[:HEAD_BYTES_MAX]), head_of(_last_line(data)[:HEAD_BYTES_MAX])
    if first is not None and last is not None:
        if since < first.seq and last.seq <= until:
            return start, data, is_checked
        if last.seq <= since or first.seq > until:
            return start, b"", True
    begin, end, at = len(data), 0, 0
    for line in data.split(b"\n")[:-1]:
        head = head_of(line[:HEAD_BYTES_MAX])
        after = at + len(line) + 1
        # A line without a place goes with those around it: it is quarantined with the record before or after it.
        is_wanted = begin < len(data) or at == 0 if head is None else since < head.seq <= until
        if is_wanted:
            begin, end = min(begin, at), after
        elif head is not None and head.seq <= since:
            begin = len(data)
        elif head is not None and head.seq > until:
            break
        at = after
    return start + begin, data[begin:end], is_checked


def _last_line(data: bytes) -> bytes:
    return data[data.rfind(b"\n", 0, len(data) - 1) + 1 :]


def _around(data: bytes, flawed: list[BadLine]) -> Iterator[tuple[int, bytes]]:
    """What is left of the data without the flawed lines, each part with where it begins."""
    at = 0
    for line in flawed:
        if line.at > at:
            yield at, data[at : line.at]
        at = line.at + len(line.data) + 1
    if at < len(data):
        yield at, data[at:]
