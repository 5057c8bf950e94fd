"""
The numbers of a report, from the lake's tables: read with DuckDB over their files, within a bound of memory, without Spark.

A table that is not there yet is empty. Everything is ordered, so that the same tables give the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import duckdb

from .lake import Lake
from .latency_buckets import bucket_of, percentile_ms
from .report_charts import LINES_MAX
from .schemas import CORE_TABLES, arrow_schema
from .storage_errors import translate_read_errors

_MEMORY_MB: Final = 512
_RANKS: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
DAY_MS: Final = 86_400_000.0
"""Events written later than this after they happened are counted and not drawn."""
_POINTS_MAX: Final = 120
_OTHERS: Final = "other topics"
_ROWS_MAX: Final = 50
_MINUTES: Final = (
    "topic string, minute timestamp, events bigint, payload_bytes bigint, sealed bigint,"
    " latency_buckets map<int,bigint>, ahead_of_clock bigint"
)
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
    times: Sequence[datetime]
    """Steps of the time of writing, which no producer's clock can stretch."""
    step_minutes: int
    rates: Mapping[str, Sequence[float]]
    """Events a minute by topic, one value a step; the smaller topics together."""
    latencies: Mapping[str, Sequence[float | None]]
    """p50, p95, p99 in milliseconds, one value a step, of the events that are no outliers."""
    ahead: int
    """Events whose own time lies after their time of writing: outliers."""
    late: int
    """Events written more than a day after they happened: outliers."""
    lag_times: Sequence[datetime]
    lags: Mapping[str, Sequence[float | None]]
    """Events not acknowledged, by group, one value a step of ``lag_times``; the groups that were furthest behind."""
    heat: Sequence[Sequence[float]]
    """Events by weekday (Monday first) and hour of writing, in UTC."""
    topics: Sequence[tuple[Any, ...]]
    """Topic, events, bytes, median and 99th percentile of all its events in milliseconds, last minute."""
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
    with (
        translate_read_errors(lake.tables_folder),
        duckdb.connect(config={"threads": 2, "memory_limit": f"{_MEMORY_MB}MB"}) as database,
    ):
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
        " coalesce(sum(sealed), 0) from gold_topic_minutes"
    )
    first, last = total[2], total[3]
    times, step = _steps(first, last)
    latencies, ahead, late = _latencies(rows, times, step)
    lag_times, lags = _lags(rows)
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
        times=times,
        step_minutes=step,
        rates=_rates(rows, times, step),
        latencies=latencies,
        ahead=ahead,
        late=late,
        lag_times=lag_times,
        lags=lags,
        heat=heat,
        topics=_topics(rows),
        groups=rows(
            'select topic, "group", lag, state, waiting_s from gold_group_lag'
            f' order by lag desc, topic, "group" limit {_ROWS_MAX}'
        ),
        letters=rows(
            'select category, topic, "group", error_shape, letters, is_poison from gold_dead_letter_categories'
            f' order by letters desc, topic, "group", error_shape limit {_ROWS_MAX}'
        ),
        quality=_quality(rows, ahead, late, int(total[4])),
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


_Rows = Callable[[str], list[tuple[Any, ...]]]


def _steps(first: datetime | None, last: datetime | None) -> tuple[list[datetime], int]:
    """Steps of whole minutes over a range, at most so many as can be drawn; and how many minutes each has."""
    if first is None or last is None:
        return [], 1
    minutes = int((last - first).total_seconds() // 60) + 1
    step = -(-minutes // _POINTS_MAX)
    return [first + timedelta(minutes=number) for number in range(0, minutes, step)], step


def _step_of(column: str, times: Sequence[datetime], step: int) -> str:
    return f"(date_diff('minute', timestamptz '{times[0].isoformat()}', {column}) // {step})::int"


def _rates(rows: _Rows, times: Sequence[datetime], step: int) -> dict[str, list[float]]:
    if not times:
        return {}
    top = rows(
        f"select topic from gold_topic_minutes group by topic order by sum(events) desc, topic limit {LINES_MAX - 1}"
    )
    rates: dict[str, list[float]] = {topic: [0.0] * len(times) for (topic,) in top}
    for topic, at, events in rows(
        f"select topic, {_step_of('minute', times, step)}, sum(events) from gold_topic_minutes group by all order by all"
    ):
        line = rates.get(topic) or rates.setdefault(_OTHERS, [0.0] * len(times))
        line[at] += float(events) / step
    return rates


def _latencies(rows: _Rows, times: Sequence[datetime], step: int) -> tuple[dict[str, list[float | None]], int, int]:
    """Percentiles by step, from the counts of all its events together; and how many were left out on either side."""
    lines: dict[str, list[float | None]] = {name: [None] * len(times) for name in _RANKS}
    if not times:
        return {}, 0, 0
    slowest, ahead, late = bucket_of(DAY_MS), 0, 0
    counts: list[dict[int, int]] = [{} for _ in times]
    at_step = _step_of("minute", times, step)
    for at, bucket, events in rows(_buckets(at_step)):
        if bucket > slowest:
            late += events
        else:
            counts[at][bucket] = events
    for at, events in rows(f"select {at_step}, sum(ahead_of_clock)::bigint from gold_topic_minutes group by all"):
        ahead += events
        counts[at][0] = max(0, counts[at].get(0, 0) - events)
    for name, rank in _RANKS.items():
        lines[name] = [percentile_ms(found, rank) for found in counts]
    return lines, ahead, late


def _topics(rows: _Rows) -> list[tuple[Any, ...]]:
    counts: dict[str, dict[int, int]] = {}
    for topic, bucket, events in rows(_buckets("topic")):
        counts.setdefault(topic, {})[bucket] = events
    return [
        (topic, events, size, *(percentile_ms(counts.get(topic, {}), rank) for rank in (0.5, 0.99)), last)
        for topic, events, size, last in rows(
            "select topic, sum(events)::bigint, sum(payload_bytes)::bigint, max(minute) from gold_topic_minutes"
            f" group by topic order by 2 desc, 1 limit {_ROWS_MAX}"
        )
    ]


def _buckets(by: str) -> str:
    return (
        f"select {by}, bucket.key, sum(bucket.value)::bigint"
        " from (select *, unnest(map_entries(latency_buckets)) as bucket from gold_topic_minutes) group by all order by all"
    )


def _lags(rows: _Rows) -> tuple[list[datetime], dict[str, list[float | None]]]:
    """What each group had not acknowledged at the end of each step. It stays as it is between two runs that found it changed."""
    ((first, last),) = rows("select min(seen_at), max(seen_at) from silver_group_positions")
    times, step = _steps(first, last)
    if not times:
        return [], {}
    top = rows(
        'select topic, "group" from silver_group_positions group by all'
        f' order by max(lag) desc, topic, "group" limit {LINES_MAX}'
    )
    lags: dict[tuple[str, str], list[float | None]] = {each: [None] * len(times) for each in top}
    for topic, group, at, lag in rows(
        f'select topic, "group", {_step_of("seen_at", times, step)}, arg_max(lag, seen_at) from silver_group_positions'
        " group by all order by all"
    ):
        if (line := lags.get((topic, group))) is not None:
            line[at:] = [float(lag)] * (len(times) - at)
    return times, {f"{topic} / {group}": line for (topic, group), line in lags.items()}


def _quality(rows: _Rows, ahead: int, late: int, sealed: int) -> list[tuple[str, int, str]]:
    reasons = rows("select reason, count(*) from bronze_quarantine group by reason order by 2 desc, 1 limit 10")
    ((twice,),) = rows(
        "select greatest(0, (select count(*) from bronze_events) - (select count(*) from silver_events))"
    )
    ((letters,),) = rows("select coalesce(sum(letters), 0) from gold_dead_letter_categories")
    ((poison,),) = rows("select count(*) from gold_dead_letter_categories where is_poison")
    return [
        *((f"quarantined: {reason}", int(count), "bad") for reason, count in reasons),
        ("events ahead of the clock", ahead, "warn" if ahead else "good"),
        ("events written more than a day late", late, "warn" if late else "good"),
        ("events repeated, or not yet in silver", int(twice), "warn" if twice else "good"),
        ("dead letters", int(letters), "warn" if letters else "good"),
        ("kinds of failure that are poison", int(poison), "bad" if poison else "good"),
        ("sealed payloads (not looked into)", sealed, ""),
    ]
