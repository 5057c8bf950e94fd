"""
Many publishers at once: how many events a second are made durable, and what each costs the processor.

Every figure comes from a process of its own. The processes of one round run one after the other, baselines among
them, and rounds are repeated, so that a burst of foreign load falls on all alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final, Literal

import msgspec

from tidings.log import Log
from tidings.log.embedded import open_log

from .baselines import BareGroupCommit, RawFile, SqliteTable
from .measuring import Loop, Taken, Window, one_core, run_on, scratch
from .report import Row, at_least, at_most
from .running import Runner
from .scales import Scale
from .workload import PAYLOADS, Variant, event_maker, sample_lines

__all__ = ["Bare", "Floor", "Ours", "Result", "bench", "measure_bare", "measure_floor", "measure_ours"]

COMMIT_ROWS: Final = 256
TARGET_PER_S: Final = 250_000
TOPICS_SPREAD_MAX: Final = 1.10
_META: Final = {"topic": "orders-00", "type": "ORDER_PLACED", "space_id": "shared:shop", "event_id": "ev-" + "0" * 32}


class Ours(msgspec.Struct, frozen=True, kw_only=True):
    """Publishing to the log."""

    folder: str
    events: int
    warm_up: int
    in_flight: int
    loop: Loop = "uvloop"
    topics: int = 1
    variant: Variant = "log ids"
    is_batched: bool = False
    """``append_many`` with ``in_flight`` events, one call after another."""
    is_one_core: bool = False


class Bare(msgspec.Struct, frozen=True, kw_only=True):
    """The least that a group commit in Python can be."""

    folder: str
    events: int
    warm_up: int
    in_flight: int
    has_our_lines: bool = False
    """Whether events become lines of our format."""
    loop: Loop = "uvloop"
    is_one_core: bool = False


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """The same lines, written in commits of 256 without an event loop."""

    folder: str
    events: int
    kind: Literal["sqlite", "growing", "recycled"]
    is_one_core: bool = False


class Result(msgspec.Struct, frozen=True):
    """One process's figures."""

    events: int
    taken: Taken
    """Up to the last acknowledgement."""
    settled_cpu_s: float
    """The CPU time with what was still done behind it: segments, index, close."""

    @property
    def per_s(self) -> float:
        """Events a second."""
        return self.events / self.taken.wall_s

    @property
    def cpu_us(self) -> float:
        """CPU time an event, all work behind it included."""
        return self.settled_cpu_s / self.events * 1e6


def measure_ours(case: Ours) -> Result:
    """Publish, and count from the first event to the last acknowledgement."""
    with one_core(case.is_one_core), scratch(case.folder) as folder:
        return run_on(case.loop, lambda: _ours(case, folder))


async def _ours(case: Ours, folder: Path) -> Result:
    log = await open_log(folder)
    await _publish(log, case, 0, case.warm_up)
    window = Window()
    await _publish(log, case, case.warm_up, case.events)
    taken = window.take()
    await log.close()
    settled = window.take()
    return Result(case.events, taken, settled.cpu_s)


async def _publish(log: Log, case: Ours, first: int, count: int) -> None:
    make = event_maker(case.variant, case.topics)
    if case.is_batched:
        for start in range(first, first + count, case.in_flight):
            await log.append_many([make(n) for n in range(start, min(start + case.in_flight, first + count))])
        return
    numbers = iter(range(first, first + count))

    async def publisher() -> None:
        for n in numbers:
            await log.append(make(n))

    await asyncio.gather(*(publisher() for _ in range(case.in_flight)))


def measure_bare(case: Bare) -> Result:
    """As for the log, on the bare group commit."""

    async def main(folder: Path) -> Result:
        bare = BareGroupCommit(folder / "lines")
        append = _append_events if case.has_our_lines else _append
        await append(bare, case.in_flight, case.warm_up)
        window = Window()
        await append(bare, case.in_flight, case.events)
        taken = window.take()
        bare.close()
        return Result(case.events, taken, taken.cpu_s)

    with one_core(case.is_one_core), scratch(case.folder) as folder:
        return run_on(case.loop, lambda: main(folder))


async def _append(bare: BareGroupCommit, in_flight: int, count: int) -> None:
    numbers = iter(range(count))

    async def publisher() -> None:
        for n in numbers:
            await bare.append(_META, PAYLOADS[n % len(PAYLOADS)])

    await asyncio.gather(*(publisher() for _ in range(in_flight)))


async def _append_events(bare: BareGroupCommit, in_flight: int, count: int) -> None:
    numbers = iter(range(count))
    make = event_maker("log ids", 1)

    async def publisher() -> None:
        for n in numbers:
            await bare.append_event(make(n))

    await asyncio.gather(*(publisher() for _ in range(in_flight)))


def measure_floor(case: Floor) -> Result:
    """Write the log's own lines, 256 a commit."""
    with one_core(case.is_one_core), scratch(case.folder) as folder:
        lines = asyncio.run(sample_lines(folder / "sample", COMMIT_ROWS))
        if case.kind == "sqlite":
            table = SqliteTable(folder / "lines.db")
            window = Window()
            for _ in range(0, case.events, COMMIT_ROWS):
                table.commit(lines)
            taken = window.take()
            table.close()
        else:
            raw = RawFile(folder / "lines", is_recycled=case.kind == "recycled")
            window = Window()
            for _ in range(0, case.events, COMMIT_ROWS):
                raw.commit(b"".join(lines))
            taken = window.take()
            raw.close()
        events = -(-case.events // COMMIT_ROWS) * COMMIT_ROWS
        return Result(events, taken, taken.cpu_s)


def _topics_case(in_flight: int, topics: int) -> str:
    return f"{in_flight} in flight, {topics} topic{'s' if topics > 1 else ''}"


def _cases(scale: Scale, folder: str, is_one_core: bool) -> dict[str, Ours | Bare | Floor]:
    size = {"folder": folder, "events": scale.many_events, "warm_up": scale.many_warm_up, "is_one_core": is_one_core}

    def ours(**how: object) -> Ours:
        return msgspec.convert({**size, **how}, Ours)

    def floor(kind: str, pinned: bool = is_one_core) -> Floor:
        wanted = {"folder": folder, "events": scale.many_events, "kind": kind, "is_one_core": pinned}
        return msgspec.convert(wanted, Floor)

    cases: dict[str, Ours | Bare | Floor] = {
        "SQLite": floor("sqlite"),
        "write and sync, growing file": floor("growing"),
        "write and sync, recycled file": floor("recycled"),
        "bare group commit, 256 in flight": msgspec.convert({**size, "in_flight": 256}, Bare),
        "bare group commit, 4096 in flight": msgspec.convert({**size, "in_flight": 4096}, Bare),
        "bare group commit, our lines, 256 in flight": msgspec.convert(
            {**size, "in_flight": 256, "has_our_lines": True}, Bare
        ),
        "bare group commit, our lines, 4096 in flight": msgspec.convert(
            {**size, "in_flight": 4096, "has_our_lines": True}, Bare
        ),
    }
    for in_flight in (256, 4096):
        for topics in (1, 8, 64):
            cases[_topics_case(in_flight, topics)] = ours(in_flight=in_flight, topics=topics)
        cases[f"{in_flight} in flight, asyncio"] = ours(in_flight=in_flight, loop="asyncio")
    cases["append_many(256)"] = ours(in_flight=256, is_batched=True)
    for variant in ("producer ids", "idem keys", "partitions"):
        cases[f"4096 in flight, {variant}"] = ours(in_flight=4096, variant=variant)
    if not is_one_core:
        cases["SQLite, one core"] = floor("sqlite", pinned=True)
        for in_flight in (256, 4096):
            cases[f"{in_flight} in flight, one core"] = ours(in_flight=in_flight, is_one_core=True)
    return cases


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """Every case in every round, then a row for each and two for how topics compare."""
    deadline = time.monotonic() + scale.bench_s_max
    cases = _cases(scale, folder, is_one_core)
    rounds: dict[str, list[Result]] = {name: [] for name in cases}
    for number in range(scale.rounds):
        for name, case in cases.items():
            if number and time.monotonic() > deadline:
                break
            match case:
                case Ours():
                    rounds[name].append(run(measure_ours, case))
                case Bare():
                    rounds[name].append(run(measure_bare, case))
                case Floor():
                    rounds[name].append(run(measure_floor, case))
    for name, case in cases.items():
        yield _row(name, case, rounds) if isinstance(case, Ours) else _baseline_row(name, rounds[name])
    for in_flight in (256, 4096):
        yield _topics_row(in_flight, rounds)


def _row(name: str, case: Ours, rounds: dict[str, list[Result]]) -> Row:
    results = rounds[name]
    best = _best(results)
    sqlite = _best(rounds.get("SQLite, one core" if "one core" in name else "SQLite", rounds["SQLite"]))
    baselines = {"SQLite": sqlite}
    if case.loop == "uvloop" and "one core" not in name:  # the bare group commit was measured like this only
        baselines["bare"] = _best(rounds[f"bare group commit, {case.in_flight} in flight"])
    row = Row(
        bench="publish_many",
        case=name,
        unit="events/s",
        ours=best,
        baselines=baselines,
        ratio=best / sqlite,
        detail=_detail(results),
    )
    return at_least(row, max(TARGET_PER_S, sqlite), f">= {TARGET_PER_S:,}, >= SQLite")


def _baseline_row(name: str, results: list[Result]) -> Row:
    return Row(
        bench="publish_many", case=f"baseline: {name}", unit="events/s", ours=_best(results), detail=_detail(results)
    )


def _detail(results: list[Result]) -> dict[str, float | str]:
    return {
        "median": median(result.per_s for result in results),
        "CPU us": median(result.cpu_us for result in results),
        "CPU us to the last answer": median(result.taken.cpu_s / result.events * 1e6 for result in results),
        "quiet": f"{sum(result.taken.is_quiet for result in results)}/{len(results)}",
    }


def _best(results: list[Result]) -> float:
    """The best quiet round; the best of all where none was quiet."""
    quiet = [result for result in results if result.taken.is_quiet]
    return max(result.per_s for result in quiet or results)


def _topics_row(in_flight: int, rounds: dict[str, list[Result]]) -> Row:
    """How much more CPU time an event takes when spread over topics; wall time would measure the neighbours."""
    cpu = {topics: median(result.cpu_us for result in rounds[_topics_case(in_flight, topics)]) for topics in (1, 8, 64)}
    worst = max(cpu[8], cpu[64]) / cpu[1]
    row = Row(
        bench="publish_many",
        case=f"{in_flight} in flight, 8 and 64 topics against 1",
        unit="x CPU",
        ours=worst,
        baselines={"1 topic us": cpu[1]},
        detail={"8 topics us": cpu[8], "64 topics us": cpu[64]},
    )
    return at_most(row, TOPICS_SPREAD_MAX)
