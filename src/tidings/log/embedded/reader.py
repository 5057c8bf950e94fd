"""
Reading segments: find a place in O(log n), walk on from there in either direction, check every line.

A segment's lines ascend in offset, seq and write time alike, so each of the three can be searched for by
halving the file; the shape of a line's head makes a probe cost one small read. No index file is needed.
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import CorruptLog
from ..record import Record
from ..segment import HEAD_BYTES_MAX, Flaw, Head, decode, decode_all, head_of
from .disk import Disk, File
from .layout import Layout, StreamKey
from .state import Segment, Stream

_PROBE_BYTES: Final = 4096
_BLOCK_BYTES: Final = 256 * 1024
_FILES_MAX: Final = 64
_LEFT_OFF_MAX: Final = 16
_NEIGHBOUR_MAX: Final = 16


class Bounds(NamedTuple):
    """What part of a stream to walk over. Lower bounds are included, upper ones excluded."""

    offset_from: int = 0
    offset_to: int | None = None
    seq_from: int = 0
    seq_to: int | None = None
    time_from: str = ""
    time_to: str | None = None


class RecordRun(NamedTuple):
    """Records that were read together, and the bytes of each one's line."""

    records: list[Record]
    sizes: list[int]


class _LeftOff(NamedTuple):
    """A run that was read, and the byte it begins at."""

    begin: int
    run: RecordRun

    def byte_of(self, target: int, key: Callable[[Record], int]) -> int | None:
        """Where the first record begins whose key is at least ``target``, if that can be told from this run."""
        records = self.run.records
        if not records or not key(records[0]) <= target <= key(records[-1]):
            return None
        return self.begin + sum(self.run.sizes[: bisect.bisect_left(records, target, key=key)])


class SegmentView(NamedTuple):
    """A segment as a reader may see it: all values fixed when the view was made."""

    number: int
    size: int
    first: Head
    last: Head


class StreamView(NamedTuple):
    """A stream as a reader may see it."""

    key: StreamKey
    segments: tuple[SegmentView, ...]


def view_of(stream: Stream, bounds: Bounds) -> StreamView:
    """What of a stream is in its files right now, from the first segment that can hold something within the bounds."""
    segments = stream.segments
    start = max(
        bisect.bisect_left(segments, bounds.offset_from, key=lambda segment: segment.last_offset),
        bisect.bisect_left(segments, bounds.seq_from, key=lambda segment: segment.last_seq),
        bisect.bisect_left(segments, bounds.time_from, key=lambda segment: segment.last_written_at),
    )
    end = len(segments)
    if bounds.offset_to is not None:
        end = bisect.bisect_left(segments, bounds.offset_to, lo=start, key=lambda segment: segment.first_offset)
    if bounds.seq_to is not None:
        end = min(end, bisect.bisect_left(segments, bounds.seq_to, lo=start, key=lambda segment: segment.first_seq))
    views = (_segment_view(segment) for segment in segments[start:end] if segment.flushed_bytes)
    return StreamView(stream.key, tuple(views))


def _segment_view(segment: Segment) -> SegmentView:
    known = segment.view
    if isinstance(known, SegmentView) and known.size == segment.flushed_bytes:
        return known
    # ``last`` may be ahead of the flushed bytes; it is used only to pass segments over, so that is safe.
    segment.view = view = SegmentView(
        segment.number,
        segment.flushed_bytes,
        Head(segment.first_offset, segment.first_seq, segment.first_written_at),
        Head(segment.last_offset, segment.last_seq, segment.last_written_at),
    )
    return view


class SegmentReader:
    """Reads segments; safe to use from several threads."""

    def __init__(self, disk: Disk, layout: Layout) -> None:
        self._disk = disk
        self._layout = layout
        self._files: OrderedDict[tuple[StreamKey, int], File] = OrderedDict()
        self._left_off: OrderedDict[tuple[StreamKey, int], _LeftOff] = OrderedDict()
        self._mutex = disk.threads.lock()

    def _file(self, key: StreamKey, segment: SegmentView) -> File:
        number = segment.number
        with self._mutex:
            file = self._files.get((key, number))
            if file is None:
                path = self._layout.segment(key, number)
                file = self._disk.open(path)
                # Every line of another segment would pass its checksum: the first one tells whose file this is.
                if head_of(file.read(0, HEAD_BYTES_MAX)) != segment.first:
                    file.close()
                    raise CorruptLog(path, 0, Flaw.ORDER, segment.first.seq)
                self._files[key, number] = file
                if len(self._files) > _FILES_MAX:
                    # Not closed here: another thread may be reading. The last reference closes it.
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end((key, number))
            return file

    def forget(self, key: StreamKey, number: int) -> None:
        """A segment was dropped: let go of its file."""
        with self._mutex:
            self._files.pop((key, number), None)
            self._left_off.pop((key, number), None)

    def close(self) -> None:
        """Let go of all files."""
        with self._mutex:
            self._files.clear()
            self._left_off.clear()

    def walk(
        self, views: Sequence[StreamView], bounds: Bounds, *, backwards: bool = False, wanted: int = 1_000_000
    ) -> Iterator[tuple[Record, int]]:
        """``runs``, one record at a time."""
        return _one_by_one(self.runs(views, bounds, backwards=backwards, wanted=wanted))

    def runs(
        self, views: Sequence[StreamView], bounds: Bounds, *, backwards: bool = False, wanted: int = 1_000_000
    ) -> Iterator[RecordRun]:
        """
        The records of the streams within the bounds, in seq order (or the reverse), each with its size.

        ``wanted`` is how many the caller is likely to take; what is read and decoded beyond that is for nothing.

        Raises:
            CorruptLog: A line on the way is damaged.
            FileNotFoundError: A segment was dropped meanwhile.
        """
        walks = [self._walk_stream(view, bounds, backwards, wanted) for view in views if view.segments]
        if len(walks) == 1:
            return walks[0]
        merged = heapq.merge(*map(_one_by_one, walks), key=_seq_of, reverse=backwards)
        return (RecordRun([record], [size]) for record, size in merged)

    def _walk_stream(self, view: StreamView, bounds: Bounds, backwards: bool, wanted: int) -> Iterator[RecordRun]:
        segments = view.segments[_first_segment(view, bounds) :]
        for segment in reversed(segments) if backwards else segments:
            if _is_before(segment, bounds) or _is_after(segment, bounds):
                continue
            file = self._file(view.key, segment)
            path = self._layout.segment(view.key, segment.number)
            left_off = self._left_off.get((view.key, segment.number))
            start, end = self._range(file, segment, bounds, left_off)
            line_bytes = segment.size // max(1, segment.last.offset - segment.first.offset + 1)
            if backwards:
                for run in _walk_back(file, path, start, end, wanted, line_bytes):
                    wanted -= len(run.records)
                    yield run
                continue
            for run in _walk_on(file, path, start, end, wanted, line_bytes):
                wanted -= len(run.records)
                self._note(view.key, segment.number, start, run)
                start += sum(run.sizes)
                yield run

    def _note(self, key: StreamKey, number: int, begin: int, run: RecordRun) -> None:
        """Remember what was read last: whoever reads page by page goes on within it, and need not search."""
        with self._mutex:
            self._left_off[key, number] = _LeftOff(begin, run)
            self._left_off.move_to_end((key, number))
            if len(self._left_off) > _LEFT_OFF_MAX:
                self._left_off.popitem(last=False)

    def _range(
        self, file: File, segment: SegmentView, bounds: Bounds, left_off: _LeftOff | None = None
    ) -> tuple[int, int]:
        """The bytes of a segment that hold the records within the bounds."""
        start, end = 0, segment.size
        first = segment.first
        if bounds.offset_from > first.offset:
            known = left_off.byte_of(bounds.offset_from, _record_offset) if left_off is not None else None
            found = find_line(file, segment.size, _offset_of, bounds.offset_from) if known is None else known
            start = max(start, found)
        if bounds.seq_from > first.seq:
            known = left_off.byte_of(bounds.seq_from, _record_seq) if left_off is not None else None
            found = find_line(file, segment.size, _head_seq, bounds.seq_from) if known is None else known
            start = max(start, found)
        if bounds.time_from > first.written_at:
            start = max(start, find_line(file, segment.size, _time_of, bounds.time_from))
        last = segment.last
        if bounds.offset_to is not None and bounds.offset_to <= last.offset:
            end = min(end, find_line(file, segment.size, _offset_of, bounds.offset_to))
        if bounds.seq_to is not None and bounds.seq_to <= last.seq:
            end = min(end, find_line(file, segment.size, _head_seq, bounds.seq_to))
        if bounds.time_to is not None and bounds.time_to <= last.written_at:
            end = min(end, find_line(file, segment.size, _time_of, bounds.time_to))
        return start, end

    def fetch(self, view: StreamView, offsets: Sequence[int]) -> RecordRun:
        """The records at the given offsets, which ascend; offsets the stream does not hold are passed over."""
        fetched = RecordRun([], [])
        at = 0
        while at < len(offsets):
            # Neighbours are read in one walk; a far one is searched for.
            run_end = at + 1
            while run_end < len(offsets) and offsets[run_end] - offsets[run_end - 1] <= _NEIGHBOUR_MAX:
                run_end += 1
            own = offsets[at:run_end]
            spread = own[-1] - own[0] + 1
            for run in self._walk_stream(view, Bounds(offset_from=own[0], offset_to=own[-1] + 1), False, spread):
                if spread > len(own):
                    wanted = set(own)
                    is_wanted = [record.offset in wanted for record in run.records]
                    run = RecordRun(list(compress(run.records, is_wanted)), list(compress(run.sizes, is_wanted)))
                fetched.records.extend(run.records)
                fetched.sizes.extend(run.sizes)
            at = run_end
        return fetched


def _one_by_one(runs: Iterable[RecordRun]) -> Iterator[tuple[Record, int]]:
    return chain.from_iterable(zip(run.records, run.sizes, strict=True) for run in runs)


def _seq_of(item: tuple[Record, int]) -> int:
    return item[0].seq


def _record_offset(record: Record) -> int:
    return record.offset


def _record_seq(record: Record) -> int:
    return record.seq


def _offset_of(head: Head) -> int:
    return head.offset


def _head_seq(head: Head) -> int:
    return head.seq


def _time_of(head: Head) -> str:
    return head.written_at


def _first_segment(view: StreamView, bounds: Bounds) -> int:
    """The first segment that can hold something within the lower bounds."""
    segments = view.segments
    return max(
        bisect.bisect_left(segments, bounds.offset_from, key=lambda segment: segment.last.offset),
        bisect.bisect_left(segments, bounds.seq_from, key=lambda segment: segment.last.seq),
        bisect.bisect_left(segments, bounds.time_from, key=lambda segment: segment.last.written_at),
    )


def _is_before(segment: SegmentView, bounds: Bounds) -> bool:
    last = segment.last
    return last.offset < bounds.offset_from or last.seq < bounds.seq_from or last.written_at < bounds.time_from


def _is_after(segment: SegmentView, bounds: Bounds) -> bool:
    first = segment.first
    return (
        (bounds.offset_to is not None and first.offset >= bounds.offset_to)
        or (bounds.seq_to is not None and first.seq >= bounds.seq_to)
        or (bounds.time_to is not None and first.written_at >= bounds.time_to)
    )


def find_line(file: File, size: int, key: Callable[[Head], Any], target: Any) -> int:
    """
    Where the first line begins whose key is at least ``target``; ``size`` if there is none.

    Halves the range [low, high): a line that begins below ``low`` has a smaller key (but the one at ``low``
    itself), one that begins at or above ``high`` a key that is large enough.
    """
    low, high = 0, size
    while high - low > _PROBE_BYTES:
        middle = (low + high) // 2
        start = _line_start_after(file, middle, high)
        if start >= high:
            high = middle + 1
            continue
        head = head_of(file.read(start, HEAD_BYTES_MAX))
        if head is None:
            break  # damaged: walking over the rest will say where
        if key(head) < target:
            low = start
        else:
            high = start
    block = file.read(low, high - low + HEAD_BYTES_MAX)
    at = low
    while at < high:
        head = head_of(block[at - low : at - low + HEAD_BYTES_MAX])
        if head is None or key(head) >= target:
            return at
        newline = block.find(b"\n", at - low)
        at = low + newline + 1 if newline >= 0 else _line_start_after(file, at, size)
    return at


def _line_start_after(file: File, at: int, end: int) -> int:
    """Where the next line begins after the one that ``at`` lies in; ``end`` if that is the last."""
    while at < end:
        block = file.read(at, min(_PROBE_BYTES, end - at))
        newline = block.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        if not block:
            return end
        at += len(block)
    return end


def _walk_on(file: File, path: Path, start: int, end: int, wanted: int, line_bytes: int) -> Iterator[RecordRun]:
    at, kept = start, b""
    while at < end:
        block = file.read(at, min(_block_bytes(wanted, line_bytes), end - at))
        if not block:
            raise CorruptLog(path, at, "the file is shorter than what was written to it")
        data = kept + block if kept else block
        begin = at - len(kept)
        at += len(block)
        lines = data.split(b"\n")
        kept = lines.pop()
        records = decode_all(lines)
        if records is None:
            whole, flaw = _before_flaw(lines)
            yield whole
            raise CorruptLog(path, begin + sum(whole.sizes), flaw)
        wanted -= len(records)
        yield RecordRun(records, [len(line) + 1 for line in lines])
    if kept:
        raise CorruptLog(path, end - len(kept), Flaw.UNFINISHED)


def _before_flaw(lines: Iterable[bytes]) -> tuple[RecordRun, Flaw]:
    """Of lines that are not all whole: those before the first that is not, and what is wrong with that one."""
    run = RecordRun([], [])
    for line in lines:
        record = decode(line)
        if isinstance(record, Flaw):
            return run, record
        run.records.append(record)
        run.sizes.append(len(line) + 1)
    raise AssertionError("all lines are whole")


def _block_bytes(wanted: int, line_bytes: int) -> int:
    """How much to read for so many lines of such a length on average: some more, as lines differ."""
    return max(_PROBE_BYTES, min(_BLOCK_BYTES, wanted * line_bytes + line_bytes * 4))


def _walk_back(file: File, path: Path, start: int, end: int, wanted: int, line_bytes: int) -> Iterator[RecordRun]:
    at, kept = end, b""
    while at > start:
        size = min(_block_bytes(wanted, line_bytes), at - start)
        block = file.read(at - size, size)
        if len(block) < size:
            raise CorruptLog(path, at - size, "the file is shorter than what was written to it")
        at -= size
        data = block + kept
        lines = data.split(b"\n")
        if at > start:
            # The first piece may be the end of a line that begins further up.
            kept = lines[0] + b"\n"
            first_kept = 1
        else:
            kept = b""
            first_kept = 0
        wholes = lines[first_kept:-1][::-1]
        records = decode_all(wholes)
        if records is None:
            whole, flaw = _before_flaw(wholes)
            yield whole
            damaged = wholes[len(whole.records)]
            raise CorruptLog(path, at + len(data) - sum(whole.sizes) - len(damaged) - 1, flaw)
        wanted -= len(records)
        yield RecordRun(records, [len(line) + 1 for line in wholes])
