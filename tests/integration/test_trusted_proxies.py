"""Behind a trusted proxy, limits and denials by address reach the client that it names, over HTTP and for sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.integration.node_support import TalkEndpoint, until, until_answered
from tidings.access.guard import AbuseReport
from tidings.server.edge import ACCESS_LOGGER
from tidings.testing.node import RunningNode, running_node

FIRST, SECOND = {"x-forwarded-for": "198.51.100.1"}, {"x-forwarded-for": "198.51.100.2"}


async def upgrade_status(node: RunningNode, client: str, more: str = "") -> int:
    """The status of an upgrade that a client asks for through the proxy; a granted one stays open until the node ends it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rpartition(":")[2]))
    writer.write(
        f"GET /echo HTTP/1.1\r\nHost: n\r\nX-Forwarded-For: {client}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{more}"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    async with asyncio.timeout(20):
        line = await reader.readline()
    _OPEN.append(writer)
    return int(line.split()[1])


_OPEN: list[asyncio.StreamWriter] = []


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_a_denied_client_does_not_shut_out_the_others(tmp_path: Path, is_trusted: bool) -> None:
    """A directive on an address reaches requests and sockets of that client; what an untrusted peer writes counts for nothing."""
    async with (
        running_node(
            tmp_path, endpoints={"/echo": TalkEndpoint()}, trusted_proxies=("127.0.0.1",) if is_trusted else ()
        ) as node,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        node.services.guard.report(AbuseReport(kind="limit", count=30, window_ms=60_000, address="198.51.100.1"))
        statuses = [(await client.get("/v1/topics", headers=each)).status_code for each in (FIRST, SECOND)]
        upgrades = [await upgrade_status(node, each) for each in ("198.51.100.1", "198.51.100.2")]
        good = await client.get("/v1/topics", headers={**FIRST, **node.headers("root", roles=["admin"])})
        for writer in _OPEN:
            writer.close()

    assert statuses == ([503, 401] if is_trusted else [401, 401])
    assert upgrades == ([503, 101] if is_trusted else [101, 101])
    assert good.status_code == 200, "who shows a good token is let in"


async def test_limits_by_address_are_the_clients_own(tmp_path: Path) -> None:
    """One client behind the proxy that takes all its sockets and requests leaves the others theirs."""
    async with (
        running_node(
            tmp_path,
            endpoints={"/echo": TalkEndpoint()},
            trusted_proxies=("127.0.0.1",),
            connections_per_address_max=2,
            requests_per_address_max=2,
        ) as node,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        upgrades = [await upgrade_status(node, "198.51.100.1") for _ in range(3)]
        upgrades.append(await upgrade_status(node, "198.51.100.2"))
        token = node.headers("root", roles=["admin"])
        waiting = [
            asyncio.ensure_future(client.get("/v1/events?wait=30", headers={**token, **FIRST})) for _ in range(2)
        ]
        await until(lambda: node._parts is not None and node._parts.http.request_count == 2)
        third = await client.get("/metrics", headers={**token, **FIRST})
        other = await client.get("/metrics", headers={**token, **SECOND})
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

        async def again() -> int:
            return (await client.get("/metrics", headers={**token, **FIRST})).status_code

        await until_answered(again, 200)
        for writer in _OPEN:
            writer.close()

    assert upgrades == [101, 101, 503, 101]
    assert (third.status_code, third.json()["code"]) == (503, "node.too_many_connections")
    assert other.status_code == 200


async def test_the_log_and_metrics_see_the_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The access log names the client; a client that is not of this machine sees no metrics without a token, though its proxy is."""
    caplog.set_level("INFO", ACCESS_LOGGER)
    async with (
        running_node(tmp_path, access_log=True, trusted_proxies=("127.0.0.1",)) as node,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        far = await client.get("/metrics", headers=FIRST)
        near = await client.get("/metrics")

    peers = [vars(each)["peer"] for each in caplog.records if each.name == ACCESS_LOGGER]
    assert (far.status_code, near.status_code) == (401, 200)
    assert peers == ["198.51.100.1", "127.0.0.1"]


async def test_memory_of_strangers_behind_a_proxy_is_counted_by_client(tmp_path: Path) -> None:
    """Sockets through one proxy are charged to their clients: one cannot use up what strangers of one address have."""
    async with running_node(
        tmp_path,
        endpoints={"/echo": TalkEndpoint(knows_everybody=False)},
        trusted_proxies=("127.0.0.1",),
        unauthenticated_memory_bytes_max=65_536,
        read_buffer_bytes=8_192,
    ) as node:
        upgrades = [await upgrade_status(node, "198.51.100.1") for _ in range(5)]
        upgrades.append(await upgrade_status(node, "198.51.100.2"))
        for writer in _OPEN:
            writer.close()

    assert upgrades == [101, 101, 101, 101, 503, 101]
