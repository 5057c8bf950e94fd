"""How far a run is: told to whoever asked, without a word to a screen."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Progress", "Silence", "Step", "watched"]

_POLL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Step:
    """Where a run is."""

    stage: str
    """``bronze``, ``silver``, or the name of a job."""
    done: int = 0
    total: int | None = None
    """Tasks, or ``None`` where nobody can say."""
    rows: int = 0
    """Rows that the stage has committed so far."""


class Progress(Protocol):
    """Whoever wants to know."""

    def __call__(self, step: Step, /) -> None:
        """Told now and then, from any thread; must not wait."""
        ...


class Silence:
    """Nobody wants to know."""

    def __call__(self, step: Step, /) -> None:
        """Nothing."""


@contextlib.contextmanager
def watched(spark: SparkSession, progress: Progress, stage: str, total: int, rows: int) -> Iterator[None]:
    """
    Tell how many of a stage's tasks are done, for as long as the block runs.

    Over Spark Connect there is no counting from here; then only the beginning and the end are told.
    """
    progress(Step(stage, 0, total, rows))
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        yield
        progress(Step(stage, total, total, rows))
        return
    tracker, over = spark.sparkContext.statusTracker(), threading.Event()

    def look() -> None:
        while not over.wait(_POLL_S):
            infos = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
            done = sum(info.numCompletedTasks for info in infos if info is not None)
            progress(Step(stage, min(done, total), total, rows))

    watcher = threading.Thread(target=look, name="tidings-pipeline-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    progress(Step(stage, total, total, rows))
