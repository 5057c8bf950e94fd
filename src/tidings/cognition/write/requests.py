"""
What a write is: its settings, who asks for it, and how an event becomes a request to write.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec

from tidings.core.events import Event, SecurityBand
from tidings.core.ids import derived_id

from ..errors import InvalidRequest
from ..ports import zone_of

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class MergeStrategy(enum.StrEnum):
    """What becomes of a near-duplicate."""

    MERGE_CONTENT = "merge_content"
    """Sentences that are new are added to the memory there is."""
    APPEND_CONTEXT = "append_context"
    """The new text is kept beside the old one, as context."""
    TEMPORAL_UPDATE = "temporal_update"
    """Only noted that it was said again, and when."""
    LINK_ONLY = "link_only"
    """Stored for itself, with a link."""


class ConsolidationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a space is worth tidying up: at so many writes, so many duplicates, or so long after the last time."""

    writes: Count = 50
    duplicates: Count = 10
    age_s: Annotated[float, msgspec.Meta(gt=0)] = 6 * 3600.0
    budget_ms: Count = 2000


class WriteSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How memories are written."""

    dedupe_window_s: Annotated[float, msgspec.Meta(gt=0)] = 168 * 3600.0
    link_at: Share = 0.8
    merge_above: Share = 0.9
    strategy: MergeStrategy = MergeStrategy.MERGE_CONTENT
    candidates_count_max: Count = 64
    recent_count_max: Count = 256
    """How many of a space's last memories novelty is measured against."""
    text_chars_max: Count = 50_000
    context_count_max: Count = 20
    episode_gap_s: Annotated[float, msgspec.Meta(gt=0)] = 2 * 3600.0
    """A longer silence begins a new episode, also within a part of the day."""
    tz: str = "UTC"
    """For writes that name no zone of their own."""
    policy_version: str = "1.0.0"
    consolidation: ConsolidationSettings = ConsolidationSettings()


class OutboxSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the outbox is emptied."""

    attempts_max: Count = 5
    delay_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    delay_s_max: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    multiplier: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    batch_count_max: Count = 100
    keep_delivered_s: Annotated[float, msgspec.Meta(ge=0)] = 86_400.0


_NOBODY: Final = "unknown"
_TAGS_MAX: Final = 64
_MENTION: Final = re.compile(r"(?<![\w@.])@([A-Za-z][\w-]{0,63})(?![\w.]*@)")


class WriteIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which write it is: what can be said of every write event, also of one that asks for nothing that can be written."""

    source_key: str
    """The same for every delivery of the same write."""
    event_id: str
    trace_id: str
    actor_id: str
    envelope_space: str
    latency_budget_ms: float | None = None


class WriteRequest(WriteIdentity, frozen=True, kw_only=True):
    """A memory somebody wants written."""

    band: SecurityBand
    content: Mapping[str, Any]
    occurred_at: datetime
    tz: str
    tags: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    participants: tuple[str, ...] = ()
    obligations: tuple[str, ...] = ()
    space_hint: str | None = None
    source: str = "bus"
    confidence: float = 1.0
    mls_epoch: int | None = None


def write_identity_of(event: Event) -> WriteIdentity:
    """Which write an event is. Reads leniently: what is missing or of another shape counts as not given."""
    meta = event.meta
    actor_id = _actor_id(event) or _NOBODY
    # The actor is part of the key: what two people do under keys that happen to be alike are two writes.
    key = (meta.topic, meta.space_id, actor_id, meta.idem_key) if meta.idem_key else (meta.event_id,)
    budget = _field(event.payload.get("qos"), "latency_budget_ms") or _field(meta.qos, "latency_budget_ms")
    is_number = isinstance(budget, int | float) and math.isfinite(budget)
    return WriteIdentity(
        source_key=derived_id("write", *(str.__str__(part) for part in key)),
        event_id=meta.event_id,
        trace_id=meta.trace_id or derived_id("trace", meta.event_id),
        actor_id=actor_id,
        envelope_space=meta.space_id,
        latency_budget_ms=float(budget) if is_number else None,
    )


def write_request_of(event: Event, *, tz_default: str, text_chars_max: int) -> WriteRequest:
    """
    Read a write event.

    An event without an actor is refused: a memory needs somebody whose it is. One without a band, or with an unknown one,
    is handled as RED: stored, redacted and not shared further than it must be.

    Raises:
        InvalidRequest: There is no actor, no content, too much of it, or a value of another shape.
    """
    meta, payload = event.meta, event.payload
    if _actor_id(event) is None:
        raise InvalidRequest("meta.actor", "a write names the actor whose memory it is")
    content = payload.get("content")
    if content is None and isinstance(payload.get("text"), str):
        content = {"text": payload["text"]}
    if isinstance(content, str):
        content = {"text": content}
    if not isinstance(content, Mapping) or not content:
        raise InvalidRequest("payload.content", "a write has content: a text, or an object")
    try:
        size = len(msgspec.json.encode(content))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest("payload.content", "is not JSON") from error
    # Four bytes a character is the most UTF-8 takes; what is escaped or structured counts as what it takes.
    if size > 4 * text_chars_max:
        raise InvalidRequest("payload.content", f"is {size} bytes long; at most {4 * text_chars_max} are allowed")
    text = content.get("text")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest("payload.content.text", "must be a string")
    if text is not None and len(text) > text_chars_max:
        raise InvalidRequest("payload.content.text", f"is longer than {text_chars_max} characters")
    tz = _text(payload, "tz") or tz_default
    zone_of(tz)
    epoch = payload.get("mls_epoch")
    mentioned = tuple(dict.fromkeys((*_texts(payload, "mentions"), *_MENTION.findall(text or ""))))
    return WriteRequest(
        **msgspec.structs.asdict(write_identity_of(event)),
        band=SecurityBand(meta.band) if meta.band in set(SecurityBand) else SecurityBand.RED,
        content=content,
        occurred_at=_moment(payload, "occurred_at") or meta.ts.astimezone(UTC),
        tz=tz,
        tags=_texts(payload, "tags"),
        mentions=mentioned[:_TAGS_MAX],
        participants=_texts(payload, "participants"),
        obligations=_texts(payload, "obligations"),
        space_hint=_text(payload, "space_hint"),
        source=_text(payload, "source") or "bus",
        confidence=_share(payload, "confidence", 1.0),
        mls_epoch=epoch if isinstance(epoch, int) else None,
    )


def _actor_id(event: Event) -> str | None:
    actor = event.meta.actor
    actor_id = actor if isinstance(actor, str) else _field(actor, "user_id") or _field(actor, "person_id")
    return actor_id if isinstance(actor_id, str) and actor_id else None


def _field(thing: object, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _text(payload: Mapping[str, Any], name: str) -> str | None:
    value = payload.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"payload.{name}", "must be a string")
    return value or None


def _texts(payload: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = payload.get(name, ())
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise InvalidRequest(f"payload.{name}", "must be a list of strings")
    if len(value) > _TAGS_MAX:
        raise InvalidRequest(f"payload.{name}", f"has {len(value)} entries; at most {_TAGS_MAX} are allowed")
    return tuple(value)


def _moment(payload: Mapping[str, Any], name: str) -> datetime | None:
    value = _text(payload, name)
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise InvalidRequest(f"payload.{name}", "is not an ISO 8601 time") from error
    if moment.tzinfo is None:
        raise InvalidRequest(f"payload.{name}", "has no zone")
    return moment.astimezone(UTC)


def _share(payload: Mapping[str, Any], name: str, default: float) -> float:
    value = payload.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidRequest(f"payload.{name}", "must be a number from 0 to 1")
    return float(value)
