"""
The pipeline's work by engines without a cluster in them: every line's columns to Parquet (zstd, payload as text), the same once
more without repeats, and counts, sizes and latencies by topic and minute.

They keep no position, check no line's checksum, take nothing for quarantine, and know no second run: what the machine can do.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from tidings.log.embedded.layout import Layout
from tidings.pipeline.latency_buckets import GROWTH

__all__ = ["Done", "Rival", "measure_duckdb", "measure_polars"]


class Rival(msgspec.Struct, frozen=True):
    """The same log, for another engine."""

    workspace: str
    folder: str
    events: int
    rounds: int = 1


class Done(msgspec.Struct, frozen=True):
    """What it took the other engine, by round: the first is cold."""

    bronze_s: list[float]
    total_s: list[float]
    rows: int
    silver_rows: int
    minutes_rows: int


_META: Final = (
    "STRUCT(written_at TIMESTAMPTZ, topic VARCHAR, type VARCHAR, space_id VARCHAR, event_id VARCHAR, ts TIMESTAMPTZ,"
    " partitions VARCHAR[], actor JSON, trace_id VARCHAR, idem_key VARCHAR, ttl_sec BIGINT, device JSON,"
    " band VARCHAR, priority JSON)"
)
_COLUMNS: Final = f"{{\"offset\": 'BIGINT', \"seq\": 'BIGINT', \"meta\": '{_META}', \"payload\": 'JSON'}}"
_MINUTES: Final = f"""
    select topic, date_trunc('minute', written_at) as minute, count(*), sum(strlen(payload)), count(distinct space_id),
        max("offset"), approx_quantile(late, [0.5, 0.95, 0.99]), max(late), count(*) filter (late < 0),
        histogram(case when late < 1 then 0 else 1 + floor(ln(late) / {math.log(GROWTH)})::int end)
    from (select *, epoch_us(written_at) - epoch_us(ts) as late from '{{silver}}') group by 1, 2
"""


def measure_duckdb(case: Rival) -> Done:
    """DuckDB with all cores, reading JSON by a given schema."""
    import duckdb

    with duckdb.connect() as duck:
        duck.execute("set timezone = 'UTC'")

        def written(query: str, file: Path) -> None:
            duck.execute(f"copy ({query}) to '{file}' (format parquet, compression zstd)")

        def bronze(target: Path) -> None:
            lines = f"read_json('{Layout(Path(case.workspace)).wal}/*.jsonl', format = 'newline_delimited', columns = {_COLUMNS})"
            written(
                f'select "offset", seq, unnest(meta), payload, meta.ts::date as date from {lines}',
                target / "bronze.parquet",
            )

        def rest(target: Path) -> None:
            events = f"from '{target}/bronze.parquet'"
            again = duck.execute(f"select 1 {events} group by event_id having count(*) > 1 limit 1").fetchone()
            first = "qualify row_number() over (partition by event_id, space_id, topic, type, payload order by seq) = 1"
            written(f"select * {events} {first if again else ''}", target / "silver.parquet")
            written(_MINUTES.format(silver=target / "silver.parquet"), target / "minutes.parquet")

        def count(file: Path) -> int:
            found = duck.execute(f"select count(*) from '{file}'").fetchone()
            return found[0] if found else 0

        return _measured(case, bronze, rest, count)


def measure_polars(case: Rival) -> Done:
    """Polars with all cores, streaming; it has no histogram, so its minutes have percentiles only."""
    import importlib

    pl: Any = importlib.import_module("polars")
    schema = {
        "offset": pl.Int64,
        "seq": pl.Int64,
        "meta": pl.Struct(dict.fromkeys(("written_at", "topic", "type", "space_id", "event_id", "ts"), pl.String)),
        "payload": pl.Struct({"value": pl.Float64, "to": pl.String, "text": pl.String}),
    }

    def bronze(target: Path) -> None:
        lines = pl.scan_ndjson(sorted(Layout(Path(case.workspace)).wal.rglob("*.jsonl")), schema=schema)
        times = [pl.col(name).str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ", time_unit="us") for name in ("written_at", "ts")]
        events = (
            lines.unnest("meta")
            .with_columns(times)
            .with_columns(pl.col("payload").struct.json_encode().alias("payload"))
        )
        events.sink_parquet(target / "bronze.parquet", compression="zstd")

    def rest(target: Path) -> None:
        events = pl.scan_parquet(target / "bronze.parquet")
        ids = events.select(pl.len(), pl.col("event_id").n_unique().alias("ids")).collect(engine="streaming")
        if ids["len"][0] != ids["ids"][0]:
            events = events.unique(["event_id", "space_id", "topic", "type", "payload"], keep="first")
        events.sink_parquet(target / "silver.parquet", compression="zstd")
        late = (pl.col("written_at") - pl.col("ts")).dt.total_microseconds()
        minutes = (
            pl.scan_parquet(target / "silver.parquet")
            .group_by("topic", pl.col("written_at").dt.truncate("1m").alias("minute"))
            .agg(
                pl.len().alias("events"),
                pl.col("payload").str.len_bytes().sum().alias("payload_bytes"),
                pl.col("space_id").n_unique().alias("spaces"),
                pl.col("offset").max().alias("last_offset"),
                *(late.quantile(rank).alias(f"p{rank}") for rank in (0.5, 0.95, 0.99)),
                late.max().alias("max"),
            )
        )
        minutes.sink_parquet(target / "minutes.parquet")

    def count(file: Path) -> int:
        return int(pl.scan_parquet(file).select(pl.len()).collect().item())

    return _measured(case, bronze, rest, count)


def _measured(
    case: Rival, bronze: Callable[[Path], None], rest: Callable[[Path], None], count: Callable[[Path], int]
) -> Done:
    bronze_s, total_s, rows = [], [], [0, 0, 0]
    for _ in range(case.rounds):
        with _folder(case.folder) as target:
            begin = time.perf_counter()
            bronze(target)
            bronze_s.append(time.perf_counter() - begin)
            rest(target)
            total_s.append(time.perf_counter() - begin)
            rows = [count(target / f"{name}.parquet") for name in ("bronze", "silver", "minutes")]
    return Done(bronze_s, total_s, *rows)


@contextmanager
def _folder(parent: str) -> Iterator[Path]:
    target = Path(parent, "rival")
    target.mkdir()
    try:
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)
