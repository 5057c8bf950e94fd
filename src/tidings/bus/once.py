"""
Acting once: a small memory of what a handler has done.

Delivery is at least once, so an event may come again: after a crash, after a deadline, by a re-drive, or because its producer
published the same thing under two ids. ``once`` keeps a handler from doing it twice while the process lives; what must hold
across restarts belongs into the store that the handler writes to, under the same key.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from tidings.core.errors import SettingsError
from tidings.core.events import Event

from .events import Ack
from .handlers import is_async, judged
from .payloads import bind_handler, takes_list


def key_of(event: Event) -> tuple[str, ...]:
    """Return the key of an event, as the log compares them: its idempotency key within its topic and space, or else its id."""
    meta = event.meta
    if meta.idem_key:
        return "idem_key", str.__str__(meta.topic), meta.space_id, meta.idem_key
    return "event_id", meta.event_id


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
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        if key not in self._keys:
            return False
        self._keys.move_to_end(key)
        return True

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Hashable) -> None:
        """Remember a key."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._count_max:
            self._keys.popitem(last=False)

    def discard(self, key: Hashable) -> None:
        """Forget a key."""
        self._keys.pop(key, None)


def once(
    handler: Callable[..., Awaitable[object]],
    memory: KeyMemory | None = None,
    *,
    key_of: Callable[[Event], Hashable] = key_of,
) -> Callable[[Any], Awaitable[object]]:
    """
    A handler that acknowledges at once what the given one has acknowledged before.

    Two events with one key that come at the same time are not both handled: the second waits until the first is
    decided. If that was acknowledged, so is the second; else it is handled itself. What the handler fails on is forgotten, and
    tried again. A handler of lists (``batch_count_max``) gets the events of a list that are new, each key once.

    Args:
        handler: A coroutine function, with parameters as ``subscribe`` takes them.
        memory: What it has done; handlers that do the same thing may share one.
        key_of: The key of an event. By default its idempotency key within its topic and space, or else its id; give another one for a
            memory that several topics share.

    Raises:
        SettingsError: The handler is a plain function.
        InvalidHandler: A parameter asks for something that there is not.
    """
    if not is_async(handler):
        raise SettingsError("handler", "must be a coroutine function: once() awaits what it does")
    bound: Callable[[Any], Any] = handler if takes_list(handler) else bind_handler(handler)
    done = KeyMemory() if memory is None else memory
    at_work: dict[Hashable, asyncio.Future[None]] = {}

    async def handle(given: Any) -> object:
        events: list[Any] = given if isinstance(given, list) else [given]
        keys = [key_of(event) for event in events]
        while waiting := {at_work[key] for key in keys if key not in done and key in at_work}:
            await asyncio.wait(waiting)
        new = {key: event for key, event in zip(reversed(keys), reversed(events), strict=True) if key not in done}
        new = {key: new[key] for key in keys if key in new}  # in their order; of one key the first
        answers: dict[Hashable, object] = {}
        if new:
            decided = asyncio.get_running_loop().create_future()
            at_work.update(dict.fromkeys(new, decided))
            try:
                answer = await bound(list(new.values()) if isinstance(given, list) else given)
                is_each = isinstance(given, list) and isinstance(answer, list) and len(answer) == len(new)
                answers = dict(zip(new, answer, strict=True)) if is_each else dict.fromkeys(new, answer)
                for key, each in answers.items():
                    if isinstance(judged(each), Ack):
                        done.add(key)
            finally:
                for key in new:
                    del at_work[key]
                decided.set_result(None)
        found = [answers.get(key, Ack()) for key in keys]
        return found if isinstance(given, list) else found[0]

    handle.__name__, handle.__qualname__, handle.__doc__ = (
        getattr(handler, "__name__", type(handler).__name__),
        getattr(handler, "__qualname__", type(handler).__qualname__),
        handler.__doc__,
    )
    return handle
