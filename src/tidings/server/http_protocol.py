"""
One HTTP/1.1 connection: httptools parses, ASGI applications answer, and every queue between them is bounded.

One request is answered at a time. While it is, at most the next request head is parsed; what follows stays unparsed, and nothing more is read.
Heads, bodies and unparsed bytes are charged to the connection's memory account, and answers that the peer does not read.

Requests that servers and proxies could understand in two ways are refused with 400 and the connection is closed: see ``http_request``.
Trailers are dropped. A WebSocket upgrade hands the connection to ``Connections.take_over``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

import httptools
from starlette.types import Scope

from tidings.core.errors import TidingsError

from .edge import UNIX, Edge, PeerCounts
from .errors import (
    HeadTooLarge,
    MalformedRequest,
    MemoryExhausted,
    TooManyConnections,
    TooManyHeaders,
    TooManyRequests,
    TrafficRefused,
)
from .http_exchange import Exchange
from .http_request import FRAMING, check_framing, handshake_key, target_of
from .proxies import TrustedProxies

if TYPE_CHECKING:
    from .connections import Connections
    from .settings import ServerSettings

READ_BYTES: Final = 65_536
"""Read at once of a body that the application awaits."""
_FIRST_READ_BYTES: Final = 16_384
"""Read at once of anything else, so that many connections without a token hold little."""
_UNSENT_BYTES: Final = 16_384
"""With more of an answer than this unsent, its application waits, and it is charged."""
_HEADER_LINE_BYTES: Final = 4
"""The size of a header line besides its name and value."""
_HEADER_MEMORY_BYTES: Final = 150
"""The memory of a parsed header besides its name and value."""
HEADERS_COUNT_MAX: Final = 256
"""Headers of one request: a short header takes thirty times its bytes in memory."""
_BODY_COPIES: Final = 2
"""How many times a body is in memory when it is complete: in parts, and put together."""
_SMALL_BYTES: Final = 4_096
"""Requests up to this size are part of the cost of a connection, and are not charged."""
_TINY_HEAD_BYTES: Final = 512
"""A head up to this size is not reckoned at all."""
_LAST_ANSWER_S: Final = 1.0
"""The time left for an answer when what follows it on the connection is refused."""

_END: Final = b"\r\n\r\n"
_PROBES: Final = ("/healthz", "/readyz")


class HttpContext:
    """
    What all HTTP connections of a node share.

    Args:
        edge: The application.
        connections: Takes over upgrades; has the current settings and the memory budget.
    """

    def __init__(self, edge: Edge, connections: Connections) -> None:
        self.edge = edge
        self.connections = connections
        self.memory = connections.memory
        self.peers = PeerCounts()
        self.open: set[HttpProtocol] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.date_line = b""
        self.buffer = memoryview(bytearray(READ_BYTES))
        """Read into by every connection: between ``get_buffer`` and ``buffer_updated`` of one, no other is read."""
        self.first_buffer = self.buffer[:_FIRST_READ_BYTES]
        self._proxies = TrustedProxies(())

    @property
    def settings(self) -> ServerSettings:
        """The current settings."""
        return self.connections.settings

    @property
    def proxies(self) -> TrustedProxies:
        """The proxies whose ``X-Forwarded-For`` counts."""
        if self._proxies.names != self.settings.trusted_proxies:
            self._proxies = TrustedProxies(self.settings.trusted_proxies)
        return self._proxies


class HttpProtocol(asyncio.BufferedProtocol):
    """One HTTP connection. ``context`` is what it shares with all others."""

    def __init__(self, context: HttpContext) -> None:
        self.context = context
        self.settings = context.settings
        """Those at the start of the connection."""
        self.writable: asyncio.Event | None = None
        """Set when the peer has read enough; ``None`` while nothing waits for it."""
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._current: Exchange | None = None
        """The request that is being answered, or was answered last."""
        self._waiting: deque[Exchange] = deque()
        """Requests parsed ahead of their turn: at most two, since parsing stops while there is one."""
        self._parsing: Exchange | None = None
        """The request whose body is being parsed."""
        self._upgrading: tuple[Exchange, bytes] | None = None
        """A valid WebSocket handshake, with its key."""
        self._unparsed = b""
        self._position = 0
        self._is_reading = True
        self.is_ahead = False
        """Whether parsing waits for the application to take what has come of a body."""
        self._is_last = False
        """Whether no more requests are taken from this connection: what comes is dropped."""
        self._unread_since_s: float | None = None
        """Since when each check found something that the peer has not taken."""
        self._due_s: float | None = None
        """When the peer must have sent what is awaited of it."""
        self._timer: asyncio.TimerHandle | None = None
        """Checks ``_due_s``, then or before: one for many requests, since making one costs more than most else."""
        self._timer_s = 0.0
        self._failure: TrafficRefused | None = None
        """Raised within a callback of the parser."""
        self._unsent = 0
        """Bytes charged for answers that the peer has not read."""
        self._is_cut = False
        """Whether more of a refused request may come: it is dropped for a moment before the connection closes."""
        self._piece_bytes = 0
        """Of a piece that began between two requests, its size."""
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._framing: list[tuple[bytes, bytes]] = []
        self._is_in_head = False
        self._raw_bytes = self._head_held = 0
        """Bytes of the head, or of a body since its last part; and of the head the bytes that are charged."""

    # As the loop sees it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None
        self._peer_address = UNIX if client is None else client[0]
        self._is_proxy = client is not None and self.context.proxies.trusts(self._peer_address)
        self.memory = self.context.memory.open(None if self._is_proxy else self._peer_address)
        if not self._is_proxy:
            self.context.peers.entered(self._peer_address)
        self._base: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": (str(own[0]), int(own[1])) if isinstance(own, tuple) else None,
            "client": client,
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "root_path": "",
            "tidings.memory": self.memory,
        }
        self.context.open.add(self)
        self._allow(self.settings.head_timeout_s)

    def get_buffer(self, sizehint: int) -> memoryview:
        current = self._current
        return self.context.buffer if current is not None and current.is_awaited else self.context.first_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_last:
            return
        data = bytes(self.context.buffer[:nbytes])
        if self._is_reading:
            self._parse(data, 0)
        else:  # it was read before, as within TLS
            self._keep(self._take_unparsed() + data, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        for exchange in (self._current, *self._waiting):
            if exchange is not None and not exchange.is_answered:
                self._leave(exchange)
                exchange.disconnect()
        self._waiting.clear()
        if self.writable is not None:
            self.writable.set()
        self._retire()

    def _retire(self) -> None:
        """The connection is over, or no longer this protocol's."""
        self.context.open.discard(self)
        self._due_s = None
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_proxy:
            self.context.peers.left(self._peer_address)
        self.memory.close()
        self._is_last = True
        # What refers to this protocol is let go of, so that its memory is free now and not when garbage is collected.
        self._parser = self._upgrading = self._parsing = self._current = None  # type: ignore[assignment]  # not used again
        self._reset()

    def pause_writing(self) -> None:
        self.writable = self.writable or asyncio.Event()
        unsent = self._transport.get_write_buffer_size()
        if self.memory.try_hold(unsent):
            self._unsent += unsent
        else:
            self._transport.abort()

    def resume_writing(self) -> None:
        self.memory.release(self._unsent)
        self._unsent = 0
        if self.writable is not None:
            self.writable.set()
            self.writable = None

    # As an exchange sees it

    @property
    def date_line(self) -> bytes:
        """The header line of the date."""
        return self.context.date_line

    def write(self, data: bytes) -> None:
        """Send a part of an answer."""
        self._transport.write(data)

    def close(self) -> None:
        """End the connection when what was written has left."""
        self._is_last = True
        self._transport.close()

    def read_on(self) -> None:
        """Parse what was left, and read on if nothing is left."""
        if self._unparsed:
            self._parse(self._take_unparsed(), 0)
        elif not (self._is_reading or self._waiting or self.is_ahead or self._transport.is_closing()):
            self._is_reading = True
            self._transport.resume_reading()

    def answered(self, exchange: Exchange) -> None:
        """An answer is complete."""
        self._unread_since_s = None  # each answer has its own time
        self.is_ahead = False
        self._leave(exchange)
        exchange.drop_request()
        if self._transport.is_closing():
            return
        if not exchange.is_kept_alive:
            self._end(exchange)
            return
        if self._waiting:
            self._start(self._waiting.popleft())
        elif exchange.is_whole and not self._is_in_head:
            self._allow(self.settings.keep_alive_s)
        if not self._is_reading:
            self.read_on()

    def _end(self, exchange: Exchange) -> None:
        """Close behind the last answer. While a request is coming it is dropped for a moment: closing at once would reset the connection, and the answer with it."""
        self._is_last = True
        self._waiting.clear()
        is_all_read = exchange.is_whole and not self._is_cut
        if is_all_read or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self._allow(_LAST_ANSWER_S)
        self._take_unparsed()
        self.read_on()

    # As its server sees it

    def shut_down(self) -> None:
        """Close, behind the answer that is being given if there is one."""
        current = self._current
        if current is None or current.is_answered:
            self._transport.close()
        else:
            current.is_kept_alive = False

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    def close_if_unread(self, now_s: float) -> None:
        """
        Cut a peer that does not read. To be called now and then.

        A connection that is closed counts too: it waits for its last bytes to be taken, and takes a place until then.
        """
        if not self._transport.get_write_buffer_size():
            self._unread_since_s = None
        elif self._unread_since_s is None:
            self._unread_since_s = now_s
        elif now_s - self._unread_since_s >= self.settings.answer_timeout_s:
            self._transport.abort()

    # Parsing

    def _take_unparsed(self) -> bytes:
        data, self._unparsed = self._unparsed, b""
        self.memory.release(len(data))
        return data[self._position :]

    def _keep(self, data: bytes, position: int) -> None:
        """Parse the rest later, and read nothing more before."""
        try:
            self.memory.hold(len(data))
        except MemoryExhausted as error:
            self._refuse(error)
        else:
            self._unparsed, self._position = data, position
            self._pause()

    def _pause(self) -> None:
        if self._is_reading and not self._transport.is_closing():
            self._is_reading = False
            self._transport.pause_reading()

    def _parse(self, data: bytes, position: int) -> None:
        """Parse up to the end of one head at a time, so that no more is parsed ahead than can be answered soon."""
        size = len(data)
        try:
            while position < size and not (self._is_last or self._waiting or self.is_ahead):
                end = data.find(_END, position) + len(_END)
                if end < len(_END):
                    end = size
                self._piece_bytes = 0
                self._raw_bytes += end - position
                if self._parsing is None:
                    self._piece_bytes = end - position
                    if self._raw_bytes > _TINY_HEAD_BYTES:
                        self._hold_head(data.count(b"\n", position, end))
                try:
                    self._parser.feed_data(data if end - position == size else memoryview(data)[position:end])
                except httptools.HttpParserUpgrade as upgrade:
                    end = position + upgrade.args[0]
                    if self._upgrading is not None and self._upgrade(data[end:]):
                        return
                position = end
                if self._raw_bytes > self.settings.head_bytes_max and (self._is_in_head or self._parsing is not None):
                    raise HeadTooLarge(self.settings.head_bytes_max)
        except TrafficRefused as error:
            self._refuse(error)
        except httptools.HttpParserError:
            if not self._is_last:
                self._refuse(self._failure or MalformedRequest())
        if self._is_last:
            return
        if position < size:
            self._keep(data, position)
        elif self._waiting or self.is_ahead:
            self._pause()
        elif not self._is_reading:
            self.read_on()

    def _hold_head(self, line_count: int) -> None:
        """Charge the head before it is parsed, with so many lines more: short headers take many times their bytes."""
        size = self._raw_bytes + _HEADER_MEMORY_BYTES * (len(self._headers) + line_count)
        if size > max(_SMALL_BYTES, self._head_held):
            self.memory.hold(size - self._head_held)
            self._head_held = size

    def _fail(self, error: TrafficRefused) -> TrafficRefused:
        """Note an error that is raised to the parser, which raises one of its own."""
        self._failure = error
        return error

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._raw_bytes = self._piece_bytes
        self._allow(self.settings.head_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer: a proxy may have checked the headers, and has not seen it among them
        if len(self._headers) == HEADERS_COUNT_MAX:
            raise self._fail(TooManyHeaders(HEADERS_COUNT_MAX))
        name = name.lower()
        self._headers.append((name, value))
        if name in FRAMING:
            self._framing.append((name, value.rstrip(b" \t")))  # llhttp leaves the blanks behind a value

    def on_headers_complete(self) -> None:
        parser, context = self._parser, self.context
        version, method = parser.get_http_version(), parser.get_method().decode("ascii")
        if not self._raw_bytes:  # it came in one piece with the body before it
            self._raw_bytes = sum(len(name) + len(value) + _HEADER_LINE_BYTES for name, value in self._headers)
        try:
            if self._raw_bytes > self.settings.head_bytes_max:
                raise HeadTooLarge(self.settings.head_bytes_max)
            has_body, expects_continue = check_framing(self._framing, version)
            path, raw_path, query, headers = target_of(method, self._url, self._headers)
            if self._raw_bytes > _TINY_HEAD_BYTES:
                self._hold_head(0)
        except TrafficRefused as error:
            raise self._fail(error) from None
        scope = {
            **self._base,
            "method": method,
            "http_version": version,
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": headers,
            "state": {},
        }
        if self._is_proxy:
            scope["client"] = (context.proxies.client(self._peer_address, self._headers), 0)
        self._is_in_head = False
        exchange = self._parsing = Exchange(self, scope, context.edge)
        exchange.held, self._head_held = self._head_held, 0
        exchange.size = max(exchange.held, self._raw_bytes + _HEADER_MEMORY_BYTES * len(self._headers))
        exchange.awaits_continue = expects_continue
        exchange.is_kept_alive = version == "1.1" and parser.should_keep_alive()
        if parser.should_upgrade():
            is_behind = self._current is not None and not self._current.is_answered
            try:
                key = handshake_key(
                    self._framing,
                    self._headers,
                    method=method,
                    version=version,
                    has_body=has_body,
                    is_behind=is_behind,
                )
            except TrafficRefused as error:
                exchange.app, exchange.is_kept_alive = context.edge.refusing(error), False
            else:
                if key is not None:
                    self._upgrading = exchange, key
                    return
        self._enqueue(exchange)

    def on_body(self, body: bytes) -> None:
        self._raw_bytes = 0
        exchange = self._parsing
        assert exchange is not None
        if exchange.is_answered or exchange.failure is not None:
            return
        exchange.size += _BODY_COPIES * len(body)
        if exchange.size > _SMALL_BYTES:
            try:
                self.memory.hold(exchange.size - exchange.held)
            except MemoryExhausted as error:
                raise self._fail(error) from None
            exchange.held = exchange.size
        self.is_ahead = exchange.take(body)

    def on_message_complete(self) -> None:
        exchange, self._parsing = self._parsing, None
        assert exchange is not None
        exchange.is_whole = True
        self._is_last = self._is_last or not exchange.is_kept_alive
        self._reset()
        if exchange.is_answered:  # the answer did not wait for all of the body
            self._allow(self.settings.keep_alive_s)
        else:
            self._due_s = None
            exchange.wake()
            if exchange is not self._current and exchange.app is not self.context.edge:
                self._allow(_LAST_ANSWER_S)  # it is refused

    # Answering

    def _enqueue(self, exchange: Exchange) -> None:
        if self._current is None or self._current.is_answered:
            self._start(exchange)
        else:
            self._due_s = None
            self._waiting.append(exchange)

    def _start(self, exchange: Exchange) -> None:
        context = self.context
        self._current = exchange
        if exchange.is_whole:
            self._due_s = None
        else:
            self._allow(self.settings.body_timeout_s)
        if self._is_proxy:
            context.peers.entered(exchange.scope["client"][0])
        # Whether the process lives and is ready is always answered: a busy node must not be taken for a dead one.
        overload = None if exchange.scope["path"] in _PROBES else self._overload(exchange)
        if overload is not None:
            exchange.app = context.edge.refusing(overload)
        task = self._loop.create_task(exchange.run())
        context.tasks.add(task)
        task.add_done_callback(context.tasks.discard)

    def _overload(self, exchange: Exchange) -> TrafficRefused | None:
        """Why one more request is refused, if it is."""
        context, settings = self.context, self.settings
        address = exchange.scope["client"][0] if self._is_proxy else self._peer_address
        if len(context.open) > settings.requests_max or len(context.tasks) >= settings.requests_max:
            return TooManyRequests(settings.requests_max)
        if context.peers.count(address) > settings.requests_per_address_max:
            return TooManyConnections(settings.requests_per_address_max, "from this address")
        if self._is_proxy:
            try:
                self.memory.identify(None, address)
            except MemoryExhausted as error:
                return error
        return None

    def _leave(self, exchange: Exchange) -> None:
        """An exchange is over: give back what it holds."""
        if exchange.held:
            self.memory.release(exchange.held)
            exchange.held = 0
        if self._is_proxy and exchange is self._current:
            self.context.peers.left(exchange.scope["client"][0])

    def _refuse(self, error: TrafficRefused) -> None:
        """Answer what cannot be taken, behind what is being answered, and end the connection: where the next request would begin is not known."""
        self._is_last = True
        self._take_unparsed()
        exchange, self._parsing = self._parsing, None
        if exchange is None:
            scope = {
                **self._base,
                "http_version": "1.1",
                "method": "?",
                "path": "?",
                "headers": self._headers,
                "state": {},
            }
            if self._url:
                scope["path"] = self._url.partition(b"?")[0].decode("ascii", "replace")
            exchange = Exchange(self, scope, self.context.edge.refusing(error))
            exchange.is_whole, exchange.is_kept_alive = True, False
            self._is_cut = True
            self.memory.release(self._head_held)
            self._head_held = 0
            self._enqueue(exchange)
            if self._waiting:
                self._allow(_LAST_ANSWER_S)
        elif exchange.is_begun:
            self._transport.close()
        else:  # the application reads the body, or has not begun
            exchange.failure, exchange.is_kept_alive = error, False
            exchange.app = self.context.edge.refusing(error)
            exchange.wake()

    def _upgrade(self, rest: bytes) -> bool:
        """Hand the connection to the endpoint of a WebSocket; return whether it took it. ``rest`` came behind the head."""
        assert self._upgrading is not None
        (exchange, key), self._upgrading = self._upgrading, None
        scope, context = exchange.scope, self.context
        try:
            context.edge.check_page(scope["headers"], scope["client"])
            context.connections.take_over(self._transport, scope, key, rest, self._retire)
        except TidingsError as error:
            exchange.app, exchange.is_kept_alive, self._is_last = context.edge.refusing(error), False, True
            self._start(exchange)
            return False
        return True

    # Time

    def _allow(self, seconds: float) -> None:
        self._due_s = due_s = self._loop.time() + seconds
        if self._timer is None or self._timer_s > due_s:
            self._set_timer(due_s)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = at_s
        self._timer = self._loop.call_at(at_s, self._look_at_time)

    def _look_at_time(self) -> None:
        self._timer = None
        if self._due_s is None:
            return
        if self._due_s > self._loop.time():
            self._set_timer(self._due_s)
        elif not self._transport.is_closing():
            self.close()
