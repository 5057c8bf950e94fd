"""
Staging: events that were accepted wait, in batches, for a commit.

A batch is what one commit takes. An event's seq is fixed when it joins one (the batch knows its first, and comes after
all that were closed before it); the rest of the work is done for all of them together when the batch is due: offsets,
checksums, lines, and their division by topic.

All who wait for a batch wait on one future, which costs a third less than one each. The price is that cancelling one
waiter cancels the future for all; the others then find that they were not meant, and wait on its replacement.

``WriteStatus`` says whether events are accepted at all, and ``UnsyncedCommits`` holds what was committed without a sync.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tidings.core.clock import Clock, format_utc
from tidings.core.errors import TidingsError

from ..encoding import WRITTEN_NS_MAX, EnvelopeHead, EventDraft, written_ns
from ..errors import LogClosed, LogFenced, StorageFull
from ..interface import Appended
from ..line_codec import LogIdMaker, encode_before_id, encode_record_line
from ..settings import LogSettings
from .index import IndexDamaged, IndexEntry, IndexFull
from .state import LogState, SegmentWrite, TopicState

logger = logging.getLogger(__name__)


class WriteStatus:
    """
    Why events are refused, if they are.

    Args:
        workspace: Which log this is, for the operator.
    """

    __slots__ = ("_workspace", "is_full", "is_index_damaged", "is_index_full", "refusal")

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace
        self.refusal: Callable[[], TidingsError] | None = None
        """Makes the error that says why nothing is accepted; ``None`` while all is well."""
        self.is_full = False
        """No room on the disk, or in the index."""
        self.is_index_full = False
        self.is_index_damaged = False
        """Going on without the index could take duplicates for new; it is derived, so the next opening makes it anew."""

    @property
    def is_fenced(self) -> bool:
        """Whether storage has failed."""
        return self.refusal is not None and self.refusal is not LogClosed and not self.is_full

    @property
    def is_plainly_closed(self) -> bool:
        """Whether nothing but closing keeps events out: all that was accepted can still be committed."""
        return self.refusal is LogClosed

    def close(self) -> None:
        """Accept nothing more; a reason that was there before stays."""
        self.refusal = self.refusal or LogClosed

    def note_full(self, cause: StorageFull | IndexFull) -> bool:
        """There is no room on the disk, or in the index; whether that is news."""
        if self.is_full:
            return False
        self.is_full = True
        self.is_index_full = isinstance(cause, IndexFull)
        self.refusal = self.refusal or same_error(cause)
        logger.error("%s: events are refused until there is room", cause)
        return True

    def note_room(self, *, is_closing: bool) -> None:
        """The disk took something: it is not full, or no longer."""
        if self.is_full:
            self.is_full = self.is_index_full = False
            if not is_closing:
                self.refusal = None
            logger.warning("there is room again: accepting events (workspace %s)", self._workspace)

    def fence(self, error: BaseException) -> Callable[[], TidingsError]:
        """Storage has failed; returns what makes the error that says so."""
        cause = str(error) or type(error).__name__
        logger.error("storage error, the log accepts no more events (workspace %s): %s", self._workspace, cause)
        self.is_full = self.is_index_full = False
        self.is_index_damaged = self.is_index_damaged or isinstance(error, IndexDamaged)
        self.refusal = lambda: LogFenced(cause)
        return self.refusal


def same_error(cause: StorageFull | IndexFull) -> Callable[[], TidingsError]:
    """Make errors that say the same: each caller gets one of its own."""
    if isinstance(cause, IndexFull):
        return lambda: IndexFull(cause.path, cause.bytes_max)
    return lambda: StorageFull(cause.path, cause.problem, cause.hint)


class TopicBatch:
    """A topic's part of a batch."""

    __slots__ = ("first_offset", "first_seq", "is_plain", "last_seq", "lines", "named", "size", "spaces", "topic")

    def __init__(self, topic: TopicState, first_seq: int) -> None:
        self.topic = topic
        self.first_offset = topic.next_offset
        self.first_seq = self.last_seq = first_seq
        self.lines: list[bytes] = []
        self.size = 0
        """Bytes of all lines."""
        self.is_plain = True
        """Whether all its records are, see ``Record.is_plain``."""
        self.named: list[tuple[int, tuple[str, ...]]] = []
        """The seqs of records that name partitions, with those names."""
        self.spaces: list[str] = []
        """The space of each line, in the ``space`` layout only."""


class CommitBatch:
    """What one commit takes."""

    __slots__ = (
        "drafts",
        "entries",
        "failure",
        "first_seq",
        "future",
        "is_from_reserve",
        "lines",
        "room",
        "shares",
        "size",
        "verdicts",
        "written_at",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, first_seq: int) -> None:
        self.first_seq = first_seq
        self.drafts: list[EventDraft] = []
        self.size = 0
        """Bytes of payload; once encoded, of all lines."""
        self.written_at = b""
        self.lines: list[bytes] = []
        self.verdicts: list[Appended] = []
        self.shares: dict[str, TopicBatch] = {}
        self.entries: list[IndexEntry] = []
        self.failure: Callable[[], TidingsError] | None = None
        self.is_from_reserve = False
        """Whether its commit may have room from the reserve."""
        self.room: RoomNeed | None = None
        """What its lines take in the segments, once encoded."""
        self.future: asyncio.Future[None] = loop.create_future()

    @property
    def last_seq(self) -> int:
        """The seq of the last event in it."""
        return self.first_seq + len(self.drafts) - 1

    @property
    def is_committed(self) -> bool:
        """Whether it is durable."""
        return self.future.done() and not self.future.cancelled() and self.failure is None

    async def wait(self) -> None:
        """Wait until the batch is committed; raise if it was not."""
        try:
            await self.future
        except asyncio.CancelledError:
            await self.wait_on()
        if self.failure is not None:
            raise self.failure()

    async def wait_on(self) -> None:
        """Wait on after the future was cancelled: for this waiter, or for another."""
        task = asyncio.current_task()
        while task is None or not task.cancelling():
            if self.future.cancelled():
                self.future = self.future.get_loop().create_future()
            try:
                await self.future
            except asyncio.CancelledError:
                continue
            return
        raise asyncio.CancelledError

    def finish(self, failure: Callable[[], TidingsError] | None = None) -> None:
        """Tell all who wait."""
        self.failure = failure
        if self.future.done():  # cancelled by a waiter in this very tick
            self.future = self.future.get_loop().create_future()
        self.future.set_result(None)


class RoomNeed(NamedTuple):
    """The room that lines take in the segments, in whole blocks, and the number of files that they may begin."""

    size: int
    files: int


class RoomPlanner:
    """
    Works out ``RoomNeed``; in the loop's thread.

    Args:
        state, settings: Where the segments end, and how long they get.
        block_bytes: Files take room in blocks of this size.
    """

    __slots__ = ("_block", "_ends", "_settings", "_state")

    def __init__(self, state: LogState, settings: LogSettings, block_bytes: int) -> None:
        self._state = state
        self._settings = settings
        self._block = block_bytes
        self._ends: dict[tuple[str, str | None], tuple[int, int]] = {}
        """The bytes and lines of each stream's open segment, with what is promised and not placed yet."""

    def need_of(self, batch: CommitBatch) -> RoomNeed:
        """The room that an encoded batch takes."""
        size = files = 0
        for share in batch.shares.values():
            if not share.spaces:
                more, begun = self._add(share.topic.name, None, share.size, len(share.lines))
                size, files = size + more, files + begun
                continue
            by_space: dict[str, tuple[int, int]] = {}
            for space_id, line in zip(share.spaces, share.lines, strict=True):
                held, lines = by_space.get(space_id, (0, 0))
                by_space[space_id] = held + len(line), lines + 1
            for space_id, (held, lines) in by_space.items():
                more, begun = self._add(share.topic.name, space_id, held, lines)
                size, files = size + more, files + begun
        return RoomNeed(size, files)

    def _add(self, topic: str, space_id: str | None, size: int, lines: int) -> tuple[int, int]:
        key, block, settings = (topic, space_id), self._block, self._settings
        end = self._ends.get(key)
        if end is None:
            streams = self._state.topics[topic].streams
            last = streams[space_id].segments[-1] if space_id in streams and streams[space_id].segments else None
            end = (last.size_bytes, last.lines) if last is not None and not last.is_sealed else (0, 0)
        held, held_lines = end
        if (
            held_lines
            and held_lines + lines <= settings.segment_lines_max
            and held + size <= settings.segment_bytes_max
        ):
            self._ends[key] = held + size, held_lines + lines
            return (-(-(held + size) // block) + -held // block) * block, 0
        # New segments: a block for the name of each, one for its last part; and one, as where they begin is not known here.
        files = 1 + lines // settings.segment_lines_max + 2 * size // settings.segment_bytes_max
        self._ends[key] = min(size, settings.segment_bytes_max), min(lines, settings.segment_lines_max)
        return (-(-size // block) + 2 * files + 1) * block, files


class BatchRange:
    """Neighbours in a batch, from ``start`` up to ``end``."""

    __slots__ = ("batch", "end", "start")

    def __init__(self, batch: CommitBatch, start: int) -> None:
        self.batch = batch
        self.start = self.end = start


class Staging:
    """The batches on their way to the disk, and the next seq, offset and id to give out."""

    __slots__ = (
        "_clock",
        "_is_clock_wrong",
        "_is_flat",
        "_last_written_ns",
        "_loop",
        "_state",
        "batches",
        "committing",
        "ids",
        "open_batch",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, state: LogState, clock: Clock, last_written_ns: int, *, is_flat: bool
    ) -> None:
        self._loop = loop
        self._state = state
        self._clock = clock
        self._last_written_ns = last_written_ns
        self._is_clock_wrong = False
        self._is_flat = is_flat
        self.ids = LogIdMaker()
        self.batches: deque[CommitBatch] = deque()
        """Batches that wait for their commit."""
        self.open_batch: CommitBatch | None = None
        """The last of them, while it takes events."""
        self.committing: CommitBatch | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether there are events that wait for a commit."""
        return bool(self.batches)

    @property
    def is_next_from_reserve(self) -> bool:
        """Whether the next batch may have room from the reserve."""
        return bool(self.batches) and self.batches[0].is_from_reserve

    @property
    def next_seq(self) -> int:
        """The seq that the next event will get."""
        last = self.batches[-1] if self.batches else self.committing
        return (last.last_seq if last is not None else self._state.committed_seq) + 1

    def open(self) -> CommitBatch:
        """Close the open batch, if there is one, and open the next, for an event that joins it at once."""
        batch = self.open_batch = CommitBatch(self._loop, self.next_seq)
        self.batches.append(batch)
        return batch

    def take(self) -> CommitBatch | None:
        """The next batch to commit, encoded; ``None`` if nothing waits."""
        if not self.batches:
            return None
        batch = self.committing = self.batches.popleft()
        if batch is self.open_batch:
            self.open_batch = None
        if not batch.lines:
            self._encode(batch)
        return batch

    def put_back(self) -> None:
        """The batch under way was not committed: it is the next one again."""
        assert self.committing is not None
        self.batches.appendleft(self.committing)
        self.committing = None

    def clear(self) -> list[CommitBatch]:
        """Take back all that was given out to the batches that wait, and return them."""
        batches = list(self.batches)
        self.batches.clear()
        self.open_batch = None
        for batch in batches:
            for share in batch.shares.values():
                share.topic.next_offset = share.topic.committed_offset
        return batches

    def find(self, seq: int) -> tuple[CommitBatch, int] | None:
        """The batch that a seq waits in, and its place there."""
        if seq > self._state.committed_seq:
            for batch in self._all():
                if batch.first_seq <= seq <= batch.last_seq:
                    return batch, seq - batch.first_seq
        return None

    def _all(self) -> Iterator[CommitBatch]:
        if self.committing is not None:
            yield self.committing
        yield from self.batches

    def _encode(self, batch: CommitBatch) -> None:
        # A clock that goes back must not: the time of writing is an order as much as a time.
        now_ns = self._clock.now_ns()
        if (now_ns >= WRITTEN_NS_MAX) is not self._is_clock_wrong:
            self._is_clock_wrong = not self._is_clock_wrong
            if self._is_clock_wrong:
                logger.error(
                    "the clock says %s: records get the time of the one before until it is right", format_utc(now_ns)
                )
        self._last_written_ns = written_ns(now_ns, self._last_written_ns)
        batch.written_at = written_at = format_utc(self._last_written_ns)
        lines, verdicts, shares = batch.lines, batch.verdicts, batch.shares
        seq = batch.first_seq
        share: TopicBatch | None = None
        known: EnvelopeHead | None = None
        met: dict[int, tuple[bytes, TopicBatch]] = {}  # by the head's identity: the drafts keep it alive
        before_id = b""
        for draft in batch.drafts:
            head = draft.head
            if head is not known or share is None:
                known = head
                if (found := met.get(id(head))) is not None:
                    before_id, share = found
                else:
                    before_id = encode_before_id(written_at, head.json)
                    share = shares.get(head.topic)
                    if share is None:
                        share = shares[head.topic] = TopicBatch(self._state.topic(head.topic), seq)
                    met[id(head)] = before_id, share
            own = share.lines
            offset = share.first_offset + len(own)
            event_id = draft.event_id
            line = encode_record_line(offset, seq, before_id, event_id, draft.ts_us, draft.rest, draft.payload)
            lines.append(line)
            own.append(line)
            verdicts.append(Appended(seq, offset, event_id))
            share.last_seq = seq
            if draft.rest or draft.is_given:
                self._note(batch, share, draft, seq, offset)
            if not self._is_flat:
                share.spaces.append(head.space_id)
            seq += 1
        for share in shares.values():
            share.topic.next_offset += len(share.lines)
            share.size = sum(map(len, share.lines))
        batch.size = sum(share.size for share in shares.values())

    @staticmethod
    def _note(batch: CommitBatch, share: TopicBatch, draft: EventDraft, seq: int, offset: int) -> None:
        share.is_plain &= not draft.rest
        event_id = draft.event_id if draft.is_given else None
        if event_id is not None or draft.idem_key is not None or draft.partitions:
            head = draft.head
            batch.entries.append(
                IndexEntry(seq, head.topic, offset, event_id, draft.idem_key, head.space_id, draft.partitions)
            )
        if draft.partitions:
            share.named.append((seq, draft.partitions))


_UNPROMISED_INTERVAL_S: Final = 1.0


class UnsyncedCommits:
    """
    The lines that a sync is still due for.

    Args:
        loop, settings: When a sync is due.
        on_due: Told when it is.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: LogSettings, on_due: Callable[[], None]) -> None:
        is_promised = settings.durability == "interval"
        self._interval_s = settings.sync_interval_ms / 1000 if is_promised else _UNPROMISED_INTERVAL_S
        self._loop = loop
        self._on_due = on_due
        self._is_timer_set = False
        self.writes: list[SegmentWrite] = []
        self._room = 0
        self.is_wanted = False
        """Whether the next job of the commit thread is to be a sync."""

    def add(self, writes: list[SegmentWrite], room: int) -> None:
        """Lines that were committed, and the room that was promised for them."""
        self.writes += writes
        self._room += room
        if not self._is_timer_set:
            self._is_timer_set = True
            self._loop.call_later(self._interval_s, self._ring)

    def _ring(self) -> None:
        self._is_timer_set = False
        self.is_wanted = True
        self._on_due()

    def take(self) -> tuple[list[SegmentWrite], int, int]:
        """All lines, which are synced now, their size in bytes, and the room that was promised for them."""
        writes, self.writes = self.writes, []
        room, self._room = self._room, 0
        return writes, sum(len(line) for write in writes for line in write.lines), room
