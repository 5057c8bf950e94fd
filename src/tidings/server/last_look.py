"""
Asking once more, right before an event is stored.

A publish is looked at when it comes in. Then it may wait: for the full window of a group, for room on the disk. What it was allowed
then may be revoked by now, and its token may have expired. So the bus of a node stands on a ``LookingLog``, which asks again in the
last moment, in the same step in which the log takes the event: whoever lost the right while waiting is refused, and nothing is stored.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

from tidings.core.events import Event
from tidings.log.interface import Appended, Duplicate, Health, Log, Page, Position, Query, TopicInfo, Verdict
from tidings.log.retention import RetentionPlan

__all__ = ["LookingLog", "asked_again"]

_ASK: Final[contextvars.ContextVar[Callable[[Event], None] | None]] = contextvars.ContextVar(
    "tidings_last_look", default=None
)


@contextlib.contextmanager
def asked_again(ask: Callable[[Event], None]) -> Iterator[None]:
    """
    While this holds, whatever is stored one by one from here is asked for first; other tasks are not concerned.

    Args:
        ask: Given the event; raises if it must not be stored after all. What it raises is the publisher's answer.
    """
    token = _ASK.set(ask)
    try:
        yield
    finally:
        _ASK.reset(token)


class LookingLog:
    """
    A log that asks before it takes an event; all else goes to the log itself.

    Args:
        log: The log.
    """

    __slots__ = ("_log",)

    def __init__(self, log: Log) -> None:
        self._log = log

    @property
    def position(self) -> Position:
        """The log's."""
        return self._log.position

    def append(self, event: Event) -> Coroutine[Any, Any, Appended | Duplicate]:
        """Store one event, if nobody objects now. See ``Log.append``."""
        ask = _ASK.get()
        if ask is not None:
            ask(event)
        return self._log.append(event)

    async def append_many(self, events: Sequence[Event]) -> list[Verdict]:
        """Store events in order. See ``Log.append_many``. Nobody waits before this, so nobody is asked again."""
        return await self._log.append_many(events)

    async def read(self, query: Query, *, limit: int = 1000, bytes_max: int = 4 << 20) -> Page:
        """Read one page. See ``Log.read``."""
        return await self._log.read(query, limit=limit, bytes_max=bytes_max)

    async def wait(self, after: int, topic: str | None = None) -> int:
        """Wait for a commit. See ``Log.wait``."""
        return await self._log.wait(after, topic)

    def topics(self) -> dict[str, TopicInfo]:
        """The log's."""
        return self._log.topics()

    async def drop(self, plan: RetentionPlan) -> None:
        """Carry out a retention plan. See ``Log.drop``."""
        await self._log.drop(plan)

    def health(self) -> Health:
        """The log's."""
        return self._log.health()

    async def close(self) -> None:
        """Close the log."""
        await self._log.close()
