"""Writes and syncs that fail: the log stops at once and says so, and reopening brings back all that it promised."""

from __future__ import annotations

import asyncio
import errno
from typing import Final, Literal

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
    open_and_check,
    open_simulated,
    recover_and_check,
    settled,
)
from tidings.log import Log, LogSettings, Query
from tidings.log.embedded.index import MemoryIndex
from tidings.log.errors import LogError, LogFenced, StorageFull, WorkspaceUnusable
from tidings.testing import SimulatedCrash, SimulatedDisk

_EVERY_TH: Final = 3


async def _append_and_drop(log: Log, book: Book) -> None:
    for _ in range(20):
        await book.append_many(log, [book.event("alpha", event_id=f"e{len(book.offered)}")])
        await book.append_many(log, [book.event("beta", pad=BIG), book.event("beta")])
        await book.drop_sealed(log, "alpha", keep_ids=True)


async def _fenced_by(disk: SimulatedDisk, book: Book, op: Literal["write", "sync", "rename"], part: str) -> None:
    """Work on a disk that fails at one place until the log notices, and let it go."""
    log = await open_simulated(disk, settings=ROOMY)
    await book.append_many(log, [book.event("alpha", event_id=f"before-{n}", partitions=("p",)) for n in range(3)])
    await settled(log)
    disk.fail_next(op, errno.EIO, path_contains=part)
    try:
        with pytest.raises(LogFenced) as caught:
            await _append_and_drop(log, book)
        assert caught.value.retryable
        assert caught.value.hint
        with pytest.raises(LogFenced):
            await log.append(book.event("alpha"))
        with pytest.raises(LogFenced):
            await log.append_many([book.event("alpha")])
        health = log.health()
        assert not health.is_writable
        assert not health.is_storage_full
        assert health.problem is not None
        assert "Input/output error" in health.problem
        assert (await log.read(Query(topic="beta"))).records is not None, "reading goes on"
    finally:
        await log.close()


@pytest.mark.crash
@pytest.mark.req("F32", "F71", "S25")
@pytest.mark.parametrize(
    ("op", "part"),
    [
        ("write", "/journal/"),
        ("sync", "/journal/"),
        ("write", "/wal/"),
        ("sync", "/wal/"),
        ("write", "/seals/"),
        ("sync", "/seals/"),
        ("write", "checkpoint"),
        ("sync", "checkpoint"),
        ("rename", "checkpoint"),
        ("write", "/ids/"),
    ],
)
async def test_a_failed_write_or_sync_fences_the_log(op: Literal["write", "sync", "rename"], part: str) -> None:
    """After the first error nothing is accepted, health says why, and reopening finds everything acknowledged."""
    disk, book = SimulatedDisk(), Book()
    await _fenced_by(disk, book, op, part)
    await recover_and_check(disk, book, MemoryIndex(), ROOMY)


@pytest.mark.crash
@pytest.mark.parametrize("part", ["/journal/", "/wal/", "/seals/"])
async def test_what_a_failed_sync_forgot_is_written_again(part: str) -> None:
    """Pages that a failed sync dropped look right until the power goes; recovery does not rely on them."""
    disk, book = SimulatedDisk(), Book()
    await _fenced_by(disk, book, "sync", part)
    log = await open_simulated(disk, settings=ROOMY)
    await check(log, book)
    cut = disk.after_crash("lose_all")
    await log.close()
    await open_and_check(cut, book, settings=ROOMY)


@pytest.mark.crash
@pytest.mark.parametrize("part", ["/wal/", "/seals/"])
async def test_a_sync_that_finds_no_room_is_not_tried_again(part: str) -> None:
    """Out of room or not, a failed sync has lost pages: it fences, it is not taken for a full disk that gets better."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=ROOMY)
    disk.fail_next("sync", errno.ENOSPC, path_contains=part)
    with pytest.raises(LogFenced):
        await keep_appending(log, book)
    await log.close()
    await recover_and_check(disk, book, MemoryIndex(), ROOMY)


async def test_all_who_wait_are_told_when_a_sync_fails() -> None:
    """Every publisher of a commit that failed hears of it, and may send the event again after reopening."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk)
    disk.fail_next("sync", errno.EIO, path_contains="/journal/")
    events = [book.event("alpha", event_id=f"e{n}") for n in range(5)]
    answers = await asyncio.gather(*(log.append(event) for event in events), return_exceptions=True)
    await log.close()

    assert [type(answer) for answer in answers] == [LogFenced] * 5
    log = await open_simulated(disk)
    await book.append_many(log, events)
    await check(log, book)
    await log.close()


class _FaultyWorkload(Workload):
    """The usual workload on a disk whose n-th call fails, which ends at that."""

    error: BaseException | None = None

    async def run(self) -> bool:
        try:
            await self._first_life()
            await self._second_life()
        except (LogError, OSError) as error:
            self.error = error
            return False
        finally:
            await let_go(self.log)
        return True


async def _fail_everywhere(number: int, settings: LogSettings, every: int) -> int:
    """Let every n-th disk call fail in turn with one error; how many places there were."""
    clean = Workload(SimulatedDisk(), settings)
    await clean.run()
    failed = 0
    for call in clean.disk.trace[::every]:
        disk = FailingDisk(call.number, number)
        workload = _FaultyWorkload(disk, settings)
        ended = await workload.run()
        try:
            assert ended or isinstance(workload.error, LogError), f"an untyped error: {workload.error!r}"
            await recover_and_check(disk, workload.book, MemoryIndex(), settings)
        except Exception as error:
            error.add_note(f"call {call} failed")
            raise
        failed += not ended
    return failed


class FailingDisk(SimulatedDisk):
    """A disk one of whose calls fails."""

    def __init__(self, call: int, number: int) -> None:
        super().__init__(call)
        self._failing_call = call
        self._number = number

    def _raise_fault(self, op, path, also=None):  # type: ignore[no-untyped-def]
        if self.calls == self._failing_call and op not in ("open", "read"):
            self._failing_call = 0
            raise OSError(self._number, "the disk says no", str(path))
        super()._raise_fault(op, path, also)


@pytest.mark.crash
@pytest.mark.parametrize("settings", [TIGHT, ROOMY], ids=["turning journal", "roomy journal"])
async def test_any_disk_call_may_fail(settings: LogSettings) -> None:
    """Whichever call fails, the error is typed and nothing acknowledged is lost."""
    assert await _fail_everywhere(errno.EIO, settings, _EVERY_TH) > 10


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", [TIGHT, ROOMY], ids=["turning journal", "roomy journal"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
async def test_any_disk_call_may_fail_in_any_way(number: int, settings: LogSettings) -> None:
    """The same, for every single call."""
    assert await _fail_everywhere(number, settings, 1) > 10


async def test_a_read_only_workspace_is_named() -> None:
    """A workspace that may not be written is refused with its path and what to do."""
    disk = SimulatedDisk()
    await (await open_simulated(disk)).close()
    disk.fail_next("lock", errno.EACCES)
    with pytest.raises(WorkspaceUnusable) as caught:
        await open_simulated(disk)

    assert str(WORKSPACE) in str(caught.value)
    assert caught.value.hint
    disk.fail_next("write", errno.EROFS, path_contains="checkpoint")
    with pytest.raises(WorkspaceUnusable):
        await open_simulated(disk)
    await (await open_simulated(disk)).close()


async def test_an_error_while_opening_lets_go_of_the_workspace() -> None:
    """Whatever goes wrong while opening, the next try is not told that the workspace is busy."""
    disk = SimulatedDisk()
    for op in ("make_folder", "write", "sync", "sync_folder", "rename"):
        disk.fail_next(op, errno.EIO)
        with pytest.raises(WorkspaceUnusable):
            await open_simulated(disk)
    disk.fail_next("write", errno.ENOSPC)
    with pytest.raises(StorageFull):
        await open_simulated(disk)
    await (await open_simulated(disk)).close()


async def test_a_fenced_log_can_be_closed_twice_and_refuses_to_drop() -> None:
    """Nothing hangs on a fenced log: dropping is refused, closing works, also again."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk, settings=ROOMY)
    await book.append_many(log, [book.event("alpha") for _ in range(9)])
    await settled(log)
    disk.fail_next("sync", errno.EIO, path_contains="/journal/")
    with pytest.raises(LogFenced):
        await log.append(book.event("alpha"))
    with pytest.raises(LogFenced):
        await book.drop_sealed(log, "alpha", keep_ids=False)
    book.perhaps_dropped.clear()
    book.forgotten.clear()
    await log.close()
    await log.close()
    await recover_and_check(disk, book, MemoryIndex(), ROOMY)


async def test_a_machine_that_stops_tells_nobody_anything() -> None:
    """Publishers of a commit that the machine stopped in get no acknowledgement."""
    disk, book = SimulatedDisk(), Book()
    log = await open_simulated(disk)
    disk.crash_after = disk.calls + 1
    with pytest.raises((LogFenced, SimulatedCrash)):
        await book.append(log, book.event("alpha"))
    await let_go(log)
    assert not book.acknowledged
    log = await open_simulated(disk.after_crash("lose_all"))
    assert log.position.seq == 0
    await check_goes_on(log, book)
    await log.close()
