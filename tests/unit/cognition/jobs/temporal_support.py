"""Rows for the temporal and the consolidation jobs, and a way to run the jobs one after the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, StructType

from tidings.cognition.jobs.consolidation_memories import CONSOLIDATION_ERASURES_JOBS, CONSOLIDATION_MEMORIES_JOBS
from tidings.cognition.jobs.consolidation_rollups import CONSOLIDATION_ROLLUPS_JOBS
from tidings.cognition.jobs.temporal_index import TEMPORAL_TOLD_JOBS
from tidings.pipeline.jobs.job import Job, JobContext

EVENTS_SCHEMA: Final = (
    "topic string, offset bigint, seq bigint, event_id string, type string, space_id string, ts timestamp,"
    " written_at timestamp, partitions array<string>, payload string, actor string, trace_id string, idem_key string,"
    " ttl_sec bigint, device string, band string, priority string, extra string, is_sealed boolean, date date"
)
SPACE: Final = "shared:home"


def utc(written: str) -> datetime:
    """A time in UTC, from ISO 8601 without an offset."""
    return datetime.fromisoformat(written).replace(tzinfo=UTC)


class Events:
    """Events one after the other, as ``silver.events`` has them."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self._offsets: dict[str, int] = {}

    def add(
        self,
        topic: str,
        kind: str,
        ts: datetime,
        payload: Mapping[str, Any] | str | None = None,
        *,
        event_id: str | None = None,
        space_id: str = SPACE,
        written_at: datetime | None = None,
        actor: str | None = None,
        trace_id: str | None = None,
        device: str | None = None,
        band: str | None = None,
        is_sealed: bool = False,
    ) -> str:
        """Add one; returns its id."""
        seq, offset = len(self.rows) + 1, self._offsets.get(topic, -1) + 1
        self._offsets[topic] = offset
        event_id = event_id or f"e{seq}"
        said = payload if payload is None or isinstance(payload, str) else json.dumps(payload)
        self.rows.append(
            (
                *(topic, offset, seq, event_id, kind, space_id, ts, written_at or ts, [], said, actor, trace_id),
                *(None, None, device, band, None, None, is_sealed, ts.date()),
            )
        )
        return event_id

    def memory(self, ts: datetime, text: str | None = None, **more: Any) -> str:
        """Something encoded on topic ``hippo``; keywords that ``add`` does not know go into the payload."""
        known = ("event_id", "space_id", "written_at", "actor", "trace_id", "device", "band", "is_sealed")
        payload = {name: value for name, value in more.items() if name not in known}
        payload.setdefault("occurred_at", ts.isoformat())
        if text is not None:
            payload["content"] = {"text": text}
        given = {name: value for name, value in more.items() if name in known}
        return self.add("hippo", "HIPPO_ENCODE", ts, payload, **given)

    def frame(self, spark: SparkSession) -> DataFrame:
        """The events as a table."""
        return spark.createDataFrame(self.rows, EVENTS_SCHEMA)


def context(as_of: datetime, **settings: Any) -> JobContext:
    """A run at that time."""
    return JobContext(epoch="e1", until=10_000, as_of=as_of, settings=settings)


def run(jobs: Sequence[Job], tables: Mapping[str, DataFrame], at: JobContext) -> dict[str, DataFrame]:
    """
    The tables after the jobs ran in that order; each is held, so that the next job does not work it out again.

    Tables that only put the events in another shape are made of the events that are given.
    """
    known = dict(tables)
    shaped: dict[str, DataFrame] = {}
    if "silver.events" in known:
        session = known["silver.events"].sparkSession
        wanted = {table for job in jobs for table in job.reads}
        told = (*TEMPORAL_TOLD_JOBS, CONSOLIDATION_ROLLUPS_JOBS[0])
        for job in (*CONSOLIDATION_ERASURES_JOBS, *CONSOLIDATION_MEMORIES_JOBS, *told):
            own = {each.table: session.createDataFrame([], each.schema) for each in job.writes}
            if not wanted.isdisjoint(own):
                built = job.build({**known, **own}, at)
                shaped |= {table: frame.localCheckpoint() for table, frame in built.items()}
    for job in jobs:
        for output in job.writes:
            if output.table in job.reads and output.table not in known:
                session = next(iter(known.values())).sparkSession
                known[output.table] = session.createDataFrame([], output.schema)
        built = job.build({name: shaped[name] if name in shaped else known[name] for name in job.reads}, at)
        assert set(built) == {output.table for output in job.writes}
        for output in job.writes:
            held = built[output.table].localCheckpoint()
            assert types_of(held.schema) == types_of(StructType.fromDDL(output.schema)), output.table
            known[output.table] = held
    return known


def types_of(kind: DataType) -> Any:
    """A type without what may be null in it."""
    if isinstance(kind, StructType):
        return [(field.name, types_of(field.dataType)) for field in kind.fields]
    if isinstance(kind, ArrayType):
        return [types_of(kind.elementType)]
    return kind.simpleString()


def rows_of(frame: DataFrame, *order: str) -> list[dict[str, Any]]:
    """The rows as dictionaries, in the order of some columns, their times in UTC."""
    ordered = frame.orderBy(*order) if order else frame
    return [_in_utc(row.asDict(recursive=True)) for row in ordered.collect()]


def _in_utc(value: Any) -> Any:
    # Spark hands times over in the zone of this process, without saying so.
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    if isinstance(value, dict):
        return {name: _in_utc(each) for name, each in value.items()}
    return [_in_utc(each) for each in value] if isinstance(value, list) else value
