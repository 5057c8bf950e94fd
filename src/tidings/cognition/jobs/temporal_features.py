"""
What moments look like on a clock and a calendar: features (T2), recency (T3) and patterns (T4).

Hours and weekdays are points on circles, so that 23:00 and 01:00 are near. The clock is the one on the wall: a zone that
nobody knows counts as UTC, and the row says so.

``gold.temporal_days`` counts moments by person, day and hour, so that what recurs is found without going through all of them.
``gold.temporal_patterns`` says for each space and each person at which hours and on which weekdays things happen, how
strongly hours recur (``circadian_score``, 1 minus the entropy of the hours) and whether weeks do (``weekly_periodicity``, the
autocorrelation of daily counts at seven days).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tidings.core.errors import SettingsError
from tidings.core.events import Event
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting, whole_days
from tidings.pipeline.schemas import columns_of

from .columns import as_of, hours_between, iso, recency, summaries, wall_clock
from .temporal_index import INDEX, TEMPORAL_TOPIC

FEATURES: Final = "gold.temporal_features"
RECENCY: Final = "gold.recency"
HALF_LIFE_H: Final = 72.0
HALF_LIVES: Final = 10
"""After so many a moment's score is below a thousandth, and the moment is recent no more."""
_DAYS_MAX: Final = 36_500
_PERIODS_H: Final = (24, 12, 8)

_FEATURES_SCHEMA: Final = (
    "space_id string, event_id string, ts timestamp, date date, person_id string, tags array<string>, tz string, "
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
        .select("space_id", F.col("doc_id").alias("event_id"), "ts", "date", "attributes.*")
        .withColumn("shown", wall_clock(F.col("ts"), F.col("tz")))
        .withColumn("is_zone_known", F.col("shown").isNotNull())
        .withColumn("local_date", F.to_date(local))
        .withColumn("hod", hod)
        .withColumn("dow", F.weekday(local))
        .select(
            *(
                "space_id",
                "event_id",
                "ts",
                "date",
                "person_id",
                "tags",
                "tz",
                "is_zone_known",
                "local_date",
                "hod",
                "dow",
            ),
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
    """How recent every moment in the index is at ``now``, of those that are not ``HALF_LIVES`` ago."""
    return (
        index.where(F.col("g") == "hour")
        .select("space_id", F.col("doc_id").alias("event_id"), "ts", now.alias("as_of"))
        .withColumn("age_h", hours_between(F.col("ts"), F.col("as_of")))
        .withColumn("half_life_h", half_life_h)
        .where(F.col("age_h") < HALF_LIVES * F.col("half_life_h"))
        .withColumn("recency", recency(F.col("ts"), F.col("as_of"), F.col("half_life_h")))
        .withColumn("is_ahead", F.col("age_h") < 0)
    )


def _recent_days(context: JobContext) -> int:
    """How many days back a moment of any space may be recent."""
    given = [
        setting(context, "half_life_h", HALF_LIFE_H, above=0),
        *setting(context, "half_life_h_by_space", {}).values(),
    ]
    longest_h = max(each for each in given if isinstance(each, int | float))
    return min(_DAYS_MAX, whole_days(HALF_LIVES * longest_h * 3600))


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


TEMPORAL_FEATURES_JOBS: Final = (
    Job(
        name="temporal_features",
        about="Puts every moment's hour and weekday, in its own zone, on circles (T2).",
        reads=(INDEX,),
        writes=(OutputTable(FEATURES, _FEATURES_SCHEMA, "The time features of one moment of one event."),),
        build=_build_features,
        partitioning=Partitioning(lambda _: {INDEX: InputWindow("ts")}),
    ),
    Job(
        name="temporal_recency",
        about="Scores every moment of the last ten half-lives by how long ago it was (T3).",
        reads=(INDEX,),
        writes=(OutputTable(RECENCY, _RECENCY_SCHEMA, "How recent one moment is at the time of the run."),),
        build=_build_recency,
        recent=lambda context: {INDEX: InputWindow("ts", days_before=_recent_days(context))},
    ),
)


DAYS: Final = "gold.temporal_days"
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
_DAYS_SCHEMA: Final = (
    "date date, space_id string, person_id string, local_date date, moments bigint, hours array<bigint>, "
    "first_ts timestamp, last_ts timestamp"
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


def weekly_periodicity() -> Column:
    """
    The score of a series of days, as an aggregate of ``day``, counted from a Monday, and ``x``, how many events it had; with the
    Monday of the ``first`` week, the Sunday of the ``last``, and ``x_week_on``.

    Only days with events have rows, so sums over the days without are worked out instead of being filled in: a series
    from 1970 to today costs as much as its events. With n days of mean m, head and tail the sums of its first and last
    seven: cov = sum(x[t] x[t+7]) - m (2 sum(x) - head - tail) + (n - 7) m^2.
    """
    x, day = F.col("x"), F.col("day")
    n, total = F.max("last") - F.max("first") + 1, F.sum("x")
    mean = total / n
    head = F.sum(F.when(day < F.col("first") + 7, x).otherwise(0))
    tail = F.sum(F.when(day > F.col("last") - 7, x).otherwise(0))
    products = F.coalesce(F.sum(x * F.col("x_week_on")), F.lit(0))
    # In whole numbers, so that a constant series is exactly 0 and not a rounding error over another.
    spread = n * F.sum(x * x) - total * total
    covariance = products - mean * (2 * total - head - tail) + (n - 7) * mean * mean
    return F.when(spread > 0, F.abs(covariance / (spread / n))).otherwise(F.lit(0.0))


def days_of(features: DataFrame) -> DataFrame:
    """How many moments each person had on each day of their own, in all and by hour, in the shape of ``gold.temporal_days``."""
    hours = ", ".join(f"count_if(floor(hod) = {at})" for at in range(24))
    return features.groupBy("date", "space_id", "person_id", "local_date").agg(
        F.count("*").alias("moments"),
        F.expr(f"array({hours})").alias("hours"),
        F.min("ts").alias("first_ts"),
        F.max("ts").alias("last_ts"),
    )


def patterns_of(days: DataFrame, weekly_min: float = _WEEKLY_MIN) -> DataFrame:
    """
    The patterns of each space as a whole (``scope`` is ``space``) and of each person in it (``person``).

    Args:
        days: ``gold.temporal_days``.
        weekly_min: From this periodicity on there is a weekly cycle.
    """
    scopes = (("space", F.lit("")), ("person", F.col("person_id")))
    named = (F.struct(F.lit(scope).alias("scope"), person.alias("_person")) for scope, person in scopes)
    hours = [f"_hour{at}" for at in range(24)]
    of_key = Window.partitionBy(*_KEY).orderBy("day")
    all_days = of_key.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    daily = (
        days.select(
            "*",
            F.datediff("local_date", F.lit(_A_MONDAY).cast("date")).alias("day"),
            F.inline(F.array(*named)),
        )
        .where("_person is not null")
        # All that follows goes by space and person: so the rows are moved once.
        .repartition(*_KEY)
        .groupBy(*_KEY, "day")
        .agg(
            F.sum("moments").alias("x"),
            *(F.expr(f"sum(hours[{at}])").alias(name) for at, name in enumerate(hours)),
            F.min("first_ts").alias("first_ts"),
            F.max("last_ts").alias("last_ts"),
        )
        .withColumns(
            {
                "x_week_on": F.sum("x").over(of_key.rangeBetween(7, 7)),
                "first": F.floor(F.min("day").over(all_days) / 7) * 7,
                "last": F.floor(F.max("day").over(all_days) / 7) * 7 + 6,
            }
        )
    )
    weekdays = [f"sum(if(pmod(day, 7) = {at}, x, 0))" for at in range(7)]
    found = (
        daily.groupBy(*_KEY)
        .agg(
            F.sum("x").alias("total"),
            F.expr(f"array({', '.join(f'sum({name})' for name in hours)})").alias("hour_hist"),
            F.expr(f"array({', '.join(weekdays)})").alias("dow_hist"),
            F.min("first_ts").alias("first_ts"),
            F.max("last_ts").alias("last_ts"),
            weekly_periodicity().alias("weekly_periodicity"),
        )
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


def _build_days(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {DAYS: days_of(tables[FEATURES]).select(*(name for name, _ in columns_of(_DAYS_SCHEMA)))}


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {PATTERNS: patterns_of(tables[DAYS], setting(context, "weekly_min", _WEEKLY_MIN))}


def _summarise(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    rows = tables[PATTERNS].withColumns({"first_ts": iso(F.col("first_ts")), "last_ts": iso(F.col("last_ts"))})
    return summaries(
        TEMPORAL_TOPIC, "TEMPORAL_PATTERNS", rows, context, order=("last_ts", "space_id", "scope", "person_id")
    )


TEMPORAL_PATTERNS_JOBS: Final = (
    Job(
        name="temporal_days",
        about="Counts the moments of each person by day and hour (for T4).",
        reads=(FEATURES,),
        writes=(
            OutputTable(
                DAYS, _DAYS_SCHEMA, "One person on one day of their own: how many moments, and in which hours."
            ),
        ),
        build=_build_days,
        partitioning=Partitioning(lambda _: {FEATURES: InputWindow("date")}),
    ),
    Job(
        name="temporal_patterns",
        about="Finds what recurs by hour and weekday, and publishes it on topic temporal (T4).",
        reads=(DAYS,),
        writes=(OutputTable(PATTERNS, _SCHEMA, "What recurs in a space, or with one person in it."),),
        build=_build,
        summarise=_summarise,
    ),
)


JOBS: Final = (*TEMPORAL_FEATURES_JOBS, *TEMPORAL_PATTERNS_JOBS)
