"""
What the ledger shows: subjects with their surroundings, racks with their plugins, and lists in pages.

Each answer is made between two commits, so all of it is of one moment: after every happening up to its ``current_seq``, before any other.
Whoever pages through a list and then subscribes with ``since`` the first page's ``current_seq`` misses nothing that changed meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from tidings.core.tasks import in_slices

from .catalogue import CurrentCatalogue
from .composing import UNBOUNDED, ProjectionBounds, ProjectionScope, SubjectProjection, Surroundings, compose, gather
from .custody import Custodies, CustodyRecord
from .errors import UnknownRack, UnknownSubject
from .following import SubjectSubscription
from .handlers import InteractionKind
from .paging import ListPage, read_page
from .relations import RelationKey, RelationRecord, Relations
from .state import LedgerState
from .subjects import AliasRecord, Described, SubjectRecord, Subjects

if TYPE_CHECKING:
    from .ledger import Ledger

Item = TypeVar("Item")
_Gathering = tuple[Surroundings, bool]
_DETACHED_COUNT: Final = 8
"""Records whose states are copied in one slice."""


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
        self._composing = asyncio.Lock()

    async def project_subject(
        self,
        canonical_id: str,
        scope: ProjectionScope | None = None,
        *,
        follow_aliases: bool = True,
        bounds: ProjectionBounds = UNBOUNDED,
    ) -> ProjectedSubject:
        """
        Project a subject with its surroundings, in slices; all of it is of one moment.

        Args:
            canonical_id: Its id, or one that is retired.
            scope: How much of the surroundings; none unless said.
            follow_aliases: Whether to show the subject that a retired id leads to. Without, only the way there is shown.
            bounds: What it may cost.

        Raises:
            UnknownSubject: No subject has or had this id.
            ProjectionTooLarge: It is larger than the bounds allow.
        """
        now_ms = self._ledger.clock.now_ns() // 1_000_000
        subject_scope = ProjectionScope() if scope is None else scope

        def look(state: LedgerState) -> Generator[None, None, tuple[Described, _Gathering | None]]:
            described = state.part(Subjects).describe(canonical_id)
            live = canonical_id if described.kind == "found" else None
            if described.kind == "aliased" and follow_aliases and described.record is not None:
                live = described.record.canonical_id
            return described, None if live is None else (yield from gather(state, live, subject_scope, bounds))

        described, gathering = await self._ledger.read_in_slices(look)
        if described.kind == "not_found":
            raise UnknownSubject(canonical_id)
        subject = await self._composed(gathering, now_ms, bounds)
        if described.kind == "found":
            return ProjectedSubject(subject, None)
        terminal_id = None if described.record is None else described.record.canonical_id
        return ProjectedSubject(subject, AliasedFrom(canonical_id, described.chain, terminal_id))

    async def _composed(
        self, gathering: _Gathering | None, now_ms: int, bounds: ProjectionBounds
    ) -> SubjectProjection | None:
        if gathering is None:
            return None
        # One at a time: several would take as long each, and every slice of each would delay all other callbacks.
        async with self._composing:
            return await in_slices(compose(*gathering, now_ms, bounds))

    async def follow_subject(
        self,
        canonical_id: str,
        scope: ProjectionScope | None = None,
        *,
        follow_aliases: bool = False,
        since: int | None = None,
        bounds: ProjectionBounds = UNBOUNDED,
    ) -> SubjectSubscription:
        """
        A subject with its surroundings, now and again whenever a happening touches it; through merges and migrations, until a split.

        Args:
            canonical_id: Its id, or with ``follow_aliases`` one that leads to it.
            scope: How much of the surroundings; none unless said.
            follow_aliases: Whether an id that is retired already will do.
            since: A cursor: the first update then has the seq of the last happening after it that touched the subject.
            bounds: What one projection may cost.

        Raises:
            UnknownSubject: No subject has or had this id.
            AliasChainUnresolved, AliasChainForked: It is retired, and not to be followed or leads to no one subject.
            CursorTooOld: What comes after ``since`` is kept nowhere.
            ProjectionTooLarge: It is larger than the bounds allow; later ones raise from the subscription.
        """
        subject_scope = ProjectionScope() if scope is None else scope

        async def look(subject_id: str) -> tuple[Described, SubjectProjection | None]:
            now_ms = self._ledger.clock.now_ns() // 1_000_000

            def view(state: LedgerState) -> Generator[None, None, tuple[Described, _Gathering | None]]:
                described = state.part(Subjects).describe(subject_id)
                is_live = described.kind == "found"
                return described, (yield from gather(state, subject_id, subject_scope, bounds)) if is_live else None

            described, gathering = await self._ledger.read_in_slices(view)
            return described, await self._composed(gathering, now_ms, bounds)

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
        page = await self.subjects_page(cursor, page_size)
        items: list[SubjectRecord] = []
        for number, record in enumerate(page.items, 1):
            items.append(record.detached())
            if number % _DETACHED_COUNT == 0:
                await asyncio.sleep(0)
        return msgspec.structs.replace(page, items=tuple(items))

    async def subjects_page(self, cursor: str | None = None, page_size: int | None = None) -> ListPage[SubjectRecord]:
        """As ``list_subjects``, with the ledger's own states, which must not be changed."""
        return await read_page(
            self._ledger,
            cursor,
            page_size,
            lambda state: state.part(Subjects).ids,
            lambda state, key: state.part(Subjects).require(key),
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
