"""
Reading what the log has dropped: from the lake, as records, without Spark.

``LakeArchive`` reads ``bronze.events`` by seq, offset, time, partition or id, a page at a time and within a bound of memory.
``ArchivedLog`` puts it behind a log: a reader whose position the log no longer holds goes on in the lake, and comes back to the
log where that begins. It notices nothing but the time it takes. What neither holds raises ``PositionTrimmed``.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from msgspec.structs import replace

from tidings.core.events import Event
from tidings.log.encoding import unsealed
from tidings.log.encryption import Encryptor
from tidings.log.errors import EpochMismatch, PositionTrimmed
from tidings.log.interface import (
    Appended,
    Authorise,
    Duplicate,
    Health,
    Log,
    Page,
    Position,
    Query,
    TopicInfo,
    Verdict,
)
from tidings.log.record import Record
from tidings.log.retention import Holders, RetentionPlan

from .errors import UnknownTable
from .lake import Lake
from .lake_scan import ScanQuery, find, load
from .schemas import BRONZE_EVENTS
from .table_files import DataFile

_AHEAD: Final = 8
"""A read looks this many pages ahead: the files are far larger than a page, and reading them anew for each would be slow."""
_AHEAD_BYTES_MAX: Final = 16 << 20
_AHEAD_READERS_MAX: Final = 4
_FILES_PER_READ_MAX: Final = 64
_ARCHIVE_READERS_MAX: Final = 2


class _Snapshot(NamedTuple):
    """What the table held when it was last looked at."""

    position: Position
    files: list[DataFile]
    version: int | None = None
    """Which version of the table that was."""


class LakeArchive:
    """
    The records in the lake. Its methods block, and may be called from several threads.

    Args:
        lake: Where the tables are.
        encryptor: Opens sealed payloads, as the log's own does.
        is_dense: Whether every seq and offset stands for a record, as in the embedded engine. Then a gap raises an error
            instead of being skipped.
        files_per_read_max: After so many files without enough records a read ends, and says how far it got.
    """

    def __init__(
        self,
        lake: Lake,
        *,
        encryptor: Encryptor | None = None,
        is_dense: bool = True,
        files_per_read_max: int = _FILES_PER_READ_MAX,
    ) -> None:
        self._lake = lake
        self._encryptor = encryptor
        self._is_dense = is_dense
        self._files_per_read_max = files_per_read_max
        self._lock = threading.Lock()
        self._snapshot: _Snapshot | None = None
        self._ahead: OrderedDict[Query, list[Record]] = OrderedDict()

    @property
    def position(self) -> Position:
        """The epoch, and the seq up to which the lake held every record when it was last looked at; 0 for an empty lake."""
        return (self._snapshot or self.refresh()).position

    def refresh(self) -> _Snapshot:
        """InputWindow at the table anew."""
        self._lake.meta()  # the log may have a new epoch, and the lake new tables
        version = self._version()  # before looking: what changes meanwhile is then seen by the next read
        note = self._lake.note(BRONZE_EVENTS.name)
        if note:
            position = Position(str(note["epoch"]), int(note["seq"]))
            fresh = _Snapshot(position, self._lake.files(BRONZE_EVENTS.name), version)
        else:
            fresh = _Snapshot(Position("", 0), [], version)
        with self._lock:
            if self._snapshot is not None and self._snapshot.version != fresh.version:
                self._ahead.clear()  # what was read ahead may have been erased since
            self._snapshot = fresh
        return fresh

    def _version(self) -> int | None:
        """The last commit to the table; asked before each read, so it must cost next to nothing."""
        try:
            return int(self._lake.open(BRONZE_EVENTS.name).version())
        except UnknownTable:
            return None

    def read(self, query: Query, *, limit: int = 1000, bytes_max: int = 4 << 20, through: int | None = None) -> Page:
        """
        Read one page, as ``Log.read`` does.

        Args:
            query: What to read.
            limit, bytes_max: How much, at most; but at least one record if there is one.
            through: InputWindow at the table anew if it was not yet known to reach to this seq.

        Raises:
            PositionTrimmed: The lake lacks records that come next, or never held the beginning.
            EpochMismatch: The query's epoch is not the lake's.
        """
        snapshot = self._snapshot or self.refresh()
        # The files of an older look are still there for a while, and hold what was erased since.
        if snapshot.version != self._version() or (through is not None and snapshot.position.seq < through):
            snapshot = self.refresh()
        # An empty lake is of no epoch yet: it holds nothing, and says so.
        if query.epoch not in (None, snapshot.position.epoch) and snapshot.position.seq > 0:
            raise EpochMismatch(str(query.epoch), snapshot.position.epoch)
        try:
            return self._page(snapshot, query, limit, bytes_max)
        except FileNotFoundError:
            # Compaction has put other files in their place since we looked.
            return self._page(self.refresh(), query, limit, bytes_max)

    def _page(self, snapshot: _Snapshot, query: Query, limit: int, bytes_max: int) -> Page:
        with self._lock:
            records = self._ahead.pop(query, None)
        horizon: int | None = None
        if records is None:
            wanted = ScanQuery.of(query, until=snapshot.position.seq)
            found = find(snapshot.files, wanted, count=limit * _AHEAD, files_max=self._files_per_read_max)
            records = load(found, backwards=query.backwards, bytes_max=max(bytes_max, _AHEAD_BYTES_MAX))
            is_all = not found.is_full and len(records) == len(found.seqs)
            horizon = found.horizon
            records = self._without_holes(records, query, wanted)
            if is_all and horizon is None and len(records) == len(found.seqs) and _fits(records, limit, bytes_max):
                return Page(self._opened(records), _beyond(query, records), at_end=True)
            if horizon is not None and _fits(records, limit, bytes_max):
                return Page(self._opened(records), _past(query, horizon), at_end=False)
        count = _count(records, limit, bytes_max)
        page, rest = records[:count], records[count:]
        following = _beyond(query, page)
        if rest:
            self._keep(following, rest)
        return Page(self._opened(page), following, at_end=False)

    def _keep(self, query: Query, records: list[Record]) -> None:
        with self._lock:
            self._ahead[query] = records
            while len(self._ahead) > _AHEAD_READERS_MAX:
                self._ahead.popitem(last=False)

    def _opened(self, records: Sequence[Record]) -> list[Record]:
        return [unsealed(record, self._encryptor) for record in records]

    def _without_holes(self, records: list[Record], query: Query, wanted: ScanQuery) -> list[Record]:
        """The records up to the first gap among them; a gap right at the beginning raises ``PositionTrimmed``."""
        if not self._is_dense or query.partitions or query.event_ids or query.from_time or query.to_time:
            return records
        if not records and query.topic is None and query.since is not None and wanted.after < wanted.until:
            raise PositionTrimmed(None, wanted.after, wanted.until)
        step = -1 if query.backwards else 1
        places = [record.seq if query.topic is None else record.offset for record in records]
        expected = _first_place(query, wanted)
        for at, place in enumerate(places):
            if expected is not None and place != expected:
                if at == 0:
                    asked = expected if query.topic is not None or query.backwards else expected - 1
                    raise PositionTrimmed(query.topic, asked, place if query.topic is not None else place - 1)
                return records[:at]
            expected = place + step
        return records


def _first_place(query: Query, wanted: ScanQuery) -> int | None:
    """Where a dense archive's answer begins; ``None`` where the query does not say."""
    if query.topic is None:
        if query.backwards:
            return wanted.until
        return None if query.since is None else query.since + 1
    if query.backwards:
        return None if query.to_offset is None or query.until is not None else query.to_offset - 1
    return query.from_offset if query.since is None else None


def _count(records: Sequence[Record], limit: int, bytes_max: int) -> int:
    """How many of the records a page takes: at least one, if there is one."""
    size = 0
    for count, record in enumerate(records):
        size += len(record.payload_json) + len(record.meta_json)
        if count == limit or (count > 0 and size > bytes_max):
            return count
    return len(records)


def _fits(records: Sequence[Record], limit: int, bytes_max: int) -> bool:
    return _count(records, limit, bytes_max) == len(records)


def _beyond(query: Query, page: Sequence[Record]) -> Query:
    """What is left of a query after a page."""
    if not page:
        return query
    last = page[-1]
    if query.backwards:
        if query.topic is None:
            return replace(query, until=max(0, last.seq - 1), to_time=None)
        return replace(query, to_offset=last.offset, until=None, to_time=None)
    if query.topic is None:
        return replace(query, since=last.seq, from_time=None)
    return replace(query, from_offset=last.offset + 1, since=None, from_time=None)


def _past(query: Query, horizon: int) -> Query:
    """What is left of a query when everything up to a seq was looked at."""
    return replace(query, until=horizon - 1) if query.backwards else replace(query, since=horizon)


class ArchivedLog:
    """
    A log whose dropped records are read from the lake.

    Everything but reading goes to the log itself. Reading does so too, until a reader asks for what the log dropped, or begins
    (or, backwards, goes on) at the oldest record there is.

    Args:
        log: The log.
        archive: The lake of the same log.
    """

    def __init__(self, log: Log, archive: LakeArchive) -> None:
        self._log = log
        self._archive = archive
        self._threads = ThreadPoolExecutor(_ARCHIVE_READERS_MAX, thread_name_prefix="tidings-archive")

    @property
    def position(self) -> Position:
        """See ``Log.position``."""
        return self._log.position

    @property
    def dropped_through_seq(self) -> int:
        """Of the log itself; the lake may hold what it dropped. See ``Log.dropped_through_seq``."""
        return self._log.dropped_through_seq

    async def append(
        self, event: Event, authorise: Authorise | None = None, *, from_reserve: bool = False
    ) -> Appended | Duplicate:
        """Store one event. See ``Log.append``."""
        return await self._log.append(event, authorise=authorise, from_reserve=from_reserve)

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        """Store events in order. See ``Log.append_many``."""
        return await self._log.append_many(events, authorise=authorise)

    async def wait(self, after: int, topic: str | None = None) -> int:
        """Wait for a record above ``after``. See ``Log.wait``."""
        return await self._log.wait(after, topic)

    def topics(self) -> dict[str, TopicInfo]:
        """See ``Log.topics``."""
        return self._log.topics()

    def topic(self, name: str) -> TopicInfo | None:
        """See ``Log.topic``."""
        return self._log.topic(name)

    async def drop(self, plan: RetentionPlan, holders: Holders | None = None) -> RetentionPlan:
        """Carry out a retention plan. See ``Log.drop``."""
        return await self._log.drop(plan, holders)

    def health(self) -> Health:
        """See ``Log.health``."""
        return self._log.health()

    async def read(self, query: Query, *, limit: int = 1000, bytes_max: int = 4 << 20) -> Page:
        """
        Read one page, from the log or from the lake. See ``Log.read``.

        Raises:
            PositionTrimmed: The log dropped what comes next, and the lake does not hold it.
            EpochMismatch, CorruptLog: as for ``Log.read``.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit}")
        if query.event_ids:
            return await self._read_by_id(query, limit, bytes_max)
        if query.backwards:
            return await self._read_backwards(query, limit, bytes_max)
        asked = query
        if query.since is None and query.from_offset is None:
            # "From the oldest there is" is in the lake if the log has dropped anything; a bound makes the log say so.
            asked = replace(query, since=0) if query.topic is None else replace(query, from_offset=0)
        try:
            page = await self._log.read(asked, limit=limit, bytes_max=bytes_max)
        except PositionTrimmed as trimmed:
            return await self._read_archived(query, asked, trimmed, limit, bytes_max)
        return page

    async def _read_archived(
        self, query: Query, asked: Query, trimmed: PositionTrimmed, limit: int, bytes_max: int
    ) -> Page:
        """A page of what the log dropped, or the log's first one if the lake has no more before it."""
        epoch = self._log.position.epoch
        if trimmed.topic is None:
            old = replace(query, until=trimmed.first if query.until is None else min(query.until, trimmed.first))
            is_last = query.until is not None and query.until <= trimmed.first
            rest = replace(asked, since=trimmed.first)
            through = min(trimmed.first, old.until or 0)
        else:
            bound = trimmed.first if query.to_offset is None else min(query.to_offset, trimmed.first)
            old = replace(query, to_offset=bound)
            is_last = query.to_offset is not None and query.to_offset <= trimmed.first
            rest = replace(asked, from_offset=trimmed.first)
            info = None if trimmed.topic is None else self._log.topic(trimmed.topic)
            through = 0 if info is None else info.first_seq - 1
        page = await self._in_thread(replace(old, epoch=epoch), limit, bytes_max, through)
        following = replace(page.next, until=query.until, to_offset=query.to_offset, epoch=query.epoch)
        if not page.at_end:
            return Page(page.records, following, at_end=False)
        if await self._lacks_end(trimmed, query):
            if page.records:  # these first; whoever reads on after them gets the error
                return Page(page.records, following, at_end=False)
            raise trimmed
        if is_last:
            return Page(page.records, following, at_end=True)
        if page.records:
            return Page(page.records, rest, at_end=False)
        # A query may have a seq and an offset as its lower bounds; each is passed once, so this ends.
        return await self.read(rest, limit=limit, bytes_max=bytes_max)

    async def _lacks_end(self, trimmed: PositionTrimmed, query: Query) -> bool:
        """Whether the lake ends before the log begins."""
        if trimmed.topic is None:
            return self._archive.position.seq < (
                trimmed.first if query.until is None else min(trimmed.first, query.until)
            )
        bound = trimmed.first if query.to_offset is None else min(trimmed.first, query.to_offset)
        last = Query(topic=trimmed.topic, backwards=True)
        while bound > 0:
            found = await self._in_thread(last, 1, 1, None)
            if found.records or found.at_end:
                return not found.records or found.records[0].offset < bound - 1
            last = found.next
        return False

    async def _read_backwards(self, query: Query, limit: int, bytes_max: int) -> Page:
        """Down through the log, then on in the lake."""
        open_ended = replace(query, since=None, from_offset=None)
        position = self._log.position
        if not self._is_dropped(query):
            return await self._log.read(query, limit=limit, bytes_max=bytes_max)
        page = await self._log.read(open_ended, limit=limit, bytes_max=bytes_max)
        # Below the drops the log holds some topics' records and not others'; the lake holds all, in one order.
        edge = await self._dropped_through(query.topic)
        kept = [
            record
            for record in page.records
            if record.seq > max(edge, query.since or 0) and record.offset >= (query.from_offset or 0)
        ]
        if len(kept) == len(page.records) and not page.at_end:
            return Page(kept, replace(page.next, since=query.since, from_offset=query.from_offset), at_end=False)
        if kept:
            following = _beyond(query, kept)
            return Page(kept, replace(following, since=query.since, from_offset=query.from_offset), at_end=False)
        upper = edge if query.until is None else min(edge, query.until)
        old = replace(query, until=upper, epoch=position.epoch)
        page = await self._in_thread(old, limit, bytes_max, upper)
        if self._archive.position.seq < upper:
            raise PositionTrimmed(None, self._archive.position.seq, edge)
        return Page(page.records, replace(page.next, epoch=query.epoch), page.at_end)

    def _is_dropped(self, query: Query) -> bool:
        """Whether the log has dropped anything of what a query could mean."""
        topics = self._log.topics()
        if query.topic is not None:
            info = topics.get(query.topic)
            return info is not None and info.first_offset > 0
        return any(info.first_offset > 0 for info in topics.values())

    async def _dropped_through(self, topic: str | None) -> int:
        """The seq up to which the log has dropped records."""
        try:
            await self._log.read(Query(topic=topic, since=0), limit=1, bytes_max=1)
        except PositionTrimmed as trimmed:
            return trimmed.first
        return 0

    async def _read_by_id(self, query: Query, limit: int, bytes_max: int) -> Page:
        """
        Few records by name: those that the log has, and those that the lake has.

        The lake is asked for all of them: the id of a dropped record may have been used again, by anybody.
        """
        page = await self._log.read(query, limit=limit, bytes_max=bytes_max)
        if not page.at_end or not self._is_dropped(query):
            return page
        by_seq = {record.seq: record for record in page.records}
        old = replace(query, epoch=self._log.position.epoch)
        at_end = False
        while not at_end and len(by_seq) < limit:
            found = await self._in_thread(old, limit, bytes_max, None)
            by_seq = {record.seq: record for record in found.records} | by_seq
            old, at_end = found.next, found.at_end
        records = [by_seq[seq] for seq in sorted(by_seq, reverse=query.backwards)]
        return Page(records[:limit], page.next, at_end and len(records) <= limit)

    async def _in_thread(self, query: Query, limit: int, bytes_max: int, through: int | None) -> Page:
        def read() -> Page:
            return self._archive.read(query, limit=limit, bytes_max=bytes_max, through=through)

        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    async def close(self) -> None:
        """Close the log, and end the threads that read the lake."""
        await self._log.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
