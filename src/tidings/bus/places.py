"""
Places in a topic, and what moving a group to one comes to: how many events come again, and how many never come.

A group stands within its topic, or right after it. A cursor ahead of its topic would later pass for proof that acknowledged
records are lost.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from tidings.core.errors import TidingsError
from tidings.log.interface import Log, Query

from .offsets import GroupPlace

__all__ = ["Aim", "MovePlan", "bounds", "offset_of", "plan_move", "segment_at"]

Aim = int | datetime | Literal["earliest", "latest"]
"""Where to go on: at an offset, at the first event written at this time or later, at the oldest kept, at what comes next."""


class MovePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What moving a group comes to. What cannot be known is ``None``."""

    committed: int | None
    """Where the group stands before."""
    next_offset: int
    """The next event that it gets."""
    comes_again: int | None
    passed_over: int | None


def bounds(log: Log, topic: str) -> tuple[int, int]:
    """The first offset that a topic still has, and the one that its next event gets."""
    info = log.topics().get(topic)
    return (0, 0) if info is None else (info.first_offset, info.next_offset)


def segment_at(log: Log, topic: str, offset: int) -> int:
    """The number of the segment that an offset is in, or will be."""
    info = log.topics().get(topic)
    segments = info.segments if info is not None else ()
    return next((segment.number for segment in reversed(segments) if segment.first_offset <= offset), 1)


async def offset_of(log: Log, topic: str, aim: Aim) -> int | None:
    """The offset that an aim comes to; ``None`` if the topic has no such place (``bounds`` says which it has)."""
    first, end = bounds(log, topic)
    match aim:
        case "earliest":
            return first
        case "latest":
            return end
        case datetime():
            page = await log.read(Query(topic=topic, from_time=aim), limit=1)
            return page.records[0].offset if page.records else end
        case _:
            return aim if first <= aim <= end else None


def plan_move(before: GroupPlace | TidingsError, target: int) -> MovePlan:
    """What moving a group to an offset would come to, from its place, or from one that cannot be known."""
    committed = comes_again = passed_over = None
    if isinstance(before, GroupPlace):
        committed, early_count = before.cursor.committed, before.cursor.early_count
        early = sum(max(0, min(last, target - 1) - first + 1) for first, last in before.cursor.ranges)
        comes_again = max(0, committed + 1 - target) + early_count - early
        passed_over = max(0, target - (committed + 1)) - early
    return MovePlan(committed=committed, next_offset=target, comes_again=comes_again, passed_over=passed_over)
