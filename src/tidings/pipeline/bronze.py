"""
Bronze: every record as the log committed it, exactly once.

The data source ``tidings`` plans what is new up to one seq, and its tasks write it to files (``bronze_task``; a little is
written here, by the same code); one commit adds them all to the table and stores the seq that the table now reaches. A run that dies leaves files that no table refers to, and
the next run starts at the same seq again. Lines that are no records go to the quarantine table, with file, byte and reason,
and so do ranges that retention dropped before they were archived. They are committed before the events: a run that dies in
between finds the same ones again, and leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import duckdb
import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from .bronze_task import ArchiveTarget, Failed, Message, Planned, Written, decode_message
from .errors import LakeConflict, LakeDamaged
from .lake import Lake
from .schemas import BRONZE_EVENTS, QUARANTINE, arrow_schema
from .session import Progress, ProgressStep, translate_spark_errors, watched
from .settings import PipelineSettings
from .source import Gap, LogSource, SourceChunk, bundles
from .state_files import archived_seq, load_hints, save_hints
from .table_files import dataset, write_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BRONZE_APP: Final = "bronze"


@dataclass(frozen=True, slots=True)
class BronzeState:
    """What the table says about itself."""

    seq: int = 0
    """Every record up to here is in the table, or in the quarantine."""
    batch: int = 0
    epoch: str | None = None
    payload_bytes: int | None = 0
    """No payload in the table is longer; ``None`` if nobody has looked, as in tables of earlier versions."""


class _BronzeNote(msgspec.Struct, frozen=True):
    """What every note of the table says."""

    seq: int
    batch: int
    epoch: str
    payload_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BronzeFill:
    """What was added."""

    since: int
    until: int
    rows: int = 0
    quarantined: int = 0
    bytes: int = 0
    """Of the log."""
    commits: int = 0

    def __add__(self, other: BronzeFill) -> BronzeFill:
        return BronzeFill(
            self.since,
            other.until,
            self.rows + other.rows,
            self.quarantined + other.quarantined,
            self.bytes + other.bytes,
            self.commits + other.commits,
        )


class Bronze:
    """
    The table of events, and how it is filled.

    Args:
        lake: Where it is.
        source: The log, at a place that the executors see too.
        settings: How much at a time.
        run: A name that no other run has.
    """

    def __init__(self, lake: Lake, source: LogSource, settings: PipelineSettings, *, run: str) -> None:
        self._lake = lake
        self._source = source
        self._settings = settings
        self._run = run

    def state(self) -> BronzeState:
        """Where the table stands."""
        return bronze_state(self._lake)

    def fill(self, spark: Callable[[], SparkSession], epoch: str, progress: Progress) -> BronzeFill:
        """
        Take all that the log has now into the table. What is little is read here; Spark is asked for if there is more.

        Raises:
            PositionLost, LakeConflict, LakeUnwritable, SegmentMissing, SparkFailed
        """
        since = self.state().seq
        view = self._source.pin(since, load_hints(self._lake.storage, epoch=epoch, seq=since))
        filled = BronzeFill(since, since)
        for chunk in view.chunks(self._settings.commit_bytes_max, self._settings.commit_files_max):
            is_small = self._settings.is_small(chunk.until - chunk.since, chunk.size)
            messages = (self._read_here if is_small else self._read)(spark, chunk, epoch, progress, filled.rows)
            filled += self.take(messages, epoch)
        progress(ProgressStep("bronze", 1, 1, filled.rows))
        return filled

    def _read(
        self, spark: Callable[[], SparkSession], chunk: SourceChunk, epoch: str, progress: Progress, rows: int
    ) -> list[Message]:
        """Have the tasks of the data source write a chunk; what they say."""
        session = spark()
        options = self.reader_options(session, epoch)
        tasks = len(bundles(chunk.ranges, self._settings.split_bytes_max, _parallelism(session)))
        with translate_spark_errors("bronze"), watched(session, progress, "bronze", tasks, rows):
            return messages_of(session.read.format("tidings").options(**options, until=str(chunk.until)).load())

    def _read_here(
        self, _: Callable[[], SparkSession], chunk: SourceChunk, epoch: str, progress: Progress, rows: int
    ) -> list[Message]:
        """The same in this process, by the same reader."""
        from pyspark.sql.types import StructType

        from .spark_source import LogReader, SourceOptions

        progress(ProgressStep("bronze", 0, 1, rows))
        options = SourceOptions.parse({**self._source_options(epoch, parallelism=1), "until": str(chunk.until)})
        reader = LogReader(options, StructType())
        batches = (batch for part in reader.partitions() for batch in reader.read(part))
        return [decode_message(text) for batch in batches for text in batch.column(0).to_pylist()]

    def reader_options(self, spark: SparkSession, epoch: str) -> dict[str, str]:
        """What the data source, made known to the session, is to do: read the log from where the table ends, and write files of the table."""
        from tidings.spark import register

        register(spark)
        return self._source_options(epoch, _parallelism(spark))

    def _source_options(self, epoch: str, parallelism: int) -> dict[str, str]:
        archive = ArchiveTarget(
            lake=self._lake.storage.url,
            epoch=epoch,
            run=self._run,
            memory_mb=self._settings.task_memory_mb,
            line_bytes_max=self._settings.quarantine_line_bytes_max,
        )
        return {
            "path": str(self._source.layout.workspace),
            "archive": msgspec.json.encode(archive).decode(),
            "splitBytes": str(self._settings.split_bytes_max),
            "minPartitions": str(parallelism),
            **{f"storage.{name}": value for name, value in self._lake.storage.options},
        }

    def take(self, messages: Sequence[Message], epoch: str) -> BronzeFill:
        """
        Commit what the tasks wrote; nothing if nothing was planned, because the table had it all.

        Raises:
            LakeConflict: Somebody else took it meanwhile.
            LakeUnwritable, SegmentMissing: A task could not do its part; nothing is committed.
        """
        for message in messages:
            if isinstance(message, Failed):
                raise message.as_error()
        state = self.state()
        planned = next((message for message in messages if isinstance(message, Planned)), None)
        if planned is None:
            return BronzeFill(state.seq, state.seq)
        if planned.since != state.seq:
            raise LakeConflict(str(self._lake.folder(BRONZE_EVENTS.name)), "another run took what is new")
        files = [message for message in messages if isinstance(message, Written)]
        events = [file for file in files if file.table == BRONZE_EVENTS.name]
        quarantined = self._set_apart(
            [file.entry for file in files if file.table == QUARANTINE.name], planned, epoch, state.batch + 1
        )
        known = state.payload_bytes
        longest = None if known is None else max([known, *(file.payload_bytes for file in events)])
        self._lake.commit(
            BRONZE_EVENTS.name,
            arrow_schema(BRONZE_EVENTS.schema),
            self._lake.adds([file.entry for file in events]),
            app=BRONZE_APP,
            version=state.batch + 1,
            note={
                "epoch": epoch,
                "seq": planned.until,
                "since": planned.since,
                "batch": state.batch + 1,
                "payload_bytes": longest,
            },
        )
        # Last: hints that are older than the table only cost reading.
        save_hints(self._lake.storage, planned.hints)
        return BronzeFill(
            planned.since,
            planned.until,
            rows=sum(int(file.entry["rows"]) for file in events),
            quarantined=quarantined,
            bytes=sum(file.log_bytes for file in events),
            commits=1,
        )

    def _set_apart(self, entries: list[Mapping[str, Any]], planned: Planned, epoch: str, batch: int) -> int:
        """Commit what is no record to the quarantine, as far as it is not known there; how many rows."""
        folder, schema = self._lake.folder(QUARANTINE.name), arrow_schema(QUARANTINE.schema)
        if planned.gaps:
            rows = pa.Table.from_pylist(gap_rows(planned.gaps, epoch, planned.found_at_us), schema=schema)
            name = f"{BRONZE_APP}-{planned.until:012d}-{self._run}-gaps.parquet"
            entries = [*entries, *_present(write_file(folder, name, schema, [rows]))]
        if not entries:
            return 0
        done = self._lake.done(QUARANTINE.name, BRONZE_APP) or 0
        known = self._lake.dataset(QUARANTINE.name, schema=schema)
        kept: list[Mapping[str, Any]] = []
        for entry in entries:
            fresh = dataset(folder, [(entry["name"], None)], schema)
            found = without_repeats(fresh, known)
            whole = found.num_rows == entry["rows"]
            kept += [entry] if whole else _present(write_file(folder, f"rest-of-{entry['name']}", schema, [found]))
        if kept:
            self._lake.commit(
                QUARANTINE.name,
                schema,
                self._lake.adds(kept),
                app=BRONZE_APP,
                version=done + 1,
                note={"epoch": epoch, "seq": planned.until, "batch": batch},
            )
        return sum(int(entry["rows"]) for entry in kept)


def bronze_state(lake: Lake) -> BronzeState:
    """
    Where the table of events stands.

    Raises:
        LakeDamaged: Its last note is not one of bronze's.
    """
    note = lake.note(BRONZE_EVENTS.name)
    if not note:
        return BronzeState()
    try:
        said = msgspec.convert(note, _BronzeNote)
    except msgspec.ValidationError as error:
        raise LakeDamaged(str(lake.folder(BRONZE_EVENTS.name)), f"its last note is not bronze's: {error}") from error
    return BronzeState(said.seq, said.batch, said.epoch, said.payload_bytes)


def check_reach(lake: Lake) -> None:
    """
    Make sure that bronze has not lost commits: the files that they named would be taken for old ones, and be deleted.

    Raises:
        LakeDamaged: It has.
    """
    until = archived_seq(lake.storage, lake.epoch)  # first: a run that commits meanwhile takes the table past it
    reached = bronze_state(lake).seq
    if reached < until:
        raise LakeDamaged(str(lake.folder(BRONZE_EVENTS.name)), ends_early(reached, until))


def ends_early(reached: int, until: int) -> str:
    """What is the matter with a bronze that has lost commits."""
    return f"its log ends at seq {reached}, and it held the records up to {until}"


def messages_of(frame: DataFrame) -> list[Message]:
    """Have the tasks of an archiving read do their work; what they say."""
    return [decode_message(row[0]) for row in frame.collect()]


def gap_rows(gaps: Sequence[Gap], epoch: str, found_at_us: int) -> list[dict[str, Any]]:
    """Ranges that retention dropped before the lake had them; neighbours are one row."""
    rows: list[dict[str, Any]] = []
    for gap in sorted(gaps, key=lambda each: (each.topic, each.first_offset)):
        last = rows[-1] if rows else None
        if last is not None and last["topic"] == gap.topic and last["_last_offset"] + 1 == gap.first_offset:
            last["last_seq"], last["_last_offset"] = gap.last_seq, gap.last_offset
            continue
        rows.append(
            {
                "file": gap.path,
                "byte_offset": 0,
                "topic": gap.topic,
                "reason": "dropped by retention before it was archived",
                "line": None,
                "line_bytes": None,
                "first_seq": gap.first_seq,
                "last_seq": gap.last_seq,
                "found_at": found_at_us,
                "epoch": epoch,
                "_last_offset": gap.last_offset,
            }
        )
    return rows


def without_repeats(fresh: Any, known: Any) -> pa.Table:
    """
    The rows of the quarantine among ``fresh`` that are not among ``known``.

    A run that found no hints reads more than it needs, and meets lines again that were set apart before.
    """
    with duckdb.connect() as duck:
        duck.register("fresh", fresh)
        duck.register("known", known)
        return duck.sql(
            "select fresh.* from fresh anti join known"
            " on fresh.file = known.file and fresh.byte_offset = known.byte_offset and fresh.reason = known.reason"
            " and fresh.epoch = known.epoch and fresh.last_seq is not distinct from known.last_seq"
        ).to_arrow_table()


def _present(entry: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    return [] if entry is None else [entry]


def _parallelism(spark: SparkSession) -> int:
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        return 4
    return max(1, int(spark.sparkContext.defaultParallelism))
