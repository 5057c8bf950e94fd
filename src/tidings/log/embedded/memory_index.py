"""
The index in memory: the model that ``LmdbIndex`` is tested against, and the one for simulated crashes.

It works on the same fingerprints as the one on disk, so both answer with the same candidates. Nothing of
it is durable; ``stale_copy`` stands for what a crash leaves of an index that lagged.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from ..errors import LogClosed
from .index import (
    IndexEntry,
    IndexStats,
    Place,
    check_place,
    fingerprint_of_id,
    fingerprint_of_idem,
    partition_key,
)

__all__ = ["MemoryIndex"]

_Places = dict[bytes, list[Place]]

_seq_of = attrgetter("seq")


class MemoryIndex:
    """An ``Index`` that lives and dies with the process."""

    def __init__(self) -> None:
        self.was_reset: str | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._covers = 0
        self._ids: _Places = {}
        self._idem: _Places = {}
        self._partitions: _Places = {}

    @property
    def covers(self) -> int:
        """Every record up to this seq is entered."""
        self._check_open()
        return self._covers

    def add(self, entries: Sequence[IndexEntry], covers: int) -> None:
        """Enter records and move ``covers`` up."""
        self._check_open()
        changes = [change for entry in entries for change in self._changes(entry)]
        with self._lock:
            for places, key, place in changes:
                known = places.setdefault(key, [])
                at = bisect_left(known, place)
                if place not in known[at : at + 1]:
                    known.insert(at, place)
            self._covers = max(self._covers, covers)

    def remove(self, entries: Sequence[IndexEntry]) -> None:
        """Forget records that the log dropped."""
        self._check_open()
        changes = [change for entry in entries for change in self._changes(entry)]
        with self._lock:
            for places, key, place in changes:
                known = places.get(key, [])
                at = bisect_left(known, place)
                if place in known[at : at + 1]:
                    del known[at]
                    if not known:
                        del places[key]

    def _changes(self, entry: IndexEntry) -> Iterator[tuple[_Places, bytes, Place]]:
        check_place(entry.seq, entry.offset)
        place = Place(entry.seq, entry.topic, entry.offset)
        if entry.event_id is not None:
            yield self._ids, fingerprint_of_id(entry.event_id), place
        if entry.idem_key is not None:
            yield self._idem, fingerprint_of_idem(entry.topic, entry.space_id, entry.idem_key), place
        for name in entry.partitions:
            yield self._partitions, partition_key(name), place

    def reset(self) -> None:
        """Forget everything."""
        self._check_open()
        with self._lock:
            self._covers = 0
            for places in (self._ids, self._idem, self._partitions):
                places.clear()

    def has_ids(self, event_ids: Sequence[str]) -> set[str]:
        """Those of the ids that have candidates."""
        return {event_id for event_id in event_ids if self.find_id(event_id)}

    def find_id(self, event_id: str) -> list[Place]:
        """Candidates for the record with this event id, by seq."""
        self._check_open()
        with self._lock:
            return list(self._ids.get(fingerprint_of_id(event_id), ()))

    def find_idem(self, topic: str, space_id: str, idem_key: str) -> list[Place]:
        """Candidates for the record with this idempotency key, by seq."""
        self._check_open()
        with self._lock:
            return list(self._idem.get(fingerprint_of_idem(topic, space_id, idem_key), ()))

    def partition(
        self, name: str, *, since: int, until: int | None, limit: int, backwards: bool = False
    ) -> list[Place]:
        """The first (or, ``backwards``, the last) ``limit`` records of a partition in a range of seqs."""
        self._check_open()
        key = partition_key(name)
        with self._lock:
            known = self._partitions.get(key, [])
            begin = bisect_right(known, since, key=_seq_of)
            end = len(known) if until is None else bisect_right(known, until, key=_seq_of)
            if backwards:
                return known[max(begin, end - limit) : end][::-1]
            return known[begin : min(end, begin + limit)]

    def stats(self) -> IndexStats:
        """How much it holds; nothing of it is on disk."""
        self._check_open()
        with self._lock:
            entries = sum(
                len(known) for places in (self._ids, self._idem, self._partitions) for known in places.values()
            )
            return IndexStats(entries, 0, self._covers, len(self._partitions))

    def snapshot(self) -> MemoryIndex:
        """A copy that later changes do not reach."""
        return self._copy(self._covers, lambda _place: True)

    def stale_copy(self, covers: int) -> MemoryIndex:
        """
        A copy that never heard of records above ``covers``.

        It is what a crash leaves when the index lagged. Records removed since then do not come back.
        """
        return self._copy(min(covers, self._covers), lambda place: place.seq <= covers)

    def _copy(self, covers: int, keeps: Callable[[Place], bool]) -> MemoryIndex:
        copy = MemoryIndex()
        copy._covers = covers
        with self._lock:
            for mine, its in (
                (self._ids, copy._ids),
                (self._idem, copy._idem),
                (self._partitions, copy._partitions),
            ):
                for key, known in mine.items():
                    if kept := [place for place in known if keeps(place)]:
                        its[key] = kept
        return copy

    def close(self) -> None:
        """Refuse everything from now on; ``snapshot`` and ``stale_copy`` go on, as a crash would leave them."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise LogClosed
