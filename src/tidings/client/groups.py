"""
``RemoteBus``: publishing and durable groups through a node, with the methods of ``EventBus``.

    async with RemoteBus("http://127.0.0.1:8787", token) as bus:
        await bus.subscribe("actions", "learner", learn, workers=4)
        await bus.publish(Event(meta=EventMeta(...), payload={...}))

Several processes that subscribe to the same topic and group share its events. A handler is what it is for ``EventBus``: it gets an
event and answers ``Ack()`` or ``Nack()``, or raises. Cursor, retries and dead letters are the node's.

The connection is opened again when it breaks, after a random delay that grows; subscriptions are taken up again, and events whose
answer was lost are sent again under their ids, so that none is stored twice. Handlers that were at work when the connection broke
are cancelled: the node has given their events to other members.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec

from tidings.bus.errors import TopicMismatch
from tidings.bus.events import Ack, ReceivedEvent
from tidings.bus.pipeline import Handler
from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import Event
from tidings.core.names import check_group, check_topic
from tidings.log.interface import Appended, Duplicate
from tidings.log.record import Record
from tidings.wire import groups as wire
from tidings.wire.events import ErrorInfo, ItemVerdict, event_to_wire

from .errors import ConnectFailed, LinkClosed
from .link import Connector, Link
from .remote_errors import RemoteClosed, RemoteRefused, RemoteStopped, RemoteUnavailable
from .remote_subscription import RemoteSubscription
from .timing import full_jitter, within
from .websocket import WebSocketConnector

__all__ = ["RemoteBus", "RemoteSubscription"]

logger = logging.getLogger(__name__)

Token = str | Callable[[], str | Awaitable[str]] | None
_RECONNECT_S_MIN: Final = 0.2
_RECONNECT_S_MAX: Final = 15.0
_AUTH_TRIES_MAX: Final = 5
_CONNECT_S_MAX: Final = 10.0
_SILENCE_S: Final = 15.0
"""After so long without a word from the node it is asked whether it is there; after three times as long it is not."""
_NOT_HEARD: Final = 1006
_PUBLISHES_MAX: Final = 1_000
_RECORDS: Final = msgspec.json.Decoder(Record)


def socket_url(url: str) -> str:
    """Where the door of the node at ``url`` is: ``http://host:8787`` becomes ``ws://host:8787/groups``."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + "/groups", "", ""))


class _Publish:
    """An event on its way."""

    __slots__ = ("answer", "message")

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.answer: asyncio.Future[ItemVerdict] = asyncio.get_running_loop().create_future()


class RemoteBus:
    """
    A bus at the other end of a connection.

    Args:
        url: The node's address, as it prints it: ``http://127.0.0.1:8787``.
        token: Who we are; or what makes a fresh token for each connection.
        name: What the node's log calls us.
        connector: What opens connections; a WebSocket's if left out.
        clock, rng: The world.
    """

    def __init__(
        self,
        url: str,
        token: Token = None,
        *,
        name: str = "",
        connector: Connector | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self.url = socket_url(url)
        self._token = token
        self._name = name
        self._connector = connector or WebSocketConnector()
        self._clock = clock
        self._rng = rng or random.Random()
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._welcome: asyncio.Future[None] | None = None
        self._subscriptions: dict[int, RemoteSubscription] = {}
        self._publishes: dict[int, _Publish] = {}
        self._room = asyncio.Semaphore(_PUBLISHES_MAX)
        self._numbers = itertools.count(1)
        self._done: list[int] = []
        self._later: set[asyncio.Task[None]] = set()
        self._heard_at = 0.0
        self._message_bytes_max = 0
        self._is_flush_due = False
        self._is_closed = False
        self._problem: RemoteStopped | None = None
        self.epoch: str | None = None
        self.connection_count = 0
        """How often the node has welcomed us."""

    # Life

    async def start(self) -> None:
        """
        Connect, and wait until the node has welcomed us. Starting twice is fine.

        Raises:
            RemoteStopped: The node does not want us, and will not.
        """
        if self._is_closed:
            raise RemoteClosed
        if self._task is None:
            self._task = asyncio.create_task(self._keep_connected(), name="tidings-remote-bus")
        while self._link is None:
            await asyncio.shield(self._welcomed())

    def _welcomed(self) -> asyncio.Future[None]:
        if self._problem is not None:
            raise self._problem
        if self._welcome is None or self._welcome.done():
            self._welcome = asyncio.get_running_loop().create_future()
            self._welcome.add_done_callback(_look_away)
        return self._welcome

    async def close(self, timeout_s: float = 10.0) -> None:
        """
        Take nothing more, let handlers that are at work finish within the time, and go. What is not finished is given back to the
        node, which does not count it as tried. Closing twice is fine.
        """
        if self._is_closed:
            return
        self._is_closed = True
        started = self._clock.monotonic()
        for subscription in list(self._subscriptions.values()):
            self._send(wire.Unsubscribe(id=subscription.number))
        waiting: list[asyncio.Future[Any]] = [
            task for sub in self._subscriptions.values() for task in sub._running.values()
        ]
        waiting += [publish.answer for publish in self._publishes.values()]
        if waiting and self._link is not None:
            left_s = max(0.0, timeout_s - (self._clock.monotonic() - started))
            await within(self._clock, left_s, asyncio.ensure_future(asyncio.wait(waiting)))
        for subscription in self._subscriptions.values():
            for tag, task in list(subscription._running.items()):
                task.cancel()
                self._send(wire.Nack(tag=tag, reason="the member stops", is_returned=True))
        self._flush()
        self._fail_all(RemoteClosed())
        for later in self._later:
            later.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> RemoteBus:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # Publishing

    async def publish(
        self, event: Event, topic: str | None = None, *, timeout_s: float | None = None
    ) -> Appended | Duplicate:
        """
        Store an event; returns when it is durable at the node. Waits for the node as long as it takes, or as long as is given.

        Raises:
            RemoteRefused: The node refused it; ``error_code`` says why.
            RemoteUnavailable: The time is up; whether it was stored is unknown, and publishing it again settles that.
            TopicMismatch: ``topic`` is given, and is not the event's.
            InvalidPayload: It cannot be said in JSON.
        """
        if topic is not None and str.__str__(topic) != str.__str__(event.meta.topic):
            raise TopicMismatch(str.__str__(topic), str.__str__(event.meta.topic))
        await self._ensure_started()
        message = event_to_wire(event)
        sending = asyncio.ensure_future(self._send_event(message))
        try:
            if timeout_s is not None and not await within(self._clock, timeout_s, sending):
                raise RemoteUnavailable(self.url, f"the event was not acknowledged within {timeout_s:g} s")
            verdict = await sending
        finally:
            sending.cancel()
        if verdict.error is not None:
            raise RemoteRefused(verdict.error)
        assert isinstance(verdict.seq, int)
        assert isinstance(verdict.offset, int)
        kind = Appended if verdict.verdict == "appended" else Duplicate
        return kind(verdict.seq, verdict.offset, verdict.event_id or event.meta.event_id)

    async def _send_event(self, event: bytes) -> ItemVerdict:
        async with self._room:
            number = next(self._numbers)
            message = wire.encode(wire.Publish(ref=number, event=msgspec.Raw(event)))
            if 0 < self._message_bytes_max < len(message):
                # Sent, it would close the connection, again after each reconnect.
                problem = f"the event is {len(message)} bytes long; the node takes at most {self._message_bytes_max}"
                return ItemVerdict(
                    index=0, verdict="refused", error=ErrorInfo(code="event.invalid_payload", detail=problem)
                )
            publish = self._publishes[number] = _Publish(message)
            try:
                if self._link is not None:
                    self._link.send(message)
                return await publish.answer
            finally:
                self._publishes.pop(number, None)

    # Subscribing

    async def subscribe(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        workers: int = 1,
        prefetch: int = 0,
        none_is_ack: bool = False,
        **options: Any,
    ) -> RemoteSubscription:
        """
        Become a member of a group.

        Args:
            topic, group: Together they name the group.
            handler: Gets each event, and answers with ``Ack()`` or ``Nack()``, or raises.
            workers: How many events this member handles at once.
            prefetch: How many more the node may send ahead; they wait here, and count as tried if this process is killed.
            none_is_ack: Take a handler that returns nothing as done.
            options: The group's, for the first member that joins: ``start``, ``max_inflight``, ``backoff_base``,
                ``backoff_mult``, ``backoff_max``, ``max_retries``, ``order``, ``by_priority``, ``ack_deadline_ms``.

        Raises:
            InvalidName: A name breaks the grammar.
            RemoteRefused: The node does not have it: no right, a damaged cursor, a group that is the node's own.
            TypeError: An option is unknown.
        """
        await self._ensure_started()
        number = next(self._numbers)
        subscription = RemoteSubscription(
            number,
            check_topic(topic),
            check_group(group),
            handler,
            workers + prefetch,
            workers,
            wire.GroupOptions(**options),
            none_is_ack=none_is_ack,
        )
        subscription._ready = asyncio.get_running_loop().create_future()
        self._subscriptions[number] = subscription
        self._join(subscription)
        try:
            await subscription._ready
        except BaseException:
            self._subscriptions.pop(number, None)
            raise
        return subscription

    async def unsubscribe(self, subscription: RemoteSubscription, timeout_s: float = 10.0) -> bool:
        """End a membership when what it was given is answered; whether it was one. The group keeps its place."""
        if self._subscriptions.get(subscription.number) is not subscription:
            return False
        self._send(wire.Unsubscribe(id=subscription.number))
        running = list(subscription._running.values())
        if running:
            await within(self._clock, timeout_s, asyncio.ensure_future(asyncio.wait(running)))
        for tag, task in list(subscription._running.items()):
            task.cancel()
            self._send(wire.Nack(tag=tag, reason="the member stops", is_returned=True))
        self._flush()
        self._subscriptions.pop(subscription.number, None)
        subscription.is_active = False
        return True

    def _join(self, subscription: RemoteSubscription) -> None:
        self._send(
            wire.Subscribe(
                id=subscription.number,
                topic=subscription.topic,
                group=subscription.group,
                max_inflight=subscription.max_inflight,
                options=subscription.options,
            )
        )

    # The connection

    async def _ensure_started(self) -> None:
        if self._is_closed:
            raise RemoteClosed
        if self._problem is not None:
            raise self._problem
        if self._task is None:
            await self.start()

    async def _keep_connected(self) -> None:
        failures = refusals = 0
        while True:
            before = self.connection_count
            problem = await self._connect_once()
            if self.connection_count > before:
                failures = refusals = 0
            if isinstance(problem, LinkClosed):
                refusals += problem.close_code == wire.CLOSE_AUTH_FAILED
                may_differ = callable(self._token) and refusals < _AUTH_TRIES_MAX
                if problem.close_code in (wire.CLOSE_PROTOCOL, wire.CLOSE_REVOKED) or (refusals and not may_differ):
                    self._problem = RemoteStopped(self.url, str(problem))
                    logger.error("%s", self._problem)
                    self._fail_all(self._problem)
                    return
            delay_s = full_jitter(failures, _RECONNECT_S_MIN, _RECONNECT_S_MAX, self._rng)
            failures += 1
            logger.warning("%s; connecting again in %.1f s", problem, delay_s)
            await self._clock.sleep(delay_s)

    async def _connect_once(self) -> LinkClosed | ConnectFailed:
        """One connection from its beginning to its end; how it ended."""
        link: Link | None = None
        watching: asyncio.Task[None] | None = None
        try:
            token = self._token() if callable(self._token) else self._token
            if inspect.isawaitable(token):
                token = await token
            opening = asyncio.ensure_future(self._connector.connect(self.url))
            if not await within(self._clock, _CONNECT_S_MAX, opening):
                opening.cancel()
                return ConnectFailed(self.url, f"no answer within {_CONNECT_S_MAX:g} s")
            link = await opening
            watching = asyncio.create_task(self._watch(link), name="tidings-remote-bus-watch")
            link.send(wire.encode(wire.Hello(token=token or "", name=self._name)))
            while True:
                messages = await link.receive()
                self._heard_at = self._clock.monotonic()
                for message in messages:
                    self._hear(link, wire.decode_from_node(message))
        except (LinkClosed, ConnectFailed) as error:
            return error
        except wire.FrameInvalid as error:
            return LinkClosed(wire.CLOSE_PROTOCOL, str(error))
        finally:
            self._lost()
            if watching is not None:
                watching.cancel()
            if link is not None:
                await link.close()

    async def _watch(self, link: Link) -> None:
        """Notice a node that is gone without a goodbye: a machine that lost its power sends none."""
        self._heard_at = self._clock.monotonic()
        while (silence_s := self._clock.monotonic() - self._heard_at) < 3 * _SILENCE_S:
            if silence_s >= _SILENCE_S:
                link.send(wire.encode(wire.Ping()))
            await self._clock.sleep(_SILENCE_S)
        logger.warning("nothing was heard from %s for %.0f s", self.url, silence_s)
        await link.close(_NOT_HEARD)

    def _lost(self) -> None:
        self._link = None
        self._done.clear()
        for subscription in self._subscriptions.values():
            subscription.is_active = False
            for task in subscription._running.values():
                task.cancel()  # the node has given their events to others
            subscription._running.clear()

    def _fail_all(self, error: RemoteStopped | RemoteClosed) -> None:
        for publish in self._publishes.values():
            if not publish.answer.done():
                publish.answer.set_exception(error)
        for subscription in self._subscriptions.values():
            if subscription._ready is not None and not subscription._ready.done():
                subscription._ready.set_exception(error)
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error)

    def _hear(self, link: Link, frame: wire.NodeFrame) -> None:
        match frame:
            case wire.Deliver():
                self._take(frame)
            case wire.Published():
                publish = self._publishes.get(frame.ref)
                if publish is not None and not publish.answer.done():
                    publish.answer.set_result(frame.verdict)
            case wire.Withdrawn():
                self._stop_handling(frame)
            case wire.Subscribed():
                self._subscribed(frame)
            case wire.Unsubscribed():
                self._unsubscribed(frame)
            case wire.Welcome():
                self._begin(link, frame)
            case wire.Pong():
                pass  # hearing it was all
            case wire.Problem():
                logger.warning("the node closes the connection: %s", frame.error.detail)

    def _begin(self, link: Link, frame: wire.Welcome) -> None:
        self._link = link
        self.epoch = frame.epoch
        self._message_bytes_max = frame.message_bytes_max
        self.connection_count += 1
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(None)
        for subscription in self._subscriptions.values():
            self._join(subscription)
        for publish in self._publishes.values():
            if not publish.answer.done():
                link.send(publish.message)

    def _subscribed(self, frame: wire.Subscribed) -> None:
        subscription = self._subscriptions.get(frame.id)
        if subscription is None:
            self._send(wire.Unsubscribe(id=frame.id))
            return
        if frame.differs:
            logger.warning(
                "group %s of topic %s runs with the options of its first member; others were asked for: %s",
                subscription.group,
                subscription.topic,
                ", ".join(frame.differs),
            )
        subscription.is_active = True
        if subscription._ready is not None and not subscription._ready.done():
            subscription._ready.set_result(None)

    def _unsubscribed(self, frame: wire.Unsubscribed) -> None:
        subscription = self._subscriptions.get(frame.id)
        if subscription is None or frame.error is None:
            return
        subscription.is_active = False
        if subscription._ready is not None and not subscription._ready.done():
            subscription._ready.set_exception(RemoteRefused(frame.error))
        elif frame.error.retryable and not self._is_closed:
            task = asyncio.create_task(self._join_later(subscription))
            self._later.add(task)
            task.add_done_callback(self._later.discard)
        else:
            self._ended(subscription, frame.error)

    def _ended(self, subscription: RemoteSubscription, error: ErrorInfo) -> None:
        subscription.problem = RemoteRefused(error)
        self._subscriptions.pop(subscription.number, None)
        for task in subscription._running.values():
            task.cancel()
        logger.error("group %s of topic %s: %s", subscription.group, subscription.topic, subscription.problem)

    async def _join_later(self, subscription: RemoteSubscription) -> None:
        await self._clock.sleep(full_jitter(2, _RECONNECT_S_MIN, _RECONNECT_S_MAX, self._rng))
        if self._subscriptions.get(subscription.number) is subscription and not subscription.is_active:
            self._join(subscription)

    # Deliveries

    def _take(self, frame: wire.Deliver) -> None:
        subscription = self._subscriptions.get(frame.id)
        if subscription is None:
            self._send(wire.Nack(tag=frame.tag, reason="no such membership", is_returned=True))
            return
        event = ReceivedEvent(_RECORDS.decode(frame.record), subscription.group, frame.attempt)
        task = asyncio.create_task(self._handle(subscription, frame.tag, event))
        subscription._running[frame.tag] = task

    async def _handle(self, subscription: RemoteSubscription, tag: int, event: ReceivedEvent) -> None:
        link = self._link
        answer = await subscription.handle(event)
        if subscription._running.pop(tag, None) is None or self._link is not link:
            return  # withdrawn, or of a connection that is gone
        if isinstance(answer, Ack):
            subscription.handled_count += 1
            self._done.append(tag)
            if not self._is_flush_due:
                self._is_flush_due = True
                asyncio.get_running_loop().call_soon(self._flush)
        else:
            self._send(wire.Nack(tag=tag, reason=answer.reason[:4_096], delay_s=answer.delay_s))

    def _flush(self) -> None:
        """One message for all that was acknowledged in this turn of the loop."""
        self._is_flush_due = False
        while self._done:
            tags, self._done = self._done[:10_000], self._done[10_000:]
            self._send(wire.Ack(tags=tags))

    def _stop_handling(self, frame: wire.Withdrawn) -> None:
        for subscription in self._subscriptions.values():
            task = subscription._running.pop(frame.tag, None)
            if task is not None:
                logger.warning("group %s: an event was withdrawn: %s", subscription.group, frame.reason)
                task.cancel()
        # Always answered: the place is taken until then.
        self._send(wire.Nack(tag=frame.tag, reason=frame.reason))

    def _send(self, frame: wire.ClientFrame) -> None:
        if self._link is not None:
            self._link.send(wire.encode(frame))


def _look_away(future: asyncio.Future[None]) -> None:
    """Nobody may be waiting when a start fails; that is no error by itself."""
    if not future.cancelled():
        future.exception()
