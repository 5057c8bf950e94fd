"""Streams: where committed lines go, and when a segment is full."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.log.embedded.layout import StreamKey
from tidings.log.embedded.state import SegmentWrite, Stream
from tidings.log.segment import Head, encode_line, head_of

KEY: Final = StreamKey("alpha")


def line(n: int, size: int = 0) -> bytes:
    """The line of offset n and seq n + 1."""
    return encode_line(
        b'"offset":%d,"seq":%d,"meta":{"written_at":"2026-01-01T00:00:00.000000Z"},"payload":{"p":"%b"}}'
        % (n, n + 1, b"x" * size)
    )


def place(
    stream: Stream, lines: list[bytes], named: list[tuple[int, tuple[str, ...]]] | None = None
) -> list[SegmentWrite]:
    """RecordLocation lines, with the heads that the engine would give."""
    first, last = head_of(lines[0]), head_of(lines[-1])
    assert isinstance(first, Head)
    assert isinstance(last, Head)
    return stream.place(lines, sum(map(len, lines)), first, last, named or ())


def written(chunks: list[SegmentWrite]) -> dict[int, bytes]:
    """What carrying out the chunks leaves in each segment."""
    files: dict[int, bytearray] = {}
    for chunk in chunks:
        file = files.setdefault(chunk.segment.number, bytearray())
        assert chunk.byte_offset == len(file), "chunks of a segment lie side by side"
        file += b"".join(chunk.lines)
    return {number: bytes(file) for number, file in files.items()}


@pytest.mark.req("F29")
def test_a_segment_is_full_at_its_number_of_lines() -> None:
    """The line after the last that fits opens the next segment, and seals the one before."""
    stream = Stream(KEY, lines_max=3, bytes_max=10**6)
    chunks = place(stream, [line(n) for n in range(8)])
    assert [segment.lines for segment in stream.segments] == [3, 3, 2]
    assert [segment.is_sealed for segment in stream.segments] == [True, True, False]
    assert [chunk.segment.number for chunk in chunks if chunk.seals] == [1, 2]
    assert [(s.first_offset, s.last_offset) for s in stream.segments] == [(0, 2), (3, 5), (6, 7)]


@pytest.mark.req("F30")
def test_a_segment_is_full_at_its_number_of_bytes() -> None:
    """A line that would take the segment over its bytes opens the next one; one larger than that stands alone."""
    size = len(line(0, 100))
    stream = Stream(KEY, lines_max=100, bytes_max=2 * size)
    place(stream, [line(n, 100) for n in range(5)])
    assert [segment.lines for segment in stream.segments] == [2, 2, 1]
    place(stream, [line(5, 1000)])
    place(stream, [line(6, 100)])
    assert [segment.lines for segment in stream.segments] == [2, 2, 1, 1, 1]


def test_a_full_segment_is_sealed_by_the_line_that_does_not_fit() -> None:
    """A segment that is exactly full stays open until there is a line for the next one."""
    stream = Stream(KEY, lines_max=2, bytes_max=10**6)
    assert not any(chunk.seals for chunk in place(stream, [line(0), line(1)]))
    seal, rest = place(stream, [line(2)])
    assert (seal.segment.number, list(seal.lines), seal.seals) == (1, [], True)
    assert (rest.segment.number, rest.byte_offset, rest.seals) == (2, 0, False)


def test_partitions_are_noted_where_their_lines_went() -> None:
    """Each segment knows the partitions its own lines name, with the last seq of each."""
    stream = Stream(KEY, lines_max=2, bytes_max=10**6)
    place(stream, [line(n) for n in range(4)], [(1, ("p",)), (2, ("p", "q")), (4, ("r",))])
    assert [segment.partitions for segment in stream.segments] == [{"p": 2, "q": 2}, {"r": 4}]


@given(
    st.lists(st.lists(st.integers(0, 400), min_size=1, max_size=9), max_size=9),
    st.integers(1, 5),
    st.integers(300, 2000),
)
def test_placing_in_any_batches_comes_to_the_same_files(
    batches: list[list[int]], lines_max: int, bytes_max: int
) -> None:
    """How lines are batched decides nothing: files and bounds are those of placing them one by one."""
    sizes = [size for batch in batches for size in batch]
    lines = [line(n, size) for n, size in enumerate(sizes)]
    together, apart = (Stream(KEY, lines_max=lines_max, bytes_max=bytes_max) for _ in range(2))
    chunks: list[SegmentWrite] = []
    at = 0
    for batch in batches:
        chunks += place(together, lines[at : at + len(batch)])
        at += len(batch)
    singly = [chunk for each in lines for chunk in place(apart, [each])]

    assert written(chunks) == written(singly)
    assert b"".join(written(chunks).values()) == b"".join(lines)
    assert [segment.info(KEY) for segment in together.segments] == [segment.info(KEY) for segment in apart.segments]
    assert all(segment.lines <= lines_max for segment in together.segments)
    assert all(segment.size_bytes <= bytes_max or segment.lines == 1 for segment in together.segments)
