"""Rights on delayed events: to read the record that holds one, to have one published when it is due, to list and cancel."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.access_events import grant_event, policy_event, revoke_event
from tests.beyond import Beyond, crossed
from tidings.access.administration import PolicyRemoved, SubjectRevoked, event_of
from tidings.access.resources import Action, actor, partition, pattern_from_text, space, topic
from tidings.bus.settings import DelayedSettings
from tidings.bus.store.dead_letters import DeadLetter
from tidings.client.groups import RemoteBus
from tidings.core.clock import SystemClock
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.server.event_rights import may_read_letter
from tidings.server.settings import NodeSettings
from tidings.testing.node import RunningNode, node_settings, running_node
from tidings.types import Ack, Event, EventMeta, ReceivedEvent

from .api_support import api, check, event, until

HELD = {
    "of the partition": event(event_id="mine", partitions=["p1"]),
    "of another partition": event(event_id="foreign", partitions=["pv"]),
    "of a revoked topic": event(event_id="secret", topic="secret"),
    "of another space": event(event_id="elsewhere", space_id="vault"),
    "without a partition": event(event_id="open"),
}


async def hold_all(node: RunningNode, client: httpx.AsyncClient) -> None:
    for held in HELD.values():
        assert (await client.post("/v1/events?delay_s=3600", json=held)).status_code == 201
    for right in (
        grant_event("bob", Action.READ, pattern_from_text("topic:*"), actor="t"),
        grant_event("bob", Action.SUBSCRIBE, pattern_from_text("topic:*"), actor="t"),
        revoke_event("bob", Action.READ, topic("secret"), actor="t"),
        revoke_event("bob", Action.SUBSCRIBE, topic("secret"), actor="t"),
    ):
        await node.log.append(right)
    await node.services.dispatcher.reached(node.log.position.seq)


def bob(node: RunningNode, **claims: Any) -> httpx.AsyncClient:
    headers = node.headers("bob", partitions=["p1"], spaces=["home"], **claims)
    return httpx.AsyncClient(base_url=node.url, headers=headers, event_hooks={"response": [check]})


def published(records: list[dict[str, Any]]) -> list[str]:
    return [each["meta"]["extra"]["publishes"] for each in records if each["meta"]["type"] == "DELAYED_HELD"]


async def test_pages_and_single_records_show_a_held_event_to_its_readers(tmp_path: Path) -> None:
    """JSON, NDJSON, CloudEvents, backwards and single: the partition, topic and space of the event within are asked for."""
    async with api(tmp_path) as (node, admin), bob(node) as reader:
        await hold_all(node, admin)
        every = (await admin.get("/v1/events?topic=schedule")).json()["events"]
        page = (await reader.get("/v1/events?topic=schedule")).json()["events"]
        backwards = (await reader.get("/v1/events?topic=schedule&backwards=true")).json()["events"]
        lines = await reader.get("/v1/events?topic=schedule", headers={"accept": "application/x-ndjson"})
        clouds = await reader.get("/v1/events", headers={"accept": "application/cloudevents-batch+json"})
        singles = {published([each])[0]: (await reader.get(f"/v1/events/{each['seq']}")).status_code for each in every}
        found = (await reader.get("/v1/events", params={"event_id": every[1]["meta"]["event_id"]})).json()["events"]

    assert published(every) == ["mine", "foreign", "secret", "elsewhere", "open"]
    assert published(page) == ["mine", "open"]
    assert published(backwards) == ["open", "mine"]
    assert published([json.loads(line) for line in lines.text.splitlines()]) == ["mine", "open"]
    assert len(clouds.json()) == 2
    assert singles == {"mine": 200, "foreign": 404, "secret": 404, "elsewhere": 404, "open": 200}
    assert found == []


async def test_the_right_on_schedule_is_needed_too(tmp_path: Path) -> None:
    """Who may read the event within, and not the topic ``schedule``, sees nothing of it."""
    async with api(tmp_path) as (node, admin):
        await admin.post("/v1/events?delay_s=3600", json=event(event_id="mine"))
        headers = node.headers("eve", topics=["demo"])
        async with httpx.AsyncClient(base_url=node.url, headers=headers) as reader:
            assert (await reader.get("/v1/events")).json()["events"] == []
            assert (await reader.get("/v1/events?topic=schedule")).status_code == 403


async def test_members_of_a_group_get_held_events_that_they_may_have(tmp_path: Path) -> None:
    """A group of ``schedule`` hands a held event to members with the rights on it; its other events wait."""
    got: list[str] = []

    async def note(received: ReceivedEvent) -> Ack:
        got.append(received.record.meta.extra["publishes"])  # type: ignore[index]
        return Ack()

    async with api(tmp_path) as (node, admin):
        await hold_all(node, admin)
        token = node.token("bob", partitions=["p1"], spaces=["home"], groups=["schedule/g"])
        async with RemoteBus(node.url, token) as member:
            await member.subscribe("schedule", "g", note, start="earliest")
            await until(lambda: len(got) >= 2)
            assert node.bus.lag("schedule", "g") == 3

    assert got == ["mine", "open"]


async def test_dead_letters_of_held_events_are_shown_to_their_readers(tmp_path: Path) -> None:
    """A letter holds the record, which holds the event: list and single letters take the rights on that."""

    async def refuse(received: ReceivedEvent) -> Ack:
        raise ValueError("no good")

    async with api(tmp_path) as (node, admin), bob(node) as reader:
        await hold_all(node, admin)
        await node.bus.subscribe("schedule", "g", refuse, max_retries=0)
        await until(lambda: node.bus.lag("schedule", "g") == 0)
        every = (await admin.get("/v1/dead-letters?topic=schedule")).json()["dead_letters"]
        seen = (await reader.get("/v1/dead-letters?topic=schedule")).json()
        statuses = [(await reader.get(f"/v1/dead-letters/schedule/{letter['id']}")).status_code for letter in every]

    assert len(every) == 5
    assert [letter["event"]["meta"]["extra"]["publishes"] for letter in seen["dead_letters"]] == ["mine", "open"]
    assert statuses == [200, 404, 404, 404, 200]


@pytest.mark.parametrize(
    "payload", [{}, {"meta": {"topic": 7}, "payload": {}}, {"meta": {"topic": "schedule"}, "payload": {}}]
)
async def test_a_held_event_that_cannot_be_read_is_shown_to_nobody(tmp_path: Path, payload: dict[str, Any]) -> None:
    """A record of that type without a readable event is hidden, from administrators as well."""
    async with api(tmp_path) as (node, admin):
        stored = await node.log.append(Event(EventMeta("schedule", "DELAYED_HELD", "home"), payload))
        assert (await admin.get("/v1/events?topic=schedule")).json()["events"] == []
        assert (await admin.get(f"/v1/events/{stored.seq}")).status_code == 404
        capsule = node.services.authenticator.of_token(node.token("ann", roles=["admin"]))
        letter = DeadLetter(
            id="g-0",
            topic="schedule",
            group="g",
            offset=0,
            seq=stored.seq,
            event_id=stored.event_id,
            space_id="home",
            error="",
            error_type="",
            traceback_digest="",
            retries=0,
            failed_at="",
            event={"meta": {"type": "DELAYED_HELD"}},
        )
        assert not may_read_letter(capsule, letter)


class Ahead(SystemClock):
    """The system's clock, two hours ahead: tokens and delays of an hour are over."""

    __slots__ = ()

    now_ns = staticmethod(lambda: time.time_ns() + 2 * 3_600 * 10**9)


async def audited(node: RunningNode) -> list[tuple[str, str, str]]:
    return [
        (str(record.meta.actor), record.payload["event_id"], record.payload["error"])
        async for record in records(node.log, Query(topic="audit"))
        if record.meta.type == "delayed.publish_refused"
    ]


async def published_ids(node: RunningNode, name: str = "demo") -> set[str]:
    return {record.meta.event_id async for record in records(node.log, Query(topic=name))}


async def test_rights_are_checked_again_when_a_delayed_event_is_due(tmp_path: Path) -> None:
    """Subject, token, topic, space, partition, grant or policy gone meanwhile: refused, audited and settled. Others are published."""
    async with api(tmp_path) as (node, admin):

        async def hold(subject: str, event_id: str, *, token: dict[str, Any] | None = None, **meta: Any) -> None:
            headers = node.headers(subject, **({"topics": ["demo"]} if token is None else token))
            answer = await admin.post("/v1/events?delay_s=3600", json=event(event_id=event_id, **meta), headers=headers)
            assert answer.status_code == 201, answer.text

        async def change(*changes: Any) -> None:
            for each in changes:
                await node.log.append(each)
            await node.services.dispatcher.reached(node.log.position.seq)

        publish, demo = Action.PUBLISH, topic("demo")
        permit = 'permit (principal == Subject::"ruled", action == Action::"publish", resource);'
        await change(grant_event("granted", publish, demo, actor="t"), policy_event("ruled", permit, actor="t"))
        for subject in ("gone", "no-topic", "no-space", "no-partition", "left", "other-partition"):
            await hold(subject, subject, partitions=["p1"])
        await hold(
            "bound", "bound", token={"topics": ["demo"], "spaces": ["home"], "partitions": ["p1"]}, partitions=["p1"]
        )
        await hold("granted", "granted", token={})
        await hold("ruled", "ruled", token={})
        await hold("boss", "boss", token={"roles": ["admin"]}, actor="somebody")
        await hold("no-proxy", "no-proxy", token={"roles": ["admin"]}, actor="somebody")
        await node.bus.publish(
            "demo", {}, type="T", space="home", delay=timedelta(hours=1), event_id="own", actor="gone"
        )
        await change(
            event_of(SubjectRevoked(subject="gone"), actor="t"),
            revoke_event("no-topic", publish, demo, actor="t"),
            revoke_event("no-space", publish, space("home"), actor="t"),
            revoke_event("no-partition", publish, partition("p1"), actor="t"),
            revoke_event("other-partition", publish, partition("p2"), actor="t"),
            revoke_event("granted", publish, demo, actor="t"),
            revoke_event("no-proxy", publish, actor("somebody"), actor="t"),
            event_of(PolicyRemoved(policy_id="ruled"), actor="t"),
        )

    async with running_node(tmp_path, clock=Ahead()) as node:
        await until(lambda: node.bus.delayed_count == 0 and not node.bus.delayed_count_of("gone"))
        await node.services.dispatcher.reached(node.log.position.seq)
        refused, there = await audited(node), await published_ids(node)
        waiting = [each async for each in node.bus.delayed_events()]

    assert there == {"left", "other-partition", "bound", "boss", "own"}
    assert sorted(refused) == [
        ("gone", "gone", "access.token_revoked"),
        ("granted", "granted", "access.forbidden"),
        ("no-partition", "no-partition", "access.forbidden"),
        ("no-proxy", "no-proxy", "api.foreign_actor"),
        ("no-space", "no-space", "access.forbidden"),
        ("no-topic", "no-topic", "access.forbidden"),
        ("ruled", "ruled", "access.forbidden"),
    ]
    assert waiting == []
    async with running_node(tmp_path, clock=Ahead()) as node:
        assert (len(await published_ids(node)), len(await audited(node))) == (5, 7)


async def test_events_of_an_earlier_version_are_refused_after_a_revocation(tmp_path: Path) -> None:
    """Their records have no publisher: the actor counts, and revocations of it."""
    async with api(tmp_path) as (node, _):
        for subject in ("gone", "there"):
            held = {"meta": {"topic": "demo", "type": "T"}, "payload": {}}
            extra = {"due_ms": time.time_ns() // 10**6 + 3_600_000, "publishes": subject}
            meta = EventMeta("schedule", "DELAYED_HELD", "home", f"held-{subject}", actor=subject, extra=extra)
            await node.log.append(Event(meta, held))
        await node.log.append(event_of(SubjectRevoked(subject="gone"), actor="t"))

    async with running_node(tmp_path, clock=Ahead()) as node:
        await until(lambda: not node.bus.delayed_count_of("gone") and not node.bus.delayed_count_of("there"))
        assert await published_ids(node) == {"there"}
        assert await audited(node) == [("gone", "gone", "access.token_revoked")]


async def test_a_closed_access_book_lets_delayed_events_wait(tmp_path: Path) -> None:
    """Nothing is decided while rights are unknown; the event is published once they are."""
    async with api(tmp_path) as (node, admin):
        await admin.post("/v1/events?delay_s=3600", json=event(event_id="e"))
        broken = Event(EventMeta("access", "access.policy_put", "system"), {"policy_id": "p", "text": "nonsense"})
        await node.log.append(broken)

    async with running_node(tmp_path, clock=Ahead()) as node:
        waiting = [each.event_id async for each in node.bus.delayed_events()]
        assert (waiting, await published_ids(node), await audited(node)) == (["e"], set(), [])
        await node.log.append(event_of(PolicyRemoved(policy_id="p"), actor="t"))
    async with running_node(tmp_path, clock=Ahead()) as node:
        await until(lambda: node.bus.delayed_count == 0)
        await until(lambda: "demo" in node.log.topics())
        assert await published_ids(node) == {"e"}


def limited(**limits: Any) -> NodeSettings:
    given = node_settings()
    return msgspec.structs.replace(given, bus=msgspec.structs.replace(given.bus, delayed=DelayedSettings(**limits)))


@pytest.mark.bound(
    "bus.settings.DelayedSettings.publisher_count_max",
    "bus.settings.DelayedSettings.count_max",
    "bus.settings.DelayedSettings.publisher_bytes_max",
    "bus.settings.DelayedSettings.bytes_max",
)
@crossed
@pytest.mark.parametrize(
    ("limits", "scope"),
    [
        ({"publisher_count_max": 3}, "of 'ann'"),
        ({"count_max": 3}, "in all"),
        ({"publisher_bytes_max": 4_000}, "of 'ann'"),
        ({"bytes_max": 4_000}, "in all"),
    ],
)
async def test_delayed_events_are_bounded(tmp_path: Path, limits: dict[str, int], scope: str, beyond: Beyond) -> None:
    """Those beyond the limit are refused by name; what waits counts after a restart; a cancelled one does not."""
    body = {**event(), "payload": {"text": "x" * 1_200}}

    async def post(client: httpx.AsyncClient, node: RunningNode, subject: str) -> tuple[int, str]:
        headers = node.headers(subject, topics=["demo"])
        answer = await client.post("/v1/events?delay_s=3600", json=body, headers=headers)
        return answer.status_code, answer.json().get("event_id") or answer.json()["code"]

    too_many = (503, "bus.too_many_delayed_events")
    async with api(tmp_path, limited(**limits)) as (node, client):
        answers = [await post(client, node, "ann") for _ in range(beyond(3))]
        assert [status for status, _ in answers[:3]] == [201] * 3
        assert set(answers[3:]) == {too_many}
        assert ((await post(client, node, "bob"))[0] == 201) is (scope != "in all")
        assert node.bus.delayed_count_of("ann") == 3
    async with api(tmp_path, limited(**limits)) as (node, client):
        assert await post(client, node, "ann") == too_many
        headers = node.headers("ann", topics=["demo"])
        refused = await client.post("/v1/events?delay_s=3600", json=body, headers=headers)
        assert scope in refused.json()["detail"]
        first = answers[0][1]
        assert (await client.delete(f"/v1/delayed?event_id={first}", headers=headers)).json()["cancelled"] is True
        assert (await post(client, node, "ann"))[0] == 201
        assert await post(client, node, "ann") == too_many


@pytest.mark.bound("bus.settings.DelayedSettings.delay_s_max")
@crossed
async def test_a_delay_is_bounded(tmp_path: Path, beyond: Beyond) -> None:
    """A longer delay is refused; the program that holds the bus may name one."""
    async with api(tmp_path, limited(delay_s_max=1_000.0)) as (node, client):
        taken = await client.post("/v1/events?delay_s=999", json=event())
        answer = await client.post(f"/v1/events?delay_s={beyond(1_000)}", json=event())
        await node.bus.publish("demo", {}, type="T", space="home", delay=timedelta(days=1))

    assert (taken.status_code, answer.status_code) == (201, 400)
    assert "1000 s ahead" in answer.json()["detail"]


async def test_delayed_events_are_listed_and_cancelled_by_actor(tmp_path: Path) -> None:
    """The list names the actor; all of one are cancelled by that actor or an administrator; ``revoke --all`` counts them."""
    async with api(tmp_path) as (node, admin):
        clients = {name: node.headers(name, topics=["demo"]) for name in ("ann", "bob")}
        for name, number in (("ann", 1), ("bob", 2), ("ann", 3)):
            await admin.post("/v1/events?delay_s=3600", json=event(event_id=f"e{number}"), headers=clients[name])
        await node.bus.publish("demo", {}, type="T", space="home", delay=timedelta(hours=1), event_id="own")
        listed = (await admin.get("/v1/delayed")).json()["delayed"]
        of_ann = (await admin.get("/v1/delayed?actor=ann")).json()["delayed"]
        revocation = {"type": "access.subject_revoked", "subject": "ann"}
        told = await admin.post("/v1/access/revocations?dry_run=true", json=revocation)
        foreign = await admin.delete("/v1/delayed?actor=ann", headers=clients["bob"])
        dry = (await admin.delete("/v1/delayed?actor=ann&dry_run=true")).json()
        own = (await admin.delete("/v1/delayed?actor=bob", headers=clients["bob"])).json()
        done = (await admin.delete("/v1/delayed?actor=ann")).json()
        both = await admin.delete("/v1/delayed?actor=ann&event_id=e1")
        left = [each["event_id"] for each in (await admin.get("/v1/delayed")).json()["delayed"]]
        audit = [
            (record.meta.type, record.meta.actor, record.payload.get("count"))
            async for record in records(node.log, Query(topic="audit"))
            if record.meta.type.startswith("api.delayed")
        ]

    assert [(each["event_id"], each["actor"]) for each in listed] == [
        ("e1", "ann"),
        ("e2", "bob"),
        ("e3", "ann"),
        ("own", None),
    ]
    assert [each["event_id"] for each in of_ann] == ["e1", "e3"]
    assert (told.status_code, told.json().get("delayed_waiting")) == (200, 2)
    assert (foreign.status_code, both.status_code) == (403, 400)
    assert dry == {"actor": "ann", "count": 2, "carried_out": False}
    assert own == {"actor": "bob", "count": 1, "carried_out": True}
    assert done == {"actor": "ann", "count": 2, "carried_out": True}
    assert left == ["own"]
    assert audit[:2] == [("api.delayed.cancel", "bob", 1), ("api.delayed.cancel.ended", "bob", None)]


async def test_a_list_looks_at_a_bounded_number_of_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller without rights gets an empty page and the place to go on, not a walk through all events."""
    monkeypatch.setattr("tidings.server.api.publishing._LOOKED_AT_MAX", 2)
    async with api(tmp_path) as (node, admin):
        for number in range(5):
            await admin.post("/v1/events?delay_s=3600", json=event(event_id=f"e{number}"))
        headers, pages, after = node.headers("eve", topics=["other"]), [], -1
        while after is not None:
            page = (await admin.get(f"/v1/delayed?after={after}", headers=headers)).json()
            pages.append(page["delayed"])
            after = page["next_after"]

    assert pages == [[], [], []]
