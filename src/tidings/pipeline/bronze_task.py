"""
What one Spark task does for bronze: write the records of its ranges to one Parquet file, and say what it wrote.

The data source does this in the place of giving rows, if it is told to archive. The rows it gives then are messages: what was
planned, files of the two tables, and what went wrong where trying again would not help. One commit is made of them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from .errors import LakeUnwritable, PipelineError, SegmentMissing
from .line_conversion import BRONZE_ENCODING, BadLine
from .schemas import BRONZE_EVENTS, MESSAGES, QUARANTINE, arrow_schema
from .segment_reader import MisplacedLine, RangeLines
from .source import Gap
from .state_files import Hints
from .storage import Storage
from .table_files import write_file

_MESSAGES: Final = arrow_schema(MESSAGES)


class ArchiveTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how the data source writes what it reads; as JSON it is the source's option ``archive``."""

    lake: str
    """Its address; what is needed to open it are options of their own, by names that Spark can redact."""
    epoch: str
    run: str
    """A name that no other run has, so that no two write to the same file."""
    memory_mb: int
    line_bytes_max: int


class Planned(msgspec.Struct, frozen=True, tag=True):
    """What the tasks were given: the records after ``since`` up to ``until``."""

    since: int
    until: int
    gaps: tuple[Gap, ...]
    hints: Hints
    """Where to read on once this is committed."""
    found_at_us: int
    """When the log was looked at, in microseconds."""


class Written(msgspec.Struct, frozen=True, tag=True):
    """A file that a task wrote; it is a part of no table yet."""

    table: str
    entry: dict[str, Any]
    """What the table's log wants to know of it."""
    log_bytes: int = 0
    """How many bytes of the log went into it."""
    payload_bytes: int = 0
    """How long the longest payload in it is."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What a task could not do. Nothing of the whole is committed."""

    path: str
    problem: str | None
    """What the disk said; ``None`` if the path is of a segment, which is not there."""

    def as_error(self) -> PipelineError:
        """The failure, to be raised where the run is."""
        return SegmentMissing(self.path) if self.problem is None else LakeUnwritable(self.path, self.problem)


Message = Planned | Written | Failed
_DECODER: Final = msgspec.json.Decoder(Message)


def encode_messages(messages: Sequence[Message]) -> pa.RecordBatch:
    """Messages as rows of the data source."""
    texts = [msgspec.json.encode(message).decode() for message in messages]
    return pa.RecordBatch.from_pydict({"message": texts}, schema=_MESSAGES)


def decode_message(text: str) -> Message:
    """A row's message."""
    found: Message = _DECODER.decode(text)
    return found


def write_lines(
    archive: ArchiveTarget, lines: RangeLines, events: Storage, quarantine: Storage, name: str, found_at_us: int
) -> list[Message]:
    """
    Write lines to a file of each table, as far as there is something for it.

    Args:
        archive: How.
        lines: What was read.
        events, quarantine: The tables' folders.
        name: Of the files: no other attempt of a task has the same.
        found_at_us: When the lines that are no records were found.
    """
    bad = list(lines.damaged)
    longest = [0]
    written: list[Message] = []
    try:
        schema = arrow_schema(BRONZE_EVENTS.schema)
        entry = write_file(events, name, schema, _tables(archive, lines, bad, longest), **BRONZE_ENCODING)
        if entry is not None:
            written.append(Written(BRONZE_EVENTS.name, entry, len(lines.data), max(longest)))
        rows = pa.Table.from_pylist(
            [quarantine_row(each, archive.epoch, archive.line_bytes_max, found_at_us) for each in bad],
            schema=arrow_schema(QUARANTINE.schema),
        )
        entry = write_file(quarantine, name, rows.schema, [rows])
        if entry is not None:
            written.append(Written(QUARANTINE.name, entry))
    except OSError as error:
        problem = getattr(error, "strerror", None) or " ".join(str(error).split())
        return [Failed(events.uri(name), problem[:500])]
    return written


def _tables(
    archive: ArchiveTarget, lines: RangeLines, bad: list[MisplacedLine], longest: list[int]
) -> Iterator[pa.Table]:
    for table, found in lines.tables(memory_mb=archive.memory_mb):
        bad += found
        payloads = (table["payload"], table["sealed"])
        longest += [pc.max(pc.binary_length(each)).as_py() or 0 for each in payloads]
        yield table


def quarantine_row(bad: MisplacedLine, epoch: str, line_bytes_max: int, found_at_us: int) -> dict[str, Any]:
    """The row of a line that is no record; of a long one what fits."""
    return {
        "file": bad.path,
        "byte_offset": bad.byte_offset,
        "topic": bad.topic,
        "reason": bad.line.reason,
        "line": BadLine(0, bad.line.data[:line_bytes_max], "").text,
        "line_bytes": len(bad.line.data),
        "first_seq": None,
        "last_seq": None,
        "found_at": found_at_us,
        "epoch": epoch,
    }
