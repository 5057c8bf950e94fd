"""
Delivering records to groups: from memory to those that keep up, from the log to those that lag.

A topic has one feed, which reads what is committed once and gives the same records to every live group. A group without room
for all of it falls behind and reads for itself, as fast as it can, until it has caught up with the feed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from tidings.core.clock import Clock, within
from tidings.core.tasks import cancel_and_wait
from tidings.log.errors import LogClosed
from tidings.log.interface import Log, Query
from tidings.log.record import Record

from .group import Group

logger = logging.getLogger(__name__)

_LIVE_COUNT_MAX: Final = 512
"""Records that groups which keep up are offered at once: what does not fit into a window makes a group fall behind."""


class TopicFeed:
    """Delivers one topic's records to its groups."""

    def __init__(self, log: Log, topic: str, read_ahead: int, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._topic = topic
        self._read_ahead = read_ahead
        info = log.topic(topic)
        self.position = info.next_offset if info is not None else 0
        """The next offset that the feed will deliver."""
        self.delivered_bytes = 0
        """Of payloads, so far: publishers check the windows again when this has grown by much."""
        self._last_seq = info.last_seq if info is not None else 0
        self.problem: BaseException | None = None
        """Why nothing is delivered any more, if so."""
        self.live: tuple[Group, ...] = ()
        """Replaced whenever a group joins or leaves."""
        self._tasks: dict[Group, asyncio.Task[None]] = {}
        self._task = asyncio.create_task(self._run(), name=f"feed {topic}")

    def attach(self, group: Group) -> None:
        """Start feeding a group from its position: live if it has all that was delivered, else it catches up first."""
        if group.has_room(self._read_ahead) and self._join(group):
            return
        self._tasks[group] = asyncio.create_task(self._catch_up(group), name=f"catch up {self._topic}/{group.name}")

    def detach(self, group: Group) -> None:
        """Stop feeding a group."""
        self._leave(group)
        if (task := self._tasks.pop(group, None)) is not None:
            task.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether nobody is fed."""
        return not self.live and not self._tasks

    async def _run(self) -> None:
        while True:
            try:
                query = Query(topic=self._topic, from_offset=self.position)
                page = await self._log.read(query, limit=min(self._read_ahead, _LIVE_COUNT_MAX))
                if not page.records:
                    await self._log.wait(self._last_seq, self._topic)
                    continue
            except LogClosed:
                return
            except Exception as error:
                self.problem = error
                logger.exception("topic %s cannot be read; nothing is delivered to its groups", self._topic)
                return
            records = page.records
            self.position, self._last_seq = records[-1].offset + 1, records[-1].seq
            size_bytes = sum([len(record.payload_json) for record in records])
            self.delivered_bytes += size_bytes
            for group in self.live:
                if not group.offer(records, size_bytes):
                    self._leave(group)
                    self.attach(group)

    def fall_behind(self, group: Group) -> None:
        """Take a group off the live feed: it reads for itself from now on, until it has caught up."""
        logger.warning(
            "group %s of topic %s: its window stayed full for too long; publishers do not wait for it until it has caught up",
            group.name,
            self._topic,
        )
        group.is_live = False
        group.live_from = self._clock.monotonic() + group.settings.stall_pause_s
        group.is_stalled = True
        self._leave(group)
        self.attach(group)

    def _leave(self, group: Group) -> None:
        if group in self.live:
            self.live = tuple(other for other in self.live if other is not group)

    def _join(self, group: Group) -> bool:
        """Make a group live if it has all that was delivered; nothing is awaited here, so nothing can come in between."""
        if group.position < self.position or self._clock.monotonic() < group.live_from:
            return False
        if group.is_stalled:
            logger.warning("group %s of topic %s has caught up", group.name, self._topic)
        group.is_live, group.is_stalled = True, False
        self.live = (*self.live, group)
        return True

    async def _catch_up(self, group: Group) -> None:
        ahead: list[Record] = []
        """What was read and has found no room yet: a page costs the same whether much or little is in it."""
        try:
            while True:
                await group.wait_for_room(self._read_ahead)
                if self._join(group):
                    self._tasks.pop(group, None)
                    return
                if not ahead:
                    query = Query(topic=self._topic, from_offset=group.position)
                    seen = self._last_seq
                    ahead = (await self._log.read(query, limit=self._read_ahead)).records
                    if not ahead and group.position >= self.position:
                        await self._wait_until_live(group, seen)
                if ahead:
                    await group.wait_until_it_fits(ahead[0])
                    count = group.fitting(ahead)
                    group.take(ahead[:count])
                    del ahead[:count]
        except LogClosed:
            return
        except Exception as error:
            group.feed_problem = error
            logger.exception("group %s of topic %s cannot be fed", group.name, self._topic)

    async def _wait_until_live(self, group: Group, seen: int) -> None:
        """Wait until a group that has caught up may be live again, or the topic has more for it."""
        more = asyncio.ensure_future(self._log.wait(seen, self._topic))
        try:
            if await within(self._clock, max(0.0, group.live_from - self._clock.monotonic()), more):
                more.result()
        finally:
            more.cancel()

    async def close(self) -> None:
        """Stop feeding everybody."""
        tasks = [self._task, *self._tasks.values()]
        await cancel_and_wait(*tasks)
