"""Appointments, watches, the catalogue and types that it lost: the operations that take their capabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidings.ledger.catalogue import catalogue_command, parse_catalogue
from tidings.ledger.commands import Command
from tidings.ledger.grammar import BATCH_COUNT
from tidings.ledger.ledger import Ledger
from tidings.ledger.state import Rehearsed
from tidings.schedule.actions import ScheduledAction, action_of
from tidings.schedule.appointment_runner import AppointmentRunner
from tidings.schedule.appointments import CancelAppointment
from tidings.schedule.watch_runner import WatchRunner
from tidings.schedule.watches import CancelWatch
from tidings.wire.steward import answers, requests

if TYPE_CHECKING:
    from .authority import Caller


_OPERATOR: Final = "operator"
"""Who cancelled, in happenings; the admin ledger has the name."""


class Scheduling:
    """
    The operations on what is done later, and on orphans.

    What is made, cancelled or migrated here is entered into the admin ledger by the same command.

    Args:
        ledger: Where all that is kept.
        appointments, watches: Who runs them.
    """

    def __init__(self, ledger: Ledger, appointments: AppointmentRunner, watches: WatchRunner) -> None:
        self._ledger = ledger
        self._appointments = appointments
        self._watches = watches

    # Appointments

    async def create_appointment(self, request: requests.CreateAppointmentRequest, caller: Caller) -> Any:
        action = _allowed_action(request.action, caller)
        entry = await self._appointments.create(request.creator, request.spec, action, admin=_name(caller))
        return answers.AppointmentCreated(
            creator=request.creator, appointment_id=entry.spec.appointment_id, next_fire_ms=entry.next_fire_ms
        )

    async def cancel_appointment(self, request: requests.CancelAppointmentRequest, caller: Caller) -> Any:
        creator, appointment_id = request.creator, request.appointment_id
        if request.dry_run:
            await self._rehearse(
                CancelAppointment(
                    creator=creator, appointment_id=appointment_id, cancelled_by=_OPERATOR, finished_max=0
                )
            )
            return answers.Done(done=request.op)
        cancelled = await self._appointments.cancel(
            creator, appointment_id, cancelled_by=_OPERATOR, admin=_name(caller)
        )
        return answers.AppointmentCancelledAnswer(creator=creator, appointment_id=appointment_id, cancelled=cancelled)

    async def list_appointments(self, request: requests.ListAppointmentsRequest, caller: Caller) -> Any:
        if request.cursor is None and request.page_size is None:
            return answers.AppointmentsList(entries=[each.to_json() for each in await self._appointments.entries()])
        page = await self._appointments.page(request.cursor, request.page_size)
        return answers.AppointmentsList(
            entries=[each.to_json() for each in page.items],
            next_cursor=page.next_cursor,
            current_seq=page.current_seq,
        )

    async def project_appointment(self, request: requests.ProjectAppointmentRequest, caller: Caller) -> Any:
        found = await self._appointments.entry(request.creator, request.appointment_id)
        return answers.AppointmentProjection(
            creator=request.creator,
            appointment_id=request.appointment_id,
            entry=None if found is None else found.to_json(),
        )

    # Watches

    async def create_watch(self, request: requests.CreateWatchRequest, caller: Caller) -> Any:
        action = _allowed_action(request.action, caller)
        entry = await self._watches.create(request.creator, request.spec, action, admin=_name(caller))
        return answers.WatchCreated(creator=request.creator, watch_id=entry.spec.watch_id)

    async def cancel_watch(self, request: requests.CancelWatchRequest, caller: Caller) -> Any:
        creator, watch_id = request.creator, request.watch_id
        if request.dry_run:
            await self._rehearse(CancelWatch(creator=creator, watch_id=watch_id, cancelled_by=_OPERATOR))
            return answers.Done(done=request.op)
        cancelled = await self._watches.cancel(creator, watch_id, cancelled_by=_OPERATOR, admin=_name(caller))
        return answers.WatchCancelledAnswer(creator=creator, watch_id=watch_id, cancelled=cancelled)

    async def list_watches(self, request: requests.ListWatchesRequest, caller: Caller) -> Any:
        if request.cursor is None and request.page_size is None:
            return answers.WatchesList(entries=[each.to_json() for each in await self._watches.entries()])
        page = await self._watches.page(request.cursor, request.page_size)
        return answers.WatchesList(
            entries=[each.to_json() for each in page.items],
            next_cursor=page.next_cursor,
            current_seq=page.current_seq,
        )

    async def project_watch(self, request: requests.ProjectWatchRequest, caller: Caller) -> Any:
        found = await self._watches.entry(request.creator, request.watch_id)
        return answers.WatchProjection(
            creator=request.creator, watch_id=request.watch_id, entry=None if found is None else found.to_json()
        )

    async def _rehearse(self, command: Command) -> None:
        if (await self._ledger.rehearse(command)).would_change:
            raise Rehearsed

    # Orphans

    async def list_grammar_orphans(self, request: requests.ListGrammarOrphansRequest, caller: Caller) -> Any:
        return answers.GrammarOrphansList(entries=[each.to_json() for each in await self._ledger.grammar.orphans()])

    async def accept_grammar_orphans(self, request: requests.AcceptGrammarOrphansRequest, caller: Caller) -> Any:
        accepted = await self._ledger.grammar.accept(request.from_type, admin=_name(caller), reason=request.reason)
        return answers.GrammarOrphansAcceptedAnswer(from_type=request.from_type, accepted=accepted)

    async def migrate_grammar_orphans(self, request: requests.MigrateGrammarOrphansRequest, caller: Caller) -> Any:
        done = await self._ledger.grammar.migrate(
            request.from_type,
            request.strategy,
            admin=_name(caller),
            dry_run=request.dry_run,
            batch_size=BATCH_COUNT if request.batch_size is None else request.batch_size,
            max_subjects=request.max_subjects,
            reason=request.reason,
        )
        return msgspec.convert({"grammar_migration": True, **done.to_json()}, answers.GrammarMigration)

    async def set_catalogue(self, request: requests.SetCatalogueRequest, caller: Caller) -> Any:
        document = parse_catalogue(request.catalogue)
        command = await self._ledger.read(lambda state: catalogue_command(state, document, admin=_name(caller)))
        if command is not None:
            await self._ledger.execute(command)
            await self._ledger.grammar.scan()
        return answers.Done(done=request.op, result="no_change" if command is None else "changed")


def _allowed_action(value: Any, caller: Caller) -> ScheduledAction:
    """
    An action that the caller may have done: an event takes the right to publish it.

    Raises:
        BadSpec: It is none.
        AccessError: It may not publish that.
    """
    action = action_of(value)
    if action.topic is not None and action.space is not None:
        assert caller.authority is not None
        caller.authority.require_publishing(action.topic, action.space)
    return action


def _name(caller: Caller) -> str:
    assert caller.authority is not None
    return caller.authority.subject
