"""
A subject with its surroundings, put together in slices.

``gather`` goes through the surroundings breadth first and decides at which relation each subject is shown with its own
surroundings: where it is nearest to the root, and only there. It takes records, which never change, out of the state; the state
must not change until it ends. ``compose`` makes the projection of them, the farthest subjects first, and needs no state.

Both are generators that yield after about a millisecond's work, so that other callbacks of the event loop run in between.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final, NamedTuple

import msgspec

from tidings.core.tasks import finish

from .conflicts import Conflicts
from .errors import ProjectionTooLarge
from .relations import RelationClaim, Relations, WalkDirection
from .state import LedgerState
from .subjects import SubjectRecord, Subjects

DEPTH_MAX: Final = 32
VISITS_MAX: Final = 100_000
RELATED_MAX: Final = 100_000
SHAPE_VERSION: Final = 1
_SLICE_COUNT: Final = 256
_LOOK_UPS_FACTOR: Final = 10
_RELATED_SIZE: Final = 200
_ADDRESSING_SIZE: Final = 50


class ProjectionBounds(NamedTuple):
    """What one projection may cost, whatever the scope says."""

    relations_max: int = RELATED_MAX
    """Relations that are shown; beyond it ``walk_truncated`` is set. Ten times as many rows of relations are looked up at most."""
    bytes_max: int | None = None
    """About the size as JSON; a larger one is refused."""


UNBOUNDED: Final = ProjectionBounds()
"""For callers in this process."""


class ProjectionScope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    How much of a subject's surroundings to show.

    What goes beyond 32 steps or 100,000 subjects is brought down to that.
    """

    relation_predicates: tuple[str, ...] = ()
    """The relations to follow; none without any."""
    direction: WalkDirection = WalkDirection.FORWARD
    max_depth: int = 1
    """0: no relations; 1: the subjects at their other ends by name; more: those with their own surroundings too."""
    max_visits: int = 1000
    """How many subjects are shown with their surroundings; the rest by name."""


class AddressingView(msgspec.Struct, frozen=True, gc=False):
    """A name of a subject, and whose it is."""

    scheme: str
    value: str
    claimant: str


class DegradedReason(msgspec.Struct, frozen=True, gc=False):
    """Why a projection is not to be relied on."""

    kind: str
    """``dangling_relation`` or ``subject_in_conflict``."""
    detail: str


class RelatedSubject(msgspec.Struct, frozen=True, gc=False):
    """The other end of a relation."""

    predicate: str
    direction: WalkDirection
    """``forward`` if the subject is the relation's source, ``inverse`` if it is the target."""
    target_id: str
    target_type: str | None
    """None if there is no such subject."""
    relation_claimants: tuple[str, ...]
    nested: SubjectProjection | None
    """The other end with its own surroundings; none beyond the scope, and where it is shown elsewhere already."""


class SubjectProjection(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A subject with its surroundings."""

    canonical_id: str
    subject_type: str
    addressings: tuple[AddressingView, ...]
    related: tuple[RelatedSubject, ...]
    composed_at_ms: int
    shape_version: int = SHAPE_VERSION
    claimants: tuple[str, ...]
    """Every plugin that claims one of its names or of the relations shown."""
    degraded: bool
    degraded_reasons: tuple[DegradedReason, ...]
    walk_truncated: bool
    """Whether something is missing because the scope's limits were reached."""
    state: Any


class _Edge(msgspec.Struct, frozen=True, gc=False):
    """
    A relation as seen from one of its ends.

    As all structs here it is unknown to the garbage collector: a hundred thousand of them would cost it a tenth of a second at once.
    """

    predicate: str
    direction: WalkDirection
    target_id: str
    target_type: str | None
    claims: tuple[RelationClaim, ...]
    is_nested: bool
    """Set if the other end is shown here with its own surroundings."""


class _Gathered(msgspec.Struct, frozen=True, gc=False):
    """A subject that is shown, and its relations."""

    record: SubjectRecord
    conflict_ids: tuple[int, ...]
    edges: list[_Edge]


Surroundings = dict[str, _Gathered]
"""By id, nearest to the root first; the root is the first."""


def project(
    state: LedgerState,
    canonical_id: str,
    scope: ProjectionScope,
    now_ms: int,
    bounds: ProjectionBounds = UNBOUNDED,
) -> SubjectProjection:
    """
    Project a live subject, in one go.

    Raises:
        UnknownSubject: There is none with this id.
        ProjectionTooLarge: See ``ProjectionBounds``.
    """
    surroundings, is_truncated = finish(gather(state, canonical_id, scope, bounds))
    return finish(compose(surroundings, is_truncated, now_ms, bounds))


def gather(
    state: LedgerState, root_id: str, scope: ProjectionScope, bounds: ProjectionBounds = UNBOUNDED
) -> Generator[None, None, tuple[Surroundings, bool]]:
    """
    Collect what a projection shows. Return it, and whether something is missing because limits were reached.

    Raises:
        UnknownSubject: There is no live subject with this id.
    """
    subjects, relations, conflicts = state.part(Subjects), state.part(Relations), state.part(Conflicts)
    depth_max = min(max(scope.max_depth, 0), DEPTH_MAX)
    visits_max = min(max(scope.max_visits, 1), VISITS_MAX)
    direction = WalkDirection(scope.direction)
    directions = (WalkDirection.FORWARD, WalkDirection.INVERSE) if direction is WalkDirection.BOTH else (direction,)
    ways = [
        (predicate, way)
        for predicate in dict.fromkeys(scope.relation_predicates)
        if relations.is_predicate_used(predicate)
        for way in directions
    ]
    relations_left = bounds.relations_max
    look_ups_left = _LOOK_UPS_FACTOR * bounds.relations_max
    is_truncated = False
    gathered: Surroundings = {}
    shown = {root_id}
    work = 0

    def entered(subject_id: str) -> _Gathered:
        conflict_ids = tuple(conflict.conflict_id for conflict in conflicts.open_of(subject_id))
        entry = gathered[subject_id] = _Gathered(subjects.require(subject_id), conflict_ids, [])
        return entry

    level = [root_id]
    entered(root_id)
    for depth in range(1, depth_max + 1):
        following: list[str] = []
        for subject_id in level:
            edges = gathered[subject_id].edges
            for predicate, way in ways:
                if look_ups_left == 0:
                    is_truncated = True
                    break
                look_ups_left -= 1
                is_forward = way is WalkDirection.FORWARD
                yield from relations.sort(subject_id, predicate, way)
                # One more than fits shows that there are more.
                targets = relations.first_neighbours(subject_id, predicate, way, relations_left + 1)
                work += 1
                for target_id in targets[:relations_left]:
                    other = subjects.get(target_id)
                    is_nested = False
                    if depth < depth_max and other is not None and target_id not in shown:
                        if len(shown) >= visits_max:
                            is_truncated = True
                        else:
                            is_nested = True
                            shown.add(target_id)
                            following.append(target_id)
                            entered(target_id)
                    source_id, end_id = (subject_id, target_id) if is_forward else (target_id, subject_id)
                    claims = relations.claims_of(source_id, predicate, end_id)
                    target_type = None if other is None else other.subject_type
                    edges.append(_Edge(predicate, way, target_id, target_type, claims, is_nested))
                    work += 1
                    if work >= _SLICE_COUNT:
                        work = 0
                        yield
                if len(targets) > relations_left:
                    is_truncated = True
                    relations_left = 0
                else:
                    relations_left -= len(targets)
                if work >= _SLICE_COUNT:
                    work = 0
                    yield
        level = following
    return gathered, is_truncated


def compose(
    surroundings: Surroundings, is_truncated: bool, now_ms: int, bounds: ProjectionBounds = UNBOUNDED
) -> Generator[None, None, SubjectProjection]:
    """
    Put a projection together. Return it.

    Raises:
        ProjectionTooLarge: It is larger than the bounds allow.
    """
    projections: dict[str, SubjectProjection] = {}
    root_id = next(iter(surroundings))
    bytes_left = bounds.bytes_max
    work = 0
    while surroundings:
        subject_id, entry = surroundings.popitem()
        record, edges = entry.record, entry.edges
        related: list[RelatedSubject] = []
        claimants = {held.claimant for held in record.addressings}
        reasons = [DegradedReason("subject_in_conflict", f"conflict_id={number}") for number in entry.conflict_ids]
        for edge in edges:
            relation_claimants = tuple(claim.claimant for claim in edge.claims)
            claimants.update(relation_claimants)
            if edge.target_type is None:
                detail = f"predicate={edge.predicate} target_id={edge.target_id}"
                reasons.append(DegradedReason("dangling_relation", detail))
            related.append(
                RelatedSubject(
                    predicate=edge.predicate,
                    direction=edge.direction,
                    target_id=edge.target_id,
                    target_type=edge.target_type,
                    relation_claimants=relation_claimants,
                    nested=projections.pop(edge.target_id) if edge.is_nested else None,
                )
            )
            work += 1
            if work >= _SLICE_COUNT:
                work = 0
                yield
        state = None
        if bytes_left is None:
            state = record.copied_state()
        else:
            if record.state is not None:
                encoded = msgspec.json.encode(record.state)
                bytes_left -= len(encoded)
                state = msgspec.json.decode(encoded)
            bytes_left -= _RELATED_SIZE * (1 + len(edges)) + sum(
                _ADDRESSING_SIZE + len(held.addressing.value) for held in record.addressings
            )
            if bytes_left < 0:
                assert bounds.bytes_max is not None
                raise ProjectionTooLarge(root_id, bounds.bytes_max)
        projections[subject_id] = SubjectProjection(
            canonical_id=subject_id,
            subject_type=record.subject_type,
            addressings=tuple(AddressingView(*held.addressing, held.claimant) for held in record.addressings),
            related=tuple(related),
            composed_at_ms=now_ms,
            claimants=tuple(sorted(claimants)),
            degraded=bool(reasons),
            degraded_reasons=tuple(reasons),
            walk_truncated=is_truncated and subject_id == root_id,
            state=state,
        )
        # A large state is copied in a slice of its own.
        work += 1 if state is None else _SLICE_COUNT // 16
        if work >= _SLICE_COUNT:
            work = 0
            yield
    return projections[root_id]
