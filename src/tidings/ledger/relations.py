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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec

from tidings.happenings.variants import SuppressionRecord

from .paging import KeyOrder

WALK_VISITS: Final = 1000


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


class RelationRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All there is about a relation."""

    source_id: str
    predicate: str
    target_id: str
    created_at_ms: int
    modified_at_ms: int
    claims: tuple[RelationClaim, ...]
    suppression: SuppressionRecord | None = None

    @property
    def triple(self) -> Triple:
        """What identifies it."""
        return Triple(self.source_id, self.predicate, self.target_id)

    @property
    def claimants(self) -> tuple[str, ...]:
        """The plugins that claim it, in the order in which they did."""
        return tuple(claim.claimant for claim in self.claims)

    @property
    def is_suppressed(self) -> bool:
        """Whether it is hidden from neighbours, counts and walks."""
        return self.suppression is not None


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

    targets: dict[str, list[str]]
    sources: dict[str, list[str]]


class Relations:
    """Every relation."""

    name: ClassVar[str] = "relations"
    frozen_type: ClassVar[Any] = tuple[RelationRecord, ...]

    def __init__(self) -> None:
        self._records: dict[Triple, RelationRecord] = {}
        self._ends: dict[str, _Ends] = {}
        self._hidden: dict[str, set[Triple]] = {}
        self._claim_counts: Counter[str] = Counter()
        self.triples: Final = KeyOrder(self._records)

    def freeze(self) -> tuple[RelationRecord, ...]:
        """The records in the order in which they came."""
        return tuple(self._records.values())

    def restore(self, frozen: tuple[RelationRecord, ...]) -> None:
        """Take them over."""
        shared: dict[str, str] = {}  # what many records name is kept once: most of a large graph's memory
        share = shared.setdefault
        for read in frozen:
            record = RelationRecord(
                share(read.source_id, read.source_id),
                share(read.predicate, read.predicate),
                share(read.target_id, read.target_id),
                read.created_at_ms,
                read.modified_at_ms,
                tuple(
                    RelationClaim(share(claim.claimant, claim.claimant), claim.asserted_at_ms, claim.reason)
                    for claim in read.claims
                ),
                read.suppression,
            )
            triple = record.triple
            self._records[triple] = record
            self._count(record)
            if record.suppression is not None:
                self._hide(triple)
                continue
            ends = self._ends_of(record.predicate)
            ends.targets.setdefault(record.source_id, []).append(record.target_id)
            ends.sources.setdefault(record.target_id, []).append(record.source_id)
        for ends in self._ends.values():
            for index in ends:
                for values in index.values():
                    values.sort()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, triple: Triple) -> bool:
        return triple in self._records

    def get(self, triple: Triple) -> RelationRecord | None:
        """The record of a relation, suppressed or not."""
        return self._records.get(triple)

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

    def predicates_of(self, subject_id: str) -> list[str]:
        """The predicates of a subject's visible relations, either way, sorted."""
        return sorted(
            predicate
            for predicate, ends in self._ends.items()
            if subject_id in ends.targets or subject_id in ends.sources
        )

    def touching(self, subject_id: str) -> list[Triple]:
        """Every relation that has this subject at an end, suppressed ones too, sorted."""
        found = set(self._hidden.get(subject_id, ()))
        for predicate, ends in self._ends.items():
            found.update(Triple(subject_id, predicate, target) for target in ends.targets.get(subject_id, ()))
            found.update(Triple(source, predicate, subject_id) for source in ends.sources.get(subject_id, ()))
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
        record = self._records.get(triple)
        claim = RelationClaim(claimant, at_ms, reason)
        if record is None:
            self._insert(RelationRecord(*triple, at_ms, at_ms, (claim,)))
            return "created"
        if claimant in record.claimants:
            return "no_change"
        self._replace(record, (*record.claims, claim), record.suppression, at_ms)
        return "claimant_added"

    def retract(
        self, triple: Triple, claimant: str, at_ms: int
    ) -> Literal["claim_removed", "relation_forgotten"] | None:
        """Take a plugin's claim back; what that did. Nothing without such a claim."""
        record = self._records.get(triple)
        if record is None or claimant not in record.claimants:
            return None
        claims = tuple(claim for claim in record.claims if claim.claimant != claimant)
        if not claims:
            self._remove(triple)
            return "relation_forgotten"
        self._replace(record, claims, record.suppression, at_ms)
        return "claim_removed"

    def suppress(self, triple: Triple, suppression: SuppressionRecord | None, at_ms: int) -> None:
        """Hide a relation, say otherwise why, or, with nothing, show it again."""
        record = self._records[triple]
        self._replace(record, record.claims, suppression, at_ms)

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
        records = [self._remove(triple) for triple in reversed(triples)]
        rewriting = Rewriting([], [])
        for triple, record in zip(triples, reversed(records), strict=True):
            for new_id in destinations(triple):
                source = new_id if triple.source_id == old_id else triple.source_id
                target = new_id if triple.target_id == old_id else triple.target_id
                moved = RelationRecord(
                    source, triple.predicate, target, record.created_at_ms, at_ms, record.claims, record.suppression
                )
                collapse = self._unite(moved)
                if collapse is not None:
                    rewriting.collapses.append(collapse)
                other = target if triple.source_id == old_id else source
                rewriting.rewritten.append(Rewritten(triple, moved.triple, record.claims, new_id, other))
        return rewriting

    def _unite(self, moved: RelationRecord) -> Collapse | None:
        there = self._records.get(moved.triple)
        if there is None:
            self._insert(moved)
            return None
        held = there.claimants
        claims = (*there.claims, *(claim for claim in moved.claims if claim.claimant not in held))
        suppression = there.suppression or moved.suppression
        self._replace(there, claims, suppression, moved.modified_at_ms)
        if suppression is None or there.is_suppressed == moved.is_suppressed:
            return None
        visible = moved if there.is_suppressed else there
        return Collapse(moved.triple, visible.claimants, suppression)

    def _insert(self, record: RelationRecord) -> None:
        triple = record.triple
        self._records[triple] = record
        self.triples.changed(triple)
        self._count(record)
        if record.suppression is None:
            self._show(triple)
        else:
            self._hide(triple)

    def _remove(self, triple: Triple) -> RelationRecord:
        record = self._records.pop(triple)
        self.triples.changed(triple)
        self._uncount(record)
        if record.suppression is None:
            self._unshow(triple)
        else:
            self._unhide(triple)
        return record

    def _replace(
        self,
        record: RelationRecord,
        claims: tuple[RelationClaim, ...],
        suppression: SuppressionRecord | None,
        at_ms: int,
    ) -> None:
        triple = record.triple
        replaced = RelationRecord(*triple, record.created_at_ms, at_ms, claims, suppression)
        self._records[triple] = replaced
        self._uncount(record)
        self._count(replaced)
        if (suppression is None) is (record.suppression is None):
            return
        if suppression is None:
            self._unhide(triple)
            self._show(triple)
        else:
            self._unshow(triple)
            self._hide(triple)

    def _count(self, record: RelationRecord) -> None:
        for claim in record.claims:
            self._claim_counts[claim.claimant] += 1

    def _uncount(self, record: RelationRecord) -> None:
        for claim in record.claims:
            self._claim_counts[claim.claimant] -= 1

    def _ends_of(self, predicate: str) -> _Ends:
        ends = self._ends.get(predicate)
        if ends is None:
            ends = self._ends[predicate] = _Ends({}, {})
        return ends

    def _show(self, triple: Triple) -> None:
        ends = self._ends_of(triple.predicate)
        _enter(ends.targets, triple.source_id, triple.target_id)
        _enter(ends.sources, triple.target_id, triple.source_id)

    def _unshow(self, triple: Triple) -> None:
        ends = self._ends[triple.predicate]
        _drop(ends.targets, triple.source_id, triple.target_id)
        _drop(ends.sources, triple.target_id, triple.source_id)
        if not ends.targets:
            del self._ends[triple.predicate]

    def _hide(self, triple: Triple) -> None:
        for subject_id in {triple.source_id, triple.target_id}:
            self._hidden.setdefault(subject_id, set()).add(triple)

    def _unhide(self, triple: Triple) -> None:
        for subject_id in {triple.source_id, triple.target_id}:
            hidden = self._hidden[subject_id]
            hidden.remove(triple)
            if not hidden:
                del self._hidden[subject_id]


def _enter(index: dict[str, list[str]], key: str, value: str) -> None:
    values = index.get(key)
    if values is None:
        index[key] = [value]
    elif value > values[-1]:
        values.append(value)
    else:
        values.insert(bisect_left(values, value), value)


def _drop(index: dict[str, list[str]], key: str, value: str) -> None:
    values = index[key]
    if len(values) == 1:
        del index[key]
    else:
        del values[bisect_left(values, value)]
