"""
What several jobs of a run read: each input, that is the same files of a table, is one DataFrame for all of them.

Where Spark opens files itself that saves planning, and nothing else is kept: it reads only the columns that a job asks for, and
keeping all of them in memory costs more than that. Where it cannot (an object store that it has no library for), every reading
downloads files as a whole and carries them through Python, so the rows stay in Spark's memory until the run ends, within a bound.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .jobs.job import Job
from .lake import Lake, can_open
from .table_files import DataFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class SharedInputs:
    """
    The inputs of one run's jobs. May be used by several threads; ``close`` forgets the rows.

    Args:
        lake: Where the tables are.
        jobs: The jobs of the run.
        bytes_max: So much of files is kept at most.
    """

    def __init__(self, lake: Lake, jobs: Iterable[Job], bytes_max: int) -> None:
        self._lake = lake
        self._to_come: dict[str, set[str]] = {}
        """By table, the jobs that read it and have not asked for it."""
        for job in jobs:
            for table in job.reads:
                self._to_come.setdefault(table, set()).add(job.name)
        self._bytes_left = bytes_max
        self._frames: dict[tuple[int, str, frozenset[str]], DataFrame] = {}
        """By session, table and files."""
        self._kept: list[DataFrame] = []
        self._lock = threading.Lock()

    def end(self, job: Job) -> None:
        """A job is done: it asks for nothing more."""
        with self._lock:
            for table in job.reads:
                self._to_come[table].discard(job.name)

    def frame(self, spark: SparkSession, job: Job, table: str, files: Sequence[DataFile], ddl: str | None) -> DataFrame:
        """
        All rows of these files of a table.

        Args:
            spark: The job's session.
            job: Who asks.
            table, files: For what.
            ddl: The columns of a table that was never made.
        """
        names = frozenset(file.name for file in files)
        with self._lock:
            others = self._to_come[table]
            others.discard(job.name)
            key = id(spark), table, names
            if (known := self._frames.get(key)) is not None:
                return known
            frame = self._lake.read(spark, table, lambda file: file.name in names, ddl)
            size = sum(file.size for file in files)
            is_wanted = bool(files) and bool(others) and size <= self._bytes_left
            if is_wanted and not can_open(spark, self._lake.folder(table)):
                frame.persist()
                self._kept.append(frame)
                self._bytes_left -= size
            self._frames[key] = frame
            return frame

    def close(self) -> None:
        """The run is over."""
        for frame in self._kept:
            with contextlib.suppress(Exception):  # a Spark that is gone has taken its memory with it
                frame.unpersist()
        self._kept.clear()
        self._frames.clear()
