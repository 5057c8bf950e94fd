"""
What the learning jobs share: reading payloads, keeping to what was known at the time, and publishing results.

A payload is JSON text of unknown shape. Everything here answers null where a value is missing or of another type, so one
odd event costs one row's value and never a run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tidings.core.events import Event, EventMeta

from .columns import name_of_actor, number, text
from .consolidation_memories import without_erased

LEARNING_TOPIC: Final = "learning"
OUTCOME_TYPES: Final = ("ACTION_EXECUTED", "USER_FEEDBACK", "RETRIEVAL_CLICK", "cognitive.learning.outcome.received")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
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
_KEYS: Final = ("prediction_id", "action_id", "plan_id", "query_id", "request_id", "target")


def truth(column: Column) -> Column:
    """1.0 or 0.0 for what says yes or no (true, 1, "OK", "success", ...); null for anything else."""
    word = F.lower(F.trim(column))
    return (
        F.when(word.isin("true", "1", "1.0", "ok", "success", "succeeded", "done"), F.lit(1.0))
        .when(word.isin("false", "0", "0.0", "failed", "failure", "error", "partial"), F.lit(0.0))
        .otherwise(F.lit(None).cast("double"))
    )


def learnable(events: DataFrame, erased: DataFrame) -> DataFrame:
    """
    The events without those that a tombstone or an erasure names: nothing is learnt from what was to be forgotten.

    Args:
        events: ``silver.events``, or a part of it.
        erased: ``gold.erasures``.
    """
    return without_erased(
        events, erased, id_column="event_id", person=name_of_actor(F.col("actor")), seq=F.col("seq")
    ).select(*events.columns)


def of_type(events: DataFrame, *types: str) -> DataFrame:
    """The events of these types whose payload can be read."""
    return events.where(F.col("type").isin(*types) & F.col("payload").isNotNull())


def within(later: str, earlier: str, seconds: float) -> Column:
    """Whether one time is at or after another, and at most so many seconds after it."""
    delay = F.col(later).cast("double") - F.col(earlier).cast("double")
    return (delay >= 0) & (delay <= seconds)


def as_of_join(rows: DataFrame, facts: DataFrame, names: Mapping[str, str], *, lookback_s: int) -> DataFrame:
    """
    Give each row the last fact of its space that was known at its time.

    Known means both: the fact happened no later than the row (``ts``), and it was in the log before it (``seq``). A fact that
    was written down afterwards does not count, however early it says it happened: whoever decided could not have seen it.

    Most rows are settled by one pass in the order of writing: if the latest fact written so far happened no later than the row,
    it is the one. Only rows that are late themselves, or follow a fact with a clock ahead, have to be searched for.

    Args:
        rows: With ``space_id``, ``ts``, ``seq``, and ``seq`` unique.
        facts: With ``space_id``, ``ts``, ``seq`` and the columns named.
        names: From the fact's columns to what they are called on the row; null where no fact was known.
        lookback_s: How old a fact may be.
    """
    known = facts.select("space_id", "ts", "seq", F.struct("ts", "seq", *names).alias("_fact"))
    nothing = F.lit(None).cast(known.schema["_fact"].dataType)
    written = Window.partitionBy("space_id").orderBy("seq").rowsBetween(Window.unboundedPreceding, -1)
    judged = (
        rows.select("space_id", "ts", "seq", nothing.alias("_fact"), F.lit(True).alias("_is_row"))
        .unionByName(known.withColumn("_is_row", F.lit(False)))
        .withColumn("_latest", F.max("_fact").over(written))
        .where("_is_row and _latest is not null")
        .drop("_fact")
        .withColumn("_latest_ts", F.col("_latest.ts"))
    )
    settled = judged.where(within("ts", "_latest_ts", lookback_s)).select("seq", F.col("_latest").alias("_fact"))
    searched = _search(judged.where("_latest_ts > ts").select("space_id", "ts", "seq"), known, lookback_s)
    found = settled.unionByName(searched).select(
        "seq", *(F.col(f"_fact.{name}").alias(called) for name, called in names.items())
    )
    return rows.join(found, "seq", "left")


def _search(rows: DataFrame, known: DataFrame, lookback_s: int) -> DataFrame:
    """
    The last fact known to each row, by looking at all that could be.

    They are joined by windows of ``lookback_s``, each fact in its own and in the next, so that a row is compared with the facts of
    two windows and not with all of history.
    """
    window = F.floor(F.col("ts").cast("double") / lookback_s).cast("bigint")
    spread = known.select(
        F.col("space_id").alias("_space"), F.explode(F.array(window, window + 1)).alias("_window"), "_fact"
    ).withColumn("_fact_ts", F.col("_fact.ts"))
    return (
        rows.withColumn("_at", window)
        .join(
            spread,
            (F.col("space_id") == F.col("_space"))
            & (F.col("_at") == F.col("_window"))
            & (F.col("_fact.seq") < F.col("seq"))
            & within("ts", "_fact_ts", lookback_s),
        )
        .groupBy("seq")
        .agg(F.max("_fact").alias("_fact"))
    )


def outcomes(events: DataFrame) -> DataFrame:
    """
    What came of things: one row for each name an outcome can be found by.

    Columns: space_id, key, head (null: any), y (0..1), outcome_ts, outcome_seq, outcome_topic, outcome_offset, outcome_id.
    Executed actions say whether they succeeded, feedback by its kind, clicks that something was worth a click, and
    ``cognitive.learning.outcome.received`` by its ``outcome``.
    """
    kind = F.lower(text("kind"))
    feedback = F.when(kind.isin(*_GOOD_WORDS), 1.0).when(kind.isin(*_BAD_WORDS), 0.0)
    y = (
        F.when(F.col("type") == "ACTION_EXECUTED", F.coalesce(truth(text("success")), truth(text("status"))))
        .when(F.col("type") == "USER_FEEDBACK", feedback)
        .when(F.col("type") == "RETRIEVAL_CLICK", 1.0)
        .otherwise(F.coalesce(truth(text("outcome")), number("outcome")))
    )
    keys = F.array_distinct(F.array_compact(F.array(F.col("trace_id"), *(text(name) for name in _KEYS))))
    return (
        of_type(events, *OUTCOME_TYPES)
        .select(
            "space_id",
            F.explode(keys).alias("key"),
            F.coalesce(text("head"), text("context.head")).alias("head"),
            y.cast("double").alias("y"),
            F.col("ts").alias("outcome_ts"),
            F.col("seq").alias("outcome_seq"),
            F.col("topic").alias("outcome_topic"),
            F.col("offset").alias("outcome_offset"),
            F.col("event_id").alias("outcome_id"),
        )
        .where("y is not null and y between 0 and 1")
    )


def summary_event(topic: str, kind: str, space_id: str, ts: datetime, payload: Mapping[str, Any]) -> Event:
    """
    A result as an event.

    Its id follows from all it says and from nothing else. A run that finds the same again makes the same event, which the
    log knows already; so ``ts`` has to come from the data, never from the run.
    """
    if ts.utcoffset() is None:
        raise TypeError("ts must have a zone")
    said = msgspec.json.encode([topic, kind, space_id, ts.isoformat(), payload], order="sorted")
    event_id = f"job-{hashlib.sha256(said).hexdigest()[:32]}"
    meta = EventMeta(topic=topic, type=kind, space_id=space_id, event_id=event_id, ts=ts, actor="pipeline:learning")
    return Event(meta, payload)


def time_of(micros: int) -> datetime:
    """
    A time from ``unix_micros``.

    Collected timestamps have no zone and are in that of the driver's machine; microseconds mean the same everywhere.
    """
    return _EPOCH + timedelta(microseconds=micros)
