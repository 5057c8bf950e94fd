"""What the node's managers tell, as subscribers of a running node see it; and what they keep on record."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.integration.cli.support import invoke
from tests.integration.events_support import Subscriber, address_of, events_node, on_record, refused, subscriber, tell
from tests.integration.node_support import TalkEndpoint, connected, until
from tidings.access.guard import Directive, GuardSettings
from tidings.core.events import Event, EventMeta
from tidings.gateway.event_types import NODE_DECLARATIONS
from tidings.testing.node import RunningNode, node_settings, running_node

ADMIN: dict[str, Any] = {"roles": ["admin"]}
MESSAGE_CREATED = {
    "type": "app.event_type_declared",
    "slug": "contacts",
    "event_type": "app.contacts.message_created",
    "topic": "messages",
    "record_type": "MESSAGE",
    "payload_fields": ["thread"],
}


def client_of(node: RunningNode, subject: str = "root", **claims: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=node.url, headers=node.headers(subject, **(claims or ADMIN)))


def told(reader: Subscriber) -> dict[str, dict[str, Any]]:
    """The last payload of each type that came."""
    return {each["event"]: each["payload"] for each in reader.envelopes}


async def until_told(reader: Subscriber, *names: str) -> dict[str, dict[str, Any]]:
    await until(lambda: set(names) <= told(reader).keys())
    return told(reader)


def fields_of(name: str) -> tuple[frozenset[str], frozenset[str]]:
    declared = next(each for each in NODE_DECLARATIONS if each.event_type == name)
    return declared.fields, declared.fields | declared.optional_fields


def check_anchored(found: dict[str, dict[str, Any]], scope_keys: set[str]) -> None:
    """Each event has its source's own count, the fields of its declaration, and no other scope than its class has."""
    for name, payload in found.items():
        required, allowed = fields_of(name)
        assert required <= payload["payload_summary"].keys() <= allowed
        assert payload["sequence_anchor"].keys() == {"event_seq"}
        assert payload["scope"].keys() <= scope_keys


@pytest.mark.req("R74")
async def test_who_hears_of_system_and_security_is_decided_by_access_control_at_the_time(tmp_path: Path) -> None:
    """Whoever is granted to administer the node may ask; when that is revoked nothing more comes, on a socket that is open, and nobody new gets in."""
    async with events_node(tmp_path) as node, client_of(node) as client:
        right = {"subject": "helper", "action": "administer", "resource": "node"}

        async def asked() -> str:
            async with subscriber(node, "helper") as reader:
                reader.subscribe(subscription_type="system")
                await reader.client.hear(1)
                return str(reader.frames[0]["event"])

        assert await asked() == "error"
        await client.post("/v1/access/grants", json=right)
        assert await asked() == "subscribed"
        async with subscriber(node, "helper") as helper, subscriber(node, "root", **ADMIN) as root:
            await helper.subscribed(subscription_type="system")
            await root.subscribed(subscription_type="system")
            await client.post("/v1/apps", json={"slug": "before"})
            await until_told(helper, "system.app_state_changed")
            await client.post("/v1/access/revocations", json=right)
            heard = len(helper.envelopes)
            await client.post("/v1/apps", json={"slug": "after"})
            await until(
                lambda: told(root).get("system.app_state_changed", {}).get("payload_summary", {}).get("app") == "after"
            )
            late = [each["payload"]["payload_summary"].get("app") for each in helper.envelopes[heard:]]
        assert await asked() == "error"

    assert "after" not in late


@pytest.mark.req("R37")
async def test_network_and_guard_tell_of_peers_to_those_who_may_know(tmp_path: Path) -> None:
    """Whoever may read the node hears of each peer by its identity, and of nobody's address or token; another hears of nobody."""
    async with events_node(tmp_path) as node, subscriber(node, "root", **ADMIN) as root, client_of(node) as client:
        await root.subscribed(subscription_type="network")
        async with subscriber(node, "alice"):
            await until_told(root, "network.peer_admitted")
        await client.post("/v1/guard/directives", json={"decision": "deny", "target": "identity:mallory"})
        found = await until_told(root, "network.peer_admitted", "network.peer_dropped", "network.peer_denied")
        async with subscriber(node, "bob") as bob:
            bob.subscribe(subscription_type="network", peer_identity_id="alice")
            assert (await bob.refusal())[1] == "permission_denied"

    check_anchored(found, {"peer_identity_id"})
    assert {name: payload["source_manager"] for name, payload in found.items()} == {
        "network.peer_admitted": "network_manager",
        "network.peer_dropped": "network_manager",
        "network.peer_denied": "dos_guard_manager",
    }
    assert found["network.peer_dropped"]["scope"] == {"peer_identity_id": "alice"}
    assert found["network.peer_denied"]["scope"] == {"peer_identity_id": "mallory"}
    assert "127.0.0.1" not in json.dumps(root.frames)


async def message(
    node: RunningNode, payload: dict[str, Any], *, app: str | None = "contacts", actor: str = "alice"
) -> None:
    meta = EventMeta("messages", "MESSAGE", "s", app=app, actor=actor)
    done = await node.log.append(Event(meta, payload))
    await node.services.dispatcher.reached(done.seq)


@pytest.mark.req("R39", "R40", "R32")
async def test_an_apps_events_are_told_from_its_registration_on_and_to_its_own_subscribers(tmp_path: Path) -> None:
    """Before the event type is declared nobody can ask for it; after, each record of the app is one event with the declared fields and no other."""
    async with events_node(tmp_path) as node, client_of(node) as client:
        for slug in ("contacts", "social"):
            await client.post("/v1/apps", json={"slug": slug})
        rights: dict[str, Any] = {"topics": ["messages"]}
        async with subscriber(node, "early", "&app=contacts", **rights) as early:
            early.subscribe(app_id="contacts", subscription_type="app.contacts")
            assert (await early.refusal())[1] == "filter_invalid"
        assert (await client.post("/v1/apps", json=MESSAGE_CREATED)).status_code == 201
        async with (
            subscriber(node, "bob", "&app=contacts", **rights) as bob,
            subscriber(node, "eve", "&app=social", **rights) as eve,
        ):
            await bob.subscribed(app_id="contacts", subscription_type="app.contacts")
            eve.subscribe(app_id="social", subscription_type="app.contacts")
            assert (await eve.refusal())[1] in ("permission_denied", "filter_invalid")
            await message(node, {"thread": "t1", "body": "do not tell"})
            await message(node, {"thread": "t2"}, app="social")
            await message(node, {"thread": "t3"}, app=None)
            await message(node, {"subject": "lacks the thread"})
            await message(node, {"thread": "t4"})
            found = await bob.heard(2)

        assert [each["payload"]["payload_summary"] for each in found] == [{"thread": "t1"}, {"thread": "t4"}]
        assert found[0]["event"] == "app.contacts.message_created"
        assert found[0]["payload"]["source_manager"] == "app.contacts"
        assert found[0]["payload"]["scope"] == {"app_id": "contacts", "domain_id": "messages"}
        lacking = await on_record(node, "descriptor_rejected")
        assert [(each["source_manager"], each["event_type"]) for each in lacking] == [
            ("app_manager", "app.contacts.message_created")
        ]


@pytest.mark.req("R40", "R75")
async def test_an_event_for_its_author_alone_reaches_nobody_else_and_one_for_readers_only_readers(
    tmp_path: Path,
) -> None:
    """With the anchor ``requester_identity_id`` only who published the record sees it; without it, whoever may read the record."""
    async with events_node(tmp_path) as node, client_of(node) as client:
        await client.post("/v1/apps", json={"slug": "contacts"})
        await client.post("/v1/apps", json=MESSAGE_CREATED)
        own = {
            **MESSAGE_CREATED,
            "event_type": "app.contacts.sent",
            "scope_anchors": ["domain_id", "requester_identity_id"],
        }
        await client.post("/v1/apps", json=own)
        async with (
            subscriber(node, "alice", "&app=contacts", topics=["messages"]) as alice,
            subscriber(node, "bob", "&app=contacts", topics=["messages"]) as bob,
            subscriber(node, "eve", "&app=contacts", topics=["other"]) as eve,
        ):
            for each in (alice, bob, eve):
                await each.subscribed(app_id="contacts", subscription_type="app.contacts")
            await message(node, {"thread": "t1"})
            await alice.heard(2)
            await bob.heard(1)
            await message(node, {"thread": "t2"}, actor="bob")
            await bob.heard(3)

            assert [each["event"] for each in alice.envelopes] == [
                "app.contacts.message_created",
                "app.contacts.sent",
                "app.contacts.message_created",
            ]
            assert [each["payload"]["payload_summary"]["thread"] for each in bob.envelopes] == ["t1", "t2", "t2"]
            assert eve.envelopes == []


@pytest.mark.req("R134", "R135", "R136", "R137")
async def test_a_directive_over_http_closes_who_is_there_and_keeps_them_out(tmp_path: Path) -> None:
    """The subscriber is closed with its reason, comes back to 503 and Retry-After, others stay; directive and outcome are on record."""
    async with events_node(tmp_path) as node, client_of(node) as client:
        async with subscriber(node, "mallory") as mallory, subscriber(node, "alice") as alice:
            await mallory.subscribed()
            await alice.subscribed()
            denial = {"decision": "deny", "target": "identity:mallory", "close_existing": True}
            done = await client.post("/v1/guard/directives", json=denial)
            assert (await mallory.refusal())[:2] == (4429, "subscription_rejected")
            status, problem, headers = await refused(address_of(node, "mallory"))
            await tell(node, "order:1")
            await alice.heard(1)
        outcome = await on_record(node, "dos_directive")

    assert done.json()["closed"] >= 1
    assert (status, problem["code"]) == (503, "network_rejected")
    assert "retry-after" in headers
    assert [(each["target"], each["closed"]) for each in outcome] == [("identity:mallory", 1)]


@pytest.mark.req("R198")
async def test_who_is_refused_again_and_again_is_denied_for_a_time(tmp_path: Path) -> None:
    """Ten refusals of one identity within a minute, and the eleventh attempt does not get as far; that is on record."""
    async with events_node(tmp_path, guard=GuardSettings()) as node:
        for _ in range(10):
            async with subscriber(node, "mallory") as mallory:
                mallory.subscribe(subscription_type="security")
                await mallory.refusal()
        status, problem, _ = await refused(address_of(node, "mallory"))
        async with subscriber(node, "alice") as alice:
            await alice.subscribed()
        await node.services.audit.flush(5.0)
        (denial,) = node.services.guard.directives()

    assert (status, problem["code"]) == (503, "network_rejected")
    assert (denial.directive.target, denial.directive.reason_code) == ("identity:mallory", "abuse.rejection")


@pytest.mark.req("R221", "R206")
async def test_what_happens_to_a_subscription_is_in_the_log_whether_or_not_anybody_hears_of_it(tmp_path: Path) -> None:
    """Opened, refused and dropped: each is a record of topic ``audit`` with who, which connection and why, readable by administrators over HTTP."""
    async with events_node(tmp_path, queue={"per_connection": 1}) as node, client_of(node) as client:
        async with subscriber(node, "slow") as slow:
            opened = await slow.subscribed()
            await tell(node, "order:1", "order:2")
            assert (await slow.refusal())[:2] == (4413, "buffer_overflow")
        async with subscriber(node, "curious") as curious:
            curious.subscribe(subscription_type="system")
            await curious.refusal()
        await node.services.audit.flush(5.0)
        answer = await client.get("/v1/events", params={"topic": "audit", "limit": 1000})
        forbidden = await client.get(
            "/v1/events", params={"topic": "audit"}, headers=node.headers("alice", topics=["orders"])
        )

    found = {each["meta"]["type"]: each["payload"] for each in answer.json()["events"]}
    assert found["security.event.subscription_dropped"]["reason"] == "buffer_overflow"
    assert found["security.event.subscription_dropped"]["connection_id"] == opened["connection_id"]
    assert found["security.event.subscription_dropped"]["context"]["requester_identity_id"] == "slow"
    assert found["security.event.subscription_rejected"]["subject"] == "curious"
    assert forbidden.status_code == 403


async def test_apps_and_records_are_there_after_a_crash(tmp_path: Path) -> None:
    """A node on the files as they were in the middle of another one's life knows every app that was answered, and every record that was written."""
    async with events_node(tmp_path / "w") as node, subscriber(node, "alice") as alice, client_of(node) as client:
        await alice.subscribed()
        for slug in ("contacts", "social"):
            await client.post("/v1/apps", json={"slug": slug})
        await client.post("/v1/apps", json=MESSAGE_CREATED)
        await client.post("/v1/apps", json={"type": "app.enabled", "slug": "social", "is_enabled": False})
        opened = await on_record(node, "subscription_opened")
        apps = (await client.get("/v1/apps")).json()
        await asyncio.to_thread(shutil.copytree, tmp_path / "w", tmp_path / "crashed")
    async with events_node(tmp_path / "crashed") as node, client_of(node) as client:
        assert await on_record(node, "subscription_opened") == opened
        assert (await client.get("/v1/apps")).json() == apps
        assert not node.services.apps.is_enabled("social")

    assert len(opened) == 1


async def test_the_tool_shows_and_changes_what_the_managers_have(tmp_path: Path) -> None:
    """Connections, stats, audit, apps, directives and settings, each through the node that holds the workspace."""
    async with events_node(tmp_path / "w") as node, subscriber(node, "alice") as alice:
        opened = await alice.subscribed()
        shared = ("--json", "-w", tmp_path / "w")
        admin = ("--token", node.token("root", roles=["admin"]), *shared)

        async def ran(*words: object, code: int = 0) -> list[dict[str, Any]]:
            result = await asyncio.to_thread(invoke, *words)
            assert result.exit_code == code, result.stderr
            return [json.loads(line) for line in result.stdout.splitlines()]

        (connection,) = await ran("gateway", "connections", *admin)
        assert (connection["connection_id"], connection["identity_id"]) == (opened["connection_id"], "alice")
        (stats,) = await ran("gateway", "stats", *admin)
        assert (stats["is_ready"], stats["connections"]) == (True, 1)
        await node.services.audit.flush(5.0)
        async with asyncio.timeout(20):
            while not (
                records := await ran("gateway", "audit", *shared)
            ):  # it reads the files, which follow a moment later
                pass
        assert records[0]["meta"]["type"] == "security.event.subscription_opened"

        await ran("app", "register", "contacts", "--title", "Contacts", *admin)
        await ran("app", "declare", "contacts", "app.contacts.sent", "--topic", "messages", "--field", "thread", *admin)
        assert [each["slug"] for each in await ran("app", "list", *admin)] == ["contacts", "default", "system"]
        await ran("app", "disable", "contacts", *admin)
        assert not node.services.apps.is_enabled("contacts")
        await ran("app", "enable", "contacts", *admin)
        await ran("app", "remove", "contacts", "--yes", *admin)
        await ran("app", "enable", "contacts", *admin, code=1)

        await ran("guard", "deny", "identity:mallory", "--for", "5m", "--reason", "too_loud", *admin)
        (directive,) = await ran("guard", "list", *admin)
        assert directive["directive"]["ttl_ms"] == 300_000
        await ran("guard", "allow", "identity:mallory", *admin)
        assert await ran("guard", "list", *admin) == []
        await ran("guard", "deny", "all", "--for", "ever", *admin, code=2)

        await ran("config", "set", "event.delivery.max_msgs_per_sec=50", "server.log_level=error", *admin)
        (shown,) = await ran("config", "show", *admin)
        assert shown["overrides"] == {"event.delivery.max_msgs_per_sec": 50, "server.log_level": "error"}
        await ran("config", "set", "server.log_level=", *admin)
        assert node.settings.server.log_level == "info"
        await ran("config", "set", "event.queue.total_ceiling=100000", *admin, code=1)
        await ran("gateway", "stats", *shared, code=2)
    result = await asyncio.to_thread(invoke, "gateway", "stats", "--token", "x", "-w", tmp_path / "w")
    assert (result.exit_code, "no node" in result.stderr) == (2, True)


async def test_metrics_show_the_gateway_and_the_managers(tmp_path: Path) -> None:
    """Counts by class and reason, histograms, directives, refused tokens and the health of components are there to be scraped."""
    async with events_node(tmp_path) as node, client_of(node) as client, subscriber(node, "alice") as alice:
        await alice.subscribed()
        await tell(node, "order:1")
        (frame,) = await alice.heard(1)
        alice.ack(frame)
        await client.get("/v1/apps", headers={"authorization": "Bearer x.y.z"})
        await until(lambda: node.services.gateway.telemetry.ack_latency.count == 1)
        text = (await client.get("/metrics")).text

    for line in (
        "tidings_gateway_ready 1.0",
        "tidings_gateway_connections 1.0",
        'tidings_gateway_produced_total{class="graph"} 1.0',
        'tidings_gateway_delivered_total{class="graph"} 1.0',
        "tidings_gateway_ack_seconds_count 1.0",
        "tidings_guard_directives 0.0",
        'tidings_auth_failed_total{code="access.token_invalid"} 1.0',
        'tidings_component_healthy{component="event_manager"} 1.0',
    ):
        assert line in text.splitlines()
    (waited,) = (line for line in text.splitlines() if line.startswith("tidings_gateway_delivery_seconds_sum "))
    assert float(waited.split()[1]) > 0


async def test_a_socket_of_another_endpoint_is_closed_by_a_directive_too(tmp_path: Path) -> None:
    """The guard is the node's: an address that is denied with ``close_existing`` loses its sockets at every endpoint, and gets no new ones."""
    async with events_node(tmp_path) as node:
        async with connected(f"{node.ws_url}/sync") as socket:
            directive = Directive(decision="deny", target="address:127.0.0.1", close_existing=True)
            _, closed = node.services.guard.apply(directive, by="test")
            assert await socket.ended() == 1013
        status, problem, _ = await refused(f"{node.ws_url}/sync")

    assert closed == 1
    assert (status, problem["code"]) == (503, "access.temporarily_denied")


async def test_who_administers_the_node_or_tries_to_is_told(tmp_path: Path) -> None:
    """What was asked for, by whom, and whether they may: an event for administrators, whichever it is."""
    async with events_node(tmp_path) as node, subscriber(node, "root", **ADMIN) as root, client_of(node) as client:
        await root.subscribed(subscription_type="security", event_type="security.admin_action")
        await client.post("/v1/apps", json={"slug": "contacts"})
        await client.get("/v1/config", headers=node.headers("mallory", topics=["orders"]))
        found = [each["payload"] for each in await root.heard(2)]

    assert [(each["scope"]["requester_identity_id"], each["payload_summary"]) for each in found] == [
        ("root", {"action": "changeApp", "count": 1, "result": "allowed"}),
        ("mallory", {"action": "showConfig", "count": 1, "result": "denied"}),
    ]


async def test_who_goes_over_a_sockets_limit_again_and_again_is_denied(tmp_path: Path) -> None:
    """Sockets of one identity that are closed for too many pings count as one offence each, at any endpoint, and end in a denial."""
    settings = msgspec.structs.replace(node_settings(), guard=GuardSettings(limits_max=2))
    async with running_node(tmp_path, settings, endpoints={"/talk": TalkEndpoint()}) as node:
        for _ in range(2):
            async with connected(f"{node.ws_url}/talk") as socket:
                for _ in range(100):
                    socket.transport.send_ping()
                assert not node.services.guard.directives()
                assert await socket.ended() == 1008
        (denial,) = node.services.guard.directives()

    assert denial.directive.ttl_ms == 30_000  # the first of them: one flood is not many
    assert (denial.directive.target, denial.directive.reason_code) == ("identity:somebody", "abuse.limit")
