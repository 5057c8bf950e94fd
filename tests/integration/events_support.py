"""A client of ``/events`` that does what it is told, and nothing by itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from picows import WSInvalidStatusError

from tests.integration.node_support import Client, connect, until
from tidings.access.guard import GuardSettings
from tidings.core.clock import SYSTEM_CLOCK, Clock, SystemClock
from tidings.core.events import Event, EventMeta
from tidings.gateway.settings import EventSettings
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.server.node import Node
from tidings.testing.node import RunningNode, node_settings, running_node

PATIENT = GuardSettings(rejections_max=10_000, overflows_max=10_000, limits_max=10_000)
"""A guard that lets a test go too far as often as it likes."""


class LeapingClock(SystemClock):
    """The machine's clock, and so much more as a test says."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def leap(self, seconds: float) -> None:
        self._ahead_s += seconds

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead_s

    def now_ns(self) -> int:
        return super().now_ns() + round(self._ahead_s * 1e9)


@contextlib.asynccontextmanager
async def events_node(
    workspace: Path, *, guard: GuardSettings = PATIENT, clock: Clock = SYSTEM_CLOCK, **sections: dict[str, Any]
) -> AsyncIterator[RunningNode]:
    """A node; ``sections`` are those of ``event``: ``queue={"per_connection": 4}``."""
    event = msgspec.convert(sections, EventSettings)
    settings = msgspec.structs.replace(node_settings(), event=event, guard=guard)
    async with running_node(workspace, settings, clock=clock) as node:
        yield node


async def tell(node: Node, *objects: str, topic: str = "orders", app: str | None = None) -> int:
    """Commit a record for each object; the last one's seq."""
    seq = 0
    for each in objects:
        meta = EventMeta(topic, "changed", "s", objects=(each,), app=app)
        seq = (await node.log.append(Event(meta, {"of": each}))).seq
    await node.services.dispatcher.reached(seq)
    return seq


async def on_record(node: RunningNode, category: str) -> list[dict[str, Any]]:
    """What the audit log has under a category, as ``subscription_rejected``."""
    await node.services.audit.flush(5.0)
    found = [each async for each in records(node.log, Query(topic="audit"))]
    return [
        json.loads(bytes(each.payload_json))
        for each in found
        if each.meta.type.partition(".")[2] == f"event.{category}"
    ]


class Subscriber:
    """One connection."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def say(self, **frame: Any) -> None:
        self.client.say(json.dumps(frame).encode())

    def subscribe(self, **filters: Any) -> None:
        kind = {} if "channels" in filters else {"subscription_type": "graph"}
        self.say(type="subscribe", **{"app_id": "default", **kind, **filters})

    def ack(self, frame: dict[str, Any]) -> None:
        self.say(type="ack", resume_token=frame["payload"]["resume_token"])

    @property
    def frames(self) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.client.heard]

    @property
    def envelopes(self) -> list[dict[str, Any]]:
        return [each for each in self.frames if each["event"] not in ("subscribed", "error")]

    @property
    def objects(self) -> list[str]:
        """The objects of the graph envelopes that came, in order."""
        return [name for each in self.envelopes for name in each["payload"]["payload_summary"]["object_ids"]]

    async def subscribed(self, **filters: Any) -> dict[str, Any]:
        """Subscribe; the answer's payload."""
        self.subscribe(**filters)
        await self.client.hear(1)
        assert self.frames[0]["event"] == "subscribed", self.frames
        payload: dict[str, Any] = self.frames[0]["payload"]
        return payload

    async def heard(self, count: int) -> list[dict[str, Any]]:
        """So many envelopes."""
        await until(lambda: len(self.envelopes) >= count or self.client.is_gone)
        return self.envelopes

    async def refusal(self) -> tuple[int | None, str, dict[str, Any]]:
        """How it ended: code, reason, and what the last frame said of it."""
        code = await self.client.ended()
        last = self.frames[-1]
        assert last["event"] == "error"
        error: dict[str, Any] = last["payload"]["error"]
        return code, self.client.close_reason, error


def address_of(node: RunningNode, subject: str, query: str = "", **claims: Any) -> str:
    """Where somebody connects; without claims, one who may read topic ``orders``."""
    token = node.token(subject, **(claims or {"topics": ["orders"]}))
    return f"{node.ws_url}/events?token={token}{query}"


@contextlib.asynccontextmanager
async def subscriber(
    node: RunningNode, subject: str = "alice", query: str = "", headers: dict[str, str] | None = None, **claims: Any
) -> AsyncIterator[Subscriber]:
    """An open connection that has not subscribed."""
    client = await connect(address_of(node, subject, query, **claims), extra_headers=headers)
    try:
        yield Subscriber(client)
    finally:
        client.transport.disconnect(False)
        await until(lambda: client.is_gone)


async def refused(
    url: str, headers: dict[str, str] | list[tuple[str, str]] | None = None
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, problem and headers of the answer to who may not connect."""
    with pytest.raises(WSInvalidStatusError) as answer:
        await connect(url, extra_headers=headers)
    response, body = answer.value.response, answer.value.raw_body
    assert response is not None
    assert body is not None
    return int(response.status), json.loads(body), {name.lower(): value for name, value in response.headers.items()}
