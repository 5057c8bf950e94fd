"""A log around another one: everything goes to the inner one, but for what a subclass does itself."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from tidings.core.events import Event

from .interface import Appended, Authorise, Duplicate, Health, Log, Page, Position, Query, TopicInfo, Verdict
from .retention import Holders, RetentionPlan

__all__ = ["LogAround"]


class LogAround:
    """
    A ``Log`` that passes on.

    Args:
        log: To whom.
    """

    def __init__(self, log: Log) -> None:
        self._log = log

    @property
    def position(self) -> Position:
        """See ``Log.position``."""
        return self._log.position

    def append(
        self, event: Event, *, authorise: Authorise | None = None, from_reserve: bool = False
    ) -> Coroutine[Any, Any, Appended | Duplicate]:
        """Store one event. See ``Log.append``."""
        return self._log.append(event, authorise=authorise, from_reserve=from_reserve)

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        """Store events in order. See ``Log.append_many``."""
        return await self._log.append_many(events, authorise=authorise)

    async def read(self, query: Query, *, limit: int = 1000, bytes_max: int = 4 << 20) -> Page:
        """Read one page. See ``Log.read``."""
        return await self._log.read(query, limit=limit, bytes_max=bytes_max)

    async def wait(self, after: int, topic: str | None = None) -> int:
        """Wait for a record above ``after``. See ``Log.wait``."""
        return await self._log.wait(after, topic)

    def topics(self) -> dict[str, TopicInfo]:
        """See ``Log.topics``."""
        return self._log.topics()

    async def drop(self, plan: RetentionPlan, holders: Holders | None = None) -> RetentionPlan:
        """Carry out a retention plan. See ``Log.drop``."""
        return await self._log.drop(plan, holders)

    def health(self) -> Health:
        """See ``Log.health``."""
        return self._log.health()

    async def close(self) -> None:
        """Close the log."""
        await self._log.close()
