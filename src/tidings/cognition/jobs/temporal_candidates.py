"""
Answers to questions about time (T5): which memories lie in the range that a request names, most recent first.

A request gives a range, or a phrase such as "yesterday morning" or "last 2 weekends", which means what people at that place
mean by it. A phrase that is not known has no range, and no guess: the request is answered, and says that it was not
understood.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType, StructField, StructType

from tidings.core.events import Event
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, setting, whole_days

from .columns import as_of, clipped, held, hours_between, instant, iso, number, recency, summaries, text, zone_or_none
from .temporal_features import FEATURES, HALF_LIFE_H, RECENCY
from .temporal_index import TEMPORAL_TOPIC

_WEEKDAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_DAYPARTS: Final = {"morning": (5, 12), "afternoon": (12, 17), "evening": (17, 22), "night": (22, 29)}
_COUNT_MAX: Final = 10_000
_WEEKENDS_MAX: Final = 520
_AGO: Final = re.compile(r"(\d{1,6}|an?|one|two|three) (day|week|month)s? ago")
_WEEKENDS: Final = re.compile(r"last (\d{1,6}|two|three) weekends")
_DAY_PART: Final = re.compile(rf"(today|yesterday|this|last|{'|'.join(_WEEKDAYS)}) ({'|'.join(_DAYPARTS)})")
_WEEKDAY: Final = re.compile(rf"(last|next) ({'|'.join(_WEEKDAYS)})")
_WORDS: Final = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3}


class TimeRange(NamedTuple):
    """From a time, included, to a time, excluded; both in UTC."""

    start: datetime
    end: datetime


def ranges_of(phrase: str, now: datetime, zone: tzinfo) -> tuple[TimeRange, ...]:
    """
    The ranges that a phrase means, earliest first; none if nothing is meant by it.

    Args:
        phrase: Such as ``today``, ``last night``, ``monday evening``, ``3 weeks ago``, ``next friday``, ``last 2 weekends``.
        now: The moment that it is said, with a zone.
        zone: Where it is said.
    """
    try:
        return _ranges_of(" ".join(phrase.lower().split()), now.astimezone(zone), zone)
    except (OverflowError, ValueError):  # before the year 1 or after 9999: nobody means that
        return ()


def _ranges_of(said: str, now: datetime, zone: tzinfo) -> tuple[TimeRange, ...]:
    today = now.date()

    def days(first: date, count: int) -> tuple[TimeRange, ...]:
        return (_between(first, 0, first + timedelta(days=count), 0, zone),)

    monday = today - timedelta(days=today.weekday())
    month = today.replace(day=1)
    plain: dict[str, Callable[[], tuple[TimeRange, ...]]] = {
        "today": lambda: days(today, 1),
        "yesterday": lambda: days(today - timedelta(days=1), 1),
        "tomorrow": lambda: days(today + timedelta(days=1), 1),
        "this week": lambda: days(monday, 7),
        "last week": lambda: days(monday - timedelta(days=7), 7),
        "this month": lambda: (_between(month, 0, _months_on(month, 1), 0, zone),),
        "last month": lambda: (_between(_months_on(month, -1), 0, month, 0, zone),),
        "last weekend": lambda: _weekends(today, 1, zone),
    }
    if said in plain:
        return plain[said]()
    if found := _DAY_PART.fullmatch(said):
        return _day_and_part(found[1], found[2], today, zone)
    if found := _AGO.fullmatch(said):
        return _sliding(_count(found[1]), found[2], now, zone)
    if found := _WEEKDAY.fullmatch(said):
        ahead = (_WEEKDAYS.index(found[2]) - today.weekday()) % 7
        return days(today + timedelta(days=ahead or 7) if found[1] == "next" else _last_weekday(today, found[2]), 1)
    if found := _WEEKENDS.fullmatch(said):
        return _weekends(today, min(_count(found[1]), _WEEKENDS_MAX), zone)
    return ()


def _count(word: str) -> int:
    return min(_WORDS.get(word) or int(word), _COUNT_MAX)


def _day_and_part(day: str, part: str, today: date, zone: tzinfo) -> tuple[TimeRange, ...]:
    if day == "last" and part != "night":
        return ()  # "last morning" is nobody's phrase
    if day in ("today", "this"):
        on = today
    elif day in ("yesterday", "last"):
        on = today - timedelta(days=1)
    else:
        on = _last_weekday(today, day)
    first, last = _DAYPARTS[part]
    return (_between(on, first, on + timedelta(days=last // 24), last % 24, zone),)


def _last_weekday(today: date, name: str) -> date:
    """The latest day of that name before today."""
    return today - timedelta(days=(today.weekday() - _WEEKDAYS.index(name)) % 7 or 7)


def _sliding(count: int, unit: str, now: datetime, zone: tzinfo) -> tuple[TimeRange, ...]:
    """A window that ends now."""
    if unit == "month":
        on = _months_on(now.date(), -count)
    else:
        on = now.date() - timedelta(days=count * (7 if unit == "week" else 1))
    start = _utc(datetime.combine(on, now.time().replace(fold=0)), zone)
    return (TimeRange(start, now.astimezone(UTC)),)


def _weekends(today: date, count: int, zone: tzinfo) -> tuple[TimeRange, ...]:
    """The last weekends that are over: on a Sunday the one before."""
    saturday = today - timedelta(days=today.weekday() + 2)
    found = [saturday - timedelta(days=7 * back) for back in reversed(range(count))]
    return tuple(_between(each, 0, each + timedelta(days=2), 0, zone) for each in found)


def _months_on(day: date, months: int) -> date:
    """The same day so many months on, or the month's last day if it has no such day."""
    year, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    return date(year, month + 1, min(day.day, calendar.monthrange(year, month + 1)[1]))


def _between(first: date, first_hour: int, last: date, last_hour: int, zone: tzinfo) -> TimeRange:
    start, end = datetime.combine(first, time(first_hour)), datetime.combine(last, time(last_hour))
    return TimeRange(_utc(start, zone), _utc(end, zone))


def _utc(shown: datetime, zone: tzinfo) -> datetime:
    """
    The instant at which clocks show that time. Where they show it twice, the first one; where a change of clocks skips it,
    the moment of the change.
    """
    found = shown.replace(tzinfo=zone).astimezone(UTC)
    back = found.astimezone(zone).replace(tzinfo=None)
    if back == shown:
        return found
    # In a gap Python reads the time by the offset before (fold 0) or after (fold 1) the change, which lies between them.
    later = shown.replace(tzinfo=zone, fold=1).astimezone(UTC)
    low, high = sorted((found, later))
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) / 2
        if middle.astimezone(zone).replace(tzinfo=None) < shown:
            low = middle
        else:
            high = middle
    return high.replace(microsecond=0)


CANDIDATES: Final = "gold.temporal_candidates"
REQUESTS: Final = "gold.temporal_requests"
_REQUEST: Final = "TEMPORAL_RANGE_REQUEST"
_RESPONSE: Final = "TEMPORAL_RANGE_RESPONSE"
_K: Final = 50
_K_MAX: Final = 500
_REQUEST_HOURS: Final = 24
_REQUESTS_FEW: Final = 1_000
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
    is_request = F.col("type") == _REQUEST
    is_recent = F.col("written_at") > as_of(context) - F.expr(f"INTERVAL '{hours}' HOUR")
    k = clipped(number("k"), 1.0, float(_K_MAX)).cast("int")
    start, end = instant("from"), instant("to")
    told = events.where(
        (F.col("topic") == TEMPORAL_TOPIC) & ((is_request & is_recent) | (F.col("type") == _RESPONSE))
    ).select(
        *("space_id", "seq", is_request.alias("is_request")),
        F.coalesce(text("request_id"), F.when(is_request, F.col("event_id"))).alias("request_id"),
        F.struct(
            F.col("ts").alias("requested_at"),
            text("phrase").alias("phrase"),
            text("person_id").alias("person_id"),
            F.coalesce(text("tz"), F.lit("UTC")).alias("tz"),
            F.coalesce(k, F.lit(setting(context, "k", _K, above=0))).alias("k"),
            F.when(start < end, F.array(F.struct(start.alias("start"), end.alias("end")))).alias("given"),
        ).alias("request"),
    )
    # Requests are few: a row at a time is quick enough. Built here and not on import: see ``columns.wall_clock``.
    meant = F.udf(_meant, _MICROS, useArrow=False)
    of_phrase = F.transform(
        meant("phrase", F.unix_micros("requested_at"), "tz"),
        lambda each: F.struct(
            F.timestamp_micros(each["start"]).alias("start"), F.timestamp_micros(each["end"]).alias("end")
        ),
    )
    return (
        told.groupBy("space_id", "request_id")
        .agg(
            # Of two requests with one id the first counts: whoever sends again asks the same.
            F.min_by("request", F.when(F.col("is_request"), F.col("seq"))).alias("request"),
            F.bool_or(~F.col("is_request")).alias("is_answered"),
        )
        .where("request is not null")
        .select("space_id", "request_id", "request.*", "is_answered")
        .withColumn("ranges", F.coalesce("given", of_phrase))
        .withColumn("is_understood", F.size("ranges") > 0)
        .select(*_REQUEST_COLUMNS)
    )


def candidates_of(
    requests: DataFrame, features: DataFrame, scores: DataFrame, near: Callable[[DataFrame], DataFrame]
) -> DataFrame:
    """
    The events in each request's ranges, at most its ``k``, the most recent first.

    Args:
        requests: From ``requests_of``.
        features: ``gold.temporal_features``.
        scores: ``gold.recency``, for each space's half-life; how recent an event is, is seen from its request.
        near: How requests meet the features (``held``).
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
        features.join(near(wanted), is_within)
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
    events = tables["silver.events"]
    # Mostly nobody asks: then nothing is worked out or looked through.
    if events.where((F.col("topic") == TEMPORAL_TOPIC) & (F.col("type") == _REQUEST)).isEmpty():
        spark = events.sparkSession
        schemas = {REQUESTS: _REQUESTS_SCHEMA, CANDIDATES: _CANDIDATES_SCHEMA}
        return {table: spark.createDataFrame([], schema).coalesce(1) for table, schema in schemas.items()}
    requests, _, near = held(requests_of(events, context), few=_REQUESTS_FEW)
    return {REQUESTS: requests, CANDIDATES: candidates_of(requests, tables[FEATURES], tables[RECENCY], near)}


def _recent(context: JobContext) -> Mapping[str, InputWindow]:
    """An answer is written after its request."""
    days = whole_days(setting(context, "request_hours", _REQUEST_HOURS, above=0) * 3600)
    return {"silver.events": InputWindow("written_at", days_before=days, types=(_REQUEST, _RESPONSE))}


def _summarise(tables: Mapping[str, DataFrame], context: JobContext) -> Iterable[Event]:
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
    rows = (
        tables[REQUESTS]
        .where(~F.col("is_answered"))
        .select("space_id", "request_id", "is_understood", F.col("requested_at").alias("_at"))
        .join(found, ["space_id", "request_id"], "left")
        .select(
            *("space_id", "request_id", "is_understood", "_at"),
            F.coalesce("found", F.array().cast(_FOUND)).alias("candidates"),
        )
    )
    return summaries(TEMPORAL_TOPIC, _RESPONSE, rows, context, order=("_at", "space_id", "request_id"))


TEMPORAL_CANDIDATES_JOBS: Final = (
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
        summarise=_summarise,
        recent=_recent,
    ),
)


JOBS: Final = TEMPORAL_CANDIDATES_JOBS
