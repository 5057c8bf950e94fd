"""
The machine stops at every disk call in turn: whatever was acknowledged is there afterwards, and nothing is made up.

The default run takes every n-th call, another n for each way to stop; ``make heavy`` takes them all.
"""

from __future__ import annotations

import itertools
import random
from typing import Final

import pytest

from tests.crash.support import (
    ENDINGS,
    ROOMY,
    SPACES,
    TIGHT,
    Ending,
    Workload,
    disk_after,
    index_after,
    let_go,
    open_and_check,
    open_simulated,
    recover_and_check,
    run_until,
    settled,
)
from tidings.log import LogSettings
from tidings.testing import SimulatedCrash, SimulatedDisk

_STRIDE: Final = 23
_JOURNALS: Final = {"turning journal": TIGHT, "roomy journal": ROOMY, "a folder for each space": SPACES}


async def _calls_in(settings: LogSettings) -> int:
    workload = Workload(SimulatedDisk(), settings)
    await workload.run()
    book = workload.book
    assert len(book.acknowledged) == len(book.offered)
    assert book.forgotten < book.dropped, "the workload means to drop, with ids and without"
    return workload.disk.calls


async def _crash_everywhere(settings: LogSettings, ending: Ending, *, within: bool, stride: int) -> None:
    first = 1 + ENDINGS.index(ending) * 2 % stride
    for calls in range(first, await _calls_in(settings) + 1, stride):
        workload = await run_until(calls, within=within, settings=settings)
        disk = disk_after(workload.disk, ending)
        try:
            await recover_and_check(disk, workload.book, index_after(workload, calls), settings)
        except Exception as error:
            error.add_note(f"stopped at call {calls}: {workload.disk.trace[-1]}")
            raise


async def _crash_in_recovery(settings: LogSettings, ending: Ending, *, rounds: int) -> None:
    """Stop somewhere, then stop recovery somewhere, perhaps more than once; then recover in peace."""
    rng = random.Random(f"{ending} {settings.journal_bytes}")
    last = await _calls_in(settings)
    for _ in range(rounds):
        calls = rng.randint(1, last)
        workload = await run_until(calls, within=rng.random() < 0.5, settings=settings)
        disk, stops = disk_after(workload.disk, ending), [calls]
        while len(stops) < 4:
            disk.crash_within = rng.random() < 0.5
            disk.crash_after = rng.randint(1, 25)
            stops.append(disk.crash_after)
            try:
                log = await open_simulated(disk, index_after(workload, rng.randint(0, 2)), settings)
            except SimulatedCrash:
                disk = disk_after(disk, ending, seed=calls)
                continue
            disk.crash_after = disk.calls  # it was through before the machine stopped; so it stops now
            await let_go(log)
            disk = disk_after(disk, ending, seed=calls)
        try:
            await recover_and_check(disk, workload.book, index_after(workload, calls), settings)
        except Exception as error:
            error.add_note(f"stopped at the calls {stops}")
            raise


@pytest.mark.crash
@pytest.mark.req("F19", "F20", "F32", "F70", "F71", "S4", "S25", "S28")
@pytest.mark.parametrize("within", [False, True], ids=["after", "within"])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("journal", _JOURNALS)
async def test_nothing_acknowledged_is_lost(journal: str, ending: Ending, within: bool) -> None:
    """Wherever the machine stops, what was acknowledged is there once, whole and in order, and the log goes on."""
    await _crash_everywhere(_JOURNALS[journal], ending, within=within, stride=_STRIDE)


@pytest.mark.crash
@pytest.mark.req("F70", "F71")
@pytest.mark.parametrize("ending", ENDINGS)
async def test_recovery_may_be_stopped_too(ending: Ending) -> None:
    """Recovery that was stopped, once or several times, comes to the same end."""
    await _crash_in_recovery(TIGHT, ending, rounds=4)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("within", [False, True], ids=["after", "within"])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("journal", _JOURNALS)
async def test_nothing_acknowledged_is_lost_at_any_call(journal: str, ending: Ending, within: bool) -> None:
    """The same, for every single call."""
    await _crash_everywhere(_JOURNALS[journal], ending, within=within, stride=1)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("journal", _JOURNALS)
async def test_recovery_may_be_stopped_anywhere(journal: str, ending: Ending) -> None:
    """The same, for many places to stop at."""
    await _crash_in_recovery(_JOURNALS[journal], ending, rounds=150)


async def test_the_power_goes_while_a_killed_process_is_recovered_from() -> None:
    """
    Recovery seals segments whose names the killed process had not synced: a seal never outlives the name of its segment.
    """
    workload = Workload(SimulatedDisk(), ROOMY)
    book, log = workload.book, await open_simulated(workload.disk, settings=ROOMY)
    for _ in range(6):  # the second segment is begun
        await book.append(log, book.event("alpha"))
        await settled(log)
    await book.append_many(log, [book.event("alpha") for _ in range(4)])
    killed = workload.disk.clone()  # these are in the journal, and not yet in their segments
    await let_go(log)

    for calls in itertools.count(killed.calls + 1):
        disk = disk_after(killed, "killed")
        disk.crash_after = calls
        try:
            await let_go(await open_simulated(disk, settings=ROOMY))
        except SimulatedCrash:
            await open_and_check(disk_after(disk, "lose_all"), book, settings=ROOMY)
        else:
            break
    assert calls > killed.calls + 10, "recovery has something to do"
