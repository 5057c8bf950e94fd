"""Reading segments: every place is found, in either direction, whatever the lines' lengths."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.log.embedded.layout import Layout, StreamKey
from tidings.log.embedded.reader import _LEFT_OFF_MAX, Bounds, SegmentReader, StreamView, find_line, view_of
from tidings.log.embedded.state import Segment, Stream
from tidings.log.errors import CorruptLog
from tidings.log.segment import Head, encode_line
from tidings.testing import SimulatedDisk

LAYOUT: Final = Layout(Path("/ws"))
KEY: Final = StreamKey("alpha")
PATH: Final = LAYOUT.segment(KEY, 1)


def head(n: int) -> Head:
    """The place of the n-th line: seqs have gaps, as those of a topic among others do; three lines share a time."""
    return Head(n, 3 * n + 2, f"2026-01-01T00:00:00.{n // 3:06d}Z")


def line(n: int, size: int) -> bytes:
    """The n-th line, with a payload of that size."""
    offset, seq, written_at = head(n)
    meta = (
        f'"written_at":"{written_at}","topic":"alpha","type":"T","space_id":"s","event_id":"e{n}","ts":"{written_at}"'
    )
    return encode_line(
        b'"offset":%d,"seq":%d,"meta":{%b},"payload":{"p":"%b"}}' % (offset, seq, meta.encode(), b"x" * size)
    )


def stored(sizes: list[int]) -> tuple[SimulatedDisk, list[int], StreamView]:
    """A segment of lines of these sizes: the disk, where each line begins, and a view of it."""
    disk = SimulatedDisk()
    lines = [line(n, size) for n, size in enumerate(sizes)]
    disk.write_all(PATH, b"".join(lines))
    starts = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]
    segment = Segment(1)
    segment.grow(len(lines), starts[-1], head(0), head(len(lines) - 1), ())
    segment.flushed_bytes = starts[-1]
    stream = Stream(KEY, lines_max=1, bytes_max=1)
    stream.segments.append(segment)
    return disk, starts, view_of(stream, Bounds())


SIZES: Final = st.lists(
    st.sampled_from([0, 1, 50, 3000, 4000, 4095, 5000]) | st.integers(0, 9000), min_size=1, max_size=30
)


@given(SIZES)
def test_every_line_is_found_by_offset_seq_and_time(sizes: list[int]) -> None:
    """Searching gives the first line whose key is at least the target, for targets on, between and beyond the lines."""
    disk, starts, _ = stored(sizes)
    file, count = disk.open(PATH), len(sizes)
    for n in range(count):
        assert find_line(file, starts[-1], lambda h: h.offset, n) == starts[n]
        assert find_line(file, starts[-1], lambda h: h.seq, head(n).seq) == starts[n]
        assert find_line(file, starts[-1], lambda h: h.seq, head(n).seq - 1) == starts[n]
        assert find_line(file, starts[-1], lambda h: h.written_at, head(n).written_at) == starts[n // 3 * 3]
    assert find_line(file, starts[-1], lambda h: h.offset, count) == starts[-1]
    assert find_line(file, starts[-1], lambda h: h.written_at, "9") == starts[-1]


@given(SIZES, st.data())
def test_backwards_is_forwards_reversed(sizes: list[int], data: st.DataObject) -> None:
    """Any part of a segment reads the same from both ends, and is exactly the part asked for."""
    disk, _, view = stored(sizes)
    reader = SegmentReader(disk, LAYOUT)
    low = data.draw(st.integers(0, len(sizes)))
    high = data.draw(st.none() | st.integers(0, len(sizes) + 1))
    bounds = Bounds(offset_from=low, offset_to=high)
    forwards = [record.offset for record, _ in reader.walk([view], bounds)]

    assert forwards == list(range(low, len(sizes) if high is None else min(high, len(sizes))))
    assert [record.offset for record, _ in reader.walk([view], bounds, backwards=True)] == forwards[::-1]


def test_blocks_end_anywhere() -> None:
    """Lines that straddle the blocks a file is read in come out whole, in both directions."""
    rng = random.Random(7)
    disk, _, view = stored([rng.choice((10, 100_000, 300_000)) for _ in range(12)])
    reader = SegmentReader(disk, LAYOUT)
    forwards = [(record.offset, size) for record, size in reader.walk([view], Bounds())]
    assert [offset for offset, _ in forwards] == list(range(12))
    assert [(record.offset, size) for record, size in reader.walk([view], Bounds(), backwards=True)] == forwards[::-1]


@pytest.mark.parametrize("backwards", [False, True])
def test_a_damaged_line_is_named_by_its_byte(backwards: bool) -> None:
    """A line that fails its checksum stops the reading, and the error says where it begins."""
    disk, starts, view = stored([50] * 9)
    disk.flip(PATH, starts[4] + 60, 1)
    with pytest.raises(CorruptLog) as caught:
        list(SegmentReader(disk, LAYOUT).walk([view], Bounds(), backwards=backwards))
    assert (caught.value.path, caught.value.byte_offset) == (str(PATH), starts[4])


@pytest.mark.parametrize("backwards", [False, True])
def test_a_file_shorter_than_it_was_is_noticed(backwards: bool) -> None:
    """Lines that were written and are gone are missed, not passed over."""
    disk, starts, view = stored([50] * 9)
    disk.write_all(PATH, disk.read_all(PATH)[: starts[7]])
    with pytest.raises(CorruptLog):
        list(SegmentReader(disk, LAYOUT).walk([view], Bounds(), backwards=backwards))


def test_another_segments_file_is_not_read_as_this_one() -> None:
    """A file whose first line is another's than the segment's is refused, although every checksum in it is right."""
    disk, starts, view = stored([50] * 6)
    disk.write_all(PATH, disk.read_all(PATH)[starts[3] :] * 2)
    with pytest.raises(CorruptLog) as caught:
        list(SegmentReader(disk, LAYOUT).walk([view], Bounds()))
    assert caught.value.byte_offset == 0


def test_fetching_gives_what_is_there() -> None:
    """Records are fetched by offset, near ones and far ones; offsets that are not there are passed over."""
    disk, _, view = stored([30] * 80)
    reader = SegmentReader(disk, LAYOUT)
    assert [record.offset for record in reader.fetch(view, [0, 3, 5, 40, 79, 99]).records] == [0, 3, 5, 40, 79]


def test_more_segments_than_open_files() -> None:
    """Streams of many segments are read with few open files, each line once."""
    disk, stream = SimulatedDisk(), Stream(KEY, lines_max=1, bytes_max=1)
    for n in range(150):
        data = line(n, 10)
        disk.write_all(LAYOUT.segment(KEY, n + 1), data)
        segment = Segment(n + 1)
        segment.grow(1, len(data), head(n), head(n), ())
        segment.flushed_bytes = len(data)
        stream.segments.append(segment)
    reader = SegmentReader(disk, LAYOUT)
    for _ in range(2):
        assert [record.offset for record, _ in reader.walk([view_of(stream, Bounds())], Bounds())] == list(range(150))
    assert [r.offset for r, _ in reader.walk([view_of(stream, Bounds())], Bounds(seq_from=head(140).seq))] == list(
        range(140, 150)
    )


def test_the_places_that_a_reader_remembers_are_bounded() -> None:
    """However many segments are read, it remembers where it left off in a fixed number of them, the last ones."""
    disk, views = SimulatedDisk(), list[StreamView]()
    for n in range(_LEFT_OFF_MAX * 3):
        stream = Stream(KEY, lines_max=1, bytes_max=1)
        segment = Segment(n + 1)
        data = line(n, 10)
        disk.write_all(LAYOUT.segment(KEY, n + 1), data)
        segment.grow(1, len(data), head(n), head(n), ())
        segment.flushed_bytes = len(data)
        stream.segments.append(segment)
        views.append(view_of(stream, Bounds()))
    reader = SegmentReader(disk, LAYOUT)

    for view in views:
        assert len(list(reader.walk([view], Bounds()))) == 1

    assert len(reader._left_off) == _LEFT_OFF_MAX
    reader.close()
