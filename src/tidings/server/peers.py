"""
How many connections each address has: for the limits per address, of HTTP and of sockets.

A Unix socket has no address. Whoever reaches it is the node's own user, or a proxy that he has put there: nobody is told apart by
it, and nobody is counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from ipaddress import IPv6Address, ip_address
from typing import Final

__all__ = ["UNIX", "PeerCounts"]

UNIX: Final = "unix"
"""What stands in the place of an address where there is none."""


class PeerCounts:
    """Open connections by address, of IPv6 by its network. It holds no more entries than there are connections."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def entered(self, address: str) -> None:
        """A connection is open."""
        if address != UNIX:
            self._counts[_network_of(address)] += 1

    def left(self, address: str) -> None:
        """One that had entered is gone."""
        if address != UNIX:
            network = _network_of(address)
            self._counts[network] -= 1
            if not self._counts[network]:
                del self._counts[network]

    def count(self, address: str) -> int:
        """How many the address has; none if it is no address."""
        return self._counts.get(_network_of(address), 0)


@functools.lru_cache(maxsize=1024)
def _network_of(address: str) -> str:
    """What one peer can hardly change: of IPv6 the first 64 bits, since a household has all addresses that begin so."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return address
    mapped = found.ipv4_mapped
    return str(mapped) if mapped is not None else str(IPv6Address(int(found) >> 64 << 64))
