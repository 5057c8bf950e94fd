"""The settings of the sync server and of the sync client: every bound has its unit in its name, and a range in its type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from tidings.core.errors import InvalidName
from tidings.core.names import check_space
from tidings.core.settings import Settings

_KIB = 1 << 10
_MIB = 1 << 20

Profile = Literal["canonical", "compatibility"]
TreeAction = Literal["set", "unset", "treePush", "treeDelete", "treeUpdate", "treeMove"]


class TreeTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What clients may do to one target of the tree profile."""

    actions: tuple[TreeAction, ...] = ("set", "unset", "treePush", "treeDelete", "treeUpdate", "treeMove")
    value_schema: dict[str, Any] | None = None
    """A JSON Schema for the ``value`` of the actions that have one."""


class SyncSettings(Settings, frozen=True, kw_only=True):
    """How the sync endpoint behaves."""

    profiles: tuple[Profile, ...] = ("canonical", "compatibility")
    """What is offered, the preferred one first."""
    model_version: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Announced to clients of the canonical profile; they start over when it changes."""
    schemas: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """JSON Schemas of the canonical profile by name; ``*`` is the schema of names that have none of their own."""
    project_schemas: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """JSON Schemas of payloads in dialects B and C by event type; ``*`` is the schema of types that have none of their own.
    A type without any is accepted."""
    tree_targets: dict[str, TreeTarget] = msgspec.field(default_factory=lambda: {"*": TreeTarget()})
    """Targets of the tree profile; ``*`` is for those that are not named, and nothing else is a pattern."""
    space_id: str = "sync"
    """The space that submitted events belong to."""

    batch_items_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    in_flight_drafts_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    """Drafts of one client, over all of its connections, that wait for their verdict."""
    requests_queued_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 32
    """Requests of one connection that are queued."""
    message_bytes_max: Annotated[int, msgspec.Meta(ge=_KIB, le=64 * _MIB)] = _MIB
    event_depth_max: Annotated[int, msgspec.Meta(ge=4, le=120)] = 64
    """Levels of JSON in one event."""
    tree_depth_max: Annotated[int, msgspec.Meta(ge=1, le=100)] = 64
    """Levels of items in a tree of the tree profile; a change that would make it deeper is rejected. A tree that is deeper
    already stays."""
    page_items_min: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 50
    page_items_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    page_items_default: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 500
    page_bytes_max: Annotated[int, msgspec.Meta(ge=_KIB, le=64 * _MIB)] = 2 * _MIB
    sync_partitions_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1000
    """Partitions that one ``sync`` may name, and one connection subscribe to."""

    heartbeat_window_ms: Annotated[int, msgspec.Meta(ge=1000)] = 30_000
    """A client of dialect A that was silent for this long is closed."""
    connect_window_ms: Annotated[int, msgspec.Meta(ge=100)] = 10_000
    """How long a connection may stay without ``connect``."""
    sweep_interval_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 500
    """How often silence and expiry are checked."""
    retry_after_ms: Annotated[int, msgspec.Meta(ge=0)] = 250
    """What ``rate_limited`` advises."""
    write_buffer_bytes_max: Annotated[int, msgspec.Meta(ge=_KIB)] = 4 * _MIB
    """With more than this unsent, a connection is not read from; if broadcasts are due to it, it is closed (1013)."""
    held_bytes_max: Annotated[int, msgspec.Meta(ge=_KIB)] = _MIB
    """Broadcasts kept back for a client of dialect B that is paging; beyond it the paging goes on instead."""
    connections_max: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    tree_partitions_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256
    """Partitions whose tree state is kept in memory; the least recently used goes first."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """A page that cannot be, no profile at all, or a space that none can have."""
        if self.page_items_min > self.page_items_max:
            yield "page_items_min", "is above page_items_max"
        if not self.profiles:
            yield "profiles", "offers nothing"
        try:
            check_space(self.space_id)
        except InvalidName as error:
            yield "space_id", error.problem


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
    """Changes that wait for one listener. Beyond it the oldest go, and the listener gets their number."""
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
