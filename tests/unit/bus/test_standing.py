"""Where a group stands, and what moving it comes to: a place against the bounds of its topic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from tidings.bus.cursor import Cursor
from tidings.bus.errors import CursorDamaged
from tidings.bus.offsets import GroupPlace, OffsetStore
from tidings.bus.places import bounds, offset_of, plan_move, segment_at
from tidings.bus.standing import stand, stored_place, unknown_group
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


def place(committed: int, *islands: tuple[int, int], attempts: dict[int, int] | None = None) -> GroupPlace:
    return GroupPlace(Cursor(committed, list(islands)), attempts or {}, False)


async def test_a_group_is_held_against_its_topic(log: MemoryLog, clock: VirtualClock) -> None:
    """Lag counts what is not acknowledged, islands apart; the age is that of the oldest event that is not."""
    standing = await stand(log, clock, "actions", "g", place(3, (6, 7), attempts={4: 2, 5: 1}))

    assert (standing.committed, standing.next_offset, standing.lag) == (3, 10, 4)
    assert (standing.early_count, standing.islands, standing.failed_deliveries) == (2, [(6, 7)], 3)
    assert standing.oldest_unacked_age_s == pytest.approx(6.0)
    assert (standing.obstacle, standing.problem) == (None, None)


async def test_a_group_that_is_through_has_no_oldest_event(log: MemoryLog, clock: VirtualClock) -> None:
    """With nothing left to acknowledge there is no lag and no age."""
    standing = await stand(log, clock, "actions", "g", place(9))

    assert (standing.lag, standing.oldest_unacked_age_s) == (0, None)


@pytest.mark.parametrize(
    ("error", "obstacle"), [(CursorDamaged("file", "is damaged"), "damaged"), (EpochMismatch("a", "b"), "other_epoch")]
)
async def test_a_place_that_is_not_known_is_an_obstacle(
    log: MemoryLog, clock: VirtualClock, error: CursorDamaged | EpochMismatch, obstacle: str
) -> None:
    """What cannot be known is nothing, and why is said in words."""
    standing = await stand(log, clock, "actions", "g", error)

    assert (standing.obstacle, standing.problem) == (obstacle, str(error))
    assert (standing.committed, standing.lag, standing.is_paused) == (None, None, False)


def test_a_group_without_a_file_stands_before_its_topic(clock: VirtualClock) -> None:
    """A place that was never stored is the one before the first event; a damaged one is an error as a value."""
    disk = SimulatedDisk()
    store = OffsetStore(disk, Path("/data/offsets"), clock, "epoch")
    new = stored_place(store, "actions", "g")
    assert isinstance(new, GroupPlace)
    assert new.cursor.committed == -1

    store.save("actions", "g", Cursor(3), {})
    for name in ("actions__g.json", "actions__g.json.bak"):
        disk.write_all(Path("/data/offsets") / name, b"damaged")
    assert isinstance(stored_place(store, "actions", "g"), CursorDamaged)


@pytest.mark.parametrize(
    ("target", "comes_again", "passed_over"),
    [(4, 2, 0), (0, 6, 0), (6, 2, 2), (8, 0, 2), (10, 0, 4)],
)
def test_a_move_says_what_it_comes_to(target: int, comes_again: int, passed_over: int) -> None:
    """Moving back brings acknowledged events again, islands too; moving forward passes over what is not acknowledged."""
    plan = plan_move(place(3, (6, 7)), target)

    assert (plan.committed, plan.next_offset) == (3, target)
    assert (plan.comes_again, plan.passed_over) == (comes_again, passed_over)


def test_a_move_from_nowhere_is_not_counted() -> None:
    """From a place that cannot be read nobody can say what comes again."""
    plan = plan_move(CursorDamaged("file", "is damaged"), 4)

    assert (plan.committed, plan.next_offset, plan.comes_again, plan.passed_over) == (None, 4, None, None)


async def test_an_aim_comes_to_an_offset(log: MemoryLog, clock: VirtualClock) -> None:
    """Earliest, latest, a time and an offset lead to a place of the topic; beyond its end there is none."""
    now = datetime_of(clock.now_ns())

    assert bounds(log, "actions") == (0, 10)
    assert await offset_of(log, "actions", "earliest") == 0
    assert await offset_of(log, "actions", "latest") == 10
    assert await offset_of(log, "actions", now - timedelta(seconds=3)) == 7
    assert await offset_of(log, "actions", now) == 10
    assert await offset_of(log, "actions", 10) == 10
    assert await offset_of(log, "actions", 11) is None
    assert await offset_of(log, "other", 1) is None


async def test_an_offset_has_a_segment(log: MemoryLog) -> None:
    """The segment is the one that holds the offset, or will; a topic without records has its first."""
    assert [segment_at(log, "actions", offset) for offset in (0, 3, 4, 9, 10)] == [1, 1, 2, 3, 3]
    assert segment_at(log, "other", 0) == 1


def test_an_unknown_group_comes_with_those_there_are() -> None:
    """The hint names groups of the topic; of others if it has none; and says so if there are none at all."""
    groups = [("actions", "a"), ("actions", "b"), ("other", "c")]

    assert unknown_group("actions", "x", groups).hint == "there are: a, b"
    assert unknown_group("third", "x", groups).hint == "there are: a of actions, b of actions, c of other"
    assert unknown_group("actions", "x", []).hint == "there are no groups yet"
