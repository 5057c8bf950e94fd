"""Memories that say the same are found, scored and merged, and one of them stays."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.unit.cognition.jobs.temporal_support import EVENTS_SCHEMA, Events, context, rows_of, run, utc
from tidings.cognition.jobs import consolidation_duplicates, consolidation_memories
from tidings.cognition.jobs.consolidation_duplicates import CONSOLIDATION_DUPLICATES_JOBS
from tidings.cognition.jobs.consolidation_memories import CONSOLIDATION_ERASURES_JOBS, CONSOLIDATION_MEMORIES_JOBS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]  # a JVM on a busy machine takes its time

(JOB,) = CONSOLIDATION_DUPLICATES_JOBS
(MEMORIES,) = CONSOLIDATION_MEMORIES_JOBS
NOW = utc("2025-09-06T14:30")
TEXT = "the washing machine in the cellar leaks again and the floor is wet, somebody should call the plumber"


CHAIN = [
    " ".join(f"other{n:02d}" if n < 2 * step else f"word{n:02d}" for n in range(40)) for step in range(6)
]  # each like the next, the ends unlike


def scenarios() -> Events:
    """Every scenario in a space of its own, so that one run serves them all."""
    events = Events()
    events.memory(NOW, TEXT, event_id="short", actor="ada", space_id="s:hand")
    events.memory(NOW + timedelta(minutes=9), TEXT + " now", event_id="long", actor="ada", space_id="s:hand")
    events.memory(NOW, TEXT, event_id="early", confidence=0.5, space_id="s:equal")
    events.memory(NOW + timedelta(days=1), TEXT.upper(), event_id="sure", confidence=0.9, space_id="s:equal")
    spaced = TEXT.replace(" in ", "\nin ")
    events.memory(NOW + timedelta(days=2), spaced, event_id="late", confidence=0.9, space_id="s:equal")
    events.memory(NOW, TEXT, event_id="one", space_id="s:unlike")
    events.memory(NOW, "tea with the neighbours in the garden, and cake", event_id="tea", space_id="s:unlike")
    events.memory(NOW, "", event_id="empty", space_id="s:unlike")
    events.memory(NOW, "", event_id="empty-too", space_id="s:unlike")
    events.memory(NOW, None, event_id="none", space_id="s:unlike")
    events.add("hippo", "HIPPO_ENCODE", NOW, "{broken", event_id="broken", space_id="s:unlike")
    events.add("hippo", "HIPPO_ENCODE", NOW, None, event_id="sealed", is_sealed=True, space_id="s:unlike")
    events.memory(NOW, TEXT, event_id="erased", space_id="s:unlike")
    events.add("system", "TOMBSTONE_PROPAGATE", NOW, {"object_id": "erased"}, space_id="s:unlike")
    for at, text in enumerate(CHAIN):
        events.memory(NOW + timedelta(seconds=at), text, event_id=f"c{at}", actor="ada", space_id="s:chain")
    for n in range(40):
        events.memory(NOW + timedelta(seconds=n), TEXT, event_id=f"m{n:03d}", actor="ada", space_id="s:many")
    events.memory(NOW, TEXT + " now", event_id="longer", actor="ada", space_id="s:many")
    return events


def add_thousand(events: Events) -> dict[str, int]:
    """900 memories of random words, and 100 that repeat one of them with another word in one place."""
    draw, origin = random.Random(7), {}
    vocabulary = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(3, 9))) for _ in range(800)]
    for n in range(900):
        words = draw.choices(vocabulary, k=draw.randint(20, 40))
        at = NOW - timedelta(minutes=draw.randint(0, 50_000))
        same: dict[str, Any] = {"actor": f"p{n % 5}", "space_id": "s:thousand"}
        origin[events.memory(at, " ".join(words), event_id=f"o{n}", **same)] = n
        if n % 9 == 0:
            words[draw.randrange(len(words))] = draw.choice(vocabulary)
            again, later = " ".join(words).capitalize(), at + timedelta(seconds=draw.randint(1, 500))
            origin[events.memory(later, again, event_id=f"d{n}", **same)] = n
    return origin


@pytest.fixture(scope="module")
def built(spark: SparkSession) -> dict[str, DataFrame]:
    """All scenarios, worked out once."""
    return run([JOB], {"silver.events": scenarios().frame(spark)}, context(NOW))


@pytest.fixture(scope="module")
def merged(built: dict[str, DataFrame]) -> dict[str, dict[str, dict[str, Any]]]:
    """What was merged, by space and memory."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows_of(built["gold.near_duplicates"]):
        found.setdefault(row["space_id"], {})[row["event_id"]] = row
    return found


def kept_of(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["kept_event_id"] for name, row in rows.items()}


def pieces(text: str) -> list[str]:
    even = " ".join(text.lower().split())
    return [even[at : at + 3] for at in range(len(even) - 2)]


def likeness(one: str, other: str) -> tuple[float, float]:
    a, b = pieces(one), pieces(other)
    shared = set(a) & set(b)
    product = sum(a.count(piece) * b.count(piece) for piece in shared)
    lengths = [sum(each.count(piece) ** 2 for piece in set(each)) ** 0.5 for each in (a, b)]
    return len(shared) / len(set(a) | set(b)), product / (lengths[0] * lengths[1])


Merged = dict[str, dict[str, dict[str, Any]]]


@pytest.mark.req("C1")
def test_a_near_duplicate_by_hand(merged: Merged) -> None:
    """Two tellings minutes apart by one author: the score is the formula's, the longer one stays, and the other points at it."""
    jaccard, cosine = likeness(TEXT, TEXT + " now")

    assert kept_of(merged["s:hand"]) == {"short": "long"}
    row = merged["s:hand"]["short"]
    assert (row["action"], row["is_near_in_time"], row["is_same_author"]) == ("MERGE_DUPLICATES", True, True)
    assert row["jaccard"] == pytest.approx(jaccard)
    assert row["cosine"] == pytest.approx(cosine)
    assert row["score"] == pytest.approx(0.45 * jaccard + 0.45 * cosine + 0.1)


@pytest.mark.req("C1")
def test_of_equal_texts_the_most_confident_then_the_earliest_stays(merged: Merged) -> None:
    """Case and spaces do not tell texts apart; without nearness and a common author equal texts score 0.9."""
    assert kept_of(merged["s:equal"]) == {"early": "sure", "late": "sure"}
    assert {round(row["score"], 6) for row in merged["s:equal"].values()} == {0.9}


@pytest.mark.req("C1")
def test_what_is_not_the_same_is_not_merged(merged: Merged) -> None:
    """Another text, no text, broken JSON, a sealed or an erased memory: each stays as it is; spaces are never mixed."""
    assert "s:unlike" not in merged
    assert all(row["space_id"] == space for space, rows in merged.items() for row in rows.values())


@pytest.mark.req("C1")
def test_likeness_is_not_passed_on(merged: Merged) -> None:
    """A memory like its neighbour, which is like the next one, is not merged into the far end of such a chain."""
    found = kept_of(merged["s:chain"])

    assert 0 < len(found) < len(CHAIN) - 1
    for name, kept in found.items():
        jaccard, cosine = likeness(CHAIN[int(name[1])], CHAIN[int(kept[1])])
        assert 0.45 * jaccard + 0.45 * cosine + 0.1 >= 0.86
        assert kept not in found


@pytest.mark.req("C1")
def test_one_text_many_times(merged: Merged) -> None:
    """All memories with one text share the fate of the best of them: one that nearly equals them takes them all along."""
    found = kept_of(merged["s:many"])

    assert len(found) == 40
    assert set(found.values()) == {"longer"}


def test_an_embedding_has_numbers_only(spark: SparkSession) -> None:
    """
    An embedding counts if all that is in it are numbers to reckon with; text that casts to "not a number" or to infinity is none.
    """
    given: dict[str, Any] = {
        "plain": [1, -0.5],
        "text": ["1.5", 2],
        "nan": ["NaN", 1],
        "infinite": [1, "Infinity"],
        "negative": ["-inf", 1],
        "huge": [1e308, 1],
        "word": ["x", 1],
        "empty": [],
        "none": None,
    }
    events = Events()
    for name, embedding in given.items():
        events.memory(NOW, f"tea {name}", event_id=name, embedding=embedding)
    told = consolidation_memories.memories_told(events.frame(spark), context(NOW)).select("event_id", "embedding")
    found = {row["event_id"]: row["embedding"] for row in rows_of(told)}

    assert {name for name, embedding in found.items() if embedding} == {"plain"}
    assert found["plain"] == [1.0, -0.5]


@pytest.mark.heavy
@pytest.mark.req("C1")
@pytest.mark.parametrize("is_much", [False, True])
def test_new_texts_are_compared_with_old_ones(
    spark: SparkSession, merged: Merged, monkeypatch: pytest.MonkeyPatch, is_much: bool
) -> None:
    """
    Memories that come one after the other, and are compared with what was known then, are merged as they are when all come at
    once, whether they are few or too many to be brought together; what is known already is not compared again.
    """
    if is_much:
        for module in (consolidation_memories, consolidation_duplicates):
            monkeypatch.setattr(module, "brought", lambda frame, few=0: (frame.localCheckpoint(eager=False), None))
    whole, known = scenarios(), {each.table: spark.createDataFrame([], each.schema) for each in MEMORIES.writes}
    for part in (whole.rows[: len(whole.rows) // 2], whole.rows[len(whole.rows) // 2 :]):
        built = MEMORIES.build(
            {"silver.events": spark.createDataFrame(part, EVENTS_SCHEMA), "gold.memories": known["gold.memories"]},
            context(NOW),
        )
        assert {row["seq"] for row in rows_of(built["gold.memory_likeness"])} <= {row[2] for row in part}
        known = {name: known[name].unionByName(frame).localCheckpoint() for name, frame in built.items()}
    (erasures,) = CONSOLIDATION_ERASURES_JOBS
    known |= erasures.build({"silver.events": whole.frame(spark)}, context(NOW))

    found: dict[str, dict[str, Any]] = {}
    for row in rows_of(JOB.build(known, context(NOW))["gold.near_duplicates"]):
        found.setdefault(row["space_id"], {})[row["event_id"]] = row
    assert found == merged


@pytest.mark.heavy
@pytest.mark.req("C1")
def test_a_thousand_events_with_a_tenth_near_duplicates(spark: SparkSession) -> None:
    """The fact sheet's test: at least nine of a hundred are merged, and no memory into one that it does not repeat."""
    events = Events()
    origin = add_thousand(events)
    built = run([JOB], {"silver.events": events.frame(spark)}, context(NOW))
    found = {row["event_id"]: row["kept_event_id"] for row in rows_of(built["gold.near_duplicates"])}

    assert len(origin) == 1_000
    assert len(found) >= 90
    assert all(origin[name] == origin[kept] for name, kept in found.items())


@pytest.mark.heavy
@pytest.mark.req("C1")
def test_pairs_equal_comparing_all_with_all(spark: SparkSession) -> None:
    """On random texts with changes of every size, what is found is what comparing every pair by plain Python finds."""
    draw = random.Random(11)
    vocabulary = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(60)]
    texts: dict[str, None] = {}
    for _ in range(15):
        words = draw.choices(vocabulary, k=18)
        for changes in (0, 1, 2, 3, 5):
            changed = list(words)
            for _ in range(changes):
                changed[draw.randrange(len(changed))] = draw.choice(vocabulary)
            texts[" ".join(changed)] = None
    distinct, events = list(texts), Events()
    for n, text in enumerate(distinct):
        events.memory(NOW + timedelta(hours=n), text, event_id=f"t{n:03d}")
    kept: list[int] = []
    expected = {}
    for n in sorted(range(len(distinct)), key=lambda n: (-len(distinct[n]), n)):
        for better in kept:
            jaccard, cosine = likeness(distinct[n], distinct[better])
            if 0.45 * jaccard + 0.45 * cosine >= 0.7:
                expected[f"t{n:03d}"] = f"t{better:03d}"
                break
        else:
            kept.append(n)
    at = context(NOW, score_min=0.7, neighbours_max=100)
    built = run([JOB], {"silver.events": events.frame(spark)}, at)

    assert len(expected) > 10
    assert {row["event_id"]: row["kept_event_id"] for row in rows_of(built["gold.near_duplicates"])} == expected


@pytest.mark.req("C1")
def test_each_group_is_told_once(built: dict[str, DataFrame]) -> None:
    """Topic consolidation hears which memories were merged into which; a later run tells the same ids."""
    assert JOB.summarise is not None
    first, again = (list(JOB.summarise(built, context(at))) for at in (NOW, NOW + timedelta(days=1)))
    equal = next(each for each in first if each.meta.space_id == "s:equal")

    assert {(each.meta.topic, each.meta.type) for each in first} == {("consolidation", "RECON_ACTION")}
    assert equal.payload == {
        "space_id": "s:equal",
        "kept_event_id": "sure",
        "action": "MERGE_DUPLICATES",
        "merged_count": 2,
        "merged_event_ids": ["early", "late"],
        "score_min": 0.9,
    }
    assert [each.meta.event_id for each in again] == [each.meta.event_id for each in first]
