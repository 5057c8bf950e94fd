"""
What a killed node leaves behind of a shared group: which events its own handlers were at, and no others.

A group that the bus runs by itself notes every event that a handler has, in a file, so that a handler that ends the process is
counted. The handlers of a shared group are mostly elsewhere: an event that waits for a member, or is with one at the other end of a
connection, cannot have ended this process, and is not counted if the node is killed. What a local member is at is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from tidings.bus.store import Claims
from tidings.bus.store.files import FileClaims, claims_file
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.layout import Layout
from tidings.log.embedded.reserve import Reserve

__all__ = ["GroupClaims", "SharedClaims"]


class SharedClaims:
    """Makes the claims of a bus's groups, shared or not; pass it as ``FileStore(claims=...)``."""

    def __init__(self, workspace: Path) -> None:
        layout = Layout(workspace)
        self._folder = layout.claims
        self._reserve = Reserve(OsDisk(), layout.reserve)
        self.shared: dict[tuple[str, str], GroupClaims] = {}

    def __call__(self, topic: str, group: str) -> Claims:
        shared = self.shared.get((topic, group))
        return shared if shared is not None else FileClaims(self._path(topic, group), self._reserve)

    def share(self, topic: str, group: str) -> None:
        """The group is about to be subscribed for members."""
        self.shared[topic, group] = GroupClaims(FileClaims(self._path(topic, group), self._reserve))

    def unshare(self, topic: str, group: str) -> None:
        """It no longer is."""
        self.shared.pop((topic, group), None)

    def _path(self, topic: str, group: str) -> Path:
        return claims_file(self._folder, topic, group)


class GroupClaims:
    """The claims of one shared group: kept in memory, and in the file where a local handler is at work."""

    def __init__(self, file: FileClaims) -> None:
        self._file = file
        self._at: dict[int, tuple[int, int]] = {}
        self._slots: dict[int, int] = {}
        self._exposed: set[int] = set()

    def take(self, slot: int, offset: int, attempt: int) -> None:
        self.clear(slot)
        self._at[offset] = (slot, attempt)
        self._slots[slot] = offset

    def taker(self, slot: int) -> Callable[[int, int], object]:
        return functools.partial(self.take, slot)

    def expose(self, offset: int) -> None:
        """A handler of this process is about to get the event."""
        if (found := self._at.get(offset)) is not None:
            slot, attempt = found
            self._exposed.add(slot)
            self._file.take(slot, offset, attempt)

    def clear(self, slot: int) -> None:
        offset = self._slots.pop(slot, None)
        if offset is not None:
            self._at.pop(offset, None)
        if slot in self._exposed:
            self._exposed.discard(slot)
            self._file.clear(slot)

    def left_over(self) -> dict[int, int]:
        return self._file.left_over()

    def begin(self, slots: int) -> None:
        self._file.begin(slots)

    def close(self) -> None:
        self._file.close()
