"""A ledger with appointments in virtual time, and short names for what was told."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from tidings.core.clock import ns_of
from tidings.happenings.happening import to_json
from tidings.ledger import open_ledger
from tidings.ledger.snapshots import MemorySnapshots
from tidings.log.interface import Log
from tidings.log.memory import MemoryLog
from tidings.schedule.actions import Actions, ScheduledAction
from tidings.schedule.appointment_runner import AppointmentRunner
from tidings.schedule.appointments import AppointmentEntry, Appointments
from tidings.schedule.settings import ScheduleSettings
from tidings.schedule.time_trust import TimeTrustTracker
from tidings.testing import VirtualClock

RING: dict[str, Any] = {"target_shelf": "hall.bell", "request_type": "ring"}
SETTINGS = ScheduleSettings(local_zone="Europe/Berlin")


class Diary:
    """A ledger, a bell, and the appointments at which it rings."""

    def __init__(self, log: Log | None = None, *, start: str = "2026-01-01T00:00:00Z") -> None:
        self.clock = VirtualClock(ns_of(datetime.fromisoformat(start)))
        self.start_ms = self.clock.now_ns() // 1_000_000
        self.log = log or MemoryLog(clock=self.clock)
        self.snapshots = MemorySnapshots()
        self.is_synced = True
        self.rung: list[tuple[float, str]] = []
        """Every firing that reached the bell: the second of virtual time, and its name."""
        self.gate: asyncio.Event | None = None
        """What the bell waits for."""
        self.error: Exception | None = None
        """What the bell answers with."""
        self.wakes: list[int | None] = []
        self.action_s_max = 30.0

    async def open(self, settings: ScheduleSettings = SETTINGS) -> None:
        """Open the ledger and start its appointments."""
        self.ledger = await open_ledger(self.log, parts=[Appointments], clock=self.clock, snapshots=self.snapshots)
        self.actions = Actions(clock=self.clock, timeout_s=self.action_s_max)
        self.actions.register("hall.bell", self._ring)
        self.trust = TimeTrustTracker(self.clock, lambda: self.is_synced, self.ledger.happenings.emit_durable, settings)
        self.runner = AppointmentRunner(
            self.ledger, self.actions, trust=self.trust, settings=settings, wake=self.wakes.append
        )
        await self.runner.start()
        self.trust.start()

    async def _ring(self, action: ScheduledAction, firing: str) -> None:
        self.rung.append((self.clock.monotonic(), firing))
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        """Stop everything, in order."""
        await self.trust.close()
        await self.clock.run_until(self.runner.close())
        await self.ledger.close()

    async def kill(self) -> None:
        """End the process: what is stored stays, what is under way is gone."""
        working = [*self.runner._firing.values(), *([self.runner._task] if self.runner._task else [])]
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        self.runner._task = None
        self.gate = None
        await self.close()

    def at(self, seconds: float) -> int:
        """A moment so many seconds after the beginning, in milliseconds."""
        return self.start_ms + round(seconds * 1000)

    async def book(self, spec: dict[str, Any], *, creator: str = "ann", **more: Any) -> AppointmentEntry:
        """Make an appointment ``a`` unless it says otherwise."""
        return await self.runner.create(creator, {"appointment_id": "a"} | spec | more, RING)

    async def once(self, seconds: float, **more: Any) -> AppointmentEntry:
        """Make an appointment at a second of virtual time."""
        return await self.book({"recurrence": {"kind": "one_shot", "fire_at_ms": self.at(seconds)}}, **more)

    async def every(self, seconds: float, **more: Any) -> AppointmentEntry:
        """Make an appointment that comes at intervals."""
        return await self.book({"recurrence": {"kind": "periodic", "interval_ms": round(seconds * 1000)}}, **more)

    async def entry(self, appointment_id: str = "a", creator: str = "ann") -> AppointmentEntry:
        """One appointment as it is."""
        found = await self.runner.entry(creator, appointment_id)
        assert found is not None
        return found

    async def told(self, *, since: int = 0) -> list[tuple[Any, ...]]:
        """What was told of appointments: the variant without its prefix, the second, and its last two fields."""
        found = []
        async for envelope in self.ledger.happenings.history(since, self.ledger.happenings.last_seq):
            fields = to_json(envelope.happening)
            kind = str(fields["type"])
            if kind.startswith("appointment_") and kind != "appointment_created":
                rest = [self._seconds(value) for name, value in fields.items() if name not in _LEFT_OUT]
                found.append((kind.removeprefix("appointment_"), self._seconds(fields["at_ms"]), *rest))
        return found

    def _seconds(self, value: Any) -> Any:
        """A moment as seconds since the beginning, a span as it is."""
        return (value - self.start_ms) / 1000 if isinstance(value, int) and value > self.start_ms // 2 else value

    @property
    def ring_times(self) -> list[float]:
        """When the bell rang, in seconds of virtual time."""
        return [at for at, _ in self.rung]


_LEFT_OUT = {"type", "at_ms", "creator", "appointment_id"}
