"""
The pipeline, in three benches: segments to tables beside plain Spark, DuckDB and Polars; what new events cost, by history and
by job; and how long somebody waits for a command, and for an event that is followed.

Spark's own way of reading (``spark.read.json`` to Parquet) runs in the same session, in turns. DuckDB and Polars have
processes of their own; they keep no position, check no line and know no second run, so they are what the machine can do
rather than what the pipeline should do.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Final

from .measuring import scratch
from .pipeline_measures import (
    BronzeFill,
    Commands,
    Compared,
    Cost,
    Costs,
    measure_commands,
    measure_cost,
    measure_spark,
    write_log,
)
from .pipeline_rivals import Rival, measure_duckdb, measure_polars
from .report import Row, at_least, at_most, noted
from .running import Runner
from .scales import Scale

__all__ = ["bench", "bench_commands", "bench_costs"]

_ROWS_PER_S_MIN: Final = 794_000.0
_PLAIN_RATIO_MIN: Final = 2.1
_DUCKDB_RATIO_MAX: Final = 1.8
_SESSION_S_MAX: Final = 10.0
_COLD_S_MAX: Final = 15.0
_COLD_EVENTS: Final = 12
_IDLE_S_MAX: Final = 1.0
_FOLLOW_S_MAX: Final = 10.0
_FOLLOWED: Final = 10
_NEW_S_MAX: Final = 20.0
_ROUNDS_MAX: Final = 3
_ROUNDS_S: Final = 90.0
_SMALL_SHARE: Final = 20
_JOBS_SHOWN: Final = 12


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """
    A log is made once; everybody reads it. ``is_one_core`` is of no meaning to Spark, which is measured on all cores.
    """
    events = scale.pipeline_events
    with scratch(folder) as place:
        small, workspace = str(place / "small"), str(place / "log")
        size = run(write_log, BronzeFill(workspace, events, small, max(1_000, events // _SMALL_SHARE))).bytes
        yield from _compared(run, scale, workspace, small, str(place), f"{events:,} events of {size // events} bytes")


def _compared(run: Runner, scale: Scale, workspace: str, small: str, place: str, what: str) -> Iterator[Row]:
    events, rounds = scale.pipeline_events, min(_ROUNDS_MAX, scale.rounds)
    ours = run(measure_spark, Compared(workspace, small, place, events, rounds, max(_ROUNDS_S, scale.bench_s_max)))
    assert ours.rows == ours.plain_rows == ours.silver_rows == events, "every event is there once"
    rival = Rival(workspace, place, events, rounds=2)
    others = {"DuckDB": run(measure_duckdb, rival)}
    if importlib.util.find_spec("polars") is not None:
        others["Polars"] = run(measure_polars, rival)
    for each in others.values():
        assert (each.rows, each.silver_rows, each.minutes_rows) == (events, events, ours.minutes_rows), "the same work"
    yield at_most(
        noted("pipeline", "Spark session from cold", "s", ours.session_s, **{"first job s": ours.first_job_s}),
        _SESSION_S_MAX,
    )
    bronze, plain = events / median(ours.bronze_s), events / median(ours.plain_s)
    row = Row(
        bench="pipeline",
        case=f"segments to bronze, {what}",
        unit="rows/s",
        ours=bronze,
        baselines={"spark.read.json": plain, **{name: events / min(each.bronze_s) for name, each in others.items()}},
        ratio=bronze / plain,
        detail={
            "best": events / min(ours.bronze_s),
            "rounds": float(len(ours.bronze_s)),
            "JVM peak MB": ours.jvm_rss_mb,
        },
    )
    yield at_least(row, _ROWS_PER_S_MIN)
    yield at_least(
        noted("pipeline", "segments to bronze, against spark.read.json to Parquet", "x", bronze / plain),
        _PLAIN_RATIO_MIN,
    )
    took = median(ours.total_s)
    yield Row(
        bench="pipeline",
        case="segments to bronze, silver and the operational tables, warm",
        unit="s",
        ours=took,
        baselines={name: min(each.total_s) for name, each in others.items()},
        ratio=took / min(others["DuckDB"].total_s),
        detail={
            "bronze s": median(ours.bronze_s),
            "silver s": median(ours.silver_s),
            "rows of minutes": float(ours.minutes_rows),
            **{f"{name} cold": each.total_s[0] for name, each in others.items()},
        },
    )
    yield at_most(
        noted("pipeline", "the same, against DuckDB", "x", took / min(others["DuckDB"].total_s)), _DUCKDB_RATIO_MAX
    )


def bench_commands(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """How long somebody waits; the same at every scale."""
    with scratch(folder) as place:
        found = run(measure_commands, Commands(str(place), _COLD_EVENTS, _FOLLOWED))
    first = f"a first run over {_COLD_EVENTS} events, from cold"
    yield at_most(noted("pipeline", first, "s", found.cold_s), _COLD_S_MAX)
    prepared = noted("pipeline", f"{first}, prepared", "s", found.prepared_s, **{"preparing s": found.prepare_s})
    yield at_most(prepared, _COLD_S_MAX)
    yield at_most(noted("pipeline", "a run with nothing new, from cold", "s", found.idle_s), _IDLE_S_MAX)
    yield at_most(
        noted(
            "pipeline",
            "followed, from an event's commit to its row in silver, worst",
            "s",
            max(found.follow_s),
            median=median(found.follow_s),
        ),
        _FOLLOW_S_MAX,
    )


def bench_costs(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """What new events cost on histories of different lengths, by job: its time, and how much it was given to read."""
    new = scale.pipeline_new
    found: dict[int, Costs] = {}
    for history in scale.pipeline_histories:
        case = f"{new:,} new events on {history:,}, every job, session warm"
        try:
            with scratch(folder) as place:
                cost = run(measure_cost, Cost(str(place), history, new, min(_ROUNDS_MAX, scale.rounds)))
        except subprocess.TimeoutExpired as error:
            # What was measured before is worth telling.
            yield at_most(noted("pipeline", f"{case}: not done in this time", "s", error.timeout), _NEW_S_MAX)
            continue
        assert cost.rows == new, "the new events and no others"
        assert not cost.failed, cost.failed
        before = {"the history s": cost.first_s, "while the JVM warmed up": median(cost.warming_s)}
        row = noted("pipeline", case, "s", median(cost.run_s), best=min(cost.run_s), **before)
        yield at_most(row, _NEW_S_MAX)
        yield from _by_job(history, cost, found, new)
        found[history] = cost


def _by_job(history: int, cost: Costs, others: Mapping[int, Costs], new: int) -> Iterator[Row]:
    """What the dearest jobs take on one history, beside others, and how much they read."""
    dearest = sorted(cost.jobs, key=lambda name: cost.jobs[name].seconds, reverse=True)
    rest = dearest[_JOBS_SHOWN:]
    lines = [*((f"job {name}", [name]) for name in dearest[:_JOBS_SHOWN]), (f"the other {len(rest)} jobs", rest)]
    for what, names in lines:
        yield Row(
            bench="pipeline",
            case=f"{what}, {new:,} new events on {history:,}",
            unit="s",
            ours=sum(cost.jobs[name].seconds for name in names),
            baselines={
                f"on {each:,}": sum(other.jobs[name].seconds for name in names) for each, other in others.items()
            },
            detail={
                f"MB read on {each:,}": sum(other.jobs[name].megabytes for name in names)
                for each, other in [(history, cost), *others.items()]
            },
        )
