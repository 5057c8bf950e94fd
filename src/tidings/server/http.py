"""
Listen for HTTP on a TCP port and, if set, a Unix socket.

The protocol of one connection is ``http_protocol.HttpProtocol``; this module has what all share: TLS, the listening sockets, the date of
answers, the check for peers that do not read, and the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import socket
import ssl
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Final

from tidings.core.clock import Clock

from .connections import Connections
from .edge import Edge
from .errors import AddressInUse, AddressUnusable, CertificateUnusable
from .http_protocol import HttpContext, HttpProtocol
from .settings import ServerSettings
from .unix_sockets import listening_socket


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


_BACKLOG: Final = 2048
_GRACE_S: Final = 0.25
_NS: Final = 1_000_000_000
_TRIM_BYTES: Final = 16 << 20
_TRIM_INTERVAL_S: Final = 2.0
_malloc_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Of glibc; others return memory by themselves."""


class HttpServer:
    """The listening half of a node."""

    def __init__(self, app: Edge, settings: ServerSettings, connections: Connections, clock: Clock) -> None:
        self._app = app
        self._settings = settings
        self._clock = clock
        self._context = HttpContext(app, connections)
        self._servers: list[asyncio.AbstractServer] = []
        self._unix_path: Path | None = None
        self._periodic: asyncio.Task[None] | None = None
        self._peak_bytes = 0
        """The most that clients held since memory was trimmed."""
        self._trimmed_s = -_TRIM_INTERVAL_S
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

    def _protocol(self) -> HttpProtocol:
        return HttpProtocol(self._context)

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
        return len(self._context.tasks)

    @property
    def connection_count(self) -> int:
        """HTTP connections open now; sockets of endpoints are not among them."""
        return len(self._context.open)

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
        for connection in list(self._context.open):
            connection.shut_down()
        tasks = list(self._context.tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=min(_GRACE_S, deadline_s))
            if late:
                # Those that wait for something to come would wait out the deadline.
                self._app.cancel_reads()
                _, late = await asyncio.wait(late, timeout=max(0.0, deadline_s - _GRACE_S))
            if late:
                # Those that wait for their peer to read go on when it is cut, and end by themselves.
                for connection in list(self._context.open):
                    connection.abort()
                _, late = await asyncio.wait(late, timeout=_GRACE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)
        for connection in list(self._context.open):
            connection.abort()
        if self._periodic is not None:
            self._periodic.cancel()
            await asyncio.gather(self._periodic, return_exceptions=True)
            self._periodic = None
        self._servers.clear()

    async def _run_periodically(self) -> None:
        """Once a second: the date of answers, peers that do not read theirs, and memory that clients no longer hold."""
        while True:
            await self._clock.sleep(1.0)
            self._set_date()
            await self._trim_memory()
            now_s = self._clock.monotonic()
            for connection in list(self._context.open):
                connection.close_if_unread(now_s)

    async def _trim_memory(self) -> None:
        """Return freed memory to the system after clients have let go of much: the C library keeps it otherwise."""
        memory = self._context.memory
        held = sum(memory.held_bytes(is_authenticated=is_known) for is_known in (False, True))
        self._peak_bytes = max(self._peak_bytes, held)
        now_s = self._clock.monotonic()
        if (
            self._peak_bytes - held > _TRIM_BYTES
            and now_s - self._trimmed_s > _TRIM_INTERVAL_S
            and _malloc_trim is not None
        ):
            self._peak_bytes, self._trimmed_s = held, now_s
            await asyncio.to_thread(_malloc_trim, 0)

    def _set_date(self) -> None:
        text = formatdate(self._clock.now_ns() / _NS, usegmt=True)
        self._context.date_line = f"date: {text}\r\n".encode()
