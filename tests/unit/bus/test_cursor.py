"""A cursor is a set of offsets with a low-water mark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.bus.store import Cursor


def held(cursor: Cursor, end: int) -> set[int]:
    return {offset for offset in range(end) if offset in cursor}


@pytest.mark.req("F34", "F54")
@given(st.integers(-1, 5), st.lists(st.integers(0, 30)))
def test_it_holds_what_was_acknowledged_and_its_mark_never_goes_back(committed: int, offsets: list[int]) -> None:
    """In whatever order offsets come, the mark is the end of the contiguous stretch, and the rest is in ranges."""
    cursor = Cursor(committed)
    model = set(range(committed + 1))
    for offset in offsets:
        before = cursor.committed
        assert cursor.ack(offset) == (offset not in model)
        model.add(offset)
        assert cursor.committed >= before
        assert cursor.committed == next(n for n in range(40) if n not in model) - 1
    assert held(cursor, 40) == model
    assert cursor.highest == max(model, default=-1)
    assert cursor.early_count == len([offset for offset in model if offset > cursor.committed])
    ahead = [offset for first, last in cursor.ranges for offset in range(first, last + 1)]
    assert ahead == sorted(offset for offset in model if offset > cursor.committed)


@given(st.integers(-1, 5), st.lists(st.integers(0, 30)), st.integers(0, 30), st.integers(0, 10))
def test_skipping_is_acknowledging_a_whole_stretch(committed: int, offsets: list[int], first: int, more: int) -> None:
    """Passing over a gap comes to the same as acknowledging each of its offsets."""
    skipped, acked = Cursor(committed), Cursor(committed)
    for offset in offsets:
        skipped.ack(offset)
        acked.ack(offset)

    skipped.skip(first, first + more)
    for offset in range(first, first + more + 1):
        acked.ack(offset)

    assert (skipped.committed, skipped.ranges) == (acked.committed, acked.ranges)


@given(st.integers(-1, 5), st.lists(st.integers(0, 30)))
def test_it_comes_back_from_its_parts(committed: int, offsets: list[int]) -> None:
    """What is stored of a cursor makes the same cursor; a copy does not change with its original."""
    cursor = Cursor(committed)
    for offset in offsets:
        cursor.ack(offset)
    copy, again = cursor.copy(), Cursor(cursor.committed, cursor.ranges)
    expected = (cursor.committed, cursor.ranges)

    cursor.ack(35)

    assert (copy.committed, copy.ranges) == (again.committed, again.ranges) == expected
