"""
The sync endpoint over real sockets: submitting, hearing, catching up, and being idle in large numbers.

What it is compared with is the server of the JavaScript package ``insieme`` 2.1.0, with its SQLite store, in the same durability
class (every answer after a sync of the disk), on the same machine, in turns, driven by the same client program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final

from .latency import SteadyRate, latency_rows, others_cores
from .measuring import Percentiles, forget_cached, scratch
from .report import Row, at_least, at_most
from .running import Runner
from .scales import Scale
from .sync_filling import COMMON, RARE, SyncLog, fill_sync
from .sync_measures import (
    Done,
    FanOut,
    Idle,
    Paced,
    Paged,
    Paging,
    Submit,
    measure_fan_out,
    measure_idle,
    measure_pace,
    measure_paging,
    measure_submit,
)
from .sync_serving import Server, has_insieme, insieme_server, node

__all__ = ["bench", "bench_latency"]

_SUBMIT_PER_S_MIN: Final = 10_000.0
_RIVAL_RATIO_MIN: Final = 3.0
_DELIVERIES_PER_S_MIN: Final = 100_000.0
_PAGED_PER_S_MIN: Final = 100_000.0
_COLD_S_MAX: Final = 3.0
_IDLE_KB_MAX: Final = 30.0
_SMALL_RATIO_MAX: Final = 2.0
_RATE_PER_S: Final = 2_000
_FIGURES: Final[tuple[tuple[str, Callable[[Paced], Percentiles], float | None], ...]] = (
    ("commit to broadcast", attrgetter("committed_to_broadcast"), 25.0),
    ("taken up to broadcast", attrgetter("taken_up_to_broadcast"), None),
    ("told to broadcast", attrgetter("told_to_broadcast"), None),
    ("submitted to broadcast", attrgetter("submitted_to_broadcast"), None),
)
_SUBSCRIBERS: Final = 20
_SMALL_EVENTS: Final = 100


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """All of it, on three nodes."""
    with scratch(folder) as workspace, node(workspace) as server:
        # Before anything else: what the node's heap has had to hold already would be used again.
        yield _idle(run, scale, server, is_one_core)
        yield from _submits(run, scale, folder, server, is_one_core)
        yield _fan_out(run, scale, server, is_one_core)
    yield from _catch_up(run, scale, folder, is_one_core)


def bench_latency(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """How long single events take to those who hear of them."""
    with scratch(folder) as workspace, node(workspace) as server:
        case = SteadyRate(
            server=server,
            workspace=str(workspace),
            subscribers=scale.hearers,
            per_s=_RATE_PER_S,
            seconds=scale.latency_s,
            run="pace",
            is_one_core=is_one_core,
        )
        yield from latency_rows(run, "sync_latency", measure_pace, case, _FIGURES)


def _submits(run: Runner, scale: Scale, folder: str, server: Server, is_one_core: bool) -> Iterator[Row]:
    kinds = {"a": [], "b": [], "one": [], "rival": []}  # type: dict[str, list[Done]]
    began = time.monotonic()
    # In turns, so that a burst of foreign load falls on all alike; and of each its best round counts.
    while not kinds["a"] or (len(kinds["a"]) < scale.rounds and time.monotonic() - began < scale.bench_s_max):
        number = len(kinds["a"])
        for kind in ("a", "b", "one"):
            case = Submit(
                server=server,
                dialect="b" if kind == "b" else "a",
                events=scale.sync_events,
                window=1 if kind == "one" else 2,
                run=f"{kind}{number}",
                is_one_core=is_one_core,
            )
            kinds[kind].append(run(measure_submit, case))
        if has_insieme():
            with insieme_server(folder) as rival:
                case = Submit(
                    server=rival,
                    dialect="b",
                    token="writer",
                    events=scale.sync_rival_events,
                    run="rival",
                    is_one_core=is_one_core,
                )
                kinds["rival"].append(run(measure_submit, case))
    best = {kind: min(rounds, key=lambda done: done.taken.wall_s) for kind, rounds in kinds.items() if rounds}
    rounds_count = float(len(kinds["a"]))
    yield at_least(
        _per_s("one client submits, batches of 100, two under way", "events/s", best["a"], rounds=rounds_count),
        _SUBMIT_PER_S_MIN,
    )
    yield _per_s("one client submits, batches of 100, one under way", "events/s", best["one"], rounds=rounds_count)
    row = _per_s("the same in the dialect of insieme 2.1.0", "events/s", best["b"], rounds=rounds_count)
    rival_done = best.get("rival")
    if rival_done is None:
        yield row
        return
    rival_per_s = rival_done.count / rival_done.taken.wall_s
    compared = Row(
        bench=row.bench,
        case=row.case,
        unit=row.unit,
        ours=row.ours,
        baselines={"insieme 2.1.0, SQLite": rival_per_s},
        ratio=row.ours / rival_per_s,
        detail={**row.detail, "its cpu us/event": rival_done.server_cpu_s / rival_done.count * 1e6},
    )
    yield at_least(compared, _RIVAL_RATIO_MIN * rival_per_s, f">= {_RIVAL_RATIO_MIN:g} x insieme")


def _fan_out(run: Runner, scale: Scale, server: Server, is_one_core: bool) -> Row:
    rounds: list[Done] = []
    began = time.monotonic()
    while not rounds or (len(rounds) < scale.rounds and time.monotonic() - began < scale.bench_s_max / 2):
        case = FanOut(
            server=server,
            subscribers=_SUBSCRIBERS,
            events=scale.sync_events,
            run=f"fan{len(rounds)}",
            is_one_core=is_one_core,
        )
        rounds.append(run(measure_fan_out, case))
    best = min(rounds, key=lambda done: done.taken.wall_s)
    name = f"{_SUBSCRIBERS} subscribers of one partition"
    return at_least(_per_s(name, "deliveries/s", best, rounds=float(len(rounds))), _DELIVERIES_PER_S_MIN)


def _idle(run: Runner, scale: Scale, server: Server, is_one_core: bool) -> Row:
    case = Idle(server=server, connections=scale.sync_connections, is_one_core=is_one_core)
    found = run(measure_idle, case)
    row = Row(
        bench="sync",
        case=f"memory of each of {case.connections:,} idle connections, authorised and subscribed",
        unit="KB",
        ours=max(found.bytes_each / 1000, 0.001),
        detail={"connected/s": case.connections / found.connect_s},
    )
    return at_most(row, _IDLE_KB_MAX)


def _catch_up(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    found: list[Paged] = []
    for records in dict.fromkeys((scale.sync_catch_up, scale.sync_large_records)):
        with scratch(folder) as workspace:
            run(fill_sync, SyncLog(workspace=str(workspace), records=records, rare=_SMALL_EVENTS))
            forget_cached(Path(workspace))
            with node(workspace) as server:
                if records == scale.sync_catch_up:
                    yield from _large_partition(run, scale, server, is_one_core)
                small = Paging(
                    server=server,
                    partition=RARE,
                    events=_SMALL_EVENTS,
                    repeats=scale.seeks,
                    counts_connecting=False,
                    is_one_core=is_one_core,
                )
                found.append(run(measure_paging, small))
    little, large = found[0], found[-1]
    # The two are minutes apart: what they cost in CPU can be compared, the time on the clock only on a quiet machine.
    little_ms, large_ms = (max(each.server_cpu_s * 1000, 0.001) for each in (little, large))
    row = Row(
        bench="sync",
        case=f"the node's CPU for a partition with {_SMALL_EVENTS} events in a log of {scale.sync_large_records:,}",
        unit="ms",
        ours=large_ms,
        baselines={f"in a log of {scale.sync_catch_up:,}": little_ms},
        ratio=large_ms / little_ms,
        detail={"median ms": large.median_s * 1000, "in the smaller log": little.median_s * 1000},
    )
    yield at_most(row, _SMALL_RATIO_MAX * little_ms, f"<= {_SMALL_RATIO_MAX:g} x the smaller log's")


def _large_partition(run: Runner, scale: Scale, server: Server, is_one_core: bool) -> Iterator[Row]:
    events = scale.sync_catch_up - _SMALL_EVENTS
    case = Paging(server=server, partition=COMMON, events=events, is_decoded=True, is_one_core=is_one_core)
    cold = run(measure_paging, case)
    row = Row(
        bench="sync",
        case=f"cold catch-up with {scale.sync_catch_up:,} events, client's decoding included",
        unit="s",
        ours=cold.wall_s,
        detail={
            "server's cpu us/event": cold.server_cpu_s / events * 1e6,
            "others' cores": others_cores(cold.taken, cold.server_cpu_s),
        },
    )
    yield at_most(row, _COLD_S_MAX)
    case = Paging(server=server, partition=COMMON, events=events, repeats=max(2, scale.rounds), is_one_core=is_one_core)
    warm = run(measure_paging, case)
    row = Row(
        bench="sync",
        case="catch-up in pages of 1,000",
        unit="events/s",
        ours=events / warm.wall_s,
        detail={
            "server's cpu us/event": warm.server_cpu_s / events * 1e6,
            "others' cores": others_cores(warm.taken, warm.server_cpu_s * case.repeats),
        },
    )
    yield at_least(row, _PAGED_PER_S_MIN)


def _per_s(case: str, unit: str, done: Done, rounds: float) -> Row:
    return Row(
        bench="sync",
        case=case,
        unit=unit,
        ours=done.count / done.taken.wall_s,
        detail={
            "server's cpu us each": done.server_cpu_s / done.count * 1e6,
            "rounds": rounds,
            "others' cores": others_cores(done.taken, done.server_cpu_s),
        },
    )
