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

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import chain
from typing import Final

import msgspec

from tidings.access.audit import Audit
from tidings.core.clock import Clock
from tidings.core.errors import InvalidEvent, TidingsError
from tidings.core.events import Event, EventMeta
from tidings.core.ids import derived_id
from tidings.core.timers import Timers
from tidings.log.encoding import check_envelope
from tidings.log.errors import EpochMismatch, IdConflict
from tidings.log.interface import Appended, Authorise, Duplicate, Log, Query, Refused, Verdict
from tidings.log.reading import records
from tidings.log.record import Record
from tidings.wire.events import event_to_wire

from .cursors import bounds
from .delayed_records import (
    HELD,
    MS_NS,
    AuthoriseDelayed,
    DelayedEvent,
    PublisherIdentity,
    delayed_of,
    details_of,
    held_id,
    publisher_of,
    size_of,
)
from .errors import BusClosed, CursorDamaged, TooManyDelayed
from .reserved import DELAYED_GROUP, SCHEDULE_TOPIC
from .retry import record_at
from .settings import DelayedSettings
from .store import Cursor, GroupPosition, GroupStore

logger = logging.getLogger(__name__)

_PUBLISHED: Final = "DELAYED_PUBLISHED"
_CANCELLED: Final = "DELAYED_CANCELLED"
_SYSTEM_SPACE: Final = "system"
_BATCH_COUNT_MAX: Final = 512
_READ_COUNT_MAX: Final = 128
"""Events that are read together for a list."""
_READ_DISTANCE_MAX: Final = 16
"""Records that lie so near to each other are read together, with those between them."""
_SAVE_INTERVAL_S: Final = 10.0
_RETRY_NS: Final = 5_000_000_000
"""How long a due event waits after a refusal that may pass."""


class _Waiting(msgspec.Struct, gc=False):
    """Entry of an event that is not settled."""

    due_ns: int
    queued_ns: int
    """Time at which it is in the queue: after its due time if publishing is retried."""
    size_bytes: int
    subject: str
    """Of the publisher; empty for events of this process."""


class _Settled(msgspec.Struct, frozen=True):
    """The payload of a record about held ones: when each was due, in milliseconds, and its offset."""

    settled: list[tuple[int, int]]


class DelayedEvents:
    """
    The events of one running bus that wait for their time.

    Args:
        log, store: Where events are, and where the position is stored.
        publish: Stores events that are due, without waiting for anybody.
        clock: What time it is.
        limits: How many events may wait.
        authorise: Checks the rights of an event's publisher when the event is due.
        is_shredded: Whether the keys of a space are gone for good.
    """

    def __init__(
        self,
        log: Log,
        store: GroupStore,
        publish: Callable[[list[Event], Authorise | None], Awaitable[Sequence[Verdict]]],
        clock: Clock,
        limits: DelayedSettings,
        *,
        authorise: AuthoriseDelayed | None = None,
        is_shredded: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._log = log
        self._store = store
        self._publish = publish
        self._clock = clock
        self._limits = limits
        self._authorise = authorise
        self._is_shredded = is_shredded
        self._timers: Timers[int] = Timers(
            clock, self._publish_due, name="delayed events", batch_count_max=_BATCH_COUNT_MAX
        )
        self._is_started = self._is_closed = False
        self._has_position = False
        self._saved_at = clock.monotonic()
        self._is_moved = False
        self._unsettled: dict[object, int] = {}
        """Offsets of what is not settled and not in the queue: about to be held or cancelled."""
        self._waiting: dict[int, _Waiting] = {}
        """Events that are not settled, by the offset of their record."""
        self._holding: set[asyncio.Task[Appended | Duplicate]] = set()
        self._stuck: set[int] = set()
        """Offsets of due events that cannot be read until the next start."""
        self._count = self._bytes = 0
        self._used: dict[str, tuple[int, int]] = {}
        """Number and bytes of waiting events by publisher."""

    def __len__(self) -> int:
        return len(self._timers.queue)

    def count_of(self, subject: str) -> int:
        """Return the number of events that wait for a publisher."""
        return self._used.get(subject, (0, 0))[0]

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
                if kind == HELD:
                    about = details_of(record)
                    publisher = publisher_of(record, about)
                    size, subject = len(record.payload_json), "" if publisher is None else publisher.subject
                    due_ns = about.due_ms * MS_NS
                    self._waiting[record.offset] = _Waiting(due_ns, due_ns, size, subject)
                    self._charge(subject, 1, size)
                    queue.add(due_ns, record.offset)
                elif kind in (_PUBLISHED, _CANCELLED):
                    for due_ms, offset in msgspec.json.decode(record.payload_json, type=_Settled).settled:
                        queue.discard(due_ms * MS_NS, offset)
                        self._release(offset)
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

    # Bounds

    def _charge(self, subject: str, count: int, size_bytes: int) -> None:
        used = self._used.get(subject, (0, 0))
        if count + used[0]:
            self._used[subject] = used[0] + count, used[1] + size_bytes
        else:
            del self._used[subject]
        self._count += count
        self._bytes += size_bytes

    def _release(self, offset: int) -> None:
        """Forget an event that is settled."""
        self._stuck.discard(offset)
        waiting = self._waiting.pop(offset, None)
        if waiting is not None:
            self._charge(waiting.subject, -1, -waiting.size_bytes)

    def _check_limits(self, publisher: PublisherIdentity | None, due_ns: int, size_bytes: int) -> None:
        limits = self._limits
        if self._count >= limits.count_max:
            raise TooManyDelayed("in all", limits.count_max, "events")
        if self._bytes + size_bytes > limits.bytes_max:
            raise TooManyDelayed("in all", limits.bytes_max, "bytes")
        if publisher is None:
            return
        own_count, own_bytes = self._used.get(publisher.subject, (0, 0))
        if own_count >= limits.publisher_count_max:
            raise TooManyDelayed(f"of {publisher.subject!r}", limits.publisher_count_max, "events")
        if own_bytes + size_bytes > limits.publisher_bytes_max:
            raise TooManyDelayed(f"of {publisher.subject!r}", limits.publisher_bytes_max, "bytes")
        if due_ns - self._clock.now_ns() > limits.delay_s_max * 1e9:
            problem = f"is more than {limits.delay_s_max:g} s ahead"
            raise InvalidEvent("at", problem, "publish it nearer to its time; the limit is bus.delayed.delay_s_max")

    # What users ask for

    async def hold(
        self, event: Event, due_ns: int, authorise: Authorise | None, publisher: PublisherIdentity | None = None
    ) -> Appended | Duplicate:
        """
        Store an event that is to be published at its time; returns when that is durable. The place is that of the record which holds it, the
        id is the event's own. ``authorise`` is asked about the event itself, now. ``publisher`` is stored with it, for ``AuthoriseDelayed``.

        Raises:
            InvalidEvent, IdConflict, StorageFull: As ``Log.append`` does.
            TooManyDelayed: As many events wait as may, or as many bytes.
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
            HELD,
            meta.space_id,
            held_id(meta.event_id),
            actor=meta.actor,
            idem_key=None if meta.idem_key is None else derived_id("delayed", meta.topic, meta.idem_key),
            band=meta.band,
            extra={
                "due_ms": due_ns // MS_NS,
                "publishes": meta.event_id,
                "publisher": None if publisher is None else msgspec.to_builtins(publisher),
            },
        )
        size, subject = size_of(envelope, event), "" if publisher is None else publisher.subject
        self._check_limits(publisher, due_ns, size)
        if not self._has_position:
            await self._save()
        held = Event(held_meta, {"meta": envelope, "payload": event.payload})
        accept: Authorise | None = None if authorise is None else lambda _: authorise(event)
        # A caller that is cancelled leaves the task running: what it stores is counted, and published at its time.
        task = asyncio.create_task(self._store_held(held, due_ns, accept, size, subject), name="hold a delayed event")
        self._holding.add(task)
        task.add_done_callback(self._held)
        try:
            stored = await asyncio.shield(task)
        except IdConflict as error:
            given = {"meta.event_id": meta.event_id, "meta.idem_key": meta.idem_key or ""}[error.field]
            raise IdConflict(error.field, given, error.seq) from None
        if isinstance(stored, Appended):
            return msgspec.structs.replace(stored, event_id=meta.event_id)
        first = await record_at(self._log, SCHEDULE_TOPIC, stored.offset)
        return stored if first is None else msgspec.structs.replace(stored, event_id=details_of(first).publishes)

    async def _store_held(
        self, held: Event, due_ns: int, authorise: Authorise | None, size_bytes: int, subject: str
    ) -> Appended | Duplicate:
        mark = object()
        self._unsettled[mark] = bounds(self._log, SCHEDULE_TOPIC)[1]
        self._charge(subject, 1, size_bytes)
        is_added = False
        try:
            stored = await self._log.append(held, authorise=authorise)
            if isinstance(stored, Appended):
                is_added = True
                self._waiting[stored.offset] = _Waiting(due_ns, due_ns, size_bytes, subject)
                self._timers.add(due_ns, stored.offset)
                self._start_if_needed()
            return stored
        finally:
            del self._unsettled[mark]
            if not is_added:
                self._charge(subject, -1, -size_bytes)

    def _held(self, task: asyncio.Task[Appended | Duplicate]) -> None:
        self._holding.discard(task)
        if not task.cancelled():
            task.exception()  # it is the caller's; one that was cancelled does not ask for it

    async def cancel(self, event_id: str, authorise: Authorise | None = None) -> bool:
        """
        Have an event not published; whether it was still waiting. It is not once this has returned, whatever happens. ``authorise`` is asked
        about an event that waits; what it raises is the answer.
        """
        record = await self._find(event_id)
        if record is None:
            return False
        offset = record.offset
        waiting = self._waiting.get(offset)
        if waiting is None:
            return False
        if authorise is not None and (offset in self._stuck or (waiting.queued_ns, offset) in self._timers.queue):
            authorise(delayed_of(record).event)
        is_stuck = offset in self._stuck
        if not is_stuck and not self._timers.discard(waiting.queued_ns, offset):
            return False
        self._stuck.discard(offset)
        self._unsettled[offset] = offset
        try:
            # Somebody published it meanwhile, or a crash came before it was settled.
            is_published = await self._is_published(event_id)
            await self._settle(_PUBLISHED if is_published else _CANCELLED, [(waiting.due_ns, offset)])
        except BaseException:
            if is_stuck:
                self._stuck.add(offset)
            else:
                self._timers.add(waiting.queued_ns, offset)
            raise
        finally:
            del self._unsettled[offset]
        return not is_published

    async def cancel_of(self, subject: str) -> int:
        """Cancel all events that wait for a publisher. Return their number."""
        offsets = sorted(offset for offset, waiting in self._waiting.items() if waiting.subject == subject)
        cancelled = 0
        for start in range(0, len(offsets), _BATCH_COUNT_MAX):
            batch: list[tuple[int, int]] = []
            for offset in offsets[start : start + _BATCH_COUNT_MAX]:
                waiting = self._waiting.get(offset)
                if waiting is not None and (offset in self._stuck or self._timers.discard(waiting.queued_ns, offset)):
                    batch.append((waiting.due_ns, offset))
                    self._unsettled[offset] = offset
            try:
                if batch:
                    await self._settle(_CANCELLED, batch)
            except BaseException:
                for _, offset in batch:
                    if offset not in self._stuck:
                        self._timers.add(self._waiting[offset].queued_ns, offset)
                raise
            finally:
                for _, offset in batch:
                    del self._unsettled[offset]
            cancelled += len(batch)
        return cancelled

    async def waiting(self, after: int = -1, subject: str | None = None) -> AsyncIterator[DelayedEvent]:
        """
        The events that wait, in the order of their records, from behind an offset on; with ``subject``, those of one publisher. Not those of
        spaces that are sealed and whose key is not at hand.
        """
        offsets = sorted(
            offset
            for offset, waiting in self._waiting.items()
            if offset > after and subject in (None, waiting.subject) and offset not in self._stuck
        )
        for start in range(0, len(offsets), _READ_COUNT_MAX):
            for record in await self._read(offsets[start : start + _READ_COUNT_MAX]):
                waiting = self._waiting.get(record.offset)
                if (
                    waiting is not None
                    and record.meta.sealed is None
                    and (waiting.queued_ns, record.offset) in self._timers.queue
                ):
                    try:
                        delayed = delayed_of(record)
                    except InvalidEvent as error:
                        logger.warning("offset %d of topic %s is not listed: %s", record.offset, SCHEDULE_TOPIC, error)
                        continue
                    yield delayed

    async def _find(self, event_id: str) -> Record | None:
        query = Query(topic=SCHEDULE_TOPIC, event_ids=(held_id(event_id),))
        return next(iter((await self._log.read(query)).records), None)

    async def _is_published(self, event_id: str) -> bool:
        return bool((await self._log.read(Query(event_ids=(event_id,)), limit=1)).records)

    # What is due

    async def _publish_due(self, due: list[tuple[int, int]]) -> None:
        """Publish events in the order in which they are due; those due at the same time in the order in which they were given."""
        records_by_offset = {record.offset: record for record in await self._read(sorted(offset for _, offset in due))}
        entries: list[tuple[int, int]] = []
        events: list[DelayedEvent] = []
        given_up: list[tuple[int, int]] = []
        for _, offset in due:
            record = records_by_offset.get(offset)
            if record is None:
                self._release(offset)
                continue
            entry = self._waiting[offset].due_ns, offset
            try:
                events.append(delayed_of(record))
            except TidingsError as error:
                if record.meta.sealed is not None and self._is_shredded(record.meta.space_id):
                    logger.warning("a delayed event is given up, its space was shredded: %s", error)
                    given_up.append(entry)
                else:
                    logger.error("a delayed event cannot be read; it waits for the next start: %s", error)
                    self._stuck.add(offset)
            else:
                entries.append(entry)
        published: list[tuple[int, int]] = []
        denied: set[str] = set()
        authorise = self._authorise_each(events, denied)
        verdicts = await self._publish([delayed.event for delayed in events], authorise)
        for entry, delayed, verdict in zip(entries, events, verdicts, strict=True):
            if not isinstance(verdict, Refused):
                published.append(entry)
            elif verdict.error.retryable:
                logger.warning("the delayed event %s is retried: %s", delayed.event_id, verdict.error)
                waiting = self._waiting[entry[1]]
                waiting.queued_ns = self._clock.now_ns() + _RETRY_NS
                self._timers.add(waiting.queued_ns, entry[1])
            else:
                logger.error("the delayed event %s is refused: %s", delayed.event_id, verdict.error)
                if delayed.event_id in denied:
                    await self._audit_refusal(delayed, verdict.error)
                given_up.append(entry)
        for kind, settled in ((_PUBLISHED, published), (_CANCELLED, given_up)):
            if settled:
                await self._settle(kind, settled)
        if self._clock.monotonic() - self._saved_at >= _SAVE_INTERVAL_S:
            await self._save()

    def _authorise_each(self, events: list[DelayedEvent], denied: set[str]) -> Authorise | None:
        """Return a check of these events; the ids of those it refuses are in ``denied``."""
        check = self._authorise
        if check is None:
            return None
        by_id = {delayed.event_id: delayed for delayed in events}

        def authorise(event: Event) -> None:
            try:
                check(by_id[event.meta.event_id])
            except TidingsError:
                denied.add(event.meta.event_id)
                raise

        return authorise

    async def _audit_refusal(self, delayed: DelayedEvent, error: TidingsError) -> None:
        meta, publisher = delayed.event.meta, delayed.publisher
        details = {
            "event_id": delayed.event_id,
            "topic": str(meta.topic),
            "space_id": str(meta.space_id),
            "error": error.code,
        }
        subject = "process" if publisher is None else publisher.subject
        await Audit(subject, "delayed").begun(self._log, "publish_refused", details)

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
        settled = _Settled([(due_ns // MS_NS, offset) for due_ns, offset in entries])
        await self._log.append(
            Event(EventMeta(SCHEDULE_TOPIC, kind, _SYSTEM_SPACE), msgspec.to_builtins(settled)), from_reserve=True
        )
        self._is_moved = True
        for _, offset in entries:
            self._release(offset)

    async def _save(self) -> None:
        """Store up to where all is settled."""
        self._saved_at, self._is_moved = self._clock.monotonic(), False
        _, end = bounds(self._log, SCHEDULE_TOPIC)
        first = min(chain(self._waiting, self._unsettled.values()), default=end)
        try:
            async with self._store.changing:  # what is dropped meanwhile is not needed
                position = GroupPosition(Cursor(first - 1), {})
                await self._store.save(SCHEDULE_TOPIC, DELAYED_GROUP, position)
        except OSError as error:
            self._is_moved = True
            logger.error("up to where delayed events are settled cannot be stored: %s", error)
        else:
            self._has_position = True
