"""
What all endpoints share: the life of a connection, whatever protocol it speaks and whatever carries it.

An endpoint (sync, groups) answers connections. A transport carries one connection: a WebSocket of the node, or a pair of queues
within a process. A protocol subclasses ``Endpoint`` and ``Connection`` and decides what a message means; the rules are kept here, so
that no endpoint can lack one:

- A connection must authenticate within a time and a number of messages. How it does (a token, the credentials of a Unix socket) is
  the protocol's business.
- It ends with the rights it was given: they are checked before every message, whenever access changes, and by a periodic sweep.
- Messages come in at a bounded rate. Requests that take time wait in a bounded queue; while too many wait, or too much is unsent, nothing
  more is read from the peer.
- A peer that does not read is closed instead of being buffered for without bound.
- A stopping endpoint lets what is under way finish, then closes each connection with a code that says so.

Nothing here waits for a peer, and nothing knows WebSocket: close codes are numbers, with the meaning that RFC 6455 gives to those below
3000.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import msgspec

from tidings.core.clock import Clock, within
from tidings.core.errors import TidingsError
from tidings.core.tasks import cancel_and_wait, finish_or_cancel

from .book import Slicing
from .guard import network_of

if TYPE_CHECKING:
    from tidings.log.record import Record

    from .book import AccessBook
    from .guard import DosGuard

logger = logging.getLogger(__name__)

_THROTTLE_S: Final = 0.05
"""The shortest pause of a peer over its rate: it is read in batches then, not message by message."""
_DONE: Final = object()
_STRANGERS_MAX: Final = 4
"""Sockets at a time whose peers have shown no token, from an address that is denied to callers without one."""
_MESSAGE_BYTES: Final = 64
"""The memory of a message that waits, besides its bytes."""
_UNWIND_S_MIN: Final = 1.0
"""The time that work under way gets to end after its connection was closed, however short the deadline."""


class Peer(msgspec.Struct, frozen=True):
    """The other end of a connection, as its transport knows it."""

    path: str
    headers: Mapping[str, str]
    """Names in lower case; of a repeated header the last value."""
    query: str = ""
    address: str = ""
    """Where it comes from, as text for logs: host and port."""

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0] or self.address


class Memory(Protocol):
    """The account of what one connection makes this process hold. A refused charge raises an error of the account's own."""

    def hold(self, size: int) -> None:
        """Charge bytes until ``release``, or until the connection ends."""
        ...

    def try_hold(self, size: int) -> bool:
        """Charge as ``hold`` does; return ``False`` where ``hold`` would raise."""
        ...

    def release(self, size: int) -> None:
        """Give back bytes of ``hold``."""
        ...

    def charge(self, size: int) -> AbstractContextManager[None]:
        """Charge bytes for the duration of a block, which may outlive the connection."""
        ...


class UnlimitedMemory:
    """The account of a connection without limits: within the process, or of a peer that this process trusts."""

    def hold(self, size: int) -> None:
        pass

    def try_hold(self, size: int) -> bool:
        return True

    def release(self, size: int) -> None:
        pass

    def charge(self, size: int) -> AbstractContextManager[None]:
        return nullcontext()


UNLIMITED_MEMORY: Final = UnlimitedMemory()


class Transport(Protocol):
    """One connection, as an endpoint sees it."""

    @property
    def memory(self) -> Memory:
        """Where the connection's memory is charged."""
        ...

    def send(self, messages: Sequence[bytes]) -> None:
        """Send each as one message, in order. Never waits; after ``close`` it does nothing."""
        ...

    def send_shared(self, prefixes: tuple[bytes, ...], suffix: bytes) -> None:
        """
        Send each prefix with the suffix behind it as one message, in order.

        A broadcast hands the same tuple to many connections, each with a suffix of its own or with none: what the prefixes cost is spent once.
        It may leave some milliseconds later, together with what follows; nothing that is sent to the same peer overtakes it.
        """
        ...

    def ping(self, payload: bytes) -> None:
        """Ask for a sign of life, which ``Connection.ponged`` is given; a transport that knows no pings does nothing."""
        ...

    def close(self, code: int, reason: str = "") -> None:
        """Close with a code, after what was sent. Closing twice is fine."""
        ...

    def authenticated(self) -> None:
        """The peer has authenticated: limits for strangers no longer apply."""
        ...

    def pause_reading(self) -> None:
        """Take nothing more from the peer: its own sending then blocks."""
        ...

    def resume_reading(self) -> None:
        """Read again."""
        ...

    @property
    def buffered_bytes(self) -> int:
        """
        What was sent and has not left this process yet.

        Whoever finds as much as the endpoint's ``unsent_bytes_max`` here is told by ``Connection.drained`` when it has left.
        """
        ...


class Rights(Protocol):
    """What a connection was given when it authenticated."""

    @property
    def subject(self) -> str:
        """Whose they are."""
        ...

    @property
    def expires_at_ns(self) -> int | None:
        """When they end, in nanoseconds since 1970."""
        ...

    @property
    def is_revoked(self) -> bool:
        """Whether they were taken back altogether."""
        ...


class EndReason(enum.Enum):
    """Why an endpoint closes a connection. The value is the close code, unless the protocol has one of its own."""

    STOPPING = (1001, "the node is stopping")
    FULL = (1013, "too many connections")
    NOT_AUTHENTICATED = (1008, "no authentication in time")
    REVOKED = (1008, "the token was revoked")
    EXPIRED = (1008, "the token has expired")
    SILENT = (1001, "nothing was heard for too long")
    TOO_SLOW = (1013, "too slow")
    LIMIT = (1008, "a limit was exceeded")
    DENIED = (1013, "denied for a time")
    FAILED = (1011, "the request failed")
    COMMITS_MISSED = (1011, "commits cannot be followed")


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for every connection, whichever endpoint it is of."""

    authentication_timeout_s: float | None = None
    unauthenticated_messages_max: int = 16
    messages_per_s_max: int = 10_000
    held_messages_max: int = 10_000
    """Messages that arrived before the transport stopped reading."""


class Allowance:
    """How many of something are allowed: a number at first, and a rate per second once there is one; a second's worth may come at once."""

    __slots__ = ("_at_s", "_left", "_rate")

    def __init__(self, count: int) -> None:
        self._left = float(count)
        self._rate = 0.0
        self._at_s = 0.0

    def set_rate(self, per_s: int, now_s: float) -> None:
        """From now on so many each second."""
        self._left = self._rate = float(per_s)
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take one: 0 if it was there, the seconds until it will be, below 0 if it never will."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        if self._rate and passed_s > 0.0:
            self._left = min(self._rate, self._left + passed_s * self._rate)
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) / self._rate if self._rate else -1.0


WorkT = TypeVar("WorkT")


class Connection(abc.ABC, Generic[WorkT]):
    """
    One connection of an endpoint. ``WorkT`` is what the protocol queues: requests that take time.

    The transport calls ``received``, ``received_binary``, ``ponged``, ``drained`` and ``closed``, all from the loop's thread. A protocol implements ``handle`` and ``work``,
    and whichever of the other hooks it needs.
    """

    __slots__ = (
        *("__weakref__", "_allowance", "_held", "_idle", "_is_blocked", "_is_over_rate", "_is_paused", "_is_stopped"),
        *(
            "_message_bytes",
            "_queue",
            "_queued_bytes",
            "_starting",
            "_taken_bytes",
            "_working",
            "endpoint",
            "heard_s",
            "is_closed",
            "rights",
            "transport",
        ),
    )

    charges_requests: bool = True
    """Whether a queued request is charged, by the size of its message. A protocol that charges its requests itself says no."""
    work_count_max: int = 1
    """Requests that are worked on at a time; they are begun in the order they came."""

    def __init__(self, endpoint: Endpoint[Any], transport: Transport) -> None:
        self.endpoint = endpoint
        self.transport = transport
        self.rights: Rights | None = None
        """Set when the peer has authenticated."""
        self.is_closed = False
        self.heard_s = endpoint.clock.monotonic()
        """When the last message came; before authentication, when the connection was opened: messages alone do not keep it open."""
        self._allowance = Allowance(endpoint.limits.unauthenticated_messages_max)
        self._held: deque[bytes] | None = None
        self._queue: deque[WorkT] | None = None  # idle connections are many, and an empty deque is not small
        self._queued_bytes: deque[int] | None = None
        """What the queued requests are charged."""
        self._message_bytes = self._taken_bytes = 0
        """Of the message that is being handled; and of requests that ``take_too`` added to those being worked on."""
        self._working = self._starting = 0
        self._is_paused = self._is_blocked = self._is_over_rate = self._is_stopped = False
        self._idle: asyncio.Future[None] | None = None

    # What a protocol implements

    @abc.abstractmethod
    def handle(self, message: bytes) -> None:
        """A message, within all limits, of a peer whose rights hold. Must not wait: ``enqueue`` what takes time."""

    @abc.abstractmethod
    async def work(self, request: WorkT) -> None:
        """Do what was queued. What is raised ends the connection with ``EndReason.FAILED``."""

    def abandoned(self, request: WorkT) -> None:
        """This will not be worked on: the connection has ended."""

    def farewell(self, why: EndReason, detail: str) -> tuple[Sequence[bytes], int, str]:
        """The last messages, the close code and the reason. ``detail`` says more than ``why``, for people."""
        code, text = why.value
        return (), code, detail or text

    def ended(self, code: int | None) -> None:
        """The connection is over; called once. ``code`` is the peer's, ``None`` if we closed it."""

    def rights_changed(self) -> None:
        """Access has changed, and the rights still hold as such: what they allow may differ."""

    def recheck_rights(self) -> Iterator[None]:
        """
        Do the same in steps, between which other tasks may run.

        From this call until the last step is done, what is delivered has to be decided when it is delivered.
        """
        self.rights_changed()
        yield

    def has_room_again(self) -> None:
        """What was buffered has been sent."""

    def ponged(self, payload: bytes) -> None:
        """The peer has answered a ping, or sent a pong that nobody asked for."""

    def received_binary(self, message: bytes) -> None:
        """A whole message came in that its sender calls binary; taken as text, unless the protocol minds."""
        self.received(message)

    def has_backlog(self) -> bool:
        """Whether so much waits to be worked on that nothing more is to be read."""
        return False

    @property
    def silence_s_max(self) -> float | None:
        """How long the peer may be silent, if there is a limit."""
        return None

    async def finish(self) -> None:
        """The endpoint is stopping: take no more requests, and return when those there are have been answered."""
        self.stop_reading()
        if self._working:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    # What the transport calls

    def received(self, message: bytes) -> None:
        """A whole message came in."""
        if self.is_closed:
            return
        if self._is_paused or self._held or not self._is_allowed():
            # What came with the same read as the message that made us pause, or that was one too many.
            if self._held is None:
                self._held = deque()
            if len(self._held) >= self.endpoint.limits.held_messages_max:
                self.end(EndReason.LIMIT, "too many messages at once")
            elif not self._hold_message(len(message)):
                self._held = None
            elif not self.is_closed:
                self._held.append(message)
        else:
            self._handle(message)

    def drained(self) -> None:
        """The peer has taken what was buffered."""
        if self._is_blocked:
            self._is_blocked = False
            self._start_working()
            self.throttle()
        self.has_room_again()

    def closed(self, code: int) -> None:
        """The connection is gone; called once, and nothing after it."""
        self._release(code)

    # What a protocol calls

    def authenticated(self, rights: Rights) -> None:
        """The peer has shown who it is."""
        self.rights = rights
        self.endpoint.is_known(self)
        self.heard_s = self.endpoint.clock.monotonic()
        self._allowance.set_rate(self.endpoint.limits.messages_per_s_max, self.heard_s)
        self.transport.authenticated()

    def is_valid(self) -> bool:
        """Whether the connection may continue; one whose time or rights have ended is closed."""
        if self.is_closed:
            return False
        endpoint, rights = self.endpoint, self.rights
        if rights is None:
            waited_s = endpoint.clock.monotonic() - self.heard_s
            limit_s = endpoint.limits.authentication_timeout_s
            if self._working:
                return True
            if waited_s >= endpoint.authentication_timeout_s:
                self.end(EndReason.NOT_AUTHENTICATED)
            elif limit_s is not None and waited_s >= limit_s:
                self.end(EndReason.LIMIT, "no token was shown in time")
        elif rights.is_revoked:
            self.end(EndReason.REVOKED)
        elif (expires_at_ns := rights.expires_at_ns) is not None and endpoint.clock.now_ns() >= expires_at_ns:
            self.end(EndReason.EXPIRED)
        return not self.is_closed

    def send(self, messages: Sequence[bytes]) -> None:
        """Send messages, in order."""
        if not self.is_closed and messages:
            self.transport.send(messages)

    def enqueue(self, request: WorkT) -> None:
        """Have something done by ``work`` when it is its turn."""
        size = self._message_bytes if self.charges_requests else 0
        if not self._hold_message(size):
            return
        if self._queue is None or self._queued_bytes is None:
            self._queue, self._queued_bytes = deque(), deque()
        self._queue.append(request)
        self._queued_bytes.append(size)
        self._start_working()

    def take_too(self, fits: Callable[[WorkT], bool]) -> WorkT | None:
        """From within ``work``: the request that comes next, if it fits those that are being worked on; then it is one of them."""
        queue, sizes = self._queue, self._queued_bytes
        if not queue or not sizes or len(queue) <= self._starting or not fits(queue[0]):
            return None
        self._taken_bytes += sizes.popleft() + _MESSAGE_BYTES
        return queue.popleft()

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return 0 if self._queue is None else len(self._queue)

    @property
    def is_working(self) -> bool:
        """Whether it is we who keep the peer waiting: then its silence means nothing."""
        return self._working > 0

    @property
    def is_full(self) -> bool:
        """Whether the peer has more to take than it may leave with us."""
        return self.transport.buffered_bytes > self.endpoint.unsent_bytes_max

    def end(self, why: EndReason, detail: str = "") -> None:
        """Close the connection, in the protocol's own words. Ending twice is fine."""
        if not self.is_closed:
            if why is EndReason.LIMIT and self.endpoint.on_limit is not None:
                self.endpoint.on_limit(self)
            messages, code, reason = self.farewell(why, detail)
            self.close(code, reason, messages)

    def close(self, code: int, reason: str, messages: Sequence[bytes] = ()) -> None:
        """Send the last messages, and close."""
        if not self.is_closed:
            self.send(messages)
            self._release(None)
            self.transport.close(code, reason)

    def stop_reading(self) -> None:
        """Take no more messages, for good."""
        self._is_stopped = self._is_paused = True
        self.transport.pause_reading()

    def throttle(self) -> None:
        """Read from the peer only while there is room for what that brings."""
        if self.is_closed or self._is_stopped:
            return
        if self.is_full:
            self._is_blocked = True
        pauses = self._is_blocked or self._is_over_rate or self.has_backlog()
        if pauses and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()
        elif not pauses and self._is_paused:
            self._is_paused = False
            if self.rights is not None:
                self.heard_s = self.endpoint.clock.monotonic()
            if self._held:
                # Not here: whoever calls may be in the middle of something.
                asyncio.get_running_loop().call_soon(self._handle_held)
            else:
                self.transport.resume_reading()

    # Within

    def _hold_message(self, size: int) -> bool:
        """Charge a message that waits. Without memory for it the connection ends."""
        is_held = self.transport.memory.try_hold(size + _MESSAGE_BYTES)
        if not is_held:
            self.end(EndReason.FULL, "the node has no memory for more messages")
        return is_held

    def _handle(self, message: bytes) -> None:
        self._message_bytes = len(message)
        if self.is_valid():
            if self.rights is not None:
                self.heard_s = self.endpoint.clock.monotonic()
            self.handle(message)
            self.throttle()

    def _handle_held(self) -> None:
        while self._held and not self._is_paused and not self.is_closed:
            if not self._is_allowed():
                return
            message = self._held.popleft()
            self.transport.memory.release(len(message) + _MESSAGE_BYTES)
            self._handle(message)
        if not self._held and not self._is_paused and not self.is_closed:
            self._held = None
            self.transport.resume_reading()

    def _is_allowed(self) -> bool:
        """Take the allowance for one message. Without it reading pauses until there is one; before authentication there will be none."""
        wait_s = self._allowance.take(self.endpoint.clock.monotonic())
        if wait_s > 0.0:
            self._is_over_rate = True
            asyncio.get_running_loop().call_later(max(wait_s, _THROTTLE_S), self._rate_has_recovered)
            self.throttle()
        elif wait_s < 0.0:
            self.end(EndReason.LIMIT, "too many messages before a token was shown")
        return wait_s == 0.0

    def _rate_has_recovered(self) -> None:
        self._is_over_rate = False
        self.throttle()

    def _start_working(self) -> None:
        while (
            self._queue
            and len(self._queue) > self._starting
            and self._working < self.work_count_max
            and not self._is_blocked
            and not self.is_closed
        ):
            self._working += 1
            self._starting += 1
            self.endpoint.spawn(self._work())

    async def _work(self) -> None:
        self._starting -= 1
        try:
            while self._queue and self._queued_bytes and not self.is_closed:
                if self.is_full:
                    self._is_blocked = True
                    break
                size = self._queued_bytes.popleft() + _MESSAGE_BYTES
                try:
                    await self.work(self._queue.popleft())
                finally:
                    size, self._taken_bytes = size + self._taken_bytes, 0
                    self.transport.memory.release(size)
                self.throttle()
        except TidingsError as error:
            logger.error("a request at %s failed: %s", self.endpoint.name, error)
            self.end(EndReason.FAILED, f"the request failed ({error.code})")
        except Exception:
            logger.exception("a request at %s failed unexpectedly", self.endpoint.name)
            self.end(EndReason.FAILED)
        finally:
            self._working -= 1
            if self.is_closed or not self._queue:
                self._drop_queue()
            self.throttle()
            if not self._working and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)

    def _drop_queue(self) -> None:
        for request in self._queue or ():
            self.abandoned(request)
        for size in self._queued_bytes or ():
            self.transport.memory.release(size + _MESSAGE_BYTES)
        self._queue = self._queued_bytes = None

    def _release(self, code: int | None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.endpoint.forget(self)
        self._held = None
        if not self._working:
            self._drop_queue()
        self.ended(code)


ConnectionT = TypeVar("ConnectionT", bound=Connection[Any])


class Endpoint(abc.ABC, Generic[ConnectionT]):
    """
    What answers at one path. It is a listener of the dispatcher, behind the access book.

    Args:
        name: For logs: the path.
        clock: What ends times and rights.
        book: Who may do what; when it has changed, connections are checked again.
    """

    authentication_timeout_s: float = 10.0
    """How long a connection may stay without authentication."""
    sweep_interval_s: float = 1.0
    """How often connections are checked for silence and expiry."""
    unsent_bytes_max: int = 4 << 20
    """With more than this unsent, nothing is read from a peer."""
    connections_max: int | None = None
    takes_token_in_message: bool = False
    """Whether a peer may show its token in its first message instead of its upgrade."""
    upgrade_headers: Mapping[str, str] = MappingProxyType({})
    """What the answer to an upgrade says beside what every answer says."""

    def __init__(self, name: str, clock: Clock, book: AccessBook | None = None) -> None:
        self.name = name
        self.clock = clock
        self.limits = ConnectionLimits()
        """Set by whoever carries the endpoint; may be replaced at any time."""
        self.guard: DosGuard | None = None
        """Keeps newcomers out; set by whoever carries the endpoint."""
        self.on_limit: Callable[[ConnectionT], None] | None = None
        """Called with a connection that is ended because it went over a limit; set by whoever carries the endpoint."""
        self.is_open = True
        self.slow_count = 0
        """Connections closed because their peers did not read."""
        self._book = book
        self._book_seq = 0 if book is None else book.seq
        self._connections: dict[ConnectionT, None] = {}
        self._strangers: dict[ConnectionT, str] = {}
        """The networks of peers that have not shown a token yet."""
        self._rechecks: dict[ConnectionT, Iterator[None]] = {}
        """Connections whose rights are still to be rechecked, since access has changed."""
        self._is_rechecking = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    # What a protocol implements

    @abc.abstractmethod
    def connect(self, transport: Transport, peer: Peer) -> ConnectionT:
        """A connection object for a new connection."""

    def admit(self, peer: Peer) -> Peer:
        """
        Whether a peer may connect at all, before the upgrade: what it costs to refuse it here is one answer over HTTP.

        Returns:
            The peer for ``connect``, with whatever is known of it by now.

        Raises:
            TidingsError: It may not; ``status`` is the answer's, if the error has one.
        """
        if self.guard is not None:
            self.guard.require(address=peer.host, entrance="connection", has_token=lambda: self._may_show_token(peer))
        return peer

    def has_token(self, peer: Peer) -> bool:
        """Return whether a peer shows a good token with its upgrade: such a peer is not denied for what others of its address did."""
        return False

    def _may_show_token(self, peer: Peer) -> bool:
        """Whether the peer has shown a good token, or may show it in its first message: a few of a denied address may, at a time."""
        if self.has_token(peer):
            return True
        if not self.takes_token_in_message or "authorization" in peer.headers:
            return False
        network = network_of(peer.host)
        return sum(network == other for other in self._strangers.values()) < _STRANGERS_MAX

    def abandon(self, peer: Peer) -> None:
        """A peer that was admitted has gone before it was connected."""

    def deliver(self, records: Sequence[Record]) -> None:
        """These records are durable, and every connection's rights are those after them."""

    def metrics(self) -> Iterable[tuple[str, str, float]]:
        """Name, description and value of what ``/metrics`` shows of this endpoint."""
        return ()

    # What the server calls

    def open(self, transport: Transport, peer: Peer) -> ConnectionT:
        """Begin a connection; while the endpoint is stopping or full, one that ends at once."""
        connection = self.connect(transport, peer)
        if not self.is_open:
            connection.end(EndReason.STOPPING)
        elif self.connections_max is not None and len(self._connections) >= self.connections_max:
            connection.end(EndReason.FULL)
        else:
            self._connections[connection] = None
            if connection.rights is None and "authorization" not in peer.headers:
                self._strangers[connection] = network_of(peer.host)
            if self._sweeper is None:
                self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name=f"tidings{self.name}-sweep")
        return connection

    async def stop(self, deadline_s: float) -> None:
        """Take no more connections, let what is under way finish within the deadline, then close those there are."""
        self.is_open = False
        started_s = self.clock.monotonic()
        finishing = asyncio.gather(*(connection.finish() for connection in self.connections))
        if not await within(self.clock, deadline_s, finishing):
            await cancel_and_wait(finishing)
        self._end_all(EndReason.STOPPING)
        await cancel_and_wait(self._sweeper)
        left_s = max(_UNWIND_S_MIN, deadline_s - (self.clock.monotonic() - started_s))
        await finish_or_cancel(self.clock, left_s, self._tasks)

    def committed(self, records: Sequence[Record]) -> None:
        """
        These records are durable; the access book knows them already.

        What a revocation took away ends before anything with a higher seq is delivered.
        """
        if self._book is not None and self._book.seq != self._book_seq:
            self._book_seq = self._book.seq
            self.rights_changed()
        self.deliver(records)

    def failed(self, problem: str) -> None:
        """No more commits will come: whoever stayed would wait for them in vain, on rights that may be gone."""
        logger.error("the connections of %s are closed: %s", self.name, problem)
        self._end_all(EndReason.COMMITS_MISSED)

    def rights_changed(self) -> None:
        """
        Grants, policies or keys have changed.

        Connections that were revoked are closed at once. What the others may still do is rechecked in slices, the first one at once.
        """
        for connection in self.connections:
            if connection.rights is not None and connection.is_valid():
                self._rechecks[connection] = connection.recheck_rights()
        if not self._is_rechecking:
            self._recheck()

    def _recheck(self) -> None:
        """Recheck rights until the slice is over."""
        slicing = None if self._book is None else Slicing(self._book)
        rechecks = self._rechecks
        while rechecks:
            connection, steps = next(iter(rechecks.items()))
            try:
                is_done = connection.is_closed or next(steps, _DONE) is _DONE
            except Exception:
                logger.exception("rechecking the rights of a connection of %s failed", self.name)
                connection.end(EndReason.FAILED)
                is_done = True
            if is_done and rechecks.get(connection) is steps:
                del rechecks[connection]
            if slicing is not None and slicing.is_over():
                break
        self._is_rechecking = bool(rechecks)
        if rechecks:
            asyncio.get_running_loop().call_soon(self._recheck)

    # What connections call

    @property
    def connections(self) -> list[ConnectionT]:
        """The open connections."""
        return list(self._connections)

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self.clock.now_ns() // 1_000_000

    def forget(self, connection: Any) -> None:
        """A connection is over."""
        self._connections.pop(connection, None)
        self._strangers.pop(connection, None)

    def is_known(self, connection: Any) -> None:
        """A connection has authenticated."""
        self._strangers.pop(connection, None)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that ``stop`` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of %s failed: %r", self.name, error, exc_info=error)

    async def _sweep(self) -> None:
        """One task for all connections, and none while there are none."""
        while self._connections:
            await self.clock.sleep(self.sweep_interval_s)
            now_s = self.clock.monotonic()
            for connection in self.connections:
                if connection.is_valid() and connection.rights is not None and not connection.is_working:
                    limit_s = connection.silence_s_max
                    if limit_s is not None and now_s - connection.heard_s >= limit_s:
                        connection.end(EndReason.SILENT)
        self._sweeper = None

    def _end_all(self, why: EndReason) -> None:
        for connection in self.connections:
            connection.end(why)
