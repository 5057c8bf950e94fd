"""Who may read the files of a workspace."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tidings.bus import EventBus
from tidings.types import Ack, Event, EventMeta


async def test_nothing_of_a_workspace_is_for_everybody(tmp_path: Path) -> None:
    """Whatever the umask: events, cursors and the index can be read by the owner and the group alone."""
    workspace = tmp_path / "workspace"
    before = os.umask(0)
    try:
        async with EventBus(workspace=workspace) as bus:
            was_handled = asyncio.Event()

            async def handler(_: object) -> Ack:
                was_handled.set()
                return Ack()

            await bus.subscribe("demo", "group", handler)
            await bus.publish(Event(EventMeta("demo", "NOTED", "home"), {"text": "private"}))
            await was_handled.wait()
    finally:
        os.umask(before)

    found = {path.relative_to(workspace): path.stat().st_mode & 0o007 for path in (workspace / ".bus").rglob("*")}
    assert len(found) > 8
    assert {str(path): mode for path, mode in found.items() if mode} == {}
