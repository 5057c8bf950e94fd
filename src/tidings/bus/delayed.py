"""
Publishing later: events that are stored now and published at their time.

An event that waits is a record of the topic ``schedule``, in the event's own space, and so sealed like any other of that space. What waits in
memory is when and where (``core.timers``), not the event. When its time has come the event is read back and published under its own id, and a
record says that it is settled; if a crash comes between the two, publishing it again finds that it is there. So it is published once, however
often the process starts, and a cancelled one is not.

Everything before the first record that waits is settled. That place is stored as the position of a group of the topic, ``delayed``: it is where
the next start begins to read, and what retention must not pass.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from itertools import chain
from typing import Final

import msgspec

from tidings.core.clock import Clock, datetime_of
from tidings.core.errors import InvalidEvent, TidingsError
from tidings.core.events import Event, EventMeta
from tidings.core.ids import derived_id
from tidings.core.timers import Timers
from tidings.core.validation import UNREADABLE
from tidings.log.encoding import check_envelope, timestamp_ns
from tidings.log.errors import EpochMismatch, IdConflict
from tidings.log.interface import Appended, Authorise, Duplicate, Log, Query, Refused, Verdict
from tidings.log.reading import records
from tidings.log.record import Record
from tidings.wire.events import event_from_json, event_to_wire

from .cursors import bounds
from .errors import BusClosed, CursorDamaged
from .retry import record_at
from .store import Cursor, GroupPosition, GroupStore

logger = logging.getLogger(__name__)

SCHEDULE_TOPIC: Final = "schedule"
DELAYED_GROUP: Final = "delayed"
_HELD: Final = "DELAYED_HELD"
_PUBLISHED: Final = "DELAYED_PUBLISHED"
_CANCELLED: Final = "DELAYED_CANCELLED"
_SYSTEM_SPACE: Final = "system"
_MS_NS: Final = 1_000_000
_BATCH_COUNT_MAX: Final = 512
_READ_DISTANCE_MAX: Final = 16
"""Records that lie so near to each other are read together, with those between them."""
_SAVE_INTERVAL_S: Final = 10.0


class DelayedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event that waits for its time."""

    event_id: str
    due: datetime
    event: Event
    offset: int
    """Of the record that holds it, in the topic ``schedule``."""


class _Settled(msgspec.Struct, frozen=True):
    """The payload of a record about held ones: when each was due, in milliseconds, and its offset."""

    settled: list[tuple[int, int]]


def due_ns_of(clock: Clock, delay: timedelta | None, at: datetime | None) -> int | None:
    """
    When an event is to be published, on a whole millisecond; ``None`` for at once.

    Raises:
        InvalidEvent: Both are given, or the delay is negative or none.
        InvalidTimestamp: The time has no zone, or is one that the log cannot order.
    """
    if delay is not None:
        if at is not None:
            raise InvalidEvent("at", "is given together with a delay", "give one of the two")
        if not isinstance(delay, timedelta) or delay < timedelta():
            raise InvalidEvent("delay", f"must be a timedelta that is not negative, not {delay!r}")
        try:
            at = datetime_of(clock.now_ns()) + delay
        except OverflowError:
            raise InvalidEvent("delay", "ends after the year 9999") from None
    due_ns = -(-timestamp_ns(at, "at") // _MS_NS) * _MS_NS
    return due_ns if due_ns > clock.now_ns() else None


def due_of(clock: Clock, event: Event, delay: timedelta | None, at: datetime | None) -> tuple[Event, datetime | None]:
    """
    For who has an event published elsewhere: when, ``None`` for at once; and the event, which without a time of its own happens then.

    Raises:
        InvalidEvent, InvalidTimestamp: As ``due_ns_of`` does.
    """
    due_ns = None if delay is None and at is None else due_ns_of(clock, delay, at)
    if due_ns is None:
        return event, None
    due = datetime_of(due_ns)
    if event.meta._ts is None:
        event = Event(EventMeta(**event.meta._values() | {"ts": due}), event.payload)
    return event, due


class DelayedEvents:
    """
    The events of one running bus that wait for their time.

    Args:
        log, store: Where events are, and where the position is stored.
        publish: Stores events that are due, without waiting for anybody.
        clock: What time it is.
    """

    def __init__(
        self, log: Log, store: GroupStore, publish: Callable[[list[Event]], Awaitable[Sequence[Verdict]]], clock: Clock
    ) -> None:
        self._log = log
        self._store = store
        self._publish = publish
        self._clock = clock
        self._timers: Timers[int] = Timers(
            clock, self._publish_due, name="delayed events", batch_count_max=_BATCH_COUNT_MAX
        )
        self._is_started = self._is_closed = False
        self._has_position = False
        self._saved_at = clock.monotonic()
        self._is_moved = False
        self._unsettled: dict[object, int] = {}
        """Offsets of what is not settled and not in the queue: about to be held or cancelled, or due and impossible to publish."""

    def __len__(self) -> int:
        return len(self._timers.queue)

    # Starting and closing

    async def open(self) -> None:
        """Find out what waits, and begin to publish what is due."""
        first, end = bounds(self._log, SCHEDULE_TOPIC)
        if end == 0:
            return
        try:
            position = await self._store.load(SCHEDULE_TOPIC, DELAYED_GROUP)
        except (CursorDamaged, EpochMismatch) as error:
            logger.warning("%s; all of the topic %s is read", error, SCHEDULE_TOPIC)
            position = None
        if position is not None:
            self._has_position = True
            first = max(first, position.cursor.committed + 1)
        queue = self._timers.queue
        async for record in records(self._log, Query(topic=SCHEDULE_TOPIC, from_offset=first)):
            kind = record.meta.type
            try:
                if kind == _HELD:
                    queue.add(_due_ms(record) * _MS_NS, record.offset)
                elif kind in (_PUBLISHED, _CANCELLED):
                    for due_ms, offset in msgspec.json.decode(record.payload_json, type=_Settled).settled:
                        queue.discard(due_ms * _MS_NS, offset)
            except msgspec.ValidationError as error:
                # Somebody else's: a record that this module did not write keeps no bus from starting.
                logger.warning("passed over offset %d of topic %s: %s", record.offset, SCHEDULE_TOPIC, error)
        self._start_if_needed()

    async def close(self) -> None:
        """Stop. What waits is published after the next start."""
        self._is_closed = True
        await self._timers.close()
        if self._is_moved:
            await self._save()

    def _start_if_needed(self) -> None:
        # Most buses delay nothing, and have no task for it. What is held while the bus closes is published after the next start.
        if not self._is_started and not self._is_closed and len(self._timers.queue):
            self._is_started = True
            self._timers.start()

    # What users ask for

    async def hold(self, event: Event, due_ns: int, authorise: Authorise | None) -> Appended | Duplicate:
        """
        Store an event that is to be published at its time; returns when that is durable. The place is that of the record which holds it, the
        id is the event's own. ``authorise`` is asked about the event itself, now.

        Raises:
            InvalidEvent, IdConflict, StorageFull: As ``Log.append`` does.
            BusClosed: The bus is being closed.
        """
        if self._is_closed:
            raise BusClosed
        meta = event.meta
        if meta.topic == SCHEDULE_TOPIC:
            raise InvalidEvent("meta.topic", f"events of the topic {SCHEDULE_TOPIC!r} are not delayed")
        is_id_given = meta._event_id is not None
        check_envelope(meta)
        if is_id_given and await self._is_published(meta.event_id):
            return await self._log.append(event, authorise=authorise)  # a duplicate, or in conflict
        left_out = ("space_id", "event_id") if meta._ts is not None else ("space_id", "event_id", "ts")
        envelope = msgspec.json.decode(event_to_wire(Event(meta, {})))["meta"]
        # An event that is held again, under its id or key, says the same: what may differ then stands beside the payload. And without a
        # time of its own it happens when it is published; its age must not count from now.
        for name in left_out:
            del envelope[name]
        held_meta = EventMeta(
            SCHEDULE_TOPIC,
            _HELD,
            meta.space_id,
            _held_id(meta.event_id),
            actor=meta.actor,
            idem_key=None if meta.idem_key is None else derived_id("delayed", meta.topic, meta.idem_key),
            band=meta.band,
            extra={"due_ms": due_ns // _MS_NS, "publishes": meta.event_id},
        )
        if not self._has_position:
            await self._save()
        mark = object()
        self._unsettled[mark] = bounds(self._log, SCHEDULE_TOPIC)[1]
        # Whoever gives up waiting leaves the mark: the event may have been stored, and is then found at the next start.
        try:
            stored = await self._log.append(
                Event(held_meta, {"meta": envelope, "payload": event.payload}),
                authorise=None if authorise is None else lambda _: authorise(event),
            )
        except TidingsError as error:
            del self._unsettled[mark]
            if isinstance(error, IdConflict):
                given = {"meta.event_id": meta.event_id, "meta.idem_key": meta.idem_key or ""}[error.field]
                raise IdConflict(error.field, given, error.seq) from None
            raise
        del self._unsettled[mark]
        if isinstance(stored, Appended):
            self._timers.add(due_ns, stored.offset)
            self._start_if_needed()
            return msgspec.structs.replace(stored, event_id=meta.event_id)
        first = await record_at(self._log, SCHEDULE_TOPIC, stored.offset)
        return stored if first is None else msgspec.structs.replace(stored, event_id=_about(first).publishes)

    async def cancel(self, event_id: str, authorise: Authorise | None = None) -> bool:
        """
        Have an event not published; whether it was still waiting. It is not once this has returned, whatever happens. ``authorise`` is asked
        about an event that waits; what it raises is the answer.
        """
        record = await self._find(event_id)
        if record is None:
            return False
        entry = (_due_ms(record) * _MS_NS, record.offset)
        if authorise is not None and entry in self._timers.queue:
            authorise(_delayed(record).event)
        if not self._timers.discard(*entry):
            return False
        self._unsettled[record.offset] = record.offset
        try:
            # Somebody published it meanwhile, or a crash came before it was settled.
            is_published = await self._is_published(event_id)
            await self._settle(_PUBLISHED if is_published else _CANCELLED, [entry])
        except BaseException:
            self._timers.add(*entry)
            raise
        finally:
            del self._unsettled[record.offset]
        return not is_published

    async def waiting(self, after: int = -1) -> AsyncIterator[DelayedEvent]:
        """
        The events that wait, in the order of their records, from behind an offset on; not those of spaces that are sealed and whose key is not
        at hand.
        """
        if not len(self._timers.queue):
            return
        first = max(after + 1, min(self._timers.queue.keys()), bounds(self._log, SCHEDULE_TOPIC)[0])
        async for record in records(self._log, Query(topic=SCHEDULE_TOPIC, from_offset=first)):
            is_held = record.meta.type == _HELD and record.meta.sealed is None
            if is_held and (_due_ms(record) * _MS_NS, record.offset) in self._timers.queue:
                yield _delayed(record)

    async def _find(self, event_id: str) -> Record | None:
        query = Query(topic=SCHEDULE_TOPIC, event_ids=(_held_id(event_id),))
        return next(iter((await self._log.read(query)).records), None)

    async def _is_published(self, event_id: str) -> bool:
        return bool((await self._log.read(Query(event_ids=(event_id,)), limit=1)).records)

    # What is due

    async def _publish_due(self, due: list[tuple[int, int]]) -> None:
        entries = {offset: (due_ns, offset) for due_ns, offset in due}
        waiting: list[tuple[int, int]] = []
        events: list[Event] = []
        for record in await self._read(sorted(entries)):
            try:
                events.append(_delayed(record).event)
            except TidingsError as error:
                logger.error("a delayed event cannot be read; it waits for the next start: %s", error)
                self._unsettled[record.offset] = record.offset
            else:
                waiting.append(entries[record.offset])
        settled: list[tuple[int, int]] = []
        for entry, event, verdict in zip(waiting, events, await self._publish(events), strict=True):
            if isinstance(verdict, Refused):
                logger.error("the delayed event %s is refused: %s", event.meta.event_id, verdict.error)
                if verdict.error.retryable:
                    self._unsettled[entry[1]] = entry[1]
                    continue
            settled.append(entry)
        if settled:
            await self._settle(_PUBLISHED, settled)
        if self._clock.monotonic() - self._saved_at >= _SAVE_INTERVAL_S:
            await self._save()

    async def _read(self, offsets: list[int]) -> list[Record]:
        """The records at some offsets, in order: those that lie near to each other in one go."""
        found: list[Record] = []
        at = 0
        while at < len(offsets):
            first = at
            while at + 1 < len(offsets) and offsets[at + 1] - offsets[at] <= _READ_DISTANCE_MAX:
                at += 1
            at += 1
            wanted = set(offsets[first:at])
            query = Query(topic=SCHEDULE_TOPIC, from_offset=offsets[first], to_offset=offsets[at - 1] + 1)
            found += [record async for record in records(self._log, query) if record.offset in wanted]
        if len(found) < len(offsets):
            logger.error("%d delayed events are no longer in the log", len(offsets) - len(found))
        return found

    async def _settle(self, kind: str, entries: list[tuple[int, int]]) -> None:
        settled = _Settled([(due_ns // _MS_NS, offset) for due_ns, offset in entries])
        await self._log.append(
            Event(EventMeta(SCHEDULE_TOPIC, kind, _SYSTEM_SPACE), msgspec.to_builtins(settled)), from_reserve=True
        )
        self._is_moved = True

    async def _save(self) -> None:
        """Store up to where all is settled."""
        self._saved_at, self._is_moved = self._clock.monotonic(), False
        _, end = bounds(self._log, SCHEDULE_TOPIC)
        first = min(chain(self._timers.queue.keys(), self._unsettled.values()), default=end)
        try:
            async with self._store.changing:  # what is dropped meanwhile is not needed
                position = GroupPosition(Cursor(first - 1), {})
                await self._store.save(SCHEDULE_TOPIC, DELAYED_GROUP, position)
        except OSError as error:
            self._is_moved = True
            logger.error("up to where delayed events are settled cannot be stored: %s", error)
        else:
            self._has_position = True


class HeldMeta(msgspec.Struct, frozen=True):
    """Fields of a held event's envelope that decide who may read it. Its space is that of the record."""

    topic: str
    type: str = ""
    partitions: tuple[str, ...] = ()


class HeldContent(msgspec.Struct, frozen=True):
    """The payload of a record that holds an event."""

    meta: HeldMeta
    payload: msgspec.Raw


_HELD_CONTENT: Final = msgspec.json.Decoder(HeldContent)


def holds_event(kind: str) -> bool:
    """Return whether a record of this type in the topic ``schedule`` holds an event."""
    return kind == _HELD


def held_content(payload_json: bytes) -> HeldContent | None:
    """Return the event in a record's payload; ``None`` if it cannot be read: sealed without a key, or written by another program."""
    try:
        return _HELD_CONTENT.decode(payload_json)
    except UNREADABLE:
        return None


def _held_id(event_id: str) -> str:
    return derived_id("delayed", event_id)


class _Held(msgspec.Struct, frozen=True):
    """What a record that holds an event says beside its payload."""

    due_ms: int
    publishes: str
    """The event's own id."""


def _about(record: Record) -> _Held:
    return msgspec.convert(record.meta.extra, _Held)


def _due_ms(record: Record) -> int:
    return _about(record).due_ms


def _delayed(record: Record) -> DelayedEvent:
    held = record.payload
    event_id, due = _about(record).publishes, datetime_of(_due_ms(record) * _MS_NS)
    held["meta"] = {"ts": due.isoformat()} | held["meta"] | {"space_id": record.meta.space_id, "event_id": event_id}
    event = event_from_json(msgspec.json.encode(held))
    return DelayedEvent(event_id=event_id, due=due, event=event, offset=record.offset)
