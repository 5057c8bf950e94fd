"""Ranges are merged, widened and cut so that nothing that lies in them is ever missed."""

from __future__ import annotations

import itertools
from datetime import UTC, date, datetime

import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.pipeline.gold_plan import gaps, may_hold_any, merged, widened
from tidings.pipeline.storage import Storage
from tidings.pipeline.table_files import DataFile

RANGES = st.lists(st.tuples(st.integers(-500, 500), st.integers(0, 60)).map(lambda each: (each[0], sum(each))))


def covered(ranges: tuple[tuple[int, int], ...]) -> set[int]:
    return {place for low, high in ranges for place in range(low, high)}


@given(RANGES, st.integers(1, 4))
def test_joined_stretches_cover_the_same_and_no_more_than_closing_gaps_takes(
    ranges: list[tuple[int, int]], count_max: int
) -> None:
    """In order and apart; the same places while there is room for all; never fewer places, never more ranges than asked."""
    every, few = merged(ranges, 1_000), merged(ranges, count_max)

    assert covered(every) == covered(tuple(ranges))
    assert all(one[1] < other[0] for one, other in itertools.pairwise(every))
    assert len(few) <= count_max
    assert covered(few) >= covered(every)
    if len(every) <= count_max:
        assert few == every


@given(RANGES, st.integers(1, 50), st.integers(0, 40), st.integers(0, 40))
def test_widened_stretches_are_whole_pieces_around_all_that_is_reached(
    ranges: list[tuple[int, int]], length: int, before: int, after: int
) -> None:
    """Every place within reach of a range_ is covered, by whole pieces."""
    found = widened(ranges, length, before=before, after=after)

    assert all(low % length == 0 and high % length == 0 for low, high in found)
    reached = {place for low, high in ranges if low < high for place in range(low - before, high + after)}
    assert covered(found) >= reached


@given(RANGES, st.lists(st.one_of(st.none(), st.integers(-600, 600))), st.sampled_from(["bigint", "timestamp"]))
def test_each_row_is_in_a_stretch_or_in_the_gap_before_the_next(
    ranges: list[tuple[int, int]], places: list[int | None], kind: str
) -> None:
    """A row in a range_ has -1, any other the number of ranges before it; a row without a place is in the first gap."""
    kept = merged(ranges)
    values = pa.array(places, pa.int64())
    if kind == "timestamp":
        micros = [None if place is None else place * 1_000_000 + 999_999 for place in places]
        values = pa.array(micros, pa.int64()).cast(pa.timestamp("us", tz="UTC"))

    found = gaps(values, kind, kept).tolist()

    for place, gap in zip(places, found, strict=True):
        if place is None:
            assert gap == 0
        elif any(low <= place < high for low, high in kept):
            assert gap == -1
        else:
            assert gap == sum(high <= place for _, high in kept)


@pytest.mark.parametrize(
    ("least", "most", "range_", "may"),
    [
        (datetime(1970, 1, 1, 1, tzinfo=UTC), datetime(1970, 1, 1, 2, tzinfo=UTC), (0, 3600), False),
        (datetime(1970, 1, 1, 1, tzinfo=UTC), datetime(1970, 1, 1, 2, tzinfo=UTC), (7200, 7201), True),
        (datetime(1970, 1, 1, 1), datetime(1970, 1, 1, 2), (3500, 3601), True),  # noqa: DTZ001 as a table's log has it
        (date(1970, 1, 2), date(1970, 1, 2), (0, 86_400), False),
        (date(1970, 1, 2), date(1970, 1, 2), (172_799, 172_800), True),
        (None, None, (5, 6), True),
        (7, 9, (10, 20), True),
        (7, 9, (11, 20), False),
    ],
)
def test_a_file_is_passed_over_only_if_its_bounds_rule_it_out(
    least: object, most: object, range_: tuple[int, int], may: bool
) -> None:
    """Bounds may have lost a fraction, days last for a day, and unknown bounds rule nothing out."""
    file = DataFile(Storage.of("f"), "f", 1, 1, {"at": least}, {"at": most})

    assert may_hold_any(file, "at", (range_,)) is may
