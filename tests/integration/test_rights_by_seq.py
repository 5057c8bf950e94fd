"""A permission is a position on live sockets: of each record hears whoever had the right at its seq, however closely commits follow each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.access_events import grant_event, revoke_event
from tests.integration.events_support import events_node, subscriber
from tests.integration.node_support import Client, connect, until
from tidings.access.resources import Action, Resource, partition, project, topic
from tidings.core.events import Event, EventMeta
from tidings.testing.node import RunningNode, running_node

HELD_S = 0.5
"""What is committed within so long is told together, if nothing decides in between."""


def order(name: str) -> Event:
    return Event(EventMeta("orders", "changed", "s", objects=(f"order:{name}",)), {})


@pytest.mark.parametrize("interval_s", [0.0, HELD_S])
@pytest.mark.parametrize("is_one_commit", [True, False], ids=["one commit", "many commits"])
async def test_a_subscriber_hears_by_the_rights_of_each_records_seq(
    tmp_path: Path, interval_s: float, is_one_commit: bool
) -> None:
    """What was committed before a revocation comes, what was committed between it and the next grant never does, what comes after that does."""

    def taken() -> Event:
        return revoke_event("alice", Action.READ, topic("orders"), actor="test")

    def given() -> Event:
        return grant_event("alice", Action.READ, topic("orders"), actor="test")

    early = [order("first"), order("before"), taken(), order("without"), given(), order("after"), taken(), order("no")]
    async with running_node(tmp_path, dispatch_interval_s=interval_s) as node, subscriber(node) as alice:
        await alice.subscribed()
        for each in [early] if is_one_commit else [[record] for record in early]:
            await node.log.append_many(each)
        await node.services.dispatcher.reached(node.log.position.seq)
        await node.log.append_many([given(), order("last")])
        await alice.heard(4)

    assert alice.objects == ["order:first", "order:before", "order:after", "order:last"]


async def test_more_than_goes_out_at_once_goes_by_the_rights_of_its_seq(tmp_path: Path) -> None:
    """One commit with more envelopes than the gateway delivers before others get their turn: the change at its end counts for none of them."""
    many = [
        Event(EventMeta("orders", "changed", "s", objects=tuple(f"order:{n}-{part}" for part in range(130))), {})
        for n in range(300)
    ]
    taken = revoke_event("alice", Action.READ, topic("orders"), actor="test")
    given = grant_event("bob", Action.READ, topic("orders"), actor="test")
    async with (
        events_node(tmp_path, queue={"per_connection": 2000}, delivery={"max_msgs_per_sec": 100_000}) as node,
        subscriber(node) as alice,
        subscriber(node, "bob", topics=["letters"]) as bob,
    ):
        await alice.subscribed()
        await bob.subscribed()
        await node.log.append_many([*many, taken, given, order("after")])
        await node.services.dispatcher.reached(node.log.position.seq)
        await bob.heard(1)
        await alice.heard(900)

    assert [
        (each["payload"]["sequence_anchor"]["global_seq"], each["payload"]["payload_summary"]["part"])
        for each in alice.envelopes
    ] == [
        (seq, part)
        for seq in range(alice.envelopes[0]["payload"]["sequence_anchor"]["global_seq"], 1000)[:300]
        for part in (1, 2, 3)
    ]
    assert bob.objects == ["order:after"]


@pytest.mark.parametrize("interval_s", [0.0, HELD_S])
async def test_an_app_that_is_disabled_tells_what_was_before(tmp_path: Path, interval_s: float) -> None:
    """A record of an app is told by what was registered at its seq: its subscribers hear all of it, and are then closed."""
    async with running_node(tmp_path, dispatch_interval_s=interval_s) as node:
        known = Event(EventMeta("apps", "app.registered", "system"), {"type": "app.registered", "slug": "contacts"})
        await node.log.append(known)
        await node.services.dispatcher.reached(node.log.position.seq)
        async with subscriber(node, query="&app=contacts") as alice:
            await alice.subscribed(app_id="contacts")
            told = [
                Event(EventMeta("orders", "changed", "s", objects=(f"order:{n}",), app="contacts"), {}) for n in "ab"
            ]
            gone = Event(EventMeta("apps", "app.removed", "system"), {"type": "app.removed", "slug": "contacts"})
            await node.log.append_many([*told, gone, told[0]])
            code, _, _ = await alice.refusal()

    assert code == 4403
    assert [each["payload"]["payload_summary"]["object_ids"] for each in alice.envelopes] == [["order:a"], ["order:b"]]


class Dialect:
    """How a client of one dialect connects, listens to one place and submits there."""

    def __init__(
        self,
        place: Resource,
        connect: Callable[[str], dict[str, Any]],
        listen: dict[str, Any],
        item: Callable[[str], dict[str, Any]],
        *,
        is_snake: bool = False,
    ) -> None:
        self.place = place
        self.connect = connect
        self.listen = listen
        self.item = item
        self.is_snake = is_snake

    def frame(self, kind: str, payload: dict[str, Any]) -> bytes:
        camel = {"type": kind, "protocolVersion": "1.0", "payload": payload}
        snake = {"type": kind, "protocol_version": "1.0", "msg_id": "m", "timestamp": 1, "payload": payload}
        return json.dumps(snake if self.is_snake else camel).encode()


DIALECTS = {
    "A": Dialect(
        partition("P"),
        lambda client_id: {"client_id": client_id},
        {"partitions": ["P"], "since_committed_id": 0, "subscription_partitions": ["P"]},
        lambda id: {
            "partitions": ["P"],
            "event": {"type": "treePush", "payload": {"target": "list", "value": {"id": id}}},
        },
        is_snake=True,
    ),
    "B": Dialect(
        project("P"),
        lambda client_id: {"clientId": client_id, "projectId": "P"},
        {"projectId": "P", "sinceCommittedId": 0, "limit": 10},
        lambda id: {
            "partition": "main",
            "projectId": "P",
            "type": "note.add",
            "schemaVersion": 1,
            "payload": {},
            "meta": {"clientTs": 1},
        },
    ),
    "C": Dialect(
        partition("P"),
        lambda client_id: {"clientId": client_id},
        {"partitions": ["P"], "sinceCommittedId": 0, "limit": 10},
        lambda id: {"partitions": ["P"], "type": "note", "payload": {}, "meta": {"clientTs": 1}},
    ),
}


async def sync_client(node: RunningNode, dialect: Dialect, client_id: str) -> Client:
    """A client that listens; its subject is called like itself."""
    client = await connect(f"{node.ws_url}/sync")
    token = node.token(client_id, client_id=client_id, partitions=["P", "main"], projects=["P"])
    client.say(dialect.frame("connect", {"token": token} | dialect.connect(client_id)))
    await client.hear(1)
    client.say(dialect.frame("sync", dialect.listen))
    await client.hear(2)
    assert [json.loads(each)["type"] for each in client.heard] == ["connected", "sync_response"], client.heard
    return client


@pytest.mark.parametrize("name", DIALECTS)
async def test_a_sync_client_hears_by_the_rights_of_each_records_seq(tmp_path: Path, name: str) -> None:
    """In every dialect, while commits are told together: as at ``/events``, and the refusal stands where the revocation does."""
    dialect = DIALECTS[name]
    async with running_node(tmp_path, dispatch_interval_s=HELD_S) as node:
        writer, reader = await sync_client(node, dialect, "writer"), await sync_client(node, dialect, "reader")

        submitted: list[str] = []

        async def submit(*ids: str) -> None:
            for each in ids:
                submitted.append(each)
                writer.say(dialect.frame("submit_events", {"events": [{"id": each} | dialect.item(each)]}))
                await until(lambda: _count(writer, "submit_events_result") == len(submitted))

        await submit("first", "before")
        await node.log.append(revoke_event("reader", Action.SYNC, dialect.place, actor="test"))
        await submit("without")
        await node.log.append(grant_event("reader", Action.SYNC, dialect.place, actor="test"))
        await submit("after")
        await until(lambda: b'"after"' in reader.heard[-1])
        heard = [json.loads(each) for each in reader.heard[2:]]

    assert [each["payload"].get("id", each["type"]) for each in heard] == ["first", "before", "error", "after"]
    assert heard[2]["payload"]["code"] == "forbidden"


def _count(client: Client, kind: str) -> int:
    return sum(json.loads(each)["type"] == kind for each in client.heard)
