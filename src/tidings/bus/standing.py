"""Where a group stands, as operators see it: its place, against its topic's own bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from tidings.core.clock import Clock, ns_of
from tidings.core.errors import TidingsError
from tidings.log.errors import EpochMismatch, PositionTrimmed
from tidings.log.interface import Log, Query

from .cursor import Cursor
from .errors import CursorDamaged, UnknownGroup
from .offsets import GroupPlace, OffsetStore
from .places import bounds

__all__ = ["Obstacle", "Standing", "stand", "stored_place", "unknown_group"]

Obstacle = Literal["damaged", "other_epoch", "trimmed"]
"""``damaged`` and ``other_epoch``: the group cannot start. ``trimmed``: records it had yet to see were dropped."""

_NAMED_COUNT_MAX: Final = 10


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One group, from the outside. What cannot be known is ``None``."""

    topic: str
    group: str
    place: GroupPlace | None
    next_offset: int
    """The topic's: the offset that its next event will get."""
    oldest_unacked_age_s: float | None = None
    """Since the oldest event that is not acknowledged was written; ``None`` if there is none."""
    obstacle: Obstacle | None = None
    problem: str | None = None
    """The obstacle in words."""

    @property
    def committed(self) -> int | None:
        """The last offset up to which everything is acknowledged."""
        return None if self.place is None else self.place.cursor.committed

    @property
    def lag(self) -> int | None:
        """How many events are not acknowledged."""
        if self.place is None:
            return None
        # The cursor may have moved after the log was looked at.
        return max(0, self.next_offset - (self.place.cursor.committed + 1) - self.early_count)

    @property
    def early_count(self) -> int:
        """How many events are acknowledged beyond the first that is not."""
        return 0 if self.place is None else self.place.cursor.early_count

    @property
    def islands(self) -> list[tuple[int, int]]:
        """The offsets of those, as ranges."""
        return [] if self.place is None else self.place.cursor.ranges

    @property
    def attempts(self) -> dict[int, int]:
        """Deliveries that failed so far, by offset, of events that will be tried again."""
        return {} if self.place is None else self.place.attempts

    @property
    def failed_deliveries(self) -> int:
        """How many deliveries those are."""
        return sum(self.attempts.values())

    @property
    def is_paused(self) -> bool:
        """Whether nothing is handed out to it, on purpose."""
        return self.place is not None and self.place.paused


def stored_place(store: OffsetStore, topic: str, group: str) -> GroupPlace | TidingsError:
    """A group's place as it was last stored, or why it is not known. A group without one stands before its topic."""
    try:
        return store.load(topic, group) or GroupPlace(Cursor(), {}, False)
    except (CursorDamaged, EpochMismatch) as error:
        return error


async def stand(log: Log, clock: Clock, topic: str, group: str, place: GroupPlace | TidingsError) -> Standing:
    """Hold a group's place, or why it is not known, against the log."""
    _, next_offset = bounds(log, topic)
    if isinstance(place, TidingsError):
        obstacle: Obstacle = "other_epoch" if isinstance(place, EpochMismatch) else "damaged"
        return Standing(
            topic=topic, group=group, place=None, next_offset=next_offset, obstacle=obstacle, problem=str(place)
        )
    standing = Standing(topic=topic, group=group, place=place, next_offset=next_offset)
    try:
        age_s = await _oldest_age_s(log, clock, topic, place.cursor.committed + 1)
    except PositionTrimmed as error:
        return msgspec.structs.replace(standing, obstacle="trimmed", problem=str(error))
    return msgspec.structs.replace(standing, oldest_unacked_age_s=age_s)


async def _oldest_age_s(log: Log, clock: Clock, topic: str, offset: int) -> float | None:
    page = await log.read(Query(topic=topic, from_offset=offset), limit=1)
    if not page.records:
        return None
    return max(0.0, (clock.now_ns() - ns_of(page.records[0].meta.written_time)) / 1e9)


def unknown_group(topic: str, group: str, groups: Sequence[tuple[str, str]]) -> UnknownGroup:
    """The error that says a group is not there; its hint names some of ``groups``, those of the topic if there are any."""
    error = UnknownGroup(topic, group)
    names = [name for each, name in groups if each == topic] or [f"{name} of {each}" for each, name in groups]
    error.hint = f"there are: {', '.join(names[:_NAMED_COUNT_MAX])}" if names else "there are no groups yet"
    return error
