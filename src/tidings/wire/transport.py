"""
What a door sees of a connection, and a connection of a door.

A door (sync, groups, the gateway) holds conversations; the server, or a test without sockets, carries them. Nothing here
waits: a message is handed over and the other side decides what to do when too much of it piles up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class Upgrade(msgspec.Struct, frozen=True):
    """The request that asked for a connection."""

    path: str
    headers: Mapping[str, str]
    """Names in lower case; of a repeated header the last value."""
    query: str = ""
    peer: str = ""
    """Where it comes from, as text for logs."""


class Transport(Protocol):
    """One connection, as a door sees it."""

    def send(self, messages: Sequence[bytes]) -> None:
        """Send each as one text message, in order. Never waits; after ``close`` it does nothing."""
        ...

    def close(self, code: int, reason: str = "") -> None:
        """Say goodbye with a WebSocket close code, after what was sent. Closing twice is fine."""
        ...

    def authenticated(self) -> None:
        """The peer has shown who it is: it gets the room and the rate of those that have. Until then it has seconds and kilobytes."""
        ...

    def pause_reading(self) -> None:
        """Take nothing more from the peer until told to: its own sending then blocks."""
        ...

    def resume_reading(self) -> None:
        """Read again."""
        ...

    @property
    def buffered_bytes(self) -> int:
        """What was sent and has not left this process yet."""
        ...


class Conversation(Protocol):
    """One connection's dialogue, as the server drives it. All calls come from the loop's thread."""

    def received(self, message: bytes) -> None:
        """A whole text or binary message came in."""
        ...

    def drained(self) -> None:
        """The peer has taken what was buffered; a conversation that had held back may go on."""
        ...

    def closed(self, code: int) -> None:
        """The connection is gone; called once, and nothing after it."""
        ...


class Door(Protocol):
    """What answers at one path."""

    def open(self, transport: Transport, upgrade: Upgrade) -> Conversation:
        """Begin a conversation on a connection that was accepted."""
        ...

    async def shut(self, deadline_s: float) -> None:
        """Take no more conversations, end those there are within the deadline, each with a code that says so."""
        ...
