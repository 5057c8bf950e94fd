"""The temporal and consolidation jobs on a real log: its tables, what they tell it, and that telling comes to an end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from tests.spark_session import TEST_SETTINGS
from tests.unit.cognition.jobs.temporal_support import SPACE, utc
from tests.unit.pipeline.support import Workspace
from tidings.cognition.payloads import HippoEncode, TemporalIngest, payload_of
from tidings.core.events import Event, EventMeta
from tidings.pipeline.jobs.registry import all_jobs

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

JOBS = [job for job in all_jobs() if job.name.startswith(("temporal_", "consolidation_", "erasures"))]
AT = utc("2025-09-01T07:30")
# The log is written now, whenever that is; its moments are to be remembered all the same.
REMEMBERING = {"ttl_days": 40_000}
SETTINGS = msgspec.structs.replace(TEST_SETTINGS, jobs={"temporal_index": REMEMBERING, "temporal_gc": REMEMBERING})


def made(
    topic: str, kind: str, at: datetime, payload: dict[str, Any], event_id: str, trace_id: str | None = None
) -> Event:
    meta = EventMeta(topic=topic, type=kind, space_id=SPACE, event_id=event_id, ts=at, trace_id=trace_id, actor="ada")
    return Event(meta, payload)


def written(name: str, at: datetime, text: str) -> list[Event]:
    """A memory as the write handler tells it: what it was, and when it was, in one trace."""
    encode = HippoEncode(content={"text": text}, space_id=SPACE, occurred_at=at, tags=("home",))
    ingest = TemporalIngest(event_id=f"write-{name}", space_id=SPACE, ts=at, tz="Europe/Berlin", person_id="ada")
    return [
        made("hippo", "HIPPO_ENCODE", at, payload_of(encode), name, f"trace-{name}"),
        made("temporal", "HIPPO_ENCODE", at, payload_of(ingest), f"time-{name}", f"trace-{name}"),
    ]


@pytest.mark.heavy
@pytest.mark.req("F121", "F122")
def test_a_pass_over_a_log_tells_it_once(spark: SparkSession, tmp_path: Path) -> None:
    """
    Written memories become moments in their own zone, patterns, candidates and rollups, told to the log's topics. A second
    pass, which reads what the first one told, tells nothing new.
    """
    workspace = Workspace(tmp_path)
    for week in range(4):
        workspace.append(written(f"m{week}", AT + timedelta(weeks=week - 4), f"The bins went out, number {week}."))
    now = AT + timedelta(days=1)
    asked = {"request_id": "r1", "phrase": "last month", "tz": "Europe/Berlin"}
    workspace.append([made("temporal", "TEMPORAL_RANGE_REQUEST", now, asked, "ask")])
    told: list[list[Event]] = []

    def publish(events: Sequence[Event]) -> bool:
        told[-1] += events
        workspace.append(events)
        return True

    for _ in range(2):
        told.append([])
        report = workspace.pipeline(SETTINGS, publish).run(lambda: spark, JOBS)
        assert [job.error for job in report.failed] == []

    first, second = ({each.meta.event_id for each in events} for events in told)
    kinds = {(each.meta.topic, str(each.meta.type)) for each in told[0]}
    assert kinds == {
        ("temporal", "TEMPORAL_INDEX_BUILT"),
        ("temporal", "TEMPORAL_PATTERNS"),
        ("temporal", "TEMPORAL_RANGE_RESPONSE"),
        ("consolidation", "CONSOLIDATION_DONE"),
    }
    assert second < first
    patterns = next(each.payload for each in told[0] if each.payload.get("scope") == "person")
    assert (patterns["person_id"], patterns["total"], patterns["hour_peak"]) == ("ada", 4, 9)
    assert patterns["weekly_periodicity"] == pytest.approx(0.75)
    answer = next(each.payload for each in told[0] if each.meta.type == "TEMPORAL_RANGE_RESPONSE")
    assert [each["event_id"] for each in answer["candidates"]] == ["m3", "m2", "m1", "m0"]
    hours = [row for row in workspace.rows("gold.temporal_index", "g", "doc_id") if row[0] == "hour"]
    assert hours == [("hour", "m0"), ("hour", "m1"), ("hour", "m2"), ("hour", "m3")]
    assert {row[0] for row in workspace.rows("gold.keep_scores", "decision")} == {"keep"}
    assert workspace.rows("gold.scrub_list", "row_key") == []
