"""Repairing from the command line: the plan first, a question, copies of what leaves, and a log that opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.cli.support import fill, invoke, lines


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A log of 25 records in ``demo`` whose first segment has an altered byte in its fifth line."""
    workspace = tmp_path / "w"
    fill(workspace, ("demo", 25), ("other", 5))
    path = workspace / ".bus" / "wal" / "demo.00000001.jsonl"
    data = bytearray(path.read_bytes())
    data[data.index(b'"demo-4"') + 2] ^= 1
    path.write_bytes(data)
    return workspace


def files(workspace: Path) -> dict[str, bytes]:
    root = workspace / ".bus"
    found = (path for path in root.rglob("*") if path.is_file() and path.name != "lock" and "index" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_a_sound_log_needs_no_repair(tmp_path: Path) -> None:
    """Repairing what is whole changes nothing and ends with 0."""
    fill(tmp_path, ("demo", 3))
    before = files(tmp_path)

    done = invoke("log", "repair", "--yes", "-w", tmp_path)

    assert (done.exit_code, done.stdout) == (0, "no repair is needed\n")
    assert files(tmp_path) == before


def test_a_dry_run_shows_the_plan_and_changes_nothing(damaged: Path) -> None:
    """The plan names the damage and what would be set aside, and ends with 1."""
    before = files(damaged)

    done = invoke("log", "repair", "--dry-run", "-w", damaged)
    plan = json.loads(invoke("log", "repair", "--dry-run", "--json", "-w", damaged).stdout)

    assert done.exit_code == 1
    assert "demo.00000001.jsonl" in done.stdout
    assert "acknowledged records would not be in the log" in done.stdout
    assert plan["carried_out"] is False
    assert plan["plan"]["is_needed"] is True
    assert files(damaged) == before


def test_without_a_terminal_nothing_is_repaired_unasked(damaged: Path) -> None:
    """Where nobody can be asked, ``--yes`` is required."""
    before = files(damaged)

    done = invoke("log", "repair", "-w", damaged)

    assert done.exit_code == 2
    assert "no terminal to ask on" in done.stderr
    assert files(damaged) == before


def test_a_repaired_log_opens_and_nothing_was_destroyed(damaged: Path) -> None:
    """After a repair the log is sound and takes events, and the damaged bytes lie where the command says."""
    bad = (damaged / ".bus" / "wal" / "demo.00000001.jsonl").read_bytes()
    epoch = json.loads((damaged / ".bus" / "meta.json").read_bytes())["epoch"]

    done = invoke("log", "repair", "--yes", "--json", "-w", damaged)

    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)["result"]
    assert result["is_new_epoch"]
    assert result["epoch"] != epoch
    kept = b"".join(path.read_bytes() for path in Path(result["folder"]).rglob("*demo*") if path.is_file())
    assert bad[bad.index(b'"demo-3"') + 200 :][:100] in kept
    assert invoke("log", "verify", "-w", damaged).exit_code == 0
    assert len(lines(invoke("log", "read", "other", "--json", "-w", damaged).stdout)) == 5
    (note,) = lines(invoke("log", "read", "audit", "--json", "-w", damaged).stdout)
    assert note["meta"]["type"] == "cli.repair"
    assert damaged / note["payload"]["folder"] == Path(result["folder"])
    more = invoke("log", "append", "demo", "--type", "T", "--space", "s", "--payload", "{}", "-w", damaged)
    assert more.exit_code == 0


def test_people_are_told_where_things_are(damaged: Path) -> None:
    """The folder with the copies is named, and it exists."""
    shown = invoke("log", "repair", "--yes", "-w", damaged).stdout

    (line,) = (line for line in shown.splitlines() if line.startswith("set aside in "))
    assert (Path(line.removeprefix("set aside in ")) / "manifest.json").exists()
    assert "repaired; the log goes on after seq 30" in shown


def test_a_missing_log_is_not_repaired(tmp_path: Path) -> None:
    """There is nothing to repair where there is no log."""
    assert invoke("log", "repair", "--dry-run", "-w", tmp_path / "none").exit_code == 3


def test_a_workspace_that_lost_its_description_is_found_and_repaired(tmp_path: Path) -> None:
    """With ``meta.json`` damaged verify says so, and repair gives the log a new one with all its records."""
    fill(tmp_path, ("demo", 5))
    (tmp_path / ".bus" / "meta.json").write_bytes(b"{")

    verified = invoke("log", "verify", "-w", tmp_path)
    repaired = invoke("log", "repair", "--yes", "-w", tmp_path)

    assert verified.exit_code == 1
    assert "meta.json" in verified.stdout
    assert repaired.exit_code == 0, repaired.stderr
    assert len(lines(invoke("log", "read", "demo", "--json", "-w", tmp_path).stdout)) == 5
