"""Publishing later through a node."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from tests.integration.api_support import api, event, until
from tidings.client.errors import RemoteRefused
from tidings.client.groups import RemoteBus
from tidings.client.http import HttpClient
from tidings.core.errors import InvalidEvent
from tidings.core.events import Event, EventMeta
from tidings.testing.node import running_node


async def test_events_are_published_later(tmp_path: Path) -> None:
    """With ``delay_s`` or ``at`` one event, or each of many, is held and published then; a cancelled one is not."""
    async with api(tmp_path) as (node, client):
        got: list[str] = []

        async def handle(delivered: Event) -> None:
            got.append(delivered.meta.event_id)

        await node.services.bus.subscribe("demo", "test", handle)
        soon = (datetime.now(UTC) + timedelta(seconds=0.2)).isoformat()
        one = await client.post("/v1/events", params={"delay_s": 0.1}, json=event(event_id="one"))
        many = await client.post(
            "/v1/events", params={"at": soon}, json=[event(event_id="two/2"), event(event_id="three")]
        )
        assert (one.status_code, one.json()["event_id"]) == (201, "one")
        assert [each["event_id"] for each in many.json()["verdicts"]] == ["two/2", "three"]
        for expected in (True, False):
            answer = await client.delete("/v1/delayed", params={"event_id": "two/2"})
            assert answer.json() == {"event_id": "two/2", "cancelled": expected}

        await until(lambda: got == ["one", "three"])


async def test_clients_publish_later(tmp_path: Path) -> None:
    """``RemoteBus`` and ``HttpClient`` take a delay or a time as the bus does; the event's own time is then, if it has none."""
    async with running_node(tmp_path) as node:
        token = node.token("ann", roles=["admin"])
        at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
        async with RemoteBus(node.url, token) as bus, HttpClient(node.url, token) as http:
            await bus.publish("demo", {"n": 1}, type="NOTED", space="home", at=at, event_id="bus")
            await bus.publish("demo", {"n": 2}, type="NOTED", space="home", delay=timedelta(hours=2), event_id="far")
            await http.publish(Event(EventMeta("demo", "NOTED", "home", "http"), {"n": 3}), at=at)
            with pytest.raises(InvalidEvent):
                await bus.publish("demo", {"n": 4}, type="NOTED", space="home", delay=timedelta(seconds=-1))
            await bus.publish(
                "demo", {"n": 5}, type="NOTED", space="home", delay=timedelta(hours=3), event_id="farther"
            )
            assert [await bus.cancel_delayed("farther") for _ in range(2)] == [True, False]
            assert await http.cancel_delayed("far") is True
            assert [(each.event_id, each.due) async for each in http.delayed_events()] == [("bus", at), ("http", at)]
            waiting = [each async for each in node.services.bus.delayed_events()]
            async with httpx.AsyncClient(base_url=node.url, headers=node.headers(roles=["admin"])) as client:
                assert "tidings_bus_delayed_events 2.0" in (await client.get("/metrics")).text

    assert [(each.event_id, each.due, each.event.meta.ts) for each in waiting] == [("bus", at, at), ("http", at, at)]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"delay_s": "-1"}, "query.delay_s"),
        ({"delay_s": "1e300"}, "query.delay_s"),
        ({"delay_s": "nan"}, "query.delay_s"),
        ({"at": "tomorrow"}, "query.at"),
        ({"at": "2030-01-01T00:00:00"}, "query.at"),
        ({"at": "2030-01-01T00:00:00Z", "delay_s": "1"}, "query.at"),
    ],
)
async def test_times_that_are_none_are_refused(tmp_path: Path, params: dict[str, str], field: str) -> None:
    """A delay or time that is none is a bad request that names it."""
    async with api(tmp_path) as (_, client):
        answer = await client.post("/v1/events", params=params, json=event())

    assert answer.status_code == 400
    assert field in answer.text


async def test_whoever_may_not_publish_it_may_not_cancel_it(tmp_path: Path) -> None:
    """Cancelling takes the right to publish; without it the answer is the one for an unknown id, over HTTP and ``/groups``."""
    later = Event(EventMeta("demo", "NOTED", "home", "e"), {"n": 1})
    async with running_node(tmp_path) as node:
        rights = {"ann": ["demo"], "bob": ["other"]}
        clients = {
            name: HttpClient(node.url, node.token(name, topics=topics, spaces=["home"]))
            for name, topics in rights.items()
        }
        with pytest.raises(RemoteRefused):
            await clients["bob"].publish(later, delay=timedelta(hours=1))
        await clients["ann"].publish(later, delay=timedelta(hours=1))
        assert await clients["bob"].cancel_delayed("e") is False
        async with RemoteBus(node.url, node.token("bob", topics=["other"], spaces=["home"])) as remote:
            assert await remote.cancel_delayed("e") is False
            assert await remote.cancel_delayed("unknown") is False
        seen = {name: [each.event_id async for each in client.delayed_events()] for name, client in clients.items()}
        assert seen == {"ann": ["e"], "bob": []}
        assert await clients["ann"].cancel_delayed("e") is True
        for client in clients.values():
            await client.close()


async def test_what_waits_is_listed_in_pages(tmp_path: Path) -> None:
    """``next_after`` leads on until there is no more; what was published or cancelled is not listed."""
    async with api(tmp_path) as (_, client):
        for number in range(5):
            await client.post("/v1/events", params={"delay_s": 3600}, json=event(event_id=f"e{number}"))
        await client.delete("/v1/delayed", params={"event_id": "e1"})
        first = (await client.get("/v1/delayed", params={"limit": 3})).json()
        assert [each["event_id"] for each in first["delayed"]] == ["e0", "e2", "e3"]
        rest = (await client.get("/v1/delayed", params={"limit": 3, "after": first["next_after"]})).json()
        assert ([each["event_id"] for each in rest["delayed"]], rest["next_after"]) == (["e4"], None)
