"""What the node's managers tell, as subscribers of a running node see it; and what they keep on record."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.integration.cli.support import invoke
from tests.integration.events_support import Subscriber, address_of, events_node, on_record, refused, subscriber, tell
from tests.integration.node_support import connected, until
from tidings.access.audit import AuditRecord
from tidings.access.guard import Directive, GuardSettings
from tidings.core.errors import SettingsError
from tidings.core.events import Event, EventMeta
from tidings.gateway.event_types import NODE_DECLARATIONS
from tidings.gateway.settings import NOT_RELOADABLE, EventSettings
from tidings.server.settings import load_settings, plan_reload
from tidings.testing.node import RunningNode

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


@pytest.mark.req("R36", "R206")
async def test_config_apps_health_log_and_the_gateway_itself_tell_of_the_system(tmp_path: Path) -> None:
    """Each by its own manager's name, with the node in its summary and a count of its own; only administrators hear it."""
    async with events_node(tmp_path) as node, subscriber(node, "root", **ADMIN) as root, client_of(node) as client:
        await root.subscribed(subscription_type="system")
        await client.patch("/v1/config", json={"values": {"event.delivery.max_msgs_per_sec": 100}})
        await client.patch("/v1/config", json={"values": {"event.queue.total_ceiling": 100}})
        await client.post("/v1/apps", json={"slug": "contacts"})
        node.services.apps.problems.append("as the test wanted")
        node.services.health.look()
        found = await until_told(
            root,
            "system.config_changed",
            "system.config_rejected",
            "system.app_state_changed",
            "system.health_state_changed",
            "system.log_record_created",
            "system.event_config_applied",
        )

    check_anchored(found, {"app_id", "domain_id"})
    assert {name: payload["source_manager"] for name, payload in found.items()} == {
        "system.config_changed": "config_manager",
        "system.config_rejected": "config_manager",
        "system.app_state_changed": "app_manager",
        "system.health_state_changed": "health_manager",
        "system.log_record_created": "log_manager",
        "system.event_config_applied": "event_manager",
    }
    assert {payload["payload_summary"]["node_id"] for payload in found.values()} == {"local"}
    assert found["system.config_changed"]["payload_summary"]["keys"] == ["event.delivery.max_msgs_per_sec"]


@pytest.mark.req("R38", "R74")
async def test_auth_guard_log_and_the_gateway_tell_of_security(tmp_path: Path) -> None:
    """A failed token, a directive, a record of trouble and a refused subscription, each by its own manager; none to whoever may not administer."""
    async with events_node(tmp_path) as node, subscriber(node, "root", **ADMIN) as root, client_of(node) as client:
        await root.subscribed(subscription_type="security")
        await client.get("/v1/apps", headers={"authorization": "Bearer not.a.token"})
        await client.post("/v1/guard/directives", json={"decision": "deny", "target": "identity:mallory"})
        node.services.audit.note(AuditRecord(category="test.trouble", severity="error"))
        async with subscriber(node, "alice") as alice:
            alice.subscribe(subscription_type="security")
            assert (await alice.refusal())[1] == "permission_denied"
        found = await until_told(
            root,
            "security.authentication_failed",
            "security.dos_directive_applied",
            "security.log_alert",
            "security.subscription_rejected",
        )

    check_anchored(found, {"requester_identity_id", "app_id", "domain_id"})
    assert {name: payload["source_manager"] for name, payload in found.items()} == {
        "security.subscription_opened": "event_manager",
        "security.authentication_failed": "auth_manager",
        "security.dos_directive_applied": "dos_guard_manager",
        "security.log_alert": "log_manager",
        "security.subscription_rejected": "event_manager",
    }
    assert found["security.dos_directive_applied"]["scope"] == {"requester_identity_id": "mallory"}
    assert found["security.subscription_rejected"]["scope"] == {"requester_identity_id": "alice"}
    assert found["security.authentication_failed"]["payload_summary"]["reason"] == "access.token_invalid"


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


@pytest.mark.req("R222", "R221")
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


async def test_records_survive_a_node_that_is_killed(tmp_path: Path) -> None:
    """What was on record when the process ended is there when the next one starts: the records are records of the log."""
    async with events_node(tmp_path) as node, subscriber(node, "alice") as alice:
        await alice.subscribed()
        before = await on_record(node, "subscription_opened")
    async with events_node(tmp_path) as node:
        after = await on_record(node, "subscription_opened")

    assert len(before) == 1
    assert after == before


@pytest.mark.req("R138", "R140", "R141")
async def test_the_gateway_has_its_place_in_the_nodes_health_from_the_start(tmp_path: Path) -> None:
    """A critical component that is not healthy before it has reported; a node that is up has it healthy, with its figures."""
    async with events_node(tmp_path) as node, client_of(node) as client:
        await until(lambda: node.health().is_ready)
        found = (await client.get("/v1/health")).json()["components"]["event_manager"]
        node.services.gateway.fail("engine_failed")
        await until(lambda: not node.health().is_ready)
        ready = await client.get("/readyz")
        status, problem, _ = await refused(address_of(node, "alice"))

    assert (found["state"], found["is_critical"]) == ("healthy", True)
    assert {"ready", "alive", "queue_depth", "connections", "produced", "delivered", "dropped"} <= found[
        "metrics"
    ].keys()
    assert ready.status_code == 503
    assert [each["code"] for each in ready.json()["reasons"]] == ["event.engine_failed"]
    assert (status, problem["code"]) == (503, "ERR_SVC_SYS_NOT_READY")


@pytest.mark.req("R208", "R211")
def test_the_gateways_keys_have_their_types_and_what_of_them_can_be_reloaded() -> None:
    """The eleven keys, and the optional cap per app; all but two are taken over by a running node."""
    keys = {
        f"{section}.{name}": type(getattr(getattr(EventSettings(), section), name))
        for section, values in msgspec.to_builtins(EventSettings()).items()
        for name in values
    }
    assert (
        keys
        == {
            "websocket.max_connections": int,
            "websocket.max_connections_per_identity": int,
            "websocket.max_connections_per_app": type(None),
            "queue.per_connection": int,
            "queue.total_ceiling": int,
            "delivery.heartbeat_interval_ms": int,
            "delivery.resume_window": int,
            "delivery.max_msgs_per_sec": int,
            "telemetry.emit_samples": bool,
            "telemetry.heartbeat_interval_ms": int,
            "telemetry.degraded_threshold_ms": int,
            "security.admin_channels": list,
        }
        or keys["security.admin_channels"] is tuple
    )
    old = load_settings(environment={})
    new = load_settings(
        environment={},
        overrides={
            "event.websocket.max_connections": 300,
            "event.websocket.max_connections_per_identity": 9,
            "event.websocket.max_connections_per_app": 10,
            "event.queue.per_connection": 300,
            "event.queue.total_ceiling": 70_000,
            "event.delivery.heartbeat_interval_ms": 6_000,
            "event.delivery.resume_window": 2_000,
            "event.delivery.max_msgs_per_sec": 300,
            "event.telemetry.emit_samples": True,
            "event.telemetry.heartbeat_interval_ms": 6_000,
            "event.telemetry.degraded_threshold_ms": 20_000,
            "event.security.admin_channels": ["network.*"],
        },
    )
    plan = plan_reload(old, new)
    assert plan.kept == tuple(f"event.{path}" for path in NOT_RELOADABLE)
    assert {*plan.applied, *plan.kept} == {f"event.{path}" for path in keys}


@pytest.mark.req("R209")
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("delivery.heartbeat_interval_ms", 4_999),
        ("websocket.max_connections", 0),
        ("websocket.max_connections_per_identity", 257),
        ("queue.total_ceiling", 63),
        ("queue.per_connection", "many"),
        ("telemetry.emit_samples", "perhaps"),
        ("telemetry.degraded_threshold_ms", 100),
        ("delivery.speed", 1),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_its_path(path: str, value: object) -> None:
    """A heartbeat below five seconds, a limit below another, text for a number, an unknown key: each is named."""
    with pytest.raises(SettingsError, match=path.replace(".", r"\.")):
        load_settings(environment={}, overrides={f"event.{path}": value})


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
