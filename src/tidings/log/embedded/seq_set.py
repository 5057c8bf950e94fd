"""
Which seqs a log holds, a bit each, and which of those it should hold it does not.

A seq may be in no line for two good reasons: its segment was dropped on purpose, or an earlier repair noted it as
lost. ``find_gaps`` takes those away; what is left nobody can explain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from .checkpoint import Seal
from .disk import Disk, read_file
from .layout import Layout

_PAGE_BITS: Final = 20
_PAGE_SEQS: Final = 1 << _PAGE_BITS
_PAGE_MASK: Final = _PAGE_SEQS - 1
_SPREAD_MAX: Final = 64
_ABSENT_RUN: Final = re.compile("0+")
_SLICE_BYTES: Final = 4096


class SeqSet:
    """A set of seqs, one bit each."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def add(self, seq: int) -> bool:
        """Put it in; false if it was in already."""
        page, byte, bit = self._page(seq), (seq & _PAGE_MASK) >> 3, 1 << (seq & 7)
        if page[byte] & bit:
            return False
        page[byte] |= bit
        return True

    def add_rising(self, seqs: Sequence[int]) -> list[int]:
        """Put in seqs that rise from one to the next; those that were in already."""
        if not seqs:
            return []
        first, last = seqs[0], seqs[-1]
        # Far apart, or on two pages, they go one by one: laid out side by side they would take too much room.
        if last - first >= len(seqs) * _SPREAD_MAX or first >> _PAGE_BITS != last >> _PAGE_BITS:
            return [seq for seq in seqs if not self.add(seq)]
        start = first & ~7
        fresh = _bits_of(seqs, start)
        page, low, high = self._page(first), (start & _PAGE_MASK) >> 3, ((last & _PAGE_MASK) >> 3) + 1
        held = int.from_bytes(page[low:high], "little")
        page[low:high] = (held | fresh).to_bytes(high - low, "little")
        return [seq for seq in seqs if held >> (seq - start) & 1] if held & fresh else []

    def _page(self, seq: int) -> bytearray:
        number = seq >> _PAGE_BITS
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = bytearray(_PAGE_SEQS >> 3)
        return page

    def missing(self, last: int) -> Iterator[tuple[int, int]]:
        """The ranges from 1 to ``last`` that are not in it."""
        start = 1  # of the range that is missing so far
        for first, end in self._present():
            if first > last:
                break
            if first > start:
                yield start, first - 1
            start = end + 1
        if start <= last:
            yield start, last

    def _present(self) -> Iterator[tuple[int, int]]:
        """The ranges that are in it; neighbouring ones may come in parts."""
        for number in sorted(self._pages):
            page, base = self._pages[number], number * _PAGE_SEQS
            for at in range(0, len(page), _SLICE_BYTES):
                bits = int.from_bytes(page[at : at + _SLICE_BYTES], "little")
                if bits:
                    flags = f"{bits:b}"[::-1]  # the lowest first
                    edge = 0
                    for absent in _ABSENT_RUN.finditer(flags):
                        if absent.start() > edge:
                            yield base + at * 8 + edge, base + at * 8 + absent.start() - 1
                        edge = absent.end()
                    yield base + at * 8 + edge, base + at * 8 + len(flags) - 1


def _bits_of(seqs: Sequence[int], start: int) -> int:
    """The seqs as bits, counted from ``start``."""
    first, last = seqs[0], seqs[-1]
    if last - first == len(seqs) - 1:
        return ((1 << len(seqs)) - 1) << (first - start)
    digits = bytearray(b"0") * (last - start + 1)
    for seq in seqs:
        digits[last - seq] = 0x31  # "1"; the highest stands first
    return int(digits, 2)


class Loss(msgspec.Struct, frozen=True):
    """What an earlier repair noted as lost; the part of its manifest that explains gaps."""

    lost: tuple[tuple[int, int], ...] = ()
    hidden: int = 0
    """Lost records whose seqs lie among those of dropped segments."""
    epoch: str | None = None
    """The epoch that the repair ended."""


def read_losses(disk: Disk, layout: Layout, epoch: str | None) -> tuple[list[Loss], list[Path]]:
    """
    The losses that earlier repairs noted, and the manifests that cannot be read.

    A repair ends the epoch before it takes anything away. A manifest of the present ``epoch`` is of one that was
    interrupted before that: it explains nothing.
    """
    losses: list[Loss] = []
    damaged: list[Path] = []
    for name in disk.names(layout.aside):
        path = layout.aside / name / "manifest.json"
        data = read_file(disk, path)
        if data is None:
            continue  # a repair that was interrupted before it changed anything
        try:
            loss = msgspec.json.decode(data, type=Loss)
        except ValueError:
            damaged.append(path)
            continue
        if loss.epoch != epoch:
            losses.append(loss)
    return losses, damaged


class Gaps(NamedTuple):
    """Seqs that no line has."""

    unexplained: list[tuple[int, int]]
    hidden: int
    """How many more are missing among the dropped segments than those held."""


def find_gaps(seqs: SeqSet, last_seq: int, dropped: Iterable[Seal], losses: Iterable[Loss]) -> Gaps:
    """
    The seqs up to ``last_seq`` that are in no line, but for those that drops and earlier losses explain.

    A seal says between which seqs its records were and how many, not which: within such a range the missing can
    only be counted.
    """
    seals, known = list(dropped), list(losses)
    lost = _merged((first, last) for loss in known for first, last in loss.lost)
    ranges = _merged((seal.first_seq, seal.last_seq) for seal in seals)
    unexplained: list[tuple[int, int]] = []
    among_drops = 0
    for gap in seqs.missing(last_seq):
        for part in _without(gap, lost):
            outside = list(_without(part, ranges))
            unexplained += outside
            among_drops += _count([part]) - _count(outside)
    allowed = sum(seal.lines for seal in seals) + sum(loss.hidden for loss in known)
    return Gaps(unexplained, max(0, among_drops - allowed))


def _count(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _without(part: tuple[int, int], ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start, end = part
    for first, last in ranges:
        if last < start:
            continue
        if first > end:
            break
        if first > start:
            yield start, first - 1
        start = last + 1
    if start <= end:
        yield start, end
