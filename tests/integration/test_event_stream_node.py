"""``EventStream`` and a real node: every envelope once, in order, through kills, lost rights, slow programs and short windows."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest

from tests.integration.api_support import until
from tests.integration.cli.support import started
from tidings.access.context import TokenClaims
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.client.errors import RemoteRefused, RemoteStopped, RemoteUnavailable
from tidings.client.events import EventStream
from tidings.client.http import HttpClient
from tidings.client.websocket import WebSocketConnector
from tidings.core.clock import SYSTEM_CLOCK
from tidings.core.events import Event, EventMeta
from tidings.gateway.settings import DeliverySettings, EventSettings, QueueSettings
from tidings.testing.node import RunningNode, node_settings, running_node
from tidings.wire.gateway import CloseReason, ResumeEvents, SubscribeEvents, decode_from_node, encode, error_of

SECRET: Final = "a secret for the processes of these tests"


def about(number: int, **meta: Any) -> Event:
    """An event about an object; now and then about so many that it takes two envelopes."""
    objects = [f"order:{number}"] if number % 5 else [f"order:{number}-{each}" for each in range(70)]
    return Event(EventMeta("orders", "CHANGED", "shared:shop", f"e{number}", objects=objects, **meta), {"n": number})


@contextlib.asynccontextmanager
async def a_node(path: Path, **event: Any) -> AsyncIterator[tuple[RunningNode, HttpClient]]:
    """A node with settings of the gateway, and somebody who publishes there."""
    settings = msgspec.structs.replace(node_settings(), event=EventSettings(**event))
    async with running_node(path, settings) as node, HttpClient(node.url, node.token("boss", roles=["admin"])) as boss:
        yield node, boss


def stream(node: RunningNode, **options: Any) -> EventStream:
    """A stream of somebody who may read orders."""
    return EventStream(node.url, token=node.token("ana", topics=["orders"]), **options)


async def take(events: EventStream, count: int) -> list[int | None]:
    """The seqs of the next few."""
    async with asyncio.timeout(20):
        return [(await anext(events)).seq for _ in range(count)]


async def publish(boss: HttpClient, numbers: range) -> list[int]:
    """The seqs, as many times as each takes envelopes."""
    verdicts = await boss.publish_many([about(number) for number in numbers])
    seqs = [each.seq for each in verdicts]
    assert all(isinstance(seq, int) for seq in seqs)
    return [seq for seq, number in zip(seqs, numbers, strict=True) for _ in range(1 if number % 5 else 2)]  # type: ignore[misc]


async def test_a_slow_program_sees_everything(tmp_path: Path) -> None:
    """Far more than the buffer holds happens while it is busy; its connection is closed, and it misses nothing."""
    async with a_node(tmp_path, queue=QueueSettings(per_connection=8)) as (node, boss), stream(node) as events:
        sent = await publish(boss, range(1, 3))
        got = await take(events, 1)
        sent += await publish(boss, range(3, 120))
        await until(lambda: not len(node.services.gateway.registry))
        got += await take(events, len(sent) - 1)

    assert got == sent


async def test_a_window_that_has_passed_is_caught_up_over_http(tmp_path: Path) -> None:
    """The token is of no use any more when the program comes back; what it missed is read, and joined with what is new."""
    async with a_node(tmp_path, delivery=DeliverySettings(resume_window=4)) as (node, boss), stream(node) as events:
        sent = await publish(boss, range(1, 2))
        got = await take(events, 1)
        assert events._link is not None
        await events._link.close()
        sent += await publish(boss, range(2, 60))
        got += await take(events, len(sent) - 1)
        waiting = asyncio.ensure_future(take(events, 1))
        await until(lambda: len(node.services.gateway.registry))
        sent += await publish(boss, range(61, 62))
        got += await waiting

    assert got == sent


@pytest.mark.req("R121")
async def test_who_cannot_resume_is_told_to_read_and_finds_it_there(tmp_path: Path) -> None:
    """The refusal of a resume names the read to do; that read has what was missed."""
    async with a_node(tmp_path) as (node, boss):
        token = node.token("ana", topics=["orders"])
        sent = await publish(boss, range(1, 4))
        link = await WebSocketConnector(headers={"authorization": f"Bearer {token}"}).connect(f"{node.ws_url}/events")
        link.send(encode(ResumeEvents("of an earlier life")))
        link.send(encode(SubscribeEvents(app_id="default", subscription_type="graph")))
        (frame,) = [decode_from_node(each) for each in await link.receive()]
        hint = error_of(frame).data
        async with httpx.AsyncClient(base_url=node.url, headers={"authorization": f"Bearer {token}"}) as client:
            answer = await client.request(hint["method"], hint["path"], params={"since": 0})

    assert (hint["reason"], hint["action"], isinstance(hint["since"], int)) == (
        CloseReason.RESUME_INVALID.reason,
        "http_catch_up",
        True,
    )
    assert [each["sequence_anchor"]["global_seq"] for each in answer.json()["envelopes"]] == sent


async def test_rights_are_those_of_now(tmp_path: Path) -> None:
    """What happens while the right is gone is not delivered, what happens after it is given back is; a subject that is revoked is told so."""
    async with a_node(tmp_path) as (node, boss), stream(node) as events:
        sent = await publish(boss, range(1, 3))
        assert await take(events, 2) == sent
        async with httpx.AsyncClient(base_url=node.url, headers=node.headers("boss", roles=["admin"])) as admin:
            right = {"subject": "ana", "action": "read", "resource": "space:shared:shop"}
            await admin.post("/v1/access/revocations", json=right)
            hidden = await publish(boss, range(3, 5))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await anext(events)
            await admin.post("/v1/access/grants", json=right)
        sent = await publish(boss, range(6, 8))
        assert await take(events, 2) == sent
        assert hidden[-1] < sent[0]
        async with httpx.AsyncClient(base_url=node.url, headers=node.headers("boss", roles=["admin"])) as admin:
            await admin.post("/v1/access/revocations", json={"type": "access.subject_revoked", "subject": "ana"})
        with pytest.raises(RemoteStopped):
            await take(events, 1)


async def test_what_the_node_refuses_is_said(tmp_path: Path) -> None:
    """A token that is no token, an app that is none, a filter that may not be, a place behind the end: each ends with what the node says of it."""
    async with a_node(tmp_path) as (node, _):
        cases: tuple[tuple[dict[str, Any], str], ...] = (
            ({"token": "no"}, "token"),
            ({"app": "nobody"}, "there is no app"),
            ({"domain": "secret"}, "permission_denied"),
            ({"objects": ["nothing"]}, "filter_invalid"),
            ({"channels": ["system.*"]}, "permission_denied"),
        )
        for options, problem in cases:
            given = {"token": node.token("ana", topics=["orders"]), **options}
            with pytest.raises(RemoteStopped, match=problem):
                await EventStream(node.url, **given).__aenter__()
        async with stream(node, app="nobody", since=0) as events:
            with pytest.raises(RemoteRefused, match="app"):
                await anext(events)
        async with stream(node, since=1_000_000) as events:
            with pytest.raises(RemoteRefused, match=r"log\.position_ahead"):
                await anext(events)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Eager(random.Random):
    """Draws short pauses: what is waited for is a process that starts."""

    def uniform(self, a: float, b: float) -> float:
        return min(b, 0.1)


@pytest.mark.slow
@pytest.mark.req("R101", "R239")
async def test_killed_again_and_again_nothing_is_missed_or_seen_twice(tmp_path: Path) -> None:
    """SIGKILL at any moment while events are published and followed: the program sees what the log has, once, in its order."""
    port, chance = free_port(), random.Random(14)
    file = tmp_path / "node.toml"
    file.write_text(
        f'[server]\nport = {port}\nlog_level = "error"\n[log]\njournal_bytes = 1048576\n[access.tokens]\nsecret = "{SECRET}"\n'
        "[event.delivery]\nresume_window = 64\nmax_msgs_per_sec = 2000\n"
    )
    issuer = TokenIssuer(TokenSettings(secret=SECRET), SYSTEM_CLOCK)
    admin = issuer.issue("boss", claims=TokenClaims(roles=frozenset({"admin"})))
    reader = issuer.issue("ana", claims=TokenClaims(topics=frozenset({"orders"})))
    url = f"http://127.0.0.1:{port}"
    got: list[tuple[int | None, int]] = []
    number = 0

    async def follow() -> None:
        async with EventStream(url, token=reader, since=0, rng=Eager()) as events:
            async for envelope in events:
                got.append((envelope.seq, envelope.payload_summary.get("part", 1)))
                if number % 50 == 0:
                    await asyncio.sleep(chance.random() / 20)

    async def publish_until(stop: asyncio.Event) -> None:
        nonlocal number
        async with HttpClient(url, admin, tries_max=1) as boss:
            while not stop.is_set():
                with contextlib.suppress(RemoteUnavailable, RemoteRefused):
                    await boss.publish(about(number))  # the same again, if it is not known what became of it
                    number += 1
                await asyncio.sleep(0)

    expected: list[tuple[int, int]] = []
    following = asyncio.create_task(follow())
    for turn in range(3):
        with started("serve", "-w", tmp_path / "workspace", "--config", file, "--json") as process:
            await asyncio.to_thread(process.json)
            stop, before = asyncio.Event(), len(got)
            publishing = asyncio.create_task(publish_until(stop))
            await until(lambda before=before: len(got) >= before + 40)  # type: ignore[misc]
            await asyncio.sleep(chance.random() / 20)
            if turn < 2:
                process.process.send_signal(signal.SIGKILL)
                stop.set()
                await publishing
                continue
            stop.set()
            await publishing
            async with HttpClient(url, admin) as boss:
                page = await boss.read(topic="orders", limit=1000)
                records = page.events
                while not page.at_end:
                    page = await boss._page(page.next, {})
                    records += page.events
            for record in records:
                expected += [(record.seq, part) for part in range(1, 2 if record.payload["n"] % 5 else 3)]
            count = len(expected)
            await until(lambda count=count: len(got) >= count)  # type: ignore[misc]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)

    assert got == expected
