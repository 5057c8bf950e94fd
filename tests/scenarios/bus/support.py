"""A bus in a simulated world: virtual time, a disk in memory, claims that outlive a simulated crash."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from tidings.bus import EventBus, ReceivedEvent
from tidings.bus.group import Group
from tidings.bus.store.files import FileGroupStore
from tidings.bus.store.memory import MemoryClaims
from tidings.core.clock import datetime_of
from tidings.core.events import Event, EventMeta, EventType
from tidings.log.embedded import EmbeddedLog, open_log
from tidings.log.embedded.index import MemoryIndex
from tidings.log.interface import Appended
from tidings.log.settings import LogSettings
from tidings.testing import SimulatedDisk, VirtualClock
from tidings.types import Ack

T = TypeVar("T")

WORKSPACE: Final = Path("/data/workspace")
BUS: Final = WORKSPACE / ".bus"
SETTINGS: Final = LogSettings(journal_bytes=1 << 20, journal_count_max=2)
TOPIC: Final = "actions"
GROUP: Final = "learner"


class World:
    """
    Everything outside of the bus.

    ``open`` makes a bus over the world's disk; opening again after ``close`` or ``kill`` is the next process.
    """

    def __init__(self, *, seed: int = 0, disk: SimulatedDisk | None = None) -> None:
        self.clock = VirtualClock(wakes_max=10_000_000)
        self.disk = disk or SimulatedDisk(seed)
        self.rng = random.Random(seed)
        self.slots: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
        self.log: EmbeddedLog | None = None
        self.bus: EventBus | None = None

    async def open(self, *middlewares: Any, log_settings: LogSettings = SETTINGS, **options: Any) -> EventBus:
        """A started bus on this world's disk."""
        self.log = await open_log(WORKSPACE, log_settings, disk=self.disk, index=MemoryIndex(), clock=self.clock)
        self.bus = EventBus(
            list(middlewares),
            log=self.log,
            store=FileGroupStore(
                WORKSPACE,
                self.log,
                disk=self.disk,
                clock=self.clock,
                claims=lambda topic, group: MemoryClaims(self.slots.setdefault((topic, group), {})),
                encryptor=options.pop("encryptor", None),
                offsets_key=options.pop("offsets_key", None),
            ),
            clock=self.clock,
            rng=self.rng,
            **options,
        )
        await self.bus.start()
        return self.bus

    async def close(self, timeout_s: float = 0.0) -> None:
        """Close the bus and its log."""
        if self.bus is not None:
            await self.run(self.bus.close(timeout_s))
            self.bus = None
        if self.log is not None:
            await self.log.close()
            self.log = None

    async def kill(self) -> None:
        """End the process: what it wrote stays, what it had in memory is gone, what was claimed stays claimed."""
        disk, slots = self.disk.clone(), {key: dict(each) for key, each in self.slots.items()}
        await self.close()
        self.disk, self.slots = disk, slots

    async def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Await a job in virtual time."""
        return await self.clock.run_until(job, outside_seconds_max=30.0)

    async def until(self, condition: Callable[[], bool], seconds_max: float = 3600.0) -> None:
        """Let time pass until something holds."""

        async def poll() -> None:
            while not condition():
                await self.clock.sleep(0.01)

        await self.clock.run_until(poll(), seconds_max=seconds_max)

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
