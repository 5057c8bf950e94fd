"""Which sync cycles bring a set of cursors up to date, and the broadcasts that wait for the end of one."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidings.wire.sync_frames import CommittedEvent

__all__ = ["BroadcastBuffer", "Cycle", "plan_cycles"]


class Cycle(msgspec.Struct):
    """One sync cycle: the same partitions from page to page, up to an end that its first page fixes."""

    partitions: tuple[str, ...]
    since: int
    sync_to: int | None = None
    """Unknown until the first page has come."""


def plan_cycles(cursors: Mapping[str, int], gap_max: int) -> list[Cycle]:
    """
    The cycles that bring every partition up to date, from the lowest cursor upwards.

    Partitions whose cursors lie within ``gap_max`` of the lowest of their cycle share it: that fetches a few events again
    and saves a request. Further apart, a quiet partition would make a busy one repeat its history. A negative
    ``gap_max`` gives each partition a cycle of its own.
    """
    cycles: list[Cycle] = []
    for name, since in sorted(cursors.items(), key=lambda item: (item[1], item[0].encode())):
        if cycles and since - cycles[-1].since <= gap_max:
            last = cycles[-1]
            cycles[-1] = Cycle((*last.partitions, name), last.since)
        else:
            cycles.append(Cycle((name,), since))
    return cycles


class BroadcastBuffer:
    """Broadcasts that wait, each once, up to a bound; ``was_lost`` says that some had to go."""

    def __init__(self, count_max: int) -> None:
        self.was_lost = False
        self._count_max = count_max
        self._events: dict[int, CommittedEvent] = {}

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: CommittedEvent) -> None:
        """Let ``event`` wait; if there is no room, all that wait are lost."""
        self._events[event.committed_id] = event
        if len(self._events) > self._count_max:
            # Keeping some of them would save nothing: what brings back one of the lost brings back all.
            self._events.clear()
            self.was_lost = True

    def take_through(self, committed_id: int) -> list[CommittedEvent]:
        """Those up to and including ``committed_id``, lowest first."""
        return [self._events.pop(each) for each in sorted(each for each in self._events if each <= committed_id)]

    def take_all(self) -> list[CommittedEvent]:
        """All of them, lowest first."""
        events = [self._events[each] for each in sorted(self._events)]
        self._events.clear()
        return events
