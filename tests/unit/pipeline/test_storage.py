"""A lake lies in a folder or in an object store, and nobody notices which."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from tests.integration.cli.support import invoke
from tests.s3_server import SECRET, new_bucket, options_of
from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.lake_support import archive, records_of
from tests.unit.pipeline.support import Workspace, event
from tidings.core.clock import SYSTEM_CLOCK
from tidings.core.errors import SettingsError
from tidings.pipeline import table_files
from tidings.pipeline.catalogue import query
from tidings.pipeline.errors import LakeBlocked, LakeError, LakeUnreachable
from tidings.pipeline.housekeeping import keep_house
from tidings.pipeline.jobs.registry import choose, jobs_in_sets
from tidings.pipeline.lake import Lake
from tidings.pipeline.schemas import BRONZE_EVENTS, arrow_schema
from tidings.pipeline.scratch import owned_folder
from tidings.pipeline.settings import PipelineSettings
from tidings.pipeline.state_files import Vacuumed, load_archived, load_vacuumed, save_vacuumed
from tidings.pipeline.storage import Storage
from tidings.pipeline.storage_errors import translate_write_errors
from tidings.pipeline.table_files import FileOutput, FileWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAYS = "n bigint, name string, date date"
ROWS = "n bigint, trace_id string"
FIRST, SECOND = date(2026, 3, 1), date(2026, 3, 2)


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty place of either kind."""
    return Storage.of(tmp_path / "lake") if request.param == "folder" else new_bucket(request.getfixturevalue("s3_url"))


def put_days(lake: Lake, rows: list[tuple[int, date]], version: int, days: list[date] | None) -> None:
    """Do what a job by days does, without Spark: a file a day, in the place of these days."""
    schema = arrow_schema(DAYS)
    given = pa.Table.from_pylist([{"n": n, "name": f"n{n}", "date": day} for n, day in rows], schema=schema)
    writer = FileWriter(lake.folder("gold.days"), schema, f"v{version}", is_by_day=True)
    entries = writer.write(iter(given.to_batches()), f"v{version}.parquet").to_pylist()
    lake.commit(
        "gold.days",
        schema,
        lake.adds(entries),
        app="job",
        version=version,
        note={"seq": version},
        replaces="all" if days is None else days,
        is_by_day=True,
    )


def test_a_file_is_there_as_a_whole_or_not_at_all(storage: Storage) -> None:
    """Small files are replaced as a whole; one whose writer fails is not there; a storage can be sent to another process."""
    assert storage.read("a/state.json") is None
    storage.replace("a/state.json", b"old")
    storage.replace("a/state.json", b"new")
    with contextlib.suppress(RuntimeError), storage.writing("a/half") as file:
        file.write(b"half a file")
        raise RuntimeError

    there = pickle.loads(pickle.dumps(storage))
    assert (there.read("a/state.json"), there.sizes(), there.folders()) == (b"new", {"a/state.json": 3}, ["a"])
    storage.delete(["a/state.json", "a/never"])
    assert storage.sizes() == {}


def test_days_are_replaced_and_others_stay(storage: Storage) -> None:
    """Of a table that is partitioned by day only the days named are replaced, the day is read back, and bounds know it."""
    lake = Lake(storage, SYSTEM_CLOCK)
    lake.begin("e1")
    put_days(lake, [(1, FIRST), (2, SECOND), (3, SECOND)], 1, None)
    put_days(lake, [(4, SECOND)], 2, [SECOND])

    rows = query(lake, "select n, name, date from gold.days order by n").rows
    assert rows == ((1, "n1", FIRST), (4, "n4", SECOND))
    assert [file.name for file in lake.files("gold.days", lambda file: file.may_hold("date", SECOND, None))] == [
        f"date={SECOND}/v2.parquet"
    ]
    put_days(lake, [], 3, [FIRST, SECOND])
    assert lake.files("gold.days") == []
    assert Lake(storage, SYSTEM_CLOCK).tables() == ["gold.days"]


def test_rows_without_a_day_are_refused(tmp_path: Path) -> None:
    """A row that belongs to no partition is told of, not dropped."""
    schema = arrow_schema(DAYS)
    writer = FileWriter(Storage.of(tmp_path), schema, "v", is_by_day=True)
    rows = pa.Table.from_pylist([{"n": 1, "name": "a", "date": None}], schema=schema)

    with pytest.raises(ValueError, match="1 rows have no date"):
        writer.write(iter(rows.to_batches()), "f.parquet")


def test_bounds_hold_for_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row group has no bounds those of its file rule nothing out, so that no reader passes over rows that are there."""
    monkeypatch.setattr(table_files, "_ROW_GROUP_BYTES", 1)
    lake = Lake(tmp_path, SYSTEM_CLOCK)
    schema = arrow_schema(ROWS)
    with FileOutput(lake.folder("gold.rows"), "f.parquet", schema) as output:
        for n, text in enumerate(("aa", "zz" + "z" * 5000)):  # of a text that long Parquet keeps no bounds
            output.add(pa.Table.from_pylist([{"n": n, "trace_id": text}], schema=schema))
    lake.commit("gold.rows", schema, lake.adds([output.entry()]), app="a", version=1, note={})

    found = lake.open("gold.rows").to_pyarrow_dataset().to_table(filter=pa.compute.field("trace_id") >= "zz")
    assert found["n"].to_pylist() == [1]
    (file,) = lake.files("gold.rows")
    assert (file.may_hold("trace_id", "zzz", None), file.minimum["n"], file.maximum["n"]) == (True, 0, 1)


@pytest.mark.parametrize("passes", [60, pytest.param(10_000, marks=[pytest.mark.heavy, pytest.mark.timeout(3600)])])
def test_tables_stay_small_however_often_they_are_committed_to(tmp_path: Path, passes: int) -> None:
    """Logs and files of a table that grows and of one that is replaced are as many after many passes as after a few."""
    lake = Lake(tmp_path, SYSTEM_CLOCK)
    lake.begin("e1")
    settings = PipelineSettings(keep_hours=0, compact_files_min=8, checkpoint_commits=5, vacuum_hours=1)
    schema = arrow_schema(ROWS)
    most, now_ns = 0, 0
    for number in range(1, passes + 1):
        rows = pa.Table.from_pylist([{"n": number, "trace_id": "t"}], schema=schema)
        for table, replaces in (("gold.grows", "nothing"), ("gold.replaced", "all")):
            lake.write_rows(
                rows,
                table,
                ROWS,
                app="a",
                version=number,
                note={"seq": number},
                run="r",
                replaces="all" if replaces == "all" else "nothing",
            )
        now_ns += 300 * 1_000_000_000
        keep_house(lake, settings, now_ns=now_ns)
        most = max(most, len(lake.storage.sizes("tables")))

    assert most < 120
    assert query(lake, "select count(*), count(distinct n), max(n) from gold.grows").rows == ((passes, passes, passes),)
    assert query(lake, "select n from gold.replaced").rows == ((passes,),)
    assert lake.note("gold.grows") == lake.note("gold.replaced") == {"seq": passes}


@pytest.mark.parametrize("is_known_idle", [True, False])
def test_old_files_go_though_nothing_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known_idle: bool
) -> None:
    """A run with nothing new starts no Spark, and still deletes old files and old entries of logs when it is time."""
    workspace = Workspace(tmp_path)
    workspace.append(event(number) for number in range(10))
    lake = workspace.lake
    lake.begin(workspace.epoch)
    archive(lake, records_of(workspace), epoch=workspace.epoch, batch=1)
    run = ("pipeline", "run", "--jobs", "none", "--set", "keep_hours=0", "--set", "checkpoint_commits=1")
    first = invoke(*run, "-w", workspace.folder)
    stray = lake.folder("bronze.events").path / "left-by-a-run-that-died.parquet"
    stray.write_bytes(b"half a file")
    os.utime(stray, (0, 0))
    second = invoke(*run, "-w", workspace.folder)
    assert stray.exists()
    tables = ("bronze.events", "silver.events")
    save_vacuumed(lake.storage, Vacuumed(workspace.epoch, dict.fromkeys(tables, 0)))
    if is_known_idle:
        monkeypatch.setattr("tidings.pipeline.status.idle_at", lambda *_: 10)

    third = invoke(*run, "-w", workspace.folder)

    assert [done.exit_code for done in (first, second, third)] == [0, 0, 0]
    assert "nothing new" in third.stdout
    assert "Spark" not in first.stderr + second.stderr + third.stderr
    assert not stray.exists()
    assert all(load_vacuumed(lake.storage, workspace.epoch).at_ns[table] > 0 for table in tables)


def test_housekeeping_works_on_an_object_store(s3_url: str) -> None:
    """Small files are put together, old ones deleted and the log summed up, in a commit that repeats the last note."""
    lake = Lake(new_bucket(s3_url), SYSTEM_CLOCK)
    lake.begin("e1")
    settings = PipelineSettings(keep_hours=0, compact_files_min=4, checkpoint_commits=4, vacuum_hours=0)
    schema = arrow_schema(ROWS)
    for number in range(1, 5):
        rows = pa.Table.from_pylist([{"n": number, "trace_id": "t"}], schema=schema)
        lake.write_rows(
            rows, "gold.rows", ROWS, app="a", version=number, note={"seq": number}, run="r", replaces="nothing"
        )

    done = keep_house(lake, settings, now_ns=1)

    assert (done.compacted_files, done.deleted_files, done.checkpoints) == (4, 4, 1)
    fresh = Lake(lake.storage, SYSTEM_CLOCK)
    assert (fresh.note("gold.rows"), len(fresh.files("gold.rows"))) == ({"seq": 4}, 1)
    assert query(fresh, "select sum(n) from gold.rows").rows == ((10,),)


@pytest.mark.parametrize("place", ["ftp://host/lake", f"s3://key:{SECRET}@bucket/lake"])
def test_an_address_that_will_not_do_is_refused(place: str) -> None:
    """Nobody knows the scheme, or a password stands where everybody sees it."""
    with pytest.raises(SettingsError) as caught:
        Storage.of(place)
    assert SECRET not in str(caught.value)


def test_a_store_that_does_not_answer_is_told_without_secrets() -> None:
    """The error says where and what, may be tried again, and shows no option."""
    options = options_of("http://127.0.0.1:9") | {"max_retries": "0", "retry_timeout": "1s"}
    storage = Storage.of("s3://bucket/lake", options)

    with pytest.raises(LakeUnreachable):
        Lake(storage, SYSTEM_CLOCK).exists("bronze.events")
    with pytest.raises(LakeUnreachable) as caught:
        Lake(storage, SYSTEM_CLOCK).tables()
    assert caught.value.retryable
    assert "s3://bucket/lake" in str(caught.value)
    assert SECRET not in f"{caught.value}{storage!r}"


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [15, pytest.param(500, marks=pytest.mark.heavy)])
def test_three_processes_replace_the_small_files_at_once(tmp_path: Path, rounds: int) -> None:
    """
    ``lake.json``, ``jobs.json``, ``archived.json``, ``positions.json``, ``housekeeping.json``, ``scrub.json`` and an export are whole for
    every reader, while three processes give them new content: no error, and nothing is left behind.
    """
    lake = Lake(tmp_path / "lake", SYSTEM_CLOCK)
    lake.begin("e1")
    spec = BRONZE_EVENTS
    row = pa.Table.from_pylist([{"seq": 3, "topic": "t", "offset": 1}], schema=arrow_schema(spec.schema))
    note = {"epoch": "e1", "seq": 3, "batch": 1}
    lake.write_rows(row, spec.name, spec.schema, app="bronze", version=1, note=note, run="r")
    command = [sys.executable, "-m", "tests.unit.pipeline.replacing_child", str(tmp_path / "lake")]
    children = [
        subprocess.Popen([*command, str(number), str(rounds)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    ended = [child.communicate(timeout=300)[1] for child in children]

    assert (ended, [child.returncode for child in children]) == ([""] * 3, [0] * 3)
    names = {path.name for path in (tmp_path / "lake").iterdir()}
    assert names == {
        "lake.json",
        "jobs.json",
        "archived.json",
        "positions.json",
        "housekeeping.json",
        "scrub.json",
        "export",
        "tables",
    }
    assert load_archived(lake.storage, "e1") == {"t": 1}


def test_a_name_that_is_gone_is_not_taken_for_a_file_in_the_way(tmp_path: Path) -> None:
    """
    A rename that finds no such file says nothing of the file that it was to replace; a file in the way of a folder is still named.
    """
    (tmp_path / "jobs.json").write_text("{}")
    for target, is_blocked in (("jobs.json", False), ("jobs.json/more.json", True)):
        with pytest.raises(LakeError) as raised, translate_write_errors(Storage.of(tmp_path)):
            Path(tmp_path / "never").rename(tmp_path / target)
        assert isinstance(raised.value, LakeBlocked) == is_blocked, target


def test_what_a_killed_writer_left_is_deleted(tmp_path: Path) -> None:
    """
    The half-written file of a process that was killed goes with the next look for old files, and no younger one.
    """
    lake = Lake(tmp_path, SYSTEM_CLOCK)
    lake.begin("e1")
    for name, at_ns in (("jobs.json.1f-3.new", 0), ("lake.json.2-0.new", SYSTEM_CLOCK.now_ns())):
        (tmp_path / name).write_bytes(b"{")
        os.utime(tmp_path / name, ns=(at_ns, at_ns))

    done = keep_house(lake, PipelineSettings(vacuum_hours=0), now_ns=SYSTEM_CLOCK.now_ns())

    assert done.deleted_files == 1
    assert {path.name for path in tmp_path.glob("*.new")} == {"lake.json.2-0.new"}


def test_a_scratch_folder_of_a_killed_process_goes_with_the_next_one(tmp_path: Path) -> None:
    """
    What a killed process left is deleted when another one makes such a folder; that of a living one, and what is no such folder, stays.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    left = Path(child.stdout.readline().strip())
    (left / "checkpoint").mkdir()
    (tmp_path / "t-other").mkdir()
    with owned_folder("t-", within=tmp_path) as mine:
        assert {left, mine, tmp_path / "t-other"} == set(tmp_path.iterdir())
        child.kill()
        child.communicate()
        with owned_folder("t-", within=tmp_path) as second:
            assert {second, mine, tmp_path / "t-other"} == set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == [tmp_path / "t-other"]


_CHILD = """
import sys
from pathlib import Path
from tidings.pipeline.scratch import owned_folder
with owned_folder("t-", within=Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


ODD_FOLDERS = (
    "a#b?c%d [x] {y,z} *ü",
    *(
        pytest.param(name, marks=pytest.mark.heavy)
        for name in ("a#b", "a?b", "a%b", "a b", "a[x]", "a{x,y}", "a*b", "ü")
    ),
)


@pytest.mark.parametrize("name", ["a%20b", "a\\b"])
def test_a_folder_that_delta_rs_cannot_reach_is_refused(tmp_path: Path, name: str) -> None:
    """
    A path that delta-rs takes for another one is named before anything is made; in another folder the lake is made.
    """
    workspace = Workspace(tmp_path / name)
    workspace.append([event(1)])
    run = ("pipeline", "run", "--jobs", "none", "-w", workspace.folder)

    refused = invoke(*run, "--json")

    assert json.loads(refused.stderr.splitlines()[-1])["error"]["code"] == "lake.path_refused"
    assert not (workspace.folder / "lake").exists()
    assert invoke(*run, "--lake", tmp_path / "lake").exit_code == 0
    assert query(Lake(tmp_path / "lake", SYSTEM_CLOCK), "select count(*) from silver.events").rows == ((1,),)
    assert {path.name for path in tmp_path.iterdir()} == {name, "lake"}


@pytest.mark.parametrize("name", ODD_FOLDERS)
def test_a_workspace_may_have_any_name(tmp_path: Path, name: str) -> None:
    """
    What has a meaning in addresses or in patterns of names is only a letter in the name of a folder: runs, queries, verify and repair.
    """
    workspace = Workspace(tmp_path / name)
    workspace.append(event(number) for number in range(3))

    for command in (("run", "--jobs", "none"), ("verify",), ("status",), ("repair", "--dry-run")):
        done = invoke("pipeline", *command, "-w", workspace.folder)
        assert done.exit_code == 0, done.stderr
    assert query(workspace.lake, "select count(*) from silver.events").rows == ((3,),)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    settings = PipelineSettings(compact_files_min=2, vacuum_hours=0, keep_hours=0, checkpoint_commits=1)
    workspace.append([event(9)])
    assert invoke("pipeline", "run", "--jobs", "none", "-w", workspace.folder).exit_code == 0
    kept = keep_house(workspace.lake, settings, now_ns=SYSTEM_CLOCK.now_ns())
    assert kept.compacted_files
    assert kept.deleted_files
    assert workspace.verify().is_equal


@pytest.mark.spark
@pytest.mark.parametrize("name", ODD_FOLDERS)
def test_spark_reads_tables_below_a_folder_of_any_name(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """
    Spark is told which files to read by their names, and takes none of them for a pattern; partitioned tables keep their day.
    """
    lake = Lake(tmp_path / name, SYSTEM_CLOCK)
    lake.begin("e1")
    put_days(lake, [(1, FIRST), (2, SECOND), (3, SECOND)], 1, None)

    rows = lake.read(spark, "gold.days", None, DAYS).orderBy("n").collect()

    assert [tuple(row) for row in rows] == [(1, "n1", FIRST), (2, "n2", SECOND), (3, "n3", SECOND)]


@pytest.mark.spark
@pytest.mark.slow
def test_a_run_on_spark_below_a_folder_of_any_name(spark: SparkSession, tmp_path: Path) -> None:
    """
    Tasks read the log and write tables, and jobs read them, in a workspace whose name means something in addresses and in patterns.
    """
    workspace = Workspace(tmp_path / "a#b [x] {y,z} 100%")
    workspace.append(event(number) for number in range(3))
    settings = msgspec.structs.replace(TEST_SETTINGS, small_rows_max=0, undivided_rows_max=0)
    jobs = choose(jobs_in_sets(), ["topic_minutes"])

    for number in (10, 11):
        assert workspace.pipeline(settings).run(lambda: spark, jobs).failed == ()
        workspace.append([event(number)])
    workspace.pipeline(settings).run(lambda: spark, jobs)

    assert sum(row[0] for row in workspace.rows("gold.topic_minutes", "events")) == 5
    assert workspace.verify().is_equal
    assert [path.name for path in tmp_path.iterdir()] == [workspace.folder.name]
