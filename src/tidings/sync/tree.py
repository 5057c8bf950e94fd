"""
The tree profile's state and its strict rules, on plain values.

A partition's state is an object. A target is a dotted path into it; the target of a tree action holds ``items`` (by id) and
``tree`` (``[{"id", "children"}]``). ``State.check`` finds a reason why an event cannot be applied before anything changes, so that
``State.apply`` cannot fail half-way. Folding a log applies what passes its check and leaves the rest, as every client does.

The order of a tree's items is kept as a ``Forest`` and written out when somebody wants to see it: a change costs what it
changes, not what there is. A bound on depth is the server's, asked by ``State.levels`` when something is submitted; what was
committed before there was one is applied all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from tidings.core.validation import explain

from .forest import HEIGHT_MAX, ROOT, Broken, Forest
from .requests import ItemError

__all__ = ["HEIGHT_MAX", "ROOT", "Change", "State", "parse_change"]

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


class State:
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

    def copy(self) -> State:
        """The same state once more."""
        return State(_copied(self._data, Forest.copy))

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
    def from_rows(cls, data: Json, trees: list[tuple[list[str], list[Any]]]) -> State:
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
