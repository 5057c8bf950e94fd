"""
What one Spark task does for bronze: read byte ranges of segments, check them, write one Parquet file.

Whatever a task finds wrong it reports; it raises only where trying again may help.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyspark import TaskContext

from .errors import SegmentMissing
from .line_conversion import BadLine, write_tables
from .schemas import QUARANTINE, arrow_schema
from .segment_reader import MisplacedLine, RangeLines, read_ranges
from .source import SegmentRange
from .storage import Storage
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
    events: Storage
    """Where the table of events is."""
    quarantine: Storage
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
        context = TaskContext.get()
        name = f"{self.stem}-{number:06d}-{context.taskAttemptId() if context else 0}.parquet"
        target = self.events.path / name
        try:
            return self._convert(self.bundles[number], target)
        except SegmentMissing as error:
            return [WrittenFile("missing", error.path, 0, 0, 0, "", 0)]
        except OSError as error:
            target.unlink(missing_ok=True)
            problem = getattr(error, "strerror", None) or " ".join(str(error).split())
            return [WrittenFile("failed", str(target), 0, 0, 0, problem[:500], 0)]

    def _convert(self, bundle: tuple[SegmentRange, ...], target: Path) -> list[WrittenFile]:
        lines = read_ranges(Path(self.segments), bundle, self.since, self.until)
        bad = list(lines.damaged)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_tables(self._tables(lines, bad), target)
        written = [_written("events", target, len(lines.data))] if target.exists() else []
        if bad:
            written.append(self._write_quarantine(bad, self.quarantine.path / target.name))
        return written

    def _tables(self, lines: RangeLines, bad: list[MisplacedLine]) -> Iterator[pa.Table]:
        for table, found in lines.tables(memory_mb=self.memory_mb):
            bad += found
            yield table

    def _write_quarantine(self, bad: list[MisplacedLine], target: Path) -> WrittenFile:
        rows = [
            {
                "file": each.path,
                "byte_offset": each.byte_offset,
                "topic": each.topic,
                "reason": each.line.reason,
                "line": BadLine(0, each.line.data[: self.line_bytes_max], "").text,
                "line_bytes": len(each.line.data),
                "first_seq": None,
                "last_seq": None,
                "found_at": self.found_at_us,
                "epoch": self.epoch,
            }
            for each in bad
        ]
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=arrow_schema(QUARANTINE.schema)), target, compression="zstd")
        return _written("quarantine", target, 0)


def _as_row(file: WrittenFile) -> dict[str, Any]:
    return {name: getattr(file, name) for name in _RESULT.names}


def _written(kind: str, target: Path, size: int) -> WrittenFile:
    """A finished file, on disk when this returns: retention will rely on it."""
    Storage.of(target.parent).sync(target.name)
    found = target.stat()
    footer = pq.read_metadata(target)
    stats, rows = statistics(footer), footer.num_rows
    return WrittenFile(kind, target.name, rows, found.st_size, found.st_mtime_ns // 1_000_000, stats, size)
