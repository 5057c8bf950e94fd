"""In a new clone, with nothing but the system's own programs on the path, what the README says first is done as it is written."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from .reading import REPOSITORY, free_port, is_ready

BARE: Final = {"PATH": "/usr/bin:/bin", **{name: os.environ[name] for name in os.environ if name.startswith("PIP_")}}
SECONDS_MAX: Final = 900.0

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of what is committed."""
    folder = tmp_path_factory.mktemp("clone") / "tidings"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, folder], check=True, timeout=300)
    return folder


def shell(clone: Path, script: str) -> str:
    """A script in the clone, as somebody would type it there."""
    environment = {**BARE, "HOME": os.environ["HOME"]}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=clone, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def made_to_run(clone: Path, port: str) -> Iterator[Path]:
    """``make run``, once its node is ready; ends by Ctrl-C, and well."""
    said = clone.parent / f"run-{time.monotonic_ns()}"
    with said.open("wb") as output:
        process = subprocess.Popen(
            ["make", "run", f"RUN_ARGS=--port {port}"],
            cwd=clone,
            env={**BARE, "HOME": os.environ["HOME"]},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + SECONDS_MAX
            while not is_ready(port) or "Ctrl-C" not in said.read_text(encoding="utf-8"):
                assert process.poll() is None, said.read_text(encoding="utf-8")
                assert time.monotonic() < end, said.read_text(encoding="utf-8")
                time.sleep(0.1)
            yield said
        finally:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all that run in it
            process.wait(SECONDS_MAX)


def test_make_run_serves_and_goes_on(clone: Path) -> None:
    """The first time it installs, publishes and serves; the second time it goes on with the same events; what it prints can be pasted."""
    seqs = []
    for _ in range(2):
        port = free_port()
        with made_to_run(clone, port):
            told = shell(
                clone, f".venv/bin/tidings topic list --json -w demo-workspace; curl -s http://127.0.0.1:{port}/"
            )
            assert "Tidings node" in told
            seqs.append(told)
    assert "demo" in seqs[0]


def test_the_install_lines_work(clone: Path) -> None:
    """``pip install`` with the extras that the pages name, in an environment of its own, and the quickstart with it, twice."""
    readme = (clone / "README.md").read_text(encoding="utf-8")
    assert "pip install ." in readme
    place = shlex.quote(str(clone.parent / "user"))
    shell(clone, f"python3 -m venv {place} && . {place}/bin/activate && pip install --quiet '.[server,client]'")
    for _ in range(2):
        told = shell(
            clone.parent, f". {place}/bin/activate && python tidings/examples/quickstart.py && tidings --version"
        )
        assert told.startswith("billed order 1: 12.50\ntidings ")
