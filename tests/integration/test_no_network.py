"""Embedded, the platform talks to no network: everything happens within one process and its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys

def watch(name, arguments):
    if name in ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        print("network:", name, arguments)

sys.addaudithook(watch)
from tidings.bus import EventBus
from tidings.types import Ack, Event, EventMeta

async def main():
    handled = asyncio.Event()

    async def handler(event):
        handled.set()
        return Ack()

    async with EventBus(workspace=sys.argv[1]) as bus:
        await bus.subscribe("actions", "learner", handler)
        await bus.publish(Event(EventMeta(topic="actions", type="NOTED", space_id="shared:home"), {"n": 1}))
        await handled.wait()
        assert [event.payload async for event in bus.replay("actions")] == [{"n": 1}]
    print("done")

asyncio.run(main())
"""


@pytest.mark.req("F102")
def test_an_embedded_bus_opens_no_connection(tmp_path: Path) -> None:
    """Publishing, handling, replaying and closing neither look up a name nor bind, connect or send on a socket."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "workspace")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (run.stdout.split(), run.returncode) == (["done"], 0), run.stderr
