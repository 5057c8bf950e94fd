"""What several jobs of a run read is read once, where that is worth it, and within a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.s3_server import new_bucket, recorded
from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace, event
from tidings.core.clock import SYSTEM_CLOCK
from tidings.pipeline.jobs.job import Job, JobContext, OutputTable
from tidings.pipeline.lake import Lake
from tidings.pipeline.runner import Pipeline
from tidings.pipeline.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


class Counting:
    """Jobs that count events, and what they saw of Spark while they were built."""

    def __init__(self, *names: str, fails: str = "") -> None:
        self.jobs = [self._job(name) for name in names]
        self.frames: list[DataFrame] = []
        self.kept: list[int] = []
        """How many tables Spark held when each of them was built."""
        self._fails = fails

    def _job(self, name: str) -> Job:
        table = f"gold.{name}"

        def build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
            assert name != self._fails
            found = tables["silver.events"]
            self.frames.append(found)
            self.kept.append(held(found.sparkSession))
            return {table: found.groupBy("topic").count().withColumnRenamed("count", "events")}

        output = OutputTable(table, "topic string, events bigint", "One topic.")
        return Job(name, "Counts.", ("silver.events",), (output,), build)


def held(spark: SparkSession) -> int:
    """How many tables Spark holds in its memory."""
    return int(spark.sparkContext._jsc.getPersistentRDDs().size())


def run(spark: SparkSession, workspace: Workspace, lake: Storage, jobs: Sequence[Job], shared_bytes_max: int) -> None:
    """One run, in which no job fails that was not meant to."""
    settings = msgspec.structs.replace(TEST_SETTINGS, shared_bytes_max=shared_bytes_max)
    name = "-".join(["run", str(shared_bytes_max), *(job.name for job in jobs)])
    Pipeline(workspace.folder, settings, clock=SYSTEM_CLOCK, run=name, lake=lake).run(lambda: spark, jobs)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A log with some events."""
    made = Workspace(tmp_path / "ws")
    made.append(event(number, f"t{number % 2}") for number in range(20))
    return made


def test_an_object_store_is_asked_once_for_what_several_jobs_read(
    spark: SparkSession, workspace: Workspace, s3_url: str
) -> None:
    """
    Of a store that Spark has no library for, a run downloads a table once for all jobs that read it; one that is larger than the
    bound, or with a bound of 0, once for each. Nothing is held after a run, also if a job fails.
    """
    lake = new_bucket(s3_url)
    run(spark, workspace, lake, [], 0)
    size = sum(file.size for file in Lake(lake, SYSTEM_CLOCK).files("silver.events"))

    def downloads(jobs: Counting, shared_bytes_max: int) -> int:
        before = held(spark)
        with recorded(s3_url) as asked:
            run(spark, workspace, lake, jobs.jobs, shared_bytes_max)
        assert held(spark) == before
        return sum(
            1 for method, path in asked if method == "GET" and "/silver/events/" in path and path.endswith(".parquet")
        )

    one = downloads(Counting("first"), size)
    assert one > 0
    assert downloads(Counting("second", "third", "fourth"), size) == one
    assert downloads(Counting("fifth", "sixth", "seventh", fails="sixth"), size) == one
    assert downloads(Counting("eighth", "ninth"), size - 1) == 2 * one
    assert downloads(Counting("tenth", "eleventh"), 0) == 2 * one
    for name in ("first", "second", "third", "fourth", "fifth", "eighth", "eleventh"):
        counts = Lake(lake, SYSTEM_CLOCK).dataset(f"gold.{name}").to_table().to_pylist()
        assert sorted((row["topic"], row["events"]) for row in counts) == [("t0", 10), ("t1", 10)]


def test_files_that_spark_opens_itself_are_planned_once_and_not_held(spark: SparkSession, workspace: Workspace) -> None:
    """
    Jobs that read the same files of a folder are given the same DataFrame, and Spark holds no rows of it.
    """
    jobs, before = Counting("first", "second"), held(spark)

    run(spark, workspace, Storage.of(workspace.folder / "lake"), jobs.jobs, 1 << 30)

    assert len({id(frame) for frame in jobs.frames}) < len(jobs.frames) == 2
    assert jobs.kept == [before, before]
    assert workspace.rows("gold.first") == workspace.rows("gold.second") == [("t0", 10), ("t1", 10)]
