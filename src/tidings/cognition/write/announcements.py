"""
The events of the write workflow: those of its stages, and those that wait in the outbox for the commit.

Ids follow from the write's own key, so that a write that is delivered again, or an outbox that is emptied again after a
crash, publishes nothing twice.

An episode is the memories of one space in one part of one day. Its bucket is a local date and a part of the day, such as
``2025-09-06-evening``; the night belongs to the date it began on, so that it is one bucket and not two.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec

from tidings.core.events import Event, EventMeta
from tidings.core.ids import content_id, derived_id

from ..payloads import (
    ConsolidationTick,
    HippoEncode,
    MemoryReceiptCreated,
    StoreMark,
    TemporalIngest,
    TimeScope,
    payload_of,
)
from ..taxonomy import CognitiveEventType, CognitiveExtras, CognitiveTrace, NeuralPathway, Stage, cognitive_event
from .receipts import Receipt
from .requests import ConsolidationSettings, WriteIdentity, WriteRequest

_MORNING_FROM: Final = 5
_PARTS: Final = (("night", 22), ("evening", 17), ("afternoon", 12), ("morning", _MORNING_FROM))
_FAST_BELOW_MS: Final = 50


def bucket_of(moment: datetime, zone: ZoneInfo) -> str:
    """The bucket a moment falls into, by the clock on the wall."""
    local = moment.astimezone(zone)
    hour, date = local.hour, local.date()
    if hour < _MORNING_FROM:
        return f"{date - timedelta(days=1)}-night"
    return f"{date}-{next(part for part, first_hour in _PARTS if hour >= first_hour)}"


def episode_id(space_id: str, bucket: str, number: int) -> str:
    """The id of a bucket's ``number``-th episode, from 1."""
    return derived_id("ep", space_id, bucket, str(number))


def lane_of(latency_budget_ms: float | None) -> str:
    """``FAST`` when there is little time to encode, else ``SMART``."""
    return "FAST" if latency_budget_ms is not None and latency_budget_ms < _FAST_BELOW_MS else "SMART"


def projection(memory_id: str, bucket: str, tags: tuple[str, ...], mentions: tuple[str, ...]) -> list[dict[str, Any]]:
    """The triples by which a memory is found: its time, its topics, whom it mentions."""
    facts = [("has_time", bucket), *(("has_topic", tag) for tag in tags), *(("mentions", name) for name in mentions)]
    return [{"subject": memory_id, "predicate": predicate, "object": value} for predicate, value in facts]


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """What a space has gathered since it was last consolidated."""

    writes: int
    duplicates: int
    since_ns: int
    """The time of the first write among them."""


def due_reasons(gathered: Gathered, settings: ConsolidationSettings, now_ns: int) -> tuple[str, ...]:
    """Why it is time; empty when it is not. With nothing gathered it never is."""
    if gathered.writes == 0:
        return ()
    age_s = (now_ns - gathered.since_ns) / 1e9
    checks = (
        ("write_count", gathered.writes >= settings.writes),
        ("duplicate_count", gathered.duplicates >= settings.duplicates),
        ("age", age_s >= settings.age_s),
    )
    return tuple(reason for reason, holds in checks if holds)


HIPPO_TOPIC: Final = "hippo"
TEMPORAL_TOPIC: Final = "temporal"
RECEIPTS_TOPIC: Final = "memory.receipts"
ACCEPTED_TOPIC: Final = "write.accepted"
CONSOLIDATION_TOPIC: Final = "consolidation"
_STAGES: Final = {
    CognitiveEventType.WRITE_INITIATED: Stage.INITIATED,
    CognitiveEventType.WRITE_SPACE_RESOLVED: Stage.ROUTING,
    CognitiveEventType.WRITE_REDACTED: Stage.PROCESSING,
    CognitiveEventType.WRITE_COMMITTED: Stage.COMPLETION,
    CognitiveEventType.WRITE_FAILED: Stage.ERROR_HANDLING,
}
_EXTRAS: Final = CognitiveExtras(source_component="write_handler", neural_pathway=NeuralPathway.HIPPOCAMPAL)


class Encoding(msgspec.Struct, frozen=True, kw_only=True):
    """What the hippocampal bridge made of a memory."""

    memory_id: str
    operation: str
    episode_id: str
    """The one that holds the memory; of a merge, the one it was in before."""
    bucket: str
    """The part of the day that this write belongs to."""
    lane: str
    novelty: float
    similarity: float
    linked_to: str | None
    simhash: str
    revision: int
    triples: list[dict[str, Any]]
    flags: tuple[str, ...] = ()


def stage_event(
    kind: CognitiveEventType,
    request: WriteIdentity,
    space_id: str,
    payload: Mapping[str, Any],
    *,
    now: datetime,
    attempt: int = 1,
) -> Event:
    """
    The event of one stage.

    Its id follows from the write and from its content: an attempt that ends as the one before publishes nothing new, and one
    that ends otherwise (a policy has changed) is published beside it. A failure names its attempt, so each one is published.
    """
    budget_ms = request.latency_budget_ms
    trace = CognitiveTrace(
        trace_id=request.trace_id,
        space_id=space_id,
        actor_id=request.actor_id,
        started_at=now,
        stage_started_at=now,
        stage=_STAGES[kind],
        latency_budget_ms=None if budget_ms is None else max(1, round(budget_ms)),
        retry_count=attempt - 1,
    )
    said: dict[str, Any] = {"write_id": request.source_key, "source_event_id": request.event_id, **payload}
    if kind is CognitiveEventType.WRITE_FAILED:
        said["attempt"] = attempt
    event_id = content_id("ev", said, request.source_key, kind.value, space_id)
    return cognitive_event(kind, trace, said, event_id=event_id, ts=now, extras=_EXTRAS)


def commit_events(
    request: WriteRequest, receipt: Receipt, encoding: Encoding, content: dict[str, Any], now: datetime
) -> list[Event]:
    """What is published once a write is committed, in this order. ``content`` is the redacted one."""
    space_id = receipt.space_id
    encode = HippoEncode(content=content, space_id=space_id, occurred_at=request.occurred_at, tags=request.tags)
    ingest = TemporalIngest(
        event_id=request.event_id,
        space_id=space_id,
        ts=request.occurred_at,
        tz=request.tz,
        person_id=request.actor_id,
        tags=request.tags,
    )
    created = MemoryReceiptCreated(
        envelope_id=request.event_id,
        write_status="committed",
        stores=(StoreMark(name="memory", ts=now),),
        receipt_id=receipt.receipt_id,
        memory_id=receipt.memory_id,
        content_hash=receipt.content_hash,
    )
    committed = {"memory_id": receipt.memory_id, "receipt_id": receipt.receipt_id, "operation": receipt.operation}
    committed["content_hash"] = receipt.content_hash
    encoded = {"space_id": space_id, **msgspec.to_builtins(encoding)}
    accepted = {"memory_id": receipt.memory_id, "source_event_id": request.event_id}

    def plain(topic: str, kind: str, payload: dict[str, Any]) -> Event:
        meta = EventMeta(
            topic=topic,
            type=kind,
            space_id=space_id,
            event_id=derived_id("ev", request.source_key, topic, kind),
            ts=now,
            actor=request.actor_id,
            trace_id=request.trace_id,
            band=request.band,
        )
        return Event(meta, payload)

    return [
        stage_event(CognitiveEventType.WRITE_COMMITTED, request, space_id, committed, now=now),
        plain(ACCEPTED_TOPIC, "WRITE_ACCEPTED", accepted),
        plain(HIPPO_TOPIC, "HIPPO_ENCODE", payload_of(encode)),
        plain(HIPPO_TOPIC, "HIPPO_ENCODED", encoded),
        plain(TEMPORAL_TOPIC, "HIPPO_ENCODE", payload_of(ingest)),
        plain(RECEIPTS_TOPIC, "MEMORY_RECEIPT_CREATED", payload_of(created)),
    ]


def consolidation_event(
    space_id: str, number: int, since: datetime, now: datetime, budget_ms: int, reasons: tuple[str, ...]
) -> Event:
    """The ``number``-th call to consolidate a space."""
    scope = TimeScope(from_=min(since, now), to=now)
    tick = ConsolidationTick(space_id=space_id, scope=scope, budget_ms=budget_ms, reason=reasons)
    meta = EventMeta(
        topic=CONSOLIDATION_TOPIC,
        type="CONSOLIDATION_TICK",
        space_id=space_id,
        event_id=derived_id("ev", "consolidation", space_id, str(number)),
        ts=now,
    )
    return Event(meta, payload_of(tick))
