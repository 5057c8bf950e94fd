"""Training rows hold what was known at the time and what came of it, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.unit.pipeline.jobs.support import Stream, context, rows_of
from tidings.cognition.jobs.consolidation_memories import CONSOLIDATION_ERASURES_JOBS
from tidings.cognition.jobs.learning_rows import LEARNING_ACTIONS_JOBS, LEARNING_PREDICTIONS_JOBS, LEARNING_RANKER_JOBS
from tidings.cognition.jobs.learning_told import JOBS as LEARNING_TOLD_JOBS
from tidings.pipeline.jobs.job import Job

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


def built(spark: SparkSession, job: Job, stream: Stream, **settings: Any) -> dict[str, list[dict[str, Any]]]:
    events = {"silver.events": stream.frame(spark)}
    listed = {
        name: frame.localCheckpoint()
        for each in (*CONSOLIDATION_ERASURES_JOBS, *LEARNING_TOLD_JOBS)
        for name, frame in each.build(events, context()).items()
    }
    tables = job.build({**events, **listed}, context(**settings))
    assert sorted(tables) == sorted(output.table for output in job.writes)
    return {name: rows_of(frame, frame.columns[0]) for name, frame in tables.items()}


# L1


@pytest.fixture(scope="module")
def stream() -> Stream:
    """Every scenario of decisions below, in a space of its own; one after the other, so seqs go on."""
    stream = Stream()
    for scenario in (decided, leaking, searched, erased, odd):
        scenario(stream)
    return stream


@pytest.fixture(scope="module")
def actions(spark: SparkSession, stream: Stream) -> list[dict[str, Any]]:
    """The rows of these decisions, worked out in one run."""
    return built(spark, LEARNING_ACTIONS_JOBS[0], stream)["gold.learning_actions"]


def decided(stream: Stream) -> None:
    def add(kind: str, payload: dict[str, Any], at_s: float, topic: str = "actions") -> None:
        stream.add(kind, payload, at_s=at_s, topic=topic, space_id="s:decided")

    add("AFFECT_ANNOTATED", {"arousal": 0.2, "valence": 0.1}, 0, "affect")
    add("AFFECT_ANNOTATED", {"arousal": 0.65, "valence": 0.2}, 10, "affect")
    add("METACOG_REPORT", {"brier": 0.1, "ece": 0.2, "surprise": 0.3}, 11, "metacog")
    decision = {
        "plan_id": "p1",
        "selected_action": {"name": "lamp_on", "args": {}},
        "confidence": 0.8,
        "risk_level": "MEDIUM",
        "alternatives": [{"name": "wait", "score": 0.5}, {"name": "ask", "score": 0.7}],
        "features": {"temp": 21.5, "room": "hall", "bias": 9},
    }
    add("ACTION_DECISION", decision, 20)
    add("ACTION_EXECUTED", {"plan_id": "p1", "status": "OK", "latency_ms": 12}, 25)
    add("ACTION_EXECUTED", {"plan_id": "p1", "status": "FAILED"}, 30)


@pytest.mark.req("L1", "F124")
def test_a_decision_meets_its_outcome_and_what_was_known(stream: Stream, actions: list[dict[str, Any]]) -> None:
    """The row of a decision has the label, the last affect and report before it, and where all of them stand."""
    (row,) = [each for each in actions if each["space_id"] == "s:decided"]
    _, affect, report, decision, outcome, _ = [each[2] for each in stream.rows if each[5] == "s:decided"]

    assert (row["action"], row["y"], row["outcome_status"], row["latency_ms"]) == ("lamp_on", 1.0, "OK", 12.0)
    assert (row["arousal"], row["valence"], row["surprise"]) == (0.65, 0.2, 0.3)
    places = (row["affect_seq"], row["metacog_seq"], row["decision_seq"], row["outcome_seq"])
    assert places == (affect, report, decision, outcome)
    assert row["features"] == pytest.approx(
        {
            "bias": 1.0,
            "confidence": 0.8,
            "risk": 0.5,
            "margin": 0.1,
            "arousal": 0.65,
            "valence": 0.2,
            "surprise": 0.3,
            "temp": 21.5,
        }
    )


def leaking(stream: Stream) -> None:
    def felt(arousal: float, at_s: float, space_id: str = "s:leak") -> None:
        stream.add("AFFECT_ANNOTATED", {"arousal": arousal, "valence": 0}, at_s=at_s, space_id=space_id)

    def executed(at_s: float, space_id: str = "s:leak") -> None:
        stream.add("ACTION_EXECUTED", {"plan_id": "p1", "status": "OK"}, at_s=at_s, space_id=space_id)

    felt(0.11, -4000)
    felt(0.22, 5, "s:other")
    felt(0.33, 20.5)  # a clock ahead: written, but not yet true
    executed(10)  # of an earlier round of the same plan
    stream.add("ACTION_DECISION", {"plan_id": "p1"}, at_s=20, space_id="s:leak")
    felt(0.44, 15)  # happened before, known only afterwards
    felt(0.55, 21)
    executed(20 + 3601)
    executed(30, "s:other")


@pytest.mark.req("L1")
def test_nothing_from_after_the_decision_leaks_in(actions: list[dict[str, Any]]) -> None:
    """Affect that happened later, was written later, is of another space, or is too old is not known; nor an earlier outcome."""
    (row,) = [each for each in actions if each["space_id"] == "s:leak"]

    assert row["arousal"] is None
    assert row["affect_seq"] is None
    assert row["y"] is None
    assert row["features"] == {"bias": 1.0}


def searched(stream: Stream) -> None:
    chance = random.Random(11)
    for _ in range(300):
        happened, space = chance.randrange(0, 9000), chance.choice(["s:one", "s:two"])
        if chance.random() < 0.5:
            stream.add("AFFECT_ANNOTATED", {"arousal": chance.random(), "valence": 0}, at_s=happened, space_id=space)
        else:
            stream.add("ACTION_DECISION", {"plan_id": f"p{happened}"}, at_s=happened, space_id=space)


@pytest.mark.req("L1")
def test_the_as_of_join_agrees_with_a_plain_search(stream: Stream, actions: list[dict[str, Any]]) -> None:
    """On random events, late ones too, each decision gets what a search through all earlier records finds."""
    found = {row["decision_seq"]: row["affect_seq"] for row in actions}
    random_rows = [row for row in stream.rows if row[5] in ("s:one", "s:two")]

    facts = [(row[6], row[2], row[5]) for row in random_rows if row[4] == "AFFECT_ANNOTATED"]
    for row in random_rows:
        if row[4] == "ACTION_DECISION":
            ts, seq, space = row[6], row[2], row[5]
            known = [
                (when, at)
                for when, at, where in facts
                if where == space and at < seq and 0 <= (ts - when).total_seconds() <= 3600
            ]
            assert found[seq] == (max(known)[1] if known else None)


def erased(stream: Stream) -> None:
    space = "s:erased"
    for plan in ("p1", "p2"):
        stream.add("ACTION_DECISION", {"plan_id": plan}, at_s=1, event_id=f"decided-{plan}", space_id=space)
        stream.add(
            "ACTION_EXECUTED", {"plan_id": plan, "status": "OK"}, at_s=2, event_id=f"done-{plan}", space_id=space
        )
    for name in ("decided-p1", "done-p2"):
        stream.add("TOMBSTONE_PROPAGATE", {"object_type": "memory", "object_id": name}, at_s=3, space_id=space)


@pytest.mark.req("L1")
def test_nothing_is_learnt_from_what_was_erased(actions: list[dict[str, Any]]) -> None:
    """A decision that a tombstone names is no training row, and an outcome that one names is no label."""
    (row,) = [each for each in actions if each["space_id"] == "s:erased"]

    assert (row["row_id"], row["y"]) == ("decided-p2", None)


def odd(stream: Stream) -> None:
    space = "s:odd"
    for payload in (
        "[]",
        "7",
        '"x"',
        "{",
        '{"plan_id": {"a": 1}, "features": [1], "alternatives": 3, "confidence": "NaN"}',
        None,
    ):
        for kind in ("ACTION_DECISION", "RETRIEVAL_IMPRESSION", "CORTEX_PREDICTION"):
            stream.add(kind, payload, at_s=1, space_id=space)
        stream.add("ACTION_EXECUTED", payload, at_s=2, space_id=space)
    for kind, said in (
        ("ACTION_DECISION", {"risk_level": "EXTREME", "features": {"huge": 1e300, "text": "Infinity"}}),
        ("RETRIEVAL_IMPRESSION", {"query_id": "q", "ranked": [{"score": 1}, 3, None], "top_k": -1}),
        ("RETRIEVAL_IMPRESSION", {"query_id": "q", "ranked": [{"score": 1}], "top_k": 1e30}),
        ("CORTEX_PREDICTION", {"heads": {"a": {"value": "high"}, "b": 3, "c": {"value": 1.5}}}),
    ):
        stream.add(kind, said, at_s=1, space_id=space)


def test_odd_payloads_cost_a_value_and_never_the_run(actions: list[dict[str, Any]]) -> None:
    """
    Decisions whose payloads have other shapes, or cannot be read, become rows with nulls; the tests of lists and of
    predictions show that such events become no rows there.
    """
    rows = [row for row in actions if row["space_id"] == "s:odd"]

    assert {tuple(row["features"].items()) for row in rows} == {(("bias", 1.0),)}


# L2


@pytest.mark.req("L2", "F124")
@pytest.mark.parametrize("is_repeated", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_impressions_become_rows_with_sampled_negatives(spark: SparkSession, is_repeated: bool) -> None:
    """The clicked document is kept, four others stand for all nine, and the counts before sampling are kept too; again, the same are drawn."""
    stream = Stream()
    odd(stream)
    ranked = [{"doc_id": f"d{n}", "score": 1 - n / 20, "features": {"fresh": n, "lang": "en"}} for n in range(12)]
    stream.add(
        "RETRIEVAL_CLICK", {"query_id": "q1", "doc_id": "d1"}, at_s=0, topic="retrieval"
    )  # before: does not count
    stream.add("RETRIEVAL_IMPRESSION", {"query_id": "q1", "ranked": ranked, "top_k": 10}, at_s=1, topic="retrieval")
    click = stream.add("RETRIEVAL_CLICK", {"query_id": "q1", "doc_id": "d3", "position": 3}, at_s=5, topic="retrieval")
    stream.add("RETRIEVAL_CLICK", {"query_id": "q1", "doc_id": "d3"}, at_s=6, topic="retrieval")
    stream.add("RETRIEVAL_CLICK", {"query_id": "q1", "doc_id": "d11"}, at_s=6, topic="retrieval")  # was not on show

    tables = built(spark, LEARNING_RANKER_JOBS[0], stream)
    rows = tables["gold.learning_ranker"]
    (impression,) = [row for row in tables["gold.learning_impressions"] if row["space_id"] == "s1"]
    assert {row["space_id"] for row in rows} == {"s1"}
    (clicked,) = [row for row in rows if row["y"] == 1]
    negatives = [row for row in rows if row["y"] == 0]

    assert (clicked["doc_id"], clicked["position"], clicked["click_seq"], clicked["weight"]) == ("d3", 3, click, 1.0)
    assert clicked["features"] == pytest.approx({"bias": 1.0, "score": 0.85, "position": 1 / 2.321928, "fresh": 3.0})
    assert len(negatives) == 4
    assert sum(row["weight"] for row in negatives) == pytest.approx(9)
    assert (impression["shown"], impression["clicked"], impression["first_click_position"]) == (10, 1, 3)
    if is_repeated:
        assert built(spark, LEARNING_RANKER_JOBS[0], stream) == tables


@pytest.mark.heavy
@pytest.mark.req("L2")
def test_a_list_without_a_click_keeps_a_few(spark: SparkSession) -> None:
    """Lists that nobody clicked teach too, by as many rows as the setting says."""
    stream = Stream()
    ranked = [{"doc_id": f"d{n}", "score": 0.5} for n in (0, 1, 2, 2, 1, 0)]
    stream.add("RETRIEVAL_IMPRESSION", {"query_id": "q1", "ranked": ranked}, at_s=1)

    rows = built(spark, LEARNING_RANKER_JOBS[0], stream, negatives_min=1)["gold.learning_ranker"]

    assert [(row["y"], row["weight"]) for row in rows] == [(0.0, 3.0)]


# L3


@pytest.mark.req("L3", "F124")
def test_each_head_meets_the_first_outcome_after_it(spark: SparkSession) -> None:
    """Outcomes find a prediction by plan or by its id, may speak of one head only, and count only afterwards."""
    stream = Stream()
    odd(stream)
    stream.add("ACTION_EXECUTED", {"plan_id": "p", "success": True}, at_s=0)
    stream.add(
        "CORTEX_PREDICTION",
        {"plan_id": "p", "heads": {"success": {"value": 0.7, "z": 0.9}, "liked": {"value": 0.5}}, "features": {"f": 1}},
        at_s=10,
        event_id="pred",
    )
    liked = stream.add("USER_FEEDBACK", {"kind": "like", "target": "pred", "context": {"head": "liked"}}, at_s=11)
    failed = stream.add("ACTION_EXECUTED", {"plan_id": "p", "success": False}, at_s=12)
    stream.add("ACTION_EXECUTED", {"plan_id": "p", "success": True}, at_s=13)
    stream.add("CORTEX_PREDICTION", {"plan_id": "none", "heads": {"success": {"value": 1.0}}}, at_s=20, event_id="q")

    rows = {
        row["row_id"]: row for row in built(spark, LEARNING_PREDICTIONS_JOBS[0], stream)["gold.learning_predictions"]
    }

    assert {name: (row["p"], row["y"], row["outcome_seq"]) for name, row in rows.items()} == {
        "pred:success": (0.7, 0.0, failed),
        "pred:liked": (0.5, 1.0, liked),
        "q:success": (1.0, None, None),
    }
    assert rows["pred:success"]["z"] == 0.9
    assert rows["pred:liked"]["z"] == pytest.approx(0.0)
    assert rows["q:success"]["z"] == pytest.approx(13.8155, abs=1e-3)
