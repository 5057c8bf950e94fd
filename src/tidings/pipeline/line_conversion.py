"""
From lines of segments to Parquet, within one task.

The log writes every line in one form: the same keys in the same order, times of the same length, no spaces. So a few
searches for what separates the values split many lines into columns at once, without parsing them. What else an envelope
holds is decoded, each distinct text once. Lines of another form are parsed one at a time, and those that are no records are
returned with the reason. The payload is kept byte for byte either way.

Runs on executors: no Spark, no loop, no engine.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final

import msgspec
import numpy as np
import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from tidings.core.events import ENVELOPE
from tidings.log.record import DECODER, RecordMeta
from tidings.log.segment import Flaw, is_whole

from .schemas import BRONZE_EVENTS, arrow_schema

_TIME_BYTES: Final = len(b"2026-11-15T10:11:35.725499Z")
_TIME: Final = pa.timestamp("us", tz="UTC")
_LINE_BYTES_MAX: Final = 1 << 31
_NAMES: Final = ("topic", "type", "space_id", "event_id")


@dataclass(frozen=True, slots=True)
class SplitLines:
    """
    Lines in columns: ``topic``, ``type``, ``space_id``, ``event_id``, ``offset``, ``seq``, ``ts``, ``written_at`` and ``payload``
    as in bronze, and ``rest``: the envelope's other keys as they stand, each with a comma before it.
    """

    rows: np.ndarray[Any, np.dtype[np.int64]]
    """Which of the lines these are."""
    columns: dict[str, pa.Array]

    def where(self, mask: pa.Array) -> SplitLines:
        """Only those for which ``mask`` is true."""
        if pc.all(mask, min_count=0).as_py():
            return self
        columns = {name: column.filter(mask) for name, column in self.columns.items()}
        return SplitLines(self.rows[mask.to_numpy(zero_copy_only=False)], columns)

    def split(self, name: str, separator: bytes, into: tuple[str, ...]) -> SplitLines:
        """
        Cut a column into several; lines that have another number of parts are left out, and so are parts without a name. The
        last part is not cut further.
        """
        cut = pc.split_pattern(self.columns[name], separator, max_splits=len(into) - 1)
        offsets = cut.offsets.to_numpy()
        is_whole = np.diff(offsets) == len(into)
        firsts = offsets[:-1][is_whole]
        kept = self.where(pa.array(is_whole))
        parts = {part: cut.values.take(pa.array(firsts + number)) for number, part in enumerate(into) if part}
        return SplitLines(kept.rows, {**kept.columns, **parts})

    def framed(self, name: str, before: bytes, after: bytes = b"") -> SplitLines:
        """Only lines whose column begins and ends so (the two must not overlap); what it begins and ends with is taken off."""
        kept = self
        for frame, look in ((before, pc.starts_with), (after, pc.ends_with)):
            if frame:
                kept = kept.where(look(kept.columns[name], frame))
        return kept.having(name, _part(kept.columns[name], len(before), -len(after) or None))

    def having(self, name: str, column: pa.Array) -> SplitLines:
        """With another column, or one in its place."""
        return SplitLines(self.rows, {**self.columns, name: column})


def lines_of(data: bytes) -> pa.Array:
    """The lines of ``data``, which ends with a newline, each with its own; nothing is copied."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends + 1
    return pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def split_lines(lines: pa.Array) -> SplitLines:
    """Those of the lines (each with its newline) that have the log's own form."""
    try:
        return _split_lines(lines)
    except pa.ArrowInvalid:
        # A value that looked right and is not, or bytes that are no text: rare enough to have all of them parsed.
        return _split_lines(lines[:0])


def _split_lines(lines: pa.Array) -> SplitLines:
    lines.cast(pa.string())  # for its check: what is cut out of text is text
    cut = SplitLines(np.arange(len(lines), dtype=np.int64), {"line": lines})
    cut = cut.where(pc.starts_with(lines, b'{"crc":"')).split("line", b'","', ("", "place", *_NAMES, "last"))
    cut = cut.framed("place", b'offset":').framed("last", b'ts":"', b"}\n")
    for name in _NAMES:
        cut = cut.framed(name, b'%b":"' % name.encode())
        if _holds(cut.columns[name], b"\\"):
            cut = cut.where(pc.invert(pc.match_substring(cut.columns[name], b"\\")))
    cut = cut.having("written_at", _part(cut.columns["place"], -_TIME_BYTES, None))
    cut = cut.having("place", _part(cut.columns["place"], 0, -_TIME_BYTES))
    cut = cut.framed("place", b"", b',"meta":{"written_at":"').split("place", b',"seq":', ("offset", "seq"))
    cut = cut.having("ts", _part(cut.columns["last"], 0, _TIME_BYTES))
    cut = cut.having("last", _part(cut.columns["last"], _TIME_BYTES, None))
    cut = cut.framed("last", b'"').split("last", b'},"payload":', ("rest", "payload"))
    cut = cut.where(pc.greater(pc.binary_length(cut.columns["payload"]), 0))
    for name in ("offset", "seq"):
        text = _as_text(cut.columns[name])
        number = text.cast(pa.int64())
        cut = cut.having(name, number).where(pc.equal(number.cast(pa.string()), text))
    columns = {name: _as_text(cut.columns[name]) for name in (*_NAMES, "payload", "rest")}
    times = {name: _as_text(cut.columns[name]).cast(_TIME) for name in ("ts", "written_at")}
    return SplitLines(cut.rows, {**columns, **times, "offset": cut.columns["offset"], "seq": cut.columns["seq"]})


def _holds(column: pa.Array, byte: bytes) -> bool:
    """Whether any value may hold this byte: one look at all of them, which is much cheaper than one at each."""
    values = column.buffers()[2]
    return values is not None and bool((np.frombuffer(values, np.uint8) == ord(byte)).any())


def _as_text(column: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(column), column.buffers(), column.null_count, column.offset)


def _part(column: pa.Array, start: int, stop: int | None) -> pa.Array:
    # Without an end its room is reckoned wrongly, and refused; this is more than a line can have.
    return pc.binary_slice(column, start, _LINE_BYTES_MAX if stop is None else stop)


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


_COPIES: Final = 8
"""How often a block's bytes are in memory at most, in one form or another."""
_BLOCK_BYTES_MAX: Final = 1 << 30
_REPEATED: Final = (
    "topic",
    "type",
    "space_id",
    "actor",
    "device",
    "band",
    "priority",
    "app",
    "partitions.list.element",
)
_COUNTED: Final = ("offset", "seq", "ts", "written_at", "date", "ttl_sec")


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no record: where it begins in the data it was found in, its bytes, and why."""

    at: int
    data: bytes
    reason: str

    @property
    def text(self) -> str:
        """Its bytes, in letters that any tool can show."""
        return base64.b64encode(self.data).decode()


def flawed_lines(data: bytes) -> list[BadLine]:
    """The lines that do not match their checksums. ``data`` ends with a newline, or is empty."""
    found: list[BadLine] = []
    at = 0
    for line in data.split(b"\n")[:-1]:
        if not is_whole(line):
            found.append(BadLine(at, line, Flaw.CHECKSUM.value))
        at += len(line) + 1
    return found


def event_tables(data: bytes, *, memory_mb: int) -> Iterator[tuple[pa.Table, list[BadLine]]]:
    """
    The records among whole, checked lines in the columns of bronze, a block at a time; beside each block the lines that are no
    records.

    Args:
        data: The lines, each with its newline.
        memory_mb: What the conversion may take beside ``data``.
    """
    for at, block in _blocks(data, min(memory_mb * (1 << 20) // _COPIES, _BLOCK_BYTES_MAX)):
        table, flawed = _converted(block)
        yield table, [BadLine(at + line.at, line.data, line.reason) for line in flawed]


BRONZE_ENCODING: Final[dict[str, Any]] = {
    "compression_level": 1,
    "data_page_version": "2.0",
    "use_dictionary": list(_REPEATED),
    "column_encoding": dict.fromkeys(_COUNTED, "DELTA_BINARY_PACKED"),
}
"""How a file of bronze is written, for Arrow's writer: what is quick to write and small."""


def _blocks(data: bytes, bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines, about so many bytes of them at a time, with where they begin; a longer line comes alone."""
    start = 0
    while start < len(data):
        end = len(data)
        if end - start > bytes_max:
            end = (data.rfind(b"\n", start, start + bytes_max) + 1) or (data.find(b"\n", start + bytes_max) + 1)
        yield start, data if end - start == len(data) else data[start:end]
        start = end


def _converted(data: bytes) -> tuple[pa.Table, list[BadLine]]:
    lines = lines_of(data)
    cut = split_lines(lines)
    optional, is_good = optional_columns(cut.columns["rest"])
    cut = SplitLines(cut.rows, cut.columns | optional).where(is_good)
    quick = pa.Table.from_pydict(_columns(cut.columns), EVENTS)
    if len(cut.rows) == len(lines):
        return quick, []
    slow, slow_rows, bad = _parsed(data, lines, np.setdiff1d(np.arange(len(lines)), cut.rows))
    order = np.argsort(np.concatenate([cut.rows, slow_rows]))
    return pa.concat_tables([quick, slow]).take(pa.array(order)), bad


def _columns(cut: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """All columns of bronze, from those that were cut and decoded."""
    how, payload = cut[HOW_SEALED], cut["payload"]
    is_sealed = pc.is_valid(how)
    sealed = pc.binary_join_element_wise('{"how":', how, ',"payload":', payload, "}", "")
    return cut | {
        "date": cut["ts"].cast(pa.date32()),
        "is_sealed": is_sealed,
        "payload": pc.if_else(is_sealed, pa.scalar(None, pa.string()), payload),
        "sealed": sealed,
    }


def _parsed(data: bytes, lines: pa.Array, rows: Any) -> tuple[pa.Table, list[int], list[BadLine]]:
    """Lines that could not be cut, one at a time."""
    starts = lines.buffers()[1]
    offsets = np.frombuffer(starts, np.int32)
    found: list[dict[str, Any]] = []
    places: list[int] = []
    bad: list[BadLine] = []
    for number in rows.tolist():
        start, end = int(offsets[number]), int(offsets[number + 1]) - 1
        row = row_of(data[start:end])
        if isinstance(row, str):
            bad.append(BadLine(start, data[start:end], row))
        else:
            found.append(row)
            places.append(number)
    return pa.Table.from_pylist(found, schema=EVENTS), places, bad
