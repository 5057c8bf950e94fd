"""Mood sets the pace of learning, and the signals say so."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cognition.support import START
from tidings.cognition.errors import InvalidRequest
from tidings.cognition.neuromodulation import adjusted_eta, learning_tick, neuromod_adjustment
from tidings.cognition.payloads import AffectAnnotated, LearningTick, NeuromodAdjustment, payload_of


@pytest.mark.req("F118")
@pytest.mark.parametrize(
    ("arousal", "valence", "eta"),
    [(0.65, 0.2, 0.0109), (0.9, -0.5, 0.01054), (0.5, 0.0, 0.01), (0.0, 0.0, 0.007), (1.0, -1.0, 0.0091)],
)
def test_the_learning_rate_follows_the_mood(arousal: float, valence: float, eta: float) -> None:
    """eta' = eta (1 + 0.6 (a - 0.5)) (1 - 0.3 max(0, -v)), from 0.01."""
    assert adjusted_eta(0.01, arousal=arousal, valence=valence) == pytest.approx(eta)


@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2))
def test_the_rate_is_bounded_and_surprise_only_raises_it(arousal: float, valence: float, surprise: float) -> None:
    """Between 0.49 and 1.95 times the base; a cap holds."""
    rate = adjusted_eta(1.0, arousal=arousal, valence=valence, surprise=surprise)

    assert 0.49 - 1e-9 <= rate <= 1.95 + 1e-9
    assert rate >= adjusted_eta(1.0, arousal=arousal, valence=valence)
    assert adjusted_eta(1.0, arousal=arousal, valence=valence, surprise=surprise, eta_max=0.5) <= 0.5


@pytest.mark.req("F118")
def test_signals_have_their_shapes_and_stable_ids() -> None:
    """NEUROMOD_ADJUSTMENT and LEARNING_TICK read back as what was put in; the same cause is the same event."""
    signals = [
        neuromod_adjustment(space_id="s", cause_id="e", eta=0.01, arousal=0.65, valence=0.2, surprise=0.0, now=START)
        for _ in range(2)
    ]
    tick = learning_tick(
        batch_id="b", space_id="s", count=3, started_at=START, completed_at=START, metrics={"brier": 0.1}
    )

    assert signals[0] == signals[1]
    assert signals[0].meta.type == "NEUROMOD_ADJUSTMENT"
    assert msgspec.convert(signals[0].payload, NeuromodAdjustment).eta_adjusted == pytest.approx(0.0109)
    assert tick.meta.type == "LEARNING_TICK"
    assert msgspec.convert(tick.payload, LearningTick).metrics == {"brier": 0.1}
    started = learning_tick(batch_id="b", space_id="s", count=3, started_at=START)
    assert started.meta.event_id != tick.meta.event_id


def test_impossible_batches_and_rates_are_refused() -> None:
    """An empty batch, one that ends before it began, a negative rate."""
    with pytest.raises(InvalidRequest, match="count"):
        learning_tick(batch_id="b", space_id="s", count=0, started_at=START)
    with pytest.raises(InvalidRequest, match="completed_at"):
        learning_tick(batch_id="b", space_id="s", count=1, started_at=START, completed_at=START - timedelta(1))
    with pytest.raises(InvalidRequest, match="eta"):
        adjusted_eta(-1.0, arousal=0, valence=0)


def test_affect_has_the_documents_shape() -> None:
    """The payload of the wiring example reads as an annotation and back, and out of range is refused."""
    given_payload = {"event_id": "...", "valence": 0.12, "arousal": 0.73, "tags": ["urgent"], "confidence": 0.67}
    annotated = msgspec.convert(given_payload, AffectAnnotated)

    assert msgspec.json.decode(msgspec.json.encode(payload_of(annotated))) == given_payload
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**given_payload, "arousal": 1.5}, AffectAnnotated)
