"""
What administrators do to the claims of others: take them back, hide relations and show them again.

Each of these leaves an entry in the admin ledger, in the same command: who sees a happening finds the entry. A command that finds nothing to
do (the claim is not there, the relation is hidden for the same reason already) succeeds and leaves no trace.
"""

from __future__ import annotations

import msgspec

from tidings.happenings.happening import Happening
from tidings.happenings.variants import (
    ClaimsRetracted,
    RelationClaimForcedRetract,
    RelationSuppressed,
    RelationSuppressionReasonUpdated,
    RelationUnsuppressed,
    SubjectAddressingForcedRetract,
    SuppressionRecord,
)

from .admin_ledger import AdminEntry, AdminLedger
from .catalogue import CurrentCatalogue
from .claims import RelationName, relation_forgotten, retract, violations, weight_of
from .commands import Command, CommandOutcome, check_emission, check_name, check_reason
from .errors import InvalidCommand, TargetPluginUnknown
from .relations import Relations, Triple
from .state import FIRST_RULES, LedgerState
from .subjects import RESERVED_SCHEMES, Addressing, Subjects


class ForceRetractAddressing(Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    Take another plugin's addressing back. Answers ``addressing_removed``, ``subject_forgotten`` or ``not_found``.

    ``is_loaded`` says whether the plugin runs. One that does not, and claims nothing, is taken for a mistyped name.
    """

    is_rehearsable = True
    is_weighed = True
    admin: str
    target_plugin: str
    addressing: Addressing
    is_loaded: bool = False
    reason: str | None = None

    def weight(self, state: LedgerState) -> int:
        return weight_of(state, self.addressing)

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``TargetPluginUnknown`` and ``InvalidCommand``."""
        self.addressing.checked()
        _check_target_plugin(state, self.admin, self.target_plugin, self.is_loaded, self.reason)
        if self.addressing.scheme in RESERVED_SCHEMES:
            raise InvalidCommand("addressing", f"the scheme {self.addressing.scheme!r} is the ledger's own")
        record = state.part(Subjects).resolve(self.addressing)
        if record is None or not any(
            (held.addressing, held.claimant) == (self.addressing, self.target_plugin) for held in record.addressings
        ):
            return CommandOutcome(result="not_found", is_changed=False)
        if len(record.addressings) == 1:
            check_emission(state, type(self).__name__, state.part(Relations).count_touching(record.canonical_id))
        state.begin_change()
        state.part(AdminLedger).record(
            AdminEntry(
                kind="subject_addressing_forced_retract",
                admin_plugin=self.admin,
                at_ms=at_ms,
                target_plugin=self.target_plugin,
                target_subject=record.canonical_id,
                target_addressing=self.addressing,
                reason=self.reason,
            )
        )
        retracted, cascade = retract(
            state,
            at_ms,
            plugin=self.target_plugin,
            addressing=self.addressing,
            by=self.admin,
            reason=self.reason,
        )
        parent = SubjectAddressingForcedRetract(
            at_ms=at_ms,
            admin_plugin=self.admin,
            target_plugin=self.target_plugin,
            canonical_id=record.canonical_id,
            scheme=self.addressing.scheme,
            value=self.addressing.value,
            reason=self.reason,
        )
        return CommandOutcome([parent, *cascade], retracted.kind)


class ForceRetractRelation(RelationName, Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    Take another plugin's claim on a relation back. Answers ``claim_removed``, ``relation_forgotten`` or ``not_found``.

    ``is_loaded`` is as with ``ForceRetractAddressing``. The predicate need not be declared.
    """

    is_rehearsable = True
    admin: str
    target_plugin: str
    is_loaded: bool = False
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``TargetPluginUnknown`` and ``InvalidCommand``."""
        self.check_names()
        _check_target_plugin(state, self.admin, self.target_plugin, self.is_loaded, self.reason)
        relations = state.part(Relations)
        triple = self.triple(state)
        record = None if triple is None else relations.get(triple)
        if triple is None or record is None or self.target_plugin not in record.claimants:
            return CommandOutcome(result="not_found", is_changed=False)
        state.begin_change()
        done = relations.retract(triple, self.target_plugin, at_ms)
        state.part(AdminLedger).record(
            AdminEntry(
                kind="relation_claim_forced_retract",
                admin_plugin=self.admin,
                at_ms=at_ms,
                target_plugin=self.target_plugin,
                target_relation=triple,
                reason=self.reason,
            )
        )
        happenings: list[Happening] = [
            RelationClaimForcedRetract(
                at_ms=at_ms,
                admin_plugin=self.admin,
                target_plugin=self.target_plugin,
                reason=self.reason,
                **triple._asdict(),
            )
        ]
        if done == "relation_forgotten":
            happenings.append(relation_forgotten(at_ms, self.admin, triple, ClaimsRetracted(self.admin)))
        return CommandOutcome(happenings, done)


def _check_target_plugin(
    state: LedgerState, admin: str, target_plugin: str, is_loaded: bool, reason: str | None
) -> None:
    check_name("admin", admin)
    check_name("target_plugin", target_plugin)
    check_reason(reason)
    is_known = (
        is_loaded
        or state.part(Subjects).is_claimant(target_plugin)
        or state.part(Relations).claim_count(target_plugin) > 0
    )
    if not is_known:
        raise TargetPluginUnknown(target_plugin)
    if target_plugin == admin:
        raise InvalidCommand(
            "target_plugin", "is the administrator's own; what it claims itself, it retracts as a plugin"
        )


class SuppressRelation(RelationName, Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    Hide a relation from neighbours, counts and walks. Answers ``newly_suppressed``, ``reason_updated``, ``already_suppressed`` or ``not_found``.

    A relation that is hidden already gets the new reason; who hid it first, and when, stay.
    """

    is_rehearsable = True
    admin: str
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``InvalidCommand``."""
        check_name("admin", self.admin)
        self.check_names()
        check_reason(self.reason)
        relations = state.part(Relations)
        triple = self.triple(state)
        record = None if triple is None else relations.get(triple)
        if triple is None or record is None:
            return CommandOutcome(result="not_found", is_changed=False)
        before = record.suppression
        if before is not None and before.reason == self.reason:
            return CommandOutcome(result="already_suppressed", is_changed=False)
        state.begin_change()
        if before is None:
            relations.suppress(triple, SuppressionRecord(self.admin, at_ms, self.reason), at_ms)
            self._record(state, at_ms, "relation_suppress", triple, None)
            suppressed = RelationSuppressed(
                at_ms=at_ms, admin_plugin=self.admin, reason=self.reason, **triple._asdict()
            )
            return CommandOutcome([suppressed], "newly_suppressed")
        relations.suppress(triple, msgspec.structs.replace(before, reason=self.reason), at_ms)
        self._record(state, at_ms, "relation_suppression_reason_updated", triple, before.reason)
        updated = RelationSuppressionReasonUpdated(
            at_ms=at_ms, admin_plugin=self.admin, old_reason=before.reason, new_reason=self.reason, **triple._asdict()
        )
        return CommandOutcome([updated], "reason_updated")

    def _record(self, state: LedgerState, at_ms: int, kind: str, triple: Triple, prior_reason: str | None) -> None:
        state.part(AdminLedger).record(
            AdminEntry(
                kind=kind,
                admin_plugin=self.admin,
                at_ms=at_ms,
                target_relation=triple,
                reason=self.reason,
                prior_reason=prior_reason,
            )
        )


class UnsuppressRelation(RelationName, Command, frozen=True, kw_only=True, omit_defaults=True):
    """Show a hidden relation again. Answers ``unsuppressed``, ``not_suppressed`` or ``not_found``."""

    is_rehearsable = True
    admin: str

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``InvalidCommand``."""
        check_name("admin", self.admin)
        self.check_names()
        relations = state.part(Relations)
        triple = self.triple(state)
        record = None if triple is None else relations.get(triple)
        if triple is None or record is None:
            return CommandOutcome(result="not_found", is_changed=False)
        if record.suppression is None:
            return CommandOutcome(result="not_suppressed", is_changed=False)
        state.begin_change()
        relations.suppress(triple, None, at_ms)
        state.part(AdminLedger).record(
            AdminEntry(kind="relation_unsuppress", admin_plugin=self.admin, at_ms=at_ms, target_relation=triple)
        )
        shown = RelationUnsuppressed(at_ms=at_ms, admin_plugin=self.admin, **triple._asdict())
        happenings: list[Happening] = [shown]
        declared = state.part(CurrentCatalogue).predicate(triple.predicate)
        if declared is not None and state.rules > FIRST_RULES:
            happenings += violations(relations, declared, self.admin, triple, at_ms)
        return CommandOutcome(happenings, "unsuppressed")
