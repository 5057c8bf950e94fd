"""
Subjects that get other ids: merged, split, or given another type. And what comes along with that.

What comes along is told in a fixed order:

    the merge or split itself
    relations whose subject has another id        (one for each relation; of a merge, the first subject's, then the second's)
    relations that a split plan left out          (split only)
    more ends than a predicate declares           (by subject; the target side before the source side)
    visible claims that became hidden             (merge only)
    claims on relations that moved, then addressings that moved
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tidings.happenings.happening import Happening
from tidings.happenings.variants import (
    ClaimReassigned,
    RelationCardinalityViolatedPostRewrite,
    RelationClaimSuppressionCollapsed,
    RelationRewritten,
    RelationSplitAmbiguous,
    Side,
    SplitStrategy,
    SubjectMerged,
    SubjectMigrated,
    SubjectSplit,
)

from .admin_ledger import AdminEntry, AdminLedger
from .catalogue import CurrentCatalogue
from .claims import RelationName, weight_of
from .commands import Command, CommandOutcome, check_emission, check_name, check_reason
from .conflicts import ClaimEntry, ClaimLog, ConflictEnd, Conflicts, Replaced
from .errors import (
    InvalidCommand,
    MergeCrossType,
    MergeSelfTarget,
    MergeSourceUnknown,
    SplitTargetIndexOutOfBounds,
)
from .relations import Relations, Rewriting, Triple
from .state import LedgerState
from .subjects import (
    Addressing,
    AliasKind,
    AliasRecord,
    ClaimedAddressing,
    SubjectName,
    SubjectRecord,
    Subjects,
    check_new_id,
    check_subject_name,
)


class MergeSubjects(Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    Make one subject of two. Answers the new id.

    The new subject has the type of both, the addressings of the first and then of the second, and no state. The old ids stay as aliases.
    Relations that come to lie on each other are united; if one of them was suppressed, what is left is suppressed.
    """

    is_rehearsable = True
    is_weighed = True
    admin: str
    a: SubjectName
    b: SubjectName
    new_id: str
    reason: str | None = None

    def weight(self, state: LedgerState) -> int:
        return weight_of(state, self.a, self.b)

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
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
        # Each relation is rewritten, and has a claim at least that is reassigned.
        check_emission(state, type(self).__name__, 2 * sum(map(relations.count_touching, sources)))

        state.begin_change()
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
        return CommandOutcome(happenings, self.new_id)


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

    is_rehearsable = True
    is_weighed = True
    admin: str
    source: SubjectName
    partition: tuple[tuple[Addressing, ...], ...]
    new_ids: tuple[str, ...]
    """One for each group."""
    strategy: SplitStrategy = SplitStrategy.TO_BOTH
    assignments: tuple[RelationAssignment, ...] = ()
    reason: str | None = None

    def weight(self, state: LedgerState) -> int:
        return weight_of(state, self.source) * len(self.new_ids)

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
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
        copies = 1 if self.strategy is SplitStrategy.TO_FIRST else len(self.new_ids)
        check_emission(state, type(self).__name__, 2 * copies * relations.count_touching(old_id))

        state.begin_change()
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
        return CommandOutcome(happenings, self.new_ids)

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

    def _groups(self, source: SubjectRecord) -> list[tuple[ClaimedAddressing, ...]]:
        held = {each.addressing: each for each in source.addressings}
        named = [addressing for group in self.partition for addressing in group]
        if len(self.partition) < 2 or not all(self.partition):
            raise InvalidCommand("partition", "must have two groups or more, none of them empty")
        if len(set(named)) != len(named):
            raise InvalidCommand("partition", "names an addressing twice")
        for addressing in named:
            if addressing not in held:
                raise InvalidCommand("partition", f"{str(addressing)!r} is no addressing of the subject")
        left_out = held.keys() - set(named)
        if left_out:
            raise InvalidCommand("partition", f"leaves out {str(min(left_out))!r}")
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
        sides: tuple[tuple[Side, Callable[[str, str], int]], ...] = (
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
