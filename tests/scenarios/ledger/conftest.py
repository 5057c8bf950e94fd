"""A ledger for each test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest

from tidings.ledger import Ledger, open_ledger
from tidings.log.memory import MemoryLog
from tidings.schedule.appointments import Appointments
from tidings.schedule.watches import Watches
from tidings.testing import VirtualClock

from .graph_support import Graph, open_graph
from .support import CATALOGUE


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def log(clock: VirtualClock) -> MemoryLog:
    return MemoryLog(clock=clock)


@pytest.fixture
async def ledger(log: MemoryLog, clock: VirtualClock) -> AsyncIterator[Ledger]:
    """Open, with the catalogue of music."""
    ids = (f"id-{number:04}" for number in itertools.count(1))  # so that every run has the same order
    async with await open_ledger(
        log, catalogue=CATALOGUE, parts=[Appointments, Watches], clock=clock, ids=ids.__next__
    ) as opened:
        yield opened


@pytest.fixture
async def graph() -> AsyncIterator[Graph]:
    """A ledger whose ids are chosen, with tracks and albums."""
    async with open_graph() as opened:
        yield opened
