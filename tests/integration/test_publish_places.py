"""Places among those that publish over HTTP: taken when the body is there, and shared between identities."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tidings.testing.node import RunningNode, running_node
from tidings.types import Ack, ReceivedEvent

from .api_support import event, until


async def slow_body(node: RunningNode, token: str) -> asyncio.StreamWriter:
    """A publish whose body never comes."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rsplit(":", 1)[1]))
    head = (
        "POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {token}\r\nContent-Length: 1000\r\n\r\n{{"
    )
    writer.write(head.encode())
    await writer.drain()
    return writer


async def test_slow_bodies_keep_no_publisher_out(tmp_path: Path) -> None:
    """With ten times as many requests that wait for their bodies as there are places, an event is published at once."""
    async with running_node(tmp_path, requests_max=50, requests_per_address_max=50) as node:
        token = node.token("nobody")
        writers = [await slow_body(node, token) for _ in range(40)]
        async with httpx.AsyncClient(base_url=node.url, headers=node.headers(roles=["admin"])) as client:
            answer = await client.post("/v1/events", json=event())
        for writer in writers:
            writer.close()

    assert answer.status_code == 201


async def test_one_identity_gets_a_share_of_the_places(tmp_path: Path) -> None:
    """An identity whose publishes wait for a full window is refused the one beyond its quarter; others publish."""
    stuck = asyncio.Event()

    async def wait(_: ReceivedEvent) -> Ack:
        await stuck.wait()
        return Ack()

    async with running_node(tmp_path, requests_max=16) as node:
        await node.bus.subscribe("demo", "slow", wait, max_inflight=1, stall_timeout_s=3600)
        ann, bob = (node.headers(name, topics=["demo", "other"]) for name in ("ann", "bob"))
        async with httpx.AsyncClient(base_url=node.url, timeout=60) as client:
            first = await client.post("/v1/events", json=event(), headers=ann)
            window = node.bus._started_now.publishing.windows["demo"]
            waiting = [asyncio.ensure_future(client.post("/v1/events", json=event(), headers=ann)) for _ in range(2)]
            await until(lambda: len(window.waiting) == 2)
            refused = [await client.post("/v1/events", json=event(topic="other"), headers=ann) for _ in range(20)]
            other = await client.post("/v1/events", json=event(topic="other"), headers=bob)
            stuck.set()
            after = await asyncio.gather(*waiting)
            last = await client.post("/v1/events", json=event(topic="other"), headers=ann)

    assert first.status_code == 201
    assert {(answer.status_code, answer.json()["code"]) for answer in refused} == {(503, "node.too_many_publishes")}
    assert [answer.status_code for answer in (other, *after, last)] == [201] * 4
