"""The learning jobs on a real log: from segments to tables, and back to the log as events, until there is no more to say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import duckdb
import pytest
from pyspark.sql import SparkSession

from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.jobs.support import at
from tidings.core.events import Event, EventMeta
from tidings.log.embedded.opening import open_log
from tidings.log.interface import Appended, Query
from tidings.log.reading import records
from tidings.log.settings import LogSettings
from tidings.pipeline.jobs.registry import all_jobs
from tidings.pipeline.lake import Lake
from tidings.pipeline.report import write_report
from tidings.pipeline.runner import Pipeline
from tidings.pipeline.serving import LakeArchive
from tidings.testing import VirtualClock

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

OURS = frozenset(
    {
        *("topic_minutes", "group_health", "dead_letter_categories", "sync_traffic", "sync_clients", "erasures"),
        *("learning_actions", "learning_ranker", "learning_predictions", "learning_drift", "learning_fit"),
        *("learning_quality", "learning_gate_rows", "learning_gate", "learning_bus", "learning_told"),
    }
)
AGAIN = frozenset(
    {
        *("erasures", "learning_told"),
        *("learning_actions", "learning_ranker", "learning_predictions", "learning_drift", "learning_fit"),
        "learning_quality",
    }
)
"""Those that could be moved by what was told."""
SETTINGS = LogSettings(journal_bytes=1 << 20, segment_lines_max=50)


def history() -> list[Event]:
    """Thirty decisions whose confidence tells the outcome, with affect before and predictions beside them."""
    made: list[Event] = []

    def add(kind: str, payload: dict[str, object], at_s: float, topic: str = "actions") -> None:
        made.append(Event(EventMeta(topic, kind, "s1", f"e{len(made)}", at(at_s)), payload))

    for n in range(30):
        confidence = (n * 7 % 30) / 30
        add("AFFECT_ANNOTATED", {"arousal": 0.65, "valence": 0.2}, n * 60, "affect")
        add("ACTION_DECISION", {"plan_id": f"p{n}", "confidence": confidence, "action": "lamp"}, n * 60 + 1)
        add("CORTEX_PREDICTION", {"plan_id": f"p{n}", "heads": {"ok": {"value": confidence}}}, n * 60 + 1, "cortex")
        add("ACTION_EXECUTED", {"plan_id": f"p{n}", "status": "OK" if confidence > 0.5 else "FAILED"}, n * 60 + 2)
    return made


async def append(workspace: Path, events: Sequence[Event]) -> int:
    """Append events as the log's writer; how many were new."""
    log = await open_log(workspace, SETTINGS)
    try:
        return sum(isinstance(verdict, Appended) for verdict in await log.append_many(list(events)))
    finally:
        await log.close()


@pytest.mark.heavy
@pytest.mark.req("F124")
def test_from_segments_to_knobs_and_quiet_again(spark: SparkSession, tmp_path: Path) -> None:
    """The jobs of this family fill their tables, tell the log once, and a run after that finds nothing new to tell."""
    jobs = [job for job in all_jobs() if job.name in OURS]
    assert {job.name for job in jobs} == OURS
    asyncio.run(append(tmp_path, history()))
    told: list[int] = []

    def publish(events: Sequence[Event]) -> bool:
        told.append(asyncio.run(append(tmp_path, events)))
        return True

    for number in range(3):
        pipeline = Pipeline(tmp_path, TEST_SETTINGS, clock=VirtualClock(), run=f"run{number}", publish=publish)
        report = pipeline.run(lambda: spark, [job for job in jobs if number == 0 or job.name in AGAIN])
        assert report.failed == ()
        told.append(-1)
    first, second, third = _between(told)
    assert sum(first) > 0
    # The second run sees what the first one said, and may add to it; the third has nothing left to say.
    assert sum(third) == 0
    assert sum(second) <= sum(first)

    lake = Lake(tmp_path / "lake", VirtualClock())
    with duckdb.connect() as database:
        files = [file.uri for file in lake.files("gold.learning_actions")]
        counted = database.sql("select count(*), sum(y)::int from read_parquet(?)", params=[files]).fetchall()
    assert counted == [(30, 14)]
    facts = write_report(lake, tmp_path / "report.html")
    assert facts.events >= 120
    assert [head for _, head, *_ in facts.heads] == ["*", "ok"]

    async def compare() -> None:
        log = await open_log(tmp_path, SETTINGS)
        archived = LakeArchive(lake).read(Query(since=0), limit=10_000, bytes_max=64 << 20).records
        committed = [record async for record in records(log, Query(until=archived[-1].seq))]
        assert archived == committed
        assert len(archived) >= 120
        await log.close()

    asyncio.run(compare())


def _between(told: list[int]) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for count in told:
        if count < 0:
            runs.append([])
        else:
            runs[-1].append(count)
    return runs[:-1]
