"""
Guards on what a publish costs the processor: the promises of speed, in the one measure that a busy machine leaves alone.

How long it takes is the benchmarks' to say (``make bench``); these only fail when something became slower by an order.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import pytest

from tests.conformance.support import numbered
from tidings.log.embedded import open_log


@pytest.mark.req("F104")
async def test_ten_thousand_events_a_second_fit_into_one_core(tmp_path: Path) -> None:
    """A durable event costs less than a ten thousandth of a second of processor time, threads included."""
    log = await open_log(tmp_path)
    events = numbered("a", 4096)
    began = time.process_time()
    await asyncio.gather(*(log.append(event) for event in events))
    spent_s = time.process_time() - began
    await log.close()

    assert spent_s / len(events) < 1 / 10_000


@pytest.mark.req("F105")
async def test_one_publish_is_far_from_three_milliseconds_of_work(tmp_path: Path) -> None:
    """Of single publishes, each awaited, 95 in 100 cost less than a third of the 3 ms that a publish may take."""
    log = await open_log(tmp_path)
    spent_s: list[float] = []
    for event in numbered("a", 200):
        began = time.process_time()
        await log.append(event)
        spent_s.append(time.process_time() - began)
    await log.close()

    assert statistics.quantiles(spent_s, n=20)[-1] < 0.001
