"""
The tree profile's state and its strict rules, on plain values.

A partition's state is an object. A target is a dotted path into it; the target of a tree action holds ``items`` (by id) and
``tree`` (``[{"id", "children"}]``). ``check`` finds a reason why an event cannot be applied before anything changes, so that
``apply`` cannot fail half-way. Folding a log applies what passes its check and leaves the rest, as every client does.
"""

from __future__ import annotations

import copy
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from .requests import ItemError

__all__ = ["ROOT", "Change", "apply", "check", "parse_change"]

ROOT: Final = "_root"

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Path = Annotated[str, msgspec.Meta(pattern=r"^[^.]+(\.[^.]+)*$", max_length=512)]
State = dict[str, Any]
Nodes = list[dict[str, Any]]


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


def parse_change(type: str, payload: dict[str, Any]) -> Change | ItemError:
    """The event as a change, or what is wrong with its fields, whatever the state."""
    try:
        parsed = msgspec.convert(payload, _Payload)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        return _error(path.rstrip("`").removeprefix("."), problem)
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


def check(state: State, change: Change) -> ItemError | None:
    """Why the change cannot be applied to the state; ``None`` if it can."""
    holder = _holder(state, change.target)
    if isinstance(holder, ItemError):
        return holder
    if change.type in ("set", "unset"):
        return _check_set(holder, change) if change.type == "set" else None
    tree = holder.get(_leaf(change.target)) if holder is not None else None
    parents = _parents(tree)
    if isinstance(parents, str):
        return _error("target", parents)
    if change.type == "treePush":
        if change.id in parents:
            return _error("value.id", "is in the tree already")
        return _check_place(parents, change)
    if change.id not in parents:
        return _error("options.id", "is not in the tree")
    if change.type == "treeMove":
        above: str | None = change.parent
        while above is not None:
            if above == change.id:
                return _error("options.parent", "lies below the item itself")
            above = parents.get(above)
        if change.sibling == change.id:
            return _error("options.position", "is the item itself")
        return _check_place(parents, change)
    return None


def apply(state: State, change: Change) -> None:
    """Apply a change that passed its check."""
    leaf = _leaf(change.target)
    if change.type == "unset":
        holder = _holder(state, change.target)
        if isinstance(holder, dict):
            holder.pop(leaf, None)
        return
    holder = _made_holder(state, change.target)
    # A state of its own: the same event may be applied to several partitions, which then go different ways.
    value = copy.deepcopy(change.value)
    if change.type == "set":
        old = holder.get(leaf)
        if not change.replaces and isinstance(old, dict) and isinstance(value, dict):
            value = {**old, **value}
        holder[leaf] = value
        return
    tree = holder.setdefault(leaf, {})
    items, roots = tree.setdefault("items", {}), tree.setdefault("tree", [])
    match change.type:
        case "treePush":
            items[change.id] = value
            _insert(roots, {"id": change.id, "children": []}, change)
        case "treeUpdate":
            items[change.id] = value if change.replaces else {**items[change.id], **value}
        case "treeDelete":
            below = [_taken(roots, change.id)]
            while below:
                node = below.pop()
                items.pop(node["id"], None)
                below.extend(node["children"])
        case "treeMove":
            _insert(roots, _taken(roots, change.id), change)


def _check_set(holder: State | None, change: Change) -> ItemError | None:
    """A tree that is set as a whole must be one, or the next action on it would find a broken one."""
    value, leaf = change.value, _leaf(change.target)
    if not isinstance(value, dict):
        return None
    old = None if change.replaces or holder is None else holder.get(leaf)
    merged = {**old, **value} if isinstance(old, dict) else value
    if "items" not in merged or "tree" not in merged:
        return None
    problem = _parents(merged)
    return _error("value", problem) if isinstance(problem, str) else None


def _check_place(parents: dict[str, str], change: Change) -> ItemError | None:
    if change.parent != ROOT and change.parent not in parents:
        return _error("options.parent", "is not in the tree")
    if change.sibling and parents.get(change.sibling) != change.parent:
        return _error("options.position", "names no sibling there")
    return None


def _holder(state: State, target: str) -> State | ItemError | None:
    """The object that holds a target's last name; ``None`` if the way there does not exist yet."""
    at: Any = state
    for name in target.split(".")[:-1]:
        at = at.get(name)
        if at is None:
            return None
        if not isinstance(at, dict):
            return _error("target", f"leads through {name!r}, which is no object")
    holder: State = at
    return holder


def _made_holder(state: State, target: str) -> State:
    at = state
    for name in target.split(".")[:-1]:
        if at.get(name) is None:
            at[name] = {}
        at = at[name]
    return at


def _leaf(target: str) -> str:
    return target.rpartition(".")[2]


def _parents(tree: Any) -> dict[str, str] | str:
    """The parent of every item of a tree, or what is wrong with the tree. No tree yet is an empty one."""
    if tree is None:
        return {}
    items = tree.get("items", {}) if isinstance(tree, dict) else None
    roots = tree.get("tree", []) if isinstance(tree, dict) else None
    if not isinstance(items, dict) or not isinstance(roots, list):
        return "holds no tree"
    parents: dict[str, str] = {}
    stack: list[tuple[str, list[Any]]] = [(ROOT, roots)]
    while stack:
        parent, nodes = stack.pop()
        for node in nodes:
            if not isinstance(node, dict) or not isinstance(node.get("children"), list):
                return "holds a tree with a broken node"
            id = node.get("id")
            if not isinstance(id, str) or not isinstance(items.get(id), dict):
                return "holds a tree with an id that is no item"
            if id in parents:
                return "holds a tree with an id twice"
            parents[id] = parent
            stack.append((id, node["children"]))
    return parents


def _children(roots: Nodes, parent: str) -> Nodes:
    if parent == ROOT:
        return roots
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node["id"] == parent:
            children: Nodes = node["children"]
            return children
        stack.extend(node["children"])
    raise AssertionError("the check has found it")


def _taken(roots: Nodes, id: str) -> dict[str, Any]:
    stack = [roots]
    while stack:
        nodes = stack.pop()
        for index, node in enumerate(nodes):
            if node["id"] == id:
                return nodes.pop(index)
            stack.append(node["children"])
    raise AssertionError("the check has found it")


def _insert(roots: Nodes, node: dict[str, Any], change: Change) -> None:
    nodes = _children(roots, change.parent)
    match change.place:
        case "first":
            nodes.insert(0, node)
        case "last":
            nodes.append(node)
        case place:
            index = next(at for at, other in enumerate(nodes) if other["id"] == change.sibling)
            nodes.insert(index + (place == "after"), node)


def _error(field: str, message: str) -> ItemError:
    return ItemError(field=f"event.payload.{field}" if field else "event.payload", message=message)
