"""What is delivered: the envelope, and its one deterministic encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from .descriptors import SummaryValue


class EventScope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who may observe an event, as far as the envelope says it: a subset of four keys."""

    app_id: str | None = None
    domain_id: str | None = None
    peer_identity_id: str | None = None
    requester_identity_id: str | None = None


class GlobalAnchor(msgspec.Struct, frozen=True):
    """The place of a graph event: the seq of its record."""

    global_seq: int


class SourceAnchor(msgspec.Struct, frozen=True):
    """The place of any other event: a count of its source, within one life of the node."""

    event_seq: int


SequenceAnchor = GlobalAnchor | SourceAnchor


class EventEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """One event, normalized. Only envelopes cross the borders of engines and the socket; the fields are in the order of their encoding."""

    audience_contract: str
    emitted_at: int
    """Microseconds of the monotonic clock, for telemetry only."""
    event_id: str
    event_type: str
    payload_summary: Mapping[str, SummaryValue]
    resume_token: str
    scope: EventScope
    sequence_anchor: SequenceAnchor
    source_manager: str


_encoder: Final = msgspec.json.Encoder(order="deterministic", enc_hook=dict)
# Text, integers, null and true or false under sorted keys, without white space: of these there is one encoding, that of RFC 8785. A struct's
# fields are encoded as they are declared, which is sorted too; a read-only mapping as the dict that it shows.


def encode(value: object) -> bytes:
    """The one encoding of an envelope, or of a part of one."""
    return _encoder.encode(value)
