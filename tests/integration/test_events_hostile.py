"""Whoever means harm at ``/events`` gets nothing, keeps nobody from anything, and is on record."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from picows import WSMsgType

from tests.integration.events_support import (
    Subscriber,
    address_of,
    events_node,
    on_record,
    refused,
    subscriber,
    tell,
)
from tests.integration.node_support import connect, until
from tidings.access.endpoint import Peer
from tidings.access.guard import Directive, GuardSettings
from tidings.core.errors import TidingsError
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.wire.gateway import FRAME_BYTES_MAX

TRACE = {"X-Trace-Id": "same"}


# Frames


@pytest.mark.req("R97", "R230", "R232", "R16", "R236", "R242")
@pytest.mark.parametrize(
    "said",
    [
        pytest.param([b"{"], id="not JSON"),
        pytest.param([b"[]"], id="no object"),
        pytest.param([(b'{"type":"ack","resume_token":"a"}', WSMsgType.BINARY)], id="binary"),
        pytest.param([b'{"type":"ack","resume_token":"' + b"a" * FRAME_BYTES_MAX + b'"}'], id="too long"),
        pytest.param([b'{"type":"publish","event_type":"graph.object_mutated","payload":{}}'], id="publishing"),
        pytest.param([b'{"type":"ack","resume_token":"a"}'], id="ack of what never came"),
        pytest.param([b'{"type":"resume","resume_token":"a"}'], id="resume after subscribe"),
        pytest.param([b'{"type":"subscribe","app_id":"default","subscription_type":"graph"}'], id="a second subscribe"),
        pytest.param([b'{"type":"subscribe","app_id":"default","channels":["security.*"]}'], id="a wider subscribe"),
    ],
)
async def test_a_frame_that_is_none_drops_the_subscription(tmp_path: Path, said: list[Any]) -> None:
    """Whatever is not a frame of its moment closes with ``frame_invalid`` at once, is on record, and moves nothing for others."""
    async with events_node(tmp_path) as node, subscriber(node) as mallory, subscriber(node, "bob") as bob:
        await mallory.subscribed()
        await bob.subscribed()
        for each in said:
            mallory.client.say(*(each if isinstance(each, tuple) else (each,)))
        code, reason, error = await mallory.refusal()
        (dropped,) = await on_record(node, "subscription_dropped")
        await tell(node, "order:1")
        await bob.heard(1)

        assert [each.identity_id for each in node.services.gateway.registry.connections()] == ["bob"]

    assert (code, reason, error["code"]) == (4400, "frame_invalid", "network_rejected")
    assert (dropped["subject"], dropped["reason"]) == ("alice", "frame_invalid")
    assert mallory.envelopes == []
    assert bob.objects == ["order:1"]


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([b'{"type":"ack","resume_token":"a"}'], id="ack"),
        pytest.param([b'{"type":"resume","resume_token":"a"}'] * 2, id="two tokens"),
        pytest.param([b"\x00"], id="garbage"),
    ],
)
async def test_a_frame_that_is_none_before_subscribing_is_a_refusal(tmp_path: Path, said: list[bytes]) -> None:
    """The same before there is a subscription: it is closed, on record as refused, and was never opened."""
    async with events_node(tmp_path) as node, subscriber(node) as mallory:
        for each in said:
            mallory.client.say(each)
        code, _, _ = await mallory.refusal()
        (record,) = await on_record(node, "subscription_rejected")

        assert await on_record(node, "subscription_opened") == []

    assert (code, record["reason"]) == (4400, "frame_invalid")


async def test_broken_websocket_frames_are_on_record(tmp_path: Path) -> None:
    """A peer that breaks WebSocket itself is closed by WebSocket's code, and its subscription is dropped for it."""
    async with events_node(tmp_path) as node, subscriber(node) as mallory:
        await mallory.subscribed()
        mallory.client.say(b"\xff\xfe")
        code = await mallory.client.ended()
        (dropped,) = await on_record(node, "subscription_dropped")

    assert (code, dropped["reason"], dropped["cause"]) == (1007, "frame_invalid", "closed with 1007")


# Acknowledgements


@pytest.mark.req("R108")
async def test_only_what_was_sent_here_and_waits_is_acknowledged(tmp_path: Path) -> None:
    """An acknowledgement of another's envelope, of one to come, of one again, and of one before it each closes."""

    async def closed_by(number: int, sends: Any) -> str:
        async with subscriber(node, "mallory") as mallory:
            await mallory.subscribed(object_ids=["order:mine"])
            await tell(node, "order:theirs", "order:mine", "order:mine")
            await mallory.heard(2)
            await theirs.heard(number)
            sends(mallory)
            code, reason, _ = await mallory.refusal()
            assert code == 4400
            return reason

    def twice(mallory: Subscriber) -> None:
        mallory.ack(mallory.envelopes[0])
        mallory.ack(mallory.envelopes[0])

    def back(mallory: Subscriber) -> None:
        mallory.ack(mallory.envelopes[1])
        mallory.ack(mallory.envelopes[0])

    def changed(mallory: Subscriber) -> None:
        token = mallory.envelopes[1]["payload"]["resume_token"]
        mallory.say(type="ack", resume_token=("B" if token[5] == "A" else "A").join((token[:5], token[6:])))

    async with events_node(tmp_path) as node, subscriber(node, "bob") as theirs:
        await theirs.subscribed(object_ids=["order:theirs"])
        ways = [
            lambda mallory: mallory.ack(theirs.envelopes[-1]),
            lambda mallory: mallory.say(type="ack", resume_token=""),
            twice,
            back,
            changed,
        ]
        assert [await closed_by(number, each) for number, each in enumerate(ways, 1)] == ["frame_invalid"] * 5
        assert {each["reason"] for each in await on_record(node, "subscription_dropped")} == {"frame_invalid"}
        assert [each.identity_id for each in node.services.gateway.registry.connections()] == ["bob"]


@pytest.mark.req("R110", "R111", "R112", "R191", "R241")
async def test_who_acknowledges_nothing_is_closed_at_the_bound(tmp_path: Path) -> None:
    """The envelope after the buffer's last closes the connection; that is on record, told to administrators, and nothing is kept for it."""
    async with (
        events_node(tmp_path, queue={"per_connection": 4}) as node,
        subscriber(node) as mallory,
        subscriber(node, "root", roles=["admin"]) as root,
    ):
        gateway = node.services.gateway
        await mallory.subscribed()
        await root.subscribed(channels=["security.subscription_dropped"])
        await tell(node, *(f"order:{number}" for number in range(4)))
        await mallory.heard(4)
        assert gateway.registry.connections()[0].use == 1.0
        await tell(node, "order:4", "order:5")
        code, reason, _ = await mallory.refusal()
        (dropped,) = await on_record(node, "subscription_dropped")
        (told,) = await root.heard(1)
        root.ack(told)
        await until(lambda: gateway.ceiling.used == 0)

    assert (code, reason, dropped["reason"]) == (4413, "buffer_overflow", "buffer_overflow")
    assert mallory.objects == [f"order:{number}" for number in range(4)]
    assert told["payload"]["payload_summary"]["reason"] == "buffer_overflow"


@pytest.mark.req("R112", "R241")
async def test_who_never_reads_costs_no_more_than_its_buffer(tmp_path: Path) -> None:
    """A peer that pings, and takes nothing of what it is sent, is closed when its buffer is full; what waits in the node stays bounded."""
    async with events_node(tmp_path, queue={"per_connection": 512}, delivery={"max_msgs_per_sec": 100_000}) as node:
        host, _, port = node.url.rpartition("/")[2].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1_024)
        token = node.token("mallory", topics=["orders"])
        key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        writer.write(
            f"GET /events?token={token} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{key}\r\n".encode()
        )
        await reader.readuntil(b"\r\n\r\n")
        frame = b'{"type":"subscribe","app_id":"default","subscription_type":"graph"}'
        writer.write(bytes((0x81, 0x80 | len(frame), 0, 0, 0, 0)) + frame)
        gateway = node.services.gateway
        await until(lambda: len(gateway.registry) == 1)
        (connection,) = node.connections.endpoints["/events"].connections
        most = 0
        for number in range(600):
            await tell(node, *(f"order:{number}-{part}-{'x' * 200}" for part in range(1)))
            most = max(most, connection.transport.buffered_bytes)
            if number % 50 == 0:
                writer.write(bytes((0x89, 0x80, 0, 0, 0, 0)))
        (dropped,) = await on_record(node, "subscription_dropped")
        await until(lambda: gateway.ceiling.used == 0)
        writer.close()

    assert dropped["reason"] == "buffer_overflow"
    assert most <= (64 << 10) + 8_192


# Resume tokens


def with_byte(token: str, at: int) -> str:
    raw = bytearray(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    raw[at] ^= 1
    return base64.urlsafe_b64encode(bytes(raw)).decode().rstrip("=")


async def answer_to(node: Any, token: str, subject: str = "alice", **filters: Any) -> tuple[Any, ...]:
    """All that somebody is told who resumes with a token: frames, code and reason."""
    async with subscriber(node, subject, headers=TRACE) as each:
        each.say(type="resume", resume_token=token)
        assert each.client.heard == []
        each.subscribe(**filters)
        code = await each.client.ended()
        return tuple(each.client.heard), code, each.client.close_reason


@pytest.mark.req("R117", "R118", "R121", "R183", "R184", "R235", "R242")
async def test_every_token_that_is_not_good_gets_the_same_answer(tmp_path: Path) -> None:
    """Forged, foreign, never sent, out of the window and of an earlier life: the same bytes at the same point, while the record has the cause."""
    async with events_node(tmp_path, delivery={"resume_window": 4}) as node:
        async with subscriber(node) as alice, subscriber(node, "bob") as bob:
            await alice.subscribed()
            await bob.subscribed(object_ids=["order:none"])
            await tell(node, "order:1")
            (frame,) = await alice.heard(1)
            token, seq = frame["payload"]["resume_token"], frame["payload"]["sequence_anchor"]["global_seq"]
        answers = {
            "forged signature": await answer_to(node, with_byte(token, -1)),
            "another event": await answer_to(node, with_byte(token, 5)),
            "another time": await answer_to(node, with_byte(token, 33)),
            "another identity": await answer_to(node, token, "carol"),
            "never sent to it": await answer_to(node, token, "bob"),
        }
        await tell(node, *(f"order:{number}" for number in range(6)))
        answers["out of the window"] = await answer_to(node, token)
        causes = [each["cause"] for each in await on_record(node, "resume_refused")]
        rejected = [each["reason"] for each in await on_record(node, "subscription_rejected")]
        cut = [await answer_to(node, each) for each in ("", token[:-7], "A" * 300, "ä", token + "A")]
    async with events_node(tmp_path) as node:
        answers["an earlier life"] = await answer_to(node, token)

    assert len(set(answers.values())) == 1, answers
    (frames, code, reason) = answers["out of the window"]
    error = json.loads(frames[0])["payload"]["error"]
    assert (len(frames), code, reason, error["code"]) == (1, 4409, "resume_invalid", "network_rejected")
    assert error["data"] == {
        "action": "http_catch_up",
        "method": "GET",
        "path": "/v1/envelopes",
        "reason": "resume_invalid",
        "since": seq,
    }
    assert len(set(causes)) > 1
    assert set(rejected) == {"resume_invalid"}
    assert {each[1:] for each in cut} == {(4409, "resume_invalid")}
    assert all(json.loads(each[0][0])["payload"]["error"]["message"] == error["message"] for each in cut)


@pytest.mark.req("R116", "R119")
async def test_a_good_token_brings_what_was_missed_and_takes_over(tmp_path: Path) -> None:
    """Who comes back gets what it missed, in order and before what is live; a connection that is still open there is told to leave."""
    async with events_node(tmp_path) as node:
        async with subscriber(node) as first:
            await first.subscribed()
            await tell(node, "order:1", "order:2", "order:3")
            token = (await first.heard(3))[0]["payload"]["resume_token"]
            async with subscriber(node) as second:
                second.say(type="resume", resume_token=token)
                answer = await second.subscribed()
                taken_over = await first.refusal()
                await tell(node, "order:4")
                await second.heard(3)
        (record,) = await on_record(node, "resume_accepted")

    assert (answer["resumed"], answer["replayed"], record["replayed"]) == (True, 2, 2)
    assert second.objects == ["order:2", "order:3", "order:4"]
    assert taken_over[:2] == (4410, "taken_over")


@pytest.mark.req("R146", "R239", "R102")
async def test_a_restart_takes_subscriptions_and_nothing_else(tmp_path: Path) -> None:
    """After a restart the token is refused and nobody is subscribed, while every record is still there to be read."""
    async with events_node(tmp_path) as node, subscriber(node) as alice:
        await alice.subscribed()
        last = await tell(node, "order:1", "order:2")
        (_, frame) = await alice.heard(2)
    async with events_node(tmp_path) as node:
        refusal = await answer_to(node, frame["payload"]["resume_token"])
        kept = [each async for each in records(node.log, Query(topic="orders"))]

        assert node.services.gateway.registry.connections() == []

    assert refusal[1] == 4409
    assert [(each.seq, each.meta.objects) for each in kept] == [(last - 1, ("order:1",)), (last, ("order:2",))]


# Apps, floods, directives


@pytest.mark.req("R91", "R99", "R242")
async def test_no_filter_crosses_into_another_app(tmp_path: Path) -> None:
    """Who connected for one app can ask for no other, and gets nothing of what others tell, whatever its rights on topics are."""
    async with events_node(tmp_path) as node, subscriber(node) as mallory, subscriber(node, "bob") as bob:
        mallory.subscribe(app_id="system")
        code, _, _ = await mallory.refusal()
        await bob.subscribed()
        await tell(node, "order:elsewhere", app="elsewhere")
        await tell(node, "order:here")
        await bob.heard(1)

    assert (code, bob.objects) == (4403, ["order:here"])


@pytest.mark.req("R198", "R136")
async def test_a_flood_before_authentication_is_kept_out(tmp_path: Path) -> None:
    """An address that is refused again and again is denied for a time, but for good tokens; nothing is held for it meanwhile."""
    async with events_node(tmp_path, guard=GuardSettings(rejections_max=5)) as node:
        good = node.token("alice", topics=["orders"])

        def answer(token: str, address: str = "203.0.113.9") -> str:
            try:
                node.connections.admit(Peer("/events", {}, f"token={token}", f"{address}:5000"), address).abandon()
            except TidingsError as error:
                return error.code
            return "admitted"

        answers = [answer(f"no{number}") for number in range(12)]
        shut_out, let_in, elsewhere = answer("no"), answer(good), answer(good, "203.0.113.10")
        records = await on_record(node, "subscription_rejected")

        assert node.services.gateway.registry.admitted == len(node.connections) == 0

    assert answers == ["auth_invalid"] * 5 + ["network_rejected"] * 7
    assert (shut_out, let_in, elsewhere) == ("network_rejected", "admitted", "admitted")
    assert [each["reason"] for each in records] == ["auth_failed"] * 5


async def test_a_flood_of_reconnects_after_authentication_is_kept_out(tmp_path: Path) -> None:
    """An identity whose subscriptions are refused again and again is denied for a time; others are not."""
    async with events_node(tmp_path, guard=GuardSettings(rejections_max=5)) as node:
        for _ in range(5):
            async with subscriber(node, "mallory") as mallory:
                mallory.subscribe(subscription_type="security")
                await mallory.refusal()
        status, problem, headers = await refused(address_of(node, "mallory"))
        async with subscriber(node, "bob") as bob:
            await bob.subscribed()

    assert (status, problem["code"], int(headers["retry-after"]) > 1) == (503, "network_rejected", True)


async def test_a_flood_of_frames_ends_with_the_first_bad_one(tmp_path: Path) -> None:
    """Of thousands of frames behind a bad one none is looked at, and others are served meanwhile."""
    async with events_node(tmp_path) as node, subscriber(node, "bob") as bob:
        await bob.subscribed()
        client = await connect(address_of(node, "mallory"))
        for _ in range(5_000):
            client.say(b'{"type":"ack","resume_token":"a"}')
        await tell(node, "order:1")
        await bob.heard(1)

        assert await client.ended() == 4400
        assert len(await on_record(node, "subscription_rejected")) == 1


@pytest.mark.req("R134", "R135")
async def test_a_directive_denies_and_closes(tmp_path: Path) -> None:
    """A directive against an identity closes its connections with ``subscription_rejected`` and keeps it out until it is lifted; all on record."""
    async with events_node(tmp_path) as node, subscriber(node, "mallory") as mallory, subscriber(node, "bob") as bob:
        await mallory.subscribed()
        await bob.subscribed()
        guard = node.services.guard
        guard.apply(Directive(decision="deny", target="identity:mallory", close_existing=True), by="root")
        code, reason, _ = await mallory.refusal()
        kept_out = await refused(address_of(node, "mallory"))
        guard.apply(Directive(decision="allow", target="identity:mallory"), by="root")
        async with subscriber(node, "mallory") as again:
            await again.subscribed()
        (dropped,) = await on_record(node, "subscription_dropped")
        await tell(node, "order:1")
        await bob.heard(1)
        directives = await on_record(node, "dos_directive")

    assert (code, reason, dropped["reason"]) == (4429, "subscription_rejected", "subscription_rejected")
    assert (kept_out[0], kept_out[1]["code"]) == (503, "network_rejected")
    assert len(directives) == 2
