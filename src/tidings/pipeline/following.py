"""
Following the log: one streaming query keeps bronze and silver up to it, for as long as it is open.

The query reads the data source ``tidings``, whose tasks write files of bronze (``bronze_task``); each micro-batch commits them
to bronze, and fills silver from there. What counts is the seq that the last commit to bronze names, not the query's
checkpoint: a micro-batch begins where the table ends. So one that is repeated, or that a run beside this one has done, changes
nothing, and each query has a checkpoint of its own, which goes with it.

Starting Spark and setting up a query takes seconds, which nobody has to wait for: until the query has looked at the log, runs
beside it take in what comes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .bronze import Bronze, BronzeFill, messages_of
from .errors import LakeConflict, SparkFailed
from .scratch import owned_folder
from .session import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from .settings import PipelineSettings

_ENDING_S_MAX: Final = 120.0


@dataclass(frozen=True, slots=True)
class FollowedBatch:
    """What a micro-batch added."""

    bronze: BronzeFill
    silver: Mapping[str, int]
    """Rows gained, by table."""


class Following:
    """
    The streaming query; opened and closed by ``with``.

    Args:
        spark: Where it runs; in this process, not behind Spark Connect, for the commits are made here. Asked for when it is opened.
        bronze: The table it fills.
        fill_silver: Called in each micro-batch after the commit to bronze; what silver gained.
        run: Takes in what there is, as a run of its own: called until the query has looked at the log.
        epoch: Of the log.
        settings: How often the log is looked at, and how much of it a micro-batch takes.
    """

    def __init__(
        self,
        spark: Callable[[], SparkSession],
        bronze: Bronze,
        fill_silver: Callable[[BronzeFill], Mapping[str, int]],
        run: Callable[[], FollowedBatch],
        epoch: str,
        settings: PipelineSettings,
    ) -> None:
        self._spark = spark
        self._bronze = bronze
        self._fill_silver = fill_silver
        self._run = run
        self.epoch = epoch
        self._settings = settings
        self._query: StreamingQuery | None = None
        self._stack = contextlib.ExitStack()
        self._batch = threading.Lock()
        """Held while a micro-batch commits."""
        self._ending = threading.Event()
        self._problem: BaseException | None = None
        self._batches: deque[FollowedBatch] = deque()
        self._news = threading.Event()

    def __enter__(self) -> Following:
        beside = threading.Thread(target=self._run_meanwhile, name="tidings-pipeline-meanwhile", daemon=True)
        beside.start()
        self._stack.callback(beside.join)
        try:
            self._query = self._started(self._spark())
        except BaseException:
            self.__exit__()
            raise
        return self

    def _started(self, spark: SparkSession) -> StreamingQuery:
        stream = spark.readStream.format("tidings").options(**self._bronze.reader_options(spark, self.epoch))
        writer = stream.option("maxBytesPerTrigger", str(self._settings.commit_bytes_max)).load().writeStream
        checkpoint = self._stack.enter_context(owned_folder("tidings-follow-")) / "checkpoint"
        writer = writer.foreachBatch(self._take).option("checkpointLocation", str(checkpoint))
        return writer.trigger(processingTime=f"{self._settings.follow_interval_ms} milliseconds").start()

    def _run_meanwhile(self) -> None:
        while not (self._ending.wait(self._settings.follow_interval_ms / 1000) or self.has_looked):
            with self._batch:
                if self._ending.is_set():
                    return
                try:
                    found = self._run()
                except Exception:  # noqa: BLE001 - whatever it is, the query meets it too, and says so
                    continue
            if found.bronze.commits:
                self._batches.append(found)
                self._news.set()

    def __exit__(self, *_: object) -> None:
        """End the query: between two micro-batches, or after the one that is being committed."""
        self._ending.set()
        is_held = self._batch.acquire(timeout=_ENDING_S_MAX)
        try:
            if self._query is not None:
                self._query.stop()
        finally:
            if is_held:
                self._batch.release()
            self._stack.close()

    @property
    def has_looked(self) -> bool:
        """Whether the query has looked at the log: until then it is being set up, and whoever works beside it would make it wait."""
        query = self._query
        return query is not None and bool(query.recentProgress or query.status["message"].startswith("Waiting"))

    def wait(self, seconds: float) -> list[FollowedBatch]:
        """
        Wait until micro-batches were committed, or for so long; what they added.

        Raises:
            PipelineError: The query has ended, for this reason.
        """
        self._news.wait(seconds)
        self._news.clear()
        found = [self._batches.popleft() for _ in range(len(self._batches))]
        if not found and self._query is not None and not self._query.isActive:
            raise self._reason(self._query)
        return found

    def _reason(self, query: StreamingQuery) -> BaseException:
        if self._problem is not None:
            return self._problem
        return SparkFailed("following the log", first_line(query.exception() or RuntimeError("the query was ended")))

    def _take(self, frame: DataFrame, _: int) -> None:
        with self._batch:
            if self._ending.is_set():
                raise InterruptedError("the query is being ended")
            try:
                filled = self._commit(frame)
                found = FollowedBatch(filled, self._fill_silver(filled))
            except BaseException as error:
                self._problem = error
                self._news.set()
                raise
        self._batches.append(found)
        self._news.set()

    def _commit(self, frame: DataFrame) -> BronzeFill:
        messages = messages_of(frame)
        try:
            return self._bronze.take(messages, self.epoch)
        except LakeConflict:
            # Another run took some of it, perhaps not all; what is left is taken the way a run does.
            return self._bronze.fill(self._spark, self.epoch, lambda _: None)
