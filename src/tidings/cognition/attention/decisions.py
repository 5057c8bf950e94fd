"""
The events that publish a decision: one relay event for those who act on it, one audit event for those who ask why.

Neither holds a word of the request's text. Their ids follow from the request's and from its content, so that publishing a
decision twice stores it once, and a request that is heard again by a later process gets decisions of its own.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec

from tidings.core.events import Event, EventMeta
from tidings.core.ids import content_id

from ..taxonomy import CognitiveEventType
from .requests import GateAction, GateRequest, GateResponse, Intent

AUDIT_TOPIC: Final = "bus.gate.decisions.audit"
ERROR_TOPIC: Final = "bus.attention_gate.error"
LOW_SALIENCE: Final = "low_salience"
HEARINGS_EXHAUSTED: Final = "hearings_exhausted"
"""Not salient enough, as often as it may be heard."""
QUEUE_FULL: Final = "deferred_queue_full"
THRESHOLD_RAISED: Final = "admit_threshold_raised"
"""Salient enough but for the load, which has raised what it takes."""
_TOPICS: Final = {
    GateAction.ADMIT: "bus.attention_gate.admitted",
    GateAction.BOOST: "bus.attention_gate.admitted",
    GateAction.DEFER: "bus.attention_gate.deferred",
    GateAction.DROP: "bus.attention_gate.dropped",
}
_TYPES: Final = {
    GateAction.ADMIT: CognitiveEventType.GATE_ADMIT,
    GateAction.BOOST: CognitiveEventType.GATE_BOOST,
    GateAction.DEFER: CognitiveEventType.GATE_DEFER,
    GateAction.DROP: CognitiveEventType.GATE_DROP,
}
_CIRCUITS: Final = {
    Intent.WRITE: "memory",
    Intent.HIPPO_ENCODE: "memory",
    Intent.RECALL: "recall",
    Intent.PROSPECTIVE_SCHEDULE: "executive",
    Intent.PROJECT: "executive",
    Intent.UNKNOWN: "learning",  # what nothing is known about is there to be learnt from
}
BOOST_STEP: Final = 2


def relay_event(
    request: GateRequest, response: GateResponse, now: datetime, *, hearing: int, queue_position: int | None
) -> Event:
    """
    The decision, for the circuits it concerns.

    Args:
        request: What was asked.
        response: What was decided.
        now: The time of the decision.
        hearing: 1 for the first time this request was heard; a deferred one is heard again.
        queue_position: Of a deferred request, from 1.
    """
    decision, trace = response.gate_decision, response.trace
    payload: dict[str, Any] = {
        "timestamp": now.isoformat(),
        "relay_circuit": _CIRCUITS[response.derived_intents[0].intent],
        "relay_decision": decision.action.value,
        "content_id": request.request_id,
        "cognitive_load": trace.load,
        "salience_score": decision.priority,
        "hysteresis_state": {
            "previous_decision": trace.previous_decision,
            "stability_count": trace.stability_count,
            "oscillation_prevention": trace.oscillation_prevention,
        },
    }
    match decision.action:
        case GateAction.ADMIT:
            payload["processing_priority"] = processing_priority(decision.priority)
            payload["admission_reason"] = _admission_reason(response)
        case GateAction.BOOST:
            boosted = min(10, request.event_priority + BOOST_STEP)
            payload["boost_factor"] = min(10.0, max(1.1, boosted / request.event_priority))
            payload["boost_reason"] = _admission_reason(response)
            payload["original_priority"] = request.event_priority
            payload["boosted_priority"] = boosted
        case GateAction.DEFER:
            payload["defer_duration_ms"] = decision.ttl_ms
            payload["defer_reason"] = defer_reason(decision.reasons)
            payload["retry_conditions"] = ["time_elapsed", *(f"recovered:{name}" for name in _limits(decision.reasons))]
            payload["queue_position"] = queue_position
        case GateAction.DROP:
            payload["drop_reason"] = _drop_reason(response)
    return _event(request, _TOPICS[decision.action], _TYPES[decision.action], payload, now, "relay", hearing)


def audit_event(request: GateRequest, response: GateResponse, now: datetime, *, hearing: int) -> Event:
    """The decision with its whole trace, for audits and for learning better thresholds."""
    payload = {
        "request_id": request.request_id,
        "space_id": request.space_id,
        "band": request.band,
        "decided_at": now.isoformat(),
        **msgspec.to_builtins(
            {
                "gate_decision": response.gate_decision,
                "derived_intents": response.derived_intents,
                "routing": response.routing,
                "trace": response.trace,
            }
        ),
    }
    kind = _TYPES[response.gate_decision.action]
    return _event(request, AUDIT_TOPIC, kind, payload, now, "audit", hearing)


def error_event(request: GateRequest, problem: str, now: datetime) -> Event:
    """The request could not be judged, and was refused for that."""
    payload = {"timestamp": now.isoformat(), "content_id": request.request_id, "problem": problem}
    return _event(request, ERROR_TOPIC, CognitiveEventType.GATE_DROP, payload, now, "error", 1)


def processing_priority(priority: float) -> int:
    """A priority in 0..1 as one of 1 to 10."""
    return min(10, max(1, round(priority * 10)))


def _event(
    request: GateRequest, topic: str, kind: str, payload: dict[str, Any], now: datetime, part: str, hearing: int
) -> Event:
    meta = EventMeta(
        topic=topic,
        type=kind,
        space_id=request.space_id or "unknown",
        event_id=content_id("gate", payload, request.request_id, part, str(hearing)),
        ts=now,
        trace_id=request.trace_id,
    )
    return Event(meta, payload)


def _admission_reason(response: GateResponse) -> str:
    if "fast_path" in response.gate_decision.reasons:
        return "executive_override"
    features = response.trace.features
    if features.get("urgency", 0.0) >= 0.6:
        return "urgent_priority"
    if response.derived_intents[0].intent is Intent.RECALL:
        return "working_memory_request"
    return "attention_capture" if features.get("arousal", 0.0) > 0.7 else "high_salience"


def _limits(reasons: tuple[str, ...]) -> list[str]:
    return [name for name in reasons if name.endswith("_high") or name in ("rate_limited", "breaker_open")]


def defer_reason(reasons: tuple[str, ...]) -> str:
    """Why a request has to wait, in a word."""
    if "queue_depth_high" in reasons:
        return "working_memory_full"
    if "rate_limited" in reasons or "breaker_open" in reasons:
        return "resource_contention"
    if "no_admission_under_load" in reasons or THRESHOLD_RAISED in reasons or _limits(reasons):
        return "cognitive_overload"
    return LOW_SALIENCE


def _drop_reason(response: GateResponse) -> str:
    path, reasons = response.trace.decision_path, response.gate_decision.reasons
    if path[-1] == "policy":
        return "policy_violation"
    if QUEUE_FULL in reasons:
        return "resource_protection"
    if HEARINGS_EXHAUSTED in reasons:
        return "attention_filter"
    if path[-1] == "capacity":
        return "cognitive_overload_protection"
    return LOW_SALIENCE
