"""Sync traffic is counted by hour, partition and client."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tests.unit.pipeline.jobs.support import SYNC_SCHEMA, at, context, rows_of, table
from tidings.pipeline.jobs.operations import SYNC_JOBS

pytestmark = pytest.mark.spark


def test_an_event_counts_in_each_of_its_partitions_and_once_for_its_client(spark: SparkSession) -> None:
    """Two partitions of one event are two rows of traffic and one event of the client."""

    def row(seq: int, partition: str, client: str | None, at_s: float, delay_s: float = 1.0) -> tuple[object, ...]:
        return (seq, "sync", "A", partition, client, f"e{seq}", "event", at(at_s - delay_s), at(at_s), None)

    events = [row(1, "p1", "c1", 0), row(1, "p2", "c1", 0), row(2, "p1", "c1", 60, 3.0), row(3, "p1", None, 4000)]
    read = {"silver.sync_events": table(spark, events, SYNC_SCHEMA)}
    built = {name: frame for job in SYNC_JOBS for name, frame in job.build(read, context()).items()}
    traffic = rows_of(built["gold.sync_traffic"], "hour", "partition")
    clients = rows_of(built["gold.sync_clients"], "client_id")

    assert [(each["partition"], each["client_id"], each["events"]) for each in traffic] == [
        ("p1", "c1", 2),
        ("p2", "c1", 1),
        ("p1", "", 1),
    ]
    assert (traffic[0]["delay_ms_mean"], traffic[0]["first_seq"], traffic[0]["last_seq"]) == (2000.0, 1, 2)
    assert [(each["client_id"], each["events"], each["partitions"]) for each in clients] == [("", 1, 1), ("c1", 2, 2)]
