"""The household example: every topic of the wiring map carries its producers' events to its consumers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.household.acting import choose
from examples.household.home import Household
from examples.household.senses import MOMENTS
from examples.household.wiring import INTAKE, WIRING
from tidings.bus import EventBus
from tidings.cognition.payloads import AffectAnnotated

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # the household lives for over a second: its reminders come a second later


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("household")


@pytest.fixture(scope="module")
def household(workspace: Path) -> Household:
    """A household that has lived through every kind of moment once."""
    lived = Household(workspace)
    asyncio.run(lived.live(seconds=0.1 * len(MOMENTS)))
    return lived


def stored(workspace: Path, topic: str, type_: str) -> list[dict[str, Any]]:
    async def read() -> list[dict[str, Any]]:
        async with EventBus(workspace=workspace) as bus:
            return [dict(event.payload) async for event in bus.replay(topic) if event.meta.type == type_]

    return asyncio.run(read())


@pytest.mark.req("F119")
@pytest.mark.parametrize("topic", WIRING)
def test_every_consumer_of_a_topic_sees_all_that_its_producers_sent(household: Household, topic: str) -> None:
    """Each group of the topic handled each event of each producer once, and nobody else spoke there."""
    sent = [(producer, type_, count) for (name, producer, type_), count in household.flow.sent.items() if name == topic]

    assert {producer for producer, _, _ in sent} == set(WIRING[topic].producers)
    for consumer in WIRING[topic].consumers:
        got = {t: n for (name, who, t), n in household.flow.got.items() if (name, who) == (topic, consumer)}
        assert sum(got.values()) == sum(count for _, _, count in sent)
        assert got.keys() == {type_ for _, type_, _ in sent}


@pytest.mark.req("F119")
def test_the_groups_are_those_of_the_wiring_map(household: Household) -> None:
    """What the parts subscribe to is the map's and the writer's intake, no more and no less."""
    listening = {(topic, part.name) for part in household.parts for topic in part.handlers()}
    intake = {(topic, consumer) for topic, wire in INTAKE.items() for consumer in wire.consumers}

    assert intake == {("bus.write.ingest", "writer")}
    assert listening - intake == {(topic, consumer) for topic, wire in WIRING.items() for consumer in wire.consumers}


@pytest.mark.req("F120")
def test_affect_reaches_the_arbiter_in_its_shape(household: Household, workspace: Path) -> None:
    """The arbiter's mood is the last annotation that was published, with all its fields."""
    said = stored(workspace, "affect", "AFFECT_ANNOTATED")

    assert all(each.keys() == {"event_id", "valence", "arousal", "tags", "confidence"} for each in said)
    mood, last = household.arbiter.mood, said[-1]
    assert mood is not None
    assert (mood.event_id, mood.valence, mood.arousal) == (last["event_id"], last["valence"], last["arousal"])
    assert (list(mood.tags), mood.confidence) == (last["tags"], last["confidence"])


@pytest.mark.req("F120")
@pytest.mark.parametrize(
    ("valence", "arousal", "risk", "chosen"),
    [
        (-0.62, 0.81, "HIGH", "ask_first"),
        (-0.62, 0.81, "MEDIUM", "ask_first"),
        (-0.40, 0.70, "HIGH", "ask_first"),
        (-0.62, 0.81, "LOW", "order_taxi"),
        (-0.39, 0.81, "HIGH", "order_taxi"),
        (-0.62, 0.69, "HIGH", "order_taxi"),
    ],
)
def test_the_risk_gate_asks_first_in_a_bad_mood(valence: float, arousal: float, risk: str, chosen: str) -> None:
    """A risky action needs a question only while arousal is high and valence low; the bounds count as such."""
    mood = AffectAnnotated(event_id="ev-1", valence=valence, arousal=arousal)

    name, _ = choose({"action": {"name": "order_taxi"}, "risk_level": risk}, mood)

    assert name == chosen


def test_the_gate_is_open_before_any_mood_is_known() -> None:
    """Without an annotation there is nothing to hold an action back."""
    assert choose({"action": {"name": "order_taxi"}, "risk_level": "HIGH"}, None)[0] == "order_taxi"


@pytest.mark.req("F121")
def test_what_is_written_reaches_the_temporal_indexer(household: Household) -> None:
    """Each moment is in the index with its time, its zone and its tags, under its episode's id."""
    kept = household.temporal.kept

    assert [each.tags for each in kept] == [moment.tags for moment in MOMENTS]
    assert {each.tz for each in kept} == {"Europe/Berlin"}
    assert all(each.ts.utcoffset() is not None for each in kept)
    assert household.temporal.hours.total() == len(MOMENTS)


@pytest.mark.req("F122")
def test_summaries_and_candidates_are_consumed(household: Household, workspace: Path) -> None:
    """Retrieval holds the last candidates, nearest first; each summary led prospective to a trigger and a reminder."""
    summaries = stored(workspace, "temporal", "TEMPORAL_PATTERNS")
    triggers = [each["trigger"] for each in stored(workspace, "prospective", "PROS_TRIGGER_UPSERTED")]
    reminders = stored(workspace, "prospective", "PROSPECTIVE_TRIGGER")

    recencies = [each["recency"] for each in household.recall.candidates]
    assert len(recencies) == len(MOMENTS)
    assert recencies == sorted(recencies, reverse=True)
    assert all(0 < value <= 1 for value in recencies)
    daily, soon = ([each for each in triggers if each["schedule"]["kind"] == kind] for kind in ("daily_time", "once"))
    assert [each["schedule"]["time"] for each in daily] == [f"{each['hour_peak']:02d}:00" for each in summaries]
    assert [each["title"] for each in soon] == [f"it is usually busy at {each['hour_peak']}:00" for each in summaries]
    # One that was made later than its moment is told as expired, and is no reminder.
    assert [each["id"] for each in reminders] == [each["id"] for each in soon if each["status"] == "ACTIVE"]
    assert triggers


@pytest.mark.req("F124")
def test_outcomes_are_learning_signals(household: Household, workspace: Path) -> None:
    """Each executed action is an example with its decision's label; what the bus recorded of attempts weighs in."""
    executed = stored(workspace, "actions", "ACTION_EXECUTED")

    signals = {each.plan_id: each for each in household.learning.signals}
    labels = {"OK": 1.0, "PARTIAL": 0.5}
    assert {plan: each.label for plan, each in signals.items()} == {
        each["plan_id"]: labels[each["status"]] for each in executed
    }
    assert all(each.eta > 0 for each in signals.values())
    assert household.outcomes.err["actions", "actuators"] == 1
    assert household.outcomes.ok["actions", "actuators"] == household.flow.got[
        "actions", "actuators", "ACTION_DECISION"
    ] + len(executed)
    assert any(each.failure_share > 0 for each in signals.values())


@pytest.mark.heavy
@pytest.mark.req("F119")
def test_the_example_runs_and_ends_by_itself(tmp_path: Path) -> None:
    """As a command it shows the flow, sums it up, and ends with 0; a second run goes on in the same workspace."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "examples.household",
        "--workspace",
        str(tmp_path),
        "--seconds",
        "0.5",
    ]

    for _ in range(2):
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)

        assert done.returncode == 0
        failures = [line for line in done.stderr.splitlines() if line.startswith("group ")]
        assert all("ConnectionError: the line is busy" in line for line in failures)  # attempts that fail on purpose
        assert "classifier -> affect       AFFECT_ANNOTATED" in done.stdout
        assert "affect       AFFECT_ANNOTATED     -> arbiter" in done.stdout
        assert all(f"\n{topic}" in done.stdout for topic in WIRING)
