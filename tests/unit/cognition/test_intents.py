"""What a request is for is guessed from its words, and leads to a topic."""

from __future__ import annotations

from typing import Any

import pytest

from tidings.cognition.attention.requests import Affect, GateAction, GateActor, GateRequest, Intent
from tidings.cognition.attention.salience import combine, derive_intents, route


def request(text: str, **more: Any) -> GateRequest:
    return GateRequest(request_id="r", actor=GateActor(person_id="p"), space_id="s", band="GREEN", text=text, **more)


@pytest.mark.parametrize(
    ("asked", "intent", "confidence"),
    [
        (request("a walk by the sea"), Intent.HIPPO_ENCODE, 0.6),
        (request("set an alarm"), Intent.PROSPECTIVE_SCHEDULE, 0.5),
        (request("find and show me the photo"), Intent.RECALL, 0.7),
        (request("save it, note it, store it, record it"), Intent.WRITE, 0.9),
        (request("a roadmap"), Intent.PROJECT, 0.5),
        (request("see you tomorrow"), Intent.PROSPECTIVE_SCHEDULE, 0.6),
        (request("we met yesterday"), Intent.RECALL, 0.5),
        (request("x", affect=Affect(tags=("urgent",))), Intent.PROSPECTIVE_SCHEDULE, 0.7),
        (request("x", affect=Affect(tags=("reflective",))), Intent.HIPPO_ENCODE, 0.6),
        (request("x", declared_intent="WRITE", declared_confidence=0.8), Intent.WRITE, 0.8),
        (request("x", declared_intent="DANCE", declared_confidence=0.8), Intent.UNKNOWN, 0.8),
    ],
)
def test_signs_lead_to_an_intent(asked: GateRequest, intent: Intent, confidence: float) -> None:
    """One source speaks for itself, with the confidence of its rule."""
    best = derive_intents(asked)[0]

    assert best.intent is intent
    assert best.confidence == pytest.approx(confidence)


def test_several_sources_combine() -> None:
    """The sum, times 0.2 for each source, 0.95 at most."""
    assert combine([0.5, 0.6]) == pytest.approx(1.1 * 0.4)
    assert combine([0.9] * 5) == 0.95


def test_at_most_three_guesses_best_first() -> None:
    """However many signs there are."""
    guesses = derive_intents(request("plan to save, find, remember and schedule it"))

    assert len(guesses) == 3
    assert [guess.confidence for guess in guesses] == sorted((guess.confidence for guess in guesses), reverse=True)


@pytest.mark.parametrize(
    ("intent", "topic", "base"),
    [
        (Intent.PROSPECTIVE_SCHEDULE, "bus.prospective.schedule", 1),
        (Intent.RECALL, "bus.retrieval.query", 2),
        (Intent.WRITE, "bus.write.ingest", 1),
        (Intent.PROJECT, "bus.planning.project", 1),
        (Intent.HIPPO_ENCODE, "bus.hippocampus.encode", 3),
    ],
)
def test_each_intent_has_its_topic_and_priority(intent: Intent, topic: str, base: int) -> None:
    """A boost adds 2 and retries, a deferral takes 1 away."""
    plain, boosted, deferred = (
        route(intent, action, None, 1000) for action in (GateAction.ADMIT, GateAction.BOOST, GateAction.DEFER)
    )

    assert {plain.topic, boosted.topic, deferred.topic} == {topic}
    assert (plain.priority, boosted.priority, deferred.priority) == (base, base + 2, base - 1)
    assert (plain.retries_max, boosted.retries_max, plain.retry_multiplier) == (1, 3, 1.5)
