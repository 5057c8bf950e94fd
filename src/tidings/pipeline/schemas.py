"""The tables that the pipeline's core fills, column by column; the jobs say the same of theirs themselves."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table: its name, its columns as a DDL string, and what a row is."""

    name: str
    schema: str
    about: str
    order: tuple[str, ...] = ()
    """Columns that files are sorted by, so that the bounds kept of each file tell where to look."""


_EVENT_COLUMNS: Final = (
    "topic string, offset bigint, seq bigint, event_id string, type string, space_id string, ts timestamp,"
    " written_at timestamp, partitions array<string>, payload string, actor string, trace_id string, idem_key string,"
    " ttl_sec bigint, device string, band string, priority string, extra string, is_sealed boolean, date date,"
    " qos string, sealed string, objects array<string>, app string"
)

BRONZE_EVENTS: Final = TableSpec(
    "bronze.events", _EVENT_COLUMNS, "One row a record, as the log committed it.", ("topic", "offset")
)
QUARANTINE: Final = TableSpec(
    "bronze.quarantine",
    "file string, byte_offset bigint, topic string, reason string, line string, line_bytes bigint, first_seq bigint,"
    " last_seq bigint, found_at timestamp, epoch string",
    "One row a line of a segment that is no record (its bytes in base64), or a range that was dropped unread.",
)
SILVER_EVENTS: Final = TableSpec(
    "silver.events", _EVENT_COLUMNS, "One row an event; a repeat has none.", ("topic", "offset")
)
SILVER_GROUP_CURSORS: Final = TableSpec(
    "silver.group_cursors",
    "topic string, `group` string, committed bigint, segment bigint, at timestamp, epoch string",
    "One row a consumer group: where it stands.",
)
SILVER_GROUP_POSITIONS: Final = TableSpec(
    "silver.group_positions",
    "topic string, `group` string, seen_at timestamp, committed bigint, head_offset bigint, lag bigint, epoch string",
    "One row a consumer group and run that found it, or the end of its topic, moved.",
)
SILVER_DEAD_LETTERS: Final = TableSpec(
    "silver.dead_letters",
    "topic string, `group` string, offset bigint, seq bigint, event_id string, error string, category string,"
    " attempts int, failed_at timestamp, history string, id string, state string, space_id string, error_type string",
    "One row an event that a group gave up on, with what has become of it.",
)
SILVER_SYNC_EVENTS: Final = TableSpec(
    "silver.sync_events",
    "seq bigint, topic string, dialect string, partition string, client_id string, event_id string, type string,"
    " ts timestamp, written_at timestamp, project_id string",
    "One row an event of a sync client and partition it names.",
    ("seq",),
)
SILVER_SEGMENTS: Final = TableSpec(
    "silver.segments",
    "topic string, space_id string, segment bigint, is_sealed boolean, first_offset bigint, last_offset bigint,"
    " first_seq bigint, last_seq bigint, size_bytes bigint, last_written_at timestamp",
    "One row a segment of the log, as it stood when a run last took in records.",
)
_TABLE_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}\.[a-z][a-z0-9_]{0,127}")
MESSAGES: Final = "message string"
"""What the data source gives when it archives: see ``bronze_task``."""
CORE_TABLES: Final = (
    BRONZE_EVENTS,
    QUARANTINE,
    SILVER_EVENTS,
    SILVER_GROUP_CURSORS,
    SILVER_GROUP_POSITIONS,
    SILVER_DEAD_LETTERS,
    SILVER_SYNC_EVENTS,
    SILVER_SEGMENTS,
)


def is_core_table(name: str) -> bool:
    """Return whether only the pipeline itself writes a table: its own ones, and whatever else is in the layer bronze."""
    return name.startswith("bronze.") or any(name == table.name for table in CORE_TABLES)


def is_table_name(name: str) -> bool:
    """Return whether a table can have this name: a layer and a name, in lower-case letters, digits and underscores."""
    return _TABLE_NAME.fullmatch(name) is not None


def arrow_schema(ddl: str) -> pa.Schema:
    """The columns as Arrow and Delta know them."""
    import pyarrow as pa

    return pa.schema([pa.field(name, _arrow_type(text)) for name, text in columns_of(ddl)])


@functools.cache
def struct_of(ddl: str) -> StructType:
    """The columns as Spark knows them."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(arrow_schema(ddl))


def columns_of(ddl: str) -> list[tuple[str, str]]:
    """Names and types of a DDL string."""
    return [_column(part) for part in _split(ddl)]


def _split(ddl: str) -> list[str]:
    """The parts between commas; commas within angle or round brackets are left alone."""
    parts, depth = [""], 0
    for letter in ddl:
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _column(text: str) -> tuple[str, str]:
    if text.startswith("`"):
        name, _, kind = text[1:].partition("`")
    else:
        # Within a struct name and type are joined by a colon, otherwise by a space.
        cut = min((at for mark in " :" if (at := text.find(mark)) > 0), default=len(text))
        name, kind = text[:cut], text[cut:]
    kind = kind.strip(" :")
    for ending in (" not null", " NOT NULL"):
        kind = kind.removesuffix(ending)
    return name, kind.lower() if "<" not in kind else kind


def _arrow_type(text: str) -> pa.DataType:
    import pyarrow as pa

    simple = {
        "string": pa.string(),
        "bigint": pa.int64(),
        "long": pa.int64(),
        "int": pa.int32(),
        "integer": pa.int32(),
        "smallint": pa.int16(),
        "tinyint": pa.int8(),
        "double": pa.float64(),
        "float": pa.float32(),
        "boolean": pa.bool_(),
        "binary": pa.binary(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "timestamp_ntz": pa.timestamp("us"),
    }
    kind, inner = _outer(text)
    if kind in simple:
        return simple[kind]
    if kind == "decimal":
        precision, scale = (int(part) for part in inner.split(","))
        return pa.decimal128(precision, scale)
    if kind == "array":
        return pa.list_(_arrow_type(inner))
    if kind == "map":
        key, value = _split(inner)
        return pa.map_(_arrow_type(key), _arrow_type(value))
    if kind == "struct":
        return pa.struct([pa.field(name, _arrow_type(each)) for name, each in columns_of(inner)])
    raise ValueError(f"no such type: {text}")


def _outer(text: str) -> tuple[str, str]:
    text = text.strip()
    for opening, closing in ("<>", "()"):
        if opening in text and text.endswith(closing):
            kind, _, inner = text.partition(opening)
            return kind.strip().lower(), inner[:-1]
    return text.lower(), ""
