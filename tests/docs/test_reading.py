"""Every program and command of README, tutorial, cheat sheet and how-to pages works as it is written, twice in one folder."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Final

import pytest

from tests.integration.cli.support import invoke
from tests.node.chromium import CHROMIUM, chromium

from .reading import FIRST_STEPS, REPOSITORY, Reader, blocks_of, reading, run_program

README: Final = REPOSITORY / "README.md"
TUTORIAL: Final = REPOSITORY / "docs/tutorial.md"
OPERATIONS: Final = REPOSITORY / "docs/howto/operations.md"
HAVE_TESTS_OF_THEIR_OWN: Final = {OPERATIONS, REPOSITORY / "docs/howto/testing.md"}
PAGES: Final = [
    *(README, FIRST_STEPS, REPOSITORY / "docs/cheat-sheet.md"),
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


def read_twice(page: Path, folder: Path, skipped: re.Pattern[str] | None = None) -> None:
    for is_first in (True, False):
        with reading(page, folder, is_first=is_first, skipped=skipped) as reader:
            reader.read()


QUICK: Final = [page for page in PAGES if not is_slow(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, *QUICK], ids=id_of)
def test_a_page_does_what_it_says_twice(page: Path, folder: Path) -> None:
    """From an empty folder, block by block, and again in the same folder; of the README all but what is slow."""
    read_twice(page, folder, SLOW)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [page for page in PAGES if page not in QUICK], ids=id_of)
def test_a_page_with_a_node_or_spark_does_what_it_says_twice(page: Path, folder: Path) -> None:
    """From an empty folder, block by block, and again in the same folder."""
    read_twice(page, folder)


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


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_the_tutorial_works_twice(folder: Path, tmp_path: Path) -> None:
    """All of it, as a whole, twice in one folder; and an order that is placed appears in the web page."""
    for is_first in (True, False):
        with reading(TUTORIAL, folder, is_first=is_first) as reader:
            reader.read()
            asyncio.run(order_until_the_page_shows_it(reader, tmp_path / f"browser-{is_first}"))
            worker = reader.terminals[1].shown()
            assert "billed order 4: 20.00" in worker
            assert "confirmed order 4 to dora@example.com" in worker


async def order_until_the_page_shows_it(reader: Reader, profile: Path) -> None:
    """Open the address that the fourth terminal printed; the page does not say when it is connected, so orders are placed until one appears."""
    (order,) = (text for _, text, _ in blocks_of(TUTORIAL) if "curl" in text)
    assert CHROMIUM is not None
    async with chromium(profile) as browser:
        await browser.go(reader.terminals[3].shown().partition("open ")[2].split()[0])
        for _ in range(200):
            reader.paste(reader.terminals[2], order)
            if "order 4 for dora@example.com" in await browser.run("document.body.innerText"):
                return
    raise AssertionError("the page shows no order")
