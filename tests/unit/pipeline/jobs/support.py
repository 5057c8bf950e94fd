"""Rows for the learning jobs: events written down shortly, as the tables hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from tidings.pipeline.jobs.job import JobContext

START: Final = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)  # a Monday
EVENTS_SCHEMA: Final = (
    "topic string, offset bigint, seq bigint, event_id string, type string, space_id string, ts timestamp,"
    " written_at timestamp, partitions array<string>, payload string, actor string, trace_id string, idem_key string,"
    " ttl_sec bigint, device string, band string, priority string, extra string, is_sealed boolean, date date"
)
CURSORS_SCHEMA: Final = "topic string, group string, committed bigint, segment bigint, at timestamp, epoch string"
LETTERS_SCHEMA: Final = (
    "topic string, group string, offset bigint, seq bigint, event_id string, error string, category string,"
    " attempts int, failed_at timestamp, history string"
)
SYNC_SCHEMA: Final = (
    "seq bigint, topic string, dialect string, partition string, client_id string, event_id string, type string,"
    " ts timestamp, written_at timestamp, project_id string"
)


def at(seconds: float) -> datetime:
    """So many seconds after the start."""
    return START + timedelta(seconds=seconds)


class Stream:
    """Writes events one after the other; seqs and offsets count up as a log's do."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self._offsets: dict[str, int] = {}

    def add(
        self,
        kind: str,
        payload: Mapping[str, Any] | str | None,
        *,
        at_s: float,
        written_s: float | None = None,
        space_id: str = "s1",
        topic: str = "actions",
        trace_id: str | None = None,
        event_id: str | None = None,
    ) -> int:
        """Add an event; returns its seq."""
        seq = len(self.rows) + 1
        offset = self._offsets.get(topic, -1) + 1
        self._offsets[topic] = offset
        said = payload if payload is None or isinstance(payload, str) else json.dumps(payload)
        ts = at(at_s)
        self.rows.append(
            (
                *(topic, offset, seq, event_id or f"e{seq}", kind, space_id, ts),
                *(at(at_s if written_s is None else written_s), [], said, None, trace_id, None, None, None, None),
                *(None, None, payload is None, ts.date()),
            )
        )
        return seq

    def frame(self, spark: SparkSession) -> DataFrame:
        """The events as a table."""
        return spark.createDataFrame(self.rows, EVENTS_SCHEMA)


def context(as_of_s: float = 0, **settings: Any) -> JobContext:
    """A run at that time."""
    return JobContext(epoch="e", until=10_000, as_of=at(as_of_s), settings=settings)


def rows_of(frame: DataFrame, *order: str) -> list[dict[str, Any]]:
    """The rows as dictionaries, in the order of some columns, with times in UTC."""
    ordered = frame.orderBy(*order) if order else frame
    rows = [row.asDict(recursive=True) for row in ordered.collect()]
    # Spark hands times out without a zone, in the machine's own.
    return [
        {name: value.astimezone(UTC) if isinstance(value, datetime) else value for name, value in row.items()}
        for row in rows
    ]


def table(spark: SparkSession, rows: Sequence[tuple[Any, ...]], schema: str) -> DataFrame:
    """Rows as a table; also none."""
    return spark.createDataFrame(list(rows), schema)
