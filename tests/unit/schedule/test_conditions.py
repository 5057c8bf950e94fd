"""A condition holds by what has happened and by the state of subjects, as its tree says."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from tidings.happenings.filters import HappeningFilter
from tidings.happenings.happening import AnyHappening, Happening
from tidings.happenings.variants import (
    CustodyReleased,
    CustodyTaken,
    SplitStrategy,
    SubjectForgotten,
    SubjectMerged,
    SubjectMigrated,
    SubjectSplit,
    SubjectStateChanged,
)
from tidings.ledger.predicates import Predicate, Regex
from tidings.schedule.conditions import (
    LEAF_COUNT_MAX,
    Composite,
    Condition,
    HappeningMatch,
    Leaves,
    SubjectState,
    Tree,
)
from tidings.schedule.errors import BadSpec
from tidings.schedule.watches import watch_spec

TAKEN = CustodyTaken(at_ms=0, plugin="p", handle_id="h", shelf="a.b", custody_type="t")
RELEASED = CustodyReleased(at_ms=0, plugin="p", handle_id="h")
IS_TAKEN = HappeningMatch(filter=HappeningFilter(variants=("custody_taken",)))
IS_RELEASED = HappeningMatch(filter=HappeningFilter(variants=("custody_released",)))


def changed(state: Any, subject: str = "s1") -> SubjectStateChanged:
    """The state of a subject has changed."""
    return SubjectStateChanged(
        at_ms=0, plugin="p", canonical_id=subject, subject_type="t", prev_state=None, new_state=state
    )


def hot(subject: str = "s1", **more: Any) -> SubjectState:
    """A subject is warmer than 80."""
    return msgspec.convert(
        {
            "kind": "subject_state",
            "canonical_id": subject,
            "predicate": {"kind": "greater_than", "field": "n", "value": 80},
            **more,
        },
        SubjectState,
    )


def both(*terms: Condition) -> Composite:
    """All terms."""
    return Composite(op="all", terms=terms)


def neither(term: Condition) -> Composite:
    """Not the term."""
    return Composite(op="not", terms=(term,))


def truths(tree: Tree, *happenings: AnyHappening, leaves: Leaves | None = None) -> list[bool]:
    """Whether the condition holds with each happening, one a millisecond."""
    leaves = leaves or tree.first({})
    found = []
    for at_ms, happening in enumerate(happenings):
        leaves = tree.taken(leaves, happening, at_ms)
        found.append(tree.holds(leaves, at_ms, tree.hits(happening)))
    return found


@pytest.mark.parametrize(
    ("predicate", "expected"),
    [
        ({"kind": "equals", "value": 1}, {"1": True, "1.0": True, "true": False, '"1"': False, "null": False}),
        ({"kind": "equals", "value": {"a": [1]}}, {'{"a": [1]}': True, '{"a": [true]}': False}),
        ({"kind": "equals", "value": None}, {"null": True, "0": False}),
        ({"kind": "not_equals", "value": "on"}, {'"off"': True, '"on"': False, "null": True}),
        ({"kind": "greater_than", "value": 80}, {"80": False, "80.1": True, '"90"': False, "true": False}),
        ({"kind": "less_than", "value": 20}, {"20": False, "19": True, "false": False, "[]": False}),
        ({"kind": "in_range", "lower": 1, "upper": 3}, {"1": False, "2": True, "3": False}),
        ({"kind": "regex", "pattern": "err(or)?$"}, {'"an error"': True, '"errors"': False, "7": False, "null": False}),
    ],
    ids=lambda value: value.get("kind", ""),
)
def test_predicates_follow_json(predicate: dict[str, Any], expected: dict[str, bool]) -> None:
    """A predicate compares by JSON's types, bounds are not included, and what has another type is no match."""
    tree = Tree(SubjectState(canonical_id="s1", predicate=msgspec.convert(predicate | {"field": "n"}, Predicate)))

    found = {text: truths(tree, changed({"n": msgspec.json.decode(text)})) == [True] for text in expected}

    assert found == expected


@pytest.mark.parametrize("kind", ["equals", "not_equals"])
@pytest.mark.parametrize("state", [None, {}, {"other": 1}, "n", [1]])
def test_what_is_not_there_matches_nothing(kind: str, state: Any) -> None:
    """Of a subject without state, or whose state has no such field, no predicate is true."""
    predicate = msgspec.convert({"kind": kind, "field": "n", "value": None}, Predicate)

    assert truths(Tree(SubjectState(canonical_id="s1", predicate=predicate)), changed(state)) == [False]


def test_hysteresis_is_of_each_leaf() -> None:
    """A leaf is true from above the upper bound to below the lower one; another leaf on the same subject has its own bounds."""
    low, high = (
        SubjectState(
            canonical_id="s1",
            predicate=msgspec.convert({"kind": "hysteresis", "field": "n", "upper": upper, "lower": lower}, Predicate),
        )
        for upper, lower in ((80, 60), (95, 90))
    )
    values = [changed({"n": n}) for n in (85, 90, 70, 60, 59, 70, 96, 89)]

    assert truths(Tree(low), *values) == [True, True, True, True, False, False, True, True]
    assert truths(Tree(both(low, high)), *values) == [False] * 6 + [True, False]
    assert truths(Tree(low), changed({"n": 85}), changed(None), changed({"n": 70})) == [True, False, False]


def test_a_leaf_is_about_its_own_subject() -> None:
    """The state of another subject changes nothing, nor does any other happening."""
    tree = Tree(hot())

    assert truths(tree, changed({"n": 90}, "s2"), changed({"n": 90}), TAKEN, changed({"n": 0}, "s2")) == [
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("happening", "expected"),
    [
        (
            SubjectMigrated(at_ms=0, old_id="s1", new_id="s9", from_type="a", to_type="b", migration_id="m"),
            [True, True],
        ),
        (SubjectMerged(at_ms=0, admin_plugin="a", source_ids=("s0", "s1"), new_id="s9", reason=None), [False, True]),
        (SubjectForgotten(at_ms=0, plugin="p", canonical_id="s1", subject_type="t"), [False, False]),
        (
            SubjectSplit(
                at_ms=0,
                admin_plugin="a",
                source_id="s1",
                new_ids=("s8", "s9"),
                strategy=SplitStrategy.TO_BOTH,
                reason=None,
            ),
            [False, False],
        ),
    ],
    ids=lambda value: value.variant if isinstance(value, Happening) else "",
)
def test_a_leaf_follows_its_subject(happening: AnyHappening, expected: list[bool]) -> None:
    """
    A migrated subject keeps its state; a merged one has none at first, and what comes under the new id counts; a subject that is gone
    or was split is followed no further.
    """
    tree = Tree(hot())
    leaves = tree.taken(tree.first({}), changed({"n": 90}), 0)

    assert truths(tree, happening, changed({"n": 91}, "s9"), leaves=leaves) == expected


def test_a_tree_says_what_it_looks_at() -> None:
    """Happenings that no leaf is about need not be shown to it: an index can be made of its filters."""
    leaves = Tree(both(IS_TAKEN, hot())).first({"s1": ("s7", None)})
    filters = Tree(both(IS_TAKEN, hot())).filters(leaves)

    def is_wanted(happening: AnyHappening) -> bool:
        return any(each.matches(happening) for each in filters)

    assert is_wanted(TAKEN)
    assert is_wanted(changed(None, "s7"))
    assert not is_wanted(changed(None, "s1"))
    assert not is_wanted(RELEASED)
    assert Tree(neither(IS_TAKEN)).filters(leaves)[0].is_empty


@pytest.mark.parametrize(
    ("condition", "happenings", "expected"),
    [
        (IS_TAKEN, [TAKEN, RELEASED, TAKEN], [True, False, True]),
        (both(IS_TAKEN, IS_RELEASED), [TAKEN, changed({}), RELEASED], [False, False, True]),
        (both(IS_TAKEN, hot()), [TAKEN, changed({"n": 90})], [False, True]),
        (both(IS_TAKEN, hot()), [changed({"n": 90}), changed({"n": 1}), TAKEN], [False, False, False]),
        (Composite(op="any", terms=(IS_TAKEN, hot())), [RELEASED, changed({"n": 90})], [False, True]),
        (neither(hot()), [changed({"n": 90}), changed({"n": 1})], [False, True]),
        (neither(neither(hot())), [changed({"n": 90}), changed({"n": 1})], [True, False]),
        (both(HappeningMatch(), neither(IS_TAKEN)), [TAKEN, RELEASED], [False, True]),
    ],
)
def test_composites(condition: Condition, happenings: list[AnyHappening], expected: list[bool]) -> None:
    """Terms may need different happenings: a match is kept until its watch fires, and a predicate is as the state is."""
    assert truths(Tree(condition), *happenings) == expected


def test_a_match_is_over_with_its_window() -> None:
    """A match with a window is kept no longer than that; the same happening again begins the window again."""
    tree = Tree(both(HappeningMatch(filter=IS_TAKEN.filter, window_ms=100), IS_RELEASED))
    leaves = tree.taken(tree.taken(tree.first({}), TAKEN, 0), TAKEN, 50)
    released = tree.taken(leaves, RELEASED, 149)

    assert tree.next_change_ms(leaves, 60) == 150
    assert tree.holds(released, 149)
    assert not tree.holds(released, 150)
    assert tree.next_change_ms(released, 150) is None


def test_releasing_leaves_what_excludes() -> None:
    """When a watch fires its matches have done their part, but a window that excludes goes on."""
    tree = Tree(both(IS_TAKEN, neither(HappeningMatch(filter=IS_RELEASED.filter, window_ms=100))))
    leaves = tree.taken(tree.taken(tree.first({}), RELEASED, 0), TAKEN, 1)

    leaves = tree.released(leaves)

    assert not tree.holds(tree.taken(leaves, TAKEN, 2), 2)
    assert tree.holds(tree.taken(leaves, TAKEN, 100), 100)
    assert not tree.holds(leaves, 100)


def test_a_subject_that_was_renamed_before_is_found() -> None:
    """A tree begins with the ids and the states that subjects have by now."""
    tree = Tree(both(hot("old"), hot("s2")))

    leaves = tree.first({"old": ("new", {"n": 99}), "s2": ("s2", {"n": 81})})

    assert leaves.subject_ids == ("new", "s2")
    assert tree.holds(leaves, 0)


def nested(depth: int) -> dict[str, Any]:
    """A composite in a composite in a ..."""
    condition: dict[str, Any] = {"kind": "happening_match"}
    for _ in range(depth):
        condition = {"kind": "composite", "op": "not", "terms": [condition]}
    return condition


STATE = {"kind": "subject_state", "canonical_id": "s1"}


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ({"kind": "composite", "op": "not", "terms": []}, "exactly one term, not 0"),
        ({"kind": "composite", "op": "not", "terms": [{"kind": "happening_match"}] * 2}, "exactly one term, not 2"),
        ({"kind": "composite", "op": "all", "terms": []}, "at least one term"),
        ({"kind": "composite", "op": "any", "terms": []}, "at least one term"),
        ({"kind": "composite", "op": "xor", "terms": []}, "Invalid enum value 'xor'"),
        (nested(9), "deeper than 8"),
        (nested(20_000), "spec"),
        ({"kind": "composite", "op": "any", "terms": [{"kind": "happening_match"}] * (LEAF_COUNT_MAX + 1)}, "leaves"),
        ({"kind": "happening_match", "filter": {"variant": ["x"]}}, "filter"),
        ({"kind": "happening_match", "window_ms": 0}, "window_ms"),
        ({"kind": "other"}, "kind"),
        (STATE | {"predicate": {"kind": "regex", "field": "n", "pattern": "a("}}, "missing )"),
        (STATE | {"predicate": {"kind": "regex", "field": "n", "pattern": "(?=a)"}}, "is no pattern"),
        (STATE | {"predicate": {"kind": "regex", "field": "n", "pattern": "a" * 1001}}, "pattern"),
        (STATE | {"predicate": {"kind": "regex", "field": "n", "pattern": "(a{1000}){1000}"}}, "is no pattern"),
        (STATE | {"predicate": {"kind": "in_range", "field": "n", "lower": 2, "upper": 2}}, "nothing is between"),
        (STATE | {"predicate": {"kind": "hysteresis", "field": "n", "lower": 3, "upper": 2}}, "is above upper"),
        (STATE | {"predicate": {"kind": "greater_than", "field": "n", "value": "80"}}, "value"),
        (STATE | {"predicate": {"kind": "less_than", "field": "n", "value": float("nan")}}, "value"),
        (STATE | {"predicate": {"kind": "less_than", "field": "", "value": 1}}, "field"),
        (STATE | {"minimum_duration_ms": -1, "predicate": {"kind": "equals", "field": "n", "value": 1}}, "minimum"),
        (STATE | {"predicate": {"kind": "equals", "field": "n", "value": "x" * 70_000}}, "bytes of JSON"),
        (STATE | {"predicate": {"kind": "equals", "field": "n", "value": object()}}, "spec"),
    ],
)
def test_what_cannot_be_watched_is_refused(condition: dict[str, Any], problem: str) -> None:
    """A condition that is malformed, too deep or too large, or whose pattern is none, is refused when it is given."""
    with pytest.raises(BadSpec) as refused:
        watch_spec({"watch_id": "w", "condition": condition})

    assert problem in str(refused.value)
    assert refused.value.subclass == "bad_spec"


def test_eight_levels_are_allowed() -> None:
    """The bound on depth is where it is said to be."""
    assert watch_spec({"watch_id": "w", "condition": nested(8)}).watch_id == "w"


def test_no_pattern_takes_long() -> None:
    """A pattern that a backtracking engine would try for years on a text of this length is answered at once."""
    tree = Tree(SubjectState(canonical_id="s1", predicate=Regex(field="n", pattern="(a|aa)+$")))
    started = time.monotonic()

    assert truths(tree, changed({"n": "a" * 100_000 + "b"})) == [False]
    assert time.monotonic() - started < 5
