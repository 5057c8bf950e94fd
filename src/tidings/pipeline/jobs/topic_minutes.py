"""
``gold.topic_minutes``: how much came in, by topic and minute, and how long it took from happening to being written.

Minutes are those of the event's own time, in UTC. Percentiles come from ``percentile_approx`` with an accuracy of 1000: the
value given stands at most a thousandth of the rows away from the rank asked for, and is one that occurred.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from .columns import shaped
from .job import Job, JobContext, Look, Output, Pieces

__all__ = ["JOBS", "topic_minutes"]

PERCENTILE_ACCURACY: Final = 1000
_OUTPUT: Final = Output(
    table="gold.topic_minutes",
    schema=(
        "topic string, minute timestamp, date date, events bigint, payload_bytes bigint, spaces bigint, sealed bigint,"
        " latency_ms_p50 double, latency_ms_p95 double, latency_ms_p99 double, latency_ms_max double,"
        " ahead_of_clock bigint"
    ),
    about="One topic in one minute of event time: how many events, how large, and how late they were written.",
    replaced_by=("minute",),
)


def topic_minutes(events: DataFrame) -> DataFrame:
    """
    Rates and latency by topic and minute.

    ``ahead_of_clock`` counts the events whose own time lies after their time of writing: somebody's clock is wrong. Their
    negative latencies are part of the percentiles, so that a wrong clock is seen and not smoothed over.
    """
    latency_ms = (F.unix_micros("written_at") - F.unix_micros("ts")) / F.lit(1000.0)
    sized = events.select(
        "topic",
        F.date_trunc("minute", "ts").alias("minute"),
        F.to_date("ts").alias("date"),
        "space_id",
        F.coalesce(F.octet_length("payload"), F.lit(0)).alias("size"),
        F.coalesce(F.col("is_sealed"), F.lit(False)).alias("is_sealed"),
        latency_ms.alias("latency_ms"),
    )
    ranks = F.percentile_approx("latency_ms", [0.5, 0.95, 0.99], PERCENTILE_ACCURACY)
    return (
        sized.groupBy("topic", "minute", "date")
        .agg(
            F.count("*").alias("events"),
            F.sum("size").alias("payload_bytes"),
            F.count_distinct("space_id").alias("spaces"),
            F.count_if("is_sealed").alias("sealed"),
            ranks.alias("ranks"),
            F.max("latency_ms").alias("latency_ms_max"),
            F.count_if(F.col("latency_ms") < 0).alias("ahead_of_clock"),
        )
        .withColumns(
            {
                "latency_ms_p50": F.element_at("ranks", 1),
                "latency_ms_p95": F.element_at("ranks", 2),
                "latency_ms_p99": F.element_at("ranks", 3),
            }
        )
    )


def _build(tables: Mapping[str, DataFrame], context: JobContext) -> Mapping[str, DataFrame]:
    return {_OUTPUT.table: shaped(topic_minutes(tables["bronze.events"]), _OUTPUT)}


JOBS: Final = (
    Job(
        name="topic_minutes",
        about="Counts, bytes and latency percentiles by topic and minute.",
        reads=("bronze.events",),
        writes=(_OUTPUT,),
        build=_build,
        pieces=Pieces(lambda _: {"bronze.events": Look("ts")}),
    ),
)
