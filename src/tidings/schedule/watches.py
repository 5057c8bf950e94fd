"""
Watches: actions that are done when a condition holds. What a watch is, where watches are kept, and the commands that change them.

Who evaluates them is ``watch_runner.py``. A watch is known by its creator and its own id; issuing one again replaces it and starts it afresh.
"""

from __future__ import annotations

import difflib
import enum
from collections import ChainMap
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import msgspec

from tidings.core.settings import Settings
from tidings.core.validation import reread
from tidings.happenings.happening import Happening, variants
from tidings.happenings.variants import WatchCancelled, WatchCreated, WatchEvaluationThrottled, WatchFired, WatchMissed
from tidings.ledger.admin_ledger import record_admin_action
from tidings.ledger.commands import Command, CommandOutcome, check_name
from tidings.ledger.paging import KeyOrder
from tidings.ledger.state import FIRST_RULES, LedgerState
from tidings.ledger.subjects import Addressing

from .actions import ScheduledAction
from .conditions import Composite, Condition, HappeningMatch, Tree
from .errors import BadSpec, QuotaExceeded
from .triggers import EDGE, Trigger, WatchMemory

WATCH_SCHEME: Final = "evo-watch"
"""The scheme of the addressing ``<creator>/<watch_id>``."""
UNWATCHED_VARIANTS: Final = frozenset(
    {"watch_created", "watch_fired", "watch_missed", "watch_cancelled", "watch_evaluation_throttled"}
)
"""Variants for which no watch is evaluated: watches that watch each other would never come to rest."""
UNFINISHED_COUNT_MAX: Final = 1000
"""How many watches that were issued again or forgotten have firings under way; the outcome of the oldest is not emitted beyond that."""
CANCELLED_COUNT_MAX: Final = 1000
"""How many watches are shown as cancelled; the oldest are forgotten first."""
_SPEC_BYTES_MAX: Final = 64 * 1024


class WatchSettings(Settings, frozen=True, kw_only=True):
    """How many watches there may be, and how often one is evaluated."""

    count_max: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 10_000
    """Watches of all creators; those that were cancelled do not count."""
    count_per_creator_max: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 1_000
    """The same, of one creator."""
    evaluations_per_second_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1_000
    """Happenings that one watch is shown in a second; what is left out is counted and told."""
    waiting_firings_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1_000
    """Firings of one watch that wait for an action to end. With so many, further ones are missed until all of those are done."""
    dispatches_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    """Actions of watches under way at once; what fires meanwhile waits."""


class WatchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is watched, and when it counts."""

    watch_id: str
    condition: Condition
    trigger: Trigger = EDGE


class WatchState(enum.StrEnum):
    """How a watch is."""

    PENDING = "pending"
    MATCHED = "matched"
    """Its condition holds, or its action is under way."""
    CANCELLED = "cancelled"


class WatchKey(NamedTuple):
    """What a watch is known by."""

    creator: str
    watch_id: str


class WatchEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One watch as it is kept."""

    creator: str
    spec: WatchSpec
    action: ScheduledAction
    issue: int
    """Counts issues of watches; tells one from another that was issued later under the same id."""
    is_cancelled: bool = False
    fires_completed: int = 0
    last_fired_at_ms: int | None = None
    memory: WatchMemory | None = None
    seq: int = 0
    """The happening up to which nothing concerns it any more."""
    firings: tuple[int, ...] = ()
    """The firings whose outcome is not known yet, by number."""
    last_firing: int = 0

    @property
    def key(self) -> WatchKey:
        """What it is known by."""
        return WatchKey(self.creator, self.spec.watch_id)

    @property
    def state(self) -> WatchState:
        """How it is."""
        if self.is_cancelled:
            return WatchState.CANCELLED
        is_held = self.memory is not None and self.memory.entered_at_ms is not None
        return WatchState.MATCHED if self.firings or is_held else WatchState.PENDING

    def to_json(self) -> dict[str, Any]:
        """The entry as clients see it."""
        form = {
            "creator": self.creator,
            "spec": msgspec.to_builtins(self.spec),
            "action": msgspec.to_builtins(self.action),
            "state": str(self.state),
            "fires_completed": self.fires_completed,
        }
        if self.last_fired_at_ms is not None:
            form["last_fired_ms"] = self.last_fired_at_ms
        return form


def watch_spec(value: WatchSpec | Any) -> WatchSpec:
    """
    A watch's spec, from JSON or as it is, if it can be watched.

    Raises:
        BadSpec: It cannot; the text says what is wrong.
    """
    spec: WatchSpec = reread(
        value,
        WatchSpec,
        lambda path, problem: BadSpec(f"{path or 'spec'}: {problem}"),
        bytes_max=_SPEC_BYTES_MAX,
    )
    Tree(spec.condition)
    _check_variants(spec.condition)
    return spec


def _check_variants(condition: Condition) -> None:
    """
    Check that the variants that a condition names can ever come.

    Raises:
        BadSpec: One is not declared, or is about watches, which are not evaluated for watches.
    """
    if isinstance(condition, Composite):
        for term in condition.terms:
            _check_variants(term)
    elif isinstance(condition, HappeningMatch):
        for name in condition.filter.variants:
            if name in UNWATCHED_VARIANTS:
                raise BadSpec(f"condition: {name} is about watches, and no watch is evaluated for it")
            if name not in variants():
                similar = difflib.get_close_matches(name, variants(), 1)
                hint = f"; did you mean {similar[0]}?" if similar else ""
                raise BadSpec(f"condition: {name[:80]!r} is not a declared variant{hint}")


class _Frozen(msgspec.Struct, frozen=True):
    entries: list[WatchEntry]
    cancelled: list[WatchEntry]
    issued_count: int
    seq: int
    unfinished: list[tuple[str, str, int, tuple[int, ...]]] = []


class Watches:
    """All watches, and up to which happening they were evaluated."""

    name: ClassVar[str] = "watches"
    frozen_type: ClassVar[Any] = _Frozen

    def __init__(self) -> None:
        self._entries: dict[WatchKey, WatchEntry] = {}
        self._cancelled: dict[WatchKey, WatchEntry] = {}
        self.order: KeyOrder[WatchKey] = KeyOrder(ChainMap(self._entries, self._cancelled))
        """The keys of all, also of those cancelled of late."""
        self._counts: dict[str, int] = {}
        self._unfinished: dict[tuple[str, str, int], tuple[int, ...]] = {}
        """The firings under way of watches that were issued again or forgotten meanwhile, by creator, id and issue."""
        self.issued_count = 0
        self.seq = 0
        """The happening up to which everything that concerns a watch is in its entry."""

    def freeze(self) -> _Frozen:
        return _Frozen(
            list(self._entries.values()),
            list(self._cancelled.values()),
            self.issued_count,
            self.seq,
            [(*watch, firings) for watch, firings in self._unfinished.items()],
        )

    def restore(self, frozen: _Frozen) -> None:
        for entry in frozen.entries:
            self.put(entry)
        self._cancelled.update((entry.key, entry) for entry in frozen.cancelled)
        self.issued_count, self.seq = frozen.issued_count, frozen.seq
        self._unfinished.update(
            ((creator, name, issue), firings) for creator, name, issue, firings in frozen.unfinished
        )

    def active(self) -> Iterator[WatchEntry]:
        """Every watch that was not cancelled, in the order in which they were issued."""
        return iter(self._entries.values())

    def all(self) -> list[WatchEntry]:
        """Every watch, also those cancelled of late, by creator and id."""
        every = self._entries | self._cancelled
        return [every[key] for key in sorted(every)]

    def get(self, key: WatchKey) -> WatchEntry | None:
        """The watch, also if it was cancelled of late."""
        return self._entries.get(key) or self._cancelled.get(key)

    def require(self, key: WatchKey) -> WatchEntry:
        """The watch of a key of ``order``."""
        entry = self.get(key)
        assert entry is not None
        return entry

    def is_active(self, key: WatchKey) -> bool:
        """Whether there is one that was not cancelled."""
        return key in self._entries

    @property
    def count(self) -> int:
        """How many there are that were not cancelled."""
        return len(self._entries)

    def count_of(self, creator: str) -> int:
        """How many of these a creator has."""
        return self._counts.get(creator, 0)

    def of_issue(self, key: WatchKey, issue: int) -> WatchEntry | None:
        """The watch that was issued then, also if it was cancelled of late."""
        entry = self.get(key)
        return entry if entry is not None and entry.issue == issue else None

    def put(self, entry: WatchEntry) -> None:
        """Add one, or replace the one of the same key."""
        before = self.get(entry.key)
        if before is None:
            self.order.changed(entry.key)
        elif before.issue != entry.issue:
            self._leave(before)
        if entry.is_cancelled:
            self._cancelled[entry.key] = entry
            return
        if entry.key not in self._entries:
            self._counts[entry.creator] = self.count_of(entry.creator) + 1
        self._entries[entry.key] = entry
        self._cancelled.pop(entry.key, None)

    def cancel(self, key: WatchKey) -> None:
        """Take one out; it is shown as cancelled for a while."""
        entry = self._entries.pop(key)
        self._counts[entry.creator] -= 1
        if not self._counts[entry.creator]:
            del self._counts[entry.creator]
        self._cancelled[key] = msgspec.structs.replace(entry, is_cancelled=True, memory=None)
        if len(self._cancelled) > CANCELLED_COUNT_MAX:
            first = next(iter(self._cancelled))
            self._leave(self._cancelled.pop(first))
            self.order.changed(first)

    def _leave(self, entry: WatchEntry) -> None:
        """Remember the firings under way of a watch that is kept no more."""
        if entry.firings:
            self._unfinished[(*entry.key, entry.issue)] = entry.firings
            if len(self._unfinished) > UNFINISHED_COUNT_MAX:
                del self._unfinished[next(iter(self._unfinished))]

    def finish_left(self, key: WatchKey, issue: int, firing: int) -> bool:
        """Finish a firing of a watch that is kept no more. Return whether it was under way."""
        firings = self._unfinished.get((*key, issue), ())
        left = tuple(number for number in firings if number != firing)
        if left:
            self._unfinished[(*key, issue)] = left
        elif firings:
            del self._unfinished[(*key, issue)]
        return len(left) < len(firings)


class CreateWatch(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Issue a watch, or issue it again. The result is its entry."""

    creator: str
    spec: WatchSpec
    action: ScheduledAction
    count_max: int
    creator_count_max: int
    admin: str | None = None
    """The administrator who does it, for the admin ledger; ``None`` for the creator itself."""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        watches = state.part(Watches)
        check_name("creator", self.creator)
        check_name("watch_id", self.spec.watch_id)
        if not watches.is_active(WatchKey(self.creator, self.spec.watch_id)):
            if watches.count >= self.count_max:
                raise QuotaExceeded("the ledger", "watches", self.count_max)
            if watches.count_of(self.creator) >= self.creator_count_max:
                raise QuotaExceeded(repr(self.creator), "watches", self.creator_count_max)
        if self.admin is not None:
            target = Addressing(WATCH_SCHEME, f"{self.creator}/{self.spec.watch_id}")
            record_admin_action(state, at_ms, self.admin, "watch_create", target)
        watches.issued_count += 1
        entry = WatchEntry(creator=self.creator, spec=self.spec, action=self.action, issue=watches.issued_count)
        watches.put(entry)
        told: list[Happening] = []
        if state.rules > FIRST_RULES:
            told.append(WatchCreated(at_ms=at_ms, creator=self.creator, watch_id=self.spec.watch_id))
        return CommandOutcome(told, entry)


class CancelWatch(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Cancel a watch. The result is whether there was anything to cancel."""

    is_rehearsable = True
    creator: str
    watch_id: str
    cancelled_by: str
    admin: str | None = None
    """As in ``CreateWatch``."""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        watches = state.part(Watches)
        check_name("cancelled_by", self.cancelled_by)
        if not watches.is_active(WatchKey(self.creator, self.watch_id)):
            return CommandOutcome(result=False, is_changed=False)
        state.begin_change()
        if self.admin is not None:
            record_admin_action(
                state, at_ms, self.admin, "watch_cancel", Addressing(WATCH_SCHEME, f"{self.creator}/{self.watch_id}")
            )
        watches.cancel(WatchKey(self.creator, self.watch_id))
        told = WatchCancelled(at_ms=at_ms, creator=self.creator, watch_id=self.watch_id, cancelled_by=self.cancelled_by)
        return CommandOutcome([told], result=True)


class WatchNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What evaluation found about one watch."""

    creator: str
    watch_id: str
    issue: int
    memory: WatchMemory
    seq: int
    """The happening up to which it was evaluated."""
    firings: tuple[int, ...] = ()
    """The firings that begin, by number."""
    missed: tuple[str, ...] = ()
    """Why it did not fire."""
    dropped: int = 0
    """How many evaluations were left out."""


class NoteWatches(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Keep what evaluation found; before any action is done."""

    notes: tuple[WatchNote, ...] = ()
    seq: int = 0
    """The happening up to which every watch was evaluated; 0 if there are more notes to come."""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        watches = state.part(Watches)
        told: list[Happening] = []
        for note in self.notes:
            entry = watches.of_issue(WatchKey(note.creator, note.watch_id), note.issue)
            if entry is None or entry.is_cancelled:
                continue
            watches.put(
                msgspec.structs.replace(
                    entry,
                    memory=note.memory,
                    seq=note.seq,
                    firings=entry.firings + note.firings,
                    last_firing=max(entry.last_firing, *note.firings, 0),
                )
            )
            creator, watch_id = note.creator, note.watch_id
            told += [
                WatchMissed(at_ms=at_ms, creator=creator, watch_id=watch_id, suppressed_at_ms=at_ms, reason=reason)
                for reason in note.missed
            ]
            if note.dropped:
                told.append(
                    WatchEvaluationThrottled(at_ms=at_ms, creator=creator, watch_id=watch_id, dropped=note.dropped)
                )
        watches.seq = max(watches.seq, self.seq)
        return CommandOutcome(told)


class FinishWatchFiring(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Keep and tell what came of a firing. It is told too if the watch was cancelled or issued again meanwhile: the action was done."""

    creator: str
    watch_id: str
    issue: int
    firing: int
    fired_at_ms: int
    dispatch_outcome: str

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        watches, key = state.part(Watches), WatchKey(self.creator, self.watch_id)
        entry = watches.of_issue(key, self.issue)
        if entry is None:
            if not watches.finish_left(key, self.issue, self.firing) and state.rules > FIRST_RULES:
                return CommandOutcome(is_changed=False)
        else:
            if self.firing not in entry.firings:
                return CommandOutcome(is_changed=False)
            watches.put(
                msgspec.structs.replace(
                    entry,
                    firings=tuple(each for each in entry.firings if each != self.firing),
                    fires_completed=entry.fires_completed + 1,
                    last_fired_at_ms=self.fired_at_ms,
                )
            )
        told = WatchFired(
            at_ms=at_ms,
            creator=self.creator,
            watch_id=self.watch_id,
            fired_at_ms=self.fired_at_ms,
            dispatch_outcome=self.dispatch_outcome,
        )
        return CommandOutcome([told])
