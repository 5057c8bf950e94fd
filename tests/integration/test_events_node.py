"""What the gateway leaves alone: it delivers, and beside that changes, keeps and stores nothing; and nothing delivers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import tidings
from tests.integration.events_support import address_of, events_node, subscriber, tell
from tests.integration.node_support import until
from tidings.access.audit import AUDIT_TOPIC
from tidings.client.websocket import WebSocketConnector
from tidings.gateway.delivery import Deliverer
from tidings.gateway.names import EventClass
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.log.record import Record
from tidings.testing.node import RunningNode
from tidings.wire.gateway import LIFE_HEADER


async def outside_audit(node: RunningNode) -> list[tuple[int, str, bytes]]:
    """Every record of the log but those of the audit log."""
    return [
        (each.seq, each.topic, bytes(each.payload_json))
        async for each in records(node.log, Query())
        if each.topic != AUDIT_TOPIC
    ]


def files_below(folder: Path) -> dict[Path, bytes]:
    """Every file, with what is in it; of Python's own none that was compiled."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.mark.req("R1")
async def test_the_log_is_the_same_after_everything_that_subscribers_can_do(tmp_path: Path) -> None:
    """Subscribing, receiving, acknowledging, resuming, failing and overflowing write audit records, and not one other."""
    async with events_node(tmp_path, queue={"per_connection": 3}) as node:
        await tell(node, "order:1", "order:2", "order:3")
        before = await outside_audit(node)
        async with subscriber(node) as good, subscriber(node, "bob") as bad, subscriber(node, "carol") as slow:
            await good.subscribed()
            await slow.subscribed()
            bad.say(type="publish", topic="orders", payload={})
            assert (await bad.refusal())[1] == "frame_invalid"
            seq = await tell(node, "order:4")
            (frame,) = await good.heard(1)
            good.ack(frame)
            await tell(node, "order:5", "order:6", "order:7")
            assert (await slow.refusal())[1] == "buffer_overflow"
            token = frame["payload"]["resume_token"]
        async with subscriber(node) as again:
            again.say(type="resume", resume_token=token)
            assert (await again.subscribed())["resumed"]
            await again.heard(3)
        told = [each for each in await outside_audit(node) if each[1] == "orders"]

        assert [each for each in await outside_audit(node) if each[0] < seq] == before
        assert len(told) == 7
        assert {each[1] for each in await outside_audit(node)} == {each[1] for each in before}


@pytest.mark.req("R16")
async def test_nothing_but_the_gateway_delivers_to_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its delivery stands still nothing comes, whatever is published, told or announced; and frames of events are made nowhere else."""
    async with events_node(tmp_path) as node, subscriber(node, "root", roles=["admin"]) as admin:
        await admin.subscribed(channels=["graph.*", "system.*", "security.*", "network.*"])
        await until(lambda: not node.services.gateway._has_queued())
        count = len(admin.frames)
        with monkeypatch.context() as stopped:
            stopped.setattr(Deliverer, "run", lambda self, count_max, now_s: 0)
            stopped.setattr(Deliverer, "flush", lambda self, now_s: False)
            async with httpx.AsyncClient(base_url=node.url, headers=node.headers("root", roles=["admin"])) as http:
                event: dict[str, Any] = {
                    "meta": {"topic": "orders", "type": "changed", "space_id": "s", "objects": ["order:1"]},
                    "payload": {"event": "graph.object_mutated"},
                }
                assert (await http.post("/v1/events", json=event)).status_code < 300
                assert (
                    await http.post("/v1/events", json=event, headers={"authorization": "Bearer no"})
                ).status_code == 401
            seq = await tell(node, "order:2")
            await node.services.dispatcher.reached(seq)
            await until(lambda: node.services.gateway._bound.depths()[EventClass.GRAPH] == 2)
            assert len(admin.frames) == count
        await admin.heard(count + 1)

    sources = Path(tidings.__file__).parent
    makers = {
        path.relative_to(sources).parts[0] for path, data in files_below(sources).items() if b"event_prefix" in data
    }
    assert makers == {"gateway", "wire"}


async def life_of(node: RunningNode) -> str:
    """What the answer to an upgrade calls the gateway's life."""
    link = await WebSocketConnector().connect(address_of(node, "alice"))
    await link.close()
    return link.headers[LIFE_HEADER]


@pytest.mark.req("R102", "R223", "R240")
async def test_events_are_kept_nowhere_and_what_was_missed_is_read_from_the_log(tmp_path: Path) -> None:
    """Who was not there gets nothing on the socket; no delivered envelope is in any file, nor a database; after a restart, which an upgrade's
    answer shows, tokens are worth nothing, and the records are all there."""
    async with events_node(tmp_path) as node:
        await tell(node, "order:1", "order:2")
        async with subscriber(node) as late:
            since = (await late.subscribed())["since"]
            seq = await tell(node, "order:3")
            frames = await late.heard(1)
            assert late.objects == ["order:3"]
        assert since < seq
        lives = [await life_of(node), await life_of(node)]
    ids = [
        frame["payload"][name].encode()
        for frame in frames
        for name in ("event_id", "resume_token", "audience_contract")
    ]
    files = files_below(tmp_path)
    assert [path.name for path, data in files.items() if any(each in data for each in ids)] == []
    assert [path.name for path, data in files.items() if data.startswith(b"SQLite format 3")] == []
    assert any(b"order:3" in data for data in files.values())

    async with events_node(tmp_path) as node:
        async with subscriber(node) as back:
            back.say(type="resume", resume_token=frames[0]["payload"]["resume_token"])
            back.subscribe()
            assert (await back.refusal())[1] == "resume_invalid"
        lives.append(await life_of(node))
        assert lives[0] == lives[1] != lives[2]
        async with httpx.AsyncClient(base_url=node.url, headers=node.headers("alice", topics=["orders"])) as http:
            page = (await http.get("/v1/envelopes", params={"since": 0})).json()
        found = [name for each in page["envelopes"] for name in each["payload_summary"]["object_ids"]]
        assert found == ["order:1", "order:2", "order:3"]


@pytest.mark.req("R60", "R236")
async def test_no_descriptor_comes_in_from_outside(tmp_path: Path) -> None:
    """At the socket it is a malformed frame, over HTTP there is no place for it, and published as an event it is an event like any other."""
    descriptor = {
        "source_manager": "graph_manager",
        "event_class": "graph",
        "event_type": "graph.object_mutated",
        "sequence_anchor_hint": 1,
        "app_id": "default",
        "domain_id": "orders",
        "payload_summary": {"object_ids": ["order:forged"]},
    }
    async with events_node(tmp_path) as node, subscriber(node, "root", roles=["admin"]) as reader:
        await reader.subscribed()
        async with subscriber(node, "mallory", roles=["admin"]) as forger:
            await forger.subscribed()
            forger.say(type="event", **descriptor)
            assert (await forger.refusal())[1] == "frame_invalid"
        async with httpx.AsyncClient(base_url=node.url, headers=node.headers("root", roles=["admin"])) as http:
            for path in ("/v1/envelopes", "/events", "/v1/gateway/connections"):
                assert (await http.post(path, json=descriptor)).status_code in (404, 405, 426)
            event = {"meta": {"topic": "orders", "type": "changed", "space_id": "s"}, "payload": descriptor}
            assert (await http.post("/v1/events", json=event)).status_code < 300
        await tell(node, "order:true")
        await reader.heard(1)

        assert reader.objects == ["order:true"]


async def test_a_commit_is_told_in_the_turn_in_which_it_is_dispatched(tmp_path: Path) -> None:
    """When the dispatcher is done with a record, its frame has left: a busy loop's next turns can be far away."""
    left: list[int] = []

    class Behind:
        def committed(self, records: Sequence[Record]) -> None:
            if records[-1].topic == "orders":
                left.append(node.connections.bytes_out)

    async with events_node(tmp_path) as node, subscriber(node) as reader:
        await reader.subscribed()
        before = node.connections.bytes_out
        node.services.dispatcher.add("a probe", Behind())
        await tell(node, "order:1")
        (frame,) = await reader.heard(1)

    assert left[0] - before > len(frame["payload"]["resume_token"])


async def test_nothing_is_made_of_commits_while_nobody_could_hear_of_them(tmp_path: Path) -> None:
    """Without subscribers there are no envelopes; the first who comes is told up to where to read, and hears what follows; who left hears all."""
    async with events_node(tmp_path) as node:
        produced = node.services.gateway.telemetry.produced_by_class
        seq = await tell(node, "order:1", "order:2")
        made = produced["graph"]
        async with subscriber(node) as reader:
            since = (await reader.subscribed())["since"]
            await tell(node, "order:3")
            (frame,) = await reader.heard(1)
        await until(lambda: not len(node.services.gateway.registry))
        await tell(node, "order:4")
        async with subscriber(node) as again:
            again.say(type="resume", resume_token=frame["payload"]["resume_token"])
            resumed = await again.subscribed()
            (missed,) = await again.heard(1)

    assert (made, since) == (0, seq)
    assert (resumed["replayed"], missed["payload"]["payload_summary"]["object_ids"]) == (1, ["order:4"])
    assert produced["graph"] == 2
