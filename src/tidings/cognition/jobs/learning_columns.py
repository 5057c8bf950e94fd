"""
What the learning jobs share: keeping to what was known at the time, and publishing results.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tidings.core.events import Event, EventMeta

from .consolidation_memories import without_erased
from .learning_told import OUTCOME_TYPES

LEARNING_TOPIC: Final = "learning"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def learnable(told: DataFrame, erased: DataFrame) -> DataFrame:
    """
    What events say without what a tombstone or an erasure names: nothing is learnt from what was to be forgotten.

    Args:
        told: ``gold.learning_told``, or a part of it.
        erased: ``gold.erasures``.
    """
    return without_erased(told, erased, id_column="event_id", person=F.col("person_id"), seq=F.col("seq")).select(
        *told.columns
    )


def of_type(told: DataFrame, *types: str) -> DataFrame:
    """What events of these types say."""
    return told.where(F.col("type").isin(*types))


def within(later: str, earlier: str, seconds: float) -> Column:
    """Whether one time is at or after another, and at most so many seconds after it."""
    delay = F.col(later).cast("double") - F.col(earlier).cast("double")
    return (delay >= 0) & (delay <= seconds)


class AsOf:
    """
    The last fact that was known at a time, while events go by in the order in which they were written.

    Known means both: the fact happened no later than the time asked for, and it was in the log before. A fact that is written
    down afterwards does not count, however early it says it happened: whoever decided could not have seen it.

    Args:
        lookback_s: How old a fact may be.
    """

    def __init__(self, lookback_s: float) -> None:
        self._lookback_s = lookback_s
        self._facts: list[tuple[float, int, int]] = []

    def add(self, at: float, row: int) -> None:
        """A fact was written."""
        bisect.insort(self._facts, (at, len(self._facts), row))

    def known(self, at: float) -> int | None:
        """The last fact known at that time; of several of one time the one written last."""
        place = bisect.bisect_right(self._facts, at, key=lambda fact: fact[0])
        if not place or at - self._facts[place - 1][0] > self._lookback_s:
            return None
        return self._facts[place - 1][2]


def outcomes(told: DataFrame) -> DataFrame:
    """
    What came of things: one row for each name an outcome can be found by.

    Columns: space_id, key, head (null: any), y (0..1), outcome_ts, outcome_seq, outcome_topic, outcome_offset, outcome_id.
    """
    return (
        of_type(told, *OUTCOME_TYPES)
        .where("y is not null")
        .select(
            "space_id",
            F.explode("keys").alias("key"),
            "head",
            "y",
            F.col("ts").alias("outcome_ts"),
            F.col("seq").alias("outcome_seq"),
            F.col("topic").alias("outcome_topic"),
            F.col("offset").alias("outcome_offset"),
            F.col("event_id").alias("outcome_id"),
        )
    )


def with_outcome(asked: DataFrame, told: DataFrame, by: Sequence[str], window_s: float, is_meant: Column) -> DataFrame:
    """
    Each row of ``asked`` with the first outcome after it, in time and in the log, as ``found``; null where none is known.

    Args:
        asked: With ``space_id``, ``ts``, ``seq``, and ``keys``: the names its outcome may be found by.
        told: ``gold.learning_told``.
        by: The columns that tell its rows apart.
        window_s: How long after it an outcome counts.
        is_meant: Which outcomes count, by columns of both.
    """
    came = outcomes(told).withColumnsRenamed({"space_id": "_space", "head": "outcome_head"})
    is_its = (F.col("space_id") == F.col("_space")) & (F.col("_key") == F.col("key"))
    is_later = (F.col("outcome_seq") > F.col("seq")) & within("outcome_ts", "ts", window_s)
    said = ("outcome_ts", "outcome_seq", "y", "outcome_topic", "outcome_offset", "outcome_id")
    return (
        asked.select(*by, "space_id", "ts", F.explode_outer("keys").alias("_key"), F.struct("*").alias("_asked"))
        .join(came, is_its & is_later & is_meant, "left")
        .groupBy(*by)
        .agg(
            F.any_value("_asked").alias("_asked"),
            F.min(F.when(F.col("outcome_seq").isNotNull(), F.struct(*said))).alias("found"),
        )
        .select("_asked.*", "found")
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
