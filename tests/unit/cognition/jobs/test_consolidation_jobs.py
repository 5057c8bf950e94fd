"""Keep scores, rollups, late data, retention and the scrub, against values worked out by hand."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.unit.cognition.jobs.temporal_support import SPACE, Events, context, rows_of, run, utc
from tidings.cognition.jobs.consolidation_duplicates import CONSOLIDATION_DUPLICATES_JOBS, CONSOLIDATION_KEEPING_JOBS
from tidings.cognition.jobs.consolidation_retention import (
    CONSOLIDATION_LATE_JOBS,
    CONSOLIDATION_RETENTION_JOBS,
    CONSOLIDATION_SCRUB_JOBS,
)
from tidings.cognition.jobs.consolidation_rollups import CONSOLIDATION_ROLLUPS_JOBS
from tidings.cognition.jobs.temporal_candidates import TEMPORAL_CANDIDATES_JOBS
from tidings.cognition.jobs.temporal_features import TEMPORAL_FEATURES_JOBS, TEMPORAL_PATTERNS_JOBS
from tidings.cognition.jobs.temporal_index import TEMPORAL_INDEX_JOBS
from tidings.core.errors import SettingsError
from tidings.core.events import Event
from tidings.pipeline.jobs.job import Job
from tidings.pipeline.schemas import SILVER_SEGMENTS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]  # a JVM on a busy machine takes its time

NOW = utc("2025-09-06T14:30")
INDEX = TEMPORAL_INDEX_JOBS[0]
FEATURES, RECENCY = TEMPORAL_FEATURES_JOBS
DAYS, PATTERNS = TEMPORAL_PATTERNS_JOBS
(CANDIDATES,) = TEMPORAL_CANDIDATES_JOBS
(DUPLICATES,) = CONSOLIDATION_DUPLICATES_JOBS
(KEEPING,) = CONSOLIDATION_KEEPING_JOBS
_, KEPT_DAYS, ROLLUPS = CONSOLIDATION_ROLLUPS_JOBS
LATE, STALE = CONSOLIDATION_LATE_JOBS
(RETENTION,) = CONSOLIDATION_RETENTION_JOBS
(SCRUB,) = CONSOLIDATION_SCRUB_JOBS
ALL = [INDEX, FEATURES, RECENCY, DAYS, PATTERNS, CANDIDATES, DUPLICATES, KEEPING, KEPT_DAYS, ROLLUPS]


def tell(job: Job, built: Any, at: datetime = NOW) -> list[Event]:
    assert job.summarise is not None
    return list(job.summarise(built, context(at)))


# C2

LONG_AGO = NOW - timedelta(days=400)
TEXT = "the washing machine in the cellar leaks again and the floor is wet, somebody should call the plumber"


@pytest.fixture(scope="module")
def events() -> Events:
    """Every memory below, in spaces of their own."""
    events = Events()
    scored_memories(events)
    summed_memories(events)
    memories_to_erase(events)
    return events


@pytest.fixture(scope="module")
def built(spark: SparkSession, events: Events) -> dict[str, DataFrame]:
    """The tables of these memories, worked out in one run."""
    return run(ALL, {"silver.events": events.frame(spark)}, context(NOW))


def scored_memories(events: Events) -> None:
    events.memory(NOW - timedelta(hours=72), "soccer was moved to six", event_id="hand", salience=0.8)
    events.add("affect", "AFFECT_ANNOTATED", NOW, {"event_id": "hand", "valence": 0.9, "arousal": 0.1})
    events.add("affect", "AFFECT_ANNOTATED", NOW, {"event_id": "hand", "valence": -0.6, "arousal": 0.1})
    events.add("retrieval", "RETRIEVAL_CLICK", NOW, {"query_id": "q", "doc_id": "hand", "position": 1})
    events.add("retrieval", "RECALL_RESULT", NOW, {"event_ids": ["hand", "hand", "x"]})
    events.memory(LONG_AGO, "dull", event_id="dull", salience=0.1)
    for band in ("GREEN", "AMBER", "RED", "BLACK", "purple"):
        events.memory(LONG_AGO, f"{band} thing", event_id=band, band=band, salience=0.1)
    events.add("hippo", "HIPPO_ENCODE", LONG_AGO, None, event_id="sealed", is_sealed=True)
    events.memory(NOW, TEXT + " yes", event_id="best", actor="ada")
    events.memory(NOW, TEXT, event_id="twin", actor="ada")
    events.memory(NOW, TEXT, event_id="red-twin", actor="ada", band="red")
    events.memory(NOW, "a", event_id="loud", salience=7)
    events.memory(NOW, "b", event_id="words", salience="very")
    events.memory(NOW, "c", event_id="gated")
    events.add("affect", "AFFECT_ANNOTATED", NOW, {"event_id": "loud", "valence": -9})
    events.add("affect", "AFFECT_ANNOTATED", NOW, {"event_id": "words", "valence": "NaN"})
    events.add("affect", "AFFECT_ANNOTATED", NOW, "{broken")
    events.add("gate", "cognitive.attention.gate.admit", NOW, {"content_id": "gated", "salience_score": 0.9})
    events.add("retrieval", "RECALL_RESULT", NOW, {"results": [{"event_id": "gated"}, {"event_id": "x"}]})
    events.add("retrieval", "RECALL_RESULT", NOW, {"event_ids": "gated"})
    events.memory(NOW, "d", event_id="recalled")
    for results in (
        [{"event_id": "recalled"}],
        [{"doc_id": "recalled"}],
        ["recalled", 7, {"event_id": "recalled"}],
        [],
    ):
        events.add("retrieval", "RECALL_RESULT", NOW, {"results": results})


@pytest.fixture(scope="module")
def scores(built: dict[str, DataFrame]) -> dict[str, dict[str, Any]]:
    """The scores of the memories of the first space."""
    return {row["event_id"]: row for row in rows_of(built["gold.keep_scores"]) if row["space_id"] == SPACE}


@pytest.mark.req("C2")
def test_a_keep_score_by_hand(scores: dict[str, dict[str, Any]]) -> None:
    """72 hours old, salience 0.8, used twice of five, valence -0.6: 0.175 + 0.28 + 0.08 + 0.04 = 0.575."""
    found = scores["hand"]

    assert found["recency"] == pytest.approx(0.5)
    assert (found["salience"], found["used_count"], found["usage"], found["valence"]) == (0.8, 2, 0.4, -0.6)
    assert found["score"] == pytest.approx(0.575)
    assert (found["decision"], found["reason"]) == ("keep", "score at least 0.25")


@pytest.mark.req("C2")
def test_a_recall_with_one_result_is_a_use(scores: dict[str, dict[str, Any]]) -> None:
    """
    Each recall uses what it lists, however few: one result by event or document, one among two that name nothing, and none.
    """
    assert scores["recalled"]["used_count"] == 3
    assert scores["gated"]["used_count"] == 1


@pytest.mark.req("C2")
def test_what_becomes_of_each(scores: dict[str, dict[str, Any]]) -> None:
    """
    Old and dull is discarded; RED, BLACK and a band that nobody knows are protected whatever the score, and so is what is
    sealed; a twin is merged, but a RED twin is not.
    """
    assert {name: row["decision"] for name, row in scores.items()} == {
        "hand": "keep",
        "dull": "discard",
        "GREEN": "discard",
        "AMBER": "discard",
        "RED": "protect",
        "BLACK": "protect",
        "purple": "protect",
        "sealed": "protect",
        "best": "keep",
        "twin": "merge",
        "red-twin": "protect",
        "loud": "keep",
        "words": "keep",
        "gated": "keep",
        "recalled": "keep",
    }
    assert scores["dull"]["score"] == pytest.approx(0.35 * 0.1 + 0.1, abs=1e-3)
    assert scores["twin"]["kept_event_id"] == "best"
    assert scores["RED"]["reason"] == "band RED"
    assert scores["sealed"]["reason"] == "sealed"


@pytest.mark.req("C2")
def test_odd_evidence_is_held_within_bounds(scores: dict[str, dict[str, Any]]) -> None:
    """Salience and valence out of range are cut, words for numbers are no evidence, and the gate's salience fills a gap."""
    assert (scores["loud"]["salience"], scores["loud"]["valence"]) == (1.0, -1.0)
    assert (scores["words"]["salience"], scores["words"]["valence"]) == (0.5, 0.0)
    assert (scores["gated"]["salience"], scores["gated"]["used_count"]) == (0.9, 1)


# C3


def summed_memories(events: Events) -> None:
    at = utc("2025-09-03T08:00")
    events.memory(at, "Ada fixed the boiler. It is warm again.", event_id="a", salience=0.9, space_id="s:two")
    bread = utc("2025-09-03T20:00")
    events.memory(bread, "Bob baked bread with rye.", event_id="b", salience=0.2, space_id="s:two")
    for n in range(60):
        text = f"Number{n} went to place{n} with thing{n} and came home{n} by bus{n}."
        events.memory(at + timedelta(minutes=n), text, space_id="s:busy")
    events.memory(at, "The secret is hidden.", event_id="red", band="RED", space_id="s:busy")
    events.add("hippo", "HIPPO_ENCODE", at, None, is_sealed=True, space_id="s:sealed")


@pytest.fixture(scope="module")
def summed(built: dict[str, DataFrame]) -> dict[tuple[str, str], dict[str, Any]]:
    """The rollups of three spaces, by space and period."""
    return {(row["space_id"], row["period"]): row for row in rows_of(built["gold.rollups"])}


@pytest.mark.req("C3")
def test_days_weeks_and_months_are_summed_up(summed: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Two memories of one day make a day, a week and a month, with what was said, where it is from and what it saves."""
    rows = {period: row for (space, period), row in summed.items() if space == "s:two"}

    assert {name: (row["from_ts"], row["to_ts"], row["is_closed"]) for name, row in rows.items()} == {
        "day": (utc("2025-09-03"), utc("2025-09-04"), True),
        "week": (utc("2025-09-01"), utc("2025-09-08"), False),
        "month": (utc("2025-09-01"), utc("2025-10-01"), False),
    }
    day = rows["day"]
    assert day["summary"] == "Ada fixed the boiler. It is warm again. Bob baked bread with rye."
    assert (day["coverage"], day["event_count"], day["withheld_count"], day["token_count"]) == (1.0, 2, 0, 16)
    assert day["features"]["token_cost_saved"] == 0
    assert day["features"]["circadian"] == pytest.approx(0.7819, abs=5e-5)  # two hours alike: 1 - ln 2 / ln 24
    assert day["features"]["weekly"] == 0
    assert day["provenance"] == {"event_ids": ["a", "b"], "version": 1}
    assert (day["version"], day["action"], day["is_told"]) == (1, "CREATE", False)
    assert {each["event_id"] for each in day["highlights"]} == {"a", "b"}


@pytest.mark.req("C3")
def test_summaries_keep_to_their_budget_and_quote_nothing_guarded(
    summed: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """
    A day has 400 tokens; RED memories count and are named in the provenance, and none of their words is told; what nobody
    can read makes a rollup without words.
    """
    day, sealed = summed["s:busy", "day"], summed["s:sealed", "day"]

    assert 380 <= day["token_count"] <= 400
    assert (day["event_count"], day["withheld_count"]) == (61, 1)
    assert "red" in day["provenance"]["event_ids"]
    assert "secret" not in day["summary"]
    assert day["features"]["token_cost_saved"] == 60 * 12 - day["token_count"]
    assert (sealed["summary"], sealed["event_count"], sealed["withheld_count"]) == ("", 1, 1)


def of_kept(spark: SparkSession, events: Events, **settings: Any) -> dict[str, DataFrame]:
    """The rollups if every memory was kept: the jobs before do not run."""
    scored = [
        (row[5], row[3], row[2], row[6], None, 1.0, 0.5, 0.0, 0, 0.0, 0.5, "keep", "", None, row[6].date())
        for row in events.rows
        if row[0] == "hippo"
    ]
    tables = {
        "silver.events": events.frame(spark),
        "gold.keep_scores": spark.createDataFrame(scored, KEEPING.writes[0].schema),
        "gold.temporal_features": spark.createDataFrame([], FEATURES.writes[0].schema),
    }
    return run([KEPT_DAYS, ROLLUPS], tables, context(NOW, **settings))


@pytest.mark.heavy
@pytest.mark.req("C3")
def test_a_period_is_the_calendars_at_the_place(spark: SparkSession) -> None:
    """In Berlin half past ten in the evening UTC is the next day; the day of the change to summer time has 23 hours."""
    events = Events()
    events.memory(utc("2025-03-29T23:30"), "Clocks change tonight.", event_id="a")
    built = of_kept(spark, events, tz="Europe/Berlin")
    day = next(row for row in rows_of(built["gold.rollups"]) if row["period"] == "day")

    assert (day["from_ts"], day["to_ts"]) == (utc("2025-03-29T23:00"), utc("2025-03-30T22:00"))
    with pytest.raises(SettingsError, match="Mars"):
        of_kept(spark, events, tz="Mars/Olympus")


@pytest.mark.heavy
@pytest.mark.req("C3", "C4")
def test_a_rollup_has_versions(spark: SparkSession) -> None:
    """
    A closed period is told once. A memory that comes later makes its rollup stale: a tenth or more of the memories makes
    version 2 with a diff, less patches it; C4 sees both coming.
    """
    events = Events()
    at = utc("2025-09-03T08:00")
    for space in ("s:same", "s:patched", "s:renewed"):
        for n in range(20):
            text = f"Thing{n} was seen near place{n}."
            events.memory(at + timedelta(minutes=n), text, event_id=f"m{n:02d}", space_id=space)
    first = {each.meta.space_id: each for each in tell(ROLLUPS, of_kept(spark, events))}

    assert {(each.meta.topic, each.meta.type) for each in first.values()} == {("consolidation", "CONSOLIDATION_DONE")}
    done = first["s:same"].payload
    assert (len(first), done["period"], done["version"], done["action"]) == (3, "day", 1, "CREATE")
    assert (len(done["diffs"]["added"]), done["diffs"]["removed"]) == (20, [])

    for space, each in first.items():
        events.add("consolidation", "CONSOLIDATION_DONE", NOW, each.payload, space_id=space)
    for space, late in (("s:patched", 1), ("s:renewed", 2)):
        for n in range(late):
            moment = at + timedelta(hours=2 + n)
            events.memory(moment, f"Thing{n} came later.", event_id=f"late{n}", written_at=NOW, space_id=space)
    stale = run([STALE], {"silver.events": events.frame(spark)}, context(NOW))["gold.reconsolidations"]
    patched, renewed = rows_of(stale, "space_id")
    assert (patched["rollup_id"], patched["told_version"]) == (first["s:patched"].payload["rollup_id"], 1)
    assert (patched["late_count"], patched["late_share"], patched["event_ids"]) == (1, 0.05, ["late0"])
    assert (patched["action"], renewed["action"]) == ("PATCH", "UPDATE_SUMMARY")

    second = {each.meta.space_id: each.payload for each in tell(ROLLUPS, of_kept(spark, events))}
    assert second.keys() == {"s:patched", "s:renewed"}
    assert (second["s:patched"]["version"], second["s:patched"]["action"]) == (1, "PATCH")
    assert second["s:patched"]["diffs"] == {"added": ["late0"], "removed": []}
    assert (second["s:renewed"]["version"], second["s:renewed"]["action"]) == (2, "UPDATE_SUMMARY")
    assert second["s:renewed"]["rollup_id"] == first["s:renewed"].payload["rollup_id"]


# C4


@pytest.mark.req("C4")
def test_late_and_out_of_order_by_hand(spark: SparkSession) -> None:
    """Ten seconds of skew are nobody's fault; eleven are out of order; an hour to be written is late; a clock may be ahead."""
    events = Events()
    events.add("t", "X", NOW, event_id="first")
    events.add("t", "X", NOW - timedelta(seconds=10), written_at=NOW, event_id="skew")
    events.add("t", "X", NOW - timedelta(seconds=11), written_at=NOW, event_id="order")
    events.add("t", "X", NOW - timedelta(seconds=3_601), written_at=NOW, event_id="late")
    events.add("t", "X", NOW + timedelta(seconds=60), written_at=NOW, event_id="ahead")
    events.add("t", "X", NOW, event_id="after")
    events.add("t", "X", NOW - timedelta(seconds=50), space_id="personal:bob", event_id="alone")
    events.add("t", "X", NOW - timedelta(days=60), event_id="long-ago")
    built = run([LATE], {"silver.events": events.frame(spark)}, context(NOW))
    found = {row["event_id"]: row for row in rows_of(built["gold.late_events"])}

    flags = {name: (row["is_late"], row["is_out_of_order"], row["is_ahead"]) for name, row in found.items()}
    assert flags == {
        "order": (False, True, False),
        "late": (True, True, False),
        "ahead": (False, False, True),
    }
    assert (found["late"]["late_s"], found["late"]["behind_s"], found["ahead"]["late_s"]) == (3_601, 3_601, -60)


@pytest.mark.req("C4")
def test_a_wrong_clock_is_one_finding(spark: SparkSession) -> None:
    """One event that claims to be of next year is ahead; the hundred that follow it, each on time, are neither late nor out of order."""
    events = Events()
    events.add("t", "X", NOW + timedelta(days=300), written_at=NOW, event_id="ahead")
    for n in range(1, 101):
        events.add("t", "X", NOW + timedelta(seconds=n), written_at=NOW + timedelta(seconds=n))
    built = run([LATE], {"silver.events": events.frame(spark)}, context(NOW + timedelta(seconds=100)))

    (found,) = rows_of(built["gold.late_events"])

    assert found["event_id"] == "ahead"
    assert (found["is_late"], found["is_out_of_order"], found["is_ahead"]) == (False, False, True)


@pytest.mark.heavy
@pytest.mark.req("C4")
def test_late_data_equals_a_plain_walk(spark: SparkSession) -> None:
    """On a random log the flags are those of one walk through it in order of offsets."""
    draw = random.Random(3)
    events, expected = Events(), {}
    highest: dict[tuple[str, str], datetime] = {}
    for n in range(300):
        topic, space = draw.choice("ab"), draw.choice(["s1", "s2"])
        written = NOW - timedelta(hours=20) + timedelta(minutes=3 * n)
        ts = written - timedelta(seconds=draw.choice([0, 0, 5, 200, 5_000, -5, -30]))
        name = events.add(topic, "X", ts, space_id=space, written_at=written)
        before = highest.get((topic, space))
        late = (written - ts).total_seconds()
        behind = 0.0 if before is None else max(0.0, (before - ts).total_seconds())
        happened = min(ts, written)
        highest[topic, space] = happened if before is None else max(before, happened)
        flags = (late > 3_600, behind > 10, late < -10)
        if any(flags):
            expected[name] = flags
    built = run([LATE], {"silver.events": events.frame(spark)}, context(NOW))
    found = {
        row["event_id"]: (row["is_late"], row["is_out_of_order"], row["is_ahead"])
        for row in rows_of(built["gold.late_events"])
    }

    assert found == expected


# C5

CURSORS = "topic string, group string, committed bigint, segment bigint, at timestamp, epoch string"


def compaction(
    spark: SparkSession,
    events: Events,
    cursors: list[tuple[Any, ...]],
    segments: list[tuple[Any, ...]],
    **settings: Any,
) -> list[dict[str, Any]]:
    tables = {
        "bronze.events": events.frame(spark),
        "silver.group_cursors": spark.createDataFrame(cursors, CURSORS),
        "silver.segments": spark.createDataFrame(segments, SILVER_SEGMENTS.schema),
    }
    return rows_of(run([RETENTION], tables, context(NOW, **settings))["gold.compaction_list"], "topic", "segment")


def aged(topic: str, kind: str, *days: float) -> Events:
    events = Events()
    for each in days:
        events.add(topic, kind, NOW - timedelta(days=each))
    return events


def segment(
    number: int,
    first: int | None,
    last: int | None,
    *,
    topic: str = "hippo",
    is_sealed: bool = True,
    space_id: str | None = None,
) -> tuple[Any, ...]:
    return topic, space_id, number, is_sealed, first, last, None, None, 100, NOW


@pytest.mark.req("C5")
def test_segments_go_when_read_by_all_and_past_their_time(spark: SparkSession) -> None:
    """The registry keeps HIPPO_ENCODE for 30 days: of four segments the first is released, each other one has its reason."""
    events = aged("hippo", "HIPPO_ENCODE", 60, 50, 40, 31, 30, 2, 1, 0)
    groups = [("hippo", "p03", 2, 1, NOW, "e1"), ("hippo", "temporal", 7, 4, NOW, "e1")]
    segments = [segment(1, 0, 1), segment(2, 2, 3), segment(3, 4, 5), segment(4, 6, 7, is_sealed=False)]
    rows = compaction(spark, events, groups, segments)

    assert [(row["segment"], row["is_released"], row["reason"]) for row in rows] == [
        (1, True, "read by all groups and past its time"),
        (2, False, "not read by p03"),
        (3, False, "not read by p03"),
        (4, False, "it is being written"),
    ]
    assert {(row["released_offset"], row["group_floor"], row["held_by"]) for row in rows} == {(2, 2, "p03")}
    read = [("hippo", "p03", 7, 4, NOW, "e1")]
    assert [row["reason"] for row in compaction(spark, events, read, segments)] == [
        "read by all groups and past its time",
        "read by all groups and past its time",
        "still to be kept",
        "it is being written",
    ]


@pytest.mark.req("C5")
def test_a_rule_may_have_a_part_of_a_day(spark: SparkSession) -> None:
    """An event goes at the moment that its rule says, on the days before and after it and on that day itself."""
    events = aged("hippo", "HIPPO_ENCODE", 2.6, 1.51, 1.5, 1.49, 1.2, 0.3)
    segments = [segment(number + 1, number, number) for number in range(6)]

    def gone(days: float) -> int:
        rows = compaction(spark, events, [], segments, retention_days={"hippo": days, "notes": 0.25})
        return sum(row["is_released"] for row in rows)

    assert {days: gone(days) for days in (3, 2, 1.5, 1.2, 1, 0.5, 0)} == {
        3: 0,
        2: 1,
        1.5: 3,
        1.2: 5,
        1: 5,
        0.5: 5,
        0: 6,
    }


@pytest.mark.heavy
@pytest.mark.req("C5")
def test_rules_and_groups_decide_how_far_a_topic_goes(spark: SparkSession) -> None:
    """A topic's own rule wins over the registry; types without any rule are kept for ever; a foreign epoch holds everything."""
    events = aged("hippo", "HIPPO_ENCODE", 60, 20, 5)
    for each in aged("notes", "NOTE", 900, 1).rows:
        events.rows.append(each)
    foreign = [("hippo", "old", 2, 1, NOW, "another life")]
    segments = [segment(number + 1, number, number) for number in range(3)]
    segments += [
        segment(1, 0, 0, topic="notes", space_id="s:a"),
        segment(2, None, None, topic="notes", is_sealed=False),
    ]

    def brief(cursors: list[tuple[Any, ...]], **settings: Any) -> list[tuple[Any, ...]]:
        rows = compaction(spark, events, cursors, segments, **settings)
        return [(row["topic"], row["segment"], row["is_released"], row["reason"]) for row in rows]

    is_free, is_kept, is_open = "read by all groups and past its time", "still to be kept", "it is being written"
    assert brief([]) == [
        ("hippo", 1, True, is_free),
        ("hippo", 2, False, is_kept),
        ("hippo", 3, False, is_kept),
        ("notes", 1, False, is_kept),
        ("notes", 2, False, is_open),
    ]
    assert brief([], retention_days={"hippo": 10, "*": 100}) == [
        ("hippo", 1, True, is_free),
        ("hippo", 2, True, is_free),
        ("hippo", 3, False, is_kept),
        ("notes", 1, True, is_free),
        ("notes", 2, False, is_open),
    ]
    assert {row[3] for row in brief(foreign)[:3]} == {"not read by old"}
    assert compaction(spark, Events(), [], []) == []
    assert [row["space_id"] for row in compaction(spark, events, [], segments[3:])] == ["s:a", None]


@pytest.mark.req("C5")
def test_what_the_lake_does_not_hold_stays(spark: SparkSession) -> None:
    """A segment of a topic, or a stretch of it, that bronze has not seen is not released; nonsense in settings is refused."""
    events = aged("hippo", "HIPPO_ENCODE", 60, 50)
    segments = [segment(1, 0, 1), segment(2, 2, 3), segment(1, 0, 9, topic="new")]
    rows = compaction(spark, events, [], segments)

    assert [(row["topic"], row["segment"], row["is_released"]) for row in rows] == [
        ("hippo", 1, True),
        ("hippo", 2, False),
        ("new", 1, False),
    ]
    assert rows[2]["reason"] == "not in the lake"
    with pytest.raises(SettingsError, match="retention_days"):
        compaction(spark, events, [], segments, retention_days={"hippo": "P7D"})


# C6


def memories_to_erase(events: Events) -> None:
    at = utc("2025-09-05T08:00")
    events.memory(at, TEXT, event_id="gone", person_id="bob", space_id="s:scrub")
    events.memory(at, TEXT + " now", event_id="stays", person_id="bob", space_id="s:scrub")
    events.memory(at, "Ada was here and fixed the boiler.", event_id="adas", person_id="ada", space_id="s:scrub")
    events.add(
        "affect",
        "AFFECT_ANNOTATED",
        at,
        {"event_id": "gone", "valence": 0.1},
        event_id="felt",
        actor="eve",
        space_id="s:scrub",
    )
    events.add(
        "affect",
        "AFFECT_ANNOTATED",
        at,
        {"event_id": "stays", "valence": 0.1},
        event_id="said",
        actor="ada",
        space_id="s:scrub",
    )
    events.add(
        "temporal",
        "TEMPORAL_RANGE_REQUEST",
        NOW,
        {"request_id": "r", "phrase": "yesterday"},
        event_id="ask",
        space_id="s:scrub",
    )
    calm = "s:calm"
    events.memory(at, TEXT, event_id="calm", person_id="eve", space_id=calm)
    events.add("system", "DSAR_EXPORT", NOW, {"subject_id": "eve", "request": "export"}, space_id=calm)
    events.add("system", "TOMBSTONE_PROPAGATE", NOW, {"object_type": "memory"}, space_id=calm)
    events.add("system", "TOMBSTONE_PROPAGATE", NOW, {"object_id": "calm"}, space_id="s:scrub")


@pytest.mark.req("C6")
def test_every_row_that_names_what_was_erased_is_listed(
    spark: SparkSession, events: Events, built: dict[str, DataFrame]
) -> None:
    """
    Against tables built before, a tombstone and a person's wish to be erased list each row that names the memory or is the
    person's, in every table; others', and what the person did later, stay. An export, a tombstone that names nothing and one of another space list nothing.
    """
    grown = Events()
    grown.rows = list(events.rows)
    home = "s:scrub"
    erased = {"object_type": "memory", "object_id": "gone"}
    stone = grown.add("system", "TOMBSTONE_PROPAGATE", NOW, erased, event_id="stone", space_id=home)
    wish = grown.add("system", "DSAR_ERASE", NOW, {"subject_id": "ada"}, event_id="wish", space_id=home)
    grown.memory(NOW, "Ada came back.", event_id="later", person_id="ada", space_id=home)
    found = run([SCRUB], {**built, "silver.events": grown.frame(spark)}, context(NOW))
    rows = rows_of(found["gold.scrub_list"], "table", "row_key")

    assert {row["space_id"] for row in rows} == {home}
    by_stone = [(row["table"], row["action"]) for row in rows if row["erased_by"] == stone]
    assert sorted(set(by_stone)) == [
        ("gold.keep_scores", "delete"),
        ("gold.near_duplicates", "delete"),
        ("gold.recency", "delete"),
        ("gold.temporal_candidates", "delete"),
        ("gold.temporal_features", "delete"),
        ("gold.temporal_index", "delete"),
        ("silver.events", "delete"),
    ]
    assert [row["row_key"] for row in rows if row["table"] == "silver.events"] == ["adas", "felt", "gone", "said"]
    assert {row["row_key"] for row in rows if row["table"] == "gold.keep_scores"} == {"adas", "gone"}
    assert {row["erased_by"] for row in rows if row["row_key"] in ("adas", "said")} == {wish}
    assert sum(row["table"] == "gold.temporal_index" for row in rows) == 10
    # The memory that was merged away is in no summary; the person's is.
    assert {(row["action"], row["erased_by"]) for row in rows if row["table"] == "gold.rollups"} == {("rebuild", wish)}
    assert all("boiler" not in str(row) for row in rows)

    told = tell(SCRUB, found)
    assert [(each.meta.topic, each.meta.type, each.payload["erased_by"]) for each in told] == [
        ("consolidation", "SCRUB_LISTED", stone),
        ("consolidation", "SCRUB_LISTED", wish),
    ]
    assert {"table": "gold.temporal_index", "action": "delete", "rows": 5} in [
        {name: each[name] for name in ("table", "action", "rows")} for each in told[0].payload["tables"]
    ]
