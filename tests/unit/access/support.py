"""What the tests of access share: records as the log would commit them, and a book that reads them."""

from __future__ import annotations

from typing import Any

import msgspec

from tidings.access.administration import ACCESS_TOPIC, Change, event_of
from tidings.access.book import AccessBook
from tidings.access.context import OperationContext, TokenClaims
from tidings.access.settings import AccessSettings
from tidings.log.record import Record, RecordMeta, Sealed

TIME = "2026-01-01T00:00:00.000000Z"


def raw_record(
    seq: int,
    kind: str,
    payload: Any,
    *,
    offset: int | None = None,
    sealed: Sealed | None = None,
    topic: str = ACCESS_TOPIC,
) -> Record:
    """A record with any payload at all; bytes are taken as they are."""
    meta = RecordMeta(
        written_at=TIME, topic=topic, type=kind, space_id="system", event_id=f"e{seq}", ts=TIME, sealed=sealed
    )
    data = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
    return Record.of(seq - 1 if offset is None else offset, seq, meta, msgspec.Raw(data))


def record_of(seq: int, change: Change) -> Record:
    """The record that a change is committed as."""
    event = event_of(change, actor="test")
    return raw_record(seq, str(event.meta.type), dict(event.payload))


def book_of(*changes: Change, settings: AccessSettings | None = None) -> AccessBook:
    """A book to which the changes were applied, from seq 1 on."""
    book = AccessBook(settings)
    for seq, change in enumerate(changes, 1):
        book.apply(record_of(seq, change))
    return book


def bearer(subject: str = "alice", *, token_id: str | None = None, **claims: Any) -> OperationContext:
    """A context with some claims."""
    return OperationContext(subject, None, None, token_id, TokenClaims(**claims))
