"""The JavaScript client that a node serves, in Node.js and in a browser: every envelope once, in order, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.integration.events_support import events_node, tell
from tests.integration.node_support import until
from tests.node.chromium import CHROMIUM, chromium
from tests.node.driving import FOLDER, NODE
from tidings.access.administration import SubjectRevoked, event_of
from tidings.testing.node import RunningNode, running_node
from tidings.wire.gateway import CloseReason

MODULE = Path(__file__).parents[2] / "src/tidings/server/static/events.js"


class Stream:
    """A process with one stream in it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def said(self, count: int = 1) -> list[dict[str, Any]]:
        """The next things that it says."""
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            return [json.loads(await self._process.stdout.readline()) for _ in range(count)]

    async def objects(self, count: int) -> list[str]:
        """The objects of the next envelopes."""
        return [name for each in await self.said(count) for name in each["objects"]]


@contextlib.asynccontextmanager
async def stream(node: RunningNode, **options: Any) -> AsyncIterator[Stream]:
    """A stream of one who may read topic ``orders``, and with a right to say so for long."""
    token = node.token("alice", topics=["orders"])
    told = json.dumps({"url": node.url, "options": {"token": token, **options}})
    process = await asyncio.create_subprocess_exec(
        str(NODE), str(FOLDER / "events.mjs"), told, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Stream(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def cut_all(node: RunningNode) -> None:
    """Cut every connection of ``/events``."""
    for each in node.connections.endpoints["/events"].connections:
        each.transport.cut()


def test_the_module_knows_every_close_reason() -> None:
    """Code and advice of each close reason are the same at both ends."""
    found = re.findall(r"\[(\d+), \"(\w+)\"\]", MODULE.read_text(encoding="utf-8"))

    assert {int(code): advice for code, advice in found} == {each.code: each.reconnect.value for each in CloseReason}


async def test_the_module_does_what_it_says_against_a_node_that_is_played() -> None:
    """Joining, acknowledging, parts, tokens, refusals and pauses: the tests in ``tests/node/events.test.mjs`` pass."""
    process = await asyncio.create_subprocess_exec(
        *(str(NODE), "--test", "--test-timeout=20000", str(FOLDER / "events.test.mjs")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()

    assert process.returncode == 0, said.decode()
    assert re.search(rb"pass (\d+)", said) is not None


async def test_the_node_serves_the_module(tmp_path: Path) -> None:
    """Without a token, as JavaScript, and not again to who has it."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as http:
        answer = await http.get("/client/events.js")
        again = await http.get("/client/events.js", headers={"if-none-match": answer.headers["etag"]})

    assert (answer.status_code, answer.text) == (200, MODULE.read_text(encoding="utf-8"))
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.req("R101", "R116", "R121")
async def test_a_stream_in_node_js_misses_nothing(tmp_path: Path) -> None:
    """What was before it, what is live, what came while it was cut, and what came across a restart: each once, in order."""
    async with events_node(tmp_path, queue={"per_connection": 8}) as node:
        await tell(node, "order:1", "order:2")
        async with stream(node, since=0) as alice:
            assert await alice.said() == [{"opened": 0}]
            assert await alice.objects(2) == ["order:1", "order:2"]
            await until(lambda: len(node.services.gateway.registry) == 1)
            await tell(node, "order:3")
            assert await alice.objects(1) == ["order:3"]
            # Faster than it acknowledges, by more than its buffer.
            await tell(node, *(f"order:{number}" for number in range(4, 30)))
            assert await alice.objects(26) == [f"order:{number}" for number in range(4, 30)]
            await until(lambda: len(node.services.gateway.registry) == 1)
            await tell(node, "order:30")
            assert await alice.objects(1) == ["order:30"]
            resumed_before = node.services.gateway.telemetry.resumed_count
            cut_all(node)
            await tell(node, "order:31")
            assert await alice.objects(1) == ["order:31"]
            assert node.services.gateway.telemetry.resumed_count == resumed_before + 1
            port = int(node.url.rpartition(":")[2])
            server = msgspec.structs.replace(node.settings.server, port=port)
            settings = msgspec.structs.replace(node.settings, server=server)
            await node.stop()
            async with RunningNode(tmp_path, settings) as again:
                last = await tell(again, "order:32", "order:33")
                (first, second) = await alice.said(2)
                assert first["objects"] + second["objects"] == ["order:32", "order:33"]
                assert second["position"] == last
                await until(lambda: len(again.services.gateway.registry) == 1)
                await again.log.append(event_of(SubjectRevoked(subject="alice"), actor="root"))
                await tell(again, "order:34")
                (end,) = await alice.said()

    assert end == {"failed": "auth_failed", "code": 4401, "name": "EventStreamError"}


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"token": "no"}, {"failed": "access.token_invalid", "code": 4401}),
        ({"app": "nowhere"}, {"failed": "app_not_found", "code": 404}),
        ({"subscriptionType": "security"}, {"failed": "permission_denied", "code": 4403}),
        ({"channels": ["nothing.*"]}, {"failed": "filter_invalid", "code": 4422}),
    ],
)
async def test_a_stream_that_is_not_wanted_ends(tmp_path: Path, options: dict[str, Any], end: dict[str, Any]) -> None:
    """Who will not be let in is told so by an error, before or after the upgrade, and does not try for ever."""
    async with events_node(tmp_path) as node, stream(node, **options) as mallory:
        (said,) = await mallory.said()

    assert {name: said.get(name) for name in end} == end


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
async def test_a_stream_in_a_browser_misses_nothing(tmp_path: Path) -> None:
    """The same module in a page of the node's own: catch-up, live, and resumed after a cut."""
    settings = {"per_connection": 8}
    async with events_node(tmp_path / "workspace", queue=settings) as node, chromium(tmp_path) as page:
        server = msgspec.structs.replace(node.settings.server, origins=(node.url,))
        node.reload(msgspec.structs.replace(node.settings, server=server))
        await tell(node, "order:1", "order:2")
        await page.go(f"{node.url}/healthz")
        options = json.dumps({"token": node.token("alice", topics=["orders"]), "since": 0})
        await page.run(
            f"""import("/client/events.js").then(({{ EventStream }}) => {{
                window.seen = [];
                window.stream = new EventStream(location.origin, {options});
                (async () => {{
                    for await (const each of stream) seen.push(...each.payload_summary.object_ids);
                    seen.push("end");
                }})();
            }})"""
        )

        async def seen(count: int) -> list[str]:
            return list(await page.until("seen", lambda found: len(found) >= count))

        await seen(2)
        await until(lambda: len(node.services.gateway.registry) == 1)
        last = await tell(node, *(f"order:{number}" for number in range(3, 20)))
        await seen(19)
        cut_all(node)
        last = await tell(node, "order:20")
        assert await seen(20) == [f"order:{number}" for number in range(1, 21)]
        # What the log notes of the connection itself may have come since.
        assert await page.run("stream.position") >= last
        await page.run("stream.close()")
        assert (await seen(21))[-1] == "end"
        await until(lambda: len(node.services.gateway.registry) == 0)
