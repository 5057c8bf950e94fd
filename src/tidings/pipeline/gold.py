"""
The jobs of a run: what each has to compute, the rows it is given, its commits, and its summary.

A job without ``Partitioning`` is given whole tables and its own are replaced as a whole. One by days is given what its changed
days are made from, and only those days are replaced; one by seq is given the rows of new events and adds to its tables. Which
days changed is told by the tables it reads: new rows of those that grow name their day, and the commits of other jobs name the
days that they replaced. The note in a job's own commits says what it was made of: the version of each table it read, and its
settings. What does not add up (other settings, a commit that names no days, a history that does not go back far enough) is
computed as a whole, which is always right. Days are counted from 1970.

Jobs are fenced: one that fails leaves its tables as they were, is noted, and is tried again by the next run. Jobs that do not
read each other's tables run side by side.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from tidings.core.clock import Clock
from tidings.core.events import Event

from .errors import JobFailed
from .jobs.job import InputWindow, Job, JobContext, OutputTable
from .lake import Lake, Note
from .schemas import BRONZE_EVENTS, CORE_TABLES, SILVER_EVENTS, SILVER_SYNC_EVENTS, arrow_schema
from .session import Progress, ProgressStep, first_line
from .settings import PipelineSettings
from .status import JobState, JobStates
from .table_files import DataFile, translate_read_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Publish = Callable[[Sequence[Event]], bool]
"""
Takes events to the log through the front door: a log that is opened for it, or the node that has the workspace. Whether
the log has them now; if it has not (the workspace is busy), the next run says the same again.
"""
Days = frozenset[int]

OWN_DEVICE: Final = "tidings-pipeline"
"""The ``device`` of what the pipeline itself publishes: it makes no run due."""
_GROWING: Final = {table.name: "seq" for table in (BRONZE_EVENTS, SILVER_EVENTS, SILVER_SYNC_EVENTS)}
_UNCHANGING: Final = ("OPTIMIZE", "VACUUM START", "VACUUM END", "ADD COLUMN", "SET TBLPROPERTIES", "CREATE TABLE")
"""Commits that leave a table's rows as they are."""
_HISTORY_MAX: Final = 64
_DAYS_MAX: Final = 366
_DAY_US: Final = 86_400_000_000
_EPOCH: Final = date(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job."""

    name: str
    rows: Mapping[str, int] | None = None
    """Rows written, by table; ``None`` if there was nothing to do."""
    published: int = 0
    """How many events it had to say to the log."""
    is_told: bool = True
    """Whether that reached the log; what did not is said again by the next run."""
    error: JobFailed | None = None
    days: int | None = None
    """How many days of its tables were rebuilt; ``None`` if all were, or it does not go by days."""
    files_read: int = 0
    """How many data files it was given"""
    files_there: int = 0
    """of how many that the tables it reads have."""
    bytes_read: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be computed, and from what."""

    note: Note
    """For the job's commits: what it is made of."""
    is_all: bool = True
    """Whether all rows are computed; otherwise:"""
    days: Days = frozenset()
    """The days whose rows are replaced."""
    since: Mapping[str, int] = field(default_factory=dict)
    """By seq: after which seq the rows of a table are new."""
    windows: Mapping[str, InputWindow] = field(default_factory=dict)
    needed: Mapping[str, Days] = field(default_factory=dict)
    """By table, the days whose rows are needed; a table that is not named is needed as a whole."""

    @property
    def is_empty(self) -> bool:
        return not self.is_all and not self.days and not self.since

    def needs(self, table: str, file: DataFile) -> bool:
        """Whether a file may have rows that are needed."""
        window = self.windows.get(table)
        if window is None:
            return True
        if window.types and not any(file.may_hold("type", kind, kind) for kind in window.types):
            return False
        if table in self.since:
            return file.may_hold(window.at, self.since[table] + 1, None)
        if table not in self.needed:
            return True
        days = self.needed[table]
        low, high = _day_of(file.minimum.get(window.at), min(days)), _day_of(file.maximum.get(window.at), max(days))
        return any(low <= day <= high for day in days)


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
    publishing: threading.Lock = field(default_factory=threading.Lock)

    def run(self, *, again: Container[str] = (), is_paced: bool = False) -> tuple[JobResult, ...]:
        """
        Run all jobs that are due; what became of each, in their order.

        Args:
            again: The names of those that are done from the beginning, also if they are up to date.
            is_paced: Whether jobs and summaries wait for their intervals: for runs that follow the log.
        """
        results: dict[str, JobResult] = {}
        running: dict[Future[JobResult], str] = {}
        waiting = {job: _before(job, self.jobs[:at]) for at, job in enumerate(self.jobs)}
        with ThreadPoolExecutor(self.settings.jobs_at_once_max, "tidings-job") as pool:
            while waiting or running:
                for job in [job for job, before in waiting.items() if before <= results.keys()]:
                    del waiting[job]
                    running[pool.submit(self._fenced, job, is_again=job.name in again, is_paced=is_paced)] = job.name
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    results[running.pop(future)] = future.result()
        return tuple(results[job.name] for job in self.jobs)

    def _fenced(self, job: Job, *, is_again: bool, is_paced: bool) -> JobResult:
        """One job with its summary, whatever becomes of it."""
        begun = self.clock.monotonic()
        state = self.states.of(job.name)
        result = JobResult(job.name)
        try:
            if not (is_paced and self._is_early(job, state)):
                result = self._computed(job, state, is_again=is_again)
            # What was not made anew has nothing new to say; and a summary costs all of a table, however little of it was
            # made anew, so it is paced even where its job is not.
            if not is_paced or (result.rows is not None and self._is_new_interval(job, state)):
                published = self._summarised(job)
                result = replace(result, published=published or 0, is_told=published is not None)
        except Exception as error:  # noqa: BLE001 - the fence: whatever it is, it is this job's
            problem = error if isinstance(error, JobFailed) else JobFailed(job.name, _said(error))
            result = JobResult(job.name, error=problem)
            problem.__cause__ = None if problem is error else error
        result = replace(result, seconds=self.clock.monotonic() - begun)
        self._note_result(job, result)
        return result

    def _computed(self, job: Job, state: JobState, *, is_again: bool) -> JobResult:
        """Bring the job's tables up to date, if they are not."""
        context = self._context(job)
        plan = self._plan(job, context, state, is_again=is_again)
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
        spark = self.spark()
        if not type(spark).__module__.startswith("pyspark.sql.connect"):
            spark.sparkContext.setLocalProperty("spark.scheduler.pool", job.name)
        tables, read = self._read_inputs(spark, job, plan, is_again=is_again)
        built = job.build(tables, context)
        rows: dict[str, int] = {}
        for number, output in enumerate(job.writes):
            self.progress(ProgressStep(job.name, number, len(job.writes), sum(rows.values())))
            frame = built.get(output.table)
            if frame is None:
                raise JobFailed(job.name, f"it promised {output.table} and did not build it")
            rows[output.table] = self._stored(job, output, as_promised(job, output, frame), plan, note)
        self.progress(ProgressStep(job.name, len(job.writes), len(job.writes), sum(rows.values())))
        self.states.update(job.name, seq=self.until, made=self.until, inputs=plan.note["inputs"], as_of=note["as_of"])
        return replace(read, rows=rows, days=len(plan.days) or None)

    def _stored(self, job: Job, output: OutputTable, frame: DataFrame, plan: _Plan, note: Note) -> int:
        """Commit what was built for a table; how many rows."""
        app = f"job.{job.name}"
        options: dict[str, Any] = {
            "app": app,
            "version": (self.lake.done(output.table, app) or 0) + 1,
            "note": note,
            "run": self.run_name,
        }
        if job.partitioning is None:
            return self.lake.replace(frame, output.table, output.schema, **options)
        if not job.partitioning.seq_column:
            days = None if plan.is_all else [_date_of(day) for day in sorted(plan.days)]
            kept = frame.where("date is not null") if days is None else frame.where(frame["date"].isin(days))
            spread = kept.repartition("date")
            return self.lake.replace(spread, output.table, output.schema, is_by_day=True, days=days, **options)
        if plan.is_all:
            return self.lake.replace(frame, output.table, output.schema, **options)
        # A run that died between two tables left one of them ahead.
        reached = int(self.lake.note(output.table).get("seq", 0))
        fresh = frame.where(frame[job.partitioning.seq_column] > reached)
        return self.lake.append(fresh, output.table, output.schema, **options) or 0

    # What has to be computed

    def _plan(self, job: Job, context: JobContext, state: JobState, *, is_again: bool) -> _Plan | None:
        """What the job has to compute to be up to date; ``None`` if it is."""
        notes = [self.lake.note(output.table) for output in job.writes]
        recipe = _recipe(job, context)
        made = min((int(note.get("seq", 0)) for note in notes), default=0)
        positions: Mapping[str, Sequence[Any]] | None = None
        made_at = ""
        if not is_again and notes and all(note.get("recipe") == recipe for note in notes):
            oldest = min(notes, key=lambda note: int(note["seq"]))
            is_known = state.made == made and state.seq > made
            positions, made_at = (state.inputs, state.as_of) if is_known else (oldest["inputs"], str(oldest["as_of"]))
            made = state.seq if is_known else made
        windows = {} if job.partitioning is None else dict(job.partitioning.windows(context))
        own = {output.table for output in job.writes}
        inputs = {table: self._position(table) for table in job.reads if table not in own}
        note: Note = {"recipe": recipe, "inputs": inputs, "days": None}
        if job.partitioning is None:
            is_due = positions is None or made < self.until or self._has_changed(inputs, positions)
            return _Plan(note) if is_due else None
        if positions == inputs and made >= self.until:
            return None
        if job.partitioning.seq_column:
            note["grows_by"] = job.partitioning.seq_column
            since = None if positions is None else self._grown(windows, positions)
            if since is None:
                return _Plan(note, windows=windows)
            return _Plan({name: note[name] for name in note if name != "days"}, False, since=since, windows=windows)
        days = None if positions is None else self._changed_days(job, context, windows, positions, made_at)
        if days is None:
            return _Plan(note, windows=windows)
        note["days"] = [_date_of(day).isoformat() for day in sorted(days)]
        needed = {
            table: frozenset(near for day in days for near in range(day - each.days_before, day + each.days_after + 1))
            for table, each in windows.items()
            if not each.is_whole
        }
        return _Plan(note, False, days, windows=windows, needed=needed)

    def _position(self, table: str) -> list[Any]:
        """Where a table stands: its version, the seq it reaches to, and of a small one that is taken whole its digest."""
        for version, note in self._commits(table):
            if "digest" in note:
                return [0, 0, note["digest"]]
            if int(note.get("seq", 0)) <= self.until:  # what came while the run is under way is the next one's
                return [version, int(note.get("seq", 0))]
        return [-1, 0]

    def _commits(self, table: str) -> Iterator[tuple[int, Note]]:
        """The commits that changed a table's rows, the newest first: their versions and notes, as far as its log goes back."""
        if self.lake.exists(table):
            for limit, skipped in ((1, 0), (_HISTORY_MAX, 1)):
                for entry in self.lake.open(table).history(limit)[skipped:]:
                    if entry.get("operation") not in _UNCHANGING:
                        yield int(entry["version"]), json.loads(entry.get("tidings") or "{}")

    def _has_changed(self, inputs: Mapping[str, Sequence[Any]], positions: Mapping[str, Sequence[Any]]) -> bool:
        """Whether a table is another than it was."""
        moved = [table for table, position in inputs.items() if positions.get(table) != position]
        return any(
            "digest" in self.lake.note(table) or self._changes(table, positions.get(table)) != [] for table in moved
        )

    def _changes(self, table: str, position: Sequence[Any] | None) -> list[Note] | None:
        """The notes of a table's commits since a position; ``None`` if all of it may have changed."""
        if position is None:
            return None
        found: list[Note] = []
        for version, note in self._commits(table):
            if version <= position[0]:
                return found
            if note.get("days", ()) is None or int(note.get("seq", -1)) < position[1]:
                return None
            found.append(note)
        # It was not there then, or its log does not go back that far.
        return found if position[0] < 0 and all("days" not in note for note in found) else None

    def _grown(
        self, windows: Mapping[str, InputWindow], positions: Mapping[str, Sequence[Any]]
    ) -> dict[str, int] | None:
        """For a job by seq: after which seq each table that has new rows for it is to be read; ``None`` to read all."""
        since: dict[str, int] = {}
        has_grown = False
        for table, window in windows.items():
            changes = self._changes(table, positions.get(table))
            if changes is None or (changes and window.is_whole):
                return None
            if not window.is_whole:
                since[table] = int(positions[table][1])
                has_grown |= bool(changes) and bool(
                    self._new_days(table, window.at, window, since[table], is_row_enough=True)
                )
        return since if has_grown else {}

    def _changed_days(
        self,
        job: Job,
        context: JobContext,
        windows: Mapping[str, InputWindow],
        positions: Mapping[str, Sequence[Any]],
        made_at: str,
    ) -> Days | None:
        """The days that changes of the tables it reads touch, and those that rows have left; ``None`` for all."""
        found: set[int] = set()
        for table, window in windows.items():
            changes = self._changes(table, positions.get(table))
            if changes is None:
                return None
            grows_by = _GROWING.get(table) or next((note["grows_by"] for note in changes if "grows_by" in note), None)
            if grows_by is not None and changes:
                reached = int(positions[table][1])
                days = self._new_days(table, grows_by, window, reached, is_row_enough=window.is_whole)
            else:
                named = (note["days"] for note in changes if "days" in note)
                days = {_day_of(day, 0) for each in named for day in each}
            if days and window.is_whole:
                return None
            found |= {near for day in days for near in range(day - window.days_after, day + window.days_before + 1)}
        found |= self._lapsed(job, context, made_at)
        return None if len(found) > _DAYS_MAX else frozenset(found)

    def _new_days(
        self, table: str, seq_column: str, window: InputWindow, since: int, *, is_row_enough: bool
    ) -> set[int]:
        """The days of a table's rows past a seq. Looked up here, which is quicker than asking Spark."""
        files = self.lake.files(
            table,
            lambda file: (
                file.may_hold(seq_column, since + 1, self.until)
                and (not window.types or any(file.may_hold("type", kind, kind) for kind in window.types))
            ),
        )
        found: set[int] = set()
        condition = (pc.field(seq_column) > since) & (pc.field(seq_column) <= self.until)
        if window.types:
            condition &= pc.field("type").isin(list(window.types))
        with translate_read_errors(self.lake.folder(table)):
            if not files:
                return found
            rows = self.lake.dataset(table, files)
            for batch in rows.to_batches(columns=[window.at], filter=condition):
                if batch.num_rows and is_row_enough:
                    return {0}
                found |= set(np.unique(_day_numbers(batch.column(0))).tolist())
        return found

    def _lapsed(self, job: Job, context: JobContext, made_at: str) -> set[int]:
        """The days that rows have left, or begun to leave, since the last run because their time was over."""
        if job.partitioning is None or job.partitioning.lifetime_days is None or not made_at:
            return set()
        lifetime = timedelta(days=job.partitioning.lifetime_days(context))
        low, high = (_day_of(moment - lifetime, 0) for moment in (datetime.fromisoformat(made_at), self.as_of))
        found: set[int] = set()
        for output in job.writes:
            for file in self.lake.files(output.table):
                first = _day_of(file.minimum.get("date"), low)
                last = _day_of(file.maximum.get("date"), high)
                found |= set(range(max(first, low), min(last, high) + 1))
        return found

    def _every_s(self, job: Job) -> float:
        if job.every_s is not None:
            return job.every_s
        return self.settings.rebuild_interval_s if job.partitioning is None else 0.0

    def _is_early(self, job: Job, state: JobState) -> bool:
        """Whether a job that waits for its interval ran within it, by the log's own time."""
        every_s = self._every_s(job)
        if not every_s or not state.as_of or state.problem:
            return False
        return self.as_of - datetime.fromisoformat(state.as_of) < timedelta(seconds=every_s)

    def _is_new_interval(self, job: Job, before: JobState) -> bool:
        """Whether one of the intervals that summaries are paced by, counted from 1970, ended since the last run."""
        interval_s = self.settings.rebuild_interval_s
        if job.partitioning is None or not before.as_of or not interval_s:
            return True
        return self.as_of.timestamp() // interval_s > datetime.fromisoformat(before.as_of).timestamp() // interval_s

    # What it is given, and what it says

    def _read_inputs(
        self, spark: SparkSession, job: Job, plan: _Plan, *, is_again: bool
    ) -> tuple[dict[str, DataFrame], JobResult]:
        tables: dict[str, DataFrame] = {}
        read = JobResult(job.name)
        own = {output.table for output in job.writes}
        # A job that is done again is done from the beginning, and so is one that only adds if it has to do all of it: it does
        # not see what it made before.
        is_anew = is_again or (plan.is_all and job.partitioning is not None)
        for table in job.reads:
            files = self.lake.files(table) if self.lake.exists(table) else []
            wanted = [] if is_anew and table in own else [file for file in files if plan.needs(table, file)]
            read = replace(
                read,
                files_there=read.files_there + len(files),
                files_read=read.files_read + len(wanted),
                bytes_read=read.bytes_read + sum(file.size for file in wanted),
            )
            frame = self._table(spark, table, plan, wanted)
            if table in own and plan.since and job.partitioning is not None:
                # A run that died between two tables left one of them ahead.
                reached = min(int(self.lake.note(output.table).get("seq", 0)) for output in job.writes)
                frame = frame.where(frame[job.partitioning.seq_column] <= reached)
            tables[table] = frame
        return tables, read

    def _table(self, spark: SparkSession, table: str, plan: _Plan, wanted: Sequence[DataFile]) -> DataFrame:
        chosen = {file.name for file in wanted}
        frame = self.lake.read(spark, table, lambda file: file.name in chosen, table_schemas(self.jobs).get(table))
        if not wanted:
            return frame.limit(0)  # Spark then knows that there is nothing, and leaves out what would be joined with it
        if table in _GROWING:
            frame = frame.where(frame["seq"] <= self.until)
        window = plan.windows.get(table)
        if window is None:
            return frame
        if window.types:
            frame = frame.where(frame["type"].isin(*window.types))
        if table in plan.since:
            return frame.where(frame[window.at] > plan.since[table])
        if table in plan.needed:
            days = [_date_of(day) for day in sorted(plan.needed[table])]
            frame = frame.where(frame[window.at].cast("date").isin(days))
        return frame

    def _context(self, job: Job) -> JobContext:
        settings = self.settings.jobs.get(job.settings_of or job.name, {})
        return JobContext(self.states.epoch, self.until, self.as_of, settings)

    def _summarised(self, job: Job) -> int | None:
        """Have the job say what it has to say, unless that was said; how many events, ``None`` if nobody takes them now."""
        state = self.states.of(job.name)
        # What has not been made anew since it was last summed up has nothing new to say.
        if self.publish is None or job.summarise is None or (state.published >= max(state.made, 1)):
            return 0
        spark = self.spark()
        tables = {output.table: self.lake.read(spark, output.table, None, output.schema) for output in job.writes}
        try:
            events = [_own(event) for event in job.summarise(tables, self._context(job))]
            with self.publishing:
                is_told = not events or self.publish(events)
        except Exception as error:
            raise JobFailed(job.name, f"its summary: {_said(error)}") from error
        if not is_told:
            return None
        # Noted last: a run that dies before says it all again, under the same ids, which the log knows.
        self.states.update(job.name, published=self.until)
        return len(events)

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
    from pyspark.sql.pandas.types import from_arrow_schema

    promised: Any = from_arrow_schema(arrow_schema(output.schema))
    wanted, found = [column.name for column in promised], frame.columns
    if missing := [name for name in wanted if name not in found]:
        raise JobFailed(job.name, f"{output.table} lacks the column {missing[0]!r}")
    if surplus := [name for name in found if name not in wanted]:
        raise JobFailed(job.name, f"{output.table} has a column {surplus[0]!r} that it did not promise")
    return frame.select(*(frame[column.name].cast(column.dataType).alias(column.name) for column in promised))


def _before(job: Job, earlier: Sequence[Job]) -> set[str]:
    """The names of those that a job has to wait for: they write what it reads, or read what it writes."""
    reads, writes = set(job.reads), {output.table for output in job.writes}
    return {
        each.name
        for each in earlier
        if not reads.isdisjoint(output.table for output in each.writes) or not writes.isdisjoint(each.reads)
    }


def _own(event: Event) -> Event:
    event.meta.device = OWN_DEVICE
    return event


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _recipe(job: Job, context: JobContext) -> str:
    """Stands for all that decides about every row alike."""
    parts = [
        sorted((name, repr(value)) for name, value in context.settings.items()),
        [(output.table, output.schema) for output in job.writes],
        None if job.partitioning is None else job.partitioning.seq_column or "date",
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _day_numbers(values: pa.Array) -> np.ndarray[Any, Any]:
    """The days that timestamps or dates lie in; nulls are left out."""
    known = values.drop_null()
    if pa.types.is_date(known.type):
        days: np.ndarray[Any, Any] = pc.cast(pc.cast(known, pa.date32()), pa.int32()).to_numpy(zero_copy_only=False)
        return days.astype(np.int64)
    micros: np.ndarray[Any, Any] = pc.cast(pc.cast(known, pa.timestamp("us", "UTC")), pa.int64()).to_numpy(
        zero_copy_only=False
    )
    found: np.ndarray[Any, Any] = np.floor_divide(micros, _DAY_US)
    return found


def _date_of(day: int) -> date:
    return _EPOCH + timedelta(days=day)


def _day_of(value: Any, otherwise: int) -> int:
    """The day of a time, a date, or a date in ISO 8601; ``otherwise`` if there is none."""
    if value is None:
        return otherwise
    if isinstance(value, datetime):
        return (
            value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        ).toordinal() - _EPOCH.toordinal()
    return (value if isinstance(value, date) else date.fromisoformat(str(value))).toordinal() - _EPOCH.toordinal()
