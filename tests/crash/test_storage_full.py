"""A disk without room: events are refused with a typed error, nothing is lost, and room is noticed without reopening."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import pytest

from tests.crash.support import (
    BIG,
    ROOMY,
    TIGHT,
    WORKSPACE,
    Book,
    Workload,
    check,
    check_goes_on,
    keep_appending,
    let_go,
    open_simulated,
    recover_and_check,
    settled,
)
from tidings.core.events import Event
from tidings.log import Appended, Log, LogSettings
from tidings.log.embedded import EmbeddedLog
from tidings.log.embedded.index import MemoryIndex
from tidings.log.errors import StorageFull
from tidings.testing import SimulatedDisk

KEPT = msgspec.structs.replace(TIGHT, reserve_bytes=128_000)
"""A reserve for batches that are far larger than a journal file."""


class _FillingDisk(SimulatedDisk):
    """Full from one call on, until somebody makes room."""

    def __init__(self, full_at: int) -> None:
        super().__init__(full_at)
        self._full_at = full_at

    def _raise_fault(self, op, path, also=None):  # type: ignore[no-untyped-def]
        if self.calls >= self._full_at > 0 and op == "write":
            self._full_at = 0
            self.capacity_bytes = self.used_bytes
        super()._raise_fault(op, path, also)


class _RefusingDisk(SimulatedDisk):
    """One write finds no room, wherever it goes: also within a file that has its blocks already."""

    def __init__(self, refused_at: int) -> None:
        super().__init__(refused_at)
        self._refused_at = refused_at

    def _raise_fault(self, op, path, also=None):  # type: ignore[no-untyped-def]
        if self.calls >= self._refused_at > 0 and op == "write":
            self._refused_at = 0
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super()._raise_fault(op, path, also)


class _PatientBook(Book):
    """Makes room when there is none, and tries again."""

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__()
        self.disk = disk
        self.refusals: list[StorageFull] = []

    async def until_there_is_room(self, act: Callable[[], Awaitable[None]]) -> None:
        for _ in range(100):
            try:
                return await act()
            except StorageFull as error:
                self.refusals.append(error)
                self.disk.capacity_bytes = None
                for _ in range(10):
                    await asyncio.sleep(0)
        raise AssertionError("there was room, and the log did not notice")

    async def append(self, log: Log, event: Event) -> None:
        await self.until_there_is_room(lambda: super(_PatientBook, self).append(log, event))

    async def append_many(self, log: Log, events: Sequence[Event]) -> None:
        await self.until_there_is_room(lambda: super(_PatientBook, self).append_many(log, events))

    async def drop_sealed(self, log: Log, topic: str, *, keep_ids: bool) -> None:
        async def drop() -> None:
            await super(_PatientBook, self).drop_sealed(log, topic, keep_ids=keep_ids)

        await self.until_there_is_room(drop)


class _PatientWorkload(Workload):
    def __init__(self, disk: SimulatedDisk, settings: LogSettings) -> None:
        super().__init__(disk, settings)
        self.patient = _PatientBook(disk)
        self.book = self.patient

    async def run(self) -> bool:
        try:
            await self._first_life()
            await self._second_life()
        finally:
            await let_go(self.log)
        return True

    async def _open(self) -> EmbeddedLog:
        async def open_once() -> None:
            await super(_PatientWorkload, self)._open()

        await self.patient.until_there_is_room(open_once)
        assert self.log is not None
        return self.log


async def _append_each(log: Log, book: Book, events: Sequence[Event]) -> None:
    for event in events:
        await book.append(log, event)


async def _fill_everywhere(make: Callable[[int], SimulatedDisk], settings: LogSettings, every: int) -> int:
    """Run out of room at every n-th write in turn; how often somebody was refused."""
    clean = Workload(SimulatedDisk(), settings)
    await clean.run()
    refusals = 0
    for call in [call for call in clean.disk.trace if call.op == "write"][::every]:
        disk = make(call.number)
        workload = _PatientWorkload(disk, settings)
        try:
            await workload.run()
            assert len(workload.book.acknowledged) == len(workload.book.offered)
            disk.capacity_bytes = None
            await recover_and_check(disk, workload.book, MemoryIndex(), settings)
        except Exception as error:
            error.add_note(f"no room at call {call}")
            raise
        assert all(error.path.startswith(str(WORKSPACE)) for error in workload.patient.refusals)
        refusals += len(workload.patient.refusals)
    return refusals


_SETTINGS = pytest.mark.parametrize("settings", [TIGHT, ROOMY], ids=["turning journal", "roomy journal"])
_DISKS = pytest.mark.parametrize("make", [_FillingDisk, _RefusingDisk], ids=["full", "one write refused"])


@pytest.mark.crash
@pytest.mark.req("F72")
@_SETTINGS
@_DISKS
async def test_room_may_run_out_anywhere(make: Callable[[int], SimulatedDisk], settings: LogSettings) -> None:
    """Wherever the disk is full, publishers are told, everything told as stored is, and room is noticed."""
    assert await _fill_everywhere(make, settings, 3) > 3


@pytest.mark.heavy
@pytest.mark.timeout(900)
@_SETTINGS
@_DISKS
async def test_room_may_run_out_at_any_write(make: Callable[[int], SimulatedDisk], settings: LogSettings) -> None:
    """The same, for every single write."""
    assert await _fill_everywhere(make, settings, 1) > 10


@pytest.mark.req("F72")
async def test_health_says_when_storage_is_full_and_when_it_is_not() -> None:
    """Health shows the full disk, refuses meanwhile, and goes back to normal by itself; the ids made are never reused."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=TIGHT)
    await book.append(log, book.event("alpha"))
    await settled(log)
    disk.capacity_bytes = disk.used_bytes
    refused = [book.event("alpha", pad=BIG) for _ in range(8)]
    with pytest.raises(StorageFull) as caught:
        await _append_each(log, book, refused)
    assert caught.value.code == "log.storage_full"
    assert caught.value.hint
    health = log.health()
    assert (health.is_writable, health.is_storage_full) == (False, True)
    assert "no space left" in (health.problem or "")
    with pytest.raises(StorageFull):
        await log.append(book.event("beta"))
    await check(log, book)

    disk.capacity_bytes = None
    async with asyncio.timeout(20):
        while log.health().is_storage_full:  # noqa: ASYNC110 - it tries again by itself, in real time
            await asyncio.sleep(0.01)
    health = log.health()
    assert (health.is_writable, health.is_storage_full, health.problem) == (True, False, None)
    await book.append_many(log, refused)
    await check_goes_on(log, book)
    await log.close()
    await recover_and_check(disk, book, MemoryIndex(), TIGHT)


@pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "killed"])
async def test_a_log_on_a_full_disk_opens_and_goes_on_when_there_is_room(is_killed: bool) -> None:
    """With no byte free the log opens: all is there to be read, events are refused, and accepted again when there is room."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=KEPT)
    await book.append_many(log, [book.event("alpha", pad=BIG) for _ in range(7)])
    if is_killed:
        await _fill(disk, log, book, "alpha")
        copy = disk.clone()
        await log.close()
        disk = copy
    else:
        await log.close()
    disk.capacity_bytes = disk.used_bytes

    log = await open_simulated(disk, settings=KEPT)
    assert not log.health().is_writable
    assert log.health().is_storage_full
    with pytest.raises(StorageFull):
        await log.append(book.event("beta"))
    await check(log, book)

    disk.capacity_bytes = None
    await _writable(log)
    await check_goes_on(log, book)
    await log.close()
    await recover_and_check(disk, book, MemoryIndex(), KEPT)


async def test_a_log_opened_on_a_full_disk_again_and_again_uses_nothing_up() -> None:
    """Opening and closing on a full disk works any number of times."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=KEPT)
    await book.append_many(log, [book.event("alpha", pad=BIG) for _ in range(7)])
    await log.close()
    disk.capacity_bytes = disk.used_bytes
    for _ in range(20):
        log = await open_simulated(disk, settings=KEPT)
        await check(log, book)
        await log.close()


async def _fill(disk: SimulatedDisk, log: Log, book: Book, topic: str) -> None:
    """Append until there is no room for more. The log may find some of its own, in journal files that it has no need of."""
    for _ in range(5):
        disk.capacity_bytes = disk.used_bytes
        with contextlib.suppress(StorageFull):
            await keep_appending(log, book, topic)
        if log.health().is_storage_full:
            return
    raise AssertionError("there was always room")


async def _writable(log: Log) -> None:
    async with asyncio.timeout(20):
        while not log.health().is_writable:  # noqa: ASYNC110 - it tries again by itself, in real time
            await asyncio.sleep(0.01)


async def test_closing_a_full_log_leaves_everything_for_recovery() -> None:
    """A log closed while there is no room keeps its journal, and the next opening finds everything."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=ROOMY)
    await book.append_many(log, [book.event("alpha") for _ in range(3)])
    await settled(log)
    await _fill(disk, log, book, "beta")
    await log.close()
    disk.capacity_bytes = None
    await recover_and_check(disk, book, MemoryIndex(), ROOMY)


@pytest.mark.parametrize("keep_ids", [False, True])
@pytest.mark.parametrize("is_reopened", [False, True])
async def test_dropping_makes_room_on_a_disk_without_a_free_byte(keep_ids: bool, is_reopened: bool) -> None:
    """Retention needs nothing but what was kept back for it, and what it frees is used without reopening."""
    disk, book = SimulatedDisk(), Book()
    settings = msgspec.structs.replace(ROOMY, reserve_bytes=KEPT.reserve_bytes)
    log = await open_simulated(disk, settings=settings)
    await book.append_many(log, [book.event("alpha", pad=BIG) for _ in range(40)])
    await settled(log)
    await _fill(disk, log, book, "beta")
    if is_reopened:
        await log.close()
        disk.capacity_bytes = disk.used_bytes
        log = await open_simulated(disk, settings=settings)
    await check(log, book)
    await book.drop_sealed(log, "alpha", keep_ids=keep_ids)
    assert book.dropped
    if is_reopened:
        # The closed log gave its journal to the one who filled the disk.
        disk.capacity_bytes = (disk.capacity_bytes or 0) + settings.journal_bytes
    await _writable(log)
    await book.append(log, book.event("beta"))
    await check(log, book)
    await log.close()


async def test_records_that_retention_needs_are_stored_on_a_full_disk() -> None:
    """Where events are refused, a record that may use the reserve is stored, durably, also by a log that has no journal file."""
    disk, book = SimulatedDisk(), Book()
    settings = msgspec.structs.replace(ROOMY, reserve_bytes=KEPT.reserve_bytes)
    log = await open_simulated(disk, settings=settings)
    await book.append_many(log, [book.event("alpha", pad=BIG) for _ in range(9)])
    await log.close()
    disk.capacity_bytes = disk.used_bytes
    log = await open_simulated(disk, settings=settings)
    for _ in range(2):
        event = book.event("audit")
        with pytest.raises(StorageFull):
            await log.append(event)
        verdict = await log.append(event, from_reserve=True)
        assert isinstance(verdict, Appended)
        book.note(event, verdict)
    await check(log, book)
    copy = disk.clone().after_crash("lose_all")
    await log.close()
    log = await open_simulated(copy, settings=settings)
    await check(log, book)
    await log.close()
