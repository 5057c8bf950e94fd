"""
A ready-made view for the tree profile: the state of each partition, folded by the server's own rules.

What the server would reject has no effect here either, so a draft that clashes with what others did meanwhile simply does
not show, and its verdict follows.
"""

from __future__ import annotations

import copy
from typing import Any

from tidings.sync import tree

from .values import LocalEvent
from .view import ViewOf

__all__ = ["tree_view"]

States = dict[str, dict[str, Any]]


def tree_view() -> ViewOf[States]:
    """
    The state of every partition, by its name. A new client begins with the server's states instead of the history.

    An event may name partitions that are not followed; their states hold what was seen of them, which is not all.
    """
    return ViewOf[States](_apply, {}, version="tree", copy=copy.deepcopy, from_server=_from_server)


def _apply(states: States, event: LocalEvent) -> States:
    change = tree.parse_change(event.type, dict(event.payload))
    if not isinstance(change, tree.Change):
        return states
    for partition in event.partitions:
        state = states.setdefault(partition, {})
        if tree.check(state, change) is None:
            tree.apply(state, change)
    return states


def _from_server(states: dict[str, Any]) -> States:
    return states
