"""What the client needs of a connection, the same over a socket, in memory and in tests; and when to try again."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from tidings.core.clock import Clock, within

from .errors import ConnectFailed, LinkClosed


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


TokenSource = str | Callable[[], str | Awaitable[str]]
"""A token, or what gives a fresh one for each connection."""


async def fresh_token(source: TokenSource) -> str:
    """The token to connect with now."""
    if isinstance(source, str):
        return source
    token = source()
    return await token if inspect.isawaitable(token) else token


async def open_link(connector: Connector, url: str, clock: Clock, timeout_s: float) -> Link:
    """
    Open a connection, within a time.

    Raises:
        ConnectFailed: It could not be opened.
    """
    opening = asyncio.ensure_future(connector.connect(url))
    try:
        if not await within(clock, timeout_s, opening):
            raise ConnectFailed(url, f"no connection within {timeout_s:g} s")
    finally:
        if not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().close()  # it came after all, and nobody wants it any more
    return opening.result()


def full_jitter(attempt: int, seconds_min: float, seconds_max: float, rng: random.Random) -> float:
    """
    How long to wait before the next attempt: anything between nothing and a bound that doubles from attempt to attempt.

    The whole range is random, so that clients that lost their server at the same moment do not come back at the same moment.
    """
    return rng.uniform(0.0, min(seconds_max, seconds_min * 2.0 ** min(attempt, 32)))


class Alarm:
    """Calls ``ring`` when a moment comes. Setting it to a later moment costs nothing."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._due: float | None = None
        self._sleeps_until = 0.0
        self._task: asyncio.Task[None] | None = None

    def set(self, due: float | None) -> None:
        """Ring at ``due`` on the clock's monotonic time; ``None`` for never."""
        self._due = due
        if due is None:
            return
        if self._task is not None and not self._task.done() and self._sleeps_until <= due:
            return  # it wakes before, looks again and goes back to sleep
        self.cancel()
        self._due = due
        self._sleeps_until = due
        self._task = asyncio.create_task(self._sleep(), name="tidings-client-alarm")

    async def _sleep(self) -> None:
        while self._due is not None:
            now = self._clock.monotonic()
            if now >= self._due:
                self._due = None
                self._ring()
                return
            self._sleeps_until = self._due
            await self._clock.sleep(self._due - now)

    def cancel(self) -> None:
        """Never mind."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
