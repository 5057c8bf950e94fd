"""
What a client has locally, connection or not: store, view, drafts and those who listen.

Everything that changes the store comes through here, so that the view, the drafts in users' hands and the listeners
hear of a change right after it is on disk, and never before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from tidings.core.clock import Clock
from tidings.core.names import check_partitions
from tidings.sync.client_effects import AdoptSnapshot, GapFound, ItemVerdict, ResetHistory, StoreEvents, StorePage
from tidings.sync.settings import ClientSettings
from tidings.wire.sync_frames import SubmitItem

from .database import Applied, Database, StoredDraft
from .drafts import (
    ChangeFeed,
    Draft,
    DraftRejected,
    EventCommitted,
    GapReported,
    HistoryReset,
    LocalEvent,
    Pending,
    QuarantinedDraft,
    Verdict,
    local_event,
)
from .store import ClientStore
from .view import LocalView, ViewOf

S = TypeVar("S")

_LOAD_EVENTS: Final = 1000
_SNAPSHOT: Final = "view"


class Replica(Generic[S]):
    """One client's local side."""

    def __init__(
        self,
        store: ClientStore,
        client_id: str,
        partitions: Iterable[str],
        view_of: ViewOf[S],
        settings: ClientSettings,
        clock: Clock,
    ) -> None:
        self.store = store
        self.client_id = client_id
        self.partitions = check_partitions(partitions)
        self.feed = ChangeFeed(settings.changes_count_max)
        self.cursors: dict[str, int] = {}
        self.model_version: int | None = None
        self.quarantined_count = 0
        self.orphan_count = 0
        self.drafts_added: Callable[[], None] = lambda: None
        """Called when there is more to send."""
        self._view_of = view_of
        self._view = LocalView(view_of, self.partitions)
        self._settings = settings
        self._clock = clock
        self._waiting: dict[str, int] = {}
        """Ids of drafts without a verdict, with how often each was sent."""
        self._handles: weakref.WeakValueDictionary[str, Draft] = weakref.WeakValueDictionary()

    @property
    def view(self) -> LocalView[S]:
        """The view of what is here."""
        return self._view

    @property
    def pending_count(self) -> int:
        """Drafts without a verdict."""
        return len(self._waiting)

    async def open(self) -> None:
        """Open the store and fold what is in it."""
        self.store.drafts_stored = self._add_stored_drafts
        await self.store.open(self.client_id)
        for draft in await self.store.call(Database.drafts):
            self._waiting[draft.item.id] = 0
        await self._load()
        await self._count()

    async def close(self) -> None:
        """Save the view and close the store."""
        for handle in list(self._handles.values()):
            handle.abandon()
        self.feed.end()
        try:
            if self._view.folded_since_snapshot:
                await self._save_snapshot()
        finally:
            await self.store.close()

    async def follow(self, partitions: Iterable[str]) -> dict[str, int]:
        """Follow exactly these partitions; returns their cursors."""
        self.partitions = check_partitions(partitions)
        self._view = LocalView(self._view_of, self.partitions)
        await self._load()
        return self.cursors

    async def _load(self) -> None:
        opened = await self.store.call(Database.opened, self.partitions)
        self._view.restore(await self.store.call(Database.snapshot, _SNAPSHOT))
        if opened.pruned_through > self._view.base_id:
            # The events below were dropped in favour of a snapshot that cannot be used: only the server has them now.
            await self.store.call(Database.refetch)
            opened = await self.store.call(Database.opened, self.partitions)
        self.cursors, self.model_version = opened.cursors, opened.model_version
        await self._fold_from_store()
        for draft in await self.store.call(Database.drafts):
            self._view.add_draft(draft.local_id, local_event(draft.item, self.client_id))

    async def _fold_from_store(self) -> None:
        since = self._view.base_id
        while True:
            events = await self.store.call(Database.events, since=since, partitions=self.partitions, limit=_LOAD_EVENTS)
            self._view.add_committed(events)
            self._settle_view()
            if len(events) < _LOAD_EVENTS:
                return
            since = events[-1].committed_id or since

    # Drafts

    async def add(self, items: Sequence[SubmitItem]) -> list[Draft]:
        """Store drafts; they are on disk and in the view when this returns."""
        # In hand before they are stored: a verdict may come before this call goes on.
        drafts = [self._handle(local_event(item, self.client_id), Pending()) for item in items]
        answers = await self.store.add_drafts(
            items, count_max=self._settings.drafts_count_max, bytes_max=self._settings.drafts_bytes_max
        )
        for draft, answer in zip(drafts, answers, strict=True):
            if not isinstance(answer, StoredDraft):
                draft.note(answer)
        return drafts

    def _add_stored_drafts(self, drafts: Sequence[StoredDraft]) -> None:
        for draft in drafts:
            self._waiting[draft.item.id] = 0
            self._view.add_draft(draft.local_id, local_event(draft.item, self.client_id))
        if drafts:
            self.drafts_added()

    async def draft(self, id: str) -> Draft | None:
        """The draft with this id, whatever became of it."""
        if id in self._handles:
            return self._handles[id]
        found = await self.store.call(Database.find, id)
        return None if found is None else self._handle(found[0], found[1])

    async def next_drafts(self, count: int) -> list[SubmitItem]:
        """The drafts to send next, oldest first."""
        if not self._waiting:
            return []
        return [draft.item for draft in await self.store.call(Database.drafts, limit=count)]

    def note_sent(self, ids: Iterable[str]) -> None:
        """These drafts are on their way."""
        for id in ids:
            if id in self._waiting:
                self._waiting[id] += 1
                if id in self._handles:
                    self._handles[id].note(Pending(self._waiting[id]))

    async def quarantine(self) -> list[QuarantinedDraft]:
        """Rejected drafts, oldest first."""
        return await self.store.call(Database.quarantine)

    async def release(self, id: str) -> Draft | None:
        """Let a rejected draft wait again."""
        stored = await self.store.call(Database.release, id)
        if stored is None:
            return None
        self._waiting[id] = 0
        event = local_event(stored.item, self.client_id)
        self._view.add_draft(stored.local_id, event)
        await self._count()
        draft = self._handle(event, Pending())
        draft.note(Pending())
        self.drafts_added()
        return draft

    async def discard(self, id: str) -> bool:
        """Forget a rejected draft."""
        is_gone = await self.store.call(Database.discard, id)
        await self._count()
        return is_gone

    def _handle(self, event: LocalEvent, verdict: Verdict) -> Draft:
        handle = self._handles.get(event.id)
        if handle is None:
            handle = self._handles[event.id] = Draft(event, verdict, self._clock)
        return handle

    # What a session asks for

    async def store_events(self, effect: StorePage | StoreEvents) -> bool:
        """Store events; ``False`` if they contradict what is stored, and nothing was."""
        cursors = effect.cursors if isinstance(effect, StorePage) else None
        applied = await self.store.call(Database.store_events, effect.events, cursors)
        if applied.is_conflicting:
            return False
        self.cursors.update(cursors or {})
        await self._apply(applied)
        if isinstance(effect, StoreEvents):
            await self.mend_view()
        return True

    @property
    def takes_snapshots(self) -> bool:
        """Whether a state of the server can replace history."""
        return self._view_of.from_server is not None

    async def adopt(self, effect: AdoptSnapshot) -> None:
        """Begin from the server's state."""
        self._view.adopt(effect.committed_id, {name: msgspec.json.decode(raw) for name, raw in effect.state.items()})
        await self._save_snapshot()

    async def settle(self, verdicts: Sequence[ItemVerdict]) -> bool:
        """Store verdicts; ``False`` if they contradict what is stored, and nothing was."""
        applied = await self.store.call(Database.settle, verdicts, self._clock.now_ns() // 1_000_000)
        if applied.is_conflicting:
            return False
        await self._apply(applied)
        return True

    async def reset(self, effect: ResetHistory) -> None:
        """Set the history aside and begin again."""
        await self.store.call(Database.reset_history)
        self.cursors = dict.fromkeys(self.cursors, 0)
        self._view.rebuild()
        await self._count()
        self.feed.tell(HistoryReset(effect.reason))

    async def note_model(self, model_version: int) -> None:
        """Remember the server's model version."""
        await self.store.call(Database.note_model, model_version)
        self.model_version = model_version

    def report_gap(self, effect: GapFound) -> None:
        """Tell that the server has lost some history."""
        self.feed.tell(GapReported(effect.partitions, effect.since, effect.pruned_through))

    async def mend_view(self) -> bool:
        """
        Fold again what came too late to be folded in its place.

        Returns:
            Whether all that takes is here; if events below were pruned, the cursors now say to fetch them again.
        """
        if not self._view.needs_rebuild:
            return True
        opened = await self.store.call(Database.opened, self.partitions)
        if opened.pruned_through:
            await self.store.call(Database.refetch)
            self.cursors = dict.fromkeys(self.cursors, 0)
        self._view.rebuild()
        await self._fold_from_store()
        return not opened.pruned_through

    async def prune(self) -> int:
        """Keep a snapshot in place of the events it covers; returns how many went."""
        if not self._view.base_id:
            return 0
        through = await self._save_snapshot()
        return await self.store.call(Database.prune, through)

    async def _apply(self, applied: Applied) -> None:
        own = applied.verdicts
        for id, verdict in own.items():
            self._waiting.pop(id, None)
            self._view.drop_draft(id)
            if id in self._handles:
                self._handles[id].note(verdict)
        self._view.add_committed(applied.events)
        self._settle_view()
        for event in applied.events:
            self.feed.tell(EventCommitted(event, event.id in own))
        for rejected in applied.rejected:
            self.feed.tell(DraftRejected(rejected.event, rejected.verdict))
        if applied.rejected or self.orphan_count:
            await self._count()
        if self._view.folded_since_snapshot >= self._settings.snapshot_events:
            await self._save_snapshot()

    def _settle_view(self) -> None:
        self._view.settle(min(self.cursors.values(), default=0))

    async def _save_snapshot(self) -> int:
        # Pruning goes by what was saved, not by where the view is by then: the view may have moved on meanwhile, and events
        # that are neither in the snapshot nor in the store would be gone.
        snapshot = self._view.snapshot()
        await self.store.call(Database.save_snapshot, _SNAPSHOT, snapshot)
        keep_count = self._settings.history_events_max
        if keep_count is not None:
            await self.store.call(Database.prune, snapshot.through, keep_count)
        return snapshot.through

    async def _count(self) -> None:
        counts = await self.store.call(Database.counts)
        self.quarantined_count, self.orphan_count = counts.quarantined, counts.orphans
