"""The socket ``/events`` of a node: who gets in, what a subscription is, what comes, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.integration.events_support import (
    LeapingClock,
    Subscriber,
    address_of,
    events_node,
    on_record,
    refused,
    subscriber,
    tell,
)
from tests.integration.node_support import connect, until
from tidings.access.administration import SubjectRevoked, event_of
from tidings.gateway.endpoint import EventsEndpoint
from tidings.gateway.gateway import ReloadVetoed
from tidings.gateway.settings import EventSettings, WebSocketSettings
from tidings.server.http import HttpServer

# Getting in


@pytest.mark.req("R84")
async def test_there_is_one_route_and_only_for_upgrades(tmp_path: Path) -> None:
    """No other path upgrades to the gateway, and the path is nothing to plain HTTP, to read or to publish."""
    async with events_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as http:
        other = await refused(address_of(node, "alice").replace("/events", "/v1/events"))
        plain = [
            (await http.request(method, "/events", headers=node.headers())).status_code for method in ("GET", "POST")
        ]

    assert (other[0], plain) == (404, [404, 404])


@pytest.mark.req("R85", "R228")
async def test_without_a_good_token_there_is_no_upgrade(tmp_path: Path) -> None:
    """No token, a forged, an expired, a revoked one and two that differ are each answered over HTTP by their code, and put on record."""
    async with events_node(tmp_path) as node:
        good = node.token("alice", topics=["orders"])
        revoked = node.token("mallory", topics=["orders"])
        await node.log.append(event_of(SubjectRevoked(subject="mallory"), actor="root"))
        await node.services.dispatcher.reached(node.log.position.seq)
        url = f"{node.ws_url}/events"
        answers = [
            await refused(url),
            await refused(f"{url}?token={good[:-4]}AAAA"),
            await refused(url, {"Authorization": "Basic YTpi"}),
            await refused(f"{url}?token={node.token('alice', lifetime_s=-100)}"),
            await refused(f"{url}?token={revoked}"),
            await refused(f"{url}?token={good}", {"X-Auth-Token": node.token("bob")}),
            await refused(url, {"Cookie": f"auth_token={node.token('bob')}; auth_token={good}"}),
            await refused(url, [("X-Auth-Token", node.token("bob")), ("X-Auth-Token", good)]),
            await refused(f"{url}?token={good}&token={good}"),
        ]
        records = await on_record(node, "subscription_rejected")

        assert node.services.gateway.registry.admitted == len(node.connections) == 0

    assert [(status, problem["code"]) for status, problem, _ in answers] == [
        (401, "auth_required"),
        (401, "auth_invalid"),
        (401, "auth_invalid"),
        (401, "ERR_AUTH_TOKEN_EXPIRED"),
        (401, "ERR_AUTH_TOKEN_REVOKED"),
        *[(401, "auth_invalid")] * 3,
        (400, "envelope_invalid"),
    ]
    assert [each["reason"] for each in records] == ["auth_failed"] * 8 + ["frame_invalid"]
    assert all(good not in json.dumps(each) for each in records)


@pytest.mark.req("R85", "R11", "R12")
async def test_a_token_is_shown_in_one_of_four_places(tmp_path: Path) -> None:
    """Query, bearer, header and cookie all say who it is; identity, app and trace id of the connection are fixed with that."""
    async with events_node(tmp_path) as node:
        token = node.token("alice", topics=["orders"])
        url = f"{node.ws_url}/events"
        shown = [
            (f"{url}?token={token}", {}),
            (url, {"Authorization": f"Bearer {token}"}),
            (url, {"X-Auth-Token": token}),
            (f"{url}?app=default", {"Cookie": f"theme=dark; auth_token={token}"}),
        ]
        clients = [
            Subscriber(await connect(where, extra_headers={**headers, "X-Trace-Id": f"t{number}"}))
            for number, (where, headers) in enumerate(shown)
        ]
        for each in clients:
            await each.subscribed()
        contexts = [each.context for each in node.services.gateway.registry]

        with pytest.raises(AttributeError):
            contexts[0].requester_identity_id = "root"  # type: ignore[misc]

    assert [(each.requester_identity_id, each.app_id, each.trace_id, each.is_admin) for each in contexts] == [
        ("alice", "default", f"t{number}", False) for number in range(4)
    ]
    assert [each.frames[0]["trace_id"] for each in clients] == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize(
    ("query", "headers", "status", "code"),
    [
        ("&app=nowhere", {}, 404, "app_not_found"),
        ("&app=No%20Slug", {}, 400, "envelope_invalid"),
        ("&app=default&app=other", {}, 400, "envelope_invalid"),
        ("", {"X-Trace-Id": "a b"}, 400, "envelope_invalid"),
        ("", {"X-Trace-Id": "x" * 129}, 400, "envelope_invalid"),
    ],
)
async def test_what_does_not_make_sense_is_refused_before_the_upgrade(
    tmp_path: Path, query: str, headers: dict[str, str], status: int, code: str
) -> None:
    """An app that is not there, or a malformed name, gets its own answer over HTTP, and leaves nothing."""
    async with events_node(tmp_path) as node:
        answer = await refused(address_of(node, "alice", query), headers)

        assert node.services.gateway.registry.admitted == 0
        assert len(await on_record(node, "subscription_rejected")) == 1

    assert (answer[0], answer[1]["code"]) == (status, code)


@pytest.mark.req("R123", "R124", "R125")
async def test_no_limit_on_connections_is_passed(tmp_path: Path) -> None:
    """Node, identity and app have so many connections and not one more, whether they have subscribed or not; a place that is free is given again."""
    limits = {"max_connections": 4, "max_connections_per_identity": 2, "max_connections_per_app": 3}
    async with events_node(tmp_path, websocket=limits) as node:
        registry = node.services.gateway.registry
        async with subscriber(node), subscriber(node) as second:
            await second.subscribed()
            of_identity = await refused(address_of(node, "alice"))
            async with subscriber(node, "bob"):
                of_app = await refused(address_of(node, "carol"))
                assert registry.admitted == 3
            await until(lambda: registry.admitted == 2)
            async with subscriber(node, "carol"):
                assert registry.admitted == 3
        await until(lambda: registry.admitted == 0)
        records = await on_record(node, "subscription_rejected")

    for status, problem, headers in (of_identity, of_app):
        assert (status, problem["code"], problem["retryable"]) == (503, "network_rejected", True)
        assert int(headers["retry-after"]) >= 1
    assert [each["reason"] for each in records] == ["subscription_rejected"] * 2


# Subscribing


@pytest.mark.req("R86", "R88", "R106")
async def test_a_subscription_has_an_id_is_registered_and_receives(tmp_path: Path) -> None:
    """What is subscribed to is answered with the connection's id and bounds; what is committed then comes as envelopes with a token each."""
    async with events_node(tmp_path) as node, subscriber(node) as alice:
        before = await tell(node, "order:0")
        answer = await alice.subscribed(domain_id="orders")
        registry = node.services.gateway.registry
        (info,), (registered,) = registry.connections(), list(registry)
        next_ping_s = registered.next_ping_s - node.services.clock.monotonic()
        after = await tell(node, "order:1", "order:2")
        frames = await alice.heard(2)

    assert answer == {
        "connection_id": info.connection_id,
        "heartbeat_interval_ms": 15_000,
        "per_connection": 256,
        "replayed": 0,
        "resumed": False,
        "since": before,
    }
    assert (info.identity_id, info.domain_id, info.channels) == ("alice", "orders", ("graph.*",))
    assert 0.0 < next_ping_s <= 15.0
    assert alice.objects == ["order:1", "order:2"]
    assert [each["payload"]["sequence_anchor"]["global_seq"] for each in frames] == [after - 1, after]
    assert len({each["payload"]["resume_token"] for each in frames}) == 2


@pytest.mark.req("R87", "R89", "R90", "R182", "R229", "R10")
@pytest.mark.parametrize(
    ("filters", "code", "reason", "error"),
    [
        ({"app_id": "system"}, 4403, "permission_denied", "acl_denied"),
        ({"subscription_type": "system"}, 4403, "permission_denied", "acl_denied"),
        ({"subscription_type": "security"}, 4403, "permission_denied", "acl_denied"),
        ({"channels": ["graph.*", "security.subscription_opened"]}, 4403, "permission_denied", "acl_denied"),
        ({"subscription_type": "network", "peer_identity_id": "bob"}, 4403, "permission_denied", "acl_denied"),
        ({"domain_id": "payroll"}, 4403, "permission_denied", "acl_denied"),
        ({"subscription_type": "everything"}, 4422, "filter_invalid", "network_rejected"),
        ({"subscription_type": "app.nowhere"}, 4422, "filter_invalid", "network_rejected"),
        ({"event_type": "security.subscription_opened"}, 4422, "filter_invalid", "network_rejected"),
        ({"subscription_type": "graph", "channels": ["graph.*"]}, 4422, "filter_invalid", "network_rejected"),
        ({"channels": []}, 4422, "filter_invalid", "network_rejected"),
        ({"object_ids": ["order:1"] * 65}, 4422, "filter_invalid", "network_rejected"),
    ],
)
async def test_a_filter_that_cannot_stand_ends_the_connection(
    tmp_path: Path, filters: dict[str, object], code: int, reason: str, error: str
) -> None:
    """A filter beyond the subscriber's rights, or that makes no sense, is told by its type, closes, and leaves a record and nothing else."""
    async with events_node(tmp_path) as node, subscriber(node) as alice:
        alice.subscribe(**filters)
        ended, named, detail = await alice.refusal()
        (record,) = await on_record(node, "subscription_rejected")
        registry = node.services.gateway.registry
        await until(lambda: registry.admitted == 0)

        assert not registry.connections()
        assert await on_record(node, "subscription_opened") == []

    assert (ended, named, detail["code"], detail["data"]["reason"]) == (code, reason, error, reason)
    assert record["reason"] == {"permission_denied": "acl_denied"}.get(reason, reason)
    assert record["subject"] == "alice"


@pytest.mark.req("R98", "R217", "R234")
async def test_administrators_see_what_the_node_tells_of_itself(tmp_path: Path) -> None:
    """With the right to administer the node, its own channels open: another's coming is told there, and never from where, or with what token."""
    async with events_node(tmp_path) as node, subscriber(node, "root", roles=["admin"]) as root:
        await root.subscribed(channels=["security.*", "system.*", "network.*"])
        async with subscriber(node) as alice:
            answer = await alice.subscribed()
            wanted = {"security.subscription_opened", "network.peer_admitted"}
            await until(lambda: wanted <= {each["event"] for each in root.envelopes})
        told = [each["payload"] for each in root.envelopes if each["event"] == "security.subscription_opened"]

    assert told[-1]["payload_summary"]["connection_id"] == answer["connection_id"]
    assert told[-1]["scope"]["requester_identity_id"] == "alice"
    assert not re.search(rb"127\.0\.0\.1|eyJ", b"".join(root.client.heard))


@pytest.mark.req("R233", "R234")
async def test_nobody_sees_what_a_read_would_refuse(tmp_path: Path) -> None:
    """Over many records in several topics, each subscriber gets exactly those that ``GET /v1/events`` gives it, and no other's names."""
    topics = {"alice": ["orders"], "bob": ["orders", "payroll"], "carol": []}
    async with events_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as http:
        sockets = {}
        for who, may in topics.items():
            sockets[who] = Subscriber(await connect(address_of(node, who, topics=may)))
            await sockets[who].subscribed()
        for number in range(6):
            await tell(node, f"thing:{number}", topic=("orders", "payroll", "other")[number % 3])
        await sockets["bob"].heard(4)
        for who, may in topics.items():
            seen = sorted(each["payload"]["sequence_anchor"]["global_seq"] for each in sockets[who].envelopes)
            read = []
            for topic in ("orders", "payroll", "other"):
                answer = await http.get(f"/v1/events?topic={topic}", headers=node.headers(who, topics=may))
                read += [each["seq"] for each in answer.json().get("events", [])]
            assert seen == sorted(read)
            frames = b"".join(sockets[who].client.heard)
            assert b"127.0.0.1" not in frames
            assert all(b'"%b"' % name.encode() not in frames for name in {"orders", "payroll", "other"} - set(may))

    assert len(sockets["bob"].envelopes) == 4


@pytest.mark.req("R100", "R103", "R104")
async def test_one_event_is_one_frame_and_the_same_for_all(tmp_path: Path) -> None:
    """Who asks for an event by two channels gets it once; all who get it get the same bytes but for their own trace id, with sorted keys."""
    async with (
        events_node(tmp_path) as node,
        subscriber(node, headers={"X-Trace-Id": 'a"\\'}) as alice,
        subscriber(node, "bob") as bob,
    ):
        await alice.subscribed(channels=["graph.*", "graph.object_mutated"])
        await bob.subscribed()
        await tell(node, "order:é", "order:2")
        await alice.heard(2)
        await bob.heard(2)
        await tell(node, "order:last")
        await until(lambda: alice.objects[-1] == bob.objects[-1] == "order:last")
        raw = [each.client.heard[1:] for each in (alice, bob)]

    assert alice.objects == bob.objects == ["order:é", "order:2", "order:last"]
    for mine, theirs in zip(*raw, strict=True):
        frame = json.loads(mine)
        assert frame["trace_id"] == 'a"\\'
        assert mine == json.dumps(frame, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        assert mine.partition(b',"trace_id":')[0] == theirs.partition(b',"trace_id":')[0]


# Acknowledging, and staying


@pytest.mark.req("R105", "R107", "R109")
async def test_an_acknowledgement_makes_room(tmp_path: Path) -> None:
    """With a buffer of four, who acknowledges every third envelope gets all of twenty; each acknowledgement covers those before it."""
    async with events_node(tmp_path, queue={"per_connection": 4}) as node, subscriber(node) as alice:
        await alice.subscribed()
        for number in range(20):
            await tell(node, f"order:{number}")
            await alice.heard(number + 1)
            if number % 3 == 2:
                alice.ack(alice.envelopes[-1])
                await until(lambda: node.services.gateway.registry.connections()[0].unacked_count == 0)

    assert alice.objects == [f"order:{number}" for number in range(20)]


@pytest.mark.req("R113", "R114", "R115", "R230")
async def test_who_answers_no_ping_is_closed(tmp_path: Path) -> None:
    """Each interval brings a ping; who answers stays, who does not is closed after two, which is on record. Other frames are no answer."""
    clock = LeapingClock()
    async with events_node(tmp_path, clock=clock) as node, subscriber(node) as alice:
        await alice.subscribed()
        silent = Subscriber(await connect(address_of(node, "bob"), enable_auto_pong=False))
        await silent.subscribed()
        registry = node.services.gateway.registry
        for number in (1, 2):
            await tell(node, f"order:{number}")
            await silent.heard(number)
            silent.ack(silent.envelopes[-1])
            silent.client.transport.send_pong(b"12345678")
            clock.leap(15.0)
            await until(lambda: any(clock.monotonic() - each.heard_s < 5.0 for each in registry))
        code, reason, _ = await silent.refusal()
        dropped = await on_record(node, "subscription_dropped")
        stays = [each.identity_id for each in registry.connections()]

    assert (code, reason) == (4408, "heartbeat_timeout")
    assert [(each["subject"], each["reason"]) for each in dropped] == [("bob", "heartbeat_timeout")]
    assert stays == ["alice"]


async def test_who_does_not_subscribe_in_time_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that only shows a resume token, or nothing, is closed when its time is over, and was never subscribed."""
    monkeypatch.setattr("tidings.gateway.endpoint.SUBSCRIBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(EventsEndpoint, "sweep_interval_s", 0.02)
    async with events_node(tmp_path) as node, subscriber(node) as alice:
        alice.say(type="resume", resume_token="x")
        code, reason, _ = await alice.refusal()
        (record,) = await on_record(node, "subscription_rejected")

    assert (code, reason, record["reason"]) == (4429, "subscription_rejected", "subscription_rejected")


@pytest.mark.req("R230")
async def test_a_subject_that_is_revoked_is_closed_before_anything_else(tmp_path: Path) -> None:
    """The revocation closes the connection by its own code; nothing that was committed after it is delivered."""
    async with events_node(tmp_path) as node, subscriber(node) as alice:
        await alice.subscribed()
        await tell(node, "order:1")
        await alice.heard(1)
        await node.log.append(event_of(SubjectRevoked(subject="alice"), actor="root"))
        await tell(node, "order:2")
        code, reason, error = await alice.refusal()
        (dropped,) = await on_record(node, "subscription_dropped")

    assert (code, reason, error["code"], error["category"]) == (4401, "auth_failed", "ERR_AUTH_TOKEN_REVOKED", "auth")
    assert (alice.objects, dropped["reason"]) == (["order:1"], "auth_failed")


async def test_a_token_that_ends_ends_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its time is over a token's connection is closed, and told that another token would do."""
    monkeypatch.setattr(EventsEndpoint, "sweep_interval_s", 0.02)
    clock = LeapingClock()
    async with events_node(tmp_path, clock=clock) as node, subscriber(node) as alice:
        await alice.subscribed()
        clock.leap(7_200.0)
        code, reason, error = await alice.refusal()

    assert (code, reason, error["code"]) == (4401, "auth_failed", "ERR_AUTH_TOKEN_EXPIRED")


# Ending


@pytest.mark.req("R143", "R144")
async def test_a_node_that_stops_says_so(tmp_path: Path) -> None:
    """First nobody is let in any more, while those there are go on; then each is told that it is a shutdown, in a frame and in the close."""
    async with events_node(tmp_path) as node, subscriber(node) as alice, subscriber(node, "bob") as bob:
        await alice.subscribed()
        node.services.gateway.drain()
        late = await refused(address_of(node, "carol"))
        await tell(node, "order:1")
        await alice.heard(1)
        stopping = asyncio.create_task(node.stop())
        code, reason, error = await alice.refusal()
        other = await bob.refusal()
        await stopping
    async with events_node(tmp_path) as node:
        closed = await on_record(node, "subscription_closed")

    assert (late[0], late[1]["code"]) == (503, "ERR_SVC_SYS_DRAINING")
    assert (code, reason, error["data"]["reason"]) == (1001, "shutdown", "shutdown")
    assert other[0] == 1001
    assert [(each["subject"], each["reason"]) for each in closed] == [("alice", "shutdown")]


@pytest.mark.req("R181")
async def test_a_client_that_leaves_is_on_record(tmp_path: Path) -> None:
    """Opening and closing by the client are both on record, with the connection's id, and nothing of it stays."""
    async with events_node(tmp_path) as node:
        async with subscriber(node) as alice:
            answer = await alice.subscribed()
        registry = node.services.gateway.registry
        await until(lambda: not registry.connections() and registry.admitted == 0)
        opened, closed = await on_record(node, "subscription_opened"), await on_record(node, "subscription_closed")

    assert [each["connection_id"] for each in (*opened, *closed)] == [answer["connection_id"]] * 2
    assert closed[0]["reason"] == "client"


async def test_a_node_that_starts_slowly_puts_nothing_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes until the node listens, starting is no news of its parts."""
    start = HttpServer.start

    async def slow_start(http: HttpServer, tls: Any) -> None:
        await asyncio.sleep(0.2)  # so that the gateway looks at itself meanwhile
        await start(http, tls)

    monkeypatch.setattr(HttpServer, "start", slow_start)
    async with events_node(tmp_path) as node:
        await node.services.audit.flush(5.0)

        assert (node.health().is_ready, node.log.position.seq) == (True, 0)


async def test_a_node_that_was_suspended_does_not_call_its_parts_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a whole process wakes up after a minute, no part of it is put on record as silent, and the node is ready."""
    monkeypatch.setattr("tidings.server.health._LOOK_INTERVAL_S", 0.2)
    clock = LeapingClock()
    async with events_node(tmp_path, clock=clock) as node:
        health = node.services.health
        clock.leap(60.0)
        await until(lambda: health.snapshot().components["event_manager"].silent_for_s < 5.0)
        await asyncio.sleep(0.3)
        await node.services.audit.flush(5.0)

        assert (node.health().is_ready, node.log.position.seq) == (True, 0)


@pytest.mark.req("R213")
async def test_a_reload_that_would_cost_connections_is_vetoed(tmp_path: Path) -> None:
    """Limits below what is in use are refused as a whole, under load, and everybody stays; limits that fit are taken."""
    async with events_node(tmp_path) as node, subscriber(node) as alice, subscriber(node, "bob") as bob:
        await alice.subscribed()
        await bob.subscribed()
        await tell(node, *(f"order:{number}" for number in range(5)))
        await bob.heard(5)

        def with_event(**sections: object) -> object:
            return msgspec.structs.replace(
                node.settings, event=msgspec.structs.replace(node.settings.event, **sections)
            )

        few = WebSocketSettings(max_connections=1, max_connections_per_identity=1)
        small = msgspec.structs.replace(node.settings.event.queue, per_connection=4)
        for sections in ({"websocket": few}, {"queue": small}):
            with pytest.raises(ReloadVetoed):
                node.reload(with_event(**sections))  # type: ignore[arg-type]
        assert node.settings.event == node.services.gateway.settings == EventSettings()
        enough = WebSocketSettings(max_connections=2, max_connections_per_identity=1)
        node.reload(with_event(websocket=enough))  # type: ignore[arg-type]
        late = await refused(address_of(node, "carol"))
        await tell(node, "order:5")
        await alice.heard(6)
        await bob.heard(6)

    assert late[0] == 503
    assert alice.objects == bob.objects == [f"order:{number}" for number in range(6)]
