"""
What the crash tests share: a book of what was promised, a workload, and the check that the promises were kept.

Every event carries a number of its own, so that a record can be told from any other whatever its id. The book notes
an event when it is offered, again when it is acknowledged, and what retention was asked to drop. ``check`` compares a
log with the book: everything acknowledged is there exactly once, whole, at its place; what was not acknowledged is
whole or absent; nothing else is there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from tests.conformance.support import read_all
from tidings.core.events import Event, EventMeta
from tidings.log import Appended, Duplicate, Log, LogSettings, Query, Record, TopicRetention
from tidings.log.embedded import EmbeddedLog, open_log
from tidings.log.embedded.index import Index, MemoryIndex
from tidings.log.errors import LogError
from tidings.log.interface import Verdict
from tidings.log.retention import SegmentInfo, plan_retention
from tidings.testing import CRASH_MODES, CrashMode, SimulatedCrash, SimulatedDisk, VirtualClock

WORKSPACE: Final = Path("/data/site/workspace")
"""Not made beforehand: opening the log has to make it, and to make it last."""
BUS: Final = WORKSPACE / ".bus"
ROOMY: Final = LogSettings(journal_bytes=64 << 10, journal_count_max=2, segment_lines_max=4, recent_bytes_max=0)
"""Small segments, nothing kept in memory that the files could answer, and a checkpoint only where one is asked for."""
TIGHT: Final = msgspec.structs.replace(ROOMY, journal_bytes=6 << 10)
"""Also a journal that turns to its next file, and uses files again, all the time. (Users are held to a mebibyte.)"""
SPACES: Final = msgspec.structs.replace(ROOMY, layout="space", segment_lines_max=2)
"""A folder for each space."""
BIG: Final = "x" * 2000
TS: Final = datetime(2026, 1, 1, tzinfo=UTC)


Ending = CrashMode | Literal["killed"]
ENDINGS: Final[tuple[Ending, ...]] = (*CRASH_MODES, "killed")
"""How a life of the log ends: the power goes, in one of the disk's ways, or only the process does."""


class Book:
    """What was offered, what was promised, and what may be gone."""

    def __init__(self) -> None:
        self.offered: dict[int, Event] = {}
        self.acknowledged: dict[int, Appended] = {}
        self.perhaps_dropped: set[int] = set()
        self.dropped: set[int] = set()
        self.forgotten: set[int] = set()
        """Dropped, or perhaps so, with their ids."""
        self.before_going_on: frozenset[int] = frozenset()
        """What was acknowledged when ``check_goes_on`` was last called."""
        self.index_floor = 0
        """A stale index knows at least this much: dropping enters tombstones durably, and all before them."""

    def event(self, topic: str = "alpha", *, pad: str = "", **meta: Any) -> Event:
        """A new event that no other equals."""
        number = len(self.offered)
        space_id = ("shared:home", "person:ana")[number % 2]
        envelope: dict[str, Any] = {"topic": topic, "type": "NOTED", "space_id": space_id, "ts": TS} | meta
        event = Event(EventMeta(**envelope), {"n": number, "pad": pad})
        self.offered[number] = event
        return event

    def note(self, event: Event, verdict: Verdict) -> None:
        """The log has answered."""
        number = event.payload["n"]
        assert isinstance(verdict, Appended | Duplicate), verdict
        place = Appended(verdict.seq, verdict.offset, verdict.event_id)
        assert place.event_id == event.meta.event_id
        known = self.acknowledged.setdefault(number, place)
        assert known == place, f"event {number} was promised {known}, and now {place}"

    async def append(self, log: Log, event: Event) -> None:
        """Append one event and note the answer."""
        self.note(event, await log.append(event))

    async def append_many(self, log: Log, events: Sequence[Event]) -> None:
        """Append events together and note the answers."""
        for event, verdict in zip(events, await log.append_many(events), strict=True):
            self.note(event, verdict)

    async def drop_sealed(self, log: Log, topic: str, *, keep_ids: bool) -> None:
        """Drop all sealed segments of a topic."""
        await settled(log)
        segments = log.topics()[topic].segments
        rule = {topic: TopicRetention(size_bytes_max=0, keep_ids=keep_ids)}
        floors = {name: log.position.seq for segment in segments for name in segment.partitions}
        plan = plan_retention(segments, rule, now=TS, partition_floors=floors)
        dropping = [decision.segment for decision in plan.drops]
        numbers = {
            number
            for number, place in self.acknowledged.items()
            if any(_is_in(segment, self.offered[number].meta, place) for segment in dropping)
        }
        self.perhaps_dropped |= numbers
        if not all(decision.keep_ids for decision in plan.drops):
            self.forgotten |= numbers
        self.index_floor = log.position.seq
        await log.drop(plan)
        self.dropped |= numbers


def _is_in(segment: SegmentInfo, meta: EventMeta, place: Appended) -> bool:
    is_its_stream = segment.topic == meta.topic and segment.space_id in (None, meta.space_id)
    return is_its_stream and segment.first_offset <= place.offset <= segment.last_offset


async def settled(log: Log) -> None:
    """Wait until of every topic (of every space's part of it) only the last segment is open."""
    for _ in range(1000):
        segments = [segment for topic in log.topics().values() for segment in topic.segments]
        last = {(segment.topic, segment.space_id): segment.number for segment in segments}
        if all(segment.digest or segment.number == last[segment.topic, segment.space_id] for segment in segments):
            return
        if not log.health().is_writable:
            return
        await asyncio.sleep(0)
    raise AssertionError("the segment_writer never came to rest")


async def open_simulated(
    disk: SimulatedDisk, index: Index | None = None, settings: LogSettings = TIGHT, **more: Any
) -> EmbeddedLog:
    """Open the workspace on a simulated disk."""
    return await open_log(WORKSPACE, settings, disk=disk, index=index or MemoryIndex(), clock=VirtualClock(), **more)


async def keep_appending(log: Log, book: Book, topic: str = "alpha") -> None:
    """Append one by one, each settled before the next, until the log refuses; or for long enough that it should have."""
    for _ in range(20):
        await book.append(log, book.event(topic))
        await settled(log)


async def let_go(log: Log | None) -> None:
    """Close a log whose machine or disk may be gone."""
    if log is not None:
        with contextlib.suppress(SimulatedCrash, LogError, OSError):
            await log.close()


class Workload:
    """A day in the life of a log, in few disk calls: everything that has a crash window happens in it."""

    def __init__(self, disk: SimulatedDisk, settings: LogSettings = TIGHT) -> None:
        self.disk = disk
        self.settings = settings
        self.book = Book()
        self.index = MemoryIndex()
        self.log: EmbeddedLog | None = None

    async def run(self) -> bool:
        """Run to the end, or to the crash; whether the end was reached."""
        try:
            await self._first_life()
            await self._second_life()
        except (SimulatedCrash, LogError):
            assert self.disk.is_crashed
        finally:
            # A process that stops does not close; but what it holds must not outlive the test.
            await self._abandon()
        return not self.disk.is_crashed

    async def _abandon(self) -> None:
        if self.log is not None:
            self.disk.crash_after = self.disk.crash_after if self.disk.is_crashed else self.disk.calls
            await let_go(self.log)
            self.log = None

    async def _open(self) -> EmbeddedLog:
        self.log = await open_simulated(self.disk, self.index, self.settings)
        return self.log

    async def _first_life(self) -> None:
        log, book = await self._open(), self.book
        await book.append(log, book.event("alpha"))
        await book.append(log, book.event("beta", event_id="own-1", partitions=("p", "q")))
        named = [book.event("alpha", event_id=f"many-{n}", partitions=("p",)) for n in range(3)]
        await book.append_many(log, [*named, book.event("beta"), book.event("beta", idem_key="key-1")])
        await book.append_many(log, [named[0], *(book.event("alpha") for _ in range(4))])
        await asyncio.gather(*(book.append(log, book.event("beta", event_id=f"each-{n}")) for n in range(4)))
        await book.drop_sealed(log, "alpha", keep_ids=False)
        for n in range(3):
            await book.append(log, book.event("gamma", pad=BIG, event_id=f"big-{n}"))
        await book.drop_sealed(log, "beta", keep_ids=True)
        await book.append_many(log, [book.event(topic) for topic in ("alpha", "beta", "gamma", "alpha")])
        self.index = self.index.snapshot()
        await log.close()
        self.log = None

    async def _second_life(self) -> None:
        log, book = await self._open(), self.book
        await book.append_many(log, [book.event("alpha", event_id=f"late-{n}", partitions=("q",)) for n in range(3)])
        await book.append(log, book.event("beta"))
        await book.append(log, next(event for event in book.offered.values() if event.meta._event_id == "own-1"))
        await book.append_many(log, [book.event("gamma", pad=BIG) for _ in range(3)])
        await book.append_many(log, [book.event(topic) for topic in ("alpha", "beta", "gamma")])


async def run_until(calls: int | None, *, within: bool = False, settings: LogSettings = TIGHT) -> Workload:
    """The workload on a machine that stops after so many disk calls."""
    workload = Workload(SimulatedDisk(calls or 0, crash_after=calls, crash_within=within), settings)
    await workload.run()
    return workload


def disk_after(disk: SimulatedDisk, ending: Ending, seed: int | None = None) -> SimulatedDisk:
    """The disk as the next life finds it."""
    if ending != "killed":
        return disk.after_crash(ending, seed=seed)
    left = disk.clone()  # the machine runs on, and with it all that was written and not synced
    left.crash_after = None
    return left


def index_after(workload: Workload, kind: int) -> MemoryIndex:
    """What may be left of the index: all of it, some of it, nothing."""
    index, floor = workload.index, workload.book.index_floor
    match kind % 3:
        case 0:
            return index.snapshot()
        case 1:
            return index.stale_copy((floor + index.snapshot().covers) // 2)
        case _:
            return MemoryIndex()


async def recover_and_check(disk: SimulatedDisk, book: Book, index: MemoryIndex, settings: LogSettings) -> None:
    """
    The next life holds everything promised and goes on; and so does one after a power cut right then.

    The second cut loses whatever recovery only seemed to have brought to the disk.
    """
    log = await open_simulated(disk, index, settings)
    try:
        await check(log, book)
        cut = disk.after_crash("lose_all")
        await check_goes_on(log, book)
    finally:
        await log.close()
    log = await open_simulated(disk, None, settings)
    try:
        await check(log, book)
    finally:
        await log.close()
    await open_and_check(cut, _without_new(book), None, settings)


async def open_and_check(
    disk: SimulatedDisk, book: Book, index: MemoryIndex | None = None, settings: LogSettings = TIGHT
) -> None:
    """Open, check, close."""
    log = await open_simulated(disk, index, settings)
    try:
        await check(log, book)
    finally:
        await log.close()


def _without_new(book: Book) -> Book:
    """The book, but for the promises made since: what it says of other events still holds."""
    earlier = Book()
    earlier.offered = book.offered
    earlier.acknowledged = {
        number: place for number, place in book.acknowledged.items() if number in book.before_going_on
    }
    earlier.perhaps_dropped, earlier.dropped = book.perhaps_dropped, book.dropped
    return earlier


def number_of(record: Record) -> int:
    """Which of the book's events a record is."""
    number = record.payload["n"]
    assert isinstance(number, int)
    return number


async def check(log: Log, book: Book) -> None:
    """Everything promised is there, and nothing that was not offered."""
    records = await read_all(log, Query())
    found = {number_of(record): record for record in records}
    twice = [number for number, count in Counter(map(number_of, records)).items() if count > 1]
    assert not twice, f"stored more than once: {twice}"
    for number, record in found.items():
        _check_whole(book, number, record)
    for number, place in book.acknowledged.items():
        if number in book.dropped:
            assert number not in found, f"event {number} came back after it was dropped"
        elif number not in book.perhaps_dropped:
            assert number in found, f"acknowledged event {number} at {place} is lost"
            record = found[number]
            assert Appended(record.seq, record.offset, record.meta.event_id) == place
    _check_order(log, records)
    await _check_views(log, records)


def _check_whole(book: Book, number: int, record: Record) -> None:
    assert number in book.offered, f"a record that nobody offered: {record}"
    meta, payload = book.offered[number].meta, book.offered[number].payload
    assert record.payload == payload
    assert (record.topic, record.meta.type, record.meta.space_id) == (meta.topic, meta.type, meta.space_id)
    assert record.meta.partitions == tuple(meta.partitions)
    assert record.meta.idem_key == meta.idem_key
    assert meta._event_id in (None, record.meta.event_id)


def _check_order(log: Log, records: Sequence[Record]) -> None:
    seqs = [record.seq for record in records]
    assert seqs == sorted(set(seqs)), "seqs rise and are never given twice"
    assert len({record.meta.event_id for record in records}) == len(records), "an id stands for one record"
    assert not seqs or seqs[-1] <= log.position.seq
    for name, topic in log.topics().items():
        offsets = [record.offset for record in records if record.topic == name]
        if any(segment.space_id is not None for segment in topic.segments):
            # Each space's part is dropped by itself, so what is left of the topic may have gaps.
            assert offsets == sorted(set(offsets))
            assert not offsets or (offsets[0], offsets[-1]) == (topic.first_offset, topic.next_offset - 1)
        else:
            assert offsets == list(range(topic.first_offset, topic.next_offset)), f"offsets of {name} have a gap"


async def _check_views(log: Log, records: Sequence[Record]) -> None:
    """Every way of asking gives the same records."""
    seqs = [record.seq for record in records]
    assert [record.seq for record in await read_all(log, Query(backwards=True))] == seqs[::-1]
    for topic in {record.topic for record in records}:
        own = [record.seq for record in records if record.topic == topic]
        assert [record.seq for record in await read_all(log, Query(topic=topic))] == own
    for name in {name for record in records for name in record.meta.partitions}:
        own = [record.seq for record in records if name in record.meta.partitions]
        assert [record.seq for record in await read_all(log, Query(partitions=(name,)))] == own


async def check_goes_on(log: Log, book: Book) -> None:
    """A retry of anything acknowledged is a duplicate, one of the rest is stored once, and new events are taken."""
    book.before_going_on = frozenset(book.acknowledged)
    known = [book.offered[number] for number in book.acknowledged if number not in book.forgotten]
    verdicts = await log.append_many(known)
    for event, verdict in zip(known, verdicts, strict=True):
        assert isinstance(verdict, Duplicate), f"a retry of {event.meta.event_id} was taken for new: {verdict}"
        book.note(event, verdict)
    unknown = [
        event
        for number, event in book.offered.items()
        if number not in book.acknowledged and event.meta._event_id is not None
    ]
    await book.append_many(log, unknown)
    await book.append_many(log, [book.event(topic, pad="after") for topic in ("alpha", "beta", "delta")])
    await check(log, book)
