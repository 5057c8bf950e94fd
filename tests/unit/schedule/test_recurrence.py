"""When something that recurs comes next, in every zone and around every change of the clocks."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidings.schedule.errors import BadRecurrence
from tidings.schedule.recurrence import (
    Anchored,
    Calendar,
    Cron,
    Daily,
    Local,
    Monthly,
    Utc,
    Weekdays,
    Weekends,
    Weekly,
    Yearly,
    cron_of,
    machine_zone,
    next_in_series,
    next_moment,
    zone_of,
)

BERLIN = ZoneInfo("Europe/Berlin")
_ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/St_Johns",
    "America/Sao_Paulo",  # its gaps were at midnight
    "Australia/Lord_Howe",  # half an hour
    "Asia/Kathmandu",
    "Africa/Casablanca",
    "Pacific/Apia",  # had no 30 December 2011
)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def walk(rule: Calendar, clock: str | None, after: str, zone: ZoneInfo = BERLIN, count: int = 3) -> list[str]:
    """The next few occurrences as the zone's clocks show them."""
    found: list[str] = []
    moment: datetime | None = at(after)
    for _ in range(count):
        assert moment is not None
        moment = next_moment(cron_of(rule, clock), moment, zone)
        found.append("never" if moment is None else moment.astimezone(zone).isoformat())
    return found


@pytest.mark.req("H46")
@pytest.mark.parametrize(
    ("rule", "clock", "expected"),
    [
        (Daily(), "06:30", ["2026-01-02T06:30:00+01:00", "2026-01-03T06:30:00+01:00"]),  # a Friday and a Saturday
        (Daily(), "06:29:59", ["2026-01-03T06:29:59+01:00"]),
        (Weekdays(), "06:30", ["2026-01-02T06:30:00+01:00", "2026-01-05T06:30:00+01:00"]),
        (Weekends(), "06:30", ["2026-01-03T06:30:00+01:00", "2026-01-04T06:30:00+01:00", "2026-01-10T06:30:00+01:00"]),
        (Weekly(days=("tue", "sun")), "06:30", ["2026-01-04T06:30:00+01:00", "2026-01-06T06:30:00+01:00"]),
        (Monthly(day_of_month=31), "06:30", ["2026-01-31T06:30:00+01:00", "2026-03-31T06:30:00+02:00"]),
        (Yearly(month=2, day=29), "06:30", ["2028-02-29T06:30:00+01:00", "2032-02-29T06:30:00+01:00"]),
        (Cron(expr="*/20 6 * * *"), None, ["2026-01-02T06:40:00+01:00", "2026-01-03T06:00:00+01:00"]),
        (Cron(expr="0 0 * * 7"), None, ["2026-01-04T00:00:00+01:00", "2026-01-11T00:00:00+01:00"]),
        (Cron(expr="0 0 * * 0"), None, ["2026-01-04T00:00:00+01:00", "2026-01-11T00:00:00+01:00"]),
        (Cron(expr="0 12 * FEB mon-tue"), None, ["2026-02-02T12:00:00+01:00", "2026-02-03T12:00:00+01:00"]),
        (Cron(expr="0 0 * * Sat-Sun,wed"), None, ["2026-01-03T00:00:00+01:00", "2026-01-04T00:00:00+01:00"]),
        (Cron(expr="0 0 13 * fri"), None, ["2026-01-09T00:00:00+01:00", "2026-01-13T00:00:00+01:00"]),
    ],
)
def test_each_rule_names_its_days(rule: Calendar, clock: str | None, expected: list[str]) -> None:
    """
    Occurrences come strictly after the moment asked about, on the rule's days, at its time in its zone.
    """
    after = "2026-01-02T06:29:59+01:00"

    assert walk(rule, clock, after, count=len(expected)) == expected


@pytest.mark.req("H46")
@pytest.mark.parametrize(
    ("rule", "clock", "expected"),
    [
        # The clocks go from 02:00 to 03:00.
        (Daily(), "02:30", ["2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"]),
        (Cron(expr="*/30 1-3 * * *"), None, ["2026-03-29T01:00:00+01:00", "2026-03-29T01:30:00+01:00"]),
        (Cron(expr="15,45 2 * * *"), None, ["2026-03-29T03:00:00+02:00", "2026-03-30T02:15:00+02:00"]),
    ],
)
def test_a_time_that_the_clocks_skip(rule: Calendar, clock: str | None, expected: list[str]) -> None:
    """
    A missing local time fires once, at the first moment after the gap; the next day it is back at its own time.
    """
    assert walk(rule, clock, "2026-03-29T00:00:00+01:00", count=len(expected)) == expected


@pytest.mark.req("H46")
def test_a_time_that_the_clocks_show_twice() -> None:
    """
    An ambiguous local time fires at its first instance, and not again an hour later; asked between the two it is the next day's.
    """
    assert walk(Daily(), "02:30", "2026-10-25T00:00:00+02:00", count=2) == [
        "2026-10-25T02:30:00+02:00",
        "2026-10-26T02:30:00+01:00",
    ]
    assert walk(Daily(), "02:30", "2026-10-25T02:10:00+01:00", count=1) == ["2026-10-26T02:30:00+01:00"]


def test_dates_can_be_left_out() -> None:
    """
    A date that is left out is one in the zone, not in UTC.
    """
    tokyo = ZoneInfo("Asia/Tokyo")
    found = next_moment(cron_of(Daily(), "06:30"), at("2026-01-01T00:00:00Z"), tokyo, {date(2026, 1, 2)})

    assert found == at("2026-01-03T06:30:00+09:00")


def _first_moment(wall: datetime, zone: ZoneInfo) -> datetime:
    """The first moment at which the zone's clocks show the time or a later one: found by looking, by quarters and then by minutes."""
    moment = wall.replace(tzinfo=UTC) - timedelta(hours=15)
    for step in (timedelta(minutes=15), timedelta(minutes=1)):
        while moment.astimezone(zone).replace(tzinfo=None) < wall:
            moment += step
        if step > timedelta(minutes=1):
            moment -= step
    return moment


_near_changes = st.sampled_from(
    [
        ("Europe/Berlin", "2026-03-29"),
        ("Europe/Berlin", "2026-10-25"),
        ("America/New_York", "2026-11-01"),
        ("America/Sao_Paulo", "2018-11-04"),
        ("America/Sao_Paulo", "2018-02-18"),
        ("Australia/Lord_Howe", "2026-04-05"),
        ("Australia/Lord_Howe", "2026-10-04"),
        ("Pacific/Apia", "2011-12-30"),
    ]
)
_anywhere = st.tuples(st.sampled_from(_ZONES), st.dates(date(2005, 1, 1), date(2037, 12, 28)).map(date.isoformat))


@pytest.mark.req("H46")
@settings(max_examples=60)
@given(
    place=_near_changes | _anywhere,
    minute_of_day=st.integers(0, 24 * 60 - 1),
    asked_minutes=st.integers(-36 * 60, 36 * 60),
)
def test_every_day_has_one_occurrence(place: tuple[str, str], minute_of_day: int, asked_minutes: int) -> None:
    """
    Whatever zone, day and time: the next daily occurrence is the first of the days' moments that comes after the one asked about, and each
    day's is the first moment at which the clocks have reached the time.
    """
    zone, day = ZoneInfo(place[0]), date.fromisoformat(place[1])
    clock = time(minute_of_day // 60, minute_of_day % 60)
    asked = datetime.combine(day, time(), UTC) + timedelta(minutes=asked_minutes)
    days = [asked.date() + timedelta(days=days) for days in range(-2, 4)]

    expected = min(moment for each in days if (moment := _first_moment(datetime.combine(each, clock), zone)) > asked)

    assert next_moment(cron_of(Daily(), clock.isoformat("minutes")), asked, zone) == expected


_fields = st.tuples(
    st.sampled_from(["*", "0", "*/15", "7,37", "10-12"]),
    st.sampled_from(["*", "2", "*/6", "1-3", "23"]),
    st.sampled_from(["*", "1", "29", "*/10"]),
    st.sampled_from(["*", "3", "10-11"]),
    st.sampled_from(["*", "0", "7", "SUN", "1-5"]),
)


def _matches(fields: tuple[str, ...], wall: datetime) -> bool:
    minute, hour, day, month, weekday = (
        _values(field, low, high)
        for field, (low, high) in zip(fields, [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)], strict=True)
    )
    is_day, is_weekday = wall.day in day, bool({wall.isoweekday(), wall.isoweekday() % 7} & weekday)
    both = fields[2].startswith("*") or fields[4].startswith("*")
    return (
        wall.minute in minute
        and wall.hour in hour
        and wall.month in month
        and ((is_day and is_weekday) if both else (is_day or is_weekday))
    )


def _values(field: str, low: int, high: int) -> set[int]:
    if field.startswith("*"):
        return set(range(low, high + 1, int(field[2:] or 1)))
    first, _, last = field.partition("-")
    return (
        set(range(int(first), int(last) + 1))
        if last
        else {0 if each == "SUN" else int(each) for each in field.split(",")}
    )


@pytest.mark.req("H46")
@settings(max_examples=40)
@given(fields=_fields, place=_near_changes, asked_minutes=st.integers(-24 * 60, 24 * 60))
def test_cron_names_the_minutes_that_its_fields_do(
    fields: tuple[str, ...], place: tuple[str, str], asked_minutes: int
) -> None:
    """
    The next moment of an expression is that of the first matching minute on the wall; looked for minute by minute over two days.
    """
    zone = ZoneInfo(place[0])
    asked = datetime.combine(date.fromisoformat(place[1]), time(), UTC) + timedelta(minutes=asked_minutes)
    start = asked.astimezone(zone).replace(tzinfo=None)
    walls = (start + timedelta(minutes=minutes) for minutes in range(-120, 48 * 60))
    expected = next(
        (moment for wall in walls if _matches(fields, wall) and (moment := _first_moment(wall, zone)) > asked),
        None,
    )

    found = next_moment(" ".join(fields), asked, zone)

    if expected is None:
        assert found is None or found - asked > timedelta(days=1)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("expression", "same"),
    [
        ("3-3/2 * * * *", "3 * * * *"),
        ("0,3-3/2,40 7-7/3 * * *", "0,3,40 7 * * *"),
        ("0 0 1-1/5 JAN-jan/2 *", "0 0 1 1 *"),
        ("0 0 * * mon-MON/2", "0 0 * * 1"),
        ("0 0 * * SUN-SUN/2", "0 0 * * 0"),
        ("13-3/2 * * * *", None),
        ("3-33/10 * * * *", "3,13,23,33 * * * *"),
    ],
)
def test_a_step_over_one_value_is_that_value(expression: str, same: str | None) -> None:
    """A range from a value to itself with a step names this value, and not all to the end of the field."""
    start = at("2026-01-01T00:00:00Z")
    if same is None:
        with pytest.raises(BadRecurrence):
            next_moment(cron_of(Cron(expr=expression), None), start, UTC)
        return
    moments = [start, start]
    for _ in range(6):
        moments = [
            next_moment(cron_of(Cron(expr=rule), None), moment, UTC) or start
            for rule, moment in zip((expression, same), moments, strict=True)
        ]
        assert moments[0] == moments[1] > start


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(-(10**6), 2 * 10**6))
def test_a_series_does_not_drift(start: int, interval: int, after: int) -> None:
    """
    The next of a series is its start and so many whole intervals, the first of these after the moment asked about.
    """
    found = next_in_series(start, interval, after)

    assert found > after
    assert (found - start) % interval == 0
    assert found == start or found - interval <= after


@pytest.mark.parametrize(
    ("rule", "clock", "field"),
    [
        (Daily(), None, "time"),
        (Daily(), "24:00", "time"),
        (Daily(), "6:30", "time"),
        (Daily(), "06:30:60", "time"),
        (Yearly(month=2, day=30), "06:30", "recurrence"),
        (Cron(expr="* * * *"), None, "recurrence.expr"),
        (Cron(expr="0 * * * * *"), None, "recurrence.expr"),
        (Cron(expr="61 * * * *"), None, "recurrence"),
        (Cron(expr="* * * * 8"), None, "recurrence"),
        (Cron(expr="1-sun * * * *"), None, "recurrence"),
        (Cron(expr="* * * FEBR *"), None, "recurrence"),
    ],
)
def test_what_names_no_time_is_refused(rule: Calendar, clock: str | None, field: str) -> None:
    """
    A rule that cannot be kept is refused, and the error names the part at fault.
    """
    with pytest.raises(BadRecurrence) as refused:
        next_moment(cron_of(rule, clock), at("2026-01-01T00:00:00Z"), UTC)

    assert refused.value.field == field


def test_zones_by_kind(tmp_path: Path) -> None:
    """
    A zone is UTC, the machine's, or one of the IANA database; a machine that has no zone is in UTC.
    """
    assert zone_of(Utc(), BERLIN) is UTC
    assert zone_of(Local(), BERLIN) is BERLIN
    assert zone_of(Anchored("Asia/Tokyo"), BERLIN) == ZoneInfo("Asia/Tokyo")
    with pytest.raises(BadRecurrence, match="Mars"):
        zone_of(Anchored("Mars/Base"), BERLIN)
    assert machine_zone(tmp_path / "none") is UTC
