"""
One HTTP/1.1 connection: httptools parses, ASGI applications answer, and every queue between them is bounded.

One request is answered at a time. While it is, at most the next request head is parsed; what follows stays unparsed, and nothing more is read.
Heads, bodies and unparsed bytes are charged to the connection's memory account, and answers that the peer does not read.

Requests that servers and proxies could understand in two ways are refused with 400 and the connection is closed: see ``_check_framing``.
Trailers are dropped. A WebSocket upgrade hands the connection to ``Connections.take_over``.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope

from tidings.core.errors import TidingsError

from .edge import UNIX, Edge, PeerCounts, legible
from .errors import (
    BadHandshake,
    HeadTooLarge,
    MalformedRequest,
    MemoryExhausted,
    TooManyConnections,
    TooManyRequests,
    TrafficRefused,
    UnknownSocketVersion,
)
from .proxies import TrustedProxies

if TYPE_CHECKING:
    from .connections import Connections
    from .settings import ServerSettings

logger = logging.getLogger(__name__)

READ_BYTES: Final = 65_536
"""Read at once of a body that the application awaits."""
_FIRST_READ_BYTES: Final = 16_384
"""Read at once of anything else, so that many connections without a token hold little."""
_BODY_AHEAD_BYTES: Final = 65_536
"""With more of a body than this, reading pauses until the application takes it."""
_UNSENT_BYTES: Final = 16_384
"""With more of an answer than this unsent, its application waits, and it is charged."""
_JOINED_BYTES: Final = 16_384
"""A shorter body leaves in one write with its head; a longer one is not copied."""
_HEADER_LINE_BYTES: Final = 4
"""The size of a header line besides its name and value."""
_HEADER_MEMORY_BYTES: Final = 150
"""The memory of a parsed header besides its name and value."""
_SMALL_BYTES: Final = 4_096
"""Requests up to this size are part of the cost of a connection, and are not charged."""
_LAST_ANSWER_S: Final = 1.0
"""The time left for an answer when what follows it on the connection is refused."""

_END: Final = b"\r\n\r\n"
_PROBES: Final = ("/healthz", "/readyz")
_BODILESS: Final = (204, 304)
_CONTROL: Final = re.compile(b"[\x00-\x08\x0a-\x1f\x7f]")
_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")
_FRAMING: Final = frozenset((b"host", b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"connection"))
_STATUS_LINES: Final = {int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_SOCKET_VERSION: Final = b"13"
_SOCKET_KEY_BYTES: Final = 16


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


class Exchange:
    """One request and its answer: the scope, ``receive`` and ``send`` of an ASGI application."""

    __slots__ = (
        *(
            "_announced",
            "_body",
            "_connection",
            "_head",
            "_is_chunked",
            "_is_taken",
            "_waiter",
            "app",
            "awaits_continue",
        ),
        *(
            "failure",
            "held",
            "is_answered",
            "is_begun",
            "is_disconnected",
            "is_kept_alive",
            "is_whole",
            "scope",
            "size",
        ),
    )

    def __init__(self, connection: HttpProtocol, scope: Scope, app: ASGIApp) -> None:
        self._connection = connection
        self.scope = scope
        self.app = app
        self._body: bytes | bytearray = b""
        self._is_taken = False
        """Whether ``receive`` has returned the end of the body."""
        self._waiter: asyncio.Event | None = None
        self._head = b""
        self._announced = 0
        self._is_chunked: bool | None = None
        self.size = self.held = 0
        """The bytes of head and body, and of these the bytes that are charged."""
        self.failure: TrafficRefused | None = None
        """Raised by ``receive``: the rest of the body will not come."""
        self.awaits_continue = False
        self.is_whole = False
        """Whether the body has come to its end."""
        self.is_begun = self.is_answered = self.is_disconnected = False
        self.is_kept_alive = True

    async def run(self) -> None:
        """Have the application answer; without a complete answer the connection is closed."""
        try:
            await self.app(self.scope, self.receive, self.send)
            if not self.is_answered and not self.is_disconnected:
                raise RuntimeError("the answer is not complete")
        except Exception:
            logger.exception("%s %s: the application failed", self.scope["method"], legible(self.scope["path"]))
            self._connection.close()

    async def receive(self) -> Message:
        """
        Return the next part of the body, or that the client has gone.

        Raises:
            TrafficRefused: The rest of the body is malformed, or there is no memory for it.
        """
        if self.awaits_continue:
            self.awaits_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._body or self.is_whole) or self._is_taken:
            if self.failure is not None or self.is_disconnected or self.is_answered:
                break
            waiter = self._waiter = self._waiter or asyncio.Event()
            self._connection.read_on()
            if self._waiter is waiter:
                await waiter.wait()
        if self.failure is not None:
            raise self.failure
        if self.is_disconnected or self.is_answered:
            return {"type": "http.disconnect"}
        body, self._body = self._body, b""
        self._is_taken = self.is_whole
        self._connection.is_ahead = False
        return {"type": "http.request", "body": bytes(body), "more_body": not self.is_whole}

    @property
    def is_awaited(self) -> bool:
        """Whether the application waits for more of the body."""
        return self._waiter is not None and not self.is_whole

    def wake(self) -> None:
        """Have ``receive`` look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.set()

    def take(self, body: bytes) -> bool:
        """Take a part of the body. Return whether as much has come as may before the application takes it."""
        if self._body:
            self._body = bytearray(self._body) if isinstance(self._body, bytes) else self._body
            self._body += body
        else:
            self._body = body
        if self._waiter is not None:
            self.wake()
        return len(self._body) > _BODY_AHEAD_BYTES

    def disconnect(self) -> None:
        """The client has gone."""
        self.is_disconnected = True
        self.wake()

    async def send(self, message: Message) -> None:
        """
        Take the next part of the answer.

        Raises:
            RuntimeError: It breaks the order of parts, or is longer or shorter than announced.
        """
        connection = self._connection
        if connection.writable is not None and not self.is_disconnected:
            await connection.writable.wait()
        if self.is_disconnected:
            return
        if not self.is_begun:
            self._begin(message["status"], message.get("headers", ()))
        elif self.is_answered:
            raise RuntimeError("the answer is complete")
        else:
            self._continue(message.get("body", b""), is_last=not message.get("more_body", False))

    def _begin(self, status: int, headers: Any) -> None:
        self.is_begun = True
        if self.awaits_continue:
            # The client may send the body it announced, or leave it out: what comes next could be either.
            self.awaits_continue = self.is_kept_alive = False
        lines = [_STATUS_LINES.get(status, b"HTTP/1.1 %d \r\n" % status), self._connection.context.date_line]
        for name, value in headers:
            if _CONTROL.search(value):
                raise RuntimeError(f"header {name!r} holds a control character")
            if name == b"content-length":
                self._is_chunked, self._announced = False, int(value)
            elif name == b"connection" and value == b"close":
                self.is_kept_alive = False
                continue
            lines += (name, b": ", value, b"\r\n")
        if self._is_chunked is None and self.scope["method"] != "HEAD" and status not in _BODILESS:
            self._is_chunked = self.scope["http_version"] == "1.1"
            if self._is_chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
            else:  # HTTP/1.0 does not know chunks: the end of the connection is the end of the body
                self.is_kept_alive, self._announced = False, -1
        if not self.is_kept_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if self._is_chunked or self._announced < 0:
            self._connection.write(head)
        else:  # each write is a system call and wakes the peer: a head that announces its body's length leaves with the body
            self._head = head

    def _continue(self, body: bytes, *, is_last: bool) -> None:
        if self.scope["method"] == "HEAD":
            body, self._announced = b"", 0
        elif self._is_chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
        elif self._announced >= 0:
            self._announced -= len(body)
            if self._announced < 0 or (is_last and self._announced):
                raise RuntimeError("the body is not as long as was announced")
        head, self._head = self._head, b""
        if len(body) > _JOINED_BYTES and head:
            self._connection.write(head)
            head = b""
        self._connection.write(head + body if head else body)
        if is_last:
            self.is_answered = True
            self.wake()
            self._connection.answered(self)


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
        self._host = b""
        """The last valid Host."""
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
        self._upgrading = None

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
        """Close behind the last answer. While a body is coming it is dropped for a moment: closing at once would reset the connection, and the answer with it."""
        self._is_last = True
        self._waiting.clear()
        if exchange.is_whole or not self._transport.can_write_eof():
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
                self._piece_bytes = end - position if self._parsing is None else 0
                self._raw_bytes += end - position
                try:
                    self._parser.feed_data(data if end - position == size else memoryview(data)[position:end])
                except httptools.HttpParserUpgrade as upgrade:
                    end = position + upgrade.args[0]
                    if self._upgrading is not None and self._upgrade(data[end:]):
                        return
                position = end
                if self._raw_bytes > self.settings.head_bytes_max and (self._is_in_head or self._parsing is not None):
                    raise HeadTooLarge(self.settings.head_bytes_max)
            if self._is_in_head:
                self._hold_head()
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

    def _hold_head(self) -> None:
        size = self._raw_bytes + _HEADER_MEMORY_BYTES * len(self._headers)
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
        name = name.lower()
        self._headers.append((name, value))
        if name in _FRAMING:
            self._framing.append((name, value.rstrip(b" \t")))  # llhttp leaves the blanks behind a value

    def on_headers_complete(self) -> None:
        parser, context = self._parser, self.context
        version = parser.get_http_version()
        if not self._raw_bytes:  # it came in one piece with the body before it
            self._raw_bytes = sum(len(name) + len(value) + _HEADER_LINE_BYTES for name, value in self._headers)
        try:
            if self._raw_bytes > self.settings.head_bytes_max:
                raise HeadTooLarge(self.settings.head_bytes_max)
            has_body, expects_continue = self._check_framing(version)
            scope = self._scope(parser.get_method().decode("ascii"))
            if self._is_proxy:
                scope["client"] = (context.proxies.client(self._peer_address, self._headers), 0)
            self._hold_head()
        except TrafficRefused as error:
            raise self._fail(error) from None
        except (httptools.HttpParserError, ValueError):
            raise self._fail(MalformedRequest("its target is not valid")) from None
        scope["http_version"] = version
        self._is_in_head = False
        exchange = self._parsing = Exchange(self, scope, context.edge)
        exchange.size = self._raw_bytes + _HEADER_MEMORY_BYTES * len(self._headers)
        exchange.held, self._head_held = self._head_held, 0
        exchange.awaits_continue = expects_continue and version == "1.1"
        exchange.is_kept_alive = version == "1.1" and parser.should_keep_alive()
        if parser.should_upgrade():
            try:
                key = self._handshake_key(scope, has_body=has_body)
            except TrafficRefused as error:
                exchange.app, exchange.is_kept_alive = context.edge.refusing(error), False
            else:
                if key is not None:
                    self._upgrading = exchange, key
                    return
        self._enqueue(exchange)

    def _check_framing(self, version: str) -> tuple[bool, bool]:
        """Refuse what could be understood in two ways. Return whether there is a body, and whether the client waits to send it."""
        hosts = lengths = encodings = 0
        has_body = expects_continue = False
        for name, value in self._framing:
            if name == b"host":
                hosts += 1
                if value != self._host and _HOST.fullmatch(value) is None:
                    raise MalformedRequest("its Host is not valid")
                self._host = value
            elif name == b"content-length":
                lengths += 1
                has_body = value.strip(b"0") != b""
                if not value.isdigit():
                    raise MalformedRequest("its Content-Length is not a number")
            elif name == b"transfer-encoding":
                encodings += 1
                has_body = True
                if value.lower() != b"chunked":
                    raise MalformedRequest("its Transfer-Encoding is not chunked")
            elif name == b"expect":
                expects_continue = value.lower() == b"100-continue"
        if version not in ("1.1", "1.0"):
            raise MalformedRequest(f"HTTP/{version} is not supported here")
        if hosts > 1 or (not hosts and version == "1.1"):
            raise MalformedRequest("it needs exactly one Host")
        if lengths + encodings > 1 or (encodings and version == "1.0"):
            raise MalformedRequest("the length of its body is ambiguous")
        return has_body, expects_continue

    def _scope(self, method: str) -> Scope:
        """The scope of the request; of its target the path and the query."""
        url, headers = httptools.parse_url(self._url), self._headers
        path = url.path or b"/"
        if url.schema is not None:
            # RFC 9112, 3.2.2: the target's authority counts, whatever Host says.
            authority = re.split(rb"[/?]", self._url.partition(b"://")[2])[0]
            if b"@" in authority:
                raise MalformedRequest("its target has user information")
            headers = [(name, authority if name == b"host" else value) for name, value in headers]
        if url.fragment is not None:
            raise MalformedRequest("its target has a fragment")
        if url.schema is None and not path.startswith(b"/") and (method, path) != ("OPTIONS", b"*"):
            raise MalformedRequest("its target is not a path")
        text = path.decode("ascii")
        return {
            **self._base,
            "method": method,
            "path": unquote(text) if "%" in text else text,
            "raw_path": path,
            "query_string": url.query or b"",
            "headers": headers,
            "state": {},
        }

    def _handshake_key(self, scope: Scope, *, has_body: bool) -> bytes | None:
        """
        The key of a WebSocket handshake; ``None`` for an upgrade to anything else, which is answered as if it were no upgrade.

        Raises:
            MalformedRequest, BadHandshake, UnknownSocketVersion: Something is wrong with it.
        """
        upgrades = [value.lower() for name, value in self._framing if name == b"upgrade"]
        if b"websocket" not in upgrades:
            if has_body:  # to the parser, a body behind the head of an upgrade would be the next request
                raise MalformedRequest("an upgrade has a body")
            return None
        if self._current is not None and not self._current.is_answered:
            raise BadHandshake("it comes behind a request that is not answered")
        for problem, is_bad in (
            ("its Upgrade names more than one protocol", len(upgrades) != 1),
            ("it has a body", has_body),
            ("it is of HTTP/1.0", scope["http_version"] == "1.0"),
            (f"its method is {scope['method']}", scope["method"] != "GET"),
        ):
            if is_bad:
                raise BadHandshake(problem)
        versions = [value for name, value in self._headers if name == b"sec-websocket-version"]
        if not versions:
            raise BadHandshake("it has no version")
        if versions != [_SOCKET_VERSION]:
            raise UnknownSocketVersion(b", ".join(versions).decode("latin-1")[:100])
        keys = [value for name, value in self._headers if name == b"sec-websocket-key"]
        try:
            is_valid = len(keys) == 1 and len(base64.b64decode(keys[0], validate=True)) == _SOCKET_KEY_BYTES
        except (binascii.Error, ValueError):
            is_valid = False
        if not is_valid:
            raise BadHandshake("it has no valid key")
        return keys[0]

    def on_body(self, body: bytes) -> None:
        self._raw_bytes = 0
        exchange = self._parsing
        assert exchange is not None
        if exchange.is_answered or exchange.failure is not None:
            return
        exchange.size += len(body)
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
