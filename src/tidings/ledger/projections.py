"""
What the ledger shows: subjects with their surroundings, racks with their plugins, and lists in pages.

Each answer is made between two commits, so all of it is of one moment: after every happening up to its ``current_seq``, before any other.
Whoever pages through a list and then subscribes with ``since`` the first page's ``current_seq`` misses nothing that changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from .catalogue import CurrentCatalogue
from .conflicts import Conflicts
from .custody import Custodies, CustodyRecord
from .errors import UnknownRack, UnknownSubject
from .following import SubjectSubscription
from .handlers import InteractionKind
from .paging import ListPage, read_page
from .relations import RelationKey, RelationRecord, Relations, Triple, WalkDirection
from .state import LedgerState
from .subjects import AliasRecord, Described, SubjectRecord, Subjects

if TYPE_CHECKING:
    from .ledger import Ledger

Item = TypeVar("Item")

DEPTH_MAX: Final = 32
VISITS_MAX: Final = 100_000
RELATED_MAX: Final = 100_000
SHAPE_VERSION: Final = 1


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


class AddressingView(msgspec.Struct, frozen=True):
    """A name of a subject, and whose it is."""

    scheme: str
    value: str
    claimant: str


class DegradedReason(msgspec.Struct, frozen=True):
    """Why a projection is not to be relied on."""

    kind: str
    """``dangling_relation`` or ``subject_in_conflict``."""
    detail: str


class RelatedSubject(msgspec.Struct, frozen=True):
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


class SubjectProjection(msgspec.Struct, frozen=True, kw_only=True):
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


class AliasedFrom(msgspec.Struct, frozen=True):
    """How an id that is retired leads to a subject."""

    queried_id: str
    chain: tuple[AliasRecord, ...]
    terminal_id: str | None
    """The live subject at the end; none if the chain forks or ends."""


class ProjectedSubject(NamedTuple):
    """What there is under an id."""

    subject: SubjectProjection | None
    aliased_from: AliasedFrom | None
    """For an id that is retired."""


class Occupant(msgspec.Struct, frozen=True):
    """The plugin on a shelf."""

    plugin: str
    interaction_kind: InteractionKind


class ShelfProjection(msgspec.Struct, frozen=True, kw_only=True):
    """A shelf, and who stands on it."""

    name: str
    fully_qualified: str
    shape: int
    shape_supports: tuple[int, ...]
    description: str
    occupant: Occupant | None


class RackProjection(msgspec.Struct, frozen=True, kw_only=True):
    """A rack and its shelves."""

    rack: str
    charter: str
    current_seq: int
    shelves: tuple[ShelfProjection, ...]


class Projections:
    """
    ``ledger.projections``.

    Args:
        ledger: What is shown.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def project_subject(
        self, canonical_id: str, scope: ProjectionScope | None = None, *, follow_aliases: bool = True
    ) -> ProjectedSubject:
        """
        A subject with its surroundings.

        Args:
            canonical_id: Its id, or one that is retired.
            scope: How much of the surroundings; none unless said.
            follow_aliases: Whether to show the subject that a retired id leads to. Without, only the way there is shown.

        Raises:
            UnknownSubject: No subject has or had this id.
        """
        now_ms = self._ledger.clock.now_ns() // 1_000_000
        wanted = ProjectionScope() if scope is None else scope

        def look(state: LedgerState) -> ProjectedSubject:
            found = state.part(Subjects).describe(canonical_id)
            if found.kind == "not_found":
                raise UnknownSubject(canonical_id)
            if found.kind == "found":
                return ProjectedSubject(project(state, canonical_id, wanted, now_ms), None)
            live = None if found.record is None else found.record.canonical_id
            shown = None if live is None or not follow_aliases else project(state, live, wanted, now_ms)
            return ProjectedSubject(shown, AliasedFrom(canonical_id, found.chain, live))

        return await self._ledger.read(look)

    async def follow_subject(
        self,
        canonical_id: str,
        scope: ProjectionScope | None = None,
        *,
        follow_aliases: bool = False,
        since: int | None = None,
    ) -> SubjectSubscription:
        """
        A subject with its surroundings, now and again whenever a happening touches it; through merges and migrations, until a split.

        Args:
            canonical_id: Its id, or with ``follow_aliases`` one that leads to it.
            scope: How much of the surroundings; none unless said.
            follow_aliases: Whether an id that is retired already will do.
            since: A cursor: the first update then has the seq of the last happening after it that touched the subject.

        Raises:
            UnknownSubject: No subject has or had this id.
            AliasChainUnresolved, AliasChainForked: It is retired, and not to be followed or leads to no one subject.
            CursorTooOld: What comes after ``since`` is kept nowhere.
        """
        wanted = ProjectionScope() if scope is None else scope

        async def look(subject_id: str) -> tuple[Described, SubjectProjection | None]:
            now_ms = self._ledger.clock.now_ns() // 1_000_000

            def view(state: LedgerState) -> tuple[Described, SubjectProjection | None]:
                found = state.part(Subjects).describe(subject_id)
                return found, project(state, subject_id, wanted, now_ms) if found.kind == "found" else None

            return await self._ledger.read(view)

        subscription = SubjectSubscription(self._ledger.happenings, look)
        await subscription.begin(canonical_id, follow_aliases=follow_aliases, since=since)
        return subscription

    async def describe_alias(self, canonical_id: str, *, include_chain: bool = True) -> Described:
        """
        What an id stands for: a subject, a chain of aliases, or nothing.

        Args:
            canonical_id: The id.
            include_chain: Without, only the id's own alias is given and not followed.
        """
        found = await self._ledger.read(
            lambda state: state.part(Subjects).describe(canonical_id, include_chain=include_chain)
        )
        return found if found.record is None else found._replace(record=found.record.detached())

    async def project_rack(self, rack: str) -> RackProjection:
        """
        A rack's shelves, and the plugins on them.

        Raises:
            UnknownRack: The catalogue declares none of this name.
        """

        def look(state: LedgerState) -> RackProjection:
            declared = state.part(CurrentCatalogue).rack(rack)
            if declared is None:
                raise UnknownRack(rack)
            return RackProjection(
                rack=rack,
                charter=declared.charter,
                current_seq=self._ledger.happenings.last_seq,
                shelves=tuple(
                    ShelfProjection(
                        name=shelf.name,
                        fully_qualified=f"{rack}.{shelf.name}",
                        shape=shelf.shape,
                        shape_supports=shelf.shape_supports,
                        description=shelf.description,
                        occupant=self._occupant(f"{rack}.{shelf.name}"),
                    )
                    for shelf in declared.shelves
                ),
            )

        return await self._ledger.read(look)

    def _occupant(self, shelf: str) -> Occupant | None:
        plugin = self._ledger.plugins.occupant(shelf)
        return None if plugin is None else Occupant(plugin.name, plugin.interaction_kind)

    async def list_custodies(self, cursor: str | None = None, page_size: int | None = None) -> ListPage[CustodyRecord]:
        """A page of the custodies, by plugin and handle. See ``list_subjects``."""
        return await read_page(
            self._ledger,
            cursor,
            page_size,
            lambda state: state.part(Custodies).order,
            lambda state, key: state.part(Custodies).require(*key),
            key_length=2,
        )

    async def list_subjects(self, cursor: str | None = None, page_size: int | None = None) -> ListPage[SubjectRecord]:
        """
        A page of the subjects, by id.

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
            lambda state: state.part(Subjects).ids,
            lambda state, key: state.part(Subjects).require(key).detached(),
            key_length=1,
            is_text=True,
        )

    async def list_relations(self, cursor: str | None = None, page_size: int | None = None) -> ListPage[RelationRecord]:
        """A page of the relations, suppressed ones too, by source, predicate and target. See ``list_subjects``."""

        def pick(state: LedgerState, key: RelationKey) -> RelationRecord:
            record = state.part(Relations).get(key)
            assert record is not None
            return record

        return await read_page(
            self._ledger, cursor, page_size, lambda state: state.part(Relations).triples, pick, key_length=3
        )

    async def list_addressings(
        self, cursor: str | None = None, page_size: int | None = None
    ) -> ListPage[tuple[str, str, str]]:
        """A page of the addressings, each as scheme, value and canonical id, by scheme and value. See ``list_subjects``."""
        return await read_page(
            self._ledger,
            cursor,
            page_size,
            lambda state: state.part(Subjects).addressings,
            lambda state, key: (*key, state.part(Subjects).require(key).canonical_id),
            key_length=2,
        )


class _Edge(NamedTuple):
    """A relation as seen from one of its ends."""

    seen_from: str
    predicate: str
    direction: WalkDirection
    target_id: str

    @property
    def triple(self) -> Triple:
        if self.direction is WalkDirection.FORWARD:
            return Triple(self.seen_from, self.predicate, self.target_id)
        return Triple(self.target_id, self.predicate, self.seen_from)


def project(state: LedgerState, canonical_id: str, scope: ProjectionScope, now_ms: int) -> SubjectProjection:
    """
    A live subject with its surroundings.

    Raises:
        UnknownSubject: There is none with this id.
    """
    state.part(Subjects).require(canonical_id)
    return _Composer(state, scope, now_ms).compose(canonical_id)


class _Composer:
    """
    Decides first, breadth first, at which relation each subject near the root is shown with its surroundings; then puts it together.

    So a subject is shown where it is nearest to the root, and only there.
    """

    def __init__(self, state: LedgerState, scope: ProjectionScope, now_ms: int) -> None:
        self._subjects = state.part(Subjects)
        self._relations = state.part(Relations)
        self._conflicts = state.part(Conflicts)
        self._now_ms = now_ms
        self._depth_max = min(max(scope.max_depth, 0), DEPTH_MAX)
        self._visits_max = min(max(scope.max_visits, 1), VISITS_MAX)
        self._predicates = tuple(dict.fromkeys(scope.relation_predicates))
        direction = WalkDirection(scope.direction)
        is_both = direction is WalkDirection.BOTH
        self._directions = (WalkDirection.FORWARD, WalkDirection.INVERSE) if is_both else (direction,)
        self._edges: dict[str, list[_Edge]] = {}
        self._shown_at: dict[str, _Edge | None] = {}
        self._is_truncated = False

    def compose(self, root_id: str) -> SubjectProjection:
        """The root, and all that it leads to."""
        self._shown_at[root_id] = None
        level = [root_id]
        left = RELATED_MAX
        for depth in range(1, self._depth_max + 1):
            following: list[str] = []
            for subject_id in level:
                edges = self._edges[subject_id] = []
                for edge in self._edges_of(subject_id):
                    if left == 0:
                        self._is_truncated = True
                        break
                    left -= 1
                    edges.append(edge)
                    if depth < self._depth_max and self._may_show(edge):
                        self._shown_at[edge.target_id] = edge
                        following.append(edge.target_id)
            level = following
        return self._projection(root_id, self._is_truncated)

    def _edges_of(self, subject_id: str) -> Iterator[_Edge]:
        for predicate in self._predicates:
            for direction in self._directions:
                for target_id in self._relations.neighbours(subject_id, predicate, direction):
                    yield _Edge(subject_id, predicate, direction, target_id)

    def _may_show(self, edge: _Edge) -> bool:
        if edge.target_id in self._shown_at or self._subjects.get(edge.target_id) is None:
            return False
        if len(self._shown_at) >= self._visits_max:
            self._is_truncated = True
            return False
        return True

    def _projection(self, subject_id: str, is_truncated: bool = False) -> SubjectProjection:
        record = self._subjects.require(subject_id)
        related = tuple(self._related(edge) for edge in self._edges.get(subject_id, ()))
        reasons = [
            DegradedReason("subject_in_conflict", f"conflict_id={conflict.conflict_id}")
            for conflict in self._conflicts.open_of(subject_id)
        ]
        reasons += [
            DegradedReason("dangling_relation", f"predicate={each.predicate} target_id={each.target_id}")
            for each in related
            if each.target_type is None
        ]
        claimants = {held.claimant for held in record.addressings}
        claimants.update(claimant for each in related for claimant in each.relation_claimants)
        return SubjectProjection(
            canonical_id=subject_id,
            subject_type=record.subject_type,
            addressings=tuple(AddressingView(*held.addressing, held.claimant) for held in record.addressings),
            related=related,
            composed_at_ms=self._now_ms,
            claimants=tuple(sorted(claimants)),
            degraded=bool(reasons),
            degraded_reasons=tuple(reasons),
            walk_truncated=is_truncated,
            state=record.copied_state(),
        )

    def _related(self, edge: _Edge) -> RelatedSubject:
        other = self._subjects.get(edge.target_id)
        relation = self._relations.get(edge.triple)
        is_shown = self._shown_at.get(edge.target_id) == edge
        return RelatedSubject(
            predicate=edge.predicate,
            direction=edge.direction,
            target_id=edge.target_id,
            target_type=None if other is None else other.subject_type,
            relation_claimants=() if relation is None else relation.claimants,
            nested=self._projection(edge.target_id) if is_shown else None,
        )
