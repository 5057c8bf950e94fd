"""
The data files of a table: writing and reading them, on the driver and in Spark's tasks, on any storage.

The table's log stores of each file its size, its rows, and the bounds of its columns, from what the writer itself found. The
bounds let a reader pass over whole files, so they are left out wherever they might not hold for every row.
A partitioned table has its files in folders by day, such as ``date=2026-11-16``, and the day is not in the files.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from deltalake.transaction import AddAction, RemoveAction

from .storage import Storage

DAY_COLUMN: Final = "date"
"""The one column that a table may be partitioned by."""
NO_DAY: Final = f"rows have no {DAY_COLUMN}, by which the table is partitioned"
_PATTERN: Final = re.compile(r"[\\*?{}\[\]]")
"""What has a meaning in a pattern of paths."""
_TEXT_CHARS_MAX: Final = 64
_LAST_LETTER: Final = "\U0010ffff"
_ROW_GROUP_BYTES: Final = 32 << 20
# Columns whose bounds help nobody and are long, or quote what somebody wrote: a table's log outlives the rows it speaks of.
_UNBOUNDED: Final = frozenset(
    {
        *("payload", "sealed", "extra", "qos", "actor", "device", "history", "line", "error"),
        *("summary", "phrase", "person_id", "client_id", "object_id", "row_key"),
    }
)


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a table."""

    folder: Storage
    name: str
    """As the table's log has it, relative to the table."""
    size: int
    rows: int
    minimum: Mapping[str, Any]
    maximum: Mapping[str, Any]
    day: date | None = None
    """Of a partitioned table: the date of all its rows."""

    @property
    def uri(self) -> str:
        """Where it is."""
        return self.folder.uri(self.name)

    @property
    def pattern(self) -> str:
        """The pattern that means this file and no other, as Hadoop reads patterns of paths."""
        return _PATTERN.sub(r"\\\g<0>", self.uri)

    def open(self) -> Any:
        """The file, for Arrow to read."""
        return self.folder.filesystem().open_input_file(self.name)

    def may_hold(self, column: str, low: Any = None, high: Any = None) -> bool:
        """Whether a value of the column may lie between the two (both included); bounds that are unknown hold anything."""
        least, most = self.minimum.get(column), self.maximum.get(column)
        if low is not None and most is not None and most < low:
            return False
        return not (high is not None and least is not None and least > high)

    def lies_within(self, column: str, low: Any, high: Any) -> bool:
        """Whether all values of the column lie between the two (both included), as far as is known."""
        least, most = self.minimum.get(column), self.maximum.get(column)
        return least is not None and most is not None and bool(low <= least and most <= high)


# Bounds


def bounded_columns(schema: pa.Schema) -> list[str]:
    """The columns whose bounds a table's log stores."""
    return [
        column.name
        for column in schema
        if column.name not in _UNBOUNDED
        and (pa.types.is_integer(column.type) or pa.types.is_temporal(column.type) or pa.types.is_string(column.type))
    ]


def statistics(footer: Any) -> str:
    """A Parquet file's rows and bounds, the way Delta writes them."""
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    names = bounded_columns(footer.schema.to_arrow_schema())
    places = {footer.schema.column(at).path: at for at in range(footer.num_columns)}
    for name in names:
        columns = [footer.row_group(group).column(places[name]) for group in range(footer.num_row_groups)]
        found = [column.statistics for column in columns if column.num_values]
        if any(each is None or not each.has_null_count for each in found):
            continue
        nulls[name] = sum(each.null_count for each in found)
        filled = [each for each in found if each.num_values]
        if filled and all(each.has_min_max for each in filled):
            least[name] = _lower(min(each.min for each in filled))
            most[name] = _upper(max(each.max for each in filled))
        elif filled and filled[0].physical_type == "BYTE_ARRAY":
            # Of long texts a writer keeps no bounds. All texts lie between these two, and some readers take none for "no row".
            least[name], most[name] = "", _LAST_LETTER * _TEXT_CHARS_MAX
    content = {"numRecords": footer.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    return json.dumps(content, ensure_ascii=False)


def _lower(value: Any) -> Any:
    return value[:_TEXT_CHARS_MAX] if isinstance(value, str) else _plain(value)


def _upper(value: Any) -> Any:
    """Bounds of text may be cut short: the lower one stays a lower one, the upper one must not fall below."""
    if isinstance(value, str):
        return value if len(value) <= _TEXT_CHARS_MAX else value[:_TEXT_CHARS_MAX] + _LAST_LETTER
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        moment = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return value.isoformat() if isinstance(value, date) else value


# Writing


class FileOutput:
    """
    One file of a table while it is written; on its storage, for good, when the block of ``with`` ends.

    Args:
        folder: The table's.
        name: The file's, relative to it.
        schema: Its columns.
        encoding: For Arrow's writer, where the usual does not do.
    """

    def __init__(self, folder: Storage, name: str, schema: pa.Schema, **encoding: Any) -> None:
        self.name = name
        self._schema = schema
        self._stack = contextlib.ExitStack()
        self._footer: list[Any] = []
        self._sink = self._stack.enter_context(folder.writing(name))
        self._writer = pq.ParquetWriter(
            self._sink,
            schema,
            compression="zstd",
            write_page_checksum=True,
            metadata_collector=self._footer,
            **encoding,
        )
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self.size = 0

    def add(self, rows: pa.Table) -> None:
        """Write rows, or keep them until a row group is full."""
        if rows.num_rows:
            self._held.append(rows.cast(self._schema))
            self._held_bytes += rows.nbytes
        if self._held_bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            self._writer.write_table(pa.concat_tables(self._held))
        self._held, self._held_bytes = [], 0

    def __enter__(self) -> FileOutput:
        return self

    def __exit__(self, *problem: Any) -> None:
        if problem[0] is None:
            try:
                self._flush()
                self._writer.close()
                self.size = self._sink.tell()
            except BaseException as error:
                self._abandon(type(error), error, error.__traceback__)
                raise
            self._stack.__exit__(*problem)
        else:
            self._abandon(*problem)

    def _abandon(self, *problem: Any) -> None:
        """Close the file without its end. The writer's destructor would write that to a closed file, and print a traceback."""
        self._writer.is_open = False
        self._stack.__exit__(*problem)

    def entry(self, day: str | None = None) -> dict[str, Any]:
        """What a table's log wants to know of the finished file: a row of ``ENTRIES``."""
        (footer,) = self._footer
        return {
            "name": self.name,
            "rows": footer.num_rows,
            "size": self.size,
            "stats": statistics(footer),
            "day": day,
        }


ENTRIES: Final = "name string, rows bigint, size bigint, stats string, day string"
_ENTRIES: Final = pa.schema(
    [
        ("name", pa.string()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("stats", pa.string()),
        ("day", pa.string()),
    ]
)


def write_file(
    folder: Storage, name: str, schema: pa.Schema, parts: Iterable[pa.Table], **encoding: Any
) -> dict[str, Any] | None:
    """Write rows to one file of a table that nobody sees yet; its entry, or ``None`` and no file if there are no rows."""
    with contextlib.ExitStack() as stack:
        output: FileOutput | None = None
        for part in parts:
            if part.num_rows:
                output = output or stack.enter_context(FileOutput(folder, name, schema, **encoding))
                output.add(part)
    return None if output is None else output.entry()


@dataclass(frozen=True, slots=True)
class FileWriter:
    """
    For Spark's ``mapInArrow``: a task writes its rows to a file (of a partitioned table: one a day) and answers with what it
    wrote. A task that is tried again, or twice at once, writes to files of its own; those of the try that counts are answered.
    """

    folder: Storage
    schema: pa.Schema
    stem: str
    """How the names of the files begin: no two runs have the same."""
    is_by_day: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """From rows to entries."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield self.write(batches, f"{self.stem}-{context.partitionId():05d}-{context.taskAttemptId()}.parquet")

    def write(self, batches: Iterable[pa.RecordBatch], name: str) -> pa.RecordBatch:
        """Write the rows to files that have this name, in folders by day where the table has those."""
        outputs: dict[str | None, FileOutput] = {}
        with contextlib.ExitStack() as stack:
            for batch in batches:
                for day, rows in self._parts(pa.Table.from_batches([batch])):
                    if day not in outputs:
                        place = name if day is None else f"{DAY_COLUMN}={day}/{name}"
                        outputs[day] = stack.enter_context(FileOutput(self.folder, place, self._stored()))
                    outputs[day].add(rows)
        entries = [output.entry(day) for day, output in outputs.items()]
        return pa.RecordBatch.from_pylist(entries, schema=_ENTRIES)

    def _stored(self) -> pa.Schema:
        if not self.is_by_day:
            return self.schema
        return pa.schema([column for column in self.schema if column.name != DAY_COLUMN])

    def _parts(self, rows: pa.Table) -> Iterator[tuple[str | None, pa.Table]]:
        if not rows.num_rows:
            return
        if not self.is_by_day:
            yield None, rows
            return
        days = rows[DAY_COLUMN].cast(pa.date32())
        if days.null_count:
            raise ValueError(f"{days.null_count} {NO_DAY}")
        rest = rows.drop_columns([DAY_COLUMN])
        for day in pc.unique(days):
            yield day.as_py().isoformat(), rest.filter(pc.equal(days, day))


def add_action(entry: Mapping[str, Any], *, now_ms: int, changes_rows: bool = True) -> AddAction:
    """The entry that makes a file a part of its table; ``changes_rows`` unless its rows were there in other files."""
    day = entry["day"]
    partition = {} if day is None else {DAY_COLUMN: day}
    return AddAction(entry["name"], entry["size"], partition, now_ms, changes_rows, entry["stats"])


def remove_action(file: DataFile, *, now_ms: int, changes_rows: bool = True) -> RemoveAction:
    """The entry that takes a file out of its table, with its rows unless others have them; the file stays until it is vacuumed."""
    return RemoveAction(
        path=file.name,
        data_change=changes_rows,
        deletion_timestamp=now_ms,
        size=file.size,
        partition_values={} if file.day is None else {DAY_COLUMN: file.day.isoformat()},
    )


def entry_of(folder: Storage, name: str) -> dict[str, Any]:
    """The entry of an unpartitioned file that is there already, from its footer."""
    with folder.filesystem().open_input_file(name) as file:
        footer = pq.read_metadata(file)
        size = file.size()
    return {"name": name, "rows": footer.num_rows, "size": size, "stats": statistics(footer), "day": None}


# Reading


def dataset(folder: Storage, files: Iterable[tuple[str, date | None]], schema: pa.Schema) -> Any:
    """Files of a table, by name and day, as one Arrow dataset; columns that a file lacks are null."""
    import pyarrow.dataset as ds  # type: ignore[import-untyped]  # slow to import, and tasks that write have no need of it

    read = ds.ParquetReadOptions(coerce_int96_timestamp_unit="us")
    form = ds.ParquetFileFormat(read_options=read)
    filesystem = folder.filesystem()
    fragments = [
        form.make_fragment(
            name,
            filesystem,
            partition_expression=None if day is None else ds.field(DAY_COLUMN) == pa.scalar(day, pa.date32()),
        )
        for name, day in files
    ]
    return ds.FileSystemDataset(fragments, schema, form, filesystem)


@dataclass(frozen=True, slots=True)
class FileReader:
    """For Spark's ``mapInArrow``, where Spark itself cannot open the files: from names and days of files to their rows."""

    folder: Storage
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """From names to rows."""
        for batch in batches:
            files = list(zip(batch["name"].to_pylist(), batch["day"].to_pylist(), strict=True))
            yield from dataset(self.folder, files, self.schema).to_batches()


Choice = Callable[[DataFile], bool]
