"""
A client of the steward's socket that knows nothing of Tidings: a socket, four bytes of length, JSON.

Written from the description of the wire alone, as clients of other makers are.
"""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

SECONDS_MAX = 20.0


class RawClient:
    """One connection."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SECONDS_MAX)
        self.socket.connect(str(path))

    def send_bytes(self, data: bytes) -> None:
        """Bytes as they are."""
        self.socket.sendall(data)

    def send(self, message: Any) -> None:
        """One frame."""
        body = json.dumps(message).encode()
        self.send_bytes(struct.pack(">I", len(body)) + body)

    def receive(self) -> Any:
        """The next frame; ``None`` at the end of the stream."""
        head = self._exactly(4)
        if head is None:
            return None
        body = self._exactly(struct.unpack(">I", head)[0])
        assert body is not None, "the stream ended within a frame"
        return json.loads(body)

    def ask(self, op: str, **fields: Any) -> Any:
        """The answer to a request."""
        self.send({"op": op, **fields})
        return self.receive()

    def is_ended(self) -> bool:
        """Whether the other end has closed; waits for it."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            try:
                part = self.socket.recv(count - len(data))
            except ConnectionResetError:
                part = b""
            if not part:
                assert not data, "the stream ended within a frame"
                return None
            data += part
        return data

    def close(self) -> None:
        """Go."""
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
