"""Features, recency, patterns and candidates are those that can be worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from datetime import date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from tests.unit.cognition.jobs.temporal_support import Events, context, rows_of, run, utc
from tidings.cognition.jobs.temporal_candidates import TEMPORAL_CANDIDATES_JOBS
from tidings.cognition.jobs.temporal_features import TEMPORAL_FEATURES_JOBS, TEMPORAL_PATTERNS_JOBS
from tidings.cognition.jobs.temporal_index import TEMPORAL_INDEX_JOBS
from tidings.core.errors import SettingsError
from tidings.core.events import Event

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]  # a JVM on a busy machine takes its time

NOW = utc("2025-09-06T14:30")
AT = context(NOW, ttl_days=30_000, half_life_h_by_space={"personal:bob": 12})
Built = dict[str, DataFrame]
INDEX = TEMPORAL_INDEX_JOBS[0]
FEATURES, RECENCY = TEMPORAL_FEATURES_JOBS
DAYS, PATTERNS = TEMPORAL_PATTERNS_JOBS
(CANDIDATES,) = TEMPORAL_CANDIDATES_JOBS


@pytest.fixture(scope="module")
def built(spark: SparkSession) -> dict[str, DataFrame]:
    """Every scenario below in a space of its own, worked out in one run."""
    events = Events()
    for scenario in (circles, walls, ages, mondays, regular, people, ranges, weekends, long_ago, answers):
        scenario(events)
    return run([INDEX, FEATURES, RECENCY, DAYS, PATTERNS, CANDIDATES], {"silver.events": events.frame(spark)}, AT)


def rows_in(frame: DataFrame, space: str, *order: str) -> list[dict[str, Any]]:
    """The rows of one space."""
    return rows_of(frame.where(frame["space_id"] == space), *order)


def by_id(frame: DataFrame, space: str) -> dict[str, dict[str, Any]]:
    return {row["event_id"]: row for row in rows_in(frame, space)}


def circles(events: Events) -> None:
    events.memory(utc("2025-09-05T06:00"), event_id="six", space_id="s:circles")  # a Friday
    events.memory(utc("2025-09-05T18:00"), event_id="eighteen", space_id="s:circles")
    events.memory(utc("2025-08-31T00:30:18"), event_id="sunday", space_id="s:circles")


@pytest.mark.req("T2")
def test_hours_and_weekdays_lie_on_circles(built: Built) -> None:
    """The fact sheet's check values: six is (1, 0), eighteen (-1, 0), Sunday (-0.7818, 0.6235)."""
    found = by_id(built["gold.temporal_features"], "s:circles")

    assert (found["six"]["hod"], found["six"]["dow"], found["six"]["is_weekend"]) == (6.0, 4, 0)
    assert (found["six"]["sin_tod"], found["six"]["cos_tod"]) == pytest.approx((1, 0))
    assert (found["eighteen"]["sin_tod"], found["eighteen"]["cos_tod"]) == pytest.approx((-1, 0))
    assert found["sunday"]["hod"] == pytest.approx(0.505)
    assert (found["sunday"]["dow"], found["sunday"]["is_weekend"], found["sunday"]["daypart"]) == (6, 1, "night")
    assert (found["sunday"]["sin_dow"], found["sunday"]["cos_dow"]) == pytest.approx((-0.7818, 0.6235), abs=5e-5)
    assert found["six"]["cells"] == pytest.approx([1, 0, 0, -1, -1, 0])  # periods of 24, 12 and 8 hours


def walls(events: Events) -> None:
    events.memory(utc("2025-07-06T22:30"), event_id="berlin", space_id="s:walls", tz="Europe/Berlin")
    events.memory(utc("2025-07-06T22:30"), event_id="kolkata", space_id="s:walls", tz="Asia/Kolkata")
    events.memory(utc("2025-07-06T22:30"), event_id="offset", space_id="s:walls", tz="-03:30")
    events.memory(utc("2025-07-06T22:30"), event_id="nowhere", space_id="s:walls", tz="Mars/Olympus")
    events.memory(utc("2025-03-30T00:59"), event_id="before", space_id="s:walls", tz="Europe/Berlin")
    events.memory(utc("2025-03-30T01:00"), event_id="after", space_id="s:walls", tz="Europe/Berlin")


@pytest.mark.req("T2")
def test_the_clock_is_the_one_on_the_wall(built: Built) -> None:
    """The same instant is another hour, and another day, elsewhere; summer time counts; an unknown zone is UTC and says so."""
    found = by_id(built["gold.temporal_features"], "s:walls")

    shown = {name: (row["local_date"], round(row["hod"], 4), row["dow"]) for name, row in found.items()}
    assert shown == {
        "berlin": (date(2025, 7, 7), 0.5, 0),
        "kolkata": (date(2025, 7, 7), 4.0, 0),
        "offset": (date(2025, 7, 6), 19.0, 6),
        "nowhere": (date(2025, 7, 6), 22.5, 6),
        "before": (date(2025, 3, 30), 1.9833, 6),
        "after": (date(2025, 3, 30), 3.0, 6),
    }
    assert {name for name, row in found.items() if not row["is_zone_known"]} == {"nowhere"}


def ages(events: Events) -> None:
    for hours in (24, 72, 168):
        events.memory(NOW - timedelta(hours=hours), event_id=f"h{hours}", space_id="s:ages")
    events.memory(NOW - timedelta(hours=24), event_id="quick", space_id="personal:bob")
    events.memory(NOW + timedelta(hours=1), event_id="ahead", space_id="s:ages")


@pytest.mark.req("T3")
def test_recency_halves_with_each_half_life(built: Built) -> None:
    """The fact sheet's check values for 72 hours; a space has its own half-life if one was learned for it."""
    found = by_id(built["gold.recency"], "s:ages") | by_id(built["gold.recency"], "personal:bob")

    assert {name: round(row["recency"], 4) for name, row in found.items()} == {
        "h24": 0.7937,
        "h72": 0.5,
        "h168": 0.1984,
        "quick": 0.25,
        "ahead": 1.0,  # the clock was behind the event
    }
    assert {name for name, row in found.items() if row["is_ahead"]} == {"ahead"}
    with pytest.raises(SettingsError, match="half_life_h_by_space"):
        RECENCY.build(built, context(NOW, half_life_h_by_space={"x": 0}))


MONDAY = utc("2025-08-04T08:00")
EVERY_HOUR = [MONDAY.replace(hour=0) + timedelta(hours=n) for n in range(14 * 24)]


def mondays(events: Events) -> None:
    for week in range(4):
        events.memory(MONDAY + timedelta(weeks=week), space_id="s:mondays")


def regular(events: Events) -> None:
    for each in EVERY_HOUR:
        events.memory(each, space_id="s:flat")
        if each.hour < 12:
            events.memory(each, space_id="s:half")


def people(events: Events) -> None:
    events.memory(MONDAY, person_id="ada", space_id="s:people")
    events.memory(MONDAY + timedelta(hours=1), person_id="bob", space_id="s:people")
    events.memory(MONDAY + timedelta(hours=1), space_id="s:people")


@pytest.mark.req("T4")
def test_mondays_only_for_four_weeks(built: Built) -> None:
    """The fact sheet's check values: one hour only is circadian 1, four Mondays are weekly 0.75, and both are suggested."""
    (space,) = rows_in(built["gold.temporal_patterns"], "s:mondays")

    assert space["scope"] == "space"
    assert (space["total"], space["hour_peak"], space["dow_peak"]) == (4, 8, 0)
    assert space["hour_hist"] == [4 if at == 8 else 0 for at in range(24)]
    assert space["dow_hist"] == [4, 0, 0, 0, 0, 0, 0]
    assert space["circadian_score"] == pytest.approx(1)
    assert space["weekly_periodicity"] == pytest.approx(0.75)
    assert space["suggestions"] == ["peak_hour:08", "peak_day:monday", "weekly_cycle"]


@pytest.mark.req("T4")
def test_what_does_not_recur(built: Built) -> None:
    """Every hour of every day alike: circadian 0, weekly 0 by definition, the lowest of equal peaks; twelve hours 0.2181."""
    (flat,) = rows_in(built["gold.temporal_patterns"], "s:flat")
    (half,) = rows_in(built["gold.temporal_patterns"], "s:half")

    assert (flat["circadian_score"], flat["weekly_periodicity"]) == (pytest.approx(0, abs=1e-12), 0)
    assert (flat["hour_peak"], flat["dow_peak"], flat["has_weekly_cycle"]) == (0, 0, False)
    assert flat["suggestions"] == ["peak_hour:00", "peak_day:monday"]
    assert half["circadian_score"] == pytest.approx(0.2181, abs=5e-5)


@pytest.mark.req("T4", "F122")
def test_patterns_are_told_of_each_space_and_person(built: Built) -> None:
    """Topic temporal hears one summary a space and one a person, as the prospective part reads it; again, the same ids."""
    assert PATTERNS.summarise is not None
    told, again = (
        [
            each
            for each in PATTERNS.summarise(built, context(NOW + timedelta(hours=n)))
            if each.meta.space_id == "s:people"
        ]
        for n in range(2)
    )

    assert [(each.payload["scope"], each.payload["person_id"], each.payload["total"]) for each in told] == [
        ("person", "ada", 1),
        ("person", "bob", 1),
        ("space", None, 3),
    ]
    assert {(each.meta.topic, each.meta.type, each.meta.space_id) for each in told} == {
        ("temporal", "TEMPORAL_PATTERNS", "s:people")
    }
    assert told[2].payload["hour_peak"] == 9
    assert told[2].payload["last_ts"] == "2025-08-04T09:00:00.000000Z"
    assert [each.meta.event_id for each in told] == [each.meta.event_id for each in again]


def circadian(hours: Counter[int]) -> float:
    total = hours.total()
    entropy = -sum(n / total * math.log(n / total) for n in hours.values())
    return 1 - entropy / math.log(24)


def weekly(days: Counter[date]) -> float:
    first = min(days) - timedelta(days=min(days).weekday())
    last = max(days) + timedelta(days=6 - max(days).weekday())
    series = [days[first + timedelta(days=n)] for n in range((last - first).days + 1)]
    mean = sum(series) / len(series)
    spread = sum((x - mean) ** 2 for x in series)
    pairs = zip(series, series[7:], strict=False)
    return abs(sum((x - mean) * (y - mean) for x, y in pairs)) / spread if spread > 1e-9 else 0.0


ZONES = ["UTC", "Europe/Berlin", "America/Chicago", "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Apia"]
INSTANTS = st.integers(0, 14 * 365 * 86_400).map(lambda seconds: utc("2011-11-01") + timedelta(seconds=seconds))
CLUSTERED = st.integers(0, 90 * 24).map(lambda hours: utc("2025-05-01T00:17") + timedelta(hours=hours))


@pytest.mark.req("T2", "T4")
@settings(max_examples=3)
@given(
    st.lists(
        st.tuples(st.one_of(CLUSTERED, INSTANTS), st.sampled_from(ZONES), st.sampled_from(["ada", "bob"])),
        min_size=1,
        max_size=60,
        unique_by=lambda each: each[0],
    )
)
@pytest.mark.heavy
def test_patterns_equal_a_plain_computation(spark: SparkSession, moments: list[tuple[datetime, str, str]]) -> None:
    """On random moments in several zones, Spark's histograms and scores are those that plain Python finds, zeros filled in."""
    events = Events()
    for at, tz, person_id in moments:
        events.memory(at, tz=tz, person_id=person_id)
    built = run(
        [INDEX, FEATURES, DAYS, PATTERNS], {"silver.events": events.frame(spark)}, context(NOW, ttl_days=30_000)
    )

    for row in rows_of(built["gold.temporal_patterns"]):
        theirs = [at.astimezone(ZoneInfo(tz)) for at, tz, person in moments if row["person_id"] in (None, person)]
        hours, days = Counter(each.hour for each in theirs), Counter(each.date() for each in theirs)
        assert row["hour_hist"] == [hours[at] for at in range(24)]
        assert row["dow_hist"] == [sum(n for day, n in days.items() if day.weekday() == at) for at in range(7)]
        assert row["circadian_score"] == pytest.approx(circadian(hours), abs=1e-9)
        assert row["weekly_periodicity"] == pytest.approx(weekly(days), abs=1e-9)


@pytest.fixture(scope="module")
def responses(built: dict[str, DataFrame]) -> list[Event]:
    """What is published of the candidates."""
    assert CANDIDATES.summarise is not None
    return list(CANDIDATES.summarise(built, AT))


def request(events: Events, space: str, **payload: Any) -> str:
    return events.add("temporal", "TEMPORAL_RANGE_REQUEST", NOW, payload, space_id=space)


def ranges(events: Events) -> None:
    for name, at in [
        ("early", "05T09:59"),
        ("first", "05T10:00"),
        ("mid", "05T13:00"),
        ("last", "05T16:59"),
        ("noon", "05T17:00"),
    ]:
        moment = utc(f"2025-09-{at}")
        events.memory(moment, event_id=name, tz="America/Chicago", person_id="ada", space_id="s:ranges")
    events.memory(utc("2025-09-05T13:00"), event_id="elsewhere", space_id="s:elsewhere")
    request(events, "s:ranges", request_id="r1", phrase="yesterday morning", tz="America/Chicago", k=2)


def weekends(events: Events) -> None:
    for name, person, at in (("ada", "ada", "10:00"), ("bob", "bob", "11:00"), ("ada-too", "ada", "10:30")):
        events.memory(utc(f"2025-08-30T{at}"), event_id=name, person_id=person, space_id="s:weekends")
    span = {"from": "2025-08-30T10:00:00Z", "to": "2025-08-30T11:00:00Z"}
    request(events, "s:weekends", request_id="span", **span)
    request(events, "s:weekends", request_id="weekends", phrase="last 2 weekends", person_id="ada")


def long_ago(events: Events) -> None:
    for name, days in (("older", 61), ("old", 60)):
        events.memory(NOW - timedelta(days=days), event_id=name, space_id="s:long-ago")
    span = [(NOW - timedelta(days=days)).isoformat() for days in (62, 59)]
    request(events, "s:long-ago", request_id="then", **{"from": span[0], "to": span[1]})


@pytest.mark.req("T5")
def test_a_range_of_long_ago_is_answered_with_its_recency(built: Built) -> None:
    """Moments that are past ten half-lives are not listed as recent; asked for they are found, each with its score, in order."""
    rows = rows_in(built["gold.temporal_candidates"], "s:long-ago", "rank")

    assert rows_in(built["gold.recency"], "s:long-ago") == []
    assert [(row["event_id"], row["recency"]) for row in rows] == [
        (name, pytest.approx(2 ** (-days * 24 / 72))) for name, days in (("old", 60), ("older", 61))
    ]


def answers(events: Events) -> None:
    space = "s:answers"
    request(events, space, request_id="none", phrase="today")
    request(events, space, request_id="what", phrase="some day", tz="Mars/Olympus")
    events.add("temporal", "TEMPORAL_RANGE_REQUEST", NOW, "{broken", event_id="broken", space_id=space)
    request(events, space, request_id="done", phrase="today")
    events.add("temporal", "TEMPORAL_RANGE_RESPONSE", NOW, {"request_id": "done"}, space_id=space)
    old = NOW - timedelta(days=2)
    events.add("temporal", "TEMPORAL_RANGE_REQUEST", old, {"phrase": "today"}, event_id="stale", space_id=space)


@pytest.mark.req("T5", "F122")
def test_candidates_are_the_most_recent_of_the_range(built: Built, responses: list[Event]) -> None:
    """Yesterday morning in Chicago: what lies in the range and the space, most recent first, cut to k, with reasons."""
    told = [each for each in responses if each.meta.space_id == "s:ranges"]
    rows = rows_in(built["gold.temporal_candidates"], "s:ranges", "rank")

    assert [(row["rank"], row["event_id"]) for row in rows] == [(1, "last"), (2, "mid")]
    assert rows[1]["recency"] == pytest.approx(2 ** (-25.5 / 72))
    assert rows[1]["features"] == {"hod": 8.0, "dow": 4, "is_weekend": 0, "daypart": "morning", "tz": "America/Chicago"}
    assert rows[1]["reason"] == ["in_range:yesterday morning", "age_h:25.5", "daypart:morning"]
    assert [(each.meta.topic, each.meta.type) for each in told] == [("temporal", "TEMPORAL_RANGE_RESPONSE")]
    assert [each["event_id"] for each in told[0].payload["candidates"]] == ["last", "mid"]
    assert told[0].payload["candidates"][0]["ts"] == "2025-09-05T16:59:00.000000Z"


@pytest.mark.req("T5")
def test_a_range_may_be_given_and_a_person_asked_for(built: Built) -> None:
    """From and to, the end excluded; a weekend is a reason; several ranges give an event once."""
    rows = rows_in(built["gold.temporal_candidates"], "s:weekends", "request_id", "rank")

    assert [(row["request_id"], row["event_id"]) for row in rows] == [
        ("span", "ada-too"),
        ("span", "ada"),
        ("weekends", "ada-too"),
        ("weekends", "ada"),
    ]
    assert "in_range:2025-08-30T10:00:00.000000Z/2025-08-30T11:00:00.000000Z" in rows[0]["reason"]
    assert all("weekend" in row["reason"] for row in rows)


@pytest.mark.req("T5")
def test_every_request_is_answered_once(responses: list[Event]) -> None:
    """One without candidates, and one that nobody understands, is answered too; one with an answer in the log is not told again."""
    told = [each for each in responses if each.meta.space_id == "s:answers"]

    assert [(each.payload["request_id"], each.payload["is_understood"]) for each in told] == [
        ("broken", False),
        ("none", True),
        ("what", False),
    ]
    assert all(each.payload["candidates"] == [] for each in told)
