"""What users of the sync client hold: events, verdicts, changes, status. Plain frozen values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from tidings.sync.client_effects import ResetReason
from tidings.wire.sync_frames import ItemError

__all__ = [
    "Change",
    "ChangesMissed",
    "ClientStatus",
    "Committed",
    "DraftRejected",
    "EventCommitted",
    "GapReported",
    "HistoryReset",
    "ItemError",
    "LocalEvent",
    "Pending",
    "QuarantinedDraft",
    "Rejected",
    "State",
    "Verdict",
]


class LocalEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the local view: committed, or still a draft."""

    id: str
    type: str
    payload: Mapping[str, Any]
    partitions: tuple[str, ...]
    client_id: str
    committed_id: int | None = None
    """Its place in the server's order; ``None`` while it is a draft."""
    committed_at_ms: float | None = None

    @property
    def is_draft(self) -> bool:
        """Whether the server's verdict is still open."""
        return self.committed_id is None


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The server has the event for good, at this place in its order."""

    committed_id: int
    was_duplicate: bool = False
    """An earlier submission of the same draft had got through, and only its answer was lost. The event exists once."""


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The server will not take the event as it is. It is in quarantine."""

    code: str
    errors: tuple[ItemError, ...] = ()


class Pending(msgspec.Struct, frozen=True, tag="pending"):
    """There is no verdict yet: the event is stored here and is sent as soon as the server can be reached."""

    attempts: int = 0
    """How often it was sent since the client was opened."""


Verdict = Committed | Rejected | Pending


class QuarantinedDraft(msgspec.Struct, frozen=True):
    """A rejected draft, with all that is needed to mend and submit it again."""

    event: LocalEvent
    verdict: Rejected
    rejected_at_ms: int


class EventCommitted(msgspec.Struct, frozen=True, tag="event_committed"):
    """An event is committed and stored here."""

    event: LocalEvent
    is_own: bool
    """It was a draft of this client."""


class DraftRejected(msgspec.Struct, frozen=True, tag="draft_rejected"):
    """A draft was rejected, and left the view."""

    event: LocalEvent
    verdict: Rejected


class HistoryReset(msgspec.Struct, frozen=True, tag="history_reset"):
    """What was synced before counts no more; everything is fetched again."""

    reason: ResetReason


class GapReported(msgspec.Struct, frozen=True, tag="gap_reported"):
    """The server no longer has all events of these partitions after ``since`` and up to ``pruned_through``."""

    partitions: tuple[str, ...]
    since: int
    pruned_through: int


class ChangesMissed(msgspec.Struct, frozen=True, tag="changes_missed"):
    """The listener was too slow and this many changes were dropped; ``events`` and ``view`` have their outcome."""

    count: int


Change = EventCommitted | DraftRejected | HistoryReset | GapReported | ChangesMissed


class State(enum.StrEnum):
    """What the client is doing about its connection."""

    CLOSED = "closed"
    WAITING = "waiting"
    """Offline, until the next attempt."""
    CONNECTING = "connecting"
    SYNCING = "syncing"
    LIVE = "live"
    STOPPED = "stopped"
    """It will not try again; ``ClientStatus.problem`` says why."""


class ClientStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How the client is doing, at one moment."""

    state: State
    pending_count: int
    quarantined_count: int
    orphan_count: int
    """Events that were committed here before a reset, and that the server has not shown again."""
    caught_up_to: int | None
    """The committed id up to which everything followed was stored, when the last sync cycle ended."""
    refused_partitions: frozenset[str]
    """Partitions that the server does not let this client sync."""
    attempts: int
    """Attempts to connect since the last one that worked."""
    problem: str | None
    """The last thing that went wrong with the connection, if it has not been mended."""
