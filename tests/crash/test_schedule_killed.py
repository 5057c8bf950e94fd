"""Appointments and delayed events of a process that is killed again and again: none is lost, none fires twice."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.crash.schedule_child import EVERY_COUNT, ONCE_COUNT
from tidings.bus import EventBus
from tidings.happenings.variants import AppointmentFired, AppointmentMissed
from tidings.ledger import open_ledger
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.schedule.appointments import AppointmentKey, Appointments

_CHILD: Final = Path(__file__).with_name("schedule_child.py")
_KILLS: Final = 3


async def live(workspace: Path, seconds: float | None) -> None:
    """One life of the process: until it is killed, so long after all of it runs; or until it is done."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(_CHILD), str(workspace), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"open\n"
            if seconds is None:
                assert await process.stdout.readline() == b"done\n"
            else:
                await asyncio.sleep(seconds)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.req("H47")
async def test_neither_lost_nor_twice(tmp_path: Path) -> None:
    """
    Whenever the process is killed: each appointment is told as fired once an occurrence, as often as it was to fire, what its action
    publishes is stored as often, and each delayed event is published once.
    """
    rng = random.Random(13)
    for _ in range(_KILLS):
        await live(tmp_path, rng.uniform(0.05, 0.6))
    await live(tmp_path, None)

    async with EventBus(workspace=tmp_path) as bus, await open_ledger(bus.log, parts=[Appointments]) as ledger:
        told = [each.happening async for each in ledger.happenings.history(0, ledger.happenings.last_seq)]
        stored = [record async for record in records(bus.log, Query(topic="rung"))]
        later = [record.meta.event_id async for record in records(bus.log, Query(topic="later"))]
        every = await ledger.read(lambda state: state.part(Appointments).get(AppointmentKey("test", "every")))
    expected = Counter({f"once-{number}": 1 for number in range(ONCE_COUNT)} | {"every": EVERY_COUNT})
    assert Counter(each.appointment_id for each in told if isinstance(each, AppointmentFired)) == expected
    assert Counter(record.payload["name"] for record in stored) == expected
    assert [each for each in told if isinstance(each, AppointmentMissed)] == []
    assert {each.dispatch_outcome for each in told if isinstance(each, AppointmentFired)} == {"ok"}
    assert every is not None
    assert every.fires_completed == EVERY_COUNT
    assert sorted(later) == sorted(f"later-{number}" for number in range(ONCE_COUNT))
