"""One connection to the ledger of a node, on which requests are answered one after another."""

from __future__ import annotations

from typing import Any

import msgspec

from tidings.wire.steward import frames, requests

from .errors import LedgerRefused
from .link import Link


def answer_of(message: bytes) -> dict[str, Any]:
    """
    An answer.

    Raises:
        LedgerRefused: It is a refusal.
    """
    answer: dict[str, Any] = msgspec.json.decode(message)
    error = answer.get("error")
    if isinstance(error, dict):
        details = dict(error.get("details") or {})
        raise LedgerRefused(
            str(error.get("class")), str(details.pop("subclass", "")), str(error.get("message")), details
        )
    return answer


class Conversation:
    """What is said on one connection."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._waiting: list[bytes] = []

    @property
    def is_open(self) -> bool:
        """Whether nothing is known of its end."""
        return self.link.is_open

    async def next(self) -> bytes:
        """The next message."""
        if not self._waiting:
            self._waiting = (await self.link.receive())[::-1]
        return self._waiting.pop()

    def say(self, request: requests.StewardRequest) -> None:
        """Send a request that is not answered."""
        self.link.send(frames.encode(request))

    async def ask(self, request: requests.StewardRequest) -> dict[str, Any]:
        """
        Send a request, and wait for its answer.

        Raises:
            LedgerRefused: It is a refusal.
            LinkClosed: The connection ended before.
        """
        self.say(request)
        return answer_of(await self.next())

    async def close(self) -> None:
        """Close the connection. Closing twice is fine."""
        await self.link.close()
