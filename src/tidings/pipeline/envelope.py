"""
Envelopes as columns of bronze: the optional keys of lines that were cut, and, for all that could not be, whole lines as rows.

The optional keys of many events say the same (one actor, the same partitions), so each text is decoded once.

Runs on executors: no Spark, no loop, no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any, Final

import msgspec
import orjson
import pyarrow as pa  # type: ignore[import-untyped]

from tidings.core.events import ENVELOPE
from tidings.log.record import DECODER, RecordMeta
from tidings.log.segment import Flaw

from .schemas import BRONZE_EVENTS, arrow_schema

__all__ = ["EVENTS", "HOW_SEALED", "optional_columns", "row_of"]

EVENTS: Final = arrow_schema(BRONZE_EVENTS.schema)
HOW_SEALED: Final = "sealed"
"""Among the optional columns: what the envelope says of a sealed payload. In bronze the payload stands beside it."""
_OPTIONAL: Final = {field.name: field.kind for field in ENVELOPE if not field.is_required}
_FIELDS: Final = msgspec.structs.fields(RecordMeta)
_KNOWN: Final = frozenset(field.encode_name for field in _FIELDS)
_ALWAYS: Final = frozenset(field.encode_name for field in _FIELDS if field.required)
_NOT_A_RECORD: Final = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, ValueError, RecursionError)
_REST: Final = msgspec.json.Decoder(
    msgspec.defstruct("Rest", [(field.name, field.type, field.default) for field in _FIELDS if not field.required])
)


def optional_columns(rests: pa.Array) -> tuple[dict[str, pa.Array], pa.Array]:
    """
    The optional columns by name, from the envelopes' optional keys as they stand (each with a comma before it); and for which
    of them that is true: others cannot be understood without their lines.
    """
    distinct = rests.dictionary_encode()
    found = [_decoded(rest) for rest in distinct.dictionary.to_pylist()]
    is_good = pa.array([values is not None for values in found], pa.bool_())
    columns = {
        name: pa.array([None if values is None else values[at] for values in found], EVENTS.field(name).type)
        for at, name in enumerate(_OPTIONAL)
    }
    return {name: column.take(distinct.indices) for name, column in columns.items()}, is_good.take(distinct.indices)


def _decoded(rest: str) -> tuple[Any, ...] | None:
    text = b"{%b}" % rest[1:].encode()
    try:
        envelope = orjson.loads(text)
        return None if _ALWAYS & envelope.keys() else _optional_values(_REST.decode(text), envelope)
    except _NOT_A_RECORD:
        return None


def row_of(line: bytes) -> dict[str, Any] | str:
    """A line, without its newline, as a row of bronze; otherwise why it is none."""
    try:
        record = DECODER.decode(line)
        meta = record.meta
        envelope: dict[str, Any] = orjson.loads(bytes(record.meta_json))
        ts, written_at = _time(meta.ts), _time(meta.written_at)
        payload = bytes(record.payload_json).decode()
    except _NOT_A_RECORD as error:
        return f"{Flaw.FORMAT.value}: {error}"
    optional = dict(zip(_OPTIONAL, _optional_values(meta, envelope), strict=True))
    how = optional.pop(HOW_SEALED)
    return {
        "topic": meta.topic,
        "offset": record.offset,
        "seq": record.seq,
        "event_id": meta.event_id,
        "type": meta.type,
        "space_id": meta.space_id,
        "ts": ts,
        "written_at": written_at,
        "payload": payload if how is None else None,
        "is_sealed": how is not None,
        "date": date(ts.year, ts.month, ts.day),
        "sealed": None if how is None else f'{{"how":{how},"payload":{payload}}}',
        **optional,
    }


def _optional_values(meta: Any, envelope: Mapping[str, Any]) -> tuple[Any, ...]:
    extra = meta.extra
    if not envelope.keys() <= _KNOWN:
        # Keys of a newer version.
        extra = {**(extra or {}), **{f"meta.{key}": value for key, value in envelope.items() if key not in _KNOWN}}
    values = {name: getattr(meta, name) for name in _OPTIONAL} | {"extra": extra}
    if meta.sealed is not None:
        values[HOW_SEALED] = envelope[HOW_SEALED]
    return tuple(_column_value(_OPTIONAL[name], value) for name, value in values.items())


def _column_value(kind: str, value: Any) -> Any:
    if kind == "names":
        return list(value)
    if value is None or kind in ("text", "number"):
        return value
    return _dumps(value) if kind == "object" else _plain(value)


def _time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _plain(value: Any) -> str:
    """A string as it is, anything else as JSON; a string that could be taken for JSON keeps its quotes."""
    text = _dumps(value)
    if not isinstance(value, str):
        return text
    try:
        orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return text


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()
