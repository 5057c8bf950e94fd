"""
Hands WebSocket upgrades from uvicorn's HTTP protocol to picows, on the same socket and port.

uvicorn makes an object of the class that it is given as ``ws``, calls ``connection_made`` and ``data_received`` with the request's
head, and installs it on the transport. Here that object feeds the head to picows' own protocol and then puts that protocol in its
place. ``WSProtocol`` is no documented name of picows: its version is pinned, and ``tests/integration/test_node_sockets.py``
notices when it changes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any, Final
from urllib.parse import unquote

import orjson
from picows import (
    WSAutoPingStrategy,
    WSUpgradeRequest,
    WSUpgradeResponse,
    WSUpgradeResponseWithListener,
)
from picows.picows import WSProtocol  # type: ignore[attr-defined]  # not among its documented names

from tidings.wire.transport import Upgrade

from .connections import Connections
from .errors import TrafficRefused
from .peers import UNIX
from .problems import PROBLEM_TYPE, problem_of
from .request_ids import REQUEST_ID_HEADER, acceptable_id, log_request
from .sockets import SocketTransport

__all__ = ["upgrade_class"]

_HANDSHAKE_TIMEOUT_S: Final = 5


class _Quiet:
    """
    What picows takes for its logger: it tells of every connection, and calls a peer's broken frame an error of ours.

    Here both are details. And not being a real logger, it keeps picows from making one for each connection.
    """

    __slots__ = ()

    def isEnabledFor(self, level: int) -> bool:
        return level >= logging.WARNING

    def debug(self, msg: str, *args: object) -> None:
        _words.debug(msg, *args)

    info = warning = error = debug

    def log(self, level: int, msg: str, *args: object) -> None:
        _words.debug(msg, *args)

    def exception(self, msg: str, *args: object) -> None:
        _words.exception(msg, *args)


_QUIET: Final = _Quiet()
_words: Final = logging.getLogger(f"{__name__}.picows")


class _UnixSocket:
    """A Unix socket for somebody who insists on setting TCP's options."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner

    def fileno(self) -> int:
        return self._inner.fileno()

    def setsockopt(self, level: int, name: int, value: int) -> None:
        if level != socket.IPPROTO_TCP:
            self._inner.setsockopt(level, name, value)

    def getsockopt(self, level: int, name: int) -> int:
        return 0 if level == socket.IPPROTO_TCP else self._inner.getsockopt(level, name)


class _UnixTransport:
    """A transport over a Unix socket, seen as picows wants it."""

    def __init__(self, inner: asyncio.Transport) -> None:
        self._inner = inner

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        found = self._inner.get_extra_info(name, default)
        return _UnixSocket(found) if name == "socket" else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def upgrade_class(connections: Connections) -> type[asyncio.Protocol]:
    """The class that uvicorn is given as ``ws``."""
    settings = connections.settings

    class HandOver(asyncio.Protocol):
        """Between uvicorn and picows, for one connection."""

        def __init__(self, config: object, server_state: object, app_state: object) -> None:
            self._protocol = WSProtocol(
                None,
                None,
                False,
                self._listener,
                _QUIET,
                True,
                _HANDSHAKE_TIMEOUT_S,
                False,
                20,
                20,
                WSAutoPingStrategy.PING_WHEN_IDLE,
                False,
                connections.settings.message_bytes_max,
                None,
                settings.read_buffer_bytes,
            )
            self._transport: Any = None
            self._socket: SocketTransport | None = None
            self._bytes_left = -1
            self._address = ""
            self._peer = ""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            peer = transport.get_extra_info("peername")
            if isinstance(peer, tuple):
                self._address, self._peer = str(peer[0]), f"{peer[0]}:{peer[1]}"
            else:
                self._address = self._peer = UNIX
            self._transport = transport
            is_unix = transport.get_extra_info("socket").family == socket.AF_UNIX
            self._protocol.connection_made(_UnixTransport(transport) if is_unix else transport)  # type: ignore[arg-type]

        def data_received(self, data: bytes) -> None:
            protocol = self._protocol
            rest = memoryview(data)
            if self._socket is not None and not self._socket.limits.is_authenticated:
                # What a peer sends before its token passes through here, so that no buffer of picows' can grow by it.
                rest = rest[: self._bytes_left]
                self._bytes_left -= len(data)
            while rest:
                buffer = protocol.get_buffer(-1)
                size = min(len(buffer), len(rest))
                buffer[:size] = rest[:size]
                rest = rest[size:]
                protocol.buffer_updated(size)
            if self._socket is None:  # refused; picows says so
                asyncio.get_running_loop().call_soon(self._install)
            elif self._bytes_left < 0 and not self._socket.limits.is_authenticated:
                self._socket.refuse("too much was sent before a token was shown")
                self._bytes_left = 0

        def _install_soon(self) -> None:
            # Later: uvicorn installs this object when it has handed over the head, and what is being read has to be taken first.
            asyncio.get_running_loop().call_soon(self._install)

        def _install(self) -> None:
            if not self._transport.is_closing():
                self._transport.set_protocol(self._protocol)

        def _listener(self, request: WSUpgradeRequest) -> WSUpgradeResponseWithListener:
            path, _, query = request.path.decode("latin-1").partition("?")
            headers = {name.lower(): value for name, value in request.headers.items()}
            upgrade = Upgrade(unquote(path), headers, query, self._peer)
            given = headers.get(REQUEST_ID_HEADER)
            request_id = acceptable_id(None if given is None else given.encode(errors="replace"))
            named = {"X-Request-Id": request_id}
            try:
                listener = connections.admit(upgrade, self._address)
            except TrafficRefused as error:
                return WSUpgradeResponseWithListener(self._refusal(error, upgrade.path, request_id, named), None)
            self._socket = listener
            self._bytes_left = connections.settings.unauthenticated_bytes_max
            listener.on_authenticated = self._install_soon
            return WSUpgradeResponseWithListener(WSUpgradeResponse.create_101_response(named), listener)

        def _refusal(
            self, error: TrafficRefused, path: str, request_id: str, named: dict[str, str]
        ) -> WSUpgradeResponse:
            body = orjson.dumps(problem_of(error, error.status, request_id))
            if connections.settings.access_log:
                bytes_out = len(body)
                log_request(
                    "GET", path, error.status, 0.0, peer=self._address, request_id=request_id, bytes_out=bytes_out
                )
            named = {"Content-Type": PROBLEM_TYPE, **named}
            refusal: WSUpgradeResponse = WSUpgradeResponse.create_error_response(error.status, body, named)
            return refusal

        def eof_received(self) -> bool | None:
            return bool(self._protocol.eof_received())

        def connection_lost(self, exc: Exception | None) -> None:
            self._protocol.connection_lost(exc)

        def pause_writing(self) -> None:
            self._protocol.pause_writing()

        def resume_writing(self) -> None:
            self._protocol.resume_writing()

    return HandOver
