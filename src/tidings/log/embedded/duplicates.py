"""
Telling duplicates: an event id or idempotency key leads to the record that had it first.

Three places are asked, from the cheapest: what was accepted since the index was last fed (a dict), the id itself
(one that the log made carries its seq), and the index, whose answers are candidates until the record was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tidings.core.ids import seq_in_event_id

from ..encoding import Draft, same_content
from ..errors import IdConflict
from ..interface import Duplicate
from ..record import Record
from .husks import Husks
from .index import Index, IndexEntry, Place
from .pages import PageReader

__all__ = ["Duplicates"]

IdemKey = tuple[str, str, str]


class _Fresh(NamedTuple):
    """A record that the index may not have yet."""

    seq: int
    topic: str
    offset: int


class _Found(NamedTuple):
    """A record that has the key, or what stayed of it after it was dropped."""

    record: Record
    is_husk: bool


class Duplicates:
    """Finds the record that an event repeats, for one log."""

    def __init__(self, index: Index, pages: PageReader, husks: Husks, line_at: Callable[[int], bytes | None]) -> None:
        self._index = index
        self._pages = pages
        self._husks = husks
        self._line_at = line_at
        """The line of a staged or recent seq."""
        self._fresh: dict[str | IdemKey, _Fresh] = {}

    def note(self, entry: IndexEntry) -> None:
        """An event was accepted: from now on its keys are taken."""
        place = _Fresh(entry.seq, entry.topic, entry.offset)
        for key in _keys(entry):
            self._fresh[key] = place

    def forget(self, entries: Sequence[IndexEntry]) -> None:
        """The index has these now, or they were rolled back."""
        for entry in entries:
            for key in _keys(entry):
                if (known := self._fresh.get(key)) is not None and known.seq == entry.seq:
                    del self._fresh[key]

    def is_surely_new(self, draft: Draft) -> bool:
        """Whether nothing can have had the draft's keys, as far as can be told without reading records."""
        return not self._candidates(draft)

    def _candidates(self, draft: Draft) -> bool:
        event_id, idem_key = draft.event_id, draft.idem_key
        if event_id is not None and (
            event_id in self._fresh or seq_in_event_id(event_id) is not None or self._index.find_id(event_id)
        ):
            return True
        if idem_key is None:
            return False
        head = draft.head
        return (head.topic, head.space_id, idem_key) in self._fresh or bool(
            self._index.find_idem(head.topic, head.space_id, idem_key)
        )

    async def find(self, draft: Draft) -> Duplicate | None:
        """
        The record that the draft repeats.

        Raises:
            IdConflict: A record has the draft's id or key, and other content.
        """
        if draft.event_id is not None:
            found = await self._by_id(draft.event_id)
            if found is not None:
                return _judge(draft, found, "meta.event_id", draft.event_id)
        if draft.idem_key is not None:
            found = await self._by_idem(draft.head.topic, draft.head.space_id, draft.idem_key)
            if found is not None:
                return _judge(draft, found, "meta.idem_key", draft.idem_key)
        return None

    async def _by_id(self, event_id: str) -> _Found | None:
        while True:
            fresh = self._fresh.get(event_id)
            if fresh is not None:
                return await self._read_fresh(fresh)
            found = await self._first(self._index.find_id(event_id), lambda record: record.meta.event_id == event_id)
            seq = seq_in_event_id(event_id)
            if found is None and seq is not None:
                found = await self._at_seq(seq)
                found = found if found is not None and found.record.meta.event_id == event_id else None
            if found is not None or event_id not in self._fresh:
                return found
            # It was accepted from somebody else while we were reading.

    async def _by_idem(self, topic: str, space_id: str, idem_key: str) -> _Found | None:
        key = (topic, space_id, idem_key)
        while True:
            fresh = self._fresh.get(key)
            if fresh is not None:
                return await self._read_fresh(fresh)
            found = await self._first(
                self._index.find_idem(topic, space_id, idem_key),
                lambda record: (record.meta.topic, record.meta.space_id, record.meta.idem_key) == key,
            )
            if found is not None or key not in self._fresh:
                return found

    async def _read_fresh(self, fresh: _Fresh) -> _Found | None:
        line = self._line_at(fresh.seq)
        if line is not None:
            return _Found(self._pages.decoded(line), False)
        return await self._first([Place(*fresh)], lambda _: True)

    async def _at_seq(self, seq: int) -> _Found | None:
        line = self._line_at(seq)
        record = self._pages.decoded(line) if line is not None else await self._pages.at_seq(seq)
        return None if record is None or self._pages.is_dropped(record) else _Found(record, False)

    async def _first(self, places: list[Place], matches: Callable[[Record], bool]) -> _Found | None:
        for record in await self._pages.at_places(places) if places else ():
            if matches(record):
                return _Found(record, False)
        for husk in self._husks.at(places) if places else ():
            if matches(husk):
                return _Found(husk, True)
        return None


def _judge(draft: Draft, found: _Found, field: str, value: str) -> Duplicate:
    record = found.record
    if not (Husks.same_content(draft, record) if found.is_husk else same_content(draft, record)):
        raise IdConflict(field, value, record.seq)
    return Duplicate(record.seq, record.offset, record.meta.event_id)


def _keys(entry: IndexEntry) -> list[str | IdemKey]:
    keys: list[str | IdemKey] = []
    if entry.event_id is not None:
        keys.append(entry.event_id)
    if entry.idem_key is not None:
        keys.append((entry.topic, entry.space_id, entry.idem_key))
    return keys
