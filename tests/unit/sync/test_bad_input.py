"""Whatever a client sends, it gets a typed answer or is sent away; nobody else notices."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.unit.sync.support import OPEN_SCHEMAS, Peer, World, event, open_world, project_item, types
from tidings.access.context import TokenClaims
from tidings.sync.settings import SyncSettings

CODES = {
    *("auth_failed", "bad_request", "validation_failed", "forbidden", "rate_limited", "server_error"),
    *("protocol_version_unsupported", "profile_unsupported"),
}


def frame(type: str, payload: Any, /, **envelope: Any) -> bytes:
    message = {"type": type, "msg_id": "m", "timestamp": 1, "payload": payload, "protocol_version": "1.0"}
    return orjson.dumps(message | envelope)


def frames(world: World) -> dict[str, bytes]:
    """One whole frame of every type."""
    return {
        "connect": frame("connect", {"token": world.token("C1"), "client_id": "C1"}),
        "submit_events": frame("submit_events", {"events": [event("a")]}),
        "sync": frame("sync", {"partitions": ["P1"], "subscription_partitions": ["P1"], "since_committed_id": 0}),
        "heartbeat": frame("heartbeat", {}),
        "disconnect": frame("disconnect", {"reason": "x"}),
    }


def assert_typed(peer: Peer) -> None:
    for message in peer.take():
        assert message["type"] != "error" or message["payload"]["code"] in CODES


@pytest.mark.parametrize("type", ["connect", "submit_events", "sync", "heartbeat", "disconnect"])
async def test_a_frame_cut_anywhere_is_a_bad_request(type: str) -> None:
    """Every prefix of every frame gets one bad_request, and the connection stays."""
    async with open_world() as world:
        peer = world.peer() if type == "connect" else await world.client()
        whole = frames(world)[type]
        for cut in range(0, len(whole), 3):
            peer.throw(whole[:cut])
            await world.settle()

            (answer,) = peer.take()
            assert answer["payload"]["code"] == "bad_request"
        assert peer.transport.code is None
        assert world.log.position.seq == 0


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"null",
        b"[]",
        b'"connect"',
        b"\xff\xfe\x00",
        b"{",
        b"[" * 100_000,
        b'{"type":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        frame("heartbeat", []),
        frame("heartbeat", None),
        frame("heartbeat", {}, type=5),
        frame("heartbeat", {}, msg_id=5),
        frame("heartbeat", {}, msg_id=None),
        frame("heartbeat", {}, timestamp="now"),
        frame("heartbeat", {}, timestamp=None),
        frame("heartbeat", {}, timestamp=True),
        frame("heartbeat", {}, protocol_version=1.0),
        b'{"type":"heartbeat","msg_id":"m","timestamp":NaN,"payload":{},"protocol_version":"1.0"}',
        b'{"type":"heartbeat","msg_id":"m","timestamp":1,"payload":{}}',
        b'{"type":"heartbeat","msg_id":"m","timestamp":1,"protocol_version":"1.0"}',
        b'{"msg_id":"m","timestamp":1,"payload":{},"protocol_version":"1.0"}',
        b'{"type":"heart\\ud800beat","msg_id":"m","timestamp":1,"payload":{},"protocol_version":"1.0"}',
        frame("submit_events_result", {"results": []}),
        frame("event_broadcast", {}),
    ],
    ids=lambda message: message[:60].decode(errors="replace"),
)
async def test_a_malformed_envelope_is_a_bad_request(message: bytes) -> None:
    """Not JSON, missing or mistyped fields, unknown types: one answer each, and the connection stays."""
    async with open_world() as world:
        peer = await world.client()

        peer.throw(message)
        await world.settle()

        (answer,) = peer.take()
        assert answer["payload"]["code"] == "bad_request"
        assert answer["payload"]["message"]
        assert (await peer.ask("heartbeat"))["type"] == "heartbeat_ack"


@pytest.mark.parametrize("version", ["", "1", "2.0", "0.9", "99.0", "1.x", "one", "1.0.0", "-1.0", "1.0\n", "x" * 5000])
async def test_an_unsupported_version_ends_the_connection(version: str) -> None:
    """Whatever the message is otherwise; the answer does not repeat more than a little of it."""
    async with open_world() as world:
        peer = world.peer()

        answer = await peer.ask("heartbeat", protocol_version=version)

        assert answer["payload"]["code"] == "protocol_version_unsupported"
        assert len(orjson.dumps(answer)) < 1000
        assert peer.transport.code == 1002


@pytest.mark.req("S30")
async def test_an_oversized_message_is_refused_unread() -> None:
    """One byte over the advertised size is a bad request; at the size it is not."""
    async with open_world(SyncSettings(schemas=OPEN_SCHEMAS, message_bytes_max=2048)) as world:
        peer = await world.client()
        rest = len(frame("submit_events", {"events": [event("a", data={"t": ""})]}))

        for size, type in ((2048, "submit_events_result"), (2049, "error")):
            peer.throw(frame("submit_events", {"events": [event("a", data={"t": "x" * (size - rest)})]}))
            await world.settle()
            (answer,) = peer.take()
            assert answer["type"] == type
        assert answer["payload"]["details"] == {"max_message_bytes": 2048}


@pytest.mark.parametrize("event_json", [b'{"type":"event","payload":{"schema":"note","data":%b}}' % value for value in (
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b'"\\ud800"', b'{"\\udc00":1}', b'"\xff"', b"01", b"1.", b"'a'", b"[1,]"
)])  # fmt: skip
async def test_what_is_no_json_in_an_event_is_a_bad_request(event_json: bytes) -> None:
    """Numbers without a value, lone surrogates and broken UTF-8 never reach the log."""
    async with open_world() as world:
        peer = await world.client()

        peer.throw(
            b'{"type":"submit_events","msg_id":"1","timestamp":1,"protocol_version":"1.0",'
            b'"payload":{"events":[{"id":"a","partitions":["P1"],"event":' + event_json + b"}]}}"
        )
        await world.settle()

        (answer,) = peer.take()
        assert answer["payload"]["code"] == "bad_request"
        assert world.log.position.seq == 0


async def test_an_event_that_nests_too_deep_is_rejected_alone() -> None:
    """Deep enough to trouble a reader, not deep enough to trouble the parser."""
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    async with open_world() as world:
        peer = await world.client()

        results = await peer.submit(event("a", data=deep), event("b"))

        assert [result["status"] for result in results] == ["rejected", "committed"]


async def test_ten_thousand_partitions_are_refused() -> None:
    """On an item the item, in a sync the request."""
    names = [f"P{n}" for n in range(10_000)]
    async with open_world() as world:
        peer = await world.client()

        (result,) = await peer.submit(event("a", *names))
        answer = await peer.ask("sync", {"partitions": names, "since_committed_id": 0})

        assert result["reason"] == "validation_failed"
        assert answer["payload"]["code"] == "bad_request"


async def test_a_name_that_differs_in_unicode_form_gives_no_way_in() -> None:
    """A right to one spelling is a right to the other, and a missing right is missing for both."""
    async with open_world() as world:
        peer = await world.client("C1", TokenClaims(partitions=frozenset({"caf\u00e9"})))

        for name in ("caf\u00e9", "cafe\u0301"):
            assert (await peer.sync(name))["partitions"] == ["caf\u00e9"]
        for name in ("cafe", "CAF\u00c9", "caf\u00e9 ", "caf\u00e9\u0301"):
            answer = await peer.ask("sync", {"partitions": [name], "since_committed_id": 0})
            assert answer["payload"]["code"] == "forbidden"


async def test_frames_repeated_and_reordered_do_no_harm() -> None:
    """Every order of the frames, twice each, is answered; one event is stored at most once."""
    from itertools import permutations

    async with open_world() as world:
        for order in permutations(("connect", "submit_events", "sync", "heartbeat", "disconnect")):
            peer = world.peer()
            whole = frames(world)
            for type in order:
                peer.throw(whole[type])
                peer.throw(whole[type])
                await world.settle()
            assert_typed(peer)
            peer.leave()
        assert world.stats.connections == 0
        assert world.log.position.seq <= 1


async def test_an_old_token_cannot_be_replayed() -> None:
    """Once expired it opens nothing, however often it worked before."""
    async with open_world() as world:
        token = world.token("C1", lifetime_s=60)
        connect = {"token": token, "client_id": "C1", "supported_profiles": ["canonical"]}
        assert (await world.peer().ask("connect", connect))["type"] == "connected"
        await world.clock.advance(61)

        answer = await world.peer().ask("connect", connect)

        assert answer["payload"]["code"] == "auth_failed"


async def test_a_client_that_never_reads_is_bounded_and_then_closed() -> None:
    """With too much unsent its messages are not read; when broadcasts are due it is closed, others go on."""
    settings = SyncSettings(schemas=OPEN_SCHEMAS, write_buffer_bytes_max=1024)
    async with open_world(settings) as world:
        writer, stuck, other = [await world.client(f"C{n}") for n in (1, 2, 3)]
        await stuck.sync("P1")
        await other.sync("P1")
        stuck.transport.buffered_bytes = 2000

        stuck.say("heartbeat")
        assert stuck.transport.is_paused
        await writer.submit(event("a"))

        assert stuck.transport.code == 1013
        assert types(stuck.take()) == ["heartbeat_ack"]
        assert types(other.take()) == ["event_broadcast"]
        assert world.stats.slow_closed == 1
        assert world.stats.subscriptions == 1


async def test_a_client_that_reads_again_is_served_again() -> None:
    """Requests that came before the pause are answered when the buffer has drained."""
    settings = SyncSettings(schemas=OPEN_SCHEMAS, write_buffer_bytes_max=1024)
    async with open_world(settings) as world:
        peer = await world.client()
        peer.transport.buffered_bytes = 2000
        peer.say("sync", {"partitions": ["P1"], "since_committed_id": 0})
        await world.settle()
        assert peer.take() == []
        assert peer.transport.is_paused

        peer.transport.buffered_bytes = 0
        peer.conversation.drained()
        await world.settle()

        assert types(peer.take()) == ["sync_response"]
        assert not peer.transport.is_paused


async def test_a_slow_client_of_dialect_b_is_told_in_its_way() -> None:
    """It does not notice a closed socket, so it gets a server_error first."""
    settings = SyncSettings(schemas=OPEN_SCHEMAS, write_buffer_bytes_max=1024)
    async with open_world(settings) as world:
        stuck, writer = await world.project_client("B1"), await world.project_client("B2")
        stuck.transport.buffered_bytes = 2000

        await writer.ask_camel("submit_events", {"events": [project_item("a")]})

        (last,) = stuck.take()
        assert last["payload"]["code"] == "server_error"
        assert stuck.transport.code == 1013


async def test_many_connections_come_and_go_without_a_trace() -> None:
    """Nothing of them is left: no connection, no subscription, no task."""
    async with open_world() as world:
        peers = [await world.client(f"C{n}") for n in range(200)]
        for peer in peers:
            await peer.sync("P1")
        assert world.stats.connections == world.stats.subscriptions == 200

        for peer in peers:
            peer.leave()

        assert world.stats.connections == world.stats.subscriptions == 0


async def test_a_flood_of_batches_is_refused_and_not_stored_up() -> None:
    """A thousand batches at once: as many as may wait are committed, the others asked to slow down."""
    async with open_world() as world:
        peer = await world.client()
        for n in range(1_000):
            peer.say("submit_events", {"events": [event(f"e{n}")]})
        await world.settle()

        answers = peer.take()
        assert len(answers) == 1_000
        committed = types(answers).count("submit_events_result")
        assert 0 < committed <= 33
        assert {m["payload"]["code"] for m in answers if m["type"] == "error"} == {"rate_limited"}
        assert world.log.position.seq == committed


async def test_an_endpoint_that_is_told_nothing_any_more_ends_its_conversations() -> None:
    """A client that stayed would wait for broadcasts in vain."""
    async with open_world() as world:
        peer = await world.client()

        world.service.failed("the dispatcher has stopped")

        (last,) = peer.take()
        assert last["payload"]["code"] == "server_error"
        assert peer.transport.code == 1011


async def test_records_of_others_in_our_topic_do_not_trouble_clients() -> None:
    """What is no sync event is passed over, on pages and as broadcast."""
    from tidings.core.events import Event, EventMeta

    async with open_world() as world:
        peer = await world.client()
        await peer.sync("P1")
        await world.log.append(Event(EventMeta("sync", "ODD", "x", partitions=("P1",)), {"something": "else"}))
        await world.log.append(Event(EventMeta("sync", "ODD", "x", partitions=("P1",)), {"event": {"type": "event"}}))
        await world.settle()

        assert [m["payload"]["committed_id"] for m in peer.take()] == [2]
        assert [each["committed_id"] for each in (await peer.sync("P1"))["events"]] == [2]


async def test_a_huge_batch_of_nothing_is_not_answered_at_length() -> None:
    """Hundreds of thousands of items, or one enormous id that blocks many: the answer stays in proportion."""
    async with open_world() as world:
        flood = await world.project_client("B1")
        answer = await flood.ask_camel("submit_events", {"events": [0] * 300_000})
        assert answer["payload"]["code"] == "server_error"
        blocked = await world.project_client("B2")

        blocked.say_camel("submit_events", {"events": [project_item("x" * 500_000), *({} for _ in range(900))]})
        await world.settle()

        (frame_sent,) = blocked.transport.sent
        assert len(frame_sent) < 2_000_000
        seed = await world.client("C1")
        answer = await seed.ask("submit_events", {"events": [event(f"e{n}") for n in range(5000)]})
        assert answer["payload"]["details"] == {"max_batch_size": 100}


async def test_long_names_are_not_remembered() -> None:
    """Names that clients choose do not pile up in the server's memory."""
    import tracemalloc

    async with open_world() as world:
        peer = await world.client()
        tracemalloc.start()
        try:
            for n in range(20):
                name = f"{n}" + "P" * 400_000
                await peer.submit(event(f"e{n}", name), event(f"f{n}", event={"type": name, "payload": {}}))
                peer.take()
            kept_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert kept_bytes < 5_000_000
