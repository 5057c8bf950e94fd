"""The tree profile's rules: what passes its check keeps the tree whole, what does not changes nothing."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidings.sync.tree import ROOT, Change, PartitionState, parse_change

ids = st.sampled_from(["a", "b", "c", "d", "e"])
positions = st.sampled_from(["first", "last"]) | st.builds(
    lambda kind, id: {kind: id}, st.sampled_from(["after", "before"]), ids
)
places = st.fixed_dictionaries({}, optional={"parent": ids | st.just(ROOT), "position": positions})
events = st.one_of(
    st.tuples(st.just("treePush"), st.builds(lambda id, o: {"value": {"id": id}, "options": o}, ids, places)),
    st.tuples(st.just("treeMove"), st.builds(lambda id, o: {"options": o | {"id": id}}, ids, places)),
    st.tuples(st.just("treeDelete"), st.builds(lambda id: {"options": {"id": id}}, ids)),
    st.tuples(
        st.just("treeUpdate"),
        st.builds(
            lambda id, n, r: {"value": {"n": n}, "options": {"id": id, "replace": r}}, ids, st.integers(), st.booleans()
        ),
    ),
)


def order_of(nodes: list[dict[str, Any]]) -> list[Any]:
    return [(node["id"], order_of(node["children"])) for node in nodes]


def all_ids(nodes: list[dict[str, Any]]) -> list[str]:
    return [id for node in nodes for id in (node["id"], *all_ids(node["children"]))]


class Model:
    """The same tree as parents and ordered children, written another way."""

    def __init__(self) -> None:
        self.children: dict[str, list[str]] = {ROOT: []}
        self.items: dict[str, dict[str, Any]] = {}

    def parent_of(self, id: str) -> str:
        return next(parent for parent, below in self.children.items() if id in below)

    def below(self, id: str) -> set[str]:
        return {id}.union(*(self.below(child) for child in self.children[id]))

    def may(self, change: Change) -> bool:
        is_there = change.id in self.items
        if change.type == "treePush":
            return not is_there and self._has_place(change)
        if change.type == "treeMove":
            if not is_there or change.parent in self.below(change.id) or change.sibling == change.id:
                return False
            return self._has_place(change)
        return is_there

    def _has_place(self, change: Change) -> bool:
        siblings = self.children.get(change.parent)
        return siblings is not None and (not change.sibling or change.sibling in siblings)

    def do(self, change: Change) -> None:
        match change.type:
            case "treePush":
                self.items[change.id] = dict(change.value)
                self.children[change.id] = []
                self._put(change)
            case "treeMove":
                self.children[self.parent_of(change.id)].remove(change.id)
                self._put(change)
            case "treeDelete":
                self.children[self.parent_of(change.id)].remove(change.id)
                for id in self.below(change.id):
                    del self.items[id], self.children[id]
            case "treeUpdate":
                old = {} if change.replaces else self.items[change.id]
                self.items[change.id] = old | change.value

    def _put(self, change: Change) -> None:
        siblings = self.children[change.parent]
        at = {"first": 0, "last": len(siblings)}.get(change.place)
        if at is None:
            at = siblings.index(change.sibling) + (change.place == "after")
        siblings.insert(at, change.id)

    def order(self, id: str = ROOT) -> list[Any]:
        return [(child, self.order(child)) for child in self.children[id]]


@given(st.lists(events, max_size=40))
def test_the_tree_is_the_one_a_simple_model_has(steps: list[tuple[str, dict[str, Any]]]) -> None:
    """Same verdicts, same order, same items; every id once, and every id an item."""
    state = PartitionState()
    model = Model()
    for type, payload in steps:
        change = parse_change(type, {"target": "t", **payload})
        assert isinstance(change, Change)
        before = state.plain()

        problem = state.check(change)

        assert state.plain() == before, "checking changes nothing"
        assert (problem is None) == model.may(change)
        if problem is None:
            assert state.levels(change) <= len(model.items) + 1
            state.apply(change)
            model.do(change)
        tree = state.plain().get("t", {"items": {}, "tree": []})
        assert order_of(tree["tree"]) == model.order()
        assert tree["items"] == model.items
        assert sorted(all_ids(tree["tree"])) == sorted(tree["items"])
        assert PartitionState.from_rows(*state.to_rows()).plain() == state.copy().plain() == state.plain()


paths = st.sampled_from(["t", "t.items", "t.tree", "t.items.a", "t.items.b.n", "t.items.a.items.b", "u.v"])
nodes: st.SearchStrategy[list[Any]] = st.recursive(
    st.just([]),
    lambda below: st.lists(st.builds(lambda id, children: {"id": id, "children": children}, ids, below), max_size=3),
    max_leaves=6,
)
values = st.one_of(
    st.none(),
    st.integers(),
    nodes,
    st.dictionaries(ids, st.just({"n": 1}) | st.just(5), max_size=4),
    st.fixed_dictionaries({}, optional={"items": st.dictionaries(ids, st.just({}), max_size=5), "tree": nodes}),
)
by_path = st.one_of(
    st.tuples(
        st.just("set"),
        st.builds(lambda t, v, r: {"target": t, "value": v, "options": {"replace": r}}, paths, values, st.booleans()),
    ),
    st.tuples(st.just("unset"), st.builds(lambda t: {"target": t}, paths)),
)


@given(st.lists(events | by_path, max_size=30))
def test_a_state_that_was_changed_is_like_one_that_was_read(steps: list[tuple[str, dict[str, Any]]]) -> None:
    """Whatever is set and unset in and around a tree: what is kept in step says the same as what is made anew."""
    state = PartitionState()
    for type, payload in steps:
        change = parse_change(type, {"target": "t", **payload})
        assert isinstance(change, Change)
        anew = PartitionState(state.plain())

        assert state.check(change) == anew.check(change)
        if state.check(change) is None:
            assert state.levels(change) == anew.levels(change)
            state.apply(change)
            anew.apply(change)
        assert state.plain() == anew.plain()
