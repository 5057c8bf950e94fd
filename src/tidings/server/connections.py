"""
All WebSockets of a node: which endpoint is at which path, who may connect, who is still there, and when writes leave.

Limits hold before a connection costs anything: over all, and per address. Liveness is one sweep over all of them, not a timer
each: at ten thousand connections that is the difference between some megabytes and none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.types import Scope

from tidings.access.announcements import Announcer
from tidings.access.endpoint import ConnectionLimits, Endpoint, Peer
from tidings.access.guard import AbuseCounter, Directive, DosGuard
from tidings.core.clock import Clock
from tidings.core.errors import TidingsError

from .edge import UNIX, PeerCounts, request_id_of
from .errors import NodeStopping, NoSuchEndpoint, TooManyConnections
from .memory import MemoryBudget
from .settings import ServerSettings
from .websocket import Framer, SocketProtocol, SocketTransport, peer_of

logger = logging.getLogger(__name__)

_SWEEP_SLICE = 256
_LATE_S = 1.0
"""How much later than its deadline an endpoint may be: it closes its connections only then."""


class Connections:
    """The sockets of one node."""

    def __init__(self, settings: ServerSettings, clock: Clock, guard: DosGuard) -> None:
        self._settings = settings
        self.memory = MemoryBudget(settings)
        """What clients make the node hold, over sockets and HTTP."""
        self._guard = guard
        self._abuse = AbuseCounter(guard, clock)
        self.announcer = Announcer("network_manager")
        self.framer = Framer()
        self.messages_in = self.messages_out = self.bytes_in = self.bytes_out = 0
        self.opened_count = 0
        self.refused: Counter[str] = Counter()
        """Connections refused, by the error's code."""
        self.closed: Counter[str] = Counter()
        """Connections that ended, by their close code's class: how many codes there are is bounded."""
        self._clock = clock
        self._endpoints: dict[str, Endpoint[Any]] = {}
        self._open: set[SocketTransport] = set()
        self._by_address = PeerCounts()
        self._unauthenticated: set[SocketTransport] = set()
        """Those whose peers have not authenticated."""
        self._unauthenticated_by_address = PeerCounts()
        self._by_path: Counter[str] = Counter()
        self._dirty: list[SocketTransport] = []
        self._is_flush_due = False
        self._is_stopping = False
        self._sweeper: asyncio.Task[None] | None = None
        self._emptied: asyncio.Event = asyncio.Event()

    # Endpoints

    @property
    def settings(self) -> ServerSettings:
        """The settings that hold now."""
        return self._settings

    @settings.setter
    def settings(self, settings: ServerSettings) -> None:
        self._settings = self.memory.settings = settings
        for endpoint in self._endpoints.values():
            endpoint.limits = _limits_of(settings)

    def add_endpoint(self, path: str, endpoint: Endpoint[Any]) -> None:
        """Let an endpoint answer at a path, within the limits of the settings."""
        assert path not in self._endpoints
        self._endpoints[path] = endpoint
        endpoint.limits = _limits_of(self._settings)
        endpoint.guard = self._guard
        endpoint.on_limit = lambda connection: self.offended(connection.transport)

    @property
    def endpoints(self) -> Mapping[str, Endpoint[Any]]:
        """The endpoints by path."""
        return self._endpoints

    def fail_endpoint(self, path: str, reason: str) -> None:
        """An endpoint has missed commits: close all its connections, so that its clients connect again and miss nothing."""
        try:
            self._endpoints[path].failed(reason)  # in its own words
        finally:
            for each in [each for each in self._open if each.path == path]:
                each.fail(reason)

    # Opening and closing

    def admit(self, peer: Peer, address: str) -> SocketTransport:
        """
        A connection for a request, within the limits.

        Raises:
            TidingsError: It may not; the error says why.
        """
        memory = self.memory.open(address)
        try:
            endpoint = self._check(peer, address)
            memory.hold(self.settings.read_buffer_bytes)
            peer = endpoint.admit(peer)
        except TidingsError as error:
            memory.close()
            self.refused[error.code] += 1
            raise
        return SocketTransport(self, endpoint, peer, address, memory)

    def take_over(
        self, transport: asyncio.Transport, scope: Scope, key: bytes, rest: bytes, leave: Callable[[], None]
    ) -> None:
        """
        Answer a valid WebSocket handshake, and take the connection over.

        Args:
            transport: The connection.
            scope: The request.
            key: Its key.
            rest: What came behind its head.
            leave: Called when the connection is taken.

        Raises:
            TidingsError: It is refused; nothing was answered.
        """
        listener = self.admit(peer_of(scope), UNIX if scope["client"] is None else scope["client"][0])
        leave()
        named = {"X-Request-Id": request_id_of(scope["headers"]), **listener.upgrade_headers}
        SocketProtocol(listener, named).begin(transport, key, rest)

    def _check(self, peer: Peer, address: str) -> Endpoint[Any]:
        if self._is_stopping:
            raise NodeStopping
        endpoint = self._endpoints.get(peer.path)
        if endpoint is None:
            raise NoSuchEndpoint(peer.path)
        if len(self._open) >= self.settings.connections_max:
            raise TooManyConnections(len(self._open), "at this node")
        from_address = self._by_address.count(address)
        if from_address >= self.settings.connections_per_address_max:
            raise TooManyConnections(from_address, "from this address")
        if len(self._unauthenticated) >= self.settings.unauthenticated_max:
            raise TooManyConnections(len(self._unauthenticated), "without a token at this node")
        unauthenticated = self._unauthenticated_by_address.count(address)
        if unauthenticated >= self.settings.unauthenticated_per_address_max:
            raise TooManyConnections(unauthenticated, "without a token from this address")
        return endpoint

    def now_s(self) -> float:
        """Seconds by a clock that never goes back."""
        return self._clock.monotonic()

    def entered(self, each: SocketTransport) -> None:
        """A connection is open."""
        self.opened_count += 1
        self._open.add(each)
        self._by_address.entered(each.address)
        self._unauthenticated.add(each)
        self._unauthenticated_by_address.entered(each.address)
        each.number = self.opened_count
        self._by_path[each.path] += 1
        self._emptied.clear()

    def authenticated(self, each: SocketTransport) -> None:
        """A connection's peer has authenticated."""
        if each in self._unauthenticated:
            self._no_longer_unknown(each)

    def admitted(self, each: SocketTransport) -> None:
        """A connection is open, and it is known whose it is."""
        each.identify()
        self._tell(each, "network.peer_admitted")

    def _no_longer_unknown(self, each: SocketTransport) -> None:
        self._unauthenticated.discard(each)
        self._unauthenticated_by_address.left(each.address)

    def delivery_failed(self, each: SocketTransport, reason: str) -> None:
        """A connection's peer did not take what it was sent."""
        self._tell(each, "network.delivery_failed", reason=reason)

    def _tell(self, each: SocketTransport, event_type: str, **more: str) -> None:
        identity = each.identity
        if identity is not None:
            about = {"connection_id": str(each.number), "path": each.path, **more}
            self.announcer.tell(event_type, about, peer_identity_id=identity)

    def offended(self, each: SocketTransport) -> None:
        """A connection went over a limit: whoever does so again and again is kept out."""
        self._abuse.note("limit", identity=each.identity, address=each.address)

    def carry_out(self, directive: Directive) -> int:
        """Close whom a directive of the guard means; says how many those are."""
        if not directive.closes or directive.reach == "subscriptions":  # The gateway closes its subscribers itself.
            return 0
        meant = [
            each
            for each in self._open
            if each.is_open
            and (directive.reach != "unauthenticated" or each in self._unauthenticated)
            and directive.covers(identity=each.identity, app=None, address=each.address, connection=str(each.number))
        ]
        for each in meant:
            each.deny(directive.reason_code)
        return len(meant)

    def left(self, each: SocketTransport, code: int) -> None:
        """A connection has closed."""
        self._open.discard(each)
        self.closed[_class_of(code)] += 1
        self._by_path[each.path] -= 1
        self._by_address.left(each.address)
        if each in self._unauthenticated:
            self._no_longer_unknown(each)
        else:
            self._tell(each, "network.peer_dropped", reason=_class_of(code))
        if not self._open:
            self._emptied.set()

    def __len__(self) -> int:
        return len(self._open)

    def counts(self) -> dict[str, int]:
        """Open connections by path."""
        return {path: self._by_path[path] for path in self._endpoints}

    # Writing

    def flush_soon(self, each: SocketTransport) -> None:
        """It has something to write at the end of this iteration of the event loop."""
        self._dirty.append(each)
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def committed(self, records: Sequence[object]) -> None:
        """The listener of the dispatcher behind all endpoints: what they have to say of these records leaves now, not at the loop's next turn."""
        self._flush()

    def _flush(self) -> None:
        self._is_flush_due = False
        dirty, self._dirty = self._dirty, []
        for each in dirty:
            each.flush()
        self.framer.forget()

    def close_soon(self, each: SocketTransport) -> None:
        """A close frame was sent: cut the connection if the peer does not answer in time."""
        asyncio.get_running_loop().call_later(self.settings.close_timeout_s, each.cut)

    # Liveness

    def start(self) -> None:
        """Start to check who is still there."""
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep_for_ever(), name="tidings-liveness")

    async def _sweep_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.settings.ping_interval_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Ping who was silent since the last sweep; cut who was silent after a ping; close who takes nothing of what it is sent."""
        for number, each in enumerate(list(self._open)):
            if each.is_stuck():
                each.too_slow()
            elif each.is_heard:
                each.is_heard = each.has_ping_out = False
            elif each.has_ping_out:
                each.cut()
            else:
                each.probe()
            if number % _SWEEP_SLICE == _SWEEP_SLICE - 1:
                await asyncio.sleep(0)

    # Stopping

    async def stop(self, deadline_s: float) -> None:
        """Accept no more connections, have the endpoints close theirs, and cut what is open after the deadline."""
        self._is_stopping = True
        ended = await asyncio.gather(
            *(asyncio.wait_for(each.stop(deadline_s), deadline_s + _LATE_S) for each in self._endpoints.values()),
            return_exceptions=True,
        )
        for path, outcome in zip(self._endpoints, ended, strict=True):
            if isinstance(outcome, Exception):
                problem = str(outcome) or type(outcome).__name__
                logger.error("the endpoint %s did not stop in order: %s", path, problem)
        for each in list(self._open):
            each.close(1001, "the node is stopping")
        if self._open:
            with_time = max(0.0, min(deadline_s, self.settings.close_timeout_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), with_time)
        for each in list(self._open):
            each.cut()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None


def _class_of(code: int) -> str:
    if code in (1000, 1001, 1005):
        return "normal"
    if code == 1006:
        return "abnormal"
    return "private" if code >= 4000 else "error"


def _limits_of(settings: ServerSettings) -> ConnectionLimits:
    return ConnectionLimits(
        authentication_timeout_s=settings.unauthenticated_timeout_s,
        unauthenticated_messages_max=settings.unauthenticated_messages_max,
        messages_per_s_max=settings.messages_per_s_max,
        held_messages_max=settings.held_messages_max,
    )
