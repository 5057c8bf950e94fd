"""
``RemoteBus``: publishing and durable groups through a node, with the methods of ``EventBus``.

    async with RemoteBus("http://127.0.0.1:8787", token) as bus:
        await bus.subscribe("actions", "learner", learn, workers=4)
        await bus.publish(Event(meta=EventMeta(...), payload={...}))

Several processes that subscribe to the same topic and group share its events. A handler is what it is for ``EventBus``: it gets an
event and answers ``Ack()`` or ``Nack()``, or raises. Cursor, retries and dead letters are the node's.

The connection is opened again when it breaks (``node_connection``); subscriptions are taken up again, and events whose answer was
lost are sent again under their ids, so that none is stored twice. Handlers that were at work when the connection broke
are cancelled: the node has given their events to other members.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Unpack, overload
from urllib.parse import urlsplit, urlunsplit

import msgspec

from tidings.bus.delayed_records import due_of
from tidings.bus.errors import TopicMismatch
from tidings.bus.events import Ack, Nack, ReceivedEvent
from tidings.bus.handlers import Handler
from tidings.bus.payloads import EnvelopeOptions, bind_handler, event_of
from tidings.bus.subscription import SharedGroupOptions
from tidings.bus.texts import cut, kind_of, text_of
from tidings.core.clock import SYSTEM_CLOCK, Clock, within
from tidings.core.events import Event
from tidings.core.names import check_topic_and_group
from tidings.core.settings import checked
from tidings.core.tasks import cancel_and_wait
from tidings.log.interface import Appended, Duplicate
from tidings.log.record import Record
from tidings.wire import groups as wire
from tidings.wire.events import ErrorInfo, event_to_wire

from .errors import RemoteClosed, RemoteRefused, RemoteStopped, RemoteUnavailable
from .link import Connector, Link, TokenSource
from .node_connection import NodeConnection, RemotePublishes, RemoteSubscription
from .reconnecting import full_jitter
from .websocket import WebSocketConnector

logger = logging.getLogger(__name__)

_RECORDS: Final = msgspec.json.Decoder(Record)
_REJOIN_S_MAX: Final = 0.8


def socket_url(url: str) -> str:
    """Where the endpoint of the node at ``url`` is: ``http://host:8787`` becomes ``ws://host:8787/groups``."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + "/groups", "", ""))


class _Slots(msgspec.Struct, frozen=True):
    """How many events a member takes at once: those that it handles, and those that wait."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=wire.MEMBER_INFLIGHT_MAX)]
    prefetch: Annotated[int, msgspec.Meta(ge=0, le=wire.MEMBER_INFLIGHT_MAX)]


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
        token: TokenSource | None = None,
        *,
        name: str = "",
        connector: Connector | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self.url = socket_url(url)
        self._clock = clock
        self._rng = rng or random.Random()
        self._connection = NodeConnection(
            self.url,
            token,
            name,
            connector=connector or WebSocketConnector(),
            clock=clock,
            rng=self._rng,
            on_frame=self._hear,
            on_lost=self._lost,
        )
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._welcome: asyncio.Future[None] | None = None
        self._subscriptions: dict[int, RemoteSubscription] = {}
        self._publishes = RemotePublishes(lambda: self._link)
        self._numbers = itertools.count(1)
        self._done: list[int] = []
        self._later: set[asyncio.Task[None]] = set()
        self._is_flush_due = False
        self._is_closed = False
        self._problem: RemoteStopped | None = None
        self.epoch: str | None = None

    @property
    def connection_count(self) -> int:
        """How often the node has welcomed us."""
        return self._connection.welcome_count

    # Life

    async def start(self, timeout_s: float | None = None) -> None:
        """
        Connect, and wait until the node has welcomed us. Starting twice is fine.

        Args:
            timeout_s: Seconds to wait; ``None`` waits forever.

        Raises:
            RemoteUnavailable: The time is up. Connecting continues until ``close``.
            RemoteStopped: The node does not want us, and will not.
        """
        if self._is_closed:
            raise RemoteClosed
        if self._task is None:
            self._task = asyncio.create_task(self._stay_connected(), name="tidings-remote-bus")
        if timeout_s is None:
            await self._connected()
            return
        connecting = asyncio.ensure_future(self._connected())
        try:
            if not await within(self._clock, timeout_s, connecting):
                raise RemoteUnavailable(self.url, f"there was no connection within {timeout_s:g} s")
            await connecting
        finally:
            connecting.cancel()

    async def _connected(self) -> None:
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
        waiting += self._publishes.answers()
        if waiting and self._link is not None:
            left_s = max(0.0, timeout_s - (self._clock.monotonic() - started))
            await within(self._clock, left_s, asyncio.ensure_future(asyncio.wait(waiting)))
        for subscription in self._subscriptions.values():
            self._return_all(subscription)
        self._flush()
        self._fail_all(RemoteClosed())
        for later in self._later:
            later.cancel()
        await cancel_and_wait(self._task)

    async def stopped(self) -> None:
        """
        Wait until connecting again is of no use, or until this end is closed.

        Raises:
            RemoteStopped: The node does not want us, and will not.
        """
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._problem is not None:
            raise self._problem

    async def __aenter__(self) -> RemoteBus:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # Publishing

    @overload
    async def publish(
        self,
        event: Event,
        topic: str | None = None,
        *,
        delay: timedelta | None = None,
        at: datetime | None = None,
        timeout_s: float | None = None,
    ) -> Appended | Duplicate: ...

    @overload
    async def publish(
        self,
        event: str,
        topic: object,
        *,
        type: str | None = None,
        space: str,
        delay: timedelta | None = None,
        at: datetime | None = None,
        timeout_s: float | None = None,
        **meta: Unpack[EnvelopeOptions],
    ) -> Appended | Duplicate: ...

    async def publish(
        self,
        event: Event | str,
        topic: object = None,
        *,
        type: str | None = None,
        space: str | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
        timeout_s: float | None = None,
        **meta: Unpack[EnvelopeOptions],
    ) -> Appended | Duplicate:
        """
        Store an event; returns when it is durable at the node. Waits for the node as long as it takes, or for ``timeout_s``, the time of the
        first connection included.

        An ``Event``, or topic and payload with the fields of the envelope as keywords: as ``EventBus.publish`` does. With ``delay``, from
        now, or ``at`` the node publishes it then; ``cancel_delayed`` takes it back.

        Raises:
            RemoteRefused: The node refused it; ``error_code`` says why.
            RemoteUnavailable: The time is up; whether it was stored is unknown, and publishing it again settles that.
            TopicMismatch: ``topic`` is given, and is not the event's.
            InvalidPayload: It cannot be said in JSON.
        """
        if not isinstance(event, Event):
            event = event_of(event, topic, type, space, meta)
        elif topic is not None and topic != event.meta.topic:
            raise TopicMismatch(str.__str__(topic), str.__str__(event.meta.topic))
        event, due = due_of(self._clock, event, delay, at)
        began_s = self._clock.monotonic()
        await self._ensure_started(timeout_s)
        moment = None if due is None else due.isoformat()
        sending = asyncio.ensure_future(self._publishes.send(next(self._numbers), event_to_wire(event), moment))
        try:
            left_s = None if timeout_s is None else max(0.0, timeout_s - (self._clock.monotonic() - began_s))
            if left_s is not None and not await within(self._clock, left_s, sending):
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

    async def cancel_delayed(self, event_id: str) -> bool:
        """
        Have an event that waits for its time not published; whether it was still waiting, and may be published by us. Once this returns it is not published any more. Waits for
        the node as long as it takes, and asks again if the connection breaks: then an event that was cancelled at the first try was no
        longer waiting at the second.

        Raises:
            RemoteRefused: The node refused.
            RemoteStopped, RemoteClosed: There is no connection, and will be none.
        """
        await self._ensure_started()
        answer = await self._publishes.cancel(next(self._numbers), event_id)
        if answer.error is not None:
            raise RemoteRefused(answer.error)
        return answer.is_cancelled

    # Subscribing

    async def subscribe(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        workers: int = 1,
        prefetch: int = 0,
        **options: Unpack[SharedGroupOptions],
    ) -> RemoteSubscription:
        """
        Become a member of a group.

        Args:
            topic, group: Together they name the group.
            handler: As for ``EventBus.subscribe``.
            workers: How many events this member handles at once.
            prefetch: How many more the node may send ahead; they wait here, and count as tried if this process is killed.
            options: The group's, from the first member that joins: see ``SharedGroupOptions``.

        Raises:
            InvalidName: A name breaks the grammar.
            SettingsError: An option is out of its range.
            RemoteRefused: The node does not have it: no right, a damaged cursor, a group that is the node's own.
            TypeError: An option is unknown.
            InvalidHandler: A parameter of the handler asks for something that there is not.
        """
        # All of it before anything is sent: the node closes a connection, with all that is on it, for a message that it cannot take.
        bound = bind_handler(handler)
        topic, group = check_topic_and_group(topic, group)
        slots = checked(_Slots(workers=workers, prefetch=prefetch))
        group_options = checked(wire.GroupOptions(**options))
        await self._ensure_started()
        number = next(self._numbers)
        subscription = RemoteSubscription(
            number,
            topic,
            group,
            bound,
            min(slots.workers + slots.prefetch, wire.MEMBER_INFLIGHT_MAX),
            slots.workers,
            group_options,
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
        self._return_all(subscription)
        self._flush()
        self._subscriptions.pop(subscription.number, None)
        subscription.is_active = False
        return True

    def _return_all(self, subscription: RemoteSubscription) -> None:
        """Give back what is not answered, as not tried."""
        running, subscription._running = subscription._running, {}
        for tag, task in running.items():
            task.cancel()
            self._send(wire.NackFrame(tag=tag, reason="the member stops", is_returned=True))

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

    async def _ensure_started(self, timeout_s: float | None = None) -> None:
        if self._is_closed:
            raise RemoteClosed
        if self._problem is not None:
            raise self._problem
        if self._task is None:
            await self.start(timeout_s)

    async def _stay_connected(self) -> None:
        self._problem = await self._connection.keep()
        logger.error("%s", self._problem)
        self._fail_all(self._problem)

    def _lost(self) -> None:
        self._link = None
        self._done.clear()
        for subscription in self._subscriptions.values():
            subscription.is_active = False
            for task in subscription._running.values():
                task.cancel()  # the node has given their events to others
            subscription._running.clear()

    def _fail_all(self, error: RemoteStopped | RemoteClosed) -> None:
        self._publishes.fail(error)
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
                self._publishes.answered(frame.ref, frame.verdict)
            case wire.DelayedCancelled():
                self._publishes.answered(frame.ref, frame)
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
        self._publishes.message_bytes_max = frame.message_bytes_max
        self._connection.welcome_count += 1
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(None)
        for subscription in self._subscriptions.values():
            self._join(subscription)
        self._publishes.send_again(link)

    def _subscribed(self, frame: wire.Subscribed) -> None:
        subscription = self._subscriptions.get(frame.id)
        if subscription is None:
            self._send(wire.Unsubscribe(id=frame.id))
            return
        if frame.differs:
            logger.warning(
                "group %s of topic %s runs with the options of its first member, within the node's bounds; others were asked for: %s",
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
        subscription._running.clear()
        logger.error("group %s of topic %s: %s", subscription.group, subscription.topic, subscription.problem)

    async def _join_later(self, subscription: RemoteSubscription) -> None:
        await self._clock.sleep(full_jitter(0, _REJOIN_S_MAX, _REJOIN_S_MAX, self._rng))
        if self._subscriptions.get(subscription.number) is subscription and not subscription.is_active:
            self._join(subscription)

    # Deliveries

    def _take(self, frame: wire.Deliver) -> None:
        subscription = self._subscriptions.get(frame.id)
        if subscription is None:
            self._send(wire.NackFrame(tag=frame.tag, reason="no such membership", is_returned=True))
            return
        event = ReceivedEvent(_RECORDS.decode(frame.record), subscription.group, frame.attempt)
        task = asyncio.create_task(self._handle(subscription, frame.tag, event))
        subscription._running[frame.tag] = task

    async def _handle(self, subscription: RemoteSubscription, tag: int, event: ReceivedEvent) -> None:
        link = self._link
        try:
            answer = await subscription.handle(event)
        except asyncio.CancelledError:
            if tag not in subscription._running:
                raise  # we did that: the node has the event back
            answer = Nack("the handler cancelled the task that it runs in")
        if subscription._running.pop(tag, None) is None or self._link is not link:
            return  # withdrawn, or of a connection that is gone
        if isinstance(answer, Ack):
            subscription.handled_count += 1
            self._done.append(tag)
            if not self._is_flush_due:
                self._is_flush_due = True
                asyncio.get_running_loop().call_soon(self._flush)
        elif isinstance(answer, Nack):
            self._send(wire.NackFrame(tag=tag, reason=cut(answer.reason)[:4_096], delay_s=answer.delay_s))
        else:
            kind = kind_of(answer)[:256]
            self._send(wire.NackFrame(tag=tag, reason=text_of(answer)[:4_096], error_type=kind))

    def _flush(self) -> None:
        """One message for all that was acknowledged in this turn of the loop."""
        self._is_flush_due = False
        while self._done:
            tags, self._done = self._done[:10_000], self._done[10_000:]
            self._send(wire.AckFrame(tags=tags))

    def _stop_handling(self, frame: wire.Withdrawn) -> None:
        for subscription in self._subscriptions.values():
            task = subscription._running.pop(frame.tag, None)
            if task is not None:
                logger.warning("group %s: an event was withdrawn: %s", subscription.group, frame.reason)
                task.cancel()
        # Always answered: the place is taken until then.
        self._send(wire.NackFrame(tag=frame.tag, reason=frame.reason))

    def _send(self, frame: wire.ClientFrame) -> None:
        if self._link is not None:
            self._link.send(wire.encode(frame))


def _look_away(future: asyncio.Future[None]) -> None:
    """Nobody may be waiting when a start fails; that is no error by itself."""
    if not future.cancelled():
        future.exception()
