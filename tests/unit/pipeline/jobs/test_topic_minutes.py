"""Rates and latencies by topic and minute are those that can be counted by hand."""

from __future__ import annotations

import random

import duckdb
import pytest
from pyspark.sql import SparkSession

from tests.unit.pipeline.jobs.support import Stream, at, context, rows_of
from tidings.pipeline.jobs.operations import TOPIC_MINUTES, topic_minutes
from tidings.pipeline.latency_buckets import bucket_of, percentile_ms
from tidings.pipeline.schemas import columns_of

pytestmark = pytest.mark.spark


def test_counts_bytes_and_latency_by_minute(spark: SparkSession) -> None:
    """Events of one topic and minute are one row; a sealed payload counts as an event without bytes."""
    stream = Stream()
    stream.add("X", {"a": 1}, at_s=0, written_s=0.010)
    stream.add("X", {"a": 22}, at_s=59.9, written_s=59.920)
    stream.add("X", None, at_s=30, written_s=30.5)
    stream.add("X", {"a": 1}, at_s=86_400, written_s=60.0, space_id="s2")
    stream.add("X", {"a": 1}, at_s=1, topic="other")

    (job,) = TOPIC_MINUTES
    table = job.build({"bronze.events": stream.frame(spark)}, context())["gold.topic_minutes"]
    first, second, other = rows_of(table, "topic", "minute")

    assert (first["topic"], first["events"], first["sealed"], first["spaces"]) == ("actions", 3, 1, 1)
    assert first["payload_bytes"] == len('{"a": 1}') + len('{"a": 22}')
    assert (first["latency_ms_p50"], first["latency_ms_p99"]) == pytest.approx((20.0, 500.0), rel=0.025)
    assert (first["latency_ms_max"], first["last_offset"]) == (500.0, 2)
    assert first["latency_buckets"] == {bucket_of(ms): 1 for ms in (10.0, 20.0, 500.0)}
    assert first["minute"] == at(0)
    # Its own clock is a day ahead; it is counted when it was written.
    assert (second["minute"], second["events"], second["ahead_of_clock"]) == (at(60), 1, 1)
    assert (second["latency_buckets"], second["latency_ms_p50"]) == ({0: 1}, 0.0)
    assert (other["topic"], other["events"]) == ("other", 1)
    assert table.columns == [name for name, _ in columns_of(job.writes[0].schema)]


def test_agrees_with_an_independent_count(spark: SparkSession) -> None:
    """DuckDB counts, sums and ranks the same on random rows, minute by minute; and so it does with all minutes added up."""
    chance = random.Random(7)
    stream = Stream()
    for _ in range(500):
        happened = chance.uniform(0, 600)
        stream.add(
            "X",
            {"n": chance.randrange(10**6)},
            at_s=round(happened, 3),
            written_s=round(happened + chance.expovariate(20), 3),
            topic=chance.choice(["a", "b"]),
        )
    events = stream.frame(spark).toArrow()
    found = topic_minutes(stream.frame(spark)).toArrow()

    with duckdb.connect() as database:
        database.execute("set timezone='UTC'")
        database.register("events", events)
        database.register("found", found)
        expected = database.sql(
            """
            select topic, date_trunc('minute', written_at) as m, count(*), sum(strlen(payload)),
                   quantile_disc((epoch_us(written_at) - epoch_us(ts)) / 1000.0, 0.5)
            from events group by all order by all
            """
        ).fetchall()
        got = database.sql(
            "select topic, minute, events, payload_bytes, latency_ms_p50 from found order by all"
        ).fetchall()
        counts = database.sql(
            "select e.key, sum(e.value)::bigint from (select unnest(map_entries(latency_buckets)) as e from found) group by all"
        ).fetchall()
        ((median,),) = database.sql(
            "select quantile_disc((epoch_us(written_at) - epoch_us(ts)) / 1000.0, 0.5) from events"
        ).fetchall()

    assert [row[:4] for row in got] == [row[:4] for row in expected]
    assert [row[4] for row in got] == pytest.approx([row[4] for row in expected], rel=0.025)
    assert percentile_ms(dict(counts), 0.5) == pytest.approx(median, rel=0.025)
