"""Limits of the sync service: within them an item is committed, and beyond them the answer names the problem."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tests.unit.sync.support import OPEN_SCHEMAS, Peer, open_world, project_item, tree_item
from tidings.sync.dialects.camel import _BATCHES_MAX
from tidings.sync.profiles import _TARGET_NAMES_MAX
from tidings.sync.settings import SyncSettings


async def tree_client(world: Any) -> Peer:
    client: Peer = await world.client("C1", supported_profiles=["compatibility"])
    return client


@pytest.mark.bound("sync.settings.SyncSettings.tree_depth_max")
@crossed
async def test_a_deeper_tree_is_rejected(beyond: Beyond) -> None:
    """A tree at the limit is committed; a deeper one is rejected by itself."""

    def tree(item_id: str, depth: int) -> dict[str, Any]:
        nodes: list[dict[str, Any]] = []
        for number in reversed(range(depth)):
            nodes = [{"id": f"i{number}", "children": nodes}]
        value = {"items": {f"i{number}": {} for number in range(depth)}, "tree": nodes}
        return tree_item(item_id, "set", {"target": f"board{item_id}", "value": value})

    async with open_world(SyncSettings(tree_depth_max=4, event_depth_max=120)) as world:
        client = await tree_client(world)
        rejected, fits = await client.submit(tree("a", beyond(4)), tree("b", 4))
        assert (rejected["status"], fits["status"]) == ("rejected", "committed")
        assert "deeper than 4 levels" in rejected["errors"][0]["message"]


@pytest.mark.bound("sync.profiles._TARGET_NAMES_MAX")
@crossed
async def test_a_change_that_names_more_targets_is_rejected(beyond: Beyond) -> None:
    """A path of as many names as allowed is committed; a longer one is rejected by itself."""

    def change(item_id: str, count: int) -> dict[str, Any]:
        return tree_item(item_id, "set", {"target": ".".join(["a"] * count), "value": 1})

    async with open_world() as world:
        client = await tree_client(world)
        rejected, fits = await client.submit(change("x", beyond(_TARGET_NAMES_MAX)), change("y", _TARGET_NAMES_MAX))
        assert (rejected["status"], fits["status"]) == ("rejected", "committed")
        assert rejected["errors"][0]["field"] == "event.payload.target"


@pytest.mark.bound("sync.dialects.camel._BATCHES_MAX")
@crossed
async def test_a_message_of_more_batches_is_rejected(beyond: Beyond) -> None:
    """As many events as ten batches hold are committed; a longer message is answered with an error, and nothing of it is stored."""
    async with open_world(SyncSettings(schemas=OPEN_SCHEMAS, batch_items_max=2)) as world:
        peer = await world.project_client()
        limit = 2 * _BATCHES_MAX
        peer.say_camel("submit_events", {"events": [project_item(f"x{number}") for number in range(beyond(limit))]})
        await world.settle()
        assert "The batch is too long" in json.dumps(peer.take())
        assert world.log.position.seq == 0
        other = await world.project_client("B2")
        other.say_camel("submit_events", {"events": [project_item(f"y{number}") for number in range(limit)]})
        await world.settle()
        [answer] = [each for each in other.take() if each["type"] == "submit_events_result"]
        assert {each["status"] for each in answer["payload"]["results"]} == {"committed"}


@pytest.mark.bound("sync.settings.SyncSettings.held_bytes_max")
@crossed
@pytest.mark.parametrize("is_beyond", [False, True])
async def test_broadcasts_beyond_what_is_held_are_paged(is_beyond: bool, beyond: Beyond) -> None:
    """During paging broadcasts are held up to the byte; beyond that paging goes on. Each event comes once either way."""
    limit = 4_096

    async def page_of(peer: Peer, since: int) -> tuple[dict[str, Any], list[str]]:
        peer.say_camel("sync", {"projectId": "proj", "sinceCommittedId": since, "limit": 2})
        await world.settle()
        heard = peer.take()
        [page] = [each["payload"] for each in heard if each["type"] == "sync_response"]
        return page, [each["payload"]["id"] for each in heard if each["type"] == "event_broadcast"]

    async with open_world(SyncSettings(schemas=OPEN_SCHEMAS, held_bytes_max=limit, page_items_min=1)) as world:
        writer, reader, live = [await world.project_client(name) for name in ("B1", "B2", "B3")]

        async def submit(item_id: str, size: int = 0) -> int:
            """Submit an item; return the length of its broadcast."""
            live.transport.sent.clear()
            writer.say_camel("submit_events", {"events": [project_item(item_id, payload={"text": "x" * size})]})
            await world.settle()
            return len(live.transport.sent[-1])

        await page_of(live, 0)
        for item_id in ("e", "f", "g"):
            await submit(item_id)
        overhead = await submit("p")
        reader.take()
        page, broadcast = await page_of(reader, 0)
        assert page["hasMore"]
        size = beyond(limit) if is_beyond else limit
        assert await submit("q", size - overhead) == size
        got = [each["id"] for each in page["events"]]
        while page["hasMore"]:
            page, others = await page_of(reader, page["nextSinceCommittedId"])
            got += [each["id"] for each in page["events"]]
            broadcast += others
        assert got + broadcast == ["e", "f", "g", "p", "q"]
        assert broadcast == ([] if is_beyond else ["q"])
