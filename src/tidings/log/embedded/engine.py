"""
The embedded engine: one event's way from ``append`` to its segment.

``append`` checks the event, and ``_accept`` tells duplicates and gives it a place in the open batch (``staging``), for which it
waits. ``_flush`` hands the next batch to the commit lane; ``_publish`` makes it visible, wakes all who wait, and passes its
lines on to be settled (``settling``), behind everybody's back. The loop's thread owns all state; lanes only do disk work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tidings.core.clock import Clock
from tidings.core.errors import TidingsError
from tidings.core.events import Event, EventMeta

from ..encoding import Draft, EventEncoder
from ..encryption import Encryptor
from ..errors import LogClosed, LogFenced, StorageFull
from ..interface import Appended, Authorise, Duplicate, Health, Page, Position, Query, Refused, TopicInfo, Verdict
from ..retention import Decision, Holders, RetentionPlan, carry_out
from ..segment import Head
from ..settings import LogSettings
from .admission import Admission
from .disk import Disk, FolderLock, is_full
from .dropper import SegmentDropper
from .duplicates import Duplicates, Staged
from .husks import Husks
from .index import Index, IndexDamaged, IndexFull
from .journal import Journal, JournalBusy
from .late_sync import LateSync
from .layout import Layout, StreamKey
from .pages import PageReader
from .reader import SegmentReader
from .room import Room
from .settler import Settler
from .settling import SettleLoop
from .staging import Batch, Run, Share, Stage
from .state import LogState, stream_of
from .stream import Chunk
from .waiting import CommitWaiters

__all__ = ["EmbeddedLog"]

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
        settler: Settler,
        journal: Journal,
        reserve_disk: Disk,
        husk_disk: Disk,
        room: Room,
        lacks: str | None,
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
        self._settler = settler
        self._journal = journal
        self._lock = lock
        encoder = EventEncoder(settings, encryptor)
        self._check, self._seal = encoder.check, encoder.seal
        self._is_flat = settings.layout == "flat"
        self._stage = Stage(loop, state, clock, last_written_ns, is_flat=self._is_flat)
        self._readers = None if is_inline else ThreadPoolExecutor(2, "tidings-log-read")
        self._segments = SegmentReader(disk, layout)
        self._pages = PageReader(state, self._segments, index, encryptor, self._offload)
        husks = Husks(husk_disk, layout, encryptor)
        self._duplicates = Duplicates(index, self._pages, husks, self._stage)
        self._waiters = CommitWaiters(loop)

        # What is staged is counted in batches: a sum over single events would cost each of them.
        self._batches_max = max(1, settings.staged_bytes_max // settings.batch_bytes_max)
        self._batch_bytes_max = settings.batch_bytes_max
        self._room: list[asyncio.Future[None]] = []
        self._is_flush_due = False
        self._commit_lane = disk.threads.lane("commit")
        self._is_commit_lane_busy = False
        self._is_journal_busy = False

        self._is_synced = settings.durability == "sync"
        self._late = LateSync(loop, settings, self._flush)

        self._settle_lane = disk.threads.lane("settle")
        self._settling = SettleLoop(
            self._settle_lane,
            settler,
            journal,
            state,
            self._duplicates,
            room,
            checkpoint_bytes=settings.journal_bytes * 3 // 4,
            delay_s=0.0 if is_inline else None,
            on_settled=self._settled,
            on_failed=self._settle_failed,
        )
        self._dropper = SegmentDropper(
            disk=reserve_disk,
            layout=layout,
            state=state,
            index=index,
            husks=husks,
            segments=self._segments,
            settling=self._settling,
        )
        self._idle: list[asyncio.Future[None]] = []

        self._admission = Admission(layout.workspace)
        self._is_closing = False
        self._is_closed = False
        if not self._is_synced:
            logger.warning(
                "durability is %r: acknowledged events can be lost in a crash (workspace %s)",
                settings.durability,
                layout.workspace,
            )
        if lacks is not None:
            self._settling.needs_spare = True
            self._become_full(lacks)

    # What the interface promises

    @property
    def position(self) -> Position:
        return Position(self._state.epoch, self._state.committed_seq)

    @property
    def layout(self) -> Layout:
        """Where the log's files are."""
        return self._layout

    def topics(self) -> dict[str, TopicInfo]:
        return self._state.infos()

    def health(self) -> Health:
        admission = self._admission
        return Health(
            is_writable=admission.refusal is None,
            is_durable=self._is_synced,
            is_storage_full=admission.is_full,
            problem=str(admission.refusal()) if admission.refusal is not None else None,
        )

    async def append(
        self, event: Event, *, authorise: Authorise | None = None, from_reserve: bool = False
    ) -> Appended | Duplicate:
        if from_reserve:
            return await self._append_from_reserve(event, authorise)
        if authorise is not None:
            authorise(event)
        draft = self._check(event)
        stage = self._stage
        batch = stage.open_batch
        if batch is None or draft.needs_care:
            staged = await self._accept(draft, event, authorise)
            if isinstance(staged, Duplicate):
                return staged
            batch, at = staged
        else:
            # What ``_accept`` comes to for most events: this is where a busy log spends its time.
            drafts = batch.drafts
            at = len(drafts)
            draft.event_id = event.meta._event_id = stage.ids.make(batch.first_seq + at)
            drafts.append(draft)
            if at >= _BATCH_EVENTS_MAX:
                stage.open_batch = None
        try:
            await batch.future
        except asyncio.CancelledError:
            await batch.wait_on()
        if batch.failure is not None:
            raise batch.failure()
        return batch.verdicts[at]

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        answers: list[Duplicate | Refused | Staged | tuple[Batch, int] | Run] = []
        stage, check, make_id = self._stage, self._check, self._stage.ids.make
        self._look_ahead(events)
        run: Run | None = None
        for event in events:
            try:
                if authorise is not None:
                    authorise(event)
                draft = check(event)
                batch = stage.open_batch
                if batch is None or draft.needs_care:
                    run = None
                    answers.append(await self._accept(draft, event, authorise, waits=False))
                    continue
                # As in ``append``. Those that follow one another in a batch are answered together.
                drafts = batch.drafts
                at = len(drafts)
                draft.event_id = event.meta._event_id = make_id(batch.first_seq + at)
                drafts.append(draft)
                if at >= _BATCH_EVENTS_MAX:
                    stage.open_batch = None
                if run is None or run.batch is not batch:
                    run = Run(batch, at)
                    answers.append(run)
                run.end = at + 1
            except (LogClosed, LogFenced, StorageFull):
                raise
            except TidingsError as error:
                run = None
                answers.append(Refused(error))
        verdicts: list[Verdict] = []
        for answer in answers:
            if isinstance(answer, Duplicate | Refused):
                verdicts.append(answer)
                continue
            if isinstance(answer, Run):
                await answer.batch.wait()
                verdicts += answer.batch.verdicts[answer.start : answer.end]
                continue
            batch, at = answer
            if not batch.is_committed:
                await batch.wait()
            appended = batch.verdicts[at]
            verdicts.append(_as_duplicate(appended) if isinstance(answer, Staged) else appended)
        return verdicts

    async def _accept(
        self, draft: Draft, event: Event, authorise: Authorise | None, *, waits: bool = True
    ) -> Duplicate | Staged | tuple[Batch, int]:
        """
        Give the draft a place in the open batch, unless it repeats something.

        A draft that repeats an event on its way waits for that one: a duplicate's answer must not be earlier than its
        original's. Without ``waits`` it is the caller who waits.
        """
        if len(self._stage.batches) > self._batches_max:
            await self._wait_for_room()
            if authorise is not None:
                authorise(event)
        if self._admission.refusal is not None:
            raise self._refused()
        if (draft.is_given or draft.idem_key is not None) and not self._is_surely_new(draft):
            found = await self._find_repeated(draft)
            if isinstance(found, Staged) and waits:
                batch, at = found
                await batch.wait()
                return _as_duplicate(batch.verdicts[at])
            if found is not None:
                return found
            # Nothing is awaited between the last check and the place in the batch: nobody can come in between.
            if self._admission.refusal is not None:
                raise self._refused()
            if authorise is not None:
                authorise(event)
        return self._join(draft, event.meta)

    def _join(self, draft: Draft, meta: EventMeta, *, from_reserve: bool = False) -> tuple[Batch, int]:
        """Give the draft a place in the open batch, or in one of its own, which waits for its commit from now on."""
        stage = self._stage
        plain = draft
        draft.event_id = event_id = draft.event_id or stage.ids.make(stage.next_seq)
        stored = self._seal(plain)  # may refuse the event: nothing was made for it until here
        batch = stage.open() if from_reserve or stage.open_batch is None else stage.open_batch
        batch.is_from_reserve = from_reserve
        at = len(batch.drafts)
        batch.drafts.append(stored)
        # Kept on the event at once: whatever happens from here on, sending it again is a retry.
        meta._event_id = event_id
        if plain.needs_care:
            self._duplicates.note(plain, batch.first_seq + at)
        batch.size += len(plain.payload)
        if batch.size > self._batch_bytes_max or at >= _BATCH_EVENTS_MAX:
            stage.open_batch = None
        if not self._is_flush_due:
            self._is_flush_due = True
            if not self._is_commit_lane_busy:
                self._loop.call_soon(self._flush)
        return batch, at

    async def _append_from_reserve(self, event: Event, authorise: Authorise | None) -> Appended | Duplicate:
        """As ``append``; if there is no room, with what the reserve gives. Others may be refused meanwhile, and this with them."""
        try:
            return await self.append(event, authorise=authorise)
        except StorageFull:
            pass
        for _ in range(_RESERVE_TRIES - 1):
            try:
                return await self._append_alone(event, authorise)
            except StorageFull:
                await self._settling.idle()
        return await self._append_alone(event, authorise)

    async def _append_alone(self, event: Event, authorise: Authorise | None) -> Appended | Duplicate:
        """Commit the event in a batch of its own, whatever is accepted otherwise, in a journal file that the reserve makes room for."""
        draft = self._check(event)
        found = None if self._is_surely_new(draft) else await self._find_repeated(draft)
        if authorise is not None:
            authorise(event)
        if isinstance(found, Staged):
            await found.batch.wait()
            return _as_duplicate(found.batch.verdicts[found.at])
        if found is not None:
            return found
        self._refuse_closed()
        if self._admission.is_fenced:
            raise self._refused()
        batch, at = self._join(draft, event.meta, from_reserve=True)
        self._stage.open_batch = None
        await batch.wait()
        return batch.verdicts[at]

    def _look_ahead(self, events: Sequence[Event]) -> None:
        if self._admission.refusal is None:
            try:
                self._duplicates.look_ahead(events)
            except IndexDamaged as error:
                self._fence(error)
                raise self._refused() from error

    def _is_surely_new(self, draft: Draft) -> bool:
        try:
            return self._duplicates.is_surely_new(draft)
        except IndexDamaged as error:
            self._fence(error)
            raise self._refused() from error

    async def _find_repeated(self, draft: Draft) -> Duplicate | Staged | None:
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
        self._settling.is_checkpoint_due |= bool(plan.drops)
        return await carry_out(plan, holders, self._drop)

    async def _drop(self, decision: Decision) -> None:
        if self._admission.refusal is not None and not self._admission.is_full:
            raise self._refused()
        await self._settle_all()
        self._refuse_closed()
        found = self._dropper.find(decision)
        if found is None:
            if self._admission.is_full and self._dropper.is_unwritten(decision):
                raise self._refused()
            return
        try:
            await self._dropper.drop(found)
        except (OSError, IndexFull) as error:
            self._fence(error)
            raise self._refused() from error
        finally:
            self._go_on()

    async def _settle_all(self) -> None:
        """Bring everything committed into segments and index."""
        settling = self._settling
        await settling.idle()
        while not self._admission.is_fenced and (settling.has_work or self._state.unindexed):
            settling.is_index_due = True
            settling.settle()
            await settling.idle()
            if self._admission.is_full:
                break  # as far as the reserve goes
            if self._late.chunks and not settling.has_lines:
                break  # not synced yet, so not to be settled; nothing of it is sealed for good either

    async def close(self) -> None:
        if self._is_closed:
            return
        if self._is_closing:
            await self._settling.idle()
            return
        self._is_closing = True
        self._admission.close()
        self._stage.open_batch = None
        try:
            while self._stage.committing is not None or (self._stage.is_waiting and self._admission.is_plainly_closed):
                await self._tick()
            if self._admission.is_plainly_closed:
                await self._finish()
            self._settling.stop()
            await self._settling.idle()  # on a full disk it may be trying again just now
        finally:
            self._is_closed = True
            self._waiters.close()
            self._release()

    async def _finish(self) -> None:
        """Everything is committed: settle it, checkpoint, and leave no journal behind."""
        settling = self._settling
        while self._late.chunks and not self._admission.is_fenced:
            self._late.is_wanted = True
            self._flush()
            await self._tick()
        await settling.idle()
        settling.is_checkpoint_due = settling.is_index_due = True
        settling.settle()
        await settling.idle()
        if self._admission.is_plainly_closed and not settling.has_lines:
            try:
                self._journal.remove()
            except OSError as error:
                logger.warning("the journal could not be removed; the next opening does it: %s", error)

    def _release(self) -> None:
        self._settling.stop()
        self._commit_lane.close()
        self._settle_lane.close()
        if self._readers is not None:
            self._readers.shutdown(wait=True)
        self._journal.close()
        self._settler.close()
        self._segments.close()
        if self._admission.is_index_damaged:
            self._index.reset()
        self._index.close()
        self._lock.release()

    def _refuse_closed(self) -> None:
        if self._is_closing:
            raise LogClosed

    # Staging

    def _refused(self) -> TidingsError:
        refusal = self._admission.refusal
        assert refusal is not None
        if self._admission.is_full:
            self._settling.schedule(now=True)  # there may be room again
        return refusal()

    async def _wait_for_room(self) -> None:
        while len(self._stage.batches) > self._batches_max:
            room: asyncio.Future[None] = self._loop.create_future()
            self._room.append(room)
            await room
            if self._admission.refusal is not None:
                raise self._refused()

    # Committing

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._is_commit_lane_busy or self._admission.is_fenced:
            return
        if self._late.is_wanted:
            self._sync()
            return
        if self._is_journal_busy and not self._stage.is_next_from_reserve:
            return
        batch = self._stage.take()
        if batch is None:
            return
        self._is_commit_lane_busy = True
        self._commit_lane.run(
            lambda: self._journal.commit(
                batch.lines, batch.first_seq, batch.last_seq, from_reserve=batch.is_from_reserve
            ),
            self._commit_done,
        )

    def _commit_done(self, error: BaseException | None) -> None:
        batch = self._stage.committing
        assert batch is not None
        self._is_commit_lane_busy = False
        if error is None:
            self._stage.committing = None
            self._state.committed_seq = batch.last_seq
            self._flush()  # the next commit starts before the waiters of this one run
            self._publish(batch)
        elif isinstance(error, JournalBusy):
            self._stage.put_back()
            self._is_journal_busy = self._settling.is_checkpoint_due = True
            if self._late.chunks:  # the journal syncs a file before it turns away from it
                self._take_synced()
            self._settling.schedule(now=True)
        elif isinstance(error, StorageFull):
            self._stage.put_back()
            path = error.path
            self._roll_back(lambda: StorageFull(path))
            self._settling.needs_spare = True
            self._become_full(path)
        else:
            self._stage.put_back()
            self._fence(error)
        self._wake_idle()

    def _publish(self, batch: Batch) -> None:
        """A batch is durable: readers may see it, its publishers may know."""
        state = self._state
        state.recent.extend(batch.lines, batch.size, [(share.topic, share.lines) for share in batch.shares.values()])
        state.unindexed += batch.entries
        chunks: list[Chunk] = []
        for share in batch.shares.values():
            topic = share.topic
            topic.committed_offset += len(share.lines)
            topic.last_seq = share.last_seq
            if not share.is_plain:
                topic.plain_from = topic.committed_offset
            self._place(share, batch, chunks)
        if self._is_synced:
            self._settling.add(chunks, batch.size, batch.last_seq)
            self._settling.schedule()
        else:
            self._late.add(chunks)
        batch.finish()
        self._waiters.wake(share.topic for share in batch.shares.values())
        if self._room:
            self._make_room()
        state.recent.evict(state.flushed_seq)

    def _place(self, share: Share, batch: Batch, chunks: list[Chunk]) -> None:
        written_at = batch.written_at.decode()
        topic, settings = share.topic, self._settings
        if self._is_flat:
            stream = topic.streams.get(None)
            if stream is None:
                stream = stream_of(topic, StreamKey(topic.name), settings.segment_lines_max, settings.segment_bytes_max)
            first = Head(share.first_offset, share.first_seq, written_at)
            last = Head(topic.committed_offset - 1, share.last_seq, written_at)
            chunks += stream.place(share.lines, share.size, first, last, share.named)
            return
        by_space: dict[str, list[bytes]] = {}
        for space_id, line in zip(share.spaces, share.lines, strict=True):
            by_space.setdefault(space_id, []).append(line)
        for space_id, lines in by_space.items():
            key = StreamKey(topic.name, space_id)
            stream = stream_of(topic, key, settings.segment_lines_max, settings.segment_bytes_max)
            chunks += stream.place_found(lines, share.named)

    def _make_room(self) -> None:
        if len(self._stage.batches) <= self._batches_max or self._admission.refusal is not None:
            waiting, self._room = self._room, []
            for room in waiting:
                if not room.done():
                    room.set_result(None)

    def _sync(self) -> None:
        """Without sync before acknowledgement: sync now and then, and settle only what was synced."""
        self._late.is_wanted = False
        self._is_commit_lane_busy = True
        self._commit_lane.run(self._journal.sync, self._sync_done)

    def _sync_done(self, error: BaseException | None) -> None:
        self._is_commit_lane_busy = False
        if error is not None:
            self._fence(error)
        else:
            self._take_synced()
            self._settling.schedule()
            self._flush()
        self._wake_idle()

    def _take_synced(self) -> None:
        self._settling.add(*self._late.take(), self._journal.synced_seq)

    # Settling

    def _settled(self, is_checkpoint: bool, lacks: str | None) -> None:
        if is_checkpoint:
            self._is_journal_busy = False
        if lacks is None:
            self._admission.note_room(is_closing=self._is_closing)
        else:
            self._become_full(lacks)
        self._go_on()

    def _settle_failed(self, error: BaseException) -> None:
        if isinstance(error, StorageFull | IndexFull):
            self._become_full(error.path)
        elif isinstance(error, OSError) and is_full(error):
            self._become_full(error.filename or str(self._layout.root))
        else:
            self._fence(error)
        self._go_on()

    def _go_on(self) -> None:
        if not self._admission.is_fenced and not self._admission.is_full and self._settling.has_work:
            self._settling.schedule()
        if not self._is_commit_lane_busy:
            self._flush()
        self._wake_idle()

    # When storage fails

    def _become_full(self, path: str) -> None:
        if self._admission.note_full(path):
            self._stage.open_batch = None
        if self._is_journal_busy and self._stage.committing is None:
            # Batches that wait for the journal wait for the segments, which have no room: better tell them now.
            self._roll_back(lambda: StorageFull(path))
        if not self._is_closing:
            self._loop.call_later(_FULL_RETRY_S, self._retry_when_full)

    def _retry_when_full(self) -> None:
        if self._admission.is_full and not self._is_closed:
            self._settling.schedule(now=True)

    def _roll_back(self, failure: Callable[[], TidingsError]) -> None:
        """Nothing of the staged batches was written: take all places back and tell their publishers."""
        for batch in self._stage.clear():
            self._duplicates.take_back(batch)
            batch.finish(failure)
        self._make_room()

    def _fence(self, error: BaseException) -> None:
        """The disk cannot be trusted any more: accept nothing, tell everybody, leave the files to recovery."""
        refusal = self._admission.fence(error)
        # A job that is scheduled already would sync again what a sync has failed on, and believe the second answer.
        self._settling.stop()
        for batch in self._stage.clear():
            batch.finish(refusal)
        self._make_room()
        self._wake_idle()

    # Waiting for the lanes

    def _offload(self, job: Callable[[], object]) -> asyncio.Future[object]:
        if self._readers is not None:
            return self._loop.run_in_executor(self._readers, job)
        future: asyncio.Future[object] = self._loop.create_future()
        try:
            future.set_result(job())
        except BaseException as error:  # noqa: BLE001 - belongs to the one who waits
            future.set_exception(error)
        return future

    async def _tick(self) -> None:
        """Wait until a lane has finished something."""
        turn: asyncio.Future[None] = self._loop.create_future()
        self._idle.append(turn)
        await turn

    def _wake_idle(self) -> None:
        waiting, self._idle = self._idle, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)


def _as_duplicate(first: Appended) -> Duplicate:
    return Duplicate(first.seq, first.offset, first.event_id)
