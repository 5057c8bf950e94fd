"""
A connection to an endpoint of the same process, without a socket.

For programs that hold node and client in one process, and for tests: messages cross in order, one iteration of the loop
later, as bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from tidings.wire.transport import Conversation, Door, Upgrade

from .link import Inbox


class DoorConnector:
    """
    Opens connections to ``door``, whatever the address.

    Args:
        door: The endpoint.
        path: The path of the upgrade request.
        messages_max: Messages that may wait for the client before the endpoint sees them as buffered.
    """

    def __init__(self, door: Door, *, path: str = "/sync", messages_max: int = 256) -> None:
        self._door = door
        self._path = path
        self._messages_max = messages_max

    async def connect(self, url: str) -> _LoopbackLink:
        """Open one."""
        link = _LoopbackLink(self._messages_max)
        link.conversation = self._door.open(link.door_side, Upgrade(self._path, {}, peer="loopback"))
        return link


class _LoopbackLink:
    """The client's side."""

    def __init__(self, messages_max: int) -> None:
        self.conversation: Conversation | None = None
        self.is_open = True
        self.inbox = Inbox(messages_max, self._pause, self._resume)
        self.door_side = _DoorSide(self)
        self._is_full = False

    def send(self, message: bytes) -> None:
        """Hand a message to the endpoint."""
        if self.is_open:
            self.door_side.deliver(message)

    async def receive(self) -> list[bytes]:
        """The messages that have come."""
        return await self.inbox.take()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close it; the endpoint sees that in the next iteration of the loop."""
        self.end(code, reason)

    def end(self, code: int, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            self.inbox.close(code, reason)
            assert self.conversation is not None
            asyncio.get_running_loop().call_soon(self.conversation.closed, code)

    def _pause(self) -> None:
        self._is_full = True

    def _resume(self) -> None:
        self._is_full = False
        self.door_side.buffered_bytes = 0
        if self.is_open and self.conversation is not None:
            asyncio.get_running_loop().call_soon(self.conversation.drained)

    def take_in(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.inbox.put(message)
        if self._is_full:
            self.door_side.buffered_bytes += sum(map(len, messages))


class _DoorSide:
    """The endpoint's transport."""

    def __init__(self, link: _LoopbackLink) -> None:
        self.buffered_bytes = 0
        self._link = link
        self._to_door: deque[bytes] = deque()
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
        self._to_door.append(message)
        self._schedule()

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        # What the client said before it left still counts; what it said to an endpoint that had closed does not.
        while self._to_door and not self._is_paused and not self._is_closed:
            assert self._link.conversation is not None
            self._link.conversation.received(self._to_door.popleft())
