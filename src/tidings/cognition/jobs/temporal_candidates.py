"""
T5, time candidates: which events fall into the time that somebody asks about, the most recent first, with reasons.

The questions are events of type ``TEMPORAL_RANGE_REQUEST`` on topic ``temporal``, with a ``phrase`` ("yesterday morning") or
``from`` and ``to``; optionally ``tz``, ``k``, ``person_id`` and ``request_id``. A request is answered for its own space and as
of its own time, so its answer can be worked out again; it is told once, as ``TEMPORAL_RANGE_RESPONSE``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType, StructField, StructType

from tidings.core.events import Event
from tidings.pipeline.jobs.job import Job, JobContext, OutputTable, setting

from .columns import as_of, clipped, hours_between, instant, iso, number, recency, summaries, text, zone_or_none
from .temporal_features import FEATURES, HALF_LIFE_H, RECENCY
from .temporal_index import TEMPORAL_TOPIC
from .temporal_phrases import ranges_of

__all__ = ["CANDIDATES", "JOBS", "candidates_of", "requests_of"]

CANDIDATES: Final = "gold.temporal_candidates"
REQUESTS: Final = "gold.temporal_requests"
_K: Final = 50
_K_MAX: Final = 500
_REQUEST_HOURS: Final = 24
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_REQUESTS_SCHEMA: Final = (
    "space_id string, request_id string, requested_at timestamp, phrase string, person_id string, tz string, k int, "
    "ranges array<struct<start: timestamp, end: timestamp>>, is_understood boolean, is_answered boolean"
)
_REQUEST_COLUMNS: Final = (
    *("space_id", "request_id", "requested_at", "phrase", "person_id", "tz", "k", "ranges"),
    *("is_understood", "is_answered"),
)
_CANDIDATES_SCHEMA: Final = (
    "space_id string, request_id string, rank int, event_id string, ts timestamp, recency double, "
    "features struct<hod: double, dow: int, is_weekend: int, daypart: string, tz: string>, reason array<string>, "
    "is_answered boolean"
)
_FOUND: Final = (
    "array<struct<rank: int, event_id: string, ts: string, recency: double, "
    "features: struct<hod: double, dow: int, is_weekend: int, daypart: string, tz: string>, reason: array<string>>>"
)
_MICROS: Final = ArrayType(StructType([StructField("start", LongType()), StructField("end", LongType())]))


# Requests are few: a row at a time is quick enough.
@F.udf(_MICROS, useArrow=False)  # type: ignore[untyped-decorator, unused-ignore]
def _meant(phrase: str | None, now_micros: int, tz: str | None) -> list[tuple[int, int]]:
    zone = zone_or_none(tz or "UTC")
    if phrase is None or zone is None:
        return []
    found = ranges_of(phrase[:100], _EPOCH + timedelta(microseconds=now_micros), zone)
    return [(_micros(each.start), _micros(each.end)) for each in found]


def _micros(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)


def requests_of(events: DataFrame, context: JobContext) -> DataFrame:
    """The requests of the last hours (``request_hours``), with the ranges that they mean, and whether they were answered."""
    hours = setting(context, "request_hours", _REQUEST_HOURS, above=0)
    told = events.where(F.col("topic") == TEMPORAL_TOPIC)
    answered = (
        told.where(F.col("type") == "TEMPORAL_RANGE_RESPONSE")
        .select("space_id", text("request_id").alias("request_id"), F.lit(True).alias("_answered"))
        .distinct()
    )
    k = clipped(number("k"), 1.0, float(_K_MAX)).cast("int")
    start, end = instant("from"), instant("to")
    given = F.when(start < end, F.array(F.struct(start.alias("start"), end.alias("end"))))
    of_phrase = F.transform(
        _meant(text("phrase"), F.unix_micros("ts"), text("tz")),
        lambda each: F.struct(
            F.timestamp_micros(each["start"]).alias("start"), F.timestamp_micros(each["end"]).alias("end")
        ),
    )
    asked = told.where(
        (F.col("type") == "TEMPORAL_RANGE_REQUEST")
        & (F.col("written_at") > as_of(context) - F.expr(f"INTERVAL '{hours}' HOUR"))
    ).select(
        "space_id",
        F.coalesce(text("request_id"), F.col("event_id")).alias("request_id"),
        F.col("ts").alias("requested_at"),
        text("phrase").alias("phrase"),
        text("person_id").alias("person_id"),
        F.coalesce(text("tz"), F.lit("UTC")).alias("tz"),
        F.coalesce(k, F.lit(setting(context, "k", _K, above=0))).alias("k"),
        F.coalesce(given, of_phrase).alias("ranges"),
        F.col("seq"),
    )
    # Of two requests with one id the first counts: whoever sends again asks the same.
    first = Window.partitionBy("space_id", "request_id").orderBy("seq")
    return (
        asked.withColumn("_turn", F.row_number().over(first))
        .where(F.col("_turn") == 1)
        .join(answered, ["space_id", "request_id"], "left")
        .withColumn("is_answered", F.coalesce("_answered", F.lit(False)))
        .withColumn("is_understood", F.size("ranges") > 0)
        .select(*_REQUEST_COLUMNS)
    )


def candidates_of(requests: DataFrame, features: DataFrame, scores: DataFrame) -> DataFrame:
    """
    The events in each request's ranges, at most its ``k``, the most recent first.

    Args:
        requests: From ``requests_of``.
        features: ``gold.temporal_features``.
        scores: ``gold.recency``, for each space's half-life; how recent an event is, is seen from its request.
    """
    half_lives = scores.groupBy(F.col("space_id").alias("_space")).agg(F.max("half_life_h").alias("half_life_h"))
    wanted = requests.select(
        F.col("space_id").alias("_asked_space"),
        *("request_id", "requested_at", "phrase", "k", "is_answered"),
        F.col("person_id").alias("_asked_person"),
        F.explode("ranges").alias("range"),
    ).join(half_lives, F.col("_asked_space") == F.col("_space"), "left")
    is_within = (
        (F.col("space_id") == F.col("_asked_space"))
        & (F.col("ts") >= F.col("range.start"))
        & (F.col("ts") < F.col("range.end"))
        & (F.col("_asked_person").isNull() | (F.col("_asked_person") == F.col("person_id")))
    )
    half_life_h = F.coalesce("half_life_h", F.lit(HALF_LIFE_H))
    found = (
        features.join(F.broadcast(wanted), is_within)
        # Ranges of one request may overlap; an event is one candidate all the same.
        .dropDuplicates(["space_id", "request_id", "event_id", "ts"])
        .withColumn("recency", recency(F.col("ts"), F.col("requested_at"), half_life_h))
    )
    best = Window.partitionBy("space_id", "request_id").orderBy(F.desc("recency"), F.desc("ts"), F.asc("event_id"))
    return (
        found.withColumn("rank", F.row_number().over(best))
        .where(F.col("rank") <= F.col("k"))
        .select(
            *("space_id", "request_id", "rank", "event_id", "ts", "recency"),
            F.struct("hod", "dow", "is_weekend", "daypart", "tz").alias("features"),
            _reason().alias("reason"),
            "is_answered",
        )
    )


def _reason() -> Column:
    age_h = hours_between(F.col("ts"), F.col("requested_at"))
    asked = F.coalesce(F.col("phrase"), F.concat(iso(F.col("range.start")), F.lit("/"), iso(F.col("range.end"))))
    return F.array_compact(
        F.array(
            F.concat(F.lit("in_range:"), asked),
            F.format_string("age_h:%.1f", age_h),
            F.concat(F.lit("daypart:"), F.col("daypart")),
            F.when(F.col("is_weekend") == 1, "weekend"),
        )
    )


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    requests = requests_of(tables["silver.events"], context)
    return {REQUESTS: requests, CANDIDATES: candidates_of(requests, tables[FEATURES], tables[RECENCY])}


def _tell(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
    found = (
        tables[CANDIDATES]
        .withColumn("ts", iso(F.col("ts")))
        .groupBy("space_id", "request_id")
        .agg(
            F.array_sort(F.collect_list(F.struct("rank", "event_id", "ts", "recency", "features", "reason"))).alias(
                "found"
            )
        )
    )
    # A request that nothing was found for is answered too, and so is one that was not understood: waiting is worse.
    told = (
        tables[REQUESTS]
        .where(~F.col("is_answered"))
        .select("space_id", "request_id", "is_understood")
        .join(found, ["space_id", "request_id"], "left")
        .select(
            "space_id", "request_id", "is_understood", F.coalesce("found", F.array().cast(_FOUND)).alias("candidates")
        )
    )
    return summaries(TEMPORAL_TOPIC, "TEMPORAL_RANGE_RESPONSE", told, context, keys=("space_id", "request_id"))


JOBS: Final = (
    Job(
        name="temporal_candidates",
        about="Answers requests for the events of a time, most recent first, with reasons (T5).",
        reads=("silver.events", FEATURES, RECENCY),
        writes=(
            OutputTable(
                REQUESTS, _REQUESTS_SCHEMA, "A recent request for the events of a time, and what it was taken to mean."
            ),
            OutputTable(CANDIDATES, _CANDIDATES_SCHEMA, "An event that falls into the time that a request asks about."),
        ),
        build=_build,
        summarise=_tell,
    ),
)
