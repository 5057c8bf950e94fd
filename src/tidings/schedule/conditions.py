"""
Conditions of watches: what they look at, and when they hold. No clock, no I/O: time and happenings are handed in.

A condition is a tree. Its leaves are matches on happenings and predicates on the state of a subject:

    {"kind": "composite", "op": "all", "terms": [
        {"kind": "happening_match", "filter": {"variants": ["custody_taken"]}, "window_ms": 60000},
        {"kind": "subject_state", "canonical_id": ID, "minimum_duration_ms": 5000,
         "predicate": {"kind": "greater_than", "field": "celsius", "value": 80}}]}

``Tree`` is a condition made ready for evaluation. What it has to remember between happenings is a value, ``Leaves``, that can be
stored: the same happenings always lead from one such value to the same other one.

- A match on happenings is latched: true from its happening on until the watch fires, or until its window is over. Two places
  have no use for that. A condition that is nothing but one match holds for the very happening only. And so does a match below a
  ``not``, unless it has a window: what excludes would otherwise exclude for ever.
- A predicate is true or false by the last state of its subject. It follows the subject when that is merged into another or migrated
  to another type; of a subject that is gone, or was split, nothing holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from tidings.happenings.filters import EVERYTHING, HappeningFilter
from tidings.happenings.happening import AnyHappening
from tidings.happenings.variants import (
    SubjectForgotten,
    SubjectMerged,
    SubjectMigrated,
    SubjectSplit,
    SubjectStateChanged,
)
from tidings.ledger.predicates import Predicate, predicate_test

from .errors import BadSpec

DEPTH_MAX: Final = 8
"""How deep composites may nest."""
LEAF_COUNT_MAX: Final = 64
_STATE_VARIANTS: Final = (
    "subject_state_changed",
    "subject_merged",
    "subject_migrated",
    "subject_split",
    "subject_forgotten",
)

Millis = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Tagged(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True, forbid_unknown_fields=True
):
    """JSON says in ``kind`` what it is."""


class HappeningMatch(_Tagged, frozen=True, kw_only=True, tag="happening_match"):
    """A happening that the filter lets through has come, and its window, where it has one, is not over."""

    filter: HappeningFilter = EVERYTHING
    window_ms: Annotated[int, msgspec.Meta(ge=1, le=2**53)] | None = None


class SubjectState(_Tagged, frozen=True, kw_only=True, tag="subject_state"):
    """The predicate is true of a subject's state. The longest ``minimum_duration_ms`` of a tree is how long the tree has to hold."""

    canonical_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    predicate: Predicate
    minimum_duration_ms: Millis | None = None


class Composite(_Tagged, frozen=True, kw_only=True, tag="composite"):
    """All of the terms, any of them, or not the one."""

    op: Literal["all", "any", "not"]
    terms: tuple[Condition, ...]


Condition: TypeAlias = HappeningMatch | SubjectState | Composite


class Leaves(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the leaves of a condition remember, in the order of the tree."""

    latched_at_ms: tuple[int | None, ...] = ()
    """When each match was latched; none if it is not."""
    subject_ids: tuple[str, ...] = ()
    """The id that the subject of each predicate has by now."""
    is_held: tuple[bool, ...] = ()
    """Whether each predicate is true."""


_Node = Callable[[Leaves, int, Collection[int]], bool]
"""Whether a part of the tree holds, by what the leaves remember, the time, and the matches that the happening at hand makes."""


class Tree:
    """
    A condition, ready for evaluation.

    Raises:
        BadSpec: It nests too deep, has too many leaves or the wrong number of terms, a range without an inside, or a pattern that is none.
    """

    def __init__(self, condition: Condition) -> None:
        self._matches: list[HappeningMatch] = []
        self._is_negated: list[bool] = []
        self._states: list[SubjectState] = []
        self._tests: list[Callable[[Any, bool], bool]] = []
        self._root = self._node(condition, 0, is_negated=False)
        self._is_single = isinstance(condition, HappeningMatch)
        self.duration_ms = max((leaf.minimum_duration_ms or 0 for leaf in self._states), default=0)
        """How long the condition has to hold."""
        self.is_momentary = not self._states and all(leaf.window_ms is None for leaf in self._matches)
        """Whether it is about happenings alone: then each that makes it hold counts for itself."""

    def _node(self, condition: Condition, depth: int, *, is_negated: bool) -> _Node:
        if isinstance(condition, Composite):
            return self._composite(condition, depth, is_negated=is_negated)
        if len(self._matches) + len(self._states) == LEAF_COUNT_MAX:
            raise BadSpec(f"a condition has at most {LEAF_COUNT_MAX} leaves")
        if isinstance(condition, SubjectState):
            number = len(self._states)
            self._states.append(condition)
            try:
                self._tests.append(predicate_test(condition.predicate))
            except ValueError as error:
                raise BadSpec(str(error)) from None
            return lambda leaves, at_ms, hits: leaves.is_held[number]
        number = len(self._matches)
        self._matches.append(condition)
        self._is_negated.append(is_negated)
        return lambda leaves, at_ms, hits: number in hits or self._is_latched(leaves, number, at_ms)

    def _composite(self, composite: Composite, depth: int, *, is_negated: bool) -> _Node:
        op = composite.op
        if depth == DEPTH_MAX:
            raise BadSpec(f"composites nest deeper than {DEPTH_MAX} levels")
        if op == "not" and len(composite.terms) != 1:
            raise BadSpec(f"a composite 'not' has exactly one term, not {len(composite.terms)}")
        if not composite.terms:
            raise BadSpec(f"a composite {op!r} has at least one term")
        is_negated ^= op == "not"
        terms = [self._node(term, depth + 1, is_negated=is_negated) for term in composite.terms]
        if op == "not":
            return lambda leaves, at_ms, hits: not terms[0](leaves, at_ms, hits)
        some_or_all = all if op == "all" else any
        return lambda leaves, at_ms, hits: some_or_all(term(leaves, at_ms, hits) for term in terms)

    def _is_latched(self, leaves: Leaves, number: int, at_ms: int) -> bool:
        since_ms, window_ms = leaves.latched_at_ms[number], self._matches[number].window_ms
        return since_ms is not None and (window_ms is None or at_ms < since_ms + window_ms)

    def _can_latch(self, number: int) -> bool:
        return self._matches[number].window_ms is not None or not (self._is_single or self._is_negated[number])

    def subject_ids(self, leaves: Leaves | None = None) -> tuple[str, ...]:
        """The subjects that predicates look at: as the condition names them, or as they are called by now."""
        return tuple(leaf.canonical_id for leaf in self._states) if leaves is None else leaves.subject_ids

    def first(self, subjects: Mapping[str, tuple[str, Any]], before: Leaves | None = None) -> Leaves:
        """
        What the leaves remember at the beginning, or after some happenings were missed.

        Args:
            subjects: Of each subject that is known: the id that it has by now, and its state.
            before: What they remembered before the happenings that were missed.
        """
        found = [subjects.get(name, (name, None)) for name in self.subject_ids(before)]
        was_held = before.is_held if before is not None else (False,) * len(found)
        return Leaves(
            latched_at_ms=before.latched_at_ms if before is not None else (None,) * len(self._matches),
            subject_ids=tuple(canonical_id for canonical_id, _ in found),
            is_held=tuple(
                test(state, was_true) for test, (_, state), was_true in zip(self._tests, found, was_held, strict=True)
            ),
        )

    def hits(self, happening: AnyHappening) -> frozenset[int]:
        """The matches that a happening makes, by number."""
        return frozenset(number for number, leaf in enumerate(self._matches) if leaf.filter.matches(happening))

    def taken(self, leaves: Leaves, happening: AnyHappening, at_ms: int) -> Leaves:
        """What the leaves remember after a happening."""
        latches = list(leaves.latched_at_ms)
        for number in self.hits(happening):
            # A window begins again with each happening; without one, the first is enough.
            if self._can_latch(number) and (latches[number] is None or self._matches[number].window_ms is not None):
                latches[number] = at_ms
        ids, held = list(leaves.subject_ids), list(leaves.is_held)
        for number, subject_id in enumerate(ids):
            match happening:
                case SubjectStateChanged(canonical_id=changed) if changed == subject_id:
                    held[number] = self._tests[number](happening.new_state, held[number])
                case SubjectMigrated(old_id=old) if old == subject_id:
                    ids[number] = happening.new_id
                case SubjectMerged(source_ids=merged) if subject_id in merged:
                    ids[number], held[number] = happening.new_id, False
                case SubjectSplit(source_id=gone) | SubjectForgotten(canonical_id=gone) if gone == subject_id:
                    held[number] = False
        return Leaves(latched_at_ms=tuple(latches), subject_ids=tuple(ids), is_held=tuple(held))

    def released(self, leaves: Leaves) -> Leaves:
        """What the leaves remember after the watch has fired: what was latched has done its part. What excludes goes on."""
        latches = zip(leaves.latched_at_ms, self._is_negated, strict=True)
        return msgspec.structs.replace(
            leaves, latched_at_ms=tuple(since_ms if is_negated else None for since_ms, is_negated in latches)
        )

    def clipped(self, leaves: Leaves, at_ms: int) -> Leaves:
        """The same, with nothing latched later than now: the clock was set back while nobody looked."""
        latches = (None if since_ms is None else min(since_ms, at_ms) for since_ms in leaves.latched_at_ms)
        return msgspec.structs.replace(leaves, latched_at_ms=tuple(latches))

    def holds(self, leaves: Leaves, at_ms: int, hits: Collection[int] = ()) -> bool:
        """Whether the condition is true, with these matches made by the happening at hand."""
        return self._root(leaves, at_ms, hits)

    def next_change_ms(self, leaves: Leaves, at_ms: int) -> int | None:
        """When the next window is over."""
        ends = [
            since_ms + leaf.window_ms
            for since_ms, leaf in zip(leaves.latched_at_ms, self._matches, strict=True)
            if since_ms is not None and leaf.window_ms is not None
        ]
        return min((end_ms for end_ms in ends if end_ms > at_ms), default=None)

    def filters(self, leaves: Leaves) -> list[HappeningFilter]:
        """What to look at: all happenings that may change anything."""
        if self.is_momentary and self.holds(self.first({}), 0):
            return [EVERYTHING]  # it is made of exclusions: anything else makes it hold
        found = [leaf.filter for leaf in self._matches]
        if leaves.subject_ids:
            subjects = tuple(sorted(set(leaves.subject_ids)))
            found.append(HappeningFilter(variants=_STATE_VARIANTS, subjects=subjects))
        return found
