"""A membership of a group at the member's end: the handler, how many of its events run at once, and what it answers."""

from __future__ import annotations

import asyncio

from tidings.bus.errors import InvalidAnswer
from tidings.bus.events import Ack, Nack, ReceivedEvent
from tidings.bus.handler_threads import Handler, HandlerThreads, as_async
from tidings.bus.outcomes import judged, outcome_of
from tidings.bus.texts import text_of
from tidings.wire import groups as wire

from .remote_errors import RemoteRefused

__all__ = ["RemoteSubscription"]


class RemoteSubscription:
    """A membership of a group, for as long as the bus is open or until ``unsubscribe``."""

    def __init__(
        self,
        number: int,
        topic: str,
        group: str,
        handler: Handler,
        max_inflight: int,
        workers: int,
        options: wire.GroupOptions,
    ) -> None:
        self.number = number
        self.topic = topic
        self.group = group
        self.max_inflight = max_inflight
        self.options = options
        """Those in effect, once the node has said which."""
        self.problem: RemoteRefused | None = None
        """Why the node ended the membership, if it did."""
        self.handled_count = 0
        self.is_active = False
        """Whether the node counts us as a member now."""
        self._handler = as_async(handler, HandlerThreads(f"tidings-{topic}-{group}", workers))
        self._places = asyncio.Semaphore(workers)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: asyncio.Future[None] | None = None

    async def handle(self, event: ReceivedEvent) -> Ack | Nack:
        """The handler's answer, whatever the handler does."""
        async with self._places:
            answer = judged(await outcome_of(self._handler(event)))
        if isinstance(answer, Ack | Nack):
            return answer
        if isinstance(answer, InvalidAnswer):
            return Nack(str(answer))
        return Nack(f"{type(answer).__name__}: {text_of(answer)}"[:4_000])  # whatever it raised: a failed attempt
