"""Limits of /events at a node's socket: at the limit a client is served; beyond it the refusal is typed, and others are served on."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from picows import WSInvalidStatusError

from tests.beyond import Beyond, crossed
from tests.integration.events_support import LeapingClock, address_of, events_node, subscriber, tell
from tests.integration.node_support import connect, until
from tidings.access.guard import GuardSettings
from tidings.gateway import constants, names
from tidings.testing.node import RunningNode
from tidings.wire import gateway as wire


async def is_served(node: RunningNode, subject: str, **filters: Any) -> bool:
    """Connect and subscribe once. Return whether that was accepted; a refusal may come at the upgrade or after it."""
    try:
        client = await connect(address_of(node, subject))
    except WSInvalidStatusError:
        return False
    client.say(json.dumps({"type": "subscribe", "app_id": "default", "subscription_type": "graph", **filters}).encode())
    await client.hear(1)
    accepted: bool = json.loads(client.heard[0])["event"] == "subscribed"
    client.transport.disconnect(False)
    return accepted


@pytest.mark.bound(
    "gateway.settings.WebSocketSettings.max_connections",
    "gateway.settings.WebSocketSettings.max_connections_per_identity",
    "gateway.settings.WebSocketSettings.max_connections_per_app",
)
@crossed
@pytest.mark.parametrize("name", ["max_connections", "max_connections_per_identity", "max_connections_per_app"])
async def test_one_more_subscriber_is_refused(tmp_path: Path, name: str, beyond: Beyond) -> None:
    """As many subscribers as allowed get an event; each further one is refused, with the time to wait."""
    websocket: dict[str, Any] = {"max_connections": 100, "max_connections_per_identity": 90, name: 3}
    if name == "max_connections":
        websocket["max_connections_per_identity"] = 3
    async with events_node(tmp_path, websocket=websocket) as node, contextlib.AsyncExitStack() as stack:
        of_all = name == "max_connections_per_identity"
        served = []
        for number in range(3):
            one = await stack.enter_async_context(subscriber(node, "alice" if of_all else f"user{number}"))
            await one.subscribed()
            served.append(one)
        for number in range(3, beyond(3)):
            assert not await is_served(node, "alice" if of_all else f"user{number}")
        await tell(node, "order:1")
        for one in served:
            assert len(await one.heard(1)) == 1


@pytest.mark.bound("gateway.constants.CHANNELS_MAX", "gateway.names.NAME_CHARS_MAX", "gateway.names.SEGMENTS_MAX")
@crossed
@pytest.mark.parametrize("kind", ["channels", "name", "segments"])
async def test_a_larger_subscription_is_refused(tmp_path: Path, kind: str, beyond: Beyond) -> None:
    """More channels, a longer channel and one of more segments are refused with the reason; another client is served."""
    channels = {
        "channels": [f"system.c{number}" for number in range(beyond(constants.CHANNELS_MAX))],
        "name": ["system." + "c" * (beyond(names.NAME_CHARS_MAX) - 7)],
        "segments": [".".join(["system", *["c"] * (beyond(names.SEGMENTS_MAX) - 1)])],
    }[kind]
    async with events_node(tmp_path) as node, subscriber(node, "root", roles=["admin"]) as one:
        one.subscribe(channels=channels)
        code, _, _ = await one.refusal()
        assert code is not None
        async with subscriber(node) as other:
            await other.subscribed()


@pytest.mark.bound("wire.gateway.FRAME_BYTES_MAX", "wire.gateway.RESUME_TOKEN_CHARS_MAX")
@crossed
@pytest.mark.parametrize("kind", ["frame", "token"])
async def test_a_longer_frame_or_resume_token_ends_the_connection(tmp_path: Path, kind: str, beyond: Beyond) -> None:
    """A longer frame, or an acknowledgement with a longer token, closes this connection and no other."""
    async with events_node(tmp_path) as node, subscriber(node) as one, subscriber(node, "bob") as other:
        await one.subscribed()
        await other.subscribed()
        if kind == "frame":
            one.client.say(b'{"type": "ack", "resume_token": "' + b"x" * beyond(wire.FRAME_BYTES_MAX) + b'"}')
        else:
            one.say(type="ack", resume_token="x" * beyond(wire.RESUME_TOKEN_CHARS_MAX))
        assert await one.client.ended() is not None
        await tell(node, "order:1")
        assert len(await other.heard(1)) == 1


@pytest.mark.bound("gateway.constants.SUMMARY_ITEMS_MAX", "access.visibility.OBJECTS_COUNT_MAX")
@crossed
async def test_a_record_with_more_objects_takes_several_envelopes(tmp_path: Path, beyond: Beyond) -> None:
    """A record with more objects than an envelope holds is delivered in parts of one seq; every object is in one of them."""
    objects = [f"order:{number}" for number in range(beyond(constants.SUMMARY_ITEMS_MAX))]
    async with events_node(tmp_path) as node, subscriber(node) as one:
        await one.subscribed()
        await node.bus.publish("orders", {}, type="PLACED", space="s", objects=objects)
        await until(lambda: sorted(one.objects) == sorted(objects))
        parts = [each["payload"]["payload_summary"] for each in one.envelopes]
        assert {part["parts"] for part in parts} == {len(parts)}
        assert all(len(part["object_ids"]) <= constants.SUMMARY_ITEMS_MAX for part in parts)


@pytest.mark.bound("gateway.settings.DeliverySettings.max_msgs_per_sec")
@crossed
async def test_envelopes_beyond_the_rate_wait(tmp_path: Path, beyond: Beyond) -> None:
    """A subscriber gets no more than its rate at once; the others follow when time passes, and none is lost."""
    clock = LeapingClock()
    async with events_node(tmp_path, clock=clock, delivery={"max_msgs_per_sec": 5}) as node, subscriber(node) as one:
        await one.subscribed()
        count = beyond(5)
        await tell(node, *(f"order:{number}" for number in range(count)))
        await one.heard(5)
        assert len(one.envelopes) < count
        while len(one.envelopes) < count:
            before = len(one.envelopes)
            for envelope in one.envelopes[-1:]:
                one.ack(envelope)
            clock.leap(1.0)
            await one.heard(before + 1)
        assert one.objects == [f"order:{number}" for number in range(count)]


@pytest.mark.bound("gateway.constants.SUBSCRIBE_TIMEOUT_S")
@crossed
async def test_a_connection_without_a_subscription_is_closed(tmp_path: Path, beyond: Beyond) -> None:
    """A client that has not subscribed in time is closed; one that subscribed in time stays."""
    clock = LeapingClock()
    async with events_node(tmp_path, clock=clock) as node, subscriber(node) as idle, subscriber(node, "bob") as other:
        await other.subscribed()
        clock.leap(beyond(int(constants.SUBSCRIBE_TIMEOUT_S)) if beyond(1) == 2 else 14.0)
        assert await idle.client.ended() is not None
        assert not other.client.is_gone


@pytest.mark.bound("access.guard.GuardSettings.rejections_max", "access.guard.GuardSettings.overflows_max")
@crossed
async def test_repeated_refusals_deny_subscriptions_and_nothing_else(tmp_path: Path, beyond: Beyond) -> None:
    """An identity whose subscriptions are refused too often is denied new ones for a time; it can still publish and read."""
    guard = GuardSettings(rejections_max=3, overflows_max=3)
    async with events_node(tmp_path, guard=guard) as node:
        for _ in range(beyond(3)):
            assert not await is_served(node, "mallory", channels=["system.secret"], subscription_type=None)
        assert not await is_served(node, "mallory")
        headers = {"Authorization": f"Bearer {node.token('mallory', topics=['orders'])}"}
        async with httpx.AsyncClient(base_url=node.url, headers=headers) as http:
            body = {"meta": {"topic": "orders", "type": "PLACED", "space_id": "s"}, "payload": {}}
            assert (await http.post("/v1/events", json=body)).status_code == 201
            assert (await http.get("/v1/events?topic=orders")).status_code == 200
        async with subscriber(node, "bob") as other:
            await other.subscribed()
