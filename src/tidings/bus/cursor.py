"""
A group's place: the low-water mark of what it has acknowledged, and the islands beyond it.

Workers finish out of order, so acknowledged offsets are kept as ranges; the mark moves over those that join up. It never
moves back. Plain values: no disk, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Cursor"]


class Cursor:
    """
    What one group has acknowledged.

    Args:
        committed: Everything up to this offset is acknowledged; -1 for nothing.
        islands: Ranges beyond, both ends included, as ``ranges`` gave them.
    """

    __slots__ = ("_by_end", "_by_start", "committed")

    def __init__(self, committed: int = -1, islands: Iterable[tuple[int, int]] = ()) -> None:
        self.committed = committed
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        for first, last in islands:
            for_real = max(first, committed + 1)
            if for_real <= last:
                self._by_start[for_real] = last
                self._by_end[last] = for_real
        self._absorb()

    def ack(self, offset: int) -> bool:
        """Acknowledge one offset; whether it was not before."""
        if offset == self.committed + 1:
            self.committed = offset
            if self._by_start:
                self._absorb()
            return True
        if offset in self:
            return False
        first = self._by_end.pop(offset - 1, offset)
        last = self._by_start.pop(offset + 1, offset)
        self._by_start[first] = last
        self._by_end[last] = first
        return True

    def skip(self, first: int, last: int) -> None:
        """Pass over offsets that hold nothing (both ends included), so that the mark can move on across them."""
        touching = [(start, end) for start, end in self._by_start.items() if start <= last + 1 and end >= first - 1]
        for start, end in touching:
            del self._by_start[start], self._by_end[end]
            first, last = min(first, start), max(last, end)
        if first <= self.committed + 1:
            self.committed = max(self.committed, last)
        else:
            self._by_start[first] = last
            self._by_end[last] = first

    def copy(self) -> Cursor:
        """The cursor as it stands now."""
        return Cursor(self.committed, self._by_start.items())

    def _absorb(self) -> None:
        while (last := self._by_start.pop(self.committed + 1, None)) is not None:
            del self._by_end[last]
            self.committed = last

    def __contains__(self, offset: int) -> bool:
        if offset <= self.committed:
            return True
        return any(first <= offset <= last for first, last in self._by_start.items())

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The islands, in order."""
        return sorted(self._by_start.items())

    @property
    def early_count(self) -> int:
        """How many offsets beyond the mark are acknowledged."""
        return sum(last - first + 1 for first, last in self._by_start.items())

    @property
    def highest(self) -> int:
        """The highest offset acknowledged."""
        return max(self._by_end, default=self.committed)
