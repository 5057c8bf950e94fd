"""
Opening a long history: after a clean close, after a kill, and what the open log keeps in memory.

The target for opening is a second plus the time to scan the last segment, which this process measures beside.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from tidings.core.events import Event, EventMeta
from tidings.log import Duplicate
from tidings.log.embedded import open_log
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.inspect import START, read_segment
from tidings.log.embedded.layout import StreamKey

from .building import Order, build
from .filling import SPACE, TOPIC, TYPE, id_of
from .measuring import Taken, Window, forget_cached, one_core, run_on
from .report import Row, at_most, noted
from .running import Runner, run_to_kill
from .scales import Scale

__all__ = ["bench", "measure_look_ups", "measure_opening", "write_and_die"]

MEMORY_BYTES_MAX: Final = 300_000_000
_BATCH: Final = 256


class Opening(msgspec.Struct, frozen=True):
    """A log to be opened."""

    workspace: str
    is_cold: bool
    is_one_core: bool


class Opened(msgspec.Struct, frozen=True):
    """What opening took."""

    taken: Taken
    last_seq: int
    scan_s: float
    """Reading and checking the last segment, which no opening can do without."""


def measure_opening(case: Opening) -> Opened:
    """Open a log once, and close it properly."""
    workspace = Path(case.workspace)
    if case.is_cold:
        forget_cached(workspace)

    async def main() -> Opened:
        window = Window()
        log = await open_log(workspace)
        taken = window.take()
        last_seq = log.position.seq
        await log.close()
        begin = time.perf_counter()
        last = max((workspace / ".bus" / "wal").iterdir())
        report = read_segment(OsDisk(), last, StreamKey(TOPIC), START, is_flat=True, after_gap=True)
        assert report.lines
        return Opened(taken, last_seq, time.perf_counter() - begin)

    with one_core(case.is_one_core):
        return run_on("uvloop", main)


class Last(msgspec.Struct, frozen=True):
    """What a writer does before it dies."""

    workspace: str
    first: int
    count: int


def write_and_die(case: Last) -> None:
    """Publish with ids of our own, and be killed right after the last acknowledgement."""

    async def main() -> None:
        log = await open_log(case.workspace)
        for start in range(case.first, case.first + case.count, _BATCH):
            seqs = range(start, min(start + _BATCH, case.first + case.count))
            await log.append_many([_event(seq) for seq in seqs])
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())


def _event(seq: int) -> Event:
    return Event(EventMeta(TOPIC, TYPE, SPACE, id_of(seq)), {"n": seq})


class LookUps(msgspec.Struct, frozen=True):
    """Publishing again what a log holds, all over it, and as many new events."""

    workspace: str
    records: int
    count: int


class LookedUp(msgspec.Struct, frozen=True):
    """What it took, and the process's memory afterwards."""

    taken: Taken
    duplicates: int
    rss_bytes: int
    anon_bytes: int
    file_bytes: int
    """The part of ``rss_bytes`` that is the page cache, mapped: the kernel takes it back when it needs it."""


def measure_look_ups(case: LookUps) -> LookedUp:
    """Publish ``count`` events with ids; every other one is a duplicate."""
    return run_on("uvloop", lambda: _look_up(case))


async def _look_up(case: LookUps) -> LookedUp:
    log = await open_log(case.workspace)
    step = max(1, case.records // max(1, case.count // 2))
    known = [1 + at * step % case.records for at in range(case.count // 2)]
    fresh = range(2 * case.records, 2 * case.records + len(known))
    duplicates = 0
    window = Window()
    for at in range(0, len(known), _BATCH // 2):
        seqs = [seq for pair in zip(known[at : at + 128], fresh[at : at + 128], strict=True) for seq in pair]
        verdicts = await log.append_many([_event(seq) for seq in seqs])
        duplicates += sum(isinstance(verdict, Duplicate) for verdict in verdicts)
    taken = window.take()
    rss, anon, file = (_memory(name) for name in ("VmRSS", "RssAnon", "RssFile"))
    await log.close()
    return LookedUp(taken, duplicates, rss, anon, file)


def _memory(name: Literal["VmRSS", "RssAnon", "RssFile"]) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def bench(run: Runner, scale: Scale, folder: str, is_one_core: bool) -> Iterator[Row]:
    """Make one long log and open it in every way."""
    workspace = str(Path(folder) / "opening")
    count, killed = scale.open_records, scale.killed_events
    try:
        built = run(build, Order(workspace, count, False))
        yield noted(
            "open",
            f"making the log of {count:,} records",
            "s",
            built.taken.wall_s,
            **{"segments MB": built.segment_bytes / 1e6, "index MB": built.index_bytes / 1e6},
        )
        yield _row("after a clean close", run(measure_opening, Opening(workspace, False, is_one_core)))
        yield _row("after a clean close, not in the page cache", run(measure_opening, Opening(workspace, True, False)))
        run_to_kill(write_and_die, Last(workspace, count + 1, killed))
        opened = run(measure_opening, Opening(workspace, False, is_one_core))
        assert opened.last_seq == count + killed, "what was acknowledged before the kill is there"
        yield _row(f"after SIGKILL, {killed:,} events into the session", opened)
        looked_up = run(measure_look_ups, LookUps(workspace, count, scale.look_ups))
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    yield _memory_row(count, scale.look_ups, looked_up)


def _row(case: str, opened: Opened) -> Row:
    row = noted(
        "open",
        case,
        "s",
        opened.taken.wall_s,
        **{"CPU s": opened.taken.cpu_s, "others' cores": opened.taken.others_cores or 0.0, "last seq": opened.last_seq},
    )
    row = msgspec.structs.replace(row, baselines={"last segment's scan": opened.scan_s})
    return at_most(row, 1.0 + opened.scan_s, "<= 1 s + scan")


def _memory_row(records: int, look_ups: int, found: LookedUp) -> Row:
    row = noted(
        "open",
        f"RssAnon, {records:,} ids indexed, after {look_ups:,} look-ups",
        "MB",
        found.anon_bytes / 1e6,
        **{
            "RSS": found.rss_bytes / 1e6,
            "of it mapped files": found.file_bytes / 1e6,
            "duplicates": found.duplicates,
            "CPU us/look-up": found.taken.cpu_s / look_ups * 1e6,
        },
    )
    return at_most(row, MEMORY_BYTES_MAX / 1e6)
