"""
At least once, whatever crashes: a state machine that publishes, fails, stops the machine at any disk call and restarts.

The promise, for every group: what it has acknowledged is part of what was published, and was handled (or buried) indeed;
all the rest is delivered again; and within one life of the process nothing that was acknowledged comes twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.crash.support import ENDINGS, Ending, disk_after
from tests.scenarios.bus.support import World
from tidings.bus import BusSettings, EventBus, ReceivedEvent
from tidings.bus.errors import PublishTimeout
from tidings.log.errors import LogError
from tidings.log.interface import Appended
from tidings.log.settings import LogSettings
from tidings.testing import SimulatedCrash
from tidings.types import Ack

TOPICS: Final = ("alpha", "beta")
GROUPS: Final = ("one", "two")
LOG: Final = LogSettings(journal_bytes=1 << 20, journal_count_max=2, segment_lines_max=5, recent_bytes_max=0)
BUS: Final = BusSettings(cursor_interval_ms=20, cursor_sync_interval_ms=60, read_ahead_count_max=7)
RETRIES_MAX: Final = 2
STATES: Final = ("dead", "requested", "trying", "redriven", "dropped")


class Delivery(RuleBasedStateMachine):
    """One workspace through many lives."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        # Tasks of a machine that stopped end with its crash, and nobody is left to hear of it.
        self.runner.get_loop().set_exception_handler(lambda *_: None)
        self.world = World()
        self.published: dict[str, set[int]] = {topic: set() for topic in TOPICS}
        self.handled: dict[tuple[str, str], set[int]] = {(topic, group): set() for topic in TOPICS for group in GROUPS}
        self.acked_now: set[tuple[str, str, int]] = set()
        self.faults: list[str] = []
        self.number = 0

    # The world

    def run(self, job: Any) -> Any:
        return self.runner.run(job)

    async def _start(self) -> None:
        self.acked_now.clear()
        bus = await self.world.open(log_settings=LOG, settings=BUS)
        for topic in TOPICS:
            for workers, group in enumerate(GROUPS, 1):
                await bus.subscribe(
                    topic,
                    group,
                    self._handler(topic, group),
                    workers=workers,
                    max_inflight=6,
                    max_retries=RETRIES_MAX,
                    order="none" if topic == "alpha" else "key",
                )
                await self._check_place(bus, topic, group)

    def _handler(self, topic: str, group: str) -> Any:
        async def handle(event: ReceivedEvent) -> Ack:
            offset, n = event.offset, event.payload["n"]
            if (topic, group, offset) in self.acked_now:
                self.faults.append(f"{topic}/{group} got {offset} again after it had acknowledged it")
            if n % 3:
                await self.world.clock.sleep(n % 7 / 100)
            if n % 5 == 0 and event.attempt <= n % 4:
                raise RuntimeError("not yet")
            self.handled[topic, group].add(offset)
            self.acked_now.add((topic, group, offset))
            return Ack()

        return handle

    async def _check_place(self, bus: EventBus, topic: str, group: str) -> None:
        """What the stored place passes over was published, and handled or buried."""
        cursor = self.world.group(topic, group).cursor
        done = {*range(cursor.committed + 1), *(n for first, last in cursor.ranges for n in range(first, last + 1))}
        info = bus.log.topics().get(topic)
        assert done <= set(range(info.next_offset if info is not None else 0))
        buried = {letter.offset for letter in await bus.dead_letters(topic, group, states=STATES)}
        assert done <= self.handled[topic, group] | buried

    async def _end(self, ending: Ending, keeps_claims: bool) -> None:
        """The process is gone; the next one finds what its end left on the disk."""
        world = self.world
        slots = {key: dict(each) for key, each in world.slots.items()} if keeps_claims or ending == "killed" else {}
        world.disk.crash_after = world.disk.crash_after if world.disk.is_crashed else world.disk.calls
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if world.log is not None:
            with contextlib.suppress(SimulatedCrash, LogError, OSError):
                await world.log.close()
        disk = disk_after(world.disk, ending)
        clock = world.clock
        self.world = World(disk=disk)
        self.world.clock, self.world.slots, self.world.rng = clock, slots, random.Random(self.number)

    async def _guarded(self, job: Any) -> bool:
        """Do something during which the machine may stop; whether it did not."""
        try:
            await job
        except (SimulatedCrash, LogError, OSError, PublishTimeout):
            assert self.world.disk.is_crashed
        return not self.world.disk.is_crashed

    # What may happen

    @initialize()
    def begin(self) -> None:
        self.run(self._start())

    @rule(topic=st.sampled_from(TOPICS), count=st.integers(1, 5))
    def publish(self, topic: str, count: int) -> None:
        async def job() -> None:
            for _ in range(count):
                self.number += 1
                assert self.world.bus is not None
                # A machine that stopped behind the back of a publisher leaves the window full for good.
                verdict = await self.world.bus.publish(self.world.event(self.number, topic), timeout_s=600)
                assert isinstance(verdict, Appended)
                self.published[topic].add(verdict.offset)

        self._go(job())

    @rule(seconds=st.floats(0.001, 2.0))
    def wait(self, seconds: float) -> None:
        self._go(self.world.clock.sleep(seconds))

    @rule(
        calls=st.integers(1, 60),
        within=st.booleans(),
        seconds=st.floats(0.01, 3.0),
        ending=st.sampled_from(ENDINGS),
        keeps_claims=st.booleans(),
    )
    def stop_the_machine(self, calls: int, within: bool, seconds: float, ending: Ending, keeps_claims: bool) -> None:
        """Stop it so many disk calls from now, wherever that is; or where it stands, if it does not get there."""
        disk = self.world.disk
        disk.crash_after, disk.crash_within = disk.calls + calls, within
        for topic in TOPICS:
            if not disk.is_crashed:
                self.publish(topic, 3)
        if not disk.is_crashed:
            self._go(self.world.clock.sleep(seconds))
        if self.world.disk is disk:
            self.run(self._end(ending, keeps_claims))
            self._restart(calls, within, ending)

    @rule()
    def restart(self) -> None:
        """Close and open again."""

        async def job() -> None:
            await self.world.close()
            await self._start()

        self.run(job())

    def _go(self, job: Any) -> None:
        self.run(self._guarded(self.world.run(job)))

    def _restart(self, calls: int, within: bool, ending: Ending) -> None:
        """Start again; the machine may stop while starting, too."""
        disk = self.world.disk
        disk.crash_after, disk.crash_within = disk.calls + calls // 2 + 1, within
        if not self.run(self._guarded(self._start())):
            self.run(self._end(ending, keeps_claims=True))
            self.run(self._start())
        else:
            disk.crash_after = None

    @precondition(lambda self: self.world.bus is not None)
    @invariant()
    def nothing_acknowledged_comes_twice(self) -> None:
        assert self.faults == []

    def teardown(self) -> None:
        try:
            if self.world.bus is not None and not self.world.disk.is_crashed:
                self.world.disk.crash_after = None
                self.run(self._settle())
        finally:
            self.runner.close()

    async def _settle(self) -> None:
        """Left alone, every group gets through all that was published."""
        for topic in TOPICS:
            for group in GROUPS:
                bus = self.world.bus
                assert bus is not None
                await self.world.until(self.world.drained(topic, group))
                buried = {letter.offset for letter in await bus.dead_letters(topic, group, states=STATES)}
                info = bus.log.topics().get(topic)
                stored = set(range(info.next_offset if info is not None else 0))
                assert self.published[topic] <= stored
                assert stored == self.handled[topic, group] | buried
        assert self.faults == []
        await self.world.close()


@pytest.mark.req("F53", "F54", "F68", "F71", "F127", "F131")
def test_what_is_acknowledged_was_published_and_the_rest_comes_again() -> None:
    """For any pattern of crashes, each group gets again exactly what it had not acknowledged."""
    run_state_machine_as_test(Delivery, settings=settings(max_examples=40, stateful_step_count=15))
