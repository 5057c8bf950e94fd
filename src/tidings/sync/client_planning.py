"""What the client's session asks for next: the sync cycles that bring its cursors up to date, and how many drafts go into one submission."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tidings.wire.sync_frames import CommittedEvent, Limits, SubmitItem

from .settings import ClientSettings


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


_BATCH_SIZE_UNSAID: Final = 100
_ENVELOPE_BYTES: Final = 512
"""More than the envelope around a batch ever takes."""


class Batcher:
    """
    Chooses batches for one connection.

    A server that refuses a batch as a whole took nothing of it, and need not say which draft is at fault. Halving finds it,
    and those that are fine get through on the way.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._limits = Limits()
        self._count_max = settings.batch_events_max

    def advertised(self, limits: Limits) -> None:
        """The server has announced its limits."""
        self._limits = limits

    def choose(self, items: Iterable[SubmitItem]) -> tuple[list[SubmitItem], list[SubmitItem]]:
        """The drafts from the front that fit into one message, and those before them that no message could hold."""
        own = self._settings.batch_bytes_max
        largest = room = min(own, self._limits.max_message_bytes or own) - _ENVELOPE_BYTES
        count_max = self._count_now()
        batch: list[SubmitItem] = []
        too_large: list[SubmitItem] = []
        for item in items:
            size = len(msgspec.json.encode(item)) + 1
            if size > largest:
                too_large.append(item)
                continue
            if size > room or len(batch) == count_max:
                break
            room -= size
            batch.append(item)
        return batch, too_large

    def refused(self, count: int) -> bool:
        """A batch of ``count`` was refused as a whole; says whether a smaller one is worth trying."""
        self._count_max = max(1, count // 2)
        return count > 1

    def answered(self) -> None:
        """A batch was taken: larger ones may go again."""
        self._count_max = min(self._count_max * 2, self._settings.batch_events_max)

    def _count_now(self) -> int:
        size_max = self._limits.max_batch_size or _BATCH_SIZE_UNSAID
        in_flight_max = self._limits.max_in_flight_drafts or self._settings.batch_events_max
        return max(1, min(self._count_max, size_max, in_flight_max))
