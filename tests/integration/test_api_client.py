"""``HttpClient`` against a node, and against a network that fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from tidings.client.errors import RemoteRefused, RemoteUnavailable
from tidings.client.http import HttpClient
from tidings.core.events import Event, EventMeta
from tidings.log.interface import Appended, Duplicate
from tidings.testing.node import running_node


def event(number: int, event_id: str | None = None, topic: str = "demo") -> Event:
    return Event(EventMeta(topic=topic, type="NOTED", space_id="home", event_id=event_id), {"n": number})


class Impatient:
    """A clock whose sleeps are over at once, and noted."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now_ns(self) -> int:
        return 0

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


async def test_publish_and_read(tmp_path: Path) -> None:
    """What is published is read back, page by page, with verdicts and refusals as values and typed errors."""
    async with running_node(tmp_path) as node, HttpClient(node.url, node.token(topics=["demo"])) as client:
        assert isinstance(await client.publish(event(0, "e-0")), Appended)
        assert isinstance(await client.publish(event(0, "e-0")), Duplicate)
        verdicts = await client.publish_many([event(1), event(2, topic="secret"), event(3)])
        page = await client.read(topic="demo", limit=2)
        late = await client.read(from_time=datetime(2100, 1, 1, tzinfo=UTC))
        with pytest.raises(RemoteRefused) as refused:
            await client.read(topic="secret")
        me = await client.whoami()

    assert [each.verdict for each in verdicts] == ["appended", "refused", "appended"]
    assert [record.payload["n"] for record in page.events] == [0, 1]
    assert not page.at_end
    assert late.events == []
    assert refused.value.error_code == "access.forbidden"
    assert me["subject"] == "tester"


async def test_following_gives_each_event_once(tmp_path: Path) -> None:
    """Following gives what is there and then what comes, in order, without repeating any."""
    async with running_node(tmp_path) as node, HttpClient(node.url, node.token(topics=["demo"])) as client:
        await client.publish_many([event(n) for n in range(3)])
        seen: list[int] = []
        async for record in client.follow(topic="demo"):
            seen.append(record.payload["n"])
            if len(seen) < 6:
                await client.publish(event(len(seen) + 2))
            if len(seen) == 8:
                break

    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]


def failing(answers: list[Callable[[], httpx.Response]]) -> tuple[httpx.MockTransport, list[bytes]]:
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return answers.pop(0)()

    return httpx.MockTransport(answer), bodies


def broken() -> httpx.Response:
    raise httpx.ConnectError("refused")


async def test_what_passes_is_tried_again_with_the_same_event() -> None:
    """After a broken connection and a 503 the same bytes are sent again, so that the node can tell it is the same event."""
    done = {"verdict": "duplicate", "seq": 4, "offset": 3, "event_id": "x", "topic": "demo", "epoch": "e"}
    transport, bodies = failing(
        [broken, lambda: httpx.Response(503, text="busy"), lambda: httpx.Response(200, json=done)]
    )
    clock = Impatient()
    async with HttpClient("http://node", transport=transport, clock=clock, rng=random.Random(1)) as client:
        verdict = await client.publish(event(1))

    assert verdict == Duplicate(4, 3, "x")
    assert len(set(bodies)) == 1
    assert len(bodies) == 3
    assert len(clock.slept) == 2


async def test_what_does_not_pass_is_told() -> None:
    """A node that stays away is told as such after the last try; a refusal is told at once."""
    transport, bodies = failing([broken] * 3)
    async with HttpClient("http://node", transport=transport, clock=Impatient(), tries_max=3) as client:
        with pytest.raises(RemoteUnavailable, match="refused"):
            await client.publish(event(1))
    assert len(bodies) == 3

    problem = {"code": "log.id_conflict", "detail": "taken", "retryable": False, "hint": "another id"}
    transport, bodies = failing([lambda: httpx.Response(409, json=problem)])
    async with HttpClient("http://node", transport=transport) as client:
        with pytest.raises(RemoteRefused, match="taken") as refused:
            await client.publish(event(1))
    assert (refused.value.error_code, refused.value.hint, len(bodies)) == ("log.id_conflict", "another id", 1)
