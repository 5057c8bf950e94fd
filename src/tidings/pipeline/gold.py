"""
Running a job: find out what of it is to be made, bring the rows that takes, have it build, check what it promised, commit,
and let it sum up.

The commit carries the job's own count, which is the run's ``until``: a job that was done for it is not done again. A job that
says how its tables fall into pieces is given what its changed pieces depend on, and only those are replaced (``gold_plan``,
``gold_store``); any other is given whole tables, and its own are replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from tidings.core.events import Event

from .errors import JobFailed, LakeError
from .gold_plan import Notes, Plan, Planner
from .gold_store import GoldStore
from .jobs.job import Job, JobContext, Output
from .lake import Lake
from .lake_log import DataFile
from .progress import Progress, Step
from .schemas import CORE_TABLES, arrow_schema
from .session import first_line
from .settings import PipelineSettings
from .stretches import holds_any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["GoldJobs", "JobResult", "table_schemas"]


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job."""

    name: str
    rows: Mapping[str, int] | None = None
    """Rows written, by table; ``None`` if there was nothing to do."""
    published: int = 0
    """How many events it had to say to the log."""
    error: JobFailed | None = None
    pieces: int | None = None
    """How many pieces of its tables were made anew; ``None`` if all were, or none was looked at."""
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
class _Brought:
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
        self._notes = Notes(lake)
        self._planner = Planner(lake, self._notes, until=until, as_of=as_of, run=run)
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
        progress(Step(job.name, 0, len(job.writes)))
        try:
            result = self._made(spark, job, self._context(job), progress, is_again=is_again)
        except (JobFailed, LakeError):
            raise
        except Exception as error:
            raise JobFailed(job.name, f"{type(error).__name__}: {first_line(error)}") from error
        finally:
            for output in job.writes:
                self._notes.forget(output.table)
        progress(Step(job.name, len(job.writes), len(job.writes), sum((result.rows or {}).values())))
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
        if plan.made == ():
            for output in job.writes:
                self._store.keep_all(output, app, note)
            return JobResult(job.name, {output.table: 0 for output in job.writes}, pieces=0)
        brought = self._bring(spark, job, plan, is_again=is_again)
        built = job.build(brought.tables, context)
        rows: dict[str, int] = {}
        for number, output in enumerate(job.writes):
            progress(Step(job.name, number, len(job.writes), sum(rows.values())))
            frame = built.get(output.table)
            if frame is None:
                raise JobFailed(job.name, f"it promised {output.table} and did not build it")
            frame = as_promised(job, output, frame)
            size = brought.bytes_read
            if plan.made is None:
                rows[output.table] = self._store.replace_all(frame, output, app, note, bytes_read=size)
            else:
                rows[output.table] = self._store.replace_stretches(frame, output, plan.made, app, note, bytes_read=size)
        return JobResult(
            job.name,
            rows,
            pieces=_count(job, plan),
            files_read=brought.files_read,
            files_there=brought.files_there,
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
        made_at = None if job.pieces is not None else self.made_at(job)
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

    def _bring(self, spark: SparkSession, job: Job, plan: Plan, *, is_again: bool) -> _Brought:
        brought = _Brought({})
        own = {output.table for output in job.writes}
        for table in job.reads:
            files = self._lake.files(table) if self._lake.exists(table) else []
            # A job that is done again is done from the beginning: it does not see what it made before.
            wanted = [] if is_again and table in own else [file for file in files if plan.wants(table, file)]
            brought.files_there += len(files)
            brought.files_read += len(wanted)
            brought.bytes_read += sum(file.size for file in wanted)
            brought.tables[table] = self._table(spark, table, plan, wanted)
        return brought

    def _table(self, spark: SparkSession, table: str, plan: Plan, wanted: Sequence[DataFile]) -> DataFrame:
        ddl = self._schemas.get(table)
        chosen = {file.name for file in wanted}
        frame = self._lake.read(spark, table, lambda file: file.name in chosen, ddl)
        if not wanted:
            return frame.limit(0)  # Spark then knows that there is nothing, and leaves out what would be joined with it
        look = plan.looks.get(table)
        if look is not None and look.types:
            frame = frame.where(frame["type"].isin(*look.types))
        if look is not None and table in plan.wanted:
            frame = frame.where(holds_any(look.at, frame.schema[look.at].dataType.simpleString(), plan.wanted[table]))
        return frame


def _count(job: Job, plan: Plan) -> int | None:
    if plan.made is None or job.pieces is None:
        return None
    if job.pieces.is_by_seq:
        return len(plan.made)
    return sum((high - low) // job.pieces.length_s for low, high in plan.made)


def as_promised(job: Job, output: Output, frame: DataFrame) -> DataFrame:
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
