"""
The decision at the heart of repair, on plain values: which run of a stream's segments stays.

A stream is a row of pieces, its segments as they were found. The longest run of records without a hole between them
stays; for what is dropped before it, seals are made from what the neighbours say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .checkpoint import Seal
from .inspection import SealBook
from .segment_scan import SegmentScan, Tail

__all__ = ["Piece", "Run", "complete_drops", "end_of_drops", "longest_run", "seal_for", "seal_of"]


class Piece(NamedTuple):
    """One segment of a stream as it was found."""

    number: int
    seal: Seal | None
    size: int | None
    scan: SegmentScan | None
    is_whole: bool
    """Whether all of it can stay, but perhaps for bytes appended to a sealed one."""
    good_lines: int
    """Lines from its start that can stay."""
    good_bytes: int
    good_last: Tail

    @property
    def lines(self) -> int:
        """Whole lines in it."""
        return self.scan.lines if self.scan is not None else 0


class Run(NamedTuple):
    """Neighbouring pieces whose records follow one another: all whole but perhaps the last."""

    first: int
    until: int
    lines: int
    end: Tail


def end_of_drops(book: SealBook) -> Tail:
    seals = [book.seals[number] for number in book.dropped if number in book.seals]
    last = max(seals, key=lambda seal: seal.segment, default=None)
    return Tail() if last is None else Tail(last.last_offset, last.last_seq, last.last_written_at)


def longest_run(pieces: list[Piece], start: Tail, held: Callable[[Tail], int]) -> Run:
    """
    The run of most records; of equal ones the later, for it keeps offsets and cursors as they are.

    Damage in a piece ends a run, which keeps the lines before it; the next run begins with the next piece.

    Args:
        start: What the first piece follows.
        held: How many records the journal would add behind a place.
    """
    best, most = Run(0, 0, 0, start), held(start)
    first, lines, end = 0, 0, start
    for at, piece in enumerate(pieces):
        if piece.is_whole or piece.good_lines:
            lines, end = lines + piece.good_lines, piece.good_last
            count = lines + held(end)
            if count >= most:
                best, most = Run(first, at + 1, lines, end), count
        if not piece.is_whole:
            first, lines = at + 1, 0
    return best


def seal_of(number: int, scan: SegmentScan) -> Seal:
    return Seal(
        segment=number,
        first_offset=scan.first.offset,
        last_offset=scan.last.offset,
        first_seq=scan.first.seq,
        last_seq=scan.last.seq,
        first_written_at=scan.first.written_at,
        last_written_at=scan.last.written_at,
        lines=scan.lines,
        bytes=scan.good_bytes,
        sha256=scan.sha256,
        chain="",
        partitions=scan.partitions,
    )


def complete_drops(book: SealBook, last: int, sizes: dict[int, int]) -> None:
    """
    Fill in what damaged lines of the seals said about dropped segments.

    Retention drops the oldest first: what lies before a dropped segment and has no file was dropped too. Where its
    seal is gone, the neighbours' seals say what was in it.
    """
    before = Tail()
    for number in range(1, last + 1):
        if number not in sizes:
            book.dropped.add(number)
        if number not in book.seals:
            after = next(book.seals[each] for each in range(number + 1, last + 1) if each in book.seals)
            until = Tail(after.first_offset, after.first_seq, after.first_written_at)
            book.seals[number] = _seal_between(number, before, until, 0, "0" * 64)
        seal = book.seals[number]
        before = Tail(seal.last_offset, seal.last_seq, seal.last_written_at)


def _seal_between(number: int, low: Tail, high: Tail, size: int, sha256: str) -> Seal:
    """A seal for a segment of which only the neighbours are known."""
    return Seal(
        segment=number,
        first_offset=low.offset + 1,
        last_offset=max(low.offset, high.offset - 1),
        first_seq=low.seq + 1,
        last_seq=max(low.seq, high.seq - 1),
        first_written_at=low.written_at,
        last_written_at=high.written_at,
        lines=max(0, high.offset - low.offset - 1),
        bytes=size,
        sha256=sha256,
        chain="",
    )


def seal_for(piece: Piece, book: SealBook, pieces: list[Piece]) -> Seal:
    """The seal of a segment that is dropped; without one of its own, it says what its neighbours leave for it."""
    if piece.seal is not None:
        return piece.seal
    before = [each.good_last for each in pieces if each.number < piece.number]
    after = [each.scan.first for each in pieces if each.number > piece.number and each.lines and each.scan is not None]
    low = before[-1] if before else end_of_drops(book)
    high = after[0] if after else piece.good_last
    sha256 = piece.scan.sha256 if piece.scan is not None else "0" * 64
    return _seal_between(piece.number, low, high, piece.size or 0, sha256)
