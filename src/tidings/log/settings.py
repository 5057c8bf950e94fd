"""The log's settings: every bound has its unit in its name, and a range in its type."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tidings.core.settings import Settings

_MB = 1_000_000
_MIB = 1 << 20


class TopicRetention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be dropped from a topic. Nothing is dropped by a rule that is not given."""

    age_days_max: Annotated[float, msgspec.Meta(gt=0)] | None = None
    size_bytes_max: Annotated[int, msgspec.Meta(ge=0)] | None = None
    consumed: bool = False
    """Drop what every group of the topic has passed, whatever its age."""
    keep_ids: bool = False
    """Remember the ids of dropped records, so that a late retry is still a duplicate. Records that name
    partitions (sync) are always remembered."""


class LogSettings(Settings, frozen=True, kw_only=True):
    """How one log behaves."""

    durability: Literal["sync", "interval", "none"] = "sync"
    """``sync`` answers after the disk has the event. The other two answer earlier, can lose acknowledged
    events, and say so in log and health."""
    sync_interval_ms: Annotated[int, msgspec.Meta(ge=1, le=60_000)] = 100
    """With ``interval``: how long an acknowledged event may be unsynced."""

    segment_bytes_max: Annotated[int, msgspec.Meta(ge=_MB, le=100 * _MB)] = 16 * _MB
    segment_lines_max: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 50_000
    layout: Literal["flat", "space"] = "flat"
    """``space`` gives each space a folder of its own below ``wal/``; the journal stays shared."""

    journal_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1024 * _MIB)] = 32 * _MIB
    """Largest size of one journal file, and at most a hundredth of the disk (1 MiB at least). A new log begins with 1 MiB; each full
    file is followed by one of twice the size. A batch of events larger than this gets a journal file of its size."""
    journal_count_max: Annotated[int, msgspec.Meta(ge=2, le=64)] = 4
    """With this many journal files not yet in segments, publishers wait for the segments to catch up."""

    reserve_bytes: Annotated[int, msgspec.Meta(ge=0, le=64 * 1024 * _MIB)] | None = None
    """Room on the disk that is kept back for the work that saves progress or frees space when the disk is full. Left out: twice the
    size of a journal file while the log is open, less of a small log that is closed. 0: none, and commits are accepted without room
    in the segments; a log that finds none is opened full."""

    payload_bytes_max: Annotated[int, msgspec.Meta(ge=1, le=64 * _MIB)] = 8 * _MIB
    payload_depth_max: Annotated[int, msgspec.Meta(ge=1, le=250)] = 128
    staged_bytes_max: Annotated[int, msgspec.Meta(ge=_MIB)] = 64 * _MIB
    """Encoded events waiting for a commit; beyond it ``append`` waits."""
    batch_bytes_max: Annotated[int, msgspec.Meta(ge=64 * 1024)] = 16 * _MIB
    """One commit takes at most this many bytes (or one event, if that is larger)."""
    recent_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 4 * _MIB
    """Committed records kept in memory for live readers."""
    index_bytes_max: Annotated[int, msgspec.Meta(ge=_MIB)] = 64 * 1024 * _MIB
    """Address space (not memory) reserved for the index file."""

    retention: dict[str, TopicRetention] = msgspec.field(default_factory=dict)
    """Rules by topic; ``*`` is the rule of topics that have none of their own."""
