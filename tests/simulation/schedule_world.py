"""
Appointments and delayed events through several lives, on a simulated disk and in simulated time, in which a seed decides everything.

People make appointments and hand in events for later, and cancel some of them; the process is closed and opened, is killed, or loses its power,
at any step. ``Diary`` holds what was promised: what was made and not cancelled happens as often as it was to happen, and nothing else happens.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import timedelta
from typing import Final

from tests.crash.support import ROOMY
from tests.simulation.book import Broken
from tidings.bus import EventBus
from tidings.bus.errors import BusClosed
from tidings.bus.store.files import FileGroupStore
from tidings.bus.store.memory import MemoryClaims
from tidings.core.events import Event, EventMeta
from tidings.happenings.variants import AppointmentFired, AppointmentMissed
from tidings.ledger import open_ledger
from tidings.ledger.errors import LedgerClosed
from tidings.log.embedded import open_log
from tidings.log.embedded.index import MemoryIndex
from tidings.log.errors import LogClosed
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.schedule.actions import Actions
from tidings.schedule.appointment_runner import AppointmentRunner
from tidings.schedule.appointments import OVERLAPPED, Appointments
from tidings.testing import InterleavedDisk

from .lives import Lives
from .world import QUIET_S, WORKSPACE

_CLOSED: Final = (BusClosed, LedgerClosed, LogClosed)
_WITHIN_S: Final = 3.0


class Diary:
    """What was asked for and promised."""

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        """How often each is to happen, whether or not anybody was told that it will."""
        self.promised: set[str] = set()
        self.perhaps_cancelled: set[str] = set()
        """Whose cancelling began; for an appointment that may be while it fires."""
        self.cancelled: set[str] = set()
        """Delayed events that were cancelled before they were published, as it was answered."""

    def check(self, happened: Counter[str], what: str) -> None:
        """Raise ``Broken`` if something happened too often, or not often enough."""
        for name, count in happened.items():
            if count > self.wanted.get(name, 0) or name in self.cancelled:
                raise Broken(f"{name} was {what} {count} times")
        for name in self.promised - self.perhaps_cancelled:
            if name in self._kind(what) and happened[name] != self.wanted[name]:
                raise Broken(f"{name} was {what} {happened[name]} times, not {self.wanted[name]}")

    def _kind(self, what: str) -> set[str]:
        return {name for name in self.wanted if name.startswith("later") == (what == "published")}


class ScheduleSimulation(Lives):
    """
    One seed's course.

    Args:
        seed: Decides everything.
    """

    crash_exponents = (1.8, 3.5)
    pauses_s = (0.0, 0.5, 60.0)

    def __init__(self, seed: object) -> None:
        super().__init__("schedule", seed)
        rng = self.rng
        self.people = rng.randint(1, 3)
        self.things = rng.randint(2, 6)
        self.turns = rng.randint(0, 3)
        self.diary = Diary()
        self.slots: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
        self.number = 0

    async def _main(self) -> None:
        self.is_open = asyncio.Event()
        await self._open()
        jobs = [self._person() for _ in range(self.people)] + [self._operate()]
        await asyncio.wait_for(asyncio.gather(*(asyncio.create_task(job) for job in jobs)), QUIET_S)
        await self._finish()

    async def _open(self) -> None:
        disk = InterleavedDisk(self.disk, self.loop)
        self.log = await open_log(WORKSPACE, ROOMY, disk=disk, index=MemoryIndex(), clock=self.clock)
        store = FileGroupStore(
            WORKSPACE,
            self.log,
            disk=disk,
            clock=self.clock,
            claims=lambda topic, group: MemoryClaims(self.slots.setdefault((topic, group), {})),
        )
        self.bus = EventBus(log=self.log, store=store, clock=self.clock, rng=random.Random(f"bus {self.seed}"))
        await self.bus.start()
        self.ledger = await open_ledger(self.log, parts=[Appointments], clock=self.clock)
        self.runner = AppointmentRunner(self.ledger, Actions(publish=self.bus.publish, clock=self.clock))
        await self.runner.start()
        self.is_open.set()

    async def _close(self) -> None:
        self.is_open.clear()
        await self.runner.close()
        await self.ledger.close()
        await self.bus.close()
        await self.log.close()

    # Who is there

    async def _person(self) -> None:
        for _ in range(self.things):
            await self.is_open.wait()
            self.number += 1
            make = self._appointment if self.rng.random() < 0.6 else self._delayed
            try:
                await make(self.number)
                await self.clock.sleep(self.rng.uniform(0, 0.3))
            except _CLOSED:
                continue

    async def _appointment(self, number: int) -> None:
        name = f"once {self.lives}.{number}"
        rule = {"kind": "one_shot", "fire_at_ms": self._ms(self.rng.uniform(-0.1, _WITHIN_S))}
        self.diary.wanted[name] = 1
        if self.rng.random() < 0.3:
            name = f"every {self.lives}.{number}"
            rule = {"kind": "periodic", "interval_ms": self.rng.randint(50, 700)}
            self.diary.wanted[name] = self.rng.randint(1, 4)
        spec = {
            "appointment_id": name,
            "recurrence": rule,
            "max_fires": self.diary.wanted[name],
            "miss_policy": {"kind": "catchup"},
        }
        action = {"topic": "rung", "event_type": "RING", "space": "shared:home", "payload": {"name": name}}
        await self.runner.create("somebody", spec, action)
        self.diary.promised.add(name)
        if self.rng.random() < 0.2:
            await self.clock.sleep(self.rng.uniform(0, _WITHIN_S))
            self.diary.perhaps_cancelled.add(name)
            await self.runner.cancel("somebody", name, cancelled_by="somebody")

    async def _delayed(self, number: int) -> None:
        name = f"later-{self.lives}.{number}"
        self.diary.wanted[name] = 1
        event = Event(EventMeta("later", "TICK", "shared:home", name), {"n": number})
        await self.bus.publish(event, delay=timedelta(seconds=self.rng.uniform(0, _WITHIN_S)))
        self.diary.promised.add(name)
        if self.rng.random() < 0.3:
            await self.clock.sleep(self.rng.uniform(0, _WITHIN_S))
            self.diary.perhaps_cancelled.add(name)
            if await self.bus.cancel_delayed(name):
                self.diary.cancelled.add(name)

    async def _operate(self) -> None:
        for _ in range(self.turns):
            await self.clock.sleep(self.rng.uniform(0, 1.0))
            if self.rng.random() < 0.5:
                await self._close()
                await self._open()
            else:
                await self.bus.compact("schedule")

    async def _finish(self) -> None:
        """All that waits has happened; then each thing is counted."""
        for _ in range(1000):
            waiting = await self.ledger.read(lambda state: state.part(Appointments).count)
            if not waiting and not [each async for each in self.bus.delayed_events()]:
                break
            await self.clock.sleep(0.1)
        await self.clock.sleep(5.0)  # what is no longer listed may be on its way
        told = [each.happening async for each in self.ledger.happenings.history()]
        self.diary.check(Counter(each.appointment_id for each in told if isinstance(each, AppointmentFired)), "fired")
        # An action that takes longer than its interval makes occurrences overlap; nothing else may be missed.
        if missed := [one for one in told if isinstance(one, AppointmentMissed) and one.reason != OVERLAPPED]:
            raise Broken(f"missed: {missed}")
        rung = [record.payload["name"] async for record in records(self.log, Query(topic="rung"))]
        self.diary.check(Counter(rung), "rung")
        later = [record.meta.event_id async for record in records(self.log, Query(topic="later"))]
        self.diary.check(Counter(later), "published")
        await self._close()

    def _ms(self, seconds: float) -> int:
        return self.clock.now_ns() // 1_000_000 + round(seconds * 1000)
