"""The node's managers over HTTP: apps, the guard, settings and health, each change on record."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.beyond import Beyond, crossed
from tidings.core.errors import SettingsError
from tidings.gateway.contexts import RequestContext
from tidings.gateway.settings import DeliverySettings, EventSettings
from tidings.testing.node import RunningNode, node_settings, running_node

from .api_support import api, event, until
from .node_support import connect, connected, until_answered

MESSAGE_CREATED = {
    "type": "app.event_type_declared",
    "slug": "contacts",
    "event_type": "app.contacts.message_created",
    "topic": "messages",
    "record_type": "NOTED",
    "payload_fields": ["n"],
}


async def audited(node: RunningNode, client: httpx.AsyncClient, kind: str) -> list[dict[str, Any]]:
    """The payloads of the audit records of a type, as an administrator reads them."""
    await node.services.audit.flush(10.0)
    answer = await client.get("/v1/events", params={"topic": "audit", "limit": 1000})
    return [each["payload"] for each in answer.json()["events"] if each["meta"]["type"] == kind]


# Apps


async def test_an_app_is_registered_by_an_administrator_and_is_on_record(tmp_path: Path) -> None:
    """Registering is a record of topic ``apps``, with one in ``audit`` before it that names who did it; a node that starts again knows it."""
    async with api(tmp_path) as (node, client):
        made = await client.post("/v1/apps", json={"slug": "contacts", "title": "Contacts"})
        declared = await client.post("/v1/apps", json=MESSAGE_CREATED)
        assert (made.status_code, declared.status_code) == (201, 201)
        begun = await audited(node, client, "api.app.registered")
        ended = await audited(node, client, "api.app.registered.ended")
        assert begun[0]["slug"] == "contacts"
        assert [(each["outcome"], each["audit_seq"]) for each in ended] == [("done", made.json()["audit_seq"])]
        assert made.json()["audit_seq"] < made.json()["seq"]
        before = (await client.get("/v1/apps")).json()
    async with api(tmp_path) as (_, client):
        after = (await client.get("/v1/apps")).json()

    assert after == before
    assert [each["slug"] for each in after["apps"]] == ["contacts", "default", "system"]
    assert after["apps"][0]["event_types"][0]["event_type"] == "app.contacts.message_created"


REFUSED_CHANGES: list[tuple[dict[str, Any], int, str]] = [
    ({"slug": "Not A Slug"}, 400, "access.invalid_app"),
    ({"slug": "x", "colour": "red"}, 400, "api.invalid_request"),
    ({"type": "app.enabled", "slug": "nobody", "is_enabled": True}, 404, "access.unknown_app"),
    ({"type": "app.enabled", "slug": "system", "is_enabled": False}, 400, "access.invalid_app"),
    ({"type": "app.removed", "slug": "default"}, 400, "access.invalid_app"),
    ({**MESSAGE_CREATED, "event_type": "app.other.message_created"}, 400, "gateway.declaration_refused"),
    ({**MESSAGE_CREATED, "event_type": "app.contacts.MessageCreated"}, 400, "gateway.declaration_refused"),
    ({**MESSAGE_CREATED, "payload_fields": ["private_key"]}, 400, "gateway.declaration_refused"),
    ({**MESSAGE_CREATED, "topic": "no topic"}, 400, "access.invalid_app"),
    ({**MESSAGE_CREATED, "slug": "nobody"}, 404, "access.unknown_app"),
    (
        {"type": "app.event_type_withdrawn", "slug": "contacts", "event_type": "app.contacts.x"},
        400,
        "access.invalid_app",
    ),
    ({"type": "app.channel_removed", "channel": "x"}, 400, "access.invalid_app"),
]


async def test_a_change_of_apps_that_makes_no_sense_is_refused_and_nothing_is_recorded(tmp_path: Path) -> None:
    """A bad slug, an unknown app, a foreign or ill-formed event name, a field that would carry a secret: refused before anything is stored."""
    async with api(tmp_path) as (node, client):
        await client.post("/v1/apps", json={"slug": "contacts"})
        before = node.log.position.seq
        for change, status, code in REFUSED_CHANGES:
            answer = await client.post("/v1/apps", json=change)
            assert (answer.status_code, answer.json()["code"]) == (status, code), change

        assert node.log.position.seq == before


async def test_the_fields_of_a_declared_event_type_are_frozen(tmp_path: Path) -> None:
    """The same declaration again is fine; other fields take a new version, even after the type was withdrawn."""
    async with api(tmp_path) as (_, client):
        await client.post("/v1/apps", json={"slug": "contacts"})

        async def declare(**change: Any) -> int:
            return (await client.post("/v1/apps", json={**MESSAGE_CREATED, **change})).status_code

        assert await declare() == 201
        assert await declare() == 201
        assert await declare(payload_fields=["n", "m"]) == 400
        assert await declare(optional_fields=["m"]) == 400
        name = "app.contacts.message_created"
        withdrawn = {"type": "app.event_type_withdrawn", "slug": "contacts", "event_type": name}
        assert (await client.post("/v1/apps", json=withdrawn)).status_code == 201
        assert await declare(payload_fields=["m"]) == 400
        assert await declare(event_type=f"{name}.v2", payload_fields=["m"]) == 201


async def test_only_administrators_change_and_see_apps_the_guard_and_settings(tmp_path: Path) -> None:
    """Whoever may read and publish everything may still not administer: 403 at each of these places."""
    async with api(tmp_path, topic_prefixes=["m"], space_prefixes=["h"]) as (_, client):
        answers = [
            await client.post("/v1/apps", json={"slug": "contacts"}),
            await client.get("/v1/apps"),
            await client.delete("/v1/apps/contacts"),
            await client.post("/v1/guard/directives", json={"decision": "deny", "target": "all"}),
            await client.get("/v1/guard/directives"),
            await client.get("/v1/config"),
            await client.patch("/v1/config", json={"values": {"server.access_log": True}}),
            await client.get("/v1/health"),
        ]

    assert {each.status_code for each in answers} == {403}


async def test_nobody_publishes_to_the_topic_of_apps(tmp_path: Path) -> None:
    """The records that register apps are written by the node alone."""
    async with api(tmp_path) as (_, client):
        answer = await client.post("/v1/events", json=event(topic="apps"))

    assert (answer.status_code, answer.json()["code"]) == (403, "api.reserved_topic")


async def test_a_channel_between_apps_takes_the_right_to_read_what_goes_through_it(tmp_path: Path) -> None:
    """An administrator opens a channel only over topics that the access book lets them read; it is then marked as validated."""
    async with api(tmp_path) as (node, client):
        for slug in ("contacts", "social"):
            await client.post("/v1/apps", json={"slug": slug})
        channel = {
            "type": "app.channel_registered",
            "channel": "feed",
            "owner_app_id": "contacts",
            "reader_app_ids": ["social"],
            "domain_ids": ["messages"],
        }
        policy = 'forbid(principal, action == Action::"read", resource == Topic::"messages");'
        await client.post("/v1/access/policies", json={"policy_id": "secret", "text": policy})
        refused = await client.post("/v1/apps", json=channel)
        await client.post("/v1/access/policies", json={"type": "access.policy_removed", "policy_id": "secret"})
        assert node.services.apps.readable_domains("social", "contacts") == frozenset()
        taken = await client.post("/v1/apps", json={**channel, "acl_validated": False})

        assert (refused.status_code, taken.status_code) == (403, 201)
        assert node.services.apps.readable_domains("social", "contacts") == {"messages"}
        assert node.services.apps.readable_domains("contacts", "social") == frozenset()
        await client.post("/v1/apps", json={"type": "app.enabled", "slug": "social", "is_enabled": False})
        assert node.services.apps.readable_domains("social", "contacts") == frozenset()


# The guard


async def test_a_denied_identity_is_kept_out_everywhere_until_it_is_allowed(tmp_path: Path) -> None:
    """HTTP answers 503 with Retry-After, a socket that shows its token is closed; others come in; ``allow`` lifts it, all on record."""
    async with api(tmp_path) as (node, client):
        alice = node.headers("alice", topics=["demo"])
        denial = {"decision": "deny", "target": "identity:alice", "ttl_ms": 60_000, "reason_code": "too_loud"}
        done = await client.post("/v1/guard/directives", json=denial)
        assert done.status_code == 201
        kept_out = await client.get("/v1/events", headers=alice, params={"topic": "demo"})
        async with connected(f"{node.ws_url}/sync") as socket:
            hello = {"type": "connect", "msg_id": "1", "timestamp": 0, "protocol_version": "1.0"}
            socket.say(
                json.dumps(
                    {**hello, "payload": {"token": node.token("alice"), "client_id": "c", "last_committed_id": 0}}
                ).encode()
            )
            await socket.ended()
        others = await client.get("/v1/events", headers=node.headers("bob", topics=["demo"]), params={"topic": "demo"})
        listed = (await client.get("/v1/guard/directives")).json()
        await client.post("/v1/guard/directives", json={"decision": "allow", "target": "identity:alice"})
        let_in = await client.get("/v1/events", headers=alice, params={"topic": "demo"})
        records = await audited(node, client, "security.guard.directive")

    assert kept_out.status_code == 503
    assert kept_out.json()["code"] == "access.temporarily_denied"
    assert 1 <= int(kept_out.headers["retry-after"]) <= 60
    assert (others.status_code, let_in.status_code) == (200, 200)
    assert [each["directive"]["target"] for each in listed["directives"]] == ["identity:alice"]
    assert [(each["decision"], each["outcome"]) for each in records] == [
        ("deny", "applied"),
        ("deny", "carried_out"),
        ("allow", "applied"),
        ("allow", "carried_out"),
    ]
    assert {each["subject"] for each in records} == {"tester"}


async def test_denying_everybody_can_be_lifted_by_whoever_denied(tmp_path: Path) -> None:
    """While all are denied, sockets and requests are refused, but for the place where directives are lifted."""
    async with api(tmp_path) as (node, client):
        await client.post("/v1/guard/directives", json={"decision": "require_challenge", "target": "all"})
        refused = await client.get("/v1/apps")
        with pytest.raises(Exception, match="503"):
            await connect(f"{node.ws_url}/sync")
        lifted = await client.post("/v1/guard/directives", json={"decision": "allow", "target": "all"})
        again = await client.get("/v1/apps")
        async with connected(f"{node.ws_url}/sync"):
            pass

    assert (refused.status_code, lifted.status_code, again.status_code) == (503, 201, 200)


REFUSED_DIRECTIVES: list[tuple[dict[str, Any], str]] = [
    ({"decision": "deny", "target": "everybody"}, "access.invalid_directive"),
    ({"decision": "deny", "target": "identity:"}, "access.invalid_directive"),
    ({"decision": "deny", "target": "all", "reason_code": "Too Loud"}, "access.invalid_directive"),
    ({"decision": "deny", "target": "all", "msgs_per_sec_max": 5}, "access.invalid_directive"),
    ({"decision": "deny", "target": "address:192.0.2.0/24"}, "access.invalid_directive"),
    ({"decision": "deny", "target": "address:here"}, "access.invalid_directive"),
    ({"decision": "deny", "target": "all", "directive_id": "mine"}, "access.invalid_directive"),
    ({"decision": "allow", "target": "connection:x"}, "access.invalid_directive"),
    ({"decision": "allow", "target": "all", "close_existing": True}, "access.invalid_directive"),
    ({"decision": "forgive", "target": "all"}, "api.invalid_request"),
    ({"decision": "deny", "target": "all", "ttl_ms": 0}, "api.invalid_request"),
    ({"decision": "deny", "target": "all", "for": "ever"}, "api.invalid_request"),
]


@pytest.mark.req("R137")
async def test_a_directive_that_makes_no_sense_loosens_nothing(tmp_path: Path) -> None:
    """It is refused and that is on record, and what was denied before stays denied."""
    async with api(tmp_path) as (node, client):
        await client.post("/v1/guard/directives", json={"decision": "deny", "target": "identity:alice"})
        alice = node.headers("alice", topics=["demo"])
        for directive, code in REFUSED_DIRECTIVES:
            refused = await client.post("/v1/guard/directives", json=directive)
            denied = await client.get("/v1/events", headers=alice, params={"topic": "demo"})
            assert (refused.status_code, refused.json()["code"], denied.status_code) == (400, code, 503), directive
        records = await audited(node, client, "security.guard.directive_refused")

    assert [each["subject"] for each in records] == ["tester"] * len(REFUSED_DIRECTIVES)


# Settings


async def test_settings_are_changed_all_or_nothing_and_every_change_is_on_record(tmp_path: Path) -> None:
    """A good patch is in force at once and counted; one bad value refuses the whole patch; ``null`` takes a change back."""
    async with api(tmp_path) as (node, client):

        async def patch(**values: Any) -> tuple[int, str | list[str]]:
            answer = await client.patch(
                "/v1/config", json={"values": {k.replace("__", "."): v for k, v in values.items()}}
            )
            return answer.status_code, answer.json()["code"] if answer.is_error else answer.json()["applied"]

        first = (await client.get("/v1/config")).json()
        changed = await patch(server__connections_max=7, event__delivery__max_msgs_per_sec=50)
        assert changed == (200, ["server.connections_max", "event.delivery.max_msgs_per_sec"])
        assert node.connections.settings.connections_max == 7
        assert await patch(server__connections_max=9, event__delivery__heartbeat_interval_ms=4999) == (
            400,
            "settings.invalid",
        )
        assert await patch(server__connections_max=9, server__colour=1) == (400, "settings.invalid")
        assert await patch(server__connections_max=9, event__queue__total_ceiling=100_000) == (
            409,
            "node.settings_vetoed",
        )
        assert await patch(access__tokens__secret="x" * 40) == (400, "settings.invalid")
        broken = {"patch.node": {"type": 5}}
        assert await patch(server__connections_max=9, sync__schemas=broken) == (409, "node.settings_vetoed")
        assert node.connections.settings.connections_max == 7
        shown = (await client.get("/v1/config")).json()
        assert await patch(server__connections_max=None) == (200, ["server.connections_max"])
        assert node.connections.settings.connections_max == first["settings"]["server"]["connections_max"]
        records = [each["keys"] for each in await audited(node, client, "operational.config.changed")]
        vetoes = [each["keys"] for each in await audited(node, client, "operational.config.rejected")]

    assert shown["cfg_seq"] == first["cfg_seq"] + 1
    assert shown["overrides"] == {"server.connections_max": 7, "event.delivery.max_msgs_per_sec": 50}
    assert shown["settings"]["access"]["tokens"]["secret"] == "<secret>"
    assert records == [["server.connections_max", "event.delivery.max_msgs_per_sec"], ["server.connections_max"]]
    assert vetoes == [
        ["event.delivery.heartbeat_interval_ms"],
        ["server.colour"],
        ["event.queue.total_ceiling"],
        ["access.tokens.secret"],
        ["server.connections_max", "sync.schemas"],
    ]


NOT_PATCHED = [
    {"access.tokens": {"secret": "x" * 40}},
    {"access.tokens": {}},
    {"event.delivery": {"max_msgs_per_sec": 7}},
    {"server.key_set_file": "keys.json"},
    {"sync.schemas": {"note": {"$ref": "file:///nowhere"}}},
]


async def test_neither_a_section_nor_a_key_nor_a_bad_schema_is_patched(tmp_path: Path) -> None:
    """A section as a whole, which could take the node's secret away or set another, is no setting, nor is a key file; a bad schema is vetoed."""
    async with api(tmp_path) as (_node, client):
        answers = [await client.patch("/v1/config", json={"values": values}) for values in NOT_PATCHED]
        shown = (await client.get("/v1/config")).json()

    assert [answer.status_code for answer in answers] == [400, 400, 400, 400, 409]
    assert (shown["cfg_seq"], shown["overrides"]) == (1, {})


async def test_a_change_survives_a_reload_and_not_a_restart(tmp_path: Path) -> None:
    """Settings that are read again keep what was changed while the node runs; a new start has what it is started with."""
    async with api(tmp_path) as (node, client):
        await client.patch("/v1/config", json={"values": {"server.connections_max": 7}})
        read_again = msgspec.structs.replace(
            node.settings,
            server=msgspec.structs.replace(node.settings.server, connections_max=100, close_timeout_s=1.0),
        )
        node.reload(read_again)
        assert node.settings.server.connections_max == 7
        assert node.settings.server.close_timeout_s == 1.0
        await client.patch("/v1/config", json={"values": {"server.connections_max": None}})
        assert node.settings.server.connections_max == 100
    async with api(tmp_path) as (node, _):
        assert node.settings.server.connections_max == 10_000


@pytest.mark.req("R210")
async def test_a_node_does_not_start_with_an_impossible_event_section(tmp_path: Path) -> None:
    """A heartbeat below five seconds, however it is given, stops the start before anything is opened."""
    event_settings = EventSettings(delivery=DeliverySettings(heartbeat_interval_ms=4_999))
    settings = msgspec.structs.replace(node_settings(), event=event_settings)

    with pytest.raises(SettingsError, match=r"event\.delivery\.heartbeat_interval_ms"):
        async with running_node(tmp_path, settings):
            pass

    assert not os.listdir(tmp_path)


# Health


async def test_health_shows_every_component(tmp_path: Path) -> None:
    """Each component with its state, and whether the node is ready because of it."""
    async with api(tmp_path) as (node, client):
        await until_answered(lambda: _readiness(client), "ready")
        found = (await client.get("/v1/health")).json()

        assert {"node", "log", "dispatcher", "keys", "access", "audit"} <= found["components"].keys()
        assert {each["state"] for each in found["components"].values()} == {"healthy"}
        assert found["liveness"] == "alive"
        node.services.book.close("as the test wanted", 1)
        await until(lambda: node.services.health.snapshot().components["access"].state == "degraded")


async def _readiness(client: httpx.AsyncClient) -> str:
    found: str = (await client.get("/v1/health")).json()["readiness"]
    return found


async def test_a_probe_without_a_token_is_no_failed_authentication(tmp_path: Path) -> None:
    """Whoever asks whether the node is ready need not show a token; a bad one that is shown counts, by the place where it was."""
    async with api(tmp_path) as (node, _), httpx.AsyncClient(base_url=node.url) as stranger:
        assert (await stranger.get("/readyz")).status_code == 200
        await stranger.get("/metrics")
        assert not node.services.authenticator.failed
        await stranger.get("/readyz", headers={"authorization": "Bearer x.y.z"})

        assert node.services.authenticator.failed == {"access.token_invalid": 1}


async def test_a_subscriber_that_is_too_slow_may_still_publish_and_read(tmp_path: Path) -> None:
    """Three streams closed for their full buffers: subscriptions are denied for a time, and nothing else is."""
    async with api(tmp_path) as (node, _):
        headers = node.headers("alice", topics=["demo"], groups=["demo/g"])
        for _ in range(3):
            node.services.gateway.telemetry.ended(
                RequestContext(app_id="default", requester_identity_id="alice", trace_id="t", capability="subscribe"),
                "c",
                "buffer_overflow",
                is_forced=True,
            )
        async with httpx.AsyncClient(base_url=node.url, headers=headers) as alice:
            stream = await alice.get("/v1/envelopes", headers={"accept": "text/event-stream"})
            page = await alice.get("/v1/envelopes")
            published = await alice.post("/v1/events", json=event(1))
            read = await alice.get("/v1/events")
        socket = await connect(f"{node.ws_url}/groups", extra_headers=headers)

        assert (stream.status_code, "retry-after" in stream.headers) == (503, True)
        assert (page.status_code, published.status_code, read.status_code) == (200, 201, 200)
        socket.transport.disconnect(False)
        await until(lambda: socket.is_gone)


@pytest.mark.bound("access.endpoint._STRANGERS_MAX")
@crossed
async def test_whoever_shows_a_good_token_is_let_in_from_a_denied_address(beyond: Beyond, tmp_path: Path) -> None:
    """Denied are requests and sockets without a token or with a bad one; a few sockets at a time may show theirs in a message."""
    directive = {"decision": "deny", "target": "address:127.0.0.1", "reach": "unauthenticated", "reason_code": "test"}
    async with api(tmp_path) as (node, client):
        assert (await client.post("/v1/guard/directives", json=directive)).status_code == 201
        good = node.headers("alice", topics=["demo"])
        async with httpx.AsyncClient(base_url=node.url) as plain:
            for headers, status in ((good, 200), ({}, 503), ({"authorization": "Bearer bad"}, 503)):
                assert (await plain.get("/v1/events", headers=headers)).status_code == status
        clients = [await connect(f"{node.ws_url}/groups", extra_headers=good)]
        clients += [await connect(f"{node.ws_url}/groups") for _ in range(4)]
        for _ in range(beyond(4) - 4):
            with pytest.raises(Exception, match="503"):
                await connect(f"{node.ws_url}/groups")
        with pytest.raises(Exception, match="503"):
            await connect(f"{node.ws_url}/groups", extra_headers={"authorization": "Bearer bad"})
        for each in clients:
            each.transport.disconnect(False)
        await until(lambda: all(each.is_gone for each in clients))


@pytest.mark.parametrize(
    ("reach", "closed"),
    [
        ("everything", ["known", "stranger", "subscriber"]),
        ("subscriptions", ["subscriber"]),
        ("unauthenticated", ["stranger"]),
    ],
)
async def test_a_directive_closes_what_it_denies(reach: str, closed: list[str], tmp_path: Path) -> None:
    """Of a member, a socket without a token and a subscriber those end that could not come in now."""
    directive = {"decision": "deny", "target": "address:127.0.0.1", "reach": reach, "close_existing": True}
    async with api(tmp_path) as (node, client):
        headers = node.headers("alice", topics=["demo"])
        sockets = {
            "known": await connect(f"{node.ws_url}/happenings", extra_headers=headers),
            "stranger": await connect(f"{node.ws_url}/groups"),
            "subscriber": await connect(f"{node.ws_url}/events", extra_headers=headers),
        }
        sockets["subscriber"].say(b'{"type":"subscribe","app_id":"default","subscription_type":"graph"}')
        await until(lambda: len(node.services.gateway.registry))
        assert (await client.post("/v1/guard/directives", json=directive)).status_code == 201
        await until(lambda: all(sockets[name].is_gone for name in closed))
        assert sorted(name for name, socket in sockets.items() if socket.is_gone) == closed
        for socket in sockets.values():
            socket.transport.disconnect(False)
        await until(lambda: all(socket.is_gone for socket in sockets.values()))
