"""
What is known about a request: whether it may be processed at all, what it is for, and how much attention it deserves.

``screen`` fails closed: what is missing or not known is refused, with the reason. ``derive_intents`` guesses from the
request's words, its tags and its own claim; no word counts for two intents. ``salience_of`` scores twelve features:

    S = urgency + novelty + value + arousal + valence + context_bump + temporal_fit + personal_relevance
        + goal_alignment + bias - risk - cost - social_risk          (each times its weight)
    priority = sigmoid(A * S / T + B)

Plain functions of a request and a profile: the same request always scores the same.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import msgspec

from tidings.core.events import SecurityBand

from ..ports import clip01, sigmoid
from ..words import count_words, has_secret, personal_data_kinds
from .requests import BAND_RULES, GateAction, GateProfile, GateRequest, GateRouting, Intent, IntentGuess

_AUDITED_SPACES: Final = ("shared:", "extended:", "interfamily:")


class Screening(msgspec.Struct, frozen=True, kw_only=True):
    """What the first stage found."""

    band: SecurityBand
    refusals: tuple[str, ...]
    notes: tuple[str, ...]
    obligations: tuple[str, ...]
    processing_ms_max: int


def screen(request: GateRequest, text_chars_max: int) -> Screening:
    """Check a request's form and policy, and collect what has to be done with it whatever is decided."""
    refusals = [
        f"missing:{name}"
        for name, value in (
            ("request_id", request.request_id),
            ("actor.person_id", request.actor.person_id),
            ("space_id", request.space_id),
            ("policy.band", request.band),
        )
        if not value
    ]
    is_known = request.band in set(SecurityBand)
    band = SecurityBand(request.band) if is_known else SecurityBand.BLACK
    if request.band and not is_known:
        refusals.append("band_unknown")
    elif is_known and band is SecurityBand.BLACK:
        refusals.append("band_black")
    if len(request.text) > text_chars_max:
        # Said before anything searches it: the limit is also what bounds the work on hostile text.
        refusals.append("text_too_long")
        return Screening(
            band=band, refusals=tuple(refusals), notes=(), obligations=request.obligations, processing_ms_max=0
        )

    notes: list[str] = []
    obligations = set(request.obligations)
    if band.rank >= SecurityBand.RED.rank:
        obligations.add("AUDIT_ACCESS")
        if has_secret(request.text):
            refusals.append("secret_in_restricted_band")
    if band is SecurityBand.AMBER:
        obligations.add("LOG_ACCESS")
    kinds = personal_data_kinds(request.text)
    if kinds:
        obligations.add("REDACT_PII")
        notes.extend(f"personal_data:{kind}" for kind in kinds)
    audited = [f"role:{request.actor.role}"] if request.actor.role in ("guest", "child") else []
    if request.space_id.startswith(_AUDITED_SPACES):
        audited.append(f"space:{request.space_id.partition(':')[0]}")
    if audited:
        obligations.add("AUDIT_ACCESS")
        notes.extend(audited)
    return Screening(
        band=band,
        refusals=tuple(refusals),
        notes=tuple(notes),
        obligations=tuple(sorted(obligations)),
        processing_ms_max=BAND_RULES[band].processing_ms_max,
    )


_PATTERNS: Final[dict[Intent, tuple[str, ...]]] = {
    Intent.PROSPECTIVE_SCHEDULE: ("remind", "reminder", "schedule", "appointment", "alarm", "timer", "due"),
    Intent.RECALL: ("recall", "what did", "when did", "where did", "who was", "find", "search", "look up", "show me"),
    Intent.WRITE: ("save", "note", "write down", "record", "store", "jot", "log"),
    Intent.PROJECT: ("plan", "planning", "project", "outline", "organise", "organize", "roadmap"),
    Intent.HIPPO_ENCODE: ("remember", "memory", "learned", "learnt", "experienced", "happened", "felt"),
}
_FUTURE: Final = ("tomorrow", "tonight", "later", "soon", "next week", "next month", "next year")
_PAST: Final = ("yesterday", "ago", "earlier", "previously", "last night", "last week", "last month", "last year")
_GUESSES_MAX: Final = 3
_TOPICS: Final = {
    Intent.PROSPECTIVE_SCHEDULE: ("bus.prospective.schedule", 1),
    Intent.RECALL: ("bus.retrieval.query", 2),
    Intent.WRITE: ("bus.write.ingest", 1),
    Intent.PROJECT: ("bus.planning.project", 1),
    Intent.HIPPO_ENCODE: ("bus.hippocampus.encode", 3),
    Intent.UNKNOWN: ("bus.hippocampus.encode", 3),
}
_BY_ACTION: Final = {GateAction.BOOST: 2, GateAction.DEFER: -1}


def derive_intents(request: GateRequest) -> tuple[IntentGuess, ...]:
    """The likeliest intents, at most three, best first; without any sign, an experience to encode."""
    sources: dict[Intent, list[float]] = defaultdict(list)
    if request.declared_intent is not None and request.declared_confidence > 0:
        known = request.declared_intent in set(Intent)
        declared = Intent(request.declared_intent) if known else Intent.UNKNOWN
        sources[declared].append(clip01(request.declared_confidence))
    for intent, words in _PATTERNS.items():
        matched = count_words(request.text, words)
        if matched:
            sources[intent].append(min(0.9, 0.3 + 0.2 * matched))
    if count_words(request.text, _FUTURE):
        sources[Intent.PROSPECTIVE_SCHEDULE].append(0.6)
    if count_words(request.text, _PAST):
        sources[Intent.RECALL].append(0.5)
    tags = () if request.affect is None else request.affect.tags
    if "urgent" in tags:
        sources[Intent.PROSPECTIVE_SCHEDULE].append(0.7)
    if "reflective" in tags:
        sources[Intent.HIPPO_ENCODE].append(0.6)
    if not sources:
        return (IntentGuess(Intent.HIPPO_ENCODE, 0.6),)
    order = list(Intent)
    guesses = [IntentGuess(intent, combine(confidences)) for intent, confidences in sources.items()]
    guesses.sort(key=lambda guess: (-guess.confidence, order.index(guess.intent)))
    return tuple(guesses[:_GUESSES_MAX])


def combine(confidences: list[float]) -> float:
    """One source speaks for itself; several add up, discounted while they are few."""
    if len(confidences) == 1:
        return confidences[0]
    return min(0.95, sum(confidences) * min(1.0, 0.2 * len(confidences)))


def route(intent: Intent, action: GateAction, deadline: str | None, processing_ms_max: int) -> GateRouting:
    """Where a request of this intent goes, and how hard it is tried."""
    topic, base = _TOPICS[intent]
    return GateRouting(
        topic=topic,
        priority=max(0, base + _BY_ACTION.get(action, 0)),
        deadline=deadline,
        retries_max=3 if action is GateAction.BOOST else 1,
        processing_ms_max=processing_ms_max,
    )


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
