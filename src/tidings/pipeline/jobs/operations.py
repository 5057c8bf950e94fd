"""
The job set ``operations``, which every log has: traffic by topic and minute, sync traffic, groups and dead letters.

``gold.topic_minutes``: rates and latency by topic and minute of writing, in UTC.
``gold.sync_traffic``: what clients submitted, by hour, dialect, partition and client; an event that names several partitions
counts once in each of them. ``gold.sync_clients`` counts it once.
``gold.group_lag`` and ``gold.retries``: how far each group is behind, and how often it had to retry. Lag is counted against
what the run has seen; a group past that has no lag.
``gold.dead_letter_categories``: failures by kind. Errors are compared by their shape: numbers, quoted text and long
hexadecimal ids are removed, so that a thousand failures of one kind are one row. A kind is poison when one group met it five
times within a day, as a retry will not help it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from ..latency_buckets import GROWTH
from .job import InputWindow, Job, JobContext, OutputTable, Partitioning, setting, shaped, time_in

_MINUTE_US: Final = 60_000_000
_MINUTES: Final = OutputTable(
    table="gold.topic_minutes",
    schema=(
        "topic string, minute timestamp, date date, events bigint, payload_bytes bigint, spaces bigint, sealed bigint,"
        " last_offset bigint, latency_ms_p50 double, latency_ms_p95 double, latency_ms_p99 double, latency_ms_max double,"
        " latency_buckets map<int,bigint>, ahead_of_clock bigint"
    ),
    about="One topic in one minute of writing: how many events, how large, and how late they were written.",
)


def topic_minutes(events: DataFrame) -> DataFrame:
    """
    Rates and latency by topic and minute of writing, which no wrong clock can move.

    ``latency_buckets`` counts the events by how late they were written (``latency_buckets.bucket_of``), so that minutes can be
    added up; the percentiles are read from it. ``ahead_of_clock`` counts the events whose own time lies after their time of
    writing: somebody's clock is wrong. They are in bucket 0.
    """
    late_us = F.unix_micros("written_at") - F.unix_micros("ts")
    # A record without a time was neither late nor early.
    bucket = F.when(F.col("late_us") >= 1, 1 + F.floor(F.log("late_us") / math.log(GROWTH))).otherwise(0).cast("int")
    rows = events.select(
        "topic",
        F.floor(F.unix_micros("written_at") / _MINUTE_US).alias("minute"),
        "space_id",
        "offset",
        F.coalesce(F.octet_length("payload"), F.lit(0)).alias("size"),
        F.coalesce(F.col("is_sealed"), F.lit(False)).alias("is_sealed"),
        late_us.alias("late_us"),
    )
    # Plain sums by bucket first, which Spark counts where the rows are; sets of spaces beside them would cost more than all else.
    counted = rows.groupBy("topic", "minute", bucket.alias("bucket")).agg(
        F.count("*").alias("events"),
        F.sum("size").alias("size"),
        F.count_if("is_sealed").alias("sealed"),
        F.max("offset").alias("offset"),
        F.max("late_us").alias("late_us"),
        F.count_if(F.col("late_us") < 0).alias("ahead"),
    )
    spaces = rows.select("topic", "minute", "space_id").distinct().groupBy("topic", "minute")
    minutes = (
        counted.groupBy("topic", "minute")
        .agg(
            F.sum("events").alias("events"),
            F.sum("size").alias("payload_bytes"),
            F.sum("sealed").alias("sealed"),
            F.max("offset").alias("last_offset"),
            (F.max("late_us") / 1000.0).alias("latency_ms_max"),
            F.sum("ahead").alias("ahead_of_clock"),
            F.sort_array(F.collect_list(F.struct("bucket", F.col("events").alias("count")))).alias("_counts"),
        )
        .join(spaces.agg(F.count("space_id").alias("spaces")), ["topic", "minute"])
        .withColumn("minute", F.timestamp_micros(F.col("minute") * _MINUTE_US))
        .withColumn("date", F.to_date("minute"))
    )
    return minutes.withColumn("_buckets", _percentile_buckets()).withColumns(
        {
            "latency_buckets": F.map_from_entries("_counts"),
            **{f"latency_ms_{rank}": _milliseconds(F.col(f"_buckets.{rank}")) for rank in _RANKS},
        }
    )


_RANKS: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def _percentile_buckets() -> Column:
    """For each rank the first of the sorted ``_counts`` that reaches it: ``latency_buckets.percentile_ms``, all in one pass."""
    none = F.lit(None).cast("int")

    def step(seen: Column, each: Column) -> Column:
        count = seen["count"] + each["count"]
        found = {name: F.when(count >= F.col("events") * rank, each["bucket"]) for name, rank in _RANKS.items()}
        return F.struct(
            count.alias("count"), *(F.coalesce(seen[name], each_).alias(name) for name, each_ in found.items())
        )

    start = F.struct(F.lit(0).cast("bigint").alias("count"), *(none.alias(name) for name in _RANKS))
    return F.aggregate("_counts", start, step)


def _milliseconds(bucket: Column) -> Column:
    return F.when(bucket == 0, 0.0).otherwise(F.pow(F.lit(GROWTH), bucket - 0.5) / 1000)


def _build_minutes(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {_MINUTES.table: shaped(topic_minutes(tables["bronze.events"]), _MINUTES)}


TOPIC_MINUTES: Final = (
    Job(
        name="topic_minutes",
        about="Counts, bytes and latency percentiles by topic and minute.",
        reads=("bronze.events",),
        writes=(_MINUTES,),
        build=_build_minutes,
        partitioning=Partitioning(lambda _: {"bronze.events": InputWindow("written_at")}),
    ),
)


_TRAFFIC: Final = OutputTable(
    table="gold.sync_traffic",
    schema=(
        "hour timestamp, date date, dialect string, partition string, client_id string, events bigint, types bigint,"
        " first_seq bigint, last_seq bigint, delay_ms_mean double, delay_ms_max double"
    ),
    about="One client in one partition and hour: how many events it had committed, and how old they were by then.",
)
_CLIENTS: Final = OutputTable(
    table="gold.sync_clients",
    schema=(
        "client_id string, dialect string, events bigint, partitions bigint, days bigint,"
        " first_written_at timestamp, last_written_at timestamp, last_seq bigint"
    ),
    about="One client: how much it submitted in all, to how many partitions, and when it was last heard of.",
)


def sync_traffic(events: DataFrame) -> DataFrame:
    """By hour of commit. The delay is from the event's own time to its commit: how long it lay on the client, mostly."""
    delay_ms = (F.unix_micros("written_at") - F.unix_micros("ts")) / F.lit(1000.0)
    return (
        events.withColumns(
            {
                "hour": F.date_trunc("hour", "written_at"),
                "date": F.to_date("written_at"),
                "client_id": F.coalesce("client_id", F.lit("")),
                "delay_ms": delay_ms,
            }
        )
        .groupBy("hour", "date", "dialect", "partition", "client_id")
        .agg(
            F.count_distinct("seq").alias("events"),
            F.count_distinct("type").alias("types"),
            F.min("seq").alias("first_seq"),
            F.max("seq").alias("last_seq"),
            F.avg("delay_ms").alias("delay_ms_mean"),
            F.max("delay_ms").alias("delay_ms_max"),
        )
    )


def sync_clients(events: DataFrame) -> DataFrame:
    """Each client, over everything it submitted."""
    return (
        events.withColumn("client_id", F.coalesce("client_id", F.lit("")))
        .groupBy("client_id", "dialect")
        .agg(
            F.count_distinct("seq").alias("events"),
            F.count_distinct("partition").alias("partitions"),
            F.count_distinct(F.to_date("written_at")).alias("days"),
            F.min("written_at").alias("first_written_at"),
            F.max("written_at").alias("last_written_at"),
            F.max("seq").alias("last_seq"),
        )
    )


def _build_traffic(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {_TRAFFIC.table: shaped(sync_traffic(tables["silver.sync_events"]), _TRAFFIC)}


def _build_clients(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {_CLIENTS.table: shaped(sync_clients(tables["silver.sync_events"]), _CLIENTS)}


SYNC_JOBS: Final = (
    Job(
        name="sync_traffic",
        about="What sync clients submitted, by hour, partition and client.",
        reads=("silver.sync_events",),
        writes=(_TRAFFIC,),
        build=_build_traffic,
        partitioning=Partitioning(lambda _: {"silver.sync_events": InputWindow("written_at")}),
    ),
    Job(
        name="sync_clients",
        about="What each sync client submitted in all.",
        reads=("silver.sync_events",),
        writes=(_CLIENTS,),
        build=_build_clients,
    ),
)


STALLED_AFTER_S: Final = 300.0
_LAG: Final = OutputTable(
    table="gold.group_lag",
    schema=(
        "topic string, group string, committed bigint, head_offset bigint, lag bigint, oldest_waiting_at timestamp,"
        " waiting_s double, cursor_at timestamp, idle_s double, state string"
    ),
    about="One group at the end of the run: how many events it has not acknowledged, and how long the oldest has waited.",
)
_RETRIES: Final = OutputTable(
    table="gold.retries",
    schema=(
        "topic string, group string, date date, letters bigint, attempts bigint, retries bigint, attempts_max int,"
        " attempts_mean double, trying_s_mean double, trying_s_max double"
    ),
    about="One group's dead letters of one day: how often they were tried, and over how long.",
)


def moment(time: datetime) -> Column:
    """A time of the run as a column, to the microsecond and whatever the session's zone."""
    whole = int(time.timestamp()) * 1_000_000 + time.microsecond
    return F.timestamp_micros(F.lit(whole))


def group_lag(
    events: DataFrame, cursors: DataFrame, as_of: datetime, *, stalled_after_s: float = STALLED_AFTER_S
) -> DataFrame:
    """
    Where each group stands.

    ``state`` is ``caught_up``; ``behind``; or ``stalled``, when events wait and the cursor has not moved for
    ``stalled_after_s``.

    Args:
        events: ``bronze.events``.
        cursors: ``silver.group_cursors``; ``committed`` is the last acknowledged offset, -1 for none.
        as_of: The run's idea of now.
        stalled_after_s: How long a cursor may stand still while events wait.
    """
    is_waiting = F.col("offset") > F.col("committed")
    topics = (
        events.select("topic", "offset", "written_at")
        .join(cursors.select("topic", "group", "committed"), "topic")
        .groupBy("topic", "group")
        .agg(
            F.max("offset").alias("head_offset"),
            F.min(F.when(is_waiting, F.col("written_at"))).alias("oldest_waiting_at"),
        )
    )
    now = moment(as_of)
    lag = F.greatest(F.lit(0), F.coalesce(F.col("head_offset") - F.col("committed"), F.lit(0)))
    idle_s = F.greatest(F.lit(0.0), now.cast("double") - F.col("cursor_at").cast("double"))
    waiting_s = F.greatest(F.lit(0.0), now.cast("double") - F.col("oldest_waiting_at").cast("double"))
    state = (
        F.when(F.col("lag") == 0, "caught_up").when(F.col("idle_s") > stalled_after_s, "stalled").otherwise("behind")
    )
    return (
        cursors.select("topic", "group", "committed", F.col("at").alias("cursor_at"))
        .join(topics, ["topic", "group"], "left")
        .withColumns({"lag": lag, "idle_s": idle_s})
        .withColumns({"waiting_s": F.when(F.col("oldest_waiting_at").isNotNull(), waiting_s), "state": state})
    )


def retries(letters: DataFrame) -> DataFrame:
    """How often dead letters were tried, by group and day of failing. A letter without attempts (expired, denied) counts none."""
    history = F.from_json("history", "array<struct<at:string,error:string>>")
    times = F.array_compact(F.transform(history, lambda attempt: time_in(attempt["at"])))
    trying_s = F.col("failed_at").cast("double") - F.array_min(times).cast("double")
    return (
        letters.select(
            "topic",
            "group",
            F.to_date("failed_at").alias("date"),
            F.coalesce(F.col("attempts"), F.lit(0)).alias("attempts"),
            F.greatest(F.lit(0.0), trying_s).alias("trying_s"),
        )
        .withColumn("trying_s", F.when(F.col("attempts") > 0, F.col("trying_s")))
        .groupBy("topic", "group", "date")
        .agg(
            F.count("*").alias("letters"),
            F.sum("attempts").alias("sum_attempts"),
            F.sum(F.greatest(F.lit(0), F.col("attempts") - 1)).alias("retries"),
            F.max("attempts").alias("attempts_max"),
            F.avg("attempts").alias("attempts_mean"),
            F.avg("trying_s").alias("trying_s_mean"),
            F.max("trying_s").alias("trying_s_max"),
        )
        .withColumnRenamed("sum_attempts", "attempts")
    )


def _build_group_health(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    stalled_after_s = setting(context, "stalled_after_s", STALLED_AFTER_S)
    lag = group_lag(
        tables["bronze.events"], tables["silver.group_cursors"], context.as_of, stalled_after_s=stalled_after_s
    )
    return {
        _LAG.table: shaped(lag, _LAG),
        _RETRIES.table: shaped(retries(tables["silver.dead_letters"]), _RETRIES),
    }


GROUP_HEALTH: Final = (
    Job(
        name="group_health",
        about="Lag of each group, and how often its dead letters were tried.",
        reads=("bronze.events", "silver.group_cursors", "silver.dead_letters"),
        writes=(_LAG, _RETRIES),
        build=_build_group_health,
    ),
)


POISON_FAILURES: Final = 5
POISON_WINDOW_S: Final = 86_400
_SAMPLES_MAX: Final = 5
_SHAPE_CHARS_MAX: Final = 200
CATEGORIES: Final = ("transient", "resource", "validation", "processing", "coordination", "poison", "system")
_CATEGORIES: Final = OutputTable(
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


def _build_categories(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    found = dead_letter_categories(
        tables["silver.dead_letters"],
        failures=setting(context, "poison_failures", POISON_FAILURES),
        window_s=setting(context, "poison_window_s", POISON_WINDOW_S),
    )
    return {_CATEGORIES.table: shaped(found, _CATEGORIES)}


DEAD_LETTERS: Final = (
    Job(
        name="dead_letter_categories",
        about="Dead letters by kind of failure, with the kinds that are poison.",
        reads=("silver.dead_letters",),
        writes=(_CATEGORIES,),
        build=_build_categories,
    ),
)


JOBS: Final = (*TOPIC_MINUTES, *SYNC_JOBS, *GROUP_HEALTH, *DEAD_LETTERS)
