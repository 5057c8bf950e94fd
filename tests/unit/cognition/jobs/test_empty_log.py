"""No job of any set minds a log without events."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.unit.cognition.jobs.temporal_support import context, types_of, utc
from tidings.pipeline.jobs.registry import all_jobs
from tidings.pipeline.schemas import CORE_TABLES, columns_of

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]  # a JVM on a busy machine takes its time


@pytest.mark.heavy
def test_nothing_gives_nothing(spark: SparkSession) -> None:
    """Every job makes empty tables of empty tables, with the columns it promised, and has nothing to publish."""
    at = context(utc("2025-09-06T14:30"))

    def empty(schema: str) -> DataFrame:
        return spark.createDataFrame([], schema).limit(0)  # as a run gives it: Spark then knows that there is nothing

    tables = {spec.name: empty(spec.schema) for spec in CORE_TABLES}
    for job in all_jobs():
        tables |= {each.table: empty(each.schema) for each in job.writes if each.table in job.reads}
        built = job.build(tables, at)
        assert set(built) == {output.table for output in job.writes}
        for output in job.writes:
            frame = built[output.table]
            assert frame.columns == [name for name, _ in columns_of(output.schema)]
            assert frame.take(1) == [], output.table
            tables[output.table] = empty(output.schema)
            assert types_of(frame.schema) == types_of(tables[output.table].schema), output.table
        if job.summarise is not None:
            assert list(job.summarise(tables, at)) == []
