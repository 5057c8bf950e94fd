"""A delayed event is read with the rights on the event itself, at every door that shows the record which holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.access_events import grant_event, revoke_event
from tidings.access.resources import Action, pattern_from_text, topic
from tidings.bus.store.dead_letters import DeadLetter
from tidings.client.groups import RemoteBus
from tidings.server.event_rights import may_read_letter
from tidings.testing.node import RunningNode
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
