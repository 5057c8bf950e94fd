"""
How many connections each address has: for the limits per address, of HTTP and of sockets.

A Unix socket has no address. Whoever reaches it is the node's own user, or a proxy that he has put there: nobody is told apart by
it, and nobody is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

__all__ = ["UNIX", "PeerCounts"]

UNIX: Final = "unix"
"""What stands in the place of an address where there is none."""


class PeerCounts:
    """Open connections by address. It holds no more entries than there are connections."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def entered(self, address: str) -> None:
        """A connection is open."""
        if address != UNIX:
            self._counts[address] += 1

    def left(self, address: str) -> None:
        """One that had entered is gone."""
        if address != UNIX:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def count(self, address: str) -> int:
        """How many the address has; none if it is no address."""
        return self._counts.get(address, 0)
