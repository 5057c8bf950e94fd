"""Retention from the command line: a plan first, dropping only when told, and a record of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.support import fill, invoke, lines
from tidings.log.embedded.cursors import StoredCursor, encode_cursor


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A log whose topic ``demo`` has two sealed segments and an open one, and ``other`` one of each."""
    fill(tmp_path / "w", ("demo", 25), ("other", 15))
    return tmp_path / "w"


def plan(workspace: Path, *args: object) -> dict[str, Any]:
    done = invoke("log", "retention", *args, "--json", "-w", workspace)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def dropped(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(each["topic"], each["segment"]) for each in found["decisions"] if each["drops"]]


def kept_offsets(workspace: Path, topic: str) -> list[int]:
    return [record["offset"] for record in lines(invoke("log", "read", topic, "--json", "-w", workspace).stdout)]


def test_without_yes_only_the_plan_is_shown(workspace: Path) -> None:
    """The plan names what may go and why the rest stays, and nothing is touched."""
    found = plan(workspace, "--max-bytes", "demo=0")

    assert dropped(found) == [("demo", 1), ("demo", 2)]
    assert (found["carried_out"], found["records"]) == (False, 20)
    reasons = {(each["topic"], each["segment"]): each["reason"] for each in found["decisions"]}
    assert reasons["demo", 3] == "it is the active segment"
    assert reasons["other", 1] == "no retention rule"
    assert kept_offsets(workspace, "demo") == list(range(25))


def test_yes_drops_and_leaves_a_record(workspace: Path) -> None:
    """With ``--yes`` the planned segments are gone, and the topic ``audit`` says what was done and by whom."""
    found = plan(workspace, "--max-bytes", "demo=0", "--yes")

    assert found["carried_out"]
    assert kept_offsets(workspace, "demo") == list(range(20, 25))
    assert kept_offsets(workspace, "other") == list(range(15))
    note, ended = lines(invoke("log", "read", "audit", "--json", "-w", workspace).stdout)
    assert ended["payload"] == {"outcome": "done", "audit_seq": note["seq"]}
    assert note["meta"]["type"] == "cli.retention"
    assert note["meta"]["actor"].startswith("cli:uid-")
    assert [(each["topic"], each["segment"]) for each in note["payload"]["dropped"]] == [("demo", 1), ("demo", 2)]
    assert invoke("log", "verify", "-w", workspace).exit_code == 0


def test_a_rule_for_all_topics_yields_to_a_topics_own(workspace: Path) -> None:
    """A bare value holds for every topic that has none of its own."""
    found = plan(workspace, "--max-bytes", "0", "--max-bytes", "demo=1GB")

    assert dropped(found) == [("other", 1)]


def test_young_records_stay(workspace: Path) -> None:
    """Nothing goes by age that is younger than the limit."""
    assert dropped(plan(workspace, "--max-age-days", "1")) == []
    assert "nothing may go" in invoke("log", "retention", "--max-age-days", "1", "-w", workspace).stdout


@pytest.mark.parametrize(
    ("cursor", "goes", "reason"),
    [
        (encode_cursor(StoredCursor(committed=9)), [("demo", 1)], "group 'worker' has not passed it"),
        (b'{"crc":"00000000","committed":9}\n', [], "the place of group 'worker' cannot be read"),
        (b'{"committed": 9}', [], "the place of group 'worker' cannot be read"),
    ],
    ids=["whole", "damaged", "without a checksum"],
)
def test_a_group_holds_what_it_has_not_passed(
    workspace: Path, cursor: bytes, goes: list[tuple[str, int]], reason: str
) -> None:
    """A segment stays while a group has records of it to read; a cursor that cannot be read holds everything."""
    offsets = workspace / ".bus" / "offsets"
    offsets.mkdir()
    (offsets / "demo__worker.json").write_bytes(cursor)

    found = plan(workspace, "--max-bytes", "demo=0")

    assert dropped(found) == goes
    assert any(reason in each["reason"] for each in found["decisions"])


def test_a_lake_that_may_lack_records_holds_them(workspace: Path) -> None:
    """Where a lake is kept, nothing goes that this tool does not know to be in it."""
    (workspace / "lake").mkdir()

    found = plan(workspace, "--max-bytes", "0", "--yes")

    assert dropped(found) == []
    assert kept_offsets(workspace, "demo") == list(range(25))


def lose_a_file(lake: Path) -> None:
    next(lake.glob("tables/bronze/events/*.parquet")).unlink()


def lose_a_commit(lake: Path) -> None:
    max(lake.glob("tables/bronze/events/_delta_log/*.json")).unlink()


def lose_the_tables(lake: Path) -> None:
    shutil.rmtree(lake / "tables")


def lose_the_disk(lake: Path) -> None:
    lake.rename(lake.with_name("elsewhere"))
    lake.symlink_to(lake.with_name("unmounted"))


@pytest.mark.parametrize("lose", [lose_a_file, lose_a_commit, lose_the_tables, lose_the_disk])
def test_nothing_goes_on_the_word_of_a_lake_that_is_not_what_it_was(
    workspace: Path, lose: Callable[[Path], None]
) -> None:
    """What a lake noted that it holds lets segments go only while its table does hold it: the log may have the last copy."""
    assert invoke("pipeline", "run", "--once", "--jobs", "none", "-w", workspace).exit_code == 0
    rule = ("--max-bytes", "demo=0")
    assert dropped(plan(workspace, *rule)) == [("demo", 1), ("demo", 2)]
    lose(workspace / "lake")

    done = invoke("log", "retention", *rule, "--yes", "-w", workspace)

    if lose is lose_the_disk:
        assert "dropped: 0 segments" in done.stdout
    else:
        assert (done.exit_code, done.stderr.count("error: "), done.stderr.count("repair")) == (1, 1, 1)
    assert kept_offsets(workspace, "demo") == list(range(25))


def test_the_plan_is_a_table_for_people(workspace: Path) -> None:
    """People see each segment's fate and reason, and how to carry it out."""
    shown = invoke("log", "retention", "--max-bytes", "demo=0", "-w", workspace).stdout

    assert "may go" in shown
    assert "it is the active segment" in shown
    assert "--yes carries it out" in shown


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--max-bytes", "0", "--yes", "--dry-run"),
        ("--max-bytes", "much"),
        ("--max-bytes", "0", "--max-bytes", "1"),
        ("--max-age-days", "0"),
        ("--max-age-days", "nan"),
    ],
)
def test_rules_that_make_no_sense_are_refused(workspace: Path, args: tuple[str, ...]) -> None:
    """A rule that is missing, malformed or contradicted ends with 2 and drops nothing."""
    done = invoke("log", "retention", *args, "-w", workspace)

    assert done.exit_code == 2
    assert kept_offsets(workspace, "demo") == list(range(25))


def test_retention_makes_no_workspace(tmp_path: Path) -> None:
    """A wrong path is an error also for the command that would write."""
    done = invoke("log", "retention", "--max-bytes", "0", "--yes", "-w", tmp_path / "none")

    assert done.exit_code == 3
    assert not (tmp_path / "none").exists()
