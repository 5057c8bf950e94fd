"""``GET /v1/envelopes``: what the socket would have delivered, in pages and as a stream, under the same rights."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.integration.api_support import api, event, until
from tests.integration.events_support import on_record
from tidings.access.guard import Directive
from tidings.client.events import EventStream
from tidings.core.events import Event, EventMeta
from tidings.gateway.settings import DeliverySettings, EventSettings, WebSocketSettings
from tidings.server.api import envelopes
from tidings.testing.node import RunningNode, node_settings, running_node
from tidings.wire.gateway import CloseReason

SSE = {"accept": "text/event-stream"}


async def publish(node: RunningNode, *events: dict[str, Any]) -> list[int]:
    """Their seqs."""
    async with httpx.AsyncClient(base_url=node.url, headers=node.headers("boss", roles=["admin"])) as client:
        answers = [await client.post("/v1/events", json=each) for each in events]
    return [int(answer.json()["seq"]) for answer in answers]


def about(*objects: str, **meta: Any) -> dict[str, Any]:
    """An event about objects."""
    return event(objects=list(objects), **meta)


def seqs(page: dict[str, Any]) -> list[int]:
    """Of a page's envelopes."""
    return [each["sequence_anchor"]["global_seq"] for each in page["envelopes"]]


@pytest.mark.req("R101", "R35")
async def test_pages_have_what_the_socket_delivers(tmp_path: Path) -> None:
    """Envelope for envelope the same, but for what is made anew each time: id, token and time of emission."""
    async with api(tmp_path) as (node, client):
        async with EventStream(node.url, token=node.token("boss", roles=["admin"])) as events:
            since = events.position
            await publish(node, about("order:1"), event(), about("order:2", "order:3", app="default", actor="boss"))
            live = [msgspec.to_builtins(await anext(events)) for _ in range(2)]
        page = (await client.get("/v1/envelopes", params={"since": since})).json()

    fresh = ("event_id", "resume_token", "emitted_at")
    assert [{name: each[name] for name in each if name not in fresh} for each in page["envelopes"]] == [
        {name: each[name] for name in each if name not in fresh} for each in live
    ]
    assert (page["at_end"], page["next_since"] >= seqs(page)[-1]) == (True, True)
    assert live[1]["scope"] == {"app_id": "default", "domain_id": "demo"}
    assert live[1]["payload_summary"] == {
        "object_ids": ["order:2", "order:3"],
        "op_count": 2,
        "op_kinds": ["NOTED"],
        "owner_identity_id": "boss",
        "space_id": "home",
    }


@pytest.mark.req("R34")
async def test_changes_of_access_and_ratings_have_types_of_their_own(tmp_path: Path) -> None:
    """Creates and updates, ratings and grants are told, none with its content."""
    async with api(tmp_path) as (node, client):
        await publish(node, about("order:1"), about("rating:1"))
        grant = {"subject": "ana", "action": "read", "resource": "topic:demo", "reason": "private"}
        assert (await client.post("/v1/access/grants", json=grant)).status_code == 201
        page = (await client.get("/v1/envelopes")).json()
        only = (await client.get("/v1/envelopes", params={"event_type": "graph.acl_changed"})).json()

    assert {each["source_manager"] for each in page["envelopes"]} == {"graph_manager"}
    found = {each["event_type"]: each["payload_summary"]["object_ids"] for each in page["envelopes"]}
    assert found == {
        "graph.object_mutated": ["order:1"],
        "graph.rating_changed": ["rating:1"],
        "graph.acl_changed": ["identity:ana", "topic:demo"],
    }
    assert "private" not in json.dumps(page)
    assert len(only["envelopes"]) == 1


async def test_a_page_never_ends_within_a_seq(tmp_path: Path) -> None:
    """A record that takes several envelopes is on one page, however small that is; going on from ``next_since`` gives each once."""
    async with api(tmp_path) as (node, client):
        await publish(node, about("o:1"), about(*(f"o:{n}" for n in range(200))), event(), about("o:2"))
        since, pages = 0, []
        while True:
            page = (await client.get("/v1/envelopes", params={"since": since, "limit": 1})).json()
            pages.append(seqs(page))
            since = page["next_since"]
            if page["at_end"]:
                break
        whole = seqs((await client.get("/v1/envelopes", params={"limit": 1000})).json())

    assert [len(set(each)) for each in pages if each] == [1, 1, 1]
    assert [seq for each in pages for seq in each] == whole
    assert len(whole) == 6


async def test_filters_narrow(tmp_path: Path) -> None:
    """By domain, object and app; until where; an app sees its own."""
    async with api(tmp_path) as (node, client):
        assert (await client.post("/v1/apps", json={"slug": "shop"})).status_code in (200, 201)
        sent = await publish(node, about("o:1"), about("o:2", topic="other"), about("o:1", "o:3", app="shop"))

        async def read(**params: Any) -> list[int]:
            return seqs((await client.get("/v1/envelopes", params={"since": 0, **params})).json())

        assert [seq for seq in await read() if seq in sent] == sent[:2]
        assert await read(domain_id="other") == sent[1:2]
        assert await read(object_id="o:1") == sent[:1]
        assert await read(object_id=["o:1", "o:2"]) == sent[:2]
        assert await read(app="shop") == sent[2:]
        assert await read(domain_id="demo", until=sent[0]) == sent[:1]


async def test_nobody_sees_an_envelope_whose_record_may_not_be_read(tmp_path: Path) -> None:
    """Topic, space and partitions count as for ``GET /v1/events``, whoever read it before, and what was revoked is gone from the next page on."""
    async with running_node(tmp_path) as node:
        sent = await publish(
            node,
            about("o:1"),
            about("o:2", topic="secret"),
            about("o:3", partitions=["p1"]),
            about("o:4", partitions=["p2"]),
        )
        headers = node.headers("ana", topics=["demo"], partitions=["p1"])
        async with (
            httpx.AsyncClient(base_url=node.url, headers=headers) as client,
            httpx.AsyncClient(base_url=node.url, headers=node.headers("boss", roles=["admin"])) as boss,
        ):
            everything = (await boss.get("/v1/envelopes", params={"since": 0})).json()
            before = (await client.get("/v1/envelopes", params={"since": 0})).json()
            denied = await client.get("/v1/envelopes", params={"domain_id": "secret"})
            revoked = {"subject": "ana", "action": "read", "resource": "space:home"}
            assert (await boss.post("/v1/access/revocations", json=revoked)).status_code == 201
            after = (await client.get("/v1/envelopes", params={"since": 0})).json()

    assert seqs(everything) == sent
    assert seqs(before) == [sent[0], sent[2]]
    assert (denied.status_code, denied.json()["code"]) == (403, "acl_denied")
    assert seqs(after) == []


async def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    """With the status and the code that say why."""
    cases: list[tuple[dict[str, Any], dict[str, str], int, str]] = [
        ({"app": "nobody"}, {}, 404, "app_not_found"),
        ({"app": "No App"}, {}, 400, "event.invalid_name"),
        ({"object_id": "nothing"}, {}, 400, "api.invalid_request"),
        ({"object_id": [f"o:{n}" for n in range(65)]}, {}, 400, "api.invalid_request"),
        ({"event_type": "graph.nothing"}, {}, 400, "api.invalid_request"),
        ({"event_type": "system.health_state_changed"}, {}, 400, "api.invalid_request"),
        ({"since": -1}, {}, 400, "api.invalid_request"),
        ({"epoch": "another"}, {}, 409, "log.epoch_mismatch"),
        ({"until": 3}, SSE, 400, "api.invalid_request"),
        ({}, {**SSE, "last-event-id": "one"}, 400, "api.invalid_request"),
        ({}, {"authorization": "Bearer no"}, 401, "access.token_invalid"),
    ]
    async with api(tmp_path) as (_, client):
        for params, headers, status, code in cases:
            answer = await client.get("/v1/envelopes", params=params, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (status, code), params


class Stream:
    """A client of server-sent events that knows what the standard says: ids last, and an id alone is no event."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.last_id: str | None = None
        self.comments = 0

    async def next(self) -> tuple[str, dict[str, Any]]:
        """The next event: its name and its data."""
        name, data = "message", ""
        async for line in self._lines:
            field, _, value = line.partition(": ")
            if line.startswith(":"):
                self.comments += 1
            elif field == "id":
                self.last_id = value
            elif field == "event":
                name = value
            elif field == "data":
                data = value
            elif not line and data:
                return name, json.loads(data)
        raise EOFError


@contextlib.asynccontextmanager
async def streaming(
    node: RunningNode, headers: dict[str, str], since: int | None = None, **params: Any
) -> AsyncIterator[Stream]:
    """A stream of a node."""
    async with httpx.AsyncClient(base_url=node.url, timeout=20) as client:
        given = {**params, **({} if since is None else {"since": since})}
        async with client.stream("GET", "/v1/envelopes", params=given, headers={**headers, **SSE}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"] == "text/event-stream"
            yield Stream(response)


async def take(stream: Stream, count: int) -> list[int]:
    """The seqs of the next few."""
    return [(await stream.next())[1]["sequence_anchor"]["global_seq"] for _ in range(count)]


async def test_a_stream_has_what_was_there_and_goes_on(tmp_path: Path) -> None:
    """History first, then what happens; the id is the seq when it is complete, and going on from it repeats nothing."""
    async with running_node(tmp_path) as node:
        headers = node.headers("boss", roles=["admin"])
        many = about(*(f"o:{n}" for n in range(100)))
        sent = await publish(node, about("o:1"), many)
        async with streaming(node, headers, since=0, domain_id="demo") as stream:
            assert await take(stream, 1) == sent[:1]
            assert stream.last_id == str(sent[0])
            assert await take(stream, 1) == sent[1:]
            assert stream.last_id == str(sent[0])
            assert await take(stream, 1) == sent[1:]
            assert stream.last_id == str(sent[1])
            sent += await publish(node, event(), many, about("o:2"))
            assert await take(stream, 3) == [sent[3], sent[3], sent[4]]
            last = stream.last_id
        assert last == str(sent[4])
        sent += await publish(node, about("o:3"))
        async with streaming(node, {**headers, "last-event-id": last or ""}, domain_id="demo") as stream:
            assert await take(stream, 1) == sent[5:]


async def test_a_stream_without_since_begins_now(tmp_path: Path) -> None:
    """It says at once where it stands, so that a client that is cut off before the first event misses nothing."""
    async with running_node(tmp_path) as node:
        await publish(node, about("o:1"))
        async with streaming(node, node.headers("boss", roles=["admin"]), object_id="o:2") as stream:
            await until(lambda: len(node.services.gateway.registry))
            sent = await publish(node, about("o:2"))
            assert await take(stream, 1) == sent
            assert stream.last_id == str(sent[0])


async def test_a_stream_counts_as_a_connection(tmp_path: Path) -> None:
    """In the limit, in the list, on record; its place is free when it ends."""
    limits = EventSettings(websocket=WebSocketSettings(max_connections=1, max_connections_per_identity=1))
    settings = msgspec.structs.replace(node_settings(), event=limits)
    async with running_node(tmp_path, settings) as node:
        headers = node.headers("boss", roles=["admin"])
        registry = node.services.gateway.registry
        async with streaming(node, headers):
            await until(lambda: len(registry.connections()) == 1)
            async with httpx.AsyncClient(base_url=node.url, headers=headers) as client:
                refused = await client.get("/v1/envelopes", headers=SSE)
                page = await client.get("/v1/envelopes")
        await until(lambda: registry.admitted == 0)
        async with streaming(node, headers):
            pass

    assert (refused.status_code, refused.json()["code"], "retry-after" in refused.headers) == (
        503,
        "network_rejected",
        True,
    )
    assert page.status_code == 200


async def test_a_stream_that_is_refused_is_on_record(tmp_path: Path) -> None:
    """As at the socket: an app that is not there, a topic that may not be read, a filter that makes no sense; nothing is opened."""
    async with running_node(tmp_path) as node:
        headers = {**node.headers("ana", topics=["demo"]), **SSE}
        async with httpx.AsyncClient(base_url=node.url, headers=headers) as client:
            asked: list[dict[str, str]] = [{"app": "nope"}, {"domain_id": "secret"}, {"object_id": "no-colon"}]
            answers = [(await client.get("/v1/envelopes", params=each)).status_code for each in asked]
            other_life = await client.get("/v1/envelopes", params={"since": 0, "epoch": "another"})
        records = await on_record(node, "subscription_rejected")
        assert node.services.gateway.registry.admitted == 0

    assert answers == [404, 403, 400]
    assert [each["reason"] for each in records] == ["acl_denied", "acl_denied", "filter_invalid"]
    assert {each["context"]["requester_identity_id"] for each in records} == {"ana"}
    assert (other_life.status_code, other_life.json()["code"]) == (409, "log.epoch_mismatch")


async def test_a_stream_that_catches_up_ends_when_it_would_not_be_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A denial does not wait until everything old has been read; that is on record too."""
    read, looked, may_go_on = envelopes._Reader.page, asyncio.Event(), asyncio.Event()

    async def page(reader: Any, *where: Any) -> Any:
        found = await read(reader, *where)
        looked.set()
        await may_go_on.wait()
        return found

    monkeypatch.setattr(envelopes._Reader, "page", page)
    async with running_node(tmp_path) as node:
        sent = await publish(node, about("o:1"), about("o:2"))
        async with streaming(node, node.headers("ana", topics=["demo"]), since=0, limit=1) as stream:
            await looked.wait()
            node.services.guard.apply(Directive(decision="deny", target="identity:ana", close_existing=True), by="boss")
            may_go_on.set()
            assert await take(stream, 1) == sent[:1]
            name, data = await stream.next()
        records = await on_record(node, "subscription_rejected")

    assert (name, data["error"]["data"]["reason"]) == ("closed", "subscription_rejected")
    assert [each["reason"] for each in records] == ["subscription_rejected"]


async def test_the_place_of_a_closed_stream_is_free_whether_or_not_its_client_reads(tmp_path: Path) -> None:
    """What is left to send to a stream that was closed keeps nobody out."""
    async with running_node(tmp_path) as node, streaming(node, node.headers("boss", roles=["admin"])):
        registry = node.services.gateway.registry
        await until(lambda: len(registry))
        (subscriber,) = registry
        registry.close(subscriber, CloseReason.BUFFER_OVERFLOW)
        assert registry.admitted == 0


async def test_nobody_is_told_what_keeps_access_from_being_decided(tmp_path: Path) -> None:
    """While a doubtful record of access denies everything, a page is refused for the time being, and says nothing of the record."""
    async with running_node(tmp_path) as node:
        await publish(node, about("o:1"))
        await node.log.append(Event(EventMeta("access", "access.of_mallory", "s"), {}))
        await node.services.dispatcher.reached(node.log.position.seq)
        async with httpx.AsyncClient(base_url=node.url, headers=node.headers("ana", topics=["demo"])) as client:
            answer = await client.get("/v1/envelopes", params={"since": 0})

    assert (answer.status_code, answer.json()["code"], "mallory" in answer.text) == (503, "access.unavailable", False)


async def test_a_stream_ends_with_the_right_to_it(tmp_path: Path) -> None:
    """A subject that is revoked is told so, and gets nothing that came after."""
    async with (
        running_node(tmp_path) as node,
        streaming(node, node.headers("ana", topics=["demo"]), since=0) as stream,
    ):
        await until(lambda: len(node.services.gateway.registry))
        async with httpx.AsyncClient(base_url=node.url, headers=node.headers("boss", roles=["admin"])) as boss:
            body = {"type": "access.subject_revoked", "subject": "ana"}
            assert (await boss.post("/v1/access/revocations", json=body)).status_code == 201
        await publish(node, about("o:1"))
        name, data = await stream.next()
        with pytest.raises(EOFError):
            await stream.next()

    assert (name, data["error"]["data"]["reason"]) == ("closed", "auth_failed")


async def test_a_stream_hears_of_a_shutdown(tmp_path: Path) -> None:
    """A node that stops says so, and does not wait for the stream."""
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(running_node(tmp_path))
        stream = await stack.enter_async_context(streaming(node, node.headers("boss", roles=["admin"])))
        await until(lambda: len(node.services.gateway.registry))
        stopping = asyncio.ensure_future(node.stop())
        name, data = await stream.next()
        await stopping

    assert (name, data["error"]["data"]["reason"]) == ("closed", "shutdown")


async def test_a_stream_is_kept_alive_by_comments(tmp_path: Path) -> None:
    """What the socket does with pings: whoever reads them is there."""
    settings = EventSettings(delivery=DeliverySettings(heartbeat_interval_ms=5000))
    async with (
        running_node(tmp_path, msgspec.structs.replace(node_settings(), event=settings)) as node,
        streaming(node, node.headers("boss", roles=["admin"])) as stream,
    ):
        registry = node.services.gateway.registry
        await until(lambda: len(registry))
        (subscriber,) = registry
        heard = subscriber.heard_s
        subscriber.ping()
        await until(lambda: subscriber.heard_s > heard)
        sent = await publish(node, about("o:1"))
        assert await take(stream, 1) == sent
        assert stream.comments == 1
