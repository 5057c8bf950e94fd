"""
Salience: what a request is worth attending to, as twelve features and one number.

    S = urgency + novelty + value + arousal + valence + context_bump + temporal_fit + personal_relevance
        + goal_alignment + bias - risk - cost - social_risk          (each times its weight)
    priority = sigmoid(A * S / T + B)

Plain functions of a request and a profile: the same request always scores the same.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tidings.core.actors import SecurityBand

from ..ports import clip01, sigmoid
from ..words import count_words
from .profiles import BAND_RULES, GateProfile
from .requests import GateRequest

__all__ = ["Salience", "features_of", "load_shift", "priority_of", "salience_of"]

URGENT: Final = ("asap", "urgent", "emergency", "now", "immediately", "today", "tonight", "this morning", "deadline")
VALUABLE: Final = (
    *("save", "remember", "note", "important", "critical", "meeting", "appointment", "deadline", "project"),
)
TRIVIAL: Final = ("test", "hello", "hi", "thanks", "ok")
OUTWARD: Final = ("share", "send", "email", "post", "publish", "external")
ADULT: Final = ("work", "stress", "money", "politics")
_TEMPORAL_FIT: Final = {"morning": 0.8, "afternoon": 0.8, "evening": 0.6, "early_morning": 0.3, "late_night": 0.3}
_AGAINST: Final = frozenset({"risk", "cost", "social_risk"})
_PROTECTED_TAG: Final = "urgent"


class Salience(msgspec.Struct, frozen=True, kw_only=True):
    """A request's score and how it came about."""

    features: dict[str, float]
    weights: dict[str, float]
    raw_score: float
    priority: float
    confidence: float

    @property
    def uncertainty(self) -> float:
        """What is missing from full confidence."""
        return 1.0 - self.confidence


def features_of(request: GateRequest) -> dict[str, float]:
    """The features of a request, each in 0..1, in the order of the weights."""
    text, affect, context, qos = request.text, request.affect, request.context, request.qos
    arousal = 0.0 if affect is None else clip01(affect.arousal)
    time_of_day = None if context is None else context.time_of_day
    tags = () if affect is None else affect.tags
    is_night = time_of_day in ("late_night", "early_morning")

    urgency = 0.3 * count_words(text, URGENT) + 0.4 * (request.deadline is not None)
    urgency += 0.2 * (arousal > 0.7) + 0.1 * (qos.budget_ms < 10)

    similar = None if context is None else context.recent_similar_requests
    novelty = 0.5 if similar is None else 1.0 if similar <= 0 else 0.7 if similar < 3 else 0.2
    novelty += 0.1 * (len(text) > 100) - 0.1 * (len(text) < 20)

    value = 0.5 + 0.2 * count_words(text, VALUABLE) - 0.2 * count_words(text, TRIVIAL)
    value += 0.1 * (request.attachments > 0)

    rule = (
        BAND_RULES[SecurityBand(request.band)] if request.band in set(SecurityBand) else BAND_RULES[SecurityBand.BLACK]
    )
    risk = rule.risk + 0.2 * count_words(text, OUTWARD)
    risk += {"low": 0.3, "high": -0.1}.get(request.actor.device_trust, 0.0)

    cost = 0.3 + (0.3 if len(text) > 500 else 0.1 if len(text) > 200 else 0.0)
    cost += min(0.4, 0.1 * max(0, request.attachments))
    cost += {"Hot": 0.2, "Critical": 0.4}.get(qos.device_thermal, 0.0)

    is_child_present = context is not None and context.child_present
    social_risk = (0.2 * count_words(text, ADULT) if is_child_present else 0.0) + 0.1 * is_night

    context_bump = 0.15 if _PROTECTED_TAG in tags else -0.05 if time_of_day == "late_night" else 0.0
    raw = {
        "urgency": urgency,
        "novelty": novelty,
        "value": value,
        "risk": risk,
        "cost": cost,
        "social_risk": social_risk,
        "arousal": arousal,
        "valence": 0.5 if affect is None else (affect.valence + 1.0) / 2.0,
        "context_bump": context_bump,
        "temporal_fit": 0.5 if time_of_day is None else _TEMPORAL_FIT.get(time_of_day, 0.5),
        "personal_relevance": 0.0 if context is None else context.personal_relevance,
        "goal_alignment": 0.0 if context is None else context.goal_alignment,
    }
    return {name: clip01(value) for name, value in raw.items()}


def salience_of(request: GateRequest, profile: GateProfile) -> Salience:
    """Score a request."""
    features = features_of(request)
    weights: dict[str, float] = msgspec.structs.asdict(profile.weights)
    raw_score = profile.bias
    for name, value in features.items():
        raw_score += -weights[name] * value if name in _AGAINST else weights[name] * value
    counted = [value for name, value in features.items() if weights[name] > 0]
    return Salience(
        features=features,
        weights=weights,
        raw_score=raw_score,
        priority=priority_of(raw_score, profile),
        confidence=_confidence(counted),
    )


def priority_of(score: float, profile: GateProfile) -> float:
    """The calibrated priority of a score, in 0..1."""
    return clip01(sigmoid(profile.calibration_a * (score / profile.temperature) + profile.calibration_b))


def load_shift(request: GateRequest, features: dict[str, float], load: float) -> float:
    """
    What the load adds to a score: busy times cost everything but protected requests, idle times are generous.

    A request is protected when it has a deadline or is tagged urgent.
    """
    is_protected = request.deadline is not None or (
        request.affect is not None and _PROTECTED_TAG in request.affect.tags
    )
    shift = 0.0
    if load > 0.7 and not is_protected:
        shift -= 0.3 * (load - 0.7)
    if load < 0.3:
        shift += 0.1 * (0.3 - load)
    if features["cost"] > 0.5:
        shift -= 0.2 * (features["cost"] - 0.5)
    return shift


def _confidence(values: list[float]) -> float:
    if not values:
        return 0.1
    present = sum(value > 0 for value in values) / len(values)
    extreme = sum(value > 0.8 or value < 0.2 for value in values)
    return max(0.1, present - min(0.3, 0.1 * extreme))
