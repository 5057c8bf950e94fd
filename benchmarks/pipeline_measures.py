"""
Single measurements of the pipeline: from segments to tables beside Spark's own reader, a few new events on a history, and the
commands as a user waits for them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.embedded.layout import Layout
from tidings.pipeline.gold import JobResult
from tidings.pipeline.jobs.registry import all_jobs, jobs_in_sets
from tidings.pipeline.lake import Lake
from tidings.pipeline.runner import Pipeline
from tidings.pipeline.session import ProgressStep, start_session, stop_session
from tidings.pipeline.settings import PipelineSettings

from .pipeline_filling import GrowingLog, Kinds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "BronzeFill",
    "Commands",
    "Compared",
    "Cost",
    "Costs",
    "JobCost",
    "Timed",
    "Waited",
    "Written",
    "measure_commands",
    "measure_cost",
    "measure_spark",
    "write_log",
]


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


def write_log(case: BronzeFill) -> Written:
    """Make both logs."""
    with GrowingLog(Path(case.small), case.small_events) as small:
        small.write(case.small_events)
    with GrowingLog(Path(case.workspace), case.events) as log:
        log.write(case.events)
        return Written(log.bytes)


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
    silver_s: list[float]
    total_s: list[float]
    """Bronze, silver and the operational tables."""
    plain_s: list[float]
    rows: int
    plain_rows: int
    silver_rows: int
    minutes_rows: int
    jvm_rss_mb: float


class _Stages:
    """When a stage of a run was last heard of."""

    def __init__(self) -> None:
        self.heard: dict[str, float] = {}

    def __call__(self, step: ProgressStep, /) -> None:
        self.heard[step.stage] = time.perf_counter()


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
        ours: list[tuple[float, float, float, dict[str, int]]] = []
        plain: list[tuple[float, int]] = []
        began = time.perf_counter()
        while not ours or (len(ours) < case.rounds and time.perf_counter() - began < case.rounds_s_max):
            # Whoever comes first in a round warms the JVM up for the other one: so they take turns in that, too.
            for is_ours in (True, False) if len(ours) % 2 == 0 else (False, True):
                if is_ours:
                    ours.append(_ours(spark, settings, case.workspace, Path(case.folder, "ours")))
                else:
                    plain.append(_plain(spark, case.workspace, Path(case.folder, "plain")))
        rss_mb = _jvm_rss_mb(spark)
    rows = ours[0][3]
    return Timed(
        session_s=session_s,
        first_job_s=first_job_s,
        bronze_s=[each[0] for each in ours],
        silver_s=[each[1] for each in ours],
        total_s=[each[2] for each in ours],
        plain_s=[each[0] for each in plain],
        rows=rows["bronze.events"],
        plain_rows=plain[0][1],
        silver_rows=rows["silver.events"],
        minutes_rows=rows["gold.topic_minutes"],
        jvm_rss_mb=rss_mb,
    )


def _ours(
    spark: SparkSession, settings: PipelineSettings, workspace: str, target: Path
) -> tuple[float, float, float, dict[str, int]]:
    stages = _Stages()
    pipeline = Pipeline(Path(workspace), settings, clock=SYSTEM_CLOCK, run=_run(), lake=target)
    try:
        begin = time.perf_counter()
        report = pipeline.run(lambda: spark, jobs_in_sets(), progress=stages)
        total_s = time.perf_counter() - begin
        assert not report.failed, report.failed
        rows = {name: sum(file.rows for file in pipeline.lake.files(name)) for name in pipeline.lake.tables()}
    finally:
        shutil.rmtree(target, ignore_errors=True)
    bronze_s = stages.heard["bronze"] - begin
    return bronze_s, stages.heard["silver"] - begin - bronze_s, total_s, rows


def _run() -> str:
    return os.urandom(4).hex()


_PLAIN_SCHEMA: Final = (
    "offset bigint, seq bigint, meta struct<written_at: timestamp, topic: string, type: string, space_id: string,"
    " event_id: string, ts: timestamp, partitions: array<string>, actor: string, trace_id: string, idem_key: string,"
    " ttl_sec: bigint, device: string, band: string, priority: string>, payload string"
)


def _plain(spark: SparkSession, workspace: str, target: Path) -> tuple[float, int]:
    """Spark's own reader and writer, given the schema, as anybody would write it."""
    from pyspark.sql import functions as F

    try:
        begin = time.perf_counter()
        files = [str(path) for path in Layout(Path(workspace)).wal.rglob("*.jsonl")]
        lines = spark.read.schema(_PLAIN_SCHEMA).json(files)
        lines.select("offset", "seq", "meta.*", "payload").withColumn("date", F.to_date("ts")).write.mode(
            "overwrite"
        ).parquet(str(target))
        return time.perf_counter() - begin, spark.read.parquet(str(target)).count()
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

_WEEK_EVENTS: Final = 200_000
"""A long history is of many weeks and not of many events a day, whose size would be what is measured."""


_WARM_ROUNDS: Final = 3
"""A JVM goes on compiling for some rounds: a pipeline that runs every minute is warm most of the time."""


class Cost(msgspec.Struct, frozen=True):
    """A history of all kinds of events, and how many come in between two runs."""

    folder: str
    history: int
    new: int
    rounds: int


class JobCost(msgspec.Struct, frozen=True):
    """What one job took, in the middle of the rounds."""

    seconds: float
    megabytes: float
    """How large the files were that it was given."""


class Costs(msgspec.Struct, frozen=True):
    """What runs of all jobs took, with a session that is warm."""

    first_s: float
    """The run over the whole history."""
    warming_s: list[float]
    """Over the first new events, while the JVM still compiles."""
    run_s: list[float]
    """Over the new events, by round."""
    jobs: dict[str, JobCost]
    """The same by job: jobs run side by side, so they add up to more."""
    rows: int
    failed: list[str]


def measure_cost(case: Cost) -> Costs:
    """Whole runs (bronze, silver, every job of every set) over a few new events."""
    settings, jobs = PipelineSettings(), all_jobs()
    warming_s: list[float] = []
    run_s: list[float] = []
    jobs_of: dict[str, list[JobResult]] = {}
    first_s, rows, failed = 0.0, 0, set[str]()
    made = GrowingLog(Path(case.folder), case.history, Kinds.LIFE, week=_WEEK_EVENTS)
    with _spark(settings) as (spark, _, _), made as log:
        for number in range(1 + _WARM_ROUNDS + case.rounds):  # the history first
            log.write(case.new if number else case.history)
            begin = time.perf_counter()
            report = Pipeline(Path(case.folder), settings, clock=SYSTEM_CLOCK, run=_run()).run(lambda: spark, jobs)
            took = time.perf_counter() - begin
            failed |= {job.name for job in report.failed}
            rows = report.bronze.rows
            if number == 0:
                first_s = took
            elif number <= _WARM_ROUNDS:
                warming_s.append(took)
            else:
                run_s.append(took)
                for job in report.jobs:
                    jobs_of.setdefault(job.name, []).append(job)
    jobs_cost = {
        name: JobCost(median(each.seconds for each in found), median(each.bytes_read for each in found) / 1e6)
        for name, found in jobs_of.items()
    }
    return Costs(first_s, warming_s, run_s, jobs_cost, rows, sorted(failed))


# The commands


class Commands(msgspec.Struct, frozen=True):
    """A small log, and how many events are followed."""

    folder: str
    events: int
    follows: int


class Waited(msgspec.Struct, frozen=True):
    """Seconds that somebody waits."""

    cold_s: float
    """A first run with the operational jobs, from the command to its end, where Java never ran before."""
    prepare_s: float
    """``tidings pipeline prepare``."""
    prepared_s: float
    """A first run after that."""
    idle_s: float
    """A run with nothing new."""
    follow_s: list[float]
    """With --follow: from the commit of an event until it is in silver, event by event; the first comes with the command."""


_FOLLOW_S_MAX: Final = 120.0


def measure_commands(case: Commands) -> Waited:
    """``tidings pipeline run`` in processes of its own."""
    workspace, cache = Path(case.folder, "log"), f"java_cache={case.folder}/java"
    with GrowingLog(workspace, case.events + case.follows) as log:
        log.write(case.events)
        run = ("run", "--once", "--set", cache, "--workspace", str(workspace))
        cold_s = _command(*run)
        prepare_s = _command("prepare", "--set", cache)
        shutil.rmtree(workspace / "lake")
        prepared_s, idle_s = _command(*run), _command(*run)
        lake = Lake(workspace / "lake", SYSTEM_CLOCK)
        with _following(workspace):
            follow_s = [_until_in_silver(log, lake) for _ in range(case.follows)]
    return Waited(cold_s, prepare_s, prepared_s, idle_s, follow_s)


def _words(*words: str) -> list[str]:
    program = "import sys; from tidings.cli import main; sys.exit(main())"
    return [sys.executable, "-c", program, "pipeline", *words]


def _command(*words: str) -> float:
    begin = time.perf_counter()
    subprocess.run(_words(*words), check=True, capture_output=True)
    return time.perf_counter() - begin


@contextmanager
def _following(workspace: Path) -> Iterator[None]:
    with subprocess.Popen(
        _words("run", "--follow", "--workspace", str(workspace)), stdout=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)


def _until_in_silver(log: GrowingLog, lake: Lake) -> float:
    log.write(1)
    begin = time.perf_counter()
    while lake.note("silver.events").get("seq", 0) < log.seq:
        if time.perf_counter() - begin > _FOLLOW_S_MAX:
            raise TimeoutError(f"seq {log.seq} did not reach silver")
        time.sleep(0.02)
    return time.perf_counter() - begin
