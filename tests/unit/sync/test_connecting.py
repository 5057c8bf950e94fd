"""Connecting: who comes in, with which profile, for how long, and what is said to those who do not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.sync.support import EVERYTHING, OPEN_SCHEMAS, event, open_world, types
from tidings.access.context import TokenClaims
from tidings.sync.settings import SyncSettings


async def test_connected_tells_watermark_profile_and_limits() -> None:
    """The answer to connect has the log's own watermark and the bounds that hold."""
    settings = SyncSettings(schemas=OPEN_SCHEMAS, page_items_min=1, batch_items_max=7, model_version=3)
    async with open_world(settings) as world:
        await world.fill(5)
        peer = world.peer()

        answer = await peer.ask(
            "connect", {"token": world.token("C1"), "client_id": "C1", "supported_profiles": ["canonical"]}
        )

        assert answer["type"] == "connected"
        assert answer["protocol_version"] == "1.0"
        assert answer["payload"] == {
            "client_id": "C1",
            "server_time": world.clock.now_ns() // 1_000_000,
            "server_last_committed_id": 5,
            "capabilities": {"profile": "canonical", "accepted_event_types": ["event"]},
            "model_version": 3,
            "limits": {
                "max_batch_size": 7,
                "sync_limit_min": 1,
                "sync_limit_max": 1000,
                "max_message_bytes": 1 << 20,
                "max_in_flight_drafts": 200,
            },
        }


@pytest.mark.parametrize(
    ("offered", "asked", "chosen"),
    [
        (("canonical", "compatibility"), {}, "compatibility"),
        (("canonical", "compatibility"), {"supported_profiles": ["compatibility", "canonical"]}, "canonical"),
        (
            ("canonical", "compatibility"),
            {"supported_profiles": ["canonical", "compatibility"], "required_profile": "compatibility"},
            "compatibility",
        ),
        (("canonical",), {}, None),
        (("canonical",), {"supported_profiles": ["compatibility"]}, None),
        (("canonical",), {"supported_profiles": []}, None),
        (("canonical",), {"supported_profiles": ["sonnet"]}, None),
        (("canonical",), {"supported_profiles": ["canonical"], "required_profile": "compatibility"}, None),
        (("canonical", "compatibility"), {"required_profile": "canonical"}, None),
        (("compatibility",), {"required_tree_policy": "strict"}, "compatibility"),
        (("compatibility",), {"required_tree_policy": "lenient"}, None),
        (("canonical",), {"supported_profiles": ["canonical"], "required_tree_policy": "lenient"}, "canonical"),
    ],
)
async def test_profiles_are_negotiated(offered: Any, asked: dict[str, Any], chosen: str | None) -> None:
    """The required profile, or the first offered one that the client speaks; otherwise the connection ends."""
    async with open_world(SyncSettings(profiles=offered, schemas=OPEN_SCHEMAS)) as world:
        peer = world.peer()

        answer = await peer.ask("connect", {"token": world.token("C1"), "client_id": "C1"} | asked)

        if chosen is None:
            assert answer["payload"]["code"] == "profile_unsupported"
            assert answer["payload"]["details"]["supported_profiles"] == list(offered)
            assert peer.transport.code == 1002
        else:
            assert answer["payload"]["capabilities"]["profile"] == chosen
            tree_policy = answer["payload"]["capabilities"].get("tree_policy")
            assert tree_policy == ("strict" if chosen == "compatibility" else None)
            assert ("model_version" in answer["payload"]) == (chosen == "canonical")


async def test_a_token_that_is_not_believed_ends_the_connection() -> None:
    """Garbage, another's client id and an expired token are all auth_failed, and say no more than that."""
    async with open_world() as world:
        stale = world.token("C1", lifetime_s=5)
        await world.clock.advance(6)
        nameless = world.issuer.issue("somebody", claims=EVERYTHING)
        for token, client_id in (
            ("not a token", "C1"),
            (world.token("C2"), "C1"),
            (stale, "C1"),
            (nameless, "C1"),
            ("", "C1"),
            ("x" * 100_000, "C1"),
        ):
            peer = world.peer()

            answer = await peer.ask("connect", {"token": token, "client_id": client_id})

            assert answer["payload"]["code"] == "auth_failed"
            assert peer.transport.code == 1008
        assert world.stats.connections == 0


async def test_only_connect_and_heartbeat_are_legal_before_connected() -> None:
    """Anything else is a bad request, and the connection stays open for a connect."""
    async with open_world() as world:
        peer = world.peer()

        assert (await peer.ask("heartbeat"))["type"] == "heartbeat_ack"
        for type, payload in (
            ("sync", {"partitions": ["P1"], "since_committed_id": 0}),
            ("submit_events", {"events": [event("a")]}),
            ("disconnect", {}),
            ("frobnicate", {}),
        ):
            assert (await peer.ask(type, payload))["payload"]["code"] == "bad_request"
        assert peer.transport.code is None
        connect = {"token": world.token("C1"), "client_id": "C1"}
        assert (await peer.ask("connect", connect))["type"] == "connected"
        assert (await peer.ask("connect", connect))["payload"]["code"] == "bad_request"
        assert peer.transport.code is None


async def test_a_newer_connection_replaces_the_older_one() -> None:
    """The older one is closed with 4001 and without an error, and hears nothing more."""
    async with open_world() as world:
        older = await world.client("C1")
        await older.sync("P1")
        newer = await world.client("C1")
        await newer.sync("P1")
        other = await world.client("C2")

        await other.submit(event("a"))

        assert older.transport.code == 4001
        assert older.take() == []
        assert types(newer.take()) == ["event_broadcast"]
        assert world.stats.connections == 2


async def test_a_failed_connect_does_not_end_the_client_that_is_there() -> None:
    """Whoever only claims a client id cannot push its owner out."""
    async with open_world() as world:
        owner = await world.client("C1")
        thief = world.peer()

        await thief.ask("connect", {"token": world.token("C2"), "client_id": "C1"})

        assert thief.transport.code == 1008
        assert owner.transport.code is None


@pytest.mark.req("SC17")
async def test_silence_ends_a_connection_and_any_message_breaks_it() -> None:
    """After the window without a message the connection is closed; a sync counts as a sign of life."""
    async with open_world() as world:
        silent, lively = await world.client("C1"), await world.client("C2")
        await world.clock.advance(20)
        await lively.sync("P1")

        await world.clock.advance(11)

        assert silent.transport.code == 4002
        assert lively.transport.code is None
        await world.clock.advance(30)
        assert lively.transport.code == 4002
        assert world.stats == world.stats.__class__(
            connections=0, subscriptions=0, committed=0, rejected=0, deliveries=0, frames_built=0, slow_closed=0
        )


async def test_a_connection_that_never_connects_is_closed() -> None:
    """Heartbeats alone keep no place."""
    async with open_world() as world:
        peer = world.peer()
        for _ in range(9):
            assert (await peer.ask("heartbeat"))["type"] == "heartbeat_ack"
            await world.clock.advance(1)

        await world.clock.advance(1.5)

        assert peer.transport.code == 4002


async def test_a_token_that_expires_ends_the_connection_by_itself() -> None:
    """The client is told auth_failed and closed with the code of its own, without sending anything."""
    async with open_world() as world:
        peer = world.peer()
        await peer.ask(
            "connect",
            {"token": world.token("C1", lifetime_s=10), "client_id": "C1", "supported_profiles": ["canonical"]},
        )
        await peer.sync("P1")

        await world.clock.advance(10.5)

        (last,) = peer.take()
        assert last["payload"]["code"] == "auth_failed"
        assert peer.transport.code == 4003
        assert world.stats.subscriptions == 0


async def test_a_changed_clock_ends_nobody_for_silence() -> None:
    """Silence is measured by a clock that never jumps."""
    async with open_world() as world:
        peer = world.peer()
        token = world.token("C1", TokenClaims(partitions=frozenset({"P1"})), lifetime_s=100_000)
        await peer.ask("connect", {"token": token, "client_id": "C1", "supported_profiles": ["canonical"]})

        world.clock.jump(3600)
        await world.clock.advance(1)

        assert peer.transport.code is None


async def test_the_endpoint_takes_only_so_many() -> None:
    """A connection too many is closed at once with 1013; when one leaves there is room again."""
    async with open_world(SyncSettings(schemas=OPEN_SCHEMAS, connections_max=2)) as world:
        first, _ = await world.client("C1"), await world.client("C2")

        third = world.peer("C3")

        assert third.transport.code == 1013
        first.leave()
        assert world.peer("C3").transport.code is None


async def test_minor_versions_are_accepted() -> None:
    """A version 1.x only adds; another major version ends the connection on any message."""
    async with open_world() as world:
        peer = await world.client()

        assert (await peer.ask("heartbeat", protocol_version="1.7"))["type"] == "heartbeat_ack"
        answer = await peer.ask("heartbeat", protocol_version="2.0")

        assert answer["payload"]["code"] == "protocol_version_unsupported"
        assert answer["payload"]["details"] == {"supported_versions": ["1.0"], "requested_version": "2.0"}
        assert peer.transport.code == 1002
