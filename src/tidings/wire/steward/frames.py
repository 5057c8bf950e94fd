"""Messages as bytes, and frames of a stream: four bytes of length, big-endian, then the message. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from tidings.core.errors import TidingsError

FRAME_BYTES_MAX: Final = 64 << 20
_HEADER_BYTES: Final = 4

encode: Final = msgspec.json.Encoder().encode
"""A request or an answer as the bytes of a message."""


class FramingFault(TidingsError):
    """What came is no frame; nothing after it can be read."""

    code = "steward.framing"
    text = "the frame cannot be read: {problem}"
    problem: str


def framed(message: bytes) -> bytes:
    """One message as a frame."""
    return len(message).to_bytes(_HEADER_BYTES, "big") + message


class FrameReader:
    """
    Frames out of bytes, however they are cut. No I/O.

    Args:
        frame_bytes_max: A longer frame is refused when its header is there.
    """

    __slots__ = ("_buffer", "_frame_bytes_max")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self._frame_bytes_max = frame_bytes_max

    @property
    def held_bytes(self) -> int:
        """What came of a frame that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """
        Take bytes; gives each frame that they complete.

        Raises:
            FramingFault: A length is 0 or too large. The frames before it were given.
        """
        buffer = self._buffer
        buffer += data
        place = 0
        try:
            while len(buffer) - place >= _HEADER_BYTES:
                size = int.from_bytes(buffer[place : place + _HEADER_BYTES], "big")
                if size == 0:
                    raise FramingFault("its length is 0")
                if size > self._frame_bytes_max:
                    raise FramingFault(f"its length is {size}, and at most {self._frame_bytes_max} are taken")
                end = place + _HEADER_BYTES + size
                if len(buffer) < end:
                    break
                message = bytes(buffer[place + _HEADER_BYTES : end])
                place = end
                yield message
        finally:
            del buffer[:place]

    def finish(self) -> None:
        """
        No more bytes will come.

        Raises:
            FramingFault: A frame is cut off.
        """
        if self._buffer:
            part = "its header" if len(self._buffer) < _HEADER_BYTES else "it"
            raise FramingFault(f"{part} was cut off")
