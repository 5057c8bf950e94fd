"""
The data source ``tidings``: a workspace's log as a DataFrame, and as a stream.

The driver's side plans: it pins what the log holds, and hands out byte ranges of segments. The tasks read theirs, check every
line, and give Arrow batches in the columns of ``bronze.events``. Nothing is locked; whoever writes the log goes on.

Told to archive, the tasks write files of the lake instead, and give messages on them: so bronze is made (``bronze_task``).

A stream's offset is a seq: seqs rise by one from record to record over all topics, so that a micro-batch is all records after
one seq up to another, whenever it is planned. ``docs/topics/spark.md`` says what the options are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tidings.core.clock import SYSTEM_CLOCK

from .bronze_task import ArchiveTarget, Failed, Message, Planned, encode_messages, write_lines
from .errors import DamagedLine, ReadRefused, RecordsDropped, SegmentMissing
from .log_place import LogPlace
from .schemas import BRONZE_EVENTS, QUARANTINE, arrow_schema
from .segment_reader import MisplacedLine, read_ranges
from .source import LogSource, LogView, SegmentRange, Selection, SourceChunk, bundles
from .state_files import Hints, load_hints
from .storage import Storage

if TYPE_CHECKING:
    from .lake import Lake

CORRUPT: Final = "_corrupt_record"
_CORRUPT_FIELD: Final = pa.field(CORRUPT, pa.string())
_EVENTS: Final = arrow_schema(BRONZE_EVENTS.schema)
_MODES: Final = ("FAILFAST", "DROPMALFORMED", "PERMISSIVE")
_STORAGE: Final = "storage."
_SPLIT_BYTES: Final = 64 << 20
_MEMORY_MB: Final = 128
"""What the conversion may take in a task: blocks of a JVM's liking come of it."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a reader is asked for, from the options of ``spark.read`` and ``spark.readStream``."""

    place: LogPlace
    since: int
    until: int | None
    topics: frozenset[str] | None
    mode: str
    rows_max: int | None
    bytes_max: int | None
    fails_on_loss: bool
    split_bytes: int
    partitions_min: int
    archive: tuple[ArchiveTarget, Storage] | None
    """Where the log is archived to, and the lake there."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """
        The options as they were given; their names are those of ``_OPTIONS``, in any case.

        Raises:
            ReadRefused: One is unknown, or says what cannot be.
        """
        known = {name.lower() for name in (*_OPTIONS, "archive")}
        storage_options = {
            name.lower().removeprefix(_STORAGE): value
            for name, value in options.items()
            if name.lower().startswith(_STORAGE)
        }
        given = [name for name in options if not name.lower().startswith(_STORAGE)]
        if unknown := sorted(name for name in given if name.lower() not in known):
            raise ReadRefused(f"there is no option {unknown[0]!r}; there are {', '.join(_OPTIONS)}")
        if (workspace := options.get("path")) is None:
            raise ReadRefused("no workspace is named; give its folder to load()")
        mode = options.get("mode", _MODES[0]).upper()
        if mode not in _MODES:
            raise ReadRefused(f"mode is one of {', '.join(_MODES)}, not {mode!r}")
        loss = options.get("failOnDataLoss", "true").lower()
        if loss not in ("true", "false"):
            raise ReadRefused(f"failOnDataLoss is true or false, not {loss!r}")
        rows_max, bytes_max = _number(options, "maxRowsPerTrigger"), _number(options, "maxBytesPerTrigger")
        if rows_max is not None and bytes_max is not None:
            raise ReadRefused("maxRowsPerTrigger and maxBytesPerTrigger bound the same thing; give one")
        topics, archive = options.get("topics"), options.get("archive")
        target = None if archive is None else msgspec.json.decode(archive, type=ArchiveTarget)
        return cls(
            place=LogPlace(Storage.of(workspace, storage_options)),
            since=_number(options, "since", least=0) or 0,
            until=_number(options, "until", least=0),
            topics=None if topics is None else frozenset(name.strip() for name in topics.split(",")),
            mode=mode,
            rows_max=rows_max,
            bytes_max=bytes_max,
            fails_on_loss=loss == "true",
            split_bytes=_number(options, "splitBytes") or _SPLIT_BYTES,
            partitions_min=_number(options, "minPartitions") or os.cpu_count() or 1,
            archive=None if target is None else (target, Storage.of(target.lake, storage_options)),
        )


_OPTIONS: Final = (
    *("path", "since", "until", "topics", "mode"),
    *("maxRowsPerTrigger", "maxBytesPerTrigger", "failOnDataLoss", "splitBytes", "minPartitions"),
)


def _number(options: Mapping[str, str], name: str, *, least: int = 1) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ReadRefused(f"{name} is a whole number from {least} on, not {text!r}")
    return int(text)


@dataclass
class _Part(InputPartition):
    """What one task reads."""

    number: int
    ranges: tuple[SegmentRange, ...]
    since: int
    until: int
    folders: tuple[Storage, Storage] | None = None
    """When the log is archived: where the files go, of the events and of the quarantine."""
    found_at_us: int = 0
    planned: Planned | None = None
    """When the log is archived: what all the parts make together; the first has it."""


class _Rows:
    """What a task gives: the events among its lines, in the columns that are wanted."""

    def __init__(self, schema: StructType, mode: str) -> None:
        self._columns = _checked_columns(schema)
        self._mode = mode
        self.bounds: list[tuple[str, str, Any]] = []
        """Comparisons that hold of all rows that are wanted: column, function of Arrow's, value."""

    def read(self, part: _Part, place: LogPlace) -> Iterator[pa.RecordBatch]:
        lines = read_ranges(place, part.ranges, part.since, part.until)
        yield from self._batches(self._corrupt_rows(lines.damaged))
        for table, bad in lines.tables(memory_mb=_MEMORY_MB):
            yield from self._batches(self._corrupt_rows(bad))
            yield from self._batches(table)

    def _batches(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        for column, function, value in self.bounds:
            table = table.filter(pc.call_function(function, [table[column], value]))
        for field in self._columns:
            if field.name not in table.column_names:
                table = table.append_column(field, pa.nulls(len(table), field.type))
        yield from table.select(self._columns.names).cast(self._columns).to_batches()

    def _corrupt_rows(self, bad: Sequence[MisplacedLine]) -> pa.Table:
        """
        Rows for lines that are no records, if they are wanted.

        Raises:
            DamagedLine: The reader is to fail.
        """
        schema = _EVENTS.append(_CORRUPT_FIELD)
        if bad and self._mode == "FAILFAST":
            raise DamagedLine(bad[0].path, bad[0].byte_offset, bad[0].line.reason)
        if self._mode != "PERMISSIVE" or CORRUPT not in self._columns.names:
            return schema.empty_table()
        rows = [{"topic": each.topic, CORRUPT: _told(each)} for each in bad]
        return pa.Table.from_pylist(rows, schema=schema)


class _Files:
    """What a task gives that archives: messages on the files that it wrote."""

    def __init__(self, archive: ArchiveTarget, storage: Storage) -> None:
        self._archive = archive
        self._storage = storage

    def state(self) -> tuple[int, Hints]:
        """How far the archive is, which counts more than any offset, and where to read on."""
        from .bronze import bronze_state

        lake = self._lake()
        seq = bronze_state(lake).seq
        return seq, load_hints(lake.storage, epoch=self._archive.epoch, seq=seq)

    def plan(self, chunk: SourceChunk, parts: list[_Part]) -> list[_Part]:
        """The parts, of which the first says what was planned; there is one even if nothing is to be read."""
        lake = self._lake()
        folders = lake.folder(BRONZE_EVENTS.name), lake.folder(QUARANTINE.name)
        parts = parts or [_Part(0, (), chunk.since, chunk.until)]
        now_us = SYSTEM_CLOCK.now_ns() // 1000
        planned = Planned(chunk.since, chunk.until, chunk.gaps, chunk.hints, now_us)
        return [
            replace(part, folders=folders, found_at_us=now_us, planned=None if part.number else planned)
            for part in parts
        ]

    def read(self, part: _Part, place: LogPlace) -> Iterator[pa.RecordBatch]:
        # A task that Spark tries again, or runs twice, must not write to the file of the other try.
        context = TaskContext.get()
        attempt = 0 if context is None else context.taskAttemptId()
        name = f"{BRONZE_EVENTS.name}-{part.until:012d}-{self._archive.run}-{part.number:06d}-{attempt}.parquet"
        messages: list[Message] = [] if part.planned is None else [part.planned]
        assert part.folders is not None
        try:
            lines = read_ranges(place, part.ranges, part.since, part.until)
            messages += write_lines(self._archive, lines, *part.folders, name, part.found_at_us)
        except SegmentMissing as error:
            messages.append(Failed(error.path, None))
        yield encode_messages(messages)

    def _lake(self) -> Lake:
        from .lake import Lake

        return Lake(self._storage, SYSTEM_CLOCK)


class _Planner:
    """What batch and stream have in common: the log that is read, and how it is divided."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._selection = Selection(options.topics)
        self._rows = _Rows(schema, options.mode) if options.archive is None else None
        self._files = None if options.archive is None else _Files(*options.archive)

    def _epoch(self) -> str:
        place = self._options.place
        place.check_copy()
        return place.layout.read_meta(place.disk).epoch

    def _pin(self, since: int, hints: Hints, until: int | None = None) -> LogView:
        place = self._options.place
        source = LogSource(place.layout, place.disk)
        return source.pin(since, hints, until=until, selection=self._selection)

    def _parts(self, chunk: SourceChunk) -> list[InputPartition]:
        divided = bundles(chunk.ranges, self._options.split_bytes, self._options.partitions_min)
        parts = [_Part(number, ranges, chunk.since, chunk.until) for number, ranges in enumerate(divided)]
        return [*(parts if self._files is None else self._files.plan(chunk, parts))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """What a task gives for its part."""
        output = self._rows or self._files
        if output is not None and isinstance(partition, _Part):  # if nothing is wanted, Spark gives one of its own
            yield from output.read(partition, self._options.place)


def _told(bad: MisplacedLine) -> str:
    found = {"file": bad.path, "byte_offset": bad.byte_offset, "reason": bad.line.reason, "line": bad.line.text}
    return msgspec.json.encode(found).decode()


def _checked_columns(schema: StructType) -> pa.Schema:
    """
    The wanted columns as Arrow has them.

    Raises:
        ReadRefused: The log has no such column, or one of another type.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    wanted = to_arrow_schema(schema, timezone="UTC")
    known = _EVENTS.append(_CORRUPT_FIELD)
    for field in wanted:
        if field.name not in known.names:
            raise ReadRefused(f"there is no column {field.name!r}; there are {', '.join(known.names)}")
        if field.type != known.field(field.name).type:
            raise ReadRefused(f"column {field.name!r} is of type {known.field(field.name).type}, not {field.type}")
    return wanted


_COMPARED: Final = {"topic", "type", "space_id", "event_id", "offset", "seq", "ts", "written_at"}
_FUNCTIONS: Final[Mapping[type[Filter], str]] = {
    EqualTo: "equal",
    GreaterThan: "greater",
    GreaterThanOrEqual: "greater_equal",
    LessThan: "less",
    LessThanOrEqual: "less_equal",
}


class LogReader(_Planner, DataSourceReader):
    """A batch: what the log holds when it is planned."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """
        Take what helps: topics and times of writing leave out segments, seqs parts of them, and what else can be compared rows.

        Spark evaluates all of it again, which costs little: nothing depends on how exact this is.
        """
        for each in filters:
            column = ".".join(getattr(each, "attribute", ()))
            if column in _COMPARED:
                self._take(column, each)
            yield each

    def _take(self, column: str, each: Filter) -> None:
        value = getattr(each, "value", None)
        if isinstance(value, datetime) and value.tzinfo is None:
            return  # a time of nobody's zone
        if isinstance(each, In) and column == "topic":
            self._narrow_topics(frozenset(each.value))
            return
        if type(each) not in _FUNCTIONS or value is None:
            return
        if column == "topic" and isinstance(each, EqualTo):
            self._narrow_topics(frozenset([value]))
        is_lower = not isinstance(each, LessThan | LessThanOrEqual)
        is_upper = not isinstance(each, GreaterThan | GreaterThanOrEqual)
        if column == "seq" and is_lower:
            since = value if isinstance(each, GreaterThan) else value - 1
            self._options = replace(self._options, since=max(self._options.since, since))
        if column == "seq" and is_upper:
            until = value - 1 if isinstance(each, LessThan) else value
            last = until if self._options.until is None else min(self._options.until, until)
            self._options = replace(self._options, until=max(0, last))
        if column == "written_at" and is_lower and _is_after(value, self._selection.written_from):
            self._selection = replace(self._selection, written_from=value)
        if column == "written_at" and is_upper and _is_after(self._selection.written_to, value):
            self._selection = replace(self._selection, written_to=value)
        assert self._rows is not None
        self._rows.bounds.append((column, _FUNCTIONS[type(each)], value))

    def _narrow_topics(self, topics: frozenset[str]) -> None:
        chosen = self._selection.topics
        self._selection = replace(self._selection, topics=topics if chosen is None else topics & chosen)

    def partitions(self) -> list[InputPartition]:
        since, hints = (self._options.since, Hints(self._epoch(), 0)) if self._files is None else self._files.state()
        last = self._pin(0, hints).until
        until = last if self._options.until is None else min(self._options.until, last)
        if until <= since:
            return []
        return [part for chunk in self._pin(since, hints, until).chunks() for part in self._parts(chunk)]


def _is_after(one: datetime | None, other: datetime | None) -> bool:
    return one is None or other is None or one > other


class LogStreamReader(_Planner, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """
    A stream from one seq to the next.

    An offset is ``{"epoch", "seq", "dropped"}``: all up to ``seq`` was given, and up to ``dropped`` retention had dropped
    records before the query began, so that their absence is no loss.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        if options.until is not None:
            raise ReadRefused("a stream has no end: until is for spark.read")
        self._hints: Hints | None = None
        self._target: int | None = None

    def initialOffset(self) -> dict[str, Any]:
        epoch = self._epoch()
        if self._files is not None:
            return {"epoch": epoch, "seq": self._files.state()[0], "dropped": 0}
        view = self._pin(0, Hints(epoch, 0))
        dropped = max((gap.last_seq for chunk in view.chunks() for gap in chunk.gaps), default=0)
        return {"epoch": epoch, "seq": self._options.since, "dropped": dropped}

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        return ReadAllAvailable() if self._options.bytes_max is None else ReadMaxBytes(self._options.bytes_max)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._pin(0, Hints(self._epoch(), 0)).until

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        view = self._pin_after(start)
        until = view.until if self._target is None else min(view.until, self._target)
        if isinstance(limit, ReadMaxRows):
            until = min(until, view.since + limit.max_rows)
        elif isinstance(limit, ReadMaxBytes):
            until = min([until, *(chunk.until for chunk in _first(view.chunks(bytes_max=limit.max_bytes)))])
        return {**start, "seq": max(start["seq"], until)}

    def reportLatestOffset(self) -> dict[str, Any]:
        epoch = self._epoch()
        return {"epoch": epoch, "seq": self._pin(0, self._hints or Hints(epoch, 0)).until, "dropped": 0}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        view = self._pin_after(start, end["seq"])
        for chunk in view.chunks():
            self._hints = chunk.hints
            lost = [gap for gap in chunk.gaps if gap.last_seq > end["dropped"]]
            if lost and self._options.fails_on_loss and self._files is None:
                raise RecordsDropped(lost[0].topic, lost[0].first_seq, lost[0].last_seq)
            return self._parts(chunk)
        return []

    def _pin_after(self, start: dict[str, Any], until: int | None = None) -> LogView:
        """
        What the log has behind an offset; behind the end of the archive, if there is one.

        Raises:
            ReadRefused: The offset is of another epoch: its seqs may stand for other records now.
        """
        epoch = self._epoch()
        if start["epoch"] != epoch:
            raise ReadRefused(
                f"the query began with epoch {start['epoch']} of the log, which is now in epoch {epoch}:"
                " its seqs may stand for other records; begin with a new checkpoint"
            )
        if self._files is not None:
            since, hints = self._files.state()
            return self._pin(since, hints, None if until is None else max(since, until))
        hints = self._hints if self._hints is not None and self._hints.seq <= start["seq"] else Hints(epoch, 0)
        return self._pin(start["seq"], hints, until)


def _first(chunks: Iterator[SourceChunk]) -> list[SourceChunk]:
    return [chunk for chunk in (next(chunks, None),) if chunk is not None]
