"""
What holds publishers up: a live group whose window is full, and a disk that is.

A publisher that finds neither passes by here without waiting; so what it asks of every event is one look at each live group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from tidings.core.clock import Clock, within
from tidings.core.events import Event
from tidings.log.errors import StorageFull
from tidings.log.interface import Appended, Duplicate, Log

from .errors import BusClosed, PublishTimeout
from .feed import TopicFeed
from .group import Group

__all__ = ["TopicTraffic", "append_when_there_is_room", "full_group"]

logger = logging.getLogger(__name__)

_STORAGE_FULL_WAIT_S: Final = 0.1


class TopicTraffic:
    """What goes through a topic that has subscriptions: what is on its way in, and who waits to publish."""

    __slots__ = ("end", "feed", "publishing", "waiting")

    def __init__(self, feed: TopicFeed) -> None:
        self.feed = feed
        self.end = feed.position
        """One past the last offset that a publisher was told."""
        self.publishing = 0
        """Events on their way to the log."""
        self.waiting: list[asyncio.Future[None]] = []

    async def wait_for_windows(self, name: str, clock: Clock, timeout_s: float | None) -> None:
        """
        Wait until no live group's window is full.

        Raises:
            PublishTimeout: One stayed full for too long.
            BusClosed: The bus was closed meanwhile.
        """
        started = clock.monotonic() if timeout_s is not None else 0.0
        while (group := full_group(self)) is not None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(turn)
            try:
                if timeout_s is None:
                    await turn
                    continue
                left_s = timeout_s - (clock.monotonic() - started)
                if not await within(clock, max(0.0, left_s), turn):
                    raise PublishTimeout(name, group.name, timeout_s)
                turn.result()
            finally:
                if not turn.done() or turn.cancelled():  # else whoever woke it has taken it out
                    self.waiting.remove(turn)

    def wake_publishers(self) -> None:
        """There may be room: those who wait look again."""
        waiting, self.waiting = self.waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)

    def turn_publishers_away(self) -> None:
        """The bus closes: those who wait are told."""
        for turn in self.waiting:
            if not turn.done():
                turn.set_exception(BusClosed())


def full_group(topic: TopicTraffic) -> Group | None:
    """The first live group whose window is full, counting what is on its way to it."""
    for group in topic.feed.live:
        if group.is_paused:
            continue
        coming = topic.end - group.position + topic.publishing
        if group.pending + coming >= group.settings.max_inflight:
            return group
    return None


async def append_when_there_is_room(
    log: Log,
    event: Event,
    error: StorageFull,
    *,
    clock: Clock,
    timeout_s: float | None,
    is_running: Callable[[], bool],
    tell: Callable[[bool], None],
) -> Appended | Duplicate:
    """
    A full disk is back-pressure: wait for room, and say so.

    Args:
        log, event, error: What was to be stored, where, and what the log said.
        clock, timeout_s: How long to wait; without a limit, as long as it takes.
        is_running: Whether the bus still takes events.
        tell: Told that the disk is full, and that it no longer is.

    Raises:
        StorageFull: There was no room in time.
        BusClosed: The bus was closed meanwhile.
    """
    tell(True)
    logger.error("%s: publishers wait", error)
    started = clock.monotonic()
    while timeout_s is None or clock.monotonic() - started < timeout_s:
        await clock.sleep(_STORAGE_FULL_WAIT_S)
        if not is_running():
            raise BusClosed
        try:
            appended = await log.append(event)
        except StorageFull:
            continue
        tell(False)
        return appended
    raise error
