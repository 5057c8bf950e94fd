"""Submitting over the endpoint: one verdict an item, in order, durable before it is told, and told to others once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tests.unit.sync.support import OPEN_SCHEMAS, TroubledLog, event, open_world, types
from tidings.access.context import TokenClaims
from tidings.log.errors import LogFenced, StorageFull
from tidings.sync.settings import SyncSettings
from tidings.testing import VirtualClock


@pytest.mark.req("S3", "S5", "S6", "S9", "S10")
async def test_a_batch_is_committed_in_order_and_told_to_others() -> None:
    """Committed ids rise along the batch; the origin gets one result, a peer one broadcast an event."""
    async with open_world() as world:
        origin, peer = await world.client("C1"), await world.client("C2")
        await origin.sync("P1")
        await peer.sync("P1")

        results = await origin.submit(event("a"), event("b"), event("c"))

        assert [result["status"] for result in results] == ["committed"] * 3
        assert [result["id"] for result in results] == ["a", "b", "c"]
        ids = [result["committed_id"] for result in results]
        assert ids == sorted(set(ids))
        heard = peer.take()
        assert types(heard) == ["event_broadcast"] * 3
        assert [message["payload"]["committed_id"] for message in heard] == ids
        assert heard[0]["payload"] == {
            "id": "a",
            "client_id": "C1",
            "partitions": ["P1"],
            "committed_id": ids[0],
            "event": event("a")["event"],
            "status_updated_at": results[0]["status_updated_at"],
        }
        assert origin.take() == []


@pytest.mark.req("S2", "S11")
async def test_a_rejected_item_leaves_no_trace_and_stops_nothing() -> None:
    """The items around a rejected one are committed; nobody hears of the rejected one."""
    settings = SyncSettings(schemas={"note": {"type": "object", "required": ["n"]}})
    async with open_world(settings) as world:
        origin, peer = await world.client("C1"), await world.client("C2")
        await peer.sync("P1")

        results = await origin.submit(event("a"), event("b", data={}), event("c"))

        assert [result["status"] for result in results] == ["committed", "rejected", "committed"]
        assert results[1]["reason"] == "validation_failed"
        assert results[1]["errors"][0]["field"] == "event.payload.data"
        assert "committed_id" not in results[1]
        assert [message["payload"]["id"] for message in peer.take()] == ["a", "c"]
        assert results[2]["committed_id"] == results[0]["committed_id"] + 1


@pytest.mark.req("S1", "S2")
async def test_an_item_in_a_foreign_partition_is_forbidden() -> None:
    """All partitions of an item must be allowed; the rest of the batch is not affected."""
    async with open_world() as world:
        origin = await world.client("C1", TokenClaims(partitions=frozenset({"P1"})))

        results = await origin.submit(event("a", "P1", "P2"), event("b", "P1"))

        assert [result["status"] for result in results] == ["rejected", "committed"]
        assert results[0]["reason"] == "forbidden"
        assert results[0]["errors"]


@pytest.mark.req("S4", "S25")
async def test_nothing_is_said_before_the_events_are_durable() -> None:
    """While the log has not committed, neither the origin nor a peer hears anything."""
    clock = VirtualClock()
    log = TroubledLog(clock)
    async with open_world(log=log, clock=clock) as world:
        origin, peer = await world.client("C1"), await world.client("C2")
        await peer.sync("P1")
        log.may_commit.clear()

        origin.say("submit_events", {"events": [event("a")]})
        await world.clock.advance(5)
        assert origin.take() == peer.take() == []

        log.may_commit.set()
        await world.settle()
        assert types(origin.take()) == ["submit_events_result"]
        assert types(peer.take()) == ["event_broadcast"]
    await log.close()


async def test_submits_that_came_together_share_a_commit() -> None:
    """Each has a result of its own, in order; one that repeats an id of those before it waits for their commit, and is answered as a retry."""
    clock = VirtualClock()
    log = TroubledLog(clock)
    async with open_world(SyncSettings(schemas={"note": {"required": ["n"]}}), log=log, clock=clock) as world:
        client = await world.client()
        for items in (["a"], ["b", "wrong", "c"], ["a"], ["d"]):
            client.say(
                "submit_events", {"events": [event(id_, data={} if id_ == "wrong" else {"n": 1}) for id_ in items]}
            )
        await world.settle()

        answers = client.take()
        assert types(answers) == ["submit_events_result"] * 4
        found = [[(each["id"], each["status"]) for each in answer["payload"]["results"]] for answer in answers]
        assert found == [
            [("a", "committed")],
            [("b", "committed"), ("wrong", "rejected"), ("c", "committed")],
            [("a", "committed")],
            [("d", "committed")],
        ]
        assert answers[2]["payload"]["results"] == answers[0]["payload"]["results"]
        assert log.batch_sizes == [3, 2]
    await log.close()


@pytest.mark.req("S27", "SC13")
async def test_a_retry_gets_the_first_id_and_time() -> None:
    """Sent again, by the same client or another, equal content is committed as it was; the count does not move."""
    async with open_world() as world:
        first, second = await world.client("C1"), await world.client("C2")
        (before,) = await first.submit(event("a", "P1", "P2", data={"x": 1, "y": [1, {"z": 2}]}))
        await world.clock.advance(3)

        (again,) = await second.submit(event("a", "P2", "P1", "P2", data={"y": [1.0, {"z": 2e0}], "x": 1.0}))
        (new,) = await second.submit(event("b"))

        assert again == before
        assert new["committed_id"] == before["committed_id"] + 1
        page = await first.sync("P1")
        assert [each["client_id"] for each in page["events"]] == ["C1", "C2"]


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        ({"n": 1}, {"n": 1.0}, True),
        ({"n": 0}, {"n": -0.0}, True),
        ({"n": 1e21}, {"n": 1000000000000000000000}, True),
        ({"n": 9007199254740993}, {"n": 9007199254740992}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"n": 1}, {"n": "1"}, False),
        ({"n": True}, {"n": 1}, False),
        ({"n": None}, {}, False),
        ({"n": [1, 2]}, {"n": [2, 1]}, False),
        ({"n": "é"}, {"n": "e\u0301"}, False),
        ({"n": 0.1}, {"n": 0.2}, False),
    ],
)
async def test_equality_is_that_of_canonical_json(one: Any, other: Any, *, is_equal: bool) -> None:
    """Numbers are doubles and keys have no order; everything else must be the same."""
    async with open_world() as world:
        client = await world.client()
        (first,) = await client.submit(event("a", data=one))

        (second,) = await client.submit(event("a", data=other))

        assert (second["status"] == "committed") == is_equal
        if is_equal:
            assert second == first
        else:
            assert second["reason"] == "validation_failed"
            assert second["errors"] == [{"field": "event", "message": "id already committed with different payload"}]


async def test_a_retry_is_recognised_although_the_schema_has_changed_since() -> None:
    """What was committed stays committed; only new events must be valid by the new schema."""
    async with open_world() as world:
        client = await world.client()
        (first,) = await client.submit(event("a", data={"old": True}))
        world.service.reload(SyncSettings(schemas={"note": {"required": ["new"]}}))

        results = await client.submit(event("a", data={"old": True}), event("b", data={"old": True}))

        assert results[0] == first
        assert results[1]["status"] == "rejected"


async def test_two_first_submissions_at_once_yield_one_commit() -> None:
    """Both connections are told the same id, neither hears the other's broadcast, and there is one record."""
    async with open_world() as world:
        one, two = await world.client("C1"), await world.client("C2")
        await one.sync("P1")
        await two.sync("P1")

        one.say("submit_events", {"events": [event("a")]})
        two.say("submit_events", {"events": [event("a")]})
        await world.settle()

        answers = [*one.take(), *two.take()]
        assert types(answers) == ["submit_events_result"] * 2
        assert answers[0]["payload"] == answers[1]["payload"]
        assert len((await one.sync("P1"))["events"]) == 1


@pytest.mark.req("S8")
@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"events": []},
        {"events": "a"},
        {"events": [event("a"), event("a")]},
        {"events": [event("a"), 5]},
        {"events": [event("a"), {"id": "b"}]},
        {"events": [event("a"), event("")]},
        {"events": [event("a"), event("b") | {"partitions": "P1"}]},
        {"events": [event("a"), event("b") | {"partitions": [1]}]},
        {"events": [event("a"), event("b") | {"partition": "P1"}]},
        {"events": [event("a"), event("b") | {"event": []}]},
        {"events": [event("a"), event("b") | {"event": {"type": 1, "payload": {}}}]},
        {"events": [event("a"), event("b") | {"event": {"type": "event", "payload": []}}]},
        {"events": [event("a"), event("b") | {"event": {"type": "event"}}]},
        {"events": [event(f"e{n}") for n in range(101)]},
        {"events": [event("a")], "partition": "P1"},
    ],
)
async def test_a_request_that_is_wrong_as_a_whole_stores_nothing(payload: dict[str, Any]) -> None:
    """Structure, repeated ids and length are looked at before any item; the connection stays open."""
    async with open_world() as world:
        client = await world.client()

        answer = await client.ask("submit_events", payload)

        assert answer["payload"]["code"] == "bad_request"
        assert client.transport.code is None
        assert world.log.position.seq == 0


@pytest.mark.req("S1")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"partitions": []}, "partitions"),
        ({"partitions": [f"P{n}" for n in range(65)]}, "partitions"),
        ({"partitions": ["P" * 129]}, "partitions"),
        ({"partitions": [""]}, "partitions"),
        ({"partitions": ["P\n"]}, "partitions"),
        ({"id": "x" * 257}, "id"),
        ({"event": {"type": "init", "payload": {}}}, "event.type"),
        ({"event": {"type": "treePush", "payload": {}}}, "event.type"),
        ({"event": {"type": "event", "payload": {"data": 1}}}, "event.payload.schema"),
        ({"event": {"type": "event", "payload": {"schema": "other", "data": 1}}}, "event.payload.schema"),
        ({"event": {"type": "event", "payload": {"schema": "note"}}}, "event.payload.data"),
        ({"event": {"type": "event", "payload": {"schema": "note", "data": {}, "more": 1}}}, "event.payload.more"),
        ({"event": {"type": "event", "payload": {"schema": "note", "data": {}, "meta": 1}}}, "event.payload.meta"),
        (
            {"event": {"type": "event", "payload": {"schema": "note", "data": {"n": {"deep": 1}}}}},
            "event.payload.data.n",
        ),
    ],
)
async def test_a_broken_constraint_rejects_the_item_alone(change: dict[str, Any], field: str) -> None:
    """The field at fault is named, and the items around it are committed."""
    settings = SyncSettings(schemas={"note": {"type": "object", "properties": {"n": {"type": "string"}}}})
    async with open_world(settings) as world:
        client = await world.client()

        results = await client.submit(event("a"), event("b") | change, event("c"))

        assert [result["status"] for result in results] == ["committed", "rejected", "committed"]
        assert results[1]["reason"] == "validation_failed"
        assert results[1]["errors"][0]["field"] == field
        assert results[1]["errors"][0]["message"]


async def test_partitions_are_normalised_before_anything_else() -> None:
    """Spellings that differ in Unicode form are one partition; order is that of the bytes, repeats go."""
    claims = TokenClaims(partitions=frozenset({"caf\u00e9", "B", "a"}))
    async with open_world() as world:
        one, two = await world.client("C1", claims), await world.client("C2", claims)
        await two.sync("cafe\u0301")

        await one.submit(event("x", "cafe\u0301", "a", "caf\u00e9", "B"))

        (heard,) = two.take()
        assert heard["payload"]["partitions"] == ["B", "a", "caf\u00e9"]


async def test_the_events_json_is_kept_as_it_was_sent() -> None:
    """Spelling of numbers and order of keys come back; only line breaks between tokens go."""
    async with open_world() as world:
        client, peer = await world.client("C1"), await world.client("C2")
        await peer.sync("P1")
        text = b'{"type":"event",\n "payload":{"schema":"note","data":{"z":1.50,"a":1E2,"t":"\\u00e9\\n"}}}'

        client.throw(
            b'{"type":"submit_events","msg_id":"1","timestamp":1,"protocol_version":"1.0",'
            b'"payload":{"events":[{"id":"a","partitions":["P1"],"event":' + text + b"}]}}"
        )
        await world.settle()

        (frame,) = peer.transport.sent
        assert b'"data":{"z":1.50,"a":1E2,"t":"\\u00e9\\n"}' in frame
        assert b"\n" not in frame


async def test_whoever_names_another_client_is_sent_away() -> None:
    """On the payload or on an item: auth_failed, closed, nothing stored."""
    async with open_world() as world:
        for payload in (
            {"events": [event("a", client_id="C9")]},
            {"events": [event("a")], "client_id": "C9"},
        ):
            client = await world.client()

            answer = await client.ask("submit_events", payload)

            assert answer["payload"]["code"] == "auth_failed"
            assert client.transport.code == 1008
        assert world.log.position.seq == 0
        honest = await world.client()
        assert (await honest.submit(event("a", client_id="C1")))[0]["status"] == "committed"


@pytest.mark.bound("sync.settings.SyncSettings.in_flight_drafts_max")
@crossed
async def test_too_many_drafts_under_way_are_rate_limited(beyond: Beyond) -> None:
    """Beyond the cap a batch is refused with an advice when to come back; those under way are answered."""
    clock = VirtualClock()
    log = TroubledLog(clock)
    settings = SyncSettings(schemas=OPEN_SCHEMAS, in_flight_drafts_max=3)
    async with open_world(settings, log=log, clock=clock) as world:
        client = await world.client()
        log.may_commit.clear()
        client.say("submit_events", {"events": [event("a"), event("b")]})
        client.say("submit_events", {"events": [event(f"c{number}") for number in range(beyond(3) - 2)]})
        client.say("submit_events", {"events": [event("e")]})
        await world.settle()

        (refused,) = client.take()
        assert refused["payload"]["code"] == "rate_limited"
        assert refused["payload"]["details"] == {"retry_after_ms": 250}
        log.may_commit.set()
        await world.settle()
        results = [each for answer in client.take() for each in answer["payload"]["results"]]
        assert [(each["id"], each["status"]) for each in results] == [
            ("a", "committed"),
            ("b", "committed"),
            ("e", "committed"),
        ]
        assert (await client.submit(event("c"), event("d"), event("f")))[0]["status"] == "committed"
    await log.close()


async def test_a_full_disk_is_told_and_goes_on_later() -> None:
    """Nothing was stored, so the client may send the same again; the connection stays."""
    clock = VirtualClock()
    log = TroubledLog(clock)
    async with open_world(log=log, clock=clock) as world:
        client = await world.client()
        log.trouble = StorageFull("somewhere")

        answer = await client.ask("submit_events", {"events": [event("a")]})
        log.trouble = None

        assert answer["payload"]["code"] == "rate_limited"
        assert (await client.submit(event("a")))[0]["status"] == "committed"
    await log.close()


async def test_a_failed_log_ends_the_connection_with_server_error() -> None:
    """Whether the event was stored is unknown, so the client must come back and send it again."""
    clock = VirtualClock()
    log = TroubledLog(clock)
    async with open_world(log=log, clock=clock) as world:
        client = await world.client()
        log.trouble = LogFenced("the disk is gone")

        answer = await client.ask("submit_events", {"events": [event("a")]})

        assert answer["payload"]["code"] == "server_error"
        assert "disk" not in answer["payload"]["message"]
        assert client.transport.code == 1011
    await log.close()


async def test_what_one_commit_tells_a_peer_goes_out_in_one_call() -> None:
    """A batch of a hundred is a hundred messages and one write."""
    async with open_world() as world:
        origin, peer = await world.client("C1"), await world.client("C2")
        await peer.sync("P1")
        sends = peer.transport.sends

        await origin.submit(*(event(f"e{n}") for n in range(100)))

        assert len(peer.take()) == 100
        assert peer.transport.sends == sends + 1
