"""
C5, retention: what of the log every group has read and its time has passed, for the bus to compact.

A topic is released up to an offset: the lowest that a group has acknowledged, and before the first record that is still
to be kept. A record is kept for as many days as its topic's rule says (``retention_days``, by topic), else as the registry says
of its type, else as the rule ``*`` says, else for ever. A group whose cursor counts in another epoch holds everything.

Each segment that the log had when the run looked is listed with its fate and the reason. Only records in bronze are seen, so
nothing is released that the lake does not hold. The list is a proposal: the bus and the log's own retention plan drop segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidings.core.errors import SettingsError
from tidings.pipeline.jobs.job import Job, JobContext, OutputTable, setting

from .columns import as_of

__all__ = ["COMPACTION", "JOBS", "REGISTRY_DAYS", "released"]

COMPACTION: Final = "gold.compaction_list"
REGISTRY_DAYS: Final[Mapping[str, int]] = {
    "SENSORY_FRAME": 7,
    "WORKSPACE_BROADCAST": 1,
    "HIPPO_ENCODE": 30,
    "ACTION_DECISION": 90,
    "ACTION_EXECUTED": 365,
    "PROSPECTIVE_SCHEDULE": 365,
    "LEARNING_TICK": 30,
    "TOMBSTONE_PROPAGATE": 9_999,
    "DSAR_EXPORT": 2_555,
    "ML_RUN_EVENT": 90,
    "JOB_STATUS_CHANGED": 7,
    "MEMORY_RECEIPT_CREATED": 30,
    "INTEGRATION_THING_CHANGED": 30,
    "PRESENCE_DEVICE_CHANGED": 7,
    "SAFETY_BAND_CHANGED": 365,
    "PROSPECTIVE_REMIND_TICK": 30,
    "REINDEX_REQUEST": 90,
    "USER_CREATED": 365,
    "USER_ROLE_ASSIGNED": 365,
    "USER_SPACE_ACCESS_GRANTED": 365,
    "USER_STATUS_CHANGED": 365,
}
"""How many days the registry of topics keeps events of a type."""

_SCHEMA: Final = (
    "topic string, space_id string, segment bigint, first_offset bigint, last_offset bigint, size_bytes bigint, "
    "is_released boolean, released_offset bigint, group_floor bigint, held_by string, reason string"
)


def released(events: DataFrame, cursors: DataFrame, context: JobContext) -> DataFrame:
    """
    One row a topic: ``topic``, ``first_offset``, ``last_offset``, ``aged_offset``, ``group_floor``, ``held_by``, ``released_offset``.

    Args:
        events: ``bronze.events``.
        cursors: ``silver.group_cursors``.
    """
    days = _days_of(setting(context, "retention_days", {}))
    # Not by adding days to a time: a rule of a million years is past the calendar's end.
    age_days = (F.unix_micros(as_of(context)) - F.unix_micros("written_at")) / F.lit(86_400_000_000)
    is_kept = days.isNull() | (age_days < days)
    topics = (
        events.groupBy("topic")
        .agg(
            F.min("offset").alias("first_offset"),
            F.max("offset").alias("last_offset"),
            F.min(F.when(is_kept, F.col("offset"))).alias("_kept"),
        )
        .withColumn("aged_offset", F.coalesce(F.col("_kept") - 1, F.col("last_offset")))
    )
    committed = F.when(F.col("epoch") == context.epoch, F.coalesce("committed", F.lit(-1))).otherwise(F.lit(-1))
    floors = (
        cursors.select("topic", F.col("group").alias("_group"), committed.cast("bigint").alias("_committed"))
        .groupBy("topic")
        .agg(F.min(F.struct("_committed", "_group")).alias("_lowest"))
        .select("topic", F.col("_lowest._committed").alias("group_floor"), F.col("_lowest._group").alias("_group"))
    )
    return (
        topics.join(floors, "topic", "left")
        .withColumn("released_offset", F.least("aged_offset", F.coalesce("group_floor", "aged_offset")))
        .withColumn("held_by", F.when(F.col("group_floor") < F.col("aged_offset"), F.col("_group")))
        .drop("_kept", "_group")
    )


def _days_of(rules: Mapping[str, Any]) -> Column:
    for topic, days in rules.items():
        if isinstance(days, bool) or not isinstance(days, int | float) or not days >= 0:
            raise SettingsError(f"retention_days.{topic}", f"must be a number of days, got {days!r}")
    common = rules.get("*")
    found = F.lit(None if common is None else float(common)).cast("double")
    for kind, days in REGISTRY_DAYS.items():
        found = F.when(F.col("type") == kind, F.lit(float(days))).otherwise(found)
    for topic, days in sorted(rules.items()):
        if topic != "*":
            found = F.when(F.col("topic") == topic, F.lit(float(days))).otherwise(found)
    return found


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    topics = released(tables["bronze.events"], tables["silver.group_cursors"], context)
    known = tables["silver.segments"].join(topics.drop("first_offset", "last_offset"), "topic", "left")
    is_read = F.col("group_floor").isNull() | (F.col("last_offset") <= F.col("group_floor"))
    is_released = F.coalesce(F.col("is_sealed") & (F.col("last_offset") <= F.col("released_offset")), F.lit(False))
    is_held = F.col("held_by").isNotNull()
    reason = (
        F.when(is_released, "read by all groups and past its time")
        .when(F.col("released_offset").isNull(), "not in the lake")
        .when(~F.col("is_sealed"), "it is being written")
        .when(~is_read & is_held, F.concat(F.lit("not read by "), F.col("held_by")))
        .otherwise(F.lit("still to be kept"))
    )
    return {
        COMPACTION: known.select(
            *("topic", "space_id", "segment", "first_offset", "last_offset", "size_bytes"),
            is_released.alias("is_released"),
            *("released_offset", "group_floor", "held_by"),
            reason.alias("reason"),
        )
    }


JOBS: Final = (
    Job(
        name="consolidation_retention",
        about="Lists the segments of the log that all groups have read and whose time has passed (C5).",
        reads=("bronze.events", "silver.group_cursors", "silver.segments"),
        writes=(OutputTable(COMPACTION, _SCHEMA, "A segment of the log, and whether it may go."),),
        build=_build,
    ),
)
