"""The page about working with the bus is true: its program runs, and its command lines are understood."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from tidings.cli.root import app

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "bus.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
LINES = re.findall(r"^tidings .+$", PAGE, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_runs(program: str, tmp_path: Path) -> None:
    """Each program works as it stands, in an empty folder, without a warning."""
    command = [sys.executable, "-W", "error", "-c", program]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "learned from {'action_id': 'a1', 'status': 'ok'}\n"


@pytest.mark.parametrize("line", LINES)
def test_every_command_line_is_understood(line: str) -> None:
    """Each line names a command and options that exist."""
    words = shlex.split(line)[1:]
    command = typer.main.get_command(app)
    name = "tidings"
    while words and words[0] in getattr(command, "commands", {}):
        name = words.pop(0)
        command = command.get_command(None, name)  # type: ignore[attr-defined]  # only groups have commands

    command.make_context(name, words)
