"""
Events on their way to a node: sent, and sent again on the next connection until the node has answered.

An event keeps its id, so that one whose answer was lost is not stored twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from tidings.wire import groups as wire
from tidings.wire.events import ErrorInfo, ItemVerdict

from .link import Link

__all__ = ["RemotePublishes"]

_PUBLISHES_MAX: Final = 1_000


class _Publish:
    """An event on its way."""

    __slots__ = ("answer", "message")

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.answer: asyncio.Future[ItemVerdict] = asyncio.get_running_loop().create_future()


class RemotePublishes:
    """
    What a ``RemoteBus`` has sent and not heard of.

    Args:
        link: The connection there is now, if there is one.
    """

    def __init__(self, link: Callable[[], Link | None]) -> None:
        self._link = link
        self._publishes: dict[int, _Publish] = {}
        self._room = asyncio.Semaphore(_PUBLISHES_MAX)
        self.message_bytes_max = 0
        """The longest message that the node takes; 0 before it has said so."""

    async def send(self, number: int, event: bytes) -> ItemVerdict:
        """Send an event under a number of its own; what the node says of it, however long that takes."""
        async with self._room:
            message = wire.encode(wire.Publish(ref=number, event=msgspec.Raw(event)))
            if 0 < self.message_bytes_max < len(message):
                # Sent, it would close the connection, again after each reconnect.
                problem = f"the event is {len(message)} bytes long; the node takes at most {self.message_bytes_max}"
                return ItemVerdict(
                    index=0, verdict="refused", error=ErrorInfo(code="event.invalid_payload", detail=problem)
                )
            publish = self._publishes[number] = _Publish(message)
            try:
                if (link := self._link()) is not None:
                    link.send(message)
                return await publish.answer
            finally:
                self._publishes.pop(number, None)

    def answered(self, frame: wire.Published) -> None:
        """The node has said what became of one."""
        publish = self._publishes.get(frame.ref)
        if publish is not None and not publish.answer.done():
            publish.answer.set_result(frame.verdict)

    def send_again(self, link: Link) -> None:
        """A new connection: whatever is not answered goes out once more."""
        for publish in self._publishes.values():
            if not publish.answer.done():
                link.send(publish.message)

    def fail(self, error: Exception) -> None:
        """No answer will come."""
        for publish in self._publishes.values():
            if not publish.answer.done():
                publish.answer.set_exception(error)

    def answers(self) -> Iterator[asyncio.Future[ItemVerdict]]:
        """What is waited for."""
        return (publish.answer for publish in self._publishes.values())
