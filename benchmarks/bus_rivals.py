"""
What the bus is compared with: queues and buses that a Python process can use instead.

Each takes so many events from publish to acknowledged, in the way that suits it best, in one durability class:

    synced     on the disk before the publisher is answered (and, where the queue has it so, before an ack is)
    unsynced   handed to the operating system; a power cut may take what was answered

They are optional: what is not installed is left out of the table. Each runs in the way that was found to suit it best:

    persist-queue, litequeue   one thread puts in as many as the bus has in flight, then takes and acknowledges them, and so on;
                               with all put in first, litequeue came out at a quarter of that
    bubus                      50 events at a time (it refuses more than 100), a history of 10; with its own 50, half as fast. Its
                               file is written after the handlers ran, and never synced
    JetStream                  a server of its own on the loopback device; stream and consumers are made before the clock starts
    Redis Streams              the same, if a redis-server is installed; pipelines of as many as the bus has in flight, published
                               and acknowledged alike; appendfsync always or everysec
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import orjson

from .measuring import Taken, Window, run_on, scratch
from .workload import PAYLOADS

__all__ = ["RIVALS", "WITH_GROUPS", "Durability", "Rival", "RivalResult", "available", "measure_rival"]

Durability = Literal["synced", "unsynced"]
_START_S_MAX: Final = 10.0
_FETCH: Final = 256
_BUBUS_LOT: Final = 50
_BUBUS_HISTORY: Final = 10


class Rival(msgspec.Struct, frozen=True):
    """So many events through one of them."""

    name: str
    folder: str
    events: int
    durability: Durability
    groups: int = 1
    in_flight: int = 256


class RivalResult(msgspec.Struct, frozen=True):
    """How long it took, all of it acknowledged."""

    events: int
    taken: Taken


def measure_rival(case: Rival) -> RivalResult:
    """Publish and handle."""
    with scratch(case.folder) as folder:
        return RivalResult(case.events, RIVALS[case.name][1](case, folder))


def available(name: str, durability: Durability) -> bool:
    """Whether it is installed, and can be had in that class."""
    classes, _, modules = RIVALS[name]
    if durability not in classes or any(importlib.util.find_spec(module) is None for module in modules):
        return False
    return all(server() is not None for server in _SERVERS.get(name, ()))


def _body(n: int) -> bytes:
    return orjson.dumps(PAYLOADS[n % len(PAYLOADS)])


def _lots(case: Rival) -> list[range]:
    return [range(first, min(first + case.in_flight, case.events)) for first in range(0, case.events, case.in_flight)]


def _persist_queue(case: Rival, folder: Path) -> Taken:
    queue: Any = importlib.import_module("persistqueue").SQLiteAckQueue(str(folder), auto_commit=True)
    window = Window()
    for lot in _lots(case):
        for n in lot:
            queue.put(_body(n))
        for _ in lot:
            item = queue.get(block=False, raw=True)
            orjson.loads(item["data"])
            queue.ack(item)
    taken = window.take()
    queue.close()
    return taken


def _litequeue(case: Rival, folder: Path) -> Taken:
    queue: Any = importlib.import_module("litequeue").LiteQueue(folder / "queue.sqlite")
    if case.durability == "synced":
        queue.conn.execute("PRAGMA synchronous = FULL")  # its own choice is NORMAL, which syncs at checkpoints only
    window = Window()
    for lot in _lots(case):
        for n in lot:
            queue.put(_body(n).decode())
        for _ in lot:
            message = queue.pop()
            orjson.loads(message.data)
            queue.done(message.message_id)
    taken = window.take()
    queue.close()
    return taken


def _bubus(case: Rival, folder: Path) -> Taken:
    logging.getLogger("bubus").setLevel(logging.CRITICAL)
    bubus: Any = importlib.import_module("bubus")
    kind: Any = type("OrderPlaced", (bubus.BaseEvent,), {"__annotations__": {"order": dict}, "__module__": __name__})

    async def main() -> Taken:
        bus = bubus.EventBus(name="Bench", wal_path=folder / "events.jsonl", max_history_size=_BUBUS_HISTORY)
        handled = 0

        def handler_of(number: int) -> Callable[[Any], Any]:
            async def handler(event: Any) -> None:
                nonlocal handled
                handled += 1

            handler.__name__ = f"handler_{number}"
            return handler

        for number in range(case.groups):
            bus.on(kind, handler_of(number))
        window = Window()
        for first in range(0, case.events, _BUBUS_LOT):
            lot = range(first, min(first + _BUBUS_LOT, case.events))
            events = [bus.dispatch(kind(order=PAYLOADS[n % len(PAYLOADS)])) for n in lot]
            for event in events:
                await event
        taken = window.take()
        await bus.stop(clear=True)
        assert handled == case.events * case.groups
        return taken

    return run_on("asyncio", main)


def _jetstream(case: Rival, folder: Path) -> Taken:
    nats: Any = importlib.import_module("nats")
    api: Any = importlib.import_module("nats.js.api")

    async def consume(durable: Any) -> None:
        left = case.events
        while left:
            for message in await durable.fetch(min(_FETCH, left), timeout=30):
                orjson.loads(message.data)
                await message.ack()
                left -= 1

    async def main(address: str) -> Taken:
        client = await nats.connect(address)
        stream = client.jetstream(publish_async_max_pending=case.in_flight)
        await stream.add_stream(name="orders", subjects=["orders"], storage=api.StorageType.FILE)
        durables = [await stream.pull_subscribe("orders", durable=f"group-{n}") for n in range(case.groups)]
        window = Window()
        groups = [asyncio.create_task(consume(durable)) for durable in durables]
        answers = [await stream.publish_async("orders", _body(n), wait_stall=30.0) for n in range(case.events)]
        await asyncio.gather(*answers, *groups)
        taken = window.take()
        await client.close()
        return taken

    with _running_nats(folder, is_synced=case.durability == "synced") as address:
        return run_on("uvloop", lambda: main(address))


def _redis_streams(case: Rival, folder: Path) -> Taken:
    redis: Any = importlib.import_module("redis.asyncio")

    async def publish(client: Any) -> None:
        for lot in _lots(case):
            async with client.pipeline(transaction=False) as pipeline:
                for n in lot:
                    pipeline.xadd("orders", {"body": _body(n)})
                await pipeline.execute()

    async def consume(client: Any, group: str) -> None:
        left = case.events
        while left:
            found = await client.xreadgroup(group, "worker", {"orders": ">"}, count=_FETCH, block=30_000)
            messages = found[0][1] if isinstance(found, list) else next(iter(found.values()))[0]
            for _, fields in messages:
                orjson.loads(fields[b"body"])
            await client.xack("orders", group, *(message_id for message_id, _ in messages))
            left -= len(messages)

    async def main(port: int) -> Taken:
        client = redis.Redis(port=port)
        groups = [f"group-{n}" for n in range(case.groups)]
        for group in groups:
            await client.xgroup_create("orders", group, mkstream=True)
        window = Window()
        await asyncio.gather(publish(client), *(consume(client, group) for group in groups))
        taken = window.take()
        await client.aclose()
        return taken

    with _running_redis(folder, is_synced=case.durability == "synced") as port:
        return run_on("uvloop", lambda: main(port))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def _running(command: list[str], port: int) -> Iterator[int]:
    """A server of our own on a port of its own, gone afterwards."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield port
    finally:
        process.terminate()
        process.wait(_START_S_MAX)


@contextmanager
def _running_nats(folder: Path, *, is_synced: bool) -> Iterator[str]:
    server = _nats_server()
    assert server is not None
    port = _free_port()
    sync = "sync_interval: always" if is_synced else ""
    config = folder / "nats.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder / "store"}"\n {sync} }}\n')
    with _running([server, "-c", str(config)], port):
        yield f"nats://127.0.0.1:{port}"


@contextmanager
def _running_redis(folder: Path, *, is_synced: bool) -> Iterator[int]:
    server = _redis_server()
    assert server is not None
    port = _free_port()
    fsync = "always" if is_synced else "everysec"
    options = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--save", ""]
    with _running([server, *options, "--appendonly", "yes", "--appendfsync", fsync], port):
        yield port


def _wait_for(port: int) -> None:
    until = time.monotonic() + _START_S_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return


def _nats_server() -> str | None:
    beside = Path(sys.executable).with_name("nats-server")
    return shutil.which("nats-server") or (str(beside) if beside.exists() else None)


def _redis_server() -> str | None:
    return shutil.which("redis-server")


_SERVERS: Final[dict[str, tuple[Callable[[], str | None], ...]]] = {
    "JetStream": (_nats_server,),
    "Redis Streams": (_redis_server,),
}
_Measure = Callable[[Rival, Path], Taken]
RIVALS: Final[dict[str, tuple[tuple[Durability, ...], _Measure, tuple[str, ...]]]] = {
    "persist-queue": (("synced",), _persist_queue, ("persistqueue",)),
    "litequeue": (("synced", "unsynced"), _litequeue, ("litequeue",)),
    "bubus": (("unsynced",), _bubus, ("bubus",)),
    "JetStream": (("synced", "unsynced"), _jetstream, ("nats",)),
    "Redis Streams": (("synced", "unsynced"), _redis_streams, ("redis",)),
}
WITH_GROUPS: Final = ("bubus", "JetStream", "Redis Streams")
"""Those that hand one event to several groups, or handlers."""
