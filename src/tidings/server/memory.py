"""
Account for the memory that clients make the node hold: by connection, identity, address, and in total.

Every byte that a client can leave with the node is charged here before it is kept: request heads and bodies, unread input, fragments of
messages, publishes that wait. A charge that would cross a limit raises ``MemoryExhausted``, which names the scope and the setting.

Clients without an identity share one small pool, so that their number does not matter. ``identify`` moves an account from that pool to its
identity. One address gets at most half of the pool of clients without an identity. Peers of the Unix socket and behind an unknown
address have no limit by address.
"""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Iterator
from typing import Final
from weakref import WeakValueDictionary

from tidings.access.guard import network_of

from .errors import MemoryExhausted
from .settings import ServerSettings

_UNAUTHENTICATED_SHARE: Final = 2
"""One address may hold one part in this many of the pool of clients without an identity."""


class MemoryScope(enum.Enum):
    """What a limit is for. The value is its label in metrics and errors."""

    CONNECTION = "connection"
    IDENTITY = "identity"
    ADDRESS = "address"
    UNAUTHENTICATED = "unauthenticated"
    UNAUTHENTICATED_ADDRESS = "unauthenticated_address"
    TOTAL = "total"


_SETTINGS: Final = {
    MemoryScope.CONNECTION: "memory_bytes_per_connection_max",
    MemoryScope.IDENTITY: "memory_bytes_per_identity_max",
    MemoryScope.ADDRESS: "memory_bytes_per_address_max",
    MemoryScope.UNAUTHENTICATED: "unauthenticated_memory_bytes_max",
    MemoryScope.UNAUTHENTICATED_ADDRESS: "unauthenticated_memory_bytes_max",
    MemoryScope.TOTAL: "memory_bytes_max",
}


class _Limit:
    """The limit of all shares of one scope; it changes when settings are reloaded."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0


class _Share:
    """The bytes that one scope holds."""

    __slots__ = ("__weakref__", "held_bytes", "limit", "scope")

    def __init__(self, scope: MemoryScope, limit: _Limit) -> None:
        self.scope = scope
        self.limit = limit
        self.held_bytes = 0


class MemoryBudget:
    """
    The accounts of one node. Not thread-safe: call it from the event loop.

    Args:
        settings: The limits.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._limits = {scope: _Limit() for scope in MemoryScope}
        self.settings = settings
        self.refused: Counter[str] = Counter()
        """Charges that were refused, by scope."""
        self._total = self.share(MemoryScope.TOTAL)
        self._unauthenticated = self.share(MemoryScope.UNAUTHENTICATED)
        # A share lives as long as an account refers to it.
        self._identities: WeakValueDictionary[str, _Share] = WeakValueDictionary()
        self._addresses: WeakValueDictionary[tuple[MemoryScope, str], _Share] = WeakValueDictionary()

    @property
    def settings(self) -> ServerSettings:
        """The limits. New limits apply to the next charge; memory that is held already stays charged."""
        return self._settings

    @settings.setter
    def settings(self, settings: ServerSettings) -> None:
        self._settings = settings
        for scope, name in _SETTINGS.items():
            self._limits[scope].size = getattr(settings, name)
        self._limits[MemoryScope.UNAUTHENTICATED_ADDRESS].size //= _UNAUTHENTICATED_SHARE

    def open(self, address: str | None) -> MemoryAccount:
        """Open the account of a connection. ``address`` is its IP address; any other text, or ``None``, has no limit by address."""
        return MemoryAccount(self, address)

    def held_bytes(self, *, is_authenticated: bool) -> int:
        """Return what all clients with, or without, an identity hold."""
        return (self._total if is_authenticated else self._unauthenticated).held_bytes

    def share(self, scope: MemoryScope) -> _Share:
        """Make a share of this scope."""
        return _Share(scope, self._limits[scope])

    def shares(self, own: _Share, address: str | None, subject: str | None) -> tuple[_Share, ...]:
        """Return the shares that a charge counts in."""
        if subject is None:
            of_address, found = MemoryScope.UNAUTHENTICATED_ADDRESS, [own, self._unauthenticated]
        else:
            identity = self._identities.get(subject)
            if identity is None:
                identity = self._identities[subject] = self.share(MemoryScope.IDENTITY)
            of_address, found = MemoryScope.ADDRESS, [own, identity, self._total]
        if address is not None and ("." in address or ":" in address):
            key = of_address, network_of(address)
            share = self._addresses.get(key)
            if share is None:
                share = self._addresses[key] = self.share(of_address)
            found.append(share)
        return tuple(found)

    def exhausted(self, scope: MemoryScope) -> MemoryExhausted:
        """Count a refused charge, and return the error for it."""
        self.refused[scope.value] += 1
        return MemoryExhausted(scope.value, self._limits[scope].size, f"server.{_SETTINGS[scope]}")


class MemoryAccount:
    """
    What one connection holds. Made by ``MemoryBudget.open``.

    ``hold`` and ``release`` are for buffers that end with the connection: ``close`` gives them back. ``charge`` is for work that may outlive it, such as
    a publish that waits: it is given back when the work ends, also after ``close``.
    """

    __slots__ = ("_address", "_budget", "_charged_bytes", "_is_closed", "_own", "_shares", "_subject")

    def __init__(self, budget: MemoryBudget, address: str | None) -> None:
        self._budget = budget
        self._address = address
        self._subject: str | None = None
        self._own = budget.share(MemoryScope.CONNECTION)
        self._charged_bytes = 0
        self._is_closed = False
        self._shares = budget.shares(self._own, address, None)

    @property
    def held_bytes(self) -> int:
        """What this account holds, charges included."""
        return self._own.held_bytes

    @property
    def subject(self) -> str | None:
        """The identity that pays; ``None`` before ``identify``."""
        return self._subject

    def identify(self, subject: str | None, address: str | None = None) -> None:
        """
        Move all that is held to an identity, or back to the pool of clients without one.

        Args:
            subject: The identity; ``None`` for a client that has not shown one.
            address: The client's address where it is not the connection's: behind a trusted proxy.

        Raises:
            MemoryExhausted: The identity, or its address, holds too much already. Nothing has moved.
        """
        address = address or self._address
        if self._is_closed or (subject == self._subject and address == self._address):
            return
        size, before = self._own.held_bytes, self._shares
        after = self._budget.shares(self._own, address, subject)
        for share in after:
            if share not in before and share.held_bytes + size > share.limit.size:
                raise self._budget.exhausted(share.scope)
        for share in before:
            share.held_bytes -= size
        for share in after:
            share.held_bytes += size
        self._subject, self._address, self._shares = subject, address, after

    def hold(self, size: int) -> None:
        """
        Charge bytes that the connection keeps until ``release`` or ``close``. After ``close`` it does nothing.

        Raises:
            MemoryExhausted: A limit would be crossed. Nothing was charged.
        """
        if self._is_closed:
            return
        scope = self._crossed(size)
        if scope is not None:
            raise self._budget.exhausted(scope)
        for share in self._shares:
            share.held_bytes += size

    def try_hold(self, size: int) -> bool:
        """Charge as ``hold`` does; return ``False`` where ``hold`` would raise."""
        try:
            self.hold(size)
        except MemoryExhausted:
            return False
        return True

    def release(self, size: int) -> None:
        """Give back bytes of ``hold``. After ``close`` it does nothing."""
        if not self._is_closed:
            assert 0 <= size <= self._own.held_bytes - self._charged_bytes
            self._give_back(size)

    @contextlib.contextmanager
    def charge(self, size: int) -> Iterator[None]:
        """
        Charge bytes for the duration of the block, also beyond ``close``.

        Raises:
            MemoryExhausted: A limit would be crossed, or the connection has closed and its work crosses one.
        """
        scope = self._crossed(size)
        if scope is not None:
            raise self._budget.exhausted(scope)
        for share in self._shares:
            share.held_bytes += size
        self._charged_bytes += size
        try:
            yield
        finally:
            self._charged_bytes -= size
            self._give_back(size)

    def close(self) -> None:
        """Give back all but what ``charge`` still holds. Closing twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            self._give_back(self._own.held_bytes - self._charged_bytes)

    def _crossed(self, size: int) -> MemoryScope | None:
        assert size >= 0
        for share in self._shares:
            if share.held_bytes + size > share.limit.size:
                return share.scope
        return None

    def _give_back(self, size: int) -> None:
        for share in self._shares:
            share.held_bytes -= size
