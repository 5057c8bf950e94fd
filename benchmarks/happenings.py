"""
Happenings: how many are emitted while subscribers listen, how fast they are replayed, and what a thousand filters cost.

SQLite writes the same rows in transactions of as many; it tells nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tidings.happenings import Envelope, HappeningFilter, HappeningSubscription
from tidings.happenings.variants import CustodyStateReported, HealthStatus
from tidings.ledger import Ledger, LedgerSettings, open_ledger

from .baselines import SqliteTable
from .measuring import Percentiles, Taken, Window, one_core, percentiles, run_on, scratch
from .report import Row, at_least, at_most, noted
from .running import Runner
from .scales import Scale

__all__ = ["bench", "measure_emission", "measure_filtered", "measure_replay", "measure_sqlite"]

_LIST: Final = 256
_LISTS_IN_FLIGHT: Final = 8
_IN_FLIGHT: Final = 1024
_BEHIND_MAX: Final = 512
"""Plain emits that wait until their seqs are written down. Nothing slows them, and what waits beyond the buffer is given up."""
_SUBSCRIBERS: Final = 10
_TICK_S: Final = 0.001
_EMITTED_PER_S_MIN: Final = 50_000.0
_REPLAYED_PER_S_MIN: Final = 200_000.0
_CORES_MAX: Final = 1.0
_SETTINGS: Final = LedgerSettings(history_count_max=None, buffer_count_max=100_000)


class Emission(msgspec.Struct, frozen=True, kw_only=True):
    """Happenings that are emitted while subscribers without a filter listen."""

    folder: str
    count: int
    how: str
    """``listed``, ``single`` or ``plain``."""
    is_one_core: bool = False


class Emitted(msgspec.Struct, frozen=True):
    """Until every subscriber had the last one."""

    taken: Taken


class Filtered(msgspec.Struct, frozen=True, kw_only=True):
    """A steady rate of durable happenings, and subscribers of which each wants something else."""

    folder: str
    seconds: float
    subscribers: int
    per_s: int


class Kept(msgspec.Struct, frozen=True):
    """What keeping the rate took."""

    taken: Taken
    count: int
    delivery: Percentiles
    """From the call that emits to the subscriber."""


def report(number: int, plugin: str = "org.example.player") -> CustodyStateReported:
    """What a plugin says several times a second."""
    return CustodyStateReported(
        at_ms=1_767_225_600_000 + number, plugin=plugin, handle_id=f"h-{number % 100}", health=HealthStatus.HEALTHY
    )


async def _count(stream: HappeningSubscription, count: int) -> None:
    while count:
        count -= len(await stream.recv_many())


def measure_emission(case: Emission) -> Emitted:
    """Emit, and wait until everybody has everything."""

    async def main(folder: Path) -> Emitted:
        async with await open_ledger(folder, settings=_SETTINGS) as ledger:
            happenings = [report(number) for number in range(case.count)]
            streams = [ledger.happenings.subscribe() for _ in range(_SUBSCRIBERS)]
            reading = [asyncio.create_task(_count(stream, case.count)) for stream in streams]
            window = Window()
            await _EMIT[case.how](ledger, happenings)
            await asyncio.gather(*reading)
            return Emitted(window.take())

    with one_core(case.is_one_core), scratch(case.folder) as folder:
        return run_on("uvloop", lambda: main(folder))


async def _emit_listed(ledger: Ledger, happenings: Sequence[CustodyStateReported]) -> None:
    starts = iter(range(0, len(happenings), _LIST))

    async def emitter() -> None:
        for start in starts:
            await ledger.happenings.emit_durable(*happenings[start : start + _LIST])

    await asyncio.gather(*(emitter() for _ in range(_LISTS_IN_FLIGHT)))


async def _emit_single(ledger: Ledger, happenings: Sequence[CustodyStateReported]) -> None:
    left = iter(happenings)

    async def emitter() -> None:
        for happening in left:
            await ledger.happenings.emit_durable(happening)

    await asyncio.gather(*(emitter() for _ in range(_IN_FLIGHT)))


async def _emit_plain(ledger: Ledger, happenings: Sequence[CustodyStateReported]) -> None:
    told = ledger.happenings
    for number, happening in enumerate(happenings, told.last_seq + 1):
        told.emit(happening)
        if number % _LIST == 0:
            await asyncio.sleep(0)
        while number - told.last_seq > _BEHIND_MAX:  # noqa: ASYNC110 - there is nothing else to wait for
            await asyncio.sleep(0)


_EMIT: Final[dict[str, Callable[[Ledger, Sequence[CustodyStateReported]], Awaitable[None]]]] = {
    "listed": _emit_listed,
    "single": _emit_single,
    "plain": _emit_plain,
}


def measure_sqlite(case: Emission) -> Emitted:
    """Write the same happenings to a table, as many in a transaction as in a list."""
    lines = [msgspec.json.encode(report(number)) for number in range(case.count)]
    with scratch(case.folder) as folder:
        table = SqliteTable(folder / "happenings.db")
        window = Window()
        for start in range(0, len(lines), _LIST):
            table.commit(lines[start : start + _LIST])
        taken = window.take()
        table.close()
        return Emitted(taken)


def measure_replay(case: Emission) -> Emitted:
    """Subscribe since the beginning to a ledger that was opened again, and read to the end."""

    async def main(folder: Path) -> Emitted:
        async with await open_ledger(folder, settings=_SETTINGS) as ledger:
            await _emit_listed(ledger, [report(number) for number in range(case.count)])
        async with await open_ledger(folder, settings=_SETTINGS) as ledger:
            window = Window()
            with ledger.happenings.subscribe(since=0) as stream:
                await _count(stream, case.count)
            return Emitted(window.take())

    with one_core(case.is_one_core), scratch(case.folder) as folder:
        return run_on("uvloop", lambda: main(folder))


def measure_filtered(case: Filtered) -> Kept:
    """Keep the rate, each happening for another one of the subscribers, on one core."""
    count = max(10, round(case.seconds * case.per_s))

    async def main(folder: Path) -> Kept:
        began, had = [0] * count, [0] * count
        left, is_done = count, asyncio.Event()

        async def follow(stream: HappeningSubscription) -> None:
            nonlocal left
            async for envelope in stream:
                had[_number(envelope)] = time.perf_counter_ns()
                left -= 1
                if not left:
                    is_done.set()

        async with await open_ledger(folder, settings=_SETTINGS) as ledger:
            filters = [HappeningFilter(plugins=(f"org.example.p{number}",)) for number in range(case.subscribers)]
            following = [asyncio.create_task(follow(ledger.happenings.subscribe(filter=each))) for each in filters]
            await asyncio.sleep(0)
            window, start, number = Window(), time.perf_counter(), 0
            async with asyncio.TaskGroup() as emitting:
                while number < count:
                    due = min(count, int((time.perf_counter() - start) * case.per_s) + 1)
                    for each in range(number, due):
                        began[each] = time.perf_counter_ns()
                        told = report(each, f"org.example.p{each % case.subscribers}")
                        emitting.create_task(ledger.happenings.emit_durable(told))
                    number = due
                    await asyncio.sleep(_TICK_S)
            await is_done.wait()
            taken = window.take()
            for task in following:
                task.cancel()
        waits = [after - before for before, after in zip(began, had, strict=True)]
        return Kept(taken, count, percentiles(waits))

    with one_core(True), scratch(case.folder) as folder:
        return run_on("uvloop", lambda: main(folder))


def _number(envelope: Envelope) -> int:
    return envelope.happening.at_ms - 1_767_225_600_000


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """Emission, replay, filters."""
    count = scale.happenings

    def emission(how: str) -> Emission:
        return Emission(folder=folder, count=count, how=how, is_one_core=is_one_core)

    listed = _best(run, scale, measure_emission, emission("listed"))
    sqlite = _best(run, scale, measure_sqlite, emission("listed"))
    row = _row(f"durable, lists of {_LIST}, {_SUBSCRIBERS} subscribers", count, listed)
    per_s = count / sqlite.wall_s
    row = msgspec.structs.replace(row, baselines={"SQLite, nobody told": per_s}, ratio=row.ours / per_s)
    yield at_least(row, _EMITTED_PER_S_MIN)
    single = _best(run, scale, measure_emission, emission("single"))
    yield _row(f"durable, one by one, {_IN_FLIGHT} in flight, {_SUBSCRIBERS} subscribers", count, single)
    plain = _best(run, scale, measure_emission, emission("plain"))
    yield _row(f"plain, {_SUBSCRIBERS} subscribers", count, plain)
    replay = _best(run, scale, measure_replay, emission("listed"))
    yield at_least(_row(f"replay of {count:,} since the beginning", count, replay), _REPLAYED_PER_S_MIN)
    yield _filtered(run, scale, folder)


def _best(run: Runner, scale: Scale, measure: Callable[[Emission], Emitted], case: Emission) -> Taken:
    """Of some rounds the one that others disturbed least."""
    rounds = [run(measure, case).taken for _ in range(min(3, scale.rounds))]
    return min(rounds, key=lambda taken: taken.wall_s)


def _row(case: str, count: int, taken: Taken) -> Row:
    beside = {"cpu us each": taken.cpu_s / count * 1e6, "others' cores": taken.others_cores or 0.0}
    row = noted("happenings", case, "happenings/s", count / taken.wall_s)
    return msgspec.structs.replace(row, detail=beside)


def _filtered(run: Runner, scale: Scale, folder: str) -> Row:
    case = Filtered(folder=folder, seconds=scale.happenings_pace_s, subscribers=scale.happenings_filters, per_s=1000)
    kept = run(measure_filtered, case)
    row = Row(
        bench="happenings",
        case=f"{case.subscribers:,} subscribers with filters of their own at {case.per_s:,}/s, durable",
        unit="cores",
        ours=kept.taken.cpu_s / kept.taken.wall_s,
        detail={
            "reached/s": kept.count / kept.taken.wall_s,
            "delivery p50 us": kept.delivery.p50,
            "delivery p99 us": kept.delivery.p99,
            "others' cores": kept.taken.others_cores or 0.0,
        },
    )
    return at_most(row, _CORES_MAX)
