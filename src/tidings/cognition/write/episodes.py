"""
Episodes: memories of one space that belong to one stretch of one part of the day.

A bucket is a local date and a part of the day, such as ``2025-09-06-evening``. The night belongs to the date it began on,
so that it is one bucket and not two.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

from tidings.core.ids import derived_id

__all__ = ["bucket_of", "episode_id", "lane_of", "projection"]

_MORNING_FROM: Final = 5
_PARTS: Final = (("night", 22), ("evening", 17), ("afternoon", 12), ("morning", _MORNING_FROM))
_FAST_BELOW_MS: Final = 50


def bucket_of(moment: datetime, zone: ZoneInfo) -> str:
    """The bucket a moment falls into, by the clock on the wall."""
    local = moment.astimezone(zone)
    hour, date = local.hour, local.date()
    if hour < _MORNING_FROM:
        return f"{date - timedelta(days=1)}-night"
    return f"{date}-{next(part for part, first_hour in _PARTS if hour >= first_hour)}"


def episode_id(space_id: str, bucket: str, number: int) -> str:
    """The id of a bucket's ``number``-th episode, from 1."""
    return derived_id("ep", space_id, bucket, str(number))


def lane_of(latency_budget_ms: float | None) -> str:
    """``FAST`` when there is little time to encode, else ``SMART``."""
    return "FAST" if latency_budget_ms is not None and latency_budget_ms < _FAST_BELOW_MS else "SMART"


def projection(memory_id: str, bucket: str, tags: tuple[str, ...], mentions: tuple[str, ...]) -> list[dict[str, Any]]:
    """The triples by which a memory is found: its time, its topics, whom it mentions."""
    facts = [("has_time", bucket), *(("has_topic", tag) for tag in tags), *(("mentions", name) for name in mentions)]
    return [{"subject": memory_id, "predicate": predicate, "object": value} for predicate, value in facts]
