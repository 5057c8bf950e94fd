"""The gateway's settings in a node: what each is, which change while it runs, and that nothing begins without them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.gateway_world import GatewayWorld
from tests.integration.events_support import events_node, subscriber
from tests.integration.node_support import until
from tidings.core.errors import SettingsError
from tidings.gateway.refusals import GatewayNotReady
from tidings.gateway.settings import DeliverySettings, EventSettings
from tidings.testing.node import RunningNode, node_settings

KEYS: list[tuple[str, Any, tuple[Any, ...], bool]] = [
    ("websocket.max_connections", 300, (0, 65_536, "300", True, 1.5), True),
    ("websocket.max_connections_per_identity", 9, (0, 65_536, "9", False), True),
    ("websocket.max_connections_per_app", 20, (0, "20", 65_536), True),
    ("websocket.max_attempts_per_min_per_identity", 60, (0, "20", 100_001), True),
    ("queue.per_connection", 300, (0, 65_537, "300"), True),
    ("queue.total_ceiling", 70_000, (63, "70000"), False),
    ("delivery.heartbeat_interval_ms", 5_000, (4_999, 0, 300_001, "5000"), True),
    ("delivery.resume_window", 99, (0, 1_000_001, "99"), True),
    ("delivery.max_msgs_per_sec", 50, (0, 100_001, "50"), True),
    ("telemetry.emit_samples", True, (1, "yes"), True),
    ("telemetry.heartbeat_interval_ms", 100, (99, 60_001, "100"), True),
    ("telemetry.degraded_threshold_ms", 20_000, (99, "20000"), True),
    ("security.admin_channels", ["network.*"], ("network.*", [1]), False),
]
"""Path, another value, values that are refused, and whether it changes while the gateway runs."""


@pytest.mark.req("R208", "R209", "R211")
async def test_every_key_has_its_type_its_range_and_takes_effect_now_or_at_the_next_start(tmp_path: Path) -> None:
    """A value of another type or out of its range is refused; one that may change holds at once; one that may not is vetoed, and stays."""
    async with (
        events_node(tmp_path) as node,
        httpx.AsyncClient(base_url=node.url, headers=node.headers("root", roles=["admin"])) as http,
    ):
        gateway = node.services.gateway
        for path, value, refused, is_reloadable in KEYS:
            section, name = path.split(".")

            def held(section: str = section, name: str = name) -> Any:
                return msgspec.to_builtins(getattr(getattr(gateway.settings, section), name))

            before = held()
            for wrong in refused:
                answer = await http.patch("/v1/config", json={"values": {f"event.{path}": wrong}})
                assert (answer.status_code, held()) == (400, before), (path, wrong)
            answer = await http.patch("/v1/config", json={"values": {f"event.{path}": value}})
            assert (answer.status_code < 300) is is_reloadable, (path, answer.text)
            assert held() == (value if is_reloadable else before)
        unknown = await http.patch("/v1/config", json={"values": {"event.websocket.colour": 1}})
        shown = (await http.get("/v1/config")).json()["settings"]["event"]

    assert unknown.status_code == 400
    assert shown["delivery"]["heartbeat_interval_ms"] == 5_000
    assert {f"{section}.{name}" for section, names in shown.items() for name in names} == {each[0] for each in KEYS}


@pytest.mark.req("R138")
async def test_no_upgrade_is_taken_without_valid_settings(tmp_path: Path) -> None:
    """With settings that cannot be there is no gateway, and the node listens nowhere; a gateway that has not started with good ones admits nobody."""
    impossible = EventSettings(delivery=DeliverySettings(heartbeat_interval_ms=4_999))
    with pytest.raises(SettingsError, match="heartbeat_interval_ms"):
        GatewayWorld(impossible)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    wanted = node_settings()
    server = msgspec.structs.replace(wanted.server, port=port)
    with pytest.raises(SettingsError, match="heartbeat_interval_ms"):
        async with RunningNode(tmp_path, msgspec.structs.replace(wanted, event=impossible, server=server)):
            pass
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)

    world = GatewayWorld(EventSettings())
    with pytest.raises(GatewayNotReady, match="starting"):
        world.admit()
    world.start()
    world.admit()
    await world.stop()


@pytest.mark.req("R140")
async def test_a_node_that_starts_has_the_gateways_probes_in_its_health(tmp_path: Path) -> None:
    """It is there as a critical component with readiness, liveness and depths; as it is, so is the node."""
    async with (
        events_node(tmp_path) as node,
        httpx.AsyncClient(base_url=node.url, headers=node.headers("root", roles=["admin"])) as http,
        subscriber(node) as reader,
    ):
        await reader.subscribed()
        component = node.services.health.snapshot().components["event_manager"]
        assert component.state == "healthy"
        assert {"ready", "alive", "queue_depth", "total_queued", "connections"} <= dict(component.metrics).keys()
        assert (await http.get("/readyz")).status_code == 200

        node.services.gateway.fail("engine_failed")
        await until(lambda: node.services.health.snapshot().components["event_manager"].state == "failed")
        assert (await http.get("/readyz")).status_code == 503
