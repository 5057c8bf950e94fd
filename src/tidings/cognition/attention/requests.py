"""
What the gate is asked, what it answers, and its settings; and how an event becomes a request.

An event without an actor is treated as a guest's, and one without a band under the gate's default band: what is not known is
treated with care, never guessed to be harmless.

There are two named profiles. ``CONFIGURED`` is the one that was in force and is the default; ``README`` is the one that was
written down. Where the second gives no value it has the first's; where it has no weight for a feature, that counts nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from tidings.core.events import Actor, Event, SecurityBand

from ..resilience import BreakerSettings, RateSettings

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much each feature counts. Risk, cost and social risk count against."""

    urgency: Weight = 1.0
    novelty: Weight = 0.8
    value: Weight = 0.9
    risk: Weight = 0.7
    cost: Weight = 0.6
    social_risk: Weight = 0.5
    arousal: Weight = 0.4
    valence: Weight = 0.2
    context_bump: Weight = 0.3
    temporal_fit: Weight = 0.3
    personal_relevance: Weight = 0.0
    goal_alignment: Weight = 0.0


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Priorities at which the action changes."""

    drop: Share = 0.20
    admit: Share = 0.60
    boost: Share = 0.80


class LoadLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At the first number of each pair requests are deferred, at the second refused."""

    queue_defer: int = 100
    queue_drop: int = 200
    load_defer: Share = 0.80
    load_drop: Share = 0.95
    requests_per_minute_max: Annotated[int, msgspec.Meta(ge=1)] = 1000
    error_rate_defer: Share = 0.10
    error_rate_drop: Share = 0.20
    outcomes_count_max: Annotated[int, msgspec.Meta(ge=1)] = 100
    outcomes_count_min: Annotated[int, msgspec.Meta(ge=1)] = 10
    """Fewer outcomes than this say nothing, neither of errors nor of latency."""
    outcomes_age_s_max: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Older outcomes no longer count, so that what was refused for them is let in again."""
    latency_ms_defer: float = 500.0
    latency_ms_drop: float = 1000.0


class GateProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the gate's decisions depend on besides the request and the load."""

    name: str
    weights: Weights = Weights()
    thresholds: Thresholds = Thresholds()
    bias: float = 0.0
    temperature: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    calibration_a: float = 1.0
    calibration_b: float = 0.0
    rate: RateSettings = RateSettings(per_second=10.0, burst=20)
    breaker: BreakerSettings = BreakerSettings()
    limits: LoadLimits = LoadLimits()
    hysteresis_margin: Share = 0.02
    text_chars_max: Annotated[int, msgspec.Meta(ge=1)] = 50_000
    deferred_count_max: Annotated[int, msgspec.Meta(ge=1)] = 200
    low_salience_hearings_max: Annotated[int, msgspec.Meta(ge=1)] = 5
    """An event that is not salient enough at so many hearings is dropped at the last; a hearing that only found the gate
    busy does not count. Fewer than a durable group's six deliveries: the gate decides before the group gives up."""
    remembered_count_max: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    """Actors, sources and decisions that the gate remembers, each; the ones unused for longest are forgotten."""


CONFIGURED: Final = GateProfile(name="configured")
README: Final = GateProfile(
    name="readme",
    weights=Weights(
        urgency=1.2,
        novelty=0.8,
        value=0.6,
        risk=1.4,
        cost=0.9,
        social_risk=1.0,
        arousal=0.3,
        valence=0.0,
        context_bump=0.3,
        temporal_fit=0.0,
    ),
    thresholds=Thresholds(admit=0.55, boost=0.75, drop=0.20),
    rate=RateSettings(per_second=2.0, burst=5),
    breaker=BreakerSettings(failure_share=0.25, window_s=30.0, open_s=15.0),
)
PROFILES: Final = {profile.name: profile for profile in (CONFIGURED, README)}


class BandRule(msgspec.Struct, frozen=True, kw_only=True):
    """What a band does to a request."""

    priority_max: float
    boost_min: float
    processing_ms_max: int
    risk: float


BAND_RULES: Final = {
    SecurityBand.GREEN: BandRule(priority_max=1.0, boost_min=0.0, processing_ms_max=30_000, risk=0.0),
    SecurityBand.AMBER: BandRule(priority_max=0.8, boost_min=0.0, processing_ms_max=15_000, risk=0.3),
    SecurityBand.RED: BandRule(priority_max=0.5, boost_min=0.9, processing_ms_max=5_000, risk=0.6),
    SecurityBand.BLACK: BandRule(priority_max=0.3, boost_min=1.0, processing_ms_max=0, risk=0.8),
}


class GateAction(enum.StrEnum):
    """What the gate decides, from least to most welcome."""

    DROP = "DROP"
    DEFER = "DEFER"
    ADMIT = "ADMIT"
    BOOST = "BOOST"

    @property
    def rank(self) -> int:
        """0 for DROP to 3 for BOOST."""
        return list(GateAction).index(self)


class Intent(enum.StrEnum):
    """What a request is for."""

    PROSPECTIVE_SCHEDULE = "PROSPECTIVE_SCHEDULE"
    RECALL = "RECALL"
    WRITE = "WRITE"
    PROJECT = "PROJECT"
    HIPPO_ENCODE = "HIPPO_ENCODE"
    UNKNOWN = "UNKNOWN"


class GateActor(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks."""

    person_id: str
    role: str = "member"
    device_trust: str = "normal"


class Affect(msgspec.Struct, frozen=True, kw_only=True):
    """How the person seems to feel."""

    valence: float = 0.0
    arousal: float = 0.0
    confidence: float = 0.0
    tags: tuple[str, ...] = ()


class Metacog(msgspec.Struct, frozen=True, kw_only=True):
    """How sure the system is of itself."""

    uncertainty: float = 0.0
    confidence: float = 0.0
    surprise: float = 0.0


class RequestQos(msgspec.Struct, frozen=True, kw_only=True):
    """What the device can afford."""

    budget_ms: float = 15.0
    device_thermal: str = "Nominal"
    battery_level: float = 1.0
    routing: str = "gate-path"


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What surrounds the request."""

    recent_similar_requests: int = 0
    child_present: bool = False
    time_of_day: str | None = None
    personal_relevance: float = 0.0
    goal_alignment: float = 0.0


class GateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One question to the gate. ``band`` is text: an unknown one is refused by the gate, not by a parser."""

    request_id: str
    actor: GateActor
    space_id: str
    band: str
    text: str = ""
    attachments: int = 0
    deadline: str | None = None
    obligations: tuple[str, ...] = ()
    declared_intent: str | None = None
    declared_confidence: float = 0.0
    affect: Affect | None = None
    metacog: Metacog | None = None
    qos: RequestQos = RequestQos()
    context: Context | None = None
    event_priority: int = 5
    trace_id: str | None = None
    version: str = "1.0"


class IntentGuess(msgspec.Struct, frozen=True):
    """An intent and how likely it is."""

    intent: Intent
    confidence: float


class GateDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict."""

    action: GateAction
    priority: float
    reasons: tuple[str, ...]
    obligations: tuple[str, ...]
    ttl_ms: int
    confidence: float
    uncertainty: float


class GateRouting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the request goes next."""

    topic: str
    priority: int
    deadline: str | None
    retries_max: int
    retry_multiplier: float = 1.5
    processing_ms_max: int = 30_000


class GateTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Why: numbers and names of rules, never the request's text."""

    features: dict[str, float]
    weights: dict[str, float]
    raw_score: float
    load_shift: float
    calibrated_priority: float
    thresholds: dict[str, float]
    load: float
    decision_path: tuple[str, ...]
    previous_decision: str | None
    stability_count: int
    oscillation_prevention: bool
    execution_time_ms: float


class GateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer in full."""

    request_id: str
    gate_decision: GateDecision
    derived_intents: tuple[IntentGuess, ...]
    routing: GateRouting
    trace: GateTrace


_TEXT_KEYS: Final = ("text", "content", "title", "what")


def request_of(event: Event, *, band_default: SecurityBand | None = SecurityBand.AMBER) -> GateRequest:
    """
    The question that an event puts to the gate.

    Args:
        event: Read leniently: a payload that lacks a part, or has it in another shape, counts as not having it.
        band_default: For an event without a band; ``None`` has such events refused.
    """
    meta, payload = event.meta, event.payload
    band = meta.band if meta.band is not None else band_default
    qos = meta.qos
    routing = _get(qos, "routing") or "gate-path"
    hints, context, affect, metacog = (_mapping(payload.get(key)) for key in ("hints", "context", "affect", "metacog"))
    given_qos = _mapping(payload.get("qos"))
    return GateRequest(
        request_id=meta.event_id,
        actor=_actor_of(meta.actor, payload),
        space_id=meta.space_id,
        band="" if band is None else str.__str__(band),
        text=_text_of(payload),
        attachments=len(attached) if isinstance(attached := payload.get("attachments"), list | tuple) else 0,
        deadline=_word(hints.get("deadline")) or _word(payload.get("deadline")),
        obligations=_words(payload.get("obligations")),
        declared_intent=_word(payload.get("intent")),
        declared_confidence=_number(payload.get("intent_confidence"), 0.0),
        affect=Affect(
            valence=_number(affect.get("valence"), 0.0),
            arousal=_number(affect.get("arousal"), 0.0),
            confidence=_number(affect.get("confidence"), 0.0),
            tags=_words(affect.get("tags")),
        )
        if affect
        else None,
        metacog=Metacog(**{name: _number(metacog.get(name), 0.0) for name in Metacog.__struct_fields__})
        if metacog
        else None,
        qos=RequestQos(
            budget_ms=_number(given_qos.get("budget_ms"), 15.0),
            device_thermal=_word(given_qos.get("device_thermal")) or "Nominal",
            battery_level=_number(given_qos.get("battery_level"), 1.0),
            routing=str(routing),
        ),
        context=Context(
            recent_similar_requests=int(_number(context.get("recent_similar_requests"), 0.0)),
            child_present=context.get("child_present") is True,
            time_of_day=_word(context.get("time_of_day")),
            personal_relevance=_number(context.get("personal_relevance"), 0.0),
            goal_alignment=_number(context.get("goal_alignment"), 0.0),
        )
        if context
        else None,
        event_priority=_priority_of(meta.priority, _get(qos, "priority")),
        trace_id=meta.trace_id,
    )


def _actor_of(actor: str | Actor | Mapping[str, Any] | None, payload: Mapping[str, Any]) -> GateActor:
    if actor is None or actor == "":
        return GateActor(person_id="unknown", role="guest", device_trust="low")
    if isinstance(actor, str):
        person_id: object = actor
        more: Mapping[str, Any] = {}
    else:
        person_id = _get(actor, "user_id") or _get(actor, "person_id") or ""
        more = actor if isinstance(actor, Mapping) else {}
    given = _mapping(payload.get("actor"))
    role = _word(more.get("role")) or _word(given.get("role")) or "member"
    trust = _word(more.get("device_trust")) or _word(given.get("device_trust")) or "normal"
    return GateActor(person_id=str(person_id), role=role, device_trust=trust)


def _text_of(payload: Mapping[str, Any]) -> str:
    for key in _TEXT_KEYS:
        value = payload.get(key)
        if isinstance(value, Mapping):
            value = value.get("text")
        if isinstance(value, str):
            return value
    return ""


def _priority_of(*given: object) -> int:
    for value in given:
        if isinstance(value, int) and not isinstance(value, bool):
            return min(10, max(1, value))
    return 5


def _get(thing: object, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _words(value: object) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list | tuple) else ()


def _number(value: object, default: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else default  # type: ignore[arg-type]  # narrowed by is_number
