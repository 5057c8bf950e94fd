"""Faults of the pipeline that issue 34 mends; see ``test_known_faults.py``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.test_known_faults import PIPELINE, left_to
from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace, event
from tidings.pipeline.jobs.job import Job
from tidings.pipeline.jobs.operations import JOBS
from tidings.spark import TidingsSource, register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class FixedConfiguration:
    """The configuration of a session that may not be changed, as in a declarative pipeline."""

    def set(self, name: str, value: str) -> None:
        raise RuntimeError(f"{name} cannot be set here")


class DeclarativeSession:
    """What ``register`` uses of a session."""

    def __init__(self) -> None:
        self.conf = FixedConfiguration()
        self.dataSource = self
        self.sources: list[object] = []

    def register(self, source: object) -> None:
        self.sources.append(source)


@left_to(PIPELINE, "group_health reads all of bronze (lake 12)")
def test_group_health_reads_no_events() -> None:
    """Head and lag of groups come from the table's statistics, not from rows of bronze."""
    [job] = [job for job in JOBS if job.name == "group_health"]
    assert "bronze.events" not in job.reads


@left_to(PIPELINE, "a job has no version (lake 15)")
def test_a_job_has_a_version() -> None:
    """A version decides whether rows of earlier code still count."""
    assert "version" in inspect.signature(Job).parameters


@left_to(PIPELINE, "register changes the session's configuration (lake 19)")
def test_register_works_where_the_session_is_fixed() -> None:
    """A session whose configuration cannot be changed, as in a declarative pipeline, can use the format."""
    session: Any = DeclarativeSession()
    try:
        register(session)
    except RuntimeError as error:
        pytest.fail(str(error))
    assert session.sources == [TidingsSource]


@pytest.mark.spark
@left_to(PIPELINE, "Spark cannot read the tables of the lake (lake 16)")
def test_spark_reads_a_table_of_the_lake(tmp_path: Path, spark: SparkSession) -> None:
    """``format("tidings").option("table", ...)`` gives the rows of a table."""
    workspace = Workspace(tmp_path)
    workspace.append([event(1)])
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)
    register(spark)
    rows = spark.read.format("tidings").option("table", "silver.events").load(str(tmp_path)).collect()
    assert len(rows) == 1


@pytest.mark.spark
@left_to(PIPELINE, "maxRowsPerTrigger counts records of other topics (lake 20)")
def test_rows_of_other_topics_do_not_count_for_a_trigger(tmp_path: Path, spark: SparkSession) -> None:
    """Ten rows of a rare topic come in one micro-batch of at most ten rows."""
    workspace = Workspace(tmp_path / "w")
    workspace.append(event(number, "rare" if number % 5 == 0 else "common") for number in range(50))
    register(spark)
    counts: list[int] = []
    stream = spark.readStream.format("tidings").options(topics="rare", maxRowsPerTrigger="10").load(str(tmp_path / "w"))
    query = stream.writeStream.foreachBatch(lambda frame, _: counts.append(frame.count()))
    query.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start().awaitTermination()
    assert counts == [10]


@pytest.mark.spark
@left_to(PIPELINE, "tables have neither description nor comments (external F18)")
def test_tables_have_descriptions(tmp_path: Path, spark: SparkSession) -> None:
    """A table of the lake carries its description, and its columns their comments."""
    workspace = Workspace(tmp_path)
    workspace.append([event(1)])
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)
    assert workspace.lake.open("bronze.events").metadata().description


@pytest.mark.spark
@pytest.mark.heavy
@left_to(PIPELINE, "one task writes a changed day, whatever its size (lake 13)")
def test_a_large_day_is_written_by_several_tasks(tmp_path: Path, spark: SparkSession) -> None:
    """Two million rows of one day make more than one file."""
    from pyspark.sql import DataFrame
    from pyspark.sql.functions import col, explode, lit, sequence

    from tidings.pipeline.jobs.job import InputWindow, JobContext, OutputTable, Partitioning

    def build(tables: Any, context: JobContext) -> dict[str, DataFrame]:
        rows = tables["silver.events"].select(col("date"), explode(sequence(lit(1), lit(2_000_000))).alias("n"))
        return {"gold.many": rows}

    job = Job(
        "many",
        "Many rows.",
        ("silver.events",),
        (OutputTable("gold.many", "date date, n int", "A row."),),
        build,
        partitioning=Partitioning(lambda _: {"silver.events": InputWindow("date")}),
    )
    workspace = Workspace(tmp_path)
    workspace.append([event(1)])
    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark, [job])
    assert [result.error for result in report.jobs] == [None]
    assert len(workspace.lake.files("gold.many")) > 1
