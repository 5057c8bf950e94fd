"""
From a batch to its verdicts: authorise, validate, store, and find out what became of each item.

Items are judged in the order of the request. Those that pass are stored by one call, so that many of them, of many connections,
share one sync of the disk; nothing is said about any of them before it is durable. An id that is known already is compared with
what was committed under it: the same again is committed as before, other content is rejected.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from tidings.access.errors import AccessError
from tidings.core.clock import Clock, datetime_of
from tidings.core.errors import InvalidEvent
from tidings.core.events import Event, EventMeta
from tidings.core.names import EVENT_ID_BYTES_MAX
from tidings.log.errors import IdConflict
from tidings.log.interface import Appended, Duplicate, Log, Refused, Verdict
from tidings.log.record import Record
from tidings.wire.sync_frames import ItemError

from . import tree
from .canonical import is_same_json
from .dialects.dialect import Dialect, log_type, millis_of
from .errors import HistoryPruned
from .hub import BroadcastListener, Hub
from .paging import Pages
from .profiles import Profiles
from .requests import Answer, CommittedAnswer, NotProcessed, RejectedAnswer, SubmittedItem
from .session import SyncSession
from .settings import SyncSettings
from .trees import FoldedState, KeyedLocks, TreeStates

_OTHER_CONTENT: Final = ItemError(field="event", message="id already committed with different payload")


class Submitter:
    """Stores what clients submit."""

    def __init__(
        self, log: Log, pages: Pages, trees: TreeStates, hub: Hub, settings: SyncSettings, clock: Clock
    ) -> None:
        self._log = log
        self._pages = pages
        self._trees = trees
        self._hub = hub
        self._clock = clock
        self._tree_locks = KeyedLocks()
        self.committed_count = 0
        self.rejected_count = 0
        self.reload(settings)

    def reload(self, settings: SyncSettings) -> None:
        """
        Validate by other settings from now on.

        Raises:
            InvalidSchema: A schema cannot be compiled; the earlier ones stay.
        """
        self._profiles = Profiles(settings)
        self._space_id = settings.space_id
        self._tree_depth_max = settings.tree_depth_max

    async def submit(self, session: SyncSession, items: list[SubmittedItem], origin: BroadcastListener) -> list[Answer]:
        """
        One verdict an item, in order, when all are durable.

        Raises:
            StorageFull, LogFenced, LogClosed, ReadOnlyLog: as for ``Log.append_many``, for all of them.
        """
        assert session.dialect is not None
        batch = _Batch(items, session.dialect, session.client_id, origin, self._clock.now_ns())
        # Rights are checked when the batch is processed, not when it began to wait: they may be gone by then.
        if session.judges_each_item:
            session.authorise(items)
            await self._judge_canonical(batch)
            await self._store(session, batch)
        elif session.dialect.stops_at_rejection:
            found = await self._pages.find(item.id for item in items if item.id)
            session.authorise(items)
            self._judge_in_order(batch, found)
            await self._store(session, batch)
        else:
            async with self._tree_locks.of(name for item in items for name in item.partitions):
                found = await self._pages.find(item.id for item in items)
                session.authorise(items)
                await self._submit_trees(session, batch, found)
        answers = batch.all_answers()
        committed = sum(isinstance(answer, CommittedAnswer) for answer in answers)
        self.committed_count += committed
        self.rejected_count += len(answers) - committed
        return answers

    async def _judge_canonical(self, batch: _Batch) -> None:
        invalid: list[int] = []
        check = self._profiles.check_canonical
        for index, item in enumerate(batch.items):
            if not item.errors:
                item.errors = check(item)
                if not item.errors:
                    batch.to_store.append(index)
                    continue
                # What is invalid now may have been committed under an earlier schema: then a retry is answered so.
                invalid.append(index)
                continue
            batch.reject(index)
        found = await self._pages.find(batch.items[index].id for index in invalid) if invalid else {}
        for index in invalid:
            record = found.get(batch.items[index].id)
            if record is not None and batch.dialect.is_same(batch.items[index], record):
                batch.commit(index, record.seq, millis_of(record))
            else:
                batch.reject(index)

    def _judge_in_order(self, batch: _Batch, found: dict[str, Record]) -> None:
        """Stop at the first rejection: what comes after it may build on it."""
        firsts: dict[str, int] = {}
        for index, item in enumerate(batch.items):
            if not item.errors and (record := found.get(item.id)) is not None:
                if batch.dialect.is_same(item, record):
                    batch.commit(index, record.seq, millis_of(record))
                    continue
                item.errors = (_OTHER_CONTENT,)
            if not item.errors:
                item.errors = self._profiles.check_project(item)
            if not item.errors and (first := firsts.setdefault(item.id, index)) != index:
                if is_same_json(item.content, batch.items[first].content):
                    batch.repeats[index] = first
                    continue
                item.errors = (_OTHER_CONTENT,)
            if item.errors:
                batch.reject(index)
                batch.block_after(index)
                return
            batch.to_store.append(index)

    async def _submit_trees(self, session: SyncSession, batch: _Batch, found: dict[str, Record]) -> None:
        """Judge each item by the state after those before it. A partition has one batch at a time, so that its state is the one stored."""
        ids = [item.id for item in batch.items]
        states: dict[str, FoldedState] = {}
        try:
            for index, item in enumerate(batch.items):
                record = found.get(item.id)
                if not item.errors and record is not None:
                    if batch.dialect.is_same(item, record):
                        batch.commit(index, record.seq, millis_of(record))
                        continue
                    item.errors = (_OTHER_CONTENT,)
                if not item.errors:
                    item.errors = await self._change_trees(item, states, ids)
                if item.errors:
                    batch.reject(index)
                else:
                    batch.to_store.append(index)
            await self._store(session, batch)
        except BaseException:
            for partition in states:
                self._trees.drop(partition)
            raise
        stored = batch.stored_seqs()
        # An item that passed its check and was not stored after all is in the states, and must not be.
        is_true = len(stored) == len(batch.to_store)
        for partition, state in states.items():
            if is_true:
                self._trees.hand_back(partition, state, stored)
            else:
                self._trees.drop(partition)

    async def _change_trees(
        self, item: SubmittedItem, states: dict[str, FoldedState], ids: Iterable[str]
    ) -> tuple[ItemError, ...]:
        change = self._profiles.check_tree(item)
        if not isinstance(change, tree.Change):
            return change
        for partition in item.partitions:
            if partition not in states:
                try:
                    states[partition] = await self._trees.take_out(partition, ids, self._log.position.seq)
                except HistoryPruned as error:
                    return (ItemError(field="partitions", message=error.describe()),)
        for partition in item.partitions:
            data = states[partition].data
            problem = data.check(change)
            if problem is not None:
                return (problem,)
            if data.levels(change) > self._tree_depth_max:
                field = "event.payload.value" if change.type == "set" else "event.payload.options.parent"
                return (ItemError(field=field, message=f"makes the tree deeper than {self._tree_depth_max} levels"),)
        for partition in item.partitions:
            states[partition].data.apply(change)
        return ()

    async def _store(self, session: SyncSession, batch: _Batch) -> None:
        if not batch.to_store:
            return
        items = {batch.items[index].id: batch.items[index] for index in batch.to_store}
        ids = list(items)

        def authorise(event: Event) -> None:
            session.require_submit(items[str(event.meta.event_id)], self._clock.now_ns())

        self._hub.expect(ids, batch.origin)
        try:
            verdicts = await self._log.append_many(
                [self._event(batch, index) for index in batch.to_store], authorise=authorise
            )
        except BaseException:
            for event_id in ids:
                self._hub.forget(event_id, batch.origin, None)
            raise
        known: list[tuple[int, Verdict]] = []
        for index, verdict in zip(batch.to_store, verdicts, strict=True):
            if isinstance(verdict, Appended):
                batch.commit(index, verdict.seq, batch.at_ms)
                batch.appended.add(index)
            else:
                seq = verdict.seq if isinstance(verdict, Duplicate) else None
                self._hub.forget(batch.items[index].id, batch.origin, seq)
                if isinstance(verdict, Refused) and isinstance(verdict.error, AccessError):
                    session.forbid(batch.items[index])
                    batch.reject(index)
                else:
                    known.append((index, verdict))
        if known:
            records = await self._pages.find(batch.items[index].id for index, _ in known)
            for index, verdict in known:
                _answer_known(batch, index, verdict, records.get(batch.items[index].id))

    def _event(self, batch: _Batch, index: int) -> Event:
        item = batch.items[index]
        meta = EventMeta(
            batch.dialect.topic,
            log_type(item.type),
            self._space_id,
            item.id,
            batch.at,
            batch.client_id,
            partitions=item.partitions,
        )
        return Event(meta, item.stored)


class _Batch:
    """A batch on its way, with the verdicts there are."""

    __slots__ = (
        *("answers", "appended", "at", "at_ms", "client_id", "dialect", "items", "origin", "repeats", "to_store"),
    )

    def __init__(
        self, items: list[SubmittedItem], dialect: Dialect, client_id: str, origin: BroadcastListener, now_ns: int
    ) -> None:
        self.items = items
        self.dialect = dialect
        self.client_id = client_id
        self.origin = origin
        self.at: datetime = datetime_of(now_ns)
        self.at_ms = now_ns // 1_000_000
        """When the server accepted the batch: stored with each event, so every later answer gives the same time."""
        self.answers: list[Answer | None] = [None] * len(items)
        self.to_store: list[int] = []
        self.appended: set[int] = set()
        self.repeats: dict[int, int] = {}
        """Items that say again what an earlier one of the same batch says."""

    def commit(self, index: int, seq: int, at_ms: int) -> None:
        self.answers[index] = CommittedAnswer(self.items[index].id, seq, at_ms)

    def reject(self, index: int) -> None:
        item = self.items[index]
        self.answers[index] = RejectedAnswer(item.id, item.reason, item.errors, self.at_ms)

    def block_after(self, index: int) -> None:
        # An id that is too long is among the reasons to be rejected; it must not be said again for every item.
        blocker = self.items[index].id[:EVENT_ID_BYTES_MAX]
        for later in range(index + 1, len(self.items)):
            self.answers[later] = NotProcessed(self.items[later].id, blocker, self.at_ms)

    def stored_seqs(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for index in self.appended:
            answer = self.answers[index]
            assert isinstance(answer, CommittedAnswer)
            found[answer.id] = answer.seq
        return found

    def all_answers(self) -> list[Answer]:
        for index, first in self.repeats.items():
            self.answers[index] = self.answers[first]
        answers = [answer for answer in self.answers if answer is not None]
        assert len(answers) == len(self.items), "every item has its verdict"
        return answers


def _answer_known(batch: _Batch, index: int, verdict: Verdict, record: Record | None) -> None:
    """The log knows the id already."""
    item = batch.items[index]
    match verdict:
        case Duplicate():
            # If only the id was kept of a dropped record, the first time is not known any more.
            batch.commit(index, verdict.seq, batch.at_ms if record is None else millis_of(record))
        case Refused(IdConflict()):
            # The log compares more strictly than canonical JSON does (1 and 1e0 spelled apart beyond 64 bits, say).
            if record is not None and batch.dialect.is_same(item, record):
                batch.commit(index, record.seq, millis_of(record))
                return
            item.errors = (_OTHER_CONTENT,)
            batch.reject(index)
        case Refused(error):
            field = error.field.removeprefix("meta.") if isinstance(error, InvalidEvent) else "event"
            problem = error.problem if isinstance(error, InvalidEvent) else error.describe()
            item.errors = (ItemError(field=field, message=problem),)
            batch.reject(index)
        case Appended():
            raise AssertionError("an appended event was not known")
