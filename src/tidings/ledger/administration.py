"""
What administrators do: merge and split subjects, take back what other plugins claim, hide relations. And the admin ledger.

Each of these leaves an entry in the admin ledger, in the same command: who sees a happening finds the entry. What comes along with a merge or
a split is told in a fixed order:

    the merge or split itself
    relations whose subject has another id        (one for each relation; of a merge, the first subject's, then the second's)
    relations that a split plan left out          (split only)
    more ends than a predicate declares           (by subject; the target side before the source side)
    visible claims that became hidden             (merge only)
    claims on relations that moved, then addressings that moved

A command that finds nothing to do (the claim is not there, the relation is hidden for the same reason already) succeeds and leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from tidings.happenings.variants import (
    ClaimReassigned,
    ClaimsRetracted,
    Happening,
    RelationCardinalityViolatedPostRewrite,
    RelationClaimForcedRetract,
    RelationClaimSuppressionCollapsed,
    RelationRewritten,
    RelationSplitAmbiguous,
    RelationSuppressed,
    RelationSuppressionReasonUpdated,
    RelationUnsuppressed,
    SplitStrategy,
    SubjectAddressingForcedRetract,
    SubjectMerged,
    SubjectMigrated,
    SubjectSplit,
    SuppressionRecord,
)

from .catalogue import CurrentCatalogue
from .claims import RelationName, check_reason, relation_forgotten, retract
from .commands import Command, Outcome, check_name
from .conflicts import ClaimEntry, ClaimLog, ConflictEnd, Conflicts, Replaced
from .errors import (
    InvalidCommand,
    MergeCrossType,
    MergeSelfTarget,
    MergeSourceUnknown,
    SplitTargetIndexOutOfBounds,
    TargetPluginUnknown,
)
from .relations import Relations, Rewriting, Triple
from .state import LedgerState
from .subjects import (
    RESERVED_SCHEMES,
    Addressing,
    AliasKind,
    AliasRecord,
    SubjectName,
    SubjectRecord,
    Subjects,
    check_new_id,
    check_subject_name,
)


class AdminEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an administrator did."""

    kind: str
    admin_plugin: str
    at_ms: int
    target_plugin: str | None = None
    target_subject: str | None = None
    target_addressing: Addressing | None = None
    target_relation: Triple | None = None
    additional_subjects: tuple[str, ...] = ()
    reason: str | None = None
    prior_reason: str | None = None


class AdminLedger:
    """What administrators did, oldest first. Only grows."""

    name: ClassVar[str] = "admin_ledger"
    frozen_type: ClassVar[Any] = tuple[AdminEntry, ...]

    def __init__(self) -> None:
        self._entries: list[AdminEntry] = []

    def freeze(self) -> tuple[AdminEntry, ...]:
        """The entries."""
        return tuple(self._entries)

    def restore(self, frozen: tuple[AdminEntry, ...]) -> None:
        """Take them over."""
        self._entries.extend(frozen)

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, entry: AdminEntry) -> None:
        """Add an entry. Every privileged command does this, with its change."""
        self._entries.append(entry)

    def entries(self, admin_plugin: str | None = None) -> tuple[AdminEntry, ...]:
        """All entries, or those of one administrator."""
        return tuple(entry for entry in self._entries if admin_plugin is None or entry.admin_plugin == admin_plugin)


class RecordAdminAction(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Enter what an administrator does to something that keeps no such entry itself: an appointment, a watch, a type, a hidden name."""

    admin: str
    kind: str
    target_addressing: Addressing | None = None
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> Outcome:
        """Raises ``InvalidCommand``."""
        check_name("admin", self.admin)
        check_name("kind", self.kind)
        check_reason(self.reason)
        entry = AdminEntry(
            kind=self.kind,
            admin_plugin=self.admin,
            at_ms=at_ms,
            target_addressing=self.target_addressing,
            reason=self.reason,
        )
        state.part(AdminLedger).record(entry)
        return Outcome()


class ForceRetractAddressing(Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    Take another plugin's addressing back. Answers ``addressing_removed``, ``subject_forgotten`` or ``not_found``.

    ``is_loaded`` says whether the plugin runs. One that does not, and claims nothing, is taken for a mistyped name.
    """

    admin: str
    target_plugin: str
    addressing: Addressing
    is_loaded: bool = False
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> Outcome:
        """Raises ``TargetPluginUnknown`` and ``InvalidCommand``."""
        self.addressing.checked()
        _check_target_plugin(state, self.admin, self.target_plugin, self.is_loaded, self.reason)
        if self.addressing.scheme in RESERVED_SCHEMES:
            raise InvalidCommand("addressing", f"the scheme {self.addressing.scheme!r} is the ledger's own")
        record = state.part(Subjects).resolve(self.addressing)
        if record is None or not any(
            (held.addressing, held.claimant) == (self.addressing, self.target_plugin) for held in record.addressings
        ):
            return Outcome(result="not_found", is_changed=False)
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
        return Outcome([parent, *cascade], retracted.kind)


class ForceRetractRelation(RelationName, Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    Take another plugin's claim on a relation back. Answers ``claim_removed``, ``relation_forgotten`` or ``not_found``.

    ``is_loaded`` is as with ``ForceRetractAddressing``. The predicate need not be declared.
    """

    admin: str
    target_plugin: str
    is_loaded: bool = False
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> Outcome:
        """Raises ``TargetPluginUnknown`` and ``InvalidCommand``."""
        self.check_names()
        _check_target_plugin(state, self.admin, self.target_plugin, self.is_loaded, self.reason)
        triple = self.triple(state)
        done = None if triple is None else state.part(Relations).retract(triple, self.target_plugin, at_ms)
        if triple is None or done is None:
            return Outcome(result="not_found", is_changed=False)
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
        return Outcome(happenings, done)


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

    admin: str
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> Outcome:
        """Raises ``InvalidCommand``."""
        check_name("admin", self.admin)
        self.check_names()
        check_reason(self.reason)
        relations = state.part(Relations)
        triple = self.triple(state)
        record = None if triple is None else relations.get(triple)
        if triple is None or record is None:
            return Outcome(result="not_found", is_changed=False)
        before = record.suppression
        if before is None:
            relations.suppress(triple, SuppressionRecord(self.admin, at_ms, self.reason), at_ms)
            self._record(state, at_ms, "relation_suppress", triple, None)
            suppressed = RelationSuppressed(
                at_ms=at_ms, admin_plugin=self.admin, reason=self.reason, **triple._asdict()
            )
            return Outcome([suppressed], "newly_suppressed")
        if before.reason == self.reason:
            return Outcome(result="already_suppressed", is_changed=False)
        relations.suppress(triple, msgspec.structs.replace(before, reason=self.reason), at_ms)
        self._record(state, at_ms, "relation_suppression_reason_updated", triple, before.reason)
        updated = RelationSuppressionReasonUpdated(
            at_ms=at_ms, admin_plugin=self.admin, old_reason=before.reason, new_reason=self.reason, **triple._asdict()
        )
        return Outcome([updated], "reason_updated")

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

    admin: str

    def execute(self, state: LedgerState, at_ms: int) -> Outcome:
        """Raises ``InvalidCommand``."""
        check_name("admin", self.admin)
        self.check_names()
        relations = state.part(Relations)
        triple = self.triple(state)
        record = None if triple is None else relations.get(triple)
        if triple is None or record is None:
            return Outcome(result="not_found", is_changed=False)
        if record.suppression is None:
            return Outcome(result="not_suppressed", is_changed=False)
        relations.suppress(triple, None, at_ms)
        state.part(AdminLedger).record(
            AdminEntry(kind="relation_unsuppress", admin_plugin=self.admin, at_ms=at_ms, target_relation=triple)
        )
        shown = RelationUnsuppressed(at_ms=at_ms, admin_plugin=self.admin, **triple._asdict())
        return Outcome([shown], "unsuppressed")


class MergeSubjects(Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    Make one subject of two. Answers the new id.

    The new subject has the type of both, the addressings of the first and then of the second, and no state. The old ids stay as aliases.
    Relations that come to lie on each other are united; if one of them was suppressed, what is left is suppressed.
    """

    admin: str
    a: SubjectName
    b: SubjectName
    new_id: str
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> Outcome:
        """Raises ``MergeSourceUnknown``, ``MergeSelfTarget``, ``MergeCrossType`` and ``InvalidCommand``."""
        check_name("admin", self.admin)
        check_reason(self.reason)
        a, b = _merge_source(state, "a", self.a), _merge_source(state, "b", self.b)
        if a is b:
            raise MergeSelfTarget(a.canonical_id)
        if a.subject_type != b.subject_type:
            raise MergeCrossType(a.subject_type, b.subject_type)
        check_new_id(state, "new_id", self.new_id)

        subjects, relations = state.part(Subjects), state.part(Relations)
        sources = (a.canonical_id, b.canonical_id)
        for source in sources:
            _retire(subjects, source, (self.new_id,), AliasKind.MERGED, at_ms, self.admin, self.reason)
        subjects.put(SubjectRecord(self.new_id, a.subject_type, a.addressings + b.addressings, at_ms, at_ms))
        rewritings = [(source, relations.rewrite(source, lambda _: (self.new_id,), at_ms)) for source in sources]
        replaced = Replaced(how="merged", old_ids=sources, new_ids=(self.new_id,), reason=self.reason)
        state.part(ClaimLog).append(ClaimEntry(self.admin, at_ms, replaced))
        state.part(Conflicts).settle(sources, subjects.is_live, ConflictEnd.MERGED, at_ms)
        state.part(AdminLedger).record(
            AdminEntry(
                kind="subject_merge",
                admin_plugin=self.admin,
                at_ms=at_ms,
                target_subject=self.new_id,
                additional_subjects=sources,
                reason=self.reason,
            )
        )
        cascade = _Cascade(state, at_ms, self.admin, rewritings)
        happenings: list[Happening] = [
            SubjectMerged(
                at_ms=at_ms, admin_plugin=self.admin, source_ids=sources, new_id=self.new_id, reason=self.reason
            ),
            *cascade.rewritten(),
            *cascade.violations([self.new_id]),
            *cascade.collapses(),
            *cascade.reassigned_relations(),
            *cascade.reassigned_addressings((a, self.new_id), (b, self.new_id)),
        ]
        return Outcome(happenings, self.new_id)


def _merge_source(state: LedgerState, field: str, name: SubjectName) -> SubjectRecord:
    check_subject_name(field, name)
    subjects = state.part(Subjects)
    record = subjects.resolve(name)
    if record is not None:
        return record
    raise MergeSourceUnknown(str(name), hint=subjects.hint_about(name))


def _retire(
    subjects: Subjects,
    old_id: str,
    new_ids: tuple[str, ...],
    kind: AliasKind,
    at_ms: int,
    admin: str,
    reason: str | None,
) -> None:
    subjects.retire(
        AliasRecord(old_id=old_id, new_ids=new_ids, kind=kind, recorded_at_ms=at_ms, admin_plugin=admin, reason=reason)
    )


class RelationAssignment(RelationName, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a relation goes when its subject is split: to the group with this number, from 0 on."""

    target_new_id_index: int


class SplitSubject(Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    Make several subjects of one. Answers the new ids.

    ``partition`` has a group of addressings for each new subject; together they are all the old one has. The new subjects have its
    type and no state; the old id stays as an alias of all. With the strategy ``explicit``, ``assignments`` say where each relation goes; one
    that is left out goes to all new subjects, and that is told.
    """

    admin: str
    source: SubjectName
    partition: tuple[tuple[Addressing, ...], ...]
    new_ids: tuple[str, ...]
    """One for each group."""
    strategy: SplitStrategy = SplitStrategy.TO_BOTH
    assignments: tuple[RelationAssignment, ...] = ()
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> Outcome:
        """Raises ``UnknownSubject``, ``SplitTargetIndexOutOfBounds`` and ``InvalidCommand``."""
        check_name("admin", self.admin)
        check_reason(self.reason)
        check_subject_name("source", self.source)
        subjects, relations = state.part(Subjects), state.part(Relations)
        source = subjects.require(self.source)
        assigned = self._assigned(state)
        groups = self._groups(source)
        if len(self.new_ids) != len(self.partition) or len(set(self.new_ids)) != len(self.new_ids):
            raise InvalidCommand("new_ids", "must be one id for each group, each another")
        for new_id in self.new_ids:
            check_new_id(state, "new_ids", new_id)

        old_id = source.canonical_id
        _retire(subjects, old_id, self.new_ids, AliasKind.SPLIT, at_ms, self.admin, self.reason)
        parts = [
            SubjectRecord(new_id, source.subject_type, group, at_ms, at_ms)
            for new_id, group in zip(self.new_ids, groups, strict=True)
        ]
        for part in parts:
            subjects.put(part)
        ambiguous: list[Triple] = []

        def destinations(triple: Triple) -> Sequence[str]:
            if self.strategy is SplitStrategy.TO_FIRST:
                return self.new_ids[:1]
            if self.strategy is SplitStrategy.EXPLICIT:
                index = assigned.get(triple)
                if index is not None:
                    return (self.new_ids[index],)
                ambiguous.append(triple)
            return self.new_ids

        rewriting = relations.rewrite(old_id, destinations, at_ms)
        replaced = Replaced(how="split", old_ids=(old_id,), new_ids=self.new_ids, reason=self.reason)
        state.part(ClaimLog).append(ClaimEntry(self.admin, at_ms, replaced))
        state.part(Conflicts).settle([old_id], subjects.is_live, ConflictEnd.SPLIT, at_ms)
        state.part(AdminLedger).record(
            AdminEntry(
                kind="subject_split",
                admin_plugin=self.admin,
                at_ms=at_ms,
                target_subject=old_id,
                additional_subjects=self.new_ids,
                reason=self.reason,
            )
        )
        cascade = _Cascade(state, at_ms, self.admin, [(old_id, rewriting)])
        happenings: list[Happening] = [
            SubjectSplit(
                at_ms=at_ms,
                admin_plugin=self.admin,
                source_id=old_id,
                new_ids=self.new_ids,
                strategy=self.strategy,
                reason=self.reason,
            ),
            *cascade.rewritten(),
            *(
                RelationSplitAmbiguous(
                    at_ms=at_ms,
                    admin_plugin=self.admin,
                    source_subject=old_id,
                    predicate=triple.predicate,
                    other_endpoint_id=triple.target_id if triple.source_id == old_id else triple.source_id,
                    candidate_new_ids=self.new_ids,
                )
                for triple in ambiguous
            ),
            *cascade.violations(self.new_ids),
            *cascade.reassigned_relations(),
            *cascade.reassigned_addressings(
                *((msgspec.structs.replace(part, canonical_id=old_id), part.canonical_id) for part in parts)
            ),
        ]
        return Outcome(happenings, self.new_ids)

    def _assigned(self, state: LedgerState) -> dict[Triple, int]:
        if self.assignments and self.strategy is not SplitStrategy.EXPLICIT:
            raise InvalidCommand("assignments", f"have no meaning with the strategy {self.strategy.value!r}")
        assigned: dict[Triple, int] = {}
        for assignment in self.assignments:
            assignment.check_names()
            index = assignment.target_new_id_index
            if not 0 <= index < len(self.partition):
                raise SplitTargetIndexOutOfBounds(index, len(self.partition))
            triple = assignment.triple(state)
            if triple is not None and assigned.setdefault(triple, index) != index:
                raise InvalidCommand("assignments", f"the relation {str(triple)!r} is assigned to two groups")
        return assigned

    def _groups(self, source: SubjectRecord) -> list[tuple[Any, ...]]:
        held = {each.addressing: each for each in source.addressings}
        named = [addressing for group in self.partition for addressing in group]
        if len(self.partition) < 2 or not all(self.partition):
            raise InvalidCommand("partition", "must have two groups or more, none of them empty")
        if len(set(named)) != len(named):
            raise InvalidCommand("partition", "names an addressing twice")
        for addressing in named:
            if addressing not in held:
                raise InvalidCommand("partition", f"{str(addressing)!r} is no addressing of the subject")
        if len(named) != len(held):
            left = next(addressing for addressing in held if addressing not in set(named))
            raise InvalidCommand("partition", f"leaves out {str(left)!r}")
        return [tuple(held[addressing] for addressing in group) for group in self.partition]


def migrate_subject(
    state: LedgerState,
    at_ms: int,
    *,
    admin: str,
    old_id: str,
    new_id: str,
    to_type: str,
    migration_id: str,
    reason: str | None = None,
) -> list[Happening]:
    """
    Give a live subject another type, and with it another id. Addressings, state and relations go along; the old id stays as an alias.

    The caller has checked that the subject is there and the new id was never used. It records the migration in the admin ledger.
    """
    subjects = state.part(Subjects)
    record = subjects.require(old_id)
    _retire(subjects, old_id, (new_id,), AliasKind.TYPE_MIGRATED, at_ms, admin, reason)
    subjects.put(msgspec.structs.replace(record, canonical_id=new_id, subject_type=to_type, modified_at_ms=at_ms))
    rewriting = state.part(Relations).rewrite(old_id, lambda _: (new_id,), at_ms)
    replaced = Replaced(how="type_migrated", old_ids=(old_id,), new_ids=(new_id,), reason=reason)
    state.part(ClaimLog).append(ClaimEntry(admin, at_ms, replaced))
    state.part(Conflicts).rename(old_id, new_id)
    cascade = _Cascade(state, at_ms, admin, [(old_id, rewriting)])
    return [
        SubjectMigrated(
            at_ms=at_ms,
            old_id=old_id,
            new_id=new_id,
            from_type=record.subject_type,
            to_type=to_type,
            migration_id=migration_id,
        ),
        *cascade.rewritten(),
        *cascade.reassigned_relations(),
        *cascade.reassigned_addressings((record, new_id)),
    ]


class _Cascade:
    """The notices of what came along when subjects got other ids."""

    def __init__(self, state: LedgerState, at_ms: int, admin: str, rewritings: list[tuple[str, Rewriting]]) -> None:
        self._state = state
        self._at_ms = at_ms
        self._admin = admin
        self._rewritings = rewritings

    def rewritten(self) -> Iterator[Happening]:
        for old_id, rewriting in self._rewritings:
            for moved in rewriting.rewritten:
                yield RelationRewritten(
                    at_ms=self._at_ms,
                    admin_plugin=self._admin,
                    predicate=moved.new.predicate,
                    old_subject_id=old_id,
                    new_subject_id=moved.new_id,
                    target_id=moved.other_id,
                )

    def violations(self, new_ids: Iterable[str]) -> Iterator[Happening]:
        relations = self._state.part(Relations)
        others = (moved.other_id for _, rewriting in self._rewritings for moved in rewriting.rewritten)
        sides: tuple[tuple[Literal["target", "source"], Any], ...] = (
            ("target", relations.inverse_count),
            ("source", relations.forward_count),
        )
        declared = [
            (predicate.name, side, cardinality, count_of)
            for predicate in self._state.part(CurrentCatalogue).catalogue.predicates
            for side, count_of in sides
            if (
                cardinality := predicate.target_cardinality if side == "target" else predicate.source_cardinality
            ).is_exceeded_by(2)
        ]
        for subject_id in sorted({*new_ids, *others}):
            for predicate, side, cardinality, count_of in declared:
                count = count_of(subject_id, predicate)
                if cardinality.is_exceeded_by(count):
                    yield RelationCardinalityViolatedPostRewrite(
                        at_ms=self._at_ms,
                        admin_plugin=self._admin,
                        subject_id=subject_id,
                        predicate=predicate,
                        side=side,
                        declared=cardinality,
                        observed_count=count,
                    )

    def collapses(self) -> Iterator[Happening]:
        for _, rewriting in self._rewritings:
            for collapse in rewriting.collapses:
                for claimant in collapse.demoted:
                    yield RelationClaimSuppressionCollapsed(
                        at_ms=self._at_ms,
                        admin_plugin=self._admin,
                        subject_id=collapse.triple.source_id,
                        predicate=collapse.triple.predicate,
                        target_id=collapse.triple.target_id,
                        demoted_claimant=claimant,
                        surviving_suppression_record=collapse.suppression,
                    )

    def reassigned_relations(self) -> Iterator[Happening]:
        for old_id, rewriting in self._rewritings:
            for moved in rewriting.rewritten:
                for claim in moved.claims:
                    yield ClaimReassigned(
                        at_ms=self._at_ms,
                        admin_plugin=self._admin,
                        plugin=claim.claimant,
                        kind="relation",
                        old_subject_id=old_id,
                        new_subject_id=moved.new_id,
                        predicate=moved.new.predicate,
                        target_id=moved.other_id,
                    )

    def reassigned_addressings(self, *moves: tuple[SubjectRecord, str]) -> Iterator[Happening]:
        for old, new_id in moves:
            for held in old.addressings:
                yield ClaimReassigned(
                    at_ms=self._at_ms,
                    admin_plugin=self._admin,
                    plugin=held.claimant,
                    kind="addressing",
                    old_subject_id=old.canonical_id,
                    new_subject_id=new_id,
                    scheme=held.addressing.scheme,
                    value=held.addressing.value,
                )
