"""
``gold.temporal_told``: what each event says of a moment, under the time that it speaks of.

An event may tell in its payload of another time than its own. Written down once, that time can be looked up: an hour of the
time index (T1) is made anew without searching every payload of the log for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting

from .columns import instant, name_of_actor, offset_in, text, texts, usable

__all__ = ["JOBS", "TEMPORAL_TOPIC", "TOLD", "told_of"]

TEMPORAL_TOPIC: Final = "temporal"
TOLD: Final = "gold.temporal_told"
_SCHEMA: Final = (
    "space_id string, event_id string, named_id string, ts timestamp, tz string, person_id string, tags array<string>, "
    "seq bigint, trace_id string, is_hippo boolean, is_temporal boolean"
)


def told_of(events: DataFrame, context: JobContext) -> DataFrame:
    """
    One row an event that tells of a moment: which one, when, where and whose.

    The space is the one that the record was committed in, whatever a payload says: nobody indexes into another's space.
    """
    topics = setting(context, "topics", ("hippo", TEMPORAL_TOPIC))
    written_at = F.coalesce(text("occurred_at"), text("ts"))
    happened = F.when(F.col("topic") == TEMPORAL_TOPIC, instant("ts")).when(
        F.col("topic") == "hippo", instant("occurred_at")
    )
    is_summary = F.col("type").startswith("TEMPORAL_") & (F.col("type") != "TEMPORAL_INGEST")
    is_moment = (
        F.when(F.col("topic") == TEMPORAL_TOPIC, ~is_summary)
        .when(F.col("topic") == "hippo", F.col("type") == "HIPPO_ENCODE")
        .otherwise(F.lit(True))
    )
    return (
        events.where(F.col("topic").isin(*topics) & is_moment)
        .select(
            "space_id",
            "event_id",
            F.when(F.col("topic") == TEMPORAL_TOPIC, text("event_id")).alias("named_id"),
            F.coalesce(happened, usable(F.col("ts"))).alias("ts"),
            F.coalesce(text("tz"), text("tz", "device"), offset_in(written_at)).alias("tz"),
            F.coalesce(text("person_id"), name_of_actor(F.col("actor"))).alias("person_id"),
            F.coalesce(texts("tags"), F.array().cast("array<string>")).alias("tags"),
            "seq",
            "trace_id",
            (F.col("topic") == "hippo").alias("is_hippo"),
            (F.col("topic") == TEMPORAL_TOPIC).alias("is_temporal"),
        )
        .where(F.col("ts").isNotNull() & F.col("space_id").isNotNull() & F.col("event_id").isNotNull())
    )


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {TOLD: told_of(tables["silver.events"], context)}


JOBS: Final = (
    Job(
        name="temporal_told",
        about="Writes down which moment each event tells of (for T1 and T6).",
        reads=("silver.events",),
        writes=(OutputTable(TOLD, _SCHEMA, "What one event says of a moment.", ("seq",)),),
        build=_build,
        partitioning=Partitioning(lambda _: {"silver.events": InputWindow("seq")}, is_by_seq=True),
        settings_of="temporal_index",
    ),
)
