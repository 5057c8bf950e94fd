"""
The payloads that other parts rely on, as types: what a producer fills in is what a consumer finds.

``payload_of`` turns one into the plain mapping an event carries; ``msgspec.convert`` reads it back. Unknown keys are
passed over, so that a newer producer does not stop an older consumer.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Signed = Annotated[float, msgspec.Meta(ge=-1, le=1)]


class AffectAnnotated(msgspec.Struct, frozen=True, kw_only=True):
    """On topic ``affect``: how an event felt, for the arbiter's risk gate."""

    event_id: str
    valence: Signed
    arousal: Share
    tags: tuple[str, ...] = ()
    confidence: Share = 0.0


class HippoEncode(msgspec.Struct, frozen=True, kw_only=True):
    """On topic ``hippo``: something to encode."""

    content: dict[str, Any]
    space_id: str
    occurred_at: datetime
    tags: tuple[str, ...] = ()
    embeddings_hint: bool = True


class TemporalIngest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """On topic ``temporal``: when something was, and nothing of what it was."""

    event_id: str
    space_id: str
    ts: datetime
    tz: str
    person_id: str | None = None
    tags: tuple[str, ...] = ()


class WorkspaceBroadcast(msgspec.Struct, frozen=True, kw_only=True):
    """On topic ``workspace``: what is salient now."""

    state_id: str
    salient_keys: tuple[str, ...]
    space_id: str
    generated_at: datetime


class StoreMark(msgspec.Struct, frozen=True, kw_only=True):
    """A store that holds a memory, and since when."""

    name: str
    ts: datetime


class MemoryReceiptCreated(msgspec.Struct, frozen=True, kw_only=True):
    """A write's outcome, for whoever asked for it."""

    envelope_id: str
    write_status: Literal["committed", "pending", "failed"]
    stores: tuple[StoreMark, ...]
    receipt_id: str
    memory_id: str
    content_hash: str


class TimeScope(msgspec.Struct, frozen=True, kw_only=True, rename={"from_": "from"}):
    """From when to when."""

    from_: datetime
    to: datetime


class ConsolidationTick(msgspec.Struct, frozen=True, kw_only=True):
    """On topic ``consolidation``: it is worth tidying a space up."""

    space_id: str
    scope: TimeScope
    budget_ms: Annotated[int, msgspec.Meta(ge=1)]
    reason: tuple[str, ...]


class LearningTick(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch of learning was done."""

    batch_id: str
    space_id: str
    count: Annotated[int, msgspec.Meta(ge=1)]
    started_at: datetime
    completed_at: datetime | None = None
    metrics: dict[str, float] = {}


class NeuromodAdjustment(msgspec.Struct, frozen=True, kw_only=True):
    """How mood and surprise change the learning rate."""

    space_id: str
    eta: Annotated[float, msgspec.Meta(ge=0)]
    eta_adjusted: Annotated[float, msgspec.Meta(ge=0)]
    arousal: Share
    valence: Signed
    surprise: Share
    computed_at: datetime


def payload_of(value: msgspec.Struct) -> dict[str, Any]:
    """The plain mapping that an event carries."""
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain
