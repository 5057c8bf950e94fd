"""
Listening: uvicorn's HTTP protocol on a TCP port and, if wanted, a Unix socket; upgrades go to the doors.

uvicorn's own server is not used: its main loop wakes ten times a second, takes the process's signals, and ends the process where
we would rather raise. Its protocol and its configuration are.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import stat
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from tidings.core.clock import Clock

from .bounded_http import BoundedHttpProtocol
from .connections import Connections
from .edge import Edge
from .errors import AddressInUse, AddressUnusable
from .peers import PeerCounts
from .settings import ServerSettings
from .upgrade import upgrade_class

__all__ = ["HttpServer"]

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
            ws=upgrade_class(connections),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.keep_alive_s,
        )
        self._config.load()
        self._state = ServerState()
        self._servers: list[asyncio.AbstractServer] = []
        self._unix_path: Path | None = None
        self._housekeeper: asyncio.Task[None] | None = None
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
        self._housekeeper = loop.create_task(self._keep_house(), name="tidings-http")

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
        await asyncio.to_thread(_clear_stale, path)
        bound = socket.socket(socket.AF_UNIX)
        try:
            bound.bind(str(path))
            # Before anybody can connect: nobody listens yet.
            await asyncio.to_thread(path.chmod, 0o600)
            bound.setblocking(False)
            server = await asyncio.get_running_loop().create_unix_server(self._protocol, sock=bound, backlog=_BACKLOG)
        except OSError as error:
            bound.close()
            raise AddressUnusable(f"unix:{path}", error.strerror or str(error)) from error
        self._servers.append(server)
        self._unix_path = path

    @property
    def request_count(self) -> int:
        """Requests being answered now."""
        return len(self._state.tasks)

    @property
    def connection_count(self) -> int:
        """HTTP connections open now; sockets of doors are not among them."""
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
                self._app.dismiss()
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
        if self._housekeeper is not None:
            self._housekeeper.cancel()
            await asyncio.gather(self._housekeeper, return_exceptions=True)
            self._housekeeper = None
        self._servers.clear()

    async def _keep_house(self) -> None:
        """Once a second: the date of answers, and peers that do not read theirs."""
        while True:
            await self._clock.sleep(1.0)
            self._set_date()
            now_s = self._clock.monotonic()
            for connection in list(self._state.connections):
                if isinstance(connection, BoundedHttpProtocol):
                    connection.look(now_s)

    def _set_date(self) -> None:
        text = formatdate(self._clock.now_ns() / _NS, usegmt=True)
        self._state.default_headers = [(b"date", text.encode())]


def _abort(connection: Any) -> None:
    transport = connection.transport
    if transport is not None:
        transport.abort()


def _clear_stale(path: Path) -> None:
    """Take away a socket that a killed node left behind; never one that somebody listens on, never another kind of file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise AddressUnusable(f"unix:{path}", error.strerror or str(error)) from error
    if not stat.S_ISSOCK(mode):
        raise AddressUnusable(f"unix:{path}", "there is a file of another kind")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise AddressInUse(f"unix:{path}")
