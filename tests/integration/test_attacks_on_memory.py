"""Clients without a token, as many as the settings allow, cost a node at most 64 MiB, whatever they do; and the account is returned."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx
import psutil  # type: ignore[import-untyped]  # has no stubs
import pytest

from tests.integration.test_connection_limits import TEXT, frame

_MIB: Final = 1 << 20
_PROGRAM: Final = Path(__file__).with_name("node_alone.py")
_POST: Final = b"POST /v1/events HTTP/1.1\r\nHost: n\r\n"
_SOCKET: Final = (
    b"GET %b HTTP/1.1\r\nHost: n\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def _on_socket(path: bytes) -> bytes:
    return _SOCKET % path + frame(TEXT, b"x" * 1_000, is_last=False) + frame(0, b"x" * 1_000, is_last=False) * 60


ATTACKS: Final = {
    "pipelined requests": b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n" * 9_000,
    "pipelined requests of 16 KB": (b"GET /healthz HTTP/1.1\r\nHost: n\r\n" + b"X: y\r\n" * 2_700 + b"\r\n") * 20,
    "a head without end": b"GET /healthz HTTP/1.1\r\nHost: n\r\n" + b"X:y\r\n" * 12_000,
    "a head of many headers": b"GET /v1/openapi.json HTTP/1.1\r\nHost: n\r\n" + b"a:\r\n" * 15_500 + b"\r\n",
    "a long head, answered": b"GET /healthz HTTP/1.1\r\nHost: n\r\n" + (b"a:" + b"x" * 250 + b"\r\n") * 240 + b"\r\n",
    "a header without end": b"GET /healthz HTTP/1.1\r\nHost: n\r\nX: " + b"y" * 60_000,
    "a body without end": _POST + b"Content-Length: 16000000\r\n\r\n" + b" " * 2_000_000,
    "chunks without end": _POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000,
    "a body that is awaited": _POST + b"Expect: 100-continue\r\nContent-Length: 16000000\r\n\r\n" + b" " * 1_000_000,
    "a trailer without end": _POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"y" * 1_000_000,
    "long answers unread": b"GET /v1/openapi.json HTTP/1.1\r\nHost: n\r\n\r\n" * 300,
    "fragments to /sync": _on_socket(b"/sync"),
    "fragments to /groups": _on_socket(b"/groups"),
    "fragments to /events": _on_socket(b"/events"),
    "fragments to /happenings": _on_socket(b"/happenings"),
}
ALL: Final = "all of them"


class Attackers:
    """Connections from several addresses of this machine that send and never read."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._sockets: list[socket.socket] = []

    def attack(self, number: int, data: bytes) -> None:
        """Connect, and send as much as is taken."""
        peer = socket.socket()
        self._sockets.append(peer)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        peer.bind((f"127.0.1.{1 + number % 8}", 0))
        peer.connect(("127.0.0.1", self._port))
        peer.setblocking(False)
        self.send(number, data)

    def send(self, number: int, data: bytes) -> int:
        """Send what is taken of some bytes."""
        with contextlib.suppress(OSError):
            return self._sockets[number].send(data)
        return 0

    def leave(self) -> None:
        for peer in self._sockets:
            peer.close()


@contextlib.asynccontextmanager
async def node_alone() -> AsyncIterator[tuple[str, str, psutil.Process]]:
    process = await asyncio.create_subprocess_exec(sys.executable, _PROGRAM, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url, token = (await process.stdout.readline()).decode().split()
        yield url, token, psutil.Process(process.pid)
    finally:
        process.stdin.close()
        await process.wait()


async def unauthenticated_bytes(client: httpx.AsyncClient) -> int:
    text = (await client.get("/metrics")).text
    match = re.search(r'tidings_memory_held_bytes\{clients="unauthenticated"\} ([0-9.e+]+)', text)
    assert match is not None
    return int(float(match[1]))


@pytest.mark.slow
@pytest.mark.parametrize("count", [96, pytest.param(960, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("attack", [ALL, *(pytest.param(name, marks=pytest.mark.heavy) for name in ATTACKS)])
async def test_clients_without_a_token_cost_at_most_64_mib(attack: str, count: int) -> None:
    """They send until nothing more is taken; the node grows by less, answers others, and the account is empty when they have left."""
    kinds = list(ATTACKS.values()) if attack == ALL else [ATTACKS[attack]]
    async with node_alone() as (url, token, process), httpx.AsyncClient(base_url=url, timeout=60) as client:
        await client.get("/v1/topics", headers={"authorization": f"Bearer {token}"})
        before = await unauthenticated_bytes(client), process.memory_info().rss
        attackers, most = Attackers(int(url.rpartition(":")[2])), 0
        left = [kinds[number % len(kinds)] for number in range(count)]
        try:
            for number, data in enumerate(left):
                attackers.attack(number, data)
            for _ in range(20):  # more is taken as the node reads, and it is asked all the while
                for number, data in enumerate(left):
                    left[number] = data[attackers.send(number, data) :] or kinds[number % len(kinds)]
                assert (await client.get("/healthz")).status_code == 200
                most = max(most, process.memory_info().rss)
        finally:
            attackers.leave()
        async with asyncio.timeout(60):
            while await unauthenticated_bytes(client) > before[0]:
                pass

    print(f"{attack}, {count}: {(most - before[1]) / _MIB:.1f} MiB")  # ``pytest -s`` shows it
    assert most - before[1] < 64 * _MIB


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(150, marks=pytest.mark.heavy)])
async def test_bodies_of_one_identity_cost_no_more_than_its_share(count: int) -> None:
    """Bodies that are refused on connections that stay open are not kept: the node grows by less than the identity's 256 MiB."""
    async with node_alone() as (url, token, process), httpx.AsyncClient(base_url=url, timeout=60) as client:
        await client.get("/v1/topics", headers={"authorization": f"Bearer {token}"})
        before, most = process.memory_info().rss, 0
        head = (
            b"POST /v1/events HTTP/1.1\r\nHost: n\r\nAuthorization: Bearer %b\r\nContent-Length: 16000000\r\n\r\n"
            % token.encode()
        )
        left = [head + b" " * 15_000_000 for _ in range(count)]
        attackers = Attackers(int(url.rpartition(":")[2]))
        try:
            for number in range(count):
                attackers.attack(number, b"")
            for _ in range(400):
                for number, data in enumerate(left):
                    left[number] = data[attackers.send(number, data[:1_000_000]) :]
                assert (await client.get("/healthz")).status_code == 200
                most = max(most, process.memory_info().rss)
        finally:
            attackers.leave()

    print(f"{count}: {(most - before) / _MIB:.1f} MiB")  # ``pytest -s`` shows it
    assert most - before < 256 * _MIB
