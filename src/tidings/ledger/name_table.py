"""Numbers for names: each name that is in use has one, and a number that is no longer in use is given to the next new name."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Final

_UNUSED: Final = ""
"""In the place of a number without a name. No name is empty."""
_SPARE_MAX: Final = 64


class NameTable:
    """
    Names by number and numbers by name, with the number of uses of each.

    Which number a name gets follows from the table alone: the lowest that is free. So a table that was restored goes on like the one before.
    """

    __slots__ = ("_free", "_names", "_numbers", "_uses")

    def __init__(self) -> None:
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._uses: list[int] = []
        self._free: list[int] = []
        """A heap that has every free number, and perhaps some that are in use again or beyond the end."""

    def __len__(self) -> int:
        """How many names are in use."""
        return len(self._numbers)

    def freeze(self) -> tuple[str, ...]:
        """The names in the order of their numbers; empty where a number is free."""
        return tuple(self._names)

    def restore(self, names: Sequence[str], used: Iterable[int]) -> None:
        """Become the table that ``freeze`` returned, with a use for each of these numbers. Names without a use are dropped."""
        uses = [0] * len(names)
        for number in used:
            uses[number] += 1
        self._names, self._uses = list(names), uses
        for number, name in enumerate(names):
            if uses[number]:
                self._numbers[name] = number
            else:
                self._names[number] = _UNUSED
        self._shrink()
        self._free = [number for number, name in enumerate(self._names) if name == _UNUSED]

    def use(self, name: str) -> int:
        """Count a use of a name. Return its number."""
        number = self._numbers.get(name)
        if number is not None:
            self._uses[number] += 1
            return number
        names, free = self._names, self._free
        while free and (free[0] >= len(names) or names[free[0]] != _UNUSED):
            heapq.heappop(free)
        if free:
            number = heapq.heappop(free)
            names[number], self._uses[number] = name, 1
        else:
            number = len(names)
            names.append(name)
            self._uses.append(1)
        self._numbers[name] = number
        return number

    def release(self, number: int) -> None:
        """Take a use back. A name without a use loses its number."""
        self._uses[number] -= 1
        if self._uses[number]:
            return
        del self._numbers[self._names[number]]
        self._names[number] = _UNUSED
        if number == len(self._names) - 1:
            self._shrink()
        else:
            heapq.heappush(self._free, number)
            if len(self._free) > 2 * len(self._names) + _SPARE_MAX:
                self._free = [each for each, name in enumerate(self._names) if name == _UNUSED]

    def _shrink(self) -> None:
        names = self._names
        while names and names[-1] == _UNUSED:
            names.pop()
            self._uses.pop()
