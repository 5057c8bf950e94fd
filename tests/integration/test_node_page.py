"""The node's page at `/`: its state, its endpoints and its API, from its own files and documents alone."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tests.node.chromium import CHROMIUM, chromium
from tidings.server.api import OPERATIONS
from tidings.server.settings import ServerSettings
from tidings.testing.node import running_node

from .api_support import event

STATIC = Path(__file__).parents[2] / "src/tidings/server/static"


async def test_the_page_is_served_with_a_strict_policy(tmp_path: Path) -> None:
    """It and its files need no token, may load nothing from elsewhere, and are asked for again only when they have changed."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        page = await client.get("/")
        named = re.findall(r'(?:src|href)="(/page/[^"]+)"', page.text)
        files = [await client.get(path) for path in named]
        again = await client.get("/", headers={"if-none-match": page.headers["etag"]})

    policy = page.headers["content-security-policy"]
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert len(named) == 3
    assert [each.status_code for each in files] == [200] * 3
    assert (again.status_code, again.content) == (304, b"")


def test_no_file_of_the_page_names_another_place() -> None:
    """No address of a network is in them, and nothing that is not in the package is needed."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("page.*"))]

    assert len(texts) == 3
    assert [found for text in texts for found in re.findall(r"https?://\S+|@import|\burl\(", text)] == []


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("127.0.0.1:{port}", "http://127.0.0.1:{port}", 201),
        ("bus.example", "https://bus.example", 201),
        ("127.0.0.1:{port}", "http://127.0.0.1:1", 403),
        ("127.0.0.1:{port}", "http://localhost:{port}", 403),
        ("evil.example", "http://evil.example", 403),
    ],
)
async def test_the_nodes_own_page_may_send_requests(tmp_path: Path, host: str, origin: str, expected: int) -> None:
    """A page that came from this node, by an address or a name of its own, is let in; one of any other port or name is not."""
    hosts = ("bus.example",) if host == "bus.example" else ()
    async with running_node(tmp_path, hosts=hosts) as node, httpx.AsyncClient(base_url=node.url) as client:
        port = node.url.rpartition(":")[2]
        who = node.headers("root", roles=["admin"])
        shown = {**who, "host": host.format(port=port), "origin": origin.format(port=port)}
        answer = await client.post("/v1/events", json=event(), headers=shown)

    assert ServerSettings().origins == ()
    assert answer.status_code == expected


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
async def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """It shows the state, every operation and every socket; a token of the address is taken and leaves it; an event is published."""
    async with running_node(tmp_path / "w") as node, chromium(tmp_path) as page:
        token = node.token("root", roles=["admin"])
        await page.go(f"{node.url}/healthz")
        await page.run(f"location.href = '/#token={token}'; 0")
        channels = await page.until("document.querySelectorAll('#channels > details').length", bool)
        operations = await page.run("document.querySelectorAll('#operations details[data-words]').length")
        state = await page.until("document.querySelector('#ready').textContent", lambda text: "ready" in text)
        assert await page.run("location.href") == f"{node.url}/"
        await page.until("document.querySelector('#whoami').textContent", lambda text: text.endswith(": root"))
        await page.run("location.hash = 'publishEvents'")
        await page.until("document.querySelectorAll('#publishEvents button').length", bool)
        await page.run("document.querySelector('#publishEvents button').click()")
        answer = await page.until("document.querySelector('#publishEvents [role=status]').textContent", bool)
        await page.run("document.querySelector('#channel-sync').open = true")
        frames = await page.until("document.querySelectorAll('#channel-sync details').length", bool)
        await page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
        stored = node.log.position.seq

    assert channels == 4
    assert operations == len(OPERATIONS)
    assert state == "ready; the log is empty"
    assert answer.startswith("201 in ")
    assert stored == 1
    assert frames > 10


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
async def test_a_link_replaces_no_token_without_asking(tmp_path: Path) -> None:
    """A tab that works with a token keeps it when a link brings another, until its user chooses that one."""
    async with running_node(tmp_path / "w") as node, chromium(tmp_path) as page:
        mine, foreign = node.token("root", roles=["admin"]), node.token("mallory")

        async def follow(token: str) -> None:
            await page.go(f"{node.url}/healthz")
            await page.run(f"location.href = '/#token={token}'; 0")
            await page.until("document.readyState + location.pathname", lambda text: text == "complete/")

        async def is_used(subject: str) -> None:
            await page.until(
                "document.querySelector('#whoami').textContent", lambda text: text.endswith(f": {subject}")
            )

        await follow(mine)
        await is_used("root")
        await follow(foreign)
        await page.until("document.querySelector('#offered') !== null", bool)
        assert await page.run("sessionStorage.getItem('tidings.token')") == mine
        assert await page.run("location.href") == f"{node.url}/"
        await page.run("document.querySelector('#keep').click()")
        assert await page.run("document.querySelector('#token').value") == mine
        await follow(foreign)
        await page.until("document.querySelector('#offered') !== null", bool)
        await page.run("document.querySelector('#replace').click()")
        await is_used("mallory")
        assert await page.run("sessionStorage.getItem('tidings.token')") == foreign
