"""
Requests that a web page has made: whether the page may, and whether the browser was led here under a foreign name.

A browser sends a page's requests from the user's own machine, so being reached from loopback proves nothing. It says which page it was
(``Origin``), and pages that are not allowed are refused, over HTTP as over WebSocket. A page whose own name was made to resolve to this
machine (DNS rebinding) is of the same origin to the browser; what gives it away is ``Host``. That is compared where access is open, and
wherever names are set.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

from .errors import HostRefused, OriginRefused
from .settings import ServerSettings

__all__ = ["check_page", "is_own_host"]

_FOREIGN_SITES: Final = (b"cross-site", b"same-site")


def check_page(
    headers: Iterable[tuple[bytes, bytes]], settings: ServerSettings, *, is_open: bool, is_unix: bool = False
) -> None:
    """
    Refuse what a foreign web page asks for.

    Args:
        headers: The request's, names in lower case; all of a repeated one count.
        settings: Which origins and hosts are allowed.
        is_open: Whether access is open, so that nothing else would keep a page out.
        is_unix: Whether it came by the Unix socket, where no browser gets.

    Raises:
        OriginRefused: The page is of an origin that is not allowed.
        HostRefused: The node is not known by the name that it was reached by.
    """
    has_origin = is_foreign = False
    for name, value in headers:
        if name == b"origin":
            has_origin = True
            origin = value.decode("latin-1")
            if "*" not in settings.origins and origin not in settings.origins:
                raise OriginRefused(origin[:200])
        elif name == b"sec-fetch-site" and value.strip().lower() in _FOREIGN_SITES:
            is_foreign = True
        elif name == b"host" and (is_open or settings.hosts) and not is_unix:
            host = value.decode("latin-1")
            if not is_own_host(host, settings):
                raise HostRefused(host[:200])
    # An image or a link of a foreign page names no origin; browsers still say that it is foreign.
    if is_foreign and not has_origin and is_open and "*" not in settings.origins:
        raise OriginRefused("another site")


def is_own_host(given: str, settings: ServerSettings) -> bool:
    """Whether a ``Host`` is an address, this machine, or a name that the settings have. A page cannot have an address for its name."""
    given = given.strip()
    name = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
    name = name.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost") or name == settings.host.lower():
        return True
    if name in {each.lower() for each in settings.hosts}:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
