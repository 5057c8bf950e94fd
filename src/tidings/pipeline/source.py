"""
What the log's segments hold: what is new after a seq, as byte ranges of segments, and every segment as a row.

A run sees the records after ``since`` up to ``until`` and no others. ``until`` is the last seq up to which every record is
known to be in a segment: the log's checkpoint says so for most, and behind it the whole, checked lines of the open segments
do for as long as their seqs follow one another. Segments only hold committed records, so what is found there is never taken
back; a line that is still being written is seen by the next run.

Much new data is taken in several chunks, each ended at a seq of its own, so that one commit stays bounded. Nothing here reads
more of a sealed segment than its seal: the tasks read the bytes. No lock is taken; whoever writes goes on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from tidings.log.embedded.checkpoint import Seal
from tidings.log.embedded.disk import Disk, File, end_of_lines
from tidings.log.embedded.inspect import read_checkpoint, seal_lines
from tidings.log.embedded.layout import Layout, StreamKey
from tidings.log.segment import HEAD_BYTES_MAX, head_of, is_whole

from .errors import PositionLost, SegmentMissing
from .schemas import SILVER_SEGMENTS, arrow_schema
from .state_files import Hints, Mark

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

_BLOCK_BYTES: Final = 1 << 20
_UNBOUNDED: Final = 1 << 62
_BUNDLE_FILES_MAX: Final = 2_000
_BUNDLE_BYTES_MIN: Final = 2 << 20
_TAIL_BYTES_MAX: Final = 512 << 20
"""Of the lines behind the checkpoint, so many bytes are looked at; a log keeps far fewer there."""


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """A range of one segment's bytes; both ends are ends of lines."""

    path: str
    """Relative to the folder of the segments."""
    topic: str
    start: int
    end: int
    file_bytes: int = 0
    sha256: str | None = None
    """Of the whole file, if it is sealed."""

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Gap:
    """A segment that retention dropped before the lake had it."""

    path: str
    topic: str
    first_seq: int
    last_seq: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class SourceChunk:
    """What one commit takes: the records after ``since`` up to ``until`` among these ranges."""

    since: int
    until: int
    ranges: tuple[SegmentRange, ...]
    gaps: tuple[Gap, ...]
    hints: Hints
    """Where to read on once this chunk is committed."""

    @property
    def size(self) -> int:
        return sum(each.size for each in self.ranges)


@dataclass(frozen=True, slots=True)
class Selection:
    """What of the log is of interest; whole segments are left out by it, never single records."""

    topics: frozenset[str] | None = None
    written_from: datetime | None = None
    written_to: datetime | None = None
    """Times of writing, both included. They never go back within a log."""

    def may_hold(self, topic: str, seal: Seal | None) -> bool:
        """Whether a segment may hold records of interest; one without a seal may hold any of its topic."""
        if self.topics is not None and topic not in self.topics:
            return False
        if seal is None:
            return True
        first, last = _time_of(seal.first_written_at), _time_of(seal.last_written_at)
        if self.written_from is not None and last is not None and last < self.written_from:
            return False
        return self.written_to is None or first is None or first <= self.written_to


@dataclass(slots=True)
class _Part:
    """One segment of a stream, as far as it is of interest."""

    stream: _Stream
    number: int
    start: int
    end: int
    first_seq: int
    last_seq: int
    mark: Mark
    """Where to read on once this segment is taken as a whole."""
    seal: Seal | None = None
    is_missing: bool = False

    def slice(self, start: int | None = None, end: int | None = None) -> SegmentRange:
        sha256 = None if self.seal is None else self.seal.sha256
        return SegmentRange(
            self.stream.path_of(self.number),
            self.stream.key.topic,
            self.start if start is None else start,
            self.end if end is None else end,
            0 if self.seal is None else self.seal.bytes,
            sha256,
        )


@dataclass(slots=True)
class _Stream:
    key: StreamKey
    numbers: list[int]
    mark: Mark
    tail: list[tuple[int, int, int]] = field(default_factory=list)
    """Lines behind the checkpoint: seq, segment, and the byte after the line."""
    ends: dict[int, int] = field(default_factory=dict)
    """Of segments that were looked at, the byte after the last line that counts."""
    dropped: set[int] | None = None

    def path_of(self, number: int) -> str:
        folder, _, _ = self.key.path.rpartition("/")
        name = f"{self.key.topic}.{number:08d}.jsonl"
        return f"{folder}/{name}" if folder else name


class LogSource:
    """
    The segments of one workspace.

    Args:
        layout, disk: Where the log is.
    """

    def __init__(self, layout: Layout, disk: Disk) -> None:
        self.layout = layout
        self._disk = disk

    def pin(self, since: int, hints: Hints, *, until: int | None = None, selection: Selection | None = None) -> LogView:
        """
        Pin what the log holds after ``since`` now.

        Args:
            since: The seq to read on after.
            hints: Where to look for it; none are as good, and cost reading.
            until: The seq to end at, instead of at the last there is.
            selection: What is of interest of it; all if that is not said.

        Raises:
            PositionLost: The log ends before ``since``, or before ``until``.
        """
        # The checkpoint before the listing: what it covers is then surely listed, or dropped since.
        checkpoint = read_checkpoint(self._disk, self.layout)
        streams = [
            _Stream(key, numbers, hints.streams.get(key.path, Mark(1)))
            for key, numbers in sorted(self.layout.segments(self._disk).items(), key=lambda pair: pair[0].path)
        ]
        # The hints reach further than the checkpoint if no file was cut, removed or written anew since they were taken.
        from_hints = (
            hints.seq >= checkpoint.seq
            and hints.streams.keys() <= {stream.key.path for stream in streams}
            and all(self._reaches(stream, stream.mark) for stream in streams)
        )
        last = base = hints.seq if from_hints else checkpoint.seq
        budget = _TAIL_BYTES_MAX
        for stream in streams:
            known = checkpoint.streams.get(stream.key.path)
            covered = stream.mark if from_hints else Mark(1) if known is None else Mark(known.segment, known.bytes)
            budget = self._scan_tail(stream, covered, base, budget)
        for seq in heapq.merge(*([line[0] for line in stream.tail] for stream in streams)):
            if seq > last + 1:
                break
            last = seq
        wanted = since if until is None else until
        if last < wanted:
            raise PositionLost(wanted, last)
        return LogView(
            self,
            streams,
            hints.epoch,
            since,
            last if until is None else until,
            selection=selection or Selection(),
            looked_from=base,
        )

    def _scan_tail(self, stream: _Stream, covered: Mark, base: int, budget: int) -> int:
        """Note the lines behind ``covered`` that are after ``base``, within the budget of bytes; what is left of that."""
        is_flawed = False
        for number in stream.numbers:
            if number < covered.segment:
                continue
            start = end = covered.byte_offset if number == covered.segment else 0
            if not is_flawed and budget > 0:
                for line_end, seq in self._lines(stream, number, start):
                    if seq is None:
                        is_flawed = True
                        break
                    end = line_end
                    if seq > base:
                        stream.tail.append((seq, number, line_end))
                budget -= end - start
            stream.ends[number] = end
        return budget

    def _reaches(self, stream: _Stream, mark: Mark) -> bool:
        if mark.segment < stream.numbers[-1]:
            return True
        return mark.segment == stream.numbers[-1] and self._size(stream, mark.segment) >= mark.byte_offset

    def _size(self, stream: _Stream, number: int) -> int:
        file = self.open(stream, number)
        try:
            return file.size()
        finally:
            file.close()

    def open(self, stream: _Stream, number: int) -> File:
        return self._disk.open(self.layout.segment(stream.key, number))

    def _lines(self, stream: _Stream, number: int, start: int) -> Iterator[tuple[int, int | None]]:
        """The end of each whole line from ``start`` on with its seq, or ``None`` for the seq at the first flaw."""
        file = self.open(stream, number)
        try:
            at, rest = start, b""
            while block := file.read(at + len(rest), _BLOCK_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    head = head_of(line[:HEAD_BYTES_MAX]) if is_whole(line) else None
                    if head is None:
                        yield at, None
                        return
                    at += len(line) + 1
                    yield at, head.seq
            if rest:
                yield at, None
        finally:
            file.close()

    def seq_at(self, stream: _Stream, number: int, byte_offset: int) -> int | None:
        """The seq of the line that begins at this byte; ``None`` if there is none."""
        file = self.open(stream, number)
        try:
            head = head_of(file.read(byte_offset, HEAD_BYTES_MAX))
        finally:
            file.close()
        return None if head is None else head.seq

    def parts(self, stream: _Stream, until: int) -> Iterator[_Part]:
        """The stream's segments from its mark on, oldest first: what is sealed by its seals, the rest by its bytes."""
        sealed_through = stream.mark.segment - 1
        there = set(stream.numbers)
        for seal, seal_end in self._seals(stream, stream.mark.seal_byte_offset):
            if isinstance(seal, int) or seal.segment <= sealed_through:
                continue
            if seal.segment not in there and seal.segment not in self._dropped(stream):
                raise SegmentMissing(stream.path_of(seal.segment))
            sealed_through = seal.segment
            is_first = seal.segment == stream.mark.segment
            yield _Part(
                stream,
                seal.segment,
                start=min(stream.mark.byte_offset, seal.bytes) if is_first else 0,
                end=seal.bytes,
                first_seq=seal.first_seq,
                last_seq=seal.last_seq,
                mark=Mark(seal.segment + 1, 0, seal_end),
                seal=seal,
                is_missing=seal.segment not in there,
            )
        for number in stream.numbers:
            if number <= sealed_through:
                continue
            start = stream.mark.byte_offset if number == stream.mark.segment else 0
            end = self._end_of(stream, number, until)
            if end < start:  # the hint was for a file that has changed its shape: look at all of it
                start = 0
            # A first line that cannot be read says nothing about the place of the others: the tasks look at them all.
            first_seq = self.seq_at(stream, number, start) or 0 if end > start else until + 1
            yield _Part(
                stream,
                number,
                start=start,
                end=end,
                first_seq=first_seq,
                last_seq=until + 1,
                mark=Mark(number, end, stream.mark.seal_byte_offset),
            )

    def _dropped(self, stream: _Stream) -> set[int]:
        """The segments that retention says it dropped; looked up once, and only if one is missing."""
        if stream.dropped is None:
            stream.dropped = {seal for seal, _ in self._seals(stream, 0) if isinstance(seal, int)}
        return stream.dropped

    def _end_of(self, stream: _Stream, number: int, until: int) -> int:
        """The byte after the last line of an open segment that is not after ``until``."""
        after = [end for seq, segment, end in stream.tail if segment == number and seq > until]
        within = [end for seq, segment, end in stream.tail if segment == number and seq <= until]
        if within:
            return within[-1]
        if not after:
            # What was written since the look has no place in this view.
            end = stream.ends.get(number)
            return self._whole_end(stream, number, self._size(stream, number)) if end is None else end
        # Its first line behind the checkpoint is after ``until``: the line ends where that one begins.
        return self._whole_end(stream, number, after[0] - 1)

    def _whole_end(self, stream: _Stream, number: int, size: int) -> int:
        """The byte after the last newline among the first ``size`` bytes."""
        file = self.open(stream, number)
        try:
            return end_of_lines(file, size)
        finally:
            file.close()

    def _seals(self, stream: _Stream, start: int) -> Iterator[tuple[Seal | int, int]]:
        return seal_lines(self._disk, self.layout, stream.key, start)


class LogView:
    """What the log held when it was looked at."""

    def __init__(
        self,
        source: LogSource,
        streams: list[_Stream],
        epoch: str,
        since: int,
        until: int,
        *,
        selection: Selection,
        looked_from: int,
    ) -> None:
        self._source = source
        self._streams = streams
        self._epoch = epoch
        self._selection = selection
        self._looked_from = looked_from
        """Behind this seq every line was looked at, so that a segment can be cut between any two."""
        self.since = since
        self.until = until

    def chunks(self, bytes_max: int = _UNBOUNDED, files_max: int = _UNBOUNDED) -> Iterator[SourceChunk]:
        """
        The way from ``since`` to ``until``, in order; each chunk begins where the one before ended.

        A chunk may hold somewhat more than asked: it is cut at the end of a segment, and the other topics give their
        part up to the same seq.
        """
        since = self.since
        queues = {stream.key.path: _Queue(self._source.parts(stream, self.until)) for stream in self._streams}
        while since < self.until:
            chunk = self._next_chunk(queues, since, bytes_max, files_max)
            yield chunk
            since = chunk.until

    def _next_chunk(self, queues: dict[str, _Queue], since: int, bytes_max: int, files_max: int) -> SourceChunk:
        ranges: list[SegmentRange] = []
        gaps: list[Gap] = []
        size, until = 0, self.until
        # Whole segments, the one that ends first in seq order first, until the chunk is full.
        heap = [(part.last_seq, path) for path, queue in queues.items() if (part := queue.head) is not None]
        heapq.heapify(heap)
        while heap:
            last_seq, path = heapq.heappop(heap)
            if last_seq > self.until:
                break
            if size >= bytes_max or len(ranges) >= files_max:
                until = min(last_seq - 1, self.until)
                break
            part = queues[path].take()
            if part.last_seq > since and self._is_wanted(part):
                if part.is_missing:
                    gaps.append(_gap(part))
                else:
                    ranges.append(part.slice())
                    size += part.end - part.start
            if (following := queues[path].head) is not None:
                heapq.heappush(heap, (following.last_seq, path))
        # Of the others the beginning, as far as it is not after the cut: the tasks leave out the rest.
        for queue in queues.values():
            for part in queue.upto(until):
                if part.is_missing and self._is_wanted(part):
                    gaps.append(_gap(part))
                elif self._is_wanted(part):
                    ranges.append(part.slice())
        is_cut = until == self.until and until >= self._looked_from
        marks = {path: mark for path, queue in queues.items() if (mark := queue.mark(is_cut=is_cut)) is not None}
        ranges.sort(key=lambda each: (each.topic, each.path, each.start))
        return SourceChunk(since, until, tuple(ranges), tuple(gaps), Hints(self._epoch, until, marks))

    def _is_wanted(self, part: _Part) -> bool:
        is_there = part.is_missing or part.end > part.start
        return is_there and self._selection.may_hold(part.stream.key.topic, part.seal)


class _Queue:
    """A stream's segments that are not yet taken, read as they are asked for."""

    def __init__(self, parts: Iterator[_Part]) -> None:
        self._parts = parts
        self._ahead: list[_Part] = []
        self._last: Mark | None = None
        self._start: Mark | None = None

    @property
    def head(self) -> _Part | None:
        self._fill(1)
        return self._ahead[0] if self._ahead else None

    def _fill(self, count: int) -> None:
        while len(self._ahead) < count and (part := next(self._parts, None)) is not None:
            self._ahead.append(part)
            if self._start is None:
                self._start = part.stream.mark

    def take(self) -> _Part:
        part = self._ahead.pop(0)
        self._last = part.mark
        return part

    def upto(self, until: int) -> Iterator[_Part]:
        """The segments that begin at ``until`` or before; they stay in the queue."""
        count = 1
        while True:
            self._fill(count)
            if len(self._ahead) < count or self._ahead[count - 1].first_seq > until:
                return
            yield self._ahead[count - 1]
            count += 1

    def mark(self, *, is_cut: bool) -> Mark | None:
        """Where to read on. ``is_cut`` says that the segments that have no seal end where the chunk does."""
        mark = self._last if self._last is not None else self._start
        if not is_cut:
            return mark
        for part in self._ahead:
            if part.seal is not None:
                return mark
            seal_byte_offset = 0 if mark is None else mark.seal_byte_offset
            mark = Mark(part.number, part.end, seal_byte_offset)
        return mark


def bundles(ranges: Sequence[SegmentRange], bytes_max: int, parallel: int) -> tuple[tuple[SegmentRange, ...], ...]:
    """
    The ranges as work for tasks: large ones split, small ones put together, topics left side by side.

    Every task gets about the same number of bytes, and there are enough tasks for all cores to have some.
    """
    total = sum(each.size for each in ranges)
    goal = max(_BUNDLE_BYTES_MIN, min(bytes_max, total // (2 * parallel) + 1))
    found: list[tuple[SegmentRange, ...]] = []
    current: list[SegmentRange] = []
    size = 0
    for part in _split(ranges, goal):
        if current and (size + part.size > goal * 5 // 4 or len(current) >= _BUNDLE_FILES_MAX):
            found.append(tuple(current))
            current, size = [], 0
        current.append(part)
        size += part.size
    if current:
        found.append(tuple(current))
    return tuple(found)


def _split(ranges: Sequence[SegmentRange], goal: int) -> Iterator[SegmentRange]:
    for each in ranges:
        count = max(1, round(each.size / goal))
        for number in range(count):
            start = each.start + each.size * number // count
            end = each.start + each.size * (number + 1) // count
            yield SegmentRange(each.path, each.topic, start, end, each.file_bytes, each.sha256)


def _gap(part: _Part) -> Gap:
    assert part.seal is not None
    seal = part.seal
    return Gap(
        part.stream.path_of(part.number),
        part.stream.key.topic,
        seal.first_seq,
        seal.last_seq,
        seal.first_offset,
        seal.last_offset,
    )


def first_offsets(layout: Layout, disk: Disk, topics: Iterable[str]) -> dict[str, int | None]:
    """
    The first offset that the log still holds of each of these topics that retention dropped something of; ``None`` where it cannot be
    read. Of a topic that lies in several files by space, the highest of theirs.
    """
    wanted = set(topics)
    found: dict[str, int | None] = {}
    for key, numbers in layout.segments(disk).items():
        if key.topic not in wanted or numbers[0] == 1:
            continue
        bounds = _open_bounds(layout, disk, key, numbers[0])
        first = None if bounds is None else bounds[0]
        before = found.get(key.topic, 0)
        found[key.topic] = None if first is None or before is None else max(first, before)
    return found


def log_segments(layout: Layout, disk: Disk) -> pa.Table:
    """
    One row a segment, by stream and number, in the shape of ``silver.segments``.

    A sealed segment is described by its seal, any other by its first and its last whole line. Segments that were dropped,
    also this moment, are not listed.
    """
    import pyarrow as pa

    schema = arrow_schema(SILVER_SEGMENTS.schema)
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    streams = layout.segments(disk)
    for key in sorted(streams, key=lambda each: each.path):
        sealed = {seal.segment: seal for seal, _ in seal_lines(disk, layout, key) if not isinstance(seal, int)}
        for number in streams[key]:
            seal = sealed.get(number)
            bounds = _open_bounds(layout, disk, key, number) if seal is None else _bounds(seal)
            if bounds is not None:
                row = (key.topic, key.space_id, number, seal is not None, *bounds)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
    return pa.table(columns, schema=schema)


def _bounds(seal: Seal) -> tuple[Any, ...]:
    """First and last offset, first and last seq, bytes, and when the last record was written."""
    seqs = (seal.first_offset, seal.last_offset, seal.first_seq, seal.last_seq)
    return (*seqs, seal.bytes, _time_of(seal.last_written_at))


def _open_bounds(layout: Layout, disk: Disk, key: StreamKey, number: int) -> tuple[Any, ...] | None:
    """The same of a segment without a seal, as far as its lines can be read; ``None`` if it was dropped since."""
    try:
        file = disk.open(layout.segment(key, number))
    except FileNotFoundError:
        return None
    try:
        end = end_of_lines(file, file.size())
        begin = end_of_lines(file, end - 1) if end else 0  # a line may be longer than a block
        first = head_of(file.read(0, HEAD_BYTES_MAX))
        last = head_of(file.read(begin, HEAD_BYTES_MAX)) if end else None
    finally:
        file.close()
    if first is None or last is None:
        return (None, None, None, None, end, None)
    return (first.offset, last.offset, first.seq, last.seq, end, _time_of(last.written_at))


def _time_of(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
