"""The client's WebSockets: a real node, and a peer that breaks the rules, on the loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import msgspec
import picows
import pytest

from tests.scenarios.client.child import make_client
from tidings.client import Committed, NewEvent
from tidings.client.errors import ConnectFailed, LinkClosed
from tidings.client.link import Link
from tidings.client.websocket import WebSocketConnector
from tidings.sync.settings import SyncSettings
from tidings.testing.node import RunningNode, node_settings, running_node

SECONDS_MAX: Final = 30


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[RunningNode]:
    settings = msgspec.structs.replace(node_settings(), sync=SyncSettings(schemas={"note": {}}))
    async with running_node(tmp_path / "node", settings) as made:
        yield made


async def test_a_thousand_events_cross_a_real_socket(node: RunningNode, tmp_path: Path) -> None:
    """One client submits a thousand, another one that comes later has all of them, in the same order."""
    url = f"{node.ws_url}/sync"
    tokens = [node.token(name, client_id=name, partitions=["P1"]) for name in ("ana", "ben")]
    async with asyncio.timeout(SECONDS_MAX):
        async with make_client(url, str(tmp_path / "ana.db"), "ana", tokens[0]) as ana:
            facts = [{"schema": "note", "data": {"n": n}} for n in range(1000)]
            drafts = await ana.submit_many([NewEvent(["P1"], "event", fact) for fact in facts])
            await ana.drained()

            assert all(isinstance(draft.verdict, Committed) for draft in drafts)
            async with make_client(url, str(tmp_path / "ben.db"), "ben", tokens[1]) as ben:
                await ben.view_when(lambda view: len(view) == 1000)
                assert ben.view == ana.view == list(range(1000))

                await ben.submit_fact(["P1"], "note", {"n": 1000})
                await ana.view_when(lambda view: len(view) == 1001)


async def test_nobody_there_is_a_connect_failure() -> None:
    """A refused connection and an address that is none are told as such."""
    connector = WebSocketConnector()
    for url in ("ws://127.0.0.1:1/sync", "nonsense"):
        with pytest.raises(ConnectFailed, match="cannot connect"):
            await connector.connect(url)


async def test_a_page_that_is_no_websocket_is_a_connect_failure(node: RunningNode) -> None:
    """An HTTP answer in place of the upgrade is told as such."""
    with pytest.raises(ConnectFailed):
        await WebSocketConnector().connect(f"{node.ws_url}/healthz")


class Peer(picows.WSListener):
    """A server end that does what a test wants as soon as somebody connects."""

    def __init__(self, act: Callable[[picows.WSTransport], None]) -> None:
        self._act = act

    def on_ws_connected(self, transport: picows.WSTransport) -> None:
        self._act(transport)


async def link_to(
    act: Callable[[picows.WSTransport], None], connector: WebSocketConnector | None = None
) -> tuple[asyncio.Server, Link]:
    server = await picows.ws_create_server(lambda request: Peer(act), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    return server, await (connector or WebSocketConnector()).connect(f"ws://127.0.0.1:{port}/")


async def test_a_message_in_pieces_is_put_together() -> None:
    """Fragments become one message; the next message is its own."""

    def act(transport: picows.WSTransport) -> None:
        transport.send(picows.WSMsgType.TEXT, b"one ", fin=False)
        transport.send(picows.WSMsgType.CONTINUATION, b"mess", fin=False)
        transport.send(picows.WSMsgType.CONTINUATION, b"age", fin=True)
        transport.send(picows.WSMsgType.TEXT, b"another")

    server, link = await link_to(act)
    got: list[bytes] = []
    async with asyncio.timeout(SECONDS_MAX):
        while len(got) < 2:
            got += await link.receive()
        await link.close()

    assert got == [b"one message", b"another"]
    server.close()


async def test_a_private_close_code_comes_through() -> None:
    """The server's own close code and reason reach the client after the last message."""

    def act(transport: picows.WSTransport) -> None:
        transport.send(picows.WSMsgType.TEXT, b"bye")
        transport.send_close(4001, b"replaced")  # type: ignore[arg-type]

    server, link = await link_to(act)
    async with asyncio.timeout(SECONDS_MAX):
        assert await link.receive() == [b"bye"]
        with pytest.raises(LinkClosed) as caught:
            await link.receive()

    assert (caught.value.close_code, caught.value.reason) == (4001, "replaced")
    server.close()


async def test_a_line_that_breaks_is_told() -> None:
    """Without a close message the code is 1006."""
    server, link = await link_to(lambda transport: transport.disconnect(graceful=False))
    async with asyncio.timeout(SECONDS_MAX):
        with pytest.raises(LinkClosed, match="1006"):
            await link.receive()
    server.close()


async def test_a_message_that_is_too_large_ends_the_connection() -> None:
    """Whether in one piece or in many, more than the bound is not kept."""

    def in_pieces(transport: picows.WSTransport) -> None:
        transport.send(picows.WSMsgType.TEXT, b"x" * 600, fin=False)
        transport.send(picows.WSMsgType.CONTINUATION, b"x" * 600, fin=True)

    def at_once(transport: picows.WSTransport) -> None:
        transport.send(picows.WSMsgType.TEXT, b"x" * 1200)

    for act in (in_pieces, at_once):
        server, link = await link_to(act, WebSocketConnector(message_bytes_max=1000))
        async with asyncio.timeout(SECONDS_MAX):
            with pytest.raises(LinkClosed):
                await link.receive()
        server.close()


async def test_many_messages_pause_the_socket_and_all_arrive() -> None:
    """A client that is slow to take them gets every message, in order."""

    def act(transport: picows.WSTransport) -> None:
        for n in range(2000):
            transport.send(picows.WSMsgType.TEXT, b"%d" % n)

    server, link = await link_to(act, WebSocketConnector(messages_max=10))
    got: list[bytes] = []
    async with asyncio.timeout(SECONDS_MAX):
        while len(got) < 2000:
            got += await link.receive()
        await link.close()

    assert got == [b"%d" % n for n in range(2000)]
    server.close()
