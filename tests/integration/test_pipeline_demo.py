"""The demo's pass of the pipeline: beside a node that goes on serving, with a report at the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
import pytest

from tests.integration.cli.support import started
from tests.integration.pipeline_support import SECONDS_MAX, environment

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

COUNT = 40


def wait_for(is_so: Callable[[], object]) -> None:
    """Wait until something is so, within bounds."""
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_on(workspace: Path) -> list[int]:
    """The processes, but for this one, that were started with the workspace as an argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(workspace).encode() in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


@pytest.mark.heavy
def test_the_demo_ends_with_a_report(tmp_path: Path) -> None:
    """
    While the node serves, a pass fills the tables beside it, with no Java of the machine in sight, and the address of a
    report about them is told.
    """
    words = ("demo", "--json", "--pipeline", "--count", COUNT, "--port", 0, "-w", tmp_path)
    with started(*words, env=environment(tmp_path, has_java=False)) as process:
        url = process.json()["url"]
        process.json()  # everything lies ready, and nobody has waited for Spark
        assert httpx.get(f"{url}/readyz").status_code == 200
        assert not (tmp_path / "report.html").exists()
        wait_for((tmp_path / "report.html").exists)
        told = process.json()
        assert httpx.get(f"{url}/readyz").status_code == 200
        process.process.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0

    page = Path(unquote(urlsplit(told["report"]).path))
    assert page == (tmp_path / "report.html").resolve()
    assert "demo / thermostat" in page.read_text()
    assert processes_on(tmp_path) == []


def test_a_node_that_is_stopped_takes_the_pass_along(tmp_path: Path) -> None:
    """
    Told to stop while the pass is under way, the demo ends in order, and so does what it started.
    """
    with started("demo", "--json", "--pipeline", "--count", COUNT, "--port", 0, "-w", tmp_path) as process:
        process.json()
        process.json()
        wait_for(lambda: len(processes_on(tmp_path)) > 1)
        process.process.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0

    assert processes_on(tmp_path) == []
