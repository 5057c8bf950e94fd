"""
The pipeline: segments to the table of events and to counts by minute, beside plain Spark, DuckDB and Polars; and new events.

Spark's own way of the same (``spark.read.json`` to Parquet) runs in the same session, in turns. DuckDB and Polars have
processes of their own; they keep no position, check no line and know no second run, so they are what the machine can do
rather than what the pipeline should do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from .measuring import scratch
from .pipeline_measures import (
    BronzeFill,
    Compared,
    Incremental,
    Rival,
    measure_duckdb,
    measure_incremental,
    measure_polars,
    measure_spark,
    write_log,
)
from .report import Row, at_least, at_most, noted
from .running import Runner
from .scales import Scale

__all__ = ["bench"]

_ROWS_PER_S_MIN: Final = 600_000.0
_PLAIN_RATIO_MIN: Final = 1.8
_SESSION_S_MAX: Final = 10.0
_INCREMENT_S_MAX: Final = 5.0
_HISTORY_RATIO_MAX: Final = 1.5
_ROUNDS_MAX: Final = 3
_ROUNDS_S: Final = 90.0
_SMALL_SHARE: Final = 20
_HISTORY_SHARE: Final = 10


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """
    A log is made once; everybody reads it. ``is_one_core`` is of no meaning to Spark, which is measured on all cores.
    """
    events = scale.pipeline_events
    with scratch(folder) as place:
        small, workspace = str(place / "small"), str(place / "log")
        size = run(write_log, BronzeFill(workspace, events, small, max(1_000, events // _SMALL_SHARE))).bytes
        yield from _compared(run, scale, workspace, small, str(place), f"{events:,} events of {size // events} bytes")
    with scratch(folder) as place:
        yield from _incremental(run, scale, str(place))


def _compared(run: Runner, scale: Scale, workspace: str, small: str, place: str, what: str) -> Iterator[Row]:
    events = scale.pipeline_events
    rounds = min(_ROUNDS_MAX, scale.rounds)
    ours = run(measure_spark, Compared(workspace, small, place, events, rounds, max(_ROUNDS_S, scale.bench_s_max)))
    assert ours.rows == ours.plain_rows == events, "every event is there once"
    rival = Rival(workspace, place, events)
    others = {"DuckDB": run(measure_duckdb, rival)}
    if importlib.util.find_spec("polars") is not None:
        others["Polars"] = run(measure_polars, rival)
    assert all(each.rows == events for each in others.values())
    yield at_most(
        noted("pipeline", "Spark session from cold", "s", ours.session_s, **{"first job s": ours.first_job_s}),
        _SESSION_S_MAX,
    )
    bronze, plain = events / median(ours.bronze_s), events / median(ours.plain_s)
    baselines = {"spark.read.json": plain, **{name: events / each.events_s for name, each in others.items()}}
    detail: dict[str, float | str] = {
        "best": events / min(ours.bronze_s),
        "rounds": float(len(ours.bronze_s)),
        "JVM peak MB": ours.jvm_rss_mb,
    }
    row = Row(
        bench="pipeline",
        case=f"segments to bronze, {what}",
        unit="rows/s",
        ours=bronze,
        baselines=baselines,
        ratio=bronze / plain,
        detail=detail,
    )
    yield at_least(row, _ROWS_PER_S_MIN)
    yield at_least(
        noted("pipeline", "segments to bronze, against spark.read.json to Parquet", "x", bronze / plain),
        _PLAIN_RATIO_MIN,
    )
    yield Row(
        bench="pipeline",
        case="segments to bronze and minutes",
        unit="rows/s",
        ours=events / _both(ours.bronze_s, ours.minutes_s),
        baselines={
            "spark.read.json": events / _both(ours.plain_s, ours.plain_minutes_s),
            **{name: events / (each.events_s + each.minutes_s) for name, each in others.items()},
        },
        ratio=_both(ours.plain_s, ours.plain_minutes_s) / _both(ours.bronze_s, ours.minutes_s),
        detail={"rows of minutes": float(ours.minutes_rows), "minutes s": median(ours.minutes_s)},
    )


def _both(first: Sequence[float], second: Sequence[float]) -> float:
    return median(one + other for one, other in zip(first, second, strict=True))


def _incremental(run: Runner, scale: Scale, place: str) -> Iterator[Row]:
    long = scale.pipeline_events
    short, new = max(1_000, long // _HISTORY_SHARE), scale.pipeline_new
    found = run(measure_incremental, Incremental(place, short, long, new, min(_ROUNDS_MAX, scale.rounds)))
    assert found.rows == new, "the new events and no others"
    yield at_most(
        noted(
            "pipeline",
            f"a run over {new:,} new events after {long:,}, session warm",
            "s",
            median(found.long_s),
            best=min(found.long_s),
            worst=max(found.long_s),
        ),
        _INCREMENT_S_MAX,
    )
    yield at_most(
        noted(
            "pipeline",
            f"the same, after {long // short} times the history",
            "x",
            median(found.long_s) / median(found.short_s),
            **{"short history s": median(found.short_s)},
        ),
        _HISTORY_RATIO_MAX,
    )
