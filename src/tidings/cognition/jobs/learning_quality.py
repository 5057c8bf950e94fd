"""
How good predictions are (L5), whether features drift (L6), and how the bus is (L8).

``gold.learning_quality`` and ``gold.learning_clicks``: Brier score, calibration error and surprise by head and day; click
rates by day. ``gold.learning_drift``: each feature and day against the days before it, by z-score and population stability
index. ``gold.bus_health``: lag, retries and dead letters of each group in one row, summed up in one tick.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, time
from functools import reduce
from typing import Any, Final

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from tidings.core.events import Event
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting, shaped
from tidings.pipeline.schemas import arrow_schema

from .learning_columns import LEARNING_TOPIC, summary_event, time_of

QUALITY_BINS: Final = 10
METACOG_TOPIC: Final = "metacog"
_QUALITY_DIGITS: Final = 9
QUALITY: Final = OutputTable(
    table="gold.learning_quality",
    schema=(
        "space_id string, date date, head string, rows bigint, positives double, brier double, ece double,"
        " surprise double, brier_calibrated double, ece_calibrated double"
    ),
    about="One head (or all of a space: head is *) on one day: how far its predictions were from what came of them.",
)
CLICKS: Final = OutputTable(
    table="gold.learning_clicks",
    schema=(
        "space_id string, date date, lists bigint, shown bigint, clicked bigint, ctr double, list_ctr double,"
        " reciprocal_rank double"
    ),
    about="One space on one day: how many of the documents shown, and of the lists, were clicked, and how high up.",
)


def quality(predictions: DataFrame, fits: DataFrame, *, bins: int = QUALITY_BINS) -> DataFrame:
    """
    Brier score and calibration error by space, day and head; ``*`` stands for all heads of the space.

    ``surprise`` is the mean distance between what was said and what came.

    Args:
        predictions: ``gold.learning_predictions``.
        fits: ``gold.learning_fits``, for the calibrations.
        bins: Equal-width bins of the calibration error.
    """
    calibrations = fits.where("model = 'calibration'").select(
        F.col("space_id").alias("_space"), F.col("set_name").alias("_set"), "platt_a", "platt_b"
    )
    scored = (
        predictions.where("y is not null")
        .join(
            calibrations,
            (F.col("space_id") == F.col("_space")) & (F.concat(F.lit("head:"), F.col("head")) == F.col("_set")),
            "left",
        )
        .select(
            "space_id",
            "date",
            F.explode(F.array(F.col("head"), F.lit("*"))).alias("head"),
            "p",
            "y",
            (1 / (1 + F.exp(-(F.col("platt_a") * F.col("z") + F.col("platt_b"))))).alias("p_calibrated"),
        )
    )
    return scored.groupBy("space_id", "date", "head").agg(
        F.count("*").alias("rows"),
        F.sum("y").alias("positives"),
        F.avg((F.col("p") - F.col("y")) ** 2).alias("brier"),
        F.avg(F.abs(F.col("p") - F.col("y"))).alias("surprise"),
        F.avg((F.col("p_calibrated") - F.col("y")) ** 2).alias("brier_calibrated"),
        _calibration_error("p", bins).alias("ece"),
        _calibration_error("p_calibrated", bins).alias("ece_calibrated"),
    )


def _calibration_error(p: str, bins: int) -> Column:
    # As text: so many parts are made faster than one by one.
    place = f"least({bins - 1}, floor({p} * {bins}))"
    off = (f"coalesce(abs(sum(if({place} = {at}, y - {p}, null))), 0D)" for at in range(bins))
    return F.expr(f"try_divide({' + '.join(off)}, count({p}))")


def click_rates(impressions: DataFrame) -> DataFrame:
    """Click rates by space and day. A list's reciprocal rank is 1 over the place of its first click, 0 without one."""
    rank: Column = F.coalesce(1 / (F.col("first_click_position") + 1.0), F.lit(0.0))
    return (
        impressions.groupBy("space_id", "date")
        .agg(
            F.count("*").alias("lists"),
            F.sum("shown").alias("shown"),
            F.sum("clicked").alias("clicked"),
            (F.count_if(F.col("clicked") > 0) / F.count("*")).alias("list_ctr"),
            F.avg(rank).alias("reciprocal_rank"),
        )
        .withColumn("ctr", F.try_divide("clicked", "shown"))
    )


def _build_quality(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    found = quality(
        tables["gold.learning_predictions"], tables["gold.learning_fits"], bins=setting(context, "bins", QUALITY_BINS)
    )
    return {QUALITY.table: shaped(found, QUALITY)}


def _build_clicks(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {CLICKS.table: shaped(click_rates(tables["gold.learning_impressions"]), CLICKS)}


def _summarise_quality(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    # The newest day first, here and of alerts: what is published late is better old.
    for row in tables[QUALITY.table].where("head = '*'").orderBy(F.desc("date"), "space_id").toLocalIterator():
        payload = {
            "date": row["date"].isoformat(),
            "rows": row["rows"],
            **{name: round(row[name], _QUALITY_DIGITS) for name in ("brier", "ece", "surprise")},
        }
        day = datetime.combine(row["date"], time(), UTC)
        yield summary_event(METACOG_TOPIC, "METACOG_REPORT", row["space_id"], day, payload)


LEARNING_QUALITY_JOBS: Final = (
    Job(
        name="learning_quality",
        about="L5: Brier score and calibration error by space and day.",
        reads=("gold.learning_predictions", "gold.learning_fits"),
        writes=(QUALITY,),
        build=_build_quality,
        summarise=_summarise_quality,
    ),
    Job(
        name="learning_clicks",
        about="L5: click rates by space and day.",
        reads=("gold.learning_impressions",),
        writes=(CLICKS,),
        build=_build_clicks,
        partitioning=Partitioning(lambda _: {"gold.learning_impressions": InputWindow("date")}),
    ),
)


REFERENCE_DAYS: Final = 7
DRIFT_BINS: Final = 10
PSI_TAU: Final = 0.25
Z_MAX: Final = 3.0
ROWS_MIN: Final = 20
SHARE_FLOOR: Final = 1e-4
_FEATURE_TABLES: Final = ("gold.learning_actions", "gold.learning_ranker", "gold.learning_predictions")
_KEY: Final = ("set_name", "space_id", "feature")
DRIFT_OUTPUT: Final = OutputTable(
    table="gold.learning_drift",
    schema=(
        "set_name string, space_id string, feature string, date date, rows bigint, mean double, deviation double,"
        " reference_rows bigint, reference_mean double, reference_deviation double, z double, psi double,"
        " is_drifted boolean"
    ),
    about="One feature of one space on one day, against the days before it (null: nothing to compare with).",
)


def feature_values(actions: DataFrame, ranker: DataFrame, predictions: DataFrame) -> DataFrame:
    """Every value that features took: set_name, space_id, feature, date, value. The bias is always 1 and left out."""
    given = F.map_entries("features")
    said = F.array(F.struct(F.concat(F.lit("head:"), F.col("head")).alias("key"), F.col("p").alias("value")))
    parts = [
        rows.select(F.lit(name).alias("set_name"), "space_id", "date", F.inline(found))
        for name, rows, found in (
            ("actions", actions, given),
            ("ranker", ranker, given),
            ("predictions", predictions, F.concat(given, said)),
        )
    ]
    values = reduce(DataFrame.unionByName, parts).withColumnRenamed("key", "feature")
    return values.where("feature <> 'bias' and value is not null")


def drift(
    values: DataFrame,
    *,
    reference_days: int = REFERENCE_DAYS,
    bins: int = DRIFT_BINS,
    tau: float = PSI_TAU,
    z_max: float = Z_MAX,
    rows_min: int = ROWS_MIN,
) -> DataFrame:
    """
    z-score and stability index of each feature and day.

    z = (mean - reference mean) / (reference deviation / sqrt(rows)), with the population's deviation; null where the reference
    has no width. A day drifts if its index is above ``tau`` or its z-score beyond ``z_max``, and both it and its reference have
    at least ``rows_min`` rows: with fewer, chance alone would raise the alarm.
    """
    # Each feature's days are compared in one place: so the values are moved once.
    compare = _day_by_day(reference_days, bins, tau, z_max, rows_min)
    return values.select(*_KEY, "date", "value").groupBy("space_id").applyInArrow(compare, DRIFT_OUTPUT.schema)


def _day_by_day(reference_days: int, bins: int, tau: float, z_max: float, rows_min: int) -> Callable[[Any], Any]:
    """Of the values of one space: each feature and day against the days before it."""

    def compare(table: Any) -> Any:
        rows: list[dict[str, Any]] = []
        if table.num_rows:
            table = table.sort_by([(name, "ascending") for name in ("set_name", "feature", "date")])
            values = table["value"].to_numpy()
            days = table["date"].cast(pa.int32()).to_numpy()
            keys = [table[name].combine_chunks().dictionary_encode() for name in ("set_name", "feature")]
            codes = [each.indices.to_numpy() for each in keys]
            begins = _changes(*codes)
            for first, last in zip(begins, [*begins[1:], len(values)], strict=True):
                names = dict(zip(("set_name", "feature"), (each[int(first)].as_py() for each in keys), strict=True))
                compared = _feature_days(
                    values[first:last], days[first:last], reference_days, bins, tau, z_max, rows_min
                )
                rows += [{"space_id": table["space_id"][0].as_py(), **names, **each} for each in compared]
        return pa.Table.from_pylist(rows, schema=arrow_schema(DRIFT_OUTPUT.schema))

    return compare


def _changes(*columns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The places at which sorted columns begin to have other values."""
    is_other = np.zeros(len(columns[0]), dtype=bool)
    is_other[0] = True
    for column in columns:
        is_other[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(is_other)


def _feature_days(
    values: np.ndarray[Any, Any],
    days: np.ndarray[Any, Any],
    reference_days: int,
    bins: int,
    tau: float,
    z_max: float,
    rows_min: int,
) -> Iterator[dict[str, Any]]:
    """The days of one feature, whose values come in the order of days."""
    begins = _changes(days)
    ends = np.append(begins[1:], len(values))
    of_day = days[begins]
    counts = ends - begins
    lows, highs = np.minimum.reduceat(values, begins), np.maximum.reduceat(values, begins)
    # Rounding may take the mean of equal values a hair off them, which would look like a spread.
    means = np.clip(np.add.reduceat(values, begins) / counts, lows, highs)
    variances = np.add.reduceat((values - np.repeat(means, counts)) ** 2, begins) / counts
    befores = np.searchsorted(of_day, of_day - reference_days)
    for at, before in enumerate(befores):
        row: dict[str, Any] = dict.fromkeys(("reference_rows", "reference_mean", "reference_deviation", "z", "psi"))
        if before < at:
            known = slice(before, at)
            total = int(counts[known].sum())
            low, high = lows[known].min(), highs[known].max()
            # Days are put together around their own least value: around zero, or around that of days that are not
            # compared, a large mean would swallow a small spread.
            moved = means[known] - low
            mean = (counts[known] * moved).sum() / total
            squares = (counts[known] * (variances[known] + moved**2)).sum() / total
            deviation = math.sqrt(max(0.0, squares - mean**2))
            row |= {
                "reference_rows": total,
                "reference_mean": low + mean,
                "reference_deviation": deviation,
                "psi": _stability(
                    _places(values[begins[at] : ends[at]], low, high, bins) / counts[at],
                    _places(values[begins[before] : begins[at]], low, high, bins) / total,
                ),
            }
            if deviation > 0:
                row["z"] = (means[at] - row["reference_mean"]) / (deviation / math.sqrt(counts[at]))
        is_enough = min(int(counts[at]), row["reference_rows"] or 0) >= rows_min and row["psi"] is not None
        is_off = is_enough and (row["psi"] > tau or (row["z"] is not None and abs(row["z"]) > z_max))
        yield {
            "date": int(of_day[at]),
            "rows": int(counts[at]),
            "mean": means[at],
            "deviation": math.sqrt(variances[at]),
            **row,
            "is_drifted": bool(is_off),
        }


def _places(values: np.ndarray[Any, Any], low: float, high: float, bins: int) -> np.ndarray[Any, Any]:
    """How many values are in each part of low..high: ``learning_math.bin_of``, of all of them at once."""
    if high > low:
        # Held within the bins before it becomes a whole number: far outside, that would overflow.
        place = np.floor(np.clip((values - low) / (high - low) * bins, 0, bins - 1)).astype(np.int64)
    else:
        place = np.where(values < low, 0, np.where(values > high, bins - 1, bins // 2))
    return np.bincount(place, minlength=bins)


def _stability(a: np.ndarray[Any, Any], e: np.ndarray[Any, Any]) -> float:
    """The population stability index of shares against those of the reference."""
    a, e = np.maximum(a, SHARE_FLOOR), np.maximum(e, SHARE_FLOOR)
    return float(((a - e) * np.log(a / e)).sum())


def _build_drift(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    values = feature_values(
        tables["gold.learning_actions"], tables["gold.learning_ranker"], tables["gold.learning_predictions"]
    )
    found = drift(
        values,
        reference_days=setting(context, "reference_days", REFERENCE_DAYS),
        bins=setting(context, "bins", DRIFT_BINS),
        tau=setting(context, "psi_tau", PSI_TAU),
        z_max=setting(context, "z_max", Z_MAX),
        rows_min=setting(context, "rows_min", ROWS_MIN),
    )
    return {DRIFT_OUTPUT.table: shaped(found, DRIFT_OUTPUT)}


def _windows(context: JobContext) -> Mapping[str, InputWindow]:
    days = setting(context, "reference_days", REFERENCE_DAYS)
    return {table: InputWindow("date", days_before=days) for table in _FEATURE_TABLES}


def _summarise_drift(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    for row in tables[DRIFT_OUTPUT.table].where("is_drifted").orderBy(F.desc("date"), *_KEY).toLocalIterator():
        payload: dict[str, Any] = {
            "pattern": "feature_drift",
            "set": row["set_name"],
            "feature": row["feature"],
            "date": row["date"].isoformat(),
            "rows": row["rows"],
            "z": None if row["z"] is None else round(row["z"], 6),
            "psi": None if row["psi"] is None else round(row["psi"], 6),
        }
        day = datetime.combine(row["date"], time(), UTC)
        yield summary_event(LEARNING_TOPIC, "PATTERN_DETECTED", row["space_id"], day, payload)


LEARNING_DRIFT_JOBS: Final = (
    Job(
        name="learning_drift",
        about="L6: z-scores and stability of features by day, with alerts.",
        reads=_FEATURE_TABLES,
        writes=(DRIFT_OUTPUT,),
        build=_build_drift,
        partitioning=Partitioning(_windows),
        summarise=_summarise_drift,
    ),
)


SPACE_ID: Final = "shared:system"
OWN_TOPICS: Final = (LEARNING_TOPIC, "metacog", "temporal", "consolidation")
_GROUPS_MAX: Final = 500
"""So many groups one event names; of more there are several."""
_BUS_DIGITS: Final = 9
BUS_OUTPUT: Final = OutputTable(
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


def _build_bus(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    found = bus_health(tables["gold.group_lag"], tables["gold.retries"], tables["gold.dead_letter_categories"])
    return {BUS_OUTPUT.table: shaped(found, BUS_OUTPUT)}


def _summarise_bus(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    known = tables[BUS_OUTPUT.table].where(~F.col("topic").isin(*OWN_TOPICS))
    moved_us = F.greatest(F.unix_micros("cursor_at"), F.unix_micros("last_failed_at"))
    # Waiting times and rates grow by themselves while nothing happens; they stay out, and an idle bus makes no news.
    rows = known.withColumn("moved_us", moved_us).orderBy("topic", "group").toLocalIterator()
    for number in itertools.count(1):
        part = list(itertools.islice(rows, _GROUPS_MAX))
        if not part:
            return
        yield from _tick(part, number, context)


def _tick(rows: Sequence[Row], number: int, context: JobContext) -> Iterable[Event]:
    """The event of some groups, if any of them ever moved."""
    moved = [row["moved_us"] for row in rows if row["moved_us"] is not None]
    if not moved:
        return
    groups: list[dict[str, Any]] = [
        {
            "topic": row["topic"],
            "group": row["group"],
            "lag": row["lag"],
            "dead_letters": row["letters"],
            "dead_letter_rate": None
            if row["dead_letter_rate"] is None
            else round(row["dead_letter_rate"], _BUS_DIGITS),
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
        "batch_id": "bus_health" if number == 1 else f"bus_health-{number}",
        "space_id": space_id,
        "count": len(groups),
        "started_at": at.isoformat(),
        "completed_at": at.isoformat(),
        "metrics": metrics,
    }
    yield summary_event(LEARNING_TOPIC, "LEARNING_TICK", space_id, at, payload)


LEARNING_BUS_JOBS: Final = (
    Job(
        name="learning_bus",
        about="L8: lag, retries, dead letters, kinds of failure and poison by group.",
        reads=("gold.group_lag", "gold.retries", "gold.dead_letter_categories"),
        writes=(BUS_OUTPUT,),
        build=_build_bus,
        summarise=_summarise_bus,
    ),
)


JOBS: Final = (*LEARNING_QUALITY_JOBS, *LEARNING_DRIFT_JOBS, *LEARNING_BUS_JOBS)
