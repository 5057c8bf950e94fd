"""
The one count of everything that waits between intake and acknowledgement: ``event.queue.total_ceiling``.

An envelope counts as one from intake until no queue and no buffer holds it any more. Each subscriber's entry counts a sixteenth beside it: what
an entry costs is a reference, however large the envelope. The count is in sixteenths, so it is exact.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from .constants import (
    ENTRIES_PER_ENVELOPE,
    ENTRIES_SHARE,
    OWN_EVENTS_RESERVE,
    PAUSE_PERCENT,
    RESUME_PERCENT,
    SOURCE_SHARE,
)
from .errors import QueueFull
from .event_types import EVENT_MANAGER, GRAPH_MANAGER
from .names import EventClass


class Ceiling:
    """
    What is held, what may be, and whether the lower classes wait.

    Args:
        total: Envelopes at a time. The last few are kept for the gateway's own events.
    """

    def __init__(self, total: int) -> None:
        self.total: Final = total
        self.is_paused = False
        """Whether intake takes graph events only."""
        self._limit: Final = (total - OWN_EVENTS_RESERVE) * ENTRIES_PER_ENVELOPE
        # However much waits to be delivered, there must be room for the entries that delivering it takes.
        self._intake_limit: Final = self._limit - self._limit // ENTRIES_SHARE
        self._pause_at: Final = total * ENTRIES_PER_ENVELOPE * PAUSE_PERCENT // 100
        self._resume_at: Final = total * ENTRIES_PER_ENVELOPE * RESUME_PERCENT // 100
        self._own_limit: Final = total * ENTRIES_PER_ENVELOPE
        self._source_limit: Final = max(1, total // SOURCE_SHARE)
        self._used = 0
        self._by_source: Counter[str] = Counter()

    @property
    def used(self) -> float:
        """Envelopes that are held, with sixteenths for entries."""
        return self._used / ENTRIES_PER_ENVELOPE

    @property
    def room(self) -> int:
        """How many more entries fit, below the gateway's own reserve."""
        return max(0, self._limit - self._used)

    def held_of(self, source: str) -> int:
        """How many envelopes of a source are held."""
        return self._by_source[source]

    def has_room_for_envelope(self, source: str) -> bool:
        """Whether one more of this source fits below the ceiling, with room left for entries."""
        limit = self._own_limit if source == EVENT_MANAGER else self._intake_limit
        return self._used + ENTRIES_PER_ENVELOPE <= limit

    def hold_envelope(self, source: str, event_class: EventClass) -> None:
        """
        Count one more envelope.

        Raises:
            QueueFull: There is no room, the class waits, or the source has its share.
        """
        if not self.has_room_for_envelope(source):
            raise QueueFull("event.queue.total_ceiling", f"{self.total} events wait already")
        if source not in (GRAPH_MANAGER, EVENT_MANAGER):
            if self.is_paused and event_class is not EventClass.GRAPH:
                raise QueueFull("event_class", f"{event_class} is paused until fewer events wait")
            if self._by_source[source] >= self._source_limit:
                raise QueueFull("source_manager", f"{source} has its share of {self._source_limit} events waiting")
        self._by_source[source] += 1
        self._grow(ENTRIES_PER_ENVELOPE)

    def hold_again(self, source: str) -> None:
        """Count an envelope that was let go, and is in a buffer again. Whoever does this has looked at ``room``."""
        self._by_source[source] += 1
        self._grow(ENTRIES_PER_ENVELOPE)

    def release_envelope(self, source: str) -> None:
        """No queue and no buffer holds this one any more."""
        if self._by_source[source] > 1:
            self._by_source[source] -= 1
        else:
            del self._by_source[source]
        self._shrink(ENTRIES_PER_ENVELOPE)

    def hold_entries(self, count: int) -> None:
        """Count entries of subscribers' buffers. Whoever adds them has looked at ``room``."""
        self._grow(count)

    def release_entries(self, count: int) -> None:
        """These were acknowledged, or their connections are gone."""
        self._shrink(count)

    def _grow(self, units: int) -> None:
        self._used += units
        if self._used >= self._pause_at:
            self.is_paused = True

    def _shrink(self, units: int) -> None:
        self._used -= units
        if self.is_paused and self._used <= self._resume_at:
            self.is_paused = False
