"""Group status and what a seek would do: a position against the bounds of its topic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from tidings.bus.admin import GroupAdmin, GroupStatus, offset_of, plan_seek
from tidings.bus.cursors import bounds
from tidings.bus.errors import CursorDamaged, UnknownGroup
from tidings.bus.store import Cursor, GroupPosition
from tidings.bus.store.files import FileGroupStore
from tidings.bus.store.memory import MemoryGroupStore
from tidings.core.clock import datetime_of
from tidings.core.events import Event, EventMeta
from tidings.log.errors import EpochMismatch
from tidings.log.memory import MemoryLog
from tidings.log.settings import LogSettings
from tidings.testing import SimulatedDisk, VirtualClock

SEGMENT_LINES = 4


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def log(clock: VirtualClock) -> AsyncIterator[MemoryLog]:
    """Ten events of one topic, a second apart."""
    made = MemoryLog(LogSettings(segment_lines_max=SEGMENT_LINES), clock=clock)
    for _ in range(10):
        await made.append(Event(EventMeta(topic="actions", type="DONE", space_id="shared:home"), {}))
        await clock.advance(1)
    yield made
    await made.close()


def position(committed: int, *ranges: tuple[int, int], attempts: dict[int, int] | None = None) -> GroupPosition:
    return GroupPosition(Cursor(committed, list(ranges)), attempts or {})


async def status_of(log: MemoryLog, clock: VirtualClock, stored: GroupPosition) -> GroupStatus:
    store = MemoryGroupStore(clock)
    await store.save("actions", "g", stored)
    return await GroupAdmin(log, store, clock).status("actions", "g")


async def test_a_status_compares_a_group_with_its_topic(log: MemoryLog, clock: VirtualClock) -> None:
    """Lag counts what is not acknowledged, early ones apart; the age is that of the oldest event that is not."""
    status = await status_of(log, clock, position(3, (6, 7), attempts={4: 2, 5: 1}))

    assert (status.committed, status.next_offset, status.lag) == (3, 10, 4)
    assert (status.acknowledged_early, status.acknowledged_ranges, status.failed_attempts) == (2, [(6, 7)], 3)
    assert status.oldest_unacked_age_s == pytest.approx(6.0)
    assert (status.obstacle, status.error) == (None, None)


async def test_a_group_that_is_through_has_no_oldest_event(log: MemoryLog, clock: VirtualClock) -> None:
    """With nothing left to acknowledge there is no lag and no age."""
    status = await status_of(log, clock, position(9))

    assert (status.lag, status.oldest_unacked_age_s) == (0, None)


@pytest.mark.parametrize("obstacle", ["damaged", "other_epoch"])
async def test_a_position_that_cannot_be_read_is_an_obstacle(
    log: MemoryLog, clock: VirtualClock, obstacle: str
) -> None:
    """What cannot be known is nothing, and why is said; a group that was never stored is before its first event."""
    disk = SimulatedDisk()
    workspace = Path("/data")
    store = FileGroupStore(workspace, log, disk=disk, clock=clock)
    new = await GroupAdmin(log, store, clock).status("actions", "g")
    assert (new.committed, new.obstacle) == (-1, None)

    if obstacle == "damaged":
        await store.save("actions", "g", position(3))
        for name in ("actions__g.json", "actions__g.json.bak"):
            disk.write_all(workspace / ".bus" / "offsets" / name, b"damaged")
    else:
        elsewhere = MemoryLog(clock=clock)
        await FileGroupStore(workspace, elsewhere, disk=disk, clock=clock).save("actions", "g", position(3))
    status = await GroupAdmin(log, store, clock).status("actions", "g")

    assert status.obstacle == obstacle
    assert isinstance(status.error, CursorDamaged if obstacle == "damaged" else EpochMismatch)
    assert (status.committed, status.lag, status.is_paused) == (None, None, False)


@pytest.mark.parametrize(
    ("target", "redelivered", "skipped"),
    [(4, 2, 0), (0, 6, 0), (6, 2, 2), (8, 0, 2), (10, 0, 4)],
)
def test_a_plan_says_what_a_seek_would_do(target: int, redelivered: int, skipped: int) -> None:
    """Moving back delivers acknowledged events again, early ones too; moving forward skips what is not acknowledged."""
    plan = plan_seek(position(3, (6, 7)), target)

    assert (plan.committed, plan.next_offset) == (3, target)
    assert (plan.redelivered, plan.skipped) == (redelivered, skipped)


def test_a_seek_from_an_unknown_position_is_not_counted() -> None:
    """From a position that cannot be read nobody can say what is delivered again."""
    plan = plan_seek(CursorDamaged("file", "is damaged"), 4)

    assert (plan.committed, plan.next_offset, plan.redelivered, plan.skipped) == (None, 4, None, None)


async def test_a_target_is_an_offset(log: MemoryLog, clock: VirtualClock) -> None:
    """Earliest, latest, a time and an offset mean an offset of the topic; beyond its end there is none."""
    now = datetime_of(clock.now_ns())

    assert bounds(log, "actions") == (0, 10)
    assert await offset_of(log, "actions", "earliest") == 0
    assert await offset_of(log, "actions", "latest") == 10
    assert await offset_of(log, "actions", now - timedelta(seconds=3)) == 7
    assert await offset_of(log, "actions", now) == 10
    assert await offset_of(log, "actions", 10) == 10
    assert await offset_of(log, "actions", 11) is None
    assert await offset_of(log, "other", 1) is None


async def test_an_unknown_group_comes_with_those_there_are(log: MemoryLog, clock: VirtualClock) -> None:
    """The hint names groups of the topic; of others if it has none; and says so if there are none at all."""
    store = MemoryGroupStore(clock)
    admin = GroupAdmin(log, store, clock)
    with pytest.raises(UnknownGroup) as none:
        await admin.check_known("actions", "x")
    for topic, group in [("actions", "a"), ("actions", "b"), ("other", "c")]:
        await store.save(topic, group, position(1))
    await admin.check_known("other", "c")
    with pytest.raises(UnknownGroup) as some:
        await admin.check_known("actions", "x")
    with pytest.raises(UnknownGroup) as others:
        await admin.check_known("third", "x")

    assert none.value.hint == "there are no groups yet"
    assert some.value.hint == "there are: a, b"
    assert others.value.hint == "there are: a of actions, b of actions, c of other"
