"""A machine for a program's bus: time, crashes, and that the bus is afterwards as it was."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from pathlib import Path

import pytest

from tidings import Bus
from tidings.bus import Ack, ReceivedEvent
from tidings.core.errors import SettingsError, TidingsError
from tidings.log.memory import MemoryLog
from tidings.testing import SimulatedCrash, VirtualClock, World


class Program:
    """A bus with one handler, that says what it got."""

    def __init__(self) -> None:
        self.bus = Bus("a/workspace/that/nobody/makes")
        self.handled: list[tuple[int, int]] = []
        self.bus.subscriber("orders", group="billing")(self.bill)

    async def bill(self, event: ReceivedEvent) -> Ack:
        self.handled.append((event.offset, event.attempt))
        return Ack()

    async def place(self) -> None:
        await self.bus.publish("orders", {}, type="ORDER_PLACED", space="shared:shop")


@pytest.fixture
def program(tidings_world: World) -> Program:
    """A program whose bus is on the machine."""
    made = Program()
    tidings_world.add(made.bus)
    return made


async def test_what_a_power_cut_takes_is_delivered_again(tidings_world: World, program: Program) -> None:
    """A position that was not synced is lost with the power, and the event comes again; once synced, it does not."""
    await program.place()
    await tidings_world.drain()
    await tidings_world.crash("lose_all")
    await program.bus.start()
    await tidings_world.drain()
    assert program.handled == [(0, 1), (0, 1)]

    await tidings_world.advance(5)
    await tidings_world.crash("lose_all")
    await program.bus.start()
    await tidings_world.drain()
    assert len(program.handled) == 2


async def test_a_killed_process_has_counted_the_attempt_that_it_died_in(tidings_world: World, program: Program) -> None:
    """An event that was with its handler comes again as the second attempt."""
    begun = asyncio.Event()

    async def hang(event: ReceivedEvent) -> None:
        begun.set()
        await asyncio.Event().wait()

    await program.bus.start()
    hanging = await program.bus.subscribe("orders", "mail", hang)
    await program.place()
    await begun.wait()
    await tidings_world.crash("killed")
    await program.bus.unsubscribe(hanging)
    seen: list[int] = []
    await program.bus.start()
    await program.bus.subscribe("orders", "mail", lambda event: seen.append(event.attempt))
    await tidings_world.drain()

    assert seen == [2]


async def test_a_machine_that_stopped_by_itself_goes_on_after_the_button(
    tidings_world: World, program: Program
) -> None:
    """A planned crash of the disk ends the publish; after ``crash`` there is a next life, with what was acknowledged."""
    await program.place()
    tidings_world.disk.crash_after = tidings_world.disk.calls + 1
    with pytest.raises((SimulatedCrash, TidingsError)):
        await tidings_world.run(program.place())
    await tidings_world.crash("lose_all")

    await program.bus.start()
    await program.place()
    await tidings_world.drain()
    assert [offset for offset, _ in program.handled][-1] >= 1


async def test_time_waits_for_plain_functions(tidings_world: World, tidings_bus: Bus) -> None:
    """A handler that blocks its thread is not past its deadline in virtual time, however many others wait for theirs."""
    attempts: list[int] = []

    def slow(event: ReceivedEvent) -> None:
        time.sleep(0.01)
        attempts.append(event.attempt)

    await tidings_bus.subscribe("orders", "mail", slow, ack_deadline_ms=100)
    for _ in range(3):
        await tidings_bus.publish("orders", {}, type="ORDER_PLACED", space="shared:shop")
    await tidings_world.drain()

    assert attempts == [1, 1, 1]


async def test_faults_of_the_disk_reach_the_program(tidings_world: World, tidings_bus: Bus) -> None:
    """A sync that fails is an error of the publish, as on a real disk."""
    await tidings_bus.start()
    tidings_world.disk.fail_next("sync", errno.EIO)

    with pytest.raises(TidingsError):
        await tidings_bus.publish("orders", {}, type="ORDER_PLACED", space="shared:shop")


def test_a_bus_that_was_left_running_is_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """The next test starts it in a loop of its own, with the handlers of the program and no others, and nothing is logged."""
    program = Program()
    for _ in range(2):
        world = World()
        world.add(program.bus)

        async def use(world: World = world) -> None:
            await program.bus.start()
            await program.bus.subscribe("orders", "only-here", lambda event: None)
            await program.place()
            await world.drain()

        with asyncio.Runner() as runner:
            runner.run(use())
            world.leave()

    assert program.handled == [(0, 1), (0, 1)]
    assert [each.group for each in program.bus.get_subscriptions()] == ["billing"]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not Path("a").exists()


async def test_a_bus_that_cannot_be_moved_says_why(tidings_world: World, tidings_bus: Bus) -> None:
    """One that runs, and one that has a log of its own."""
    with pytest.raises(SettingsError, match="a log of its own"):
        tidings_world.add(Bus(log=MemoryLog()))
    await tidings_bus.start()
    with pytest.raises(SettingsError, match="runs already"):
        tidings_world.add(tidings_bus)


async def test_a_bus_without_work_wakes_nobody(tmp_path: Path) -> None:
    """An hour with nothing to do passes in a few steps of the clock: positions are stored when they change, not all the time."""
    clock = VirtualClock(wakes_max=10)
    async with Bus(tmp_path, clock=clock) as bus:
        await bus.subscribe("orders", "billing", lambda event: None)
        await clock.advance(3600)
