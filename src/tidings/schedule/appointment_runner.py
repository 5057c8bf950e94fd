"""
Keeps appointments: looks at what is due, tells what approaches or is missed, and has the actions done.

That an occurrence begins to fire is stored before its action is done, and what came of it is stored after. So a crash neither loses an
occurrence nor lets it count twice: one whose outcome is not stored is dispatched again, under the same name, which a topic's log and a
careful handler recognise.

The clock decides what is due, and how far it is to be trusted decides what becomes of that: with an untrusted clock an occurrence is told
as missed and waits; with one that was set just now, everything waits for the next look at it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

from tidings.core.errors import TidingsError
from tidings.core.settings import checked
from tidings.core.tasks import cancel_and_wait, finish_or_cancel
from tidings.core.timers import WallClockAlarm
from tidings.ledger.commands import Command
from tidings.ledger.errors import LedgerClosed, LedgerError
from tidings.ledger.ledger import Ledger
from tidings.ledger.paging import ListPage, read_page
from tidings.ledger.state import LedgerState

from .actions import Actions, ScheduledAction, action_of
from .after_firing import AfterFiring, after_firing, tolerance_ms
from .appointment_specs import AppointmentSpec, Drop, appointment_spec
from .appointments import (
    DROP_POLICY,
    GRACE_WINDOW_EXCEEDED,
    MS_NS,
    UNTRUSTED_TIME,
    AppointmentEntry,
    AppointmentKey,
    Appointments,
    AppointmentState,
    BeginAppointmentFiring,
    CancelAppointment,
    CreateAppointments,
    FinishAppointmentFiring,
    MissAppointment,
    NewAppointment,
    ShiftIntervals,
    TellAppointmentApproach,
)
from .errors import BadRecurrence
from .recurrence import machine_zone, zone_named
from .settings import ScheduleSettings
from .time_trust import TimeTrust, TimeTrustTracker

logger = logging.getLogger(__name__)

_BATCH_COUNT_MAX: Final = 512
_CHUNK_COUNT_MAX: Final = 8
"""Appointments that share a record. More would not be cheaper: long commands are looked at more closely."""
_RETRY_S: Final = 1.0
_CLOSE_S: Final = 5.0

WakeHook = Callable[[int | None], None]
"""Called with the moment, in milliseconds since 1970, at which a sleeping machine is to be woken; ``None`` if there is none."""


class AppointmentRunner:
    """
    Runs the appointments of a ledger that has the part ``Appointments``.

    Args:
        ledger: Where they are kept. Its clock is the one they go by.
        actions: Who does what they ask for.
        trust: How far the clock is to be trusted; without one, entirely, and a clock that is set goes unnoticed.
        settings: How many there may be, and how late is too late.
        wake: Has a sleeping machine woken in time; called whenever the moment changes.
    """

    def __init__(
        self,
        ledger: Ledger,
        actions: Actions,
        *,
        trust: TimeTrustTracker | None = None,
        settings: ScheduleSettings | None = None,
        wake: WakeHook | None = None,
    ) -> None:
        self._ledger = ledger
        self._clock = ledger.clock
        self._actions = actions
        self._trust = trust
        self._settings = checked(settings or ScheduleSettings(), "schedule")
        local = self._settings.local_zone
        self._local = machine_zone() if local is None else zone_named(local)
        self._wake = wake
        self._wake_ms: int | None = None
        self._set_by_ms = 0
        """By how much the clock was set since intervals were last moved."""
        self._shifting = asyncio.Lock()
        self._alarm = WallClockAlarm(self._clock, self._settings.clock_poll_interval_s)
        self._task: asyncio.Task[None] | None = None
        self._firing: dict[str, asyncio.Task[None]] = {}
        """Actions under way, by the name of the firing."""
        if trust is not None:
            trust.on_change(self._clock_changed)

    # Life

    async def start(self) -> None:
        """Take up all appointments where they were left."""
        assert self._task is None
        await self._ledger.execute(ShiftIntervals(now_ms=self._now_ms(), by_ms=0))
        await self._check_wake()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="appointments")

    async def close(self) -> None:
        """
        Stop, before the ledger is closed. Closing twice is fine.

        Actions under way have a few seconds to end; what does not is dispatched again after the next start.
        """
        task, self._task = self._task, None
        if task is None:
            return
        await cancel_and_wait(task)
        await finish_or_cancel(self._clock, _CLOSE_S, self._firing.values())

    # What users do

    async def create(
        self, creator: str, spec: AppointmentSpec | Any, action: ScheduledAction | Any, *, admin: str | None = None
    ) -> AppointmentEntry:
        """
        Issue an appointment, or issue it again: then it starts afresh, with counters at 0.

        Args:
            creator: Whose it is: a plugin, or a word for an operator.
            spec: When; an ``AppointmentSpec`` or its JSON.
            action: What is done; an ``ScheduledAction`` or its JSON.
            admin: The administrator who does it, for the admin ledger.

        Raises:
            BadRecurrence: The spec cannot be kept: it names no time that ever comes, or cannot be understood.
            BadSpec: The action cannot be understood.
            InvalidCommand: A name cannot be used.
            QuotaExceeded: There are as many appointments as there may be.
        """
        (result,) = await self.create_many(creator, [(spec, action)], admin=admin)
        if isinstance(result, LedgerError):
            raise result
        return result

    async def create_many(
        self,
        creator: str,
        appointments: Iterable[tuple[AppointmentSpec | Any, ScheduledAction | Any]],
        *,
        admin: str | None = None,
    ) -> list[AppointmentEntry | LedgerError]:
        """
        Issue appointments, each as ``create`` does, together.

        Returns:
            The entry of each, or the error where there was no room for it, or a name could not be used (then of those next to it, too).

        Raises:
            BadRecurrence, BadSpec: One of them cannot be understood; none was issued.
        """
        every = [self._new(spec, action) for spec, action in appointments]
        chunks = [every[first : first + _CHUNK_COUNT_MAX] for first in range(0, len(every), _CHUNK_COUNT_MAX)]
        settings = self._settings
        commands = [
            CreateAppointments(
                creator=creator,
                appointments=tuple(chunk),
                count_max=settings.appointments_max,
                creator_count_max=settings.appointments_per_creator_max,
                finished_max=settings.finished_appointments_max,
                admin=admin,
            )
            for chunk in chunks
        ]
        results: list[AppointmentEntry | LedgerError] = []
        for chunk, result in zip(chunks, await self._ledger.execute_many(commands), strict=True):
            results += [result] * len(chunk) if isinstance(result, LedgerError) else result
        await self._changed()
        return results

    def _new(self, spec: AppointmentSpec | Any, action: ScheduledAction | Any) -> NewAppointment:
        checked_spec = appointment_spec(spec)
        next_fire_ms = checked_spec.next_fire_ms(self._now_ms(), local=self._local)
        if next_fire_ms is None:
            if checked_spec.end_time_ms is not None:
                raise BadRecurrence("end_time_ms", "is before the first occurrence")
            raise BadRecurrence("recurrence", "names no time that ever comes")
        return NewAppointment(spec=checked_spec, action=action_of(action), next_fire_ms=next_fire_ms)

    async def cancel(self, creator: str, appointment_id: str, *, cancelled_by: str, admin: str | None = None) -> bool:
        """Cancel an appointment; whether there was one. Its action, if it is under way, is done to its end. ``admin``: as in ``create``."""
        is_cancelled: bool = await self._ledger.execute(
            CancelAppointment(
                creator=creator,
                appointment_id=appointment_id,
                cancelled_by=cancelled_by,
                finished_max=self._settings.finished_appointments_max,
                admin=admin,
            )
        )
        await self._changed()
        return is_cancelled

    async def entries(self) -> list[AppointmentEntry]:
        """Every appointment, also those that have finished of late, by creator and id."""
        return await self._ledger.read(lambda state: state.part(Appointments).all())

    async def page(self, cursor: str | None = None, page_size: int | None = None) -> ListPage[AppointmentEntry]:
        """
        A page of what ``entries`` gives.

        Args:
            cursor: Where the page before ended; the first page unless given.
            page_size: How many; 100 unless given, at least 1 and at most 1,000.

        Raises:
            InvalidPageCursor: The cursor is not of this list.
        """
        return await read_page(
            self._ledger,
            cursor,
            page_size,
            lambda state: state.part(Appointments).order,
            lambda state, key: state.part(Appointments).of_key(key),
            key_length=2,
            is_text=True,
        )

    async def entry(self, creator: str, appointment_id: str) -> AppointmentEntry | None:
        """One appointment, also if it has finished of late."""
        return await self._ledger.read(
            lambda state: state.part(Appointments).get(AppointmentKey(creator, appointment_id))
        )

    @property
    def firing_count(self) -> int:
        """How many actions are under way."""
        return len(self._firing)

    # What is due

    async def _run(self) -> None:
        is_sure = False
        while True:
            try:
                if not is_sure:
                    # Beginning an occurrence may have been stored although it was answered with an error, or by an earlier process.
                    for entry in await self._ledger.read(lambda state: state.part(Appointments).firing()):
                        self._fire(entry)
                is_sure = True
                due_ns = await self._do_what_is_due()
            except LedgerClosed:
                return
            except TidingsError as error:
                logger.error("appointments cannot be kept at the moment: %s", error)
                is_sure = False
                await self._clock.sleep(_RETRY_S)
            except Exception:
                logger.exception("appointments cannot be kept at the moment")
                is_sure = False
                await self._clock.sleep(_RETRY_S)
            else:
                await self._alarm.wait(due_ns)

    async def _do_what_is_due(self) -> int | None:
        """Do what is due, as far as there is room for it; when there is more to do, ``None`` for when somebody rings."""
        trust = await self._look_at_clock()
        room = min(_BATCH_COUNT_MAX, self._settings.dispatches_max - len(self._firing))
        if room <= 0 or trust is TimeTrust.ADJUSTING:
            return None  # the end of an action rings, and so does the next look at the clock
        now_ms = self._now_ms()

        def look(state: LedgerState) -> tuple[list[AppointmentEntry], int | None]:
            appointments = state.part(Appointments)
            found = appointments.missed(room) if trust.is_lenient else []
            return found + appointments.due(now_ms, room - len(found)), appointments.first_due_ns

        entries, due_ns = await self._ledger.read(look)
        commands = [self._judge(entry, now_ms, trust) for entry in entries]
        if not commands:
            return due_ns
        results = await self._ledger.execute_many(commands)
        for result in results:
            if isinstance(result, AppointmentEntry):
                self._fire(result)
        for result in results:
            if isinstance(result, TidingsError):
                raise result
        await self._check_wake()
        return self._clock.now_ns()  # there may be more

    def _judge(self, entry: AppointmentEntry, now_ms: int, trust: TimeTrust) -> Command:
        """What is to be done about an appointment that has something to do."""
        scheduled_ms = entry.next_fire_ms
        assert scheduled_ms is not None
        occurrence: dict[str, Any] = {
            "creator": entry.creator,
            "appointment_id": entry.spec.appointment_id,
            "issue": entry.issue,
            "scheduled_for_ms": scheduled_ms,
        }
        if now_ms < scheduled_ms:
            return TellAppointmentApproach(**occurrence)
        finished_max = self._settings.finished_appointments_max
        if not trust.is_lenient:
            return MissAppointment(**occurrence, reason=UNTRUSTED_TIME, finished_max=finished_max)
        late_ms = tolerance_ms(entry.spec.miss_policy, self._settings.drop_tolerance_ms)
        if late_ms is None or now_ms - scheduled_ms <= late_ms:
            return BeginAppointmentFiring(**occurrence)
        reason = DROP_POLICY if isinstance(entry.spec.miss_policy, Drop) else GRACE_WINDOW_EXCEEDED
        # Of several that were missed the last may still be in time.
        after_ms = max(scheduled_ms, now_ms - late_ms - 1)
        next_fire_ms = self._next_fire_ms(entry, after_ms, entry.fires_completed)
        return MissAppointment(**occurrence, reason=reason, next_fire_ms=next_fire_ms, finished_max=finished_max)

    def _fire(self, entry: AppointmentEntry) -> None:
        """Have the action of an occurrence done, beside everything else."""
        name = entry.firing_name
        if name not in self._firing:
            self._firing[name] = task = asyncio.get_running_loop().create_task(self._dispatch(entry), name=name)
            task.add_done_callback(self._fired)

    def _fired(self, task: asyncio.Task[None]) -> None:
        del self._firing[task.get_name()]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s was not finished", task.get_name(), exc_info=error)
        self._alarm.ring()

    async def _dispatch(self, entry: AppointmentEntry) -> None:
        fired_at_ms, began_s = self._now_ms(), self._clock.monotonic()
        outcome = await self._actions.dispatch(entry.action, entry.firing_name)
        while True:
            try:
                # Intervals are moved first, so that this one, which is decided by the clock as it is now, is not moved again.
                await self._look_at_clock()
                await self._ledger.execute(self._finish(entry, fired_at_ms, began_s, outcome))
                await self._check_wake()
            except LedgerClosed:
                return  # it is dispatched again, under its name
            except TidingsError as error:
                logger.error("what came of %s cannot be stored, and is tried again: %s", entry.firing_name, error)
                await self._clock.sleep(_RETRY_S)
                if not await self._is_firing(entry):
                    return
            else:
                return

    def _finish(
        self, entry: AppointmentEntry, fired_at_ms: int, began_s: float, outcome: str
    ) -> FinishAppointmentFiring:
        assert entry.next_fire_ms is not None
        now_ms = self._now_ms()
        set_by_ms = now_ms - fired_at_ms - round((self._clock.monotonic() - began_s) * 1000)
        if abs(set_by_ms) <= self._settings.clock_step_s_min * 1000:
            set_by_ms = 0  # adjusted, not set
        try:
            after = after_firing(
                entry.spec,
                scheduled_ms=entry.next_fire_ms,
                began_ms=fired_at_ms,
                now_ms=now_ms,
                set_by_ms=set_by_ms,
                fires_completed=entry.fires_completed + 1,
                tolerance_ms=tolerance_ms(entry.spec.miss_policy, self._settings.drop_tolerance_ms),
                local=self._local,
            )
        except BadRecurrence as error:
            self._log_ending(entry, error)
            after = AfterFiring(None, ())
        return FinishAppointmentFiring(
            creator=entry.creator,
            appointment_id=entry.spec.appointment_id,
            issue=entry.issue,
            scheduled_for_ms=entry.next_fire_ms,
            fired_at_ms=fired_at_ms,
            dispatch_outcome=outcome,
            next_fire_ms=after.next_fire_ms,
            overlapped_ms=after.overlapped_ms,
            finished_max=self._settings.finished_appointments_max,
        )

    async def _is_firing(self, entry: AppointmentEntry) -> bool:
        key = AppointmentKey(entry.creator, entry.spec.appointment_id)
        try:
            now = await self._ledger.read(lambda state: state.part(Appointments).get(key))
        except TidingsError:
            return True
        return now is not None and now.state is AppointmentState.FIRING and now.firing_name == entry.firing_name

    def _next_fire_ms(self, entry: AppointmentEntry, after_ms: int, fires_completed: int) -> int | None:
        try:
            return entry.spec.next_fire_ms(
                after_ms, local=self._local, previous_ms=entry.next_fire_ms, fires_completed=fires_completed
            )
        except BadRecurrence as error:
            self._log_ending(entry, error)
            return None

    @staticmethod
    def _log_ending(entry: AppointmentEntry, error: BadRecurrence) -> None:
        """Log that an appointment has no further occurrence: its zone is one that the machine no longer knows."""
        logger.error("appointment %s of %s ends: %s", entry.spec.appointment_id, entry.creator, error)

    # The clock

    async def _look_at_clock(self) -> TimeTrust:
        """Move intervals if the clock was set. Return how far it is to be trusted."""
        trust = TimeTrust.TRUSTED if self._trust is None else await self._trust.current()
        async with self._shifting:
            if set_by_ms := self._set_by_ms:
                await self._ledger.execute(ShiftIntervals(now_ms=self._now_ms(), by_ms=set_by_ms))
                self._set_by_ms -= set_by_ms
        return trust

    async def _clock_changed(self, step_s: float) -> None:
        """The clock was set, or is trusted more or less than before."""
        self._set_by_ms += round(step_s * 1000)
        self._alarm.ring()

    async def _changed(self) -> None:
        self._alarm.ring()
        await self._check_wake()

    async def _check_wake(self) -> None:
        """Have the machine woken at another moment, if it is another."""
        if self._wake is None:
            return
        wake_ms = await self._ledger.read(lambda state: state.part(Appointments).wake_ms)
        if wake_ms != self._wake_ms:
            self._wake_ms = wake_ms
            try:
                self._wake(wake_ms)
            except Exception:
                logger.exception("the machine cannot be told when to wake")

    def _now_ms(self) -> int:
        return self._clock.now_ns() // MS_NS
