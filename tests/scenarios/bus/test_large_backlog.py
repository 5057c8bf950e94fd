"""A group that comes a million events late, over real files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from benchmarks.filling import TOPIC, fill
from tidings.bus import EventBus, ReceivedEvent
from tidings.types import Ack

COUNT = 1_000_000
BACKLOG_BYTES_MAX = 64 << 20
"""What working it off may add to the process: windows, read-ahead and files, not the events."""


@pytest.mark.slow
@pytest.mark.req("F66")
async def test_a_million_events_are_worked_off_in_order_within_little_memory(tmp_path: Path) -> None:
    """Every event of the backlog arrives once and in order, the window is never exceeded, and memory stays where it was."""
    await asyncio.to_thread(fill, tmp_path, COUNT, has_partitions=False)
    process = psutil.Process()
    done = asyncio.Event()
    expected = most_pending = most_bytes = 0

    async with EventBus(workspace=tmp_path) as bus:

        async def handler(event: ReceivedEvent) -> Ack:
            nonlocal expected, most_pending, most_bytes
            assert event.offset == expected
            expected += 1
            if expected % 10_000 == 0:
                most_bytes = max(most_bytes, process.memory_full_info().uss)
                state = bus.get_subscriptions(TOPIC)[0].group_state
                assert state is not None
                most_pending = max(most_pending, state.pending)
            if expected == COUNT:
                done.set()
            return Ack()

        before_bytes = process.memory_full_info().uss
        await bus.subscribe(TOPIC, "late", handler, max_inflight=500)
        await done.wait()

    assert expected == COUNT
    assert most_pending <= 500
    assert most_bytes - before_bytes < BACKLOG_BYTES_MAX
