"""
What the client needs of a connection, the same over a socket, in memory and in tests.

``EndpointConnector`` connects to an endpoint of the same process, without a socket: for programs that hold node and client in one
process, and for tests. Messages cross in order, one iteration of the loop later, as they would over a socket.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from tidings.access.endpoint import UNLIMITED_MEMORY, Peer, Transport
from tidings.core.clock import Clock, within
from tidings.core.tasks import cancel_and_wait

from .errors import ConnectFailed, LinkClosed


class Link(Protocol):
    """One connection."""

    @property
    def is_open(self) -> bool:
        """Whether nothing is known of its end; what is sent after that goes nowhere."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """What the answer to the upgrade said; names in whatever case. Empty if there was no upgrade."""
        ...

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

    @property
    def is_open(self) -> bool:
        """Whether more messages may come."""
        return self._closed is None

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
            await cancel_and_wait(opening)
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().close()  # it came after all, and nobody wants it any more
    return opening.result()


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


class _ServerConnection(Protocol):
    """What of an ``access.endpoint.Connection`` is called here."""

    def received(self, message: bytes) -> None: ...

    def ponged(self, payload: bytes) -> None: ...

    def drained(self) -> None: ...

    def closed(self, code: int) -> None: ...


class _Answering(Protocol):
    """What of an ``access.endpoint.Endpoint`` is called here."""

    def admit(self, peer: Peer) -> Peer: ...

    def open(self, transport: Transport, peer: Peer) -> _ServerConnection: ...


class EndpointConnector:
    """
    Opens connections to ``endpoint``, whatever the address says.

    Args:
        endpoint: What answers.
        path: The path to ask for.
        messages_max: Messages that may wait for the client before the endpoint sees them as buffered.
    """

    def __init__(self, endpoint: _Answering, *, path: str = "/sync", messages_max: int = 256) -> None:
        self._endpoint = endpoint
        self._path = path
        self._messages_max = messages_max

    async def connect(self, url: str) -> _LoopbackLink:
        """
        Open one.

        Raises:
            TidingsError: The endpoint does not let it in.
        """
        link = _LoopbackLink(self._messages_max)
        peer = self._endpoint.admit(Peer(self._path, {}, urlsplit(url).query, "loopback"))
        link.connection = self._endpoint.open(link.server_side, peer)
        return link


class _LoopbackLink:
    """The client's side."""

    def __init__(self, messages_max: int) -> None:
        self.headers: Mapping[str, str] = {}
        self.connection: _ServerConnection | None = None
        self.inbox = Inbox(messages_max, self._pause, self._resume)
        self.server_side = _ServerSide(self)
        self._is_full = False

    @property
    def is_open(self) -> bool:
        """Whether neither side has closed it."""
        return self.inbox.is_open

    def send(self, message: bytes) -> None:
        """Hand a message to the endpoint."""
        if self.is_open:
            self.server_side.deliver(message)

    async def receive(self) -> list[bytes]:
        """The messages that have come."""
        return await self.inbox.take()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close it; the endpoint hears of it in the next turn."""
        self.end(code, reason)

    def end(self, code: int, reason: str) -> None:
        if self.is_open:
            self.inbox.close(code, reason)
            assert self.connection is not None
            asyncio.get_running_loop().call_soon(self.connection.closed, code)

    def _pause(self) -> None:
        self._is_full = True

    def _resume(self) -> None:
        self._is_full = False
        self.server_side.buffered_bytes = 0
        if self.is_open and self.connection is not None:
            asyncio.get_running_loop().call_soon(self.connection.drained)

    def take_in(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.inbox.put(message)
        if self._is_full:
            self.server_side.buffered_bytes += sum(map(len, messages))


class _ServerSide:
    """The transport that the endpoint sees."""

    memory = UNLIMITED_MEMORY

    def __init__(self, link: _LoopbackLink) -> None:
        self.buffered_bytes = 0
        self._link = link
        self._to_endpoint: deque[bytes] = deque()
        self._is_paused = False
        self._is_closed = False

    def send(self, messages: Sequence[bytes]) -> None:
        if self._link.is_open:
            self._link.take_in(messages)

    def send_shared(self, prefixes: tuple[bytes, ...], suffix: bytes) -> None:
        self.send([prefix + suffix for prefix in prefixes])

    def ping(self, payload: bytes) -> None:
        """The client is there, being in the same process."""
        if self._link.is_open and self._link.connection is not None:
            asyncio.get_running_loop().call_soon(self._link.connection.ponged, payload)

    def close(self, code: int, reason: str = "") -> None:
        self._is_closed = True
        self._link.end(code, reason)

    def authenticated(self) -> None:
        """Nobody is limited here."""

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._schedule()

    def deliver(self, message: bytes) -> None:
        self._to_endpoint.append(message)
        self._schedule()

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        # What the client said before it left still counts; what it said to an endpoint that had closed does not.
        while self._to_endpoint and not self._is_paused and not self._is_closed:
            assert self._link.connection is not None
            self._link.connection.received(self._to_endpoint.popleft())
