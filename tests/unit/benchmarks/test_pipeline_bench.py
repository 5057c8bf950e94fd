"""The pipeline's bench: its log is a true one, and everybody who is compared finds every event."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.pipeline import bench, bench_commands, bench_costs
from benchmarks.pipeline_filling import GrowingLog, Kinds
from benchmarks.pipeline_rivals import Rival, measure_duckdb
from benchmarks.running import in_child
from benchmarks.scales import TINY
from tidings.log import Query
from tidings.log.embedded import open_log
from tidings.log.reading import records


@pytest.mark.parametrize(("kinds", "topics"), [(Kinds.PLAIN, 8), (Kinds.LIFE, 7)])
async def test_the_log_is_one_that_a_writer_left(tmp_path: Path, kinds: Kinds, topics: int) -> None:
    """What is written directly, and then written on, opens without repair and reads back whole, in order of time."""
    with GrowingLog(tmp_path, 2_500, kinds) as made:
        made.write(2_500)
        made.write(300)

    log = await open_log(tmp_path)
    found = [record async for record in records(log, Query())]
    await log.close()

    assert [record.seq for record in found] == list(range(1, 2_801))
    assert len({record.meta.event_id for record in found}) == 2_800
    assert len({record.topic for record in found}) == topics
    assert [record.meta.ts for record in found] == sorted(record.meta.ts for record in found)
    assert all(record.meta.ts <= record.meta.written_at for record in found)
    assert 230 <= made.bytes / 2_800 <= 290


def test_a_rival_finds_every_event(tmp_path: Path) -> None:
    """What DuckDB makes of the log has as many rows, and nothing is left behind."""
    with GrowingLog(tmp_path / "log", 1_500) as made:
        made.write(1_500)

    found = measure_duckdb(Rival(str(tmp_path / "log"), str(tmp_path), 1_500))

    assert (found.rows, found.silver_rows) == (1_500, 1_500)
    assert 0 < found.bronze_s[0] < found.total_s[0]
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.heavy  # seven sessions of Spark, from cold
@pytest.mark.timeout(900)
def test_the_benches_give_figures_for_all_their_cases(tmp_path: Path) -> None:
    """The benches give distinct rows with real figures, each target with a verdict, and leave nothing behind."""
    rows = [row for each in (bench, bench_commands, bench_costs) for row in each(in_child, TINY, str(tmp_path), False)]

    assert {row.bench for row in rows} == {"pipeline"}
    assert len({row.case for row in rows}) == len(rows)
    assert sum(row.target != "" for row in rows) == 10
    assert sum(row.case.startswith("job ") for row in rows) == 24
    assert all(math.isfinite(row.ours) and row.ours > 0 for row in rows if row.target)
    assert all((row.verdict == "info") == (row.target == "") for row in rows)
    assert list(tmp_path.iterdir()) == []
