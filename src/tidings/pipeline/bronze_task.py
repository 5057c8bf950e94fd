"""
What one Spark task does for bronze: read byte ranges of segments, check them, write one Parquet file.

A sealed segment is checked as a whole against the digest in its seal, which costs a tenth of checking line by line; the
open ones, and a sealed one that fails, are checked line by line. Whatever a task finds wrong it reports; it raises only
where trying again may help.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tidings.log.segment import HEAD_BYTES_MAX, head_of

from .line_conversion import BadLine, flawed_lines, write_events
from .schemas import QUARANTINE, arrow_schema
from .source import SegmentRange
from .state_files import sync_file
from .table_files import statistics

RESULT_DDL: Final = "kind string, name string, rows bigint, size bigint, modified_ms bigint, stats string, bytes bigint"
_RESULT: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("name", pa.string()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("modified_ms", pa.int64()),
        ("stats", pa.string()),
        ("bytes", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that a task wrote; it is a part of no table yet."""

    kind: str
    """
    ``events`` or ``quarantine``; ``failed`` if the disk would not take it, and then ``stats`` says why; ``missing`` if a
    segment was not there.
    """
    name: str
    rows: int
    size: int
    modified_ms: int
    stats: str
    bytes: int
    """How many bytes of the log went into it."""


@dataclass(frozen=True, slots=True)
class BronzeTask:
    """The work of all tasks of one chunk; each task takes the bundles whose numbers it is given."""

    segments: str
    """The folder of the segments."""
    events: str
    """The folder of the table of events."""
    quarantine: str
    bundles: tuple[tuple[SegmentRange, ...], ...]
    since: int
    until: int
    stem: str
    """How the names of the files begin: no two runs have the same."""
    epoch: str
    found_at_us: int
    memory_mb: int
    line_bytes_max: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For Spark's ``mapInArrow``: from numbers of bundles to descriptions of files."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                written = [_as_row(file) for file in self.convert(number)]
                yield pa.RecordBatch.from_pylist(written, schema=_RESULT)

    def convert(self, number: int) -> list[WrittenFile]:
        """Write one bundle."""
        # A task that Spark tries again, or runs twice, must not write to the file of the other try.
        name = f"{self.stem}-{number:06d}-{os.getpid()}.parquet"
        target = Path(self.events, name)
        try:
            return self._convert(self.bundles[number], target)
        except _Missing as error:
            return [WrittenFile("missing", str(error), 0, 0, 0, "", 0)]
        except OSError as error:
            target.unlink(missing_ok=True)
            problem = getattr(error, "strerror", None) or " ".join(str(error).split())
            return [WrittenFile("failed", str(target), 0, 0, 0, problem[:500], 0)]

    def _convert(self, bundle: tuple[SegmentRange, ...], target: Path) -> list[WrittenFile]:
        parts: list[bytes] = []
        bad: list[tuple[SegmentRange, int, BadLine]] = []
        places: list[tuple[int, SegmentRange, int]] = []
        """Where each part begins in the joined data, and which byte of its segment that is."""
        total = 0
        for each in bundle:
            start, data, is_checked = self._read(each)
            flawed = [] if is_checked else flawed_lines(data)
            bad += [(each, start, line) for line in flawed]
            for part_start, part in _around(data, flawed):
                parts.append(part)
                places.append((total, each, start + part_start))
                total += len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        for line in write_events(data, target, memory_mb=self.memory_mb):
            begin, each, start = next(place for place in reversed(places) if place[0] <= line.at)
            bad.append((each, start, BadLine(line.at - begin, line.data, line.reason)))
        written = [_written("events", target, total)] if target.exists() else []
        if bad:
            written.append(self._write_quarantine(bad, Path(self.quarantine, target.name)))
        return written

    def _read(self, each: SegmentRange) -> tuple[int, bytes, bool]:
        """The lines of a slice that are within the cut, the byte where they begin, and whether they need no more checks."""
        try:
            start, data, is_checked = _read_slice(Path(self.segments, each.path), each)
        except FileNotFoundError:
            raise _Missing(each.path) from None
        return _within(start, data, self.since, self.until, is_checked)

    def _write_quarantine(self, bad: list[tuple[SegmentRange, int, BadLine]], target: Path) -> WrittenFile:
        rows = [
            {
                "file": each.path,
                "byte_offset": start + line.at,
                "topic": each.topic,
                "reason": line.reason,
                "line": BadLine(0, line.data[: self.line_bytes_max], "").text,
                "line_bytes": len(line.data),
                "first_seq": None,
                "last_seq": None,
                "found_at": self.found_at_us,
                "epoch": self.epoch,
            }
            for each, start, line in bad
        ]
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=arrow_schema(QUARANTINE.schema)), target, compression="zstd")
        return _written("quarantine", target, 0)


class _Missing(Exception):
    """A segment was dropped since the run looked at the log."""


def _as_row(file: WrittenFile) -> dict[str, Any]:
    return {name: getattr(file, name) for name in _RESULT.names}


def _written(kind: str, target: Path, size: int) -> WrittenFile:
    """A finished file, on disk when this returns: retention will rely on it."""
    sync_file(target)
    found = target.stat()
    stats, rows = statistics(target)
    return WrittenFile(kind, target.name, rows, found.st_size, found.st_mtime_ns // 1_000_000, stats, size)


def _read_slice(path: Path, each: SegmentRange) -> tuple[int, bytes, bool]:
    """The lines of a slice, the byte where they begin, and whether they passed the check of their whole segment."""
    with path.open("rb", buffering=0) as file:
        # Reading the whole segment is worth it unless the slice is a small part of it.
        if each.sha256 is None or each.file_bytes > 2 * each.size:
            start, data = _read_range(file, each.start, each.end)
            return start, data, False
        whole = _read_all(file, each.file_bytes)
    is_checked = hashlib.sha256(whole).hexdigest() == each.sha256
    start, end = _aligned(whole, each.start, each.end)
    return start, whole if (start, end) == (0, len(whole)) else whole[start:end], is_checked


def _read_all(file: Any, size: int) -> bytes:
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


def _read_range(file: Any, start: int, end: int) -> tuple[int, bytes]:
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


def _within(start: int, data: bytes, since: int, until: int, is_checked: bool) -> tuple[int, bytes, bool]:
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
