"""
L5, ``gold.learning_quality`` and ``gold.learning_clicks``: how good predictions and rankings were, by space and day.

Brier = mean (p - y)^2. ECE = sum over ten equal-width bins of share * |accuracy - confidence|. Both are given for what was
said and, where L4 has a calibration of the head, for what it would have said. Click rates count documents and lists.
Each space and day with outcomes is told as ``METACOG_REPORT``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, time
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidings.core.events import Event
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting, shaped

from .learning_columns import summary_event

__all__ = ["CLICKS", "JOBS", "QUALITY", "click_rates", "quality"]

BINS: Final = 10
METACOG_TOPIC: Final = "metacog"
_TOLD_MAX: Final = 1000
_DIGITS: Final = 9
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
    partitioned_by=("date",),
)


def quality(predictions: DataFrame, fits: DataFrame, *, bins: int = BINS) -> DataFrame:
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
            F.broadcast(calibrations),
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
    key = ("space_id", "date", "head")
    raw = _calibration_error(scored, "p", bins).withColumnRenamed("error", "ece")
    mended = _calibration_error(scored.where("p_calibrated is not null"), "p_calibrated", bins)
    return (
        scored.groupBy(*key)
        .agg(
            F.count("*").alias("rows"),
            F.sum("y").alias("positives"),
            F.avg((F.col("p") - F.col("y")) ** 2).alias("brier"),
            F.avg(F.abs(F.col("p") - F.col("y"))).alias("surprise"),
            F.avg((F.col("p_calibrated") - F.col("y")) ** 2).alias("brier_calibrated"),
        )
        .join(raw, list(key), "left")
        .join(mended.withColumnRenamed("error", "ece_calibrated"), list(key), "left")
    )


def _calibration_error(scored: DataFrame, p: str, bins: int) -> DataFrame:
    place = F.least(F.lit(bins - 1), F.floor(F.col(p) * bins).cast("int"))
    key = ("space_id", "date", "head")
    return (
        scored.groupBy(*key, place.alias("place"))
        .agg(F.count("*").alias("n"), F.abs(F.sum("y") - F.sum(p)).alias("off"))
        .groupBy(*key)
        .agg((F.sum("off") / F.sum("n")).alias("error"))
    )


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


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    found = quality(
        tables["gold.learning_predictions"], tables["gold.learning_fits"], bins=setting(context, "bins", BINS)
    )
    return {QUALITY.table: shaped(found, QUALITY)}


def _build_clicks(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {CLICKS.table: shaped(click_rates(tables["gold.learning_impressions"]), CLICKS)}


def _summarise(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    days = tables[QUALITY.table].where("head = '*'").orderBy(F.desc("date"), "space_id").limit(_TOLD_MAX)
    for row in days.collect():
        payload = {
            "date": row["date"].isoformat(),
            "rows": row["rows"],
            **{name: round(row[name], _DIGITS) for name in ("brier", "ece", "surprise")},
        }
        day = datetime.combine(row["date"], time(), UTC)
        yield summary_event(METACOG_TOPIC, "METACOG_REPORT", row["space_id"], day, payload)


JOBS: Final = (
    Job(
        name="learning_quality",
        about="L5: Brier score and calibration error by space and day.",
        reads=("gold.learning_predictions", "gold.learning_fits"),
        writes=(QUALITY,),
        build=_build,
        summarise=_summarise,
    ),
    Job(
        name="learning_clicks",
        about="L5: click rates by space and day.",
        reads=("gold.learning_impressions",),
        writes=(CLICKS,),
        build=_build_clicks,
        partitioning=Partitioning(lambda _: {"gold.learning_impressions": InputWindow("shown_at")}, length_s=86_400),
    ),
)
