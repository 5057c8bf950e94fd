"""In a new clone, with nothing but the system's own programs on the path, all that README, tutorial and how-to pages say is done as it is written."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.node.chromium import CHROMIUM, chromium

from .reading import REPOSITORY, Clone, Reader, blocks_of, free_port, is_ready, read_twice, reading
from .test_reading import OPERATIONS, PAGES, TUTORIAL, id_of

TESTING: Final = REPOSITORY / "docs/howto/testing.md"
ALL_PAGES: Final = [*PAGES, TUTORIAL, OPERATIONS, TESTING]
SECONDS_MAX: Final = 900.0
INSTALLING: Final = re.compile(
    r"(?:^|`)((?:\w+=\w+ )?pip (?:install|wheel) (?:[^`\n]* )?'?\.(?:\[[\w,]+\]')?)(?:`|$)", re.MULTILINE
)
"""A line of a page that installs the checkout or makes a wheel of it."""

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone of what is committed, and an environment for a user of it, with nothing in it."""
    folder = tmp_path_factory.mktemp("clone")
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, folder / "tidings"], check=True, timeout=300)
    made = Clone(folder / "tidings", folder / "user/bin")
    shell(made, "python3 -m venv ../user")
    return made


def shell(clone: Clone, script: str) -> str:
    """A script in the clone, as somebody would type it there."""
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=clone.checkout,
        env=clone.environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, (script, done.stdout, done.stderr)
    return done.stdout


@contextmanager
def made_to_run(clone: Clone, port: str) -> Iterator[Path]:
    """``make run``, once its node is ready; ends by Ctrl-C, and well."""
    said = clone.checkout.parent / f"run-{time.monotonic_ns()}"
    with said.open("wb") as output:
        process = subprocess.Popen(
            ["make", "run", f"RUN_ARGS=--port {port}"],
            cwd=clone.checkout,
            env=clone.environment(),
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


def test_make_run_serves_and_goes_on(clone: Clone) -> None:
    """The first time it installs, publishes and serves; the second time it goes on with the same events."""
    counts = []
    for _ in range(2):
        port = free_port()
        with made_to_run(clone, port):
            assert "Tidings node" in shell(clone, f"curl -s http://127.0.0.1:{port}/")
            demo, _ = shell(clone, ".venv/bin/tidings topic list --json -w demo-workspace").splitlines()
            counts.append(json.loads(demo)["records"])
    assert 0 < counts[0] < counts[1]


def test_every_line_that_installs_works_twice(clone: Clone) -> None:
    """One after another, in an environment of the user's own; then the quickstart runs with it, twice."""
    found = [line for page in ALL_PAGES for line in INSTALLING.findall(page.read_text(encoding="utf-8"))]
    lines = list(dict.fromkeys(found))
    assert {"pip install .", "pip install '.[server,client,pipeline]'", "pip wheel --no-deps ."} <= set(lines)
    for line in (*lines, *lines):
        shell(clone, line)
    for _ in range(2):
        assert shell(clone, "cd .. && python tidings/examples/quickstart.py && tidings --version").startswith(
            "billed order 1: 12.50\ntidings "
        )


@pytest.fixture(scope="module")
def installed(clone: Clone) -> Clone:
    """The clone, with what the tutorial says is needed."""
    shell(clone, "pip install --quiet '.[server,client,pipeline]'")
    return clone


@pytest.mark.parametrize("page", [page for page in ALL_PAGES if page != TUTORIAL], ids=id_of)
def test_a_page_does_what_it_says_twice(
    page: Path, installed: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an empty folder, block by block, and again in the same folder; the page about operations has a workspace and keys to look after."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if page == OPERATIONS:
        place = shlex.quote(str(folder))
        shell(
            installed,
            f"cd {place} && python {installed.checkout}/examples/quickstart.py && tidings key create keys.json",
        )
    read_twice(installed.checkout / id_of(page), folder, clone=installed)


def test_the_tutorial_works_twice(installed: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, as a whole, twice in one folder; and an order that is placed appears in the web page."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for is_first in (True, False):
        with reading(installed.checkout / id_of(TUTORIAL), folder, is_first=is_first, clone=installed) as reader:
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
