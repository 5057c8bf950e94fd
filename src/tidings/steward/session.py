"""
A connection of the steward, whatever carries it: one request at a time, or one subscription, or a plugin that is served from elsewhere.

The Unix socket and ``/happenings`` are both a ``StewardEndpoint``; they differ in how a peer says who it is. What a request means is in
``operations``; this is its life: requests are answered in order, a subscription takes the connection over and sends only while the peer
takes what it is sent, and everything that a connection holds goes with it.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from tidings.access.authentication import Authenticator
from tidings.access.book import AccessBook
from tidings.access.endpoint import Connection, Endpoint, EndReason, Peer, Transport
from tidings.access.errors import AccessError, AuthFailed, TokenRevoked
from tidings.core.clock import Clock
from tidings.core.errors import TidingsError
from tidings.core.ids import new_event_id
from tidings.ledger.flight_mode import FLIGHT_MODE_SET
from tidings.wire.groups import CLOSE_AUTH_FAILED, CLOSE_REVOKED, CLOSE_TIMED_OUT
from tidings.wire.steward import answers, frames, requests

from .authority import Authority, Need, SocketAuthority, TokenAuthority
from .capabilities import CapabilityPolicy, PeerCredentials
from .errors import ends_connection, error_frame_of
from .operations import Operations
from .serving import ServedPlugin
from .settings import StewardSettings
from .streams import FrameStream

logger = logging.getLogger(__name__)

_NORMAL: Final = 1000
_POLICY: Final = 1008
_PIECE_BYTES: Final = 65_536
_BACKLOG: Final = 2
"""Requests that may wait behind the one that is worked on; then nothing more is read."""
_SERVED_BACKLOG: Final = 64
"""Requests that may wait on a connection that serves a plugin: its answers to calls are behind them."""


class StewardConnection(Connection[bytes]):
    """One connection: the ``Caller`` of its operations."""

    __slots__ = ("_asking", "_room", "_stream", "_streaming", "authority", "granted", "peer", "served", "steward")

    def __init__(self, steward: StewardEndpoint, transport: Transport, peer: Peer) -> None:
        super().__init__(steward, transport)
        self.steward = steward
        self.peer = peer
        self.authority: Authority | None = None
        self.granted: frozenset[str] = frozenset()
        """The capabilities that were negotiated."""
        self.served: ServedPlugin | None = None
        """The plugin that is at the other end."""
        self._asking: asyncio.Task[Any] | None = None
        """What a plugin is asked for the peer; nobody else waits for that."""
        self._stream: FrameStream | None = None
        self._streaming: asyncio.Task[None] | None = None
        self._room: asyncio.Future[None] | None = None

    @property
    def is_output_only(self) -> bool:
        """Whether a subscription has the connection: what the peer sends is passed over."""
        return self._stream is not None

    def hold_memory(self, size: int) -> None:
        self.transport.memory.hold(size)

    def enter(self, authority: Authority) -> None:
        """The peer has shown who it is."""
        self.authority = authority
        self.granted = frozenset()
        self.authenticated(authority)
        self.rights_changed()

    # What the transport calls

    def received(self, message: bytes) -> None:
        if self._stream is None:
            super().received(message)

    def throttle(self) -> None:
        # That a subscriber has gone is noticed by reading, so reading goes on.
        if self._stream is None:
            super().throttle()

    def finish_and_close(self) -> bool:
        """The peer will send nothing more: answer what it has asked for, then close. False if there is nothing left to answer."""
        if not self.is_working and not self.queued:
            return False
        self.endpoint.spawn(self._finish_and_close())
        return True

    async def _finish_and_close(self) -> None:
        await super().finish()
        self.close(_NORMAL, "")

    # What the endpoint base calls

    def handle(self, message: bytes) -> None:
        """A message came in."""
        if self.authority is None:
            self._authenticate(message)
        elif self.served is None or not self.served.take_answer(message):
            self.enqueue(message)

    async def work(self, message: bytes) -> None:
        """Answer one request."""
        if self._stream is not None:
            return
        try:
            answer = await self._perform(requests.decode_request(message))
        except TidingsError as error:
            frame = frames.encode(error_frame_of(error))
            if ends_connection(error):
                self.close(_NORMAL, "", [frame])
            else:
                self.send([frame])
        except Exception:
            request_id = f"rq-{new_event_id()[3:]}"
            logger.exception("a request at %s failed [%s]", self.endpoint.name, request_id)
            self.send([frames.encode(answers.error_frame("internal", f"the request failed [{request_id}]"))])
        else:
            if isinstance(answer, FrameStream):
                self._turn_round(answer)
            else:
                self.send([_within_bounds(frames.encode(answer))])

    def has_backlog(self) -> bool:
        return self.queued >= (_BACKLOG if self.served is None else _SERVED_BACKLOG)

    def has_room_again(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def finish(self) -> None:
        """Answer what was asked; give a subscriber what is being coalesced for it, if it reads. A plugin here can answer no more calls."""
        if self.served is not None:
            self.served.end()
        if self._stream is not None:
            self._stream.close()
            if self._streaming is not None:
                if self.is_full:
                    self._streaming.cancel()
                await asyncio.gather(self._streaming, return_exceptions=True)
        await super().finish()

    def ended(self, code: int | None) -> None:
        if self._streaming is not None and self._streaming is not asyncio.current_task():
            self._streaming.cancel()
        if self._asking is not None:
            self._asking.cancel()
        if self.served is not None:
            self.served.end()

    def rights_changed(self) -> None:
        """A subscription, and a plugin that is called here, end with the right to them."""
        assert self.authority is not None
        try:
            if self._stream is not None:
                self.authority.require("subscribe")
            if self.served is not None:
                self.authority.require("act")
                self.authority.require_name(self.served.plugin.name)
        except AccessError as error:
            self.close(_POLICY, error.code, [frames.encode(error_frame_of(error))])

    def farewell(self, why: EndReason, detail: str) -> tuple[Sequence[bytes], int, str]:
        code, text = why.value
        codes = {
            EndReason.NOT_AUTHENTICATED: CLOSE_TIMED_OUT,
            EndReason.REVOKED: CLOSE_REVOKED,
            EndReason.EXPIRED: CLOSE_AUTH_FAILED,
        }
        return (), codes.get(why, code), detail or text

    # Within

    def _authenticate(self, message: bytes) -> None:
        """Who is there: the credentials that came with the connection say it, or else the first message must."""
        try:
            authority = self.steward.authority_at_connecting(self.peer)
            if authority is None:
                request = requests.decode_request(message)
                if not isinstance(request, requests.AuthenticateRequest):
                    raise AuthFailed
                authority = self.steward.authority_of(request.token)
        except AuthFailed as error:
            code = CLOSE_REVOKED if isinstance(error, TokenRevoked) else CLOSE_AUTH_FAILED
            self.close(code, error.code, [frames.encode(error_frame_of(error))])
        except TidingsError as error:
            self.send([frames.encode(error_frame_of(error))])
        else:
            self.enter(authority)
            self.enqueue(message)

    async def _perform(self, request: requests.StewardRequest) -> Any:
        assert self.authority is not None
        if isinstance(request, requests.AuthenticateRequest):
            self.enter(self.steward.authority_of(request.token))
            return answers.Authenticated(subject=self.authority.subject)
        await self._settle("nothing")
        answer = await self._answer(request)
        if request.need == "read":
            await self._settle("read")
        return answer

    async def _answer(self, request: requests.StewardRequest) -> Any:
        """What is answered to a request; a plugin that is only asked something is let alone when the peer has gone."""
        answering = self.steward.operations.perform(request, self)
        if not isinstance(request, requests.RequestRequest) or request.request_type == FLIGHT_MODE_SET:
            return await answering  # these change something, which has to be done to its end
        self._asking = asking = asyncio.create_task(answering)
        try:
            await asyncio.wait([asking])
        finally:
            self._asking = None
            asking.cancel()
        return None if asking.cancelled() else asking.result()

    async def _settle(self, need: Need) -> None:
        """Wait until rights are as new as the log, and so as what was read from the ledger; then ask for one."""
        assert self.authority is not None
        settled = self.authority.settled()
        if settled is not None:
            await settled
        self.authority.require(need)

    def _turn_round(self, stream: FrameStream) -> None:
        """From here on only we speak. Reading goes on, to notice that the peer has gone."""
        self._stream = stream
        self._held = None
        self._is_paused = False
        self.transport.resume_reading()
        self.endpoint.spawn(self._run(stream))

    async def _run(self, stream: FrameStream) -> None:
        """Carry a subscription: send while the peer takes it, and end with it."""
        self._streaming = asyncio.current_task()
        try:
            async with contextlib.aclosing(stream.frames()) as batches:
                async for messages in batches:
                    await self._settle("subscribe")
                    for piece in _pieces(messages):
                        self.send(piece)
                        while self.is_full and not self.is_closed:
                            self._room = asyncio.get_running_loop().create_future()
                            await self._room
        except AccessError as error:
            self.close(_POLICY, error.code, [frames.encode(error_frame_of(error))])
        except TidingsError as error:
            self.close(_NORMAL, error.code, [frames.encode(error_frame_of(error))])
        except Exception:
            request_id = f"rq-{new_event_id()[3:]}"
            logger.exception("a subscription at %s failed [%s]", self.endpoint.name, request_id)
            problem = f"the subscription failed [{request_id}]"
            self.close(_NORMAL, "", [frames.encode(answers.error_frame("internal", problem))])
        else:
            self.close(_NORMAL, "the subscription has ended")
        finally:
            stream.close()


def _pieces(messages: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Messages in their order, so many at a time that it is asked often enough whether the peer takes them."""
    piece: list[bytes] = []
    size = 0
    for message in messages:
        piece.append(message)
        size += len(message)
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _within_bounds(message: bytes) -> bytes:
    """An answer that a frame can hold."""
    if len(message) <= frames.FRAME_BYTES_MAX:
        return message
    problem = f"the answer is {len(message)} bytes long; ask for less, or for a page"
    return frames.encode(answers.error_frame("resource_exhausted", problem, "answer_too_large"))


class StewardEndpoint(Endpoint[StewardConnection]):
    """
    What answers on the Unix socket, or at ``/happenings``; how a peer says who it is, a subclass decides.

    Args:
        name: For logs.
        operations: What requests mean.
        clock: What time it is.
        settings: Bounds.
        book: Who may do what, where tokens decide.
    """

    def __init__(
        self,
        name: str,
        operations: Operations,
        *,
        clock: Clock,
        settings: StewardSettings,
        book: AccessBook | None = None,
    ) -> None:
        super().__init__(name, clock, book)
        self.operations = operations
        self.unsent_bytes_max = settings.unsent_bytes_max

    def connect(self, transport: Transport, peer: Peer) -> StewardConnection:
        """A new connection."""
        return StewardConnection(self, transport, peer)

    @abc.abstractmethod
    def authority_at_connecting(self, peer: Peer) -> Authority | None:
        """
        What a peer may do by what it showed when it connected; ``None`` if it has yet to show something.

        Raises:
            AuthFailed: It is not accepted.
        """

    def authority_of(self, token: str) -> Authority:
        """
        What the bearer of a token may do.

        Raises:
            AuthFailed: The token is not accepted, or tokens are not spoken here.
        """
        raise AuthFailed

    @property
    def subscription_count(self) -> int:
        """Connections that a subscription has."""
        return sum(connection.is_output_only for connection in self.connections)


class SocketEndpoint(StewardEndpoint):
    """
    What answers on the Unix socket: the kernel says who is there.

    Args:
        operations, clock, settings: See ``StewardEndpoint``.
        policy: Who gets which capability.
    """

    def __init__(
        self, operations: Operations, *, clock: Clock, settings: StewardSettings, policy: CapabilityPolicy
    ) -> None:
        super().__init__("the steward socket", operations, clock=clock, settings=settings)
        self.connections_max = settings.connections_max
        self._policy = policy

    def open_for(self, transport: Transport, peer: Peer, credentials: PeerCredentials | None) -> StewardConnection:
        """Begin a connection of a peer that the kernel knows."""
        connection = self.open(transport, peer)
        if not connection.is_closed:
            connection.enter(SocketAuthority(self._policy, credentials))
        return connection

    def authority_at_connecting(self, peer: Peer) -> Authority | None:
        return None

    def metrics(self) -> Iterable[tuple[str, str, float]]:
        """What ``/metrics`` shows of it."""
        yield "tidings_steward_connections", "Open connections of the steward socket.", len(self.connections)
        yield "tidings_steward_subscriptions", "Subscriptions on the steward socket.", self.subscription_count


class _KnownPeer(Peer, frozen=True, kw_only=True):
    """A peer that showed a good token with its upgrade."""

    authority: TokenAuthority


class TokenEndpoint(StewardEndpoint):
    """
    What answers at ``/happenings``: a token, with the upgrade or in the first message, says who is there.

    Args:
        operations, clock, settings, book: See ``StewardEndpoint``.
        authenticator: Who is asking.
        is_open: Whether those without a token are let in.
        settled: See ``Authority``.
    """

    takes_token_in_message = True

    def __init__(
        self,
        operations: Operations,
        *,
        clock: Clock,
        settings: StewardSettings,
        book: AccessBook,
        authenticator: Authenticator,
        is_open: bool,
        settled: Callable[[], Awaitable[None] | None],
    ) -> None:
        super().__init__("/happenings", operations, clock=clock, settings=settings, book=book)
        self._authenticator = authenticator
        self._is_open = is_open
        self._settled = settled

    def authority_at_connecting(self, peer: Peer) -> TokenAuthority | None:
        header = peer.headers.get("authorization")
        if header is None and not self._is_open:
            return None
        return TokenAuthority(
            self._authenticator.of_header(header, path=self.name, entrance="connection"), self._settled
        )

    def has_token(self, peer: Peer) -> bool:
        return self._authenticator.accepts(peer.headers.get("authorization"))

    def admit(self, peer: Peer) -> Peer:
        """
        Admit a peer. If it shows a token with its upgrade, that is verified here, so a bad one is refused with 401.

        Raises:
            AuthFailed: The token is not accepted.
        """
        peer = super().admit(peer)
        if "authorization" not in peer.headers:
            return peer
        authority = self.authority_at_connecting(peer)
        assert authority is not None
        return _KnownPeer(peer.path, peer.headers, peer.query, peer.address, authority=authority)

    def open(self, transport: Transport, peer: Peer) -> StewardConnection:
        connection = super().open(transport, peer)
        if isinstance(peer, _KnownPeer) and not connection.is_closed:
            connection.enter(peer.authority)
        return connection

    def authority_of(self, token: str) -> Authority:
        return TokenAuthority(self._authenticator.of_token(token, path=self.name, entrance="connection"), self._settled)

    def metrics(self) -> Iterable[tuple[str, str, float]]:
        """What ``/metrics`` shows of it."""
        yield "tidings_happenings_connections", "Open connections of the endpoint /happenings.", len(self.connections)
        yield "tidings_happenings_subscriptions", "Subscriptions at /happenings.", self.subscription_count
