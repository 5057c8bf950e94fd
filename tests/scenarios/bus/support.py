"""A bus in a simulated world: virtual time, a disk in memory, claims that outlive a simulated crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tidings import testing
from tidings.bus import EventBus, ReceivedEvent
from tidings.bus.group import Group
from tidings.core.clock import datetime_of
from tidings.core.events import Event, EventMeta, EventType
from tidings.log.interface import Appended, Log
from tidings.log.settings import LogSettings
from tidings.testing import SimulatedDisk
from tidings.types import Ack

WORKSPACE: Final = Path("/data/workspace")
BUS: Final = WORKSPACE / ".bus"
SETTINGS: Final = LogSettings(journal_bytes=1 << 20, journal_count_max=2)
TOPIC: Final = "actions"
GROUP: Final = "learner"


class World(testing.World):
    """
    Everything outside of the bus.

    ``open`` makes a bus over the world's disk; opening again after ``close`` or ``kill`` is the next process.
    """

    def __init__(self, *, seed: int = 0, disk: SimulatedDisk | None = None) -> None:
        super().__init__(seed=seed, disk=disk)
        self.log: Log | None = None
        self.bus: EventBus | None = None

    async def open(self, *middlewares: Any, **options: Any) -> EventBus:
        """A started bus on this world's disk."""
        self.bus = EventBus(list(middlewares), **options)
        self.add(self.bus)
        await self.bus.start()
        self.log = self.bus.log
        return self.bus

    async def close(self, timeout_s: float = 0.0) -> None:
        """Close the bus and its log."""
        await super().close(timeout_s)
        self.leave()
        self.bus = self.log = None

    async def kill(self) -> None:
        """End the process: what it wrote stays, what it had in memory is gone, what was claimed stays claimed."""
        await self.crash("killed")

    def event(self, n: int = 0, topic: str = TOPIC, payload: Mapping[str, Any] | None = None, **meta: Any) -> Event:
        """An event that happens now."""
        envelope: dict[str, Any] = {"space_id": "shared:home", "ts": datetime_of(self.clock.now_ns())} | meta
        return Event(EventMeta(topic=topic, type=EventType.ACTION_EXECUTED, **envelope), payload or {"n": n})

    async def publish(self, count: int = 1, *, first: int = 0, topic: str = TOPIC, **meta: Any) -> list[int]:
        """Publish numbered events one after another; their offsets."""
        bus = self.bus
        assert bus is not None

        async def job() -> list[int]:
            offsets = []
            for n in range(first, first + count):
                verdict = await bus.publish(self.event(n, topic, **meta))
                assert isinstance(verdict, Appended)
                offsets.append(verdict.offset)
            return offsets

        return await self.run(job())

    def group(self, topic: str = TOPIC, group: str = GROUP) -> Group:
        """The runtime of a group."""
        assert self.bus is not None
        found = next(sub for sub in self.bus.get_subscriptions(topic) if sub.group == group)
        assert found.group_state is not None
        return found.group_state

    def drained(self, topic: str = TOPIC, group: str = GROUP) -> Callable[[], bool]:
        """Whether a group is done with all of its topic, as a condition."""
        return lambda: self.bus is not None and self.bus.lag(topic, group) == 0


async def soon(condition: Callable[[], bool]) -> None:
    """Wait in real time, for threads and a real disk, until something holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - whatever is waited for has no event to wait on
            await asyncio.sleep(0)


class Recorder:
    """A handler that keeps what it gets, and fails where told."""

    def __init__(self, *, fails: Callable[[ReceivedEvent], bool] = lambda _: False) -> None:
        self.events: list[ReceivedEvent] = []
        self.fails = fails

    async def __call__(self, event: ReceivedEvent) -> Ack:
        self.events.append(event)
        if self.fails(event):
            raise RuntimeError(f"no luck with {event.offset}")
        return Ack()

    @property
    def offsets(self) -> list[int]:
        """The offsets in the order they came."""
        return [event.offset for event in self.events]

    def attempts_of(self, offset: int) -> list[int]:
        """The attempts at one event, in order."""
        return [event.attempt for event in self.events if event.offset == offset]
