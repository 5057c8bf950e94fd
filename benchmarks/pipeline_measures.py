"""
Single measurements of the pipeline and of what it is compared with.

All of them do the same work on the same log: every line's columns to Parquet (zstd, payload as text), then counts and latency
percentiles by topic and minute from that Parquet to another file.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.layout import Layout
from tidings.pipeline.bronze import Bronze
from tidings.pipeline.gold import GoldJobs
from tidings.pipeline.jobs.registry import all_jobs, choose
from tidings.pipeline.lake import Lake
from tidings.pipeline.runner import Pipeline
from tidings.pipeline.session import start_session, stop_session
from tidings.pipeline.settings import PipelineSettings
from tidings.pipeline.source import LogSource
from tidings.pipeline.status import JobStates

from .pipeline_filling import GrowingLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "BronzeFill",
    "Compared",
    "Incremental",
    "Incremented",
    "Rival",
    "Timed",
    "Written",
    "measure_duckdb",
    "measure_incremental",
    "measure_polars",
    "measure_spark",
    "write_log",
]

_MINUTES: Final = "topic_minutes"


class BronzeFill(msgspec.Struct, frozen=True):
    """A log to be made."""

    workspace: str
    events: int
    small: str
    """A small log of the same kind, to warm up with."""
    small_events: int


class Written(msgspec.Struct, frozen=True):
    """How large it is."""

    bytes: int


class Compared(msgspec.Struct, frozen=True):
    """A log to be converted, in turns with Spark's own reader and writer."""

    workspace: str
    small: str
    folder: str
    events: int
    rounds: int
    rounds_s_max: float
    """No round is begun after this."""


class Timed(msgspec.Struct, frozen=True):
    """Seconds, one figure a round."""

    session_s: float
    first_job_s: float
    bronze_s: list[float]
    minutes_s: list[float]
    plain_s: list[float]
    plain_minutes_s: list[float]
    rows: int
    minutes_rows: int
    plain_rows: int
    jvm_rss_mb: float


def write_log(case: BronzeFill) -> Written:
    """Make both logs."""
    with GrowingLog(Path(case.small), case.small_events) as small:
        small.write(case.small_events)
    with GrowingLog(Path(case.workspace), case.events) as log:
        log.write(case.events)
        return Written(log.bytes)


@contextmanager
def _spark(settings: PipelineSettings) -> Iterator[tuple[SparkSession, float, float]]:
    begin = time.perf_counter()
    session = start_session(settings)
    session_s = time.perf_counter() - begin
    try:
        begin = time.perf_counter()
        session.range(1000).selectExpr("sum(id)").collect()
        yield session, session_s, time.perf_counter() - begin
    finally:
        stop_session(session)


def measure_spark(case: Compared) -> Timed:
    """Session start; then ours and plain Spark, in turns, each round into a new folder."""
    settings = PipelineSettings()
    with _spark(settings) as (spark, session_s, first_job_s):
        _ours(spark, settings, case.small, Path(case.folder, "warm"))
        _plain(spark, case.small, Path(case.folder, "warm-plain"))
        ours: list[tuple[float, float, int, int]] = []
        plain: list[tuple[float, float, int]] = []
        began = time.perf_counter()
        while not ours or (len(ours) < case.rounds and time.perf_counter() - began < case.rounds_s_max):
            # Whoever comes first in a round warms the JVM up for the other one: so they take turns in that, too.
            for is_ours in (True, False) if len(ours) % 2 == 0 else (False, True):
                if is_ours:
                    ours.append(_ours(spark, settings, case.workspace, Path(case.folder, "ours")))
                else:
                    plain.append(_plain(spark, case.workspace, Path(case.folder, "plain")))
        rss_mb = _jvm_rss_mb(spark)
    return Timed(
        session_s=session_s,
        first_job_s=first_job_s,
        bronze_s=[each[0] for each in ours],
        minutes_s=[each[1] for each in ours],
        plain_s=[each[0] for each in plain],
        plain_minutes_s=[each[1] for each in plain],
        rows=ours[0][2],
        minutes_rows=ours[0][3],
        plain_rows=plain[0][2],
        jvm_rss_mb=rss_mb,
    )


def _ours(
    spark: SparkSession, settings: PipelineSettings, workspace: str, target: Path
) -> tuple[float, float, int, int]:
    layout, disk, lake = Layout(Path(workspace)), OsDisk(), Lake(target, SYSTEM_CLOCK)
    epoch = layout.read_meta(disk).epoch
    jobs = choose(all_jobs(), [_MINUTES])
    try:
        begin = time.perf_counter()
        source = LogSource(layout, disk)
        bronze = Bronze(lake, source, settings, run=_run(), now_us=SYSTEM_CLOCK.now_ns() // 1000)
        filled = bronze.fill(spark, epoch, lambda _: None)
        bronze_s = time.perf_counter() - begin
        begin = time.perf_counter()
        gold = GoldJobs(
            lake,
            settings,
            jobs,
            spark=lambda: spark,
            states=JobStates(lake.storage, epoch),
            until=filled.until,
            as_of=Pipeline.as_of(_lake_only(lake)),
            run_name=_run(),
            clock=SYSTEM_CLOCK,
            publish=None,
            progress=lambda _: None,
        )
        (result,) = gold.run()
        return bronze_s, time.perf_counter() - begin, filled.rows, sum((result.rows or {}).values())
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _lake_only(lake: Lake) -> Pipeline:
    return Pipeline(lake.storage.path.parent, PipelineSettings(), clock=SYSTEM_CLOCK, run=_run(), lake=lake.storage)


def _run() -> str:
    return os.urandom(4).hex()


_PLAIN_SCHEMA: Final = (
    "offset bigint, seq bigint, meta struct<written_at: timestamp, topic: string, type: string, space_id: string,"
    " event_id: string, ts: timestamp, partitions: array<string>, actor: string, trace_id: string, idem_key: string,"
    " ttl_sec: bigint, device: string, band: string, priority: string>, payload string"
)


def _plain(spark: SparkSession, workspace: str, target: Path) -> tuple[float, float, int]:
    """Spark's own reader and writer, given the schema, as anybody would write it."""
    from pyspark.sql import functions as F

    try:
        begin = time.perf_counter()
        files = [str(path) for path in Layout(Path(workspace)).wal.rglob("*.jsonl")]
        lines = spark.read.schema(_PLAIN_SCHEMA).json(files)
        lines.select("offset", "seq", "meta.*", "payload").withColumn("date", F.to_date("ts")).write.mode(
            "overwrite"
        ).parquet(str(target / "events"))
        plain_s = time.perf_counter() - begin
        begin = time.perf_counter()
        events = spark.read.parquet(str(target / "events"))
        late = (F.unix_micros("written_at") - F.unix_micros("ts")) / F.lit(1000.0)
        minutes = events.groupBy("topic", F.date_trunc("minute", "ts").alias("minute")).agg(
            F.count("*").alias("events"),
            F.sum(F.octet_length("payload")).alias("payload_bytes"),
            F.count_distinct("space_id").alias("spaces"),
            F.percentile_approx(late, [0.5, 0.95, 0.99], 1000).alias("ranks"),
            F.max(late).alias("latency_ms_max"),
        )
        minutes.write.mode("overwrite").parquet(str(target / "minutes"))
        minutes_s = time.perf_counter() - begin
        return plain_s, minutes_s, events.count()
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _jvm_rss_mb(spark: SparkSession) -> float:
    """What Spark's own process holds, where the system tells."""
    process: Any = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0.0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM")), "0 0")
    return int(line.split()[1]) / 1024


# New events, a few at a time


class Incremental(msgspec.Struct, frozen=True):
    """A short and a long history, and how many events come in between two runs."""

    folder: str
    short: int
    long: int
    new: int
    rounds: int


class Incremented(msgspec.Struct, frozen=True):
    """Seconds that one run over the new events took, by round, after the short history and after the long one."""

    short_s: list[float]
    long_s: list[float]
    rows: int


def measure_incremental(case: Incremental) -> Incremented:
    """Whole runs (bronze, silver, minutes) over a few new events, with a session that is warm."""
    settings = PipelineSettings()
    jobs = choose(all_jobs(), [_MINUTES])
    took: dict[str, list[float]] = {"short": [], "long": []}
    rows = 0
    with _spark(settings) as (spark, _, _):
        short = GrowingLog(Path(case.folder, "short"), case.short)
        long = GrowingLog(Path(case.folder, "long"), case.long)
        with short, long:
            logs = {"short": (short, case.short), "long": (long, case.long)}
            for name, (log, size) in logs.items():
                log.write(size)
                _pipeline(case, name, settings).run(lambda: spark, jobs)
            for _ in range(case.rounds + 1):  # the first round warms up
                for name, (log, _) in logs.items():
                    log.write(case.new)
                    begin = time.perf_counter()
                    rows = _pipeline(case, name, settings).run(lambda: spark, jobs).bronze.rows
                    took[name].append(time.perf_counter() - begin)
    return Incremented(took["short"][1:], took["long"][1:], rows)


def _pipeline(case: Incremental, name: str, settings: PipelineSettings) -> Pipeline:
    return Pipeline(Path(case.folder, name), settings, clock=SYSTEM_CLOCK, run=_run())


# Engines without a cluster in them


class Rival(msgspec.Struct, frozen=True):
    """The same log, for another engine."""

    workspace: str
    folder: str
    events: int


class Done(msgspec.Struct, frozen=True):
    """What it took the other engine."""

    events_s: float
    minutes_s: float
    rows: int


def measure_duckdb(case: Rival) -> Done:
    """DuckDB with all cores, reading JSON by a given schema."""
    import duckdb

    wal = Layout(Path(case.workspace)).wal
    with duckdb.connect() as duck, _folder(case.folder) as target:
        duck.execute("set timezone = 'UTC'")
        meta = (
            "STRUCT(written_at TIMESTAMPTZ, topic VARCHAR, type VARCHAR, space_id VARCHAR, event_id VARCHAR, ts TIMESTAMPTZ,"
            " partitions VARCHAR[], actor JSON, trace_id VARCHAR, idem_key VARCHAR, ttl_sec BIGINT, device JSON,"
            " band VARCHAR, priority JSON)"
        )
        columns = f"{{\"offset\": 'BIGINT', \"seq\": 'BIGINT', \"meta\": '{meta}', \"payload\": 'JSON'}}"
        events_s = _timed(
            lambda: duck.execute(
                f"copy (select \"offset\", seq, unnest(meta), payload, meta.ts::date as date from read_json('{wal}/*.jsonl',"
                f" format = 'newline_delimited', columns = {columns})) to '{target}/events.parquet'"
                " (format parquet, compression zstd)"
            )
        )
        minutes_s = _timed(
            lambda: duck.execute(
                f"copy (select topic, date_trunc('minute', ts) as minute, count(*), sum(strlen(payload)),"
                " count(distinct space_id), approx_quantile(epoch_us(written_at) - epoch_us(ts), [0.5, 0.95, 0.99]),"
                " max(epoch_us(written_at) - epoch_us(ts))"
                f" from '{target}/events.parquet' group by 1, 2) to '{target}/minutes.parquet'"
            )
        )
        rows = duck.execute(f"select count(*) from '{target}/events.parquet'").fetchone()
    return Done(events_s, minutes_s, rows[0] if rows else 0)


def measure_polars(case: Rival) -> Done:
    """Polars with all cores, streaming."""
    import importlib

    pl: Any = importlib.import_module("polars")
    texts = ("written_at", "topic", "type", "space_id", "event_id", "ts")
    payload = {"value": pl.Float64, "to": pl.String, "text": pl.String}
    schema = {
        "offset": pl.Int64,
        "seq": pl.Int64,
        "meta": pl.Struct(dict.fromkeys(texts, pl.String)),
        "payload": pl.Struct(payload),
    }
    with _folder(case.folder) as target:
        files = sorted(Layout(Path(case.workspace)).wal.rglob("*.jsonl"))
        lines = pl.scan_ndjson(files, schema=schema)
        times = [pl.col(name).str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ", time_unit="us") for name in ("written_at", "ts")]
        events = (
            lines.unnest("meta")
            .with_columns(times)
            .with_columns(pl.col("payload").struct.json_encode().alias("payload"))
        )
        events_s = _timed(lambda: events.sink_parquet(target / "events.parquet", compression="zstd"))
        late = (pl.col("written_at") - pl.col("ts")).dt.total_microseconds()
        minutes = (
            pl.scan_parquet(target / "events.parquet")
            .group_by("topic", pl.col("ts").dt.truncate("1m").alias("minute"))
            .agg(
                pl.len().alias("events"),
                pl.col("payload").str.len_bytes().sum().alias("payload_bytes"),
                pl.col("space_id").n_unique().alias("spaces"),
                *(late.quantile(rank).alias(f"p{rank}") for rank in (0.5, 0.95, 0.99)),
                late.max().alias("max"),
            )
        )
        minutes_s = _timed(lambda: minutes.sink_parquet(target / "minutes.parquet"))
        rows = pl.scan_parquet(target / "events.parquet").select(pl.len()).collect().item()
    return Done(events_s, minutes_s, rows)


@contextmanager
def _folder(parent: str) -> Iterator[Path]:
    target = Path(parent, "rival")
    target.mkdir()
    try:
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
