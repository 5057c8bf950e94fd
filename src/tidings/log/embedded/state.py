"""
What a log knows while it runs: topics and their segments, what is committed, and the most recent records in memory.

Owned by the event loop's thread. The invariant that lets a reader cross from files to memory without missing
or repeating anything: whatever is committed and not (known to be) in a segment file is in ``RecentRecords``.

A stream is a topic, or one space's part of a topic in the ``space`` layout. ``Stream.place`` decides, for lines
that were committed, in which segment and at which byte each belongs; the segment writer then writes what it is
told. The decision is made once, in commit order, so it does not depend on when the writing happens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..interface import TopicInfo
from ..record import Record
from ..retention import SegmentInfo
from ..segment import Head, head_of
from .index import IndexEntry
from .layout import StreamKey

Named = Sequence[tuple[int, tuple[str, ...]]]
"""The seqs of records that name partitions, with those names."""


class Segment:
    """One segment's bounds. Written by the loop's thread only."""

    __slots__ = (
        "digest",
        "first_offset",
        "first_seq",
        "first_written_at",
        "flushed_bytes",
        "is_sealed",
        "last_offset",
        "last_seq",
        "last_written_at",
        "lines",
        "number",
        "partitions",
        "size_bytes",
        "view",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.first_offset = self.first_seq = 0
        self.last_offset = self.last_seq = -1
        self.first_written_at = self.last_written_at = ""
        self.lines = 0
        self.size_bytes = 0
        self.flushed_bytes = 0
        """What readers may take from the file; the rest is still in memory."""
        self.is_sealed = False
        self.digest: str | None = None
        self.view: object = None
        """What the reader made of it last; sealed segments do not change."""
        self.partitions: dict[str, int] = {}

    def grow(self, lines: int, size: int, first: Head, last: Head, named: Named) -> None:
        """Count lines in, from ``first`` to ``last``, with the partitions they name."""
        if not self.lines:
            self.first_offset, self.first_seq, self.first_written_at = first
        self.last_offset, self.last_seq, self.last_written_at = last
        self.lines += lines
        self.size_bytes += size
        for seq, partitions in named:
            for partition in partitions:
                self.partitions[partition] = seq

    def info(self, key: StreamKey) -> SegmentInfo:
        """The segment as retention and the tools see it."""
        return SegmentInfo(
            topic=key.topic,
            space_id=key.space_id,
            number=self.number,
            is_sealed=self.is_sealed,
            first_offset=self.first_offset,
            last_offset=self.last_offset,
            first_seq=self.first_seq,
            last_seq=self.last_seq,
            first_written_at=self.first_written_at,
            last_written_at=self.last_written_at,
            lines=self.lines,
            size_bytes=self.size_bytes,
            partitions=dict(self.partitions),
            digest=self.digest,
        )


class SegmentWrite:
    """An order to the segment writer: these lines at this byte of this segment, then perhaps seal it."""

    __slots__ = ("byte_offset", "lines", "seals", "segment", "stream")

    def __init__(self, stream: Stream, segment: Segment, byte_offset: int, lines: Sequence[bytes]) -> None:
        self.stream = stream
        self.segment = segment
        self.byte_offset = byte_offset
        self.lines = lines
        self.seals = False


class Stream:
    """The segments of one stream, oldest first."""

    __slots__ = (
        "bytes_max",
        "dropped_through_offset",
        "dropped_through_seq",
        "key",
        "lines_max",
        "next_number",
        "segments",
    )

    def __init__(self, key: StreamKey, *, lines_max: int, bytes_max: int) -> None:
        self.key = key
        self.lines_max = lines_max
        self.bytes_max = bytes_max
        self.segments: list[Segment] = []
        self.next_number = 1
        self.dropped_through_offset = -1
        self.dropped_through_seq = 0

    @property
    def last_offset(self) -> int:
        """The offset of the last line placed; of the last one dropped if all are gone; else -1."""
        return self.segments[-1].last_offset if self.segments else self.dropped_through_offset

    @property
    def last_seq(self) -> int:
        """The seq of the last line placed; of the last one dropped if all are gone; else 0."""
        return self.segments[-1].last_seq if self.segments else self.dropped_through_seq

    @property
    def size_bytes(self) -> int:
        """All segments together."""
        return sum(segment.size_bytes for segment in self.segments)

    def place(
        self,
        lines: Sequence[bytes],
        size: int,
        first: Head,
        last: Head,
        named: Named = (),
    ) -> list[SegmentWrite]:
        """
        Give each line its segment and byte; ``first`` and ``last`` are the places of the outer two.

        A line opens a new segment when the active one is full by lines, or would be by bytes.
        """
        active = self.segments[-1] if self.segments and not self.segments[-1].is_sealed else None
        if (
            active is not None
            and active.lines + len(lines) <= self.lines_max
            and active.size_bytes + size <= self.bytes_max
        ):
            write = SegmentWrite(self, active, active.size_bytes, lines)
            active.grow(len(lines), size, first, last, named)
            return [write]
        return self._place_across(lines, active, named)

    def place_found(self, lines: Sequence[bytes], named: Named) -> list[SegmentWrite]:
        """As ``place``, for lines whose places have to be read from their heads."""
        first, last = _place_of(lines[0]), _place_of(lines[-1])
        own = {_place_of(line).seq for line in lines} if named else set()
        return self.place(
            lines, sum(map(len, lines)), first, last, [(seq, parts) for seq, parts in named if seq in own]
        )

    def _place_across(self, lines: Sequence[bytes], active: Segment | None, named: Named) -> list[SegmentWrite]:
        writes: list[SegmentWrite] = []
        at = 0
        while at < len(lines):
            if active is None or not self._fits(active, len(lines[at])):
                if active is not None:
                    active.is_sealed = True
                    if not (writes and writes[-1].segment is active):
                        writes.append(SegmentWrite(self, active, active.size_bytes, ()))
                    writes[-1].seals = True
                active = Segment(self.next_number)
                self.next_number += 1
                self.segments.append(active)
            start, size = at, 0
            while at < len(lines) and self._fits(active, len(lines[at]), at - start, size):
                size += len(lines[at])
                at += 1
            part = lines[start:at]
            writes.append(SegmentWrite(self, active, active.size_bytes, part))
            first, last = _place_of(part[0]), _place_of(part[-1])
            inside = [(seq, partitions) for seq, partitions in named if first.seq <= seq <= last.seq]
            active.grow(len(part), size, first, last, inside)
        return writes

    def _fits(self, segment: Segment, size: int, more_lines: int = 0, more_bytes: int = 0) -> bool:
        held_lines, held_bytes = segment.lines + more_lines, segment.size_bytes + more_bytes
        return held_lines < self.lines_max and (not held_lines or held_bytes + size <= self.bytes_max)


def _place_of(line: bytes) -> Head:
    head = head_of(line)
    assert head is not None, "a committed line has a head"
    return head


class TopicState:
    """One topic: its streams (one, but for the ``space`` layout), and its recent lines."""

    __slots__ = (
        "committed_offset",
        "last_seq",
        "name",
        "next_offset",
        "plain_from",
        "recent",
        "recent_first",
        "streams",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.streams: dict[str | None, Stream] = {}
        self.next_offset = 0
        """What the next event will get; runs ahead of ``committed_offset`` by what is staged."""
        self.committed_offset = 0
        """One past the last committed record."""
        self.last_seq = 0
        self.recent: list[bytes] = []
        self.recent_first = 0
        """The offset of the first line in ``recent``."""
        self.plain_from = 0
        """From this offset on all lines in ``recent`` are those of plain records (``Record.is_plain``)."""

    @property
    def first_offset(self) -> int:
        """The oldest offset kept; ``committed_offset`` if none is."""
        firsts = [stream.segments[0].first_offset for stream in self.streams.values() if stream.segments]
        if not firsts and self.recent:  # a crash left them in the journal only, and a follower shows them from there
            dropped = max((stream.dropped_through_offset for stream in self.streams.values()), default=-1)
            return max(self.recent_first, dropped + 1)
        return min(firsts, default=self.committed_offset)

    @property
    def dropped_through_seq(self) -> int:
        """Up to here retention has dropped records of this topic."""
        return max((stream.dropped_through_seq for stream in self.streams.values()), default=0)

    @property
    def has_drops(self) -> bool:
        """Whether retention has dropped records of this topic."""
        return any(stream.dropped_through_offset >= 0 for stream in self.streams.values())

    def is_dropped(self, record: Record) -> bool:
        """Whether retention has dropped this record, which memory may still hold."""
        stream = self.streams.get(None) or self.streams.get(record.meta.space_id)
        return stream is not None and record.offset <= stream.dropped_through_offset

    def info(self) -> TopicInfo:
        """The topic as the interface shows it."""
        segments: list[SegmentInfo] = [
            segment.info(stream.key) for stream in self.streams.values() for segment in stream.segments
        ]
        segments.sort(key=lambda segment: segment.first_seq)
        return TopicInfo(
            topic=self.name,
            first_offset=self.first_offset,
            next_offset=self.committed_offset,
            first_seq=segments[0].first_seq if segments else self.last_seq + 1,
            last_seq=self.last_seq,
            size_bytes=sum(segment.size_bytes for segment in segments),
            segments=tuple(segments),
        )


class _Share(NamedTuple):
    """What one commit added to memory."""

    last_seq: int
    lines: int
    size: int
    topics: list[tuple[TopicState, int]]


class RecentRecords:
    """The last committed lines of all topics in seq order; seqs are dense, so a line's place is its seq's."""

    def __init__(self, bytes_max: int, first_seq: int) -> None:
        self._bytes_max = bytes_max
        self._shares: deque[_Share] = deque()
        self._size = 0
        self.first_seq = first_seq
        self.lines: list[bytes] = []

    def extend(self, lines: list[bytes], size: int, parts: Iterable[tuple[TopicState, list[bytes]]]) -> None:
        """Take in one commit."""
        self.lines += lines
        self._size += size
        shares: list[tuple[TopicState, int]] = []
        for topic, own in parts:
            topic.recent += own
            shares.append((topic, len(own)))
        self._shares.append(_Share(self.first_seq + len(self.lines) - 1, len(lines), size, shares))

    def evict(self, flushed_seq: int) -> None:
        """Let go of the oldest commits beyond the limit, as far as the files hold them."""
        # Emptying the front of a list costs its length, so it is done rarely and in bulk.
        if self._size * 4 <= self._bytes_max * 5:
            return
        count = 0
        by_topic: dict[TopicState, int] = {}
        while self._shares and self._size > self._bytes_max and self._shares[0].last_seq <= flushed_seq:
            share = self._shares.popleft()
            self._size -= share.size
            count += share.lines
            for topic, own in share.topics:
                by_topic[topic] = by_topic.get(topic, 0) + own
        del self.lines[:count]
        self.first_seq += count
        for topic, own in by_topic.items():
            del topic.recent[:own]
            topic.recent_first += own

    def line_at(self, seq: int) -> bytes | None:
        """The line of a seq, if it is in memory."""
        at = seq - self.first_seq
        return self.lines[at] if 0 <= at < len(self.lines) else None


class LogState:
    """The log as its readers see it."""

    def __init__(self, epoch: str, last_seq: int, recent_bytes_max: int) -> None:
        self.epoch = epoch
        self.committed_seq = last_seq
        self.flushed_seq = last_seq
        """Everything up to here is in the segment files (though perhaps not synced)."""
        self.topics: dict[str, TopicState] = {}
        self.dropped_through_seq = 0
        """Up to here retention has dropped records of some topic. Kept: with thousands of topics each read would look at all."""
        self.recent = RecentRecords(recent_bytes_max, last_seq + 1)
        self.unindexed: list[IndexEntry] = []
        """Committed records that the index does not have yet, in seq order."""

    def topic(self, name: str) -> TopicState:
        """The topic's state, made if it is new."""
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = TopicState(name)
        return topic

    def add_stream(self, stream: Stream) -> TopicState:
        """Take in a stream that recovery found."""
        topic = self.topic(stream.key.topic)
        topic.streams[stream.key.space_id] = stream
        topic.committed_offset = max(topic.committed_offset, stream.last_offset + 1)
        topic.next_offset = topic.recent_first = topic.committed_offset
        topic.last_seq = max(topic.last_seq, stream.last_seq)
        self.note_drop(stream)
        return topic

    def note_drop(self, stream: Stream) -> None:
        """A stream's records were dropped up to ``stream.dropped_through_seq``."""
        self.dropped_through_seq = max(self.dropped_through_seq, stream.dropped_through_seq)

    def is_dropped(self, record: Record) -> bool:
        """Whether retention has dropped this record."""
        if not self.dropped_through_seq or record.seq > self.dropped_through_seq:
            return False
        topic = self.topics.get(record.topic)
        return topic is not None and topic.is_dropped(record)

    def streams(self) -> Iterable[Stream]:
        """All streams of all topics."""
        return (stream for topic in self.topics.values() for stream in topic.streams.values())

    def info(self, name: str) -> TopicInfo | None:
        """A topic that holds or held records."""
        topic = self.topics.get(name)
        return topic.info() if topic is not None and (topic.committed_offset or topic.has_drops) else None

    def infos(self) -> dict[str, TopicInfo]:
        """All topics that hold or held records."""
        return {
            name: topic.info()
            for name, topic in sorted(self.topics.items())
            if topic.committed_offset or topic.has_drops
        }


def stream_of(topic: TopicState, key: StreamKey, lines_max: int, bytes_max: int) -> Stream:
    """The topic's stream of that key, made if it is new."""
    stream = topic.streams.get(key.space_id)
    if stream is None:
        stream = topic.streams[key.space_id] = Stream(key, lines_max=lines_max, bytes_max=bytes_max)
    return stream


class CommitWaiters:
    """Futures to be woken by the next commit, of any topic or of one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._any: list[asyncio.Future[None]] = []
        self._by_topic: dict[str, list[asyncio.Future[None]]] = {}

    async def wait(self, topic: str | None) -> None:
        """Sleep until the next commit (in ``topic``, if given), or until the log is closed."""
        waiting = self._any if topic is None else self._by_topic.setdefault(topic, [])
        waiter: asyncio.Future[None] = self._loop.create_future()
        waiting.append(waiter)
        try:
            await waiter
        finally:
            if waiter.cancelled() and waiter in waiting:
                waiting.remove(waiter)

    def wake_any(self) -> None:
        """Something was committed: wake those who wait for any topic."""
        if self._any:
            _finish(self._any)

    def wake(self, topics: Iterable[TopicState]) -> None:
        """Something was committed in these topics: wake those who wait for one of them."""
        if self._by_topic:
            for topic in topics:
                if (waiting := self._by_topic.pop(topic.name, None)) is not None:
                    _finish(waiting)

    def close(self) -> None:
        """Wake everybody: there will be no more commits."""
        _finish(self._any)
        for waiting in self._by_topic.values():
            _finish(waiting)
        self._by_topic.clear()


def _finish(waiting: list[asyncio.Future[None]]) -> None:
    waiters = waiting.copy()
    waiting.clear()
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
