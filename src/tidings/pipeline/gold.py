"""
Running a job: bring the tables it reads, have it build, check what it promised, commit, and let it sum up.

The commit carries the job's own count, which is the run's ``until``: a job that was done for it is not done again. A job
that is known to work day by day is given only the days that have gained events since it last ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tidings.core.events import Event

from .errors import JobFailed, LakeError
from .jobs.job import Job, JobContext, Output
from .jobs.registry import DAILY
from .lake import Lake
from .progress import Progress, Step
from .schemas import CORE_TABLES, arrow_schema, columns_of
from .session import first_line
from .settings import PipelineSettings

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


def table_schemas(jobs: Sequence[Job]) -> dict[str, str]:
    """The columns of every table that the pipeline knows, as DDL, by name."""
    schemas = {table.name: table.schema for table in CORE_TABLES}
    for job in jobs:
        schemas |= {output.table: output.schema for output in job.writes}
    return schemas


class GoldJobs:
    """
    The jobs of one run.

    Args:
        lake: Where the tables are.
        settings: The jobs' own settings.
        jobs: All that may run, for the columns of the tables they write.
        epoch, until, as_of: What is fixed for the run.
        run: A name that no other run has.
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
    ) -> None:
        self._lake = lake
        self._settings = settings
        self._schemas = table_schemas(jobs)
        self._epoch = epoch
        self._until = until
        self._as_of = as_of
        self._run = run

    def run(
        self, spark: SparkSession, job: Job, progress: Progress, *, is_again: bool = False, is_paced: bool = False
    ) -> JobResult:
        """
        Run one job, unless it was done for this ``until``; or, ``is_paced``, not long ago though it costs all of history.

        Raises:
            JobFailed: Its code failed, or what it built is not what it promised.
            LakeError: Its tables cannot be written.
        """
        app = f"job.{job.name}"
        reached = [self._lake.note(output.table).get("seq", 0) for output in job.writes]
        since = min((int(seq) for seq in reached), default=0)
        if not is_again and (since >= self._until or (is_paced and self._is_early(job))):
            return JobResult(job.name)
        context = self._context(job)
        progress(Step(job.name, 0, len(job.writes)))
        try:
            tables = self._tables(spark, job, 0 if is_again else since)
            built = job.build(tables, context)
            rows: dict[str, int] = {}
            for number, output in enumerate(job.writes):
                progress(Step(job.name, number, len(job.writes), sum(rows.values())))
                rows[output.table] = self._store(job, output, built, app)
        except (JobFailed, LakeError):
            raise
        except Exception as error:
            raise JobFailed(job.name, f"{type(error).__name__}: {first_line(error)}") from error
        progress(Step(job.name, len(job.writes), len(job.writes), sum(rows.values())))
        return JobResult(job.name, rows)

    def _is_early(self, job: Job) -> bool:
        """Whether a job that makes its tables anew did so within the interval, by the log's own time."""
        if job.name in DAILY:
            return False
        made = [self._lake.note(output.table).get("as_of") for output in job.writes]
        if not made or not all(made):
            return False
        oldest = min(datetime.fromisoformat(str(moment)) for moment in made)
        return self._as_of - oldest < timedelta(seconds=self._settings.rebuild_interval_s)

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
        return JobContext(self._epoch, self._until, self._as_of, self._settings.jobs.get(job.name, {}))

    def _tables(self, spark: SparkSession, job: Job, since: int) -> dict[str, DataFrame]:
        days = self._changed_days(spark, job, since) if job.name in DAILY and since > 0 else None
        return {table: self._table(spark, table, days) for table in job.reads}

    def _table(self, spark: SparkSession, table: str, days: list[date] | None) -> DataFrame:
        ddl = self._schemas.get(table)
        if days is None or ddl is None or "date" not in dict(columns_of(ddl)):
            return self._lake.read(spark, table, None, ddl)
        frame = self._lake.read(spark, table, lambda file: any(file.may_hold("date", day, day) for day in days), ddl)
        return frame.where(frame["date"].isin(days))

    def _changed_days(self, spark: SparkSession, job: Job, since: int) -> list[date]:
        """The days of events that came since the job last ran; late events make old days change."""
        days: set[date] = set()
        for table in job.reads:
            files = self._lake.files(table, lambda file: file.may_hold("seq", since + 1, self._until))
            if not files:
                continue
            chosen = {file.name for file in files}
            frame = self._lake.read(spark, table, lambda file, chosen=chosen: file.name in chosen)  # type: ignore[misc]
            days |= {row[0] for row in frame.where(f"seq > {since}").select("date").distinct().collect()}
        return sorted(days)

    def _store(self, job: Job, output: Output, built: Mapping[str, DataFrame], app: str) -> int:
        frame = built.get(output.table)
        if frame is None:
            raise JobFailed(job.name, f"it promised {output.table} and did not build it")
        return self._lake.replace(
            as_promised(job, output, frame),
            output.table,
            output.schema,
            by=output.replaced_by,
            app=app,
            version=self._until,
            note={"epoch": self._epoch, "seq": self._until, "job": job.name, "as_of": self._as_of.isoformat()},
            run=self._run,
        )


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
