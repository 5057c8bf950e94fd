"""
One WebSocket connection: frames from picows become messages for a conversation, messages become coalesced writes.

What a conversation sends within one turn of the loop leaves in one write. Nothing here waits. A peer that breaks the protocol
is told with a close code (1002 broken frames, 1007 text that is not UTF-8, 1008 more than it may send, 1009 a message too long, 1013 a
peer that does not read) and cut if it does not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from picows import WSFrame, WSListener, WSMsgType, WSTransport

from tidings.wire.transport import Conversation, Door, Upgrade

from .connection_limits import ConnectionLimits
from .framing import PING, close_frame, pong_frame

if TYPE_CHECKING:
    from .connections import Connections

__all__ = ["SocketTransport"]

logger = logging.getLogger(__name__)

_PROTOCOL_ERROR: Final = 1002
_ABNORMAL: Final = 1006
_INVALID_TEXT: Final = 1007
_POLICY: Final = 1008
_TOO_BIG: Final = 1009
_INTERNAL: Final = 1011
_TRY_LATER: Final = 1013
_NO_CODE: Final = 1005
_THROTTLE_S: Final = 0.05

_TEXT: Final = WSMsgType.TEXT
_BINARY: Final = WSMsgType.BINARY
_CONTINUATION: Final = WSMsgType.CONTINUATION
_PING: Final = WSMsgType.PING
_PONG: Final = WSMsgType.PONG
_CLOSE: Final = WSMsgType.CLOSE


class SocketTransport(WSListener):
    """
    A ``wire.transport.Transport`` over picows.

    Args:
        connections: Whose it is: counts it, flushes it, pings it.
        door: Who answers.
        upgrade: The request that asked for it.
        address: The peer's address, for the limit per address.
    """

    __slots__ = (
        "_close_code",
        "_connections",
        "_conversation",
        "_door",
        "_fragments",
        "_fragments_bytes",
        "_fragments_type",
        "_held",
        "_is_paused",
        "_is_throttled",
        "_is_watched",
        "_pending",
        "_pending_bytes",
        "_transport",
        "_unsent_bytes",
        "_upgrade",
        "address",
        "has_ping_out",
        "is_heard",
        "limits",
        "on_authenticated",
        "path",
    )

    def __init__(self, connections: Connections, door: Door, upgrade: Upgrade, address: str) -> None:
        self._connections = connections
        self._door: Door | None = door
        self._upgrade: Upgrade | None = upgrade
        self._conversation: Conversation | None = None
        self._transport: Any = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._fragments: list[bytes] | None = None
        self._fragments_bytes = 0
        self._fragments_type: WSMsgType = _TEXT
        self._held: deque[bytes] | None = None
        self._is_paused = False
        self._is_throttled = False
        self._is_watched = False
        self._unsent_bytes = 0
        """What the peer had not taken at the last sweep; 0 if it has taken everything since."""
        self._close_code: int | None = None
        """Set when a goodbye was said, by us or by the peer."""
        self.limits = ConnectionLimits(connections.settings, connections.now_s())
        self.on_authenticated: Callable[[], None] | None = None
        """Called once, when the peer has shown a token."""
        self.address = address
        self.path = upgrade.path
        self.is_heard = True
        self.has_ping_out = False

    # As a door sees it

    def send(self, messages: Sequence[bytes]) -> None:
        if self._close_code is not None or not messages:
            return
        self._queue(self._connections.framer.framed(messages))
        self._connections.messages_out += len(messages)

    def close(self, code: int, reason: str = "") -> None:
        if self._close_code is not None:
            return
        self._queue(close_frame(code, reason))
        self._close_code = code
        # Nothing more is taken from the peer; but its own goodbye must be heard, or the connection lingers.
        self._held = None
        self._is_throttled = False
        self._is_paused = True
        self.resume_reading()
        self._connections.close_soon(self)

    def authenticated(self) -> None:
        if self.limits.is_authenticated:
            return
        self.limits.authenticated(self._connections.settings, self._connections.now_s())
        self._connections.authenticated(self)
        if self.on_authenticated is not None:
            self.on_authenticated()
            self.on_authenticated = None

    def pause_reading(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._stop_reading()

    def resume_reading(self) -> None:
        if not self._is_paused:
            return
        self._is_paused = False
        self._go_on_reading()

    @property
    def buffered_bytes(self) -> int:
        size = self._pending_bytes
        if self._transport is not None and not self._transport.is_closing():
            size += self._transport.get_write_buffer_size()
        if size:
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
        settings = self._connections.settings
        is_known = self.limits.is_authenticated
        if left > (settings.write_buffer_bytes_max if is_known else settings.unauthenticated_bytes_max):
            if self._close_code is None:
                logger.warning("%s: %d bytes wait for a peer that does not read; closed", self.address, left)
                self.close(_TRY_LATER, "too slow")
        elif not left and self._is_watched:
            self._tell_drained()

    def is_stuck(self) -> bool:
        """Whether the peer has taken nothing since this was last asked, and there was something to take."""
        transport = self._transport
        unsent = 0 if transport is None or transport.is_closing() else transport.get_write_buffer_size()
        before, self._unsent_bytes = self._unsent_bytes, unsent
        return 0 < before <= unsent

    def too_slow(self) -> None:
        """Close the connection of a peer that does not read."""
        self.close(_TRY_LATER, "too slow")

    def refuse(self, reason: str) -> None:
        """Close the connection of a peer that goes beyond what it may do."""
        self.close(_POLICY, reason)

    def ping(self) -> None:
        """Ask whether the peer is there."""
        self.has_ping_out = True
        self._queue(PING)

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
        # A mark of zero tells of every byte that a peer has not taken, and when it has: ``drained`` depends on it.
        self._transport.set_write_buffer_limits(high=0)
        door, upgrade = self._door, self._upgrade
        assert door is not None
        assert upgrade is not None
        self._door = self._upgrade = None
        self._connections.entered(self)
        try:
            self._conversation = door.open(self, upgrade)
        except Exception:
            logger.exception("the door at %s could not begin a conversation", self.path)
            self.fail("the door failed")

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        self.is_heard = True
        if transport.is_close_frame_sent:
            return  # picows has said goodbye to frames that it cannot read; it goes on reading them all the same
        kind = frame.msg_type
        if frame.rsv1 or frame.rsv2 or frame.rsv3:
            self.close(_PROTOCOL_ERROR, "reserved bits are set, and no extension was agreed")
        elif kind is _TEXT and frame.fin and self._fragments is None:
            self._take(frame.get_payload_as_bytes(), is_text=True)
        elif kind in (_TEXT, _BINARY, _CONTINUATION):
            self._take_data(frame, kind)
        elif kind in (_PING, _PONG):
            if not self.limits.take_control(self._connections.now_s()):
                self.close(_POLICY, "too many pings")
            elif kind is _PING and self._close_code is None:
                self._queue(pong_frame(frame.get_payload_as_bytes()))
        elif kind is _CLOSE:
            self._take_close(frame)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        code = self._close_code
        if code is None:
            # picows itself says goodbye to frames that it cannot read.
            handshake: Any = transport.close_handshake
            code = _ABNORMAL if handshake is None or handshake.sent is None else int(handshake.sent.code)
        self._close_code = code
        self._pending, self._pending_bytes = [], 0
        self._held = self._fragments = None
        self._connections.left(self, code)
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            try:
                conversation.closed(code)
            except Exception:
                logger.exception("a conversation at %s failed while it was told that it ended", self.path)

    def pause_writing(self) -> None:
        """The peer has not taken everything; ``resume_writing`` follows."""

    def resume_writing(self) -> None:
        self._unsent_bytes = 0
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
        if self._fragments_bytes + 64 * len(self._fragments) > self._connections.settings.message_bytes_max:
            self._fragments = None
            self.close(_TOO_BIG, "the message is too long")
            return
        self._fragments.append(frame.get_payload_as_bytes())
        if frame.fin:
            message = b"".join(self._fragments)
            self._fragments = None
            self._take(message, is_text=self._fragments_type is _TEXT)

    def _take(self, message: bytes, *, is_text: bool) -> None:
        if self._close_code is not None:
            return
        connections = self._connections
        connections.messages_in += 1
        connections.bytes_in += len(message)
        if is_text and not message.isascii() and not _is_utf8(message):
            self.close(_INVALID_TEXT, "the text is not UTF-8")
        elif self._is_paused or self._is_throttled or self._held or not self._has_allowance():
            # What came with the same read as the message that made the endpoint pause, or that was one too many.
            if self._close_code is not None:
                return
            if self._held is None:
                self._held = deque()
            if len(self._held) >= connections.settings.held_messages_max:
                self.close(_POLICY, "too many messages at once")
            else:
                self._held.append(message)
        else:
            self._deliver(message)

    def _has_allowance(self) -> bool:
        """Take the room for one message. Without it reading stops until there is some, or for good before a token was shown."""
        wait_s = self.limits.take_message(self._connections.now_s())
        if wait_s > 0.0:
            self._is_throttled = True
            self._stop_reading()
            # At least so long that a peer over its rate is read in pieces, not message by message.
            asyncio.get_running_loop().call_later(max(wait_s, _THROTTLE_S), self._end_throttling)
        elif wait_s < 0.0:
            self.close(_POLICY, "too many messages before a token was shown")
        return wait_s == 0.0

    def _end_throttling(self) -> None:
        self._is_throttled = False
        self._go_on_reading()

    def _stop_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _go_on_reading(self) -> None:
        if self._held:
            # Not here: whoever resumes may be in the middle of something.
            asyncio.get_running_loop().call_soon(self._deliver_held)
        elif not (self._is_paused or self._is_throttled or self._transport is None or self._transport.is_closing()):
            self._transport.resume_reading()

    def _deliver(self, message: bytes) -> None:
        conversation = self._conversation
        if conversation is None:
            return
        try:
            conversation.received(message)
        except Exception:
            logger.exception("a conversation at %s failed", self.path)
            self.fail("the door failed")

    def _deliver_held(self) -> None:
        while self._held and not (self._is_paused or self._is_throttled) and self._close_code is None:
            if not self._has_allowance():
                return
            self._deliver(self._held.popleft())
        if not self._held:
            self._go_on_reading()

    def _take_close(self, frame: WSFrame) -> None:
        code = int.from_bytes(frame.get_payload_as_bytes()[:2]) if frame.payload_size >= 2 else _NO_CODE
        if self._close_code is None:
            self._queue(close_frame(1000 if code == _NO_CODE else code))
            self._close_code = code
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def _tell_drained(self) -> None:
        self._is_watched = False
        if self._close_code is None and self._conversation is not None:
            # Not here: this may be the middle of the conversation's own sending.
            asyncio.get_running_loop().call_soon(self._drained)

    def _drained(self) -> None:
        conversation = self._conversation
        if conversation is None or self._close_code is not None:
            return
        try:
            conversation.drained()
        except Exception:
            logger.exception("a conversation at %s failed", self.path)
            self.fail("the door failed")


def _is_utf8(message: bytes) -> bool:
    try:
        message.decode()
    except UnicodeDecodeError:
        return False
    return True
