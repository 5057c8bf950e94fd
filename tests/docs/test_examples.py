"""Every example is short and does what it says, twice in one folder, as a reader would run it."""

from __future__ import annotations

import asyncio
import functools
import http.server
import importlib.util
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.docs.reading import FIRST_PAGE, run_program
from tests.docs.test_programs import blocks
from tests.node.chromium import CHROMIUM, chromium
from tidings import Bus, Client
from tidings.testing.node import node_settings, running_node

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
LINES_MAX: Final = 59
SAID: Final = {
    "quickstart.py": ["billed order 1: 12.50"],
    "safe_retry.py": ["the second is a duplicate: True", "both answers name seq 1: True"],
    "shared_list.py": [
        "offline, ana sees ['bread'] and ben sees ['eggs', 'salt']",
        "bread is committed: True",
        "no salt is rejected: True 1",
        "together, both see ['bread', 'eggs'] alike: True",
    ],
    "player.py": [
        "the track is new",
        "it is healthy",
        "playback on audio.playback",
        "it is healthy",
        "over",
        "it stopped at 1:30",
    ],
    "follow_events.py": ["['PLACED']", "['PAID']", "['SENT']"],
    "sealed_space.py": ["with the key: nobody else reads this", "without it: log.sealed_payload"],
    "typed_events.py": ["ORDER_PLACED 1: 3.90", "the payload is no Order: $.items[0].cents: expected int, got str"],
    "delayed.py": ["waiting: ['ana', 'ben']", "taken back: True", "to ana: thank you", "waiting: 0"],
}
"""What each example that ends by itself prints in an empty folder."""
OTHERS: Final = {
    *("worker.py", "producer.py"),  # the test of docs/index.md runs them
    *("tables_duckdb.py", "tables_pandas.py", "tables_pyspark.py", "tables_polars.py"),  # test_pipeline_examples.py
    "test_with_virtual_time.py",  # test_testing_page.py
    *("web_app.py", "live_tail.py", "browser.html"),  # below
}


def test_every_example_is_short_and_is_run() -> None:
    """Each file has under 60 lines, a test, and a line on the folder's page; the household is an application of many parts."""
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [path for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md"]

    assert {path.name for path in files} == {*SAID, *OTHERS} == set(re.findall(r"\]\((\w+\.\w+)\)", page))
    assert [path.name for path in files if len(path.read_text(encoding="utf-8").splitlines()) > LINES_MAX] == []


@pytest.mark.parametrize("name", sorted(SAID))
def test_every_example_runs_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an empty folder it prints exactly what is expected; and it runs again in the same folder."""
    monkeypatch.chdir(tmp_path)
    program = (EXAMPLES / name).read_text(encoding="utf-8")
    run_program(program, name)

    assert capsys.readouterr().out.splitlines() == SAID[name]
    run_program(program, name)


def test_the_first_steps_show_the_worker_and_the_producer() -> None:
    """The programs of that page, which a test runs in two processes, are the examples to the letter."""
    names = ("worker.py", "producer.py")

    assert blocks(FIRST_PAGE, "python") == [(EXAMPLES / name).read_text(encoding="utf-8") for name in names]


async def test_a_web_application_bills_what_it_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An order is stored once, however often it is posted; the next life of the application has it, and a wrong one is refused."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        module = load("web_app")
        transport = httpx.ASGITransport(module.app)
        async with (
            module.app.router.lifespan_context(module.app),
            httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
        ):
            answers = [await client.post("/orders", json={"number": 1, "cents": 1250}) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [202, 202]
            assert answers[0].json() == answers[1].json()
            assert (await client.post("/orders", json={"number": "one"})).status_code == 422
            conflict = await client.post("/orders", json={"number": 1, "cents": 9900})
            assert (conflict.status_code, conflict.json()["code"]) == (409, "log.id_conflict")
            assert (await client.get("/orders")).json() == [{"number": 1, "cents": 1250}]
            await module.bus.drain()

    assert capsys.readouterr().out == "billed order 1: 12.50\n"


def load(name: str) -> Any:
    """An example as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_another_process_sees_each_event_as_it_is_written(tmp_path: Path) -> None:
    """The tail prints what is there, then what comes, and ends without a word at Ctrl-C; and again from the start."""
    async with Bus(tmp_path / "workspace") as bus:
        for life in range(2):
            count = 2 * life
            await place(bus, count)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(EXAMPLES / "live_tail.py")),
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            async with asyncio.timeout(60):
                seen = [await process.stdout.readline() for _ in range(count + 1)]
                await place(bus, count + 1)
                seen.append(await process.stdout.readline())
                process.send_signal(signal.SIGINT)
                rest = await process.communicate()
            assert seen == [f"{at} ORDER_PLACED {{'number': {at}}}\n".encode() for at in range(count + 2)]
            assert (process.returncode, *rest) == (0, b"", b"")


async def place(bus: Bus, number: int) -> None:
    await bus.publish("orders", {"number": number}, type="ORDER_PLACED", space="shared:shop")


@pytest.fixture
def pages() -> Iterator[str]:
    """A web server for the folder of examples, as ``python -m http.server`` is one; its origin."""
    handler = functools.partial(QuietHandler, directory=str(EXAMPLES))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.skipif(CHROMIUM is None, reason="no browser on this machine")
async def test_a_page_in_a_browser_shows_what_happens(tmp_path: Path, pages: str) -> None:
    """What was before it, what comes while it is open, and when it is opened again only what it has not shown."""
    listed = "Array.from(document.querySelectorAll('li'), each => each.textContent)"
    async with (
        running_node(tmp_path / "workspace", node_settings(origins=(pages,))) as node,
        Client(node.url, node.token(roles=["admin"])) as client,
        chromium(tmp_path) as page,
    ):

        async def tell(number: int) -> str:
            about = [f"order:{number}"]
            await client.publish("orders", {}, type="ORDER_PLACED", space="shared:shop", objects=about)
            return f"order:{number}: ORDER_PLACED"

        first = await tell(1)
        address = f"{pages}/browser.html?node={node.url}#{node.token('ana', topics=['orders'])}"
        await page.go(address)
        await page.until(listed, lambda found: found == [first])
        second = await tell(2)
        await page.until(listed, lambda found: found == [first, second])
        await page.go("about:blank")
        third = await tell(3)
        await page.go(address)
        await page.until(listed, lambda found: found == [third])
