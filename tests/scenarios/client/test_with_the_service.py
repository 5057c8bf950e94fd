"""The Python client and the sync service back to back, without sockets, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.access_events import grant_event, revoke_event
from tests.unit.sync.support import OPEN_SCHEMAS, World, open_world
from tidings.access.context import TokenClaims
from tidings.access.resources import Action, partition
from tidings.client import (
    ClientSettings,
    ClientStore,
    Committed,
    EndpointConnector,
    HistoryReset,
    LocalEvent,
    NewEvent,
    Rejected,
    ResetReason,
    State,
    SyncClient,
    ViewOf,
)
from tidings.client.errors import ClientStopped, ConnectFailed
from tidings.sync.settings import SyncSettings

NOTE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def add(state: list[int], event: LocalEvent) -> list[int]:
    return [*state, event.payload["data"]["n"]]


class Line(EndpointConnector):
    """A line to the service that can be cut."""

    def __init__(self, world: World) -> None:
        super().__init__(world.service)
        self.is_up = True
        self.links: list[Any] = []

    async def connect(self, url: str) -> Any:
        if not self.is_up:
            raise ConnectFailed(url, "the line is cut")
        self.links.append(await super().connect(url))
        return self.links[-1]

    async def cut(self) -> None:
        """Cut it, as a network does: neither side is told why."""
        self.is_up = False
        await self.links[-1].close(1006)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world(SyncSettings(schemas={"note": NOTE}, page_items_min=1)) as made:
        yield made


def client_of(
    world: World,
    name: str = "C1",
    *,
    line: Line | None = None,
    claims: TokenClaims | None = None,
    token_lifetime_s: int = 86_400,
    **details: Any,
) -> SyncClient[list[int]]:
    allowed = claims or TokenClaims(partition_prefixes=("P",))
    given: dict[str, Any] = {
        "token": lambda: world.token(name, allowed, lifetime_s=token_lifetime_s),
        "client_id": name,
        "store": ClientStore(":memory:", is_inline=True),
        "partitions": ["P1"],
        "view": ViewOf[list[int]](add, []),
        "settings": ClientSettings(page_events=20, retry_s_min=0.1, retry_s_max=2),
        "connector": line or Line(world),
        "clock": world.clock,
        "rng": random.Random(5),
        "required_profile": "canonical",
    }
    return SyncClient("ws://node/sync", **{**given, **details})


async def note(client: SyncClient[list[int]], n: Any, *partitions: str) -> Any:
    return await client.submit_fact(partitions or ["P1"], "note", {"n": n})


async def test_two_offline_clients_meet(world: World) -> None:
    """Both edit without a line; afterwards both views are the log's order, each event once."""
    lines = Line(world), Line(world)
    for line in lines:
        line.is_up = False
    async with client_of(world, "C1", line=lines[0]) as one, client_of(world, "C2", line=lines[1]) as two:
        for n in range(30):
            await note(one, n)
            await note(two, 100 + n)
        for line in lines:
            line.is_up = True

        await world.clock.run_until(
            asyncio.gather(*(each.view_when(lambda view: len(view) == 60) for each in (one, two))), seconds_max=60
        )

        assert one.view == two.view
        assert [n for n in one.view if n < 100] == list(range(30)), "each one's own order is kept"


async def test_a_partition_that_comes_back_is_whole(world: World) -> None:
    """A right is revoked and granted again on an open line: the client has what it missed, without being told to do anything."""
    async with client_of(world, "C1") as writer, client_of(world, "C2", partitions=["P1", "P2"]) as reader:
        await world.clock.run_until(asyncio.gather(writer.caught_up(), reader.caught_up()), seconds_max=60)
        await note(writer, 1)
        await world.clock.run_until(reader.view_when(lambda view: view == [1]), seconds_max=60)

        await world.log.append(revoke_event("user-of-C2", Action.SYNC, partition("P1"), actor="test"))
        await note(writer, 2)
        await note(writer, 3, "P2")
        await world.clock.run_until(reader.view_when(lambda view: view == [1, 3]), seconds_max=60)
        assert reader.status.refused_partitions == {"P1"}
        await world.log.append(grant_event("user-of-C2", Action.SYNC, partition("P1"), actor="test"))
        await note(writer, 4)

        await world.clock.run_until(reader.view_when(lambda view: view == [1, 2, 3, 4]), seconds_max=60)
        assert reader.status.refused_partitions == frozenset()


@pytest.mark.req("S2", "S11", "SC02")
async def test_a_rejected_item_does_not_hold_up_its_batch(world: World) -> None:
    """The service rejects one of three; the others are committed, and the reason names the field."""
    async with client_of(world) as client:
        facts = [{"schema": "note", "data": {"n": n}} for n in (1, "no number", 3)]
        drafts = await client.submit_many([NewEvent(["P1"], "event", fact) for fact in facts])

        verdicts = [await world.clock.run_until(draft.settled(), seconds_max=60) for draft in drafts]

        assert [type(verdict) for verdict in verdicts] == [Committed, Rejected, Committed]
        assert isinstance(verdicts[1], Rejected)
        assert verdicts[1].code == "validation_failed"
        assert verdicts[1].errors[0].field.startswith("event.payload.data")
        assert client.view == [1, 3]


@pytest.mark.req("SC05", "S16")
async def test_a_paged_catch_up_meets_live_events(world: World) -> None:
    """While a client pages through the history another one commits; the pager ends with all of it, in order."""
    async with client_of(world, "C1") as writer:
        for n in range(100):
            await note(writer, n)
        await world.clock.run_until(writer.drained(), seconds_max=60)
        async with client_of(world, "C2") as reader:
            for n in range(100, 120):
                await note(writer, n)
            await world.clock.run_until(reader.view_when(lambda view: len(view) == 120), seconds_max=60)

            assert reader.view == list(range(120))


@pytest.mark.req("S27", "SC13", "SC15")
async def test_answers_lost_with_their_line_are_resolved(world: World) -> None:
    """The line is cut again and again while drafts are under way: in the end each is committed once."""
    line = Line(world)
    async with client_of(world, line=line, settings=ClientSettings(batch_events_max=3, retry_s_min=0.05)) as client:
        drafts = [await note(client, n) for n in range(40)]
        for _ in range(12):
            await asyncio.sleep(0)
            if line.links:
                await line.cut()
            line.is_up = True
            await world.clock.advance(0.11)
        await world.clock.run_until(client.drained(), seconds_max=120)

        verdicts = [draft.verdict for draft in drafts]
        assert all(isinstance(verdict, Committed) for verdict in verdicts)
        assert client.view == list(range(40))
        assert world.stats.committed == 40


async def test_an_expiring_token_is_renewed_without_a_word(world: World) -> None:
    """The service ends the connection when the token runs out; the client comes back with a fresh one and misses nothing."""
    async with client_of(world, "C1", token_lifetime_s=60) as client, client_of(world, "C2") as other:
        await world.clock.run_until(client.caught_up(), seconds_max=60)
        for n in range(10):
            await note(other, n)
            await world.clock.advance(30)

        await world.clock.run_until(client.view_when(lambda view: len(view) == 10), seconds_max=60)

        assert client.status.state is State.LIVE


async def test_a_foreign_token_stops_the_client(world: World) -> None:
    """A fixed token of another client is refused; the client says so and keeps what it has."""
    async with client_of(world, "C1", token=world.token("C2")) as client:
        await note(client, 1)

        with pytest.raises(ClientStopped):
            await world.clock.run_until(client.drained(), seconds_max=60)
        assert client.view == [1]


async def test_a_revoked_partition_ends_while_the_others_go_on(world: World) -> None:
    """After a revocation nothing of that partition arrives any more, the status names it, and the rest is live."""
    async with (
        client_of(world, "C1", partitions=["P1", "P2"]) as client,
        client_of(world, "C2") as other,
    ):
        await note(other, 1, "P2")
        await world.clock.run_until(client.view_when(lambda view: view == [1]), seconds_max=60)

        await world.log.append(revoke_event("user-of-C1", Action.SYNC, partition("P2"), actor="admin"))
        await world.settle()
        await note(other, 2, "P2")
        await note(other, 3, "P1")
        await world.clock.run_until(client.view_when(lambda view: len(view) == 2), seconds_max=60)

        assert client.view == [1, 3]
        assert client.status.refused_partitions == {"P2"}


async def test_a_partition_without_permission_is_named(world: World) -> None:
    """One forbidden name does not keep the allowed ones from syncing."""
    allowed = TokenClaims(partitions=frozenset({"P1"}))
    async with client_of(world, claims=allowed, partitions=["P1", "P7", "P8"]) as client:
        await note(client, 1)
        await world.clock.run_until(client.drained(), seconds_max=60)

        assert client.status.refused_partitions == {"P7", "P8"}
        assert client.view == [1]


async def test_a_second_client_with_the_same_id_takes_over(world: World) -> None:
    """The older one is told and stays away; the newer one works."""
    async with client_of(world, "C1") as older:
        await world.clock.run_until(older.caught_up(), seconds_max=60)
        async with client_of(world, "C1") as newer:
            await world.clock.run_until(newer.caught_up(), seconds_max=60)
            await world.clock.advance(60)

            assert older.status.state is State.STOPPED
            assert newer.status.state is State.LIVE


@pytest.mark.req("SC18")
async def test_a_new_model_version_while_connected(world: World) -> None:
    """The service changes its model: the client reads everything again without being restarted."""
    async with client_of(world) as client:
        for n in range(5):
            await note(client, n)
        await world.clock.run_until(client.drained(), seconds_max=60)
        changes = client.changes()

        world.service.reload(SyncSettings(schemas=OPEN_SCHEMAS, page_items_min=1, model_version=2))

        assert await world.clock.run_until(anext(changes), seconds_max=60) == HistoryReset(ResetReason.MODEL_CHANGED)
        await world.clock.run_until(client.view_when(lambda view: view == [0, 1, 2, 3, 4]), seconds_max=60)


@pytest.mark.req("SC17")
async def test_an_idle_client_is_not_taken_for_dead(world: World) -> None:
    """Ten quiet minutes pass on one connection."""
    line = Line(world)
    async with client_of(world, line=line) as client:
        await world.clock.run_until(client.caught_up(), seconds_max=60)
        await world.clock.advance(600)

        assert client.status.state is State.LIVE
        assert len(line.links) == 1
