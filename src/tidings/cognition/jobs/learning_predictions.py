"""
L3, ``gold.learning_predictions``: what was predicted against what came of it, a row a head.

A ``CORTEX_PREDICTION`` and its outcome find each other by a name they share: the prediction's own id, or the plan, action,
query, request or trace both speak of. Only an outcome after the prediction, in time and in the log, counts; the first one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting, shaped

from .consolidation_erasures import ALL_ERASURES, ERASURES
from .learning_columns import OUTCOME_TYPES, learnable, numbers, of_type, outcomes, text, within
from .learning_math import PROBABILITY_FLOOR

__all__ = ["JOBS", "OUTPUT", "prediction_rows"]

WINDOW_S: Final = 86_400
_KEYS: Final = ("prediction_id", "action_id", "plan_id", "query_id", "request_id")
OUTPUT: Final = OutputTable(
    table="gold.learning_predictions",
    schema=(
        "row_id string, space_id string, date date, head string, p double, z double, y double, predicted_at timestamp,"
        " features map<string,double>, prediction_topic string, prediction_offset bigint, prediction_seq bigint,"
        " outcome_topic string, outcome_offset bigint, outcome_seq bigint, outcome_id string"
    ),
    about="One head of one prediction: what it said, and what came of it (null: not known yet).",
    partitioned_by=("predicted_at",),
)


def prediction_rows(events: DataFrame, *, window_s: int = WINDOW_S) -> DataFrame:
    """
    Calibration rows.

    ``p`` is the head's value, where that is a probability; rows whose value is outside 0..1 are left out. ``z`` is the score
    that was given with it, otherwise the logit of ``p``.

    Args:
        events: ``silver.events``.
        window_s: How long after a prediction its outcome counts.
    """
    heads = F.from_json(text("heads"), "map<string,struct<value:string,z:string>>")
    said = (
        of_type(events, "CORTEX_PREDICTION")
        .select(
            "event_id",
            "space_id",
            F.to_date("ts").alias("date"),
            "ts",
            "seq",
            "topic",
            "offset",
            F.array_distinct(F.array_compact(F.array("event_id", "trace_id", *(text(name) for name in _KEYS)))).alias(
                "keys"
            ),
            numbers("features").alias("features"),
            F.explode(heads).alias("head", "said"),
        )
        .withColumns({"p": F.col("said.value").try_cast("double"), "_z": F.col("said.z").try_cast("double")})
        .where("p between 0 and 1")
    )
    held = F.least(F.greatest(F.col("p"), F.lit(PROBABILITY_FLOOR)), F.lit(1 - PROBABILITY_FLOOR))
    said = said.withColumn("z", F.coalesce(F.when(F.abs("_z") < 1e300, F.col("_z")), F.log(held / (1 - held))))
    found = outcomes(events).withColumnsRenamed({"space_id": "_space", "head": "_head"})
    first = (
        said.select("seq", "space_id", "head", "ts", F.explode("keys").alias("_asked"))
        .join(
            found,
            (F.col("space_id") == F.col("_space"))
            & (F.col("_asked") == F.col("key"))
            & (F.col("_head").isNull() | (F.col("_head") == F.col("head")))
            & (F.col("outcome_seq") > F.col("seq"))
            & within("outcome_ts", "ts", window_s),
        )
        .groupBy("seq", "head")
        .agg(
            F.min_by(
                F.struct("y", "outcome_topic", "outcome_offset", "outcome_seq", "outcome_id"),
                F.struct("outcome_ts", "outcome_seq"),
            ).alias("found")
        )
    )
    return said.join(first, ["seq", "head"], "left").select(
        F.concat_ws(":", "event_id", "head").alias("row_id"),
        "space_id",
        "date",
        "head",
        "p",
        "z",
        "found.y",
        F.col("ts").alias("predicted_at"),
        "features",
        F.col("topic").alias("prediction_topic"),
        F.col("offset").alias("prediction_offset"),
        F.col("seq").alias("prediction_seq"),
        "found.outcome_topic",
        "found.outcome_offset",
        "found.outcome_seq",
        "found.outcome_id",
    )


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    rows = prediction_rows(
        learnable(tables["silver.events"], tables[ERASURES]),
        window_s=setting(context, "prediction_window_s", WINDOW_S),
    )
    return {OUTPUT.table: shaped(rows, OUTPUT)}


def _looks(context: JobContext) -> Mapping[str, InputWindow]:
    window_s = setting(context, "prediction_window_s", WINDOW_S)
    return {
        "silver.events": InputWindow("ts", after_s=window_s, types=("CORTEX_PREDICTION", *OUTCOME_TYPES)),
        **ALL_ERASURES,
    }


JOBS: Final = (
    Job(
        name="learning_predictions",
        about="L3: what heads predicted against what came of it.",
        reads=("silver.events", ERASURES),
        writes=(OUTPUT,),
        build=_build,
        partitioning=Partitioning(_looks),
    ),
)
