"""What clients can make a node hold, over HTTP and over sockets: less than the settings say, whatever they send; and all of it is returned."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.beyond import Beyond, crossed
from tests.integration.node_support import TalkEndpoint, until
from tests.integration.test_connection_limits import CLOSE, TEXT, frame
from tests.integration.test_connection_limits import raw as socket_to
from tidings.server.api.operations import BODY_BYTES_MAX
from tidings.testing.node import RunningNode, running_node

MIB = 1 << 20
KIB = 1 << 10


def held(node: RunningNode) -> int:
    return node.connections.memory.held_bytes(is_authenticated=True)


class Body:
    """A request whose body is sent by hand."""

    def __init__(self, node: RunningNode, path: str, token: str, size: int) -> None:
        self._port = int(node.url.rpartition(":")[2])
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: n\r\nAuthorization: {token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {size}\r\n\r\n"
        )

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.writer.write(self._head.encode())

    async def send(self, size: int) -> None:
        with contextlib.suppress(ConnectionError):
            self.writer.write(b" " * size)
            await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, object]]:
        async with asyncio.timeout(20):
            head = await self.reader.readuntil(b"\r\n\r\n")
            body = await self.reader.read(65_536)
        return int(head.split()[1]), json.loads(body)

    def leave(self) -> None:
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def bodies(node: RunningNode, path: str, subjects: list[str], size: int) -> AsyncIterator[list[Body]]:
    opened = []
    for subject in subjects:
        token = node.headers(subject, roles=["admin"])["authorization"]
        opened.append(Body(node, path, token, size))
        await opened[-1].open()
    try:
        yield opened
    finally:
        for body in opened:
            body.leave()


@pytest.mark.parametrize("path", ["/v1/groups/a/b/pause", "/v1/access/policies", "/v1/apps", "/v1/dead-letters/drop"])
@pytest.mark.parametrize("size", [15 * MIB, 131_073])
async def test_only_publishing_takes_long_bodies(tmp_path: Path, path: str, size: int) -> None:
    """An operation that stores no events refuses a body beyond its limit by its length, before a byte of it is read."""
    async with running_node(tmp_path) as node, bodies(node, path, ["root"], size) as (body,):
        status, problem = await body.answer()

    assert (status, problem["code"]) == (413, "node.body_too_large")


@pytest.mark.bound("server.api.operations.BODY_BYTES_MAX")
@crossed
async def test_a_chunked_body_of_an_operation_is_cut_too(tmp_path: Path, beyond: Beyond) -> None:
    """The limit holds for a body that does not announce its length, to the byte."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        statuses = []
        for size in (BODY_BYTES_MAX, beyond(BODY_BYTES_MAX)):

            async def parts(size: int = size) -> AsyncIterator[bytes]:
                yield b'{"all": true}' + b" " * (size - 13)

            answer = await client.post(
                "/v1/dead-letters/drop",
                content=parts(),
                headers={**node.headers("root", roles=["admin"]), "content-type": "application/json"},
            )
            statuses.append(answer.status_code)

    assert statuses == [400, 413]


@pytest.mark.parametrize("path", ["pause", "resume", "seek"])
async def test_rights_come_before_the_body(tmp_path: Path, path: str) -> None:
    """A caller without the right is refused although its body has not come, and would make no sense."""
    async with running_node(tmp_path) as node:
        token = node.headers("nobody", topics=[])["authorization"]
        body = Body(node, f"/v1/groups/orders/billing/{path}", token, 1_000)
        await body.open()
        status, problem = await body.answer()
        body.leave()

    assert (status, problem["code"]) == (403, "access.forbidden")


@pytest.mark.parametrize(
    ("scope", "settings", "subjects"),
    [
        ("identity", {"memory_bytes_per_identity_max": 4 * MIB}, ["root"] * 8),
        ("address", {"memory_bytes_per_address_max": 4 * MIB}, [f"root{n}" for n in range(8)]),
        ("total", {"memory_bytes_max": 4 * MIB}, [f"root{n}" for n in range(8)]),
    ],
)
async def test_bodies_of_all_requests_together_are_bounded(
    tmp_path: Path, scope: str, settings: dict[str, Any], subjects: list[str]
) -> None:
    """Unfinished bodies are read up to the limit over all of them; the next part is refused by name, and everything is returned."""
    async with running_node(tmp_path, **settings) as node:
        async with bodies(node, "/v1/events", subjects, 15 * MIB) as opened:
            for body in opened:
                await body.send(MIB)
            answered = {asyncio.ensure_future(body.answer()) for body in opened}
            done, waiting = await asyncio.wait(answered, return_when=asyncio.FIRST_COMPLETED)
            problems = [task.result() for task in done]
            most = held(node)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: held(node) == 0)

    assert {(status, problem["code"]) for status, problem in problems} == {(503, "node.memory_exhausted")}
    assert all(f"'{scope}'" in str(problem["detail"]) for _, problem in problems)
    assert most <= 4 * MIB


async def test_one_connection_holds_no_more_than_its_share(tmp_path: Path) -> None:
    """A body beyond the share of its connection is refused while others are read to their end."""
    async with running_node(tmp_path, memory_bytes_per_connection_max=MIB) as node:
        async with bodies(node, "/v1/events", ["root"], 2 * MIB) as (body,):
            await body.send(MIB + 65_536)
            status, problem = await body.answer()
        async with bodies(node, "/v1/events", ["root"], MIB // 4) as (body,):
            await body.send(MIB // 4)
            fits, _ = await body.answer()
        await until(lambda: held(node) == 0)

    assert (status, problem["code"], fits) == (503, "node.memory_exhausted", 400)


@pytest.mark.parametrize("kind", ["one frame", "fragments"])
async def test_unread_input_of_sockets_is_bounded_over_all(tmp_path: Path, kind: str) -> None:
    """Messages that are never finished fill the account up to its limit; the socket that goes beyond is closed with 1013."""
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}, memory_bytes_max=4 * MIB) as node:
        peers = [await socket_to(node, "/echo") for _ in range(8)]
        whole = frame(TEXT, b"x" * (MIB + MIB // 2))
        part = frame(TEXT, b"x" * MIB, is_last=False)
        for peer in peers:
            await peer.send(whole[: MIB + MIB // 4] if kind == "one frame" else part)
        await until(lambda: node.connections.closed["error"] > 0 or len(node.connections) < len(peers))
        most = held(node)
        codes = [await peer.close_code() for peer in peers[-1:]]
        for peer in peers:
            peer.inner.close()
        await until(lambda: len(node.connections) == 0 and held(node) == 0)

    assert most <= 4 * MIB
    assert codes == [1013]


async def test_a_buffer_that_grew_stays_charged_until_its_socket_closes(tmp_path: Path) -> None:
    """What a long message made the node reserve counts for as long as it is reserved."""
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}) as node:
        peer = await socket_to(node, "/echo")
        small = held(node)
        await peer.send(frame(TEXT, b"x" * MIB))
        await until(lambda: held(node) > MIB)
        large = held(node)
        await peer.send(frame(CLOSE, b"\x03\xe8"))
        await until(lambda: held(node) == 0)
        peer.inner.close()

    assert small == 2_048
    assert MIB < large <= 3 * MIB
