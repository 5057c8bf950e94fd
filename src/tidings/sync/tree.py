"""
The tree profile's state and its strict rules, on plain values.

A partition's state is an object. A target is a dotted path into it; the target of a tree action holds ``items`` (by id) and
``tree`` (``[{"id", "children"}]``). ``PartitionState.check`` finds a reason why an event cannot be applied before anything changes, so that
``PartitionState.apply`` cannot fail half-way. Folding a log applies what passes its check and leaves the rest, as every client does.

The order of a tree's items is kept as a ``Forest`` and written out on demand: a change costs what it changes, not what there is.
Siblings are linked to each other and every item knows its parent: to insert, to move and to find a place take as many steps as
there are levels above it, to remove takes as many as there are items removed. Nothing here recurses, so a tree of any depth can be
held and written out. A bound on depth is the server's, checked by ``PartitionState.levels`` when something is submitted; what was
committed before there was one is applied all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from tidings.core.validation import explain
from tidings.wire.sync_frames import ItemError

ROOT: Final = "_root"
"""The parent of the items at the top."""
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
        """The tree that nested ``{"id", "children"}`` describe, or what is wrong with them."""
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


Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Path = Annotated[str, msgspec.Meta(pattern=r"^[^.]+(\.[^.]+)*$", max_length=512)]
Json = dict[str, Any]


class _Options(msgspec.Struct, frozen=True, kw_only=True):
    id: Text | UnsetType = UNSET
    parent: Text = ROOT
    position: Any = "first"
    replace: bool = False


class _Payload(msgspec.Struct, frozen=True, kw_only=True):
    target: Path
    value: Any = UNSET
    options: _Options = _Options()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the tree profile whose own fields are in order."""

    type: str
    target: str
    value: Any
    id: str
    """Of the item it concerns; empty for ``set`` and ``unset``."""
    parent: str
    place: str
    """``first``, ``last``, ``after`` or ``before``."""
    sibling: str
    replaces: bool


def parse_change(type: str, payload: Json) -> Change | ItemError:
    """The event as a change, or what is wrong with its fields, whatever the state."""
    try:
        parsed = msgspec.convert(payload, _Payload)
    except msgspec.ValidationError as error:
        problem, path = explain(error)
        return _error(path, problem)
    options, value = parsed.options, parsed.value
    if value is UNSET and type in ("set", "treePush", "treeUpdate"):
        return _error("value", "is required")
    id = "" if options.id is UNSET else options.id
    if type in ("treeDelete", "treeUpdate", "treeMove") and not id:
        return _error("options.id", "is required")
    if type in ("treePush", "treeUpdate") and not isinstance(value, dict):
        return _error("value", "must be an object")
    if type == "treePush":
        given = value.get("id")
        if not isinstance(given, str) or not given or given == ROOT:
            return _error("value.id", "must be a non-empty string")
        id = given
    match options.position:
        case "first" | "last" as place:
            sibling = ""
        case {"after": str(sibling)} if sibling and len(options.position) == 1:
            place = "after"
        case {"before": str(sibling)} if sibling and len(options.position) == 1:
            place = "before"
        case _:
            return _error("options.position", "must be first, last, {after: id} or {before: id}")
    return Change(
        type=type,
        target=parsed.target,
        value=value,
        id=id,
        parent=options.parent,
        place=place,
        sibling=sibling,
        replaces=options.replace,
    )


class PartitionState:
    """
    One partition's state.

    Args:
        data: What to begin with, as plain JSON; it is this state's own from then on.
    """

    __slots__ = ("_data",)

    def __init__(self, data: Json | None = None) -> None:
        self._data = {} if data is None else data

    # Changes

    def check(self, change: Change) -> ItemError | None:
        """Why the change cannot be applied; ``None`` if it can."""
        holder = self._holder(change.target)
        if isinstance(holder, ItemError):
            return holder
        if change.type in ("set", "unset"):
            return _check_set(holder, change) if change.type == "set" else None
        forest = _forest(None if holder is None else holder.get(_leaf(change.target)))
        if isinstance(forest, str):
            return _error("target", forest)
        if change.type == "treePush":
            if change.id in forest:
                return _error("value.id", "is in the tree already")
            return _check_place(forest, change)
        if change.id not in forest:
            return _error("options.id", "is not in the tree")
        if change.type == "treeMove":
            if change.parent in forest and forest.is_below(change.parent, change.id):
                return _error("options.parent", "lies below the item itself")
            if change.sibling == change.id:
                return _error("options.position", "is the item itself")
            return _check_place(forest, change)
        return None

    def levels(self, change: Change) -> int:
        """How deep a change that passed its check would make a tree; 0 if it makes none deeper."""
        holder = self._holder(change.target)
        leaf = _leaf(change.target)
        if change.type == "set":
            nodes = change.value.get("tree") if isinstance(change.value, dict) else None
            nodes = change.value if leaf == "tree" else nodes
            forest = Forest.of(nodes) if isinstance(nodes, list) else None
            return forest.height_of(ROOT) if isinstance(forest, Forest) else 0
        if change.type not in ("treePush", "treeMove"):
            return 0
        found = _forest(holder.get(leaf) if isinstance(holder, dict) else None)
        assert isinstance(found, Forest), "the check has found it"
        above = found.depth_of(change.parent)
        if change.type == "treePush":
            return above + 1
        before = found.parent_of(change.id)
        assert before is not None
        return above + found.height_of(change.id) if above > found.depth_of(before) else 0

    def apply(self, change: Change) -> None:
        """Apply a change that passed its check."""
        leaf = _leaf(change.target)
        if change.type == "unset":
            found = self._holder(change.target)
            if isinstance(found, dict):
                self._note_items(change, functools.partial(found.pop, leaf, None))
            return
        # A state of its own: the same event may be applied to several partitions, which then go different ways.
        value = _copied(change.value, _no_forest)
        if change.type == "set":
            self._note_items(change, lambda: _set(self._made_holder(change.target), leaf, value, change.replaces))
            return
        holder = self._holder(change.target)
        tree = holder.get(leaf) if isinstance(holder, dict) else None
        if tree is None or "items" not in tree or "tree" not in tree:
            self._note_items(change, lambda: self._make_tree(change.target))
            tree = self._made_holder(change.target)[leaf]
        items, forest = tree["items"], tree["tree"]
        match change.type:
            case "treePush":
                items[change.id] = value
                forest.insert(change.id, change.parent, change.place, change.sibling)
                forest.item_count += 1
            case "treeUpdate":
                if change.replaces:
                    items[change.id] = value
                else:
                    _merge(items[change.id], value)
            case "treeDelete":
                for id in forest.remove(change.id):
                    items.pop(id, None)
                    forest.item_count -= 1
            case "treeMove":
                forest.move(change.id, change.parent, change.place, change.sibling)

    def _holder(self, target: str) -> Json | ItemError | None:
        """The object that holds a target's last name; ``None`` if the way there does not exist yet."""
        at: Any = self._data
        for name in target.split(".")[:-1]:
            at = at.get(name)
            if at is None:
                return None
            if not isinstance(at, dict):
                return _error("target", f"leads through {name!r}, which is no object")
        holder: Json = at
        return holder

    def _made_holder(self, target: str) -> Json:
        at = self._data
        for name in target.split(".")[:-1]:
            if at.get(name) is None:
                at[name] = {}
            at = at[name]
        return at

    def _make_tree(self, target: str) -> None:
        holder, leaf = self._made_holder(target), _leaf(target)
        if holder.get(leaf) is None:
            holder[leaf] = {}
        holder[leaf].setdefault("items", {})
        holder[leaf].setdefault("tree", Forest())

    def _note_items(self, change: Change, do: Callable[[], object]) -> None:
        """Carry out what goes by a path, and keep count where it adds or takes away items of a tree on the way."""
        names = change.target.split(".")
        watched: list[tuple[Json, Forest, Iterable[str] | None, int]] = []
        at: Any = self._data
        for place, name in enumerate(names):
            if not isinstance(at, dict):
                break
            forest = at.get("tree")
            if name == "items" and isinstance(forest, Forest):
                ids: Iterable[str] | None = names[place + 1 : place + 2]
                if not ids and change.type not in ("set", "unset"):
                    ids = ("items",)  # a tree in the place of another one's items
                elif not ids:
                    merges = not change.replaces and isinstance(change.value, dict) and isinstance(at.get(name), dict)
                    ids = change.value if merges else None
                watched.append((at, forest, ids, _count_items(at.get("items"), forest, ids)))
            at = at.get(name)
        do()
        for tree, forest, ids, before in watched:
            forest.item_count += _count_items(tree.get("items"), forest, ids) - before

    # As a whole

    def plain(self) -> Json:
        """The state as plain JSON, for others to keep."""
        copied: Json = _copied(self._data, Forest.plain)
        return copied

    def copy(self) -> PartitionState:
        """The same state once more."""
        return PartitionState(_copied(self._data, Forest.copy))

    def to_rows(self) -> tuple[Json, list[tuple[list[str], list[Any]]]]:
        """The state with its trees apart, each with its path, as JSON that nests no deeper than the values in it."""
        trees: list[tuple[list[str], list[Any]]] = []
        waiting: list[tuple[list[str], Json]] = [([], self._data)]
        while waiting:
            path, found = waiting.pop()
            for name, value in found.items():
                if isinstance(value, dict):
                    waiting.append(([*path, name], value))
                elif isinstance(value, Forest):
                    trees.append(([*path, name], list(value.rows())))
        return _copied(self._data, _no_forest), trees

    @classmethod
    def from_rows(cls, data: Json, trees: list[tuple[list[str], list[Any]]]) -> PartitionState:
        """The state that ``to_rows`` gave. Trees within an item of another tree come back with it."""
        for path, rows in trees:
            at = data
            for name in path[:-1]:
                at = at[name]
            forest = at[path[-1]] = Forest.from_rows(rows)
            forest.item_count = _count_items(at.get("items"), forest)
        return cls(data)


def _set(holder: Json, leaf: str, value: Any, replaces: bool) -> None:
    old = holder.get(leaf)
    if not replaces and isinstance(old, dict) and isinstance(value, dict):
        _merge(old, value)
    else:
        holder[leaf] = value


def _merge(old: Json, value: Json) -> None:
    """Put a value's entries over an object's own. If that is a tree and gets other items, they are counted."""
    old.update(value)
    forest = old.get("tree")
    if "items" in value and isinstance(forest, Forest):
        forest.item_count = _count_items(old["items"], forest)


def _check_set(holder: Json | None, change: Change) -> ItemError | None:
    """A tree that is set as a whole must be one, or the next action on it would find a broken one."""
    value, leaf = change.value, _leaf(change.target)
    if not isinstance(value, dict):
        return None
    old = None if change.replaces or holder is None else holder.get(leaf)
    known: Json = old if isinstance(old, dict) else {}
    if not all(name in value or name in known for name in ("items", "tree")):
        return None
    if value.keys().isdisjoint(("items", "tree")):
        found = _forest(known)
        return _error("value", found) if isinstance(found, str) else None
    nodes, items = (value[name] if name in value else known[name] for name in ("tree", "items"))
    if isinstance(nodes, list):
        nodes = Forest.of(nodes)
    if isinstance(nodes, Forest) and isinstance(items, dict) and _count_items(items, nodes) == len(nodes):
        return None
    if isinstance(nodes, Broken):
        return _error("value", nodes.problem)
    is_tree = isinstance(nodes, Forest) and isinstance(items, dict)
    return _error("value", "holds a tree with an id that is no item" if is_tree else "holds no tree")


def _check_place(forest: Forest, change: Change) -> ItemError | None:
    if change.parent != ROOT and change.parent not in forest:
        return _error("options.parent", "is not in the tree")
    if change.sibling and forest.parent_of(change.sibling) != change.parent:
        return _error("options.position", "names no sibling there")
    return None


def _forest(tree: Any) -> Forest | str:
    """The order of a tree's items, or what is wrong with it. No tree yet is an empty one."""
    if tree is None:
        return Forest()
    if not isinstance(tree, dict) or not isinstance(items := tree.get("items", {}), dict):
        return "holds no tree"
    nodes = tree.get("tree")
    if isinstance(nodes, list):
        # Once: from here on it is kept in step with every change.
        nodes = tree["tree"] = Forest.of(nodes)
        if isinstance(nodes, Forest):
            nodes.item_count = _count_items(items, nodes)
    if isinstance(nodes, Broken):
        return nodes.problem
    if not isinstance(nodes, Forest):
        return Forest() if "tree" not in tree else "holds no tree"
    return nodes if nodes.item_count == len(nodes) else "holds a tree with an id that is no item"


def _count_items(items: Any, forest: Forest, ids: Iterable[str] | None = None) -> int:
    """How many ids of a tree, or of these ids, are items of it."""
    if not isinstance(items, dict):
        return 0
    if ids is None:
        ids = items if len(items) < len(forest) else forest
    return sum(id in forest and isinstance(items.get(id), dict) for id in ids)


def _copied(value: Any, of_forest: Callable[[Forest], Any]) -> Any:
    """JSON once more, with each ``Forest`` in it as ``of_forest`` has it."""
    top: list[Any] = [None]
    waiting: list[tuple[Any, Any, Any]] = [(top, 0, value)]
    while waiting:
        target, key, found = waiting.pop()
        if isinstance(found, Broken):
            found = found.nodes
        if isinstance(found, dict):
            made: Any = dict.fromkeys(found)  # keeps the order of the keys
            waiting.extend((made, name, inner) for name, inner in found.items() if isinstance(inner, _DEEP))
            made.update((name, inner) for name, inner in found.items() if not isinstance(inner, _DEEP))
        elif isinstance(found, list):
            made = list(found)
            waiting.extend((made, place, inner) for place, inner in enumerate(found) if isinstance(inner, _DEEP))
        else:
            made = of_forest(found) if isinstance(found, Forest) else found
        target[key] = made
    return top[0]


_DEEP: Final = (dict, list, Forest, Broken)


def _no_forest(forest: Forest) -> None:
    """Where the trees of a state are kept apart, or there are none."""


def _leaf(target: str) -> str:
    return target.rpartition(".")[2]


def _error(field: str, message: str) -> ItemError:
    return ItemError(field=f"event.payload.{field}" if field else "event.payload", message=message)
