"""A ``RemoteBus`` whose node cannot be reached gives up when the caller's time is up."""

from __future__ import annotations

import asyncio

import pytest

from tidings.client.errors import ConnectFailed, RemoteUnavailable
from tidings.client.groups import RemoteBus
from tidings.client.link import Link
from tidings.testing import VirtualClock


class Unreachable:
    """Opens no connection: it waits, or fails at once."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits

    async def connect(self, url: str) -> Link:
        if self.waits:
            await asyncio.Event().wait()
        raise ConnectFailed(url, "nobody listens")


@pytest.mark.parametrize("waits", [False, True])
async def test_the_time_of_a_publish_includes_the_first_connection(waits: bool) -> None:
    """``RemoteUnavailable`` after five seconds, for the first publish and for the next one."""
    clock = VirtualClock()
    bus = RemoteBus("http://127.0.0.1:1", "token", connector=Unreachable(waits=waits), clock=clock)
    for ends_s in (5.0, 10.0):
        with pytest.raises(RemoteUnavailable):
            await clock.run_until(bus.publish("t", {}, type="T", space="s", timeout_s=5.0))
        assert clock.monotonic() == ends_s
    await clock.run_until(bus.close())


async def test_starting_takes_a_time_limit() -> None:
    """``RemoteUnavailable`` after three seconds; starting again waits again."""
    clock = VirtualClock()
    bus = RemoteBus("http://127.0.0.1:1", "token", connector=Unreachable(waits=True), clock=clock)
    for ends_s in (3.0, 6.0):
        with pytest.raises(RemoteUnavailable, match="within 3 s"):
            await clock.run_until(bus.start(timeout_s=3.0))
        assert clock.monotonic() == ends_s
    await clock.run_until(bus.close())
