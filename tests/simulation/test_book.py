"""The book of promises: each of its checks fails where its promise is broken, and only there."""

from __future__ import annotations

import pytest

from tests.simulation.book import Book, Broken, GroupBook
from tidings.log.retention import RetentionPlan, SegmentDecision, SegmentInfo

KEY = ("alpha", "g")


def book(order: str = "none", attempts_max: int = 2, at_once_max: int = 2) -> Book:
    """A book with one group, which has acknowledged the first two of four events."""
    made = Book()
    group = made.groups[KEY] = GroupBook(KEY, order=order, attempts_max=attempts_max, at_once_max=at_once_max)
    group.exists = True
    for offset in range(4):
        made.offer(offset + 100)
        made.publish("alpha", offset, offset + 100)
    for offset in range(2):
        made.deliver(KEY, [(offset, 1, "k")])
        made.leave(KEY, offset, 1, is_acknowledged=True)
    return made


def plan(first: int, last: int) -> RetentionPlan:
    """A plan to drop one segment."""
    segment = SegmentInfo(
        topic="alpha",
        number=1,
        is_sealed=True,
        first_offset=first,
        last_offset=last,
        first_seq=1,
        last_seq=9,
        first_written_at="",
        last_written_at="",
        lines=1 + last - first,
        size_bytes=1,
    )
    return RetentionPlan((SegmentDecision(segment=segment, drops=True, reason=""),))


def test_what_a_group_lacks_must_not_be_dropped() -> None:
    """What it has acknowledged, given up or been moved past may go."""
    kept = book()
    kept.check_plan(plan(0, 1), {})
    kept.check_kept("alpha", 2, {})
    kept.check_plan(plan(0, 2), {KEY: {2}})
    with pytest.raises(Broken, match="has not had 2"):
        kept.check_plan(plan(0, 2), {})
    with pytest.raises(Broken, match="has not had 2, and the topic begins at 3"):
        kept.check_kept("alpha", 3, {})
    kept.begin_move(KEY, 3)
    kept.end_move(KEY, is_moved=True)
    kept.check_kept("alpha", 3, {})


def test_after_moving_back_a_group_lacks_again_what_it_had() -> None:
    """And may get it again; while it is not known whether it was moved, neither is held against anybody."""
    moved = book()
    moved.begin_move(KEY, 1)
    moved.end_move(KEY, is_moved=True)
    with pytest.raises(Broken, match="has not had 1"):
        moved.check_plan(plan(0, 1), {})
    moved.deliver(KEY, [(1, 1, "k")])


def test_what_was_acknowledged_must_not_come_again_while_the_process_lives() -> None:
    """After its end it may."""
    again = book()
    with pytest.raises(Broken, match="got 1 again"):
        again.deliver(KEY, [(1, 1, "k")])
    again.end_life()
    again.deliver(KEY, [(1, 1, "k")])


@pytest.mark.parametrize(("order", "key"), [("strict", "other"), ("key", "k")])
def test_order_must_be_kept(order: str, key: str) -> None:
    """Within a key, or altogether."""
    ordered = book(order)
    ordered.deliver(KEY, [(3, 1, "k")])
    ordered.leave(KEY, 3, 1, is_acknowledged=False)
    with pytest.raises(Broken, match="got 2 after 3"):
        ordered.deliver(KEY, [(2, 1, key)])


def test_bounds_must_be_kept() -> None:
    """No more attempts than allowed unless somebody asked, and no more events at once."""
    bounded = book()
    with pytest.raises(Broken, match="for the 3th time of 2"):
        bounded.deliver(KEY, [(2, 3, "k")])
    bounded.asked_again.add((KEY, 2))
    bounded.deliver(KEY, [(2, 3, "k")])
    bounded.deliver(KEY, [(2, 1, "k")])
    bounded.deliver(KEY, [(3, 1, "k")])
    with pytest.raises(Broken, match="3 events at once"):
        bounded.deliver(KEY, [(4, 1, "k")])


def test_a_place_passes_over_nothing_that_the_group_lacks() -> None:
    """Nor over what was never published."""
    placed = book()
    placed.check_place(KEY, [(0, 1)], 4, ())
    with pytest.raises(Broken, match="has not had 3"):
        placed.check_place(KEY, [(0, 1), (3, 3)], 4, ())
    with pytest.raises(Broken, match="has not had 1"):
        placed.check_place(KEY, [(0, 1)], 1, ())


def test_what_publishers_were_told_must_be_stored() -> None:
    """Once, at its place, and nothing else beside it."""
    kept = book()
    stored = {0: 100, 1: 101, 2: 102, 3: 103}
    kept.check_stored("alpha", stored, 0)
    kept.check_stored("alpha", {2: 102, 3: 103}, 2)
    for wrong in ({0: 100, 1: 101, 2: 102}, stored | {4: 103}, stored | {4: 999}):
        with pytest.raises(Broken):
            kept.check_stored("alpha", wrong, 0)
    kept.offer(104)
    kept.refused.add(104)
    with pytest.raises(Broken, match="were refused"):
        kept.check_stored("alpha", stored | {4: 104}, 0)


def test_in_the_end_a_group_has_had_everything() -> None:
    """Or has given it up."""
    with pytest.raises(Broken, match=r"never given \[2, 3\]"):
        book().check_delivered(KEY, 4, ())
    book().check_delivered(KEY, 4, {2, 3})
