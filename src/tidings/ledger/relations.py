"""
The relation graph: triples of source, predicate and target, each with the claims of one or more plugins.

A relation is there while somebody claims it. An administrator may *suppress* it: neighbours, counts and walks pass it over, its record
and its claims stay. The graph knows neither subjects nor the catalogue; the commands do.

For each predicate every source has its relations by their targets, and every target by their sources. The first time that somebody asks
for a subject's neighbours they are sorted, and kept so from there on: neighbours are a copy of that list, whatever the size of the graph.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec

from tidings.happenings.variants import SuppressionRecord

from .name_table import NameTable
from .paging import KeyOrder

WALK_VISITS: Final = 1000
_RUN_COUNT: Final = 4096
_SHORT_COUNT: Final = 64

RelationKey = tuple[str, str, str]
"""A triple as the graph keeps it. A plain tuple of texts costs the garbage collector nothing, a named one does."""


class Triple(NamedTuple):
    """What identifies a relation."""

    source_id: str
    predicate: str
    target_id: str

    def __str__(self) -> str:
        return f"{self.source_id} {self.predicate} {self.target_id}"


class RelationClaim(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """That a plugin says so."""

    claimant: str
    asserted_at_ms: int
    reason: str | None = None


class RelationRecord(NamedTuple):
    """All there is about a relation."""

    source_id: str
    predicate: str
    target_id: str
    created_at_ms: int
    modified_at_ms: int
    claims: tuple[RelationClaim, ...]
    suppression: SuppressionRecord | None

    @property
    def triple(self) -> Triple:
        """What identifies it."""
        return Triple(*self[:3])

    @property
    def claimants(self) -> tuple[str, ...]:
        """The plugins that claim it, in the order in which they did."""
        return tuple(claim.claimant for claim in self.claims)

    @property
    def is_suppressed(self) -> bool:
        """Whether it is hidden from neighbours, counts and walks."""
        return self.suppression is not None


class _Stored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A relation as it is kept: names by their numbers, so that a large graph is read back quickly and has each name once."""

    source: int
    predicate: int
    target: int
    created_at_ms: int
    modified_at_ms: int
    claims: tuple[RelationClaim, ...]
    suppression: SuppressionRecord | None = None


class _Frozen(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    relations: tuple[_Stored, ...]


class WalkDirection(enum.StrEnum):
    """Which way relations are followed."""

    FORWARD = "forward"
    INVERSE = "inverse"
    BOTH = "both"


class Visit(NamedTuple):
    """A subject that a walk came to."""

    subject_id: str
    depth: int
    predicate: str | None
    """By which it was reached first; none at the start."""


class Walk(NamedTuple):
    """Where a walk came to, nearest first."""

    visits: list[Visit]
    is_truncated: bool
    """Whether it ended because it had visited as many subjects as it may."""


class Rewritten(NamedTuple):
    """A relation of which an end has another id now."""

    old: Triple
    new: Triple
    claims: tuple[RelationClaim, ...]
    """Those it had before."""
    new_id: str
    other_id: str
    """The end that did not change; ``new_id`` if both were the same."""


class Collapse(NamedTuple):
    """A visible and a suppressed relation that became one, which is suppressed."""

    triple: Triple
    demoted: tuple[str, ...]
    """The plugins whose claims were visible."""
    suppression: SuppressionRecord


class Rewriting(NamedTuple):
    """What became of the relations of a subject that has other ids now, in the order of their old triples."""

    rewritten: list[Rewritten]
    collapses: list[Collapse]


class _Direction:
    """The relations of one predicate, by the subject at one end and then by the one at the other."""

    __slots__ = ("_orders", "rows")

    def __init__(self) -> None:
        self.rows: defaultdict[str, dict[str, _Stored]] = defaultdict(dict)
        """Of each subject that has any, suppressed ones too. Plain dictionaries of such values cost the garbage collector nothing."""
        self._orders: dict[str, list[str]] = {}
        """The other ends of the visible ones, sorted: of each subject that somebody asked about, or that has suppressed ones."""

    def put(self, subject_id: str, other_id: str, stored: _Stored) -> None:
        """Keep a relation, instead of the one that was between these two."""
        row = self.rows[subject_id]
        before = row.get(other_id)
        row[other_id] = stored
        order = self._orders.get(subject_id)
        if order is None:
            if stored.suppression is not None:
                self.visible(subject_id)
            return
        was_visible = before is not None and before.suppression is None
        if stored.suppression is not None:
            if was_visible:
                del order[bisect_left(order, other_id)]
        elif not was_visible:
            insort(order, other_id)

    def remove(self, subject_id: str, other_id: str) -> None:
        """Forget a relation."""
        row = self.rows[subject_id]
        stored = row.pop(other_id)
        if not row:
            del self.rows[subject_id]
            self._orders.pop(subject_id, None)
        elif stored.suppression is None and subject_id in self._orders:
            order = self._orders[subject_id]
            del order[bisect_left(order, other_id)]

    def count(self, subject_id: str) -> int:
        """How many visible relations a subject has."""
        order = self._orders.get(subject_id)
        return len(self.rows.get(subject_id, ()) if order is None else order)

    def visible(self, subject_id: str) -> Sequence[str]:
        """The other ends of a subject's visible relations, sorted; neither to be changed nor kept."""
        order = self._orders.get(subject_id)
        if order is None:
            row = self.rows.get(subject_id)
            if row is None:
                return ()
            order = sorted(other_id for other_id, stored in row.items() if stored.suppression is None)
            self._orders[subject_id] = order
        return order

    def first_visible(self, subject_id: str, count_max: int) -> Sequence[str]:
        """Return the first of ``visible``, without keeping the order of a subject that has few."""
        row = self.rows.get(subject_id)
        if row is None:
            return ()
        if len(row) <= _SHORT_COUNT and subject_id not in self._orders:
            return sorted(other_id for other_id, stored in row.items() if stored.suppression is None)[:count_max]
        return self.visible(subject_id)[:count_max]

    def sort(self, subject_id: str) -> Iterator[None]:
        """Prepare ``visible`` in slices, if the subject has many relations. They must not change until this ends."""
        row = self.rows.get(subject_id)
        if row is None or len(row) <= _RUN_COUNT or subject_id in self._orders:
            return
        items = iter(row.items())
        order: list[str] = []
        while run := list(islice(items, _RUN_COUNT)):
            order += sorted(other_id for other_id, stored in run if stored.suppression is None)
            yield
        order.sort()  # merges the runs
        self._orders[subject_id] = order


class _Directions(NamedTuple):
    """The relations of one predicate, both ways."""

    forward: _Direction
    inverse: _Direction


class _Graph:
    """Every relation, and what identifies them."""

    __slots__ = ("by_predicate", "length")

    def __init__(self) -> None:
        self.by_predicate: dict[str, _Directions] = {}
        self.length = 0

    def directions(self, predicate: str) -> _Directions:
        """The relations of a predicate, which may have none yet."""
        directions = self.by_predicate.get(predicate)
        if directions is None:
            directions = self.by_predicate[predicate] = _Directions(_Direction(), _Direction())
        return directions

    def find(self, triple: RelationKey) -> _Stored | None:
        """A relation, if there is one."""
        source, predicate, target = triple
        directions = self.by_predicate.get(predicate)
        row = None if directions is None else directions.forward.rows.get(source)
        return None if row is None else row.get(target)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[RelationKey]:
        """Whatever changes meanwhile."""
        for predicate, (forward, _) in list(self.by_predicate.items()):
            for source in list(forward.rows):
                yield from zip(repeat(source), repeat(predicate), list(forward.rows.get(source, ())))

    def __contains__(self, triple: object) -> bool:
        return isinstance(triple, tuple) and self.find(triple) is not None


class Relations:
    """Every relation."""

    name: ClassVar[str] = "relations"
    frozen_type: ClassVar[Any] = _Frozen

    def __init__(self) -> None:
        self._graph = _Graph()
        self._names = NameTable()
        """Every subject id and predicate that is in a relation."""
        self._claim_counts: Counter[str] = Counter()
        self.triples: Final = KeyOrder(self._graph)
        self.changed: set[RelationKey] | None = None
        """Relations that were changed in any way, for somebody who keeps account of them and empties this; ``None``: nobody does."""

    def freeze(self) -> _Frozen:
        """Names in the order of their numbers; relations by predicate and source."""
        rows = (row.values() for each in self._graph.by_predicate.values() for row in each.forward.rows.values())
        return _Frozen(self._names.freeze(), tuple(chain.from_iterable(rows)))

    def restore(self, frozen: _Frozen) -> None:
        """Take them over."""
        names, relations = frozen.names, frozen.relations
        self._names.restore(
            names,
            chain.from_iterable((stored.source, stored.predicate, stored.target) for stored in relations),
        )
        self._graph.length = len(relations)
        self._claim_counts.update(claim.claimant for stored in relations for claim in stored.claims)
        hidden: list[_Stored] = []
        before: int | None = None
        for stored in relations:
            if stored.predicate != before:
                before = stored.predicate
                forward, inverse = self._graph.directions(names[before])
                by_source, by_target = forward.rows, inverse.rows
            source, target = names[stored.source], names[stored.target]
            by_source[source][target] = stored
            by_target[target][source] = stored
            if stored.suppression is not None:
                hidden.append(stored)
        for stored in hidden:
            forward, inverse = self._graph.directions(names[stored.predicate])
            forward.visible(names[stored.source])
            inverse.visible(names[stored.target])

    def __len__(self) -> int:
        return len(self._graph)

    def __contains__(self, triple: RelationKey) -> bool:
        return triple in self._graph

    def get(self, triple: RelationKey) -> RelationRecord | None:
        """The record of a relation, suppressed or not."""
        stored = self._graph.find(triple)
        if stored is None:
            return None
        return RelationRecord(*triple, stored.created_at_ms, stored.modified_at_ms, stored.claims, stored.suppression)

    def claims_of(self, source_id: str, predicate: str, target_id: str) -> tuple[RelationClaim, ...]:
        """Return who claims a relation; nothing if it does not exist."""
        stored = self._graph.find((source_id, predicate, target_id))
        return () if stored is None else stored.claims

    @property
    def claimants(self) -> tuple[str, ...]:
        """Every plugin that claims a relation."""
        return tuple(plugin for plugin, count in self._claim_counts.items() if count)

    def claim_count(self, plugin: str) -> int:
        """How many relations a plugin claims."""
        return self._claim_counts[plugin]

    def forward_count(self, source_id: str, predicate: str) -> int:
        """How many targets are visible from a source."""
        directions = self._graph.by_predicate.get(predicate)
        return 0 if directions is None else directions.forward.count(source_id)

    def inverse_count(self, target_id: str, predicate: str) -> int:
        """How many sources are visible from a target."""
        directions = self._graph.by_predicate.get(predicate)
        return 0 if directions is None else directions.inverse.count(target_id)

    def neighbours(
        self, subject_id: str, predicate: str, direction: WalkDirection = WalkDirection.FORWARD
    ) -> list[str]:
        """The ids at the other ends of a subject's visible relations, sorted, each once."""
        directions = self._graph.by_predicate.get(predicate)
        if directions is None:
            return []
        forward, inverse = directions
        if direction is WalkDirection.FORWARD:
            return list(forward.visible(subject_id))
        if direction is WalkDirection.INVERSE:
            return list(inverse.visible(subject_id))
        return sorted({*forward.visible(subject_id), *inverse.visible(subject_id)})

    def is_predicate_used(self, predicate: str) -> bool:
        """Return whether there is, or was, a relation of this predicate."""
        return predicate in self._graph.by_predicate

    def sort(self, subject_id: str, predicate: str, direction: WalkDirection) -> Iterator[None]:
        """Prepare ``first_neighbours`` in slices of about a millisecond. Relations must not change until this ends."""
        directions = self._graph.by_predicate.get(predicate)
        if directions is not None:
            forward, inverse = directions
            yield from (forward if direction is WalkDirection.FORWARD else inverse).sort(subject_id)

    def first_neighbours(
        self, subject_id: str, predicate: str, direction: WalkDirection, count_max: int
    ) -> Sequence[str]:
        """Return the first of what ``neighbours`` gives in one direction."""
        directions = self._graph.by_predicate.get(predicate)
        if directions is None:
            return ()
        forward, inverse = directions
        return (forward if direction is WalkDirection.FORWARD else inverse).first_visible(subject_id, count_max)

    def count_touching(self, subject_id: str) -> int:
        """Count the relations that have this subject at an end, suppressed ones too; one with itself counts twice."""
        return sum(
            len(direction.rows.get(subject_id, ()))
            for directions in self._graph.by_predicate.values()
            for direction in directions
        )

    def touching(self, subject_id: str) -> list[Triple]:
        """Every relation that has this subject at an end, suppressed ones too, sorted."""
        found: set[Triple] = set()
        for predicate, (forward, inverse) in self._graph.by_predicate.items():
            found.update(Triple(subject_id, predicate, target) for target in forward.rows.get(subject_id, ()))
            found.update(Triple(source, predicate, subject_id) for source in inverse.rows.get(subject_id, ()))
        return sorted(found)

    def walk(
        self,
        start_id: str,
        predicates: Sequence[str],
        *,
        direction: WalkDirection = WalkDirection.FORWARD,
        max_depth: int = 1,
        max_visits: int = WALK_VISITS,
    ) -> Walk:
        """
        Follow visible relations, breadth first; each subject is visited once.

        Args:
            start_id: Where to start; always the first visit.
            predicates: What to follow; nothing is followed without any.
            direction: Which way.
            max_depth: How many steps at most.
            max_visits: How many subjects at most, the start included.
        """
        visits = [Visit(start_id, 0, None)]
        seen = {start_id}
        waiting = deque(visits)
        while waiting:
            here = waiting.popleft()
            if here.depth >= max_depth:
                break
            for predicate in predicates:
                for neighbour in self.neighbours(here.subject_id, predicate, direction):
                    if neighbour in seen:
                        continue
                    if len(visits) >= max_visits:
                        return Walk(visits, True)
                    visit = Visit(neighbour, here.depth + 1, predicate)
                    seen.add(neighbour)
                    visits.append(visit)
                    waiting.append(visit)
        return Walk(visits, False)

    def claim(
        self, triple: Triple, claimant: str, at_ms: int, reason: str | None = None
    ) -> Literal["created", "claimant_added", "no_change"]:
        """Add a plugin's claim; what the claim did."""
        stored = self._graph.find(triple)
        claim = RelationClaim(claimant, at_ms, reason)
        if stored is None:
            self._put(triple, at_ms, at_ms, (claim,), None)
            return "created"
        if _is_claimed(stored.claims, claimant):
            return "no_change"
        self._put(triple, stored.created_at_ms, at_ms, (*stored.claims, claim), stored.suppression)
        return "claimant_added"

    def retract(
        self, triple: Triple, claimant: str, at_ms: int
    ) -> Literal["claim_removed", "relation_forgotten"] | None:
        """Take a plugin's claim back; what that did. Nothing without such a claim."""
        stored = self._graph.find(triple)
        if stored is None or not _is_claimed(stored.claims, claimant):
            return None
        claims = tuple(claim for claim in stored.claims if claim.claimant != claimant)
        if not claims:
            self._remove(triple)
            return "relation_forgotten"
        self._put(triple, stored.created_at_ms, at_ms, claims, stored.suppression)
        return "claim_removed"

    def suppress(self, triple: Triple, suppression: SuppressionRecord | None, at_ms: int) -> None:
        """Hide a relation, say otherwise why, or, with nothing, show it again."""
        stored = self._graph.find(triple)
        assert stored is not None
        self._put(triple, stored.created_at_ms, at_ms, stored.claims, suppression)

    def forget_touching(self, subject_id: str) -> list[Triple]:
        """Remove every relation of a subject, whoever claims it; which those were, sorted."""
        triples = self.touching(subject_id)
        for triple in reversed(triples):  # from the lists' ends
            self._remove(triple)
        return triples

    def rewrite(self, old_id: str, destinations: Callable[[Triple], Sequence[str]], at_ms: int) -> Rewriting:
        """
        Move the relations of a subject to other ids.

        A relation that comes to lie on another one is united with it: the claims of both, and suppressed if one of them was.

        Args:
            old_id: The subject.
            destinations: The ids that take its place in a relation; the relation is copied to each.
            at_ms: When.
        """
        triples = self.touching(old_id)
        taken = [self._remove(triple) for triple in reversed(triples)]  # from the lists' ends
        rewriting = Rewriting([], [])
        for triple, stored in zip(triples, reversed(taken), strict=True):
            for new_id in destinations(triple):
                source = new_id if triple.source_id == old_id else triple.source_id
                target = new_id if triple.target_id == old_id else triple.target_id
                moved = Triple(source, triple.predicate, target)
                collapse = self._unite(moved, stored, at_ms)
                if collapse is not None:
                    rewriting.collapses.append(collapse)
                other = target if triple.source_id == old_id else source
                rewriting.rewritten.append(Rewritten(triple, moved, stored.claims, new_id, other))
        return rewriting

    def _unite(self, triple: Triple, moved: _Stored, at_ms: int) -> Collapse | None:
        there = self._graph.find(triple)
        if there is None:
            self._put(triple, moved.created_at_ms, at_ms, moved.claims, moved.suppression)
            return None
        added = (claim for claim in moved.claims if not _is_claimed(there.claims, claim.claimant))
        suppression = there.suppression or moved.suppression
        self._put(triple, there.created_at_ms, at_ms, (*there.claims, *added), suppression)
        if suppression is None or (there.suppression is None) is (moved.suppression is None):
            return None
        visible = there if there.suppression is None else moved
        return Collapse(triple, tuple(claim.claimant for claim in visible.claims), suppression)

    def _put(
        self,
        triple: RelationKey,
        created_at_ms: int,
        modified_at_ms: int,
        claims: tuple[RelationClaim, ...],
        suppression: SuppressionRecord | None,
    ) -> None:
        source, predicate, target = triple
        before = self._graph.find(triple)
        if before is None:
            use = self._names.use
            numbers = use(source), use(predicate), use(target)
        else:
            numbers = before.source, before.predicate, before.target
        stored = _Stored(*numbers, created_at_ms, modified_at_ms, claims, suppression)
        forward, inverse = self._graph.directions(predicate)
        forward.put(source, target, stored)
        inverse.put(target, source, stored)
        self._count(claims, 1)
        if before is None:
            self._graph.length += 1
            self.triples.changed((source, predicate, target))
        else:
            self._count(before.claims, -1)
        if self.changed is not None:
            self.changed.add((source, predicate, target))

    def _remove(self, triple: RelationKey) -> _Stored:
        source, predicate, target = triple
        stored = self._graph.find(triple)
        assert stored is not None
        forward, inverse = self._graph.by_predicate[predicate]
        forward.remove(source, target)
        inverse.remove(target, source)
        if not forward.rows:
            del self._graph.by_predicate[predicate]
        self._graph.length -= 1
        self.triples.changed(triple)
        if self.changed is not None:
            self.changed.add(triple)
        self._count(stored.claims, -1)
        for number in (stored.source, stored.predicate, stored.target):
            self._names.release(number)
        return stored

    def _count(self, claims: tuple[RelationClaim, ...], change: int) -> None:
        for claim in claims:
            self._claim_counts[claim.claimant] += change


def _is_claimed(claims: tuple[RelationClaim, ...], plugin: str) -> bool:
    return any(claim.claimant == plugin for claim in claims)
