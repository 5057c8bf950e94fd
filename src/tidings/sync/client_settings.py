"""The sync client's settings: every bound has its unit in its name, and a range in its type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from tidings.core.settings import Settings

__all__ = ["ClientSettings"]

_MIB = 1 << 20

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class ClientSettings(Settings, frozen=True, kw_only=True):
    """How one sync client behaves."""

    page_events: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 500
    """Events asked for in one page; the server may give fewer, and says within which range."""
    batch_events_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    """Drafts sent in one message; the server's own bound holds as well."""
    batch_bytes_max: Annotated[int, msgspec.Meta(ge=1024, le=64 * _MIB)] = _MIB
    """The largest message sent; the server's own bound holds as well."""
    buffer_events_max: Count = 10_000
    """Broadcasts that may wait for the end of a sync cycle. Beyond it they are dropped, and the cycle is run again."""
    refresh_events: Count = 1000
    """After this many events that came without a page, a sync cycle moves the stored cursor past them."""
    cursor_gap_max: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 1000
    """Partitions whose cursors are no further apart are synced together, from the lowest."""

    heartbeat_s: Seconds = 10.0
    """How long this end is silent before it sends a sign of life."""
    silence_s_max: Seconds = 30.0
    """How long the server may be silent before the connection is given up."""
    answer_s_max: Seconds = 30.0
    """How long a request may stay without its answer before the connection is given up."""
    connect_s_max: Seconds = 10.0
    """How long opening a connection may take."""
    retry_s_min: Seconds = 0.25
    retry_s_max: Seconds = 30.0
    """Before attempt n the client waits a random time of up to ``retry_s_min`` doubled n times, at most ``retry_s_max``."""

    drafts_count_max: Count = 10_000
    """Drafts kept, those in quarantine included. Beyond it ``submit`` raises ``DraftQueueFull``."""
    drafts_bytes_max: Annotated[int, msgspec.Meta(ge=1024)] = 64 * _MIB
    changes_count_max: Count = 1024
    """Changes that wait for one listener. Beyond it the oldest go, and the listener is told how many."""
    inbound_messages_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256
    """Messages received and not handled yet. Beyond it nothing more is read from the socket."""
    snapshot_events: Count = 1000
    """The view is saved after this many more events were folded into it."""

    history_events_max: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Committed events kept beside the view's snapshot, about; older ones are dropped when a snapshot is saved. All, unless given."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Times that contradict each other."""
        if self.silence_s_max <= self.heartbeat_s:
            yield (
                "silence_s_max",
                "must be more than heartbeat_s: silence is noticed by heartbeats that stay unanswered",
            )
        if self.retry_s_max < self.retry_s_min:
            yield "retry_s_max", "must not be less than retry_s_min"
