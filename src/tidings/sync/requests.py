"""
What clients ask for, what they are answered, and what a session has its connection do: plain values, in no dialect's spelling.

Codecs (``dialects``) turn messages into requests and answers into messages; the session decides, and returns effects that the
connection carries out in order.
"""

from __future__ import annotations

import enum
from typing import Any, Literal, NamedTuple

import msgspec

from tidings.log.record import Record
from tidings.wire.sync_frames import CloseCode, ItemError


class Scope(NamedTuple):
    """Where an event belongs, and so what rights it takes: the project, if it is in one, and the partitions."""

    project: str | None
    partitions: tuple[str, ...] = ()


class ConnectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client introduces itself."""

    msg_id: str | None
    token: str
    client_id: str
    project_id: str | None = None
    supported_profiles: tuple[str, ...] = ("compatibility",)
    required_profile: str | None = None
    required_tree_policy: str | None = None


class SubmittedItem(msgspec.Struct, kw_only=True, gc=False):
    """One submitted event."""

    id: str
    partitions: tuple[str, ...] = ()
    """As they are stored: normalised. In dialect B the project."""
    scope: Scope | None = None
    """What rights it takes; ``None`` for an item that cannot be read."""
    type: str = ""
    body: Any = None
    """The event's own payload, parsed."""
    content: Any = None
    """What equality compares beside the partitions, parsed."""
    stored: dict[str, Any] = {}
    """What is stored as the record's payload."""
    errors: tuple[ItemError, ...] = ()
    """Constraints that the codec found broken; such an item is rejected."""
    reason: Literal["validation_failed", "forbidden"] = "validation_failed"
    """Why, if there are errors."""
    client_id: str | None = None
    """The client that the item claims to be from."""
    user_id: str | None = None
    """The user that the item claims to be from (dialects B and C)."""


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. One that is longer than it may be has its ``count`` and no items: nobody reads them."""

    msg_id: str | None
    items: list[SubmittedItem]
    count: int
    client_id: str | None = None


class SyncRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a page."""

    msg_id: str | None
    partitions: tuple[str, ...]
    subscriptions: tuple[str, ...] | None = None
    """The new set of subscriptions; ``None`` leaves it as it is."""
    since: int
    limit: int | None = None
    wants_snapshot: bool = False
    client_id: str | None = None


class HeartbeatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A sign of life."""

    msg_id: str | None
    client_id: str | None = None


class DisconnectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The client disconnects."""

    msg_id: str | None
    client_id: str | None = None


Request = ConnectRequest | SubmitRequest | SyncRequest | HeartbeatRequest | DisconnectRequest


class CommittedAnswer(msgspec.Struct, frozen=True, gc=False):
    """The item is durable, now or since an earlier try; ``at_ms`` is the first commit's time."""

    id: str
    seq: int
    at_ms: int


class RejectedAnswer(msgspec.Struct, frozen=True, gc=False):
    """The item was refused and left no trace."""

    id: str
    reason: Literal["validation_failed", "forbidden"]
    errors: tuple[ItemError, ...]
    at_ms: int


class NotProcessed(msgspec.Struct, frozen=True, gc=False):
    """The item was not looked at, since one before it was rejected (dialect B)."""

    id: str
    blocked_by: str
    at_ms: int


Answer = CommittedAnswer | RejectedAnswer | NotProcessed


class PageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One page, ready to be spelled."""

    partitions: tuple[str, ...]
    subscriptions: tuple[str, ...]
    records: list[Record]
    next_since: int
    sync_to: int
    has_more: bool
    model_version: int | None = None
    pruned_through: int | None = None
    snapshot: tuple[int, dict[str, bytes]] | None = None


class SessionState(enum.Enum):
    """The state of a connection."""

    AWAIT_CONNECT = "await_connect"
    ADMITTING = "admitting"
    ACTIVE = "active"
    CLOSED = "closed"


class SendFrame(msgspec.Struct, frozen=True, gc=False):
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


Effect = SendFrame | Close | Admit | Submit | ReadPage


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
