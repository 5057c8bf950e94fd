"""
What a log knows while it runs: topics, what is committed, and the most recent records in memory.

Owned by the event loop's thread. The invariant that lets a reader cross from files to memory without missing
or repeating anything: whatever is committed and not (known to be) in a segment file is in ``RecentRecords``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ..interface import TopicInfo
from ..record import Record
from ..retention import SegmentInfo
from .index import IndexEntry
from .layout import StreamKey
from .stream import Stream

__all__ = ["LogState", "RecentRecords", "TopicState"]


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
        return topic

    @property
    def dropped_through_seq(self) -> int:
        """Up to here retention has dropped records of some topic."""
        return max((topic.dropped_through_seq for topic in self.topics.values()), default=0)

    def is_dropped(self, record: Record) -> bool:
        """Whether retention has dropped this record."""
        if not self.dropped_through_seq or record.seq > self.dropped_through_seq:
            return False
        topic = self.topics.get(record.topic)
        return topic is not None and topic.is_dropped(record)

    def streams(self) -> Iterable[Stream]:
        """All streams of all topics."""
        return (stream for topic in self.topics.values() for stream in topic.streams.values())

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
