"""Logs that are ugly on purpose: each table against DuckDB's own computation over the raw files."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.properties.pipeline_logs import DAMAGES, damage, events_of, give_up
from tests.properties.pipeline_oracle import RawLog, differences
from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.keys import DerivedKeys
from tidings.log.settings import LogSettings
from tidings.pipeline.jobs.registry import all_jobs, choose

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

JOBS = choose(all_jobs(), ["topic_minutes", "group_health", "dead_letter_categories"])
KIND: dict[str, Any] = {"type": "MADE", "topic": "busy", "space_id": "shared:home", "event_id": "e", "payload": {}}


def kind(copies: int, **fields: Any) -> dict[str, Any]:
    """So many events of a kind."""
    return {**KIND, "partitions": (), **fields, "copies": copies}


@pytest.mark.heavy
def test_something_of_everything(spark: SparkSession, tmp_path: Path) -> None:
    """
    With each kind of damage, a sealed space, five megabytes at once, late and repeated events, every table is right.
    """
    workspace = Workspace(
        tmp_path,
        LogSettings(journal_bytes=1 << 20, segment_lines_max=40),
        AesGcmEncryptor(DerivedKeys(b"\x07" * 32, spaces=("secret",))),
    )
    raw = RawLog()
    early = list(
        events_of(
            [
                kind(
                    90, payload={"text": 'grüße \u2028 日本 \U0001f600 \\" \x00'}, actor={"a": 1, "payload": {"b": '"'}}
                ),
                kind(5, event_id="ünï ✓", topic="quiet", space_id="secret", payload={"pin": 1234}),
                kind(3, event_id="s", topic="sync", actor="phone-1", partitions=("p1", "p2")),
            ],
            0,
            0,
        )
    )
    workspace.append(early)
    raw.take(workspace)
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark, JOBS)
    reached = workspace.pipeline(TEST_SETTINGS).reached()
    assert workspace.retain("busy", 0, archived={"busy": 1 << 40}) == 2
    later = events_of(
        [
            kind(100, event_id="late", ts=datetime(2001, 1, 1, tzinfo=UTC), payload={"n": 1.5e-7}),
            kind(2, event_id="early", ts=datetime(2036, 1, 1, tzinfo=UTC), extra={"x": [1, None]}, priority=3),
            kind(1, event_id="old", ts=datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)),
            kind(3, event_id="w", topic="sync.projects", actor="web", partitions=("proj",)),
            kind(3, event_id="l", topic="sync.legacy", actor="7", partitions=("old",)),
        ],
        10_000,
        None,
    )
    workspace.append([*later, *early[:30]])
    give_up(workspace, [("disk full", 3, 1), ("boom 7", 20, 3), ("connection lost", 40, 2), ("invalid 'a'", 41, 1)])
    for number, how in enumerate(DAMAGES):
        damage(workspace, how, 13 * number + 5, reached)
    raw.take(workspace)

    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark, JOBS)

    assert report.bronze.quarantined == len(DAMAGES) + 1  # one was cut in two
    assert report.failed == ()
    ids = workspace.column("bronze.events", "event_id")
    assert len(ids) > len(set(ids)), "some ids came twice"
    assert True in workspace.column("bronze.events", "is_sealed")
    assert differences(workspace, raw) == {}


@pytest.mark.heavy
def test_one_topic_with_most_and_one_key_with_all(spark: SparkSession, tmp_path: Path) -> None:
    """
    Nine events of ten in one topic, all of one client in one partition, a record a segment: every table is right.
    """
    workspace = Workspace(tmp_path, LogSettings(journal_bytes=1 << 20, segment_lines_max=1))
    kinds = [
        kind(90, event_id="b", topic="sync", actor="one", partitions=("p",)),
        kind(10, event_id="q", topic="quiet", actor="one", partitions=("p",)),
    ]
    workspace.append(events_of(kinds, 0, None))
    raw = RawLog()
    raw.take(workspace)

    workspace.pipeline(TEST_SETTINGS).run(lambda: spark, JOBS)

    assert len(workspace.segments()) == 100
    assert differences(workspace, raw) == {}
