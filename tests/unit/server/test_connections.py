"""When sockets are written to."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from tidings.access.audit import AuditLog
from tidings.access.guard import DosGuard, GuardSettings
from tidings.core.clock import Clock
from tidings.server.connections import Connections
from tidings.server.settings import ServerSettings
from tidings.testing import VirtualClock


class Time:
    """A clock that moves by what the sockets take."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class SlowSocket:
    """One that takes its time to be written to."""

    def __init__(self, time: Time, takes_s: float) -> None:
        self.written_s: list[float] = []
        self.is_written = asyncio.Event()
        self._time = time
        self._takes_s = takes_s

    def flush(self) -> None:
        """A write."""
        self.written_s.append(asyncio.get_running_loop().time())
        self._time.now_s += self._takes_s
        self.is_written.set()


async def told_twice(takes_s: float) -> float:
    """How long after a first broadcast a second one leaves."""
    time = Time()
    guard = DosGuard(GuardSettings(), VirtualClock(), cast(AuditLog, None))
    connections = Connections(ServerSettings(broadcast_interval_s=0.001), cast(Clock, time), guard)
    socket = SlowSocket(time, takes_s)
    for _ in range(2):
        socket.is_written.clear()
        connections.flush_together(cast(Any, socket))
        await socket.is_written.wait()
    return socket.written_s[1] - socket.written_s[0]


async def test_what_takes_long_to_tell_is_told_less_often() -> None:
    """Telling everybody is followed by three times as long without, so that it takes a quarter of the node's time; but by no more than 50 ms."""
    assert await told_twice(0.01) >= 0.039
    assert 0.549 <= await told_twice(0.5) < 1.9
