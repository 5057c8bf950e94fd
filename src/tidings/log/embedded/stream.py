"""
One stream of segments, as the engine knows it: what is where, and where the next line goes.

A stream is a topic, or one space's part of a topic in the ``space`` layout. ``place`` decides, for lines
that were committed, in which segment and at which byte each belongs; the settler then writes what it is
told. The decision is made once, in commit order, so it does not depend on when the writing happens.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..retention import SegmentInfo
from ..segment import Head, head_of
from .layout import StreamKey

__all__ = ["Chunk", "Named", "Segment", "Stream"]

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


class Chunk:
    """An order to the settler: these lines at this byte of this segment, then perhaps seal it."""

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
    ) -> list[Chunk]:
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
            chunk = Chunk(self, active, active.size_bytes, lines)
            active.grow(len(lines), size, first, last, named)
            return [chunk]
        return self._place_across(lines, active, named)

    def place_found(self, lines: Sequence[bytes], named: Named) -> list[Chunk]:
        """As ``place``, for lines whose places have to be read from their heads."""
        first, last = _place_of(lines[0]), _place_of(lines[-1])
        own = {_place_of(line).seq for line in lines} if named else set()
        return self.place(
            lines, sum(map(len, lines)), first, last, [(seq, parts) for seq, parts in named if seq in own]
        )

    def _place_across(self, lines: Sequence[bytes], active: Segment | None, named: Named) -> list[Chunk]:
        chunks: list[Chunk] = []
        at = 0
        while at < len(lines):
            if active is None or not self._fits(active, len(lines[at])):
                if active is not None:
                    active.is_sealed = True
                    if not (chunks and chunks[-1].segment is active):
                        chunks.append(Chunk(self, active, active.size_bytes, ()))
                    chunks[-1].seals = True
                active = Segment(self.next_number)
                self.next_number += 1
                self.segments.append(active)
            start, size = at, 0
            while at < len(lines) and self._fits(active, len(lines[at]), at - start, size):
                size += len(lines[at])
                at += 1
            part = lines[start:at]
            chunks.append(Chunk(self, active, active.size_bytes, part))
            first, last = _place_of(part[0]), _place_of(part[-1])
            inside = [(seq, partitions) for seq, partitions in named if first.seq <= seq <= last.seq]
            active.grow(len(part), size, first, last, inside)
        return chunks

    def _fits(self, segment: Segment, size: int, more_lines: int = 0, more_bytes: int = 0) -> bool:
        held_lines, held_bytes = segment.lines + more_lines, segment.size_bytes + more_bytes
        return held_lines < self.lines_max and (not held_lines or held_bytes + size <= self.bytes_max)


def _place_of(line: bytes) -> Head:
    head = head_of(line)
    assert head is not None, "a committed line has a head"
    return head
