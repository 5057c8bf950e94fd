"""Appointments, watches, the catalogue and types that it lost: the operations that take their capabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidings.ledger.catalogue import catalogue_command, parse_catalogue
from tidings.ledger.grammar import BATCH_COUNT
from tidings.ledger.ledger import Ledger
from tidings.schedule.actions import ScheduledAction, action_of
from tidings.schedule.appointment_runner import AppointmentRunner
from tidings.schedule.watch_runner import WatchRunner
from tidings.wire import steward as wire

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

    async def create_appointment(self, request: wire.CreateAppointmentRequest, caller: Caller) -> Any:
        action = _allowed_action(request.action, caller)
        entry = await self._appointments.create(request.creator, request.spec, action, admin=_name(caller))
        return wire.AppointmentCreated(
            creator=request.creator, appointment_id=entry.spec.appointment_id, next_fire_ms=entry.next_fire_ms
        )

    async def cancel_appointment(self, request: wire.CancelAppointmentRequest, caller: Caller) -> Any:
        creator, appointment_id = request.creator, request.appointment_id
        cancelled = await self._appointments.cancel(
            creator, appointment_id, cancelled_by=_OPERATOR, admin=_name(caller)
        )
        return wire.AppointmentCancelledAnswer(creator=creator, appointment_id=appointment_id, cancelled=cancelled)

    async def list_appointments(self, request: wire.ListAppointmentsRequest, caller: Caller) -> Any:
        return wire.AppointmentsList(entries=[each.to_json() for each in await self._appointments.entries()])

    async def project_appointment(self, request: wire.ProjectAppointmentRequest, caller: Caller) -> Any:
        found = await self._appointments.entry(request.creator, request.appointment_id)
        return wire.AppointmentProjection(
            creator=request.creator,
            appointment_id=request.appointment_id,
            entry=None if found is None else found.to_json(),
        )

    # Watches

    async def create_watch(self, request: wire.CreateWatchRequest, caller: Caller) -> Any:
        action = _allowed_action(request.action, caller)
        entry = await self._watches.create(request.creator, request.spec, action, admin=_name(caller))
        return wire.WatchCreated(creator=request.creator, watch_id=entry.spec.watch_id)

    async def cancel_watch(self, request: wire.CancelWatchRequest, caller: Caller) -> Any:
        creator, watch_id = request.creator, request.watch_id
        cancelled = await self._watches.cancel(creator, watch_id, cancelled_by=_OPERATOR, admin=_name(caller))
        return wire.WatchCancelledAnswer(creator=creator, watch_id=watch_id, cancelled=cancelled)

    async def list_watches(self, request: wire.ListWatchesRequest, caller: Caller) -> Any:
        return wire.WatchesList(entries=[each.to_json() for each in await self._watches.entries()])

    async def project_watch(self, request: wire.ProjectWatchRequest, caller: Caller) -> Any:
        found = await self._watches.entry(request.creator, request.watch_id)
        return wire.WatchProjection(
            creator=request.creator, watch_id=request.watch_id, entry=None if found is None else found.to_json()
        )

    # Orphans

    async def list_grammar_orphans(self, request: wire.ListGrammarOrphansRequest, caller: Caller) -> Any:
        return wire.GrammarOrphansList(entries=[each.to_json() for each in await self._ledger.grammar.orphans()])

    async def accept_grammar_orphans(self, request: wire.AcceptGrammarOrphansRequest, caller: Caller) -> Any:
        accepted = await self._ledger.grammar.accept(request.from_type, admin=_name(caller), reason=request.reason)
        return wire.GrammarOrphansAcceptedAnswer(from_type=request.from_type, accepted=accepted)

    async def migrate_grammar_orphans(self, request: wire.MigrateGrammarOrphansRequest, caller: Caller) -> Any:
        done = await self._ledger.grammar.migrate(
            request.from_type,
            request.strategy,
            admin=_name(caller),
            dry_run=request.dry_run,
            batch_size=BATCH_COUNT if request.batch_size is None else request.batch_size,
            max_subjects=request.max_subjects,
            reason=request.reason,
        )
        return msgspec.convert({"grammar_migration": True, **done.to_json()}, wire.GrammarMigration)

    async def set_catalogue(self, request: wire.SetCatalogueRequest, caller: Caller) -> Any:
        document = parse_catalogue(request.catalogue)
        command = await self._ledger.read(lambda state: catalogue_command(state, document, admin=_name(caller)))
        if command is not None:
            await self._ledger.execute(command)
            await self._ledger.grammar.scan()
        return wire.Done(done=request.op, result="no_change" if command is None else "changed")


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
    return caller.authority.name
