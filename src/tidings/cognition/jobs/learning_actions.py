"""
L1, ``gold.learning_actions``: decisions as training rows, each with what was known then and what came of it.

A row is an ``ACTION_DECISION``. Its label is the first ``ACTION_EXECUTED`` of the same plan or action within the window.
Affect and self-assessment are the last ones known when the decision was written (``learning_columns.as_of_join``): nothing
that happened, or was written down, after the decision is among the features. Places in the log say where each value is from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting, shaped

from .consolidation_erasures import ALL_ERASURES, ERASURES
from .learning_columns import as_of_join, learnable, numbers, of_type, text, truth, value, within

__all__ = ["JOBS", "OUTPUT", "action_rows"]

WINDOW_S: Final = 3600
LOOKBACK_S: Final = 3600
REPORT_LOOKBACK_S: Final = 172_800
_TYPES: Final = ("ACTION_DECISION", "ACTION_EXECUTED", "AFFECT_ANNOTATED", "AFFECT_UPDATE", "METACOG_REPORT")
_OWN_FEATURES: Final = ("bias", "confidence", "risk", "margin", "arousal", "valence", "surprise")
OUTPUT: Final = OutputTable(
    table="gold.learning_actions",
    schema=(
        "row_id string, space_id string, date date, action string, decided_at timestamp, y double, outcome_status string,"
        " latency_ms double, features map<string,double>, arousal double, valence double, surprise double, brier double,"
        " decision_topic string, decision_offset bigint, decision_seq bigint, outcome_topic string, outcome_offset bigint,"
        " outcome_seq bigint, affect_seq bigint, metacog_seq bigint"
    ),
    about="One decision: what was known when it was made, and whether what it led to succeeded (null: not known yet).",
    partitioned_by=("decided_at",),
)


def action_rows(
    events: DataFrame,
    *,
    window_s: int = WINDOW_S,
    lookback_s: int = LOOKBACK_S,
    report_lookback_s: int = REPORT_LOOKBACK_S,
) -> DataFrame:
    """
    Training rows from decisions.

    ``y`` is 1 for success (``success`` true, or ``status`` OK), 0 for anything else that was executed, and null where nothing
    was within the window. A partial success is no success.

    Args:
        events: ``silver.events``.
        window_s: How long after a decision its outcome counts.
        lookback_s: How old affect may be.
        report_lookback_s: How old a self-assessment may be; these come a few a day.
    """
    decisions = of_type(events, "ACTION_DECISION").select(
        F.col("event_id").alias("row_id"),
        "space_id",
        F.to_date("ts").alias("date"),
        "ts",
        "seq",
        "offset",
        "topic",
        F.coalesce(text("action_id"), text("plan_id")).alias("key"),
        F.coalesce(text("selected_action.name"), text("action")).alias("action"),
        value("confidence").alias("confidence"),
        F.element_at(F.create_map(*_risks()), F.upper(text("risk_level"))).alias("risk"),
        _best_alternative().alias("best_alternative"),
        numbers("features").alias("given"),
    )
    affects = of_type(events, "AFFECT_ANNOTATED", "AFFECT_UPDATE").select(
        "space_id", "ts", "seq", value("arousal").alias("arousal"), value("valence").alias("valence")
    )
    reports = of_type(events, "METACOG_REPORT").select(
        "space_id", "ts", "seq", value("surprise").alias("surprise"), value("brier").alias("brier")
    )
    known = as_of_join(
        decisions,
        affects.withColumn("affect_seq", F.col("seq")),
        {"arousal": "arousal", "valence": "valence", "affect_seq": "affect_seq"},
        lookback_s=lookback_s,
    )
    known = as_of_join(
        known,
        reports.withColumn("metacog_seq", F.col("seq")),
        {"surprise": "surprise", "brier": "brier", "metacog_seq": "metacog_seq"},
        lookback_s=report_lookback_s,
    )
    return _with_features(_with_outcomes(known, events, window_s))


def _with_outcomes(decisions: DataFrame, events: DataFrame, window_s: int) -> DataFrame:
    executed = of_type(events, "ACTION_EXECUTED").select(
        F.col("space_id").alias("_space"),
        F.explode(F.array_distinct(F.array_compact(F.array(text("action_id"), text("plan_id"))))).alias("_key"),
        F.col("ts").alias("_ts"),
        F.struct(
            "ts",
            "seq",
            "topic",
            "offset",
            F.coalesce(truth(text("success")), truth(text("status")), F.lit(0.0)).alias("y"),
            F.coalesce(text("status"), text("success")).alias("status"),
            value("latency_ms").alias("latency_ms"),
        ).alias("_done"),
    )
    first = (
        decisions.select("seq", "space_id", "key", "ts")
        .join(
            executed,
            (F.col("space_id") == F.col("_space"))
            & (F.col("key") == F.col("_key"))
            & (F.col("_done.seq") > F.col("seq"))
            & within("_ts", "ts", window_s),
        )
        .groupBy("seq")
        .agg(F.min_by("_done", F.struct("_done.ts", "_done.seq")).alias("_done"))
    )
    return decisions.join(first, "seq", "left")


def _with_features(rows: DataFrame) -> DataFrame:
    own = {
        "bias": F.lit(1.0),
        "confidence": F.col("confidence"),
        "risk": F.col("risk"),
        "margin": F.col("confidence") - F.col("best_alternative"),
        "arousal": F.col("arousal"),
        "valence": F.col("valence"),
        "surprise": F.col("surprise"),
    }
    pairs = [part for name in _OWN_FEATURES for part in (F.lit(name), own[name])]
    known = F.map_filter(F.create_map(*pairs), lambda _, found: found.isNotNull())
    # A producer's feature of the same name as one of ours gives way: two meanings under one weight teach nothing.
    given = F.map_filter("given", lambda name, _: ~name.isin(*_OWN_FEATURES))
    return rows.select(
        "row_id",
        "space_id",
        "date",
        "action",
        F.col("ts").alias("decided_at"),
        F.col("_done.y").alias("y"),
        F.col("_done.status").alias("outcome_status"),
        F.col("_done.latency_ms").alias("latency_ms"),
        F.map_concat(known, given).alias("features"),
        "arousal",
        "valence",
        "surprise",
        "brier",
        F.col("topic").alias("decision_topic"),
        F.col("offset").alias("decision_offset"),
        F.col("seq").alias("decision_seq"),
        F.col("_done.topic").alias("outcome_topic"),
        F.col("_done.offset").alias("outcome_offset"),
        F.col("_done.seq").alias("outcome_seq"),
        "affect_seq",
        "metacog_seq",
    )


def _risks() -> list[Column]:
    return [
        part for word, risk in (("LOW", 0.0), ("MEDIUM", 0.5), ("HIGH", 1.0)) for part in (F.lit(word), F.lit(risk))
    ]


def _best_alternative() -> Column:
    alternatives = F.from_json(text("alternatives"), "array<struct<name:string,score:string>>")
    return F.array_max(F.transform(alternatives, lambda other: other["score"].try_cast("double")))


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    rows = action_rows(
        learnable(tables["silver.events"], tables[ERASURES]),
        window_s=setting(context, "action_window_s", WINDOW_S),
        lookback_s=setting(context, "lookback_s", LOOKBACK_S),
        report_lookback_s=setting(context, "report_lookback_s", REPORT_LOOKBACK_S),
    )
    return {OUTPUT.table: shaped(rows, OUTPUT)}


def _looks(context: JobContext) -> Mapping[str, InputWindow]:
    known_s = max(setting(context, "lookback_s", LOOKBACK_S), setting(context, "report_lookback_s", REPORT_LOOKBACK_S))
    window_s = setting(context, "action_window_s", WINDOW_S)
    return {"silver.events": InputWindow("ts", before_s=known_s, after_s=window_s, types=_TYPES), **ALL_ERASURES}


JOBS: Final = (
    Job(
        name="learning_actions",
        about="L1: decisions with what was known then and what came of them.",
        reads=("silver.events", ERASURES),
        writes=(OUTPUT,),
        build=_build,
        partitioning=Partitioning(_looks),
    ),
)
