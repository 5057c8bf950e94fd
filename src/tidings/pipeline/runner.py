"""
One run of the pipeline: the log to bronze, bronze to silver, silver to gold, and the jobs' summaries to the log.

A run pins ``until`` first and everything in it sees the records up to there and no others. Each step commits by itself and
stores in its commit how far it got, so a run that ends early is continued by the next. A run with nothing new does nothing,
and starts no Spark; what the pipeline itself published is nothing new, and reaches the tables with what comes after it.

A lake names the epoch of the log it was made from. If the log has another one, either repair gave it a new epoch, and then
what repair set aside shows the old one; or the lake is another log's. The first may be accepted: the tables of the ended
epoch are moved aside as they are, because they may be the only place that still holds what the log dropped, and new ones are
created. The second is always refused.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from tidings.core.clock import Clock, datetime_of
from tidings.log.embedded.disk import Disk, OsDisk, read_file
from tidings.log.embedded.layout import Layout

from .bronze import Bronze, BronzeFill, bronze_state, check_reach
from .errors import EpochChanged, LakeConflict, LakeOfAnotherLog, PipelineError
from .following import FollowedBatch, Following
from .gold import GoldJobs, JobResult, Publish
from .housekeeping import keep_house
from .lake import Lake
from .schemas import BRONZE_EVENTS, QUARANTINE, SILVER_EVENTS, arrow_schema
from .session import Progress, ProgressStep, cores_of
from .settings import PipelineSettings
from .shared_inputs import SharedInputs
from .silver import Silver
from .source import LogSource, LogView
from .state_files import load_archived, load_hints, save_archived
from .status import JobStates, files_digest
from .storage import LAKE_FOLDER, Storage
from .summaries import OWN_DEVICE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .jobs.job import Job

_EPOCH: Final = re.compile(rb'"epoch":\s*"([0-9a-f]{16})"')
_MANIFEST_BYTES_MAX: Final = 1 << 20


def earlier_epochs(layout: Layout, disk: Disk) -> set[str]:
    """The epochs that the log had before, from what repair set aside."""
    found: set[str] = set()
    for folder in disk.names(layout.aside):
        for name in disk.names(layout.aside / folder):
            if name in ("manifest.json", "meta.json"):
                data = read_file(disk, layout.aside / folder / name) or b""
                found |= {match.decode() for match in _EPOCH.findall(data[:_MANIFEST_BYTES_MAX])}
    return found


def check_epoch(lake: Lake, layout: Layout, disk: Disk, epoch: str, *, accepts_epoch: bool) -> None:
    """
    Make sure that the lake is this log's, in its present epoch; begin one if there is none.

    Raises:
        EpochChanged: The log has a new epoch, and that was not accepted.
        LakeOfAnotherLog: The lake was made from another log.
        LakeDamaged: There are tables, and nothing says from which log they were made; or bronze has lost commits.
    """
    meta = lake.known_meta()
    if meta is None:
        lake.begin(epoch)
        return
    if meta.epoch == epoch:
        check_reach(lake)
        return
    if meta.epoch not in earlier_epochs(layout, disk):
        raise LakeOfAnotherLog(str(lake.storage), f"its tables were made from epoch {meta.epoch} of another log")
    if not accepts_epoch:
        raise EpochChanged(meta.epoch, epoch)
    lake.begin(epoch)


_T = TypeVar("_T")
AHEAD_MAX: Final = timedelta(days=1)
"""So far the log's time may be ahead of this machine's clock: clocks differ, and some are set to the wrong zone."""
_JOBS_AT_ONCE: Final = 4
_TRIES_MAX: Final = 5
"""So often a step is begun if other runs do it at the same time."""
_OWN_BYTES_MAX: Final = 4 << 20
"""With more than so many bytes in the log that are new, nobody asks who published them."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run did."""

    epoch: str
    until: int
    bronze: BronzeFill
    silver: Mapping[str, int]
    """Rows gained, by table."""
    jobs: tuple[JobResult, ...] = field(default=())

    @property
    def failed(self) -> tuple[JobResult, ...]:
        """The jobs that failed."""
        return tuple(job for job in self.jobs if job.error is not None)


class Pipeline:
    """
    The pipeline of one workspace.

    Args:
        workspace: The folder that holds the log, and the lake unless ``lake`` says otherwise.
        settings: Where and how it runs.
        clock: For the times that tables' logs and the quarantine want; what jobs call now comes from the log.
        run: A name that no other run has, so that no two write to the same file.
        disk: How the log's own files are read here; the tasks read theirs themselves.
        publish: Where the jobs' summaries go; without it there are none.
    """

    def __init__(
        self,
        workspace: Path,
        settings: PipelineSettings,
        *,
        clock: Clock,
        run: str,
        disk: Disk | None = None,
        lake: Storage | Path | str | None = None,
        publish: Publish | None = None,
    ) -> None:
        self.layout = Layout(workspace)
        self.settings = settings
        self.lake = Lake(lake or self.layout.workspace / LAKE_FOLDER, clock)
        self._clock = clock
        self._run = run
        self._disk = disk or OsDisk()
        self._publish = publish

    def run(
        self,
        spark: Callable[[], SparkSession],
        jobs: Sequence[Job] = (),
        *,
        accepts_epoch: bool = False,
        again: Container[str] = (),
        silver_anew: Container[str] = (),
        is_paced: bool = False,
        request: str = "",
        progress: Progress | None = None,
    ) -> RunReport:
        """
        Bring every table up to what the log holds now.

        Args:
            spark: Where the work is done; asked for only if there is some.
            jobs: The jobs to run, in order; none for bronze and silver alone.
            accepts_epoch: Whether tables of an ended epoch may be set aside and new ones begun.
            again: The names of jobs that are done from the beginning, also if they are up to date.
            silver_anew: The silver tables that are made from the beginning.
            is_paced: Whether jobs wait for their intervals: for runs that follow the log.
            request: Stands for what is asked for, jobs and settings: if nothing is left to do, ``status.idle_at`` knows it by that.
            progress: Told how far it is.

        Raises:
            EpochChanged, LakeOfAnotherLog, PositionLost: The lake does not fit the log.
            LakeConflict, LakeUnwritable, LakeDamaged: The lake cannot be written.
            SparkFailed: Spark gave up on bronze or silver; a job that fails is reported, and stops no other.
        """
        report_to = progress or _ignore
        meta = self.layout.read_meta(self._disk)
        files = files_digest(self.layout) if request else ""
        check_epoch(self.lake, self.layout, self._disk, meta.epoch, accepts_epoch=accepts_epoch)
        source = LogSource(self.layout, self._disk)
        bronze = Bronze(self.lake, source, self.settings, run=self._run)
        before = bronze.state().seq
        view = source.pin(before, load_hints(self.lake.storage, epoch=meta.epoch, seq=before))
        filled = BronzeFill(before, before)
        states = JobStates(self.lake.storage, meta.epoch)
        # What is left of a summary is compared with what was published, so that has to be in silver.
        has_more = any(states.of(job.name).has_more for job in jobs)
        if view.until > before and (has_more or not self._is_own(view)):
            filled = _beside_others(lambda: bronze.fill(spark, meta.epoch, report_to))
        until = bronze.state().seq
        gained: Mapping[str, int] = {}
        results: tuple[JobResult, ...] = ()
        if until:
            gained = self._fill_silver(spark, meta.epoch, filled, report_to, anew=silver_anew, is_paced=is_paced)
            at_once = self._at_once_max()
            results = self._gold(spark, jobs, states, until, report_to, again=again, is_paced=is_paced, at_once=at_once)
            if jobs and not any(result.error for result in results):
                is_done = all(result.is_told for result in results)
                states.reached(until, *((request, files) if is_done else ()))
            self._keep_house(filled, gained, results)
        return RunReport(meta.epoch, until, filled, gained, results)

    def follow(
        self, spark: Callable[[], SparkSession], *, accepts_epoch: bool = False, progress: Progress | None = None
    ) -> Following:
        """
        A streaming query, to be opened by ``with``, that keeps bronze and silver up to the log; what the log holds now is taken
        in before this returns, and ``progress`` is told of that. The jobs are ``run_gold``'s.

        Raises:
            As ``run``.
        """
        epoch = self.run(spark, accepts_epoch=accepts_epoch, progress=progress).epoch

        def fill_silver(filled: BronzeFill) -> Mapping[str, int]:
            gained = self._fill_silver(spark, epoch, filled, _ignore, is_paced=True)
            self._keep_house(filled, gained, ())
            return gained

        beside = copy.copy(self)
        beside._run = f"{self._run}-beside"

        def run() -> FollowedBatch:
            report = beside.run(spark, is_paced=True)
            return FollowedBatch(report.bronze, report.silver)

        bronze = Bronze(self.lake, LogSource(self.layout, self._disk), self.settings, run=self._run)
        return Following(spark, bronze, fill_silver, run, epoch, self.settings)

    def _fill_silver(
        self,
        spark: Callable[[], SparkSession],
        epoch: str,
        filled: BronzeFill,
        progress: Progress,
        *,
        anew: Container[str] = (),
        is_paced: bool,
    ) -> Mapping[str, int]:
        """Note what bronze holds now, and bring silver up to it; the rows that each table gained."""
        if filled.commits or not load_archived(self.lake.storage, epoch):
            save_archived(self.lake, epoch, filled.until)
        silver = Silver(self.lake, self.layout, self._disk, self._clock, self.settings, self._run, anew, is_paced)
        return _beside_others(lambda: silver.fill(spark, epoch, filled.until, progress))

    def run_gold(
        self, spark: Callable[[], SparkSession], jobs: Sequence[Job], *, progress: Progress | None = None
    ) -> tuple[JobResult, ...]:
        """
        Run the jobs that are due, each by its schedule, over what silver holds now: for whoever fills silver otherwise.

        What the pipeline itself published makes no job due.
        """
        states = JobStates(self.lake.storage, self.layout.read_meta(self._disk).epoch)
        until = int(self.lake.note(SILVER_EVENTS.name).get("seq", 0))
        results: tuple[JobResult, ...] = ()
        has_more = any(states.of(job.name).has_more for job in jobs)
        if until and (has_more or states.failed() or self.has_news(states.until)):
            # Whoever fills silver meanwhile must not wait for a core.
            at_once = max(1, min(self._at_once_max(), cores_of(self.settings) - 1))
            results = self._gold(
                spark, jobs, states, until, progress or _ignore, again=(), is_paced=True, at_once=at_once
            )
            if not any(result.error for result in results):
                states.reached(until)
        self._keep_house(None, {}, results)
        return results

    def _at_once_max(self) -> int:
        """How many jobs run side by side: each has tasks for several cores, and more jobs would only make each other slower."""
        return self.settings.jobs_at_once_max or min(cores_of(self.settings), _JOBS_AT_ONCE)

    def _gold(
        self,
        spark: Callable[[], SparkSession],
        jobs: Sequence[Job],
        states: JobStates,
        until: int,
        progress: Progress,
        *,
        again: Container[str],
        is_paced: bool,
        at_once: int,
    ) -> tuple[JobResult, ...]:
        gold = GoldJobs(
            self.lake,
            self.settings,
            jobs,
            spark=spark,
            states=states,
            until=until,
            as_of=self.as_of(),
            run_name=self._run,
            clock=self._clock,
            publish=self._publish,
            progress=progress,
            at_once_max=at_once,
            shared=SharedInputs(self.lake, jobs, self.settings.shared_bytes_max),
        )
        return gold.run(again=again, is_paced=is_paced)

    def _keep_house(self, bronze: BronzeFill | None, silver: Mapping[str, int], results: Sequence[JobResult]) -> None:
        """Keep the tables small that were committed to, and those for which it is time."""
        tables = [table for table, gained in silver.items() if gained]
        tables += [table for result in results for table in result.rows or ()]
        if bronze is not None and bronze.commits:
            tables += [BRONZE_EVENTS.name, QUARANTINE.name]
        keep_house(self.lake, self.settings, now_ns=self._clock.now_ns(), tables=tables)

    def _is_own(self, view: LogView) -> bool:
        """Whether all that the log has after what the lake has was published by the pipeline itself."""
        for chunk in view.chunks(_OWN_BYTES_MAX, self.settings.commit_files_max):
            if chunk.gaps or chunk.size > _OWN_BYTES_MAX or chunk.until < view.until:
                return False
            for part in chunk.ranges:
                data = read_file(self._disk, self.layout.wal / part.path) or b""
                for line in data[part.start : part.end].splitlines():
                    try:
                        record = msgspec.json.decode(line, type=_Record)
                    except msgspec.DecodeError:
                        return False
                    if record.seq > view.since and record.meta.device != OWN_DEVICE:
                        return False
        return True

    def has_news(self, since: int) -> bool:
        """Whether bronze has records past a seq that the pipeline did not publish itself."""
        import pyarrow.compute as pc  # type: ignore[import-untyped]

        files = self.lake.files(BRONZE_EVENTS.name, lambda file: file.may_hold("seq", since + 1, None))
        if not files:
            return False
        is_other = (pc.field("device") != OWN_DEVICE) | pc.is_null(pc.field("device"))
        rows = self.lake.dataset(BRONZE_EVENTS.name, files, arrow_schema(BRONZE_EVENTS.schema))
        return bool(rows.head(1, columns=["seq"], filter=(pc.field("seq") > since) & is_other).num_rows)

    def as_of(self) -> datetime:
        """
        What a run calls now: when the last record that the lake holds was written.

        The log's time never goes back, so one record that was written by a clock a hundred years ahead would stop it. Where the last
        record is more than ``AHEAD_MAX`` ahead of this machine's clock, and the first one is not, that clock counts. Where the first
        one is too, it is this machine's clock that is behind, and the log's time counts.
        """
        _, latest = self._written()
        return latest if self.ahead_until() is None else datetime_of(self._clock.now_ns())

    def ahead_until(self) -> datetime | None:
        """When the last record was written, if that is so far ahead of this machine's clock that the clock counts; else ``None``."""
        first, latest = self._written()
        limit = datetime_of(self._clock.now_ns()) + AHEAD_MAX
        return latest if latest > limit >= first else None

    def _written(self) -> tuple[datetime, datetime]:
        """When the first and the last record of the lake were written; 1970 if it has none."""
        files = self.lake.files(BRONZE_EVENTS.name) if self.lake.exists(BRONZE_EVENTS.name) else []
        first = [_utc(at) for file in files if isinstance(at := file.minimum.get("written_at"), datetime)]
        last = [_utc(at) for file in files if isinstance(at := file.maximum.get("written_at"), datetime)]
        none = datetime.fromtimestamp(0, UTC)
        return min(first, default=none), max(last, default=none)

    def reached(self) -> int:
        """The last seq that the lake holds; 0 before the first run."""
        return bronze_state(self.lake).seq

    def pending(self) -> int | None:
        """
        How many records a run would take in: as many as the log is ahead of the lake, or none if the pipeline itself published them
        all. ``None`` if nobody can say.
        """
        state = bronze_state(self.lake)
        epoch = self.layout.read_meta(self._disk).epoch
        try:
            source = LogSource(self.layout, self._disk)
            view = source.pin(state.seq, load_hints(self.lake.storage, epoch=epoch, seq=state.seq))
        except PipelineError:
            return None
        return 0 if view.until == state.seq or self._is_own(view) else view.until - state.seq


def _beside_others(step: Callable[[], _T]) -> _T:
    """
    Do a step again from where the tables are, if another run did part of it meanwhile.

    Raises:
        LakeConflict: Others were first each time.
    """
    for _ in range(_TRIES_MAX - 1):
        with contextlib.suppress(LakeConflict):
            return step()
    return step()


class _Meta(msgspec.Struct):
    device: Any = None


class _Record(msgspec.Struct):
    """What of a line says who published it."""

    seq: int
    meta: _Meta


def _ignore(step: ProgressStep, /) -> None:
    """Progress that nobody asked for."""


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
