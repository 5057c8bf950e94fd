"""
The guards are guarded: each promise of the log is broken on purpose, and the checks must notice.

A check that stays green while the engine acknowledges too early, or trusts a torn line, would be worth nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from tests.crash.support import (
    BIG,
    BUS,
    ROOMY,
    TIGHT,
    Book,
    check,
    check_goes_on,
    disk_after,
    keep_appending,
    open_and_check,
    open_simulated,
    recover_and_check,
    run_until,
    settled,
)
from tidings.core.ids import LogIdMaker
from tidings.log import Appended
from tidings.log.embedded import checkpoint, inspect, recover, staging
from tidings.log.embedded.duplicates import Duplicates
from tidings.log.embedded.index import MemoryIndex
from tidings.log.embedded.journal import Journal
from tidings.log.embedded.segment_writer import SegmentWriter
from tidings.log.errors import CorruptLog, IdConflict, LogFenced, StorageFull
from tidings.testing import SimulatedDisk

Check = Callable[[], Awaitable[None]]


async def acknowledged_survives() -> None:
    """What was acknowledged is there after the power went right then."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk)
    await book.append_many(log, [book.event("alpha") for _ in range(3)])
    cut = disk.after_crash("lose_all")
    await log.close()
    await open_and_check(cut, book)


async def journal_outlives_its_records() -> None:
    """No journal file is used again before the segments are on disk."""
    for calls in range(30, 90, 3):
        workload = await run_until(calls, settings=TIGHT)
        await open_and_check(disk_after(workload.disk, "lose_all"), workload.book)


async def damage_is_noticed() -> None:
    """An altered byte of an acknowledged record is told, not served."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=ROOMY)
    await book.append_many(log, [book.event("alpha", pad="some text") for _ in range(3)])
    await settled(log)
    await log.close()
    path = BUS / "wal" / "alpha.00000001.jsonl"
    disk.flip(path, disk.read_all(path).index(b"some text"), 1)
    try:
        await open_and_check(disk, book, settings=ROOMY)
    except CorruptLog:
        return
    raise AssertionError("altered data was served")


async def torn_commit_is_dropped() -> None:
    """A commit that was torn leaves nothing behind, and what comes next is whole."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=ROOMY)
    await book.append(log, book.event("alpha"))
    before = disk.clone()
    await book.append_many(log, [book.event("alpha", pad=BIG) for _ in range(3)])
    data = disk.read_all(BUS / "journal" / "00000000.jsonl")
    await log.close()
    torn = before.after_crash("lose_all")
    used = data.rstrip(b"\0")
    torn.write_all(BUS / "journal" / "00000000.jsonl", used[:-900].ljust(len(data), b"\0"))
    told = Book()
    told.offered, told.acknowledged = book.offered, {0: book.acknowledged[0]}
    await recover_and_check(torn, told, MemoryIndex(), ROOMY)


async def retry_is_a_duplicate() -> None:
    """An event sent again is told as such: right away, after it was indexed, and after reopening."""
    disk, book, index = SimulatedDisk(), Book(), MemoryIndex()
    log = await open_simulated(disk, index)
    event = book.event("alpha", event_id="again")
    await book.append(log, event)
    await book.append(log, event)
    await check_goes_on(log, book)
    await log.close()
    log = await open_simulated(disk, index.snapshot())
    await check_goes_on(log, book)
    await log.close()


async def failed_sync_is_made_good() -> None:
    """Bytes that a failed sync lost are on disk after recovery."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=ROOMY)
    await book.append_many(log, [book.event("alpha") for _ in range(3)])
    await settled(log)
    disk.fail_next("sync", errno.EIO, path_contains="/wal/")
    with pytest.raises(LogFenced):
        await keep_appending(log, book)
    await log.close()
    log = await open_simulated(disk, settings=ROOMY)
    cut = disk.after_crash("lose_all")
    await log.close()
    try:
        await open_and_check(cut, book, settings=ROOMY)
    except CorruptLog as error:
        raise AssertionError(f"acknowledged records were lost: {error}") from error


async def ids_are_never_made_twice() -> None:
    """An id that was given to a refused event is never given to another."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk)
    disk.fail_next("write", errno.ENOSPC, path_contains="/journal/")
    refused, other = book.event("alpha"), book.event("alpha")
    with pytest.raises(StorageFull):
        await log.append(refused)
    for _ in range(10):  # being asked, it looks whether there is room again
        with contextlib.suppress(StorageFull):
            await book.append(log, other)
            break
        await asyncio.sleep(0)
    assert book.acknowledged
    first = refused.meta._event_id
    try:
        verdict = await log.append(refused)
    except IdConflict as error:
        raise AssertionError(f"{first} was given to two events") from error
    assert isinstance(verdict, Appended)
    book.note(refused, verdict)
    await check(log, book)
    await log.close()


def _acknowledge_before_sync(patch: pytest.MonkeyPatch) -> None:
    def sync(self: Journal) -> None:
        self.synced_seq = self._written_seq

    patch.setattr(Journal, "sync", sync)


def _skip_the_checksum(patch: pytest.MonkeyPatch) -> None:
    for reader in ("segment", "embedded.inspect"):
        patch.setattr(f"tidings.log.{reader}.is_whole", lambda line: True)
    patch.setattr(inspect, "_starts_right", lambda line, info: True)


def _trust_a_torn_frame(patch: pytest.MonkeyPatch) -> None:
    original = inspect.JournalReport.follow

    def follow(self: inspect.JournalReport, last_seq: int) -> tuple[list[inspect.Frame], int]:
        self.frames = [frame._replace(is_whole=bool(frame.lines)) for frame in self.frames]
        return original(self, last_seq)

    patch.setattr(inspect.JournalReport, "follow", follow)


def _forget_the_dedupe_entry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Duplicates, "note", lambda *_: None)


def _forget_the_index_entries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentWriter, "feed_index", lambda self, entries, covers: self._index.add([], covers))


def _do_not_rewrite_the_tail(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recover, "_cut", lambda *_: None)


def _recycle_before_the_checkpoint(patch: pytest.MonkeyPatch) -> None:
    def turn_to(self: Journal, size: int, *, from_reserve: bool) -> object:
        self.checkpointed_seq = self._written_seq
        return original(self, size, from_reserve=from_reserve)

    original = Journal._switch_to
    patch.setattr(Journal, "_switch_to", turn_to)
    patch.setattr(SegmentWriter, "checkpoint", lambda *_: None)


def _reuse_ids(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(staging, "LogIdMaker", lambda: LogIdMaker(bytes))


def _believe_any_seal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recover._Planner, "_refuse_gaps", lambda *_: None)
    patch.setattr(checkpoint, "sync_for_good", lambda *_: None)
    patch.setattr("tidings.log.embedded.segment_writer.sync_for_good", lambda *_: None)


_BREAKS: Final[list[tuple[Callable[[pytest.MonkeyPatch], None], Check]]] = [
    (_acknowledge_before_sync, acknowledged_survives),
    (_skip_the_checksum, damage_is_noticed),
    (_trust_a_torn_frame, torn_commit_is_dropped),
    (_forget_the_dedupe_entry, retry_is_a_duplicate),
    (_forget_the_index_entries, retry_is_a_duplicate),
    (_do_not_rewrite_the_tail, failed_sync_is_made_good),
    (_recycle_before_the_checkpoint, journal_outlives_its_records),
    (_believe_any_seal, journal_outlives_its_records),
    (_reuse_ids, ids_are_never_made_twice),
]


@pytest.mark.parametrize("guard", sorted({guard for _, guard in _BREAKS}, key=str))
async def test_the_guard_is_content_with_the_engine(guard: Check) -> None:
    """Unbroken, the engine passes every guard."""
    await guard()


@pytest.mark.parametrize(("break_it", "guard"), _BREAKS, ids=lambda part: part.__name__.strip("_"))
async def test_a_broken_promise_is_noticed(
    break_it: Callable[[pytest.MonkeyPatch], None], guard: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one promise broken, the guard of that promise fails."""
    break_it(monkeypatch)
    with pytest.raises((AssertionError, CorruptLog)):
        await guard()
