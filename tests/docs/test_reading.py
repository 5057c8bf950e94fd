"""Every program and command of a page that is quick works as it is written, twice in one folder; ``test_new_clone.py`` reads all pages, in a clone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.integration.cli.support import invoke

from .reading import FIRST_PAGE, REPOSITORY, blocks_of, read_twice, run_program

README: Final = REPOSITORY / "README.md"
TUTORIAL: Final = REPOSITORY / "docs/tutorial.md"
OPERATIONS: Final = REPOSITORY / "docs/howto/operations.md"
HAVE_TESTS_OF_THEIR_OWN: Final = {OPERATIONS, REPOSITORY / "docs/howto/testing.md"}
PAGES: Final = [
    *(README, FIRST_PAGE, REPOSITORY / "docs/cheat-sheet.md"),
    *(page for page in sorted((REPOSITORY / "docs/howto").glob("*.md")) if page not in HAVE_TESTS_OF_THEIR_OWN),
]
SLOW: Final = re.compile(r"^tidings (serve|work|pipeline|table|demo|bench)\b", re.MULTILINE)
"""What starts a node or Spark, or takes its time otherwise."""


def id_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def is_slow(page: Path) -> bool:
    return any(language == "sh" and SLOW.search(text) for language, text, _ in blocks_of(page))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder, empty and the current one."""
    found = tmp_path / "folder"
    found.mkdir()
    monkeypatch.chdir(found)
    return found


QUICK: Final = [page for page in PAGES if not is_slow(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, *QUICK], ids=id_of)
def test_a_page_does_what_it_says_twice(page: Path, folder: Path) -> None:
    """From an empty folder, block by block, and again in the same folder; of the README all but what is slow."""
    read_twice(page, folder, skipped=SLOW)


@pytest.mark.slow
def test_what_is_restored_and_imported_has_the_same_events(folder: Path) -> None:
    """The page about operations, in a folder with a workspace and a key file, does what it says."""
    run_program((REPOSITORY / "examples/quickstart.py").read_text(encoding="utf-8"), "quickstart.py")
    assert invoke("key", "create", "keys.json").exit_code == 0
    read_twice(OPERATIONS, folder)

    exported = [
        invoke("log", "export", "--topic", "orders", "--format", "events", "--workspace", place).stdout
        for place in ("workspace", "restored/workspace", "imported")
    ]
    assert exported == [exported[0]] * 3
    assert "ORDER_PLACED" in exported[0]
