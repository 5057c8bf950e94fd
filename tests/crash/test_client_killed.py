"""Real client processes over real sockets to a real node, killed with SIGKILL at random moments."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.scenarios.client.child import make_client
from tidings.sync.settings import SyncSettings
from tidings.testing.node import RunningNode, node_settings, running_node

CHILD: Final = Path(__file__).parents[1] / "scenarios" / "client" / "child.py"
ROOT: Final = Path(__file__).parents[2]
STRIDE: Final = 100_000
SECONDS_MAX: Final = 60


async def live_and_die(arguments: list[str], lines: int, delay_s: float) -> list[int]:
    """Run a child until it has told so many lines and a moment more, kill it, and return what it told."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CHILD), *arguments, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    told: list[bytes] = []
    async with asyncio.timeout(SECONDS_MAX):
        while len(told) < lines:
            told.append(await process.stdout.readline())
        await asyncio.sleep(delay_s)  # the kill comes at any moment of its work, and that is the point
        process.kill()
        told += (await process.stdout.read()).splitlines()
        await process.wait()
    return [int(line.split()[1]) for line in told if line.startswith(b"taken")]


async def kill_again_and_again(folder: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    settings = node_settings()
    settings = type(settings)(
        log=settings.log, access=settings.access, server=settings.server, sync=SyncSettings(schemas={"note": {}})
    )
    async with running_node(folder / "node", settings) as node:
        stores = {name: str(folder / f"{name}.db") for name in ("ana", "ben")}
        taken: list[int] = []
        for number in range(rounds):
            name = rng.choice(sorted(stores))
            first = (number + 1) * STRIDE
            arguments = [f"{node.ws_url}/sync", stores[name], name, token(node, name), str(first)]
            taken += await live_and_die(arguments, rng.randint(1, 40), rng.uniform(0, 0.02))

        views = []
        for name, store in stores.items():
            async with make_client(f"{node.ws_url}/sync", store, name, token(node, name)) as client:
                async with asyncio.timeout(SECONDS_MAX):
                    await client.drained()
                    await client.caught_up()
                assert await client.quarantine() == []
        for name, store in {**stores, "new": str(folder / "new.db")}.items():
            async with make_client(f"{node.ws_url}/sync", store, name, token(node, name)) as client:
                async with asyncio.timeout(SECONDS_MAX):
                    await client.caught_up()
                views.append(client.view)

    assert views[0] == views[1] == views[2], "everybody sees the same history"
    assert len(set(views[0])) == len(views[0]), "nothing is there twice"
    assert set(taken) <= set(views[0]), "nothing that was taken is lost"
    assert len(taken) >= rounds


def token(node: RunningNode, name: str) -> str:
    return node.token(name, client_id=name, partitions=["P1"])


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.req("S18", "S23", "S27")
async def test_killed_clients_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Clients are killed a few times each; in the end every number that was taken is committed once, for everybody."""
    await kill_again_and_again(tmp_path, rounds=3, seed=11)


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_clients_killed_many_times(tmp_path: Path) -> None:
    """The same, many times over."""
    await kill_again_and_again(tmp_path, rounds=80, seed=12)
