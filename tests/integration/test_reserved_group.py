"""The group that the bus keeps for delayed events is refused at every door of a node, and by the tool on a workspace."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from tests.integration.cli.support import invoke
from tidings import Bus
from tidings.client.errors import RemoteRefused
from tidings.client.groups import RemoteBus
from tidings.types import Ack, ReceivedEvent

from .api_support import api, event


async def test_a_node_refuses_changes_of_the_reserved_group(tmp_path: Path) -> None:
    """Seek, pause, resume and delete over HTTP, and a membership through /groups: each with a typed error that names the group."""

    async def handle(received: ReceivedEvent) -> Ack:
        raise AssertionError

    async with api(tmp_path) as (node, admin):
        await admin.post("/v1/events?delay_s=3600", json=event())
        path = "/v1/groups/schedule/delayed"
        answers = [
            await admin.post(f"{path}/seek", json={"to": "latest"}),
            await admin.post(f"{path}/pause", json={}),
            await admin.post(f"{path}/resume", json={}),
            await admin.delete(path),
        ]
        async with RemoteBus(node.url, node.token("root", roles=["admin"])) as bus:
            with pytest.raises(RemoteRefused, match="kept by the bus"):
                await bus.subscribe("schedule", "delayed", handle)

    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(409, "bus.reserved_group")] * 4


def test_the_tool_refuses_to_move_the_reserved_group(tmp_path: Path) -> None:
    """``tidings group seek`` and ``delete`` on a workspace that no process holds."""

    async def hold() -> None:
        async with Bus(tmp_path) as bus:
            await bus.publish("reminders", {}, type="T", space="s", delay=timedelta(hours=1))

    asyncio.run(hold())
    for command in (("seek", "schedule", "delayed", "--latest", "--yes"), ("delete", "schedule", "delayed", "--yes")):
        result = invoke("group", *command, "--workspace", str(tmp_path))
        assert result.exit_code != 0
        assert "kept by the bus" in result.output
