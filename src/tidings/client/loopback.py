"""
A connection to an endpoint of the same process, without a socket.

For programs that hold node and client in one process, and for tests: messages cross in order, one iteration of the loop
later, as bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from tidings.access.endpoint import Peer, Transport

from .link import Inbox


class _ServerConnection(Protocol):
    """What of an ``access.endpoint.Connection`` is called here."""

    def received(self, message: bytes) -> None: ...

    def drained(self) -> None: ...

    def closed(self, code: int) -> None: ...


class _Answering(Protocol):
    """What of an ``access.endpoint.Endpoint`` is called here."""

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
        """Open one."""
        link = _LoopbackLink(self._messages_max)
        link.connection = self._endpoint.open(link.server_side, Peer(self._path, {}, address="loopback"))
        return link


class _LoopbackLink:
    """The client's side."""

    def __init__(self, messages_max: int) -> None:
        self.connection: _ServerConnection | None = None
        self.is_open = True
        self.inbox = Inbox(messages_max, self._pause, self._resume)
        self.server_side = _ServerSide(self)
        self._is_full = False

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
            self.is_open = False
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

    def __init__(self, link: _LoopbackLink) -> None:
        self.buffered_bytes = 0
        self._link = link
        self._to_endpoint: deque[bytes] = deque()
        self._is_paused = False
        self._is_closed = False

    def send(self, messages: Sequence[bytes]) -> None:
        if self._link.is_open:
            self._link.take_in(messages)

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
