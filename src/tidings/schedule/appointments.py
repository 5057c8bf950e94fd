"""
Appointments: actions that are done at a time. Where appointments are kept, and the commands that change them.

When one fires is said by its ``appointment_specs``; who keeps the time is ``appointment_runner``. An appointment is known by its creator and its own id; issuing one again replaces it and starts
it afresh. An occurrence is known by the moment it was scheduled for, and fires once: the next one is always later, also when the clock was
set back meanwhile.

Commands say when an appointment fires next, and do not work it out: the rules of time zones change, and the log is read again under new ones.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from tidings.core.timers import TimerQueue
from tidings.happenings.happening import Happening
from tidings.happenings.variants import (
    AppointmentApproaching,
    AppointmentCancelled,
    AppointmentCreated,
    AppointmentFired,
    AppointmentMissed,
)
from tidings.ledger.admin_ledger import record_admin_action
from tidings.ledger.commands import Command, CommandOutcome, check_name
from tidings.ledger.paging import KeyOrder
from tidings.ledger.state import FIRST_RULES, LedgerState
from tidings.ledger.subjects import Addressing

from .actions import ScheduledAction
from .appointment_specs import AppointmentSpec, Catchup, CatchupWithinGrace, Drop
from .errors import QuotaExceeded
from .recurrence import (
    Anchored,
    Cron,
    Daily,
    Local,
    Monthly,
    OneShot,
    Periodic,
    Utc,
    Weekdays,
    Weekends,
    Weekly,
    Yearly,
)

APPOINTMENT_SCHEME: Final = "evo-appointment"
"""The scheme of the addressing ``<creator>/<appointment_id>``."""
UNTRUSTED_TIME: Final = "untrusted_time"
DROP_POLICY: Final = "drop_policy"
GRACE_WINDOW_EXCEEDED: Final = "grace_window_exceeded"
OVERLAPPED: Final = "overlapped"
MS_NS: Final = 1_000_000


class AppointmentState(enum.StrEnum):
    """How an appointment is."""

    PENDING = "pending"
    APPROACHING = "approaching"
    """Its lead time has begun."""
    FIRING = "firing"
    """Its action is under way."""
    FIRED = "fired"
    """It has no further occurrence."""
    CANCELLED = "cancelled"

    @property
    def is_finished(self) -> bool:
        """Whether it will not fire any more."""
        return self is AppointmentState.FIRED or self is AppointmentState.CANCELLED


class AppointmentEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One appointment as it is kept."""

    creator: str
    spec: AppointmentSpec
    action: ScheduledAction
    issue: int
    """Counts issues of appointments; tells one from another that was issued later under the same id."""
    state: AppointmentState = AppointmentState.PENDING
    next_fire_ms: int | None = None
    """When the next occurrence was scheduled for; while it fires, that one."""
    last_fired_at_ms: int | None = None
    fires_completed: int = 0
    is_missed: bool = False
    """It was told that the clock could not be trusted when the next occurrence was due; it waits for that."""

    @property
    def firing_name(self) -> str:
        """Names the occurrence that fires, in this issue and no other."""
        return f"appointment/{self.creator}/{self.spec.appointment_id}/{self.issue}/{self.next_fire_ms}"

    def to_json(self) -> dict[str, Any]:
        """The entry as clients see it: what is not finished is pending."""
        form = {
            "creator": self.creator,
            "spec": {
                field.encode_name: msgspec.to_builtins(getattr(self.spec, field.name))
                for field in msgspec.structs.fields(self.spec)
            },
            "action": msgspec.to_builtins(self.action),
            "state": str(self.state if self.state.is_finished else AppointmentState.PENDING),
            "fires_completed": self.fires_completed,
        }
        if self.next_fire_ms is not None:
            form["next_fire_ms"] = self.next_fire_ms
        if self.last_fired_at_ms is not None:
            form["last_fired_ms"] = self.last_fired_at_ms
        return form


class AppointmentKey(NamedTuple):
    """What an appointment is known by."""

    creator: str
    appointment_id: str


# How entries are kept. A million of them are to fit into memory, so each is one row of MessagePack without field names, under its two names
# joined in one text: some 250 bytes in all, where the objects themselves would take over a thousand.

_JOINT: Final = "\0"  # no name holds one
_STATES: Final = tuple(AppointmentState)
_TAGGED: Final[dict[str, type[msgspec.Struct]]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        OneShot, Periodic, Daily, Weekdays, Weekends, Weekly, Monthly, Yearly, Cron,
        Utc, Local, Anchored,
        Drop, Catchup, CatchupWithinGrace,
    )
}  # fmt: skip
_LOCAL: Final = Local()
_POLICY: Final = CatchupWithinGrace()
_FIRING: Final = _STATES.index(AppointmentState.FIRING)
_PENDING: Final = _STATES.index(AppointmentState.PENDING)
_PERIODIC: Final = str(Periodic.__struct_config__.tag)
_NOTHING_FURTHER: Final = (None, (), None, None, (), (), None, False, None)
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode


def _key(creator: str, appointment_id: str) -> str:
    return f"{creator}{_JOINT}{appointment_id}"


def _pack(entry: AppointmentEntry) -> bytes:
    spec, action = entry.spec, entry.action
    further = (
        spec.time,
        () if spec.zone is None or spec.zone == _LOCAL else _packed(spec.zone),
        spec.end_time_ms,
        spec.max_fires,
        spec.except_,
        () if spec.miss_policy == _POLICY else _packed(spec.miss_policy),
        spec.pre_fire_ms,
        spec.must_wake_device,
        spec.wake_pre_arm_ms,
    )
    return _encode(
        (
            _STATES.index(entry.state),
            entry.next_fire_ms,
            entry.last_fired_at_ms,
            entry.fires_completed,
            entry.is_missed,
            entry.issue,
            _packed(spec.recurrence),
            () if further == _NOTHING_FURTHER else further,
            action.payload,
            *((action.target_shelf, action.request_type) if action.topic is None else ()),
            *((action.topic, action.event_type, action.space) if action.topic is not None else ()),
        )
    )


def _packed(value: msgspec.Struct) -> Any:
    return value.__struct_config__.tag, *msgspec.structs.astuple(value)


def _unpack(key: str, data: bytes) -> AppointmentEntry:
    creator, _, appointment_id = key.partition(_JOINT)
    state, next_fire_ms, last_fired_at_ms, fires_completed, is_missed, issue, rule, further, payload, *names = _decode(
        data
    )
    time, zone, end_time_ms, max_fires, skipped, policy, pre_fire_ms, must_wake, wake_pre_arm_ms = (
        further or _NOTHING_FURTHER
    )
    roles = ("target_shelf", "request_type") if len(names) == 2 else ("topic", "event_type", "space")
    return AppointmentEntry(
        creator=creator,
        spec=AppointmentSpec(
            appointment_id=appointment_id,
            recurrence=_unpacked(rule),
            time=time,
            zone=_unpacked(zone) if zone else _LOCAL,
            end_time_ms=end_time_ms,
            max_fires=max_fires,
            except_=tuple(skipped),
            miss_policy=_unpacked(policy) if policy else _POLICY,
            pre_fire_ms=pre_fire_ms,
            must_wake_device=must_wake,
            wake_pre_arm_ms=wake_pre_arm_ms,
        ),
        action=ScheduledAction(payload=payload, **dict(zip(roles, names, strict=True))),
        issue=issue,
        state=_STATES[state],
        next_fire_ms=next_fire_ms,
        last_fired_at_ms=last_fired_at_ms,
        fires_completed=fires_completed,
        is_missed=is_missed,
    )


def _unpacked(row: list[Any]) -> Any:
    kind = _TAGGED[row[0]]
    values = (tuple(value) if isinstance(value, list) else value for value in row[1:])
    return kind(**dict(zip(kind.__struct_fields__, values, strict=True)))


class _Place(NamedTuple):
    """What the indexes know of an entry."""

    is_finished: bool
    is_firing: bool
    is_missed: bool
    is_periodic: bool
    due_ms: int | None
    """When something is to be done: its approach told, or its action done. Not while it fires, or waits for a clock to trust."""
    wake_ms: int | None
    """When a sleeping machine is to be woken for it."""


def _place(data: bytes) -> _Place:
    """Read from an entry's row alone: opening a ledger does this for every appointment."""
    state, next_ms, _, _, is_missed, _, rule, further, *_ = _decode(data)
    is_firing = state == _FIRING
    is_periodic = rule[0] == _PERIODIC
    if next_ms is None or is_firing:
        return _Place(next_ms is None, is_firing, is_missed, is_periodic, None, None)
    due_ms, wake_ms = next_ms, None
    if further:
        *_, pre_fire_ms, must_wake, wake_pre_arm_ms = further
        if pre_fire_ms is not None and state == _PENDING:
            due_ms = next_ms - pre_fire_ms
        if must_wake:
            wake_ms = next_ms - (wake_pre_arm_ms or 0)
    return _Place(False, False, is_missed, is_periodic, None if is_missed else due_ms, wake_ms)


class _Frozen(msgspec.Struct, frozen=True):
    entries: dict[str, bytes]
    finished: list[str]
    issued_count: int


class Appointments:
    """All appointments, and the order in which they are due."""

    name: ClassVar[str] = "appointments"
    frozen_type: ClassVar[Any] = _Frozen

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self.order: KeyOrder[str] = KeyOrder(self._entries)
        """Keys, each creator and id joined by a NUL."""
        self._counts: dict[str, int] = {}
        """Of each creator, those that can still fire."""
        self._finished: dict[str, None] = {}
        """The others, in the order in which they ended."""
        self._due: TimerQueue[str] = TimerQueue()
        self._wakes: TimerQueue[str] = TimerQueue()
        self._missed: dict[str, None] = {}
        self._firing: dict[str, None] = {}
        self._periodic: dict[str, None] = {}
        self.issued_count = 0

    def freeze(self) -> _Frozen:
        return _Frozen(dict(self._entries), list(self._finished), self.issued_count)

    def restore(self, frozen: _Frozen) -> None:
        self._entries.update(frozen.entries)
        self._finished = dict.fromkeys(frozen.finished)
        self.issued_count = frozen.issued_count
        due: list[tuple[int, str]] = []
        for key, packed in self._entries.items():
            place = _place(packed)
            if place.due_ms is not None:
                due.append((place.due_ms * MS_NS, key))
            self._add_to_indexes(key, place._replace(due_ms=None))
        self._due = TimerQueue(sorted(due))

    # Looking

    def get(self, key: AppointmentKey) -> AppointmentEntry | None:
        """The appointment, also if it has finished of late."""
        packed = self._entries.get(joined := _key(*key))
        return None if packed is None else _unpack(joined, packed)

    def all(self) -> list[AppointmentEntry]:
        """Every appointment, also those that have finished of late, by creator and id."""
        return [_unpack(key, self._entries[key]) for key in sorted(self._entries)]

    def of_key(self, key: str) -> AppointmentEntry:
        """The one that a key of ``order`` stands for."""
        return _unpack(key, self._entries[key])

    def is_active(self, creator: str, appointment_id: str) -> bool:
        """Whether there is one that can still fire."""
        key = _key(creator, appointment_id)
        return key in self._entries and key not in self._finished

    @property
    def count(self) -> int:
        """How many can still fire."""
        return len(self._entries) - len(self._finished)

    def count_of(self, creator: str) -> int:
        """How many of these a creator has."""
        return self._counts.get(creator, 0)

    @property
    def first_due_ns(self) -> int | None:
        """When something is to be done next, in nanoseconds."""
        return self._due.first_ns

    def due(self, until_ms: int, count_max: int) -> list[AppointmentEntry]:
        """Those with something to do by now, the one that was due first in front."""
        found = self._due.until(until_ms * MS_NS, count_max)
        return [_unpack(key, self._entries[key]) for _, key in found]

    def firing(self) -> list[AppointmentEntry]:
        """Those whose action is under way."""
        return [_unpack(key, self._entries[key]) for key in self._firing]

    def missed(self, count_max: int) -> list[AppointmentEntry]:
        """Those that are due and wait for a clock that can be trusted, at most so many."""
        return [_unpack(key, self._entries[key]) for key in islice(self._missed, count_max)]

    @property
    def wake_ms(self) -> int | None:
        """When a sleeping machine is to be woken."""
        first_ns = self._wakes.first_ns
        return None if first_ns is None else first_ns // MS_NS

    def periodic(self) -> Iterator[AppointmentEntry]:
        """Those that come at intervals and are not firing."""
        return (_unpack(key, self._entries[key]) for key in self._periodic)

    # Changing

    def put(self, entry: AppointmentEntry, finished_max: int | None = None) -> None:
        """Add one, or replace the one of the same key; of those that have finished, forget the first if there are more than so many."""
        key = _key(entry.creator, entry.spec.appointment_id)
        packed = _pack(entry)
        if (before := self._entries.get(key)) is not None:
            self._remove_from_indexes(key, _place(before))
        else:
            self.order.changed(key)
        self._entries[key] = packed
        self._add_to_indexes(key, _place(packed))
        if finished_max is not None:
            while len(self._finished) > finished_max:
                first = next(iter(self._finished))
                del self._finished[first], self._entries[first]
                self.order.changed(first)

    def _add_to_indexes(self, key: str, place: _Place) -> None:
        if place.is_finished:
            self._finished[key] = None
            return
        creator = key.partition(_JOINT)[0]
        self._counts[creator] = self._counts.get(creator, 0) + 1
        if place.due_ms is not None:
            self._due.add(place.due_ms * MS_NS, key)
        if place.wake_ms is not None:
            self._wakes.add(place.wake_ms * MS_NS, key)
        if place.is_missed:
            self._missed[key] = None
        if place.is_firing:
            self._firing[key] = None
        elif place.is_periodic:
            self._periodic[key] = None

    def _remove_from_indexes(self, key: str, place: _Place) -> None:
        if place.is_finished:
            self._finished.pop(key, None)
            return
        creator = key.partition(_JOINT)[0]
        self._counts[creator] -= 1
        if not self._counts[creator]:
            del self._counts[creator]
        if place.due_ms is not None:
            self._due.discard(place.due_ms * MS_NS, key)
        if place.wake_ms is not None:
            self._wakes.discard(place.wake_ms * MS_NS, key)
        for index in (self._missed, self._firing, self._periodic):
            index.pop(key, None)

    def occurrence(self, key: AppointmentKey, issue: int, scheduled_for_ms: int) -> AppointmentEntry | None:
        """The appointment, if it is still the one that was issued then, has not finished, and is at this occurrence."""
        entry = self.get(key)
        is_it = entry is not None and (entry.issue, entry.next_fire_ms) == (issue, scheduled_for_ms)
        return entry if entry is not None and is_it and not entry.state.is_finished else None


class NewAppointment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An appointment to be issued."""

    spec: AppointmentSpec
    action: ScheduledAction
    next_fire_ms: int | None = None


class CreateAppointments(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Issue appointments, or issue them again. The result is the entry of each, or ``QuotaExceeded`` where there was no room for it."""

    creator: str
    appointments: tuple[NewAppointment, ...]
    count_max: int
    creator_count_max: int
    finished_max: int
    admin: str | None = None
    """The administrator who does it, for the admin ledger; ``None`` for the creator itself."""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        appointments = state.part(Appointments)
        check_name("creator", self.creator)
        if self.admin is not None:
            check_name("admin", self.admin)
        for new in self.appointments:
            check_name("appointment_id", new.spec.appointment_id)
        before = appointments.issued_count
        results = [self._issue(appointments, new) for new in self.appointments]
        if self.admin is not None:
            for entry in results:
                if isinstance(entry, AppointmentEntry):
                    target = Addressing(APPOINTMENT_SCHEME, f"{self.creator}/{entry.spec.appointment_id}")
                    record_admin_action(state, at_ms, self.admin, "appointment_create", target)
        told: list[Happening] = []
        if state.rules > FIRST_RULES:
            told += [
                AppointmentCreated(
                    at_ms=at_ms,
                    creator=self.creator,
                    appointment_id=entry.spec.appointment_id,
                    next_fire_ms=entry.next_fire_ms,
                )
                for entry in results
                if isinstance(entry, AppointmentEntry)
            ]
        return CommandOutcome(told, results, appointments.issued_count > before)

    def _issue(self, appointments: Appointments, new: NewAppointment) -> AppointmentEntry | QuotaExceeded:
        if not appointments.is_active(self.creator, new.spec.appointment_id):
            if appointments.count >= self.count_max:
                return QuotaExceeded("the ledger", "appointments", self.count_max)
            if appointments.count_of(self.creator) >= self.creator_count_max:
                return QuotaExceeded(repr(self.creator), "appointments", self.creator_count_max)
        appointments.issued_count += 1
        entry = AppointmentEntry(
            creator=self.creator,
            spec=new.spec,
            action=new.action,
            issue=appointments.issued_count,
            state=AppointmentState.FIRED if new.next_fire_ms is None else AppointmentState.PENDING,
            next_fire_ms=new.next_fire_ms,
        )
        appointments.put(entry, self.finished_max)
        return entry


class CancelAppointment(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Cancel an appointment. The result is whether there was anything to cancel."""

    is_rehearsable = True
    creator: str
    appointment_id: str
    cancelled_by: str
    finished_max: int
    admin: str | None = None
    """As in ``CreateAppointments``."""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        appointments = state.part(Appointments)
        check_name("cancelled_by", self.cancelled_by)
        entry = appointments.get(AppointmentKey(self.creator, self.appointment_id))
        if entry is None or entry.state is AppointmentState.CANCELLED:
            return CommandOutcome(result=False, is_changed=False)
        state.begin_change()
        cancelled = msgspec.structs.replace(entry, state=AppointmentState.CANCELLED, next_fire_ms=None, is_missed=False)
        if self.admin is not None:
            target = Addressing(APPOINTMENT_SCHEME, f"{self.creator}/{self.appointment_id}")
            record_admin_action(state, at_ms, self.admin, "appointment_cancel", target)
        appointments.put(cancelled, self.finished_max)
        told = AppointmentCancelled(
            at_ms=at_ms,
            creator=self.creator,
            appointment_id=self.appointment_id,
            cancelled_by=self.cancelled_by,
        )
        return CommandOutcome([told], result=True)


class _Occurrence(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Something about one occurrence of an appointment. Nothing is done if that has passed, or the appointment was cancelled or issued again."""

    creator: str
    appointment_id: str
    issue: int
    scheduled_for_ms: int

    def entry(self, state: LedgerState) -> AppointmentEntry | None:
        """The appointment, if it is at this occurrence."""
        key = AppointmentKey(self.creator, self.appointment_id)
        return state.part(Appointments).occurrence(key, self.issue, self.scheduled_for_ms)

    def missed(self, at_ms: int, scheduled_for_ms: int, reason: str) -> AppointmentMissed:
        """Make the happening of an occurrence that does not fire."""
        return AppointmentMissed(
            at_ms=at_ms,
            creator=self.creator,
            appointment_id=self.appointment_id,
            scheduled_for_ms=scheduled_for_ms,
            reason=reason,
        )


class TellAppointmentApproach(_Occurrence, frozen=True, kw_only=True, omit_defaults=True):
    """The lead time of an occurrence has begun."""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        entry = self.entry(state)
        if entry is None or entry.state is not AppointmentState.PENDING:
            return CommandOutcome(is_changed=False)
        state.part(Appointments).put(msgspec.structs.replace(entry, state=AppointmentState.APPROACHING))
        told = AppointmentApproaching(
            at_ms=at_ms,
            creator=self.creator,
            appointment_id=self.appointment_id,
            scheduled_for_ms=self.scheduled_for_ms,
            fires_in_ms=max(0, self.scheduled_for_ms - at_ms),
        )
        return CommandOutcome([told])


class BeginAppointmentFiring(_Occurrence, frozen=True, kw_only=True, omit_defaults=True):
    """An occurrence begins to fire. The result is its entry, whose action is to be done; none if there is nothing to do."""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        entry = self.entry(state)
        if entry is None or entry.state is AppointmentState.FIRING:
            return CommandOutcome(is_changed=False)
        firing = msgspec.structs.replace(entry, state=AppointmentState.FIRING, is_missed=False)
        state.part(Appointments).put(firing)
        return CommandOutcome(result=firing)


class FinishAppointmentFiring(_Occurrence, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a firing. It is told also if the appointment was cancelled or issued again meanwhile: its action was done."""

    fired_at_ms: int
    dispatch_outcome: str
    next_fire_ms: int | None = None
    overlapped_ms: tuple[int, ...] = ()
    """Occurrences that are not fired since the action was running."""
    finished_max: int

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        entry = self.entry(state)
        if entry is not None:
            done = msgspec.structs.replace(
                entry,
                state=AppointmentState.FIRED if self.next_fire_ms is None else AppointmentState.PENDING,
                next_fire_ms=self.next_fire_ms,
                last_fired_at_ms=self.fired_at_ms,
                fires_completed=entry.fires_completed + 1,
            )
            state.part(Appointments).put(done, self.finished_max)
        told = AppointmentFired(
            at_ms=at_ms,
            creator=self.creator,
            appointment_id=self.appointment_id,
            fired_at_ms=self.fired_at_ms,
            dispatch_outcome=self.dispatch_outcome,
        )
        overlapped = () if entry is None else self.overlapped_ms
        return CommandOutcome([told, *(self.missed(at_ms, moment_ms, OVERLAPPED) for moment_ms in overlapped)])


class MissAppointment(_Occurrence, frozen=True, kw_only=True, omit_defaults=True):
    """
    An occurrence is not fired when it is due. It is told once: what was missed because of the clock, and is too late when that is right again,
    is passed over without another word.
    """

    reason: str
    next_fire_ms: int | None = None
    """The occurrence after it; not for one that waits until the clock can be trusted."""
    finished_max: int

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        entry = self.entry(state)
        if entry is None or entry.state is AppointmentState.FIRING:
            return CommandOutcome(is_changed=False)
        if self.reason == UNTRUSTED_TIME:
            if entry.is_missed:
                return CommandOutcome(is_changed=False)
            after = msgspec.structs.replace(entry, is_missed=True)
        else:
            after = msgspec.structs.replace(
                entry,
                state=AppointmentState.FIRED if self.next_fire_ms is None else AppointmentState.PENDING,
                next_fire_ms=self.next_fire_ms,
                is_missed=False,
            )
        state.part(Appointments).put(after, self.finished_max)
        if entry.is_missed:
            return CommandOutcome()
        return CommandOutcome([self.missed(at_ms, self.scheduled_for_ms, self.reason)])


class ShiftIntervals(Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    The clock was set: what comes at intervals keeps its distance from now, and is never further away than an interval.

    The result is how many were moved.
    """

    now_ms: int
    by_ms: int

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        appointments = state.part(Appointments)
        moved: list[AppointmentEntry] = []
        for entry in appointments.periodic():
            assert isinstance(entry.spec.recurrence, Periodic)
            assert entry.next_fire_ms is not None
            furthest_ms = self.now_ms + entry.spec.recurrence.interval_ms
            next_fire_ms = min(entry.next_fire_ms + self.by_ms, furthest_ms)
            if next_fire_ms != entry.next_fire_ms:
                moved.append(msgspec.structs.replace(entry, next_fire_ms=next_fire_ms))
        for entry in moved:
            appointments.put(entry)
        return CommandOutcome(result=len(moved), is_changed=bool(moved))
