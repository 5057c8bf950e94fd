"""Waiting for a commit: who is cancelled goes, the others get their verdicts; and a slow disk bounds who may wait."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from tests.conformance.support import SECONDS_MAX, event, read_all
from tidings.core.errors import TidingsError
from tidings.core.events import Event
from tidings.log import Appended, Duplicate, LogSettings, Query
from tidings.log.embedded import EmbeddedLog, open_log
from tidings.log.embedded.disk import InlineSerialExecutor, OsThreads, ThreadSerialExecutor
from tidings.log.embedded.index import MemoryIndex
from tidings.log.errors import LogClosed
from tidings.testing import SimulatedDisk

_KIB: Final = 1024
SETTINGS: Final = LogSettings(journal_bytes=256 * _KIB, staged_bytes_max=1024 * _KIB, batch_bytes_max=64 * _KIB)


class NotAllowed(TidingsError):
    """The right is gone."""


class GatedDisk(SimulatedDisk):
    """A disk on which, while the gate is closed, no journal gets synced: as slow as a disk can be."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = OsThreads()
        self.gate = threading.Event()
        self.gate.set()
        self.is_waited_at = threading.Event()

    def _raise_fault(self, op, path, also=None):  # type: ignore[no-untyped-def]
        super()._raise_fault(op, path, also)
        if op == "sync" and path.parent.name == "journal" and not self.gate.is_set():
            self._mutex.release()  # reading goes on meanwhile
            try:
                self.is_waited_at.set()
                assert self.gate.wait(SECONDS_MAX)
            finally:
                self._mutex.acquire()


@pytest.fixture
def disk() -> GatedDisk:
    """A disk with its gate open."""
    return GatedDisk()


@pytest.fixture
async def log(disk: GatedDisk) -> AsyncIterator[EmbeddedLog]:
    """A log on that disk, with its threads."""
    log = await open_log(Path("/ws"), SETTINGS, disk=disk, index=MemoryIndex())
    yield log
    disk.gate.set()
    await log.close()


async def _all_wait(disk: GatedDisk, events: list[Event], log: EmbeddedLog) -> list[asyncio.Task[Appended | Duplicate]]:
    """Publish events, one task each, and return when their commit hangs at the disk."""
    disk.gate.clear()
    disk.is_waited_at.clear()
    tasks = [asyncio.create_task(log.append(each)) for each in events]
    assert await asyncio.to_thread(disk.is_waited_at.wait, SECONDS_MAX)
    await asyncio.sleep(0)
    return tasks


async def test_cancelling_some_leaves_the_others_their_verdicts(disk: GatedDisk, log: EmbeddedLog) -> None:
    """Of publishers that wait for one commit some give up: the others are answered, and all events are stored."""
    events = [event("demo", {"n": n}) for n in range(6)]
    tasks = await _all_wait(disk, events, log)
    for n in (0, 3):
        tasks[n].cancel()
    await asyncio.sleep(0)
    tasks[5].cancel()
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, False, False, True, False, True]
    disk.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(answer) for answer in answers] == [
        asyncio.CancelledError if n in (0, 3, 5) else Appended for n in range(6)
    ]
    assert [record.payload["n"] for record in await read_all(log, Query())] == list(range(6))
    again = await log.append_many(events)
    assert again == [Duplicate(n + 1, n, each.meta.event_id) for n, each in enumerate(events)]


async def test_a_timeout_strikes_only_its_own(disk: GatedDisk, log: EmbeddedLog) -> None:
    """A publisher that waits no longer than it wants gets its timeout; the one beside it gets its verdict."""

    async def impatient() -> Appended | Duplicate:
        async with asyncio.timeout(0.01):
            return await log.append(event("demo", {"n": "impatient"}))

    patient, *_ = await _all_wait(disk, [event("demo", {"n": "patient"})], log)
    with pytest.raises(TimeoutError):
        await impatient()
    assert not patient.done()
    disk.gate.set()
    assert isinstance(await patient, Appended)


def _cancel(task: asyncio.Task[Appended | Duplicate], _: object) -> None:
    task.cancel()


async def test_cancelling_in_the_moment_of_the_verdict(disk: GatedDisk, log: EmbeddedLog) -> None:
    """A publisher cancelled in the very tick its commit is finished takes no other down with it."""
    for _ in range(30):
        tasks = [asyncio.create_task(log.append(event("demo"))) for _ in range(3)]
        tasks[0].add_done_callback(functools.partial(_cancel, tasks[1]))
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[0], Appended)
        assert isinstance(answers[2], Appended)
    assert await read_all(log, Query()) != []
    assert log.position.seq == 90


@pytest.mark.req("F19", "S4", "S25")
async def test_nothing_is_visible_before_it_is_durable(disk: GatedDisk, log: EmbeddedLog) -> None:
    """While the disk has not got a commit, no reader sees it, nobody is woken, and a duplicate of it waits as well."""
    original = event("demo", {"n": 1}, event_id="one")
    (task,) = await _all_wait(disk, [original], log)
    waiting = asyncio.create_task(log.wait(0))
    again = asyncio.create_task(log.append(original))
    many = asyncio.create_task(log.append_many([original, original]))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not any(each.done() for each in (task, waiting, again, many))
    assert log.position.seq == 0
    assert await read_all(log, Query()) == []
    disk.gate.set()
    assert await task == Appended(1, 0, "one")
    assert await waiting == 1
    assert await again == Duplicate(1, 0, "one")
    assert await many == [Duplicate(1, 0, "one")] * 2


@pytest.mark.req("F66")
async def test_a_slow_disk_makes_publishers_wait(disk: GatedDisk, log: EmbeddedLog) -> None:
    """However many publish while the disk hangs, no more is taken in than the setting allows; then all are stored."""
    size = 20_000
    events = [event("demo", {"n": n, "pad": "x" * size}) for n in range(300)]
    tasks = await _all_wait(disk, events, log)
    for _ in range(50):
        await asyncio.sleep(0)
    taken_in = sum(each.meta._event_id is not None for each in events)
    # Counted in batches, each of which the event that fills it may overfill; one more is at the disk.
    batches_max = SETTINGS.staged_bytes_max // SETTINGS.batch_bytes_max + 2
    assert taken_in * size <= batches_max * (SETTINGS.batch_bytes_max + size)
    assert taken_in * size >= SETTINGS.staged_bytes_max // 2
    disk.gate.set()
    answers = await asyncio.gather(*tasks)
    assert {answer.seq for answer in answers} == set(range(1, 301))
    assert sorted(record.payload["n"] for record in await read_all(log, Query())) == list(range(300))


async def test_closing_waits_for_what_was_accepted(disk: GatedDisk, log: EmbeddedLog) -> None:
    """Closing finishes the commits under way: their publishers are answered, later ones are refused."""
    tasks = await _all_wait(disk, [event("demo") for _ in range(3)], log)
    closing = asyncio.create_task(log.close())
    await asyncio.sleep(0)
    with pytest.raises(LogClosed):
        await log.append(event("demo"))
    disk.gate.set()
    assert [type(answer) for answer in await asyncio.gather(*tasks)] == [Appended] * 3
    await closing
    assert disk.names(Path("/ws/.bus/journal")) == [], "a clean closing leaves nothing to recover"


@pytest.mark.parametrize(
    "make", [InlineSerialExecutor, lambda loop: ThreadSerialExecutor(loop, "test")], ids=["inline", "thread"]
)
async def test_a_lane_reports_in_the_loop_what_became_of_a_job(make: type[InlineSerialExecutor]) -> None:
    """Jobs run one after another, and whatever they raise is handed over in the loop's thread."""
    lane = make(asyncio.get_running_loop())
    seen: list[tuple[BaseException | None, bool]] = []
    for outcome in (None, ValueError("no"), KeyboardInterrupt()):
        finished = asyncio.Event()

        def job(outcome: BaseException | None = outcome) -> None:
            if outcome is not None:
                raise outcome

        def done(error: BaseException | None, finished: asyncio.Event = finished) -> None:
            seen.append((error, threading.current_thread() is threading.main_thread()))
            finished.set()

        lane.run(job, done)
        async with asyncio.timeout(SECONDS_MAX):
            await finished.wait()
    lane.close()
    assert [type(error) for error, _ in seen] == [type(None), ValueError, KeyboardInterrupt]
    assert all(is_main for _, is_main in seen)


async def test_a_right_revoked_while_waiting_does_not_count(disk: GatedDisk, log: EmbeddedLog) -> None:
    """An event that had to wait for memory is authorised again before the log accepts it."""
    is_allowed = True

    def authorise(_event: Event) -> None:
        if not is_allowed:
            raise NotAllowed

    disk.gate.clear()
    tasks = [
        asyncio.create_task(log.append(event("a", {"pad": "x" * 70 * _KIB}), authorise=authorise)) for _ in range(40)
    ]
    await asyncio.to_thread(disk.is_waited_at.wait, SECONDS_MAX)
    is_allowed = False
    disk.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)

    stored = [answer for answer in answers if isinstance(answer, Appended)]
    assert 0 < len(stored) < len(answers)
    assert all(isinstance(answer, Appended | NotAllowed) for answer in answers)
    assert log.position.seq == len(stored)
