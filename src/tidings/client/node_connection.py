"""
What a ``RemoteBus`` is made of: its connection to the node, the events it has published, and its memberships of groups.

The connection is opened, watched, and opened again when it breaks, after a random delay that grows. A node that is gone without
closing is noticed by its silence. A node that refuses for good is not asked again.

A published event is sent again on the next connection until the node has answered. It keeps its id, so that one whose answer was
lost is not stored twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from tidings.bus.events import Ack, Nack, ReceivedEvent
from tidings.bus.handlers import Handler, HandlerThreads, as_async, judged, outcome_of
from tidings.core.clock import Clock
from tidings.wire import groups as wire
from tidings.wire.events import ErrorInfo, ItemVerdict

from .errors import ConnectFailed, LinkClosed, RemoteRefused, RemoteStopped
from .link import Connector, Link, TokenSource, fresh_token, open_link
from .reconnecting import Reconnecting

logger = logging.getLogger(__name__)

_CONNECT_S_MAX: Final = 10.0
_SILENCE_S: Final = 15.0
"""After so long without a word from the node it is asked whether it is there; after three times as long it is not."""
_NOT_HEARD: Final = 1006


class NodeConnection:
    """
    One connection after another.

    Args:
        url, token, name: Where to, who we are (or what makes a fresh token for each connection), what the node's log calls us.
        connector, clock, rng: Replaceable for tests.
        on_frame: Called with each frame of the node, and the connection it came on.
        on_lost: Called when a connection has ended.
    """

    def __init__(
        self,
        url: str,
        token: TokenSource | None,
        name: str,
        *,
        connector: Connector,
        clock: Clock,
        rng: random.Random,
        on_frame: Callable[[Link, wire.NodeFrame], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._url = url
        self._token = token
        self._name = name
        self._connector = connector
        self._clock = clock
        self._reconnecting = Reconnecting(url, clock=clock, rng=rng, may_differ=callable(token))
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._heard_at = 0.0
        self.welcome_count = 0
        """How often the node has welcomed us; whoever hears it counts it here."""

    async def keep(self) -> RemoteStopped:
        """Stay connected, until the node does not want us, and will not."""
        while True:
            before = self.welcome_count
            problem = await self._connect_once()
            if self.welcome_count > before:
                self._reconnecting.succeeded()
            try:
                await self._reconnecting.pause(problem)
            except RemoteStopped as stopped:
                return stopped

    async def _connect_once(self) -> LinkClosed | ConnectFailed:
        """One connection from its beginning to its end; how it ended."""
        link: Link | None = None
        watching: asyncio.Task[None] | None = None
        try:
            token = "" if self._token is None else await fresh_token(self._token)
            link = await open_link(self._connector, self._url, self._clock, _CONNECT_S_MAX)
            watching = asyncio.create_task(self._watch(link), name="tidings-remote-bus-watch")
            link.send(wire.encode(wire.Hello(token=token, name=self._name)))
            while True:
                messages = await link.receive()
                self._heard_at = self._clock.monotonic()
                for message in messages:
                    self._on_frame(link, wire.decode_from_node(message))
        except (LinkClosed, ConnectFailed) as error:
            return error
        except wire.FrameInvalid as error:
            return LinkClosed(wire.CLOSE_PROTOCOL, str(error))
        finally:
            self._on_lost()
            if watching is not None:
                watching.cancel()
            if link is not None:
                await link.close()

    async def _watch(self, link: Link) -> None:
        """Notice a node that is gone without closing: a machine that lost its power sends none."""
        self._heard_at = self._clock.monotonic()
        while (silence_s := self._clock.monotonic() - self._heard_at) < 3 * _SILENCE_S:
            if silence_s >= _SILENCE_S:
                link.send(wire.encode(wire.Ping()))
            await self._clock.sleep(_SILENCE_S)
        logger.warning("nothing was heard from %s for %.0f s", self._url, silence_s)
        await link.close(_NOT_HEARD)


_PUBLISHES_MAX: Final = 1_000


class _Publish:
    """An event on its way, or a question about one."""

    __slots__ = ("answer", "message")

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


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

    async def send(self, number: int, event: bytes, at: str | None = None) -> ItemVerdict:
        """Send an event under a number of its own, to be published at a time; what the node says of it, however long that takes."""
        async with self._room:
            message = wire.encode(wire.Publish(ref=number, event=msgspec.Raw(event), at=at))
            if 0 < self.message_bytes_max < len(message):
                # Sent, it would close the connection, again after each reconnect.
                problem = f"the event is {len(message)} bytes long; the node takes at most {self.message_bytes_max}"
                return ItemVerdict(
                    index=0, verdict="refused", error=ErrorInfo(code="event.invalid_payload", detail=problem)
                )
            verdict: ItemVerdict = await self._answer(number, message)
            return verdict

    async def cancel(self, number: int, event_id: str) -> wire.DelayedCancelled:
        """Have an event that waits not published; what the node says to that, however long it takes."""
        async with self._room:
            message = wire.encode(wire.CancelDelayed(ref=number, event_id=event_id))
            answer: wire.DelayedCancelled = await self._answer(number, message)
            return answer

    async def _answer(self, number: int, message: bytes) -> Any:
        """Send a message, now or on the next connection, and wait for what is answered to it."""
        publish = self._publishes[number] = _Publish(message)
        try:
            if (link := self._link()) is not None:
                link.send(message)
            return await publish.answer
        finally:
            self._publishes.pop(number, None)

    def answered(self, number: int, answer: ItemVerdict | wire.DelayedCancelled) -> None:
        """The node has said what became of one."""
        publish = self._publishes.get(number)
        if publish is not None and not publish.answer.done():
            publish.answer.set_result(answer)

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

    def answers(self) -> Iterator[asyncio.Future[Any]]:
        """What is waited for."""
        return (publish.answer for publish in self._publishes.values())


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

    async def handle(self, event: ReceivedEvent) -> Ack | Nack | BaseException:
        """What the handler answered or, for a failed attempt, raised."""
        async with self._places:
            return judged(await outcome_of(self._handler(event)))
