"""The time index has each moment once a granularity, and lets go of what is past its life or erased."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.unit.cognition.jobs.temporal_support import SPACE, Events, context, rows_of, run, utc
from tidings.cognition.jobs.temporal_index import TEMPORAL_INDEX_JOBS
from tidings.core.errors import SettingsError
from tidings.core.events import Event

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]  # a JVM on a busy machine takes its time

INDEX, GC = TEMPORAL_INDEX_JOBS
NOW = utc("2025-09-06T14:30")
AT = utc("2025-09-05T07:08:09")


def one_moment(events: Events) -> None:
    space = "s:one"
    same = {"ts": AT.isoformat(), "tz": "Asia/Kolkata", "person_id": "ada", "space_id": space}
    events.memory(AT, event_id="by-id", tags=["x"], space_id=space)
    events.add("temporal", "HIPPO_ENCODE", NOW, {"event_id": "by-id", "tags": ["y"], **same}, space_id=space)
    events.memory(AT, event_id="by-trace", trace_id="t1", space_id=space)
    events.add("temporal", "HIPPO_ENCODE", NOW, {"event_id": "the-write", **same}, trace_id="t1", space_id=space)
    events.add("temporal", "TEMPORAL_INGEST", NOW, {"event_id": "alone", **same}, space_id=space)


def no_moments(events: Events) -> None:
    space = "s:none"
    events.add("hippo", "HIPPO_ENCODED", AT, {}, space_id=space)
    events.add("temporal", "TEMPORAL_PATTERNS", AT, {}, space_id=space)
    events.add("temporal", "TEMPORAL_RANGE_REQUEST", AT, {}, space_id=space)
    events.add("affect", "AFFECT_ANNOTATED", AT, {"event_id": "other"}, event_id="felt", space_id=space)


def reaching_out(events: Events) -> None:
    payload = {"event_id": "x", "space_id": "personal:other", "ts": AT.isoformat()}
    events.add("temporal", "HIPPO_ENCODE", AT, payload, space_id="s:reach")


def lives(events: Events) -> None:
    events.memory(NOW - timedelta(days=180), event_id="old")
    events.memory(NOW - timedelta(days=179), event_id="young")
    events.memory(AT, event_id="erased")
    events.memory(AT, event_id="elsewhere", space_id="personal:bob")
    events.memory(AT, event_id="by-ada", actor="ada")
    events.add("system", "TOMBSTONE_PROPAGATE", AT, {"object_type": "memory", "object_id": "erased", "space_id": SPACE})
    events.add("system", "TOMBSTONE_PROPAGATE", AT, {"object_type": "memory", "object_id": "elsewhere"})
    events.add("system", "TOMBSTONE_PROPAGATE", AT, {"object_type": "profile", "object_id": "ada"})
    events.add("system", "TOMBSTONE_PROPAGATE", AT, "{broken")
    events.add("system", "DSAR_EXPORT", AT, {"user_id": "eve", "request": "export"})
    events.memory(AT, event_id="ada-again", actor="ada")
    events.memory(AT, event_id="by-eve", actor="eve")


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> list[dict[str, Any]]:
    """The index of these scenarios, worked out in one run."""
    events = Events()
    for scenario in (one_moment, no_moments, reaching_out, lives):
        scenario(events)
    return index_of(spark, events)


def index_of(spark: SparkSession, events: Events, **settings: Any) -> list[dict[str, Any]]:
    built = run([INDEX], {"silver.events": events.frame(spark)}, context(NOW, **settings))
    return rows_of(built["gold.temporal_index"], "doc_id", "ts", "g")


def told(spark: SparkSession, events: Events) -> list[Event]:
    built = run([INDEX], {"silver.events": events.frame(spark)}, context(NOW))
    assert INDEX.summarise is not None
    return list(INDEX.summarise(built, context(NOW)))


@pytest.mark.req("T1")
def test_a_moment_has_one_row_a_granularity(spark: SparkSession) -> None:
    """One event is five rows, each in the bucket of its UTC time and its space; weeks are ISO weeks."""
    events = Events()
    events.memory(AT, event_id="a", tz="Europe/Berlin", tags=["tea"], actor='{"user_id":"ada"}')
    events.memory(utc("2024-12-30T00:00"), event_id="b")

    rows = index_of(spark, events, ttl_days=400)

    assert [(row["doc_id"], row["g"], row["time_bucket"]) for row in rows] == [
        ("a", "day", "2025-09-05|shared:home"),
        ("a", "hour", "2025-09-05-07|shared:home"),
        ("a", "minute", "2025-09-05-07-08|shared:home"),
        ("a", "month", "2025-09|shared:home"),
        ("a", "week", "2025-W36|shared:home"),
        ("b", "day", "2024-12-30|shared:home"),
        ("b", "hour", "2024-12-30-00|shared:home"),
        ("b", "minute", "2024-12-30-00-00|shared:home"),
        ("b", "month", "2024-12|shared:home"),
        ("b", "week", "2025-W01|shared:home"),
    ]
    assert rows[0]["attributes"] == {"tz": "Europe/Berlin", "person_id": "ada", "tags": ["tea"]}
    assert rows[0]["ts"] == AT
    assert len({row["hash"] for row in rows}) == 10


@pytest.mark.req("T1", "F121")
def test_memory_and_time_of_one_event_are_one_moment(rows: list[dict[str, Any]]) -> None:
    """
    What topic temporal says of a memory joins it, by the id it names or, as the write handler tells it, by the trace; zone,
    person and tags reach the index.
    """
    hours = [row for row in rows if row["g"] == "hour" and row["space_id"] == "s:one"]

    assert [(row["doc_id"], row["ts"], row["attributes"]["tz"]) for row in hours] == [
        ("alone", AT, "Asia/Kolkata"),
        ("by-id", AT, "Asia/Kolkata"),
        ("by-trace", AT, "Asia/Kolkata"),
    ]
    assert hours[1]["attributes"] == {"tz": "Asia/Kolkata", "person_id": "ada", "tags": ["x", "y"]}


@pytest.mark.heavy
@pytest.mark.req("T1")
def test_running_again_tells_nothing_new_and_another_event_does(spark: SparkSession) -> None:
    """
    An event delivered twice is one moment; a second run, with the first one's summary in the log, tells the same ids. The
    summary's digest, and with it the event's id, follow from the rows.
    """
    events = Events()
    events.memory(AT, event_id="a")
    events.memory(AT, event_id="a")
    first = told(spark, events)
    for each in first:
        events.add("temporal", str(each.meta.type), NOW, each.payload, event_id=each.meta.event_id)

    again = told(spark, events)

    events.memory(AT, event_id="b")
    changed = told(spark, events)

    assert [each.meta.event_id for each in first] == [each.meta.event_id for each in again]
    assert {(each.meta.topic, each.meta.type) for each in first} == {("temporal", "TEMPORAL_INDEX_BUILT")}
    hourly = next(each.payload for each in first if each.payload["g"] == "hour")
    assert (hourly["written"], len(first)) == (1, 5)
    assert {each.meta.event_id for each in first}.isdisjoint(each.meta.event_id for each in changed)
    assert hourly["window"] == {"from": "2025-09-05T07:08:09.000000Z", "to": "2025-09-05T07:08:09.000000Z"}
    assert len(hourly["hashes"]) == 1


def test_odd_payloads_cost_themselves_only(spark: SparkSession) -> None:
    """Broken JSON, no payload, times without a day or outside the log's years: the event's own time and zone stand in."""
    events = Events()
    events.add("hippo", "HIPPO_ENCODE", AT, "{broken", event_id="broken")
    events.add("hippo", "HIPPO_ENCODE", AT, None, event_id="sealed", is_sealed=True)
    events.add("hippo", "HIPPO_ENCODE", AT, {"occurred_at": "soon", "tags": "none"}, event_id="words")
    for name, said in (("dayless", "10:15:00"), ("dayless T", "T10:15Z"), ("year", "2025"), ("month", "2025-03")):
        events.add("hippo", "HIPPO_ENCODE", AT, {"occurred_at": said}, event_id=name)
    events.add("temporal", "HIPPO_ENCODE", AT, {"ts": "10:15"}, event_id="dayless ts")
    events.add("hippo", "HIPPO_ENCODE", AT, {"occurred_at": "2025-09-05"}, event_id="day")
    events.add("hippo", "HIPPO_ENCODE", AT, {"occurred_at": "9999-01-01T00:00:00Z"}, event_id="far")
    events.add("hippo", "HIPPO_ENCODE", AT, {"occurred_at": "2025-09-05T09:08:09+02:00"}, event_id="offset")
    events.add("hippo", "HIPPO_ENCODE", AT, {}, event_id="device", device='{"tz":"Asia/Tokyo"}')
    events.add("temporal", "HIPPO_ENCODE", AT, [], event_id="list")  # type: ignore[arg-type]

    hours = {row["doc_id"]: row for row in index_of(spark, events, tz_default="Europe/Rome") if row["g"] == "hour"}

    assert hours.pop("day")["ts"] == utc("2025-09-05T00:00")
    dayless = ["dayless", "dayless T", "dayless ts", "year", "month"]
    assert {name: row["ts"] for name, row in hours.items()} == dict.fromkeys(
        ["broken", "sealed", "words", "far", "offset", "device", "list", *dayless], AT
    )
    assert hours["broken"]["attributes"]["tz"] == "Europe/Rome"
    assert hours["offset"]["attributes"]["tz"] == "+02:00"
    assert hours["device"]["attributes"]["tz"] == "Asia/Tokyo"


def test_only_moments_are_indexed(spark: SparkSession, rows: list[dict[str, Any]]) -> None:
    """Other topics, other types of topic hippo and the jobs' own summaries are not moments, unless a setting names the topic."""
    events = Events()
    no_moments(events)

    assert [row for row in rows if row["space_id"] == "s:none"] == []
    assert {row["doc_id"] for row in index_of(spark, events, topics=["affect"])} == {"felt"}


def test_a_payload_cannot_reach_into_another_space(rows: list[dict[str, Any]]) -> None:
    """The space is the one that the record was committed in."""
    assert {row["space_id"] for row in rows if row["doc_id"] == "x"} == {"s:reach"}
    assert all(row["space_id"] != "personal:other" for row in rows)


@pytest.mark.req("T6")
def test_what_is_past_its_life_or_erased_is_not_in_the_index(rows: list[dict[str, Any]]) -> None:
    """
    A build leaves out what is older than 180 days and what a tombstone names: an object by its id, a person for what came
    before, each in its own space only.
    """
    found = {row["doc_id"] for row in rows if row["space_id"] in (SPACE, "personal:bob")}
    assert found == {"young", "elsewhere", "ada-again", "by-eve"}


@pytest.mark.heavy
@pytest.mark.req("T6")
def test_collection_names_what_went_and_what_is_still_there(spark: SparkSession) -> None:
    """Against an index built before, rows past their life or erased are listed with the reason; the next build is without them."""
    events = Events()
    events.memory(NOW - timedelta(days=179), event_id="old")
    events.memory(AT, event_id="erased")
    events.memory(AT, event_id="stays")
    before = run([INDEX], {"silver.events": events.frame(spark)}, context(NOW))["gold.temporal_index"]
    stone = events.add("system", "TOMBSTONE_PROPAGATE", NOW, {"object_id": "erased", "issued_at": NOW.isoformat()})
    later = context(NOW + timedelta(days=2))
    known = {"silver.events": events.frame(spark), "gold.temporal_index": before}

    stale = rows_of(run([GC], known, later)["gold.temporal_deletions"], "doc_id", "g")
    fresh = run([INDEX, GC], {"silver.events": events.frame(spark)}, later)

    assert [(row["doc_id"], row["reason"], row["erased_by"], row["gone_at"], row["is_in_index"]) for row in stale] == [
        *[("erased", "erased", stone, NOW, True)] * 5,
        *[("old", "expired", None, NOW + timedelta(days=1), True)] * 5,
    ]
    assert {row["doc_id"] for row in rows_of(fresh["gold.temporal_index"])} == {"stays"}
    assert {row["is_in_index"] for row in rows_of(fresh["gold.temporal_deletions"])} == {False}


@pytest.mark.heavy
@pytest.mark.req("T6")
def test_the_list_of_deletions_does_not_grow_for_ever(spark: SparkSession) -> None:
    """What went more than ``deletions_days`` ago, and is not in the index, is no longer listed."""
    events = Events()
    events.memory(NOW - timedelta(days=300), event_id="long-gone")
    events.memory(NOW - timedelta(days=200), event_id="gone")

    built = run([INDEX, GC], {"silver.events": events.frame(spark)}, context(NOW))

    assert {row["doc_id"] for row in rows_of(built["gold.temporal_deletions"])} == {"gone"}


@pytest.mark.parametrize("settings", [{"ttl_days": "long"}, {"ttl_days": 0}, {"topics": "hippo"}])
def test_a_setting_that_cannot_be_is_refused(spark: SparkSession, settings: dict[str, Any]) -> None:
    """A job's setting of another type or out of range is named, and nothing is built."""
    (name,) = settings

    with pytest.raises(SettingsError, match=name):
        index_of(spark, Events(), **settings)
