"""A ledger with watches in virtual time, and short names for what is watched and told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tidings.happenings.happening import to_json
from tidings.happenings.variants import PluginEvent
from tidings.ledger import LedgerSettings, open_ledger
from tidings.ledger.catalogue import parse_catalogue
from tidings.ledger.claims import AnnounceSubject, UpdateSubjectState
from tidings.ledger.merging import MergeSubjects
from tidings.ledger.snapshots import MemorySnapshots
from tidings.ledger.subjects import Addressing
from tidings.log.memory import MemoryLog
from tidings.schedule.actions import Actions, ScheduledAction
from tidings.schedule.watch_runner import WatchRunner
from tidings.schedule.watches import Watches, WatchSettings
from tidings.testing import VirtualClock

CATALOGUE = parse_catalogue('schema_version = 1\n[[subjects]]\nname = "room"\n')
RING: dict[str, Any] = {"target_shelf": "hall.bell", "request_type": "ring"}
LEVEL: dict[str, Any] = {"kind": "level", "cooldown_ms": 1000}


def event(name: str, **more: Any) -> dict[str, Any]:
    """A match on a plugin's events."""
    return {"kind": "happening_match", "filter": {"plugins": [name]}, **more}


def hot(subject: str = "s1", **more: Any) -> dict[str, Any]:
    """A room is warmer than 80."""
    predicate = {"kind": "greater_than", "field": "celsius", "value": 80}
    return {"kind": "subject_state", "canonical_id": subject, "predicate": predicate, **more}


def every(*terms: dict[str, Any]) -> dict[str, Any]:
    """All terms."""
    return {"kind": "composite", "op": "all", "terms": list(terms)}


class House:
    """A ledger, a bell, and the watches that ring it."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        self.log = MemoryLog()
        self.snapshots = MemorySnapshots()
        self.rung: list[str] = []
        """Every firing that reached the bell, by name."""
        self.is_time_trusted = True
        self.gate: asyncio.Event | None = None
        """What the bell waits for."""

    async def open(self, *, settings: WatchSettings | None = None, ledger: LedgerSettings | None = None) -> None:
        """Open the ledger and start its watches."""
        self.ledger = await open_ledger(
            self.log,
            catalogue=CATALOGUE,
            parts=[Watches],
            clock=self.clock,
            snapshots=self.snapshots,
            settings=ledger,
        )
        self.actions = Actions(clock=self.clock)
        self.actions.register("hall.bell", self.ring)
        self.runner = WatchRunner(
            self.ledger, self.actions, is_time_trusted=lambda: self.is_time_trusted, settings=settings
        )
        await self.runner.start()

    async def ring(self, action: ScheduledAction, firing: str) -> None:
        """Be the bell."""
        self.rung.append(firing)
        if self.gate is not None:
            await self.gate.wait()

    async def close(self) -> None:
        """Stop the watches and close the ledger, in order."""
        await self.clock.run_until(self.runner.close())
        await self.ledger.close()

    async def reopen(self) -> None:
        """Close, and open again."""
        await self.close()
        await self.open()

    async def watch(
        self, condition: Mapping[str, Any], trigger: Mapping[str, Any] | None = None, name: str = "w", **more: Any
    ) -> None:
        """Watch something."""
        spec = {"watch_id": name, "condition": condition}
        if trigger is not None:
            spec["trigger"] = trigger
        await self.runner.create("ops", spec, more.get("action", RING))

    async def emit(self, *plugins: str) -> None:
        """One event of each of these plugins."""
        for plugin in plugins:
            told = PluginEvent(at_ms=0, plugin=plugin, event_type="e", payload=None)
            await self.ledger.happenings.emit_durable(told)
        await self.clock.advance(0)

    async def room(self, celsius: Any = None, subject: str = "s1") -> None:
        """A room that is so warm from now on."""
        name = Addressing("room", subject)
        await self.ledger.execute(AnnounceSubject(plugin="p", subject_type="room", addressings=(name,), new_id=subject))
        if celsius is not None:
            await self.heat(celsius, subject=subject)

    async def heat(self, *celsius: float, subject: str = "s1") -> None:
        """The room gets so warm, one value after another."""
        for value in celsius:
            await self.ledger.execute(
                UpdateSubjectState(plugin="p", subject=Addressing("room", subject), state={"celsius": value})
            )
        await self.clock.advance(0)

    async def merge(self, one: str, other: str, new_id: str) -> None:
        """Two rooms become one."""
        await self.ledger.execute(MergeSubjects(admin="a", a=one, b=other, new_id=new_id))
        await self.clock.advance(0)

    async def told(self, *variants: str) -> list[dict[str, Any]]:
        """What was told of watches, or of these variants: without times."""
        found = []
        async for envelope in self.ledger.happenings.history():
            form = to_json(envelope.happening)
            kind = form["type"]
            if kind in variants or (not variants and kind.startswith("watch_") and kind != "watch_created"):
                found.append({key: value for key, value in form.items() if not key.endswith("at_ms")})
        return found

    async def fired_count(self) -> int:
        """How many times a watch has fired."""
        return len(await self.told("watch_fired"))
