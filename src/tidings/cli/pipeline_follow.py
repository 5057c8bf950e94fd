"""``tidings pipeline run --follow``: bronze and silver as the log is written, the jobs every so often, until it is ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from tidings.core.errors import TidingsError

from .pipeline_progress import RunProgress

if TYPE_CHECKING:
    from tidings.pipeline.gold import JobResult
    from tidings.pipeline.jobs.job import Job
    from tidings.pipeline.runner import Pipeline, RunReport
    from tidings.pipeline.session import SessionOnDemand

    from .session import Session

_LOOK_S: Final = 0.25
JOBS_EVERY_S: Final = 30.0
"""How often the jobs are looked at, if nothing else is said."""


def follow(
    session: Session,
    pipeline: Callable[[], Pipeline],
    spark: SessionOnDemand,
    jobs: Sequence[Job],
    *,
    jobs_every_s: float,
    accepts_epoch: bool,
    show: Callable[[RunReport], None],
) -> None:
    """
    Follow the log until the process is interrupted; what may pass is tried again.

    Args:
        session: Of the command.
        pipeline: Makes the pipeline, each time with a name that no other has.
        spark: Where it runs.
        jobs: The jobs; each runs by its own schedule.
        jobs_every_s: How often they are looked at.
        accepts_epoch: Whether tables of an ended epoch may be set aside.
        show: Told of each micro-batch that added records, and of jobs that ran.

    Raises:
        TidingsError: What does not pass by itself.
    """
    from tidings.pipeline.errors import LakeConflict

    while True:
        try:
            _follow(session, pipeline(), spark, jobs, jobs_every_s, accepts_epoch, show)
        except TidingsError as error:
            if not error.retryable:
                raise
            session.out.note(f"following the log failed, and is tried again: {error}")
            session.out.flush()
            if not isinstance(error, LakeConflict):
                spark.stop()  # it may be Spark itself that is in trouble
        # Ctrl-C ends this wait and the command with it.
        threading.Event().wait(jobs_every_s)


def _follow(
    session: Session,
    pipeline: Pipeline,
    spark: SessionOnDemand,
    jobs: Sequence[Job],
    jobs_every_s: float,
    accepts_epoch: bool,
    show: Callable[[RunReport], None],
) -> None:
    from tidings.pipeline.bronze import BronzeFill
    from tidings.pipeline.runner import RunReport

    # Spark that is started in the main thread cancels all its jobs at Ctrl-C, in the middle of a commit too; here the query is
    # ended between two of them. And a start that is interrupted would leave its JVM behind.
    with ThreadPoolExecutor(1, "tidings-pipeline-start") as starting, ExitStack() as stack:
        started = starting.submit(spark)
        with RunProgress(session.out, session.clock) as progress:
            following = pipeline.follow(started.result, accepts_epoch=accepts_epoch, progress=progress)
        session.out.note(f"following the log; the tables reach to seq {pipeline.reached()}")
        session.out.flush()
        beside = stack.enter_context(ThreadPoolExecutor(1, "tidings-pipeline-jobs"))
        query = stack.enter_context(following)
        running: Future[tuple[JobResult, ...]] | None = None
        looked_at = -jobs_every_s
        while True:
            now = session.clock.monotonic()
            if running is None and now - looked_at >= jobs_every_s and query.has_looked:
                looked_at = now
                running = beside.submit(pipeline.run_gold, spark, jobs)
            for batch in query.wait(_LOOK_S):
                if batch.bronze.commits:
                    show(RunReport(query.epoch, batch.bronze.until, batch.bronze, batch.silver))
            if running is not None and running.done():
                if results := running.result():
                    reached = pipeline.reached()
                    show(RunReport(query.epoch, reached, BronzeFill(reached, reached), {}, results))
                running = None
            session.out.flush()
