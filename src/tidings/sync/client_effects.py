"""
What a client session asks its shell to do, in order.

An effect is done before the next one begins, and storing means: durably. That order is the protocol's promise that a page
counts only once its events and its cursor are stored, and that the next page is asked for after that.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from tidings.wire.sync_frames import ClientPayload, CommittedEvent, ItemError


class End(enum.StrEnum):
    """Why a session is over."""

    LOST = "lost"
    """The connection broke, or the server closed it without a word."""
    SILENT = "silent"
    """The server gave no sign of life, or no answer, for too long."""
    AUTH_FAILED = "auth_failed"
    """The token is expired, wrong, or another client's."""
    UNSUPPORTED = "unsupported"
    """The server speaks no version or profile that this client speaks; trying again changes nothing."""
    SERVER_ERROR = "server_error"
    """The server met something unexpected and asks to come again."""
    OVERLOADED = "overloaded"
    """The server takes no more for now."""
    PROTOCOL = "protocol"
    """The server sent what the protocol does not allow here."""
    REPLACED = "replaced"
    """The same client id has connected elsewhere; connecting again would end that one."""
    LEFT = "left"
    """This end disconnected."""


class ResetReason(enum.StrEnum):
    """Why what was synced before does not count any more."""

    FUTURE_CURSOR = "future_cursor"
    """The server's last id is below the cursor: it has another history than the one that was read."""
    MODEL_CHANGED = "model_changed"
    """The server's model version is another one."""
    HISTORY_REPLACED = "history_replaced"
    """The server shows another event at a committed id that is known already."""


class SendMessage(msgspec.Struct, frozen=True):
    """Send this message."""

    payload: ClientPayload


class StorePage(msgspec.Struct, frozen=True):
    """Store the events of a page and the cursors it reaches, in one transaction."""

    events: Sequence[CommittedEvent]
    cursors: Mapping[str, int]


class StoreEvents(msgspec.Struct, frozen=True):
    """Store events that came by broadcast; the cursors stay where they are."""

    events: Sequence[CommittedEvent]


class AdoptSnapshot(msgspec.Struct, frozen=True):
    """Begin from the server's state of all partitions followed: it holds all their events up to that id."""

    committed_id: int
    state: Mapping[str, msgspec.Raw]
    """By partition, as JSON."""


class ItemCommitted(msgspec.Struct, frozen=True):
    """The server has committed the draft."""

    id: str
    committed_id: int
    status_updated_at: int | float
    was_duplicate: bool
    """It was committed before this submission: the answer to an earlier one was lost."""


class ItemRejected(msgspec.Struct, frozen=True):
    """The server will never take the draft as it is."""

    id: str
    code: str
    errors: Sequence[ItemError]


ItemVerdict = ItemCommitted | ItemRejected


class StoreVerdicts(msgspec.Struct, frozen=True):
    """Store the verdicts on drafts."""

    verdicts: Sequence[ItemVerdict]


class ResetHistory(msgspec.Struct, frozen=True):
    """Set committed events aside and all cursors to 0; the session goes on from there."""

    reason: ResetReason


class ModelNoted(msgspec.Struct, frozen=True):
    """Remember the server's model version."""

    model_version: int


class GapFound(msgspec.Struct, frozen=True):
    """The server no longer has all events of these partitions up to that id."""

    partitions: tuple[str, ...]
    since: int
    pruned_through: int


class PartitionRefused(msgspec.Struct, frozen=True):
    """This client may not sync the partition; the others go on without it."""

    partition: str


class PartitionRestored(msgspec.Struct, frozen=True):
    """This client may sync the partition again; what it missed is fetched."""

    partition: str


class Delayed(msgspec.Struct, frozen=True):
    """The server asked to wait; the request is repeated after this time."""

    delay_s: float


class CaughtUp(msgspec.Struct, frozen=True):
    """Everything committed up to this id, in the partitions followed, is stored."""

    sync_to: int


class Ended(msgspec.Struct, frozen=True):
    """The session is over; close the connection."""

    end: End
    code: str = ""
    message: str = ""
    retry_after_s: float | None = None


Effect = (
    SendMessage
    | StorePage
    | StoreEvents
    | AdoptSnapshot
    | StoreVerdicts
    | ResetHistory
    | ModelNoted
    | GapFound
    | PartitionRefused
    | PartitionRestored
    | Delayed
    | CaughtUp
    | Ended
)
