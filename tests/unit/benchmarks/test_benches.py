"""Every bench runs to its end on a few events, finds what it wrote, and reports in the agreed shape."""

from __future__ import annotations

import asyncio
import json
import math
import tomllib
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHES, main
from benchmarks.baselines import BareGroupCommit
from benchmarks.filling import fill, id_of, partition_of
from benchmarks.measuring import Taken, percentiles
from benchmarks.publish_many import Ours, measure_ours
from benchmarks.replay import Replay, measure_replay
from benchmarks.report import at_least, at_most, noted
from benchmarks.running import MeasurementFailed, in_child, in_process
from benchmarks.scales import TINY
from tidings.core.events import Event, EventMeta
from tidings.log import Duplicate, Query
from tidings.log.embedded import open_log
from tidings.log.reading import records


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name == "publish_one" else pytest.param(name, marks=pytest.mark.heavy)
        for name in BENCHES
        if not name.startswith("pipeline")  # see test_pipeline_bench.py
    ],
)
def test_a_bench_gives_figures_for_all_its_cases(name: str, tmp_path: Path) -> None:
    """A bench gives distinct rows under its own name, all with real figures, and leaves nothing behind."""
    rows = list(BENCHES[name](in_process, TINY, str(tmp_path), False))

    assert rows
    assert {row.bench for row in rows} == {name}
    assert len({row.case for row in rows}) == len(rows)
    assert all(math.isfinite(row.ours) and row.ours > 0 for row in rows)
    assert all((row.verdict == "info") == (row.target == "") for row in rows)
    assert list(tmp_path.iterdir()) == []
    if name == "bus":
        judged = {row.case for row in rows if row.verdict in ("pass", "miss", "unsure")}
        assert judged >= set(_rows_of_requirements()), (
            "what the requirements say is measured is measured, with a verdict"
        )


def _rows_of_requirements() -> list[str]:
    """The rows of the bus's bench that docs/requirements.toml names."""
    measured = tomllib.loads((Path(__file__).parents[3] / "docs/requirements.toml").read_text())["F"]["measured"]
    named = [text for text in measured.values() if text.startswith("`python -m benchmarks --only bus`, row")]
    assert len(named) == 4
    return [row for text in named for row in text.split("`")[3::2] if row != "publish"]


@pytest.mark.slow
def test_the_command_prints_and_keeps_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command measures in processes of their own, prints JSON that names machine and scale, and keeps it."""
    results = tmp_path / "results"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = ["--tiny", "--json", "--only", "publish_one", "--dir", str(scratch), "--results", str(results)]

    status = main(options)

    printed = json.loads(capsys.readouterr().out)
    (kept,) = results.iterdir()
    assert status == 0
    assert printed == json.loads(kept.read_text())
    assert printed["scale"] == "tiny"
    assert printed["machine"]["cores"] >= 1
    assert {row["bench"] for row in printed["rows"]} == {"publish_one"}
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_the_table_shows_every_row_and_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json a table comes out, with a verdict on each target and what ran beside."""
    main(["--tiny", "--only", "publish_one", "--dir", str(tmp_path), "--results", str(tmp_path / "results")])

    shown = capsys.readouterr().out
    assert shown.count("<= 1.5 x raw") == 4
    assert "load before" in shown
    assert "Other processes used" in shown


def test_a_child_gives_what_the_function_gives(tmp_path: Path) -> None:
    """A measurement in a process of its own sees its case and returns its result."""
    case = Ours(folder=str(tmp_path), events=300, warm_up=10, in_flight=20, topics=3, variant="producer ids")

    result = in_child(measure_ours, case)

    assert result.events == 300
    assert result.taken.wall_s > 0
    assert result.settled_cpu_s >= result.taken.cpu_s > 0


def test_a_child_that_fails_is_reported(tmp_path: Path) -> None:
    """A measurement that ends without a result raises what it said."""
    with pytest.raises(MeasurementFailed, match="FileNotFoundError"):
        in_child(measure_ours, Ours(folder=str(tmp_path / "missing"), events=1, warm_up=0, in_flight=1))


async def test_a_filled_log_is_one_that_a_writer_left(tmp_path: Path) -> None:
    """What is written directly opens without repair, reads back whole, and knows its ids and partitions."""
    fill(tmp_path, 2_500, has_partitions=True)

    log = await open_log(tmp_path)
    found = [record async for record in records(log, Query())]
    named = [record.seq async for record in records(log, Query(partitions=(partition_of(7),)))]
    again = await log.append(
        Event(EventMeta("orders", "ORDER_PLACED", "shared:shop", id_of(42), partitions=(partition_of(42),)), {"n": 42})
    )
    await log.close()

    assert [record.seq for record in found] == list(range(1, 2_501))
    assert [record.payload["n"] for record in found] == list(range(1, 2_501))
    assert named == list(range(7, 2_501, 100))
    assert again == Duplicate(42, 41, id_of(42))


def test_replays_agree_on_what_they_read(tmp_path: Path) -> None:
    """Records, payloads and raw lines are as many, and the checksums say that all were looked at."""
    fill(tmp_path, 1_200, has_partitions=True)

    plain, payloads, raw = (
        measure_replay(Replay(str(tmp_path), how, False, False))
        for how in ("records", "records and payloads", "raw lines")
    )

    assert plain.records == payloads.records == raw.records == 1_200
    assert plain.checksum == payloads.checksum == sum(range(1, 1_201))


async def test_the_bare_group_commit_survives_a_cancelled_waiter(tmp_path: Path) -> None:
    """The baseline is no cheaper for being wrong: one cancelled publisher does not take the others along."""
    bare = BareGroupCommit(tmp_path / "lines")
    publishers = [asyncio.create_task(bare.append({}, {"n": n})) for n in range(20)]
    await asyncio.sleep(0)
    publishers[3].cancel()

    answers = await asyncio.gather(*publishers, return_exceptions=True)
    bare.close()

    assert isinstance(answers[3], asyncio.CancelledError)
    assert [answer for n, answer in enumerate(answers) if n != 3] == [n + 1 for n in range(20) if n != 3]
    assert len((tmp_path / "lines").read_bytes().splitlines()) == 20


def test_percentiles_are_of_the_sorted_latencies() -> None:
    """The order in which latencies came does not matter, and they are given in microseconds."""
    found = percentiles([n * 1000 for n in reversed(range(100))])

    assert (found.p50, found.p95, found.p99) == (50, 95, 99)


@pytest.mark.parametrize(
    ("others_cores", "wall_s", "is_quiet"),
    [(0.1, 1.0, True), (0.5, 1.0, False), (None, 1.0, False), (0.0, 0.01, False)],
)
def test_only_a_round_known_to_be_undisturbed_is_quiet(
    others_cores: float | None, wall_s: float, is_quiet: bool
) -> None:
    """Much foreign load, no knowledge of it, or too short a round: not quiet."""
    assert Taken(wall_s, 1.0, others_cores, 0.0, 0).is_quiet is is_quiet


@pytest.mark.parametrize(
    ("ours", "least", "most"), [(9.0, "miss", "pass"), (10.0, "pass", "pass"), (11.0, "pass", "miss")]
)
def test_a_target_is_met_on_its_bound(ours: float, least: str, most: str) -> None:
    """Both kinds of target include their bound."""
    row = noted("bench", "case", "unit", ours)

    assert at_least(row, 10.0).verdict == least
    assert at_most(row, 10.0).verdict == most
