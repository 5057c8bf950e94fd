"""
Replay and training export: a pinned range as an iterator, as JSON Lines or as Parquet, the same bytes every time.

A range is pinned by three seqs: after ``since``, up to and including ``until``, without what was erased up to
``erased_until``. The same three give the same bytes, whatever was appended or dropped meanwhile, as long as log and lake
together still hold the range. Reading moves no group: an export has none. A file appears whole or not at all.

Erasures are those of the jobs (``erasures``), each of the space of its own record. A tombstone of an object removes every record of its space that names the object,
whenever it was committed; one of a person, and a person's own request, removes what was committed about them before it. A
sealed record of a space with erasures cannot be checked, and is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Set
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import duckdb
import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tidings.log.interface import Log, Query
from tidings.log.reading import records
from tidings.log.record import Record

from .erasures import ERASURE_TYPES, Erasure, RefusedErasure, read_erasure
from .errors import NotExportable, TooManyErasures
from .lake import Lake
from .lake_scan import is_erased
from .settings import ExportFormat
from .storage import replacing

_GROUP_ROWS_MAX: Final = 20_000
_GROUP_BYTES_MAX: Final = 32 << 20


class HashedFile:
    """A file that knows the digest of what was written to it. What arrow asks of a file is there; closing is not arrow's to do."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        """Write bytes."""
        self._digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        """How much was written."""
        return self.size

    def flush(self) -> None:
        """Nothing: whoever opened the file flushes it."""

    def close(self) -> None:
        """Nothing: whoever opened the file closes it."""

    @property
    def sha256(self) -> str:
        """The digest so far."""
        return self._digest.hexdigest()


@contextlib.contextmanager
def fresh_file(path: Path) -> Iterator[HashedFile]:
    """A new file in place of ``path``, which keeps its old content until this ends well."""
    with replacing(path) as file:
        yield HashedFile(file)


@contextlib.contextmanager
def _rows_to(file: HashedFile, format_: ExportFormat, schema: Any) -> Iterator[Callable[[Any, int], None]]:
    """
    Takes rows, each with about how many bytes it is: lines of JSON, or dictionaries for Parquet.

    Row groups are split by rows and bytes of the rows themselves, never by how they arrived, so the bytes are the same each time.
    """
    if format_ is ExportFormat.JSONL:

        def write_line(line: bytes, _: int) -> None:
            file.write(line + b"\n")

        yield write_line
        return
    # The sink cannot seek, and need not: Parquet puts its directory at the end.
    with (
        pa.PythonFile(file, mode="w") as sink,
        pq.ParquetWriter(sink, schema, compression="zstd", version="2.6") as writer,
    ):
        rows: list[dict[str, Any]] = []
        size = 0

        def flush() -> None:
            nonlocal size
            writer.write_table(pa.Table.from_pylist(rows, schema=schema), row_group_size=_GROUP_ROWS_MAX)
            rows.clear()
            size = 0

        def add(row: dict[str, Any], row_bytes: int) -> None:
            nonlocal size
            rows.append(row)
            size += row_bytes
            if len(rows) >= _GROUP_ROWS_MAX or size >= _GROUP_BYTES_MAX:
                flush()

        yield add
        if rows:
            flush()


ERASURES_MAX: Final = 1_000_000


class Erasures:
    """The subjects to leave out, by space."""

    def __init__(self) -> None:
        self._objects: dict[str, set[str]] = {}
        self._people: dict[str, dict[str, int]] = {}
        self.count = 0
        self.refused = 0
        """How many erase nothing, because they name another space than their own, or nothing."""

    def add(self, record: Record) -> bool:
        """Take a record into account; whether it erases something."""
        if record.meta.sealed is not None or is_erased(record):
            return False
        found = read_erasure(record.meta.type, record.meta.space_id, bytes(record.payload_json))
        if isinstance(found, RefusedErasure):
            self.refused += 1
        if not isinstance(found, Erasure):
            return False
        if found.is_person:
            people = self._people.setdefault(found.space_id, {})
            people[found.object_id] = max(people.get(found.object_id, 0), record.seq)
        else:
            self._objects.setdefault(found.space_id, set()).add(found.object_id)
        self.count += 1
        return True

    def concern(self, space_id: str) -> bool:
        """Whether anything of this space was erased."""
        return space_id in self._objects or space_id in self._people

    def name(self, record: Record) -> bool:
        """Whether an erasure names this record, or may and that cannot be checked; or its content was removed already."""
        if is_erased(record):
            return True
        space_id = record.meta.space_id
        if not self.concern(space_id) or is_erasure(record):
            return False
        if record.meta.sealed is not None:
            return True
        return self.names_any(space_id, record.seq, _texts_of(record))

    def names_any(self, space_id: str, seq: int, texts: Iterator[str]) -> bool:
        """Whether any of these texts is the name of something erased, for a row of that space and seq."""
        objects: Set[str] = self._objects.get(space_id, set())
        people = self._people.get(space_id, {})
        return any(text in objects or seq < people.get(text, 0) for text in texts)


def is_erasure(record: Record) -> bool:
    """Whether a record is of a kind that erases. Such records stay: they are the reason for what is missing."""
    return record.meta.type in ERASURE_TYPES and record.meta.sealed is None


async def load_erasures(log: Log, *, until: int, erasures_max: int = ERASURES_MAX) -> Erasures:
    """
    All that was erased up to and including a seq. Reads everything from the first record on.

    Raises:
        PositionTrimmed: Records were dropped, and no lake holds them: an erasure may have been among them.
        TooManyErasures: More than can be kept in mind.
    """
    found = Erasures()
    async for record in records(log, Query(since=0, until=until)):
        # A look at the bytes first: few records erase, and decoding all the other envelopes would take most of the time.
        envelope = bytes(record.meta_json)
        if b"TOMBSTONE_" in envelope or b"DSAR_" in envelope:
            found.add(record)
        if found.count > erasures_max:
            raise TooManyErasures(erasures_max)
    return found


def _texts_of(record: Record) -> Iterator[str]:
    meta = record.meta
    yield meta.event_id
    yield from meta.objects
    yield from (text for text in (meta.trace_id, meta.idem_key) if text is not None)
    for part in (meta.actor, meta.device, meta.extra, msgspec.json.decode(record.payload_json)):
        yield from texts_in(part)


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value, however deep; keys too."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each


_RECORDS: Final = pa.schema(
    [
        ("topic", pa.string()),
        *((name, pa.int64()) for name in ("offset", "seq")),
        *((name, pa.string()) for name in ("event_id", "type", "space_id", "ts", "written_at")),
        *(
            ("partitions", pa.list_(pa.string())),
            ("is_sealed", pa.bool_()),
            ("meta", pa.string()),
            ("payload", pa.string()),
        ),
    ]
)
_SEQ_COLUMNS: Final = ("seq", "decision_seq", "impression_seq", "prediction_seq", "last_seq")
_BATCH_ROWS: Final = 2000
_MEMORY_MB: Final = 256

Advance = Callable[[int], None]


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
    refused_erasures: int = 0
    """Erasures that were not honoured: they name another space than their own, or nothing."""
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
    with fresh_file(path) as file, _rows_to(file, format_, _RECORDS) as write:
        async for record in _candidates(log, fixed):
            if erasures.name(record):
                left_out += 1
                continue
            # A line of JSON is the record as it was committed.
            is_json = format_ is ExportFormat.JSONL
            write(record.to_json() if is_json else _row_of(record), len(record.meta_json) + len(record.payload_json))
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
        refused_erasures=erasures.refused,
        bytes=file.size,
        sha256=file.sha256,
    )


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
    held = lake.dataset(table, lake.files(table, version=opened.version()), schema)
    rows = left_out = 0
    with fresh_file(path) as file, _rows_to(file, format_, schema) as write:
        for row in _table_rows(held, schema, seq, range_):
            if erasures.names_any(row.get("space_id") or "", row[seq], texts_in(list(row.values()))):
                left_out += 1
                continue
            line = msgspec.json.encode(row, order="sorted")
            write(line if format_ is ExportFormat.JSONL else _with_sorted_maps(row), len(line))
            rows += 1
    return ExportReport(
        epoch=epoch,
        since=range_.since,
        until=range_.until,
        erased_until=range_.erased_until,
        rows=rows,
        left_out=left_out,
        refused_erasures=erasures.refused,
        bytes=file.size,
        sha256=file.sha256,
        version=int(opened.version()),
    )


def _table_rows(held: Any, schema: Any, seq: str, range_: ExportRange) -> Iterator[dict[str, Any]]:
    # Maps have no order among rows; every other column takes part, so that rows of one seq always come in the same order.
    order = [f'"{field.name}"' for field in schema if not pa.types.is_nested(field.type)]
    conditions = [f'"{seq}" > {int(range_.since)}', f'"{seq}" <= {int(range_.until or 0)}']
    given: list[Any] = []
    if range_.spaces and "space_id" in schema.names:
        conditions.append("list_contains(?, space_id)")
        given.append(list(range_.spaces))
    query = f'select * from held where {" and ".join(conditions)} order by "{seq}", {", ".join(order)}'
    with duckdb.connect(config={"threads": 1, "memory_limit": f"{_MEMORY_MB}MB"}) as database:
        database.execute("set timezone = 'UTC'")
        database.register("held", held)
        reader = database.sql(query, params=given).to_arrow_reader(_BATCH_ROWS)
        for batch in reader:
            yield from batch.cast(schema).to_pylist(maps_as_pydicts="strict")


def _with_sorted_maps(row: dict[str, Any]) -> dict[str, Any]:
    return {name: sorted(value.items()) if isinstance(value, dict) else value for name, value in row.items()}
