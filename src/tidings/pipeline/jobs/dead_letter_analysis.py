"""
``gold.dead_letter_categories``: what goes wrong, by kind, and which kinds are poison.

Errors are compared by their shape: numbers, quoted text and long hexadecimal ids are taken out, so that a thousand failures
of one kind are one row. A kind is poison when one group met it five times within a day, as a retry will not help it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from .columns import setting, shaped
from .job import Job, JobContext, Output

__all__ = ["CATEGORIES", "JOBS", "category_of", "dead_letter_categories", "error_shape"]

POISON_FAILURES: Final = 5
POISON_WINDOW_S: Final = 86_400
_SAMPLES_MAX: Final = 5
_SHAPE_CHARS_MAX: Final = 200
CATEGORIES: Final = ("transient", "resource", "validation", "processing", "coordination", "poison", "system")
_OUTPUT: Final = Output(
    table="gold.dead_letter_categories",
    schema=(
        "topic string, group string, category string, error_shape string, letters bigint, events bigint, share double,"
        " attempts bigint, first_failed_at timestamp, last_failed_at timestamp, within_day_max bigint,"
        " is_poison boolean, event_ids array<string>"
    ),
    about="One kind of failure of one group: how often, since when, and whether it is poison.",
)


def error_shape(error: Column) -> Column:
    """An error's text without what differs from one failure of its kind to the next."""
    shape = F.coalesce(error, F.lit(""))
    for pattern, stands_for in (
        (r"'[^']*'|\"[^\"]*\"", "'*'"),
        (r"\b[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*\b", "#"),
        (r"[0-9]+(?:\.[0-9]+)?", "#"),
        (r"\s+", " "),
    ):
        shape = F.regexp_replace(shape, pattern, stands_for)
    return F.substring(F.trim(shape), 1, _SHAPE_CHARS_MAX)


def category_of(category: Column, error: Column) -> Column:
    """The category that was stored, where it is one of ours; otherwise what the error's words suggest."""
    said = F.lower(F.coalesce(error, F.lit("")))
    guess = (
        F.when(said.rlike(r"timed? ?out|timeout|temporar|unavailable|connection|try again"), "transient")
        .when(said.rlike(r"memory|disk|space left|quota|too many open|resource"), "resource")
        .when(
            said.rlike(r"invalid|missing|schema|validation|not allowed|denied|expired|keyerror|typeerror"), "validation"
        )
        .when(said.rlike(r"deadlock|lock|conflict|concurrent|coordination"), "coordination")
        .when(said.rlike(r"poison|quarantin"), "poison")
        .when(said.rlike(r"ended the process|killed|segmentation|system"), "system")
        .otherwise("processing")
    )
    return F.when(F.lower(category).isin(*CATEGORIES), F.lower(category)).otherwise(guess)


def dead_letter_categories(
    letters: DataFrame, *, failures: int = POISON_FAILURES, window_s: int = POISON_WINDOW_S
) -> DataFrame:
    """
    Failures by group and kind.

    ``within_day_max`` is the most letters of the kind within any ``window_s``; from ``failures`` on the kind is poison.
    ``share`` is of the group's letters. ``event_ids`` names a few, oldest first.
    """
    kind = ("topic", "group", "category", "error_shape")
    shaped_ = letters.select(
        "topic",
        "group",
        category_of(F.col("category"), F.col("error")).alias("category"),
        error_shape(F.col("error")).alias("error_shape"),
        "event_id",
        "offset",
        F.coalesce(F.col("attempts"), F.lit(0)).alias("attempts"),
        "failed_at",
    )
    last_day = (
        Window.partitionBy(*kind).orderBy(F.col("failed_at").cast("bigint")).rangeBetween(-window_s, Window.currentRow)
    )
    grouped = (
        shaped_.withColumn("within_day", F.count("*").over(last_day))
        .groupBy(*kind)
        .agg(
            F.count("*").alias("letters"),
            F.count_distinct("event_id").alias("events"),
            F.sum("attempts").alias("attempts"),
            F.min("failed_at").alias("first_failed_at"),
            F.max("failed_at").alias("last_failed_at"),
            F.max("within_day").alias("within_day_max"),
            F.array_sort(F.collect_set(F.struct("offset", "event_id"))).alias("places"),
        )
    )
    of_group = Window.partitionBy("topic", "group")
    return grouped.withColumns(
        {
            "share": F.col("letters") / F.sum("letters").over(of_group),
            "is_poison": (F.col("within_day_max") >= failures) | (F.col("category") == "poison"),
            "event_ids": F.slice(F.transform("places", lambda place: place["event_id"]), 1, _SAMPLES_MAX),
        }
    )


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    found = dead_letter_categories(
        tables["silver.dead_letters"],
        failures=setting(context, "poison_failures", POISON_FAILURES),
        window_s=setting(context, "poison_window_s", POISON_WINDOW_S),
    )
    return {_OUTPUT.table: shaped(found, _OUTPUT)}


JOBS: Final = (
    Job(
        name="dead_letter_categories",
        about="Dead letters by kind of failure, with the kinds that are poison.",
        reads=("silver.dead_letters",),
        writes=(_OUTPUT,),
        build=_build,
    ),
)
