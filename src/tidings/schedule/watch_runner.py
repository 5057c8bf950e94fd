"""
Evaluates watches: follows what happens, waits for what has to last, and has the actions done.

One task takes in happenings, in their order; a timer wakes watches whose time has come. Either way, what was found is stored first
(``NoteWatches``), with the number of each firing that begins; then the actions are done, for each watch one after another; then what came of
them is stored (``FinishWatchFiring``) and told. So a crash loses no firing: one whose outcome is not stored is dispatched again, under
the same name, and what had not been evaluated is evaluated from history.

Durations and cooldowns go by a steady clock: they are as long as they are, also if the clock is set meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from tidings.core.clock import SteadyClock
from tidings.core.errors import TidingsError
from tidings.core.settings import checked
from tidings.core.tasks import cancel_and_wait, finish_or_cancel
from tidings.core.timers import Timers
from tidings.happenings.bus import Envelope
from tidings.happenings.errors import CursorTooOld, HappeningsClosed, Lagged
from tidings.happenings.filter_index import FilterIndex
from tidings.happenings.subscription import HappeningSubscription
from tidings.happenings.variants import ClockAdjusted, ClockTrustChanged, SubjectStateChanged
from tidings.ledger.errors import LedgerClosed
from tidings.ledger.ledger import Ledger
from tidings.ledger.paging import ListPage, read_page
from tidings.ledger.state import LedgerState
from tidings.ledger.subjects import Subjects

from .actions import Actions, ScheduledAction, action_of
from .conditions import Tree
from .triggers import UNTRUSTED_TIME, first_memory, shifted, step
from .watches import (
    UNWATCHED_VARIANTS,
    CancelWatch,
    CreateWatch,
    FinishWatchFiring,
    NoteWatches,
    WatchEntry,
    Watches,
    WatchKey,
    WatchNote,
    WatchSettings,
    WatchSpec,
    watch_spec,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

FEEDBACK: Final = "feedback"
OVERLOADED: Final = "overloaded"
_STRUCTURAL: Final = frozenset({"subject_merged", "subject_migrated", "subject_split", "subject_forgotten"})
"""Never left out, however many come: a watch would lose its subject."""
_WINDOW_MS: Final = 1000
_FEEDBACK_ROUNDS_MAX: Final = 100
"""How many times in a row what happens during an action may bring about the same action."""
_NOTES_PER_COMMAND_MAX: Final = 50
_EVALUATIONS_IN_A_ROW_MAX: Final = 100
"""Then others have a turn: thousands of watches may look at the same happening."""
_UNSTORED_SEQS_MAX: Final = 10_000
"""About how many happenings are evaluated again after a crash, if no watch had anything to store."""
_RETRY_S: Final = 1.0
_CLOSE_S: Final = 5.0
_MS: Final = 1_000_000


class _Line:
    """The firings of a watch that are yet to be dispatched. It outlives the evaluation, which may have to begin anew."""

    __slots__ = ("action", "after_seq", "issue", "key", "numbers", "rounds", "rounds_of", "task", "through_seq")

    def __init__(self, entry: WatchEntry) -> None:
        self.key = entry.key
        self.issue = entry.issue
        self.action = entry.action
        self.numbers: deque[int] = deque()
        """The first one is under way."""
        self.task: asyncio.Task[None] | None = None
        self.after_seq: int | None = None
        self.through_seq: int | None = None
        """What happened while the last action was done: after the one seq, through the other; none while it is being done."""
        self.rounds = 0
        """How often in a row it was what happened during an action that brought about the next, up to the last one."""
        self.rounds_of: dict[int, int] = {}
        """The same of those that wait, where it is not 0."""

    def begin(self, seq: int) -> int:
        """Begin with the first firing, after this happening; its number."""
        number = self.numbers[0]
        self.rounds = self.rounds_of.pop(number, 0)
        self.after_seq, self.through_seq = seq, None
        return number

    def rounds_through(self, seq: int) -> int:
        """How many rounds a firing has behind it that this happening brings about."""
        is_during = (
            self.after_seq is not None
            and self.after_seq < seq
            and (self.through_seq is None or seq <= self.through_seq)
        )
        return self.rounds + 1 if is_during else 0

    def keep_only_first(self) -> None:
        """Begin none of those that wait."""
        while len(self.numbers) > 1:
            self.numbers.pop()


class _Watch:
    """One watch under evaluation."""

    def __init__(self, entry: WatchEntry, line: _Line, ahead_ms: int) -> None:
        self.key: Final = entry.key
        self.issue: Final = entry.issue
        self.trigger: Final = entry.spec.trigger
        self.tree: Final = Tree(entry.spec.condition)
        self.memory = (
            shifted(entry.memory, ahead_ms) if entry.memory else first_memory(self.tree, self.tree.first({}), 0)
        )
        self.seq = entry.seq
        self.last_firing = entry.last_firing
        self.line: Final = line
        self.index_numbers: list[int] = []
        self.look_at_ms: int | None = None
        self.armed_ns: int | None = None
        self.window_ends_ms = 0
        self.evaluated_count = 0
        self.dropped_count = 0
        self.unseen: dict[str, Envelope] = {}
        """The last state of each subject that came in a window that was full."""
        self.held_back: str | None = None
        """Why no firing is begun until those that wait are done."""
        self.held_until_ms = 0
        self.quiet_until_ms = 0


class _Draft:
    """What is to be stored about a watch."""

    __slots__ = ("dropped", "firings", "missed")

    def __init__(self) -> None:
        self.firings: list[int] = []
        self.missed: list[str] = []
        self.dropped = 0


_Drafts = dict[_Watch, _Draft]


class WatchRunner:
    """
    Runs the watches of a ledger that has the part ``Watches``. Before ``start`` it only keeps them.

    Args:
        ledger: Where they are kept, and whose happenings they are about.
        actions: Who does what they ask for.
        is_time_trusted: Whether durations can be relied on now. A change is heard of as ``clock_trust_changed``.
        settings: How many there may be, and how often one is evaluated.
    """

    def __init__(
        self,
        ledger: Ledger,
        actions: Actions,
        *,
        is_time_trusted: Callable[[], bool] = lambda: True,
        settings: WatchSettings | None = None,
    ) -> None:
        self._ledger = ledger
        self._actions = actions
        self._is_time_trusted = is_time_trusted
        self._settings = checked(settings or WatchSettings(), "watches")
        self._steady = SteadyClock(ledger.clock)
        self._timers: Timers[WatchKey] = Timers(self._steady, self._look, name="watches", look_interval_s=60.0)
        self._lock = asyncio.Lock()
        self._dispatches = asyncio.Semaphore(self._settings.dispatches_max)
        self._watches: dict[WatchKey, _Watch] = {}
        self._lines: dict[tuple[WatchKey, int], _Line] = {}
        self._index: FilterIndex[_Watch] = FilterIndex()
        self._seq = 0
        self._stored_seq = 0
        self._subscription: HappeningSubscription | None = None
        self._is_stale = False
        self._task: asyncio.Task[None] | None = None
        self._changes: set[asyncio.Task[Any]] = set()

    # Life

    async def start(self) -> None:
        """Take up all watches where they were left, and follow what happens from now on."""
        assert self._task is None
        async with self._lock:
            await self._load()
        self._timers.start()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="watches")

    async def close(self) -> None:
        """
        Stop, before the ledger is closed. Closing twice is fine.

        Actions under way have a few seconds to end; what does not is dispatched again after the next start.
        """
        task, self._task = self._task, None
        if task is None:
            return
        await asyncio.gather(*self._changes, return_exceptions=True)
        async with self._lock:  # what was evaluated is stored: nobody is stopped in between
            await self._timers.close()
            await cancel_and_wait(task)
        working = [line.task for line in self._lines.values() if line.task is not None]
        for line in self._lines.values():
            line.keep_only_first()
        await finish_or_cancel(self._ledger.clock, _CLOSE_S, working)
        if self._subscription is not None:
            self._subscription.close()
        if self._watches and self._seq > self._stored_seq:
            try:
                await self._store_seq()
            except TidingsError as error:
                logger.warning("the watches were not closed in order; some happenings are evaluated again: %s", error)

    # What users do

    async def create(
        self, creator: str, spec: WatchSpec | Any, action: ScheduledAction | Any, *, admin: str | None = None
    ) -> WatchEntry:
        """
        Issue a watch, or issue it again: then it starts afresh, with counters at 0.

        Args:
            creator: Whose it is: a plugin, or a word for an operator.
            spec: What is watched; a ``WatchSpec`` or its JSON.
            action: What is done; an ``ScheduledAction`` or its JSON.
            admin: The administrator who does it, for the admin ledger.

        Raises:
            BadSpec: Spec or action cannot be understood.
            InvalidCommand: A name cannot be used.
            QuotaExceeded: There are as many watches as there may be.
        """
        command = CreateWatch(
            creator=creator,
            spec=watch_spec(spec),
            action=action_of(action),
            count_max=self._settings.count_max,
            creator_count_max=self._settings.count_per_creator_max,
            admin=admin,
        )
        return await self._whole(self._create(command))

    async def cancel(self, creator: str, watch_id: str, *, cancelled_by: str, admin: str | None = None) -> bool:
        """Cancel a watch; whether there was one. Its action, if it is under way, is done to its end. ``admin``: as in ``create``."""
        command = CancelWatch(creator=creator, watch_id=watch_id, cancelled_by=cancelled_by, admin=admin)
        return await self._whole(self._cancel(command))

    async def entries(self) -> list[WatchEntry]:
        """Every watch, also those cancelled of late, by creator and id."""
        return await self._ledger.read(lambda state: state.part(Watches).all())

    async def page(self, cursor: str | None = None, page_size: int | None = None) -> ListPage[WatchEntry]:
        """A page of what ``entries`` gives. See ``AppointmentRunner.page``."""
        return await read_page(
            self._ledger,
            cursor,
            page_size,
            lambda state: state.part(Watches).order,
            lambda state, key: state.part(Watches).require(key),
            key_length=2,
        )

    async def entry(self, creator: str, watch_id: str) -> WatchEntry | None:
        """One watch, also if it was cancelled of late."""
        return await self._ledger.read(lambda state: state.part(Watches).get(WatchKey(creator, watch_id)))

    async def _whole(self, change: Coroutine[Any, Any, _T]) -> _T:
        """Make a change to its end, also if the caller gives up: what is stored must be what is evaluated."""
        task = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._made)
        return await asyncio.shield(task)

    def _made(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # it is the caller's, if that still waits

    async def _create(self, command: CreateWatch) -> WatchEntry:
        async with self._lock:
            entry: WatchEntry = await self._ledger.execute(command)
            if self._task is not None:  # else it is taken up at the start
                self._give_up(entry.key)
                try:
                    await self._enter(entry)
                except (TidingsError, OSError):
                    self._begin_anew()
                    raise
            return entry

    async def _cancel(self, command: CancelWatch) -> bool:
        async with self._lock:
            is_cancelled: bool = await self._ledger.execute(command)
            if is_cancelled:
                self._give_up(WatchKey(command.creator, command.watch_id))
            return is_cancelled

    # Beginning

    async def _load(self) -> None:
        """Make all watches anew from what is stored, and bring them up to date."""
        for key in list(self._watches):
            self._forget(key)
        self._is_stale = False
        entries, self._seq = await self._ledger.read(
            lambda state: (list(state.part(Watches).active()), state.part(Watches).seq)
        )
        self._stored_seq = self._seq
        for entry in entries:
            line = self._add(entry).line
            line.numbers.extend(number for number in entry.firings if number not in line.numbers)
        fresh = [self._watches[entry.key] for entry in entries if entry.memory is None]
        await self._begin(fresh)
        await self._subscribe(fresh)
        for line in list(self._lines.values()):
            self._work_off(line)

    async def _enter(self, entry: WatchEntry) -> None:
        """Begin to evaluate a new watch."""
        watch = self._add(entry)
        await self._begin([watch])
        drafts: _Drafts = {watch: _Draft()}
        self._evaluate(watch, drafts)
        await self._store(drafts)

    async def _begin(self, watches: Sequence[_Watch]) -> None:
        """Let watches remember how things are now. What happened before does not concern them."""
        if not watches:
            return
        names = {name for watch in watches for name in watch.tree.subject_ids()}
        subjects, seq = await self._look_up(names)
        for watch in watches:
            watch.memory = first_memory(watch.tree, watch.tree.first(subjects), self._now_ms())
            watch.seq = seq
            self._file(watch)

    async def _subscribe(self, fresh: Iterable[_Watch] = ()) -> None:
        """Evaluate what has happened since, from history; what happens from now on comes by the subscription. Store this of new ones too."""
        if self._subscription is not None:
            self._subscription.close()
        self._subscription = self._ledger.happenings.subscribe()
        until_seq = self._subscription.current_seq
        drafts: _Drafts = {watch: _Draft() for watch in fresh}
        since_seq = self._seq if self._watches else until_seq
        try:
            async for envelope in self._ledger.happenings.history(since_seq, until_seq):
                await self._take_in(envelope, drafts)
                if len(drafts) >= _NOTES_PER_COMMAND_MAX:
                    await self._store(drafts)
                    drafts = {}
        except CursorTooOld:
            names = {name for watch in self._watches.values() for name in watch.memory.leaves.subject_ids}
            subjects, _ = await self._look_up(names)
            for watch in self._watches.values():
                leaves = watch.tree.first(subjects, watch.memory.leaves)
                watch.memory = msgspec.structs.replace(watch.memory, leaves=leaves)
                drafts.setdefault(watch, _Draft())
                self._file(watch)
        self._seq = until_seq
        for watch in self._watches.values():
            self._evaluate(watch, drafts)
        await self._store(drafts)

    async def _look_up(self, names: Iterable[str]) -> tuple[dict[str, tuple[str, Any]], int]:
        """The subjects of these names: their ids by now and their states; and the happening up to which that is so."""

        def found(state: LedgerState) -> tuple[dict[str, tuple[str, Any]], int]:
            records = {name: state.part(Subjects).describe(name).record for name in names}
            known = {name: (record.canonical_id, record.state) for name, record in records.items() if record}
            return known, self._ledger.happenings.last_seq

        return await self._ledger.read(found)

    def _add(self, entry: WatchEntry) -> _Watch:
        line = self._lines.setdefault((entry.key, entry.issue), _Line(entry))
        watch = self._watches[entry.key] = _Watch(entry, line, self._ahead_ms())
        if entry.memory is not None:
            self._file(watch)
        return watch

    def _forget(self, key: WatchKey) -> None:
        """Evaluate a watch no more. What is under way goes on."""
        watch = self._watches.pop(key, None)
        if watch is None:
            return
        self._unfile(watch)
        watch.look_at_ms, watch.dropped_count = None, 0
        self._arm(watch)
        if watch.line.task is None:
            del self._lines[watch.key, watch.issue]

    def _give_up(self, key: WatchKey) -> None:
        """Evaluate a watch no more, and begin none of its firings that wait."""
        watch = self._watches.get(key)
        if watch is not None:
            watch.line.keep_only_first()
            self._forget(key)

    def _file(self, watch: _Watch) -> None:
        """Enter a watch in the index by what it looks at now."""
        self._unfile(watch)
        watch.index_numbers = [self._index.add(each, watch) for each in watch.tree.filters(watch.memory.leaves)]

    def _unfile(self, watch: _Watch) -> None:
        for number in watch.index_numbers:
            self._index.remove(number)
        watch.index_numbers = []

    # Evaluating

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
                if not self._is_stale:
                    return
            except LedgerClosed:
                return
            except (TidingsError, OSError):
                logger.exception("evaluating watches failed; it begins anew in %g s", _RETRY_S)
            await self._ledger.clock.sleep(_RETRY_S)
            try:
                async with self._lock:
                    await self._load()
            except LedgerClosed:
                return
            except (TidingsError, OSError):
                self._is_stale = True

    async def _follow(self) -> None:
        """Take in what happens until there is no more, or until what was found could not be stored."""
        while not self._is_stale:
            assert self._subscription is not None
            try:
                envelopes = await self._subscription.recv_many()
            except Lagged:
                async with self._lock:
                    await self._subscribe()
                continue
            except HappeningsClosed:
                return
            async with self._lock:
                drafts: _Drafts = {}
                for envelope in envelopes:
                    await self._take_in(envelope, drafts)
                await self._store(drafts)

    async def _look(self, due: list[tuple[int, WatchKey]]) -> None:
        """See about watches whose time has come."""
        async with self._lock:
            drafts: _Drafts = {}
            for due_ns, key in due:
                watch = self._watches.get(key)
                if watch is not None and watch.armed_ns == due_ns:
                    watch.armed_ns = None
                    self._turn_window(watch, drafts)
                    self._evaluate(watch, drafts)
            try:
                await self._store(drafts)
            except (TidingsError, OSError):
                logger.exception("what watches found could not be stored; they begin anew in %g s", _RETRY_S)
                self._begin_anew()

    def _begin_anew(self) -> None:
        """What watches remember is ahead of what is stored: have them made again from there."""
        self._is_stale = True
        assert self._subscription is not None
        self._subscription.close()

    async def _take_in(self, envelope: Envelope, drafts: _Drafts) -> None:
        """Show a happening to all watches that look at such. Whoever calls this has the lock, so that no watch comes or goes meanwhile."""
        happening, self._seq = envelope.happening, envelope.seq
        if happening.variant in UNWATCHED_VARIANTS:
            return
        for number, watch in enumerate(dict.fromkeys(self._index.matching(happening)), 1):
            if number % _EVALUATIONS_IN_A_ROW_MAX == 0:
                await asyncio.sleep(0)
            if envelope.seq > watch.seq and self._is_admitted(watch, envelope, drafts):
                self._evaluate(watch, drafts, envelope)
        if isinstance(happening, ClockTrustChanged):
            for watch in self._watches.values():
                if watch.memory.told == UNTRUSTED_TIME:
                    self._evaluate(watch, drafts)
        elif isinstance(happening, ClockAdjusted):
            for watch in self._watches.values():  # what is stored goes by the clock as it was
                drafts.setdefault(watch, _Draft())

    def _is_admitted(self, watch: _Watch, envelope: Envelope, drafts: _Drafts) -> bool:
        """Whether a watch may be evaluated once more in this second. The state that it misses is kept for the next one."""
        if envelope.happening.variant in _STRUCTURAL:
            return True
        if self._now_ms() >= watch.window_ends_ms:
            self._turn_window(watch, drafts)
        watch.evaluated_count += 1
        if watch.evaluated_count <= self._settings.evaluations_per_second_max:
            return True
        watch.dropped_count += 1
        if isinstance(envelope.happening, SubjectStateChanged):
            watch.unseen[envelope.happening.canonical_id] = envelope
        self._arm(watch)
        return False

    def _turn_window(self, watch: _Watch, drafts: _Drafts) -> None:
        """Begin a new second if the last is over: tell what was left out, and see the last states among that."""
        now_ms = self._now_ms()
        if now_ms < watch.window_ends_ms:
            return
        watch.window_ends_ms, watch.evaluated_count = now_ms + _WINDOW_MS, 0
        if watch.dropped_count:
            drafts.setdefault(watch, _Draft()).dropped += watch.dropped_count
            watch.dropped_count = 0
        unseen, watch.unseen = watch.unseen, {}
        for envelope in unseen.values():
            watch.evaluated_count += 1
            self._evaluate(watch, drafts, envelope)

    def _evaluate(self, watch: _Watch, drafts: _Drafts, envelope: Envelope | None = None) -> None:
        """Evaluate a watch, with a happening or because time has passed, and draft what is to be stored."""
        now_ms, before = self._now_ms(), watch.memory
        found = step(
            watch.tree,
            watch.trigger,
            before,
            now_ms,
            happening=None if envelope is None else envelope.happening,
            is_time_trusted=self._is_time_trusted(),
        )
        watch.memory, watch.look_at_ms = found.memory, found.look_at_ms
        if found.memory != before:
            drafts.setdefault(watch, _Draft())
            if found.memory.leaves.subject_ids != before.leaves.subject_ids:
                self._file(watch)
        if found.missed is not None:
            drafts.setdefault(watch, _Draft()).missed.append(found.missed)
        if found.is_fired:
            self._fire(watch, drafts.setdefault(watch, _Draft()), now_ms, envelope)
        self._arm(watch)

    def _fire(self, watch: _Watch, draft: _Draft, now_ms: int, envelope: Envelope | None) -> None:
        """Draft a firing, unless the watch keeps setting off itself, or too many of its firings wait already."""
        line = watch.line
        rounds = 0 if envelope is None else line.rounds_through(envelope.seq)
        waiting_count = len(line.numbers) + len(draft.firings)
        if not waiting_count and now_ms >= watch.held_until_ms:
            watch.held_back = None
        if rounds >= _FEEDBACK_ROUNDS_MAX:
            watch.held_back = FEEDBACK
        elif waiting_count >= self._settings.waiting_firings_max:
            watch.held_back = watch.held_back or OVERLOADED
        if watch.held_back is None:
            watch.last_firing += 1
            draft.firings.append(watch.last_firing)
            if rounds:
                line.rounds_of[watch.last_firing] = rounds
            return
        # It has to come to rest: a single firing more could begin it all again.
        watch.held_until_ms = max(watch.held_until_ms, now_ms + _WINDOW_MS if waiting_count else 0)
        if now_ms >= watch.quiet_until_ms:
            watch.quiet_until_ms = now_ms + _WINDOW_MS
            draft.missed.append(watch.held_back)

    def _arm(self, watch: _Watch) -> None:
        """Have the watch looked at when its time comes."""
        moments = (watch.look_at_ms, watch.window_ends_ms if watch.dropped_count else None)
        first_ms = min((each for each in moments if each is not None), default=None)
        due_ns = None if first_ms is None else first_ms * _MS
        if due_ns != watch.armed_ns:
            if watch.armed_ns is not None:
                self._timers.discard(watch.armed_ns, watch.key)
            if due_ns is not None:
                self._timers.add(due_ns, watch.key)
            watch.armed_ns = due_ns

    async def _store(self, drafts: _Drafts) -> None:
        """Store what was found, then begin the firings. Moments are stored by the clock as it is now, which is where a restart begins."""
        items = list(drafts.items())
        for begin in range(0, len(items), _NOTES_PER_COMMAND_MAX):
            chunk = items[begin : begin + _NOTES_PER_COMMAND_MAX]
            seq = self._seq if begin + len(chunk) == len(items) else 0
            notes = tuple(self._note(watch, draft) for watch, draft in chunk)
            await self._ledger.execute(NoteWatches(notes=notes, seq=seq))
            self._stored_seq = max(self._stored_seq, seq)
            for watch, draft in chunk:
                if draft.firings:
                    watch.line.numbers.extend(draft.firings)
                    self._work_off(watch.line)
        if self._watches and self._seq > self._stored_seq + _UNSTORED_SEQS_MAX:
            await self._store_seq()

    def _note(self, watch: _Watch, draft: _Draft) -> WatchNote:
        return WatchNote(
            creator=watch.key.creator,
            watch_id=watch.key.watch_id,
            issue=watch.issue,
            memory=shifted(watch.memory, -self._ahead_ms()),
            seq=max(watch.seq, self._seq),
            firings=tuple(draft.firings),
            missed=tuple(draft.missed),
            dropped=draft.dropped,
        )

    async def _store_seq(self) -> None:
        """Store how far everything was evaluated: from there it goes on after a restart."""
        seq = self._seq
        await self._ledger.execute(NoteWatches(seq=seq))
        self._stored_seq = seq

    def _now_ms(self) -> int:
        return self._steady.now_ns() // _MS

    def _ahead_ms(self) -> int:
        """By how much the steady clock is ahead of the ledger's: more or less than nothing once that was set."""
        return self._now_ms() - self._ledger.clock.now_ns() // _MS

    # Doing

    def _work_off(self, line: _Line) -> None:
        """Dispatch what waits in a line, if nobody does yet."""
        if line.task is None and line.numbers:
            line.task = asyncio.get_running_loop().create_task(self._dispatch(line), name="watch action")

    async def _dispatch(self, line: _Line) -> None:
        ledger = self._ledger
        try:
            while line.numbers:
                async with self._dispatches:
                    number = line.begin(ledger.happenings.last_seq)
                    fired_at_ms = ledger.clock.now_ns() // _MS
                    firing = f"watch/{line.key.creator}/{line.key.watch_id}/{line.issue}/{number}"
                    outcome = await self._actions.dispatch(line.action, firing)
                line.through_seq = ledger.happenings.last_seq
                await self._finish(
                    FinishWatchFiring(
                        creator=line.key.creator,
                        watch_id=line.key.watch_id,
                        issue=line.issue,
                        firing=number,
                        fired_at_ms=fired_at_ms,
                        dispatch_outcome=outcome,
                    )
                )
                line.numbers.popleft()
        except TidingsError as error:
            # It is dispatched again after the next start.
            logger.error("what came of the action of watch %s could not be stored: %s", "/".join(line.key), error)
        finally:
            line.task = None
            watch = self._watches.get(line.key)
            if watch is None or watch.line is not line:
                del self._lines[line.key, line.issue]

    async def _finish(self, command: FinishWatchFiring) -> None:
        while True:
            try:
                await self._ledger.execute(command)
            except TidingsError as error:
                if not error.retryable or isinstance(error, LedgerClosed):
                    raise
                logger.warning("what came of a watch's action could not be stored; it is tried again: %s", error)
                await self._ledger.clock.sleep(_RETRY_S)
            else:
                return
