"""Salience follows its formula, and moves the way its features say."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.cognition.attention.requests import CONFIGURED, README, Affect, Context, GateActor, GateRequest, RequestQos
from tidings.cognition.attention.salience import features_of, load_shift, priority_of, salience_of


def request(text: str = "", **more: Any) -> GateRequest:
    fields: dict[str, Any] = {"request_id": "r", "actor": GateActor(person_id="p"), "space_id": "s", "band": "GREEN"}
    return GateRequest(**{**fields, "text": text, **more})


REQUESTS = st.builds(
    request,
    text=st.text(max_size=600) | st.sampled_from(["urgent meeting now", "send money", "hi"]),
    band=st.sampled_from(["GREEN", "AMBER", "RED", "BLACK", "PINK"]),
    attachments=st.integers(0, 50),
    deadline=st.none() | st.just("2026-01-01"),
    affect=st.none()
    | st.builds(Affect, valence=st.floats(-5, 5), arousal=st.floats(-5, 5), tags=st.just(("urgent",)) | st.just(())),
    context=st.none()
    | st.builds(
        Context,
        recent_similar_requests=st.integers(-1, 9),
        child_present=st.booleans(),
        time_of_day=st.sampled_from([None, "morning", "evening", "late_night", "noonish"]),
        personal_relevance=st.floats(-2, 2),
        goal_alignment=st.floats(-2, 2),
    ),
    qos=st.builds(
        RequestQos, budget_ms=st.floats(1, 100), device_thermal=st.sampled_from(["Nominal", "Hot", "Critical"])
    ),
)


def test_an_almost_empty_message_scores_066() -> None:
    """With the configured weights "ok" comes to S = 0.66 and priority 0.66: enough to be admitted."""
    scored = salience_of(request("ok"), CONFIGURED)

    assert scored.raw_score == pytest.approx(0.8 * 0.4 + 0.9 * 0.3 + 0.2 * 0.5 + 0.3 * 0.5 - 0.6 * 0.3)
    assert scored.priority == pytest.approx(0.66, abs=0.005)
    assert scored.priority >= CONFIGURED.thresholds.admit


def test_the_readme_profile_weighs_differently() -> None:
    """The second profile has its own weights, and none for valence and time of day."""
    scored = salience_of(request("ok"), README)

    assert scored.raw_score == pytest.approx(0.8 * 0.4 + 0.6 * 0.3 - 0.9 * 0.3)
    assert (README.thresholds.admit, README.thresholds.boost, README.thresholds.drop) == (0.55, 0.75, 0.20)


@pytest.mark.parametrize(
    ("feature", "asked", "value"),
    [
        ("urgency", request("nothing"), 0.0),
        ("urgency", request("Urgent: now, NOW!"), 0.6),
        ("urgency", request("this  morning"), 0.3),
        ("urgency", request("x", deadline="soon"), 0.4),
        ("urgency", request("x", affect=Affect(arousal=0.71)), 0.2),
        ("urgency", request("x", qos=RequestQos(budget_ms=9.9)), 0.1),
        ("urgency", request("asap urgent emergency now"), 1.0),
        ("novelty", request("x" * 50), 0.5),
        ("novelty", request("x" * 19), 0.4),
        ("novelty", request("x" * 101), 0.6),
        ("novelty", request("x" * 50, context=Context(recent_similar_requests=0)), 1.0),
        ("novelty", request("x" * 50, context=Context(recent_similar_requests=2)), 0.7),
        ("novelty", request("x" * 50, context=Context(recent_similar_requests=3)), 0.2),
        ("value", request("x", attachments=1), 0.6),
        ("value", request("save a note"), 0.9),
        ("value", request("hello, thanks"), 0.1),
        ("risk", request("x", band="AMBER"), 0.3),
        ("risk", request("share it", band="RED"), 0.8),
        ("risk", request("x", actor=GateActor(person_id="p", device_trust="low")), 0.3),
        ("risk", request("x", band="AMBER", actor=GateActor(person_id="p", device_trust="high")), 0.2),
        ("cost", request("x" * 201), 0.4),
        ("cost", request("x" * 501, attachments=9), 1.0),
        ("cost", request("x", qos=RequestQos(device_thermal="Hot")), 0.5),
        ("cost", request("x", qos=RequestQos(device_thermal="Critical")), 0.7),
        ("social_risk", request("money"), 0.0),
        ("social_risk", request("work, money", context=Context(child_present=True)), 0.4),
        ("social_risk", request("x", context=Context(time_of_day="early_morning")), 0.1),
        ("valence", request("x", affect=Affect(valence=-1.0)), 0.0),
        ("valence", request("x"), 0.5),
        ("context_bump", request("x", affect=Affect(tags=("urgent",))), 0.15),
        ("context_bump", request("x", context=Context(time_of_day="late_night")), 0.0),
        ("temporal_fit", request("x", context=Context(time_of_day="afternoon")), 0.8),
        ("temporal_fit", request("x", context=Context(time_of_day="evening")), 0.6),
        ("temporal_fit", request("x", context=Context(time_of_day="late_night")), 0.3),
    ],
)
def test_each_feature_follows_its_rule(feature: str, asked: GateRequest, value: float) -> None:
    """The steps of the feature table, one by one."""
    assert features_of(asked)[feature] == pytest.approx(value)


def test_words_are_matched_whole() -> None:
    """ "hi" is not in "this", "now" not in "know", "ok" not in "book"."""
    plain = features_of(request("this I know of a book"))

    assert plain["value"] == pytest.approx(0.5)
    assert plain["urgency"] == 0.0


@given(REQUESTS, st.sampled_from([CONFIGURED, README]))
def test_everything_stays_within_its_bounds_and_is_repeatable(asked: GateRequest, profile: Any) -> None:
    """Features, priority, confidence and uncertainty lie in 0..1, and the same request scores the same."""
    scored = salience_of(asked, profile)

    assert all(0 <= value <= 1 for value in scored.features.values())
    assert 0 <= scored.priority <= 1
    assert 0.1 <= scored.confidence <= 1
    assert scored.uncertainty == pytest.approx(1 - scored.confidence)
    assert salience_of(asked, profile) == scored


@given(REQUESTS)
def test_a_deadline_never_lowers_and_a_stricter_band_never_raises(asked: GateRequest) -> None:
    """Urgency counts for a request, risk against it."""
    base = salience_of(asked, CONFIGURED).priority

    assert salience_of(msgspec.structs.replace(asked, deadline="d"), CONFIGURED).priority >= base
    assert salience_of(msgspec.structs.replace(asked, band="BLACK"), CONFIGURED).priority <= base


def test_calibration_is_a_sigmoid_with_temperature() -> None:
    """priority = sigmoid(A * S / T + B), also far out where a naive form would overflow."""
    profile = msgspec.structs.replace(CONFIGURED, temperature=2.0, calibration_a=3.0, calibration_b=0.5)

    assert priority_of(1.0, profile) == pytest.approx(1 / (1 + math.exp(-2.0)))
    assert priority_of(-1e6, CONFIGURED) == 0.0
    assert priority_of(1e6, CONFIGURED) == 1.0


def test_confidence_counts_features_and_mistrusts_extremes() -> None:
    """ "ok": 5 of 10 weighted features are above 0, and more than three are extreme: 0.5 - 0.3."""
    assert salience_of(request("ok"), CONFIGURED).confidence == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("load", "cost", "deadline", "shift"),
    [
        (0.9, 0.3, None, -0.06),
        (0.9, 0.3, "soon", 0.0),
        (0.5, 0.3, None, 0.0),
        (0.1, 0.3, None, 0.02),
        (0.5, 0.8, None, -0.06),
    ],
)
def test_load_shifts_the_score(load: float, cost: float, deadline: str | None, shift: float) -> None:
    """Busy times cost unprotected requests, idle ones help, dear requests pay."""
    assert load_shift(request("x", deadline=deadline), {"cost": cost}, load) == pytest.approx(shift)
