"""
``gold.sync_traffic``: what clients submitted, by hour, dialect, partition and client.

An event that names several partitions counts once in each of them, as each of them carries it; ``gold.sync_clients`` counts
it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from .columns import shaped
from .job import Job, JobContext, Look, Output, Pieces

__all__ = ["JOBS", "sync_clients", "sync_traffic"]

_TRAFFIC: Final = Output(
    table="gold.sync_traffic",
    schema=(
        "hour timestamp, date date, dialect string, partition string, client_id string, events bigint, types bigint,"
        " first_seq bigint, last_seq bigint, delay_ms_mean double, delay_ms_max double"
    ),
    about="One client in one partition and hour: how many events it had committed, and how old they were by then.",
    replaced_by=("hour",),
)
_CLIENTS: Final = Output(
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


JOBS: Final = (
    Job(
        name="sync_traffic",
        about="What sync clients submitted, by hour, partition and client.",
        reads=("silver.sync_events",),
        writes=(_TRAFFIC,),
        build=_build_traffic,
        pieces=Pieces(lambda _: {"silver.sync_events": Look("written_at")}),
    ),
    Job(
        name="sync_clients",
        about="What each sync client submitted in all.",
        reads=("silver.sync_events",),
        writes=(_CLIENTS,),
        build=_build_clients,
    ),
)
