"""The pipeline's commands, as a person or a script runs them."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.cli.support import invoke, lines
from tests.s3_server import SECRET, new_bucket
from tests.unit.pipeline.support import Workspace, event
from tidings.core.clock import SYSTEM_CLOCK
from tidings.pipeline.bronze import Bronze
from tidings.pipeline.errors import JavaMissing, LakeConflict, SparkFailed
from tidings.pipeline.lake import Lake
from tidings.pipeline.session import Progress, ProgressStep

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def shared(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands run on the session that all tests share; the demo's test starts a JVM as a user's command does."""
    monkeypatch.setattr("tidings.pipeline.session.start_session", lambda *_, **__: spark)
    monkeypatch.setattr("tidings.pipeline.session.stop_session", lambda _: None)


def said(*args: object, code: int = 0) -> Any:
    """What a command prints with ``--json``."""
    done = invoke(*args, "--json")
    assert done.exit_code == code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.usefixtures("shared")
def test_tables_agree_with_the_log_until_it_is_changed(tmp_path: Path) -> None:
    """
    A run fills the tables; status, verify and questions then agree with the log. A log that lost a record is found to
    differ, with exit code 1.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number, f"t{number % 2}") for number in range(40))
    options = ("-w", workspace.folder)

    ran = said("pipeline", "run", "--once", "--jobs", "topic_minutes", *options)

    assert (ran["rows"], ran["until"], ran["silver"]["silver.events"]) == (40, 40, 40)
    assert [job["name"] for job in ran["jobs"]] == ["topic_minutes"]
    assert ran["jobs"][0]["error"] is None
    status = said("pipeline", "status", *options)
    assert (status["seq"], status["pending"]) == (40, 0)
    verdict = said("pipeline", "verify", *options)
    assert verdict["is_equal"]
    assert {stream["stream"]: stream["lake"]["count"] for stream in verdict["streams"]} == {"t0": 20, "t1": 20}
    names = [table["name"] for table in said("table", "list", *options)]
    assert {"bronze.events", "silver.events", "gold.topic_minutes"} <= set(names)
    shown = said("table", "show", "bronze.events", *options)
    assert (shown["rows"], shown["seq"], len(shown["sample"])) == (40, 40, 5)
    query = "select topic, count(*) as n from bronze.events group by 1 order by 1"
    asked = invoke("table", "query", query, *options, "--json").stdout
    assert lines(asked) == [{"topic": "t0", "n": 20}, {"topic": "t1", "n": 20}]
    minutes = lines(invoke("table", "query", "from gold.topic_minutes", *options, "--json").stdout)
    assert sum(row["events"] for row in minutes) == 40

    path = workspace.segments()[0]
    records = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*records[:3], *records[4:]]))

    assert not said("pipeline", "verify", *options, code=1)["is_equal"]


@pytest.mark.heavy  # tests/unit/pipeline/test_repair.py goes through the tool too
@pytest.mark.usefixtures("shared")
def test_a_damaged_lake_is_made_whole(tmp_path: Path) -> None:
    """
    Files that are gone are named, a dry run changes nothing, a repair makes every table whole, and log and lake are equal.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number, f"t{number % 2}") for number in range(40))
    options = ("-w", workspace.folder)
    said("pipeline", "run", "--once", "--jobs", "topic_minutes", *options)
    before = {table: workspace.rows(table, "topic") for table in ("silver.events", "gold.topic_minutes")}
    gone = [workspace.lake.files(table)[0] for table in ("bronze.events", *before)]
    for file in gone:
        Path(file.uri).unlink()

    assert invoke("pipeline", "verify", *options).exit_code == 1
    dry = said("pipeline", "repair", "--dry-run", *options)
    done = said("pipeline", "repair", *options)

    assert [each["file"] for each in dry["files"]] == [each["file"] for each in done["files"]]
    assert {each["file"] for each in done["files"]} == {file.name for file in gone}
    assert (dry["recovered"], done["recovered"]) == (0, gone[0].rows)
    assert (done["rebuilt_jobs"], done["lost"]) == (["topic_minutes"], [])
    assert said("pipeline", "verify", *options)["is_equal"]
    assert {table: workspace.rows(table, "topic") for table in before} == before
    for table in ("silver.segments", "gold.topic_minutes"):
        log = workspace.lake.folder(table).path / "_delta_log"
        max(log.glob("*.json")).write_text("{ no json")

    done = said("pipeline", "repair", *options)

    assert set(done["logs"]) == {"silver.segments", "gold.topic_minutes"}
    assert (done["rebuilt_jobs"], done["rebuilt_silver"]) == (["topic_minutes"], ["silver.segments"])
    assert workspace.rows("gold.topic_minutes", "topic") == before["gold.topic_minutes"]
    assert said("pipeline", "repair", *options)["logs"] == {}
    workspace.append(event(number, f"t{number % 2}") for number in range(40, 50))
    assert said("pipeline", "run", "--once", "--jobs", "topic_minutes", *options)["rows"] == 10
    assert sum(workspace.column("gold.topic_minutes", "events")) == 50
    assert said("pipeline", "verify", *options)["is_equal"]


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("place", "is_folder"),
    [
        ("", False),
        ("tables", False),
        ("tables/bronze", False),
        ("tables/silver/events", False),
        ("lake.json", True),
        ("jobs.json", True),
    ],
    ids=["lake", "tables", "layer", "table", "lake.json", "jobs.json"],
)
def test_something_else_is_in_the_way(tmp_path: Path, place: str, is_folder: bool) -> None:
    """
    Where a file is in a folder's place, or a folder in a file's, a run names it and says to move it away. When that is done, and the
    lake's own is back, the next run is right.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number) for number in range(12))
    run = ("pipeline", "run", "--once", "--jobs", "topic_minutes", "-w", workspace.folder)
    said(*run)
    workspace.append(event(number) for number in range(12, 15))
    blocked, aside = workspace.folder.joinpath("lake", place), tmp_path / "aside"
    blocked.rename(aside)
    blocked.mkdir() if is_folder else blocked.touch()

    told = {command: invoke("pipeline", command, *run[-2:], "--json") for command in ("repair", "verify")}
    failed = invoke(*run, "--json")

    # Nothing depends on what is known of jobs: they would be done again.
    for done in (failed, *(told.values() if place != "jobs.json" else ())):
        error = json.loads(done.stdout or done.stderr)["error"]
        assert (done.exit_code, error["code"]) == (1, "lake.blocked")
        assert error["message"].startswith(f"{blocked}: a {'folder' if is_folder else 'file'} is where")
        assert "move away" in error["hint"]
    blocked.rmdir() if is_folder else blocked.unlink()
    aside.rename(blocked)
    assert said(*run)["until"] == 15
    assert sum(workspace.column("gold.topic_minutes", "events")) == 15
    assert said("pipeline", "verify", *run[-2:])["is_equal"]


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("place", ["", "tables", "tables/silver"])
def test_a_lake_on_a_disk_that_is_not_there(tmp_path: Path, place: str) -> None:
    """
    A link that leads nowhere is no empty lake: every command names it, and once the disk is back the next run is right.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number) for number in range(12))
    run = ("pipeline", "run", "--once", "--jobs", "none", "-w", workspace.folder)
    said(*run)
    workspace.append(event(number) for number in range(12, 15))
    link, disk = workspace.folder.joinpath("lake", place), tmp_path / "disk"
    link.rename(disk)
    link.symlink_to(tmp_path / "unmounted")

    for command in (run[:-2], *(("pipeline", name) for name in ("status", "verify", "repair")), ("table", "list")):
        failed = invoke(*command, *run[-2:], "--json")
        error = json.loads(failed.stdout or failed.stderr)["error"]
        assert (failed.exit_code, error["code"]) == (1, "lake.blocked"), command
        assert error["message"] == f"{link}: a link that leads nowhere"
        assert "mount" in error["hint"]
    disk.rename(tmp_path / "unmounted")
    assert said(*run)["until"] == 15
    assert workspace.column("silver.events", "seq") == list(range(1, 16))


@pytest.mark.usefixtures("shared")
def test_a_folder_where_the_next_commit_has_to_be(tmp_path: Path) -> None:
    """
    It is named, and not taken for a commit of somebody else, which would pass by itself.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number) for number in range(12))
    run = ("pipeline", "run", "--once", "--jobs", "none", "-w", workspace.folder)
    said(*run)
    workspace.append(event(number) for number in range(12, 15))
    folder = workspace.folder / "lake/tables/bronze/events/_delta_log"
    blocked = folder / f"{len(list(folder.glob('*.json'))):020}.json"
    blocked.mkdir()

    failed = invoke(*run, "--json")

    error = json.loads(failed.stdout or failed.stderr)["error"]
    assert (failed.exit_code, error["code"]) == (1, "lake.blocked")
    assert error["message"].startswith(str(blocked))
    blocked.rmdir()
    assert said(*run)["until"] == 15


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("command", ["run", "repair"])
def test_what_this_user_may_not_read_is_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """
    Nothing is made anew in the place of a file that is there: who may read it is what has to be mended.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number) for number in range(12))
    said("pipeline", "run", "--once", "--jobs", "none", "-w", workspace.folder)
    kept = workspace.folder / "lake/lake.json"
    content, read = kept.read_bytes(), Path.read_bytes

    def refuses(path: Path) -> bytes:
        if path.name == kept.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuses)
    failed = invoke("pipeline", command, "-w", workspace.folder, "--json")
    monkeypatch.undo()

    error = json.loads(failed.stdout or failed.stderr)["error"]
    assert (error["code"], error["message"]) == ("lake.unwritable", f"{kept}: Permission denied")
    assert "permissions" in error["hint"]
    assert kept.read_bytes() == content


@pytest.mark.parametrize("is_swallowed", [False, True])
def test_ctrl_c_ends_one_run_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_swallowed: bool) -> None:
    """
    Also if what the process did just then, such as importing a library, swallows it or fails because of it.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number) for number in range(12))

    def interrupted(bronze: Bronze, spark: object, epoch: str, progress: Progress) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if is_swallowed:
            progress(ProgressStep("silver", 0, 1))
        raise AttributeError("partially initialized module 'pandas' has no attribute 'core'")

    monkeypatch.setattr(Bronze, "fill", interrupted)
    done = invoke("pipeline", "run", "--once", "--jobs", "none", "-w", workspace.folder)

    assert done.exit_code == 130
    assert "Traceback" not in done.stderr
    assert "silver" not in done.stderr


@pytest.mark.usefixtures("shared")
def test_a_file_in_the_place_of_a_tables_log(tmp_path: Path) -> None:
    """
    What is wrong within a table is repaired, as the run that met it says.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number) for number in range(12))
    run = ("pipeline", "run", "--once", "--jobs", "topic_minutes", "-w", workspace.folder)
    said(*run)
    log = workspace.folder / "lake/tables/silver/segments/_delta_log"
    log.rename(tmp_path / "aside")
    log.touch()
    workspace.append(event(number) for number in range(12, 15))

    failed = invoke(*run, "--json")
    done = said("pipeline", "repair", *run[-2:])

    error = json.loads(failed.stdout or failed.stderr)["error"]
    assert (failed.exit_code, error["code"]) == (1, "lake.damaged")
    assert "repair" in error["hint"]
    assert list(done["logs"]) == ["silver.segments"]
    assert said(*run)["until"] == 15
    assert sum(workspace.column("gold.topic_minutes", "events")) == 15


@pytest.mark.heavy  # tests/unit/pipeline/test_storage.py goes over a bucket every time
@pytest.mark.usefixtures("shared")
def test_a_lake_in_an_object_store(tmp_path: Path, s3_url: str) -> None:
    """
    With --lake and --storage-option every command works on a bucket as on a folder; the workspace gets no lake, and no key is shown.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number, f"t{number % 2}") for number in range(40))
    bucket = new_bucket(s3_url)
    given = [text for name, value in bucket.options for text in ("--storage-option", f"{name}={value}")]
    options = ("-w", workspace.folder, "--lake", bucket.url, *given)

    ran = said("pipeline", "run", "--once", "--jobs", "topic_minutes", *options)
    workspace.append(event(number, f"t{number % 2}") for number in range(40, 50))
    again = said("pipeline", "run", "--once", "--jobs", "topic_minutes", *options)

    assert (ran["rows"], again["rows"], again["until"]) == (40, 10, 50)
    assert [job["error"] for job in (*ran["jobs"], *again["jobs"])] == [None, None]
    assert said("pipeline", "status", *options)["seq"] == 50
    assert said("pipeline", "verify", *options)["is_equal"]
    asked = invoke("table", "query", "select sum(events) as n from gold.topic_minutes", *options, "--json").stdout
    assert lines(asked) == [{"n": 50}]
    page = tmp_path / "report.html"
    assert said("pipeline", "report", "-o", page, *options)["events"] == 50
    lake = Lake(bucket, SYSTEM_CLOCK)
    file = lake.files("bronze.events")[0]
    file.folder.delete([file.name, *(name for name in file.folder.sizes() if "_delta_log/" in name)])
    done = said("pipeline", "repair", *options)
    assert (list(done["logs"]), done["recovered"], done["lost"]) == (["bronze.events"], file.rows, [])
    assert done["set_aside"] == [str(file.folder)]
    assert said("pipeline", "verify", *options)["is_equal"]
    assert not (workspace.folder / "lake").exists()
    failed = invoke("table", "list", "-w", workspace.folder, "--lake", "s3://nowhere/lake", *given, "--debug")
    assert "s3://nowhere/lake" in failed.stderr
    assert SECRET not in failed.stderr + failed.stdout
    assert SECRET not in page.read_text()


@pytest.mark.usefixtures("shared")
def test_a_backfill_makes_tables_anew(tmp_path: Path) -> None:
    """
    A backfill does a job again for what it was done for, and fills silver from bronze.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number) for number in range(12))
    options = ("--jobs", "topic_minutes", "-w", workspace.folder)
    said("pipeline", "run", *options)
    version = workspace.lake.open("gold.topic_minutes").version()

    again = said("pipeline", "run", *options)
    anew = said("pipeline", "backfill", "--silver", *options)

    assert (again["rows"], again["until"], again["jobs"]) == (0, 12, [])
    assert anew["silver"]["silver.events"] == 12
    assert sum(anew["jobs"][0]["rows"].values()) > 0
    assert workspace.lake.open("gold.topic_minutes").version() == version + 1


@pytest.mark.usefixtures("shared")
def test_a_run_with_nothing_new_loads_neither_spark_nor_the_tables(tmp_path: Path) -> None:
    """
    The second of two runs over the same log says so without importing PySpark, the jobs or the table library, so it takes no
    longer than the tool's start.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append([event(1)])
    run = ("pipeline", "run", "-w", str(workspace.folder), "--json")
    said(*run[:-1])

    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tidings.cli", *run], capture_output=True, text=True, check=True
    )

    assert (json.loads(done.stdout)["rows"], json.loads(done.stdout)["until"]) == (0, 1)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert imported.isdisjoint({"pyspark", "deltalake", "duckdb", "pyarrow", "pandas", "numpy"})


def test_what_may_pass_does_not_end_runs_that_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    With --every a run that another one got in the way of is told, and the next one is made; what cannot pass ends it.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append([event(1)])
    problems = iter([LakeConflict("here", "another run did the same"), SparkFailed("bronze", "no"), JavaMissing(())])

    def run(*_: object, **__: object) -> None:
        raise next(problems)

    monkeypatch.setattr("tidings.pipeline.runner.Pipeline.run", run)
    done = invoke("pipeline", "run", "--every", "1ms", "--jobs", "none", "-w", workspace.folder)

    assert done.exit_code == 1
    assert done.stderr.count("the next one tries again") == 2
    assert "another run did the same" in done.stderr
    assert "no Java was found" in done.stderr


def test_mistakes_are_told_in_a_sentence(tmp_path: Path) -> None:
    """
    An unreachable master, a missing log, a setting that does not exist: each has its code and no traceback.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append([event(1)])
    run = ("pipeline", "run", "-w", workspace.folder)

    for args, code, error in (
        ((*run, "--master", "spark://127.0.0.1:9"), 1, "pipeline.master_unreachable"),
        ((*run, "--remote", "sc://127.0.0.1:9"), 1, "pipeline.master_unreachable"),
        ((*run, "--remote", "http://x"), 2, "cli.usage"),
        ((*run, "--set", "nonsense=1"), 2, "settings.invalid"),
        ((*run, "--set", "driver_memory_mb=1"), 2, "settings.invalid"),
        ((*run, "--every", "soon"), 2, "cli.usage"),
        ((*run, "--with", "nonsense"), 1, "pipeline.unknown_job_set"),
        ((*run, "--with", "cognition", "--jobs", "topic_minutes"), 2, "cli.usage"),
        (("pipeline", "status", "-w", tmp_path / "nowhere"), 3, "workspace.missing"),
        (("pipeline", "explain", "nonsense", "-w", workspace.folder), 1, "pipeline.unknown_job"),
        (("table", "show", "gold.nonsense", "-w", workspace.folder), 1, "lake.unknown_table"),
    ):
        done = invoke(*args, "--json")
        assert done.exit_code == code, done.stderr
        assert json.loads(done.stderr)["error"]["code"] == error


def test_the_tool_starts_without_spark() -> None:
    """
    Importing the commands imports neither PySpark nor anything else that takes long.
    """
    heavy = ["pyspark", "duckdb", "pyarrow", "deltalake", "pandas"]
    code = (
        f"import sys, tidings.cli.pipeline, tidings.cli.table; print([name for name in {heavy} if name in sys.modules])"
    )

    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
