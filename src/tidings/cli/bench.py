"""``tidings bench``: what this machine's disk and processor give, in a few seconds: sync, publish, handle."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tidings.bus.eventbus import EventBus
from tidings.core.events import Event, EventMeta

from .doctor import nearest_folder, sync_times_ns
from .session import Session, command

app = typer.Typer(rich_markup_mode=None)

_SYNC_COUNT: Final = 100
_AT_ONCE: Final = 256
_TOPIC: Final = "bench"


@command(app, "bench", examples="tidings bench\ntidings bench --seconds 5 -w /data/workspace\ntidings bench --json")
async def bench(
    session: Session,
    *,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=60.0, metavar="S", help="How long each part takes, about.")
    ] = 2.0,
    payload_bytes: Annotated[
        int, typer.Option("--payload-bytes", min=1, max=1 << 20, metavar="N", help="How large each payload is.")
    ] = 200,
) -> None:
    """
    Measure this machine shortly: a raw sync, one publisher alone, many at once, and a group that handles what they published.

    A scratch log beside the workspace is used, with the settings that a bus has if it is given none, and removed. It is a rough picture:
    other programs that run meanwhile are in it. To compare versions use the benchmarks of the source.
    """
    folder = nearest_folder(session.workspace.parent)
    monotonic = session.clock.monotonic
    raw = [each / 1e9 for each in sync_times_ns(folder, monotonic, _SYNC_COUNT)]
    with tempfile.TemporaryDirectory(prefix=".tidings-bench-", dir=folder) as scratch:
        async with EventBus(Path(scratch) / "log") as bus:
            run = _Run(bus, monotonic, seconds, {"text": "x" * payload_bytes})
            alone = await run.publish(1)
            many = await run.publish(_AT_ONCE)
            handled_per_s = await run.handle()
    found = {
        "folder": str(folder),
        "payload_bytes": payload_bytes,
        "sync": _summary(raw),
        "publish_one": alone,
        f"publish_{_AT_ONCE}_at_once": many,
        "handle": {"per_s": round(handled_per_s)},
    }
    if session.out.is_json:
        session.out.json(found)
        return
    session.out.table(
        f"On {folder}",
        ("what", "a second>", "median ms>", "99 % ms>"),
        [
            _row("raw sync of 4 KB", _summary(raw)),
            _row("publish, one after another", alone),
            _row(f"publish, {_AT_ONCE} at once", many),
            ("handle, one group", round(handled_per_s), "", ""),
        ],
    )
    session.out.text("a publish is on disk when it returns: one alone waits for a sync, many at once share one")


class _Run:
    """One bus that is measured."""

    def __init__(self, bus: EventBus, monotonic: Callable[[], float], seconds: float, payload: dict[str, Any]) -> None:
        self._bus = bus
        self._monotonic = monotonic
        self._seconds = seconds
        self._payload = payload
        self._count = 0

    async def publish(self, at_once: int) -> dict[str, float]:
        """So many publishers, each of which waits for its answer before it publishes again."""
        began, times = self._monotonic(), list[float]()
        end = began + self._seconds

        async def one() -> None:
            while (sent := self._monotonic()) < end:
                await self._bus.publish(Event(EventMeta(_TOPIC, "MEASURED", "shared:bench"), self._payload))
                times.append(self._monotonic() - sent)

        await asyncio.gather(*(one() for _ in range(at_once)))
        self._count += len(times)
        return {**_summary(times), "per_s": round(len(times) / (self._monotonic() - began))}

    async def handle(self) -> float:
        """How many events a second a group gets through, of those that were published."""
        done, numbers, began = asyncio.Event(), itertools.count(1), self._monotonic()

        async def handler(payload: dict[str, Any]) -> None:
            if next(numbers) == self._count:
                done.set()

        await self._bus.subscribe(_TOPIC, "bench", handler, workers=8)
        await done.wait()
        return self._count / (self._monotonic() - began)


def _summary(times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    middle, late = (ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 99))
    return {"p50_ms": round(middle * 1000, 3), "p99_ms": round(late * 1000, 3), "count": len(ordered)}


def _row(what: str, found: dict[str, float]) -> tuple[object, ...]:
    return what, found.get("per_s", round(1000 / max(found["p50_ms"], 0.001))), found["p50_ms"], found["p99_ms"]
