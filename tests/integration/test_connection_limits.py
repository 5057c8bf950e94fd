"""What a socket may do before its peer has shown a token, and how fast after that: at every endpoint, over real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from tidings.server.settings import ServerSettings
from tidings.testing.node import RunningNode, running_node
from tidings.wire import groups as wire

from .node_support import Client, TalkEndpoint, connect, connected, until

PATHS = pytest.mark.parametrize("path", ["/sync", "/groups", "/talk"])
PING, PONG, TEXT, CLOSE = 0x9, 0xA, 0x1, 0x8


def frame(opcode: int, payload: bytes = b"", *, is_last: bool = True, rsv: int = 0) -> bytes:
    """A client's frame, masked with zeros."""
    first = (0x80 if is_last else 0) | rsv | opcode
    size = len(payload)
    if size < 126:
        head = bytes((first, 0x80 | size))
    elif size < 65_536:
        head = bytes((first, 0x80 | 126)) + struct.pack(">H", size)
    else:
        head = bytes((first, 0x80 | 127)) + struct.pack(">Q", size)
    return head + bytes(4) + payload


class Raw:
    """A socket whose client does as it likes, and does not read unless it is told to."""

    def __init__(self, inner: socket.socket) -> None:
        self.inner = inner

    async def send(self, data: bytes) -> bool:
        """Whether all of it was taken within the time."""
        try:
            async with asyncio.timeout(3):
                await asyncio.get_running_loop().sock_sendall(self.inner, data)
        except (TimeoutError, ConnectionError):
            return False
        return True

    async def close_code(self) -> int | None:
        """Read to the end; the code of the close frame that came, if one did."""
        found, data = None, b""
        async with asyncio.timeout(20):
            while True:
                try:
                    piece = await asyncio.get_running_loop().sock_recv(self.inner, 65_536)
                except ConnectionError:
                    break
                if not piece:
                    break
                data += piece
                while len(data) >= 2:
                    size, skip = data[1] & 0x7F, 2
                    if size == 126:
                        size, skip = int.from_bytes(data[2:4]), 4
                    if len(data) < skip + size:
                        break
                    if data[0] & 0xF == CLOSE:
                        found = int.from_bytes(data[skip : skip + 2])
                    data = data[skip + size :]
        self.inner.close()
        return found


async def raw(node: RunningNode, path: str) -> Raw:
    host, _, port = node.url.rpartition("/")[2].rpartition(":")
    inner = socket.socket()
    inner.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    inner.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(inner, (host, int(port)))
    head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    await loop.sock_sendall(inner, (head + key).encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += await loop.sock_recv(inner, 1)
    assert answer.startswith(b"HTTP/1.1 101"), answer
    return Raw(inner)


def endpoint() -> TalkEndpoint:
    return TalkEndpoint(knows_everybody=False)


@PATHS
@pytest.mark.parametrize("opcode", [PING, PONG], ids=["ping", "pong"])
async def test_pings_before_a_token_are_few(tmp_path: Path, path: str, opcode: int) -> None:
    """A socket that pings and reads nothing is closed after a handful, and holds nothing."""
    async with running_node(tmp_path, close_timeout_s=0.2, endpoints={"/talk": endpoint()}) as node:
        peer = await raw(node, path)
        await peer.send(frame(opcode, bytes(125)) * 400)
        waiting = [each.buffered_bytes for each in node.connections._open]
        code = await peer.close_code()

    assert code == 1008
    assert sum(waiting) <= ServerSettings().unauthenticated_bytes_max


@PATHS
async def test_messages_before_a_token_are_few(tmp_path: Path, path: str) -> None:
    """Heartbeats, and whatever else is allowed before a token, end the connection when there are too many."""
    said = {
        "/sync": b'{"type":"heartbeat","msg_id":"m","timestamp":0,"protocol_version":"1.0","payload":{}}',
        "/groups": wire.encode(wire.Ping(ref=1)),
        "/talk": b"hello",
    }[path]
    async with running_node(tmp_path, close_timeout_s=0.2, endpoints={"/talk": endpoint()}) as node:
        async with connected(f"{node.ws_url}{path}") as client:
            for _ in range(ServerSettings().unauthenticated_messages_max + 1):
                client.say(said)
            assert await client.ended() == 1008
        assert len(client.heard) <= ServerSettings().unauthenticated_messages_max


@PATHS
@pytest.mark.parametrize("kind", ["one frame", "fragments", "half a frame"])
async def test_bytes_before_a_token_are_few(tmp_path: Path, path: str, kind: str) -> None:
    """A long message is cut short before it is whole, however it is divided."""
    long = bytes(1_000_000)
    sent = {
        "one frame": frame(TEXT, long),
        "fragments": frame(TEXT, b"", is_last=False) + frame(0, b"a" * 100, is_last=False) * 10_000,
        "half a frame": frame(TEXT, long)[:500_000],
    }[kind]
    async with running_node(tmp_path, close_timeout_s=0.2, endpoints={"/talk": endpoint()}) as node:
        peer = await raw(node, path)
        await peer.send(sent)
        code = await peer.close_code()
        await until(lambda: not len(node.connections))

    assert code in (1008, None)  # none where the rest of what was sent met a closed connection


@PATHS
async def test_a_token_is_shown_in_seconds(tmp_path: Path, path: str) -> None:
    """A silent socket, and one that pings now and then, are closed in time."""
    async with running_node(
        tmp_path, close_timeout_s=0.2, endpoints={"/talk": endpoint()}, unauthenticated_timeout_s=0.5
    ) as node:
        silent, pinging = await raw(node, path), await raw(node, path)
        await pinging.send(frame(PING, b"x"))
        assert (await silent.close_code(), await pinging.close_code()) == (1008, 1008)


@PATHS
async def test_few_sockets_of_an_address_are_without_a_token(tmp_path: Path, path: str) -> None:
    """Beyond the limit the next one gets 503; one that has shown its token takes no such place."""
    async with running_node(
        tmp_path, close_timeout_s=0.2, endpoints={"/talk": endpoint()}, unauthenticated_per_address_max=3
    ) as node:
        clients = [await connect(f"{node.ws_url}{path}") for _ in range(3)]
        with pytest.raises(Exception, match="503"):
            await connect(f"{node.ws_url}{path}")
        clients[0].transport.disconnect(False)
        await until(lambda: len(node.connections) == 2)
        member = await connect(f"{node.ws_url}/groups")
        member.say(wire.encode(wire.Hello(token=node.token("a", topics=["demo"]))))
        await member.hear(1)
        clients.append(await connect(f"{node.ws_url}{path}"))
        assert not member.is_gone


async def hello(node: RunningNode) -> Client:
    client = await connect(f"{node.ws_url}/groups")
    client.say(wire.encode(wire.Hello(token=node.token("worker", topics=["demo"]))))
    await client.hear(1)
    return client


async def test_messages_after_a_token_have_a_rate(tmp_path: Path) -> None:
    """What comes faster is read later: everything is answered, in the time that the rate takes."""
    async with running_node(tmp_path, messages_per_s_max=100) as node:
        client = await hello(node)
        began = asyncio.get_running_loop().time()
        for number in range(200):
            client.say(wire.encode(wire.Ping(ref=number)))
        count = len(await client.hear(201))
        took_s = asyncio.get_running_loop().time() - began

    assert count == 201
    assert took_s > 0.8


async def test_pings_after_a_token_have_a_rate(tmp_path: Path) -> None:
    """A flood of pings closes the connection of a member too."""
    async with running_node(tmp_path, control_frames_per_s_max=5) as node:
        client = await hello(node)
        for _ in range(20):
            client.transport.send_ping(b"x")
        assert await client.ended() == 1008


async def test_a_peer_that_does_not_read_is_closed_with_a_code(tmp_path: Path) -> None:
    """Who takes nothing of what waits for it, between two looks, is told 1013 if it ever reads again."""

    def flood(talk: Any, message: bytes) -> None:
        talk.transport.send([os.urandom(1).hex().encode() * 500_000])

    async with running_node(tmp_path, endpoints={"/talk": TalkEndpoint(flood)}, close_timeout_s=10.0) as node:
        peer = await raw(node, "/talk")
        for _ in range(8):
            await peer.send(frame(TEXT, b"more"))
        await until(lambda: any(each.buffered_bytes > 1_000_000 for each in node.connections._open))
        await node.connections.sweep()
        await peer.send(frame(PING))  # it is there, and does not read
        await node.connections.sweep()
        ends = [each._close_code for each in node.connections._open]
        peer.inner.close()

    assert ends == [1013]


async def test_addresses_of_one_network_are_one_peer() -> None:
    """Of IPv6 the first 64 bits count; an IPv4 address is the same however it is written."""
    from tidings.server.edge import PeerCounts

    peers = PeerCounts()
    peers.entered("2001:db8::1")
    peers.entered("2001:db8::2:3")
    peers.entered("192.0.2.1")

    assert peers.count("2001:db8:0:0:ffff::") == 2
    assert peers.count("2001:db8:0:1::1") == 0
    assert peers.count("::ffff:192.0.2.1") == 1
