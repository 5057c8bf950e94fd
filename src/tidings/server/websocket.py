"""
WebSockets of the node: picows takes over a connection from the HTTP protocol and carries an endpoint's messages.

``SocketProtocol`` is picows' protocol on the same socket, with its buffer charged. ``SocketTransport`` is one
connection: frames become messages for an endpoint's connection, messages become coalesced writes: what is sent within one iteration of the
event loop leaves in one. Nothing here waits. A peer that breaks the protocol gets a close code (1002 broken frames, 1007 text that is
not UTF-8, 1008 more than it may send, 1009 a message too long, 1013 a peer that does not read) and is cut if it does not answer.

``WSProtocol`` is no documented name of picows: its version is pinned, and ``tests/integration/test_node_sockets.py`` notices when it
changes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from picows import (
    WSAutoPingStrategy,
    WSFrame,
    WSListener,
    WSMsgType,
    WSTransport,
    WSUpgradeResponse,
    WSUpgradeResponseWithListener,
)
from picows.picows import WSProtocol  # type: ignore[attr-defined]  # not among its documented names

from tidings.access.endpoint import Allowance, Connection, Endpoint, EndReason, Peer

from .edge import UNIX
from .errors import MemoryExhausted
from .memory import MemoryAccount
from .settings import ServerSettings

if TYPE_CHECKING:
    from .connections import Connections

_TEXT_BYTE: Final = 0x81
_CLOSE_BYTE: Final = 0x88
_PONG_BYTE: Final = 0x8A
_PING_BYTE: Final = 0x89
PING: Final = b"\x89\x00"
CLOSE_REASON_BYTES_MAX: Final = 123


def frame(payload: bytes, first_byte: int = _TEXT_BYTE) -> bytes:
    """One unfragmented frame."""
    return _head(len(payload), first_byte) + payload


def _head(size: int, first_byte: int) -> bytes:
    if size < 126:
        return bytes((first_byte, size))
    if size < 65536:
        return bytes((first_byte, 126, size >> 8, size & 255))
    return bytes((first_byte, 127)) + size.to_bytes(8, "big")


def pong_frame(payload: bytes) -> bytes:
    """The answer to a ping."""
    return frame(payload, _PONG_BYTE)


def close_frame(code: int, reason: str = "") -> bytes:
    """A close frame; a reason that is too long for a control frame is cut at a letter."""
    text = reason.encode()[:CLOSE_REASON_BYTES_MAX].decode(errors="ignore").encode()
    return frame(code.to_bytes(2, "big") + text, _CLOSE_BYTE)


_SHARED_COUNT_MAX: Final = 64
"""Broadcasts within one iteration of the loop whose framing is remembered."""


class Framer:
    """
    Frames messages, and remembers its last work.

    A broadcast hands the same tuple of messages to one connection after another: it is framed once. Only a tuple is remembered;
    a list could hold something else by the next call. Messages that end in each connection's own suffix are framed once for each length of
    a suffix.
    """

    __slots__ = ("_blob", "_messages", "_shared")

    def __init__(self) -> None:
        self._messages: Sequence[bytes] = ()
        self._blob = b""
        # By the tuple's identity, which holds while the tuple is held, and the suffix's length.
        self._shared: dict[tuple[int, int], tuple[tuple[bytes, ...], list[bytes]]] = {}

    def framed(self, messages: Sequence[bytes]) -> bytes:
        """All messages as text frames, in order."""
        if messages is self._messages:
            return self._blob
        parts: list[bytes] = []
        for message in messages:
            parts.append(_head(len(message), _TEXT_BYTE))
            parts.append(message)
        blob = b"".join(parts)
        if type(messages) is tuple:
            self._messages, self._blob = messages, blob
        return blob

    def framed_with(self, prefixes: tuple[bytes, ...], suffix: bytes) -> bytes:
        """Each prefix with the suffix behind it as a text frame, in order."""
        if not suffix:
            return self.framed(prefixes)
        key = (id(prefixes), len(suffix))
        found = self._shared.get(key)
        if found is None:
            size = len(suffix)
            found = (prefixes, [_head(len(each) + size, _TEXT_BYTE) + each for each in prefixes])
            if len(self._shared) >= _SHARED_COUNT_MAX:
                self._shared.clear()
            self._shared[key] = found
        return suffix.join(found[1]) + suffix

    def forget(self) -> None:
        """Forget the last work, so that a large broadcast does not stay in memory."""
        self._messages, self._blob = (), b""
        self._shared.clear()


logger = logging.getLogger(__name__)

_PROTOCOL_ERROR: Final = 1002
_ABNORMAL: Final = 1006
_INVALID_TEXT: Final = 1007
_POLICY: Final = 1008
_TOO_BIG: Final = 1009
_INTERNAL: Final = 1011
_TRY_LATER: Final = 1013
_NO_CODE: Final = 1005
_SENDABLE_CODES: Final = frozenset((*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)))
"""The codes that a close frame may have, RFC 6455, 7.4."""
_FRAGMENT_BYTES: Final = 64
"""What a fragment of a message takes besides its bytes."""

_TEXT: Final = WSMsgType.TEXT
_BINARY: Final = WSMsgType.BINARY
_CONTINUATION: Final = WSMsgType.CONTINUATION
_PING: Final = WSMsgType.PING
_PONG: Final = WSMsgType.PONG
_CLOSE: Final = WSMsgType.CLOSE


class SocketTransport(WSListener):
    """
    An ``access.endpoint.Transport`` over picows.

    Args:
        connections: Counts it, flushes it, pings it.
        endpoint: What answers.
        peer: The request that asked for it.
        address: The peer's address, for the limit per address.
        memory: Its account, which has paid for the read buffer.
    """

    __slots__ = (
        *(
            "_close_code",
            "_connection",
            "_connections",
            "_controls",
            "_endpoint",
            "_fragments",
            "_fragments_bytes",
            "_fragments_held",
        ),
        *(
            "_fragments_type",
            "_is_watched",
            "_peer",
            "_pending",
            "_pending_bytes",
            "_transport",
            "_unsent_bytes",
            "_unsent_held",
        ),
        *(
            "address",
            "has_ping_out",
            "is_authenticated",
            "is_dropping",
            "is_heard",
            "memory",
            "number",
            "on_authenticated",
            "path",
            "unread_bytes",
        ),
    )

    def __init__(
        self, connections: Connections, endpoint: Endpoint[Any], peer: Peer, address: str, memory: MemoryAccount
    ) -> None:
        self._connections = connections
        self._endpoint: Endpoint[Any] | None = endpoint
        self._peer: Peer | None = peer
        self._connection: Connection[Any] | None = None
        self._transport: Any = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._fragments: list[bytes] | None = None
        self._fragments_bytes = self._fragments_held = 0
        self._fragments_type: WSMsgType = _TEXT
        self._is_watched = False
        self._unsent_bytes = 0
        """What the peer had not taken at the last sweep; 0 if it has taken everything since."""
        self._close_code: int | None = None
        """Set when a close frame was sent or received."""
        self._controls = Allowance(connections.settings.unauthenticated_messages_max)
        self.memory: Final = memory
        self._unsent_held = 0
        """Bytes charged that the peer has not taken."""
        self.unread_bytes = 0
        """What came and is no whole frame yet."""
        self.is_dropping = False
        """Whether what the peer sends is dropped: the connection is being closed, and its frames are not read."""
        self.is_authenticated = False
        self.on_authenticated: Callable[[], None] | None = None
        """Called once, when the peer has authenticated."""
        self.number = 0
        """Which of the node's connections it is; counted from when the node started."""
        self.address = address
        self.path = peer.path
        self.is_heard = True
        self.has_ping_out = False

    # As an endpoint sees it

    def send(self, messages: Sequence[bytes]) -> None:
        if self._close_code is not None or not messages:
            return
        self._queue(self._connections.framer.framed(messages))
        self._connections.messages_out += len(messages)

    def send_shared(self, prefixes: tuple[bytes, ...], suffix: bytes) -> None:
        if self._close_code is not None or not prefixes:
            return
        self._queue(self._connections.framer.framed_with(prefixes, suffix))
        self._connections.messages_out += len(prefixes)

    def ping(self, payload: bytes) -> None:
        if self._close_code is None:
            self._queue(frame(payload, _PING_BYTE))

    def close(self, code: int, reason: str = "") -> None:
        if self._close_code is not None:
            return
        self._queue(close_frame(code, reason))
        self._close_code = code
        # Nothing more is taken from the peer; but its own close frame must be read, or the connection lingers.
        self.resume_reading()
        self._connections.close_soon(self)

    def authenticated(self) -> None:
        if self.is_authenticated:
            return
        self.is_authenticated = True
        self._controls.set_rate(self._connections.settings.control_frames_per_s_max, self._connections.now_s())
        self._connections.authenticated(self)
        if self._connection is not None:
            self._connections.admitted(self)
        if self.on_authenticated is not None:
            self.on_authenticated()
            self.on_authenticated = None

    def pause_reading(self) -> None:
        if self._close_code is None and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    @property
    def buffered_bytes(self) -> int:
        size = self._pending_bytes
        if self._transport is not None and not self._transport.is_closing():
            size += self._transport.get_write_buffer_size()
        connection = self._connection
        if size and (connection is None or size >= connection.endpoint.unsent_bytes_max):
            self._is_watched = True
        return size

    # As its owner sees it

    def flush(self) -> None:
        """Hand what is pending to the kernel, in one write."""
        pending, self._pending, size, self._pending_bytes = self._pending, [], self._pending_bytes, 0
        transport = self._transport
        if not pending or transport is None or transport.is_closing():
            return
        self._connections.bytes_out += size
        transport.write(pending[0] if len(pending) == 1 else b"".join(pending))
        left = transport.get_write_buffer_size()
        if (left or self._unsent_held) and not self._hold_unsent(left):
            return
        settings = self._connections.settings
        is_known = self.is_authenticated
        if left > (settings.write_buffer_bytes_max if is_known else settings.unauthenticated_bytes_max):
            if self._close_code is None:
                logger.warning("%s: %d bytes wait for a peer that does not read; closed", self.address, left)
                self.too_slow()
        elif not left and self._is_watched:
            self._tell_drained()

    def _hold_unsent(self, size: int) -> bool:
        before = self._unsent_held
        if size > before and not self.hold(size - before):
            return False
        self.memory.release(max(0, before - size))
        self._unsent_held = size
        return True

    def is_stuck(self) -> bool:
        """Whether the peer has taken nothing since this was last asked, and there was something to take."""
        transport = self._transport
        unsent = 0 if transport is None or transport.is_closing() else transport.get_write_buffer_size()
        before, self._unsent_bytes = self._unsent_bytes, unsent
        return 0 < before <= unsent

    def too_slow(self) -> None:
        """Close the connection of a peer that does not read, in its endpoint's own words."""
        self._connections.delivery_failed(self, "too_slow")
        if self._connection is not None:
            self._connection.end(EndReason.TOO_SLOW)
        self.close(_TRY_LATER, "too slow")

    @property
    def settings(self) -> ServerSettings:
        """The settings that hold now."""
        return self._connections.settings

    @property
    def identity(self) -> str | None:
        """Whose connection it is, once that is known."""
        rights = None if self._connection is None else self._connection.rights
        return None if rights is None else rights.subject

    @property
    def is_open(self) -> bool:
        """Whether nobody has begun to close it."""
        return self._close_code is None

    def identify(self) -> None:
        """Charge what the connection holds to its identity."""
        try:
            self.memory.identify(self.identity)
        except MemoryExhausted as error:
            self.exhausted(error)

    def exhausted(self, error: MemoryExhausted) -> None:
        """Close the connection of a peer that makes the node hold as much memory as it may."""
        if self._close_code is None:
            logger.warning("%s: %s; closed", self.address, error.describe())
            if self._connection is not None:
                self._connection.end(EndReason.FULL, error.describe())
            self.close(_TRY_LATER, error.code)
        self.is_dropping = True

    def hold(self, size: int) -> bool:
        """Charge memory for the peer; without room the connection is closed."""
        try:
            self.memory.hold(size)
        except MemoryExhausted as error:
            self.exhausted(error)
            return False
        return True

    def deny(self, reason: str) -> None:
        """Close the connection of a peer that is kept out, in its endpoint's own words."""
        if self._connection is not None:
            self._connection.end(EndReason.DENIED, reason)
        self.close(_TRY_LATER, reason)

    def refuse(self, reason: str) -> None:
        """Close the connection of a peer that goes beyond what it may do: one offence, however much more of it is under way."""
        if self._close_code is None:
            self._connections.offended(self)
            self.close(_POLICY, reason)

    def probe(self) -> None:
        """Ask whether the peer is there."""
        self.has_ping_out = True
        self._queue(PING)

    @property
    def upgrade_headers(self) -> Mapping[str, str]:
        """What its endpoint has the answer to the upgrade say."""
        return {} if self._endpoint is None else self._endpoint.upgrade_headers

    def abandon(self) -> None:
        """It was admitted, and is gone without having been opened."""
        self.memory.close()
        if self._endpoint is not None and self._peer is not None:
            self._endpoint.abandon(self._peer)
            self._endpoint = self._peer = None

    def cut(self) -> None:
        """End the connection without another word."""
        if self._transport is not None:
            self._transport.abort()

    def fail(self, reason: str) -> None:
        """Something of ours broke: say so, and end the connection."""
        self.close(_INTERNAL, reason)

    # As picows sees it

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport.underlying_transport
        # With a mark of zero we hear of every byte that a peer has not taken, and when it has: ``drained`` depends on it.
        self._transport.set_write_buffer_limits(high=0)
        endpoint, peer = self._endpoint, self._peer
        assert endpoint is not None
        assert peer is not None
        self._endpoint = self._peer = None
        self._connections.entered(self)
        try:
            self._connection = endpoint.open(self, peer)
        except Exception:
            logger.exception("the endpoint %s could not open a connection", self.path)
            self.fail("the endpoint failed")
        if self.is_authenticated:  # by its endpoint, before the upgrade
            self._connections.admitted(self)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        self.is_heard = True
        self.unread_bytes = frame.tail_size
        if transport.is_close_frame_sent:
            return  # picows has sent a close frame for frames that it cannot read; it continues to read them all the same
        kind = frame.msg_type
        if frame.rsv1 or frame.rsv2 or frame.rsv3:
            self.close(_PROTOCOL_ERROR, "reserved bits are set, and no extension was agreed")
        elif kind is _TEXT and frame.fin and self._fragments is None:
            self._take(frame.get_payload_as_bytes(), is_text=True)
        elif kind in (_TEXT, _BINARY, _CONTINUATION):
            self._take_data(frame, kind)
        elif kind in (_PING, _PONG):
            if self._controls.take(self._connections.now_s()) != 0.0:
                self.refuse("too many pings")
            elif self._close_code is None:
                payload = frame.get_payload_as_bytes()
                if kind is _PING:
                    self._queue(pong_frame(payload))
                elif self._connection is not None:
                    self._tell(self._connection.ponged, payload)
        elif kind is _CLOSE:
            self._take_close(frame)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        code = self._close_code
        if code is None:
            # picows itself closes on frames that it cannot read.
            handshake: Any = transport.close_handshake
            code = _ABNORMAL if handshake is None or handshake.sent is None else int(handshake.sent.code)
        self._close_code = code
        self._pending, self._pending_bytes = [], 0
        self._fragments = None
        self.memory.close()
        self._connections.left(self, code)
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.closed(code)
            except Exception:
                logger.exception("a connection of %s failed when it had ended", self.path)

    def pause_writing(self) -> None:
        """The peer has not taken everything; ``resume_writing`` follows."""

    def resume_writing(self) -> None:
        self._unsent_bytes = 0
        self._hold_unsent(0)
        if self._is_watched:
            self._tell_drained()

    # Within

    def _queue(self, blob: bytes) -> None:
        if not self._pending:
            self._connections.flush_soon(self)
        self._pending.append(blob)
        self._pending_bytes += len(blob)

    def _take_data(self, frame: WSFrame, kind: WSMsgType) -> None:
        """A frame that is a whole binary message, or a part of any message."""
        is_part_of_one = self._fragments is not None
        if (kind is _CONTINUATION) != is_part_of_one:
            self.close(_PROTOCOL_ERROR, "frames of a message out of order")
            return
        if frame.fin and not is_part_of_one:
            self._take(frame.get_payload_as_bytes(), is_text=False)
            return
        if self._fragments is None:
            self._fragments, self._fragments_bytes, self._fragments_type = [], 0, kind
        self._fragments_bytes += frame.payload_size
        # Empty fragments cost memory too: each counts as some bytes.
        if self._fragments_bytes + _FRAGMENT_BYTES * len(self._fragments) > self.settings.message_bytes_max:
            self._drop_fragments()
            self.close(_TOO_BIG, "the message is too long")
            return
        size = frame.payload_size + _FRAGMENT_BYTES
        if not self.hold(size):
            self._drop_fragments()
            return
        self._fragments_held += size
        self._fragments.append(frame.get_payload_as_bytes())
        if frame.fin:
            message = b"".join(self._fragments)
            self._drop_fragments()
            self._take(message, is_text=self._fragments_type is _TEXT)

    def _drop_fragments(self) -> None:
        self._fragments = None
        self.memory.release(self._fragments_held)
        self._fragments_held = 0

    def _take(self, message: bytes, *, is_text: bool) -> None:
        if self._close_code is not None:
            return
        connections = self._connections
        connections.messages_in += 1
        connections.bytes_in += len(message)
        if is_text and not message.isascii() and not _is_utf8(message):
            self.close(_INVALID_TEXT, "the text is not UTF-8")
        elif self._connection is not None:
            self._tell(self._connection.received if is_text else self._connection.received_binary, message)

    def _tell(self, hook: Callable[[bytes], None], payload: bytes) -> None:
        try:
            hook(payload)
        except Exception:
            logger.exception("a connection of %s failed", self.path)
            self.fail("the endpoint failed")

    def _take_close(self, frame: WSFrame) -> None:
        code = int.from_bytes(frame.get_payload_as_bytes()[:2]) if frame.payload_size >= 2 else _NO_CODE
        if self._close_code is None:
            if frame.payload_size < 2:
                reply = 1000
            else:
                reply = code = code if code in _SENDABLE_CODES else _PROTOCOL_ERROR
            self._queue(close_frame(reply))
            self._close_code = code
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def _tell_drained(self) -> None:
        self._is_watched = False
        if self._close_code is None and self._connection is not None:
            # Not here: this may be the middle of the connection's own sending.
            asyncio.get_running_loop().call_soon(self._drained)

    def _drained(self) -> None:
        if self._connection is None or self._close_code is not None:
            return
        try:
            self._connection.drained()
        except Exception:
            logger.exception("a connection of %s failed", self.path)
            self.fail("the endpoint failed")


def _is_utf8(message: bytes) -> bool:
    try:
        message.decode()
    except UnicodeDecodeError:
        return False
    return True


_HANDSHAKE_TIMEOUT_S: Final = 5
_HANDSHAKE: Final = (
    b"GET / HTTP/1.1\r\nHost: node\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\n\r\n"
)


class _Quiet:
    """
    What picows takes for its logger: it logs every connection, and calls a peer's broken frame an error of ours.

    Here both are details. And not being a real logger, it keeps picows from making one for each connection.
    """

    __slots__ = ()

    def isEnabledFor(self, level: int) -> bool:
        return level >= logging.WARNING

    def debug(self, msg: str, *args: object) -> None:
        _picows.debug(msg, *args)

    info = warning = error = debug

    def log(self, level: int, msg: str, *args: object) -> None:
        _picows.debug(msg, *args)

    def exception(self, msg: str, *args: object) -> None:
        _picows.exception(msg, *args)


_QUIET: Final = _Quiet()
_picows: Final = logging.getLogger(f"{__name__}.picows")


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


def peer_of(scope: Mapping[str, Any]) -> Peer:
    """The request of an upgrade, as an endpoint sees it."""
    client = scope["client"]
    address = UNIX if client is None else f"{client[0]}:{client[1]}"
    headers = _combined((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    return Peer(scope["path"], headers, scope["query_string"].decode("latin-1"), address)


def _combined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers by name; one that came several times is one that says it all, so that none hides behind another."""
    combined: dict[str, str] = {}
    for name, value in headers:
        separator = "; " if name == "cookie" else ", "
        combined[name] = f"{combined[name]}{separator}{value}" if name in combined else value
    return combined


class SocketProtocol(WSProtocol):  # type: ignore[misc]  # compiled, without types
    """
    The connection of one ``SocketTransport``: picows' protocol, whose read buffer is charged to the connection's account.

    picows doubles its buffer before a message fits no more, and keeps it so; the same is reckoned here.

    Args:
        owner: Whose connection it is; it was admitted.
        headers: Of the answer to the handshake.
    """

    def __init__(self, owner: SocketTransport, headers: Mapping[str, str]) -> None:
        settings = owner.settings
        super().__init__(
            None,
            None,
            False,
            lambda _: WSUpgradeResponseWithListener(WSUpgradeResponse.create_101_response(dict(headers)), owner),
            _QUIET,
            True,
            _HANDSHAKE_TIMEOUT_S,
            False,
            20,
            20,
            WSAutoPingStrategy.PING_WHEN_IDLE,
            False,
            settings.message_bytes_max,
            None,
            settings.read_buffer_bytes,
        )
        self._socket = owner
        self._size = settings.read_buffer_bytes
        self._bytes_left = settings.unauthenticated_bytes_max
        """What may come before the peer has authenticated."""

    def begin(self, transport: asyncio.Transport, key: bytes, rest: bytes) -> None:
        """Answer the handshake with this key, and take what came behind it."""
        is_unix = transport.get_extra_info("socket").family == socket.AF_UNIX
        self.connection_made(_UnixTransport(transport) if is_unix else transport)
        transport.set_protocol(self)
        # Of the request only what picows needs: it takes fewer and shorter headers than an HTTP request may have.
        self._feed(_HANDSHAKE % key)
        self._socket.unread_bytes = 0
        self._feed(rest)

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            buffer = self.get_buffer(-1)
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            rest = rest[size:]
            self.buffer_updated(size)

    def buffer_updated(self, nbytes: int) -> None:
        owner = self._socket
        if owner.is_dropping:  # what comes next overwrites it
            if self.get_buffer(-1)[0] == _CLOSE_BYTE:  # it closes too: nothing is left to wait for
                self.transport.underlying_transport.close()
            return
        size, unread = self._size, owner.unread_bytes + nbytes
        if (unread * 100 // size > 90 or size - unread <= 256) and not self._grow():
            return
        owner.unread_bytes = unread
        super().buffer_updated(nbytes)
        if self.transport.is_close_frame_sent:  # by picows, for frames that it cannot read
            owner.is_dropping = True
        if not owner.is_authenticated:
            self._bytes_left -= nbytes
            if self._bytes_left < 0:
                owner.refuse("too much was sent before a token was shown")

    def _grow(self) -> bool:
        if not self._socket.hold(self._size):
            return False
        self._size *= 2
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._socket.abandon()
