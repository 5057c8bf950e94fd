"""
What is wrong with a frame of the sync protocol, before anybody looks at what it asks for.

    SyncFrameError
    ├── MalformedFrame          not JSON, or a field is missing or of the wrong type
    ├── UnknownMessageType      the envelope is fine, its type is none of ours
    └── UnsupportedVersion      the envelope names a protocol version that this end does not speak
"""

from __future__ import annotations

from tidings.core.errors import TidingsError

__all__ = ["MalformedFrame", "SyncFrameError", "UnknownMessageType", "UnsupportedVersion"]


class SyncFrameError(TidingsError):
    """The root of what is wrong with a frame."""

    code = "sync.frame"


class MalformedFrame(SyncFrameError):
    """A message is not JSON, or one of its fields is missing or of the wrong type."""

    code = "sync.malformed_frame"

    def __init__(self, problem: str, type: str | None = None, field: str = "") -> None:
        super().__init__(problem, type, field)
        self.problem = problem
        self.type = type
        self.field = field

    def describe(self) -> str:
        at = f" ({self.field})" if self.field else ""
        return f"{self.type or 'message'}: {self.problem}{at}"


class UnknownMessageType(SyncFrameError):
    """The envelope is whole, but nobody knows its type."""

    code = "sync.unknown_message_type"

    def __init__(self, type: str) -> None:
        super().__init__(type)
        self.type = type

    def describe(self) -> str:
        return f"unknown message type {ascii(self.type)[:80]}"


class UnsupportedVersion(SyncFrameError):
    """The message is of a protocol version that this end does not speak."""

    code = "sync.unsupported_version"

    def __init__(self, requested: str) -> None:
        super().__init__(requested)
        self.requested = requested

    def describe(self) -> str:
        return f"protocol version {ascii(self.requested)[:80]} is not supported"
