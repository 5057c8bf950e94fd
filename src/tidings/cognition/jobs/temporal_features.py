"""
T2, a moment's features, and T3, its recency.

Hour and weekday are those of a clock on the wall in the event's own zone, put on circles so that 23:59 is near 00:00 and
Sunday near Monday. A zone that nobody knows counts as UTC, and the row says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidings.core.errors import SettingsError
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting

from .columns import as_of, hours_between, recency, wall_clock
from .temporal_index import INDEX

__all__ = ["FEATURES", "JOBS", "RECENCY", "daypart", "features_of", "recency_of"]

FEATURES: Final = "gold.temporal_features"
RECENCY: Final = "gold.recency"
HALF_LIFE_H: Final = 72.0
_PERIODS_H: Final = (24, 12, 8)

_FEATURES_SCHEMA: Final = (
    "space_id string, event_id string, ts timestamp, person_id string, tags array<string>, tz string, "
    "is_zone_known boolean, local_date date, hod double, dow int, sin_tod double, cos_tod double, sin_dow double, "
    "cos_dow double, is_weekend int, daypart string, cells array<double>"
)
_RECENCY_SCHEMA: Final = (
    "space_id string, event_id string, ts timestamp, as_of timestamp, age_h double, half_life_h double, "
    "recency double, is_ahead boolean"
)


def daypart(hod: Column) -> Column:
    """Morning from 5, afternoon from 12, evening from 17, night from 22 over midnight."""
    return (
        F.when((hod >= 5) & (hod < 12), "morning")
        .when((hod >= 12) & (hod < 17), "afternoon")
        .when((hod >= 17) & (hod < 22), "evening")
        .otherwise("night")
    )


def features_of(index: DataFrame, periods_h: tuple[float, ...] = _PERIODS_H) -> DataFrame:
    """
    The features of every moment in the index.

    Args:
        index: ``gold.temporal_index``; its rows of one granularity stand for the moments.
        periods_h: The periods of the time cells: a sine and a cosine for each, in this order.
    """
    local = F.coalesce(F.col("shown"), F.col("ts").cast("timestamp_ntz"))
    hod = F.hour(local) + F.minute(local) / 60.0 + F.date_format(local, "s.SSSSSS").cast("double") / 3600.0
    cells: list[Column] = []
    for period_h in periods_h:
        cells += _circle(F.col("hod"), float(period_h))
    sin_tod, cos_tod = _circle(F.col("hod"), 24.0)
    sin_dow, cos_dow = _circle(F.col("dow"), 7.0)
    return (
        index.where(F.col("g") == "hour")
        .select("space_id", F.col("doc_id").alias("event_id"), "ts", "attributes.*")
        .withColumn("shown", wall_clock("ts", "tz"))
        .withColumn("is_zone_known", F.col("shown").isNotNull())
        .withColumn("local_date", F.to_date(local))
        .withColumn("hod", hod)
        .withColumn("dow", F.weekday(local))
        .select(
            *("space_id", "event_id", "ts", "person_id", "tags", "tz", "is_zone_known", "local_date", "hod", "dow"),
            *(sin_tod.alias("sin_tod"), cos_tod.alias("cos_tod"), sin_dow.alias("sin_dow"), cos_dow.alias("cos_dow")),
            (F.col("dow") >= 5).cast("int").alias("is_weekend"),
            daypart(F.col("hod")).alias("daypart"),
            F.array(*cells).cast("array<double>").alias("cells"),
        )
    )


def _circle(place: Column, period: float) -> tuple[Column, Column]:
    angle = place * F.lit(2 * math.pi / period)
    return F.sin(angle), F.cos(angle)


def recency_of(index: DataFrame, now: Column, half_life_h: Column) -> DataFrame:
    """How recent every moment in the index is at ``now``."""
    return (
        index.where(F.col("g") == "hour")
        .select("space_id", F.col("doc_id").alias("event_id"), "ts", now.alias("as_of"))
        .withColumn("age_h", hours_between(F.col("ts"), F.col("as_of")))
        .withColumn("half_life_h", half_life_h)
        .withColumn("recency", recency(F.col("ts"), F.col("as_of"), F.col("half_life_h")))
        .withColumn("is_ahead", F.col("age_h") < 0)
    )


def half_life_of(context: JobContext) -> Column:
    """Each space's half-life: the one learned for it, or the common one."""
    common = setting(context, "half_life_h", HALF_LIFE_H, above=0)
    learned: dict[str, Any] = setting(context, "half_life_h_by_space", {})
    found = F.lit(common)
    for space_id, hours in sorted(learned.items()):
        if not isinstance(hours, int | float) or not hours > 0:
            raise SettingsError(f"half_life_h_by_space.{space_id}", f"must be a number above 0, got {hours!r}")
        found = F.when(F.col("space_id") == space_id, F.lit(float(hours))).otherwise(found)
    return found


def _build_features(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    periods_h: tuple[float, ...] = setting(context, "cell_periods_h", _PERIODS_H)
    if not all(isinstance(each, int | float) and each > 0 for each in periods_h):
        raise SettingsError("cell_periods_h", f"must be numbers above 0, got {periods_h!r}")
    return {FEATURES: features_of(tables[INDEX], periods_h)}


def _build_recency(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {RECENCY: recency_of(tables[INDEX], as_of(context), half_life_of(context))}


JOBS: Final = (
    Job(
        name="temporal_features",
        about="Puts every moment's hour and weekday, in its own zone, on circles (T2).",
        reads=(INDEX,),
        writes=(OutputTable(FEATURES, _FEATURES_SCHEMA, "The time features of one moment of one event.", ("ts",)),),
        build=_build_features,
        partitioning=Partitioning(lambda _: {INDEX: InputWindow("ts")}),
    ),
    Job(
        name="temporal_recency",
        about="Scores every moment by how long ago it was (T3).",
        reads=(INDEX,),
        writes=(OutputTable(RECENCY, _RECENCY_SCHEMA, "How recent one moment is at the time of the run."),),
        build=_build_recency,
    ),
)
