"""``tidings pipeline status`` says of each table how far it is, what it cost last, what failed and when, and when it is next due."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from tests.integration.cli.support import invoke
from tests.unit.pipeline.lake_support import archive, records_of, write_table
from tests.unit.pipeline.support import Workspace, event
from tidings.log.segment import encode_line
from tidings.pipeline.state_files import Archived
from tidings.pipeline.status import JobStates
from tidings.pipeline.storage import Storage
from tidings.pipeline.summaries import OWN_DEVICE

AS_OF = "2026-03-02T09:00:00+00:00"


def made(folder: Path) -> Workspace:
    """A log of five records, of which the tables hold four: one by a job that is paced, one by a job that failed since."""
    workspace = Workspace(folder)
    workspace.append(event(number) for number in range(5))
    workspace.lake.begin(workspace.epoch)
    note = {"seq": 4, "batch": 1, "epoch": workspace.epoch}
    write_table(workspace.lake, "bronze.events", "seq bigint", [{"seq": n} for n in (1, 2, 3, 4)], note)
    for name in ("paced", "broken"):
        write_table(workspace.lake, f"gold.{name}", "n bigint", [{"n": 1}], {"seq": 2, "job": name})
    states = JobStates(workspace.lake.storage, workspace.epoch)
    done = {
        "seq": 2,
        "made": 2,
        "ran_at": AS_OF,
        "seconds": 1.5,
        "rows": 1200,
        "days": 1,
        "bytes_read": 7,
    }
    states.update("paced", **done, as_of=AS_OF, every_s=600.0)
    states.update("broken", **done, failed_at="2026-03-02T09:30:00+00:00", problem="division by zero")
    states.update("never", failed_at="2026-03-02T09:31:00+00:00", problem="no such column")
    return workspace


def test_two_runs_at_once_keep_what_the_other_noted(tmp_path: Path) -> None:
    """What a run notes of its jobs leaves what another run noted meanwhile of others."""
    one, other = (JobStates(Storage.of(tmp_path), "e") for _ in range(2))
    one.update("counts", seq=7)
    other.update("sums", seq=8)
    one.reached(9)

    found = JobStates(Storage.of(tmp_path), "e")
    assert (found.of("counts").seq, found.of("sums").seq) == (7, 8)


def test_status_for_programs(tmp_path: Path) -> None:
    """Position, cost, failure and next time of each table, and the jobs that failed, also one that never made a table."""
    workspace = made(tmp_path)
    said = json.loads(invoke("pipeline", "status", "--json", "-w", workspace.folder).stdout)
    tables = {table["name"]: table for table in said["tables"]}
    cost = {"at": AS_OF, "seconds": 1.5, "rows": 1200, "days": 1, "bytes_read": 7, "all_because": None}

    assert (said["seq"], said["pending"]) == (4, 1)
    assert (tables["bronze.events"]["rows"], tables["bronze.events"]["job"], tables["bronze.events"]["last"]) == (
        4,
        None,
        None,
    )
    assert (tables["gold.paced"]["seq"], tables["gold.paced"]["behind"]) == (2, 2)
    assert tables["gold.paced"]["last"] == tables["gold.broken"]["last"] == cost
    assert (tables["gold.paced"]["failed"], tables["gold.paced"]["due"]) == (None, "2026-03-02T09:10:00+00:00")
    assert tables["gold.broken"]["failed"] == {"at": "2026-03-02T09:30:00+00:00", "problem": "division by zero"}
    assert tables["gold.broken"]["due"] == "now"
    assert [failed["job"] for failed in said["failed"]] == ["broken", "never"]


@pytest.mark.parametrize("table", ["bronze.events", "gold.paced"])
def test_a_damaged_table_hides_no_other(tmp_path: Path, table: str) -> None:
    """A table whose own log cannot be read is said to be damaged; what is known of the others is said as ever."""
    workspace = made(tmp_path)
    (log,) = (workspace.lake.folder(table).path / "_delta_log").glob("*1.json")
    log.write_text("no commit")

    said = json.loads(invoke("pipeline", "status", "--json", "-w", workspace.folder).stdout)
    shown = invoke("pipeline", "status", "-w", workspace.folder).stdout

    assert [each["name"] for each in said["tables"]] == ["bronze.events", "gold.broken", "gold.paced"]
    assert {each["name"] for each in said["tables"] if each["problem"]} == {table}
    assert {each["name"]: each["rows"] for each in said["tables"]}["gold.broken"] == 1
    assert f"DAMAGED {table}" in shown


@pytest.mark.parametrize(
    ("gone", "table"),
    [
        ("tables", "bronze.events"),
        ("tables/bronze", "bronze.events"),
        ("tables/gold/paced/_delta_log", "gold.paced"),
        ("lake.json", ""),
    ],
)
def test_what_is_gone_is_no_new_beginning(tmp_path: Path, gone: str, table: str) -> None:
    """Where tables, a table's own log or ``lake.json`` were deleted, status and verify say what helps, and not that a run does."""
    workspace = made(tmp_path)
    archived = msgspec.json.encode(Archived(workspace.epoch, 4, {}))
    workspace.lake.storage.replace("archived.json", encode_line(archived[1:]))
    harmed = workspace.lake.storage.path / gone
    shutil.rmtree(harmed) if harmed.is_dir() else harmed.unlink()

    shown = invoke("pipeline", "status", "-w", workspace.folder)
    verified = invoke("pipeline", "verify", "-w", workspace.folder)

    assert "pipeline repair" in shown.stdout + shown.stderr
    assert f"DAMAGED {table}" in shown.stdout or not table
    assert "run --once" not in shown.stdout
    if table != "gold.paced":  # which verify does not read
        assert "pipeline repair" in verified.stderr
        assert verified.exit_code != 0


@pytest.mark.parametrize(("device", "is_news"), [(OWN_DEVICE, False), ("phone", True)])
def test_what_the_pipeline_published_is_not_yet_to_come(tmp_path: Path, device: str, is_news: bool) -> None:
    """
    Records that only the pipeline itself published are neither yet to come nor does a table wait for them; those of others are,
    and so is everything beside them.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number, device=None if number < 3 else device) for number in range(5))
    workspace.lake.begin(workspace.epoch)
    archive(workspace.lake, records_of(workspace)[:4], epoch=workspace.epoch, batch=1)
    note = {"seq": 2, "batch": 1, "epoch": workspace.epoch}
    write_table(workspace.lake, "silver.events", "seq bigint", [{"seq": n} for n in (1, 2, 3, 4)], note | {"seq": 4})
    write_table(workspace.lake, "silver.group_cursors", "n bigint", [], note)
    write_table(workspace.lake, "bronze.quarantine", "n bigint", [], note)
    write_table(workspace.lake, "gold.counts", "n bigint", [{"n": 1}], note | {"job": "counts"})
    write_table(workspace.lake, "gold.sums", "n bigint", [{"n": 1}], note | {"job": "sums", "seq": 3})
    states = JobStates(workspace.lake.storage, workspace.epoch)
    states.update("counts", seq=3, made=2)

    said = json.loads(invoke("pipeline", "status", "--json", "-w", workspace.folder).stdout)

    assert said["pending"] == (1 if is_news else 0)
    due = "now" if is_news else "with new records"
    assert {(table["due"], table["behind"]) for table in said["tables"] if "gold" in table["name"]} == {
        (due, 1 if is_news else 0)
    }
    assert {(table["due"], table["behind"]) for table in said["tables"] if "gold" not in table["name"]} == {(due, 0)}


def test_status_for_people(tmp_path: Path) -> None:
    """The same as a table, with durations and counts in few characters, and a line for each job that failed."""
    text = invoke("pipeline", "status", "-w", made(tmp_path).folder).stdout
    (paced,) = (line for line in text.splitlines() if "gold.paced" in line)

    for said in ("2026-03-02 09:00:00", "1.5 s", "1.2k rows in 1 day", "at 2026-03-02 09:10:00 of the log"):
        assert said in paced
    assert "FAILED never at 2026-03-02 09:31:00: no such column" in text
    assert "then failed" in text
    assert "the lake holds the log up to seq 4; 1 records are yet to come" in text
