"""
T4, what recurs: histograms of hours and weekdays of each space and each person in it, and what follows from them.

    circadian_score    = KL(hours || uniform) / ln 24: 0 when all hours are alike, 1 when there is only one
    weekly_periodicity = |autocorrelation at lag 7| of the counts by local day, over whole ISO weeks from the first
                         event's to the last one's, biased estimator; 0 for a series that never changes

A summary of each goes to topic ``temporal``, where recall and the prospective part read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tidings.core.events import Event
from tidings.pipeline.jobs.job import Job, JobContext, OutputTable, setting

from .columns import iso, summaries
from .temporal_features import FEATURES
from .temporal_index import TEMPORAL_TOPIC

__all__ = ["JOBS", "PATTERNS", "circadian_score", "patterns_of", "weekly_periodicity"]

PATTERNS: Final = "gold.temporal_patterns"
_WEEKLY_MIN: Final = 0.3
_WEEKDAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_A_MONDAY: Final = "1970-01-05"
_KEY: Final = ("space_id", "scope", "_person")

_SCHEMA: Final = (
    "space_id string, scope string, person_id string, total bigint, hour_hist array<bigint>, dow_hist array<bigint>, "
    "hour_peak int, dow_peak int, circadian_score double, weekly_periodicity double, has_weekly_cycle boolean, "
    "suggestions array<string>, first_ts timestamp, last_ts timestamp"
)


def circadian_score(hour_hist: Column) -> Column:
    """0 for hours all alike, 1 for a single one; 0 also for a histogram of nothing."""
    total = F.aggregate(hour_hist, F.lit(0).cast("bigint"), lambda sum_, each: sum_ + each)
    share = F.transform(hour_hist, lambda each: each / F.greatest(total, F.lit(1)))
    divergence = F.aggregate(
        share, F.lit(0.0), lambda sum_, p: sum_ + F.when(p > 0, p * F.log(p * 24)).otherwise(F.lit(0.0))
    )
    # Rounding may take a flat day a hair below 0.
    return F.least(F.greatest(divergence / math.log(24), F.lit(0.0)), F.lit(1.0))


def weekly_periodicity(features: DataFrame) -> DataFrame:
    """
    The score of each key, from rows with ``local_date``.

    Only days with events have rows, so sums over the days without are worked out instead of being filled in: a series
    from 1970 to today costs as much as its events. With n days of mean m, head and tail the sums of its first and last
    seven: cov = sum(x[t] x[t+7]) - m (2 sum(x) - head - tail) + (n - 7) m^2.
    """
    day = F.datediff("local_date", F.lit(_A_MONDAY).cast("date"))
    daily = features.groupBy(*_KEY, day.alias("day")).agg(F.count("*").alias("x"))
    of_key = Window.partitionBy(*_KEY)
    daily = (
        daily.withColumn("x_week_on", F.sum("x").over(of_key.orderBy("day").rangeBetween(7, 7)))
        .withColumn("first", F.floor(F.min("day").over(of_key) / 7) * 7)
        .withColumn("last", F.floor(F.max("day").over(of_key) / 7) * 7 + 6)
    )
    summed = daily.groupBy(*_KEY).agg(
        (F.max("last") - F.max("first") + 1).alias("n"),
        F.sum("x").alias("sum"),
        F.sum(F.col("x") * F.col("x")).alias("squares"),
        F.coalesce(F.sum(F.col("x") * F.col("x_week_on")), F.lit(0)).alias("products"),
        F.sum(F.when(F.col("day") < F.col("first") + 7, F.col("x")).otherwise(0)).alias("head"),
        F.sum(F.when(F.col("day") > F.col("last") - 7, F.col("x")).otherwise(0)).alias("tail"),
    )
    n, mean = F.col("n"), F.col("sum") / F.col("n")
    # In whole numbers, so that a constant series is exactly 0 and not a rounding error over another.
    spread = n * F.col("squares") - F.col("sum") * F.col("sum")
    covariance = F.col("products") - mean * (2 * F.col("sum") - F.col("head") - F.col("tail")) + (n - 7) * mean * mean
    score = F.when(spread > 0, F.abs(covariance / (spread / n))).otherwise(F.lit(0.0))
    return summed.select(*_KEY, score.alias("weekly_periodicity"))


def patterns_of(features: DataFrame, weekly_min: float = _WEEKLY_MIN) -> DataFrame:
    """
    The patterns of each space as a whole (``scope`` is ``space``) and of each person in it (``person``).

    Args:
        features: ``gold.temporal_features``.
        weekly_min: From this periodicity on there is a weekly cycle.
    """
    whole = features.withColumn("scope", F.lit("space")).withColumn("_person", F.lit(""))
    each = features.where(F.col("person_id").isNotNull()).withColumn("scope", F.lit("person"))
    keyed = whole.unionByName(each.withColumn("_person", F.col("person_id")))
    hour = F.floor("hod")
    counted = keyed.groupBy(*_KEY).agg(
        F.count("*").alias("total"),
        F.array(*[F.count_if(hour == at) for at in range(24)]).alias("hour_hist"),
        F.array(*[F.count_if(F.col("dow") == at) for at in range(7)]).alias("dow_hist"),
        F.min("ts").alias("first_ts"),
        F.max("ts").alias("last_ts"),
    )
    found = (
        counted.join(weekly_periodicity(keyed), list(_KEY))
        .withColumn("hour_peak", _peak("hour_hist"))
        .withColumn("dow_peak", _peak("dow_hist"))
        .withColumn("circadian_score", circadian_score(F.col("hour_hist")))
        .withColumn("has_weekly_cycle", F.col("weekly_periodicity") >= weekly_min)
    )
    names = F.array(*map(F.lit, _WEEKDAYS))
    suggestions = F.array_compact(
        F.array(
            F.format_string("peak_hour:%02d", "hour_peak"),
            F.concat(F.lit("peak_day:"), F.element_at(names, F.col("dow_peak") + 1)),
            F.when(F.col("has_weekly_cycle"), "weekly_cycle"),
        )
    )
    person_id = F.when(F.col("scope") == "person", F.col("_person"))
    return found.select(
        *("space_id", "scope", person_id.alias("person_id"), "total", "hour_hist", "dow_hist", "hour_peak", "dow_peak"),
        *("circadian_score", "weekly_periodicity", "has_weekly_cycle", suggestions.alias("suggestions")),
        *("first_ts", "last_ts"),
    )


def _peak(histogram: str) -> Column:
    """The place of the largest count, the lowest of several."""
    return (F.array_position(F.col(histogram), F.array_max(histogram)) - 1).cast("int")


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {PATTERNS: patterns_of(tables[FEATURES], setting(context, "weekly_min", _WEEKLY_MIN))}


def _tell(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    told = tables[PATTERNS].withColumns({"first_ts": iso(F.col("first_ts")), "last_ts": iso(F.col("last_ts"))})
    return summaries(TEMPORAL_TOPIC, "TEMPORAL_PATTERNS", told, context, keys=("space_id", "scope", "person_id"))


JOBS: Final = (
    Job(
        name="temporal_patterns",
        about="Finds what recurs by hour and weekday, and tells it on topic temporal (T4).",
        reads=(FEATURES,),
        writes=(OutputTable(PATTERNS, _SCHEMA, "What recurs in a space, or with one person in it."),),
        build=_build,
        summarise=_tell,
    ),
)
