"""
Acting once: a small memory of what a handler has done.

Delivery is at least once, so an event may come again: after a crash, after a deadline, by a re-drive, or because its producer
published the same thing under two ids. ``once`` keeps a handler from doing it twice while the process lives; what must hold
across restarts belongs into the store that the handler writes to, under the same key.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from tidings.core.errors import SettingsError
from tidings.core.events import Event

from .events import Ack

__all__ = ["KeyMemory", "key_of", "once"]


def key_of(event: Event) -> str:
    """What an event is known by: its idempotency key, or else its id."""
    return event.meta.idem_key or event.meta.event_id


class KeyMemory:
    """
    The last keys that were added; the one that was asked for longest ago is forgotten first.

    Args:
        count_max: At most so many.

    Raises:
        SettingsError: That is none.
    """

    def __init__(self, count_max: int = 10_000) -> None:
        if count_max < 1:
            raise SettingsError("count_max", f"must be at least 1, not {count_max}")
        self._count_max = count_max
        self._keys: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        if key not in self._keys:
            return False
        self._keys.move_to_end(key)
        return True

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: str) -> None:
        """Remember a key."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._count_max:
            self._keys.popitem(last=False)

    def discard(self, key: str) -> None:
        """Forget a key."""
        self._keys.pop(key, None)


def once(
    handler: Callable[[Any], Awaitable[object]], memory: KeyMemory | None = None
) -> Callable[[Any], Awaitable[object]]:
    """
    A handler that acknowledges without a further look what the given one has acknowledged before.

    Two events with one key that come at the same time are not both handled: the second fails, and comes again when the first is
    decided. What the handler fails on is forgotten, and tried again.

    Args:
        handler: A coroutine function that takes one event.
        memory: What it has done; handlers that do the same thing may share one.
    """
    done = KeyMemory() if memory is None else memory
    at_work: set[str] = set()

    @functools.wraps(handler)
    async def handle(event: Any) -> object:
        key = key_of(event)
        if key in done:
            return Ack()
        if key in at_work:
            raise RuntimeError(f"another event with the key {key!r} is being handled")
        at_work.add(key)
        try:
            answer = await handler(event)
        finally:
            at_work.discard(key)
        if isinstance(answer, Ack):
            done.add(key)
        return answer

    return handle
