"""A rollup is summed up again if, and only if, something that it is made of has changed."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.unit.cognition.jobs.temporal_support import Events, context, rows_of, run, utc
from tidings.cognition.jobs.consolidation_duplicates import CONSOLIDATION_KEEPING_JOBS
from tidings.cognition.jobs.consolidation_rollups import CONSOLIDATION_ROLLUPS_JOBS
from tidings.cognition.jobs.temporal_features import TEMPORAL_FEATURES_JOBS

pytestmark = pytest.mark.spark
NOW = utc("2025-09-06T12:00")
(KEEPING,) = CONSOLIDATION_KEEPING_JOBS
_, KEPT_DAYS, ROLLUPS = CONSOLIDATION_ROLLUPS_JOBS


def rolled(spark: SparkSession, events: Events, before: DataFrame | None, **settings: Any) -> DataFrame:
    """The rollups if every memory was kept, after a run that left those before."""
    scored = [
        (row[5], row[3], row[2], row[6], None, 1.0, 0.5, 0.0, 0, 0.0, 0.5, "keep", "", None, row[6].date())
        for row in events.rows
    ]
    tables = {
        "silver.events": events.frame(spark),
        "gold.keep_scores": spark.createDataFrame(scored, KEEPING.writes[0].schema),
        "gold.temporal_features": spark.createDataFrame([], TEMPORAL_FEATURES_JOBS[0].writes[0].schema),
    }
    if before is not None:
        tables["gold.rollups"] = before
    return run([KEPT_DAYS, ROLLUPS], tables, context(NOW, **settings))["gold.rollups"]


@pytest.mark.heavy
@pytest.mark.req("C3")
def test_only_periods_that_changed_are_summed_up_again(spark: SparkSession) -> None:
    """
    A day that got a memory is another; a day that got none keeps what the last run said of it, to the letter and with all
    of its parts, lists and numbers among them.
    """
    events = Events()
    events.memory(utc("2025-09-03T08:00"), "Ada fixed the boiler.", event_id="a")
    events.memory(utc("2025-09-04T08:00"), "Bob baked bread.", event_id="b")
    for hour in range(6):
        text = f"Thing{hour} went to place{hour}. And back."
        events.memory(utc(f"2025-09-03T{hour + 8:02d}:15"), text, space_id="s:same")
    first = rolled(spark, events, None)
    # Words that no memory has: whoever sums up anew does not find them.
    mark = F.when(F.col("space_id") != "s:same", F.lit("As before: ")).otherwise(F.lit(""))
    marked = first.withColumn("summary", F.concat(mark, "summary"))
    events.memory(utc("2025-09-04T09:00"), "It was rye.", event_id="c")

    second = rolled(spark, events, marked)
    other = rolled(spark, events, marked, tokens_day_max=300)

    def days(frame: DataFrame) -> list[str]:
        return [row["summary"] for row in rows_of(frame.where("period = 'day' and space_id != 's:same'"), "from_ts")]

    assert days(second) == ["As before: Ada fixed the boiler.", "Bob baked bread. It was rye."]
    assert days(other) == ["Ada fixed the boiler.", "Bob baked bread. It was rye."]
    same = [rows_of(frame.where("space_id = 's:same'"), "rollup_id") for frame in (first, second, other)]
    assert same[0] == same[1]
    assert [row["summary"] for row in same[0]] == [row["summary"] for row in same[2]]
