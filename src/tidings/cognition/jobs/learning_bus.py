"""
L8, ``gold.bus_health``: each group's lag, retries, dead letters and kinds of failure in one row, told as ``LEARNING_TICK``.

The topics that the pipeline itself writes to are not told about: a tick about the tick before it would never end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tidings.core.events import Event
from tidings.pipeline.jobs.job import Job, JobContext, OutputTable, setting, shaped

from .learning_columns import LEARNING_TOPIC, summary_event, time_of

__all__ = ["JOBS", "OUTPUT", "bus_health"]

SPACE_ID: Final = "shared:system"
OWN_TOPICS: Final = (LEARNING_TOPIC, "metacog", "temporal", "consolidation")
_TOLD_MAX: Final = 500
_DIGITS: Final = 9
OUTPUT: Final = OutputTable(
    table="gold.bus_health",
    schema=(
        "topic string, group string, state string, handled bigint, lag bigint, waiting_s double, letters bigint,"
        " dead_letter_rate double, retries bigint, retry_rate double, categories map<string,bigint>, top_category string,"
        " poison_kinds bigint, is_poisoned boolean, cursor_at timestamp, last_failed_at timestamp"
    ),
    about="One group: how far behind it is, how often it fails, at what, and whether it meets poison.",
)


def bus_health(lag: DataFrame, retries: DataFrame, categories: DataFrame) -> DataFrame:
    """
    The health of every group that has a cursor or a dead letter.

    ``handled`` is how many events the group is done with, dead letters among them. Rates are per handled event; the retries
    counted are those of dead letters, as a retry that helped leaves no trace in the log.

    Args:
        lag: ``gold.group_lag``.
        retries: ``gold.retries``.
        categories: ``gold.dead_letter_categories``.
    """
    tried = retries.groupBy("topic", "group").agg(F.sum("letters").alias("letters"), F.sum("retries").alias("retries"))
    kinds = (
        categories.groupBy("topic", "group", "category")
        .agg(
            F.sum("letters").alias("of_category"),
            F.count_if("is_poison").alias("poison_kinds"),
            F.max("last_failed_at").alias("last_failed_at"),
        )
        .groupBy("topic", "group")
        .agg(
            F.map_from_entries(F.array_sort(F.collect_list(F.struct("category", "of_category")))).alias("categories"),
            F.min_by("category", F.struct(-F.col("of_category"), "category")).alias("top_category"),
            F.sum("poison_kinds").alias("poison_kinds"),
            F.max("last_failed_at").alias("last_failed_at"),
        )
    )
    nothing = F.lit(0).cast("bigint")
    return (
        lag.join(tried, ["topic", "group"], "full")
        .join(kinds, ["topic", "group"], "full")
        .withColumns(
            {
                "state": F.coalesce("state", F.lit("unknown")),
                "handled": F.coalesce(F.col("committed") + 1, nothing),
                "lag": F.coalesce("lag", nothing),
                "letters": F.coalesce("letters", nothing),
                "retries": F.coalesce("retries", nothing),
                "poison_kinds": F.coalesce("poison_kinds", nothing),
                "categories": F.coalesce("categories", F.create_map().cast("map<string,bigint>")),
            }
        )
        .withColumns(
            {
                "dead_letter_rate": F.try_divide("letters", "handled"),
                "retry_rate": F.try_divide("retries", "handled"),
                "is_poisoned": F.col("poison_kinds") > 0,
            }
        )
    )


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    found = bus_health(tables["gold.group_lag"], tables["gold.retries"], tables["gold.dead_letter_categories"])
    return {OUTPUT.table: shaped(found, OUTPUT)}


def _summarise(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    told = tables[OUTPUT.table].where(~F.col("topic").isin(*OWN_TOPICS))
    moved_us = F.greatest(F.unix_micros("cursor_at"), F.unix_micros("last_failed_at"))
    # Waiting times and rates grow by themselves while nothing happens; they stay out, and an idle bus makes no news.
    rows = told.withColumn("moved_us", moved_us).orderBy("topic", "group").limit(_TOLD_MAX).collect()
    moved = [row["moved_us"] for row in rows if row["moved_us"] is not None]
    if not moved:
        return
    groups: list[dict[str, Any]] = [
        {
            "topic": row["topic"],
            "group": row["group"],
            "lag": row["lag"],
            "dead_letters": row["letters"],
            "dead_letter_rate": None if row["dead_letter_rate"] is None else round(row["dead_letter_rate"], _DIGITS),
            "retries": row["retries"],
            "categories": dict(sorted(row["categories"].items())),
            "is_poisoned": row["is_poisoned"],
        }
        for row in rows
    ]
    at = time_of(max(moved))
    metrics = {
        "groups": groups,
        "lag": sum(each["lag"] for each in groups),
        "dead_letters": sum(each["dead_letters"] for each in groups),
        "poisoned_groups": [f"{each['topic']}/{each['group']}" for each in groups if each["is_poisoned"]],
    }
    space_id = setting(context, "space_id", SPACE_ID)
    payload = {
        "batch_id": "bus_health",
        "space_id": space_id,
        "count": len(groups),
        "started_at": at.isoformat(),
        "completed_at": at.isoformat(),
        "metrics": metrics,
    }
    yield summary_event(LEARNING_TOPIC, "LEARNING_TICK", space_id, at, payload)


JOBS: Final = (
    Job(
        name="learning_bus",
        about="L8: lag, retries, dead letters, kinds of failure and poison by group.",
        reads=("gold.group_lag", "gold.retries", "gold.dead_letter_categories"),
        writes=(OUTPUT,),
        build=_build,
        summarise=_summarise,
    ),
)
