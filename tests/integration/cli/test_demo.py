"""The demo: it fills a log, follows it, goes on where it was, and ends by itself."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.integration.cli.support import SECONDS_MAX, TOOL, environment, invoke, lines


def test_the_demo_publishes_follows_and_ends(tmp_path: Path) -> None:
    """Every event is published once and seen once, and the screen says what to try next."""
    done = invoke("demo", "--once", "-w", tmp_path)

    assert done.exit_code == 0
    assert "published 300 events, followed 300 of them live" in done.stdout
    assert "duplicate of seq 299" in done.stdout
    assert "300 in 2 topics" in done.stdout
    assert f" log tail -w {tmp_path}" in done.stdout
    assert invoke("log", "verify", "--ids", "-w", tmp_path).exit_code == 0


def test_the_demo_goes_on_where_it_was(tmp_path: Path) -> None:
    """A second run continues both topics: readings count on, and nothing is published twice."""
    invoke("demo", "--once", "--count", 50, "-w", tmp_path)

    again = json.loads(invoke("demo", "--once", "--count", 50, "--json", "-w", tmp_path).stdout)

    assert (again["first_seq"], again["last_seq"], again["followed"]) == (51, 100, 50)
    readings = lines(invoke("log", "read", "demo", "--raw", "-w", tmp_path).stdout)
    assert [each["reading"] for each in readings] == list(range(80))


@pytest.mark.slow
def test_the_demo_draws_on_a_terminal(tmp_path: Path) -> None:
    """On a terminal the live tail is a table that is drawn again and again."""
    controller, terminal = pty.openpty()
    try:
        command = [*TOOL, "demo", "--once", "--count", "40", "-w", str(tmp_path)]
        env = {**environment(), "TERM": "xterm", "COLUMNS": "120"}
        with subprocess.Popen(command, stdout=terminal, stderr=terminal, stdin=terminal, env=env) as process:
            os.close(terminal)
            screen = b""
            try:
                while block := os.read(controller, 65536):
                    screen += block
            except OSError:  # how a terminal says that the other side is gone
                pass
            assert process.wait(SECONDS_MAX) == 0
    finally:
        os.close(controller)

    assert b"Live tail" in screen
    assert b"\x1b[" in screen
    assert b"40 events, each on disk before it is shown" in screen
