"""
Publishing: middleware, back-pressure, and the append to the log.

Publishers wait while the window of a live group is full, and while the disk is. One that finds neither passes without waiting: it
looks at each live group, and then lets as many events pass unchecked as it found room for. A list is stored as many events at once
as the windows take, in order.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from tidings.core.clock import Clock, within
from tidings.core.errors import TidingsError
from tidings.core.events import Event
from tidings.core.names import check_topic
from tidings.log.errors import LogClosed, LogFenced, StorageFull
from tidings.log.interface import Appended, Authorise, Duplicate, Log, Refused, Verdict

from .errors import BusClosed, PublishTimeout
from .feed import TopicFeed
from .group import Group
from .handlers import is_in_handler
from .middleware import MetricsMiddleware, MiddlewareChain, MiddlewareError, PublishContext
from .settings import BusSettings

logger = logging.getLogger(__name__)

_STORAGE_FULL_WAIT_S: Final = 0.1
_LIST_COUNT_MAX: Final = 1024
"""Of a longer list this many events are looked at together, however little of it fits into a window."""
_UNCHECKED_MAX: Final = 64
"""Events that pass before the groups are looked at again: others may write to the log too, and they are not counted here."""


Hold = Callable[[Event], Awaitable[Appended | Duplicate]]
"""Stores an event that is to be published later."""


class _FullWindow(NamedTuple):
    """A group whose window was full at every look so far."""

    progress: int
    moved_at: float
    """When an event was last seen to leave it."""
    full_at: float
    """When it was first seen full."""


class TopicWindow:
    """How many events the live groups of a topic have room for, and who waits to publish there."""

    __slots__ = (
        "_counted_for",
        "_is_closed",
        "_unchecked",
        "_unchecked_until_bytes",
        "_watching",
        "end",
        "feed",
        "publishing",
        "waiting",
    )

    def __init__(self, feed: TopicFeed) -> None:
        self.feed = feed
        self.end = feed.position
        """One past the last offset that a publisher was answered with."""
        self.publishing = 0
        """Events on their way to the log."""
        self.waiting: list[asyncio.Future[None]] = []
        self._is_closed = False
        """The bus closes: nobody will make room any more."""
        self._unchecked = self._unchecked_until_bytes = 0
        self._counted_for: tuple[Group, ...] = ()
        self._watching: asyncio.Task[None] | None = None
        """While windows are full that somebody has waited for."""

    def has_room(self) -> bool:
        """Whether one more event fits into every live group's window; if so, that room is reserved for it."""
        feed = self.feed
        live = feed.live
        if self._unchecked <= 0 or live is not self._counted_for or feed.delivered_bytes > self._unchecked_until_bytes:
            room = self.room_for(_UNCHECKED_MAX)
            if room <= 0:
                return False
            self._unchecked, self._counted_for = room, live
            smallest = min((group.settings.max_inflight_bytes for group in live), default=0)
            self._unchecked_until_bytes = feed.delivered_bytes + smallest // 8
        self._unchecked -= 1
        return True

    def room_for(self, count: int) -> int:
        """How many of so many more events fit into every live group's window."""
        return max(0, self._least_room(count)[1])

    def check_again(self) -> None:
        """Something has changed that counting does not see: a group was paused or resumed."""
        self._unchecked = 0

    def _room(self, group: Group) -> int:
        """The room in a group's window, counting what is on its way to it."""
        return group.room_for_new - (self.end - group.position + self.publishing)

    def _least_room(self, wanted: int) -> tuple[Group | None, int]:
        """The live group with the least room, if that is less than wanted, and that room."""
        least, least_room = None, wanted
        for group in self.feed.live:
            if not group.is_paused:
                room = self._room(group)
                if room <= 0:
                    return group, room
                if room < least_room:
                    least, least_room = group, room
        return least, least_room

    async def wait(self, name: str, clock: Clock, timeout_s: float | None) -> float | None:
        """
        Wait until no live group's window is full. A group that lets no event out of a full window is not live for long.

        Returns:
            What is left of the time.

        Raises:
            PublishTimeout: One stayed full for too long.
            BusClosed: The bus was closed meanwhile.
        """
        started = clock.monotonic() if timeout_s is not None else 0.0
        while (least := self._least_room(1))[1] <= 0:
            group = least[0]
            assert group is not None
            if self._is_closed:
                raise BusClosed
            group.is_change_wanted = True
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._watch(clock), name=f"windows {name}")
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(waiter)
            try:
                if timeout_s is None:
                    await waiter
                    continue
                left_s = timeout_s - (clock.monotonic() - started)
                if not await within(clock, max(0.0, left_s), waiter):
                    raise PublishTimeout(name, group.name, timeout_s)
                waiter.result()
            finally:
                if waiter in self.waiting:  # else whoever woke it has taken it out
                    self.waiting.remove(waiter)
        self.check_again()  # whoever has waited uses room that was not counted
        return None if timeout_s is None else timeout_s - (clock.monotonic() - started)

    async def _watch(self, clock: Clock) -> None:
        """Take groups off the live feed whose window is full and stays so for too long: without an event that leaves it, or at all."""
        since: dict[Group, _FullWindow] = {}
        while full := [group for group in self.feed.live if not group.is_paused and self._room(group) <= 0]:
            now = clock.monotonic()
            last, since = since, {group: _FullWindow(group.progress, now, now) for group in full}
            for group, before in last.items():
                if group not in since:
                    continue
                moved_at = before.moved_at if before.progress == group.progress else now
                since[group] = _FullWindow(group.progress, moved_at, before.full_at)
                timeout_s = group.settings.full_timeout_s
                is_slow = timeout_s is not None and now - before.full_at >= timeout_s
                if is_slow or now - moved_at >= group.settings.stall_timeout_s:
                    self.feed.fall_behind(group)
            self.check_again()
            self.wake_publishers()
            await clock.sleep(min(group.settings.stall_timeout_s for group in full) / 8)
        self.wake_publishers()

    def stop_watching(self) -> None:
        """Nobody publishes here any more."""
        if self._watching is not None:
            self._watching.cancel()

    def wake_publishers(self) -> None:
        """There may be room: those who wait check again."""
        waiting, self.waiting = self.waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """The bus closes: those who wait, or would wait from now on, get ``BusClosed``."""
        self._is_closed = True
        self.stop_watching()
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_exception(BusClosed())


class _Reservation:
    """
    Room for events that are published together, in the windows of their topics that have subscriptions.

    As a context manager: while it holds, the events count as on their way. The windows are those of the moment in which it was
    made: a topic may lose its last group meanwhile, and get another window.
    """

    __slots__ = ("_counts", "_names", "_windows")

    def __init__(self, windows: dict[str, TopicWindow], events: Sequence[Event]) -> None:
        self._names = names = [event.meta.topic for event in events]
        try:
            known = windows.keys() & set(names)
        except TypeError:  # something that is no name is among them: the log will say so
            self._names = names = [name if isinstance(name, str) else "" for name in names]
            known = windows.keys() & set(names)
        self._windows = {name: windows[name] for name in known}
        self._counts = {name: names.count(name) for name in known}

    def fitting(self) -> int:
        """How many of the events, from the first on, fit into all live groups' windows now."""
        room = {name: self._windows[name].room_for(count) - count for name, count in self._counts.items()}
        short = sum(left < 0 for left in room.values())
        at = len(self._names)
        while short:  # some topics have too little room: leave out the last events until they have not
            at -= 1
            name = self._names[at]
            if name in room:
                room[name] += 1
                short -= room[name] == 0
        return at

    def __enter__(self) -> None:
        for name, window in self._windows.items():
            window.publishing += self._counts[name]
            window.check_again()

    def __exit__(self, *exc: object) -> None:
        for name, window in self._windows.items():
            window.publishing -= self._counts[name]

    def stored(self, verdicts: Sequence[Verdict]) -> None:
        """Count what was stored; the publisher is about to be answered."""
        left = dict(self._windows)
        for name, verdict in zip(reversed(self._names), reversed(verdicts), strict=True):
            if not left:
                return
            if name in left and isinstance(verdict, Appended):  # offsets grow: the last one is the highest
                window = left.pop(name)
                window.end = max(window.end, verdict.offset + 1)


class _Allowed(NamedTuple):
    """An event of a list that no middleware refused, with what its hooks share, and the context that they run in."""

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


class Publishing:
    """
    The part of a running bus that stores events.

    Args:
        log: Where to.
        chain, metrics: The middlewares, and those of them that count.
        clock, settings: What time it is, and how long to wait where nothing else is said.
    """

    def __init__(
        self,
        log: Log,
        *,
        chain: MiddlewareChain,
        metrics: Sequence[MetricsMiddleware],
        clock: Clock,
        settings: BusSettings,
    ) -> None:
        self._log = log
        self._chain = chain
        self._metrics = metrics
        self._clock = clock
        self._timeout_s = settings.publish_timeout_s
        self._storage_full_timeout_s = settings.storage_full_timeout_s
        self._is_storage_full = False
        self._is_closed = False
        self.windows: dict[str, TopicWindow] = {}
        """By topic; only those that have groups here."""
        self.count = 0
        """Events stored so far."""

    def close(self) -> None:
        """Refuse what comes from now on, and those who wait."""
        self._is_closed = True
        for window in self.windows.values():
            window.close()

    # One event

    async def publish_in_chain(
        self,
        event: Event,
        timeout_s: float | None,
        authorise: Authorise | None,
        hold: Hold | None = None,
    ) -> Appended | Duplicate:
        """Store an event, with its hooks; see ``EventBus.publish``."""
        topic = event.meta.topic
        if topic.__class__ is not str or topic not in self.windows:  # else it is known to be a name
            topic = check_topic(topic)
        context = PublishContext(event, topic, clock=self._clock)
        try:
            if (rest := self._chain.run_before_publish(context)) is not None:
                await rest
            verdict = await (self.store(context.event, timeout_s, authorise) if hold is None else hold(context.event))
        except Exception as error:
            await self._run_after(context, error)
            raise
        try:
            rest = self._chain.run_after_publish(context, verdict)
        except MiddlewareError as error:
            self._log_after(context, error)
            return verdict
        if rest is not None:
            await self._await_after(context, rest)
        return verdict

    async def _run_before(self, context: PublishContext) -> None:
        if (rest := self._chain.run_before_publish(context)) is not None:
            await rest

    async def _run_after(self, context: PublishContext, verdict: Verdict | Exception) -> None:
        try:
            rest = self._chain.run_after_publish(context, verdict)
        except MiddlewareError as error:
            self._log_after(context, error)
            return
        if rest is not None:
            await self._await_after(context, rest)

    async def _await_after(self, context: PublishContext, rest: Awaitable[None]) -> None:
        try:
            await rest
        except MiddlewareError as error:
            self._log_after(context, error)

    def _log_after(self, context: PublishContext, error: MiddlewareError) -> None:
        # What is committed stays committed: this must not look like a failed publish.
        logger.error("after a publish to %s: %s", context.topic, error)

    async def store(self, event: Event, timeout_s: float | None, authorise: Authorise | None) -> Appended | Duplicate:
        """Store an event, as soon as the windows and the disk have room for it."""
        if self._is_closed:
            raise BusClosed
        try:
            window = self.windows.get(event.meta.topic)
        except TypeError:  # no name at all: the log will say so
            window = None
        left_s = self._timeout_s if timeout_s is None else timeout_s
        if window is not None:
            if not window.has_room() and not is_in_handler():
                left_s = await window.wait(event.meta.topic, self._clock, left_s)
            window.publishing += 1
        try:
            appended = await self._log.append(event, authorise)
        except StorageFull as error:
            appended = await self._append_when_there_is_space(event, error, left_s, authorise)
        finally:
            if window is not None:
                window.publishing -= 1
        if window is not None and appended.offset >= window.end:
            window.end = appended.offset + 1
        if self._is_storage_full:
            self._set_storage_full(False)
        self.count += 1
        return appended

    async def _append_when_there_is_space(
        self, event: Event, error: StorageFull, left_s: float | None, authorise: Authorise | None
    ) -> Appended | Duplicate:
        """A full disk is back-pressure: wait for space, and say so."""
        self._set_storage_full(True)
        logger.error("%s: publishers wait", error)
        clock, started = self._clock, self._clock.monotonic()
        limit_s = min((each for each in (left_s, self._storage_full_timeout_s) if each is not None), default=None)
        left_s = limit_s
        while left_s is None or left_s > 0:
            await clock.sleep(_STORAGE_FULL_WAIT_S if left_s is None else min(_STORAGE_FULL_WAIT_S, left_s))
            if self._is_closed:
                raise BusClosed
            try:
                return await self._log.append(event, authorise=authorise)
            except StorageFull:
                left_s = None if limit_s is None else limit_s - (clock.monotonic() - started)
        raise error

    def _set_storage_full(self, is_full: bool) -> None:
        self._is_storage_full = is_full
        for metrics in self._metrics:
            metrics.set_storage_full(is_full)

    # Lists

    async def publish_many(
        self, events: Sequence[Event], timeout_s: float | None, authorise: Authorise | None = None
    ) -> list[Verdict]:
        """Store events in order, with their hooks; see ``EventBus.publish_many``."""
        verdicts: list[Verdict] = []
        if not self._chain.publish_hooks:
            await self._store_many(events, timeout_s, authorise, verdicts)
            return verdicts
        asked = [await self._ask(event) for event in events]
        allowed = [each for each in asked if isinstance(each, _Allowed)]
        try:
            await self._store_many([each.context.event for each in allowed], timeout_s, authorise, verdicts)
        except Exception as error:
            for each in allowed[len(verdicts) :]:
                await each.run(self._run_after(each.context, error))
            raise
        finally:
            for each, verdict in zip(allowed, verdicts, strict=False):
                outcome = verdict.error if isinstance(verdict, Refused) else verdict
                await each.run(self._run_after(each.context, outcome))
        stored = iter(verdicts)
        return [next(stored) if isinstance(each, _Allowed) else each for each in asked]

    async def _ask(self, event: Event) -> _Allowed | Refused:
        """Run the hooks before one event of a list."""
        try:
            context = PublishContext(event, check_topic(event.meta.topic), clock=self._clock)
        except TidingsError as error:
            return Refused(error)
        allowed = _Allowed(context, contextvars.copy_context())
        try:
            await allowed.run(self._run_before(context))
        except TidingsError as error:
            await allowed.run(self._run_after(context, error))
            return Refused(error)
        return allowed

    async def _store_many(
        self,
        events: Sequence[Event],
        timeout_s: float | None,
        authorise: Authorise | None,
        verdicts: list[Verdict],
    ) -> None:
        """Store events in order; their verdicts are in the list as far as it comes."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        started = self._clock.monotonic()

        def left_s() -> float | None:
            return None if limit_s is None else max(0.0, limit_s - (self._clock.monotonic() - started))

        count_max = len(events)
        while len(verdicts) < len(events):
            left = events[len(verdicts) : len(verdicts) + count_max]
            reservation = _Reservation(self.windows, left)
            count = len(left) if is_in_handler() else reservation.fitting()
            if count < len(left):
                count_max = _LIST_COUNT_MAX
            if count == 0:
                name = left[0].meta.topic
                await self.windows[name].wait(name, self._clock, left_s())
                continue
            if count < len(left):
                left = left[:count]
                reservation = _Reservation(self.windows, left)
            if self._is_closed:
                raise BusClosed
            try:
                verdicts += await self._append(left, reservation, authorise)
            except StorageFull:
                # Those that were stored have their ids by now, and are found to be there. In order, so one by one.
                for event in left:
                    verdicts.append(await self._verdict(event, left_s(), authorise))

    async def store_at_once(self, events: Sequence[Event], authorise: Authorise | None = None) -> Sequence[Verdict]:
        """
        Store events, without hooks and without waiting for a window: a slow group must not hold up what others wait for.

        Raises:
            StorageFull: There was no room.
        """
        return await self._append(events, _Reservation(self.windows, events), authorise)

    async def _append(
        self, events: Sequence[Event], reservation: _Reservation, authorise: Authorise | None
    ) -> list[Verdict]:
        with reservation:
            stored = await self._log.append_many(events, authorise=authorise)
        reservation.stored(stored)
        if self._is_storage_full:
            self._set_storage_full(False)
        self.count += len(stored) - list(map(type, stored)).count(Refused)
        return stored

    async def _verdict(self, event: Event, timeout_s: float | None, authorise: Authorise | None) -> Verdict:
        try:
            return await self.store(event, timeout_s, authorise)
        except (StorageFull, PublishTimeout, BusClosed, LogClosed, LogFenced):
            raise
        except TidingsError as error:
            return Refused(error)
