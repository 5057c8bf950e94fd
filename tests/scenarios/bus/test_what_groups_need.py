"""Nothing that a group has not acknowledged is dropped, whatever state its files are in and whoever else is at work."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.scenarios.bus.support import BUS, GROUP, SETTINGS, TOPIC, Recorder, World
from tidings.bus import EventBus
from tidings.log.errors import PositionTrimmed
from tidings.testing import CRASH_MODES, CrashMode, SimulatedDisk

CUT = replace(SETTINGS, segment_lines_max=4)
FILE = BUS / "offsets" / f"{TOPIC}__{GROUP}.json"
BACKUP = BUS / "offsets" / f"{TOPIC}__{GROUP}.json.bak"


async def with_backlog(world: World, handled: int = 8, events: int = 24) -> EventBus:
    """A group that has acknowledged some events and left, and events that it has yet to get."""
    bus = await world.open(log_settings=CUT)
    await world.run(bus.subscribe(topic=TOPIC, group=GROUP, handler=Recorder()))
    await world.publish(handled)
    await world.until(world.drained())
    await world.run(bus.unsubscribe(bus.get_subscriptions()[0]))
    await world.publish(events - handled, first=handled)
    return bus


async def assert_backlog_is_there(world: World, handled: int = 8, events: int = 24) -> None:
    """The group can go on, and gets at least what it has not acknowledged."""
    assert world.bus is not None
    got = Recorder()
    await world.run(world.bus.subscribe(topic=TOPIC, group=GROUP, handler=got))
    await world.until(world.drained())
    assert set(range(handled, events)) <= set(got.offsets)


async def test_a_group_whose_file_is_missing_keeps_its_backlog(world: World) -> None:
    """A process that ended between two renames left only the backup: the group is listed, held to, and goes on from it."""
    bus = await with_backlog(world)
    world.disk.write_all(BACKUP, world.disk.read_all(FILE))
    world.disk.write_all(FILE.with_name(FILE.name + ".new"), b"cut o")
    world.disk.remove(FILE)

    assert await bus.groups(TOPIC) == [(TOPIC, GROUP)]
    plan = await world.run(bus.compact())

    assert [drop.segment.last_offset for drop in plan.drops] == [3, 7]
    await assert_backlog_is_there(world)


@pytest.mark.parametrize("names", [[FILE], [FILE, BACKUP]], ids=["the file", "both files"])
async def test_a_file_whose_checksum_does_not_fit_frees_nothing(world: World, names: list[Path]) -> None:
    """A cursor that was damaged into a higher one is not believed: what counts is the backup, or nothing at all."""
    bus = await with_backlog(world)
    damaged = world.disk.read_all(FILE).replace(b'"committed":7', b'"committed":9999')
    assert damaged != world.disk.read_all(FILE)
    for name in names:
        world.disk.write_all(name, damaged)

    plan = await world.run(bus.compact())

    assert [drop.segment.last_offset for drop in plan.drops] == ([3, 7] if names == [FILE] else [])
    if names != [FILE]:
        assert f"the place of group {GROUP!r} cannot be read" in plan.decisions[0].reason
        await world.run(bus.seek(TOPIC, GROUP, 8))
    await assert_backlog_is_there(world)


async def test_a_group_of_another_epoch_holds_everything(world: World) -> None:
    """Offsets of another history say nothing about this one, so the group needs all there is until it is told where to go on."""
    bus = await with_backlog(world)
    await world.close()
    for name in (FILE, BACKUP):
        other = world.disk.read_all(name)
        epoch = other.split(b'"epoch":"')[1][:16]
        body = other.split(b",", 1)[1].replace(epoch, b"0" * 16)
        world.disk.write_all(name, b'{"crc":"%08x",%b' % (zlib.crc32(body[:-1]), body))
    bus = await world.open(log_settings=CUT)

    assert (await world.run(bus.compact())).drops == ()


class SnapshotDisk(SimulatedDisk):
    """A disk that keeps a copy of itself after every call that changes a name among the groups' files, once it is told to."""

    def __init__(self) -> None:
        super().__init__(0)
        self.copies: list[SimulatedDisk] | None = None

    def rename(self, source: Path, target: Path) -> None:
        """Rename, and keep a copy."""
        super().rename(source, target)
        self._keep(target)

    def remove(self, path: Path) -> None:
        """Remove, and keep a copy."""
        super().remove(path)
        self._keep(path)

    def _keep(self, path: Path) -> None:
        if self.copies is not None and path.parent == BUS / "offsets":
            self.copies.append(self.clone())


async def test_no_moment_of_storing_a_cursor_frees_what_its_group_needs() -> None:
    """Whoever looks between two disk calls while a busy group's place is stored still holds to the group and its backlog."""
    disk = SnapshotDisk()
    world = World(disk=disk)
    bus = await world.open(log_settings=CUT)
    stuck = Recorder(fails=lambda event: event.offset == 8)
    await world.run(bus.subscribe(topic=TOPIC, group=GROUP, handler=stuck, backoff_base=1e6, backoff_max=1e6))
    await world.run(bus.subscribe(topic=TOPIC, group="fast", handler=Recorder()))
    await world.publish(16)
    await world.until(lambda: world.group().cursor.committed == 7)
    await world.run(bus.compact(dry_run=True))
    disk.copies = []
    for n in range(16, 22):  # acknowledged beyond the one that is stuck: the place is stored again and again
        await world.publish(1, first=n)
        await world.clock.advance(0.6)
    copies, disk.copies = disk.copies, None
    await world.close()

    assert len(copies) > 10
    for copy in copies:
        after = World(disk=copy)
        bus = await after.open(log_settings=CUT)
        plan = await after.run(bus.compact())
        assert {drop.segment.last_offset for drop in plan.drops} <= {3, 7}
        await assert_backlog_is_there(after, handled=8, events=9)
        await after.close()


@pytest.mark.parametrize("mode", CRASH_MODES)
async def test_a_power_cut_after_compaction_leaves_no_group_behind_what_was_dropped(mode: CrashMode) -> None:
    """Segments go only by places that a power cut cannot take back, so the group can always go on."""
    for seed in range(6):
        world = World(seed=seed)
        bus = await world.open(log_settings=CUT)
        await world.run(bus.subscribe(topic=TOPIC, group=GROUP, handler=Recorder()))
        await world.publish(24)
        await world.until(world.drained())
        await world.clock.advance(0.06)  # stored, and not synced yet
        await world.run(bus.compact())
        cut = world.disk.after_crash(mode, seed=seed)
        await world.close()

        after = World(disk=cut)
        await after.open(log_settings=CUT)
        await assert_backlog_is_there(after, handled=24, events=24)
        await after.close()


async def interleaved(
    world: World, first: Coroutine[Any, Any, Any], steps: int, second: Coroutine[Any, Any, Any]
) -> Any:
    """Run two jobs, the second beginning after the first has taken so many steps; the second's outcome."""

    async def later() -> Any:
        for _ in range(steps):
            await asyncio.sleep(0)
        return await second

    async def both() -> Any:
        outcomes = await asyncio.gather(first, later(), return_exceptions=True)
        return outcomes[1]

    return await world.run(both())


@pytest.mark.parametrize("steps", range(0, 40, 3))
async def test_a_group_that_is_created_during_a_compaction_gets_what_it_was_promised(steps: int) -> None:
    """A group that was told it begins at the first event gets that event; or it is told that the event is gone."""
    for start in ("earliest", 0):
        world = World()
        bus = await with_backlog(world, handled=24)
        got = Recorder()
        outcome = await interleaved(
            world, bus.compact(), steps, bus.subscribe(topic=TOPIC, group="late", handler=got, start=start)
        )
        first = bus.log.topics()[TOPIC].first_offset
        if isinstance(outcome, PositionTrimmed):
            assert (start, outcome.first > 0) == (0, True)
        else:
            assert not isinstance(outcome, BaseException)
            await world.until(world.drained(group="late"))
            assert bus.health().problem is None
            assert got.offsets == list(range(got.offsets[0], 24))
            assert got.offsets[0] >= first
            assert start == "earliest" or got.offsets[0] == 0
        await world.close()


@pytest.mark.parametrize("steps", range(0, 40, 3))
async def test_a_group_that_is_set_back_during_a_compaction_gets_what_it_was_promised(steps: int) -> None:
    """Either the group is back at the first event, and gets it again; or it is told that the event is gone, and stays."""
    world = World()
    bus = await world.open(log_settings=CUT)
    got = Recorder()
    await world.run(bus.subscribe(topic=TOPIC, group=GROUP, handler=got))
    await world.publish(24)
    await world.until(world.drained())
    await world.clock.advance(60)

    outcome = await interleaved(world, bus.compact(), steps, bus.seek(TOPIC, GROUP, 0))

    await world.until(world.drained())
    assert bus.health().problem is None
    again = got.offsets[24:]
    assert again == ([] if isinstance(outcome, PositionTrimmed) else list(range(24)))
    await world.close()
