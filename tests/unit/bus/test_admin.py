"""Administration of groups on a log and a store, without a bus."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from tidings.bus.admin import GroupAdmin, offset_of
from tidings.bus.cursors import bounds
from tidings.bus.errors import CursorDamaged, UnknownGroup
from tidings.bus.store import Cursor, GroupPosition
from tidings.bus.store.files import FileGroupStore
from tidings.bus.store.memory import MemoryGroupStore
from tidings.core.clock import datetime_of
from tidings.core.errors import SettingsError
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


async def admin_with(log: MemoryLog, clock: VirtualClock, stored: GroupPosition) -> GroupAdmin:
    store = MemoryGroupStore(clock)
    await store.save("actions", "g", stored)
    return GroupAdmin(log, store, clock)


async def test_a_report_compares_a_group_with_its_topic(log: MemoryLog, clock: VirtualClock) -> None:
    """Lag counts what is not acknowledged, early ones apart; the age is that of the oldest event that is not."""
    admin = await admin_with(log, clock, position(3, (6, 7), attempts={4: 2, 5: 1}))
    report = await admin.report("actions", "g")

    assert (report.committed, report.next_offset, report.lag) == (3, 10, 4)
    assert (report.acknowledged_early, report.acknowledged_ranges, report.failed_attempts) == (2, [(6, 7)], 3)
    assert report.failed_attempts_by_offset == {4: 2, 5: 1}
    assert report.oldest_unacked_age_s == pytest.approx(6.0)
    assert (report.state, report.problem) == ("ready", None)


async def test_a_group_that_is_through_has_no_oldest_event(log: MemoryLog, clock: VirtualClock) -> None:
    """With nothing left to acknowledge there is no lag and no age."""
    (report,) = await (await admin_with(log, clock, position(9))).reports()

    assert (report.lag, report.oldest_unacked_age_s) == (0, None)


@pytest.mark.parametrize("state", ["damaged", "other_epoch"])
async def test_a_position_that_cannot_be_read_says_why(log: MemoryLog, clock: VirtualClock, state: str) -> None:
    """What cannot be known is nothing, and why is said; such a group can be moved, and what that repeats is not counted."""
    disk = SimulatedDisk()
    workspace = Path("/data")
    store = FileGroupStore(workspace, log, disk=disk, clock=clock)
    if state == "damaged":
        await store.save("actions", "g", position(3))
        for name in ("actions__g.json", "actions__g.json.bak"):
            disk.write_all(workspace / ".bus" / "offsets" / name, b"damaged")
    else:
        elsewhere = MemoryLog(clock=clock)
        await FileGroupStore(workspace, elsewhere, disk=disk, clock=clock).save("actions", "g", position(3))
    admin = GroupAdmin(log, store, clock)
    report = await admin.report("actions", "g")

    assert (report.state, report.committed, report.lag, report.paused) == (state, None, None, False)
    assert report.problem is not None
    with pytest.raises(CursorDamaged if state == "damaged" else EpochMismatch):
        await admin.pause("actions", "g")
    plan = await admin.seek("actions", "g", 4, dry_run=True)
    assert (plan.committed, plan.next_offset, plan.redelivered, plan.skipped) == (None, 4, None, None)
    assert plan.problem is not None
    await admin.seek("actions", "g", 4)
    assert (await admin.report("actions", "g")).committed == 3


@pytest.mark.parametrize(
    ("target", "redelivered", "skipped"),
    [(4, 2, 0), (0, 6, 0), (6, 2, 2), (8, 0, 2), (10, 0, 4)],
)
async def test_a_seek_says_what_it_does(
    log: MemoryLog, clock: VirtualClock, target: int, redelivered: int, skipped: int
) -> None:
    """Moving back delivers acknowledged events again, early ones too; moving forward skips what is not acknowledged."""
    admin = await admin_with(log, clock, position(3, (6, 7)))
    plan = await admin.seek("actions", "g", target, dry_run=True)

    assert (plan.committed, plan.next_offset, plan.carried_out) == (3, target, False)
    assert (plan.redelivered, plan.skipped) == (redelivered, skipped)
    done = await admin.seek("actions", "g", target)
    assert (done.redelivered, done.skipped, done.carried_out) == (redelivered, skipped, True)
    assert (await admin.report("actions", "g")).committed == target - 1


async def test_a_group_that_nobody_runs_is_paused_and_resumed(log: MemoryLog, clock: VirtualClock) -> None:
    """Each says whether there was anything to change, and a dry run changes nothing."""
    admin = await admin_with(log, clock, position(3))

    assert (await admin.pause("actions", "g", dry_run=True)).changes
    assert (await admin.report("actions", "g")).state == "ready"
    done = await admin.pause("actions", "g")
    assert (done.carried_out, done.changes) == (True, True)
    assert done.audit_seq is not None
    again = await admin.pause("actions", "g")
    assert (again.carried_out, again.changes, again.audit_seq) == (False, False, None)
    assert (await admin.report("actions", "g")).state == "paused"
    assert (await admin.resume("actions", "g")).carried_out
    assert (await admin.report("actions", "g")).state == "ready"


async def test_a_target_is_an_offset(log: MemoryLog, clock: VirtualClock) -> None:
    """Earliest, latest, a time and an offset mean an offset of the topic; beyond its end there is none."""
    now = datetime_of(clock.now_ns())

    assert bounds(log, "actions") == (0, 10)
    assert await offset_of(log, "actions", "earliest") == 0
    assert await offset_of(log, "actions", "latest") == 10
    assert await offset_of(log, "actions", now - timedelta(seconds=3)) == 7
    assert await offset_of(log, "actions", now) == 10
    assert await offset_of(log, "actions", 10) == 10
    for topic, beyond in [("actions", 11), ("other", 1)]:
        with pytest.raises(SettingsError):
            await offset_of(log, topic, beyond)


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
