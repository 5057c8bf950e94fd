"""
Publish the gate's decision events: each once, in order, however many callers wait.

One caller at a time publishes, everything that waits and not only its own; the others wait for their turn and return without
publishing if their events are out by then. Events that cannot be published now stay first in line. The list of waiting
events is bounded: beyond ``_COUNT_MAX`` the oldest one that is not being published is lost, and counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from tidings.core.errors import InvalidEvent
from tidings.core.events import Event
from tidings.log.interface import Refused, Verdict

from ..ports import MetricSink, Publish

PublishMany: TypeAlias = Callable[[Sequence[Event]], Awaitable[Sequence[Verdict]]]
"""Stores events durably, in order; returns one verdict each, as ``EventBus.publish_many`` does."""

_COUNT_MAX: Final = 1000
_LIST_COUNT_MAX: Final = 256


class _Caller:
    """A caller that waits for the events numbered above ``after`` and up to ``until``."""

    __slots__ = ("after", "error", "until")

    def __init__(self, after: int, until: int) -> None:
        self.after = after
        self.until = until
        self.error: Exception | None = None


class UnpublishedDecisions:
    """
    The decision events that wait to be published.

    Args:
        publish: Stores one event; without it and ``publish_many``, ``flush`` forgets the events.
        publish_many: Stores a list of events. Used instead of ``publish``.
        metrics: Gets ``gate_decisions_unpublished_total``.
    """

    def __init__(self, publish: Publish | None, publish_many: PublishMany | None, metrics: MetricSink) -> None:
        self._publish = publish
        self._publish_many = publish_many
        self._metrics = metrics
        self._waiting: deque[tuple[int, Event]] = deque()
        self._in_flight: list[tuple[int, Event]] = []
        self._turn = asyncio.Lock()
        self._callers: set[_Caller] = set()
        self.added_count = 0
        self.lost_count = 0

    def add(self, event: Event) -> None:
        """Append an event."""
        if len(self._waiting) + len(self._in_flight) >= _COUNT_MAX:
            self._waiting.popleft()
            self._lost()
        self.added_count += 1
        self._waiting.append((self.added_count, event))

    async def flush(self, after: int = 0) -> int:
        """
        Return when the events that wait now are out. Return the number that this call published.

        Args:
            after: ``added_count`` before the caller's own events.

        Raises:
            InvalidEvent: One of the caller's own events can never be stored. It is counted as lost.
            Exception: Whatever else publishing raises; all callers that wait get it, and the events stay.
        """
        caller = _Caller(after, self.added_count)
        if self._is_out(caller.until):
            return 0
        self._callers.add(caller)
        count = 0
        try:
            async with self._turn:
                while caller.error is None and not self._is_out(caller.until):
                    count += await self._publish_next()
        finally:
            self._callers.discard(caller)
        if caller.error is not None:
            raise caller.error
        return count

    def _is_out(self, number: int) -> bool:
        oldest = self._in_flight or self._waiting
        return not oldest or oldest[0][0] > number

    async def _publish_next(self) -> int:
        """Publish the oldest events; return the number that was stored."""
        count_max = 1 if self._publish_many is None else _LIST_COUNT_MAX
        entries = self._in_flight = [self._waiting.popleft() for _ in range(min(count_max, len(self._waiting)))]
        unpublished = entries
        try:
            verdicts = await self._verdicts([event for _, event in entries])
            unpublished = []
            failure: Exception | None = None
            for (number, event), verdict in zip(entries, verdicts, strict=True):
                if not isinstance(verdict, Refused):
                    continue
                if isinstance(verdict.error, InvalidEvent):
                    # The log will never take it (its space has no valid name, say): kept, it would block all others.
                    self._lost()
                    self._fail(verdict.error, number)
                else:
                    unpublished.append((number, event))
                    failure = failure or verdict.error
            if failure is not None:
                self._fail(failure)
            return len(entries) - sum(isinstance(verdict, Refused) for verdict in verdicts)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            # Also if the caller is cancelled: the events may be stored or not, and publishing them again is idempotent.
            self._in_flight = []
            self._waiting.extendleft(reversed(unpublished))

    async def _verdicts(self, events: list[Event]) -> Sequence[Verdict | None]:
        if self._publish_many is not None:
            return await self._publish_many(events)
        (event,) = events
        if self._publish is not None:
            try:
                await self._publish(event)
            except InvalidEvent as error:
                return [Refused(error)]
        return [None]

    def _fail(self, error: Exception, number: int | None = None) -> None:
        """Fail the callers that wait for the event of this number; without a number, all."""
        for caller in self._callers:
            if caller.error is None and (number is None or caller.after < number <= caller.until):
                caller.error = error

    def _lost(self) -> None:
        self.lost_count += 1
        self._metrics("gate_decisions_unpublished_total", 1.0, {})
