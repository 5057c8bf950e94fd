"""
Running a job: plan what has to be computed, read the rows that takes, have the job build, check its promised columns, commit,
and let it summarise.

The commit carries the run's ``until``: a job that was done for it is not done again. A job whose tables are partitioned is
given what its changed partitions depend on, and only those are replaced (``gold_plan``); any other is given whole tables, and
its own are replaced as a whole. Only files that may hold rows of the replaced ranges are touched. Their other rows are
written again as they are, split where a range begins and ends, so that a file is not touched again for what comes next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tidings.core.events import Event

from .errors import JobFailed, LakeError
from .gold_plan import DAY_S, JobPlan, JobPlanner, NoteCache, Range, gaps, holds_any, may_hold_any
from .jobs.job import Job, JobContext, OutputTable
from .lake import Lake, Note, rows_of, stem
from .schemas import CORE_TABLES, arrow_schema, columns_of
from .session import Progress, ProgressStep, first_line
from .settings import PipelineSettings
from .table_files import DataFile, entry_of, remove_action, translate_read_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS: Final = 65_536


class GoldStore:
    """
    The jobs' tables, to be written.

    Args:
        lake: Where they are.
        now_ns: For the times that a table's log wants.
        file_bytes: About as large a file is made, where there is much.
        until: The seq that the run reaches to.
        run: A name that no other run has.
    """

    def __init__(self, lake: Lake, *, now_ns: int, file_bytes: int, until: int, run: str) -> None:
        self._lake = lake
        self._now_ms = now_ns // 1_000_000
        self._file_bytes = file_bytes
        self._until = until
        self._run = run

    def replace_all(
        self, frame: DataFrame, output: OutputTable, column: str, app: str, note: Note, *, bytes_read: int
    ) -> int:
        """Put the rows in the place of all there were; how many."""
        if column:
            frame = self._in_files(frame, column, bytes_read)
        return self._lake.replace(
            frame, output.table, output.schema, app=app, version=self._version(output, app), note=note, run=self._run
        )

    def _version(self, output: OutputTable, app: str) -> int:
        return max(self._until, (self._lake.done(output.table, app) or 0) + 1)

    def keep_all(self, output: OutputTable, app: str, note: Note) -> None:
        """Leave the rows as they are, and note how far they reach."""
        version = self._version(output, app)
        self._lake.commit(output.table, arrow_schema(output.schema), (), app=app, version=version, note=note)

    def replace_ranges(
        self,
        frame: DataFrame,
        output: OutputTable,
        column: str,
        ranges: tuple[Range, ...],
        app: str,
        note: Note,
        *,
        bytes_read: int,
    ) -> int:
        """Put those rows that lie in the ranges in the place of those that lay there; how many came."""
        kind = dict(columns_of(output.schema))[column]
        fresh = self._in_files(frame.where(holds_any(column, kind, ranges)), column, bytes_read)
        version = self._version(output, app)
        name = stem(app, version, self._run)
        adds = self._lake.write_files(fresh, output.table, output.schema, name)
        old = self._lake.files(output.table, lambda file: may_hold_any(file, column, ranges))
        touched, kept = self._cut(old, output.table, column, kind, ranges, name)
        folder = self._lake.folder(output.table)
        rest = self._lake.adds([entry_of(folder, file.relative_to(folder.path).as_posix()) for file in kept])
        self._lake.commit(
            output.table,
            arrow_schema(output.schema),
            [*adds, *rest],
            [remove_action(file, now_ms=self._now_ms) for file in touched],
            app=app,
            version=version,
            note=note,
        )
        return rows_of(adds)

    def _in_files(self, frame: DataFrame, column: str, bytes_read: int) -> DataFrame:
        """The rows spread over files by their place, so that files are of a size and their bounds tell them apart."""
        count = max(1, bytes_read // self._file_bytes)
        spread = frame.repartition(1) if count == 1 else frame.repartitionByRange(count, column)
        return spread.sortWithinPartitions(column)

    def _cut(
        self,
        files: list[DataFile],
        table: str,
        column: str,
        kind: str,
        ranges: tuple[Range, ...],
        name: str,
    ) -> tuple[list[DataFile], list[Path]]:
        """The files that do hold rows of the ranges, and new files with the rest of their rows."""
        touched: list[DataFile] = []
        kept: list[Path] = []
        folder = self._lake.folder(table)
        for number, file in enumerate(files):
            with translate_read_errors(folder):
                target = folder.path / f"{name}-kept" / f"{number:05d}"
                found = _cut_file(folder.path / file.name, column, kind, ranges, target)
            if found is not None:
                touched.append(file)
                kept += found
        if kept:
            folder.sync(*(path.relative_to(folder.path).as_posix() for path in kept))
        return touched, kept


def _cut_file(path: Path, column: str, kind: str, ranges: tuple[Range, ...], target: Path) -> list[Path] | None:
    """Write the rows that lie in no range_, a file a gap; None, and nothing written, if no row lies in a range_."""
    with pq.ParquetFile(path) as source:
        if not any((_gaps(batch, column, kind, ranges) < 0).any() for batch in _batches(source, [column])):
            return None
        target.parent.mkdir(parents=True, exist_ok=True)
        writers: dict[int, tuple[Path, Any]] = {}
        with contextlib.ExitStack() as stack:
            for batch in _batches(source, None):
                places = _gaps(batch, column, kind, ranges)
                for gap in np.unique(places[places >= 0]).tolist():
                    if gap not in writers:
                        file = target.with_name(f"{target.name}-{gap}.parquet")
                        writer = pq.ParquetWriter(file, source.schema_arrow, compression="zstd")
                        writers[gap] = (file, stack.enter_context(writer))
                    writers[gap][1].write_batch(batch.filter(pa.array(places == gap)))
        return [file for file, _ in writers.values()]


def _batches(source: Any, columns: list[str] | None) -> Iterator[Any]:
    yield from source.iter_batches(batch_size=_BATCH_ROWS, columns=columns)


def _gaps(batch: Any, column: str, kind: str, ranges: tuple[Range, ...]) -> np.ndarray[Any, Any]:
    return gaps(batch.column(column), kind, ranges)


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job."""

    name: str
    rows: Mapping[str, int] | None = None
    """Rows written, by table; ``None`` if there was nothing to do."""
    published: int = 0
    """How many events it had to say to the log."""
    error: JobFailed | None = None
    partitions: int | None = None
    """How many partitions of its tables were rebuilt; ``None`` if all were, or none was checked."""
    files_read: int = 0
    """How many data files it was given"""
    files_there: int = 0
    """of how many that the tables it reads have."""


def table_schemas(jobs: Sequence[Job]) -> dict[str, str]:
    """The columns of every table that the pipeline knows, as DDL, by name."""
    schemas = {table.name: table.schema for table in CORE_TABLES}
    for job in jobs:
        schemas |= {output.table: output.schema for output in job.writes}
    return schemas


@dataclass(slots=True)
class _Input:
    """The tables that a job was given, and what that took."""

    tables: dict[str, DataFrame]
    files_read: int = 0
    files_there: int = 0
    bytes_read: int = 0


class GoldJobs:
    """
    The jobs of one run.

    Args:
        lake: Where the tables are.
        settings: The jobs' own settings.
        jobs: All that may run, for the columns of the tables they write.
        epoch, until, as_of: What is fixed for the run.
        run: A name that no other run has.
        now_ns: The time, for the tables' logs.
    """

    def __init__(
        self,
        lake: Lake,
        settings: PipelineSettings,
        jobs: Sequence[Job],
        *,
        epoch: str,
        until: int,
        as_of: datetime,
        run: str,
        now_ns: int,
    ) -> None:
        self._lake = lake
        self._settings = settings
        self._schemas = table_schemas(jobs)
        self._epoch = epoch
        self._until = until
        self._as_of = as_of
        self._notes = NoteCache(lake)
        self._planner = JobPlanner(lake, self._notes, until=until, as_of=as_of, run=run)
        self._store = GoldStore(lake, now_ns=now_ns, file_bytes=settings.compact_bytes_max, until=until, run=run)

    def run(
        self, spark: SparkSession, job: Job, progress: Progress, *, is_again: bool = False, is_paced: bool = False
    ) -> JobResult:
        """
        Run one job, unless it was done for this ``until``; or, ``is_paced``, not long ago though it costs all of history.

        Raises:
            JobFailed: Its code failed, or what it built is not what it promised.
            LakeError: Its tables cannot be written.
        """
        reached = [self._notes.of(output.table).get("seq", 0) for output in job.writes]
        since = min((int(seq) for seq in reached), default=0)
        if not is_again and (since >= self._until or (is_paced and self._is_early(job))):
            return JobResult(job.name)
        progress(ProgressStep(job.name, 0, len(job.writes)))
        try:
            result = self._made(spark, job, self._context(job), progress, is_again=is_again)
        except (JobFailed, LakeError):
            raise
        except Exception as error:
            raise JobFailed(job.name, f"{type(error).__name__}: {first_line(error)}") from error
        finally:
            for output in job.writes:
                self._notes.forget(output.table)
        progress(ProgressStep(job.name, len(job.writes), len(job.writes), sum((result.rows or {}).values())))
        return result

    def _made(
        self, spark: SparkSession, job: Job, context: JobContext, progress: Progress, *, is_again: bool
    ) -> JobResult:
        plan = self._planner.plan(job, context, is_again=is_again)
        note = {
            "epoch": self._epoch,
            "seq": self._until,
            "job": job.name,
            "as_of": self._as_of.isoformat(),
            **plan.note,
        }
        app = f"job.{job.name}"
        if plan.rebuilt == ():
            for output in job.writes:
                self._store.keep_all(output, app, note)
            return JobResult(job.name, {output.table: 0 for output in job.writes}, partitions=0)
        given = self._read_inputs(spark, job, plan, is_again=is_again)
        built = job.build(given.tables, context)
        rows: dict[str, int] = {}
        for number, output in enumerate(job.writes):
            progress(ProgressStep(job.name, number, len(job.writes), sum(rows.values())))
            frame = built.get(output.table)
            if frame is None:
                raise JobFailed(job.name, f"it promised {output.table} and did not build it")
            frame = as_promised(job, output, frame)
            size = given.bytes_read
            column = "" if job.partitioning is None else job.partitioning.seq_column or "date"
            if plan.rebuilt is None:
                rows[output.table] = self._store.replace_all(frame, output, column, app, note, bytes_read=size)
            else:
                rows[output.table] = self._store.replace_ranges(
                    frame, output, column, plan.rebuilt, app, note, bytes_read=size
                )
        return JobResult(
            job.name,
            rows,
            partitions=_count(job, plan),
            files_read=given.files_read,
            files_there=given.files_there,
        )

    def made_at(self, job: Job) -> datetime | None:
        """What the run that made the job's tables called now; ``None`` if one of them was never made."""
        made = [self._notes.of(output.table).get("as_of") for output in job.writes]
        if not made or not all(made):
            return None
        return min(datetime.fromisoformat(str(moment)) for moment in made)

    def is_new_interval(self, made_at: datetime | None) -> bool:
        """Whether one of the intervals that rebuilding is paced by, counted from 1970, ended since that time."""
        interval_s = self._settings.rebuild_interval_s
        if made_at is None or not interval_s:
            return True
        return self._as_of.timestamp() // interval_s > made_at.timestamp() // interval_s

    def _is_early(self, job: Job) -> bool:
        """Whether a job that makes its tables anew did so within the interval, by the log's own time."""
        made_at = None if job.partitioning is not None else self.made_at(job)
        return made_at is not None and self._as_of - made_at < timedelta(seconds=self._settings.rebuild_interval_s)

    def summary(self, spark: SparkSession, job: Job) -> tuple[Event, ...]:
        """
        What a job has to say to the log about the tables it wrote.

        Raises:
            JobFailed: Its code failed.
        """
        if job.summarise is None:
            return ()
        tables = {output.table: self._lake.read(spark, output.table, None, output.schema) for output in job.writes}
        try:
            return tuple(job.summarise(tables, self._context(job)))
        except Exception as error:
            raise JobFailed(job.name, f"its summary: {type(error).__name__}: {first_line(error)}") from error

    def _context(self, job: Job) -> JobContext:
        settings = self._settings.jobs.get(job.settings_of or job.name, {})
        return JobContext(self._epoch, self._until, self._as_of, settings)

    def _read_inputs(self, spark: SparkSession, job: Job, plan: JobPlan, *, is_again: bool) -> _Input:
        given = _Input({})
        own = {output.table for output in job.writes}
        for table in job.reads:
            files = self._lake.files(table) if self._lake.exists(table) else []
            # A job that is done again is done from the beginning: it does not see what it made before.
            wanted = [] if is_again and table in own else [file for file in files if plan.needs(table, file)]
            given.files_there += len(files)
            given.files_read += len(wanted)
            given.bytes_read += sum(file.size for file in wanted)
            given.tables[table] = self._table(spark, table, plan, wanted)
        return given

    def _table(self, spark: SparkSession, table: str, plan: JobPlan, wanted: Sequence[DataFile]) -> DataFrame:
        ddl = self._schemas.get(table)
        chosen = {file.name for file in wanted}
        frame = self._lake.read(spark, table, lambda file: file.name in chosen, ddl)
        if not wanted:
            return frame.limit(0)  # Spark then knows that there is nothing, and leaves out what would be joined with it
        window = plan.windows.get(table)
        if window is not None and window.types:
            frame = frame.where(frame["type"].isin(*window.types))
        if window is not None and table in plan.needed:
            frame = frame.where(
                holds_any(window.at, frame.schema[window.at].dataType.simpleString(), plan.needed[table])
            )
        return frame


def _count(job: Job, plan: JobPlan) -> int | None:
    if plan.rebuilt is None or job.partitioning is None:
        return None
    if job.partitioning.seq_column:
        return len(plan.rebuilt)
    return sum((high - low) // DAY_S for low, high in plan.rebuilt)


def as_promised(job: Job, output: OutputTable, frame: DataFrame) -> DataFrame:
    """
    The frame with the columns of its promise, in their order and of their types.

    Raises:
        JobFailed: A column is missing, or one too many is there.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    promised: Any = from_arrow_schema(arrow_schema(output.schema))
    wanted, found = [column.name for column in promised], frame.columns
    if missing := [name for name in wanted if name not in found]:
        raise JobFailed(job.name, f"{output.table} lacks the column {missing[0]!r}")
    if surplus := [name for name in found if name not in wanted]:
        raise JobFailed(job.name, f"{output.table} has a column {surplus[0]!r} that it did not promise")
    return frame.select(*(frame[column.name].cast(column.dataType).alias(column.name) for column in promised))
