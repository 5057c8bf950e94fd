"""Programs of the other pages and examples run as they are printed, twice in one folder; every command that a page shows exists."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.integration.cli.support import invoke

from .reading import run_program
from .test_reading import HAVE_TESTS_OF_THEIR_OWN, QUICK, README, TUTORIAL

REPOSITORY: Final = Path(__file__).parents[2]
PAGES: Final = [
    README,
    *sorted(path for path in (REPOSITORY / "docs").rglob("*.md") if path.parent.name != "adr"),
]
READ_AS_A_WHOLE: Final = {README, TUTORIAL, *QUICK, *HAVE_TESTS_OF_THEIR_OWN}
INLINE: Final = re.compile(r"`(tidings [a-z][^`\n]*)`")
FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [block for language, block in found if language in languages]


def id_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page not in READ_AS_A_WHOLE], ids=id_of
)
def test_every_program_of_a_page_runs_twice(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, in an empty folder; and again in the same folder, as a reader would."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        for at, program in enumerate(blocks(page, "python")):
            run_program(program, f"{id_of(page)}[{at}]")


def commands_of(page: Path) -> list[str]:
    """The lines of a page's blocks that call the tool, and what its sentences say to type."""
    lines = "\n".join(blocks(page, "", "sh", "console")).replace("\\\n", " ").splitlines()
    calls = [re.sub(r"^(\$ |.*\| )", "", line) for line in lines]
    within = INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return [line for line in (*calls, *within) if line.startswith("tidings ")]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=id_of)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    """Nouns, verbs and options are those of the tool."""
    for line in commands_of(page):
        words = shlex.split(line.partition(" #")[0].partition(" | ")[0].partition(" > ")[0])[1:]
        named = list(itertools.takewhile(re.compile(r"[a-z][a-z-]*").fullmatch, words))[:2]
        shown = help_of(*named) or help_of(*named[:1])
        assert shown, line
        asked = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert sorted(word for word in asked if not re.search(rf"{re.escape(word)}\b", shown)) == [], line


@functools.cache
def help_of(*words: str) -> str | None:
    """What the tool says of a command; None if it has none of that name."""
    done = invoke(*words, "--help", env={"COLUMNS": "200"})
    return done.stdout if done.exit_code == 0 else None


def test_the_readme_shows_the_quickstart() -> None:
    """The program on the first page is the example, to the letter, and has a dozen lines of code at most."""
    shown = blocks(README, "python")[0]

    assert shown == (REPOSITORY / "examples/quickstart.py").read_text(encoding="utf-8")
    assert len([line for line in shown.splitlines() if line.strip() and not line.startswith('"""')]) <= 12


def test_a_typed_program_runs_as_it_was_checked(tmp_path: Path) -> None:
    """The program that ``mypy --strict`` checks with the tests does what its types say."""
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("user_program.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ORDER_PLACED order_placed 0",
        "ORDER_PLACED order_placed 1",
        "by hand in attempt 1",
        "o-1 in attempt 1",
        "o-2 in attempt 1",
    ]
