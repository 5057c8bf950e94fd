"""Several processes of the real command on one lake: each record is in the tables once, and none of them ends by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.integration.cli.support import invoke
from tests.integration.pipeline_support import environment
from tests.unit.pipeline.support import Workspace, event
from tidings.core.clock import SYSTEM_CLOCK
from tidings.pipeline.bronze import bronze_state
from tidings.pipeline.schemas import SILVER_EVENTS

# Compaction at every other commit, and a look for old files at each: what happens a few times a day happens all the time.
BUSY = ("--set", "compact_files_min=2", "--set", "vacuum_hours=0", "--set", "checkpoint_commits=3")
SECONDS_MAX = 240.0


def started(workspace: Workspace, folder: Path, *options: str) -> subprocess.Popen[str]:
    """A pipeline that goes on until it is interrupted."""
    command = [sys.executable, "-m", "tidings.cli", "pipeline", "run", *options, *BUSY, "-w", str(workspace.folder)]
    return subprocess.Popen(
        command, env=environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def await_seq(workspace: Workspace, runs: list[subprocess.Popen[str]], seq: int) -> None:
    """Wait until silver reaches a seq; a run that ends before is an error."""
    deadline = SYSTEM_CLOCK.monotonic() + SECONDS_MAX
    waiting = threading.Event()
    while int(workspace.lake.note(SILVER_EVENTS.name).get("seq", 0)) < seq:
        for run in runs:
            assert run.poll() is None, run.stderr.read() if run.stderr is not None else ""
        assert SYSTEM_CLOCK.monotonic() < deadline, f"bronze is at {bronze_state(workspace.lake).seq} of {seq}"
        waiting.wait(0.05)


def ended(runs: list[subprocess.Popen[str]]) -> list[str]:
    """Interrupt the runs, as Ctrl-C does; what each said."""
    for run in runs:
        run.send_signal(signal.SIGINT)
    return [run.communicate(timeout=SECONDS_MAX)[1] for run in runs]


def check(workspace: Workspace, count: int) -> None:
    """Each record is there once, as the log has it, and nothing is to be mended."""
    verified = invoke("pipeline", "verify", "-w", workspace.folder)
    assert (verified.exit_code, workspace.column("bronze.events", "seq")) == (0, list(range(1, count + 1))), (
        verified.stdout
    )
    assert workspace.column("silver.events", "seq") == list(range(1, count + 1))
    repaired = invoke("pipeline", "repair", "--dry-run", "-w", workspace.folder)
    assert repaired.stdout.strip() == (
        "0 damaged files and 0 damaged logs; bronze lacks 0 records; nothing was changed"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("processes", "rounds"), [(2, 8), pytest.param(3, 300, marks=[pytest.mark.heavy, pytest.mark.timeout(3600)])]
)
def test_runs_beside_each_other_take_each_record_once(tmp_path: Path, processes: int, rounds: int) -> None:
    """
    Processes of ``--every 100ms``, which put files together all the time, beside a writer: log and lake are equal in the end.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append([event(0)])
    runs = [started(workspace, tmp_path, "--every", "100ms", "--jobs", "none") for _ in range(processes)]
    try:
        for number in range(1, rounds + 1):
            workspace.append([event(number, f"t{number % 3}")])
            await_seq(workspace, runs, number + 1)
    finally:
        said = ended(runs)

    assert [problem for problem in said if "Damaged" in problem or "Traceback" in problem] == []
    check(workspace, rounds + 1)


@pytest.mark.heavy
@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_one_that_follows_keeps_house_alone(tmp_path: Path) -> None:
    """
    One ``--follow`` whose two threads both keep house, beside a writer: log and lake are equal in the end.
    """
    workspace = Workspace(tmp_path / "ws")
    workspace.append([event(0)])
    options = ("--follow", "--every", "1s", "--set", "follow_interval_ms=50", "--master", "local[2]")
    runs = [started(workspace, tmp_path, *options)]
    try:
        for number in range(1, 201):
            workspace.append([event(number, f"t{number % 3}")])
            await_seq(workspace, runs, number + 1)
    finally:
        said = ended(runs)

    assert "Traceback" not in said[0]
    check(workspace, 201)
