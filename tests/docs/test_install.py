"""The set-up: which pins are missing, what goes wrong, and that the parts fit together."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tools.install import main, missing

REPOSITORY = Path(__file__).parents[2]
REQUIREMENTS = REPOSITORY / "requirements"


def pins(name: str) -> set[str]:
    return set((REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(("less", "more"), [("base", "server"), ("server", "pipeline"), ("pipeline", "dev")])
def test_a_larger_set_of_pins_has_the_smaller_one_in_it(less: str, more: str) -> None:
    """What the tests run with is what a node and the pipeline of a checkout run with, version by version."""
    assert pins(less) - pins(more) == set()


def test_only_what_is_missing_and_meant_for_this_interpreter_is_installed(tmp_path: Path) -> None:
    """A pin that is there in this version, and one for another system, are left alone."""
    file = tmp_path / "pins.txt"
    file.write_text(
        f"# a comment\nmsgspec=={version('msgspec')}\nmsgspec==0.0.1\nnot-there==1.0\nelsewhere==1.0 ; sys_platform == 'nowhere'\n"
    )

    assert [str(each) for each in missing(file)] == ["msgspec==0.0.1", "not-there==1.0"]


def test_where_nothing_is_missing_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No pip is started, and nothing is said."""
    file = tmp_path / "pins.txt"
    file.write_text(f"msgspec=={version('msgspec')}\n")
    monkeypatch.setattr(sys, "argv", ["install", "a test", str(file)])

    assert main() == 0
    assert capsys.readouterr().out == ""


def test_a_set_up_that_fails_shows_what_pip_said(tmp_path: Path) -> None:
    """The last lines of the pip that failed are on stderr, and the exit code is 1."""
    file = tmp_path / "pins.txt"
    file.write_text("not-there==1.0\n")
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, "a test", str(file)],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 1
    assert "No matching distribution found for not-there==1.0" in done.stderr
    assert "set-up of a test: 1 packages" in done.stdout


RUN = """
import sys
sys.prefix = "."  # where it writes what pip says
from tools.install import main
sys.exit(main())
"""
