"""Dialect C, as the JavaScript client 1.3.0 speaks it: camel case with partitions, one event a submit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.sync.support import Peer, World, open_world


async def connected(world: World, client_id: str) -> Peer:
    peer = world.peer(client_id)
    answer = await peer.ask_camel("connect", {"token": world.token(client_id), "clientId": client_id})
    assert answer["type"] == "connected", answer
    assert answer["payload"] == {"clientId": client_id, "globalLastCommittedId": world.log.position.seq}
    return peer


def item(id: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "partitions": ["P1"], "type": "note", "payload": {"n": id}, "meta": {"clientTs": 1}} | more


async def test_submit_broadcast_and_sync() -> None:
    """The sync's partitions are also the subscription; times are called created."""
    async with open_world() as world:
        one, two = await connected(world, "L1"), await connected(world, "L2")
        page = await two.ask_camel("sync", {"partitions": ["P1"], "sinceCommittedId": 0, "limit": 10})
        assert page["payload"] == {
            "partitions": ["P1"],
            "events": [],
            "nextSinceCommittedId": 0,
            "hasMore": False,
            "syncToCommittedId": 0,
        }

        answer = await one.ask_camel("submit_events", {"events": [item("a")]})

        (result,) = answer["payload"]["results"]
        assert result == {"id": "a", "status": "committed", "committedId": 1, "created": result["created"]}
        (heard,) = two.take()
        stored = item("a", meta={"clientTs": 1, "clientId": "L1"})
        assert heard["payload"] == {"committedId": 1, "created": result["created"]} | stored
        page = await one.ask_camel("sync", {"partitions": ["P1"], "sinceCommittedId": 0})
        assert page["payload"]["events"] == [heard["payload"]]


@pytest.mark.parametrize(
    "change",
    [
        {"partitions": ["P1", "P1"]},
        {"partitions": []},
        {"payload": 1},
        {"type": ""},
        {"meta": None},
        {"meta": {}},
        {"meta": {"clientId": "L1"}},
        {"meta": {"clientTs": None}},
        {"meta": {"clientTs": "1"}},
    ],
)
async def test_a_broken_item_is_rejected(change: dict[str, Any]) -> None:
    """A partition named twice, and a missing ``meta.clientTs``, are among the faults."""
    async with open_world() as world:
        peer = await connected(world, "L1")

        answer = await peer.ask_camel("submit_events", {"events": [item("a") | change]})

        assert answer["payload"]["results"][0]["reason"] == "validation_failed"


async def test_a_user_is_the_tokens_where_the_token_names_one() -> None:
    """An item of another user is forbidden, as in the later dialect."""
    async with open_world() as world:
        peer = world.peer("L1")
        await peer.ask_camel("connect", {"token": world.token("L1", user_id="u-7"), "clientId": "L1"})

        foreign = await peer.ask_camel("submit_events", {"events": [item("a", userId="u-8")]})
        own = await peer.ask_camel("submit_events", {"events": [item("a", userId="u-7")]})

        (refused,), (taken,) = foreign["payload"]["results"], own["payload"]["results"]
        assert (refused["status"], refused["reason"], taken["status"]) == ("rejected", "forbidden", "committed")


async def test_the_same_again_is_the_same_and_other_content_is_not() -> None:
    """The whole of meta is compared."""
    async with open_world() as world:
        peer = await connected(world, "L1")
        first = await peer.ask_camel("submit_events", {"events": [item("a")]})

        again = await peer.ask_camel("submit_events", {"events": [item("a")]})
        other = await peer.ask_camel("submit_events", {"events": [item("a", meta={"clientTs": 2})]})

        assert again["payload"] == first["payload"]
        assert other["payload"]["results"][0]["status"] == "rejected"


async def test_a_foreign_partition_is_forbidden_for_sync_and_item() -> None:
    """As in the other dialects."""
    async with open_world() as world:
        peer = await connected(world, "L1")

        page = await peer.ask_camel("sync", {"partitions": ["X"], "sinceCommittedId": 0})
        result = await peer.ask_camel("submit_events", {"events": [item("a", partitions=["X"])]})

        assert page["payload"]["code"] == "forbidden"
        assert result["payload"]["results"][0]["reason"] == "forbidden"


async def test_an_item_without_meta_is_rejected() -> None:
    """``meta`` is required, as in the later dialect; the connection stays, and the next item is stored."""
    async with open_world() as world:
        peer = await connected(world, "L1")
        bare = {name: value for name, value in item("a").items() if name != "meta"}

        first = await peer.ask_camel("submit_events", {"events": [bare]})
        second = await peer.ask_camel("submit_events", {"events": [item("a")]})

        (result,) = first["payload"]["results"]
        assert (result["id"], result["status"], result["reason"]) == ("a", "rejected", "validation_failed")
        assert second["payload"]["results"][0]["status"] == "committed"


async def test_an_empty_batch_is_a_bad_request() -> None:
    """The answer is that of the client's own server, and the connection stays open."""
    async with open_world() as world:
        peer = await connected(world, "L1")

        answer = await peer.ask_camel("submit_events", {"events": []})

        assert answer["type"] == "error"
        assert answer["payload"]["code"] == "bad_request"
        assert answer["payload"]["message"] == "payload.events must contain at least one item"
        assert (await peer.ask_camel("submit_events", {"events": [item("a")]}))["type"] == "submit_events_result"
