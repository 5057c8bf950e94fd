"""WebSocket frames as bytes, for a server: what is sent is not masked, so one blob serves every peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["CLOSE_REASON_BYTES_MAX", "PING", "Framer", "close_frame", "frame", "pong_frame"]

_TEXT: Final = 0x81
_CLOSE: Final = 0x88
_PONG: Final = 0x8A
PING: Final = b"\x89\x00"
CLOSE_REASON_BYTES_MAX: Final = 123


def frame(payload: bytes, first_byte: int = _TEXT) -> bytes:
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
    return frame(payload, _PONG)


def close_frame(code: int, reason: str = "") -> bytes:
    """A goodbye; a reason that is too long for a control frame is cut at a letter."""
    text = reason.encode()[:CLOSE_REASON_BYTES_MAX].decode(errors="ignore").encode()
    return frame(code.to_bytes(2, "big") + text, _CLOSE)


class Framer:
    """
    Frames messages, and remembers its last work.

    A broadcast hands the same tuple of messages to one connection after another: it is framed once. Only a tuple is remembered;
    a list could hold something else by the next call.
    """

    __slots__ = ("_blob", "_messages")

    def __init__(self) -> None:
        self._messages: Sequence[bytes] = ()
        self._blob = b""

    def framed(self, messages: Sequence[bytes]) -> bytes:
        """All messages as text frames, in order."""
        if messages is self._messages:
            return self._blob
        parts: list[bytes] = []
        for message in messages:
            parts.append(_head(len(message), _TEXT))
            parts.append(message)
        blob = b"".join(parts)
        if type(messages) is tuple:
            self._messages, self._blob = messages, blob
        return blob

    def forget(self) -> None:
        """Let go of the last work, so that a large broadcast does not stay in memory."""
        self._messages, self._blob = (), b""
