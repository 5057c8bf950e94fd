"""
The numbers of a report, from the lake's tables: read with DuckDB over their files, within a bound of memory, without Spark.

A table that is not there yet is empty. Everything is ordered, so that the same tables give the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import duckdb

from .lake import Lake
from .schemas import CORE_TABLES, arrow_schema

_MEMORY_MB: Final = 512
_TOPICS_MAX: Final = 6
_POINTS_MAX: Final = 120
_ROWS_MAX: Final = 50
_MINUTES: Final = "topic string, minute timestamp, date date, events bigint, payload_bytes bigint, sealed bigint, latency_ms_p50 double, latency_ms_p95 double, latency_ms_p99 double, ahead_of_clock bigint"
_COLUMNS: Final = {
    **{table.name: table.schema for table in CORE_TABLES},
    "gold.topic_minutes": _MINUTES,
    "gold.group_lag": "topic string, group string, lag bigint, waiting_s double, state string",
    "gold.dead_letter_categories": "topic string, group string, category string, error_shape string, letters bigint, is_poison boolean",
    "gold.sync_traffic": "hour timestamp, partition string, client_id string, events bigint",
    "gold.learning_quality": "space_id string, date date, head string, rows bigint, brier double, ece double",
    "gold.learning_drift": "set_name string, space_id string, feature string, date date, z double, psi double, is_drifted boolean",
    "gold.learning_clicks": "space_id string, date date, lists bigint, ctr double",
    "gold.gate_proposals": "space_id string, rows bigint, admit_now double, admit_proposed double, regretted_now bigint, regretted_proposed bigint",
}
"""The columns that the report reads, for tables that are not there yet."""
_DUCK_TYPES: Final = {
    "string": "varchar",
    "timestamp": "timestamptz",
    "int": "integer",
    "array<string>": "varchar[]",
    "map<string,double>": "map(varchar, double)",
    "map<string,bigint>": "map(varchar, bigint)",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the page shows."""

    epoch: str
    seq: int
    tables: Sequence[tuple[str, int, int]]
    """Name, rows and bytes of each table."""
    events: int
    payload_bytes: int
    first: datetime | None
    last: datetime | None
    ticks: Sequence[str]
    step_minutes: int
    rates: Mapping[str, Sequence[float]]
    """Events a minute by topic, one value a tick; the smaller topics together."""
    latencies: Mapping[str, Sequence[float | None]]
    """p50, p95, p99 in milliseconds, one value a tick."""
    heat: Sequence[Sequence[float]]
    """Events by weekday (Monday first) and hour, in UTC."""
    topics: Sequence[tuple[Any, ...]]
    groups: Sequence[tuple[Any, ...]]
    letters: Sequence[tuple[Any, ...]]
    quality: Sequence[tuple[str, int, str]]
    """What may be wrong with the data: what, how often, and how bad that is."""
    clients: Sequence[tuple[Any, ...]]
    heads: Sequence[tuple[Any, ...]]
    drifts: Sequence[tuple[Any, ...]]
    clicks: Sequence[tuple[Any, ...]]
    proposals: Sequence[tuple[Any, ...]]


def read_facts(lake: Lake) -> Facts:
    """
    Read the lake.

    Raises:
        LakeDamaged: A table cannot be read.
    """
    names = lake.tables()
    sizes = [
        (name, sum(f.rows for f in files), sum(f.size for f in files))
        for name in names
        if (files := lake.files(name)) is not None
    ]
    with duckdb.connect(config={"threads": 2, "memory_limit": f"{_MEMORY_MB}MB"}) as database:
        database.execute("set timezone = 'UTC'")
        for name, ddl in _COLUMNS.items():
            _view(database, lake, name, ddl)
        return _facts(database, lake, sizes)


def _view(database: duckdb.DuckDBPyConnection, lake: Lake, name: str, ddl: str) -> None:
    """A table under its name with ``_`` for the dot; an empty one where there are no files."""
    database.register(name.replace(".", "_"), lake.dataset(name, schema=arrow_schema(ddl)))


def _facts(database: duckdb.DuckDBPyConnection, lake: Lake, sizes: Sequence[tuple[str, int, int]]) -> Facts:
    def rows(query: str) -> list[tuple[Any, ...]]:
        return database.execute(query).fetchall()

    note = lake.note("bronze.events") if lake.exists("bronze.events") else {}
    (total,) = rows(
        "select coalesce(sum(events), 0), coalesce(sum(payload_bytes), 0), min(minute), max(minute),"
        " coalesce(sum(ahead_of_clock), 0), coalesce(sum(sealed), 0) from gold_topic_minutes"
    )
    first, last = total[2], total[3]
    minutes = 1 if first is None else int((last - first).total_seconds() // 60) + 1
    step = max(1, -(-minutes // _POINTS_MAX))
    ticks, rates, latencies = _series(rows, first, minutes, step)
    heat = [[0.0] * 24 for _ in range(7)]
    for weekday, hour, events in rows(
        "select isodow(minute)::int - 1, hour(minute)::int, sum(events) from gold_topic_minutes group by all order by all"
    ):
        heat[weekday][hour] = float(events)
    return Facts(
        epoch=str(note.get("epoch", "")),
        seq=int(note.get("seq", 0)),
        tables=sizes,
        events=int(total[0]),
        payload_bytes=int(total[1]),
        first=first,
        last=last,
        ticks=ticks,
        step_minutes=step,
        rates=rates,
        latencies=latencies,
        heat=heat,
        topics=rows(
            "select topic, sum(events)::bigint, sum(payload_bytes)::bigint,"
            " max(latency_ms_p99), sum(events * latency_ms_p50) / sum(events), max(minute)"
            f" from gold_topic_minutes group by topic order by 2 desc, 1 limit {_ROWS_MAX}"
        ),
        groups=rows(
            'select topic, "group", lag, state, waiting_s from gold_group_lag'
            f' order by lag desc, topic, "group" limit {_ROWS_MAX}'
        ),
        letters=rows(
            'select category, topic, "group", error_shape, letters, is_poison from gold_dead_letter_categories'
            f' order by letters desc, topic, "group", error_shape limit {_ROWS_MAX}'
        ),
        quality=_quality(rows, int(total[4]), int(total[5])),
        clients=rows(
            "select partition, client_id, sum(events)::bigint, max(hour) from gold_sync_traffic"
            f" group by all order by 3 desc, 1, 2 limit {_ROWS_MAX}"
        ),
        heads=rows(
            "select space_id, head, sum(rows)::bigint, sum(brier * rows) / sum(rows), sum(ece * rows) / sum(rows), max(date)"
            f" from gold_learning_quality group by all order by 1, 2 limit {_ROWS_MAX}"
        ),
        drifts=rows(
            "select space_id, set_name, feature, date, psi, z from gold_learning_drift where is_drifted"
            f" order by date desc, 1, 2, 3 limit {_ROWS_MAX}"
        ),
        clicks=rows(
            "select space_id, sum(lists)::bigint, sum(ctr * lists) / sum(lists) from gold_learning_clicks"
            f" group by all order by 1 limit {_ROWS_MAX}"
        ),
        proposals=rows(
            "select space_id, rows, admit_now, admit_proposed, regretted_now, regretted_proposed from gold_gate_proposals"
            f" order by 1 limit {_ROWS_MAX}"
        ),
    )


def _series(
    rows: Any, first: datetime | None, minutes: int, step: int
) -> tuple[list[str], dict[str, list[float]], dict[str, list[float | None]]]:
    if first is None:
        return [], {}, {}
    count = -(-minutes // step)
    origin = f"timestamptz '{first.isoformat()}'"
    bucket = f"(date_diff('minute', {origin}, minute) // {step})::int"
    top = rows(
        f"select topic from gold_topic_minutes group by topic order by sum(events) desc, topic limit {_TOPICS_MAX}"
    )
    shown = [topic for (topic,) in top]
    rates: dict[str, list[float]] = {topic: [0.0] * count for topic in shown}
    for topic, at, events in rows(
        f"select topic, {bucket}, sum(events) from gold_topic_minutes group by all order by all"
    ):
        line = rates.get(topic) or rates.setdefault("other topics", [0.0] * count)
        line[at] += float(events) / step
    latencies: dict[str, list[float | None]] = {name: [None] * count for name in ("p50", "p95", "p99")}
    for at, *found in rows(
        f"select {bucket}, "
        + ", ".join(f"sum(events * latency_ms_{name}) / sum(events)" for name in latencies)
        + " from gold_topic_minutes group by all order by all"
    ):
        for name, value in zip(latencies, found, strict=True):
            latencies[name][at] = float(value)
    (labels,) = rows(
        f"select list(strftime({origin} + to_minutes(i * {step}), '%Y-%m-%d %H:%M') order by i) from range({count}) r(i)"
    )
    return list(labels[0]), rates, latencies


def _quality(rows: Any, ahead: int, sealed: int) -> list[tuple[str, int, str]]:
    reasons = rows("select reason, count(*) from bronze_quarantine group by reason order by 2 desc, 1 limit 10")
    ((twice,),) = rows(
        "select greatest(0, (select count(*) from bronze_events) - (select count(*) from silver_events))"
    )
    ((letters,),) = rows("select coalesce(sum(letters), 0) from gold_dead_letter_categories")
    ((poison,),) = rows("select count(*) from gold_dead_letter_categories where is_poison")
    return [
        *((f"quarantined: {reason}", int(count), "bad") for reason, count in reasons),
        ("events ahead of the clock", ahead, "warn" if ahead else "good"),
        ("events repeated, or not yet in silver", int(twice), "warn" if twice else "good"),
        ("dead letters", int(letters), "warn" if letters else "good"),
        ("kinds of failure that are poison", int(poison), "bad" if poison else "good"),
        ("sealed payloads (not looked into)", sealed, ""),
    ]
