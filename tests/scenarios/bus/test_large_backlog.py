"""A group that comes late to a large topic, over real files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.filling import fill

BACKLOG_BYTES_MAX = 64 << 20
"""What working it off may add to the process: windows, read-ahead and files, not the events."""
REPOSITORY = Path(__file__).parents[3]
# A process of its own: what other tests have left in the heap would be measured too.
PROGRAM = """
import asyncio, json, sys

import psutil

from benchmarks.filling import TOPIC
from tidings.bus import EventBus
from tidings.types import Ack


async def main(workspace, count):
    process = psutil.Process()
    done = asyncio.Event()
    expected = most_pending = most_bytes = 0

    async with EventBus(workspace=workspace) as bus:

        async def handler(event):
            nonlocal expected, most_pending, most_bytes
            assert event.offset == expected
            expected += 1
            if expected % 10_000 == 0:
                most_bytes = max(most_bytes, process.memory_full_info().uss)
                most_pending = max(most_pending, bus.get_subscriptions(TOPIC)[0].group_state.pending)
            if expected == count:
                done.set()
            return Ack()

        before_bytes = process.memory_full_info().uss
        await bus.subscribe(TOPIC, "late", handler, max_inflight=500)
        await done.wait()
    print(json.dumps([expected, most_pending, most_bytes - before_bytes]))


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.slow
@pytest.mark.req("F66")
@pytest.mark.parametrize(
    "count", [50_000, *(pytest.param(count, marks=pytest.mark.heavy) for count in (200_000, 1_000_000))]
)
def test_a_backlog_is_worked_off_in_order_within_little_memory(tmp_path: Path, count: int) -> None:
    """Every event of the backlog arrives once and in order, the window is never exceeded, and memory stays where it was."""
    fill(tmp_path, count, has_partitions=False)

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(count)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    expected, most_pending, grown_bytes = json.loads(done.stdout)
    assert expected == count
    assert most_pending <= 500
    assert grown_bytes < BACKLOG_BYTES_MAX
