"""
The same command on this machine's cores, on a real standalone cluster, and through a Spark Connect server: the same tables.

No Java of the machine is in sight of any of the processes: master, workers, executors, server and driver all run on the one
that comes as a package.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.pipeline_support import SECONDS_MAX, cluster, ended, environment, tool
from tests.spark_session import TEST_SETTINGS, connect_address
from tests.unit.pipeline.support import Workspace, event
from tidings.log.settings import LogSettings
from tidings.pipeline.jobs.registry import all_jobs, choose

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

COUNT = 160
JOBS = ["topic_minutes", "group_health"]
RUN = ("pipeline", "run", "--once", "--jobs", ",".join(JOBS))
TABLES = ("bronze.events", "silver.events", "silver.sync_events", "gold.topic_minutes")
SMALL_EXECUTORS = ("--set", "spark.executor.memory=512m", "--set", "small_rows_max=0", "--set", "undivided_rows_max=0")


@pytest.fixture(scope="module")
def local(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A log, and the tables that this machine's own cores make of it."""
    folder = tmp_path_factory.mktemp("local")
    workspace = Workspace(folder / "ws", LogSettings(journal_bytes=1 << 20, segment_lines_max=20))
    topics = ("t0", "t0", "t1", "sync")
    workspace.append(
        event(number, topics[number % 4], partitions=(f"p{number % 3}", "all"), actor=f"client-{number % 2}")
        for number in range(COUNT)
    )
    shutil.copytree(workspace.folder, folder / "copy")
    workspace.pipeline(TEST_SETTINGS).run(lambda: spark, choose(all_jobs(), JOBS))
    assert workspace.verify().is_equal
    return workspace


def copy_of(local: Workspace, folder: Path) -> Workspace:
    """The same log without a lake."""
    shutil.copytree(local.folder.with_name("copy"), folder / "ws")
    return Workspace(folder / "ws", local.log_settings)


def content(workspace: Workspace) -> dict[str, Any]:
    """What the tables hold, in any order, and what counts and checksums say of log and lake."""
    verdict = workspace.verify()
    assert verdict.is_equal
    tables: dict[str, Any] = {table: workspace.rows(table) for table in TABLES}
    return {**tables, "streams": [(each.stream, each.lake) for each in verdict.streams]}


@pytest.mark.heavy
def test_one_master_and_two_workers(local: Workspace, tmp_path: Path) -> None:
    """
    On a standalone cluster of three processes, by one option, the tables are those of the local run.
    """
    workspace = copy_of(local, tmp_path)
    with cluster(tmp_path / "spark") as (address, _):
        options = ("--master", address, *SMALL_EXECUTORS, "-w", workspace.folder)
        ran = tool(*RUN, *options, env=environment(tmp_path, has_java=False))

    assert (ran["rows"], ran["until"], [job["error"] for job in ran["jobs"]]) == (COUNT, COUNT, [None, None])
    assert content(workspace) == content(local)


@pytest.mark.heavy
def test_a_spark_connect_server(spark: SparkSession, local: Workspace, tmp_path: Path) -> None:
    """
    Through Spark Connect, with no JVM on this side, the tables are those of the local run.
    """
    workspace = copy_of(local, tmp_path)
    options = ("--remote", connect_address(spark), "-w", workspace.folder)

    ran = tool(*RUN, *options, env=environment(tmp_path, has_java=False))

    assert (ran["rows"], ran["until"], [job["error"] for job in ran["jobs"]]) == (COUNT, COUNT, [None, None])
    assert content(workspace) == content(local)


@pytest.mark.heavy
def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    """
    When a worker and its executor die while a run is writing, the run ends right or is told to have failed; the next is right.
    """
    workspace = Workspace(tmp_path / "ws", LogSettings(journal_bytes=1 << 22))
    workspace.append(event(number, payload={"text": f"{number} " * 60}) for number in range(30_000))
    env = environment(tmp_path, has_java=False)
    with cluster(tmp_path / "spark") as (address, workers):
        # Many small tasks, so that some are done and some are not when the worker goes.
        options = ("--master", address, *SMALL_EXECUTORS, "--set", "split_bytes_max=65536", "-w", workspace.folder)
        command = [sys.executable, "-m", "tidings.cli", *RUN, *map(str, options), "--json"]
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            written = workspace.lake.folder("bronze.events").path
            deadline = time.monotonic() + SECONDS_MAX
            while process.poll() is None and not list(written.glob("*.parquet")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert process.poll() is None, process.stderr and process.stderr.read()
            ended(workers[0])
            said, errors = process.communicate(timeout=SECONDS_MAX)
        finally:
            ended(process)
        if process.returncode:
            assert json.loads(said or errors)["error"]["code"] == "pipeline.spark_failed"
        ran = tool(*RUN, *options, env=env)

    assert ran["until"] == 30_000
    assert workspace.verify().is_equal
    assert len(workspace.column("silver.events", "seq")) == 30_000
    assert sum(workspace.column("gold.topic_minutes", "events")) == 30_000
