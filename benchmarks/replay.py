"""
Reading back: whole logs page by page, and single records by seq, offset, time and partition.

The log is made first and opened anew by each measuring process, so nothing is served from the writer's memory.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from random import Random
from statistics import median
from typing import Final, Literal

import msgspec

from tidings.core.clock import datetime_of
from tidings.log import Log, Query
from tidings.log.embedded import open_log
from tidings.log.reading import pages

from .building import Order, build
from .filling import TOPIC, partition_of, time_ns_of
from .measuring import Percentiles, Taken, Window, forget_cached, one_core, percentiles, run_on
from .report import Row, at_least, at_most, noted
from .running import Runner
from .scales import Scale

__all__ = ["bench", "measure_replay", "measure_seeks"]

TARGET_PER_S: Final = 500_000
GROWTH_MAX: Final = 3.0
_PAGE: Final = 1000
_SEEK_PAGE: Final = 1
_KEYS: Final = ("seq", "offset", "time", "partition")

How = Literal["records", "records and payloads", "one partition", "raw lines"]


class Replay(msgspec.Struct, frozen=True):
    """Reading one log from its first record to its last."""

    workspace: str
    how: How
    is_cold: bool
    is_one_core: bool


class Replayed(msgspec.Struct, frozen=True):
    """How much was read, in what time; ``checksum`` shows that it was read."""

    records: int
    checksum: int
    taken: Taken


def measure_replay(case: Replay) -> Replayed:
    """Read a log as the case says."""
    workspace = Path(case.workspace)
    if case.is_cold:
        forget_cached(workspace)
    with one_core(case.is_one_core):
        if case.how == "raw lines":
            return _replay_lines(workspace)
        return run_on("uvloop", lambda: _replay(workspace, case.how))


def _replay_lines(workspace: Path) -> Replayed:
    """What a tool that takes lines as they are can reach: nothing is checked or decoded."""
    window = Window()
    count = checksum = 0
    for path in sorted((workspace / ".bus" / "wal").iterdir()):
        with path.open("rb") as file:
            for line in file:
                count += 1
                checksum += len(line)
    return Replayed(count, checksum, window.take())


async def _replay(workspace: Path, how: How) -> Replayed:
    log = await open_log(workspace)
    query = Query(partitions=(partition_of(7),)) if how == "one partition" else Query()
    window = Window()
    count = checksum = 0
    async for page in pages(log, query, limit=_PAGE):
        count += len(page.records)
        if how == "records and payloads":
            checksum += sum(record.payload["n"] for record in page.records)
        else:
            checksum += sum(record.seq for record in page.records)
    taken = window.take()
    await log.close()
    return Replayed(count, checksum, taken)


class Seeks(msgspec.Struct, frozen=True):
    """Asking for single records all over a log."""

    workspace: str
    records: int
    count: int
    is_one_core: bool


class Sought(msgspec.Struct, frozen=True):
    """Latencies by what was asked for."""

    by: dict[str, Percentiles]
    taken: Taken


def measure_seeks(case: Seeks) -> Sought:
    """Ask for one record at a time, by seq, offset, time and partition in turn."""
    with one_core(case.is_one_core):
        return run_on("uvloop", lambda: _seek(case))


async def _seek(case: Seeks) -> Sought:
    log = await open_log(case.workspace)
    random = Random(1)
    latencies: dict[str, list[int]] = {key: [] for key in _KEYS}
    for key in _KEYS:  # the first of each kind opens files
        await _find(log, key, case.records // 2)
    window = Window()
    for _ in range(case.count):
        seq = random.randrange(1, case.records)
        for key in _KEYS:
            begin = time.perf_counter_ns()
            await _find(log, key, seq)
            latencies[key].append(time.perf_counter_ns() - begin)
    taken = window.take()
    await log.close()
    return Sought({key: percentiles(each) for key, each in latencies.items()}, taken)


async def _find(log: Log, key: str, seq: int) -> None:
    match key:
        case "seq":
            query = Query(since=seq)
        case "offset":
            query = Query(topic=TOPIC, from_offset=seq)
        case "time":
            query = Query(from_time=datetime_of(time_ns_of(seq)) - timedelta(microseconds=1))
        case _:
            query = Query(since=seq, partitions=(partition_of(seq),))
    await log.read(query, limit=_SEEK_PAGE)


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """Make three logs, seek in each, replay the largest."""
    deadline = time.monotonic() + scale.bench_s_max
    workspaces = {size: str(Path(folder) / f"replay-{size}") for size in scale.replay_sizes}
    try:
        for size, workspace in workspaces.items():
            run(build, Order(workspace, size, True))
        largest = workspaces[scale.replay_sizes[-1]]
        hows: tuple[How, ...] = ("records", "records and payloads", "one partition", "raw lines")
        cases = {how: Replay(largest, how, False, is_one_core) for how in hows}
        rounds: dict[str, list[Replayed]] = {how: [] for how in hows}
        seeks: dict[int, list[Sought]] = {size: [] for size in workspaces}
        for number in range(scale.rounds):
            if number and time.monotonic() > deadline:
                break
            for how, case in cases.items():
                rounds[how].append(run(measure_replay, case))
            for size, workspace in workspaces.items():
                seeks[size].append(run(measure_seeks, Seeks(workspace, size, scale.seeks, is_one_core)))
        cold = run(measure_replay, Replay(largest, "records", True, is_one_core))
    finally:
        for workspace in workspaces.values():
            shutil.rmtree(workspace, ignore_errors=True)
    for how in hows:
        yield _replay_row(how, rounds)
    yield noted(
        "replay",
        "records, not in the page cache",
        "events/s",
        cold.records / cold.taken.wall_s,
        **{"CPU us": cold.taken.cpu_s / cold.records * 1e6, "others' cores": cold.taken.others_cores or 0.0},
    )
    for key in _KEYS:
        yield _seek_row(key, seeks)


def _per_s(results: list[Replayed]) -> float:
    quiet = [result for result in results if result.taken.is_quiet]
    return max(result.records / result.taken.wall_s for result in quiet or results)


def _replay_row(how: How, rounds: dict[str, list[Replayed]]) -> Row:
    results = rounds[how]
    raw = _per_s(rounds["raw lines"])
    row = Row(
        bench="replay",
        case=f"{how}, {results[0].records:,}",
        unit="events/s",
        ours=_per_s(results),
        baselines={} if how == "raw lines" else {"raw lines": raw},
        ratio=None if how == "raw lines" else _per_s(results) / raw,
        detail={
            "median": median(result.records / result.taken.wall_s for result in results),
            "CPU us": median(result.taken.cpu_s / result.records * 1e6 for result in results),
            "quiet": f"{sum(result.taken.is_quiet for result in results)}/{len(results)}",
        },
    )
    return at_least(row, TARGET_PER_S) if how == "records" else row


def _seek_row(key: str, seeks: dict[int, list[Sought]]) -> Row:
    """What a log a hundred times as large costs a seek: with a search over all of it, a hundred times as much."""
    p50 = {size: median(sought.by[key].p50 for sought in found) for size, found in seeks.items()}
    small, *_, large = p50
    row = Row(
        bench="replay",
        case=f"seek by {key}, {large:,} against {small:,} records",
        unit="us, p50",
        ours=p50[large],
        baselines={f"{size:,}": figure for size, figure in p50.items() if size != large},
        ratio=p50[large] / p50[small],
        detail={"p99": median(sought.by[key].p99 for sought in seeks[large])},
    )
    return at_most(row, GROWTH_MAX * p50[small], f"<= {GROWTH_MAX:.0f} x the small one")
