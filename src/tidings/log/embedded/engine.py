"""
The embedded engine: one event's way from ``append`` to its segment.

``append`` checks the event, and ``_accept`` finds duplicates and gives it a place in the open batch (``staging``), for whose commit
it waits. ``_commit_next`` hands the next batch to the commit thread, which writes it to the journal; ``_publish`` makes it visible,
wakes all who wait, and passes its lines on to the segment writer, which works after the acknowledgement. The loop's thread owns
all state; the other threads only do disk work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tidings.core.clock import Clock
from tidings.core.errors import TidingsError
from tidings.core.events import Event, EventMeta

from ..encoding import EventDraft, EventEncoder
from ..encryption import Encryptor
from ..errors import LogClosed, LogFenced, StorageFull
from ..interface import Appended, Authorise, Duplicate, Health, Page, Position, Query, Refused, TopicInfo, Verdict
from ..retention import Holders, RetentionPlan, SegmentDecision, carry_out
from ..segment import Head
from ..settings import LogSettings
from .disk import Disk, FolderLock, is_full
from .dropping import SegmentDropper
from .duplicates import Duplicates, Staged
from .index import Index, IndexDamaged, IndexFull
from .journal import Journal, JournalBusy
from .layout import Layout, StreamKey
from .pages import PageReader
from .reader import SegmentReader
from .reserve import Reserve, SegmentRoom
from .segment_writer import FlushScheduler, SegmentWriter, Unflushed
from .staging import (
    BatchRange,
    CommitBatch,
    RoomPlanner,
    Staging,
    TopicBatch,
    UnsyncedCommits,
    WriteStatus,
    same_error,
)
from .state import CommitWaiters, LogState, SegmentWrite, stream_of
from .tombstones import Tombstones

logger = logging.getLogger(__name__)

_BATCH_EVENTS_MAX: Final = 4096
"""Encoding a batch holds up the event loop; this many events do so for some milliseconds."""
_FULL_RETRY_S: Final = 0.2
_RESERVE_TRIES: Final = 3


class EmbeddedLog:
    """The log on files. Made by ``open_log``, which recovers first."""

    def __init__(
        self,
        *,
        layout: Layout,
        settings: LogSettings,
        state: LogState,
        disk: Disk,
        clock: Clock,
        encryptor: Encryptor | None,
        index: Index,
        segment_writer: SegmentWriter,
        journal: Journal,
        reserve: Reserve,
        room: SegmentRoom | None,
        reserve_disk: Disk,
        tombstone_disk: Disk,
        unflushed: Sequence[Unflushed],
        full: StorageFull | IndexFull | None,
        lock: FolderLock,
        last_written_ns: int,
    ) -> None:
        loop = asyncio.get_running_loop()
        is_inline = disk.threads.is_inline
        self._loop = loop
        self._layout = layout
        self._settings = settings
        self._state = state
        self._clock = clock
        self._index = index
        self._segment_writer = segment_writer
        self._journal = journal
        self._lock = lock
        encoder = EventEncoder(settings, encryptor)
        self._check, self._seal = encoder.check, encoder.seal
        self._is_flat = settings.layout == "flat"
        self._staging = Staging(loop, state, clock, last_written_ns, is_flat=self._is_flat)
        self._readers = None if is_inline else ThreadPoolExecutor(2, "tidings-log-read")
        self._segments = SegmentReader(disk, layout)
        self._pages = PageReader(state, self._segments, index, encryptor, self._offload)
        tombstones = Tombstones(tombstone_disk, layout, encryptor)
        self._duplicates = Duplicates(index, self._pages, tombstones, self._staging)
        self._waiters = CommitWaiters(loop)

        # What is staged is counted in batches: a sum over single events would cost each of them.
        self._batches_max = max(1, settings.staged_bytes_max // settings.batch_bytes_max)
        self._batch_bytes_max = settings.batch_bytes_max
        self._space_waiters: list[asyncio.Future[None]] = []
        self._is_commit_due = False
        self._commit_executor = disk.threads.serial_executor("commit")
        self._is_committing = False
        self._is_journal_busy = False

        self._room = room
        self._rooms = RoomPlanner(state, settings, disk.space(layout.root).block_bytes)
        self._is_synced = settings.durability == "sync"
        self._unsynced = UnsyncedCommits(loop, settings, self._commit_next)

        self._flush_executor = disk.threads.serial_executor("flush")
        self._flushing = FlushScheduler(
            self._flush_executor,
            segment_writer,
            journal,
            state,
            self._duplicates,
            reserve=reserve,
            room=room,
            delay_s=0.0 if is_inline else None,
            on_flushed=self._flushed,
            on_failed=self._flush_failed,
        )
        self._dropper = SegmentDropper(
            disk=reserve_disk,
            layout=layout,
            state=state,
            index=index,
            tombstones=tombstones,
            segments=self._segments,
            flushing=self._flushing,
        )
        self._job_waiters: list[asyncio.Future[None]] = []
        self._full_timer: asyncio.TimerHandle | None = None

        self._status = WriteStatus(layout.workspace)
        self._is_closing = False
        self._is_closed = False
        if not self._is_synced:
            logger.warning(
                "durability is %r: acknowledged events can be lost in a crash (workspace %s)",
                settings.durability,
                layout.workspace,
            )
        for each in unflushed:
            self._flushing.add(*each)
        if full is not None:
            self._flushing.needs_spare = isinstance(full, StorageFull)
            self._flushing.is_index_due = isinstance(full, IndexFull)
            self._become_full(full)
        elif unflushed:
            self._flushing.schedule()

    # What the interface promises

    @property
    def position(self) -> Position:
        return Position(self._state.epoch, self._state.committed_seq)

    @property
    def dropped_through_seq(self) -> int:
        return self._state.dropped_through_seq

    @property
    def layout(self) -> Layout:
        """Where the log's files are."""
        return self._layout

    def topics(self) -> dict[str, TopicInfo]:
        return self._state.infos()

    def topic(self, name: str) -> TopicInfo | None:
        return self._state.info(name)

    def health(self) -> Health:
        status = self._status
        return Health(
            is_writable=status.refusal is None,
            is_durable=self._is_synced,
            is_storage_full=status.is_full and not status.is_index_full,
            is_index_full=status.is_index_full,
            problem=str(status.refusal()) if status.refusal is not None else None,
        )

    async def append(
        self, event: Event, authorise: Authorise | None = None, *, from_reserve: bool = False
    ) -> Appended | Duplicate:
        if from_reserve:
            return await self._append_from_reserve(event, authorise)
        if authorise is not None:
            authorise(event)
        draft = self._check(event)
        staging = self._staging
        batch = staging.open_batch
        if batch is None or draft.needs_slow_path:
            placed = self._accept_at_once(draft, event.meta)
            if placed is None:
                accepted = await self._accept(draft, event, authorise)
                if isinstance(accepted, Duplicate):
                    return accepted
                placed = accepted
            batch, at = placed
        else:
            # What ``_accept`` comes to for most events: this is where a busy log spends its time.
            drafts = batch.drafts
            at = len(drafts)
            draft.event_id = event.meta._event_id = staging.ids.make(batch.first_seq + at)
            drafts.append(draft)
            if at >= _BATCH_EVENTS_MAX:
                staging.open_batch = None
        try:
            await batch.future
        except asyncio.CancelledError:
            await batch.wait_on()
        if batch.failure is not None:
            raise batch.failure()
        return batch.verdicts[at]

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        answers: list[Duplicate | Refused | Staged | tuple[CommitBatch, int] | BatchRange] = []
        staging, check, make_id = self._staging, self._check, self._staging.ids.make
        self._look_up_ids(events)
        run: BatchRange | None = None
        for event in events:
            try:
                if authorise is not None:
                    authorise(event)
                draft = check(event)
                batch = staging.open_batch
                if batch is None or draft.needs_slow_path:
                    run = None
                    answers.append(
                        self._accept_at_once(draft, event.meta)
                        or await self._accept(draft, event, authorise, waits=False)
                    )
                    continue
                # As in ``append``. Those that follow one another in a batch are answered together.
                drafts = batch.drafts
                at = len(drafts)
                draft.event_id = event.meta._event_id = make_id(batch.first_seq + at)
                drafts.append(draft)
                if at >= _BATCH_EVENTS_MAX:
                    staging.open_batch = None
                if run is None or run.batch is not batch:
                    run = BatchRange(batch, at)
                    answers.append(run)
                run.end = at + 1
            except (LogClosed, LogFenced, StorageFull):
                # Whoever is told so must be able to find out what was stored: nothing of it may come later.
                for answer in answers:
                    if not isinstance(answer, Duplicate | Refused):
                        with contextlib.suppress(TidingsError):
                            await (answer.batch if isinstance(answer, BatchRange) else answer[0]).wait()
                raise
            except TidingsError as error:
                run = None
                answers.append(Refused(error))
        verdicts: list[Verdict] = []
        for answer in answers:
            if isinstance(answer, Duplicate | Refused):
                verdicts.append(answer)
                continue
            if isinstance(answer, BatchRange):
                await answer.batch.wait()
                verdicts += answer.batch.verdicts[answer.start : answer.end]
                continue
            batch, at = answer
            if not batch.is_committed:
                await batch.wait()
            appended = batch.verdicts[at]
            verdicts.append(_as_duplicate(appended) if isinstance(answer, Staged) else appended)
        return verdicts

    def _accept_at_once(self, draft: EventDraft, meta: EventMeta) -> tuple[CommitBatch, int] | None:
        """Give the draft a place in the open batch, if nothing has to be waited for and it is surely no duplicate."""
        is_refused = self._status.refusal is not None
        if is_refused and (not self._status.is_index_full or self._is_closing or _has_entries(draft)):
            return None
        if len(self._staging.batches) > self._batches_max:
            return None
        if draft.is_given or draft.idem_key is not None:
            try:
                if not self._duplicates.is_surely_new(draft):
                    return None
            except IndexDamaged as error:
                self._fence(error)
                raise self._refused() from error
        placed = self._join(draft, meta)
        if is_refused:
            self._staging.open_batch = None  # the next event may need the index
        return placed

    async def _accept(
        self, draft: EventDraft, event: Event, authorise: Authorise | None, *, waits: bool = True
    ) -> Duplicate | Staged | tuple[CommitBatch, int]:
        """
        Give the draft a place in the open batch, unless it repeats something.

        A draft that repeats an event on its way waits for that one: a duplicate's answer must not be earlier than its
        original's. Without ``waits`` it is the caller who waits.
        """
        if len(self._staging.batches) > self._batches_max:
            await self._wait_for_space()
            if authorise is not None:
                authorise(event)
        if self._status.refusal is not None:
            raise self._refused()
        if draft.is_given or draft.idem_key is not None:
            found = await self._find_repeated(draft)
            if isinstance(found, Staged) and waits:
                batch, at = found
                await batch.wait()
                return _as_duplicate(batch.verdicts[at])
            if found is not None:
                return found
            # Nothing is awaited between the last check and the place in the batch: nobody can come in between.
            if self._status.refusal is not None:
                raise self._refused()
            if authorise is not None:
                authorise(event)
        return self._join(draft, event.meta)

    def _join(self, draft: EventDraft, meta: EventMeta, *, from_reserve: bool = False) -> tuple[CommitBatch, int]:
        """Give the draft a place in the open batch, or in one of its own, which waits for its commit from now on."""
        staging = self._staging
        draft.event_id = event_id = draft.event_id or staging.ids.make(staging.next_seq)
        stored = self._seal(draft)  # may refuse the event: nothing was made for it until here
        batch = staging.open() if from_reserve or staging.open_batch is None else staging.open_batch
        batch.is_from_reserve = from_reserve
        at = len(batch.drafts)
        batch.drafts.append(stored)
        # Kept on the event at once: whatever happens from here on, sending it again is a retry.
        meta._event_id = event_id
        if draft.needs_slow_path:
            self._duplicates.note(draft, batch.first_seq + at)
        batch.size += len(draft.payload)
        if batch.size > self._batch_bytes_max or at >= _BATCH_EVENTS_MAX:
            staging.open_batch = None
        if not self._is_commit_due:
            self._is_commit_due = True
            if not self._is_committing:
                self._loop.call_soon(self._commit_next)
        return batch, at

    async def _append_from_reserve(self, event: Event, authorise: Authorise | None) -> Appended | Duplicate:
        """As ``append``; if there is no room, with what the reserve gives. Others may be refused meanwhile, and this with them."""
        try:
            return await self.append(event, authorise=authorise)
        except (StorageFull, IndexFull):
            pass
        for _ in range(_RESERVE_TRIES - 1):
            try:
                return await self._append_alone(event, authorise)
            except StorageFull:
                await self._flushing.idle()
        return await self._append_alone(event, authorise)

    async def _append_alone(self, event: Event, authorise: Authorise | None) -> Appended | Duplicate:
        """Commit the event in a batch of its own, whatever is accepted otherwise, in a journal file that the reserve makes room for."""
        draft = self._check(event)
        found = await self._find_repeated(draft)
        if authorise is not None:
            authorise(event)
        if isinstance(found, Staged):
            await found.batch.wait()
            return _as_duplicate(found.batch.verdicts[found.at])
        if found is not None:
            return found
        self._refuse_closed()
        if self._status.is_fenced:
            raise self._refused()
        batch, at = self._join(draft, event.meta, from_reserve=True)
        self._staging.open_batch = None
        await batch.wait()
        return batch.verdicts[at]

    def _look_up_ids(self, events: Sequence[Event]) -> None:
        if self._status.refusal is None:
            try:
                self._duplicates.look_up_ids(events)
            except IndexDamaged as error:
                self._fence(error)
                raise self._refused() from error

    async def _find_repeated(self, draft: EventDraft) -> Duplicate | Staged | None:
        try:
            return await self._duplicates.find(draft)
        except IndexDamaged as error:
            self._fence(error)
            raise self._refused() from error

    async def read(self, query: Query, *, limit: int = 1000, bytes_max: int = 4 << 20) -> Page:
        self._refuse_closed()
        return await self._pages.read(query, limit, bytes_max)

    async def wait(self, after: int, topic: str | None = None) -> int:
        self._refuse_closed()
        while True:
            reached = self._state.committed_seq
            if topic is not None:
                reached = self._state.topics[topic].last_seq if topic in self._state.topics else 0
            if reached > after:
                return self._state.committed_seq
            await self._waiters.wait(topic)
            self._refuse_closed()

    async def drop(self, plan: RetentionPlan, holders: Holders | None = None) -> RetentionPlan:
        self._refuse_closed()
        # What is dropped lies below a checkpoint: nobody has to account for it from the journal any more.
        self._flushing.is_checkpoint_due |= bool(plan.drops)
        return await carry_out(plan, holders, self._drop)

    async def _drop(self, decision: SegmentDecision) -> None:
        if self._status.refusal is not None and not self._status.is_full:
            raise self._refused()
        await self._flush_all()
        self._refuse_closed()
        found = self._dropper.find(decision)
        if found is None:
            if self._status.is_full and self._dropper.is_unwritten(decision):
                raise self._refused()
            return
        try:
            await self._dropper.drop(found)
        except OSError as error:
            self._fence(error)
            raise self._refused() from error
        finally:
            self._resume()

    async def _flush_all(self) -> None:
        """Bring everything committed into segments and index."""
        flushing = self._flushing
        await flushing.idle()
        while not self._status.is_fenced and (flushing.has_work or self._state.unindexed):
            flushing.is_index_due = True
            flushed_seq = self._state.flushed_seq
            flushing.flush()
            await flushing.idle()
            if self._status.is_full and (flushed_seq == self._state.flushed_seq or not flushing.has_lines):
                break  # as far as the reserve goes
            if self._unsynced.writes and not flushing.has_lines:
                break  # not synced yet, so not to be flushed; nothing of it is sealed either

    async def close(self) -> None:
        if self._is_closed:
            return
        if self._is_closing:
            await self._flushing.idle()
            return
        self._is_closing = True
        self._status.close()
        self._staging.open_batch = None
        try:
            while self._staging.committing is not None or (self._staging.is_waiting and self._status.is_plainly_closed):
                await self._wait_for_job()
            if self._status.is_plainly_closed:
                await self._finish()
            self._flushing.stop()
            await self._flushing.idle()  # on a full disk it may be trying again just now
        finally:
            self._is_closed = True
            self._waiters.close()
            self._release()

    async def _finish(self) -> None:
        """Everything is committed: flush it, checkpoint, and leave no journal behind."""
        flushing = self._flushing
        while self._unsynced.writes and not self._status.is_fenced:
            self._unsynced.is_wanted = True
            self._commit_next()
            await self._wait_for_job()
        await flushing.idle()
        flushed_seq = -1
        while flushed_seq < 0 or (flushing.has_lines and self._state.flushed_seq > flushed_seq):
            flushed_seq = self._state.flushed_seq
            flushing.is_checkpoint_due = flushing.is_index_due = True
            flushing.flush()
            await flushing.idle()
        if self._status.is_plainly_closed and not flushing.has_lines:
            try:
                self._journal.remove(sum(stream.size_bytes for stream in self._state.streams()))
            except OSError as error:
                logger.warning("the journal could not be removed; the next opening does it: %s", error)

    def _release(self) -> None:
        self._flushing.stop()
        if self._full_timer is not None:
            self._full_timer.cancel()
        self._commit_executor.close()
        self._flush_executor.close()
        if self._readers is not None:
            self._readers.shutdown(wait=True)
        self._journal.close()
        self._segment_writer.close()
        self._segments.close()
        if self._status.is_index_damaged:
            self._index.reset()
        self._index.close()
        self._lock.release()

    def _refuse_closed(self) -> None:
        if self._is_closing:
            raise LogClosed

    # Staging

    def _refused(self) -> TidingsError:
        refusal = self._status.refusal
        assert refusal is not None
        if self._status.is_full:
            self._flushing.schedule(now=True)  # there may be space again
        return refusal()

    async def _wait_for_space(self) -> None:
        while len(self._staging.batches) > self._batches_max:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._space_waiters.append(waiter)
            await waiter
            if self._status.refusal is not None:
                raise self._refused()

    # Committing

    def _commit_next(self) -> None:
        self._is_commit_due = False
        if self._is_committing or self._status.is_fenced:
            return
        if self._unsynced.is_wanted:
            self._sync()
            return
        if self._is_journal_busy and not self._staging.is_next_from_reserve:
            return
        batch = self._staging.take()
        if batch is None:
            return
        if self._room is not None and batch.room is None:
            batch.room = self._rooms.need_of(batch)
        self._is_committing = True
        self._commit_executor.run(lambda: self._commit(batch), self._commit_done)

    def _commit(self, batch: CommitBatch) -> None:
        """Write a batch to the journal, once there is room for it in the segments too. (In the commit thread.)"""
        if self._room is None or batch.room is None:
            self._journal.commit(batch.lines, batch.first_seq, batch.last_seq, from_reserve=batch.is_from_reserve)
            return
        self._room.promise(*batch.room)
        try:
            self._journal.commit(batch.lines, batch.first_seq, batch.last_seq, from_reserve=batch.is_from_reserve)
        except BaseException:
            self._room.settle(batch.room.size)
            raise

    def _commit_done(self, error: BaseException | None) -> None:
        batch = self._staging.committing
        assert batch is not None
        self._is_committing = False
        if error is None:
            self._staging.committing = None
            self._state.committed_seq = batch.last_seq
            self._commit_next()  # the next commit starts before the waiters of this one run
            self._publish(batch)
        elif isinstance(error, JournalBusy):
            self._staging.put_back()
            self._is_journal_busy = self._flushing.is_checkpoint_due = True
            if self._unsynced.writes:  # the journal syncs a file before it turns away from it
                self._take_synced()
            self._flushing.schedule(now=True)
        elif isinstance(error, StorageFull):
            self._staging.put_back()
            self._roll_back(same_error(error))
            self._flushing.needs_spare = True
            self._become_full(error)
        else:
            self._staging.put_back()
            self._fence(error)
        self._wake_job_waiters()

    def _publish(self, batch: CommitBatch) -> None:
        """A batch is durable: readers may see it, its publishers may know."""
        state = self._state
        state.recent.extend(batch.lines, batch.size, [(part.topic, part.lines) for part in batch.shares.values()])
        state.unindexed += batch.entries
        writes: list[SegmentWrite] = []
        for part in batch.shares.values():
            topic = part.topic
            topic.committed_offset += len(part.lines)
            topic.last_seq = part.last_seq
            if not part.is_plain:
                topic.plain_from = topic.committed_offset
            self._place(part, batch, writes)
        room = 0 if batch.room is None else batch.room.size
        if self._is_synced:
            self._flushing.add(writes, batch.size, batch.last_seq, room)
            self._flushing.schedule()
        else:
            self._unsynced.add(writes, room)
        # Who follows everything is told before the publishers: it has one turn for all of them, and they have one each.
        self._waiters.wake_any()
        batch.finish()
        self._waiters.wake(part.topic for part in batch.shares.values())
        if self._space_waiters:
            self._wake_space_waiters()
        state.recent.evict(state.flushed_seq)

    def _place(self, part: TopicBatch, batch: CommitBatch, writes: list[SegmentWrite]) -> None:
        written_at = batch.written_at.decode()
        topic, settings = part.topic, self._settings
        if self._is_flat:
            stream = topic.streams.get(None)
            if stream is None:
                stream = stream_of(topic, StreamKey(topic.name), settings.segment_lines_max, settings.segment_bytes_max)
            first = Head(part.first_offset, part.first_seq, written_at)
            last = Head(topic.committed_offset - 1, part.last_seq, written_at)
            writes += stream.place(part.lines, part.size, first, last, part.named)
            return
        by_space: dict[str, list[bytes]] = {}
        for space_id, line in zip(part.spaces, part.lines, strict=True):
            by_space.setdefault(space_id, []).append(line)
        for space_id, lines in by_space.items():
            key = StreamKey(topic.name, space_id)
            stream = stream_of(topic, key, settings.segment_lines_max, settings.segment_bytes_max)
            writes += stream.place_found(lines, part.named)

    def _wake_space_waiters(self) -> None:
        if len(self._staging.batches) <= self._batches_max or self._status.refusal is not None:
            waiting, self._space_waiters = self._space_waiters, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)

    def _sync(self) -> None:
        """Without sync before acknowledgement: sync now and then, and flush only what was synced."""
        self._unsynced.is_wanted = False
        self._is_committing = True
        self._commit_executor.run(self._journal.sync, self._sync_done)

    def _sync_done(self, error: BaseException | None) -> None:
        self._is_committing = False
        if error is not None:
            self._fence(error)
        else:
            self._take_synced()
            self._flushing.schedule()
            self._commit_next()
        self._wake_job_waiters()

    def _take_synced(self) -> None:
        writes, size, room = self._unsynced.take()
        self._flushing.add(writes, size, self._journal.synced_seq, room)

    # Flushing

    def _flushed(self, is_checkpoint: bool, full: StorageFull | IndexFull | None) -> None:
        if is_checkpoint:
            self._is_journal_busy = False
        if full is None:
            self._status.note_room(is_closing=self._is_closing)
        else:
            self._become_full(full)
            if self._flushing.has_lines:  # this step was moved: so may the next be
                self._flushing.schedule(now=True)
        self._resume()

    def _flush_failed(self, error: BaseException) -> None:
        if isinstance(error, StorageFull | IndexFull):
            self._become_full(error)
        elif isinstance(error, OSError) and is_full(error):
            self._become_full(StorageFull(error.filename or str(self._layout.root)))
        else:
            self._fence(error)
        self._resume()

    def _resume(self) -> None:
        if not self._status.is_fenced and not self._status.is_full and self._flushing.has_work:
            self._flushing.schedule()
        if not self._is_committing:
            self._commit_next()
        self._wake_job_waiters()

    # When storage fails

    def _become_full(self, cause: StorageFull | IndexFull) -> None:
        if self._status.note_full(cause):
            self._staging.open_batch = None
        if self._is_journal_busy and self._staging.committing is None:
            # Batches that wait for the journal wait for the segments, which have no room: better tell them now.
            self._roll_back(same_error(cause))
        self._arm_retry()

    def _arm_retry(self) -> None:
        if self._full_timer is None and not self._is_closing:
            self._full_timer = self._loop.call_later(_FULL_RETRY_S, self._retry_when_full)

    def _retry_when_full(self) -> None:
        self._full_timer = None
        if self._status.is_full and not self._is_closed:
            self._flushing.schedule(now=True)
            self._arm_retry()  # the job just running may be another's, such as a drop: it looks for no room

    def _roll_back(self, failure: Callable[[], TidingsError]) -> None:
        """Nothing of the staged batches was written: take all places back and tell their publishers."""
        for batch in self._staging.clear():
            self._duplicates.roll_back(batch)
            batch.finish(failure)
        self._wake_space_waiters()

    def _fence(self, error: BaseException) -> None:
        """The disk cannot be trusted any more: accept nothing, tell everybody, leave the files to recovery."""
        refusal = self._status.fence(error)
        # A job that is scheduled already would sync again what a sync has failed on, and believe the second answer.
        self._flushing.stop()
        for batch in self._staging.clear():
            batch.finish(refusal)
        self._wake_space_waiters()
        self._wake_job_waiters()

    # Waiting for the threads

    def _offload(self, job: Callable[[], object]) -> asyncio.Future[object]:
        if self._readers is not None:
            return self._loop.run_in_executor(self._readers, job)
        future: asyncio.Future[object] = self._loop.create_future()
        try:
            future.set_result(job())
        except BaseException as error:  # noqa: BLE001 - belongs to the one who waits
            future.set_exception(error)
        return future

    async def _wait_for_job(self) -> None:
        """Wait until a thread has finished a job."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._job_waiters.append(waiter)
        await waiter

    def _wake_job_waiters(self) -> None:
        waiting, self._job_waiters = self._job_waiters, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


def _has_entries(draft: EventDraft) -> bool:
    """Whether the index needs an entry for the event."""
    return draft.is_given or draft.idem_key is not None or bool(draft.partitions)


def _as_duplicate(first: Appended) -> Duplicate:
    return Duplicate(first.seq, first.offset, first.event_id)
