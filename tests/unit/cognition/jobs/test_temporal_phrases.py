"""A phrase means the range that people at that place mean by it."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cognition.jobs.temporal_support import utc
from tidings.cognition.jobs.temporal_candidates import ranges_of

CHICAGO = ZoneInfo("America/Chicago")
BERLIN = ZoneInfo("Europe/Berlin")
NOW = utc("2025-09-06T14:30")  # a Saturday; 09:30 in Chicago, 16:30 in Berlin


@pytest.mark.req("T5")
def test_yesterday_morning_in_chicago() -> None:
    """The fact sheet's check value: five to noon of the day before, on Chicago's clocks."""
    assert ranges_of("yesterday morning", NOW, CHICAGO) == ((utc("2025-09-05T10:00"), utc("2025-09-05T17:00")),)


@pytest.mark.parametrize(
    ("phrase", "start", "end"),
    [
        ("today", "2025-09-05T22:00", "2025-09-06T22:00"),
        ("Yesterday", "2025-09-04T22:00", "2025-09-05T22:00"),
        ("last  night", "2025-09-05T20:00", "2025-09-06T03:00"),
        ("this morning", "2025-09-06T03:00", "2025-09-06T10:00"),
        ("this afternoon", "2025-09-06T10:00", "2025-09-06T15:00"),
        ("this evening", "2025-09-06T15:00", "2025-09-06T20:00"),
        ("monday evening", "2025-09-01T15:00", "2025-09-01T20:00"),
        ("saturday morning", "2025-08-30T03:00", "2025-08-30T10:00"),
        ("this week", "2025-08-31T22:00", "2025-09-07T22:00"),
        ("last week", "2025-08-24T22:00", "2025-08-31T22:00"),
        ("this month", "2025-08-31T22:00", "2025-09-30T22:00"),
        ("last month", "2025-07-31T22:00", "2025-08-31T22:00"),
        ("3 days ago", "2025-09-03T14:30", "2025-09-06T14:30"),
        ("a week ago", "2025-08-30T14:30", "2025-09-06T14:30"),
        ("6 months ago", "2025-03-06T15:30", "2025-09-06T14:30"),
        ("last friday", "2025-09-04T22:00", "2025-09-05T22:00"),
        ("last saturday", "2025-08-29T22:00", "2025-08-30T22:00"),
        ("next saturday", "2025-09-12T22:00", "2025-09-13T22:00"),
        ("next monday", "2025-09-07T22:00", "2025-09-08T22:00"),
    ],
)
def test_what_is_meant_in_berlin(phrase: str, start: str, end: str) -> None:
    """Days, weeks, months, parts of days, spans that end now, and weekdays, on Berlin's clocks."""
    assert ranges_of(phrase, NOW, BERLIN) == ((utc(start), utc(end)),)


def test_weekends_are_several_ranges() -> None:
    """Two weekends are two ranges, earliest first; the one that is on is not over and does not count."""
    assert ranges_of("last 2 weekends", NOW, UTC) == (
        (utc("2025-08-23"), utc("2025-08-25")),
        (utc("2025-08-30"), utc("2025-09-01")),
    )


@pytest.mark.parametrize(
    ("now", "hours"),
    [("2025-03-30T12:00", 23), ("2025-10-26T12:00", 25), ("2025-06-01T12:00", 24)],
)
def test_a_day_over_a_change_of_clocks_has_its_own_length(now: str, hours: int) -> None:
    """Berlin's last Sunday of March has 23 hours, that of October 25."""
    ((start, end),) = ranges_of("today", utc(now), BERLIN)

    assert end - start == timedelta(hours=hours)


def test_a_time_that_clocks_skip_is_the_moment_of_the_change() -> None:
    """A span that would begin at 02:30 on the day Berlin skips that hour begins at 03:00, which is 01:00 UTC."""
    assert ranges_of("1 day ago", utc("2025-03-31T00:30"), BERLIN) == (
        (utc("2025-03-30T01:00"), utc("2025-03-31T00:30")),
    )


def test_a_month_back_from_its_last_day() -> None:
    """A month before 31 March is 28 February."""
    assert ranges_of("1 month ago", utc("2025-03-31T12:00"), UTC) == (
        (utc("2025-02-28T12:00"), utc("2025-03-31T12:00")),
    )


@pytest.mark.parametrize("phrase", ["", "soon", "last morning", "yesterday's", "1 year ago", "9999999 days ago"])
def test_what_means_nothing_has_no_range(phrase: str) -> None:
    """A phrase that is not known gives no range, and no guess."""
    assert ranges_of(phrase, NOW, BERLIN) == ()


def test_before_the_calendar_there_is_nothing() -> None:
    """A span that would begin before the year 1 has no range."""
    assert ranges_of("9999 months ago", utc("0700-01-01T00:00"), UTC) == ()


@given(
    st.integers(0, 70 * 365 * 86_400).map(lambda seconds: utc("1990-01-01") + timedelta(seconds=seconds)),
    st.sampled_from(["Europe/Berlin", "America/Chicago", "Asia/Kolkata", "Australia/Lord_Howe", "America/Sao_Paulo"]),
    st.sampled_from(["today", "yesterday", "last week", "this month", "last night", "last 3 weekends", "2 weeks ago"]),
)
def test_ranges_are_never_empty_and_follow_each_other(now: datetime, zone: str, phrase: str) -> None:
    """Whatever the zone and the day, ranges have a length and do not overlap."""
    found = ranges_of(phrase, now, ZoneInfo(zone))

    assert found
    assert all(each.start < each.end for each in found)
    assert all(one.end <= other.start for one, other in itertools.pairwise(found))
