"""
Load a node for a long time, well-behaved clients and hostile ones together, and check that nothing grows.

    python -m benchmarks.soak [--minutes 60] [--rate 50]        or: make soak

A node runs in a process of its own, with retention that keeps the log small. Memory, file descriptors, threads and disk use of that process and
workspace are sampled. After a warm-up of a quarter of the time they have to stay flat: the median of the last fifth may exceed that of the
first fifth after the warm-up only by the allowance in ``ALLOWANCES``. Exits with 1 if something grew, or if a client met an error that it
must not meet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import httpx
import psutil  # type: ignore[import-untyped]  # has no stubs

from tidings import Client, EventStream, Nack
from tidings.client import SyncClient
from tidings.client.ledger import LedgerClient
from tidings.core.errors import TidingsError
from tidings.core.events import Event, EventMeta

from .nodes import NodeProcess, serving

__all__ = ["Sample", "growth", "main"]

_MIB: Final = 1 << 20
_SPACE: Final = "shared:shop"
_SAMPLES: Final = 400
_WARM_UP: Final = 0.25
_CATALOGUE: Final = """
schema_version = 1
[[subjects]]
name = "track"
"""
_CONFIG: Final = """
[server]
access_log = false
retention_interval_s = 5.0
[log]
journal_bytes = 1048576
segment_bytes_max = 1000000
[log.retention."*"]
size_bytes_max = 4000000
[sync.schemas.note]
"""


@dataclass(frozen=True)
class Sample:
    """What the node holds at one time."""

    memory_bytes: int
    """Resident memory without the pages of mapped files, such as the index."""
    descriptors: int
    threads: int
    disk_bytes: int


ALLOWANCES: Final = {
    "memory_bytes": (24 * _MIB, 0.05),
    "descriptors": (16, 0.05),
    "threads": (4, 0.0),
    "disk_bytes": (16 * _MIB, 0.1),
}
"""How much each may grow: an amount, and a share of what there was."""


@dataclass
class Counts:
    """What the clients did, and what they met."""

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def growth(samples: list[Sample]) -> list[str]:
    """Compare the end with the time after the warm-up. Return a line for each figure that grew beyond its allowance."""
    steady = samples[int(len(samples) * _WARM_UP) :]
    fifth = max(1, len(steady) // 5)
    problems = []
    for name, (amount, share) in ALLOWANCES.items():
        before = statistics.median(getattr(sample, name) for sample in steady[:fifth])
        after = statistics.median(getattr(sample, name) for sample in steady[-fifth:])
        if after > before + amount + share * before:
            problems.append(f"{name} grew from {before:,.0f} to {after:,.0f}")
    return problems


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(prog="soak", description="Check that a node under mixed load does not grow.")
    parser.add_argument("--minutes", type=float, default=60.0, help="duration of the load; default: 60")
    parser.add_argument("--rate", type=float, default=50.0, help="events published per second; default: 50")
    arguments = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="tidings-soak-"))
    try:
        return _soak(folder, arguments.minutes * 60, arguments.rate)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _soak(folder: Path, seconds: float, rate: float) -> int:
    counts = Counts()
    with serving(folder, _CONFIG, _CATALOGUE) as node:
        samples = asyncio.run(_load(node, folder, seconds, rate, counts))
    problems = [*growth(samples), *counts.problems]
    print(f"done: {dict(counts.done)}\nrefused: {dict(counts.refused)}")
    print("\n".join(problems) or "flat")
    return 1 if problems else 0


async def _load(node: NodeProcess, folder: Path, seconds: float, rate: float, counts: Counts) -> list[Sample]:
    url, token = node.url, node.token
    clients: list[Callable[[], Awaitable[None]]] = [
        lambda: _publish(url, token(), rate, counts),
        lambda: _work(url, token("worker"), counts),
        lambda: _follow(url, token("page"), counts),
        lambda: _read(url, token("reader"), counts),
        lambda: _sync(url, token("ana", "ana-phone"), folder / "ana.db", counts),
        lambda: _keep_ledger(url, token("plugin"), counts),
        lambda: _come_and_go(url, token("visitor"), counts),
        lambda: _abuse(url, counts),
    ]
    tasks = [asyncio.ensure_future(_forever(client, counts)) for client in clients]
    process, samples = psutil.Process(node.pid), []
    pause_s = max(0.25, seconds / _SAMPLES)
    end_s = time.monotonic() + seconds
    try:
        while time.monotonic() < end_s:
            await asyncio.sleep(pause_s)
            samples.append(await asyncio.to_thread(_sample, process, folder / "w"))
            if len(samples) % (_SAMPLES // 20) == 0:
                print(f"{seconds - (end_s - time.monotonic()):7.0f} s  {samples[-1]}", flush=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return samples


def _sample(process: psutil.Process, workspace: Path) -> Sample:
    disk_bytes = 0
    for path in workspace.rglob("*"):
        with contextlib.suppress(OSError):
            disk_bytes += path.stat().st_blocks * 512
    memory = process.memory_info()
    return Sample(memory.rss - memory.shared, process.num_fds(), process.num_threads(), disk_bytes)


async def _forever(client: Callable[[], Awaitable[None]], counts: Counts) -> None:
    """Run a client again and again. Errors that a node may answer with are counted; others end the soak as problems."""
    while True:
        try:
            await client()
        except (TidingsError, httpx.HTTPError, OSError, EOFError) as error:
            counts.refused[getattr(error, "code", type(error).__name__)] += 1
            await asyncio.sleep(0.5)
        except Exception as error:  # noqa: BLE001 - reported at the end
            counts.problems.append(f"a client failed: {type(error).__name__}: {error}")
            await asyncio.sleep(5.0)


async def _publish(url: str, token: str, rate: float, counts: Counts) -> None:
    rng = random.Random(1)
    async with Client(url, token) as client:
        for number in range(1_000_000_000):
            event = Event(
                EventMeta("orders", "PLACED", _SPACE, objects=[f"order:{number % 100}"]),
                {"text": "x" * rng.randrange(2_000)},
            )
            if number % 20 == 0:
                await client.publish(
                    "delayed", {"n": number}, type="DUE", space=_SPACE, delay=timedelta(seconds=rng.uniform(0, 20))
                )
            else:
                await client.publish(event)
            counts.done["published"] += 1
            await asyncio.sleep(1 / rate)


async def _work(url: str, token: str, counts: Counts) -> None:
    rng = random.Random(2)

    async def handle(event: Event) -> Nack | None:
        counts.done["handled"] += 1
        return Nack("chosen by chance") if rng.random() < 0.02 else None

    async with Client(url, token) as client, httpx.AsyncClient(base_url=url, headers=_headers(token)) as http:
        await client.subscribe("orders", "billing", handle, workers=4, max_retries=1)
        while True:
            await asyncio.sleep(5.0)
            answer = await http.post("/v1/dead-letters/drop", json={"topic": "orders", "group": "billing"})
            counts.done["letters dropped"] += answer.status_code == 200


async def _follow(url: str, token: str, counts: Counts) -> None:
    async with EventStream(url, token=token) as events:
        async for _ in events:
            counts.done["envelopes"] += 1


async def _read(url: str, token: str, counts: Counts) -> None:
    async with httpx.AsyncClient(base_url=url, headers=_headers(token), timeout=60.0) as http:
        start = "/v1/events?since=0&limit=100&wait=5"
        url = start
        while True:
            page = (await http.get(url)).json()
            url = page.get("next", start)  # Without one, retention was faster.
            since = page.get("seq", 0)
            await http.get("/v1/envelopes", params={"since": max(0, since - 50), "limit": 50})
            await http.get("/metrics")
            counts.done["pages"] += 1


async def _sync(url: str, token: str, store: Path, counts: Counts) -> None:
    socket_url = f"{url.replace('http', 'ws', 1)}/sync"
    client: SyncClient[Any]
    async with SyncClient(socket_url, token=token, client_id="ana-phone", store=store, partitions=["notes"]) as client:
        while True:
            draft = await client.submit_fact(["notes"], "note", {"text": "hello"})
            await draft.settled(timeout_s=30.0)
            counts.done["synced"] += 1
            await asyncio.sleep(0.2)


async def _keep_ledger(url: str, token: str, counts: Counts) -> None:
    async with LedgerClient(url, token=token, capabilities=["plugins"]) as client:
        plugin = client.plugin("org.example.soak")
        for number in range(1_000_000_000):
            name = ("id", str(number))
            await plugin.announce_subject("track", [name], state={"n": number})
            await plugin.retract_addressing(name)
            counts.done["subjects"] += 1
            await asyncio.sleep(0.1)


async def _come_and_go(url: str, token: str, counts: Counts) -> None:
    """Connect, take a few things and leave, at every door in turn."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0), EventStream(url, token=token) as events:
                await anext(events)
        async with httpx.AsyncClient(base_url=url, headers=_headers(token)) as http:
            with contextlib.suppress(httpx.TimeoutException):
                async with http.stream(
                    "GET", "/v1/envelopes", headers={"accept": "text/event-stream"}, timeout=1.0
                ) as answer:
                    async for _ in answer.aiter_lines():
                        break
        counts.done["visits"] += 1
        await asyncio.sleep(0.5)


async def _abuse(url: str, counts: Counts) -> None:
    """Do what strangers do: pipeline without reading, send half a request, a bad upgrade, garbage; then leave."""
    host, port = url.removeprefix("http://").split(":")
    pieces = [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 2_000,
        b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 60_000,
        b"GET /events HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Version: 13\r\n\r\n",
        b"\x00\xff" * 4_000,
        b"GET /sync HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n" + b"\x82\xfe\xff\xff" + b"\x00" * 30_000,
    ]
    for piece in pieces:
        writers = []
        for _ in range(10):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(piece)
                writers.append(writer)
        await asyncio.sleep(1.0)
        for writer in writers:
            writer.transport.abort()
            counts.done["abuses"] += 1


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


if __name__ == "__main__":
    sys.exit(main())
