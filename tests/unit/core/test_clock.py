"""Times are exact, and their text order is their time order."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.clock import SYSTEM_CLOCK, Clock, SystemClock, datetime_of, format_utc, ns_of

NS_MAX = ns_of(datetime(2262, 1, 1, tzinfo=UTC)) - 1
MOMENTS = st.integers(0, NS_MAX)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, b"1970-01-01T00:00:00.000000Z"),
        (999, b"1970-01-01T00:00:00.000000Z"),
        (1_000, b"1970-01-01T00:00:00.000001Z"),
        (999_999_999, b"1970-01-01T00:00:00.999999Z"),
        (1_000_000_000, b"1970-01-01T00:00:01.000000Z"),
        (1_767_225_599_999_999_999, b"2025-12-31T23:59:59.999999Z"),
        (1_767_225_600_000_000_000, b"2026-01-01T00:00:00.000000Z"),
        (1_709_164_800_000_000_000, b"2024-02-29T00:00:00.000000Z"),
        (NS_MAX, b"2261-12-31T23:59:59.999999Z"),
    ],
)
def test_a_moment_is_told_in_utc_with_six_decimals(ns: int, text: bytes) -> None:
    """At the borders of microsecond, second, day, year and range."""
    assert format_utc(ns) == text


@given(MOMENTS, MOMENTS)
def test_text_order_is_time_order(one: int, other: int) -> None:
    """Of two moments the earlier never has the later text, in whichever order they are told."""
    texts = format_utc(one), format_utc(other)

    assert (texts[0] < texts[1]) == (one // 1000 < other // 1000)
    assert (texts[0] == texts[1]) == (one // 1000 == other // 1000)


@given(MOMENTS)
def test_text_and_datetime_agree(ns: int) -> None:
    """The text of a moment reads back as the datetime of the moment."""
    assert datetime.fromisoformat(format_utc(ns).decode()) == datetime_of(ns)


@given(MOMENTS)
def test_datetimes_and_nanoseconds_turn_into_each_other(ns: int) -> None:
    """Exactly, but for what is below a microsecond, which is cut and never rounded up."""
    assert ns_of(datetime_of(ns)) == ns // 1000 * 1000
    assert datetime_of(ns).tzinfo is UTC


@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=9)), timezone(timedelta(hours=-7))])))
def test_a_zone_does_not_change_the_moment(moment: datetime) -> None:
    """The same moment told in another zone is the same number; before 1970 it is negative."""
    if 1 < moment.year < 9999:  # at the very ends of the calendar another zone has no date for it
        assert ns_of(moment) == ns_of(moment.astimezone(UTC))
    assert (ns_of(moment) < 0) == (moment < datetime(1970, 1, 1, tzinfo=UTC))


def test_a_datetime_without_a_zone_has_no_moment() -> None:
    """It is refused, not taken for UTC or for local time."""
    with pytest.raises(TypeError):
        ns_of(datetime(2026, 1, 1))  # noqa: DTZ001 - meant


async def test_the_system_clock_is_a_clock() -> None:
    """It tells wall time and a time that never goes back, and sleeps."""
    clock: Clock = SYSTEM_CLOCK
    before_ns, before = clock.now_ns(), clock.monotonic()

    await clock.sleep(0)

    assert isinstance(clock, SystemClock)
    assert clock.monotonic() >= before
    assert abs(clock.now_ns() - before_ns) < 60 * 1_000_000_000
    assert re.fullmatch(rb"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", format_utc(clock.now_ns()))
