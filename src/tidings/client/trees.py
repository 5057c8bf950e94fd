"""
A ready-made view for the tree profile: the state of each partition, folded by the server's own rules.

What the server would reject has no effect here either, so a draft that clashes with what others did meanwhile simply does
not show, and its verdict follows.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from tidings.sync import tree

from .values import LocalEvent
from .view import ViewOf

__all__ = ["tree_view"]

States = dict[str, dict[str, Any]]
_Folded = dict[str, tree.PartitionState]


class _Saved(msgspec.Struct):
    """States as they are kept: trees as rows, so that a deep one does not nest deeply."""

    rows: dict[str, tuple[dict[str, Any], list[tuple[list[str], list[Any]]]]]


def tree_view() -> ViewOf[States]:
    """
    The state of every partition, by its name. A new client begins with the server's states instead of the history.

    An event may name partitions that are not followed; their states hold what was seen of them, which is not all.
    """
    view = ViewOf[_Folded](
        _apply,
        {},
        version="tree.2",
        encode=_encode,
        decode=_decode,
        copy=lambda states: {name: state.copy() for name, state in states.items()},
        from_server=lambda states: {name: tree.PartitionState(state) for name, state in states.items()},
        show=lambda states: {name: state.plain() for name, state in states.items()},
    )
    return cast("ViewOf[States]", view)


def _apply(states: _Folded, event: LocalEvent) -> _Folded:
    change = tree.parse_change(event.type, dict(event.payload))
    if not isinstance(change, tree.Change):
        return states
    for partition in event.partitions:
        state = states.setdefault(partition, tree.PartitionState())
        if state.check(change) is None:
            state.apply(change)
    return states


def _encode(states: _Folded) -> bytes:
    return msgspec.json.encode(_Saved({name: state.to_rows() for name, state in states.items()}))


def _decode(data: bytes) -> _Folded:
    saved = msgspec.json.decode(data, type=_Saved)
    return {name: tree.PartitionState.from_rows(*rows) for name, rows in saved.rows.items()}
