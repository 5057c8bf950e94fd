"""Relaxed durability: loud about itself, loses a tail at most, and never puts into segments what is not synced."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Literal

import msgspec
import pytest

from tests.conformance.support import read_all, until
from tests.crash.support import BIG, BUS, TIGHT, Book, let_go, open_and_check, open_simulated
from tidings.log import LogSettings, Query
from tidings.log.errors import LogError
from tidings.testing import CRASH_MODES, CrashMode, SimulatedCrash, SimulatedDisk

Relaxed = Literal["interval", "none"]
MODES: Final[tuple[Relaxed, ...]] = ("interval", "none")


def _settings(durability: Relaxed, sync_interval_ms: int = 60_000) -> LogSettings:
    return msgspec.structs.replace(TIGHT, durability=durability, sync_interval_ms=sync_interval_ms)


@pytest.mark.parametrize("durability", MODES)
async def test_a_relaxed_log_says_so(durability: Relaxed, caplog: pytest.LogCaptureFixture) -> None:
    """Opening a log that can lose acknowledged events warns, and its health shows it."""
    with caplog.at_level(logging.WARNING):
        log = await open_simulated(SimulatedDisk(), settings=_settings(durability))
    assert not log.health().is_durable
    assert any("can be lost" in record.message for record in caplog.records)
    await log.close()


async def test_the_default_is_durable_and_silent(caplog: pytest.LogCaptureFixture) -> None:
    """The default syncs before it acknowledges, and has nothing to warn of."""
    log = await open_simulated(SimulatedDisk())
    assert log.health().is_durable
    assert not caplog.records
    await log.close()


@pytest.mark.parametrize("durability", MODES)
async def test_what_is_not_synced_is_not_settled(durability: Relaxed) -> None:
    """Acknowledged and not yet synced, records are in no segment: those hold only what cannot be lost."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=_settings(durability))
    await book.append_many(log, [book.event("alpha") for _ in range(9)])
    for _ in range(50):
        await asyncio.sleep(0)
    assert disk.names(BUS / "wal") == []
    assert len(await read_all(log, Query())) == 9
    await log.close()
    await open_and_check(disk.after_crash("lose_all"), book)


async def test_an_interval_log_is_synced_after_its_interval() -> None:
    """After the interval what was acknowledged is on disk, without anybody asking for it."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=_settings("interval", sync_interval_ms=1))
    await book.append_many(log, [book.event("alpha") for _ in range(3)])
    await until(lambda: disk.names(BUS / "wal") != [])
    cut = disk.after_crash("lose_all")
    await log.close()
    await open_and_check(cut, book)


async def _run_relaxed(disk: SimulatedDisk, book: Book, durability: Relaxed) -> None:
    log = None
    try:
        log = await open_simulated(disk, settings=_settings(durability))
        for n in range(6):
            await book.append_many(log, [book.event("alpha", event_id=f"a{n}"), book.event("beta", pad=BIG)])
            await book.append(log, book.event("alpha"))
    except (SimulatedCrash, LogError):
        assert disk.is_crashed
    finally:
        disk.crash_after = disk.crash_after if disk.is_crashed else disk.calls
        await let_go(log)


@pytest.mark.crash
@pytest.mark.parametrize("mode", CRASH_MODES)
@pytest.mark.parametrize("durability", MODES)
async def test_a_relaxed_log_loses_a_tail_at_most(durability: Relaxed, mode: CrashMode) -> None:
    """After a crash a relaxed log holds a prefix of what it acknowledged, whole and in order, and goes on."""
    clean = SimulatedDisk()
    await _run_relaxed(clean, Book(), durability)
    lost = 0
    for calls in range(1, clean.calls + 1, 2):
        disk, book = SimulatedDisk(calls, crash_after=calls, crash_within=calls % 4 == 1), Book()
        await _run_relaxed(disk, book, durability)
        log = await open_simulated(disk.after_crash(mode), settings=_settings(durability))
        records = await read_all(log, Query())
        assert [record.seq for record in records] == list(range(1, len(records) + 1))
        places = {place.seq: number for number, place in book.acknowledged.items()}
        for record in records:
            number = record.payload["n"]
            assert places.get(record.seq, number) == number
            assert record.payload == book.offered[number].payload
        lost += len(book.acknowledged.keys() - {record.payload["n"] for record in records})
        await book.append(log, book.event("gamma"))
        await log.close()
    assert lost or mode != "lose_all", "the test means to reach what may be lost"
