"""
A machine for a program's bus: virtual time, a disk in memory, and a button that crashes it.

    world = World()
    world.add(shop.bus)
    await shop.bus.publish("orders", {"number": 1}, type="ORDER_PLACED", space="shared:shop")
    await world.drain()
    await world.crash()
    await shop.bus.start()

The bus is the program's own, with its handlers, settings and middlewares; only its files, its clock and its chance are others. So
retries, delayed events and deadlines take no time, and every run takes the same course. What a handler itself waits for
(``asyncio.sleep``, a socket) takes real time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from tidings.bus.eventbus import EventBus
from tidings.bus.life import EventBusState
from tidings.bus.members import LocalMember
from tidings.bus.store.files import open_files
from tidings.bus.store.interface import GroupStore
from tidings.bus.store.memory import MemoryClaims
from tidings.log.embedded.index import MemoryIndex
from tidings.log.interface import Log
from tidings.log.settings import LogSettings

from .clock import VirtualClock
from .disk import SimulatedDisk
from .survival import CrashMode

T = TypeVar("T")

Ending = CrashMode | Literal["killed"]
"""What stops the machine: the power goes, in one of the disk's ways, or only the process does."""

_WORKSPACE: Final = Path("/data/workspace")
_JOURNAL_BYTES: Final = 1 << 20
_DAY_S: Final = 86_400.0
_WAKES_MAX: Final = 10_000_000


class World:
    """
    A machine for one program.

    Args:
        seed: Decides what is left to chance: jitter of retries, and what a crash leaves.
        disk: To begin with; a new one if left out.

    ``clock`` and ``disk`` may be used directly: ``disk.fail_next("sync", errno.EIO)``, ``disk.capacity_bytes = 0``. After a crash
    ``disk`` is another one.
    """

    def __init__(self, *, seed: int = 0, disk: SimulatedDisk | None = None) -> None:
        self.clock = VirtualClock(wakes_max=_WAKES_MAX, is_busy_outside=self._is_in_thread)
        self.disk = disk or SimulatedDisk(seed)
        self.rng = random.Random(seed)
        self._slots: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
        self._buses: list[EventBus] = []
        self._leaving = contextlib.ExitStack()

    def add(self, bus: EventBus) -> None:
        """
        From its next start on, the bus runs on this machine, until ``leave``. As everywhere, one at a time writes the workspace.

        Raises:
            SettingsError: It runs already, or was made with a log of its own.
        """
        self._leaving.enter_context(bus.moved(self._open, self.clock, self.rng))
        self._buses.append(bus)

    def leave(self) -> None:
        """Put every bus back as it was, stopped; one that still runs is let go as it is, and its event loop must end."""
        self._buses.clear()
        self._leaving.close()

    async def _open(self, _: Path | str, settings: LogSettings | None, /, **options: Any) -> tuple[Log, GroupStore]:
        small = msgspec.structs.replace(settings or LogSettings(), journal_bytes=_JOURNAL_BYTES, journal_count_max=2)
        options |= {"disk": self.disk, "index": MemoryIndex(), "claims": self._claims}
        return await open_files(_WORKSPACE, small, **options)

    def _claims(self, topic: str, group: str) -> MemoryClaims:
        return MemoryClaims(self._slots.setdefault((topic, group), {}))

    def _is_in_thread(self) -> bool:
        subscriptions = (each for bus in self._buses for each in bus.get_subscriptions())
        members = (member for subscription in subscriptions for member in subscription.members)
        return any(isinstance(member, LocalMember) and member.is_in_thread for member in members)

    # Time

    async def run(self, awaitable: Awaitable[T]) -> T:
        """Wait for something in virtual time: whenever nobody has anything to do, it is the time of the next who waits."""
        return await self.clock.run_until(awaitable, outside_seconds_max=30.0)

    async def advance(self, seconds: float) -> None:
        """Let time pass."""
        await self.clock.advance(seconds)

    async def drain(self, timeout_s: float = 30 * _DAY_S) -> None:
        """
        Let time pass until every group has acknowledged or dead-lettered all that was published, retries included.

        Raises:
            DrainTimeout: Some had not within this much virtual time.
        """
        for bus in self._running():
            await self.run(bus.drain(timeout_s))

    def play(self, scenario: Coroutine[Any, Any, T]) -> T:
        """For tests that are not ``async`` themselves: run a scenario in an event loop of its own, and close every bus at its end."""

        async def whole() -> T:
            try:
                return await scenario
            finally:
                await self.close()

        return asyncio.run(whole())

    async def until(self, condition: Callable[[], bool], seconds_max: float = 3600.0) -> None:
        """Let time pass until something holds; ``NeverFinished`` if it does not within so many seconds."""

        async def poll() -> None:
            while not condition():
                await self.clock.sleep(0.01)

        await self.clock.run_until(poll(), seconds_max=seconds_max)

    # Ends

    async def crash(self, ending: Ending = "random") -> None:
        """
        Stop the machine as it is. The buses are stopped then; ``await bus.start()`` is the next life.

        Handlers that are at work are cancelled, and nothing that anybody does from here on reaches the disk. What was published
        is there in the next life. Of what was not synced, such as the last positions of groups, ``ending`` decides.

        Args:
            ending: ``killed`` ends the process only: all that was written stays. Otherwise the power goes, and the disk holds what
                ``SimulatedDisk.after_crash`` says; ``lose_all`` is the worst for it.
        """
        if ending == "killed":
            left = self.disk.clone()
            left.crash_after = None
        else:
            left = self.disk.after_crash(ending)
        # Claims are in mapped memory that nobody syncs.
        is_claim_left = ending in ("killed", "keep_all") or (ending != "lose_all" and self.rng.random() < 0.5)
        slots = {key: dict(each) for key, each in self._slots.items()} if is_claim_left else {}
        self.disk.crash_after = None  # so that those who still run can end; nobody looks at this disk again
        await self.close()
        self.disk, self._slots = left, slots

    async def close(self, timeout_s: float = 0.0) -> None:
        """Close every bus; handlers that are at work may finish within this much virtual time."""
        for bus in self._running():
            await self.run(bus.close(timeout_s))

    def _running(self) -> list[EventBus]:
        return [bus for bus in self._buses if bus.state is not EventBusState.STOPPED]
