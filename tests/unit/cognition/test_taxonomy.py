"""Cognitive events have their names, carry their trace, and keep it through the envelope."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.unit.cognition.support import START, make_event
from tidings.cognition.errors import InvalidRequest
from tidings.cognition.taxonomy import (
    CognitiveEventType,
    CognitiveExtras,
    CognitiveTrace,
    NeuralPathway,
    Stage,
    cognitive_event,
    extras_of,
    topic_of,
    trace_of,
)
from tidings.core.names import check_topic, check_type

TRACE = CognitiveTrace(
    trace_id="t", space_id="s", started_at=START, stage_started_at=START, latency_budget_ms=100, actor_id="alice"
)


@pytest.mark.req("F113")
def test_the_documents_five_types_exist() -> None:
    """Attention request, working-memory update, workspace broadcast, load alert, focus shift."""
    five = {
        *("ATTENTION_REQUEST", "WORKING_MEMORY_UPDATE", "GLOBAL_WORKSPACE_BROADCAST", "COGNITIVE_LOAD_ALERT"),
        "FOCUS_SHIFT_REQUEST",
    }

    assert {kind.value for kind in CognitiveEventType if "." not in kind.value} == five
    assert {topic_of(CognitiveEventType(kind)) for kind in five} == {"workspace"}


def test_there_are_25_dotted_types_in_six_families() -> None:
    """All of them are names the log takes, and each family has a topic."""
    dotted = [kind for kind in CognitiveEventType if "." in kind.value]

    assert len(dotted) == 25
    assert {kind.family for kind in dotted} == {
        *("memory", "recall", "attention", "working_memory", "arbitration", "learning"),
    }
    for kind in CognitiveEventType:
        assert check_type(kind) == kind.value
        assert check_topic(topic_of(kind))


def test_an_event_carries_its_trace() -> None:
    """What goes into the envelope comes out of it, hints included."""
    extras = CognitiveExtras(neural_pathway=NeuralPathway.THALAMIC, neuromodulation={"dopamine": 0.5})
    event = cognitive_event(
        CognitiveEventType.ATTENTION_REQUEST, TRACE, {"a": 1}, event_id="e", ts=START, extras=extras
    )

    assert trace_of(event) == TRACE
    assert extras_of(event) == extras
    assert (event.meta.trace_id, event.meta.space_id, event.meta.actor) == ("t", "s", "alice")
    assert trace_of(make_event({})) is None


def test_a_damaged_trace_is_refused() -> None:
    """It is named, and not guessed at."""
    with pytest.raises(InvalidRequest, match="cognitive"):
        trace_of(make_event({}, extra={"cognitive": {"trace_id": 5}}))


def test_work_moves_through_stages_and_retries() -> None:
    """A stage keeps the start, a child names its parent, retries end, and budgets run out."""
    later = START + timedelta(milliseconds=101)
    moved = TRACE.at_stage(Stage.PROCESSING, later)
    child = moved.child("u", later)

    assert (moved.started_at, moved.stage_started_at) == (START, later)
    assert (child.parent_trace_id, child.stage, child.started_at) == ("t", Stage.INITIATED, later)
    assert TRACE.is_over_budget(later)
    assert not child.is_over_budget(later)
    tried = TRACE
    for _ in range(3):
        again = tried.retried(later)
        assert again is not None
        tried = again
    assert tried.retried(later) is None
