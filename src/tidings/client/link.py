"""What the sync client asks of a connection, so that it runs the same over a socket, in memory, and in a test's hands."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .errors import LinkClosed

__all__ = ["Connector", "Inbox", "Link"]


class Link(Protocol):
    """One open connection."""

    def send(self, message: bytes) -> None:
        """Send one text message. Never waits; on a connection that is gone it does nothing."""
        ...

    async def receive(self) -> list[bytes]:
        """
        The messages that have come since the last call, at least one.

        Raises:
            LinkClosed: The connection is gone, and all that came before was handed out.
        """
        ...

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close it, and wait until that is done. Closing twice is fine."""
        ...


class Connector(Protocol):
    """Opens connections."""

    async def connect(self, url: str) -> Link:
        """
        Open one.

        Raises:
            ConnectFailed: It could not be opened.
        """
        ...


class Inbox:
    """
    Messages on their way from a connection to whoever receives them.

    Args:
        count_max: With this many waiting, ``pause`` is called, and ``resume`` when they were taken.
    """

    def __init__(self, count_max: int, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._count_max = count_max
        self._pause = pause
        self._resume = resume
        self._is_paused = False
        self._messages: deque[bytes] = deque()
        self._closed: LinkClosed | None = None
        self._arrived: asyncio.Future[None] | None = None

    def put(self, message: bytes) -> None:
        """A message came."""
        self._messages.append(message)
        if len(self._messages) >= self._count_max and not self._is_paused:
            self._is_paused = True
            self._pause()
        self._wake()

    def close(self, code: int, reason: str = "") -> None:
        """No more messages will come."""
        if self._closed is None:
            self._closed = LinkClosed(code, reason)
            self._wake()

    async def take(self) -> list[bytes]:
        """All messages that wait, at least one; raises ``LinkClosed`` after the last."""
        while not self._messages:
            if self._closed is not None:
                raise self._closed
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        messages = list(self._messages)
        self._messages.clear()
        if self._is_paused:
            self._is_paused = False
            self._resume()
        return messages

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
