"""
Brings committed lines from the journal into their segments, and keeps what is derived from them.

This happens after the acknowledgement: a commit is durable in the journal before it comes here, so no publisher waits for it.
``SegmentWriter`` does the work, in order: write the lines, seal full segments (sync, digest, seal), at a checkpoint sync
every open segment, so that journal files can be used again; then feed the index. ``FlushScheduler`` says when: a busy log
flushes by the megabyte, an idle one after some milliseconds. A checkpoint is due when the journal runs out of files, or has
grown by most of one; the index is fed with each checkpoint, when many entries wait, or after a second.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

from ..errors import StorageFull
from .checkpoint import append_seal_line, encode_seal, save_checkpoint
from .disk import Disk, File, SerialExecutor, sync_for_good
from .duplicates import Duplicates
from .index import Index, IndexEntry, IndexFull
from .journal import Journal
from .layout import Layout, StreamKey
from .reserve import Reserve, SegmentRoom
from .state import LogState, Segment, SegmentWrite

_OPEN_FILES_MAX: Final = 256


class Digest(Protocol):
    """A SHA-256 of what was written so far."""

    def update(self, data: bytes, /) -> None:
        """Take in what follows."""
        ...

    def hexdigest(self) -> str:
        """The digest up to here."""
        ...


class FlushedSegment(NamedTuple):
    """What became of a segment: how many bytes its file holds, and its digest once it is sealed."""

    segment: Segment
    flushed_bytes: int
    digest: str | None


class _StreamFile:
    """How far one stream's files are written."""

    __slots__ = ("chain", "digest", "file", "is_dirty", "key", "number", "sealed_through", "size")

    def __init__(
        self,
        key: StreamKey,
        chain: str,
        sealed_through: int,
        number: int = 0,
        size: int = 0,
        digest: Digest | None = None,
    ) -> None:
        self.key = key
        self.chain = chain
        self.sealed_through = sealed_through
        self.number = number
        self.file: File | None = None
        self.digest: Digest = hashlib.sha256() if digest is None else digest
        self.size = size
        self.is_dirty = False

    def begin(self, number: int) -> None:
        """Turn to a new segment; the one before is sealed."""
        self.number = number
        self.digest = hashlib.sha256()
        self.size = 0


class SegmentWriter:
    """
    Writes segments. Used by one thread at a time; keeps its own view of how far each file is.

    Args:
        disk: For segments.
        layout, index: Whose files these are.
        reserve_disk: For what is small and says how far the segments are: seals and checkpoints.
    """

    def __init__(self, disk: Disk, layout: Layout, index: Index, reserve_disk: Disk | None = None) -> None:
        self._disk = disk
        self._reserve_disk = reserve_disk or disk
        self._layout = layout
        self._index = index
        self._writers: dict[StreamKey, _StreamFile] = {}
        self._open_files: OrderedDict[StreamKey, _StreamFile] = OrderedDict()
        self._new_names: set[StreamKey] = set()
        self._flushed: dict[int, FlushedSegment] = {}

    def adopt(
        self, key: StreamKey, *, chain: str, sealed_through: int, number: int, size: int, digest: Digest | None
    ) -> None:
        """
        Take over a stream as recovery found it; no file is opened for it.

        Args:
            chain: The digest of its last seal.
            sealed_through: The number of its last sealed segment.
            number: Its open segment, 0 if it has none.
            size: How many bytes of that are checked lines.
            digest: Of those bytes.
        """
        self._writers[key] = _StreamFile(key, chain, sealed_through, number, size, digest)

    def write(self, writes: Iterable[SegmentWrite]) -> list[FlushedSegment]:
        """
        Write writes in order; seal the segments they fill.

        Giving the same writes again after an error is right: bytes have fixed places, and what was done
        before the error is reported then.
        """
        by_stream: dict[StreamKey, list[SegmentWrite]] = {}
        for write in writes:
            by_stream.setdefault(write.stream.key, []).append(write)
        for key, own in by_stream.items():
            self._write_stream(key, own)
        flushed = list(self._flushed.values())
        self._flushed.clear()
        return flushed

    def _write_stream(self, key: StreamKey, writes: Sequence[SegmentWrite]) -> None:
        writer = self._writers.get(key)
        if writer is None:
            writer = self._writers[key] = _StreamFile(key, chain="0" * 64, sealed_through=0)
        at = 0
        while at < len(writes):
            # The writes of one segment lie side by side: they are one write.
            segment, start, seals = writes[at].segment, writes[at].byte_offset, False
            lines: list[bytes] = []
            while at < len(writes) and writes[at].segment is segment:
                lines += writes[at].lines
                seals = seals or writes[at].seals
                at += 1
            if segment.number <= writer.sealed_through:
                continue  # done before an error that another stream met
            if segment.number != writer.number:
                writer.begin(segment.number)
            self._extend(writer, start, b"".join(lines))
            digest = self._seal(writer, segment) if seals else None
            self._flushed[id(segment)] = FlushedSegment(segment, writer.size, digest)

    def _extend(self, writer: _StreamFile, start: int, data: bytes) -> None:
        fresh = data[max(0, writer.size - start) :]
        if fresh:
            file = self._file_of(writer)
            writer.is_dirty = True
            file.write(writer.size, fresh)
            writer.digest.update(fresh)
            writer.size += len(fresh)

    def _file_of(self, writer: _StreamFile) -> File:
        if writer.file is None:
            path = self._layout.segment(writer.key, writer.number)
            if not self._disk.exists(path):
                self._disk.make_folder(path.parent)
                self._new_names.add(writer.key)
            writer.file = self._disk.open(path, create=True)
            self._close_idle_file()
        self._open_files[writer.key] = writer
        self._open_files.move_to_end(writer.key)
        return writer.file

    def _close_idle_file(self) -> None:
        """Thousands of topics must not mean thousands of descriptors; the digest so far stays in memory."""
        if len(self._open_files) >= _OPEN_FILES_MAX:
            # Many at a time, as many syncs together cost little more than one; those unused for longest.
            idle = list(islice(self._open_files.values(), _OPEN_FILES_MAX // 2))
            self._sync(idle)
            for writer in idle:
                self._close(writer)

    def _seal(self, writer: _StreamFile, segment: Segment) -> str:
        # The order matters: first the lines are on disk, then the seal that vouches for them.
        self._sync([writer])
        self._sync_names()
        line, chain = encode_seal(segment, writer.digest.hexdigest(), writer.chain)
        append_seal_line(self._reserve_disk, self._layout, writer.key, line)
        writer.chain = chain
        writer.sealed_through = writer.number
        self._close(writer)
        return chain

    def _sync(self, writers: Iterable[_StreamFile]) -> None:
        dirty = [writer for writer in writers if writer.is_dirty]
        if dirty:
            path = self._layout.segment(dirty[0].key, dirty[0].number)
            sync_for_good(self._disk, [writer.file for writer in dirty if writer.file is not None], path)
            for writer in dirty:
                writer.is_dirty = False

    def _close(self, writer: _StreamFile) -> None:
        if writer.file is not None:
            writer.file.close()
            writer.file = None
        self._open_files.pop(writer.key, None)

    def _sync_names(self) -> None:
        folders = {self._layout.segment(key, 0).parent for key in self._new_names}
        if any(key.space_id is not None for key in self._new_names):
            folders.add(self._layout.wal)
        for folder in sorted(folders):
            self._disk.sync_folder(folder)
        self._new_names.clear()

    def checkpoint(self, seq: int) -> None:
        """Put everything up to ``seq``, which must have been written, on disk and say so."""
        self._sync(self._open_files.values())
        self._sync_names()
        marks = {key: (writer.number, writer.size) for key, writer in self._writers.items() if writer.number}
        save_checkpoint(self._reserve_disk, self._layout, seq, marks)

    def feed_index(self, entries: Sequence[IndexEntry], covers: int) -> None:
        """Enter records into the index."""
        self._index.add(entries, covers)

    def close(self) -> None:
        """Close the files."""
        for writer in list(self._open_files.values()):
            self._close(writer)


_DELAY_S: Final = 0.02
_BYTES: Final = 1 << 20
_STEP_BYTES_MIN: Final = 1 << 20


class Unflushed(NamedTuple):
    """Committed lines up to ``seq`` that the segments lack, and the room that was promised for them."""

    writes: list[SegmentWrite]
    size: int
    seq: int
    room: int


_INDEX_DELAY_S: Final = 1.0
_INDEX_ENTRIES: Final = 20_000


class FlushScheduler:
    """
    Drives the segment writer, one job at a time. A job moves at most what the reserve has room for; if more waits, it ends with
    a checkpoint, so that a journal file can go before the next is moved.

    Args:
        reserve, room: What is promised to commits.
        delay_s: How long lines may wait for more; 0 to flush at once.
        on_flushed: Called after each job that went well, with whether it was a checkpoint, and what there is no room for.
        on_failed: Told what went wrong; nothing more is flushed until ``schedule`` is called again.
    """

    def __init__(
        self,
        executor: SerialExecutor,
        segment_writer: SegmentWriter,
        journal: Journal,
        state: LogState,
        duplicates: Duplicates,
        *,
        reserve: Reserve,
        room: SegmentRoom | None,
        delay_s: float | None = None,
        on_flushed: Callable[[bool, StorageFull | IndexFull | None], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = executor
        self._segment_writer = segment_writer
        self._journal = journal
        self._state = state
        self._duplicates = duplicates
        self._reserve = reserve
        self._room = room
        self._delay_s = _DELAY_S if delay_s is None else delay_s
        self._on_flushed = on_flushed
        self._on_failed = on_failed
        self._unflushed: deque[Unflushed] = deque()
        self._bytes = 0
        self._seq = state.committed_seq
        """The highest seq among what was added."""
        self._since_checkpoint_bytes = 0
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._index_timer: asyncio.TimerHandle | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._is_stopped = False
        self.is_busy = False
        self.is_checkpoint_due = False
        self.is_index_due = False
        self.needs_spare = False
        """Whether it was the journal that found no room: then there is room when a new file fits."""

    def add(self, writes: list[SegmentWrite], size: int, seq: int, room: int = 0) -> None:
        """Committed (and synced) lines, up to ``seq``, with the room that was promised for them."""
        self._unflushed.append(Unflushed(writes, size, seq, room))
        self._bytes += size
        self._seq = seq

    @property
    def has_work(self) -> bool:
        """Whether lines wait, or a checkpoint is due."""
        return bool(self._unflushed) or self.is_checkpoint_due

    @property
    def has_lines(self) -> bool:
        """Whether lines wait."""
        return bool(self._unflushed)

    def schedule(self, *, now: bool = False) -> None:
        """Flush soon, or now."""
        if self.is_busy or self._is_stopped:
            return
        if now or not self._delay_s or self._bytes >= _BYTES:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_soon(self.flush)
        elif self._timer is None:
            self._timer = self._loop.call_later(self._delay_s, self.flush)

    def flush(self) -> None:
        """Start a job, unless one is running."""
        self._timer = None
        if self.is_busy or self._is_stopped:
            return
        journal, segment_writer, state, room = self._journal, self._segment_writer, self._state, self._room
        taken = self._take_step()
        writes = taken[0].writes if len(taken) == 1 else [write for each in taken for write in each.writes]
        size = sum(each.size for each in taken)
        self._bytes -= size
        seq = taken[-1].seq if self._unflushed else self._seq
        self._since_checkpoint_bytes += size
        is_checkpoint = (
            self.is_checkpoint_due
            or bool(self._unflushed)
            or journal.is_tight
            or self._since_checkpoint_bytes >= journal.file_bytes * 3 // 4
        )
        is_index = self.is_index_due or is_checkpoint or len(state.unindexed) >= _INDEX_ENTRIES
        entries: list[IndexEntry] = []
        if is_index:
            entries = [entry for entry in state.unindexed if entry.seq <= seq]
        elif state.unindexed and self._index_timer is None:
            self._index_timer = self._loop.call_later(_INDEX_DELAY_S, self._feed_index)
        is_spare_due = self.needs_spare or journal.wants_spare
        flushed: list[FlushedSegment] = []
        is_settled = False
        full: StorageFull | IndexFull | None = None
        index_full: IndexFull | None = None

        def job() -> None:
            nonlocal full, index_full, is_settled
            flushed.extend(segment_writer.write(writes))
            is_settled = True
            if room is not None:
                room.settle(sum(each.room for each in taken))
            if is_checkpoint:
                segment_writer.checkpoint(seq)
                journal.checkpointed_seq = seq
                if room is not None:
                    room.give_back()
            if is_index:
                try:
                    segment_writer.feed_index(entries, seq)
                except IndexFull as error:
                    index_full = error  # the segments are written all the same
            full = journal.ensure_space(needs_spare=is_spare_due) or index_full

        def done(error: BaseException | None) -> None:
            self.is_busy = False
            # Also after an error: what was written before it is written, and will not be reported again.
            for segment, flushed_bytes, digest in flushed:
                segment.flushed_bytes = flushed_bytes
                segment.digest = digest or segment.digest
            if error is None:
                self._take_in(seq, len(entries), is_checkpoint=is_checkpoint, is_index=is_index and index_full is None)
                self.is_index_due |= index_full is not None
                self.needs_spare = is_spare_due and isinstance(full, StorageFull)
                self._on_flushed(is_checkpoint, full)
            else:
                again = [each._replace(room=0) for each in taken] if is_settled else taken
                self._unflushed.extendleft(reversed(again))
                self._bytes += size
                self._on_failed(error)
            self._wake()

        self.is_busy = True
        self._executor.run(job, done)

    def _take_step(self) -> list[Unflushed]:
        """Take what one job moves: at most what the reserve has room for, or one commit that is larger."""
        unflushed = self._unflushed
        step_bytes = max(_STEP_BYTES_MIN, self._reserve.for_segments())
        if self._bytes <= step_bytes:
            taken = list(unflushed)
            unflushed.clear()
            return taken
        taken = [unflushed.popleft()]
        size = taken[0].size
        while unflushed and size + unflushed[0].size <= step_bytes:
            taken.append(unflushed.popleft())
            size += taken[-1].size
        return taken

    def _take_in(self, seq: int, entry_count: int, *, is_checkpoint: bool, is_index: bool) -> None:
        state = self._state
        state.flushed_seq = seq
        if is_checkpoint:
            self._since_checkpoint_bytes = 0
            self.is_checkpoint_due = False
        if is_index:
            self.is_index_due = False
            self._duplicates.forget(state.unindexed[:entry_count])
            del state.unindexed[:entry_count]
        state.recent.evict(seq)

    def _feed_index(self) -> None:
        self._index_timer = None
        self.is_index_due = True
        self.schedule(now=True)

    async def idle(self) -> None:
        """Wait until no job is running."""
        while self.is_busy:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(waiter)
            await waiter

    async def run_alone(self, job: Callable[[], None]) -> None:
        """
        Run another job on the segment writer's thread, with nothing beside it. There must be none running.

        Raises:
            Exception: What the job raised.
        """
        assert not self.is_busy
        finished: asyncio.Future[None] = self._loop.create_future()

        def done(error: BaseException | None) -> None:
            self.is_busy = False
            if not finished.done():
                if error is None:
                    finished.set_result(None)
                else:
                    finished.set_exception(error)
            self._wake()

        self.is_busy = True
        self._executor.run(job, done)
        await finished

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def stop(self) -> None:
        """Flush nothing more."""
        self._is_stopped = True
        for timer in (self._timer, self._index_timer):
            if timer is not None:
                timer.cancel()
