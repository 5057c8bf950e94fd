"""
Many topics: closing a log that has a new event in each of them, and opening it again.

What no log with a file a topic can do without is measured beside, in the same process and with as many bytes: making and
syncing the files, one after another and many at a time, and reading them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from tidings.core.events import Event, EventMeta
from tidings.log.embedded import open_log

from .filling import SPACE, TYPE
from .measuring import run_on
from .report import Row, at_most, noted
from .running import Runner
from .scales import Scale

__all__ = ["bench", "measure_topics"]

_BATCH: Final = 1000
_TOGETHER: Final = 128
_SINGLE_MAX: Final = 500
"""Files synced one after another; the figure is carried over to all of them."""


class Topics(msgspec.Struct, frozen=True):
    """How many topics, and where."""

    folder: str
    count: int


class Took(msgspec.Struct, frozen=True):
    """Seconds."""

    close: float
    open: float
    close_idle: float
    synced_singly: float
    synced_together: float
    read: float


def measure_topics(case: Topics) -> Took:
    """Publish to all topics, close, open, close."""
    workspace, bare = Path(case.folder, "log"), Path(case.folder, "bare")

    async def main() -> list[float]:
        log = await open_log(workspace)
        for first in range(0, case.count, _BATCH):
            numbers = range(first, min(first + _BATCH, case.count))
            await log.append_many([Event(EventMeta(f"topic-{n}", TYPE, SPACE), {"n": n}) for n in numbers])
        marks = [time.perf_counter()]
        await log.close()
        marks.append(time.perf_counter())
        log = await open_log(workspace)
        marks.append(time.perf_counter())
        assert len(log.topics()) == case.count
        marks.append(time.perf_counter())
        await log.close()
        return [*marks, time.perf_counter()]

    try:
        begin, closed, opened, counted, end = run_on("uvloop", main)
        line = (workspace / ".bus" / "wal" / "topic-0.00000001.jsonl").read_bytes()
        bare.mkdir()
        few = min(_SINGLE_MAX, case.count)
        singly = _write(bare, "a", few, line, 1) * case.count / few
        together = _write(bare, "b", case.count, line, _TOGETHER)
        mark = time.perf_counter()
        for n in range(case.count):
            (bare / f"b{n}").read_bytes()
        return Took(closed - begin, opened - closed, end - counted, singly, together, time.perf_counter() - mark)
    finally:
        shutil.rmtree(case.folder, ignore_errors=True)


def _write(folder: Path, prefix: str, count: int, data: bytes, together: int) -> float:
    """Make files and sync them, so many at a time; the seconds it took."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(min(16, together)) as pool:
        for first in range(0, count, together):
            numbers = range(first, min(first + together, count))
            fds = [os.open(folder / f"{prefix}{n}", os.O_CREAT | os.O_RDWR, 0o600) for n in numbers]
            for fd in fds:
                os.write(fd, data)
            list(pool.map(os.fdatasync, fds))
            for fd in fds:
                os.close(fd)
    return time.perf_counter() - begin


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """Close and open a log of many topics."""
    count = scale.topics
    took = run(measure_topics, Topics(str(Path(folder) / "topics"), count))
    closing = noted("topics", f"closing, a new event in each of {count:,} topics", "s", took.close)
    files = {"files synced one by one": took.synced_singly, "files synced together": took.synced_together}
    closing = msgspec.structs.replace(closing, baselines=files)
    yield at_most(closing, 1.0 + 3 * took.synced_together, "<= 1 s + 3 times together")
    opening = noted("topics", f"opening {count:,} topics", "s", took.open)
    opening = msgspec.structs.replace(opening, baselines={"reading the files": took.read})
    yield at_most(opening, 1.0 + 6 * took.read, "<= 1 s + 6 times reading")
    yield noted("topics", f"closing {count:,} topics without a new event", "s", took.close_idle)
