"""
Listening for HTTP: uvicorn's protocol on a TCP port and, if wanted, a Unix socket, with the bounds that uvicorn lacks.

Bounded are the length of a request's head, the time that head, body and answer take, and the connections of one address; a refusal is a
problem document with a request id. Without bounds a peer that sends nothing, or one header after another, or asks and never reads, holds a
connection or memory for ever, and a thousand such peers keep everybody else out. WebSocket upgrades go to the endpoints.

uvicorn's own server is not used: its main loop wakes ten times a second, takes the process's signals, and ends the process where we would
rather raise. Its protocol and its configuration are.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import errno
import socket
import ssl
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from tidings.core.clock import Clock

from .connections import Connections
from .edge import PROBLEM_TYPE, REQUEST_ID_HEADER, UNIX, Edge, PeerCounts
from .errors import (
    AddressInUse,
    AddressUnusable,
    BadHandshake,
    CertificateUnusable,
    HeadTooLarge,
    MalformedRequest,
    TooManyConnections,
    TooManyRequests,
    TrafficRefused,
)
from .settings import ServerSettings
from .unix_sockets import listening_socket
from .websocket import websocket_class


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """
    The port's TLS context; ``None`` where no certificate is set.

    Raises:
        CertificateUnusable: A file cannot be read, or the two do not fit.
    """
    if settings.tls_cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: ServerSettings) -> None:
    """
    Use the certificate that the files hold now, for connections from now on.

    Raises:
        CertificateUnusable: A file cannot be read, or the two do not fit; the context keeps what it has.
    """
    cert, key = settings.tls_cert_file, settings.tls_key_file
    assert cert is not None
    assert key is not None
    try:
        # Tried apart first: a context that was given half of a pair would serve neither the old nor the new one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise CertificateUnusable(f"{cert}, {key}", error.reason or "is not a PEM certificate and its key") from error
    except OSError as error:
        raise CertificateUnusable(f"{cert}, {key}", error.strerror or str(error)) from error


def _no_password() -> str:
    """Without this an encrypted key would make the node ask at a terminal, and wait."""
    return ""


_SOCKET_VERSIONS: Final = (b"13", b"8", b"7")
"""What picows speaks; it would refuse others in a form of its own."""
_SOCKET_KEY_BYTES: Final = 16
_PROBES: Final = ("/healthz", "/readyz")
_HEADER_LINE_BYTES: Final = 4
"""What a header takes beside its name and value."""
_BODILESS: Final = (204, 304)


class _Cycle(RequestResponseCycle):
    """
    One request and its answer.

    A head that says how long its body is leaves together with the body: each write is a call of the system, and wakes the peer. One that does
    not say so leaves at once, since its body may take its time.
    """

    _head = b""

    async def send(self, message: Any) -> None:
        """
        Take the next part of the answer.

        Raises:
            RuntimeError: It breaks the order of parts, or says more or less than was announced.
        """
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._begin(message["status"], message.get("headers", ()))
        elif self.response_complete:
            raise RuntimeError("the answer is complete")
        else:
            self._go_on(message.get("body", b""), is_last=not message.get("more_body", False))

    def _begin(self, status: int, headers: Any) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        lines = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            if HEADER_VALUE_RE.search(value):
                raise RuntimeError(f"header {name!r} holds a control character")
            if name == b"content-length":
                self.chunked_encoding = False
                self.expected_content_length = int(value)
            elif name == b"connection" and value == b"close":
                self.keep_alive = False
                continue
            lines += (name, b": ", value, b"\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in _BODILESS:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if self.chunked_encoding:
            self.transport.write(head)
        else:
            self._head = head

    def _go_on(self, body: bytes, *, is_last: bool) -> None:
        if self.scope["method"] == "HEAD":
            body, self.expected_content_length = b"", 0
        elif self.chunked_encoding:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (is_last and self.expected_content_length):
                raise RuntimeError("the body is not as long as was said")
        head, self._head = self._head, b""
        self.transport.write(head + body)
        if is_last:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


class BoundedHttpProtocol(HttpToolsProtocol):
    """
    One HTTP connection.

    Args:
        settings: The bounds.
        edge: The application, for what is refused before it is asked.
        peers: The HTTP connections of each address.
        options: As uvicorn has them.
    """

    def __init__(self, settings: ServerSettings, edge: Edge, peers: PeerCounts, **options: Any) -> None:
        super().__init__(**options)
        self._settings = settings
        self._edge = edge
        self._peers = peers
        self._address: str | None = None
        """Under which it is counted, for as long as it is."""
        self._due_s: float | None = None
        """When the peer must have sent what is awaited of it, by the loop's time."""
        self._timer: asyncio.TimerHandle | None = None
        """Looks whether it has, then or before: one for many requests, since making one takes longer than most else that is done for them."""
        self._timer_s = 0.0
        self._is_in_head = True
        self._head_bytes = 0
        self._parsed_bytes = 0
        self._is_between = True
        """Whether the next byte begins a request."""
        self._fresh_bytes = 0
        """What came with the first bytes of a request; of one that begins behind another in the same piece that is not known."""
        self._answering: RequestResponseCycle | None = None
        self._unread_since_s: float | None = None
        """Since when each check found something that the peer has not taken."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._address = UNIX if self.client is None else self.client[0]
        self._peers.entered(self._address)
        self._allow(self._settings.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._timer is not None:
            self._timer.cancel()
        self._leave()
        if self._answering is not None and not self._answering.response_complete:
            # uvicorn tells the request that came last. With several on their way that is not the one being answered, which
            # would go on writing to nobody and fail.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
        self._fresh_bytes = len(data) if self._is_between else 0
        super().data_received(data)
        # Looked at only now: a short head and a long body may come in one piece.
        if self._is_in_head and self._head_bytes > self._settings.head_bytes_max and not self.transport.is_closing():
            self._refuse(HeadTooLarge(self._settings.head_bytes_max))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._is_between = True, False
        self._head_bytes, self._fresh_bytes = self._fresh_bytes, 0
        self._parsed_bytes = 0
        self._allow(self._settings.head_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._count_in_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_in_head(len(name) + len(value) + _HEADER_LINE_BYTES)
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def _count_in_head(self, size: int) -> None:
        """Headers count one by one, and trailers too: a head that came in one piece is no shorter for that."""
        self._parsed_bytes += size
        if self._parsed_bytes > self._settings.head_bytes_max:
            raise HeadTooLarge(self._settings.head_bytes_max)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._allow(self._settings.body_timeout_s)
        parser, scope = self.parser, self.scope
        scope["method"] = parser.get_method().decode("ascii")
        scope["http_version"] = version = parser.get_http_version()
        if parser.should_upgrade() and self._should_upgrade():
            return
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = url.path, url.query or b""
        before = self.cycle
        self.cycle = cycle = _Cycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_message_complete(self) -> None:
        self._is_between = True
        if self.cycle is not None and self.cycle.response_complete:  # the answer did not wait for all of it
            self._allow(self._settings.keep_alive_s)
        else:
            self._disarm()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        overload = self._overload()
        # Whether the process lives and is ready is always answered: a node with much to do must not be taken for a dead one.
        if overload is not None and cycle.scope["path"] not in _PROBES:
            app = self._edge.refusing(overload)
        super()._start_asgi_task(cycle, app)

    def _overload(self) -> TrafficRefused | None:
        """Why one more request is refused, if it is."""
        settings = self._settings
        if len(self.connections) > settings.requests_max or len(self.tasks) >= settings.requests_max:
            return TooManyRequests(settings.requests_max)
        if self._address is not None and self._peers.count(self._address) > settings.requests_per_address_max:
            return TooManyConnections(settings.requests_per_address_max, "from this address")
        return None

    def on_response_complete(self) -> None:
        self._unread_since_s = None  # each answer has its own time
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._is_between:
            self._allow(self._settings.keep_alive_s)

    def close_if_unread(self, now_s: float) -> None:
        """
        Cut a peer that does not read. To be called now and then.

        A connection that is closed counts too: it waits for its last bytes to be taken, and takes a place until then.
        """
        if not self.transport.get_write_buffer_size():
            self._unread_since_s = None
        elif self._unread_since_s is None:
            self._unread_since_s = now_s
        elif now_s - self._unread_since_s >= self._settings.answer_timeout_s:
            self.transport.abort()

    def handle_websocket_upgrade(self) -> None:
        self._disarm()
        problem = _handshake_problem(self.scope["method"], self.headers)
        if problem is not None:
            self._is_between = False  # the request is whole, and it is the one that is refused
            self._refuse(BadHandshake(problem))
            return
        try:
            self._edge.check_page(self.headers, self.client)
        except TrafficRefused as error:
            self._is_between = False
            self._refuse(error)
            return
        self._leave()  # from here on it is one of the sockets, and counted among them
        # Firefox asks to "keep-alive, Upgrade", and picows wants to be told of the one only.
        self.scope["headers"] = [
            (name, b"upgrade" if name == b"connection" else value) for name, value in self.scope["headers"]
        ]
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn does with bytes that it cannot make sense of, or that one of the callbacks here has refused."""
        is_too_large = self._parsed_bytes > self._settings.head_bytes_max
        self._refuse(HeadTooLarge(self._settings.head_bytes_max) if is_too_large else MalformedRequest())

    def _leave(self) -> None:
        if self._address is not None:
            self._peers.left(self._address)
            self._address = None

    def _allow(self, seconds: float) -> None:
        self._due_s = due_s = self.loop.time() + seconds
        if self._timer is None or self._timer_s > due_s:
            self._set_timer(due_s)

    def _disarm(self) -> None:
        self._due_s = None

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = at_s
        self._timer = self.loop.call_at(at_s, self._look_at_time)

    def _look_at_time(self) -> None:
        self._timer = None
        if self._due_s is None:
            return
        if self._due_s > self.loop.time():
            self._set_timer(self._due_s)
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, error: TrafficRefused) -> None:
        """Answer below the application, and end the connection: what follows could not be told apart from what came."""
        self._disarm()
        answering = self._answering
        if answering is not None and not answering.response_complete:
            is_about_it = answering is self.cycle and answering.more_body and not self._is_in_head
            if answering.response_started or not is_about_it:
                # The peer would take it for the answer that it waits for, or for part of the one that it reads.
                self.transport.close()
                return
        scope: dict[str, Any] = {"client": self.client}
        headers: list[tuple[bytes, bytes]] = []
        if not self._is_between:  # else what is known is about the request before
            headers = self.headers
            scope |= {"path": self.url.partition(b"?")[0].decode("ascii", "replace"), **self.scope}
        request_id, body = self._edge.refused_below(error, headers, scope)
        head = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            *(f"{name.decode()}: {value.decode()}" for name, value in self.server_state.default_headers),
            f"content-type: {PROBLEM_TYPE}",
            f"content-length: {len(body)}",
            f"{REQUEST_ID_HEADER}: {request_id}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*head, "\r\n"]).encode() + body)
        self.transport.close()


def _handshake_problem(method: str, headers: list[tuple[bytes, bytes]]) -> str | None:
    """What keeps a request for a WebSocket from being one."""
    given = dict(headers)
    if method != "GET":
        return f"its method is {method}"
    if given.get(b"sec-websocket-version") not in _SOCKET_VERSIONS:
        return "its version is not spoken here"
    try:
        key = base64.b64decode(given.get(b"sec-websocket-key", b""), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    return None if len(key) == _SOCKET_KEY_BYTES else "it has no valid key"


_BACKLOG = 2048
_GRACE_S = 0.25
_NS = 1_000_000_000


class HttpServer:
    """The listening half of a node."""

    def __init__(self, app: Edge, settings: ServerSettings, connections: Connections, clock: Clock) -> None:
        self._app = app
        self._settings = settings
        self._connections = connections
        self._peers = PeerCounts()
        self._clock = clock
        self._config = uvicorn.Config(
            app,
            http="httptools",
            ws=websocket_class(connections),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        self._config.load()
        self._state = ServerState()
        self._servers: list[asyncio.AbstractServer] = []
        self._unix_path: Path | None = None
        self._periodic: asyncio.Task[None] | None = None
        self.port = settings.port

    async def start(self, tls: ssl.SSLContext | None) -> None:
        """
        Begin to listen.

        Raises:
            AddressInUse: Another process listens there.
            AddressUnusable: The address cannot be listened on.
        """
        self._set_date()
        loop = asyncio.get_running_loop()
        in_time = None if tls is None else self._settings.head_timeout_s
        self._servers.append(
            await loop.create_server(
                self._protocol, sock=self._bound(), ssl=tls, backlog=_BACKLOG, ssl_handshake_timeout=in_time
            )
        )
        try:
            if self._settings.unix_path is not None:
                await self._listen_on(Path(self._settings.unix_path))
        except BaseException:
            await self.stop(0.0)
            raise
        self._periodic = loop.create_task(self._run_periodically(), name="tidings-http")

    def _protocol(self) -> asyncio.Protocol:
        # The settings that hold now: of the limits some can be reloaded, and then hold from the next connection on.
        return BoundedHttpProtocol(
            self._connections.settings,
            self._app,
            self._peers,
            config=self._config,
            server_state=self._state,
            app_state={},
        )

    def _bound(self) -> socket.socket:
        host, port = self._settings.host, self._settings.port
        address = f"{host}:{port}"
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise AddressUnusable(address, error.strerror or str(error)) from error
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
            bound.listen(_BACKLOG)
        except OSError as error:
            bound.close()
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(address) from error
            raise AddressUnusable(address, error.strerror or str(error)) from error
        bound.setblocking(False)
        self.port = bound.getsockname()[1]
        return bound

    async def _listen_on(self, path: Path) -> None:
        bound = await asyncio.to_thread(listening_socket, path, 0o600)
        server = await asyncio.get_running_loop().create_unix_server(self._protocol, sock=bound, backlog=_BACKLOG)
        self._servers.append(server)
        self._unix_path = path

    @property
    def request_count(self) -> int:
        """Requests being answered now."""
        return len(self._state.tasks)

    @property
    def connection_count(self) -> int:
        """HTTP connections open now; sockets of endpoints are not among them."""
        return len(self._state.connections)

    @property
    def refused(self) -> Mapping[str, int]:
        """Requests refused before any route was asked, by the error's code."""
        return self._app.refused

    def stop_listening(self) -> None:
        """Take no new connections."""
        for server in self._servers:
            server.close()
        if self._unix_path is not None:
            with contextlib.suppress(OSError):
                self._unix_path.unlink()
            self._unix_path = None

    async def stop(self, deadline_s: float) -> None:
        """Finish the requests that are being answered, within the deadline, and close all connections."""
        self.stop_listening()
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = list(self._state.tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=min(_GRACE_S, deadline_s))
            if late:
                # Those that wait for something to come would wait out the deadline.
                self._app.cancel_reads()
                _, late = await asyncio.wait(late, timeout=max(0.0, deadline_s - _GRACE_S))
            if late:
                # Those that wait for their peer to read go on when it is cut, and end by themselves.
                for connection in list(self._state.connections):
                    _abort(connection)
                _, late = await asyncio.wait(late, timeout=_GRACE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)
        for connection in list(self._state.connections):
            _abort(connection)
        if self._periodic is not None:
            self._periodic.cancel()
            await asyncio.gather(self._periodic, return_exceptions=True)
            self._periodic = None
        self._servers.clear()

    async def _run_periodically(self) -> None:
        """Once a second: the date of answers, and peers that do not read theirs."""
        while True:
            await self._clock.sleep(1.0)
            self._set_date()
            now_s = self._clock.monotonic()
            for connection in list(self._state.connections):
                if isinstance(connection, BoundedHttpProtocol):
                    connection.close_if_unread(now_s)

    def _set_date(self) -> None:
        text = formatdate(self._clock.now_ns() / _NS, usegmt=True)
        self._state.default_headers = [(b"date", text.encode())]


def _abort(connection: Any) -> None:
    transport = connection.transport
    if transport is not None:
        transport.abort()
