"""
The order of a tree's items: who is below whom, and who comes after whom.

Siblings are linked to each other and every item knows its parent, so that a step costs the same in a small tree and in a large one:
to insert, to move and to find a place take as many steps as there are levels above it, to remove takes as many as there are
items removed. Nothing here calls itself, so a tree of any depth can be held and written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

__all__ = ["HEIGHT_MAX", "ROOT", "Broken", "Forest"]

ROOT: Final = "_root"
"""What stands for the parent of the items at the top."""
HEIGHT_MAX: Final = 128
"""Heights are counted up to here: a bound on depth must be below it."""


class _Node:
    """An item's place. ``height`` counts the levels from here down; ``heights`` how many children have which height."""

    __slots__ = ("after", "before", "first", "height", "heights", "id", "last", "more", "parent")

    def __init__(self, id: str, more: dict[str, Any] | None = None) -> None:
        self.id = id
        self.more = more
        self.parent: _Node | None = None
        self.before: _Node | None = None
        self.after: _Node | None = None
        self.first: _Node | None = None
        self.last: _Node | None = None
        self.height = 1
        self.heights: dict[int, int] | None = None


class Broken:
    """What was set as the order of a tree and is none; kept as it is, with the reason."""

    __slots__ = ("nodes", "problem")

    def __init__(self, nodes: list[Any], problem: str) -> None:
        self.nodes = nodes
        self.problem = problem


class Forest:
    """The places of all items of one tree."""

    __slots__ = ("_nodes", "_root", "item_count")

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._root = _Node(ROOT)
        self.item_count = 0
        """How many of the ids are items; kept by whoever keeps the items."""

    @classmethod
    def of(cls, nodes: list[Any]) -> Forest | Broken:
        """The tree that nested ``{"id", "children"}`` stand for, or what is wrong with them."""
        forest = cls()
        waiting = [(forest._root, node) for node in reversed(nodes)]
        while waiting:
            parent, node = waiting.pop()
            if not isinstance(node, dict) or not isinstance(node.get("children"), list):
                return Broken(nodes, "holds a tree with a broken node")
            id = node.get("id")
            if not isinstance(id, str) or id == ROOT:
                return Broken(nodes, "holds a tree with an id that is no item")
            if id in forest._nodes:
                return Broken(nodes, "holds a tree with an id twice")
            more = {name: value for name, value in node.items() if name not in ("id", "children")}
            placed = forest._nodes[id] = _Node(id, more or None)
            _link(placed, parent, parent.last)
            waiting.extend((placed, child) for child in reversed(node["children"]))
        forest._measure()
        return forest

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[str, str, dict[str, Any] | None]]) -> Forest:
        """The tree that ``rows`` gave."""
        forest = cls()
        for id, parent_id, more in rows:
            parent = forest._at(parent_id)
            node = forest._nodes[id] = _Node(id, more)
            _link(node, parent, parent.last)
        forest._measure()
        return forest

    def _measure(self) -> None:
        """Count all heights at once, for a tree that was just built, parents before children."""
        for node in reversed(self._nodes.values()):
            node.height = _height_above(node.heights or {})
            assert node.parent is not None
            if node.parent.heights is None:
                node.parent.heights = {}
            node.parent.heights[node.height] = node.parent.heights.get(node.height, 0) + 1
        self._root.height = _height_above(self._root.heights or {})

    def rows(self) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
        """Every id with its parent's, parents before children and siblings in order."""
        node = self._root.first
        while node is not None:
            assert node.parent is not None
            yield node.id, node.parent.id, node.more
            node = node.first or _next_up(node)

    def plain(self) -> list[dict[str, Any]]:
        """The tree as nested ``{"id", "children"}``."""
        top: list[dict[str, Any]] = []
        children = {ROOT: top}
        for id, parent, more in self.rows():
            below: list[dict[str, Any]] = []
            children[id] = below
            children[parent].append({"id": id, "children": below, **(more or {})})
        return top

    def copy(self) -> Forest:
        """The same tree once more."""
        forest = Forest.from_rows(self.rows())
        forest.item_count = self.item_count
        return forest

    # Questions

    def __contains__(self, id: object) -> bool:
        return id in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def parent_of(self, id: str) -> str | None:
        """The id of the parent, or ``ROOT``; ``None`` for what is not in the tree."""
        node = self._nodes.get(id)
        return None if node is None or node.parent is None else node.parent.id

    def depth_of(self, id: str) -> int:
        """The level of an item: 1 at the top. 0 for ``ROOT``."""
        depth, node = 0, self._at(id)
        while node.parent is not None:
            depth, node = depth + 1, node.parent
        return depth

    def height_of(self, id: str) -> int:
        """The levels from an item down, itself included, as far as they are counted; of ``ROOT``, the levels of the tree."""
        node = self._at(id)
        return node.height - 1 if node is self._root else node.height

    def is_below(self, id: str, other: str) -> bool:
        """Whether an item is ``other`` or lies below it."""
        node: _Node | None = self._at(id)
        while node is not None and node.id != other:
            node = node.parent
        return node is not None

    # Changes

    def insert(self, id: str, parent: str, place: str, sibling: str) -> None:
        """Put a new id at its place: ``first``, ``last``, or ``before`` or ``after`` a sibling."""
        node = self._nodes[id] = _Node(id)
        self._put(node, parent, place, sibling)

    def move(self, id: str, parent: str, place: str, sibling: str) -> None:
        """Put an id, with all below it, at another place."""
        node = self._nodes[id]
        self._unlink(node)
        self._put(node, parent, place, sibling)

    def remove(self, id: str) -> list[str]:
        """Take out an id and all below it; returns them."""
        top = self._nodes[id]
        self._unlink(top)
        removed: list[str] = []
        waiting = [top]
        while waiting:
            node = waiting.pop()
            del self._nodes[node.id]
            removed.append(node.id)
            child = node.first
            while child is not None:
                waiting.append(child)
                following = child.after
                child.parent = child.before = child.after = None  # no cycles left behind for the collector
                child = following
            node.first = node.last = None
        return removed

    def _put(self, node: _Node, parent_id: str, place: str, sibling: str) -> None:
        parent = self._at(parent_id)
        match place:
            case "first":
                _link(node, parent, None)
            case "last":
                _link(node, parent, parent.last)
            case "after":
                _link(node, parent, self._nodes[sibling])
            case _:
                _link(node, parent, self._nodes[sibling].before)
        _count_heights(parent, None, node.height)

    def _at(self, id: str) -> _Node:
        return self._root if id == ROOT else self._nodes[id]

    def _unlink(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        if node.before is None:
            parent.first = node.after
        else:
            node.before.after = node.after
        if node.after is None:
            parent.last = node.before
        else:
            node.after.before = node.before
        node.parent = node.before = node.after = None
        _count_heights(parent, node.height, None)


def _link(node: _Node, parent: _Node, before: _Node | None) -> None:
    """Put a node below a parent, behind ``before``; heights are not counted."""
    after = parent.first if before is None else before.after
    node.parent, node.before, node.after = parent, before, after
    if before is None:
        parent.first = node
    else:
        before.after = node
    if after is None:
        parent.last = node
    else:
        after.before = node


def _next_up(node: _Node) -> _Node | None:
    """What follows an item and all below it."""
    at: _Node | None = node
    while at is not None:
        if at.after is not None:
            return at.after
        at = at.parent
    return None


def _count_heights(node: _Node | None, old: int | None, new: int | None) -> None:
    """A child's height changed from ``old`` to ``new``; ``None`` is no child. Goes up only as far as that changes anything."""
    while node is not None:
        heights = node.heights
        if heights is None:
            heights = node.heights = {}
        if old is not None:
            heights[old] -= 1
            if not heights[old]:
                del heights[old]
        if new is not None:
            heights[new] = heights.get(new, 0) + 1
        height = _height_above(heights)
        if height == node.height:
            return
        old, new = node.height, height
        node.height = height
        node = node.parent


def _height_above(heights: dict[int, int]) -> int:
    return min(1 + max(heights, default=0), HEIGHT_MAX)
