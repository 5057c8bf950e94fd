"""The bus's settings, those of a topic, and those of a subscription."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from tidings.core.errors import SettingsError
from tidings.core.settings import Settings


class Backoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When to try again: at a moment drawn from zero to ``min(base * mult**i, max)`` after the i-th failure, from 0."""

    base_s: Annotated[float, msgspec.Meta(ge=0)] = 0.5
    mult: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    max_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    retries_max: Annotated[int, msgspec.Meta(ge=0)] = 5
    """After the first delivery and this many retries the event is a dead letter."""


class TopicPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for every group of a topic."""

    expired: Literal["drop", "dead_letter"] = "drop"
    """What becomes of an event that is older than its ``ttl_sec`` when its turn comes."""
    ack_deadline_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """An event not acknowledged in time goes to another worker, and counts as tried."""
    priority: Annotated[int, msgspec.Meta(ge=1, le=10)] = 5
    """Of the topic's events that have none of their own, for groups that go by priority."""


class SubscriptionSettings(Settings, frozen=True, kw_only=True):
    """How one group reads its topic."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    max_inflight: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 1000
    """Events that the group holds for its workers: delivered, or waiting to be. Publishers wait while it is reached."""
    max_inflight_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 64 << 20
    """The same in bytes of their payloads. One event fits always, however large."""
    waiting_retries_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1000
    """Events that wait for a retry, where retries hold nobody up. With more, the group takes in nothing new, and nobody waits
    for it."""
    stall_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 10.0
    """How long publishers wait for a full window that no event leaves. Then the group reads from the log until it has caught
    up, and nobody waits for it."""
    full_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None
    """How long publishers wait while the window is full at every look, though events leave it. Then it is as for a stalled group.
    Without it, as long as it takes."""
    stall_pause_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    """How long publishers do not wait for the group after that, even if it has caught up."""
    backoff: Backoff = Backoff()
    start: Literal["earliest", "latest"] | Annotated[int, msgspec.Meta(ge=0)] = "earliest"
    """Where a new group begins; a group that has a cursor goes on from there."""
    order: Literal["none", "key", "strict"] = "none"
    """``none``: a retry does not hold up later events. ``key``: events with one key one after another, others in
    parallel. ``strict``: all one after another."""
    by_priority: bool = False
    """Among the events that wait, take the one with the highest priority first."""
    batch_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    """More than 1: the handler gets a list of up to this many events."""
    ack_deadline_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Instead of the topic's."""


class DelayedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of delayed events. Those of one publisher and the longest delay apply to events that come in through a node."""

    count_max: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 500_000
    """Events that wait; further ones are refused."""
    bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=1 << 40)] = 4 << 30
    """Size of all events that wait."""
    publisher_count_max: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 10_000
    """Events that wait for one subject."""
    publisher_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=1 << 40)] = 256 << 20
    """Size of the events that wait for one subject."""
    delay_s_max: Annotated[float, msgspec.Meta(gt=0, le=86_400 * 36_500)] = 86_400.0 * 366
    """Longest time between submitting and publishing."""


class BusSettings(Settings, frozen=True, kw_only=True):
    """How a bus behaves."""

    topics: dict[str, TopicPolicy] = msgspec.field(default_factory=dict)
    """Policies by topic; ``*`` is the policy of topics that have none of their own."""
    cursor_interval_ms: Annotated[int, msgspec.Meta(ge=1, le=60_000)] = 50
    """How often a moved cursor is written. After a crash of the process, what was acknowledged since is delivered again."""
    cursor_sync_interval_ms: Annotated[int, msgspec.Meta(ge=1, le=600_000)] = 1000
    """How often cursors are synced. After a power cut, what was acknowledged since is delivered again."""
    publish_timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """How long a publish waits in all, for full windows and for room on a full disk; without it, windows are waited for as long as it takes."""
    storage_full_timeout_s: Annotated[float, msgspec.Meta(ge=0)] | None = 30.0
    """How long a publish waits for room on a full disk at the most; then it raises ``StorageFull``. ``null``: as long as it takes."""
    close_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """How long closing waits for handlers that are at work."""
    read_ahead_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 2048
    """Events that a lagging group reads at once, and a feed at most."""
    delayed: DelayedSettings = DelayedSettings()
    """Bounds of delayed events."""


def check_timeout(timeout_s: float | None, *, is_optional: bool = True) -> None:
    """
    Check an argument ``timeout_s``.

    Raises:
        SettingsError: It is no number of seconds.
    """
    if timeout_s is None and is_optional:
        return
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not math.isfinite(timeout_s):
        raise SettingsError("timeout_s", f"must be a number of seconds, not {timeout_s!r}")
