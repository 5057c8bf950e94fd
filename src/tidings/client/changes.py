"""Changes as they happen, for whoever listens: bounded for each listener, and honest about what was dropped."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque

from .values import Change, ChangesMissed

__all__ = ["ChangeFeed", "Changes"]


class Changes:
    """
    One listener's changes, an async iterator. It listens from the moment it is made, and ends when the client closes.

    A listener that is too slow loses the oldest changes and gets a ``ChangesMissed`` in their place.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._waiting: deque[Change] = deque()
        self._missed_count = 0
        self._is_over = False
        self._arrived: asyncio.Future[None] | None = None

    def __aiter__(self) -> Changes:
        return self

    async def __anext__(self) -> Change:
        while True:
            if self._missed_count:
                missed, self._missed_count = self._missed_count, 0
                return ChangesMissed(missed)
            if self._waiting:
                return self._waiting.popleft()
            if self._is_over:
                raise StopAsyncIteration
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived

    def put(self, change: Change) -> None:
        """Tell the listener."""
        if len(self._waiting) == self._count_max:
            self._waiting.popleft()
            self._missed_count += 1
        self._waiting.append(change)
        self._wake()

    def end(self) -> None:
        """Tell the listener that there is no more."""
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


class ChangeFeed:
    """All listeners of one client. One that nobody holds any more is forgotten."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._listeners: weakref.WeakSet[Changes] = weakref.WeakSet()

    def listen(self) -> Changes:
        """A new listener."""
        changes = Changes(self._count_max)
        self._listeners.add(changes)
        return changes

    def tell(self, change: Change) -> None:
        """Tell all of them."""
        for listener in self._listeners:
            listener.put(change)

    def end(self) -> None:
        """End all of them."""
        for listener in self._listeners:
            listener.end()
