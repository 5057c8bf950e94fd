"""
Pages: answering queries from memory where it reaches, from segments where it does not.

Small steps, each from one snapshot. Between two steps anything may be committed, flushed or dropped; the query that
a page ends with is all that a reader carries from one to the next.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain, compress

import msgspec

from tidings.core.clock import format_utc, ns_of
from tidings.core.ids import seq_in_event_id
from tidings.core.names import check_partitions

from ..encoding import unsealed
from ..encryption import Encryptor
from ..errors import EpochMismatch, PositionTrimmed
from ..interface import Page, Query
from ..record import DECODER, PLAIN_DECODER, Record
from ..segment import decode_trusted
from .index import OFFSET_MAX, Index, RecordLocation
from .reader import Bounds, RecordRun, SegmentReader, StreamView, view_of
from .state import LogState, TopicState


class _Plan:
    """One query, resolved: where reading stands and where it must stop."""

    __slots__ = ("bounds", "bytes_left", "is_full", "limit", "query", "records", "topic")

    def __init__(self, query: Query, topic: TopicState | None, bounds: Bounds, limit: int, bytes_max: int) -> None:
        self.query = query
        self.topic = topic
        self.bounds = bounds
        self.limit = limit
        self.bytes_left = bytes_max
        self.records: list[Record] = []
        self.is_full = False

    def take(self, items: Iterable[tuple[Record, int]]) -> bool:
        """Take records until the page is full; whether the items ran out first."""
        if self.is_full:
            return False
        for record, size in items:
            if size > self.bytes_left and self.records:
                self.is_full = True
                return False
            self.records.append(record)
            self.bytes_left -= size
            if len(self.records) >= self.limit:
                self.is_full = True
                return False
        return True

    def take_run(self, run: RecordRun, encryptor: Encryptor | None) -> bool:
        """``take`` for what was read together, opening what is sealed."""
        records, sizes = run
        if encryptor is not None:
            records = [unsealed(record, encryptor) for record in records]
        size = sum(sizes)
        if len(records) > self.limit - len(self.records) or size > self.bytes_left or self.is_full:
            return self.take(zip(records, sizes, strict=True))
        self.records += records
        self.bytes_left -= size
        self.is_full = len(self.records) >= self.limit
        return not self.is_full

    def take_lines(self, lines: list[bytes], start: int, *, is_plain: bool = False) -> bool | None:
        """
        ``take`` for lines that are all wanted, as they are: what a reader that keeps up with the log gets, at the speed
        of C. ``None``, and nothing taken, if they may not all fit. ``is_plain`` if all of them are known to be.
        """
        room = self.limit - len(self.records)
        chosen = lines[start : start + room]
        size = sum(map(len, chosen))
        if size > self.bytes_left or self.is_full:
            return None
        self.records += map(PLAIN_DECODER.decode if is_plain else DECODER.decode, chosen)
        self.bytes_left -= size
        self.is_full = len(chosen) == room
        return not self.is_full


class PageReader:
    """Reads pages for one log."""

    def __init__(
        self,
        state: LogState,
        segments: SegmentReader,
        index: Index,
        encryptor: Encryptor | None,
        offload: Callable[[Callable[[], object]], asyncio.Future[object]],
    ) -> None:
        self._state = state
        self._segments = segments
        self._index = index
        self._encryptor = encryptor
        self._offload = offload

    async def read(self, query: Query, limit: int, bytes_max: int) -> Page:
        """One page of ``query``; see ``Log.read``."""
        if limit < 1 or bytes_max < 1:
            raise ValueError("limit and bytes_max must be at least 1")
        if query.topic is None and not (query.from_offset is None and query.to_offset is None):
            raise ValueError("offsets count within a topic: name one")
        if query.epoch is not None and query.epoch != self._state.epoch:
            raise EpochMismatch(query.epoch, self._state.epoch)
        if query.partitions:
            query = msgspec.structs.replace(query, partitions=check_partitions(query.partitions))
        topic = self._state.topics.get(query.topic) if query.topic is not None else None
        if query.topic is not None and topic is None:
            return Page([], msgspec.structs.replace(query, to_offset=0) if query.backwards else query, True)
        dropped = self._refuse_trimmed(query, topic)
        if dropped != query.known_drops:
            query = msgspec.structs.replace(query, known_drops=dropped)
        plan = _Plan(query, topic, _bounds_of(query), limit, bytes_max)
        if query.partitions or query.event_ids:
            return await self._read_indexed(plan)
        if query.backwards:
            return await self._read_back(plan)
        return await self._read_on(plan)

    def _refuse_trimmed(self, query: Query, topic: TopicState | None) -> int:
        """The seq up to which records were dropped, which the reader knows from now on."""
        if topic is not None and query.from_offset is not None:
            first = topic.first_offset
            if topic.has_drops and query.from_offset < first:
                raise PositionTrimmed(topic.name, query.from_offset, first)
        dropped = self._state.dropped_through_seq if topic is None else topic.dropped_through_seq
        if query.since is not None and max(query.since, query.known_drops) < dropped:
            raise PositionTrimmed(None, query.since, dropped)
        return max(query.known_drops, dropped)

    # Forwards

    async def _read_on(self, plan: _Plan) -> Page:
        topic, recent = plan.topic, self._state.recent
        while not self._memory_reaches(plan):
            # The files hold everything that precedes the recent records; go on in memory right behind that.
            bounds = plan.bounds
            if topic is None:
                border = recent.first_seq
                on_disk = bounds._replace(seq_to=border if bounds.seq_to is None else min(border, bounds.seq_to))
                behind = bounds._replace(seq_from=border)
            else:
                border = topic.recent_first
                on_disk = bounds._replace(
                    offset_to=border if bounds.offset_to is None else min(border, bounds.offset_to)
                )
                behind = bounds._replace(offset_from=border)
            if not await self._step(plan, self._views(topic, on_disk), on_disk, backwards=False):
                return self._page_on(plan, at_end=False)
            plan.bounds = behind
        at_end = self._take_recent(plan)
        if at_end is None:
            at_end = plan.take(self._recent_on(plan))
        return self._page_on(plan, at_end=at_end)

    def _take_recent(self, plan: _Plan) -> bool | None:
        """The recent records in one go, if nothing but the position decides which; ``None`` if not."""
        bounds, recent = plan.bounds, self._state.recent
        if self._encryptor is not None or self._state.dropped_through_seq:
            return None
        if plan.topic is None:
            if bounds != Bounds(seq_from=bounds.seq_from):
                return None
            return plan.take_lines(recent.lines, max(0, bounds.seq_from - recent.first_seq))
        if bounds != Bounds(offset_from=bounds.offset_from):
            return None
        topic = plan.topic
        start = max(0, bounds.offset_from - topic.recent_first)
        return plan.take_lines(topic.recent, start, is_plain=topic.recent_first + start >= topic.plain_from)

    def _memory_reaches(self, plan: _Plan) -> bool:
        bounds, recent = plan.bounds, self._state.recent
        if plan.topic is None:
            return bounds.seq_from >= recent.first_seq
        return bounds.offset_from >= plan.topic.recent_first or bounds.seq_from >= recent.first_seq

    def _recent_on(self, plan: _Plan) -> Iterator[tuple[Record, int]]:
        bounds = plan.bounds
        if plan.topic is None:
            lines, start = self._state.recent.lines, bounds.seq_from - self._state.recent.first_seq
        else:
            lines, start = plan.topic.recent, bounds.offset_from - plan.topic.recent_first
        for at in range(max(0, start), len(lines)):
            record = decode_trusted(lines[at])
            if _is_beyond(record, bounds):
                return
            if not (_is_short_of(record, bounds) or self._state.is_dropped(record)):
                yield unsealed(record, self._encryptor), len(lines[at])

    def _page_on(self, plan: _Plan, *, at_end: bool) -> Page:
        query, topic = plan.query, plan.topic
        if topic is not None:
            if plan.records:
                query = _continue(query, from_offset=plan.records[-1].offset + 1)
        elif plan.records:
            query = _continue(query, since=plan.records[-1].seq)
        return Page(plan.records, query, at_end)

    # Backwards

    async def _read_back(self, plan: _Plan) -> Page:
        state, topic = self._state, plan.topic
        bounds = plan.bounds
        # Memory first: it holds the newest; its end is fixed before anything is awaited.
        if topic is None:
            lines, first = state.recent.lines, state.recent.first_seq
            end = len(lines) if bounds.seq_to is None else min(len(lines), bounds.seq_to - first)
            below = bounds._replace(seq_to=first if bounds.seq_to is None else min(first, bounds.seq_to))
        else:
            lines, first = topic.recent, topic.recent_first
            end = len(lines) if bounds.offset_to is None else min(len(lines), bounds.offset_to - first)
            below = bounds._replace(offset_to=first if bounds.offset_to is None else min(first, bounds.offset_to))
        views = self._views(topic, below)
        ran_out = plan.take(self._recent_back(lines, end, bounds))
        if ran_out:
            ran_out = await self._step(plan, views, below, backwards=True)
        return self._page_back(plan, at_end=ran_out)

    def _recent_back(self, lines: list[bytes], end: int, bounds: Bounds) -> Iterator[tuple[Record, int]]:
        for at in range(end - 1, -1, -1):
            record = decode_trusted(lines[at])
            if _is_short_of(record, bounds):
                return
            if not (_is_beyond(record, bounds) or self._state.is_dropped(record)):
                yield unsealed(record, self._encryptor), len(lines[at])

    def _page_back(self, plan: _Plan, *, at_end: bool) -> Page:
        query, topic = plan.query, plan.topic
        if topic is not None:
            lowest = plan.records[-1].offset if plan.records else query.to_offset
            if at_end:
                lowest = topic.first_offset if lowest is None else min(lowest, topic.first_offset)
            if lowest is not None:
                query = msgspec.structs.replace(query, to_offset=lowest)
        else:
            last = plan.records[-1].seq - 1 if plan.records else query.until
            if at_end:
                last = 0
            if last is not None:
                query = msgspec.structs.replace(query, until=last)
        return Page(plan.records, query, at_end)

    # By what the index knows: partition, event id

    async def _read_indexed(self, plan: _Plan) -> Page:
        query = plan.query
        places, horizon = (await self._with_ids(plan), None) if query.event_ids else self._named(plan)
        ran_out = horizon is None and len(places) <= plan.limit
        places = places[: plan.limit]
        run = await self._fetch(places)
        if query.event_ids or query.from_time is not None or query.to_time is not None:
            run = _asked_for(run, plan)
        ran_out &= plan.take_run(run, None)
        looked_at = horizon
        if plan.is_full:
            looked_at = plan.records[-1].seq
        elif places:
            looked_at = places[-1].seq if horizon is None else horizon
        if query.backwards:
            last = 0 if ran_out else query.until if looked_at is None else looked_at - 1
            query = msgspec.structs.replace(query, until=last)
        elif looked_at is not None and plan.records:
            query = _continue(query, since=looked_at)
        elif looked_at is not None:  # all that was looked at is too old: the time bound is still ahead
            query = msgspec.structs.replace(query, since=looked_at)
        return Page(plan.records, query, ran_out)

    async def _with_ids(self, plan: _Plan) -> list[RecordLocation]:
        """Where records with the wanted ids may be, in the order asked for."""
        wanted = frozenset(plan.query.event_ids)
        known = self._index.has_ids(list(wanted))
        found = {place for event_id in known for place in self._index.find_id(event_id)}
        found.update(
            RecordLocation(entry.seq, entry.topic, entry.offset)
            for entry in self._state.unindexed
            if entry.event_id in wanted
        )
        for event_id in wanted:  # one that the log made is in no index: it carries its seq
            seq = seq_in_event_id(event_id)
            record = await self.at_seq(seq) if seq is not None else None
            if record is not None:
                found.add(RecordLocation(record.seq, record.topic, record.offset))
        return sorted(self._within(found, plan), reverse=plan.query.backwards)

    def _named(self, plan: _Plan) -> tuple[list[RecordLocation], int | None]:
        """
        Records that name a wanted partition, in the order asked for; and, if the index has more than was asked
        of it, the seq up to which the answer is complete.
        """
        query, bounds, limit = plan.query, plan.bounds, plan.limit + 1
        wanted = frozenset(query.partitions)
        since, until = max(0, bounds.seq_from - 1), None if bounds.seq_to is None else bounds.seq_to - 1
        lists = [
            self._index.partition(name, since=since, until=until, limit=limit, backwards=query.backwards)
            for name in wanted
        ]
        cuts = [own[-1].seq for own in lists if len(own) >= limit]
        unindexed = self._state.unindexed
        recent = [
            RecordLocation(entry.seq, entry.topic, entry.offset)
            for entry in unindexed[bisect.bisect_left(unindexed, bounds.seq_from, key=lambda entry: entry.seq) :]
            if not wanted.isdisjoint(entry.partitions)
        ]
        horizon = (max(cuts) if query.backwards else min(cuts)) if cuts else None
        if len(lists) == 1 and not recent:
            within = self._within(lists[0], plan)  # in order as they are, and none twice
        else:
            within = sorted(self._within({*recent, *chain.from_iterable(lists)}, plan), reverse=query.backwards)
        if horizon is not None:
            within = [place for place in within if (place.seq >= horizon if query.backwards else place.seq <= horizon)]
        return within, horizon

    def _within(self, places: Iterable[RecordLocation], plan: _Plan) -> list[RecordLocation]:
        """Those of the places that are committed, kept, and within the query's bounds."""
        topics, bounds = self._state.topics, plan.bounds
        last_seq = (
            self._state.committed_seq if bounds.seq_to is None else min(self._state.committed_seq, bounds.seq_to - 1)
        )
        below = OFFSET_MAX + 1 if bounds.offset_to is None else bounds.offset_to
        wanted = topics.values() if plan.topic is None else (plan.topic,)
        firsts = {topic.name: max(bounds.offset_from, topic.first_offset) for topic in wanted}
        return [
            place
            for place in places
            if bounds.seq_from <= place.seq <= last_seq and firsts.get(place.topic, below) <= place.offset < below
        ]

    async def _fetch(self, places: list[RecordLocation]) -> RecordRun:
        """The records at the places, in their order; what is not there any more is left out."""
        state = self._state
        first_recent = state.recent.first_seq
        on_disk: dict[str, list[int]] = {}
        from_memory: dict[int, tuple[Record, int]] = {}
        for seq, topic, offset in places:
            if seq < first_recent:
                on_disk.setdefault(topic, []).append(offset)
            elif (line := state.recent.line_at(seq)) is not None:
                record = decode_trusted(line)
                if not state.is_dropped(record):
                    from_memory[seq] = (unsealed(record, self._encryptor), len(line))
        streams = [
            (stream, sorted(own)) for name, own in on_disk.items() for stream in state.topics[name].streams.values()
        ]
        fetched = RecordRun([], [])
        if streams:
            wanted = [
                (view_of(stream, Bounds(offset_from=own[0], offset_to=own[-1] + 1)), own) for stream, own in streams
            ]

            def job() -> object:
                read = [self._segments.fetch(view, own) for view, own in wanted]
                records = list(chain.from_iterable(run.records for run in read))
                if self._encryptor is not None:
                    records = [unsealed(record, self._encryptor) for record in records]
                return RecordRun(records, list(chain.from_iterable(run.sizes for run in read)))

            found = await self._offload(job)
            assert isinstance(found, RecordRun)
            fetched = found
        if len(streams) == 1 and not from_memory and places[0].seq <= places[-1].seq:
            return fetched
        known = {record.seq: (record, size) for record, size in zip(*fetched, strict=True)} | from_memory
        there = [known[place.seq] for place in places if place.seq in known]
        return RecordRun([record for record, _ in there], [size for _, size in there])

    def decoded(self, line: bytes) -> Record:
        """A line of this process's own, as a reader would get it."""
        return unsealed(decode_trusted(line), self._encryptor)

    def is_dropped(self, record: Record) -> bool:
        """Whether retention has dropped the record, though memory may still hold it."""
        return self._state.is_dropped(record)

    async def at_places(self, places: list[RecordLocation]) -> list[Record]:
        """The records that are (still) at these places; for telling duplicates."""
        known = [place for place in places if place.topic in self._state.topics]
        return (await self._fetch(known)).records

    async def at_seq(self, seq: int) -> Record | None:
        """The record with this seq, if it is kept."""
        page = await self.read(Query(until=seq, backwards=True), 1, 1 << 30)
        return page.records[0] if page.records and page.records[0].seq == seq else None

    # Files

    def _views(self, topic: TopicState | None, bounds: Bounds) -> list[StreamView]:
        streams = self._state.streams() if topic is None else topic.streams.values()
        return [view_of(stream, bounds) for stream in streams]

    async def _step(self, plan: _Plan, views: list[StreamView], bounds: Bounds, *, backwards: bool) -> bool:
        """Fill the page from files; whether they ran out first."""
        if not any(view.segments for view in views):
            return True

        def job() -> object:
            wanted = plan.limit - len(plan.records)
            runs = self._segments.runs(views, bounds, backwards=backwards, wanted=wanted)
            return all(plan.take_run(run, self._encryptor) for run in runs)

        try:
            return bool(await self._offload(job))
        except FileNotFoundError:
            # Retention dropped a segment under the reader. Say so if the query asked for it by position; else what
            # was read so far is a page, and what is kept now is the rest.
            self._refuse_trimmed(plan.query, plan.topic)
            if plan.records:
                return False
            return await self._step(plan, self._views(plan.topic, bounds), bounds, backwards=backwards)


def _bounds_of(query: Query) -> Bounds:
    return Bounds(
        offset_from=query.from_offset or 0,
        offset_to=query.to_offset,
        seq_from=0 if query.since is None else query.since + 1,
        seq_to=None if query.until is None else query.until + 1,
        time_from="" if query.from_time is None else _time_text(query.from_time),
        time_to=None if query.to_time is None else _time_text(query.to_time),
    )


def _time_text(moment: datetime) -> str:
    if moment.utcoffset() is None:
        raise ValueError("the times of a query need a time zone")
    return format_utc(ns_of(moment.astimezone(UTC))).decode()


def _is_beyond(record: Record, bounds: Bounds) -> bool:
    return (
        (bounds.offset_to is not None and record.offset >= bounds.offset_to)
        or (bounds.seq_to is not None and record.seq >= bounds.seq_to)
        or (bounds.time_to is not None and record.meta.written_at >= bounds.time_to)
    )


def _is_short_of(record: Record, bounds: Bounds) -> bool:
    return (
        record.offset < bounds.offset_from or record.seq < bounds.seq_from or record.meta.written_at < bounds.time_from
    )


def _is_outside_time(record: Record, bounds: Bounds) -> bool:
    written_at = record.meta.written_at
    return written_at < bounds.time_from or (bounds.time_to is not None and written_at >= bounds.time_to)


def _asked_for(run: RecordRun, plan: _Plan) -> RecordRun:
    """Those that were asked for, of records that the index led to: it knows neither times nor, for sure, ids."""
    query = plan.query
    ids, partitions = frozenset(query.event_ids), frozenset(query.partitions)
    is_asked_for = [
        not _is_outside_time(record, plan.bounds)
        and (not ids or record.meta.event_id in ids)
        and (not partitions or not partitions.isdisjoint(record.meta.partitions))
        for record in run.records
    ]
    return RecordRun(list(compress(run.records, is_asked_for)), list(compress(run.sizes, is_asked_for)))


def _continue(query: Query, *, from_offset: int | None = None, since: int | None = None) -> Query:
    """The same query, further on. The lower bounds that were passed are replaced by the position."""
    if from_offset is not None:
        return msgspec.structs.replace(query, from_offset=from_offset, since=None, from_time=None)
    return msgspec.structs.replace(query, since=since, from_time=None)
