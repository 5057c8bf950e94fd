"""
The relation graph: triples of source, predicate and target, each with the claims of one or more plugins.

A relation is there while somebody claims it. An administrator may *suppress* it: neighbours, counts and walks pass it over, its record
and its claims stay. The graph knows neither subjects nor the catalogue; the commands do.

For each predicate the visible targets of a source and the visible sources of a target are kept as sorted lists: neighbours are a copy of
one of them, whatever the size of the graph.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec

from tidings.happenings.variants import SuppressionRecord

from .paging import KeyOrder

WALK_VISITS: Final = 1000


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


class _Ends(NamedTuple):
    """The visible relations of one predicate."""

    targets: defaultdict[str, list[str]]
    sources: defaultdict[str, list[str]]


class Relations:
    """Every relation."""

    name: ClassVar[str] = "relations"
    frozen_type: ClassVar[Any] = _Frozen

    def __init__(self) -> None:
        self._stored: dict[RelationKey, _Stored] = {}
        self._numbers: dict[str, int] = {}
        """Of every subject id and predicate that was ever in a relation, in the order in which they came."""
        self._ends: dict[str, _Ends] = {}
        self._hidden: dict[str, set[RelationKey]] = {}
        self._claim_counts: Counter[str] = Counter()
        self.triples: Final = KeyOrder(self._stored)
        self.changed: set[RelationKey] | None = None
        """Relations that were changed in any way, for somebody who keeps account of them and empties this; ``None``: nobody does."""

    def freeze(self) -> _Frozen:
        """Names and relations, each in the order in which they came."""
        return _Frozen(tuple(self._numbers), tuple(self._stored.values()))

    def restore(self, frozen: _Frozen) -> None:
        """Take them over."""
        names, relations = frozen.names, frozen.relations
        self._numbers.update(zip(names, range(len(names)), strict=True))
        keys = zip(
            *(map(names.__getitem__, map(attrgetter(end), relations)) for end in ("source", "predicate", "target")),
            strict=True,
        )
        self._stored.update(zip(keys, relations, strict=True))
        self._claim_counts.update(claim.claimant for stored in relations for claim in stored.claims)
        before: str | None = None
        for key, stored in self._stored.items():
            if stored.suppression is not None:
                self._hide(key)
                continue
            source, predicate, target = key
            if predicate is not before:
                before = predicate
                targets, sources = self._ends_of(predicate)
            targets[source].append(target)
            sources[target].append(source)
        for ends in self._ends.values():
            for index in ends:
                for values in index.values():
                    if len(values) > 1:
                        values.sort()

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, triple: RelationKey) -> bool:
        return triple in self._stored

    def get(self, triple: RelationKey) -> RelationRecord | None:
        """The record of a relation, suppressed or not."""
        stored = self._stored.get(triple)
        if stored is None:
            return None
        return RelationRecord(*triple, stored.created_at_ms, stored.modified_at_ms, stored.claims, stored.suppression)

    @property
    def claimants(self) -> tuple[str, ...]:
        """Every plugin that claims a relation."""
        return tuple(plugin for plugin, count in self._claim_counts.items() if count)

    def claim_count(self, plugin: str) -> int:
        """How many relations a plugin claims."""
        return self._claim_counts[plugin]

    def forward_count(self, source_id: str, predicate: str) -> int:
        """How many targets are visible from a source."""
        ends = self._ends.get(predicate)
        return 0 if ends is None else len(ends.targets.get(source_id, ()))

    def inverse_count(self, target_id: str, predicate: str) -> int:
        """How many sources are visible from a target."""
        ends = self._ends.get(predicate)
        return 0 if ends is None else len(ends.sources.get(target_id, ()))

    def neighbours(
        self, subject_id: str, predicate: str, direction: WalkDirection = WalkDirection.FORWARD
    ) -> list[str]:
        """The ids at the other ends of a subject's visible relations, sorted, each once."""
        ends = self._ends.get(predicate)
        if ends is None:
            return []
        targets = ends.targets.get(subject_id, ())
        sources = ends.sources.get(subject_id, ())
        if direction is WalkDirection.FORWARD:
            return list(targets)
        if direction is WalkDirection.INVERSE:
            return list(sources)
        return sorted({*targets, *sources})

    def touching(self, subject_id: str) -> list[Triple]:
        """Every relation that has this subject at an end, suppressed ones too, sorted."""
        found = set(self._hidden.get(subject_id, ()))
        for predicate, ends in self._ends.items():
            found.update((subject_id, predicate, target) for target in ends.targets.get(subject_id, ()))
            found.update((source, predicate, subject_id) for source in ends.sources.get(subject_id, ()))
        return [Triple(*key) for key in sorted(found)]

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
        stored = self._stored.get(triple)
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
        stored = self._stored.get(triple)
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
        stored = self._stored[triple]
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
        there = self._stored.get(triple)
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
        key = (source, predicate, target)
        before = self._stored.get(key)
        number = self._number
        self._stored[key] = _Stored(
            number(source), number(predicate), number(target), created_at_ms, modified_at_ms, claims, suppression
        )
        self._count(claims, 1)
        if self.changed is not None:
            self.changed.add(key)
        if before is None:
            self.triples.changed(key)
        else:
            self._count(before.claims, -1)
            if (before.suppression is None) is (suppression is None):
                return
            self._unindex(key, before)
        if suppression is None:
            ends = self._ends_of(predicate)
            _enter(ends.targets[source], target)
            _enter(ends.sources[target], source)
        else:
            self._hide(key)

    def _remove(self, triple: RelationKey) -> _Stored:
        stored = self._stored.pop(triple)
        self.triples.changed(triple)
        if self.changed is not None:
            self.changed.add(triple)
        self._count(stored.claims, -1)
        self._unindex(triple, stored)
        return stored

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _count(self, claims: tuple[RelationClaim, ...], change: int) -> None:
        for claim in claims:
            self._claim_counts[claim.claimant] += change

    def _ends_of(self, predicate: str) -> _Ends:
        ends = self._ends.get(predicate)
        if ends is None:
            ends = self._ends[predicate] = _Ends(defaultdict(list), defaultdict(list))
        return ends

    def _hide(self, key: RelationKey) -> None:
        for subject_id in {key[0], key[2]}:
            self._hidden.setdefault(subject_id, set()).add(key)

    def _unindex(self, key: RelationKey, stored: _Stored) -> None:
        source, predicate, target = key
        if stored.suppression is None:
            ends = self._ends[predicate]
            _drop(ends.targets, source, target)
            _drop(ends.sources, target, source)
            if not ends.targets:
                del self._ends[predicate]
            return
        for subject_id in {source, target}:
            hidden = self._hidden[subject_id]
            hidden.remove(key)
            if not hidden:
                del self._hidden[subject_id]


def _is_claimed(claims: tuple[RelationClaim, ...], plugin: str) -> bool:
    return any(claim.claimant == plugin for claim in claims)


def _enter(values: list[str], value: str) -> None:
    if not values or value > values[-1]:
        values.append(value)
    else:
        values.insert(bisect_left(values, value), value)


def _drop(index: dict[str, list[str]], key: str, value: str) -> None:
    values = index[key]
    if len(values) == 1:
        del index[key]
    else:
        del values[bisect_left(values, value)]
