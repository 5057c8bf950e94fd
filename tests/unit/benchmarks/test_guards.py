"""
Guards on what a publish costs the processor, the one measure that a busy machine leaves alone.

They show no promise of speed: those are about time, and the benchmarks measure them (``python -m benchmarks --only bus``). These
fail when something became slower by an order. Of
several rounds the best counts: what else the process does (a collection, a thread of a test before) falls on some of them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Final

from tests.conformance.support import numbered
from tidings.bus import EventBus
from tidings.log.embedded import open_log
from tidings.types import Ack

_ROUNDS: Final = 5


def _p95(spent_s: list[float]) -> float:
    return statistics.quantiles(spent_s, n=20)[-1]


async def test_ten_thousand_events_a_second_fit_into_one_core(tmp_path: Path) -> None:
    """A durable event costs less than a ten thousandth of a second of processor time, threads included."""
    log = await open_log(tmp_path)
    events = numbered("a", 4096)
    began = time.process_time()
    await asyncio.gather(*(log.append(event) for event in events))
    spent_s = time.process_time() - began
    await log.close()

    assert spent_s / len(events) < 1 / 10_000


async def test_one_publish_is_far_from_three_milliseconds_of_work(tmp_path: Path) -> None:
    """Of single publishes, each awaited, 95 in 100 cost less than a third of the 3 ms that a publish may take."""
    log = await open_log(tmp_path)
    p95s: list[float] = []
    for _ in range(_ROUNDS):
        spent_s: list[float] = []
        for event in numbered("a", 200):
            began = time.process_time()
            await log.append(event)
            spent_s.append(time.process_time() - began)
        p95s.append(_p95(spent_s))
    await log.close()

    assert min(p95s) < 0.001


async def test_delivery_is_far_from_five_milliseconds_of_work(tmp_path: Path) -> None:
    """From the call to publish until the handler is entered, 95 in 100 events cost less than a third of the 5 ms allowed."""
    entered = asyncio.Event()
    at_entry = 0.0

    async def handler(_: object) -> Ack:
        nonlocal at_entry
        at_entry = time.process_time()
        entered.set()
        return Ack()

    p95s: list[float] = []
    async with EventBus(workspace=tmp_path) as bus:
        await bus.subscribe("a", "g", handler)
        for _ in range(_ROUNDS):
            spent_s: list[float] = []
            for event in numbered("a", 200):
                began = time.process_time()
                await bus.publish(event)
                await entered.wait()
                entered.clear()
                spent_s.append(at_entry - began)
            p95s.append(_p95(spent_s))

    assert min(p95s) < 0.005 / 3


async def test_handling_costs_far_less_than_a_millisecond_beside_the_handler(tmp_path: Path) -> None:
    """Reading, claiming, handing out and acknowledging a backlog costs less than a tenth of a millisecond an event."""
    count = 2000
    left = count
    done = asyncio.Event()

    async def handler(_: object) -> Ack:
        nonlocal left
        left -= 1
        if not left:
            done.set()
        return Ack()

    async with EventBus(workspace=tmp_path) as bus:
        await bus.publish_many(numbered("a", count))
        began = time.process_time()
        await bus.subscribe("a", "g", handler)
        async with asyncio.timeout(60):
            await done.wait()
        spent_s = time.process_time() - began

    assert spent_s / count < 0.0001
