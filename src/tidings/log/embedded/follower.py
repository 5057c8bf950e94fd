"""
Reading a workspace that another process writes (or nobody).

A follower changes nothing. Beside a living writer it sees what has reached the segments, about 20 milliseconds behind the
acknowledgement, and reads again when asked to wait. If there is no writer, records that a crash left in the journal are
shown too, from memory, exactly as recovery would find them.

Streams reach their files one after another, so a follower shows only seqs below which nothing is missing: whoever
reads on from a seq it has seen never skips a record that appeared late. What the writer's checkpoint covers is complete;
beyond it seqs are dense, so they can be counted on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import Event

from ..encryption import Encryptor
from ..errors import CorruptLog, EpochMismatch, LogClosed, ReadOnlyLog, WorkspaceBusy
from ..interface import Appended, Authorise, Duplicate, Health, Page, Position, Query, TopicInfo, Verdict
from ..retention import Holders, RetentionPlan
from ..segment import Head
from ..settings import LogSettings
from .disk import Disk, OsDisk
from .index import Index, MemoryIndex, entries_of, entry_of
from .inspect import JournalLine, LineInfo, read_checkpoint, read_seals, read_segment
from .layout import Layout, StreamKey
from .lmdb_index import LmdbIndex
from .pages import PageReader
from .reader import SegmentReader
from .recover import add_sealed, plan_recovery
from .state import LogState, RecentRecords, Segment, Stream, TopicState, stream_of

_POLL_INTERVAL_S: Final = 0.02


async def open_follower(
    workspace: Path | str,
    settings: LogSettings | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
    disk: Disk | None = None,
    encryptor: Encryptor | None = None,
) -> FollowerLog:
    """
    Open a workspace's log for reading only, beside its writer or without one.

    Raises:
        WorkspaceMissing: There is no log.
        UnsupportedFormat: A newer version wrote it.
        CorruptLog: Acknowledged data is lost or altered.
    """
    log = FollowerLog(Layout(workspace), settings or LogSettings(), clock, disk or OsDisk(), encryptor)
    await asyncio.to_thread(log.refresh)
    return log


class FollowerLog:
    """A log that can only be read. Made by ``open_follower``."""

    def __init__(
        self, layout: Layout, settings: LogSettings, clock: Clock, disk: Disk, encryptor: Encryptor | None
    ) -> None:
        self._layout = layout
        self._settings = settings
        self._clock = clock
        self._disk = disk
        meta = layout.read_meta(disk)
        self._is_flat = meta.layout == "flat"
        self._state = LogState(meta.epoch, 0, settings.recent_bytes_max)
        self._ahead: set[int] = set()
        """Seqs seen beyond the first one that is still missing."""
        self._index: Index = self._open_index(meta.epoch)
        self._segments = SegmentReader(disk, layout)
        self._readers = ThreadPoolExecutor(1, "tidings-log-follow")
        self._pages = PageReader(self._state, self._segments, self._index, encryptor, self._offload_reading)
        self._lock = asyncio.Lock()
        """Held while refreshing or reading: the state must not change under a reader."""
        self._is_closed = False
        self._index_covers = 0
        """The seq that the index covered when it was last asked."""
        self._load()
        self._index_covers = self._index.covers

    def _open_index(self, epoch: str) -> Index:
        if not self._disk.exists(self._layout.index):
            return MemoryIndex()
        bytes_max = self._settings.index_bytes_max
        try:
            return LmdbIndex.open(self._layout.index, epoch=epoch, map_bytes_max=bytes_max, read_only=True)
        except WorkspaceBusy:
            return MemoryIndex()  # the writer is in this very process, where LMDB allows one handle only

    def _load(self) -> None:
        """Load what is sealed; and, if there is no writer, what recovery would bring back."""
        lock = self._disk.lock(self._layout.lock, shared=True) if self._can_lock() else None
        if lock is not None and not isinstance(lock, str):
            try:
                self._load_recovered()
            finally:
                lock.release()
            return
        if isinstance(lock, str):
            self._load_sealed()
        else:
            self._load_recovered()

    def _can_lock(self) -> bool:
        try:
            self._disk.open(self._layout.lock, write=True).close()
        except OSError:
            return False
        return True

    def _load_recovered(self) -> None:
        found = plan_recovery(self._disk, self._layout, self._settings)
        state = self._state
        for recovered in found.streams.values():
            state.add_stream(recovered.stream)
        missing = [line.info.seq for recovered in found.streams.values() for line in recovered.missing]
        overlay = [line for frame in found.frames for line in frame.lines if missing and line.info.seq >= min(missing)]
        state.recent.first_seq = overlay[0].info.seq if overlay else found.last_seq + 1
        for line in overlay:
            self._show_from_memory(line)
        state.committed_seq = state.flushed_seq = found.last_seq
        self._add_unindexed(seq_from=self._index.covers + 1)

    def _show_from_memory(self, line: JournalLine) -> None:
        info = line.info
        topic = self._state.topic(info.meta.topic)
        if not topic.recent:
            topic.recent_first = info.offset
        self._state.recent.extend([line.data], len(line.data), [(topic, [line.data])])
        topic.plain_from = info.offset + 1
        topic.committed_offset = topic.next_offset = max(topic.committed_offset, info.offset + 1)
        topic.last_seq = max(topic.last_seq, info.seq)
        entry = entry_of(info)
        if entry is not None and info.seq > self._index.covers:
            self._state.unindexed.append(entry)

    def _load_sealed(self) -> None:
        covered_seq = read_checkpoint(self._disk, self._layout).seq
        for key in self._layout.sealed_streams(self._disk):
            stream = Stream(key, lines_max=1, bytes_max=1)
            add_sealed(stream, read_seals(self._disk, self._layout, key).checked())
            self._state.add_stream(stream)
            for segment in stream.segments:
                if segment.last_seq > covered_seq:
                    infos = self._lines_of(key, segment)
                    self._ahead.update(info.seq for info in infos if info.seq > covered_seq)
        self._state.committed_seq = covered_seq
        self._add_unindexed(seq_from=self._index.covers + 1)

    def _add_unindexed(self, seq_from: int) -> None:
        """Note the records with partitions that the index does not have."""
        known = {entry.seq for entry in self._state.unindexed}
        infos = [
            info
            for stream in self._state.streams()
            for segment in stream.segments
            if segment.partitions and segment.last_seq >= seq_from
            for info in self._lines_of(stream.key, segment)
            if info.meta.partitions and info.seq >= seq_from and info.seq not in known
        ]
        entries = [*self._state.unindexed, *entries_of(infos)]
        self._state.unindexed = sorted(entries, key=attrgetter("seq"))

    def _lines_of(self, key: StreamKey, segment: Segment) -> list[LineInfo]:
        """The lines of a segment that was seen already."""
        path, infos = self._layout.segment(key, segment.number), list[LineInfo]()
        before, size = Head(segment.first_offset - 1, segment.first_seq - 1, ""), segment.flushed_bytes
        read_segment(self._disk, path, key, before, is_flat=self._is_flat, size=size, seen=infos.extend)
        return infos

    # Reading what is new

    def refresh(self) -> None:
        """
        Add what the writer has written since. Called from one thread at a time.

        Raises:
            EpochMismatch: The log was repaired, and its records are others now.
            CorruptLog: Acknowledged data is lost or altered.
        """
        try:
            try:
                self._read_files()
            except CorruptLog:
                self._read_files()  # files come and go while they are listed: it is damage only if it stays
        except (CorruptLog, WorkspaceBusy):
            self._refuse_other_life()
            raise
        # Afterwards: a repair names the new epoch before it changes any other file.
        self._refuse_other_life()

    def _refuse_other_life(self) -> None:
        epoch = self._layout.read_meta(self._disk).epoch
        if epoch != self._state.epoch:
            raise EpochMismatch(self._state.epoch, epoch)

    def _read_files(self) -> None:
        # Before the files: what a later checkpoint covers may not have been there when they were read.
        covered_seq = read_checkpoint(self._disk, self._layout).seq
        for key, numbers in self._layout.segments(self._disk).items():
            topic = self._state.topic(key.topic)
            stream = stream_of(topic, key, 1, 1)
            if numbers[0] > (stream.segments[0].number if stream.segments else stream.next_number):
                self._remove_dropped(stream)
            for number in numbers:
                if number >= stream.next_number or (stream.segments and stream.segments[-1].number == number):
                    self._read_new_lines(stream, number)
        state = self._state
        if covered_seq > state.committed_seq:
            state.committed_seq = covered_seq
            self._ahead = {seq for seq in self._ahead if seq > covered_seq}
        if state.recent.lines and covered_seq >= state.recent.first_seq + len(state.recent.lines) - 1:
            self._forget_memory()
        self._follow_index()
        while state.committed_seq + 1 in self._ahead:
            state.committed_seq += 1
            self._ahead.discard(state.committed_seq)
        if not state.recent.lines:
            state.flushed_seq = state.committed_seq
            state.recent.first_seq = state.committed_seq + 1

    def _follow_index(self) -> None:
        state, covers = self._state, self._index.covers
        if covers < self._index_covers:  # the writer has begun it anew
            self._add_unindexed(seq_from=covers + 1)
        self._index_covers = covers
        if state.unindexed and state.unindexed[0].seq <= covers:
            state.unindexed = [entry for entry in state.unindexed if entry.seq > covers]

    def _remove_dropped(self, stream: Stream) -> None:
        """Retention has dropped segments; also ones that this follower never saw."""
        seals = read_seals(self._disk, self._layout, stream.key).checked()
        for seal in seals.seals.values():
            if seal.segment in seals.dropped:
                stream.dropped_through_offset, stream.dropped_through_seq = seal.last_offset, seal.last_seq
        stream.segments = [segment for segment in stream.segments if segment.number not in seals.dropped]
        stream.next_number = max([stream.next_number, *(number + 1 for number in seals.dropped)])
        self._state.note_drop(stream)

    def _forget_memory(self) -> None:
        """A writer came, and what the crash had left in the journal is in the segments now."""
        state = self._state
        state.recent = RecentRecords(self._settings.recent_bytes_max, state.committed_seq + 1)
        for topic in state.topics.values():
            topic.recent = []
            self._show_files_of(topic)

    @staticmethod
    def _show_files_of(topic: TopicState) -> None:
        ends = [(stream.last_offset + 1, stream.last_seq) for stream in topic.streams.values()]
        topic.committed_offset = max([topic.committed_offset, *(offset for offset, _ in ends)])
        topic.next_offset = topic.recent_first = topic.committed_offset
        topic.last_seq = max([topic.last_seq, *(seq for _, seq in ends)])

    def _read_new_lines(self, stream: Stream, number: int) -> None:
        is_known = bool(stream.segments) and stream.segments[-1].number == number
        segment = stream.segments[-1] if is_known else Segment(number)
        key, topic = stream.key, self._state.topic(stream.key.topic)
        path, start = self._layout.segment(key, number), segment.flushed_bytes
        before = Head(stream.last_offset, stream.last_seq, "")
        report = read_segment(self._disk, path, key, before, is_flat=self._is_flat, start=start, seen=self._note_lines)
        if report.is_missing:
            self._remove_dropped(stream)
            if number >= stream.next_number or (stream.segments and stream.segments[-1].number == number):
                raise CorruptLog(path, start, "the segment is missing, and no seal says that it was dropped")
            return
        if report.good_lines:
            segment.grow(report.good_lines, report.good_bytes - start, report.first, report.good_last, ())
            segment.partitions |= report.partitions
            segment.flushed_bytes = report.good_bytes
            if not is_known:
                for earlier in stream.segments:
                    earlier.is_sealed = True
                stream.segments.append(segment)
                stream.next_number = number + 1
        # The writer may be in the middle of the last line.
        if report.problems and report.problems[0].code != "line.unfinished":
            raise report.problems[0].as_error()
        if not topic.recent:
            self._show_files_of(topic)

    def _note_lines(self, infos: list[LineInfo]) -> None:
        """Take note of lines that reached the files."""
        state, covers = self._state, self._index.covers
        state.unindexed += entries_of(info for info in infos if info.meta.partitions and info.seq > covers)
        self._ahead.update(info.seq for info in infos if info.seq > state.committed_seq)

    # What the interface promises

    @property
    def position(self) -> Position:
        return Position(self._state.epoch, self._state.committed_seq)

    @property
    def dropped_through_seq(self) -> int:
        return self._state.dropped_through_seq

    @property
    def layout(self) -> Layout:
        """Where the log's files are."""
        return self._layout

    def topics(self) -> dict[str, TopicInfo]:
        return self._state.infos()

    def topic(self, name: str) -> TopicInfo | None:
        return self._state.info(name)

    def health(self) -> Health:
        return Health(is_writable=False, is_durable=True, problem=str(ReadOnlyLog()))

    async def append(
        self, event: Event, authorise: Authorise | None = None, *, from_reserve: bool = False
    ) -> Appended | Duplicate:
        raise ReadOnlyLog

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        raise ReadOnlyLog

    async def drop(self, plan: RetentionPlan, holders: Holders | None = None) -> RetentionPlan:
        raise ReadOnlyLog

    async def read(self, query: Query, *, limit: int = 1000, bytes_max: int = 4 << 20) -> Page:
        self._refuse_closed()
        async with self._lock:
            await self._offload(self.refresh)
            page = await self._read(query, limit, bytes_max)
            await self._offload(
                self._refuse_other_life
            )  # a repair meanwhile may have changed the files under the reader
            return page

    async def _read(self, query: Query, limit: int, bytes_max: int) -> Page:
        shown = self._state.committed_seq
        if query.until is None or query.until > shown:
            page = await self._pages.read(msgspec.structs.replace(query, until=shown), limit, bytes_max)
            if page.next.until == shown:
                page = msgspec.structs.replace(page, next=msgspec.structs.replace(page.next, until=query.until))
            return page
        return await self._pages.read(query, limit, bytes_max)

    async def wait(self, after: int, topic: str | None = None) -> int:
        while True:
            self._refuse_closed()
            async with self._lock:
                await self._offload(self.refresh)
            reached = self._state.committed_seq
            if topic is not None:
                known = self._state.topics.get(topic)
                reached = min(reached, known.last_seq) if known is not None else 0
            if reached > after:
                return self._state.committed_seq
            await self._clock.sleep(_POLL_INTERVAL_S)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._readers.shutdown(wait=True)
            self._segments.close()
            self._index.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise LogClosed

    def _offload_reading(self, job: Callable[[], object]) -> asyncio.Future[object]:
        def reading() -> object:
            try:
                return job()
            except FileNotFoundError:
                self.refresh()  # retention was faster: notice it before the reader tries again
                raise

        return self._offload(reading)

    def _offload(self, job: Callable[[], object]) -> asyncio.Future[object]:
        return asyncio.get_running_loop().run_in_executor(self._readers, job)
