"""
C4, late data: events that came long after they happened or out of order, and the summaries they make stale.

Within a topic and space an event is out of order if one before it in the log happened more than ``skew_s`` later: within
that window clocks may differ. It is late if it was written more than ``late_s`` after it happened, and ahead if it claims to
have happened more than ``skew_s`` after it was written.

A rollup is stale once memories of its period were committed after it was told. Few of them patch it, more make a new
version; ``consolidation_rollups`` does so, by the same threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from tidings.pipeline.jobs.job import Job, JobContext, OutputTable, setting

from .columns import as_of, hours_between, instant, text
from .consolidation_memories import CONSOLIDATION_TOPIC, memories
from .consolidation_rollups import PATCH_SHARE_MAX, TOLD_TYPE, told_rollups

__all__ = ["JOBS", "LATE_EVENTS", "RECONSOLIDATIONS", "late_events"]

LATE_EVENTS: Final = "gold.late_events"
RECONSOLIDATIONS: Final = "gold.reconsolidations"
_SKEW_S: Final = 10.0
_LATE_S: Final = 3_600.0
_DAYS: Final = 30
_LISTED_MAX: Final = 1_000

_LATE_SCHEMA: Final = (
    "topic string, space_id string, event_id string, offset bigint, seq bigint, ts timestamp, written_at timestamp, "
    "late_s double, behind_s double, is_late boolean, is_out_of_order boolean, is_ahead boolean"
)
_RECON_SCHEMA: Final = (
    "space_id string, rollup_id string, period string, from_ts timestamp, to_ts timestamp, told_version int, "
    "told_seq bigint, late_count bigint, late_share double, action string, event_ids array<string>"
)


def late_events(events: DataFrame, *, skew_s: float, late_s: float) -> DataFrame:
    """The events that are late, out of order or ahead, with by how much."""
    before = Window.partitionBy("topic", "space_id").orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
    behind_s = hours_between(F.col("ts"), F.max("ts").over(before)) * 3600
    found = (
        events.withColumn("late_s", hours_between(F.col("ts"), F.col("written_at")) * 3600)
        .withColumn("behind_s", F.greatest(F.coalesce(behind_s, F.lit(0.0)), F.lit(0.0)))
        .withColumn("is_late", F.col("late_s") > late_s)
        .withColumn("is_out_of_order", F.col("behind_s") > skew_s)
        .withColumn("is_ahead", F.col("late_s") < -skew_s)
    )
    return found.where(F.col("is_late") | F.col("is_out_of_order") | F.col("is_ahead")).select(
        *("topic", "space_id", "event_id", "offset", "seq", "ts", "written_at", "late_s", "behind_s"),
        *("is_late", "is_out_of_order", "is_ahead"),
    )


def reconsolidations(events: DataFrame, context: JobContext) -> DataFrame:
    """The rollups that were told and have got memories since."""
    share_max = setting(context, "patch_share_max", PATCH_SHARE_MAX)
    spans = events.where((F.col("topic") == CONSOLIDATION_TOPIC) & (F.col("type") == TOLD_TYPE)).select(
        F.col("seq").alias("told_seq"),
        text("period").alias("period"),
        instant("from").alias("from_ts"),
        instant("to").alias("to_ts"),
    )
    told = told_rollups(events).join(spans, "told_seq").withColumnRenamed("space_id", "_space")
    came = memories(events, context).select("space_id", "event_id", "seq", "ts")
    is_stale = (
        (F.col("space_id") == F.col("_space"))
        & (F.col("ts") >= F.col("from_ts"))
        & (F.col("ts") < F.col("to_ts"))
        & (F.col("seq") > F.col("told_seq"))
    )
    known = F.greatest(F.size(F.coalesce("told_ids", F.array().cast("array<string>"))), F.lit(1))
    stale = (
        came.join(told, is_stale)
        .groupBy("space_id", "rollup_id", "period", "from_ts", "to_ts", "told_version", "told_seq")
        .agg(
            F.count("*").alias("late_count"),
            (F.count("*") / F.first(known)).alias("late_share"),
            F.slice(F.array_sort(F.collect_list("event_id")), 1, _LISTED_MAX).alias("event_ids"),
        )
    )
    action = F.when(F.col("late_share") < share_max, "PATCH").otherwise(F.lit("UPDATE_SUMMARY"))
    return stale.select(
        *("space_id", "rollup_id", "period", "from_ts", "to_ts", "told_version", "told_seq", "late_count"),
        *("late_share", action.alias("action"), "event_ids"),
    )


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    events = tables["silver.events"]
    days = setting(context, "days", _DAYS, above=0)
    recent = events.where(F.col("written_at") > as_of(context) - F.expr(f"INTERVAL '{days}' DAY"))
    return {
        LATE_EVENTS: late_events(
            recent,
            skew_s=setting(context, "skew_s", _SKEW_S, above=0),
            late_s=setting(context, "late_s", _LATE_S, above=0),
        ),
        RECONSOLIDATIONS: reconsolidations(events, context),
    }


JOBS: Final = (
    Job(
        name="consolidation_late",
        about="Finds late and out-of-order events, and the summaries they make stale (C4).",
        reads=("silver.events",),
        writes=(
            OutputTable(LATE_EVENTS, _LATE_SCHEMA, "An event that came late, out of order, or ahead of its time."),
            OutputTable(RECONSOLIDATIONS, _RECON_SCHEMA, "A rollup that was told before all of its memories had come."),
        ),
        build=_build,
    ),
)
