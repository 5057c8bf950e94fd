"""
Publishing by the list: as many events at once as the windows of their topics' groups take, in order.

What stands around a publish is asked for each event in turn before any of them is stored, and told of each afterwards.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from tidings.core.clock import Clock
from tidings.core.errors import TidingsError
from tidings.core.events import Event
from tidings.core.names import check_topic
from tidings.log.errors import LogClosed, LogFenced, StorageFull
from tidings.log.interface import Appended, Duplicate, Log, Refused, Verdict

from .back_pressure import LIST_COUNT_MAX, Coming, TopicTraffic
from .errors import BusClosed, PublishTimeout
from .middleware import MiddlewareChain, PublishContext
from .worker import is_in_handler

__all__ = ["ListPublishing"]

Store = Callable[[Log, Event, float | None], Awaitable[Appended | Duplicate]]
TellAfter = Callable[[PublishContext, Verdict | Exception], Awaitable[None]]


class _Asked(NamedTuple):
    """An event that nobody refused, with what its hooks share, and the context that they run in."""

    context: PublishContext
    own: contextvars.Context

    async def run(self, hooks: Awaitable[object]) -> None:
        """
        Run hooks as if the event were published alone: what a middleware opens for one (a span, say) does not enclose the
        others.
        """

        async def job() -> None:
            await hooks

        await asyncio.create_task(job(), context=self.own)


class ListPublishing:
    """
    The part of a bus that stores lists.

    Args:
        topics: The topics that have groups.
        chain, tell_after: What stands around a publish, and how it is told afterwards.
        store: Stores one event, waiting for windows and for room on the disk.
        on_stored: Told how many were stored.
        is_running: Whether the bus takes events.
        clock, timeout_s: What time it is, and how long to wait for a window where nothing else is said.
    """

    def __init__(
        self,
        *,
        topics: Mapping[str, TopicTraffic],
        chain: MiddlewareChain,
        tell_after: TellAfter,
        store: Store,
        on_stored: Callable[[int], None],
        is_running: Callable[[], bool],
        clock: Clock,
        timeout_s: float | None,
    ) -> None:
        self._topics = topics
        self._chain = chain
        self._tell_after = tell_after
        self._store = store
        self._on_stored = on_stored
        self._is_running = is_running
        self._clock = clock
        self._timeout_s = timeout_s

    async def publish(self, log: Log, events: Sequence[Event], timeout_s: float | None) -> list[Verdict]:
        """Store events in order, with all that stands around that; see ``EventBus.publish_many``."""
        if self._chain.publish_hooks:
            return await self._publish_in_chain(log, events, timeout_s)
        verdicts: list[Verdict] = []
        await self._store_many(log, events, timeout_s, verdicts)
        return verdicts

    async def _publish_in_chain(self, log: Log, events: Sequence[Event], timeout_s: float | None) -> list[Verdict]:
        asked = [await self._ask(event) for event in events]
        passing = [each for each in asked if isinstance(each, _Asked)]
        stored: list[Verdict] = []
        try:
            await self._store_many(log, [each.context.event for each in passing], timeout_s, stored)
        except Exception as error:
            for each in passing[len(stored) :]:
                await each.run(self._tell_after(each.context, error))
            raise
        finally:
            for each, verdict in zip(passing, stored, strict=False):
                told = verdict.error if isinstance(verdict, Refused) else verdict
                await each.run(self._tell_after(each.context, told))
        each_stored = iter(stored)
        return [next(each_stored) if isinstance(each, _Asked) else each for each in asked]

    async def _ask(self, event: Event) -> _Asked | Refused:
        try:
            context = PublishContext(event, check_topic(event.meta.topic), clock=self._clock)
        except TidingsError as error:
            return Refused(error)
        asked = _Asked(context, contextvars.copy_context())
        try:
            await asked.run(self._before_publish(context))
        except TidingsError as error:
            await asked.run(self._tell_after(context, error))
            return Refused(error)
        return asked

    async def _before_publish(self, context: PublishContext) -> None:
        if (rest := self._chain.run_before_publish(context)) is not None:
            await rest

    async def _store_many(
        self, log: Log, events: Sequence[Event], timeout_s: float | None, verdicts: list[Verdict]
    ) -> None:
        """Store events in order; their verdicts are in the list as far as it comes."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        started = self._clock.monotonic()

        def left_s() -> float | None:
            return None if limit_s is None else max(0.0, limit_s - (self._clock.monotonic() - started))

        looked_at = len(events)
        while len(verdicts) < len(events):
            left = events[len(verdicts) : len(verdicts) + looked_at]
            coming = Coming(self._topics, left)
            count = len(left) if is_in_handler() else coming.fitting()
            if count < len(left):
                looked_at = LIST_COUNT_MAX
            if count == 0:
                name = left[0].meta.topic
                await self._topics[name].wait_for_windows(name, self._clock, left_s())
                continue
            if count < len(left):
                left = left[:count]
                coming = Coming(self._topics, left)
            if not self._is_running():
                raise BusClosed
            try:
                with coming:
                    stored = await log.append_many(left)
            except StorageFull:
                # Those that were stored have their ids by now, and are found to be there. In order, so one by one.
                for event in left:
                    verdicts.append(await self._store_one(log, event, left_s()))  # noqa: PERF401 - as far as it comes
                continue
            coming.note(stored)
            self._on_stored(len(stored) - list(map(type, stored)).count(Refused))
            verdicts += stored

    async def _store_one(self, log: Log, event: Event, timeout_s: float | None) -> Verdict:
        try:
            return await self._store(log, event, timeout_s)
        except (StorageFull, PublishTimeout, BusClosed, LogClosed, LogFenced):
            raise
        except TidingsError as error:
            return Refused(error)
