"""
What the pipeline's tables must hold, computed a second time: by DuckDB, from the bytes of the log's files.

Nothing of the pipeline's own reading is used here. A line counts as a record if its checksum is right and it is JSON that
names an id; all others belong in the quarantine, at their file and byte.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec
import pyarrow as pa  # type: ignore[import-untyped]

from tests.unit.pipeline.support import Workspace

__all__ = ["RawLog", "differences"]

Rows = list[tuple[Any, ...]]

_JSON_COLUMNS: Final = ("actor", "device", "priority", "extra", "qos")
_RECORDS: Final = """
    create table records as
    select file, place, line, payload, (doc->>'$.offset')::bigint as "offset", (doc->>'$.seq')::bigint as seq,
        doc->'$.meta' as meta, doc->>'$.meta.topic' as topic, doc->>'$.meta.event_id' as event_id,
        doc->>'$.meta.type' as type, doc->>'$.meta.space_id' as space_id,
        (doc->>'$.meta.ts')::timestamptz as ts, (doc->>'$.meta.written_at')::timestamptz as written_at,
        coalesce(from_json((doc->'$.meta.partitions'), '["VARCHAR"]'), []) as partitions,
        (doc->'$.meta.sealed') is not null as is_sealed
    from (select *, case when is_whole and json_valid(line) then line::json end as doc from lines)
    where (doc->'$.meta.event_id') is not null
"""
_BRONZE: Final = """
    select seq, topic, "offset", event_id, type, space_id, epoch_us(ts), epoch_us(written_at), partitions,
        case when not is_sealed then payload end, meta->>'$.trace_id', meta->>'$.idem_key',
        (meta->>'$.ttl_sec')::bigint, meta->>'$.band', is_sealed, strftime(ts, '%Y-%m-%d'),
        meta->'$.actor', meta->'$.device', meta->'$.priority', meta->'$.extra', meta->'$.qos'
    from {source} order by seq
"""
_FIRST_OF_ITS_KIND: Final = """(
    select * from records qualify is_sealed
        or row_number() over (partition by event_id, space_id, topic, type, partitions, payload order by seq) = 1
)"""
_SYNC: Final = f"""
    select seq, topic, case topic when 'sync' then 'A' when 'sync.projects' then 'B' else 'C' end, part_name, meta->'$.actor',
        event_id, type, epoch_us(ts), epoch_us(written_at), case when topic = 'sync.projects' then part_name end
    from (select *, unnest(partitions) as part_name from {_FIRST_OF_ITS_KIND})
    where topic in ('sync', 'sync.projects', 'sync.legacy') order by seq, part_name
"""
_RANK: Final = """
    format('{{:.10g}}', case when sorted[ceil({rank} * len(sorted))::bigint] < 1 then 0.0
        else 1.05 ** (0.5 + floor(ln(sorted[ceil({rank} * len(sorted))::bigint]) / ln(1.05))) / 1000 end)
"""
"""To ten digits: of decades in milliseconds the last bits are another library's."""
_MINUTES: Final = f"""
    select topic, epoch_us(minute), strftime(minute, '%Y-%m-%d'), count(*), sum(size), count(distinct space_id),
        count(*) filter (is_sealed), {", ".join(_RANK.format(rank=rank) for rank in (0.5, 0.95, 0.99))},
        sorted[-1] / 1000.0, count(*) filter (late < 0), max("offset")
    from (
        select *, list_sort(list(late) over (partition by topic, minute)) as sorted from (
            select topic, space_id, is_sealed, "offset", case when is_sealed then 0 else strlen(payload) end as size,
                make_timestamptz(60000000 * floor(epoch_us(written_at) / 60000000.0)::bigint) as minute,
                epoch_us(written_at) - epoch_us(ts) as late
            from records))
    group by topic, minute, sorted order by 1, 2
"""
_LAG: Final = """
    select c.topic, c."group", c.committed, max(r."offset"), greatest(0, coalesce(max(r."offset") - c.committed, 0)),
        epoch_us(min(r.written_at) filter (r."offset" > c.committed)),
        case when coalesce(max(r."offset") - c.committed, 0) <= 0 then 'caught_up'
             when (select max(written_at) from records) - c.stored_at > interval 300 second then 'stalled' else 'behind' end
    from cursors c left join records r on r.topic = c.topic
    group by c.topic, c."group", c.committed, c.stored_at order by 1, 2
"""
_LETTERS: Final = """
    select topic, "group", "offset", seq, event_id, error, attempts from letters order by 1, 2, 3
"""
_KINDS: Final = """
    select topic, "group", kind, count(*), count(distinct event_id), sum(attempts) from (
        select *, case when error ilike '%connection%' then 'transient' when error ilike '%disk%' then 'resource'
            when error ilike '%invalid%' then 'validation' when error ilike '%deadlock%' then 'coordination'
            when error ilike '%poison%' then 'poison' when error ilike '%killed%' then 'system'
            else 'processing' end as kind from letters)
    group by all order by 1, 2, 3
"""


class _Payload(msgspec.Struct):
    payload: msgspec.Raw


class RawLog:
    """The lines of a log's files, those too whose files are gone by the time the tables are looked at."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], bytes] = {}

    def take(self, workspace: Workspace) -> None:
        """Note every line that stands in a segment now; one that was noted before at its place is replaced."""
        for path in workspace.segments():
            name = str(path.relative_to(workspace.layout.wal))
            self._lines = {place: line for place, line in self._lines.items() if place[0] != name}
            at = 0
            for line in path.read_bytes().split(b"\n")[:-1]:
                self._lines[name, at] = line
                at += len(line) + 1

    def table(self) -> pa.Table:
        """All of them, each with whether its checksum is right."""
        rows = []
        for (name, at), line in sorted(self._lines.items()):
            row = {"file": name, "place": at, "line": _text(line), "is_whole": _is_whole(line), "raw": line}
            rows.append({**row, "payload": _payload_of(line)})
        columns = {"file": pa.string(), "place": pa.int64(), "line": pa.string(), "is_whole": pa.bool_()}
        return pa.Table.from_pylist(
            rows, schema=pa.schema({**columns, "raw": pa.binary(), "payload": pa.string()}.items())
        )


def _text(line: bytes) -> str | None:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return None


def _is_whole(line: bytes) -> bool:
    head, body = line[:18], line[18:]
    return head == b'{"crc":"%08x",' % zlib.crc32(body) and _text(line) is not None


def _payload_of(line: bytes) -> str | None:
    try:
        return bytes(msgspec.json.decode(line, type=_Payload).payload).decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def differences(workspace: Workspace, raw: RawLog) -> dict[str, tuple[Rows, Rows]]:
    """Of each table, the rows that it should have and has not, and those it has and should not have."""
    with duckdb.connect(config={"threads": 2}) as duck:
        duck.execute("set timezone = 'UTC'")
        duck.register("lines", raw.table())
        duck.execute(_RECORDS)
        _load_bus_files(duck, workspace)
        expected = dict(_expected(duck))
        actual = dict(_actual(duck, workspace))
    return {
        table: (missing, surplus)
        for table, rows in expected.items()
        if any((missing := _without(rows, actual[table]), surplus := _without(actual[table], rows)))
    }


def _without(rows: Rows, others: Rows) -> Rows:
    left = [repr(row) for row in others]
    found = []
    for row in rows:
        if (text := repr(row)) in left:
            left.remove(text)
        else:
            found.append(row)
    return found


def _expected(duck: duckdb.DuckDBPyConnection) -> Iterator[tuple[str, Rows]]:
    yield "bronze.events", _said(duck.execute(_BRONZE.format(source="records")).fetchall())
    yield "silver.events", _said(duck.execute(_BRONZE.format(source=_FIRST_OF_ITS_KIND)).fetchall())
    bad = "select file, place, raw from lines anti join records using (file, place) order by 1, 2"
    yield "bronze.quarantine", duck.execute(bad).fetchall()
    rows = duck.execute(_SYNC).fetchall()
    yield "silver.sync_events", [(*row[:4], _value(row[4]), *row[5:]) for row in rows]
    yield "gold.topic_minutes", duck.execute(_MINUTES).fetchall()
    yield "gold.group_lag", duck.execute(_LAG).fetchall()
    yield "silver.dead_letters", duck.execute(_LETTERS).fetchall()
    yield "gold.dead_letter_categories", duck.execute(_KINDS).fetchall()


def _actual(duck: duckdb.DuckDBPyConnection, workspace: Workspace) -> Iterator[tuple[str, Rows]]:
    def asked(table: str, columns: str, rest: str) -> Rows:
        if not workspace.lake.exists(table) or not (files := workspace.lake.files(table)):
            return []
        query = f"select {columns} from read_parquet(?) {rest}"
        return duck.execute(query, [[file.uri for file in files]]).fetchall()

    events = (
        'seq, topic, "offset", event_id, type, space_id, epoch_us(ts), epoch_us(written_at), partitions, payload, trace_id,'
        " idem_key, ttl_sec, band, is_sealed, date::varchar, " + ", ".join(_JSON_COLUMNS)
    )
    for table in ("bronze.events", "silver.events"):
        yield table, _said(asked(table, events, "order by seq"))
    yield "bronze.quarantine", asked("bronze.quarantine", "file, byte_offset, from_base64(line)", "order by 1, 2")
    sync = (
        "seq, topic, dialect, partition, client_id, event_id, type, epoch_us(ts), epoch_us(written_at), project_id",
        "order by seq, partition",
    )
    yield (
        "silver.sync_events",
        [(*row[:4], _value(row[4]), *row[5:]) for row in asked("silver.sync_events", *sync)],
    )
    minutes = "topic, epoch_us(minute), date::varchar, events, payload_bytes, spaces, sealed"
    minutes += "".join(f", format('{{:.10g}}', latency_ms_p{rank})" for rank in (50, 95, 99))
    minutes += ", latency_ms_max, ahead_of_clock, last_offset"
    yield "gold.topic_minutes", asked("gold.topic_minutes", minutes, "order by 1, 2")
    lag = 'topic, "group", committed, head_offset, lag, epoch_us(oldest_waiting_at), state'
    yield "gold.group_lag", asked("gold.group_lag", lag, "order by 1, 2")
    letters = 'topic, "group", "offset", seq, event_id, error, attempts'
    yield "silver.dead_letters", asked("silver.dead_letters", letters, "order by 1, 2, 3")
    kinds = 'topic, "group", category, sum(letters)::bigint, sum(events)::bigint, sum(attempts)::bigint'
    yield (
        "gold.dead_letter_categories",
        asked("gold.dead_letter_categories", kinds, "group by 1, 2, 3 order by 1, 2, 3"),
    )


def _said(rows: Rows) -> Rows:
    """The rows with JSON texts in the last columns as what they say, plain words included."""
    cut = len(_JSON_COLUMNS)
    return [(*row[:-cut], *(_value(value) for value in row[-cut:])) for row in rows]


def _value(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _load_bus_files(duck: duckdb.DuckDBPyConnection, workspace: Workspace) -> None:
    """Cursors and dead letters, read off the bus's own files."""
    duck.execute('create table cursors (topic varchar, "group" varchar, committed bigint, stored_at timestamptz)')
    for path in _files(workspace.layout.offsets, "*.json"):
        topic, _, group = path.stem.partition("__")
        said = json.loads(path.read_bytes())
        duck.execute("insert into cursors values (?, ?, ?, ?)", [topic, group, said["committed"], said["ts"]])
    duck.execute(
        'create table letters (topic varchar, "group" varchar, "offset" bigint, seq bigint, event_id varchar,'
        " error varchar, attempts int)"
    )
    for path in _files(workspace.layout.dlq, "*.jsonl"):
        duck.execute(
            "insert into letters select l->>'$.topic', l->>'$.group', (l->>'$.offset')::bigint, (l->>'$.seq')::bigint,"
            " l->>'$.event_id', l->>'$.error', json_array_length(l->'$.attempts')"
            " from (select json->'$.letter' as l from read_json_objects(?, format = 'newline_delimited'))"
            " where l is not null",
            [str(path)],
        )


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern)) if folder.is_dir() else []
