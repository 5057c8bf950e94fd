"""
From lines of segments to Parquet, within one task: every line checked, a vectorised parser where all is well.

Runs on executors: no Spark, no loop, no engine. DuckDB cuts each line before its payload, so the payload is kept byte for
byte, and decodes what stands in front of it. Whether that went well is read off the file it wrote (as many rows as lines,
no required column empty); if it did not, the lines are taken one at a time, slowly, and those that are no records are set
apart with the reason. Both ways write the same columns.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

import duckdb
import fsspec  # type: ignore[import-untyped]
import msgspec
import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from tidings.log.record import DECODER, RecordMeta
from tidings.log.segment import Flaw, is_whole

from .schemas import BRONZE_EVENTS, REQUIRED, arrow_schema

__all__ = ["BadLine", "Converter", "flawed_lines"]

_KNOWN: Final = tuple(field.encode_name for field in msgspec.structs.fields(RecordMeta))
_JSON_KEYS: Final = ("actor", "device", "priority", "qos", "extra", "sealed")
_TEXT_KEYS: Final = ("trace_id", "idem_key", "band")
_TIME_CHARS: Final = len("2026-11-15T10:11:35.725499Z")
_ALWAYS: Final = ("written_at", "topic", "type", "space_id", "event_id", "ts")
_BARE_HEAD: Final = '{"crc":"00000000","offset":,"seq":,"meta":{' + ",".join(f'"{key}":""' for key in _ALWAYS) + "}"
_PATH: Final = "memory://tidings/lines"


def _structure() -> str:
    types: dict[str, Any] = {
        **dict.fromkeys(_KNOWN, "VARCHAR"),
        **dict.fromkeys(_JSON_KEYS, "JSON"),
        "written_at": "TIMESTAMPTZ",
        "ts": "TIMESTAMPTZ",
        "ttl_sec": "BIGINT",
        "partitions": ["VARCHAR"],
    }
    return json.dumps({"offset": "BIGINT", "seq": "BIGINT", "meta": types})


def _bare_bytes() -> str:
    """How long a head is if it has the keys that every record has, and no others."""
    terms = [f"{len(_BARE_HEAD) + 2 * _TIME_CHARS}", 'strlen("offset"::varchar)', "strlen(seq::varchar)"]
    terms += [f"strlen(meta.{key})" for key in _ALWAYS if key not in ("written_at", "ts")]
    return " + ".join(terms)


def _expected_bytes() -> str:
    """How long a head is if it has the keys we know and no others: then nothing needs a second look."""
    terms = [_bare_bytes()]
    terms += [f"coalesce(strlen(meta.{key}) + {len(key) + 6}, 0)" for key in _TEXT_KEYS]
    terms += [f"coalesce(strlen(meta.{key}::varchar) + {len(key) + 4}, 0)" for key in (*_JSON_KEYS, "ttl_sec")]
    terms.append(
        "coalesce(strlen(array_to_string(meta.partitions, '')) + greatest(3 * len(meta.partitions) - 1, 0)"
        f" + {len('partitions') + 6}, 0)"
    )
    return " + ".join(terms)


def _plain_sql(key: str) -> str:
    """A string as it is, anything else as JSON; a string that could be taken for JSON keeps its quotes."""
    value, text = f"meta.{key}::varchar", f"(meta.{key} ->> '$')"
    return f"case when starts_with({value}, '\"') and not json_valid({text}) then {text} else {value} end as {key}"


_UNKNOWN: Final = f"list_filter(json_keys(head, '$.meta'), lambda k: not list_contains({list(_KNOWN)!r}, k))"
_EXTRA: Final = f"""
    case when strlen(head) - 1 = {_bare_bytes()} then null
         when strlen(head) - 1 = {_expected_bytes()} then meta.extra::varchar
         when len({_UNKNOWN}) = 0 then meta.extra::varchar
         else '{{' || array_to_string(list_concat(
                case when meta.extra is null or meta.extra::varchar = '{{}}' then []
                     else [(meta.extra::varchar)[2:-2]] end,
                list_transform({_UNKNOWN}, lambda k:
                    to_json('meta.' || k)::varchar || ':' || json_extract(head, '$.meta."' || k || '"')::varchar)
              ), ',') || '}}'
    end as extra"""
# A million days are added and taken away: dividing cuts towards zero, which is the wrong day before 1970.
_DAY: Final = "date '1970-01-01' + ((epoch_us(meta.ts) + 86400000000000000) // 86400000000 - 1000000)::integer"
_QUERY: Final = f"""
    with lines as (
        select line, instr(line, ',"payload":') as cut
        from read_csv('{_PATH}', columns={{'line': 'VARCHAR'}}, delim='\\x01', quote='', escape='', new_line='\\n',
                      header=false, auto_detect=false, null_padding=false, nullstr='\\x02',
                      max_line_size=$bytes, buffer_size=$bytes)
    ), heads as (
        select left(line, cut - 1) || '}}' as head, substr(line, cut + 11, length(line) - cut - 11) as payload
        from lines
    ), decoded as (
        select head, payload, from_json(head, '{_structure()}') as j from heads
    ), records as (
        select head, payload, j.offset as "offset", j.seq as seq, j.meta as meta from decoded
    )
    select meta.topic as topic, "offset", seq, meta.event_id as event_id, meta.type as type, meta.space_id as space_id,
        meta.ts as ts, meta.written_at as written_at, coalesce(meta.partitions, []) as partitions,
        case when meta.sealed is null then payload end as payload,
        {_plain_sql("actor")}, meta.trace_id as trace_id, meta.idem_key as idem_key, meta.ttl_sec as ttl_sec,
        {_plain_sql("device")}, meta.band as band, {_plain_sql("priority")}, {_EXTRA},
        meta.sealed is not null as is_sealed, {_DAY} as date, meta.qos::varchar as qos,
        case when meta.sealed is not null
             then '{{"how":' || meta.sealed::varchar || ',"payload":' || payload || '}}' end as sealed
    from records"""


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


class Converter:
    """
    Turns lines into a Parquet file.

    Args:
        memory_mb: What DuckDB may take beside the lines.
    """

    def __init__(self, memory_mb: int) -> None:
        self._duck = duckdb.connect(config={"threads": 1, "memory_limit": f"{memory_mb}MB"})
        self._duck.execute("set timezone = 'UTC'")
        # With one thread the rows keep their order anyway; saying so spares DuckDB the bookkeeping.
        self._duck.execute("set preserve_insertion_order = false")
        self._files = fsspec.filesystem("memory")
        self._duck.register_filesystem(self._files)

    def close(self) -> None:
        """Let go of the parser."""
        self._duck.close()

    def write(self, data: bytes, target: Path) -> list[BadLine]:
        """
        Write the records among whole, checked lines to ``target``; the lines that are no records come back.

        No file is written if there is no record.
        """
        lines = data.count(b"\n")
        if lines == 0:
            return []
        if self._write_fast(data, target, lines):
            return []
        target.unlink(missing_ok=True)
        return write_slowly(data, target)

    def _write_fast(self, data: bytes, target: Path, lines: int) -> bool:
        self._files.pipe(_PATH, data)
        quoted = str(target).replace("'", "''")
        query = _QUERY.replace("$bytes", str(len(data) + 1))
        try:
            self._duck.execute(
                f"copy ({query}) to '{quoted}' (format parquet, compression zstd, compression_level 1,"
                " parquet_version 'V2', dictionary_size_limit 1000)"
            )
        except duckdb.IOException:
            raise
        except duckdb.Error:
            return False
        finally:
            self._files.rm(_PATH)
        return _is_complete(target, lines)


def _is_complete(target: Path, lines: int) -> bool:
    """Whether every line became a row with all that a record must have."""
    footer = pq.read_metadata(target)
    if footer.num_rows != lines:
        return False
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        for at in range(row_group.num_columns):
            column = row_group.column(at)
            if column.path_in_schema in REQUIRED and (
                column.statistics is None or not column.statistics.has_null_count or column.statistics.null_count
            ):
                return False
    return True


def write_slowly(data: bytes, target: Path) -> list[BadLine]:
    """The same, a line at a time."""
    bad: list[BadLine] = []
    rows: list[dict[str, Any]] = []
    schema = arrow_schema(BRONZE_EVENTS.schema)
    writer: pq.ParquetWriter | None = None
    try:
        for at, line in _lines_with_places(data):
            row = _row(line)
            if isinstance(row, str):
                bad.append(BadLine(at, line, row))
                continue
            rows.append(row)
            if len(rows) >= 50_000:
                writer = writer or pq.ParquetWriter(target, schema, compression="zstd")
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows.clear()
        if rows:
            writer = writer or pq.ParquetWriter(target, schema, compression="zstd")
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    finally:
        if writer is not None:
            writer.close()
    return bad


def _lines_with_places(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    for line in data.split(b"\n")[:-1]:
        yield at, line
        at += len(line) + 1


def _row(line: bytes) -> dict[str, Any] | str:
    """A line as a row; otherwise why it is none."""
    try:
        record = DECODER.decode(line)
        meta = record.meta
        envelope: dict[str, Any] = orjson.loads(bytes(record.meta_json))
        ts, written_at = _time(meta.ts), _time(meta.written_at)
        payload = bytes(record.payload_json).decode()
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, ValueError, RecursionError) as error:
        return f"{Flaw.FORMAT.value}: {error}"
    extra: dict[str, Any] = dict(meta.extra or {})
    extra |= {f"meta.{key}": value for key, value in envelope.items() if key not in _KNOWN}
    return {
        "topic": meta.topic,
        "offset": record.offset,
        "seq": record.seq,
        "event_id": meta.event_id,
        "type": meta.type,
        "space_id": meta.space_id,
        "ts": ts,
        "written_at": written_at,
        "partitions": list(meta.partitions),
        "payload": payload if meta.sealed is None else None,
        "actor": _plain(meta.actor),
        "trace_id": meta.trace_id,
        "idem_key": meta.idem_key,
        "ttl_sec": meta.ttl_sec,
        "device": _plain(meta.device),
        "band": meta.band,
        "priority": _plain(meta.priority),
        "extra": _dumps(extra) if extra or meta.extra is not None else None,
        "is_sealed": meta.sealed is not None,
        "date": date(ts.year, ts.month, ts.day),
        "qos": None if meta.qos is None else _dumps(meta.qos),
        "sealed": None if meta.sealed is None else f'{{"how":{_dumps(envelope["sealed"])},"payload":{payload}}}',
    }


def _time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _plain(value: Any) -> str | None:
    if value is None:
        return None
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
