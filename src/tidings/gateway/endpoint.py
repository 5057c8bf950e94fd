"""
The endpoint ``/events``: from frames to calls of the registry, and back.

Who may not connect hears it over HTTP, before the upgrade: who they are, which app they mean, and whether there is a place for them is settled
there. A connection then shows a resume token or not, subscribes once, and acknowledges. What is decided about it is the registry's affair;
here is what the wire says of it. Whatever ends a connection is told in an ``error`` frame, in the close code, and on record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

import msgspec

from tidings.access.authentication import Authenticator
from tidings.access.book import AccessBook, Capsule
from tidings.access.endpoint import Connection, Endpoint, EndReason, Peer, Transport
from tidings.access.errors import AuthFailed, TokenExpired, TokenRevoked
from tidings.access.resources import Action
from tidings.access.resources import node as whole_node
from tidings.core.clock import Clock
from tidings.wire import gateway as wire
from tidings.wire.gateway import CloseReason

from .constants import SUBSCRIBE_TIMEOUT_S
from .contexts import AppId, RequestContext, TraceId
from .refusals import (
    AdmissionDenied,
    AuthExpired,
    AuthInvalid,
    AuthRequired,
    AuthRevoked,
    BadUpgrade,
    GatewayDraining,
    SubscriptionClosed,
    SubscriptionRefused,
)

if TYPE_CHECKING:
    from .gateway import Gateway
    from .registry import Admission, Subscriber

_TRACE_HEADER: Final = "x-trace-id"
_TOKEN_HEADER: Final = "x-auth-token"
_TOKEN_COOKIE: Final = "auth_token"
_TOKEN_PARAMETER: Final = "token"
_APP_PARAMETER: Final = "app"

_MESSAGES: Final = {
    CloseReason.AUTH_FAILED: "the token is no longer good",
    CloseReason.PERMISSION_DENIED: "this may not be subscribed to",
    CloseReason.HEARTBEAT_TIMEOUT: "pings were not answered",
    CloseReason.RESUME_INVALID: "the resume token is of no use; read what was missed over HTTP",
    CloseReason.TAKEN_OVER: "another connection goes on where this one stood",
    CloseReason.BUFFER_OVERFLOW: "too many envelopes wait for an acknowledgement",
    CloseReason.SUBSCRIPTION_REJECTED: "the subscription was refused",
    CloseReason.QUEUE_FULL: "the node has no room",
    CloseReason.SHUTDOWN: "the node is stopping",
    CloseReason.INTERNAL_ERROR: "something failed in the node",
}
"""What a client is told. Of its own mistakes it hears more; of why a token or a right was not enough, nothing."""

_REASONS: Final = {
    EndReason.STOPPING: CloseReason.SHUTDOWN,
    EndReason.REVOKED: CloseReason.AUTH_FAILED,
    EndReason.EXPIRED: CloseReason.AUTH_FAILED,
    EndReason.FULL: CloseReason.QUEUE_FULL,
    EndReason.TOO_SLOW: CloseReason.BUFFER_OVERFLOW,
    EndReason.LIMIT: CloseReason.FRAME_INVALID,
    EndReason.DENIED: CloseReason.SUBSCRIPTION_REJECTED,
    EndReason.FAILED: CloseReason.INTERNAL_ERROR,
    EndReason.COMMITS_MISSED: CloseReason.INTERNAL_ERROR,
}
_ERRORS: Final = {EndReason.REVOKED: AuthRevoked.code, EndReason.EXPIRED: AuthExpired.code}
_BROKEN: Final = (1002, 1007, 1008, 1009)
"""Close codes of a transport whose peer does not speak WebSocket as it must."""


class AdmittedPeer(Peer, frozen=True, kw_only=True):
    """A peer that may connect: who it is, and the place that is kept for it."""

    rights: Capsule
    admission: Admission


class _Sink:
    """Where the gateway sends one subscriber's envelopes."""

    __slots__ = ("_connection", "_suffix")

    def __init__(self, connection: EventsConnection, suffix: bytes) -> None:
        self._connection = connection
        self._suffix = suffix

    def send(self, prefixes: tuple[bytes, ...]) -> bool:
        connection = self._connection
        if connection.is_closed:
            raise ConnectionResetError
        transport = connection.transport
        transport.send_shared(prefixes, self._suffix)
        return transport.buffered_bytes <= connection.endpoint.unsent_bytes_max

    def ping(self, payload: bytes) -> None:
        if not self._connection.is_closed:
            self._connection.transport.ping(payload)

    def close(self, reason: CloseReason, data: Mapping[str, object]) -> None:
        self._connection.refuse(reason, data=data)


class EventsConnection(Connection[wire.SubscribeEvents]):
    """One connection."""

    __slots__ = (
        *("_admission", "_events", "_is_on_record", "_is_subscribing", "_opened_s"),
        *("_problem", "_reason", "_resume_token", "_subscriber"),
    )

    def __init__(self, events: EventsEndpoint, transport: Transport, peer: AdmittedPeer) -> None:
        super().__init__(events, transport)
        self._events = events
        self._admission = peer.admission
        self._opened_s = self.heard_s
        self._resume_token: str | None = None
        self._is_subscribing = False
        self._subscriber: Subscriber | None = None
        self._reason: CloseReason | None = None
        """Why we have closed it."""
        self._problem = ""
        self._is_on_record = False
        self.authenticated(peer.rights)

    # What the endpoint base calls

    def handle(self, message: bytes) -> None:
        """A frame came in."""
        try:
            self._take(wire.decode_from_client(message))
        except wire.EventFrameInvalid as error:
            self.refuse(CloseReason.FRAME_INVALID, error.problem)
        except SubscriptionClosed as error:
            self.refuse(error.close_reason, error.problem, error.data)

    def received_binary(self, message: bytes) -> None:
        """No frame of ours is binary."""
        self.refuse(CloseReason.FRAME_INVALID, "a binary message")

    async def work(self, frame: wire.SubscribeEvents) -> None:
        """Subscribe, with the resume token that was shown before, if any."""
        registry, trace_id = self._events.gateway.registry, self._admission.context.trace_id
        assert isinstance(self.rights, Capsule)
        try:
            subscriber = await registry.open(
                self._admission,
                self.rights,
                frame,
                _Sink(self, wire.event_suffix(trace_id)),
                resume_token=self._resume_token,
            )
        except SubscriptionClosed as error:
            self._is_on_record = True
            self.refuse(error.close_reason, error.problem, error.data)
            return
        if self.is_closed:
            registry.close(subscriber, self._reason)
            return
        self._subscriber = subscriber
        settings = self._events.gateway.settings
        answer = wire.SubscribedEvents(
            connection_id=subscriber.connection_id,
            heartbeat_interval_ms=settings.delivery.heartbeat_interval_ms,
            per_connection=settings.queue.per_connection,
            replayed=subscriber.replayed_count,
            resumed=subscriber.is_resumed,
            since=subscriber.since,
        )
        self.send((wire.subscribed_frame(answer, trace_id),))
        subscriber.resume_sending()

    def ponged(self, payload: bytes) -> None:
        """An answer to a ping."""
        if self._subscriber is not None:
            self._subscriber.ponged(payload)

    def has_room_again(self) -> None:
        """The peer has taken what it was sent."""
        if self._subscriber is not None:
            self._subscriber.resume_sending()

    def has_backlog(self) -> bool:
        """Nothing is read while it is being looked up what is subscribed to."""
        return self.is_working

    @property
    def is_full(self) -> bool:
        """Never: what is read here brings no answers. How much waits for a peer is for the registry to judge, which counts envelopes."""
        return False

    def is_valid(self) -> bool:
        """Not without a subscription for long either."""
        if super().is_valid() and not self._is_subscribing:
            waited_s = self.endpoint.clock.monotonic() - self._opened_s
            if waited_s >= SUBSCRIBE_TIMEOUT_S:
                self.refuse(CloseReason.SUBSCRIPTION_REJECTED, "no subscribe came in time")
        return not self.is_closed

    def farewell(self, why: EndReason, detail: str) -> tuple[Sequence[bytes], int, str]:
        """An ``error`` frame, and the reason's own code."""
        reason = _REASONS.get(why, CloseReason.SUBSCRIPTION_REJECTED)
        return self._last_words(reason, detail or why.value[1], error=_ERRORS.get(why))

    def ended(self, code: int | None) -> None:
        """The connection is over: so is its subscription, and its place is free. Without a subscription it is one that was refused."""
        gateway, admission = self._events.gateway, self._admission
        is_broken = code in _BROKEN
        reason = CloseReason.FRAME_INVALID if is_broken else self._reason
        problem = self._problem or (f"closed with {code}" if is_broken else "")
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            gateway.registry.close(subscriber, reason, cause=problem)
        elif not self._is_on_record and reason not in (None, CloseReason.SHUTDOWN):
            gateway.telemetry.rejected(admission.context, reason.reason, cause=problem, address=admission.address)
        admission.release()

    # What the registry calls, and we

    def refuse(self, reason: CloseReason, problem: str = "", data: Mapping[str, object] | None = None) -> None:
        """Close the connection for a reason. Closing twice is fine."""
        if not self.is_closed:
            messages, code, text = self._last_words(reason, problem, data)
            self.close(code, text, messages)

    # Within

    def _take(self, frame: wire.ClientFrame) -> None:
        match frame:
            case wire.AckEvent():
                if self._subscriber is None:
                    raise wire.EventFrameInvalid("ack comes after subscribed")
                self._subscriber.ack(frame.resume_token)
            case wire.ResumeEvents():
                if self._is_subscribing or self._resume_token is not None:
                    raise wire.EventFrameInvalid("resume comes once, before subscribe")
                self._resume_token = frame.resume_token
            case wire.SubscribeEvents():
                if self._is_subscribing:
                    raise wire.EventFrameInvalid("subscribe comes once; another filter takes another connection")
                self._is_subscribing = True
                self.enqueue(frame)

    def _last_words(
        self, reason: CloseReason, problem: str, data: Mapping[str, object] | None = None, error: str | None = None
    ) -> tuple[Sequence[bytes], int, str]:
        self._reason, self._problem = reason, problem
        message = _MESSAGES.get(reason, problem)
        frame = wire.error_frame(reason, message, self._admission.context.trace_id, error=error, data=data)
        return (frame,), reason.code, reason.reason


class EventsEndpoint(Endpoint[EventsConnection]):
    """
    What answers at ``/events``.

    Args:
        gateway: What delivers.
        clock, book, authenticator: What ends rights; who is asking.
        default_app: The app of who names none.
        new_trace_id: Names a connection that brings no name.
    """

    unsent_bytes_max = 64 << 10
    """With more than this unsent, nothing more is sent to a peer: it waits in the buffer, where it is counted."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        clock: Clock,
        book: AccessBook,
        authenticator: Authenticator,
        default_app: str,
        new_trace_id: Callable[[], str],
    ) -> None:
        super().__init__("/events", clock, book)
        self.upgrade_headers = {wire.LIFE_HEADER: gateway.life}
        self.gateway = gateway
        self._authenticator = authenticator
        self._default_app = default_app
        self._new_trace_id = new_trace_id

    def admit(self, peer: Peer) -> AdmittedPeer:
        """
        Who is asking, and whether there is a place.

        Raises:
            SubscriptionRefused: There is none, or it is not known who is asking; that is on record.
        """
        address = peer.host
        verdict = (
            None if self.guard is None else self.guard.admit(address=address, has_token=lambda: self.has_token(peer))
        )
        if verdict is not None and not verdict.is_allowed:
            # The denial is on record, and counted: a flood is not answered with a flood of records.
            problem = f"denied for a time ({verdict.reason_code})"
            raise AdmissionDenied(problem, "ERR_RESOURCE_RATE_LIMIT", verdict.retry_after_s)
        try:
            if not self.is_open:
                raise GatewayDraining
            rights = self._rights(peer)
            context = self._context(peer, rights)
        except SubscriptionRefused as error:
            self.gateway.telemetry.rejected(None, error.reason, cause=error.describe(), address=address)
            raise
        return AdmittedPeer(
            peer.path,
            peer.headers,
            peer.query,
            peer.address,
            rights=rights,
            admission=self.gateway.admit(context, address=address),
        )

    def has_token(self, peer: Peer) -> bool:
        try:
            token = _token_of(peer)
        except SubscriptionRefused:
            return False
        return token is not None and self._authenticator.accepts(f"Bearer {token}")

    def connect(self, transport: Transport, peer: Peer) -> EventsConnection:
        assert isinstance(peer, AdmittedPeer)
        return EventsConnection(self, transport, peer)

    def abandon(self, peer: Peer) -> None:
        assert isinstance(peer, AdmittedPeer)
        peer.admission.release()

    def _rights(self, peer: Peer) -> Capsule:
        try:
            # The guard is asked when there is a place to be had: it answers for identity and app together.
            return self._authenticator.of_token(_token_of(peer), path=peer.path, is_guarded=False)
        except TokenExpired as error:
            raise AuthExpired from error
        except TokenRevoked as error:
            raise AuthRevoked from error
        except AuthFailed as error:
            raise (AuthRequired if type(error) is AuthFailed else AuthInvalid) from error

    def _context(self, peer: Peer, rights: Capsule) -> RequestContext:
        app = _only(peer.query, _APP_PARAMETER) or self._default_app
        trace_id = peer.headers.get(_TRACE_HEADER) or self._new_trace_id()
        who = rights.context
        return RequestContext(
            app_id=_checked(app, AppId, _APP_PARAMETER),
            requester_identity_id=who.subject,
            trace_id=_checked(trace_id, TraceId, "X-Trace-Id"),
            device_id=who.client_id,
            capability=Action.SUBSCRIBE.value,
            is_admin=rights.allows(Action.ADMINISTER, whole_node()),
        )


def _token_of(peer: Peer) -> str | None:
    """The token that a peer shows, in one of four places; if in several, it is the same."""
    shown = {
        peer.headers.get(_TOKEN_HEADER),
        _only(peer.query, _TOKEN_PARAMETER),
        *_cookies(peer.headers.get("cookie")),
    }
    authorization = peer.headers.get("authorization")
    if authorization is not None:
        scheme, _, token = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise AuthInvalid
        shown.add(token.strip())
    shown.discard(None)
    if len(shown) > 1:
        raise AuthInvalid
    return shown.pop() if shown else None


def _cookies(header: str | None) -> Iterator[str]:
    """The tokens that cookies show: there may be several of the name, of other paths and domains."""
    for each in (header or "").split(";"):
        name, _, value = each.partition("=")
        if name.strip() == _TOKEN_COOKIE:
            yield value.strip().strip('"')


def _only(query: str, name: str) -> str | None:
    """The value of a parameter that may be given once."""
    if not query:
        return None
    try:
        values = parse_qs(query, keep_blank_values=True, max_num_fields=16, errors="strict").get(name, [])
    except ValueError as error:
        raise BadUpgrade("query", "cannot be read") from error
    if len(values) > 1:
        raise BadUpgrade(name, "is given more than once")
    return values[0] if values else None


def _checked(value: str, kind: object, field: str) -> str:
    try:
        text: str = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadUpgrade(field, "breaks the grammar of such names") from error
    return text
