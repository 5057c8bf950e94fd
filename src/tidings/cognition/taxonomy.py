"""
The cognitive event types, the trace each of them carries, and how they become events of the bus.

A family of types shares a topic (``cognitive.memory``, ``cognitive.attention``, ...), so that a group reads one topic
and not twenty-five. The five types that the bus's document names itself go to ``workspace``. The trace travels in the
envelope, under ``cognitive``; readers that do not know it pass over it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, TypeVar

import msgspec

from tidings.core.events import Event, EventMeta

from .errors import InvalidRequest


class CognitiveEventType(enum.StrEnum):
    """What happens in the cognitive layer."""

    WRITE_INITIATED = "cognitive.memory.write.initiated"
    WRITE_SPACE_RESOLVED = "cognitive.memory.write.space_resolved"
    WRITE_REDACTED = "cognitive.memory.write.redacted"
    WRITE_COMMITTED = "cognitive.memory.write.committed"
    WRITE_FAILED = "cognitive.memory.write.failed"
    RECALL_CONTEXT_REQUESTED = "cognitive.recall.context.requested"
    RECALL_STORES_QUERIED = "cognitive.recall.stores.queried"
    RECALL_RESULTS_FUSED = "cognitive.recall.results.fused"
    RECALL_BUNDLE_ASSEMBLED = "cognitive.recall.bundle.assembled"
    RECALL_BUNDLE_FAILED = "cognitive.recall.bundle.failed"
    GATE_ADMIT = "cognitive.attention.gate.admit"
    GATE_DEFER = "cognitive.attention.gate.defer"
    GATE_BOOST = "cognitive.attention.gate.boost"
    GATE_DROP = "cognitive.attention.gate.drop"
    WORKING_MEMORY_UPDATED = "cognitive.working_memory.updated"
    WORKING_MEMORY_EVICTED = "cognitive.working_memory.evicted"
    DECISION_REQUESTED = "cognitive.arbitration.decision.requested"
    DECISION_MADE = "cognitive.arbitration.decision.made"
    DECISION_FAILED = "cognitive.arbitration.decision.failed"
    HABIT_EVALUATED = "cognitive.arbitration.habit.evaluated"
    PLANNER_EVALUATED = "cognitive.arbitration.planner.evaluated"
    OUTCOME_RECEIVED = "cognitive.learning.outcome.received"
    HABIT_UPDATED = "cognitive.learning.habit.updated"
    PLANNER_UPDATED = "cognitive.learning.planner.updated"
    SELF_MODEL_UPDATED = "cognitive.learning.self_model.updated"

    ATTENTION_REQUEST = "ATTENTION_REQUEST"
    WORKING_MEMORY_UPDATE = "WORKING_MEMORY_UPDATE"
    GLOBAL_WORKSPACE_BROADCAST = "GLOBAL_WORKSPACE_BROADCAST"
    COGNITIVE_LOAD_ALERT = "COGNITIVE_LOAD_ALERT"
    FOCUS_SHIFT_REQUEST = "FOCUS_SHIFT_REQUEST"

    @property
    def family(self) -> str:
        """The second word of a dotted name (``memory``, ``recall``, ...); ``workspace`` for the others."""
        return self.value.split(".")[1] if "." in self.value else "workspace"


class Stage(enum.StrEnum):
    """How far the work on an event has come."""

    INITIATED = "initiated"
    VALIDATION = "validation"
    ROUTING = "routing"
    PROCESSING = "processing"
    COORDINATION = "coordination"
    COMPLETION = "completion"
    ERROR_HANDLING = "error_handling"


class CognitiveErrorType(enum.StrEnum):
    """What kind of thing went wrong."""

    VALIDATION = "validation"
    ROUTING = "routing"
    PROCESSING = "processing"
    TIMEOUT = "timeout"
    COORDINATION = "coordination"
    RESOURCE = "resource"
    INTEGRITY = "integrity"


class NeuralPathway(enum.StrEnum):
    """Which way an event takes."""

    HIPPOCAMPAL = "hippocampal"
    THALAMIC = "thalamic"
    CORTICAL = "cortical"
    PREFRONTAL = "prefrontal"


class RoutingStrategy(enum.StrEnum):
    """How consumers are chosen."""

    BROADCAST = "broadcast"
    ROUND_ROBIN = "round_robin"
    PRIORITY = "priority"
    STICKY_SESSION = "sticky_session"
    COGNITIVE_LOAD = "cognitive_load"


Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class CognitiveTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a piece of work came from, how far it is, and what it may cost."""

    trace_id: str
    space_id: str
    started_at: datetime
    stage_started_at: datetime
    parent_trace_id: str | None = None
    session_id: str | None = None
    actor_id: str | None = None
    stage: Stage = Stage.INITIATED
    latency_budget_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=1, le=10)] = 5
    salience_score: Share = 0.0
    routing_strategy: RoutingStrategy = RoutingStrategy.BROADCAST
    retry_count: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_retries: Annotated[int, msgspec.Meta(ge=0)] = 3
    cognitive_load: Share = 0.0
    attention_level: Share = 0.0
    working_memory_pressure: Share = 0.0

    def at_stage(self, stage: Stage, now: datetime) -> CognitiveTrace:
        """The same work, one stage on."""
        return msgspec.structs.replace(self, stage=stage, stage_started_at=now)

    def child(self, trace_id: str, now: datetime) -> CognitiveTrace:
        """A piece of work that this one sets off."""
        return msgspec.structs.replace(
            self,
            trace_id=trace_id,
            parent_trace_id=self.trace_id,
            started_at=now,
            stage_started_at=now,
            stage=Stage.INITIATED,
            retry_count=0,
        )

    def retried(self, now: datetime) -> CognitiveTrace | None:
        """The same work tried again; ``None`` when it was tried often enough."""
        if self.retry_count >= self.max_retries:
            return None
        return msgspec.structs.replace(
            self, retry_count=self.retry_count + 1, stage=Stage.INITIATED, stage_started_at=now
        )

    def is_over_budget(self, now: datetime) -> bool:
        """Whether more time has passed than the budget has."""
        budget_ms = self.latency_budget_ms
        return budget_ms is not None and now - self.started_at > timedelta(milliseconds=budget_ms)


class CognitiveExtras(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Further hints for those who handle an event."""

    source_component: str | None = None
    target_components: tuple[str, ...] = ()
    requires_coordination: bool = False
    coordination_timeout_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    neural_pathway: NeuralPathway | None = None
    plasticity_required: bool = False
    neuromodulation: dict[str, float] = {}


_T = TypeVar("_T", CognitiveTrace, CognitiveExtras)
_KEY: Final = "cognitive"
_NO_EXTRAS: Final = CognitiveExtras()


def topic_of(kind: CognitiveEventType) -> str:
    """The topic of a type's family."""
    return kind.family if kind.family == "workspace" else f"cognitive.{kind.family}"


def cognitive_event(
    kind: CognitiveEventType,
    trace: CognitiveTrace,
    payload: Mapping[str, Any],
    *,
    event_id: str,
    ts: datetime,
    extras: CognitiveExtras = _NO_EXTRAS,
    topic: str | None = None,
) -> Event:
    """An event of a cognitive type, with its trace in the envelope."""
    carried = {**msgspec.to_builtins(trace), **msgspec.to_builtins(extras)}
    meta = EventMeta(
        topic=topic if topic is not None else topic_of(kind),
        type=kind.value,
        space_id=trace.space_id,
        event_id=event_id,
        ts=ts,
        actor=trace.actor_id,
        trace_id=trace.trace_id,
        priority=trace.priority,
        extra={_KEY: carried},
    )
    return Event(meta, payload)


def trace_of(event: Event) -> CognitiveTrace | None:
    """
    The trace an event carries; ``None`` if it carries none.

    Raises:
        InvalidRequest: It carries one that cannot be read.
    """
    return _carried(event, CognitiveTrace)


def extras_of(event: Event) -> CognitiveExtras | None:
    """
    The hints an event carries; ``None`` if it has no trace.

    Raises:
        InvalidRequest: They cannot be read.
    """
    return _carried(event, CognitiveExtras)


def _carried(event: Event, kind: type[_T]) -> _T | None:
    found = (event.meta.extra or {}).get(_KEY)
    if found is None:
        return None
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"meta.extra.{_KEY}", str(error)) from error
