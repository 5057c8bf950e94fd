"""The proxies in front of a node, and the clients that they name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_HEADER = b"x-forwarded-for"


class TrustedProxies:
    """
    Addresses whose ``X-Forwarded-For`` counts.

    Args:
        names: Addresses and networks, such as ``10.0.0.0/8``.

    Raises:
        ValueError: One is neither.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._networks = tuple(ip_network(name, strict=False) for name in names)
        self.trusts = lru_cache(maxsize=1024)(self._trusts)

    def _trusts(self, address: str) -> bool:
        """Whether an address is that of a proxy."""
        parsed = _parsed(address) if self._networks else None
        return parsed is not None and any(parsed in network for network in self._networks)

    def client(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """
        Return the address of a request's client: the rightmost one of ``X-Forwarded-For`` that is not a proxy's.

        Every proxy appends the address it was reached from, so what is left of the first address that is not a proxy's was written by the client.

        Args:
            peer: The proxy that the request came from; the answer where the header names no client.
            headers: The request's, names in lower case.
        """
        hops = b",".join(value for name, value in headers if name == _HEADER).decode("latin-1").split(",")
        client = peer
        for hop in reversed(hops):
            parsed = _parsed(hop.strip())
            if parsed is None:
                break
            client = str(parsed)
            if not self.trusts(client):
                break
        return client


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    """An address, of IPv4 or with brackets also with a port; an IPv4 address within IPv6 as itself."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
