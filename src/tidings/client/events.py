"""
The events of a node as they happen: subscribe to its gateway, and miss nothing.

    async with EventStream("http://127.0.0.1:8787", token=token, app="shop", domain="orders", since=saved) as events:
        async for envelope in events:
            print(envelope.seq, envelope.event_type, envelope.objects)
            save(events.position)

Every graph envelope that the caller may see is given once, in the order of seqs, across broken connections and restarts of the node. A connection
that breaks is opened again after a pause. It is resumed where the node still knows how; where it does not, what was missed is read over HTTP
(``GET /v1/envelopes``) and joined with what the new connection brings. Events of other classes are nowhere but in the node's memory: if a
connection cannot be resumed some may be missing, and ``gap_count`` says so.

Nothing runs in the background but what somebody has waited for: whoever gives up waiting and asks again later finds it where it was. An envelope is acknowledged when the program asks for the next one; a program that is too slow for the node's buffer
loses the connection, waits, longer each time, and resumes with what it has not seen.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Self
from urllib.parse import urlencode, urlsplit

import httpx
import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.errors import SettingsError
from tidings.core.tasks import cancel_and_wait
from tidings.wire.gateway import (
    LIFE_HEADER,
    AckEvent,
    CloseReason,
    EventFrameInvalid,
    Reconnect,
    ResumeEvents,
    SubscribedEvents,
    SubscribeEvents,
    decode_from_node,
    encode,
    error_of,
)

from .errors import ConnectFailed, LinkClosed, LinkError, RemoteClosed, RemoteRefused, RemoteStopped, RemoteUnavailable
from .http import HttpClient, ReceivedEnvelope
from .link import Connector, Link, TokenSource, fresh_token, open_link
from .reconnecting import Reconnecting
from .websocket import WebSocketConnector

_CONNECT_S_MAX: Final = 10.0
_SILENCE_S: Final = 15.0
_MESSAGES_MAX: Final = 1 << 17
"""More than the largest window of a node: so the socket is always read, and its pings are answered however slow the program is."""
_ACKS_TOGETHER_MAX: Final = 64
_HOPELESS: Final = frozenset({400, 403, 404})
"""Answers to an upgrade that would be the same the next time."""
_UNAUTHORISED: Final = 401
_OVERFLOW_S_MIN: Final = 1.0
_OVERFLOW_S_MAX: Final = 30.0
"""The pause after the node closed the connection because the program is too slow; it doubles each time, up to the longest, and begins again
when a connection has lasted twice that long. A node denies subscriptions to clients that come back at once."""
_GRAPH: Final = "graph"


class _Place(NamedTuple):
    """Where a graph envelope stands: its seq, and which part it is if one record took several."""

    seq: int
    part: int
    is_last: bool = True

    @classmethod
    def after(cls, seq: int) -> _Place:
        """Behind everything that a seq has."""
        return cls(seq + 1, 0, is_last=False)

    @classmethod
    def of(cls, envelope: ReceivedEnvelope) -> _Place | None:
        """The place of an envelope; ``None`` for other classes."""
        seq, summary = envelope.seq, envelope.payload_summary
        return None if seq is None else cls(seq, summary.get("part", 1), summary.get("part") == summary.get("parts"))

    @property
    def whole_seq(self) -> int:
        """The last seq of which nothing is missing."""
        return self.seq if self.is_last else self.seq - 1

    def is_behind(self, other: _Place) -> bool:
        return (self.seq, self.part) > (other.seq, other.part)


class _Received(NamedTuple):
    """An envelope on its way to the program, or a place that was reached without one."""

    place: _Place | None
    envelope: ReceivedEnvelope | None = None
    link: Link | None = None
    """The connection that it came on; none if it was read over HTTP."""


_ENVELOPE: Final = msgspec.json.Decoder(ReceivedEnvelope)
_SUBSCRIBED: Final = msgspec.json.Decoder(SubscribedEvents)


class EventStream:
    """
    A subscription to a node's events: an asynchronous context manager, and an iterator of envelopes within it.

    Nothing is missed after ``since``; without it, entering waits until the node has accepted the subscription, and nothing is missed after that.
    Iterating ends by an error only.

    Args:
        url: The node's address, ``http`` or ``https``.
        token: What to show it, or what makes a fresh token for each connection.
        app: The app whose events are wanted.
        subscription_type: The class, or ``app.<slug>``; ``event_type`` narrows it to one type.
        channels: Several families (``graph.*``) or types instead.
        domain: Only of this topic.
        objects: Only of these, each ``<type>:<id>``.
        peer: Only network events of this peer.
        since: Give the graph envelopes after this seq first; only what comes from now on if left out.
        patience_s: How long to go on trying to reach the node; ``None`` for as long as it takes, 0 for a single attempt.
        ssl_context: For ``https``; the system's own unless given.
        connector_for, http_transport, clock, rng: Replaceable for tests.

    Raises (entering and iterating):
        RemoteStopped: The node does not want us, and will not.
        RemoteUnavailable: The patience is over.
        RemoteRefused: ``log.position_trimmed``: what is wanted is gone; ``log.epoch_mismatch``, ``log.position_ahead``: the node has begun another log.
        RemoteClosed: The stream was closed at this end.

    Raises (at once):
        SettingsError: ``objects`` names none.
    """

    def __init__(
        self,
        url: str,
        *,
        token: TokenSource | None = None,
        app: str = "default",
        subscription_type: str = _GRAPH,
        event_type: str | None = None,
        channels: Iterable[str] | None = None,
        domain: str | None = None,
        objects: Iterable[str] | None = None,
        peer: str | None = None,
        since: int | None = None,
        patience_s: float | None = None,
        ssl_context: ssl.SSLContext | None = None,
        connector_for: Callable[[str], Connector] | None = None,
        http_transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        parts = urlsplit(url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        self._url = url
        self._socket_url = f"{scheme}://{parts.netloc}/events?{urlencode({'app': app})}"
        self._wanted = SubscribeEvents(
            app_id=app,
            subscription_type=subscription_type if channels is None else None,
            event_type=event_type,
            channels=None if channels is None else tuple(channels),
            domain_id=domain,
            object_ids=None if objects is None else tuple(objects),
            peer_identity_id=peer,
        )
        if self._wanted.object_ids == ():
            raise SettingsError("objects", "names none", "leave it out for all objects")
        self._token = token
        self._ssl_context = ssl_context
        self._connector_for = connector_for or self._websocket_connector
        self._http_transport = http_transport
        self._clock = clock
        self._rng = rng or random.Random()
        self._reconnecting = Reconnecting(
            url, clock=clock, rng=self._rng, patience_s=patience_s, may_differ=callable(token)
        )
        named = [subscription_type] if channels is None else list(self._wanted.channels or ())
        self._graph_types = [name for name in [event_type, *named] if name is not None and name.startswith("graph.")]
        self._has_graph = any(name.split(".")[0] == _GRAPH for name in named)
        self._queue: deque[_Received] = deque()
        self._reached = None if since is None else _Place.after(since)
        """Behind the last graph envelope that came."""
        self._given = self._reached
        """Behind the last one that the program has."""
        self._is_behind = since is not None and self._has_graph
        """Whether the node is asked over HTTP for what comes next, up to ``_behind_until`` if that is known."""
        self._behind_until: int | None = None
        self._epoch: str | None = None
        self._link: Link | None = None
        self._http: HttpClient | None = None
        self._resume_token: str | None = None
        self._life: str | None = None
        """Of the gateway, as it said when the last connection was opened; the token is of that life."""
        self._link_count = 0
        """Envelopes that came on this connection."""
        self._link_total = 0
        self._messages: deque[bytes] = deque()
        """What has come on this connection and was not looked at."""
        self._last: _Received | None = None
        self._ack_count = 0
        self._acks_together = 1
        self._refusal = ""
        self._overflow_count = 0
        self._subscribed_s = 0.0
        self._step: asyncio.Future[None] | None = None
        """What is being waited for, by the program or by nobody any more."""
        self._is_closed = False
        self.gap_count = 0
        """How often a connection could not be resumed: events of other classes than graph may have been missed then."""

    @property
    def position(self) -> int | None:
        """Every graph envelope up to this seq was given, the last one included: where to begin after a restart of the program."""
        return None if self._given is None else self._given.whole_seq

    async def __aenter__(self) -> Self:
        try:
            while self._reached is None:
                await self._go_on()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the subscription. What was given last counts as done. Closing twice is fine."""
        self._is_closed = True
        self._acknowledge(is_final=True)
        try:
            await cancel_and_wait(self._step)
        finally:
            await self._hang_up()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReceivedEnvelope:
        self._acknowledge()
        while True:
            while not self._queue:
                if self._is_closed:
                    raise RemoteClosed
                await self._go_on()
            received = self._queue.popleft()
            if received.place is not None:
                self._given = received.place
            if received.envelope is not None:
                self._last = received
                return received.envelope

    def _acknowledge(self, *, is_final: bool = False) -> None:
        """The program is done with what it has; the node is told of several at once, or when nothing else is here."""
        last, self._last = self._last, None
        if last is None or last.envelope is None or last.link is not self._link or self._link is None:
            return
        self._ack_count += 1
        if is_final or self._ack_count >= self._acks_together or not self._queue:
            self._ack_count = 0
            self._link.send(encode(AckEvent(last.envelope.resume_token)))

    # Where the next envelopes come from

    async def _go_on(self) -> None:
        """Wait for the next step. It goes on if the waiting ends: a program that waits for short times only gets somewhere too."""
        step = self._step
        if step is None:
            step = self._step = asyncio.ensure_future(self._take_step())
        try:
            await asyncio.shield(step)
        except asyncio.CancelledError:
            if self._is_closed and step.cancelled():
                raise RemoteClosed from None
            raise
        finally:
            if step.done() and self._step is step:
                self._step = None

    async def _take_step(self) -> None:
        """One step towards the next envelope: a page, a connection, or what has come on it."""
        try:
            if self._is_behind:
                await self._read_page()
            elif self._link is None:
                await self._subscribe()
            else:
                if not self._messages:
                    self._messages.extend(await self._link.receive())
                # What was missed before this connection comes before what it brings.
                while self._messages and not self._is_behind:
                    self._take(self._messages.popleft())
        except LinkError as problem:
            await self._lost(problem)
        except EventFrameInvalid as problem:
            await self._lost(LinkClosed(CloseReason.FRAME_INVALID.code, str(problem)))
        except RemoteUnavailable as problem:
            await self._lost(ConnectFailed(self._url, problem.problem))

    async def _read_page(self) -> None:
        assert self._reached is not None
        if self._http is None:
            shown = None if self._token is None else await fresh_token(self._token)
            transport = self._http_transport
            if transport is None and self._ssl_context is not None:
                transport = httpx.AsyncHTTPTransport(verify=self._ssl_context)
            self._http = HttpClient(
                self._url, shown, tries_max=1, transport=transport, clock=self._clock, rng=self._rng
            )
        wanted = self._wanted
        try:
            page = await self._http.read_envelopes(
                since=self._reached.whole_seq,
                until=self._behind_until,
                epoch=self._epoch,
                app=wanted.app_id,
                domain_id=wanted.domain_id,
                object_ids=wanted.object_ids or (),
                event_types=self._graph_types,
            )
        except RemoteRefused as refused:
            if refused.may_retry:
                raise ConnectFailed(self._url, str(refused), refused.status, refused.retry_after_s) from refused
            if refused.status == _UNAUTHORISED:
                raise LinkClosed(CloseReason.AUTH_FAILED.code, str(refused)) from refused
            raise
        if not page.at_end:
            # The last page says nothing of the socket, which may be refused each time.
            self._reconnecting.succeeded()
        self._epoch = page.epoch
        for envelope in page.envelopes:
            self._put(envelope, None)
        self._reach(page.next_since)
        if page.at_end:
            self._is_behind, self._behind_until = False, None
            await self._end_reading()  # a connection that nobody needs would keep others out

    def _reach(self, seq: int) -> None:
        """Everything up to a seq has come."""
        place = _Place.after(seq)
        if self._reached is None or place.is_behind(self._reached):
            self._reached = place
            if self._queue:
                self._queue.append(_Received(place))
            else:
                self._given = place

    async def _subscribe(self) -> None:
        shown = "" if self._token is None else await fresh_token(self._token)
        link = await open_link(self._connector_for(shown), self._socket_url, self._clock, _CONNECT_S_MAX)
        self._link, self._link_count, self._ack_count = link, 0, 0
        self._link_total += 1
        life, self._life = self._life, link.headers.get(LIFE_HEADER)
        if life != self._life:
            self._resume_token = None  # to be told that it is of no use would take another connection
        if self._resume_token is not None:
            link.send(encode(ResumeEvents(self._resume_token)))
        link.send(encode(self._wanted))

    def _take(self, message: bytes) -> None:
        """What the node sent: its answer to the subscription, an envelope, or before a close why."""
        frame = decode_from_node(message)
        try:
            if frame.event == "error":
                self._refusal = error_of(frame).message
            elif frame.event == "subscribed":
                self._subscribed(_SUBSCRIBED.decode(frame.payload))
            else:
                envelope = _ENVELOPE.decode(frame.payload)
                self._link_count += 1
                self._resume_token = envelope.resume_token
                self._put(envelope, self._link)
        except msgspec.DecodeError as error:
            raise EventFrameInvalid(str(error)) from error

    def _subscribed(self, answer: SubscribedEvents) -> None:
        self._reconnecting.succeeded()
        self._subscribed_s = self._clock.monotonic()
        self._acks_together = max(1, min(_ACKS_TOGETHER_MAX, answer.per_connection // 4))
        if answer.resumed:
            return
        self._resume_token = None
        if self._reached is None:
            self._reach(answer.since)
            return
        self.gap_count += self._link_total > 1
        if self._has_graph and self._reached.whole_seq < answer.since:
            self._is_behind, self._behind_until = True, answer.since

    def _put(self, envelope: ReceivedEnvelope, link: Link | None) -> None:
        """Queue an envelope, unless it came before: a record that took several may be read again from its first part on."""
        place = _Place.of(envelope)
        if place is not None:
            if self._reached is not None and not place.is_behind(self._reached):
                return
            self._reached = place
        self._queue.append(_Received(place, envelope, link))

    # When a connection is over

    async def _lost(self, problem: LinkError) -> None:
        """
        Get ready for the next connection, after a pause.

        Raises:
            RemoteStopped, RemoteUnavailable: There will be none.
        """
        await self._hang_up()
        if self._is_closed:
            raise RemoteClosed from problem
        reason = CloseReason.of_code(problem.close_code) if isinstance(problem, LinkClosed) else None
        refusal, self._refusal = self._refusal, ""
        if reason is not None and reason.reconnect is Reconnect.NO:
            raise RemoteStopped(self._url, f"{reason.reason}: {refusal}" if refusal else reason.reason) from problem
        if isinstance(problem, ConnectFailed) and problem.status in _HOPELESS:
            raise RemoteStopped(self._url, problem.problem) from problem
        if isinstance(problem, ConnectFailed) and problem.status == _UNAUTHORISED:
            problem = LinkClosed(CloseReason.AUTH_FAILED.code, problem.problem)
        is_stuck = (
            reason is CloseReason.BUFFER_OVERFLOW and self._link_count == 0
        )  # resuming there would end in the same way again
        if is_stuck or (reason is not None and reason.reconnect is Reconnect.CATCH_UP):
            self._resume_token = None
        if self._resume_token is None:
            self._is_behind, self._behind_until = self._has_graph and self._reached is not None, None
        if reason is not CloseReason.RESUME_INVALID:  # the node is there, and has nothing against us without that token
            await self._reconnecting.pause(problem, delay_s_min=self._overflow_pause_s(reason))

    def _overflow_pause_s(self, reason: CloseReason | None) -> float:
        """Return how long to wait at least: longer each time the program was too slow."""
        if self._clock.monotonic() - self._subscribed_s > 2 * _OVERFLOW_S_MAX:
            self._overflow_count = 0
        if reason is not CloseReason.BUFFER_OVERFLOW:
            return 0.0
        self._overflow_count += 1
        return min(_OVERFLOW_S_MAX, _OVERFLOW_S_MIN * 2.0 ** min(self._overflow_count - 1, 16))

    async def _hang_up(self) -> None:
        link, self._link = self._link, None
        self._messages.clear()
        if link is not None:
            await link.close()
        await self._end_reading()

    async def _end_reading(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    def _websocket_connector(self, token: str) -> Connector:
        return WebSocketConnector(
            ssl_context=self._ssl_context,
            messages_max=_MESSAGES_MAX,
            silence_s=_SILENCE_S,
            headers={"authorization": f"Bearer {token}"} if token else {},
        )
