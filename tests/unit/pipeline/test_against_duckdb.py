"""Bronze and silver say what DuckDB's own JSON reader makes of the raw lines, on logs with ugly content."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace, event
from tidings.core.events import Event
from tidings.log.settings import LogSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

UGLY = [
    "",
    " ",
    "null",
    "{}",
    "42",
    'quote " and \\ slash',
    "ümläut",
    "日本",
    "\u2028",
    "tab\tline\nend",
    "x" * 300,
    '","payload":{"a":1}',
]


def ugly_event(chance: random.Random, number: int) -> Event:
    """An event with something odd in each place that may be odd."""
    meta: dict[str, Any] = {}
    if chance.random() < 0.5:
        meta["actor"] = chance.choice([{"id": number, "payload": {"x": [1]}}, "plain", "7", chance.choice(UGLY[6:8])])
    if chance.random() < 0.3:
        meta["partitions"] = tuple({f"p{chance.randrange(5)}", "ü"})
    if chance.random() < 0.3:
        meta["extra"] = {chance.choice(UGLY): chance.choice(UGLY), "payload": {"deep": None}}
    if chance.random() < 0.2:
        meta["ttl_sec"] = chance.randrange(1000)
    payload = {
        chance.choice(UGLY): chance.choice([*UGLY, 1e300, -0.0, 2**53, None, [1, {"a": []}], True]) for _ in range(3)
    }
    return event(
        number, chance.choice(["a", "b.c", "sync"]), payload, space_id=chance.choice(["s", "shared:ü"]), **meta
    )


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.heavy)])
def test_the_tables_are_what_the_raw_lines_say(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    """
    Column by column, the tables hold what an independent reading of the segments gives.
    """
    chance = random.Random(seed)
    workspace = Workspace(tmp_path, LogSettings(journal_bytes=1 << 20, segment_lines_max=chance.randrange(3, 40)))
    for first in (0, 100):
        workspace.append(ugly_event(chance, first + number) for number in range(100))
        workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    with duckdb.connect() as duck:
        duck.execute("set timezone = 'UTC'")
        meta = "STRUCT(topic VARCHAR, event_id VARCHAR, space_id VARCHAR, ts TIMESTAMPTZ, partitions VARCHAR[], ttl_sec BIGINT)"
        raw = f"read_json('{workspace.layout.wal}/*.jsonl', format='newline_delimited', columns={{'offset':'BIGINT','seq':'BIGINT','meta':'{meta}','payload':'JSON'}})"
        files = [file.uri for file in workspace.lake.files("bronze.events")]
        lines = duck.execute(
            'select meta.topic, "offset", seq, meta.event_id, meta.space_id, meta.ts::varchar, coalesce(meta.partitions, []),'
            f" meta.ttl_sec, payload::json::varchar, (meta.ts at time zone 'UTC')::date::varchar from {raw} order by seq"
        ).fetchall()
        rows = duck.execute(
            'select topic, "offset", seq, event_id, space_id, ts::varchar, partitions, ttl_sec, json(payload)::varchar,'
            " date::varchar from read_parquet(?) order by seq",
            [files],
        ).fetchall()

    assert len(rows) == 200
    assert rows == lines
    assert workspace.column("silver.events", "seq") == [row[2] for row in rows]
    spread = sum(len(row[6]) for row in rows if row[0] == "sync")
    assert len(workspace.rows("silver.sync_events")) == spread
    assert workspace.verify().is_equal
