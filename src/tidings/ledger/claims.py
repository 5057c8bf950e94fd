"""
What plugins say: that there is a subject, what its state is, and how it is related to others.

The functions ``announce`` and ``retract`` are what the commands come down to once they are checked; other commands that make
and forget subjects use them too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec

from tidings.core.validation import same_json
from tidings.happenings.happening import Happening
from tidings.happenings.variants import (
    AddressingForm,
    Cardinality,
    ClaimsRetracted,
    RelationAsserted,
    RelationCardinalityViolation,
    RelationClaimAdded,
    RelationClaimRetracted,
    RelationForgotten,
    Side,
    SubjectAddressingAdded,
    SubjectAddressingRemoved,
    SubjectAnnounced,
    SubjectCascade,
    SubjectConflictDetected,
    SubjectForgotten,
    SubjectStateChanged,
)

from .catalogue import CurrentCatalogue, PredicateDeclaration
from .commands import Command, CommandOutcome, check_emission, check_json, check_name, check_reason
from .conflicts import ClaimEntry, ClaimLog, ConflictEnd, Conflicts, SubjectClaim, SubjectsConflict
from .errors import (
    InvalidCommand,
    NotClaimant,
    SubjectTypeMismatch,
    UnknownPredicate,
    UnknownRelation,
    UnknownSubject,
    UnknownSubjectType,
)
from .relations import Relations, Triple
from .state import FIRST_RULES, LedgerState
from .subjects import (
    RESERVED_SCHEMES,
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


class Announced(NamedTuple):
    """What an announcement did."""

    kind: Literal["created", "updated", "no_change", "conflict"]
    canonical_id: str | None
    """The subject; none after a conflict."""
    conflicting_ids: tuple[str, ...] = ()
    """After a conflict: the subjects that the addressings belong to, sorted."""


def announce(
    state: LedgerState,
    at_ms: int,
    *,
    plugin: str,
    subject_type: str,
    addressings: Iterable[Addressing],
    new_id: str,
    subject_state: Any = None,
) -> tuple[Announced, list[Happening]]:
    """
    Make a subject, or add addressings to one that has some of them already. What the catalogue declares is not asked.

    Args:
        state: The ledger's state.
        at_ms: When.
        plugin: Who claims the addressings that are new.
        subject_type: Its type.
        addressings: Names of one subject. If they belong to several, nothing is attached, and the conflict is kept and told.
        new_id: Its id if it is new.
        subject_state: Its state if it is new or gets an addressing; of one that is not new, a change is told.

    Raises:
        SubjectTypeMismatch: The subject is of another type.
        InvalidCommand: ``new_id`` was used before.
    """
    subjects = state.part(Subjects)
    wanted = tuple(dict.fromkeys(addressings))
    owners = sorted({owner for owner in map(subjects.find, wanted) if owner is not None})
    if len(owners) > 1:
        return _conflict(state, at_ms, plugin, wanted, tuple(owners))
    if not owners:
        check_new_id(state, "new_id", new_id)
        held = tuple(ClaimedAddressing(addressing, plugin, at_ms) for addressing in wanted)
        subjects.put(SubjectRecord(new_id, subject_type, held, at_ms, at_ms, subject_state))
        if state.rules == FIRST_RULES:
            return Announced("created", new_id), []
        made = SubjectAnnounced(
            at_ms=at_ms, plugin=plugin, canonical_id=new_id, subject_type=subject_type, addressings=_forms(wanted)
        )
        return Announced("created", new_id), [made]
    record = subjects.require(owners[0])
    if record.subject_type != subject_type:
        raise SubjectTypeMismatch(record.canonical_id, record.subject_type, subject_type)
    added = tuple(
        ClaimedAddressing(addressing, plugin, at_ms) for addressing in wanted if subjects.find(addressing) is None
    )
    if not added:
        return Announced("no_change", record.canonical_id), []
    kept = record.state if subject_state is None else subject_state
    subjects.put(
        msgspec.structs.replace(record, addressings=record.addressings + added, modified_at_ms=at_ms, state=kept)
    )
    told: list[Happening] = []
    if state.rules > FIRST_RULES:
        told += [
            SubjectAddressingAdded(
                at_ms=at_ms, plugin=plugin, canonical_id=record.canonical_id, **held.addressing._asdict()
            )
            for held in added
        ]
    if not same_json(kept, record.state):
        told.append(_state_changed(at_ms, plugin, record, kept))
    return Announced("updated", record.canonical_id), told


def _state_changed(at_ms: int, plugin: str, before: SubjectRecord, new_state: Any) -> SubjectStateChanged:
    return SubjectStateChanged(
        at_ms=at_ms,
        plugin=plugin,
        canonical_id=before.canonical_id,
        subject_type=before.subject_type,
        prev_state=before.copied_state(),
        new_state=msgspec.to_builtins(new_state),
    )


def _conflict(
    state: LedgerState, at_ms: int, plugin: str, addressings: tuple[Addressing, ...], owners: tuple[str, ...]
) -> tuple[Announced, list[Happening]]:
    _, is_new = state.part(Conflicts).open(plugin, addressings, owners, at_ms)
    if not is_new:
        return Announced("conflict", None, owners), []
    claim = SubjectsConflict(addressings=addressings, canonical_ids=owners)
    state.part(ClaimLog).append(ClaimEntry(plugin, at_ms, claim))
    detected = SubjectConflictDetected(
        at_ms=at_ms,
        plugin=plugin,
        addressings=_forms(addressings),
        canonical_ids=owners,
    )
    return Announced("conflict", None, owners), [detected]


def _forms(addressings: tuple[Addressing, ...]) -> tuple[AddressingForm, ...]:
    return tuple(AddressingForm(*addressing) for addressing in addressings)


class Retracted(NamedTuple):
    """What taking an addressing back did."""

    kind: Literal["addressing_removed", "subject_forgotten"]
    canonical_id: str


def retract(
    state: LedgerState,
    at_ms: int,
    *,
    plugin: str,
    addressing: Addressing,
    by: str | None = None,
    reason: str | None = None,
) -> tuple[Retracted, list[Happening]]:
    """
    Take an addressing back. With its last addressing a subject is forgotten, and with the subject its relations.

    Args:
        state: The ledger's state.
        at_ms: When.
        plugin: Who claims it.
        addressing: Which.
        by: Who takes it back, if not its claimant.
        reason: Why; kept with the id of a subject that is forgotten.

    Raises:
        UnknownSubject: Nobody claims it.
        NotClaimant: Another plugin claims it.
        CommandTooLarge: The subject would be forgotten with more relations than one command may emit happenings.
    """
    subjects = state.part(Subjects)
    owner = subjects.find(addressing)
    if owner is None:
        raise UnknownSubject(str(addressing))
    record = subjects.require(owner)
    left = tuple(held for held in record.addressings if held.addressing != addressing)
    if not any(held.addressing == addressing and held.claimant == plugin for held in record.addressings):
        raise NotClaimant(plugin, f"the addressing {str(addressing)!r}")
    if left:
        subjects.put(msgspec.structs.replace(record, addressings=left, modified_at_ms=at_ms))
        if by is not None or state.rules == FIRST_RULES:  # what an administrator does has a happening of its own
            return Retracted("addressing_removed", owner), []
        removed = SubjectAddressingRemoved(
            at_ms=at_ms, plugin=plugin, canonical_id=owner, scheme=addressing.scheme, value=addressing.value
        )
        return Retracted("addressing_removed", owner), [removed]
    relations = state.part(Relations)
    check_emission(state, "RetractAddressing", relations.count_touching(owner))
    actor = plugin if by is None else by
    subjects.retire(
        AliasRecord(
            old_id=owner,
            new_ids=(),
            kind=AliasKind.TOMBSTONE,
            recorded_at_ms=at_ms,
            admin_plugin=actor,
            reason=reason,
        )
    )
    forgotten = SubjectForgotten(at_ms=at_ms, plugin=actor, canonical_id=owner, subject_type=record.subject_type)
    cascade = SubjectCascade(owner)
    happenings: list[Happening] = [forgotten]
    happenings.extend(relation_forgotten(at_ms, actor, triple, cascade) for triple in relations.forget_touching(owner))
    state.part(Conflicts).settle([owner], subjects.is_live, ConflictEnd.FORGOTTEN, at_ms)
    return Retracted("subject_forgotten", owner), happenings


def relation_forgotten(
    at_ms: int, plugin: str, triple: Triple, reason: ClaimsRetracted | SubjectCascade
) -> RelationForgotten:
    """The notice that a relation is gone."""
    source_id, predicate, target_id = triple
    return RelationForgotten(
        at_ms=at_ms, plugin=plugin, source_id=source_id, predicate=predicate, target_id=target_id, reason=reason
    )


def _check_addressing(field: str, addressing: Addressing) -> None:
    addressing.checked(field)
    if addressing.scheme in RESERVED_SCHEMES:
        raise InvalidCommand(field, f"the scheme {addressing.scheme!r} is the ledger's own")


class AnnounceSubject(Command, frozen=True, kw_only=True, omit_defaults=True):
    """A plugin says that there is a subject with these names. Answers ``Announced``."""

    plugin: str
    subject_type: str
    addressings: tuple[Addressing, ...]
    new_id: str
    """The id if it is new."""
    claims: tuple[SubjectClaim, ...] = ()
    """What else the plugin says about which names are of one thing; goes to the claim log."""
    state: Any = None

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``UnknownSubjectType``, ``SubjectTypeMismatch`` and ``InvalidCommand``."""
        check_name("plugin", self.plugin)
        check_name("subject_type", self.subject_type)
        if not self.addressings:
            raise InvalidCommand("addressings", "a subject needs at least one")
        for addressing in self.addressings:
            _check_addressing("addressings", addressing)
        for claim in self.claims:
            claim.a.checked("claims.a")
            claim.b.checked("claims.b")
            check_reason(claim.reason, "claims.reason")
        check_json("state", self.state)
        if not state.part(CurrentCatalogue).declares_type(self.subject_type):
            raise UnknownSubjectType(self.subject_type)
        announced, happenings = announce(
            state,
            at_ms,
            plugin=self.plugin,
            subject_type=self.subject_type,
            addressings=self.addressings,
            new_id=self.new_id,
            subject_state=self.state,
        )
        log = state.part(ClaimLog)
        logged = [log.append(ClaimEntry(self.plugin, at_ms, claim)) for claim in self.claims]
        is_changed = announced.kind in ("created", "updated") or bool(happenings) or any(logged)
        return CommandOutcome(happenings, announced, is_changed)


def weight_of(state: LedgerState, *names: SubjectName) -> int:
    """How many relations these subjects have, together."""
    records = filter(None, map(state.part(Subjects).resolve, names))
    return 1 + sum(state.part(Relations).count_touching(record.canonical_id) for record in records)


class RetractAddressing(Command, frozen=True, kw_only=True, omit_defaults=True):
    """A plugin takes a name back that it claims. Answers ``Retracted``."""

    is_weighed = True
    plugin: str
    addressing: Addressing
    reason: str | None = None

    def weight(self, state: LedgerState) -> int:
        return weight_of(state, self.addressing)

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``UnknownSubject``, ``NotClaimant`` and ``InvalidCommand``."""
        check_name("plugin", self.plugin)
        _check_addressing("addressing", self.addressing)
        check_reason(self.reason)
        retracted, happenings = retract(
            state, at_ms, plugin=self.plugin, addressing=self.addressing, reason=self.reason
        )
        return CommandOutcome(happenings, retracted)


class UpdateSubjectState(Command, frozen=True, kw_only=True, omit_defaults=True):
    """A plugin that has a name on a subject sets the subject's state, any JSON; null is none. Answers the subject's id."""

    plugin: str
    subject: SubjectName
    state: Any

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``UnknownSubject``, ``NotClaimant`` and ``InvalidCommand``."""
        check_name("plugin", self.plugin)
        check_subject_name("subject", self.subject)
        check_json("state", self.state)
        subjects = state.part(Subjects)
        record = subjects.require(self.subject)
        if not record.is_claimed_by(self.plugin):
            raise NotClaimant(self.plugin, f"an addressing of the subject {record.canonical_id!r}")
        subjects.put(msgspec.structs.replace(record, modified_at_ms=at_ms, state=self.state))
        return CommandOutcome([_state_changed(at_ms, self.plugin, record, self.state)], record.canonical_id)


def violations(
    relations: Relations, declared: PredicateDeclaration, plugin: str, triple: Triple, at_ms: int
) -> list[Happening]:
    """Return the happenings for a relation that a plugin or administrator made visible, if its ends have too many of it now."""
    sides: tuple[tuple[Side, Cardinality, int], ...] = (
        ("source", declared.source_cardinality, relations.forward_count(triple.source_id, triple.predicate)),
        ("target", declared.target_cardinality, relations.inverse_count(triple.target_id, triple.predicate)),
    )
    return [
        RelationCardinalityViolation(
            at_ms=at_ms,
            plugin=plugin,
            predicate=triple.predicate,
            source_id=triple.source_id,
            target_id=triple.target_id,
            side=side,
            declared=cardinality,
            observed_count=count,
        )
        for side, cardinality, count in sides
        if cardinality.is_exceeded_by(count)
    ]


class RelationName(msgspec.Struct, frozen=True, kw_only=True):
    """How a command names a relation: by names of its subjects."""

    source: SubjectName
    predicate: str
    target: SubjectName

    def check_names(self) -> None:
        """
        See that the names can be names.

        Raises:
            InvalidCommand: One cannot.
        """
        check_subject_name("source", self.source)
        check_name("predicate", self.predicate)
        check_subject_name("target", self.target)

    def triple(self, state: LedgerState) -> Triple | None:
        """The relation between the subjects of these names, whether it is there or not; none if a subject is not known."""
        source = state.part(Subjects).resolve(self.source)
        target = state.part(Subjects).resolve(self.target)
        if source is None or target is None:
            return None
        return Triple(source.canonical_id, self.predicate, target.canonical_id)


class ClaimRelation(RelationName, Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    A plugin says that two subjects are related. Answers ``created``, ``claimant_added`` or ``no_change``.

    A relation that makes more ends than its predicate declares is stored, and the violation is told, once for each side.
    """

    plugin: str
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``UnknownPredicate``, ``UnknownSubject`` and ``InvalidCommand``."""
        check_name("plugin", self.plugin)
        self.check_names()
        check_reason(self.reason)
        declared = state.part(CurrentCatalogue).predicate(self.predicate)
        if declared is None:
            raise UnknownPredicate(self.predicate)
        subjects, relations = state.part(Subjects), state.part(Relations)
        source, target = subjects.require(self.source), subjects.require(self.target)
        if not declared.takes_source(source.subject_type):
            raise InvalidCommand("source", f"{declared.name!r} takes no source of type {source.subject_type!r}")
        if not declared.takes_target(target.subject_type):
            raise InvalidCommand("target", f"{declared.name!r} takes no target of type {target.subject_type!r}")
        triple = Triple(source.canonical_id, declared.name, target.canonical_id)
        done = relations.claim(triple, self.plugin, at_ms, self.reason)
        happenings: list[Happening] = []
        if state.rules > FIRST_RULES and done != "no_change":
            variant: type[RelationAsserted | RelationClaimAdded]
            variant = RelationAsserted if done == "created" else RelationClaimAdded
            happenings.append(
                variant(
                    at_ms=at_ms,
                    plugin=self.plugin,
                    source_id=triple.source_id,
                    predicate=triple.predicate,
                    target_id=triple.target_id,
                )
            )
        if done == "created":
            happenings += violations(relations, declared, self.plugin, triple, at_ms)
        return CommandOutcome(happenings, done, done != "no_change")


class RetractRelation(RelationName, Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    A plugin takes its claim on a relation back. Answers ``claim_removed`` or ``relation_forgotten``.

    What is claimed can be taken back also when the catalogue declares the predicate no more.
    """

    plugin: str
    reason: str | None = None

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        """Raises ``UnknownPredicate``, ``UnknownSubject``, ``UnknownRelation``, ``NotClaimant`` and ``InvalidCommand``."""
        check_name("plugin", self.plugin)
        self.check_names()
        check_reason(self.reason)
        subjects, relations = state.part(Subjects), state.part(Relations)
        is_declared = state.part(CurrentCatalogue).predicate(self.predicate) is not None
        triple = self.triple(state)
        if not is_declared and (triple is None or triple not in relations):
            raise UnknownPredicate(self.predicate)
        subjects.require(self.source)
        subjects.require(self.target)
        assert triple is not None
        if triple not in relations:
            raise UnknownRelation(str(triple))
        done = relations.retract(triple, self.plugin, at_ms)
        if done is None:
            raise NotClaimant(self.plugin, f"the relation {str(triple)!r}")
        if done == "claim_removed":
            if state.rules == FIRST_RULES:
                return CommandOutcome(result=done)
            retracted = RelationClaimRetracted(at_ms=at_ms, plugin=self.plugin, **triple._asdict())
            return CommandOutcome([retracted], done)
        return CommandOutcome([relation_forgotten(at_ms, self.plugin, triple, ClaimsRetracted(self.plugin))], done)
