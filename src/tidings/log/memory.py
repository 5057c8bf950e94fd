"""
The model engine: a log in lists and dictionaries, simple enough to be seen to be right.

It keeps every promise of ``interface`` but durability: what it holds ends with the process, and it grows
until retention drops something. The other engines are tested against it, so it checks and encodes events
as they do (``encoding``), counts bytes as they stand in a line, and cuts topics into segments by the same
rule, although it has no files.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from msgspec.structs import replace

from tidings.core.clock import SYSTEM_CLOCK, Clock, format_utc
from tidings.core.errors import TidingsError
from tidings.core.events import Event
from tidings.core.ids import LogIdMaker
from tidings.core.names import check_partitions

from .encoding import EventDraft, EventEncoder, content_digest, unsealed, written_ns
from .encryption import Encryptor
from .errors import EpochMismatch, IdConflict, LogClosed, PositionTrimmed
from .interface import Appended, Authorise, Duplicate, Health, Page, Position, Query, Refused, TopicInfo, Verdict
from .record import Record
from .retention import Holders, RetentionPlan, SegmentDecision, SegmentInfo, carry_out
from .segment import decode_trusted
from .settings import LogSettings


class _Stored(NamedTuple):
    """A record as it was committed (its payload still sealed, if it is), and the length of its line."""

    record: Record
    size_bytes: int


class _Known(NamedTuple):
    """What an id or idempotency key stands for. Outlives the record when its ids are to be kept."""

    first: Duplicate
    digest: bytes


class _Segment:
    """The records that the embedded engine would hold in one file."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.stored: list[_Stored] = []
        self.size_bytes = 0
        self.partitions: dict[str, int] = {}

    def has_room(self, size_bytes: int, settings: LogSettings) -> bool:
        """Whether a line of this size still belongs here; a segment takes its first line whatever its size."""
        if not self.stored:
            return True
        return (
            len(self.stored) < settings.segment_lines_max and self.size_bytes + size_bytes <= settings.segment_bytes_max
        )

    def add(self, stored: _Stored) -> None:
        self.stored.append(stored)
        self.size_bytes += stored.size_bytes
        for partition in stored.record.meta.partitions:
            self.partitions[partition] = stored.record.seq

    def info(self, topic: str, *, is_sealed: bool) -> SegmentInfo:
        first, last = self.stored[0].record, self.stored[-1].record
        return SegmentInfo(
            topic=topic,
            number=self.number,
            is_sealed=is_sealed,
            first_offset=first.offset,
            last_offset=last.offset,
            first_seq=first.seq,
            last_seq=last.seq,
            first_written_at=first.meta.written_at,
            last_written_at=last.meta.written_at,
            lines=len(self.stored),
            size_bytes=self.size_bytes,
            partitions=dict(self.partitions),
        )


class _Topic:
    """One topic: its kept records in order, and the same records by segment. The last segment is the active one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stored: list[_Stored] = []
        self.segments = [_Segment(1)]
        self.next_offset = 0
        self.last_seq = 0
        self.dropped_through_seq = 0

    @property
    def first_offset(self) -> int:
        return self.stored[0].record.offset if self.stored else self.next_offset

    def add(self, stored: _Stored, settings: LogSettings) -> None:
        active = self.segments[-1]
        if not active.has_room(stored.size_bytes, settings):
            active = _Segment(active.number + 1)
            self.segments.append(active)
        active.add(stored)
        self.stored.append(stored)
        self.next_offset = stored.record.offset + 1
        self.last_seq = stored.record.seq

    def drop(self, number: int) -> list[_Stored]:
        """Take a sealed segment's records out; none if the segment is active or gone."""
        for segment in self.segments[:-1]:
            if segment.number == number:
                self.segments.remove(segment)
                self.stored = [stored for kept in self.segments for stored in kept.stored]
                self.dropped_through_seq = max(self.dropped_through_seq, segment.stored[-1].record.seq)
                return segment.stored
        return []

    def info(self) -> TopicInfo:
        return TopicInfo(
            topic=self.name,
            first_offset=self.first_offset,
            next_offset=self.next_offset,
            first_seq=self.stored[0].record.seq,
            last_seq=self.last_seq,
            size_bytes=sum(segment.size_bytes for segment in self.segments),
            segments=tuple(
                segment.info(self.name, is_sealed=segment is not self.segments[-1]) for segment in self.segments
            ),
        )


class MemoryLog:
    """
    A ``Log`` in memory.

    Args:
        settings: Limits on payloads and segments; what concerns files has no effect.
        clock: Gives the time of writing.
        encryptor: Seals payloads of the spaces it protects.
        epoch: The name of this log's life; a random one if left out.
    """

    def __init__(
        self,
        settings: LogSettings = LogSettings(),  # noqa: B008 - frozen
        *,
        clock: Clock = SYSTEM_CLOCK,
        encryptor: Encryptor | None = None,
        epoch: str | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._encryptor = encryptor
        self._encoder = EventEncoder(settings, encryptor)
        self._epoch = secrets.token_hex(8) if epoch is None else epoch
        self._id_maker = LogIdMaker()
        self._stored: list[_Stored] = []
        self._topics: dict[str, _Topic] = {}
        self._ids: dict[str, _Known] = {}
        self._idem_keys: dict[tuple[str, str, str], _Known] = {}
        self._last_seq = 0
        self._last_written_ns = 0
        self._dropped_through_seq = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def position(self) -> Position:
        """Epoch and the seq of the last record."""
        return Position(self._epoch, self._last_seq)

    @property
    def dropped_through_seq(self) -> int:
        """See ``Log.dropped_through_seq``."""
        return self._dropped_through_seq

    async def append(
        self, event: Event, authorise: Authorise | None = None, *, from_reserve: bool = False
    ) -> Appended | Duplicate:
        """Store one event. See ``Log.append``."""
        self._check_open()
        verdict = self._store(event, authorise)
        # Let others run, as an engine with a disk would: here a cancellation may strike, after the fact.
        await asyncio.sleep(0)
        return verdict

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        """Store events in order. See ``Log.append_many``."""
        self._check_open()
        verdicts: list[Verdict] = []
        for event in events:
            try:
                verdicts.append(self._store(event, authorise))
            except TidingsError as error:
                verdicts.append(Refused(error))
        await asyncio.sleep(0)
        return verdicts

    async def read(self, query: Query, *, limit: int = 1000, bytes_max: int = 4 << 20) -> Page:
        """Read one page. See ``Log.read``."""
        self._check_open()
        if query.epoch is not None and query.epoch != self._epoch:
            raise EpochMismatch(query.epoch, self._epoch)
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit}")
        _check_bounds(query)
        dropped_through_seq = self._refuse_trimmed(query)
        page = self._page(replace(query, known_drops=dropped_through_seq), limit, bytes_max)
        await asyncio.sleep(0)
        return page

    async def wait(self, after: int, topic: str | None = None) -> int:
        """Wait for a record above ``after``. See ``Log.wait``."""
        self._check_open()
        while self._last_seq_of(topic) <= after:
            await self._changed.wait()
            self._check_open()
        return self._last_seq

    def topics(self) -> dict[str, TopicInfo]:
        """The topics that hold records; one that ever did always does, as its active segment never goes."""
        return {name: topic.info() for name, topic in self._topics.items()}

    def topic(self, name: str) -> TopicInfo | None:
        """See ``Log.topic``."""
        topic = self._topics.get(name)
        return None if topic is None else topic.info()

    async def drop(self, plan: RetentionPlan, holders: Holders | None = None) -> RetentionPlan:
        """Drop the sealed segments that the plan names, that are still there and that nobody needs."""
        self._check_open()
        done = await carry_out(plan, holders, self._drop)
        kept = [stored for topic in self._topics.values() for stored in topic.stored]
        self._stored = sorted(kept, key=_seq)
        return done

    async def _drop(self, decision: SegmentDecision) -> None:
        topic = self._topics.get(decision.segment.topic)
        gone = topic.drop(decision.segment.number) if topic is not None else []
        if not gone:
            return
        self._dropped_through_seq = max(self._dropped_through_seq, gone[-1].record.seq)
        if not decision.keep_ids:
            for stored in gone:
                self._forget_ids(stored.record)

    def health(self) -> Health:
        """Writable until closed, and never durable."""
        return Health(
            is_writable=not self._is_closed,
            is_durable=False,
            problem=str(LogClosed()) if self._is_closed else None,
        )

    async def close(self) -> None:
        """Close the log; whoever waits is told."""
        self._is_closed = True
        self._changed.set()

    def _check_open(self) -> None:
        if self._is_closed:
            raise LogClosed

    def _last_seq_of(self, topic: str | None) -> int:
        if topic is None:
            return self._last_seq
        return self._topics[topic].last_seq if topic in self._topics else 0

    # Storing

    def _store(self, event: Event, authorise: Authorise | None) -> Appended | Duplicate:
        if authorise is not None:
            authorise(event)
        draft = self._encoder.check(event)
        digest = content_digest(draft)
        duplicate = self._find(draft, digest)
        if duplicate is not None:
            return duplicate
        seq = self._last_seq + 1
        name = draft.head.topic
        topic = self._topics.get(name) or _Topic(name)
        event_id = draft.event_id or self._id_maker.make(seq)
        time_ns = written_ns(self._clock.now_ns(), self._last_written_ns)
        named = self._encoder.seal(replace(draft, event_id=event_id))
        line = self._encoder.encode(named, topic.next_offset, seq, format_utc(time_ns))

        # Nothing was changed up to here, and nothing fails from here on.
        event.meta.event_id = event_id
        stored = _Stored(decode_trusted(line), len(line))
        topic.add(stored, self._settings)
        self._topics[name] = topic
        self._stored.append(stored)
        self._last_seq = seq
        self._last_written_ns = time_ns
        known = _Known(Duplicate(seq, stored.record.offset, event_id), digest)
        self._ids[event_id] = known
        if draft.idem_key is not None:
            self._idem_keys[name, draft.head.space_id, draft.idem_key] = known
        self._changed.set()
        self._changed = asyncio.Event()
        return Appended(seq, stored.record.offset, event_id)

    def _find(self, draft: EventDraft, digest: bytes) -> Duplicate | None:
        """The first commit of what the draft says again; the event id is looked at before the idempotency key."""
        if draft.is_given and (known := self._ids.get(draft.event_id)) is not None:
            return _same(known, digest, "meta.event_id", draft.event_id)
        if draft.idem_key is not None:
            known = self._idem_keys.get((draft.head.topic, draft.head.space_id, draft.idem_key))
            if known is not None:
                return _same(known, digest, "meta.idem_key", draft.idem_key)
        return None

    def _forget_ids(self, record: Record) -> None:
        meta = record.meta
        if (known := self._ids.get(meta.event_id)) is not None and known.first.seq == record.seq:
            del self._ids[meta.event_id]
        if meta.idem_key is not None:
            del self._idem_keys[meta.topic, meta.space_id, meta.idem_key]

    # Reading

    def _refuse_trimmed(self, query: Query) -> int:
        """The seq up to which records were dropped, which the reader knows from now on."""
        topic = None if query.topic is None else self._topics.get(query.topic)
        if topic is not None and query.from_offset is not None and query.from_offset < topic.first_offset:
            raise PositionTrimmed(topic.name, query.from_offset, topic.first_offset)
        if query.topic is None:
            dropped_through_seq = self._dropped_through_seq
        else:
            dropped_through_seq = 0 if topic is None else topic.dropped_through_seq
        if query.since is not None and max(query.since, query.known_drops) < dropped_through_seq:
            raise PositionTrimmed(None, query.since, dropped_through_seq)
        return max(query.known_drops, dropped_through_seq)

    def _page(self, query: Query, limit: int, bytes_max: int) -> Page:
        topic = None if query.topic is None else self._topics.get(query.topic)
        stored = self._stored if query.topic is None else topic.stored if topic is not None else []
        start, end = _range(stored, query)
        wanted = frozenset(check_partitions(query.partitions))
        wanted_ids = frozenset(query.event_ids)
        records: list[Record] = []
        size_bytes = 0
        looked_at: Record | None = None
        at_end = True
        for at in reversed(range(start, end)) if query.backwards else range(start, end):
            record, line_bytes = stored[at]
            meta = record.meta
            if (not wanted or not wanted.isdisjoint(meta.partitions)) and (
                not wanted_ids or meta.event_id in wanted_ids
            ):
                if records and (len(records) == limit or size_bytes + line_bytes > bytes_max):
                    at_end = False
                    break
                records.append(unsealed(record, self._encryptor))
                size_bytes += line_bytes
            looked_at = record
        if at_end and query.backwards:
            first_offset = 0 if topic is None else topic.first_offset
            return Page(records, _nothing_before(query, first_offset), at_end)
        return Page(records, query if looked_at is None else _beyond(query, looked_at), at_end)


def _same(known: _Known, digest: bytes, field: str, value: str) -> Duplicate:
    if known.digest != digest:
        raise IdConflict(field, value, known.first.seq)
    return known.first


def _check_bounds(query: Query) -> None:
    if query.topic is None and (query.from_offset is not None or query.to_offset is not None):
        raise ValueError("offsets count within a topic: a query by offset needs one")
    for bound in (query.from_time, query.to_time):
        if bound is not None and bound.utcoffset() is None:
            raise ValueError(f"{bound.isoformat()} has no time zone")


def _range(stored: list[_Stored], query: Query) -> tuple[int, int]:
    """Which of the records lie within all bounds. Seq, offset and time of writing all rise along the list."""
    starts = [0]
    ends = [len(stored)]
    if query.since is not None:
        starts.append(bisect_right(stored, query.since, key=_seq))
    if query.until is not None:
        ends.append(bisect_right(stored, query.until, key=_seq))
    if query.from_offset is not None:
        starts.append(bisect_left(stored, query.from_offset, key=_offset))
    if query.to_offset is not None:
        ends.append(bisect_left(stored, query.to_offset, key=_offset))
    if query.from_time is not None:
        starts.append(bisect_left(stored, query.from_time, key=_written))
    if query.to_time is not None:
        ends.append(bisect_left(stored, query.to_time, key=_written))
    return max(starts), min(ends)


def _seq(stored: _Stored) -> int:
    return stored.record.seq


def _offset(stored: _Stored) -> int:
    return stored.record.offset


def _written(stored: _Stored) -> datetime:
    return stored.record.meta.written_time


def _beyond(query: Query, last: Record) -> Query:
    """
    What is left of a query after ``last``.

    One bound takes the place of all on its side. An older one would mean the same, until retention drops
    what lies between the two: then the reader would be told of a loss that it has not suffered.
    """
    if query.backwards:
        if query.topic is None:
            return replace(query, until=last.seq - 1, to_time=None)
        return replace(query, to_offset=last.offset, until=None, to_time=None)
    if query.topic is None:
        return replace(query, since=last.seq, from_time=None)
    return replace(query, from_offset=last.offset + 1, since=None, from_time=None)


def _nothing_before(query: Query, first_offset: int) -> Query:
    """A backwards query that has come to its end, and stays there whatever is appended."""
    return replace(query, until=0) if query.topic is None else replace(query, to_offset=first_offset)
