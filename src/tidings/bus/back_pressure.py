"""
What holds publishers up: a live group whose window is full, and a disk that is.

A publisher that finds neither passes by here without waiting. It looks at each live group, and then lets as many events pass
unseen as it found room for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tidings.core.clock import Clock, within
from tidings.core.events import Event
from tidings.log.errors import StorageFull
from tidings.log.interface import Appended, Duplicate, Log, Verdict

from .errors import BusClosed, PublishTimeout
from .feed import TopicFeed
from .group import Group

__all__ = ["LIST_COUNT_MAX", "Coming", "TopicTraffic", "append_when_there_is_room"]

logger = logging.getLogger(__name__)

_STORAGE_FULL_WAIT_S: Final = 0.1
LIST_COUNT_MAX: Final = 1024
"""Of a longer list this many events are looked at together, however little of it fits into a window."""
_UNSEEN_MAX: Final = 64
"""Events that pass before the groups are looked at again: others may write to the log too, and they are not counted here."""


class TopicTraffic:
    """What goes through a topic that has subscriptions: what is on its way in, and who waits to publish."""

    __slots__ = (
        "_counted_for",
        "_unseen",
        "_unseen_until_bytes",
        "_watching",
        "end",
        "feed",
        "is_closed",
        "publishing",
        "waiting",
    )

    def __init__(self, feed: TopicFeed) -> None:
        self.feed = feed
        self.end = feed.position
        """One past the last offset that a publisher was told."""
        self.publishing = 0
        """Events on their way to the log."""
        self.waiting: list[asyncio.Future[None]] = []
        self.is_closed = False
        """The bus closes: nobody will make room any more."""
        self._unseen = self._unseen_until_bytes = 0
        self._counted_for: tuple[Group, ...] = ()
        self._watching: asyncio.Task[None] | None = None
        """While windows are full that somebody has waited for."""

    def has_room(self) -> bool:
        """Whether one more event fits into every live group's window. It is taken to come."""
        feed = self.feed
        live = feed.live
        if self._unseen <= 0 or live is not self._counted_for or feed.handed_bytes > self._unseen_until_bytes:
            room = self.room_for(_UNSEEN_MAX)
            if room <= 0:
                return False
            self._unseen, self._counted_for = room, live
            smallest = min((group.settings.max_inflight_bytes for group in live), default=0)
            self._unseen_until_bytes = feed.handed_bytes + smallest // 8
        self._unseen -= 1
        return True

    def room_for(self, count: int) -> int:
        """How many of so many more events fit into every live group's window."""
        return max(0, _least_room(self, count)[1])

    def look_again(self) -> None:
        """Something has changed that counting does not see: a group was paused or goes on."""
        self._unseen = 0

    async def wait_for_windows(self, name: str, clock: Clock, timeout_s: float | None) -> None:
        """
        Wait until no live group's window is full. A group that lets no event out of a full window is not live for long.

        Raises:
            PublishTimeout: One stayed full for too long.
            BusClosed: The bus was closed meanwhile.
        """
        started = clock.monotonic() if timeout_s is not None else 0.0
        while (group := _full_group(self)) is not None:
            if self.is_closed:
                raise BusClosed
            group.is_change_wanted = True
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._watch(clock), name=f"windows {name}")
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
                if turn in self.waiting:  # else whoever woke it has taken it out
                    self.waiting.remove(turn)
        self.look_again()  # whoever has waited takes a place that was not counted

    async def _watch(self, clock: Clock) -> None:
        """Take groups off the live feed whose window is full and stays so, without an event that leaves it, for too long."""
        since: dict[Group, tuple[int, float]] = {}
        while full := [group for group in self.feed.live if not group.is_paused and _room(self, group) <= 0]:
            now = clock.monotonic()
            last, since = since, {group: (group.progress, now) for group in full}
            for group, (progress, moment) in last.items():
                if group in since and progress == group.progress:
                    since[group] = (progress, moment)
                    if now - moment >= group.settings.stall_timeout_s:
                        self.feed.put_behind(group)
            self.look_again()
            self.wake_publishers()
            await clock.sleep(min(group.settings.stall_timeout_s for group in full) / 8)
        self.wake_publishers()

    def stop_watching(self) -> None:
        """Nobody publishes here any more."""
        if self._watching is not None:
            self._watching.cancel()

    def wake_publishers(self) -> None:
        """There may be room: those who wait look again."""
        waiting, self.waiting = self.waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)

    def turn_publishers_away(self) -> None:
        """The bus closes: those who wait are told, and those who would wait from now on."""
        self.is_closed = True
        self.stop_watching()
        for turn in self.waiting:
            if not turn.done():
                turn.set_exception(BusClosed())


def _full_group(topic: TopicTraffic) -> Group | None:
    """The first live group whose window is full, counting what is on its way to it."""
    group, room = _least_room(topic, 1)
    return group if room <= 0 else None


def _room(topic: TopicTraffic, group: Group) -> int:
    """The room in a group's window, counting what is on its way to it."""
    return group.room_for_new - (topic.end - group.position + topic.publishing)


def _least_room(topic: TopicTraffic, wanted: int) -> tuple[Group | None, int]:
    """The live group with the least room, if that is less than wanted, and that room."""
    least, least_room = None, wanted
    for group in topic.feed.live:
        if not group.is_paused:
            room = _room(topic, group)
            if room <= 0:
                return group, room
            if room < least_room:
                least, least_room = group, room
    return least, least_room


class Coming:
    """
    Events that are published together, as the topics see them that they go to and that have subscriptions.

    As a context manager: while it holds, the events count as on their way. The topics are those of the moment in which it was
    made: one may lose its last group meanwhile, and be begun anew.
    """

    __slots__ = ("_counts", "_names", "_topics")

    def __init__(self, topics: Mapping[str, TopicTraffic], events: Sequence[Event]) -> None:
        self._names = names = [event.meta.topic for event in events]
        try:
            known = topics.keys() & set(names)
        except TypeError:  # something that is no name is among them: the log will say so
            self._names = names = [name if isinstance(name, str) else "" for name in names]
            known = topics.keys() & set(names)
        self._topics = {name: topics[name] for name in known}
        self._counts = {name: names.count(name) for name in known}

    def fitting(self) -> int:
        """How many of the events, from the first on, fit into all live groups' windows now."""
        room = {name: self._topics[name].room_for(count) - count for name, count in self._counts.items()}
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
        for name, topic in self._topics.items():
            topic.publishing += self._counts[name]
            topic.look_again()

    def __exit__(self, *exc: object) -> None:
        for name, topic in self._topics.items():
            topic.publishing -= self._counts[name]

    def note(self, verdicts: Sequence[Verdict]) -> None:
        """The publisher is about to be told these."""
        left = dict(self._topics)
        for name, verdict in zip(reversed(self._names), reversed(verdicts), strict=True):
            if not left:
                return
            if name in left and isinstance(verdict, Appended):  # offsets grow: the last one is the highest
                topic = left.pop(name)
                topic.end = max(topic.end, verdict.offset + 1)


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
    while timeout_s is None or (left_s := timeout_s - (clock.monotonic() - started)) > 0:
        await clock.sleep(_STORAGE_FULL_WAIT_S if timeout_s is None else min(_STORAGE_FULL_WAIT_S, left_s))
        if not is_running():
            raise BusClosed
        try:
            appended = await log.append(event)
        except StorageFull:
            continue
        tell(False)
        return appended
    raise error
