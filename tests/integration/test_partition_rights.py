"""Partitions and projects are bounds at every entrance: HTTP, dead letters, groups and publishing, as they are for sync clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.access_events import revoke_event
from tidings.access.context import TokenClaims
from tidings.access.resources import Action, ResourceKind, partition, project
from tidings.client.errors import RemoteRefused
from tidings.client.groups import RemoteBus
from tidings.testing.node import RunningNode
from tidings.types import Ack, Event, EventMeta, ReceivedEvent

from .api_support import api, check, event, until
from .test_qa_sync_sockets import Place, place
from .test_sync_rights import DIALECTS, Speaker, tell

TOPICS = {"a": "sync", "b": "sync.projects", "c": "sync.legacy"}


def reader(node: RunningNode, **claims: Any) -> httpx.AsyncClient:
    """A client whose token is for all topics of sync clients, and ``demo``."""
    headers = node.headers("alice", topics=["demo", *TOPICS.values()], **claims)
    return httpx.AsyncClient(base_url=node.url, headers=headers, event_hooks={"response": [check]})


async def ids(client: httpx.AsyncClient, topic: str) -> list[str]:
    page = (await client.get("/v1/events", params={"topic": topic})).json()
    return [each["meta"]["event_id"] for each in page["events"]]


async def two_events(here: Place, dialect: str) -> None:
    """``x1`` in partition P1, ``x2`` in P2; in dialect B both in the project ``proj``."""
    writer = await Speaker.connected(here, dialect, "writer", partitions=["P1", "P2"])
    assert [await writer.submit("x1", "P1"), await writer.submit("x2", "P2")] == ["committed"] * 2


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_topic_shows_no_partition_that_sync_would_not(tmp_path: Path, dialect: str) -> None:
    """A token that names partitions reads those only; one that names none loses those that are revoked."""
    async with place(tmp_path) as here:
        await two_events(here, dialect)
        async with (
            reader(here.node, partitions=["P1"]) as bound,
            reader(here.node) as unbound,
            reader(here.node, projects=["other"]) as elsewhere,
        ):
            seen = await ids(bound, TOPICS[dialect])
            ones = [(await bound.get(f"/v1/events/{seq}")).status_code for seq in (1, 2)]
            everything = await ids(unbound, TOPICS[dialect])
            foreign = await ids(elsewhere, TOPICS[dialect])
            await tell(here, revoke_event("alice", Action.READ, partition("P1"), actor="t"))
            left = await ids(unbound, TOPICS[dialect])
            await tell(here, revoke_event("alice", Action.READ, project("proj"), actor="t"))
            last = await ids(unbound, TOPICS[dialect])

    assert seen == ["x1"]
    assert ones == [200, 404]
    assert everything == ["x1", "x2"]
    assert foreign == ([] if dialect == "b" else ["x1", "x2"])
    assert left == ["x2"]
    assert last == ([] if dialect == "b" else ["x2"])


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_dead_letter_is_shown_to_who_may_read_its_partition(tmp_path: Path, dialect: str) -> None:
    """A letter holds its event, so the list leaves out those of other partitions and one of them is 404."""

    async def refuse(received: ReceivedEvent) -> Ack:
        raise ValueError("no good")

    topic = TOPICS[dialect]
    async with place(tmp_path) as here:
        await two_events(here, dialect)
        await here.node.bus.subscribe(topic, "g", refuse, max_retries=0)
        await until(lambda: here.node.bus.lag(topic, "g") == 0)
        async with reader(here.node) as unbound, reader(here.node, partitions=["P1"]) as bound:
            everything = (await unbound.get(f"/v1/dead-letters?topic={topic}")).json()["dead_letters"]
            seen = (await bound.get(f"/v1/dead-letters?topic={topic}")).json()
            statuses = [(await bound.get(f"/v1/dead-letters/{topic}/{each['id']}")).status_code for each in everything]

    assert [each["event_id"] for each in everything] == ["x1", "x2"]
    assert ([each["event_id"] for each in seen["dead_letters"]], seen["count"]) == (["x1"], 1)
    assert statuses == [200, 404]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_member_gets_events_of_its_partitions(tmp_path: Path, dialect: str) -> None:
    """What a member of a group may not see waits, and goes to one who may."""
    topic = TOPICS[dialect]
    narrow: list[str] = []
    wide: list[str] = []

    def member(here: Place, subject: str, **claims: Any) -> RemoteBus:
        return RemoteBus(here.node.url, here.node.token(subject, topics=[topic], groups=[f"{topic}/g"], **claims))

    def into(found: list[str]) -> Any:
        async def note(received: ReceivedEvent) -> Ack:
            found.append(received.meta.event_id)
            return Ack()

        return note

    async with place(tmp_path) as here:
        await two_events(here, dialect)
        async with member(here, "one", partitions=["P1"]) as first, member(here, "all") as second:
            await first.subscribe(topic, "g", into(narrow), start="earliest")
            await until(lambda: narrow == ["x1"])
            await second.subscribe(topic, "g", into(wide), start="earliest")
            await until(lambda: here.node.bus.lag(topic, "g") == 0)

    assert (narrow, wide) == (["x1"], ["x2"])


async def test_an_event_is_published_to_partitions_of_the_token_only(tmp_path: Path) -> None:
    """Over HTTP and the socket, an event that names another partition, alone or beside its own, is refused by name."""
    async with api(tmp_path) as (node, _), reader(node, partitions=["P1"]) as alice:
        answers = [
            await alice.post("/v1/events", json=event(partitions=names)) for names in (["P1"], ["P2"], ["P1", "P2"], [])
        ]
        async with RemoteBus(node.url, node.token("alice", topics=["demo"], partitions=["P1"])) as bus:
            with pytest.raises(RemoteRefused, match="partition:P2"):
                await bus.publish(Event(EventMeta("demo", "NOTED", "home", partitions=("P2",)), {}))
        stored = node.log.position.seq

    assert [each.status_code for each in answers] == [201, 403, 403, 201]
    assert all("partition:P2" in each.json()["detail"] for each in answers[1:3])
    assert stored == 2


async def test_a_list_without_names_is_no_leave_to_see_all(tmp_path: Path) -> None:
    """A token that speaks of partitions and names none is bound to none, in a project and in a topic."""
    nothing: dict[str, Any] = {"names_none_of": frozenset({ResourceKind.PARTITION})}
    assert TokenClaims(**nothing).binds(ResourceKind.PARTITION)
    async with place(tmp_path) as here:
        await two_events(here, "b")
        async with reader(here.node, **nothing) as bound:
            assert await ids(bound, "sync.projects") == []
            assert (await bound.get("/v1/whoami")).json()["names_none_of"] == ["partition"]
        speaker = await Speaker.connected(here, "b", "nobody", **nothing)
        assert await speaker.sync() == []
        assert await speaker.submit("y1", "P1") == "forbidden"


@pytest.mark.parametrize("order", ["", "&backwards=true"])
async def test_an_id_that_may_not_be_seen_is_answered_like_one_that_is_unknown(tmp_path: Path, order: str) -> None:
    """Neither the page nor the address of the next one says that there is such an event, or where."""
    async with api(tmp_path) as (node, admin), reader(node) as alice:
        await admin.post("/v1/events", json=[event(n, topic="secret", event_id=f"hidden-{n}") for n in range(3)])
        hidden, unknown = [
            (await alice.get(f"/v1/events?event_id={name}{order}")).text.replace(name, "ID")
            for name in ("hidden-1", "unknown")
        ]

    assert hidden == unknown


@pytest.mark.parametrize("media", ["application/json", "application/cloudevents+json"])
async def test_a_key_given_twice_is_the_requests_fault(tmp_path: Path, media: str) -> None:
    """One event with a repeated key is answered with 400, and not as if the node had failed."""
    plain = b'{"meta": {"topic": "demo", "type": "N", "space_id": "home"}, "payload": {"a": 1, "a": 2}}'
    cloud = (
        b'{"specversion": "1.0", "id": "1", "id": "2", "source": "/s", "type": "N", "topic": "demo", "spaceid": "home"}'
    )
    async with api(tmp_path) as (_, admin):
        body = plain if media == "application/json" else cloud
        answer = await admin.post("/v1/events", content=body, headers={"content-type": media})

    assert (answer.status_code, answer.json()["code"]) == (400, "event.repeated_key")
