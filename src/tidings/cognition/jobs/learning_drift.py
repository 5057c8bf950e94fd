"""
L6, ``gold.learning_drift``: whether today's features still look like last week's.

Each feature of each space is compared, day by day, with the days before it: the mean by its z-score, the distribution by the
population stability index over ten equal-width bins of the reference's range. What drifts is told as ``PATTERN_DETECTED``,
and L4 learns more slowly from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, time
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tidings.core.events import Event
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting, shaped

from .learning_columns import LEARNING_TOPIC, summary_event

__all__ = ["JOBS", "OUTPUT", "drift", "feature_values"]

REFERENCE_DAYS: Final = 7
BINS: Final = 10
PSI_TAU: Final = 0.25
Z_MAX: Final = 3.0
ROWS_MIN: Final = 20
SHARE_FLOOR: Final = 1e-4
_DAY_S: Final = 86_400
_ALERTS_MAX: Final = 1000
_KEY: Final = ("set_name", "space_id", "feature")
OUTPUT: Final = OutputTable(
    table="gold.learning_drift",
    schema=(
        "set_name string, space_id string, feature string, date date, rows bigint, mean double, deviation double,"
        " reference_rows bigint, reference_mean double, reference_deviation double, z double, psi double,"
        " is_drifted boolean"
    ),
    about="One feature of one space on one day, against the days before it (null: nothing to compare with).",
    partitioned_by=("date",),
)


def feature_values(actions: DataFrame, ranker: DataFrame, predictions: DataFrame) -> DataFrame:
    """Every value that features took: set_name, space_id, feature, date, value. The bias is always 1 and left out."""
    of_actions = actions.select(F.lit("actions").alias("set_name"), "space_id", "date", F.explode("features"))
    of_ranker = ranker.select(F.lit("ranker").alias("set_name"), "space_id", "date", F.explode("features"))
    of_heads = predictions.select(F.lit("predictions").alias("set_name"), "space_id", "date", F.explode("features"))
    said = predictions.select(
        F.lit("predictions").alias("set_name"),
        "space_id",
        "date",
        F.concat(F.lit("head:"), F.col("head")).alias("key"),
        F.col("p").alias("value"),
    )
    return (
        of_actions.unionByName(of_ranker)
        .unionByName(of_heads)
        .unionByName(said)
        .where("key <> 'bias' and value is not null")
        .withColumnRenamed("key", "feature")
    )


def drift(
    values: DataFrame,
    *,
    reference_days: int = REFERENCE_DAYS,
    bins: int = BINS,
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
    placed = values.withColumn("day", F.datediff("date", F.lit("1970-01-01").cast("date")))
    # Squares are summed around each feature's least value: around zero, a large mean would swallow a small spread.
    origin = F.min("value").over(Window.partitionBy(*_KEY))
    daily = (
        placed.withColumn("origin", origin)
        .withColumn("moved", F.col("value") - F.col("origin"))
        .groupBy(*_KEY, "date", "day", "origin")
        .agg(
            F.count("*").alias("rows"),
            F.sum("moved").alias("total"),
            F.sum(F.col("moved") * F.col("moved")).alias("squares"),
            F.min("value").alias("low"),
            F.max("value").alias("high"),
        )
    )
    before = Window.partitionBy(*_KEY).orderBy("day").rangeBetween(-reference_days, -1)
    daily = daily.withColumns(
        {
            "reference_rows": F.sum("rows").over(before),
            "reference_total": F.sum("total").over(before),
            "reference_squares": F.sum("squares").over(before),
            "reference_low": F.min("low").over(before),
            "reference_high": F.max("high").over(before),
        }
    )
    moments = daily.withColumns(
        {
            "mean": F.col("origin") + F.col("total") / F.col("rows"),
            "deviation": _deviation("rows", "total", "squares"),
            "reference_mean": F.col("origin") + F.col("reference_total") / F.col("reference_rows"),
            "reference_deviation": _deviation("reference_rows", "reference_total", "reference_squares"),
        }
    )
    z = F.when(
        F.col("reference_deviation") > 0,
        (F.col("mean") - F.col("reference_mean")) / (F.col("reference_deviation") / F.sqrt("rows")),
    )
    is_enough = (F.col("rows") >= rows_min) & (F.col("reference_rows") >= rows_min)
    is_off = F.coalesce(F.col("psi") > tau, F.lit(False)) | F.coalesce(F.abs("z") > z_max, F.lit(False))
    return (
        moments.withColumn("z", z)
        .join(_stability(placed, daily, reference_days, bins), [*_KEY, "day"], "left")
        .withColumn("is_drifted", F.coalesce(is_enough, F.lit(False)) & is_off)
    )


def _deviation(rows: str, total: str, squares: str) -> Column:
    mean = F.col(total) / F.col(rows)
    return F.sqrt(F.greatest(F.lit(0.0), F.col(squares) / F.col(rows) - mean * mean))


def _stability(values: DataFrame, daily: DataFrame, reference_days: int, bins: int) -> DataFrame:
    """The index of each day: a value counts for its own day, and as reference for those that follow."""
    of_day = daily.where("reference_rows is not null").select(
        *_KEY, "day", "reference_low", "reference_high", F.col("rows").alias("_rows"), "reference_rows"
    )
    width = F.col("reference_high") - F.col("reference_low")
    place = (
        F.when(
            width > 0,
            # Held within the bins before it becomes a whole number: far outside, that would overflow.
            F.floor(
                F.least(
                    F.lit(bins - 1.0),
                    F.greatest(F.lit(0.0), (F.col("value") - F.col("reference_low")) / width * bins),
                )
            ).cast("int"),
        )
        .when(F.col("value") < F.col("reference_low"), 0)
        .when(F.col("value") > F.col("reference_high"), bins - 1)
        .otherwise(bins // 2)
    )
    counted = (
        values.select(
            *_KEY,
            "value",
            F.col("day").alias("_own"),
            F.explode(F.sequence(F.col("day"), F.col("day") + reference_days)).alias("day"),
        )
        .join(of_day, [*_KEY, "day"])
        .groupBy(*_KEY, "day", "_rows", "reference_rows", place.alias("place"))
        .agg(F.count_if(F.col("_own") == F.col("day")).alias("a"), F.count_if(F.col("_own") < F.col("day")).alias("e"))
    )
    a = F.greatest(F.col("a") / F.col("_rows"), F.lit(SHARE_FLOOR))
    e = F.greatest(F.col("e") / F.col("reference_rows"), F.lit(SHARE_FLOOR))
    return counted.groupBy(*_KEY, "day").agg(F.sum((a - e) * F.log(a / e)).alias("psi"))


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    values = feature_values(
        tables["gold.learning_actions"], tables["gold.learning_ranker"], tables["gold.learning_predictions"]
    )
    found = drift(
        values,
        reference_days=setting(context, "reference_days", REFERENCE_DAYS),
        bins=setting(context, "bins", BINS),
        tau=setting(context, "psi_tau", PSI_TAU),
        z_max=setting(context, "z_max", Z_MAX),
        rows_min=setting(context, "rows_min", ROWS_MIN),
    )
    return {OUTPUT.table: shaped(found, OUTPUT)}


def _looks(context: JobContext) -> Mapping[str, InputWindow]:
    reference_s = _DAY_S * setting(context, "reference_days", REFERENCE_DAYS)
    times = {
        "gold.learning_actions": "decided_at",
        "gold.learning_ranker": "shown_at",
        "gold.learning_predictions": "predicted_at",
    }
    return {table: InputWindow(at, before_s=reference_s) for table, at in times.items()}


def _summarise(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    alerts = tables[OUTPUT.table].where("is_drifted").orderBy(F.desc("date"), *_KEY).limit(_ALERTS_MAX).collect()
    for row in alerts:
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


JOBS: Final = (
    Job(
        name="learning_drift",
        about="L6: z-scores and stability of features by day, with alerts.",
        reads=("gold.learning_actions", "gold.learning_ranker", "gold.learning_predictions"),
        writes=(OUTPUT,),
        build=_build,
        partitioning=Partitioning(_looks, length_s=_DAY_S),
        summarise=_summarise,
    ),
)
