"""What an idle, authorised sync client costs a node."""

from __future__ import annotations

import asyncio
import gc
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]  # has no stubs
import pytest

from tests.integration.node_support import SECONDS_MAX
from tidings.testing.node import RunningNode, running_node

CLIENTS: Final = Path(__file__).with_name("node_idle_clients.py")
BYTES_MAX: Final = 30_000


async def start_clients(node: RunningNode, first: int, count: int) -> Process:
    """A process with so many clients, all connected."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, CLIENTS, f"{node.ws_url}/sync", str(first), str(count), stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for number in range(first, first + count):
        token = node.token(f"u{number}", client_id=f"c{number}", partitions=[f"p/{number}"])
        process.stdin.write(f"{token}\n".encode())
    await process.stdin.drain()
    async with asyncio.timeout(SECONDS_MAX * 2):
        assert await process.stdout.readline() == b"up\n"
    return process


async def end(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("count", [500, pytest.param(1500, marks=pytest.mark.heavy)])
async def test_an_idle_client_costs_less_than_thirty_kilobytes(tmp_path: Path, count: int) -> None:
    """The resident memory of a node grows by less than 30 KB for each authorised connection that does nothing."""
    me = psutil.Process()
    async with running_node(
        tmp_path, connections_per_address_max=10_000, unauthenticated_per_address_max=10_000, unauthenticated_max=10_000
    ) as node:
        some = await start_clients(node, 0, 200)  # what is set up once is set up now
        gc.collect()
        before = me.memory_info().rss
        clients = await start_clients(node, 200, count)
        gc.collect()
        grown = me.memory_info().rss - before
        connected = len(node.connections)
        await end(clients)
        await end(some)

    assert connected == count + 200
    assert grown / count < BYTES_MAX
    print(f"{grown / count:.0f} bytes each")  # ``pytest -s`` shows it
