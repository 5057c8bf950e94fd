"""The write workflow's settings."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

__all__ = ["ConsolidationSettings", "MergeStrategy", "OutboxSettings", "WriteSettings"]

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class MergeStrategy(enum.StrEnum):
    """What becomes of a near-duplicate."""

    MERGE_CONTENT = "merge_content"
    """Sentences that are new are added to the memory there is."""
    APPEND_CONTEXT = "append_context"
    """The new text is kept beside the old one, as context."""
    TEMPORAL_UPDATE = "temporal_update"
    """Only noted that it was said again, and when."""
    LINK_ONLY = "link_only"
    """Stored for itself, with a link."""


class ConsolidationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a space is worth tidying up: at so many writes, so many duplicates, or so long after the last time."""

    writes: Count = 50
    duplicates: Count = 10
    age_s: Annotated[float, msgspec.Meta(gt=0)] = 6 * 3600.0
    budget_ms: Count = 2000


class WriteSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How memories are written."""

    dedupe_window_s: Annotated[float, msgspec.Meta(gt=0)] = 168 * 3600.0
    link_at: Share = 0.8
    merge_above: Share = 0.9
    strategy: MergeStrategy = MergeStrategy.MERGE_CONTENT
    candidates_count_max: Count = 64
    recent_count_max: Count = 256
    """How many of a space's last memories novelty is measured against."""
    text_chars_max: Count = 50_000
    context_count_max: Count = 20
    episode_gap_s: Annotated[float, msgspec.Meta(gt=0)] = 2 * 3600.0
    """A longer silence begins a new episode, also within a part of the day."""
    tz: str = "UTC"
    """For writes that name no zone of their own."""
    policy_version: str = "1.0.0"
    consolidation: ConsolidationSettings = ConsolidationSettings()


class OutboxSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the outbox is emptied."""

    attempts_max: Count = 5
    delay_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    delay_s_max: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    multiplier: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    batch_count_max: Count = 100
    keep_delivered_s: Annotated[float, msgspec.Meta(ge=0)] = 86_400.0
