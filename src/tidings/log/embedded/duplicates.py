"""
Telling duplicates: an event id or idempotency key leads to the record that had it first.

Three places are asked, from the cheapest: what was accepted since the index was last fed (a dict), the id itself
(one that the log made carries its seq), and the index, whose answers are candidates until the record was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tidings.core.events import Event
from tidings.core.ids import seq_in_event_id

from ..encoding import EnvelopeHead, EventDraft, same_content, same_draft
from ..errors import IdConflict
from ..interface import Duplicate
from ..record import Record
from .index import Index, IndexEntry, RecordLocation
from .pages import PageReader
from .staging import CommitBatch, Staging
from .tombstones import Tombstones

_ABSENT_MAX: Final = 10_000


class Staged(NamedTuple):
    """The event that a draft repeats has a place in a batch, but is not committed yet."""

    batch: CommitBatch
    at: int


class _Found(NamedTuple):
    """What has the key: a record, what stayed of one after it was dropped, or an event on its way."""

    first: Record | Staged
    is_tombstone: bool = False


class Duplicates:
    """Finds the record that an event repeats, for one log."""

    def __init__(self, index: Index, pages: PageReader, tombstones: Tombstones, staging: Staging) -> None:
        self._index = index
        self._pages = pages
        self._tombstones = tombstones
        self._staging = staging
        self._fresh: dict[str, int] = {}
        """The seqs of events that the index may not have yet, by event id and by ``_idem_text``."""
        self._absent: set[str] = set()
        """Ids that the index did not have; it may have any of them once something is forgotten here."""

    def note(self, draft: EventDraft, seq: int) -> None:
        """An event was accepted: from now on its keys are taken."""
        if draft.is_given:
            self._fresh[draft.event_id] = seq
        if draft.idem_key is not None:
            self._fresh[_idem_text(draft.head.topic, draft.head.space_id, draft.idem_key)] = seq

    def roll_back(self, batch: CommitBatch) -> None:
        """A batch was not committed: its keys are free."""
        for seq, draft in enumerate(batch.drafts, batch.first_seq):
            self._forget(seq, draft.event_id if draft.is_given else None, draft.idem_key, draft.head)

    def forget(self, entries: Sequence[IndexEntry]) -> None:
        """The index has these now."""
        for entry in entries:
            self._forget(entry.seq, entry.event_id, entry.idem_key, entry)

    def _forget(self, seq: int, event_id: str | None, idem_key: str | None, names: EnvelopeHead | IndexEntry) -> None:
        fresh = self._fresh
        if event_id is not None:
            self._absent.discard(event_id)
            if fresh.get(event_id) == seq:
                del fresh[event_id]
        if idem_key is not None:
            key = _idem_text(names.topic, names.space_id, idem_key)
            if fresh.get(key) == seq:
                del fresh[key]

    def look_up_ids(self, events: Sequence[Event]) -> None:
        """These are about to come: look all their ids up at once, which is cheaper than one by one."""
        if not events or events[0].meta._event_id is None:
            return  # who gives ids mostly gives all of them; looking them up one by one is as right
        ids = [event_id for event in events if type(event_id := event.meta._event_id) is str]
        if len(ids) > 1:
            if len(self._absent) > _ABSENT_MAX:
                self._absent.clear()
            self._absent.update(set(ids) - self._index.has_ids(ids))

    def is_surely_new(self, draft: EventDraft) -> bool:
        """Whether nothing can have had the draft's keys, as far as can be told without reading records."""
        if draft.is_given:
            event_id = draft.event_id
            if (
                event_id in self._fresh
                or self._own_seq(event_id) is not None
                or (event_id not in self._absent and self._index.find_id(event_id))
            ):
                return False
        idem_key = draft.idem_key
        if idem_key is None:
            return True
        topic, space_id = draft.head.topic, draft.head.space_id
        return _idem_text(topic, space_id, idem_key) not in self._fresh and not self._index.find_idem(
            topic, space_id, idem_key
        )

    async def find(self, draft: EventDraft) -> Duplicate | Staged | None:
        """
        The record that the draft repeats, or the accepted event on its way to become one.

        Raises:
            IdConflict: A record has the draft's id or key, and other content.
        """
        if draft.is_given:
            found = await self._by_id(draft.event_id)
            if found is not None:
                return _judge(draft, found, "meta.event_id", draft.event_id)
        if draft.idem_key is not None:
            found = await self._by_idem(draft.head.topic, draft.head.space_id, draft.idem_key)
            if found is not None:
                return _judge(draft, found, "meta.idem_key", draft.idem_key)
        return None

    async def _by_id(self, event_id: str) -> _Found | None:
        def matches(record: Record) -> bool:
            return record.meta.event_id == event_id

        while True:
            seq = self._fresh.get(event_id)
            if seq is not None:
                return await self._at_seq(seq, matches)
            found = await self._first(self._index.find_id(event_id), matches)
            seq = self._own_seq(event_id)
            if found is None and seq is not None:
                found = await self._at_seq(seq, matches, event_id)
            if found is not None or event_id not in self._fresh:
                return found
            # It was accepted from somebody else while we were reading.

    def _own_seq(self, event_id: str) -> int | None:
        """The seq of the record that this id was made for, if it can have been: a random id of that shape names no seq yet given."""
        seq = seq_in_event_id(event_id)
        return seq if seq is not None and 0 < seq < self._staging.next_seq else None

    async def _by_idem(self, topic: str, space_id: str, idem_key: str) -> _Found | None:
        def matches(record: Record) -> bool:
            meta = record.meta
            return (meta.topic, meta.space_id, meta.idem_key) == (topic, space_id, idem_key)

        key = _idem_text(topic, space_id, idem_key)
        while True:
            seq = self._fresh.get(key)
            if seq is not None:
                return await self._at_seq(seq, matches)
            found = await self._first(self._index.find_idem(topic, space_id, idem_key), matches)
            if found is not None or key not in self._fresh:
                return found

    async def _at_seq(self, seq: int, matches: Callable[[Record], bool], event_id: str | None = None) -> _Found | None:
        """What is at a seq, if it is what was looked for."""
        staged = self._staging.find(seq)
        if staged is not None:
            batch, at = staged
            is_it = event_id is None or batch.drafts[at].event_id == event_id
            return _Found(Staged(batch, at)) if is_it else None
        record = await self._pages.at_seq(seq)
        return _Found(record) if record is not None and matches(record) else None

    async def _first(self, places: list[RecordLocation], matches: Callable[[Record], bool]) -> _Found | None:
        for record in await self._pages.at_places(places) if places else ():
            if matches(record):
                return _Found(record)
        for tombstone in self._tombstones.at(places) if places else ():
            if matches(tombstone):
                return _Found(tombstone, is_tombstone=True)
        return None


def _judge(draft: EventDraft, found: _Found, field: str, value: str) -> Duplicate | Staged:
    first = found.first
    if isinstance(first, Staged):
        original, seq = first.batch.drafts[first.at], first.batch.first_seq + first.at
        is_same = same_draft(draft, original)
    else:
        seq = first.seq
        is_same = Tombstones.same_content(draft, first) if found.is_tombstone else same_content(draft, first)
    if not is_same:
        raise IdConflict(field, value, seq)
    return first if isinstance(first, Staged) else Duplicate(seq, first.offset, first.meta.event_id)


def _idem_text(topic: str, space_id: str, idem_key: str) -> str:
    """An idempotency key counts within its topic and space. No name holds the separator, so no event id looks like this."""
    return f"{topic}\0{space_id}\0{idem_key}"
