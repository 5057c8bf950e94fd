"""
Replay and training export: a pinned range as an iterator, as JSON Lines or as Parquet, the same bytes every time.

A range is pinned by three seqs: after ``since``, up to and including ``until``, with what was erased up to ``erased_until`` left
out. The same three give the same bytes, whatever was appended or dropped meanwhile, as long as log and lake together still hold
the range. Reading moves no group: an export has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import duckdb
import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from tidings.log.interface import Log, Query
from tidings.log.reading import records
from tidings.log.record import Record

from .errors import PipelineError
from .export_erasures import Erasures, load_erasures, texts_in
from .export_files import ExportFormat, fresh_file, parquet_rows
from .lake import Lake

__all__ = [
    "ExportRange",
    "ExportReport",
    "NotExportable",
    "export_file",
    "export_table",
    "exported_records",
    "pinned",
]

_RECORD_SCHEMA: Final = (
    *(("topic", pa.string()), ("offset", pa.int64()), ("seq", pa.int64()), ("event_id", pa.string())),
    *(("type", pa.string()), ("space_id", pa.string()), ("ts", pa.string()), ("written_at", pa.string())),
    *(
        ("partitions", pa.list_(pa.string())),
        ("is_sealed", pa.bool_()),
        ("meta", pa.string()),
        ("payload", pa.string()),
    ),
)
_SEQ_COLUMNS: Final = ("seq", "decision_seq", "impression_seq", "prediction_seq", "last_seq")
_BATCH_ROWS: Final = 2000
_MEMORY_MB: Final = 256

Advance = Callable[[int], None]


class NotExportable(PipelineError):
    """A table cannot be exported by range: its rows have no place in the log."""

    code = "export.not_exportable"
    hint = "export a table of rows, such as gold.learning_actions, or query it with 'tidings table query'"

    def __init__(self, table: str) -> None:
        super().__init__(table)
        self.table = table

    def describe(self) -> str:
        return f"{table_text(self.table)} has no column that says where in the log a row is from"


def table_text(table: str) -> str:
    """A table's name, for people."""
    return f"table {table!r}"


class ExportRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to export. Conditions are joined by and."""

    since: Annotated[int, msgspec.Meta(ge=0)] = 0
    """After this seq; 0 is the oldest record there is."""
    until: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Up to and including this seq; ``pinned`` fills it in."""
    erased_until: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Erasures up to this seq are honoured; ``pinned`` takes all there are."""
    topic: str | None = None
    types: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was written; with ``since``, ``until`` and ``erased_until`` it can be made again, and ``sha256`` compared."""

    epoch: str
    since: int
    until: int
    erased_until: int
    rows: int
    left_out: int
    """Rows that an erasure names."""
    bytes: int
    sha256: str
    version: int | None = None
    """Of a table: the version that was read."""


def pinned(log: Log, range_: ExportRange) -> ExportRange:
    """The range with its ends filled in as things stand now."""
    seq = log.position.seq
    until = seq if range_.until is None else min(range_.until, seq)
    erased_until = seq if range_.erased_until is None else min(range_.erased_until, seq)
    return msgspec.structs.replace(range_, until=until, erased_until=erased_until)


async def exported_records(log: Log, range_: ExportRange, erasures: Erasures | None = None) -> AsyncIterator[Record]:
    """
    The records of a range, in seq order, without those that were erased.

    Give it an ``ArchivedLog`` to reach what the log has dropped. It keeps a page of records in memory, and the erasures.

    Raises:
        PositionTrimmed: The range begins before what is still held.
        TooManyErasures: More than can be kept in mind.
    """
    fixed = pinned(log, range_)
    assert fixed.until is not None
    assert fixed.erased_until is not None
    known = await load_erasures(log, until=fixed.erased_until) if erasures is None else erasures
    async for record in _candidates(log, fixed):
        if not known.name(record):
            yield record


async def _candidates(log: Log, fixed: ExportRange) -> AsyncIterator[Record]:
    query = Query(topic=fixed.topic, since=fixed.since or None, until=fixed.until)
    types, spaces = frozenset(fixed.types), frozenset(fixed.spaces)
    async for record in records(log, query):
        if (not types or record.meta.type in types) and (not spaces or record.meta.space_id in spaces):
            yield record


async def export_file(
    log: Log,
    range_: ExportRange,
    path: Path,
    format_: ExportFormat = ExportFormat.JSONL,
    *,
    advance: Advance | None = None,
) -> ExportReport:
    """
    Write a range of records to a file.

    A line of JSON is the record as committed, without its checksum. In Parquet the envelope's main fields are columns, and
    ``meta`` and ``payload`` hold both as the JSON they were committed as.

    Args:
        log: Where to read; an ``ArchivedLog`` to reach what was dropped.
        range_: What to export.
        path: The file; replaced when the export is whole.
        format_: JSON Lines or Parquet.
        advance: Told the seq that was reached, now and then.

    Raises:
        PositionTrimmed: The range begins before what is still held. No file is written.
        TooManyErasures: More than can be kept in mind.
    """
    fixed = pinned(log, range_)
    assert fixed.until is not None
    assert fixed.erased_until is not None
    erasures = await load_erasures(log, until=fixed.erased_until)
    rows = left_out = 0
    with fresh_file(path) as file, _record_sink(file, format_) as write:
        async for record in _candidates(log, fixed):
            if erasures.name(record):
                left_out += 1
                continue
            write(record)
            rows += 1
            if advance is not None and rows % 500 == 0:
                advance(record.seq)
    return ExportReport(
        epoch=log.position.epoch,
        since=fixed.since,
        until=fixed.until,
        erased_until=fixed.erased_until,
        rows=rows,
        left_out=left_out,
        bytes=file.size,
        sha256=file.sha256,
    )


def _record_sink(file: Any, format_: ExportFormat) -> Any:
    return _jsonl_records(file) if format_ is ExportFormat.JSONL else _parquet_records(file)


@contextlib.contextmanager
def _jsonl_records(file: Any) -> Iterator[Callable[[Record], None]]:
    yield lambda record: file.write(record.to_json() + b"\n")


@contextlib.contextmanager
def _parquet_records(file: Any) -> Iterator[Callable[[Record], None]]:
    with parquet_rows(file, pa.schema(list(_RECORD_SCHEMA))) as add:
        yield lambda record: add(_row_of(record), len(record.meta_json) + len(record.payload_json))


def _row_of(record: Record) -> dict[str, Any]:
    meta = record.meta
    return {
        "topic": meta.topic,
        "offset": record.offset,
        "seq": record.seq,
        "event_id": meta.event_id,
        "type": meta.type,
        "space_id": meta.space_id,
        "ts": meta.ts,
        "written_at": meta.written_at,
        "partitions": list(meta.partitions),
        "is_sealed": meta.sealed is not None,
        "meta": bytes(record.meta_json).decode(),
        "payload": bytes(record.payload_json).decode(),
    }


def export_table(
    lake: Lake,
    table: str,
    path: Path,
    format_: ExportFormat,
    range_: ExportRange,
    erasures: Erasures,
    *,
    epoch: str,
    version: int | None = None,
) -> ExportReport:
    """
    Write the rows of a table whose seqs lie in a range, such as training rows, without those that name what was erased.

    Rows come in the order of their seqs, then of all their columns. A table is built anew by later runs, so the same bytes need
    the same ``version``; the report says which was read.

    Args:
        lake, table: Where the rows are.
        path, format_: Where they go.
        range_: With ``until`` and ``erased_until`` filled in (``pinned``); of its filters, ``spaces`` counts.
        erasures: What to leave out.
        epoch: The log's, for the report.
        version: The table's version; the latest if left out.

    Raises:
        NotExportable: The table's rows have no seq.
        UnknownTable, LakeDamaged: It cannot be read.
    """
    assert range_.until is not None
    assert range_.erased_until is not None
    opened = lake.open(table, version)
    schema = pa.schema(opened.schema().to_arrow())
    seq = next((name for name in _SEQ_COLUMNS if name in schema.names), None)
    if seq is None:
        raise NotExportable(table)
    files = [str(file.path) for file in lake.files(table, version=opened.version())]
    rows = left_out = 0
    with fresh_file(path) as file, _table_sink(file, format_, schema) as write:
        for row in _table_rows(files, schema, seq, range_):
            if erasures.names_any(row.get("space_id") or "", row[seq], texts_in(list(row.values()))):
                left_out += 1
                continue
            write(row)
            rows += 1
    return ExportReport(
        epoch=epoch,
        since=range_.since,
        until=range_.until,
        erased_until=range_.erased_until,
        rows=rows,
        left_out=left_out,
        bytes=file.size,
        sha256=file.sha256,
        version=int(opened.version()),
    )


def _table_rows(files: list[str], schema: Any, seq: str, range_: ExportRange) -> Iterator[dict[str, Any]]:
    if not files:
        return
    # Maps have no order among rows; every other column takes part, so that rows of one seq always come in the same order.
    order = [f'"{field.name}"' for field in schema if not pa.types.is_nested(field.type)]
    conditions = [f'"{seq}" > {int(range_.since)}', f'"{seq}" <= {int(range_.until or 0)}']
    given: list[Any] = [files]
    if range_.spaces and "space_id" in schema.names:
        conditions.append("list_contains(?, space_id)")
        given.append(list(range_.spaces))
    query = f'select * from read_parquet(?) where {" and ".join(conditions)} order by "{seq}", {", ".join(order)}'
    with duckdb.connect(config={"threads": 1, "memory_limit": f"{_MEMORY_MB}MB"}) as database:
        database.execute("set timezone = 'UTC'")
        reader = database.sql(query, params=given).to_arrow_reader(_BATCH_ROWS)
        for batch in reader:
            yield from batch.cast(schema).to_pylist(maps_as_pydicts="strict")


@contextlib.contextmanager
def _table_sink(file: Any, format_: ExportFormat, schema: Any) -> Iterator[Callable[[dict[str, Any]], None]]:
    if format_ is ExportFormat.JSONL:
        yield lambda row: file.write(msgspec.json.encode(row, order="sorted") + b"\n")
        return
    with parquet_rows(file, schema) as add:
        yield lambda row: add(_with_sorted_maps(row), len(msgspec.json.encode(row)))


def _with_sorted_maps(row: dict[str, Any]) -> dict[str, Any]:
    return {name: sorted(value.items()) if isinstance(value, dict) else value for name, value in row.items()}
