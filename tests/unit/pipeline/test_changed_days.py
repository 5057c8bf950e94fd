"""A job computes what changed since its tables were made, however many commits that took; or all, and then it says why."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from tests.integration.cli.support import invoke
from tests.unit.pipeline.support import Workspace, event
from tidings.core.clock import SYSTEM_CLOCK
from tidings.pipeline.changes import NEVER_MADE, Changes, Plan
from tidings.pipeline.housekeeping import compact
from tidings.pipeline.jobs.job import InputWindow, Job, JobContext, OutputTable, Partitioning
from tidings.pipeline.lake import Lake
from tidings.pipeline.schemas import SILVER_EVENTS, arrow_schema
from tidings.pipeline.settings import PipelineSettings
from tidings.pipeline.status import JobState, JobStates

FIRST = date(2026, 3, 1)
NOW = datetime(2026, 4, 1, tzinfo=UTC)
DAILY = "n bigint, date date"


def job(table: str = SILVER_EVENTS.name, name: str = "daily", **window: Any) -> Job:
    """A job by days, of one table."""
    given = InputWindow("ts" if table == SILVER_EVENTS.name else "date", **window)
    return Job(
        name,
        "",
        (table,),
        (OutputTable("gold.daily", DAILY, ""),),
        lambda *_: {},
        partitioning=Partitioning(lambda _: {table: given}),
    )


def take(lake: Lake, seq: int, day: int) -> None:
    """Commit one event of a day to silver."""
    schema = arrow_schema(SILVER_EVENTS.schema)
    at = datetime(2026, 3, 1, 12, tzinfo=UTC) + timedelta(days=day)
    rows = pa.Table.from_pylist([{"seq": seq, "topic": "t", "type": "A", "ts": at}], schema=schema)
    lake.write_rows(
        rows,
        SILVER_EVENTS.name,
        SILVER_EVENTS.schema,
        app="silver",
        version=(lake.done(SILVER_EVENTS.name, "silver") or 0) + 1,
        note={"seq": seq, "batch": seq},
        run="r",
        replaces="nothing",
    )


def planned(lake: Lake, until: int, given: Job | None = None, state: JobState | None = None, **options: Any) -> Plan:
    """What a run up to a seq has to compute."""
    context = JobContext("e", until, NOW, options.pop("settings", {}))
    is_again = options.pop("is_again", False)
    found = Changes(lake, until, NOW, **options).plan(given or job(), context, state or JobState(), is_again=is_again)
    assert found is not None
    return found


def made(lake: Lake, until: int, given: Job | None = None) -> None:
    """Commit the job's table as of a seq."""
    note = {**planned(lake, until, given).note, "seq": until, "job": (given or job()).name, "as_of": NOW.isoformat()}
    version = (lake.done("gold.daily", "job.daily") or 0) + 1
    rows = pa.Table.from_pylist([], schema=arrow_schema(DAILY))
    lake.write_rows(rows, "gold.daily", DAILY, app="job.daily", version=version, note=note, run="r")


@pytest.mark.parametrize(
    ("commits", "kept_max"), [(60, 5), pytest.param(1000, 100, marks=[pytest.mark.heavy, pytest.mark.timeout(1200)])]
)
def test_only_what_changed_is_computed_after_any_number_of_commits(tmp_path: Path, commits: int, kept_max: int) -> None:
    """
    Many more commits than are kept in memory touch two days of ten, compactions among them: those two days are computed.
    """
    lake = Lake(tmp_path / "lake", SYSTEM_CLOCK, commits_kept_max=kept_max)
    lake.begin("e")
    for seq in range(1, 11):
        take(lake, seq, seq)
    assert planned(lake, 10).why_all == NEVER_MADE
    made(lake, 10)

    for number in range(commits):
        take(lake, 11 + number, 3 + 4 * (number % 2))
        if number % 50 == 49:
            assert compact(lake, SILVER_EVENTS.name, PipelineSettings()) > 1
    found = planned(lake, 10 + commits)

    assert (found.is_all, found.dates) == (False, [FIRST + timedelta(days=3), FIRST + timedelta(days=7)])
    fresh = Lake(tmp_path / "lake", SYSTEM_CLOCK, commits_kept_max=kept_max)
    assert planned(fresh, 10 + commits).dates == found.dates
    assert found.why_all == ""


def cut_off(lake: Lake) -> None:
    """Have the log of silver begin after the position that the job read to."""
    lake.open(SILVER_EVENTS.name).create_checkpoint()
    for path in sorted((lake.folder(SILVER_EVENTS.name).path / "_delta_log").glob("*.json"))[:-1]:
        path.unlink()


def rewrite(lake: Lake) -> None:
    """Have a commit of silver name no days, as a scrub does."""
    note = {**lake.note(SILVER_EVENTS.name), "days": None}
    lake.commit(SILVER_EVENTS.name, arrow_schema(SILVER_EVENTS.schema), (), app="scrub", version=1, note=note)


@pytest.mark.parametrize(
    ("change", "options", "why"),
    [
        (cut_off, {}, "the log of silver.events begins at version 5, and version 3 was read last"),
        (rewrite, {}, "all of silver.events was made anew"),
        (lambda _: None, {"settings": {"half_life": 2}}, "its settings or its columns are others than before"),
        (lambda _: None, {"given": job(name="other")}, "job daily made gold.daily"),
        (lambda _: None, {"given": job(is_whole=True)}, "silver.events has changed, which every day is made from"),
        (lambda _: None, {"is_again": True}, "it was asked for"),
    ],
    ids=["cleaned up", "scrubbed", "settings", "another job", "whole", "asked"],
)
def test_a_plan_that_computes_all_says_why(
    tmp_path: Path, change: Callable[[Lake], None], options: dict[str, Any], why: str
) -> None:
    """
    What does not add up is computed as a whole, with a reason that names the table or the setting.
    """
    lake = Lake(tmp_path / "lake", SYSTEM_CLOCK)
    lake.begin("e")
    for seq in range(1, 4):
        take(lake, seq, seq)
    made(lake, 3)
    for seq in range(4, 6):
        take(lake, seq, seq)
    change(lake)
    take(lake, 6, 1)

    found = planned(Lake(tmp_path / "lake", SYSTEM_CLOCK), 6, **options)

    assert (found.is_all, found.why_all) == (True, why)


def test_a_table_too_large_to_compare_is_named(tmp_path: Path) -> None:
    """
    Two versions of a table that is made anew are compared up to a number of rows; past it all is computed, and the plan says so.
    """
    lake = Lake(tmp_path / "lake", SYSTEM_CLOCK)
    lake.begin("e")
    given = job("gold.kept", is_whole=True, names_days=True)

    def put(version: int, days: int) -> None:
        rows = [{"n": version, "date": FIRST + timedelta(days=day)} for day in range(days)]
        table = pa.Table.from_pylist(rows, schema=arrow_schema(DAILY))
        lake.write_rows(table, "gold.kept", DAILY, app="job.k", version=version, note={"seq": version}, run="r")

    put(1, 4)
    made(lake, 1, given)
    put(2, 5)

    assert len(planned(lake, 2, given, compared_max=9).dates) == 5
    found = planned(lake, 2, given, compared_max=8)
    assert found.why_all == "two versions of gold.kept have 9 rows, and up to 8 are compared"


def test_status_says_why_all_was_computed(tmp_path: Path) -> None:
    """
    ``tidings pipeline status`` has a line for each job that last computed all of history, and with ``--json`` a field.
    """
    workspace = Workspace(tmp_path)
    workspace.append([event(1)])
    assert invoke("pipeline", "run", "--jobs", "none", "-w", tmp_path).exit_code == 0
    made(workspace.lake, 1)
    why = "all of silver.events was made anew"
    JobStates(workspace.lake.storage, workspace.epoch).update("daily", ran_at=NOW.isoformat(), made=1, why_all=why)

    assert f"daily last computed all of history, because {why}" in invoke("pipeline", "status", "-w", tmp_path).stdout
    assert f'"all_because":"{why}"' in invoke("pipeline", "status", "--json", "-w", tmp_path).stdout.replace(": ", ":")
