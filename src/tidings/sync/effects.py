"""What a session decides: effects for its driver to carry out, in order. Plain values."""

from __future__ import annotations

import enum

import msgspec

from tidings.wire.sync_codes import CloseCode

from .requests import ConnectRequest, SubmitRequest, SyncRequest

__all__ = ["Admit", "Close", "Effect", "PagePlan", "ReadPage", "Send", "State", "Submit"]


class State(enum.Enum):
    """Where a connection stands."""

    AWAIT_CONNECT = "await_connect"
    ADMITTING = "admitting"
    ACTIVE = "active"
    CLOSED = "closed"


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send one frame."""

    frame: bytes


class Close(msgspec.Struct, frozen=True, gc=False):
    """End the connection, after what was sent."""

    code: CloseCode
    reason: str


class Admit(msgspec.Struct, frozen=True):
    """Find out who this is, then call ``admitted``."""

    request: ConnectRequest


class Submit(msgspec.Struct, frozen=True):
    """Validate and store these items, then call ``submitted``."""

    request: SubmitRequest


class ReadPage(msgspec.Struct, frozen=True):
    """When everything committed so far was published call ``plan_page``, read, then call ``page_read``."""

    request: SyncRequest


Effect = Send | Close | Admit | Submit | ReadPage


class PagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to read for one page."""

    request: SyncRequest
    partitions: tuple[str, ...]
    """As stored."""
    since: int
    until: int
    limit: int
    subscriptions: frozenset[str] | None
    """What to subscribe to before reading; ``None`` leaves it."""
    begins: bool
    """Whether a new cycle begins."""
