"""The tree profile from the client's side: the same state everywhere, and a quick start for newcomers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sync.support import World, open_world
from tidings.access.context import TokenClaims
from tidings.client import (
    ClientSettings,
    ClientStore,
    Committed,
    EndpointConnector,
    Rejected,
    SyncClient,
    tree_view,
)
from tidings.client.errors import ConnectFailed
from tidings.core.events import Event, EventMeta
from tidings.sync.settings import SyncSettings

States = dict[str, dict[str, Any]]


class Line(EndpointConnector):
    """A line that can be down."""

    is_up = True

    async def connect(self, url: str) -> Any:
        if not self.is_up:
            raise ConnectFailed(url, "the line is cut")
        return await super().connect(url)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world(SyncSettings(profiles=("compatibility",), page_items_min=1)) as made:
        yield made


def client_of(
    world: World, name: str, line: Line | None = None, store: Path | None = None, page_events: int = 20
) -> SyncClient[States]:
    return SyncClient(
        "ws://node/sync",
        token=lambda: world.token(name, TokenClaims(partition_prefixes=("P",))),
        client_id=name,
        store=ClientStore(store or ":memory:", is_inline=True),
        partitions=["P1"],
        view=tree_view(),
        settings=ClientSettings(page_events=page_events, retry_s_min=0.1, retry_s_max=2),
        connector=line or Line(world.service),
        clock=world.clock,
        rng=random.Random(5),
        required_profile="compatibility",
    )


async def push(client: SyncClient[States], id: str, text: str) -> Any:
    value = {"id": id, "text": text}
    return await client.submit(["P1"], "treePush", {"target": "todo", "value": value, "options": {"position": "last"}})


async def update(client: SyncClient[States], id: str, text: str) -> Any:
    payload = {"target": "todo", "value": {"text": text}, "options": {"id": id}}
    return await client.submit(["P1"], "treeUpdate", payload)


def texts(state: States) -> dict[str, str]:
    return {id: item["text"] for id, item in state.get("P1", {}).get("todo", {}).get("items", {}).items()}


@pytest.mark.req("SC14")
async def test_two_clients_change_one_item(world: World) -> None:
    """Both changes are committed, and both clients end with the later one's value."""
    async with client_of(world, "C1") as one, client_of(world, "C2") as two:
        await push(one, "milk", "one litre")
        await world.clock.run_until(two.view_when(lambda state: "milk" in texts(state)), seconds_max=60)

        drafts = [await update(one, "milk", "from one"), await update(two, "milk", "from two")]
        verdicts = [await world.clock.run_until(draft.settled(), seconds_max=60) for draft in drafts]
        assert all(isinstance(verdict, Committed) for verdict in verdicts)
        last = max(range(2), key=lambda n: verdicts[n].committed_id if isinstance(verdicts[n], Committed) else 0)
        winner = ("from one", "from two")[last]
        for client in (one, two):
            await world.clock.run_until(
                client.view_when(lambda state: texts(state) == {"milk": winner}), seconds_max=60
            )

        assert one.view == two.view


@pytest.mark.req("SC16")
async def test_an_offline_batch_whose_last_item_clashes(world: World) -> None:
    """Push, change and push of the same id: two are committed, the third is rejected and leaves no trace in the view."""
    line = Line(world.service)
    line.is_up = False
    async with client_of(world, "C1", line) as client:
        drafts = [
            await push(client, "a", "first"),
            await update(client, "a", "changed"),
            await push(client, "a", "again"),
        ]
        assert texts(client.view) == {"a": "changed"}
        line.is_up = True

        verdicts = [await world.clock.run_until(draft.settled(), seconds_max=60) for draft in drafts]

        assert [type(verdict) for verdict in verdicts] == [Committed, Committed, Rejected]
        assert texts(client.view) == {"a": "changed"}


@pytest.mark.req("S28")
async def test_a_newcomer_begins_with_the_servers_state(world: World, tmp_path: Path) -> None:
    """It has the whole state without the history, follows what comes after, and goes on from there after a restart."""
    async with client_of(world, "C1") as old:
        for n in range(30):
            await push(old, f"i{n}", f"text {n}")
        await world.clock.run_until(old.drained(), seconds_max=60)
        async with client_of(world, "C2", store=tmp_path / "new.db") as new:
            await world.clock.run_until(new.caught_up(), seconds_max=60)

            assert new.view == old.view
            assert [event async for event in new.events()] == []
            await update(old, "i3", "later")
            await world.clock.run_until(new.view_when(lambda state: texts(state)["i3"] == "later"), seconds_max=60)
            await push(new, "own", "mine")
            await world.clock.run_until(new.drained(), seconds_max=60)

        down = Line(world.service)
        down.is_up = False
        async with client_of(world, "C2", down, store=tmp_path / "new.db") as again:
            assert again.view["P1"]["todo"]["tree"] == old.view["P1"]["todo"]["tree"]
            assert texts(again.view) == texts(old.view)
            assert len(texts(again.view)) == 31


@pytest.mark.parametrize("levels", [300, 1200])
async def test_a_deep_tree_is_shown_kept_and_opened_again(world: World, tmp_path: Path, levels: int) -> None:
    """A tree that grew before there was a bound: view, snapshot, closing and opening all go without its depth."""
    chain = [
        Event(
            EventMeta("sync", "treePush", "sync", event_id=f"e{n}", partitions=("P1",)),
            {
                "event": {
                    "type": "treePush",
                    "payload": {
                        "target": "todo",
                        "value": {"id": f"i{n}", "text": f"{n}"},
                        "options": {"parent": f"i{n - 1}" if n else "_root"},
                    },
                }
            },
        )
        for n in range(levels)
    ]
    for start in range(0, levels, 1000):
        await world.log.append_many(chain[start : start + 1000])
    path = tmp_path / "deep.db"
    async with client_of(world, "C1", store=path, page_events=500) as client:
        await world.clock.run_until(client.view_when(lambda state: len(texts(state)) == levels), seconds_max=600)
        await world.clock.run_until(client.caught_up(), seconds_max=60)
        draft = await push(client, "own", "mine")
        assert isinstance(await world.clock.run_until(draft.settled(), seconds_max=60), Committed)
        await client.prune()
        await update(client, "own", "changed")
        await world.clock.run_until(client.drained(), seconds_max=60)

    down = Line(world.service)
    down.is_up = False
    async with client_of(world, "C1", down, store=path) as again:
        found = texts(again.view)
        depth, nodes = 0, again.view["P1"]["todo"]["tree"]
        while nodes:
            depth, nodes = depth + 1, nodes[0]["children"]
        assert (len(found), found["own"], depth) == (levels + 1, "changed", levels)
