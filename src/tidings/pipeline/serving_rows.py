"""
From a row of ``bronze.events`` back to the record it was made from.

The table keeps the payload byte for byte and every part of the envelope that this version knows, so a record that comes back
equals the one that went in: same places, same envelope, same payload bytes, sealed ones included.

A record that was erased since has neither a payload nor a sealed one, which no other row has. It comes back with its place,
its id and an empty payload, and says by which event it was erased.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from tidings.core.events import ENVELOPE
from tidings.log.record import Record, RecordMeta, Sealed

__all__ = ["ERASED_BY", "RECORD_COLUMNS", "is_erased", "record_of"]

RECORD_COLUMNS: Final = ("offset", "seq", *(field.name for field in ENVELOPE), "payload")
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
    values = {field.name: _FROM_COLUMN[field.kind](row[field.name]) for field in ENVELOPE if field.name != "sealed"}
    values["extra"] = _extra_of(values["extra"])
    meta = RecordMeta(**values, sealed=None if sealed is None else sealed.how)
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


_FROM_COLUMN: Final[Mapping[str, Callable[[Any], Any]]] = {
    "text": lambda text: text,
    "number": lambda number: number,
    "time": _text_of,
    "names": lambda names: tuple(names or ()),
    "any": _value_of,
    "object": lambda text: None if text is None else msgspec.json.decode(text),
}


def _extra_of(kept: dict[str, Any] | None) -> dict[str, Any] | None:
    if kept is None:
        return None
    own = {name: value for name, value in kept.items() if not name.startswith(_FOREIGN)}
    return own if own or not kept else None
