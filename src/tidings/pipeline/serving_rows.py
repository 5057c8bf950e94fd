"""
From a row of ``bronze.events`` back to the record it was made from.

The table keeps the payload byte for byte and every part of the envelope that this version knows, so a record that comes back
equals the one that went in: same places, same envelope, same payload bytes, sealed ones included.

A record that was erased since has neither a payload nor a sealed one, which no other row has. It comes back with its place,
its id and an empty payload, and says by which event it was erased.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from tidings.log.record import Record, RecordMeta, Sealed

__all__ = ["ERASED_BY", "RECORD_COLUMNS", "is_erased", "record_of"]

RECORD_COLUMNS: Final = (
    *("topic", "offset", "seq", "event_id", "type", "space_id", "ts", "written_at", "partitions", "payload", "actor"),
    *("trace_id", "idem_key", "ttl_sec", "device", "band", "priority", "extra", "qos", "sealed"),
)
_FOREIGN: Final = "meta."
"""Keys of the envelope that the writer of the table did not know are kept among the extras under this prefix."""


ERASED_BY: Final = "erased_by"
"""Among the extras of an erased record: the event that asked for it."""
_NOTHING: Final = b"{}"


class _SealedPayload(msgspec.Struct, frozen=True):
    how: Sealed
    payload: msgspec.Raw


def record_of(row: Mapping[str, Any]) -> Record:
    """The record that a row was made from, or what is left of it."""
    sealed = None if row["sealed"] is None else msgspec.json.decode(row["sealed"], type=_SealedPayload)
    if sealed is not None:
        payload = sealed.payload
    elif row["payload"] is not None:
        payload = msgspec.Raw(row["payload"].encode())
    else:
        payload = msgspec.Raw(_NOTHING)
    meta = RecordMeta(
        written_at=_text_of(row["written_at"]),
        topic=row["topic"],
        type=row["type"],
        space_id=row["space_id"],
        event_id=row["event_id"],
        ts=_text_of(row["ts"]),
        actor=_value_of(row["actor"]),
        trace_id=row["trace_id"],
        idem_key=row["idem_key"],
        ttl_sec=row["ttl_sec"],
        device=_value_of(row["device"]),
        partitions=tuple(row["partitions"] or ()),
        band=row["band"],
        priority=_value_of(row["priority"]),
        qos=None if row["qos"] is None else msgspec.json.decode(row["qos"]),
        extra=_extra_of(row["extra"]),
        sealed=None if sealed is None else sealed.how,
    )
    return Record.of(row["offset"], row["seq"], meta, payload)


def is_erased(record: Record) -> bool:
    """Whether a record from the lake is what is left of one that was erased."""
    return bytes(record.payload_json) == _NOTHING and ERASED_BY in (record.meta.extra or {})


def _text_of(time: datetime) -> str:
    """A time the way the log writes it: in UTC, with six decimals."""
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _value_of(text: str | None) -> Any:
    """What was kept as JSON, or as plain text where that could not be taken for JSON."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _extra_of(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    kept: dict[str, Any] = msgspec.json.decode(text)
    own = {name: value for name, value in kept.items() if not name.startswith(_FOREIGN)}
    return own if own or not kept else None
