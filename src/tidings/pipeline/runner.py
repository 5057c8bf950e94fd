"""
One run of the pipeline: the log to bronze, bronze to silver, silver to gold, and the jobs' summaries to the log.

A run pins ``until`` first and everything in it sees the records up to there and no others. Each step commits by itself and
stores in its commit how far it got, so a run that ends early is continued by the next, and a run with nothing new does
nothing. A job that fails leaves its tables as they were and does not stop the others.

A lake names the epoch of the log it was made from. If the log has another one, either repair gave it a new epoch, and then
what repair set aside shows the old one; or the lake is another log's. The first may be accepted: the tables of the ended
epoch are moved aside as they are, because they may be the only place that still holds what the log dropped, and new ones are
created. The second is always refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidings.core.clock import Clock
from tidings.core.events import Event
from tidings.log.embedded.disk import Disk, OsDisk, read_file
from tidings.log.embedded.layout import Layout

from .bronze import Bronze, BronzeFill, bronze_state
from .errors import EpochChanged, JobFailed, LakeOfAnotherLog, PipelineError
from .gold import GoldJobs, JobResult
from .housekeeping import keep_house
from .lake import Lake
from .schemas import BRONZE_EVENTS, SILVER_EVENTS, SILVER_SYNC_EVENTS
from .session import Progress, ProgressStep
from .settings import PipelineSettings
from .silver import Silver
from .source import LogSource
from .state_files import load_archived, load_published, save_archived, save_published
from .storage import Storage

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
    """
    meta = lake.meta()
    if meta is None and not lake.tables():
        lake.begin(epoch)
        return
    lake_epoch = "" if meta is None else meta.epoch
    if lake_epoch == epoch:
        return
    if lake_epoch not in earlier_epochs(layout, disk):
        raise LakeOfAnotherLog(str(lake.storage), f"its tables were made from epoch {lake_epoch or '?'} of another log")
    if not accepts_epoch:
        raise EpochChanged(lake_epoch, epoch)
    lake.begin(epoch)


Publish = Callable[[Sequence[Event]], bool]
"""
Takes events to the log through the front door: a log that is opened for it, or the node that has the workspace. Whether
the log has them now; if it has not (the workspace is busy), the next run says the same again.
"""

LAKE_FOLDER: Final = "lake"


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
        spark: SparkSession,
        jobs: Sequence[Job] = (),
        *,
        accepts_epoch: bool = False,
        is_again: bool = False,
        is_paced: bool = False,
        progress: Progress | None = None,
    ) -> RunReport:
        """
        Bring every table up to what the log holds now.

        Args:
            spark: Where the work is done.
            jobs: The jobs to run, in order; none for bronze and silver alone.
            accepts_epoch: Whether tables of an ended epoch may be set aside and new ones begun.
            is_again: Whether jobs that were done for this ``until`` are done again.
            is_paced: Whether jobs that cost all of history wait for ``rebuild_interval_s``: for runs that follow the log.
            progress: Told how far it is.

        Raises:
            EpochChanged, LakeOfAnotherLog, PositionLost: The lake does not fit the log.
            LakeConflict, LakeUnwritable, LakeDamaged: The lake cannot be written.
            SparkFailed: Spark gave up.
        """
        report_to = progress or _ignore
        meta = self.layout.read_meta(self._disk)
        check_epoch(self.lake, self.layout, self._disk, meta.epoch, accepts_epoch=accepts_epoch)
        source = LogSource(self.layout, self._disk)
        now_us = self._clock.now_ns() // 1000
        bronze = Bronze(self.lake, source, self.settings, run=self._run, now_us=now_us)
        filled = bronze.fill(spark, meta.epoch, report_to)
        until = bronze.state().seq
        gained: Mapping[str, int] = {}
        results: tuple[JobResult, ...] = ()
        if until:
            if filled.commits or not load_archived(self.lake.storage, meta.epoch):
                save_archived(self.lake, meta.epoch, until)
            silver = Silver(self.lake, self.layout, self._disk, self._clock, self.settings, self._run)
            gained = silver.fill(spark, meta.epoch, until, report_to)
            gold = GoldJobs(
                self.lake,
                self.settings,
                jobs,
                epoch=meta.epoch,
                until=until,
                as_of=self.as_of(),
                run=self._run,
                now_ns=self._clock.now_ns(),
            )
            results = self._run_jobs(
                spark, gold, jobs, meta.epoch, until, report_to, is_again=is_again, is_paced=is_paced
            )
            keep_house(self.lake, self.settings, now_ns=self._clock.now_ns())
        return RunReport(meta.epoch, until, filled, gained, results)

    def _run_jobs(
        self,
        spark: SparkSession,
        gold: GoldJobs,
        jobs: Sequence[Job],
        epoch: str,
        until: int,
        progress: Progress,
        *,
        is_again: bool,
        is_paced: bool,
    ) -> tuple[JobResult, ...]:
        results = []
        published = load_published(self.lake.storage, epoch)
        for job in jobs:
            try:
                made_at = gold.made_at(job)
                result = gold.run(spark, job, progress, is_again=is_again, is_paced=is_paced)
                # What was not made anew has nothing new to say; and a summary costs all of a table, however little of it
                # was made anew, so it is paced even where its job is not.
                is_due = not is_paced or (
                    result.rows is not None and (job.partitioning is None or gold.is_new_interval(made_at))
                )
                if (
                    self._publish is not None
                    and job.summarise is not None
                    and is_due
                    and published.get(job.name, 0) < until
                ):
                    events = gold.summary(spark, job)
                    # Noted last: a run that dies before says it all again, under the same ids, which the log knows.
                    if not events or self._publish(events):
                        published[job.name] = until
                        save_published(self.lake.storage, epoch, published)
                        result = replace(result, published=len(events))
            except JobFailed as error:
                result = JobResult(job.name, error=error)
            results.append(result)
        return tuple(results)

    def refill_silver(self) -> None:
        """Empty the silver tables; the next run fills them from bronze again."""
        epoch = self.layout.read_meta(self._disk).epoch
        for table in (SILVER_EVENTS, SILVER_SYNC_EVENTS):
            batch = int(self.lake.note(table.name).get("batch", 0)) + 1
            self.lake.reset(table.name, app="silver", note={"epoch": epoch, "seq": 0, "batch": batch})

    def as_of(self) -> datetime:
        """When the last record that the lake holds was written: what a run calls now."""
        latest = [
            moment
            for file in self.lake.files(BRONZE_EVENTS.name)
            if isinstance(moment := file.maximum.get("written_at"), datetime)
        ]
        return max((_utc(moment) for moment in latest), default=datetime.fromtimestamp(0, UTC))

    def reached(self) -> int:
        """The last seq that the lake holds; 0 before the first run."""
        return bronze_state(self.lake).seq

    def pending(self) -> int | None:
        """How many seqs the log is ahead of the lake; ``None`` if nobody can say."""
        from .state_files import load_hints

        state = bronze_state(self.lake)
        epoch = self.layout.read_meta(self._disk).epoch
        try:
            source = LogSource(self.layout, self._disk)
            view = source.pin(state.seq, load_hints(self.lake.storage, epoch=epoch, seq=state.seq))
        except PipelineError:
            return None
        return view.until - state.seq


def _ignore(step: ProgressStep, /) -> None:
    """Progress that nobody asked for."""


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
