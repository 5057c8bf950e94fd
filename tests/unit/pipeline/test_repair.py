"""What of the lake is gone or cannot be read comes back, from the log and from what else the lake has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from tests.unit.pipeline.lake_support import all_records, archive
from tests.unit.pipeline.support import Workspace, event
from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.embedded import open_log
from tidings.log.record import Record
from tidings.pipeline.lake import Lake
from tidings.pipeline.log_place import LogPlace
from tidings.pipeline.repair import BronzeRepair, Damage, find_damage, repair_bronze
from tidings.pipeline.schemas import BRONZE_EVENTS, QUARANTINE, SILVER_EVENTS, arrow_schema
from tidings.pipeline.settings import PipelineSettings
from tidings.pipeline.storage import Storage


def records_of(workspace: Workspace) -> list[Record]:
    """All that the log holds."""

    async def read() -> list[Record]:
        log = await open_log(workspace.folder, workspace.log_settings)
        try:
            return await all_records(log)
        finally:
            await log.close()

    return asyncio.run(read())


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A log of forty records in two topics, and a bronze of three files that holds them all."""
    made = Workspace(tmp_path)
    made.append(event(number, f"t{number % 2}") for number in range(40))
    archive(made.lake, records_of(made), epoch=made.epoch, batch=1, files=3)
    made.lake.begin(made.epoch)
    return made


def repair(workspace: Workspace) -> tuple[Damage, BronzeRepair]:
    """Find what is the matter with the lake, and repair bronze."""
    lake = workspace.lake
    damage = find_damage(lake)
    place = LogPlace(Storage.of(workspace.folder))
    return damage, repair_bronze(lake, place, damage, PipelineSettings(), run="r", now_ns=SYSTEM_CLOCK.now_ns())


def bronze_files(lake: Lake) -> list[Path]:
    """The files of bronze."""
    return [Path(file.uri) for file in lake.files(BRONZE_EVENTS.name)]


def flip(path: Path, at: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "bytes instead of"),
        (lambda path: flip(path, path.stat().st_size - 20), "cannot be read"),
    ],
    ids=["gone", "shorter", "changed"],
)
def test_a_damaged_file_is_made_anew_from_the_log(workspace: Workspace, harm: object, problem: str) -> None:
    """A file that is gone, cut short or changed is found; its records come back, and log and lake are equal."""
    path = bronze_files(workspace.lake)[1]
    harm(path)  # type: ignore[operator]

    damage, done = repair(workspace)

    assert [problem in each.problem for each in damage.files[BRONZE_EVENTS.name]] == [True]
    assert (done.recovered, done.healed, done.lost) == (13, 0, [])
    assert workspace.verify().is_equal
    assert workspace.column(BRONZE_EVENTS.name, "seq") == list(range(1, 41))
    assert find_damage(workspace.lake).is_whole
    assert workspace.lake.note(BRONZE_EVENTS.name)["batch"] == 1  # the next run goes on where the last one ended
    assert repair(workspace)[1] == BronzeRepair()


def test_what_only_the_lake_had_is_told(workspace: Workspace) -> None:
    """Records that the log has dropped come back from silver; those that are nowhere are named, by seq, here and in the quarantine."""
    lake = workspace.lake
    kept, lost = lake.files(BRONZE_EVENTS.name)[:2]
    entry = lake.copy_file(kept, SILVER_EVENTS.name, "copy.parquet")
    schema = arrow_schema(SILVER_EVENTS.schema)
    lake.commit(SILVER_EVENTS.name, schema, lake.adds([entry]), app="silver", version=1, note={"seq": 40})
    for topic in ("t0", "t1"):
        assert workspace.retain(topic, 0, archived={"t0": 9, "t1": 9}) == 1
    Path(kept.uri).unlink()
    Path(lost.uri).unlink()

    damage, done = repair(workspace)

    assert damage.missing_count == kept.rows + lost.rows
    held = set(workspace.column(BRONZE_EVENTS.name, "seq"))
    gone = {seq for first, last in done.lost for seq in range(first, last + 1)}
    assert gone
    assert gone | held == set(range(1, 41))
    assert not gone & held
    rows = workspace.rows(QUARANTINE.name, "reason", "first_seq", "last_seq")
    assert {row[1:] for row in rows if row[0].startswith("lost")} == set(done.lost)
    assert all(each.is_equal for each in workspace.verify().streams)


def test_a_line_that_is_whole_again_comes_back(workspace: Workspace, tmp_path: Path) -> None:
    """A record that was quarantined, because its segment was damaged, is taken up once the segment is restored."""
    segment = workspace.segments()[0]
    lines = segment.read_bytes().splitlines(keepends=True)
    seqs = [record.seq for record in records_of(workspace) if record.topic == "t0"]
    damaged = Workspace(tmp_path)
    known = [record for record in records_of(damaged) if record.seq != seqs[2]]
    lake = Lake(tmp_path / "other", SYSTEM_CLOCK)
    archive(lake, known, epoch=damaged.epoch, batch=1)
    lake.begin(damaged.epoch)
    row: dict[str, Any] = {
        "file": str(segment.relative_to(workspace.layout.wal)),
        "byte_offset": len(b"".join(lines[:2])),
        "topic": "t0",
        "reason": "a line's checksum does not match",
        "line": "",
        "line_bytes": len(lines[2]) - 1,
        "epoch": damaged.epoch,
    }
    stays = row | {"byte_offset": row["byte_offset"] + 3}
    rows = pa.Table.from_pylist([row, stays], schema=arrow_schema(QUARANTINE.schema))
    lake.write_rows(rows, QUARANTINE.name, QUARANTINE.schema, app="bronze", version=1, note={"seq": 40}, run="r")

    damage = find_damage(lake)
    place = LogPlace(Storage.of(workspace.folder))
    done = repair_bronze(lake, place, damage, PipelineSettings(), run="r", now_ns=1)

    assert damage.is_whole
    assert (done.recovered, done.healed, done.lost) == (1, 1, [])
    assert find_damage(lake).missing == []
    assert sum(file.rows for file in lake.files(QUARANTINE.name)) == 1
