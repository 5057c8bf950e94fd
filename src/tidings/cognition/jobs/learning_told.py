"""
What events say that something can be learnt from, taken out of their payloads once, when they are new: ``gold.learning_told``.

The jobs that make training rows go by days, and a new event has them make its day and those near it again: without this table each
of them would read all payloads of these days in every run. It is stored by the day of the events' own time.

A payload is JSON text of unknown shape. Where a value is missing or of another type there is null, so one odd event costs one row's
value and never a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning, shaped

from .columns import finite, finite_members, name_of_actor, number, numbers, text

OUTCOME_TYPES: Final = ("ACTION_EXECUTED", "USER_FEEDBACK", "RETRIEVAL_CLICK", "cognitive.learning.outcome.received")
ACTIONS_TYPES: Final = ("ACTION_DECISION", "ACTION_EXECUTED", "AFFECT_ANNOTATED", "AFFECT_UPDATE", "METACOG_REPORT")
RANKER_TYPES: Final = ("RETRIEVAL_IMPRESSION", "RETRIEVAL_CLICK")
PREDICTIONS_TYPES: Final = ("CORTEX_PREDICTION", *OUTCOME_TYPES)
_GATE_TYPES: Final = tuple(f"cognitive.attention.gate.{action}" for action in ("admit", "boost", "defer", "drop"))
GATE_TYPES: Final = (*_GATE_TYPES, *OUTCOME_TYPES)
AUDIT_TOPIC: Final = "bus.gate.decisions.audit"
SHOWN_MAX: Final = 200
ADMIT_DEFAULT: Final = 0.60
_GOOD_WORDS: Final = (
    "accept",
    "accepted",
    "confirm",
    "helpful",
    "like",
    "positive",
    "thumbs_up",
    "up",
    "useful",
    "yes",
)
_BAD_WORDS: Final = ("correct", "dislike", "negative", "no", "reject", "rejected", "thumbs_down", "down", "useless")
_NAMES: Final = ("prediction_id", "action_id", "plan_id", "query_id", "request_id")
TOLD: Final = OutputTable(
    table="gold.learning_told",
    schema=(
        "seq bigint, date date, space_id string, event_id string, topic string, offset bigint, type string, ts timestamp,"
        " person_id string, keys array<string>, plans array<string>, query_id string, doc_id string,"
        " documents array<struct<doc_id: string, score: double, features: map<string,double>>>, y double, head string,"
        " status string, latency_ms double, action string, confidence double, risk double, best_alternative double,"
        " features map<string,double>, arousal double, valence double, surprise double, brier double,"
        " heads array<struct<head: string, p: double, z: double>>, gate struct<action: string, band: string, intent: string,"
        " priority: double, load: double, admit: double, is_scored: boolean>"
    ),
    about="What one event says that can be learnt from: a decision, what was known, what was shown or predicted, and what came of it.",
)


def truth(column: Column) -> Column:
    """1.0 or 0.0 for what says yes or no (true, 1, "OK", "success", ...); null for anything else."""
    word = F.lower(F.trim(column))
    return (
        F.when(word.isin("true", "1", "1.0", "ok", "success", "succeeded", "done"), F.lit(1.0))
        .when(word.isin("false", "0", "0.0", "failed", "failure", "error", "partial"), F.lit(0.0))
        .otherwise(F.lit(None).cast("double"))
    )


def told(events: DataFrame) -> DataFrame:
    """
    One row an event that matters to learning and whose payload can be read.

    ``keys`` are the names that an outcome, or what waits for one, is found by, and ``plans`` those of an action. ``y`` (0..1) is what came of
    something: executed actions say whether they succeeded, feedback by its kind, clicks that something was worth a click, and
    ``cognitive.learning.outcome.received`` by its ``outcome``. Of a list of results no more than ``top_k`` documents (and never more than
    200) were on show. Of heads those count whose value is a probability.
    """
    kind = F.col("type")
    is_decision, is_done, is_shown = (
        kind == each for each in ("ACTION_DECISION", "ACTION_EXECUTED", "RETRIEVAL_IMPRESSION")
    )
    is_click, is_prediction, is_report = (
        kind == each for each in ("RETRIEVAL_CLICK", "CORTEX_PREDICTION", "METACOG_REPORT")
    )
    is_felt, is_gate, is_outcome = (
        kind.isin(*each) for each in (("AFFECT_ANNOTATED", "AFFECT_UPDATE"), _GATE_TYPES, OUTCOME_TYPES)
    )
    said_kind = F.lower(text("kind"))
    y = (
        F.when(is_done, F.coalesce(truth(text("success")), truth(text("status"))))
        .when(kind == "USER_FEEDBACK", F.when(said_kind.isin(*_GOOD_WORDS), 1.0).when(said_kind.isin(*_BAD_WORDS), 0.0))
        .when(is_click, 1.0)
        .when(is_outcome, F.coalesce(truth(text("outcome")), number("outcome")))
    )
    names = [text(name) for name in _NAMES]
    keys = (
        F.when(is_outcome, F.array("trace_id", *names, text("target")))
        .when(is_prediction, F.array("event_id", "trace_id", *names))
        .when(is_gate, F.array(text("request_id"), F.col("trace_id")))
    )
    plans = F.when(is_decision, F.array(F.coalesce(text("action_id"), text("plan_id")))).when(
        is_done, F.array_distinct(F.array(text("action_id"), text("plan_id")))
    )
    return (
        events.where(kind.isin(*_TYPES) & F.col("payload").isNotNull() & (~is_gate | (F.col("topic") == AUDIT_TOPIC)))
        .select(
            *("seq", F.to_date("ts").alias("date"), "space_id", "event_id", "topic", "offset", "type", "ts"),
            name_of_actor(F.col("actor")).alias("person_id"),
            F.array_distinct(F.array_compact(keys)).alias("keys"),
            plans.alias("plans"),
            F.when(is_shown | is_click, text("query_id")).alias("query_id"),
            F.when(is_click, text("doc_id")).alias("doc_id"),
            F.when(is_shown, _documents()).alias("documents"),
            y.cast("double").alias("y"),
            F.when(is_outcome, F.coalesce(text("head"), text("context.head"))).alias("head"),
            F.when(is_done, F.coalesce(text("status"), text("success"))).alias("status"),
            F.when(is_done, number("latency_ms")).alias("latency_ms"),
            F.when(is_decision, F.coalesce(text("selected_action.name"), text("action"))).alias("action"),
            F.when(is_decision, number("confidence")).alias("confidence"),
            F.when(is_decision, F.element_at(F.create_map(*_risks()), F.upper(text("risk_level")))).alias("risk"),
            F.when(is_decision, _best_alternative()).alias("best_alternative"),
            F.when(is_decision | is_prediction, numbers("features"))
            .when(is_gate, numbers("trace.features"))
            .alias("features"),
            *(F.when(is_felt, number(name)).alias(name) for name in ("arousal", "valence")),
            *(F.when(is_report, number(name)).alias(name) for name in ("surprise", "brier")),
            F.when(is_prediction, _heads()).alias("heads"),
            F.when(is_gate, _gate()).alias("gate"),
        )
        .withColumn("y", F.when(F.col("y").between(0, 1), F.col("y")))
        .where("date is not null")
    )


def _documents() -> Column:
    item = "struct<doc_id:string,score:string,features:map<string,string>>"
    limit = F.least(F.coalesce(number("top_k").try_cast("int"), F.lit(SHOWN_MAX)), F.lit(SHOWN_MAX))
    return F.transform(
        F.slice(F.from_json(text("ranked"), f"array<{item}>"), 1, F.greatest(limit, F.lit(0))),
        lambda each: F.struct(
            each["doc_id"].alias("doc_id"),
            finite(each["score"]).alias("score"),
            finite_members(each["features"]).alias("features"),
        ),
    )


def _heads() -> Column:
    said = F.map_entries(F.from_json(text("heads"), "map<string,struct<value:string,z:string>>"))
    heads = F.transform(
        said,
        lambda each: F.struct(
            each["key"].alias("head"),
            finite(each["value"]["value"]).alias("p"),
            finite(each["value"]["z"]).alias("z"),
        ),
    )
    return F.filter(heads, lambda each: each["p"].between(0, 1))


def _gate() -> Column:
    return F.struct(
        F.upper(text("gate_decision.action")).alias("action"),
        F.coalesce(text("band"), F.lit("")).alias("band"),
        F.coalesce(text("derived_intents[0].intent"), F.lit("")).alias("intent"),
        number("gate_decision.priority").alias("priority"),
        number("trace.load").alias("load"),
        F.coalesce(number("trace.thresholds.admit"), F.lit(ADMIT_DEFAULT)).alias("admit"),
        F.array_contains(F.from_json(text("trace.decision_path"), "array<string>"), "action").alias("is_scored"),
    )


def _risks() -> list[Column]:
    return [
        part for word, risk in (("LOW", 0.0), ("MEDIUM", 0.5), ("HIGH", 1.0)) for part in (F.lit(word), F.lit(risk))
    ]


def _best_alternative() -> Column:
    alternatives = F.from_json(text("alternatives"), "array<struct<name:string,score:string>>")
    return F.array_max(F.transform(alternatives, lambda other: finite(other["score"])))


_TYPES: Final = tuple(dict.fromkeys((*ACTIONS_TYPES, *RANKER_TYPES, *PREDICTIONS_TYPES, *GATE_TYPES)))


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {TOLD.table: shaped(told(tables["silver.events"]), TOLD)}


JOBS: Final = (
    Job(
        name="learning_told",
        about="Takes what can be learnt from out of payloads (for L1 to L3 and L7).",
        reads=("silver.events",),
        writes=(TOLD,),
        build=_build,
        partitioning=Partitioning(lambda _: {"silver.events": InputWindow("seq", types=_TYPES)}, seq_column="seq"),
    ),
)
