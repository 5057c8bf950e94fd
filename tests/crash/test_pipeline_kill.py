"""Runs that are killed: whatever kill -9 leaves, the next run makes tables that say what the log says."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.pipeline_support import environment, tool
from tests.unit.pipeline.support import Workspace, event
from tidings.pipeline.bronze import bronze_state

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.heavy, pytest.mark.crash, pytest.mark.timeout(900)]

# Runs for ever with tiny commits, so that a kill finds it at work; says when Spark is up.
_CHILD = """
import itertools, os, sys
from pathlib import Path
from tidings.core.clock import SYSTEM_CLOCK
from tidings.pipeline.runner import Pipeline
from tidings.pipeline.session import SessionOnDemand
from tidings.pipeline.settings import PipelineSettings
settings = PipelineSettings(master="local[2]", shuffle_partitions=1, commit_files_max=2)
with SessionOnDemand(settings) as spark:
    spark().range(1).count()
    print("up", flush=True)
    for number in itertools.count():
        Pipeline(Path(sys.argv[1]), settings, clock=SYSTEM_CLOCK, run=f"{os.getpid():x}x{number}").run(spark)
        print("ran", flush=True)
"""


def test_killed_again_and_again(tmp_path: Path) -> None:
    """
    A run that is killed at three random moments, and then left alone, ends with every record once.
    """
    chance = random.Random(5)
    workspace = Workspace(tmp_path / "ws")
    env = environment(tmp_path)
    reached = []
    for turn in range(3):
        workspace.append(event(1000 * turn + number, f"t{number % 3}") for number in range(200))
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(workspace.folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=chance.uniform(0.5, 6.0))
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        reached.append(bronze_state(workspace.lake).seq)
    assert reached == sorted(reached)

    ran = tool("pipeline", "run", "--jobs", "none", "--master", "local[2]", "-w", workspace.folder, env=env)

    assert ran["until"] == 600
    verdict = workspace.verify()
    assert verdict.is_equal
    assert workspace.column("silver.events", "seq") == list(range(1, 601))


def test_following_is_killed_again_and_again(tmp_path: Path) -> None:
    """
    A query that follows the log and is killed at two random moments goes on when it is started again: every record is in
    silver once, and Ctrl-C ends it without a complaint.
    """
    chance = random.Random(6)
    workspace = Workspace(tmp_path / "ws")
    workspace.append(event(number, f"t{number % 3}") for number in range(100))
    env = environment(tmp_path)
    options = ("--jobs", "none", "--master", "local[2]", "--set", "follow_interval_ms=50", "--json")
    command = [
        sys.executable,
        "-m",
        "tidings.cli",
        "pipeline",
        "run",
        "--follow",
        *options,
        "-w",
        str(workspace.folder),
    ]
    until = 100
    for turn in range(3):
        with (tmp_path / f"errors{turn}").open("wb") as errors:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=env, start_new_session=True, text=True
            )
        assert child.stdout is not None
        try:
            for step in range(3):
                await_seq(workspace, until, child)
                workspace.append(event(1000 * turn + 100 * step + number + 100) for number in range(20))
                until += 20
            if turn < 2:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=chance.uniform(0.0, 2.0))
            else:
                await_seq(workspace, until, child)
                child.send_signal(signal.SIGINT)
                assert child.wait(timeout=60) == 0
                assert b"Traceback" not in (tmp_path / f"errors{turn}").read_bytes()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()

    assert workspace.verify().is_equal
    assert workspace.column("silver.events", "seq") == list(range(1, until + 1))


def await_seq(workspace: Workspace, seq: int, child: subprocess.Popen[str]) -> None:
    """Wait until silver reaches a seq."""
    deadline = time.monotonic() + 240
    while workspace.lake.note("silver.events").get("seq", 0) < seq:
        assert child.poll() is None, "following has ended"
        assert time.monotonic() < deadline, f"silver never reached {seq}"
        time.sleep(0.02)
