"""What the node's own managers tell, as an administrator sees it at the socket."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.events_support import Subscriber, events_node, on_record, refused, subscriber, tell
from tests.integration.node_support import until
from tidings.access.audit import AuditRecord
from tidings.server.health import Reason
from tidings.testing.node import RunningNode


def told(reader: Subscriber, family: str) -> list[dict[str, Any]]:
    """The envelopes of a family that came."""
    return [each["payload"] for each in reader.envelopes if each["event"].startswith(family)]


def assert_counted_by_source(envelopes: list[dict[str, Any]]) -> None:
    """Each manager's events have its own count, which rises, and no seq of the log."""
    by_source = sorted(envelopes, key=lambda each: str(each["source_manager"]))
    for _, group in groupby(by_source, key=lambda each: each["source_manager"]):
        anchors = [each["sequence_anchor"] for each in group]
        assert all(list(each) == ["event_seq"] for each in anchors)
        counts = [each["event_seq"] for each in anchors]
        assert counts == sorted(set(counts))


def administrator(node: RunningNode) -> httpx.AsyncClient:
    """A client of the HTTP API that may do everything."""
    return httpx.AsyncClient(base_url=node.url, headers=node.headers("root", roles=["admin"]))


@pytest.mark.req("R36")
async def test_system_events_come_from_config_app_health_log_and_the_gateway(tmp_path: Path) -> None:
    """Each is told by its own manager under its own name, names the node, and is counted by its source; no other manager tells of any."""
    async with (
        events_node(tmp_path) as node,
        subscriber(node, "root", roles=["admin"]) as admin,
        administrator(node) as http,
    ):
        await admin.subscribed(subscription_type="system", app_id="default")
        services = node.services
        await http.patch("/v1/config", json={"values": {"event.delivery.resume_window": 99}})
        await http.post("/v1/apps", json={"slug": "contacts"})
        services.health.register("oven", is_critical=False)
        services.health.report("oven", "healthy")
        services.health.report("oven", "degraded", (Reason("oven.cold", "the oven is cold"),))
        await tell(node, "key:-----BEGIN PRIVATE KEY-----")
        wanted = {
            ("config_manager", "system.config_changed"),
            ("app_manager", "system.app_state_changed"),
            ("health_manager", "system.health_state_changed"),
            ("log_manager", "system.log_record_created"),
            ("event_manager", "system.event_descriptor_rejected"),
        }
        await until(lambda: wanted <= {(each["source_manager"], each["event_type"]) for each in told(admin, "system.")})
        envelopes = told(admin, "system.")

    assert {each["source_manager"] for each in envelopes} == {source for source, _ in wanted}
    assert len({each["payload_summary"]["node_id"] for each in envelopes}) == 1
    assert_counted_by_source(envelopes)


@pytest.mark.req("R38", "R222")
async def test_security_events_come_from_auth_guard_log_and_the_gateway(tmp_path: Path) -> None:
    """Each is told by its own manager, names whom it is about, is counted by its source, and stays on record when the sockets are closed."""
    async with events_node(tmp_path) as node, administrator(node) as http:
        async with subscriber(node, "root", roles=["admin"]) as admin:
            await admin.subscribed(subscription_type="security", app_id="default")
            async with subscriber(node, "mallory") as bad:
                bad.subscribe(subscription_type="system")
                assert (await bad.refusal())[1] == "permission_denied"
            assert (await refused(f"{node.ws_url}/events?token=nonsense"))[0] == 401
            node.services.audit.note(AuditRecord(category="oven.burnt", severity="critical", subject="cook"))
            denial = {"decision": "deny", "target": "identity:mallory", "ttl_ms": 60_000, "reason_code": "flood"}
            assert (await http.post("/v1/guard/directives", json=denial)).status_code == 201
            wanted = {
                ("auth_manager", "security.authentication_failed"),
                ("dos_guard_manager", "security.dos_directive_applied"),
                ("log_manager", "security.log_alert"),
                ("event_manager", "security.subscription_rejected"),
            }
            await until(
                lambda: wanted <= {(each["source_manager"], each["event_type"]) for each in told(admin, "security.")}
            )
            envelopes = told(admin, "security.")
        rejected = await on_record(node, "subscription_rejected")
        answer = await http.get("/v1/events", params={"topic": "audit", "limit": 1000})
        kinds = {each["meta"]["type"] for each in answer.json()["events"]}

    assert_counted_by_source(envelopes)
    about = {(each["event_type"], each["scope"].get("requester_identity_id")) for each in envelopes}
    assert {("security.subscription_rejected", "mallory"), ("security.dos_directive_applied", "mallory")} <= about
    assert any(each["subject"] == "mallory" for each in rejected)
    assert {"security.event.subscription_rejected", "security.event.dos_directive", "security.oven.burnt"} <= kinds
    assert "nonsense" not in str(envelopes)
