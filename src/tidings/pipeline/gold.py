"""
The jobs of a run: the rows each is given, its commits, and its summary. What it has to compute is ``changes``' to find.

Jobs are fenced: one that fails leaves its tables as they were, is noted, and is tried again by the next run. Jobs that do not
read each other's tables run side by side. A job whose input is not much (``undivided_rows_max``) has a session that spends
nothing on preparing for more, and its tables are written here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from tidings.core.clock import Clock
from tidings.core.events import Event

from .bronze import bronze_state
from .changes import GROWING, NEVER_MADE, Changes, Plan, below
from .committer import JOB_APPS, Replaces, check_owner
from .errors import JavaMissing, JobFailed, LakeConflict, MasterUnreachable, SparkFailed
from .jobs.job import Job, JobContext, OutputTable, setting, shaped
from .lake import Lake, rows_of, stem
from .schemas import CORE_TABLES, arrow_schema, columns_of
from .session import Progress, ProgressStep, first_line, session_for_little, session_for_short_rows
from .settings import PipelineSettings
from .shared_inputs import SharedInputs
from .status import JobState, JobStates
from .summaries import OWN_DEVICE, SUMMARIES_MAX, Published
from .table_files import DAY_COLUMN, NO_DAY, DataFile
from .table_log import Note

if TYPE_CHECKING:
    from deltalake.transaction import AddAction
    from pyspark.sql import DataFrame, SparkSession

Publish = Callable[[Sequence[Event]], bool]
"""
Takes events to the log through the front door: a log that is opened for it, or the node that has the workspace. Whether
the log has them now; if it has not (the workspace is busy), the next run says the same again.
"""

_TRIES_MAX: Final = 3
"""So often a job is computed if other runs commit to its tables meanwhile."""
_ENVELOPE_BYTES: Final = 1024
"""What a row may have beside what its event's payload says."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job."""

    name: str
    rows: Mapping[str, int] | None = None
    """Rows written, by table; ``None`` if there was nothing to do."""
    published: int = 0
    """How many events it published that were not published before."""
    is_told: bool = True
    """Whether that reached the log; what did not is said again by the next run."""
    error: JobFailed | None = None
    waits_for: str = ""
    """The job that failed in this run and has never made a table that this one reads: this one was not run."""
    days: int | None = None
    """How many days of its tables were rebuilt; ``None`` if all were, or it does not go by days."""
    files_read: int = 0
    """How many data files it was given"""
    files_there: int = 0
    """of how many that the tables it reads have."""
    bytes_read: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GoldJobs:
    """The jobs of one run."""

    lake: Lake
    settings: PipelineSettings
    jobs: Sequence[Job]
    """Those to run, each after those whose tables it reads."""
    spark: Callable[[], SparkSession]
    """The session; asked for only when a job has something to compute."""
    states: JobStates
    """What is known of the jobs' last runs."""
    until: int
    as_of: datetime
    run_name: str
    """A name that no other run has."""
    clock: Clock
    publish: Publish | None
    """Where summaries go; without it there are none."""
    progress: Progress
    """Told how far it is, from any thread."""
    at_once_max: int
    """So many run side by side."""
    shared: SharedInputs
    publishing: threading.Lock = field(default_factory=threading.Lock)

    def run(self, *, again: Container[str] = (), is_paced: bool = False) -> tuple[JobResult, ...]:
        """
        Run all jobs that are due; what became of each, in their order.

        Args:
            again: The names of those that are done from the beginning, also if they are up to date.
            is_paced: Whether jobs and summaries wait for their intervals: for runs that follow the log.

        Raises:
            JavaMissing, MasterUnreachable, SparkFailed: A job needs Spark, and it cannot be started.
        """
        results: dict[str, JobResult] = {}
        running: dict[Future[JobResult], str] = {}
        waiting = {job: _before(job, self.jobs[:at]) for at, job in enumerate(self.jobs)}
        ahead = seconds_ahead(waiting, lambda name: self.states.of(name).seconds)
        with contextlib.closing(self.shared), ThreadPoolExecutor(self.at_once_max, "tidings-job") as pool:
            while waiting or running:
                ready = [job for job, before in waiting.items() if before <= results.keys()]
                ready.sort(key=lambda job: -ahead[job.name])
                for job in ready[: self.at_once_max - len(running)]:
                    del waiting[job]
                    if maker := self._missing_maker(job, results):
                        # Run on a table that is missing, it would store "there is nothing" as a fact.
                        results[job.name] = JobResult(job.name, waits_for=maker)
                        self.shared.end(job)
                        continue
                    running[pool.submit(self._fenced, job, is_again=job.name in again, is_paced=is_paced)] = job.name
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    if future.exception() is not None:
                        pool.shutdown(wait=False, cancel_futures=True)
                    results[running.pop(future)] = future.result()
        return tuple(results[job.name] for job in self.jobs)

    def _missing_maker(self, job: Job, results: Mapping[str, JobResult]) -> str:
        """The first job of this run that was not successful and never made a table that ``job`` reads; empty if there is none."""
        for maker in self.jobs:
            result = results.get(maker.name)
            if result is None or not (result.error or result.waits_for):
                continue
            tables = {output.table for output in maker.writes}.intersection(job.reads)
            if any("seq" not in self.lake.note(table) for table in tables):
                return maker.name
        return ""

    def _fenced(self, job: Job, *, is_again: bool, is_paced: bool) -> JobResult:
        """One job with its summary, whatever becomes of it."""
        begun = self.clock.monotonic()
        state = self.states.of(job.name)
        result = JobResult(job.name)
        try:
            if not (is_paced and self._is_early(job, state)):
                result = self._computed_beside_others(job, is_again=is_again)
            # What was not made anew has nothing new to say, unless a page of it was left over; and a summary costs all of a
            # table, however little of it was made anew, so it is paced even where its job is not.
            if not is_paced or ((result.rows is not None or state.has_more) and self._is_new_interval(job, state)):
                published = self._summarised(job)
                result = replace(result, published=published or 0, is_told=published is not None)
        except (JavaMissing, MasterUnreachable, SparkFailed):
            raise  # there is no Spark, for whatever job
        except Exception as error:  # noqa: BLE001 - the fence: whatever it is, it is this job's
            problem = error if isinstance(error, JobFailed) else JobFailed(job.name, _said(error))
            result = JobResult(job.name, error=problem)
            problem.__cause__ = None if problem is error else error
        result = replace(result, seconds=self.clock.monotonic() - begun)
        self.shared.end(job)
        self._note_result(job, result)
        return result

    def _computed_beside_others(self, job: Job, *, is_again: bool) -> JobResult:
        """Bring the job's tables up to date, or find that another run of the same seq has done it meanwhile."""
        for tries_left in reversed(range(_TRIES_MAX)):
            try:
                return self._computed(job, self.states.of(job.name), is_again=is_again)
            except LakeConflict:
                reached = min((int(self.lake.note(output.table).get("seq", 0)) for output in job.writes), default=0)
                if not is_again and reached >= self.until:
                    return JobResult(job.name)
                if not tries_left:
                    raise
        raise AssertionError("no try was made")

    def _computed(self, job: Job, state: JobState, *, is_again: bool) -> JobResult:
        """Bring the job's tables up to date, if they are not."""
        for output in job.writes:
            check_owner(output.table, f"{JOB_APPS}{job.name}")
        context = self._context(job)
        plan = Changes(self.lake, self.until, self.as_of).plan(job, context, state, is_again=is_again)
        if plan is None:
            return JobResult(job.name)
        note = {
            "epoch": self.states.epoch,
            "seq": self.until,
            "job": job.name,
            "as_of": self.as_of.isoformat(),
            **plan.note,
        }
        if plan.is_empty:
            # Nothing that it reads has changed for it: no commit says so, and the next run looks from here on.
            self.states.update(job.name, seq=self.until, inputs=plan.note["inputs"], as_of=note["as_of"])
            return JobResult(job.name)
        self.progress(ProgressStep(job.name, 0, len(job.writes)))
        files, read = self._inputs(job, plan, is_again=is_again)
        read_files = [file for found in files.values() for file in found]
        is_small = self._is_undivided(read_files)
        # Rows are made of rows: where there are none to read, none are made.
        of_rows = job.reads if job.partitioning is None else plan.windows
        has_rows = not of_rows or any(files[table] for table in of_rows)
        built = job.build(self._frames(self._session(job, read_files), job, plan, files), context) if has_rows else {}
        rows: dict[str, int] = {}
        for number, output in enumerate(job.writes):
            self.progress(ProgressStep(job.name, number, len(job.writes), sum(rows.values())))
            frame = built.get(output.table)
            if frame is None and has_rows:
                raise JobFailed(job.name, f"it promised {output.table} and did not build it")
            rows[output.table] = self._stored(job, output, frame, plan, note, is_small=is_small)
        self.progress(ProgressStep(job.name, len(job.writes), len(job.writes), sum(rows.values())))
        self.states.update(
            job.name,
            seq=self.until,
            made=self.until,
            inputs=plan.note["inputs"],
            as_of=note["as_of"],
            why_all="" if plan.why_all == NEVER_MADE else plan.why_all,
        )
        return replace(read, rows=rows, days=len(plan.days) or None)

    def _stored(
        self, job: Job, output: OutputTable, frame: DataFrame | None, plan: Plan, note: Note, *, is_small: bool
    ) -> int:
        """Commit what was built for a table; how many rows."""
        app, table, schema = f"{JOB_APPS}{job.name}", output.table, arrow_schema(output.schema)
        version = (self.lake.done(table, app) or 0) + 1
        seq_column = None if job.partitioning is None else job.partitioning.seq_column
        is_by_day = seq_column is not None and DAY_COLUMN in schema.names
        replaces: Replaces = "all" if plan.is_all else "nothing" if seq_column else plan.dates
        adds = []
        if frame is not None:
            frame = as_promised(job, output, frame)
            if seq_column == "" and not plan.is_all:
                frame = _of_days(frame, plan)
            elif seq_column and not plan.is_all:
                # A run that died between two tables left one of them ahead.
                frame = frame.where(frame[seq_column] > int(self.lake.note(table).get("seq", 0)))
            frame = frame.repartition("date") if is_by_day and not is_small else frame
            name = stem(app, version, self.run_name)
            try:
                adds = self.lake.write_files(frame, table, output.schema, name, is_by_day=is_by_day, is_small=is_small)
            except Exception as error:
                if NO_DAY in str(error):
                    raise JobFailed(job.name, f"it made rows of {table} without a date") from error
                raise
            if seq_column == "" and not plan.is_all:
                _check_days(job, table, adds, plan)
        self.lake.commit(
            table, schema, adds, app=app, version=version, note=note, replaces=replaces, is_by_day=is_by_day
        )
        return rows_of(adds)

    def _every_s(self, job: Job) -> float:
        if job.every_s is not None:
            return job.every_s
        return self.settings.rebuild_interval_s if job.partitioning is None else 0.0

    def _is_early(self, job: Job, state: JobState) -> bool:
        """Whether a job that waits for its interval ran within it, by the log's own time."""
        every_s = self._every_s(job)
        if not every_s or not state.as_of or state.problem:
            return False
        # A run whose time was ahead, by a wrong clock, makes nothing early.
        return timedelta(0) <= self.as_of - datetime.fromisoformat(state.as_of) < timedelta(seconds=every_s)

    def _is_new_interval(self, job: Job, before: JobState) -> bool:
        """Whether one of the intervals that summaries are paced by, counted from 1970, ended since the last run."""
        interval_s = self.settings.rebuild_interval_s
        if job.partitioning is None or not before.as_of or not interval_s:
            return True
        return self.as_of.timestamp() // interval_s != datetime.fromisoformat(before.as_of).timestamp() // interval_s

    # What it is given, and what it says

    def _inputs(self, job: Job, plan: Plan, *, is_again: bool) -> tuple[dict[str, list[DataFile]], JobResult]:
        """The files that the job is given, by table, and how many they are."""
        own = {output.table for output in job.writes}
        # A job that is done from the beginning does not see what it made before.
        is_anew = is_again or (plan.is_all and plan.is_anew)
        there = {table: self.lake.files(table) if self.lake.exists(table) else [] for table in job.reads}
        files = {
            table: [] if is_anew and table in own else [file for file in found if plan.needs(table, file)]
            for table, found in there.items()
        }
        wanted = [file for found in files.values() for file in found]
        size = sum(file.size for file in wanted)
        return files, JobResult(
            job.name, files_read=len(wanted), files_there=sum(map(len, there.values())), bytes_read=size
        )

    def _frames(
        self, spark: SparkSession, job: Job, plan: Plan, files: Mapping[str, Sequence[DataFile]]
    ) -> dict[str, DataFrame]:
        """The rows that the job is given, by table."""
        schemas = table_schemas(self.jobs)
        own = {output.table for output in job.writes}
        tables: dict[str, DataFrame] = {}
        for table, wanted in files.items():
            frame = self.shared.frame(spark, job, table, wanted, schemas.get(table))
            if not wanted:
                # Spark then knows that there is nothing, and leaves out what would be joined with it.
                frame = frame.limit(0)
            elif table in GROWING:
                frame = below(frame, wanted, "seq", self.until)
            if table in own and plan.since and job.partitioning is not None:
                # A run that died between two tables left one of them ahead.
                reached = min(int(self.lake.note(output.table).get("seq", 0)) for output in job.writes)
                frame = below(frame, wanted, job.partitioning.seq_column, reached)
            tables[table] = plan.rows(table, frame, wanted) if wanted else frame
        return tables

    def _session(self, job: Job, files: Sequence[DataFile]) -> SparkSession:
        """The session for a job that reads these files."""
        spark = self.spark()
        if not type(spark).__module__.startswith("pyspark.sql.connect"):
            spark.sparkContext.setLocalProperty("spark.scheduler.pool", job.name)
        if not self._is_undivided(files):
            payload_bytes = bronze_state(self.lake).payload_bytes
            is_by_seq = job.partitioning is not None and bool(job.partitioning.seq_column)
            if payload_bytes is None or not is_by_seq:
                return spark
            # A row that comes from one event is about as long as that event at most.
            return session_for_short_rows(spark, payload_bytes + _ENVELOPE_BYTES, self.settings)
        return session_for_little(spark, is_compiled=not self.settings.is_small(*_amount(files)))

    def _is_undivided(self, files: Sequence[DataFile]) -> bool:
        return self.settings.is_undivided(*_amount(files))

    def _context(self, job: Job) -> JobContext:
        settings = self.settings.jobs.get(job.settings_of or job.name, {})
        return JobContext(self.states.epoch, self.until, self.as_of, settings)

    def _summarised(self, job: Job) -> int | None:
        """Have the job say what it has to say, unless that was said; how many events, ``None`` if nobody takes them now."""
        state = self.states.of(job.name)
        # What has not been made anew since it was last summed up has nothing new to say.
        if self.publish is None or job.summarise is None or (state.published >= max(state.made, 1)):
            return 0
        files = [file for output in job.writes for file in self.lake.files(output.table)]
        spark = self._session(job, files)
        tables = {output.table: self.lake.read(spark, output.table, None, output.schema) for output in job.writes}
        try:
            context = self._context(job)
            count_max = setting(context, "summaries_max", SUMMARIES_MAX, above=0)
            page = Published(self.lake).page(map(_own, job.summarise(tables, context)), count_max)
            with self.publishing:
                is_told = not page.events or self.publish(page.events)
        except Exception as error:
            raise JobFailed(job.name, f"its summary: {_said(error)}") from error
        if not is_told:
            return None
        # Noted last: a run that dies before says it all again, under the same ids, which the log knows.
        published = state.published if page.has_more else self.until
        self.states.update(job.name, published=published, has_more=page.has_more)
        return len(page.events)

    def _note_result(self, job: Job, result: JobResult) -> None:
        now = datetime.fromtimestamp(self.clock.now_ns() / 1e9, UTC).isoformat()
        if result.error is not None:
            self.states.update(result.name, failed_at=now, problem=result.error.problem)
            return
        changes: dict[str, Any] = {"failed_at": "", "problem": "", "every_s": self._every_s(job)}
        if result.rows is not None:
            changes |= {
                "ran_at": now,
                "seconds": round(result.seconds, 3),
                "rows": sum(result.rows.values()),
                "days": result.days,
                "bytes_read": result.bytes_read,
            }
        self.states.update(result.name, **changes)


def table_schemas(jobs: Sequence[Job]) -> dict[str, str]:
    """The columns of every table that the pipeline knows, as DDL, by name."""
    schemas = {table.name: table.schema for table in CORE_TABLES}
    for job in jobs:
        schemas |= {output.table: output.schema for output in job.writes}
    return schemas


def as_promised(job: Job, output: OutputTable, frame: DataFrame) -> DataFrame:
    """
    The frame with the columns of its promise, in their order and of their types.

    Raises:
        JobFailed: A column is missing, or one too many is there.
    """
    wanted, found = [name for name, _ in columns_of(output.schema)], frame.columns
    if missing := [name for name in wanted if name not in found]:
        raise JobFailed(job.name, f"{output.table} lacks the column {missing[0]!r}")
    if surplus := [name for name in found if name not in wanted]:
        raise JobFailed(job.name, f"{output.table} has a column {surplus[0]!r} that it did not promise")
    return shaped(frame, output)


def _before(job: Job, earlier: Sequence[Job]) -> set[str]:
    """The names of those that a job has to wait for: they write what it reads, or read what it writes."""
    reads, writes = set(job.reads), {output.table for output in job.writes}
    return {
        each.name
        for each in earlier
        if not reads.isdisjoint(output.table for output in each.writes) or not writes.isdisjoint(each.reads)
    }


def seconds_ahead(before: Mapping[Job, set[str]], seconds: Callable[[str], float]) -> dict[str, float]:
    """
    How long it takes from the start of each job to the end of the last one that waits for it, by what each took last: whoever has
    the longest way ahead goes first, so that a run does not end with jobs that had to wait for each other.

    Args:
        before: The jobs in their order, each with the names of those that it waits for.
        seconds: How long a job takes, by its name; 0 if nobody knows.
    """
    found: dict[str, float] = {}
    for job in reversed(list(before)):
        behind = [found[other.name] for other, names in before.items() if job.name in names]
        found[job.name] = max(behind, default=0.0) + (seconds(job.name) or 1.0)
    return found


def _of_days(frame: DataFrame, plan: Plan) -> DataFrame:
    """The rows that a job by days made, without those of days that it could make a part of only. What has no place stays, to be found."""
    if plan.beside is None:
        return frame.where(frame[DAY_COLUMN].isNull() | frame[DAY_COLUMN].isin(plan.dates))
    if not plan.beside:
        return frame
    return frame.where(frame[DAY_COLUMN].isNull() | ~frame[DAY_COLUMN].isin(plan.dates_of(plan.beside)))


def _check_days(job: Job, table: str, adds: Iterable[AddAction], plan: Plan) -> None:
    """
    Make sure that the files of a table are of the days that are replaced.

    Raises:
        JobFailed: They are not: these rows would be in no table.
    """
    days = {day.isoformat() for day in plan.dates}
    others = sorted({str(add.partition_values[DAY_COLUMN]) for add in adds} - days)
    if others:
        raise JobFailed(
            job.name,
            f"it made rows of {table} of days that its windows do not reach: {', '.join(others[:3])} beside"
            f" {', '.join(sorted(days)[:3])}; give its InputWindow days_before or days_after",
        )


def _amount(files: Iterable[DataFile]) -> tuple[int, int]:
    """How many rows and bytes files have."""
    sizes = [(file.rows, file.size) for file in files]
    return sum(rows for rows, _ in sizes), sum(size for _, size in sizes)


def _own(event: Event) -> Event:
    event.meta.device = OWN_DEVICE
    return event


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
