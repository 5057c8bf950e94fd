"""History: what was told is read back from the records, within a window for subscribers and beyond it from log and lake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.unit.ledger.ledger_support import Names, TakeName, a_ledger, killed
from tests.unit.pipeline.lake_support import all_records, archive, empty_lake
from tidings.core.clock import Clock, datetime_of
from tidings.happenings.bus import Envelope
from tidings.happenings.errors import CursorTooOld
from tidings.happenings.happening import UnknownHappening
from tidings.happenings.variants import CustodyReleased
from tidings.ledger import Ledger, LedgerSettings, open_ledger
from tidings.ledger.retention import LedgerHolders
from tidings.ledger.snapshots import MemorySnapshots
from tidings.log.interface import Log, Query
from tidings.log.memory import MemoryLog
from tidings.log.retention import Needs, RetentionPlan, plan_retention
from tidings.log.settings import LogSettings, TopicRetention
from tidings.pipeline.serving import ArchivedLog, LakeArchive
from tidings.testing import VirtualClock


def note(n: int) -> CustodyReleased:
    """A happening."""
    return CustodyReleased(at_ms=n, plugin="org.example", handle_id=f"h{n}")


async def emit(ledger: Ledger, count: int) -> None:
    """Tell so many."""
    for n in range(count):
        await ledger.happenings.emit_durable(note(n))


def seqs(found: list[Envelope]) -> list[int]:
    """Their seqs."""
    return [each.seq for each in found]


async def test_history_is_read_from_any_seq_in_pages_of_any_size() -> None:
    """Records with none, one and many happenings, some split over several records, and seqs that are in no record: all are found."""
    async with a_ledger(record_bytes_max=1024) as ledger:
        receiver = ledger.happenings.subscribe()
        for n, times in enumerate((0, 1, 3, 0, 0, 40, 1, 0, 2)):
            await ledger.execute(TakeName(taken=f"n{n}", by="p", times=times))
            if n in (3, 7):
                ledger.happenings.emit(note(n))
                while (await receiver.recv()).happening != note(n):
                    pass
        everything = await ledger._history.read(0, 1000)
        assert len(everything) == 47
        assert everything[-1].seq == 49 == ledger.happenings.last_seq
        for since in range(51):
            for limit in (1, 2, 39, 100):
                found = await ledger._history.read(since, limit)
                expected = [each for each in everything if each.seq > since]
                assert found == expected[: len(found)]  # to the end of a record
                assert min(limit, len(expected)) <= len(found) <= limit + 40


async def test_reading_page_after_page_searches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first page of a replay looks for its place; the others go on where the one before ended."""
    log = MemoryLog()
    async with a_ledger(log) as ledger:
        await emit(ledger, 300)
        reads: list[Query] = []
        read = log.read

        async def noted(query: Query, **options: int) -> object:
            reads.append(query)
            return await read(query, **options)

        monkeypatch.setattr(log, "read", noted)
        since = 100
        while page := await ledger._history.read(since, 10):
            since = page[-1].seq

        assert since == 300
        assert len(reads) < 35


async def test_a_variant_that_is_not_declared_here_is_read_as_it_came() -> None:
    """History written by a process that knows more variants does not break this one."""
    async with a_ledger() as ledger:
        unknown = UnknownHappening("door_opened", {"at_ms": 5, "badge": None, "floors": [1, 2]})
        await ledger.happenings.emit_durable(note(1))
        await ledger.happenings.emit_durable(unknown)

        assert [each.happening for each in await ledger._history.read(0, 10)] == [note(1), unknown]


async def test_a_variant_that_was_declared_otherwise_is_read_as_it_came() -> None:
    """A field that another version wrote differently makes the happening one of an unknown kind, and no error."""
    async with a_ledger() as ledger:
        older = UnknownHappening("custody_released", {"at_ms": 5, "plugin": "p"})
        await ledger.happenings.emit_durable(older)

        assert [each.happening for each in await ledger._history.read(0, 10)] == [older]


@pytest.mark.req("H73")
async def test_history_is_kept_by_count() -> None:
    """The janitor leaves the last so many seqs, a cursor before them is told the oldest, and one right before them loses nothing."""
    clock = VirtualClock()
    async with a_ledger(clock=clock, history_count_max=10, history_age_s_max=None, janitor_interval_s=60) as ledger:
        await emit(ledger, 100)
        ledger.happenings.subscribe(since=0)

        await clock.advance(61)

        with pytest.raises(CursorTooOld) as caught:
            ledger.happenings.subscribe(since=89)
        assert (caught.value.oldest_available_seq, caught.value.current_seq) == (91, 100)
        subscription = ledger.happenings.subscribe(since=90)
        assert seqs([await subscription.recv() for _ in range(10)]) == list(range(91, 101))


@pytest.mark.req("H73")
@pytest.mark.req("H73")
@pytest.mark.parametrize("is_split", [False, True])
async def test_history_is_trimmed_by_whole_commands(is_split: bool) -> None:
    """A window that begins within a command begins before it, also if its happenings are in several records; the last one stays whole."""
    size = 1024 if is_split else 1 << 20
    async with a_ledger(history_count_max=10, history_age_s_max=None, record_bytes_max=size) as ledger:
        for number, times in enumerate((30, 30, 5)):
            await ledger.execute(TakeName(taken=f"n{number}", by="p", times=times))
        assert await ledger.trim_history() == 30
        await ledger.execute(TakeName(taken="n3", by="p", times=5))
        assert await ledger.trim_history() == 60
        await ledger.execute(TakeName(taken="last", by="p", times=100))
        assert await ledger.trim_history() == 70
        assert seqs(await ledger._history.read(70, 1000)) == list(range(71, 171))


async def test_history_is_kept_by_age() -> None:
    """What is older than the limit goes, whatever the count; an idle ledger keeps nothing in the end, and says so."""
    clock = VirtualClock()
    async with a_ledger(clock=clock, history_count_max=1000, history_age_s_max=1800) as ledger:
        await emit(ledger, 5)
        await clock.advance(1000)
        await emit(ledger, 5)
        await clock.advance(900)

        assert ledger.happenings.oldest_seq == 6
        with pytest.raises(CursorTooOld):
            ledger.happenings.subscribe(since=4)

        await clock.advance(1800)
        assert ledger.happenings.oldest_seq == 0
        with pytest.raises(CursorTooOld):
            ledger.happenings.subscribe(since=9)
        ledger.happenings.subscribe(since=10)


@pytest.mark.parametrize("read_count", [0, 1, 1500])
async def test_iterating_ends_when_the_ledger_closes_in_the_middle_of_history(read_count: int) -> None:
    """A reader that is still in history ends as one that is not: what it got has no gap, and its cursor goes on in the next ledger."""
    log = await log_with(3_000)
    received: list[int] = []
    async with await open_ledger(log, parts=[Names], settings=LedgerSettings(history_age_s_max=None)) as ledger:
        subscription = ledger.happenings.subscribe(since=0)
        while len(received) < read_count:
            received.append((await subscription.recv()).seq)
    await log.close()
    async for envelope in subscription:
        received.append(envelope.seq)  # noqa: PERF401 - it ends after any of them

    assert received == list(range(1, len(received) + 1))
    assert len(received) < 3_000


async def log_with(count: int) -> MemoryLog:
    """A log with so many happenings, whose ledger was closed."""
    log = MemoryLog()
    async with await open_ledger(log, parts=[Names], settings=LedgerSettings(history_age_s_max=None)) as ledger:
        await asyncio.gather(*(ledger.happenings.emit_durable(note(n)) for n in range(count)))
    return log


@pytest.mark.parametrize("jump_s", [56 * 365 * 86_400.0, -86_400.0, 3_600.0])
async def test_setting_the_clock_does_not_make_history_older(jump_s: float) -> None:
    """A box begins in 1970 and the time service sets its clock: history goes half an hour after it was stored, neither earlier nor later."""
    clock = VirtualClock(0)
    async with a_ledger(clock=clock, history_age_s_max=1800) as ledger:
        await emit(ledger, 50)
        clock.jump(jump_s)
        await emit(ledger, 5)
        await clock.advance(75)
        assert await ledger.trim_history() == 0
        ledger.happenings.subscribe(since=0).close()

        await clock.advance(1800 - 75)
        assert await ledger.trim_history() == 0
        await clock.advance(1800 / 200)
        assert await ledger.trim_history() == 55


@pytest.mark.parametrize("clock_s", [1000.0, 0.0, 86_400.0])
async def test_what_an_earlier_process_stored_ages_on(clock_s: float) -> None:
    """
    Opened after 1,000 s, the history goes after another 800 s. If the clock was behind, it goes after all of the age; if it shows a day later, at once.
    """
    clock = VirtualClock(86_400 * 10**9)
    log, snapshots = MemoryLog(clock=clock), MemorySnapshots()
    async with a_ledger(log, clock=clock, snapshots=snapshots, history_age_s_max=1800) as ledger:
        await emit(ledger, 5)
    clock.jump(clock_s if clock_s else -86_000)
    async with a_ledger(log, clock=clock, snapshots=snapshots, history_age_s_max=1800) as ledger:
        await emit(ledger, 5)
        left_s = max(0.0, 1800 - clock_s)
        if left_s:
            await clock.advance(left_s - 1)
            assert await ledger.trim_history() == 0
        await clock.advance(2)
        assert await ledger.trim_history() == (5 if clock_s else 10)


@pytest.mark.req("H74")
@pytest.mark.parametrize("is_killed", [False, True])
async def test_trimming_outlives_a_restart_and_never_moves_seqs_back(is_killed: bool) -> None:
    """After everything was trimmed and the ledger opened again, an old cursor is still refused, and seqs go on."""
    clock, snapshots = VirtualClock(), MemorySnapshots()
    log = MemoryLog(clock=clock)
    async with a_ledger(log, clock=clock, snapshots=snapshots, history_age_s_max=10) as ledger:
        await emit(ledger, 7)
        await clock.advance(100)
        assert ledger._history.trimmed_through == 7
        if is_killed:
            await killed(ledger)
    async with a_ledger(log, clock=clock, snapshots=snapshots, history_age_s_max=None) as ledger:
        with pytest.raises(CursorTooOld):
            ledger.happenings.subscribe(since=3)
        assert await ledger.happenings.emit_durable(note(1)) == 8
        assert await ledger.trim_history() == 7


class Nobody:
    """No groups and no dead letters."""

    async def needs(self) -> Needs:
        return Needs()

    @asynccontextmanager
    async def needs_of(self, topic: str) -> AsyncIterator[Needs]:
        yield Needs()


async def drop_all(log: Log, ledger: Ledger, clock: Clock) -> RetentionPlan:
    """Drop all that the log's retention may drop of the ledger's records."""
    holders = LedgerHolders(ledger, Nobody())
    plan = plan_retention(
        [segment for info in log.topics().values() for segment in info.segments],
        {"ledger": TopicRetention(consumed=True)},
        now=datetime_of(clock.now_ns()),
        needs=await holders.needs(),
    )
    return await log.drop(plan, holders)


async def test_retention_leaves_what_snapshots_and_history_need() -> None:
    """No record goes that not both snapshots cover, or that subscribers may still ask for; the ledger opens from what is left."""
    clock, snapshots = VirtualClock(), MemorySnapshots()
    log = MemoryLog(LogSettings(segment_lines_max=5), clock=clock)
    async with a_ledger(log, clock=clock, snapshots=snapshots, history_count_max=10) as ledger:
        for n in range(30):
            await ledger.execute(TakeName(taken=f"n{n}", by="p"))
        await ledger.trim_history()
        assert not (await drop_all(log, ledger, clock)).drops
        await ledger.take_snapshot()
        assert not (await drop_all(log, ledger, clock)).drops, "one snapshot might turn out to be damaged"
        for n in range(30, 40):
            await ledger.execute(TakeName(taken=f"n{n}", by="p"))
        await ledger.take_snapshot()
        await drop_all(log, ledger, clock)
        assert log.topics()["ledger"].first_offset == 20, "seqs from 21 on are kept, of which 20 records lie before"
        found = await ledger._history.read(20, 100)
        assert seqs(found) == list(range(21, 41))
        await ledger.trim_history()
        await drop_all(log, ledger, clock)
        assert log.topics()["ledger"].first_offset == 30, "the older snapshot covers 32 records"
    async with a_ledger(log, clock=clock, snapshots=snapshots) as ledger:
        assert await ledger.execute(TakeName(taken="one more", by="p")) == 41
    assert Needs().why_kept(log.topics()["ledger"].segments[0]) == "all records of this topic count"


@pytest.mark.req("H75")
async def test_history_beyond_retention_comes_from_the_lake(tmp_path: Path) -> None:
    """What subscribers can no longer have, and the log has dropped, ``history`` reads from the lake; without one it names the oldest there is."""
    clock, snapshots = VirtualClock(), MemorySnapshots()
    log = MemoryLog(LogSettings(segment_lines_max=5), clock=clock, epoch="e1")
    async with a_ledger(log, clock=clock, snapshots=snapshots, history_count_max=10) as ledger:
        for n in range(40):
            await ledger.execute(TakeName(taken=f"n{n}", by="p", times=2))
        everything = [each async for each in ledger.happenings.history()]
        assert seqs(everything) == list(range(1, 81))
        lake = empty_lake(tmp_path, clock)
        archive(lake, await all_records(log), epoch="e1", batch=1)
        await ledger.trim_history()
        await ledger.take_snapshot()
        await ledger.execute(TakeName(taken="x", by="p", times=0))
        await ledger.take_snapshot()
        await drop_all(log, ledger, clock)
        with pytest.raises(CursorTooOld) as caught:
            [each async for each in ledger.happenings.history()]
        assert caught.value.oldest_available_seq == 69
        recent = [each async for each in ledger.happenings.history(since=68)]
        assert recent == everything[68:]
    archived = ArchivedLog(log, LakeArchive(lake))
    async with a_ledger(archived, clock=clock, snapshots=snapshots) as ledger:
        assert [each async for each in ledger.happenings.history()] == everything
        assert [each async for each in ledger.happenings.history(since=33, until=71)] == everything[33:71]
        with pytest.raises(CursorTooOld):
            ledger.happenings.subscribe(since=33)
