"""
The steward's Unix socket: frames of ``wire.steward`` to and from connections of a ``SocketEndpoint``; and ``/happenings`` beside it.

The kernel says who is at the other end. Nothing here waits: what a peer has not taken is counted, and its subscription sends no more until
it has; frames that are not complete are counted over all peers, since each may be 64 MiB long. A peer that closes its sending end
after its requests still gets the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Final, cast

import msgspec

from tidings.access.endpoint import UNLIMITED_MEMORY, Peer
from tidings.log.settings import LogSettings
from tidings.steward.capabilities import PeerCredentials, load_policy
from tidings.steward.session import SocketEndpoint, StewardConnection, TokenEndpoint
from tidings.steward.settings import NodeLedgerSettings
from tidings.wire.steward.frames import FrameReader, FramingFault, framed

from .services import Services
from .unix_sockets import listening_socket

logger = logging.getLogger(__name__)

_SO_PEERGROUPS: Final = 59
_CREDENTIALS: Final = struct.Struct("3i")
_BACKLOG: Final = 1_024
_RECORD_BYTES_MIN: Final = 1_024
_LOST: Final = 1006
_CLOSED: Final = 1000


class StewardSocket:
    """
    Listens, and counts.

    Args:
        endpoint: What answers.
        path: Where the socket is.
        mode: Who may open it.
        partial_bytes_max: What all peers together may have sent of incomplete frames.
    """

    def __init__(self, endpoint: SocketEndpoint, path: Path, *, mode: int, partial_bytes_max: int) -> None:
        self.endpoint = endpoint
        self.partial_bytes_max = partial_bytes_max
        self.partial_bytes = 0
        self.framing_faults = 0
        """Connections closed because what they sent was no frame."""
        self._path = path
        self._mode = mode
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """
        Begin to listen.

        Raises:
            AddressInUse: Another process listens there.
            AddressUnusable: The path cannot be used.
        """
        bound = await asyncio.to_thread(listening_socket, self._path, self._mode)
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _FramedTransport(self), sock=bound, backlog=_BACKLOG
        )

    def stop_listening(self) -> None:
        """Take no new connections. Stopping twice is fine."""
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(OSError):
                self._path.unlink()

    async def stop(self, deadline_s: float) -> None:
        """Take no new connections, and end those there are within the deadline."""
        self.stop_listening()
        await self.endpoint.stop(deadline_s)


class _FramedTransport(asyncio.Protocol):
    """An ``access.endpoint.Transport`` over a Unix socket."""

    __slots__ = ("_connection", "_held_bytes", "_is_closing", "_reader", "_server", "_transport")

    def __init__(self, server: StewardSocket) -> None:
        self._server = server
        self._reader = FrameReader()
        self._held_bytes = 0
        self._is_closing = False
        self._transport: asyncio.Transport | None = None
        self._connection: StewardConnection | None = None

    # As an endpoint sees it

    memory = UNLIMITED_MEMORY

    def send(self, messages: Sequence[bytes]) -> None:
        if self._transport is not None and not self._is_closing:
            self._transport.write(b"".join(map(framed, messages)))

    def send_shared(self, prefixes: tuple[bytes, ...], suffix: bytes) -> None:
        self.send([prefix + suffix for prefix in prefixes])

    def ping(self, payload: bytes) -> None:
        """There are none: the kernel says when a process has ended."""

    def close(self, code: int, reason: str = "") -> None:
        if self._transport is not None and not self._is_closing:
            self._is_closing = True
            self._hold(0)
            self._transport.close()

    def authenticated(self) -> None:
        """The kernel has said who it is."""

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    @property
    def buffered_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # As the loop sees it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # With a mark of zero we hear when a peer has taken everything: ``drained`` depends on it.
        self._transport.set_write_buffer_limits(high=0)
        credentials = peer_credentials(transport.get_extra_info("socket"))
        peer = Peer("", {}, address="unix" if credentials is None else f"unix:pid {credentials.pid}")
        self._connection = self._server.endpoint.open_for(self, peer, credentials)

    def data_received(self, data: bytes) -> None:
        connection = self._connection
        if connection is None or self._is_closing or connection.is_output_only:
            return
        try:
            for message in self._reader.feed(data):
                connection.received(message)
        except FramingFault as error:
            self._fail(error)
            return
        self._hold(self._reader.held_bytes)
        if self._server.partial_bytes > self._server.partial_bytes_max:
            self._fail(FramingFault("all peers together have sent too much of frames that are not complete"))

    def eof_received(self) -> bool:
        connection = self._connection
        if connection is None or connection.is_output_only:
            return False
        try:
            self._reader.finish()
        except FramingFault as error:
            self._fail(error)
            return False
        return connection.finish_and_close()

    def pause_writing(self) -> None:
        """The peer has not taken everything; ``resume_writing`` follows."""

    def resume_writing(self) -> None:
        if self._connection is not None:
            self._connection.drained()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closing = True
        self._hold(0)
        connection, self._connection, self._transport = self._connection, None, None
        if connection is not None:
            connection.closed(_CLOSED if error is None else _LOST)

    # Within

    def _hold(self, held_bytes: int) -> None:
        self._server.partial_bytes += held_bytes - self._held_bytes
        self._held_bytes = held_bytes

    def _fail(self, fault: FramingFault) -> None:
        self._server.framing_faults += 1
        logger.warning("%s: %s; closed", self._server.endpoint.name, fault)
        self.close(_LOST)


def peer_credentials(connected: socket.socket) -> PeerCredentials | None:
    """Who is at the other end of a Unix socket; ``None`` where the kernel does not say."""
    kind = getattr(socket, "SO_PEERCRED", None)
    if kind is None:
        return None
    try:
        pid, uid, gid = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, kind, _CREDENTIALS.size))
    except (OSError, struct.error):
        return None
    try:
        found = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1_024)
        groups = frozenset(struct.unpack(f"{len(found) // 4}I", found))
    except (OSError, struct.error):
        groups = frozenset()
    return PeerCredentials(pid, uid, gid, groups)


def fitted_to(ledger: NodeLedgerSettings, log: LogSettings) -> NodeLedgerSettings:
    """The ledger's settings, its records no longer than the log takes them: a command that is too long is refused as that."""
    bytes_max = min(ledger.record_bytes_max, max(log.payload_bytes_max // 2, _RECORD_BYTES_MIN))
    return msgspec.structs.replace(ledger, record_bytes_max=bytes_max)


def steward_socket_of(services: Services) -> StewardSocket | None:
    """
    The socket over a node's parts, if the settings name one.

    Raises:
        SettingsError: The policy file cannot be used.
    """
    settings = services.settings.steward
    if settings.socket_path is None:
        return None
    policy_file = None if settings.policy_file is None else Path(settings.policy_file)
    endpoint = SocketEndpoint(
        services.ledger_service.operations,
        clock=services.clock,
        settings=settings,
        policy=load_policy(policy_file, os.geteuid()),
    )
    return StewardSocket(
        endpoint,
        Path(settings.socket_path).absolute(),
        mode=settings.socket_mode,
        partial_bytes_max=settings.partial_bytes_max,
    )


def happenings_endpoint(services: Services) -> TokenEndpoint:
    """The endpoint ``/happenings`` over a node's parts."""
    dispatcher, log, access = services.dispatcher, services.log, services.settings.access

    def settled() -> Awaitable[None] | None:
        # What was read is no newer than the log is now; once the access book is as new, rights are as of what was read.
        seq = log.position.seq
        return None if dispatcher.seq >= seq else dispatcher.reached(seq)

    return TokenEndpoint(
        services.ledger_service.operations,
        clock=services.clock,
        settings=services.settings.steward,
        book=services.book,
        authenticator=services.authenticator,
        is_open=access.is_open,
        settled=settled,
    )
