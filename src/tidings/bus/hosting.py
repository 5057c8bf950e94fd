"""
Running subscriptions: from a subscription to a group at work that is fed, and back to a place on the disk.

A topic that has groups has one feed, made with its first group and closed after its last.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from tidings.core.clock import Clock
from tidings.log.interface import Log

from .back_pressure import TopicTraffic
from .claims import Claims
from .cursor_keeper import CursorKeeper
from .errors import BusClosed
from .feed import TopicFeed
from .group import Group
from .middleware import MiddlewareChain
from .pipeline import Pipeline
from .redrives import Redrives
from .settings import BusSettings, TopicPolicy
from .subscription import Subscription
from .waiting_retries import record_at
from .worker import Worker

__all__ = ["GroupHost"]


class GroupHost:
    """
    The groups that one bus runs.

    Args:
        settings, chain: How the bus behaves, and what stands around its handlers.
        cursors, redrives, claims: Where a group's place is kept, its dead letters, and what it is at.
        clock, rng: The world.
    """

    def __init__(
        self,
        *,
        settings: BusSettings,
        chain: MiddlewareChain,
        cursors: CursorKeeper,
        redrives: Redrives,
        claims: Callable[[str, str], Claims],
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._chain = chain
        self._cursors = cursors
        self._redrives = redrives
        self._claims = claims
        self._clock = clock
        self._rng = rng
        self._alone = asyncio.Lock()
        self._is_stopped = False
        self._groups: dict[Group, None] = {}
        self._ended_workers: asyncio.Queue[tuple[Group, Worker]] = asyncio.Queue()
        self._replacing: asyncio.Task[None] | None = None
        self.topics: dict[str, TopicTraffic] = {}
        """The topics that have groups here. The same mapping for good: who publishes holds on to it."""

    def start(self) -> None:
        """Take groups in."""
        self._is_stopped = False
        self._replacing = asyncio.create_task(self._replace_workers(), name="replace workers")

    async def _replace_workers(self) -> None:
        """
        Start another worker where one has ended that was not told to, for as long as the bus runs.

        A task of its own, so that it ends too when a program ends all its tasks without closing the bus.
        """
        while True:
            group, worker = await self._ended_workers.get()
            group.replace(worker)

    async def run(self, log: Log, subscription: Subscription) -> None:
        """
        Take a subscription's group up from where it stands, and start to feed it.

        Raises:
            BusClosed: The bus was closed meanwhile.
            CursorDamaged, EpochMismatch, PositionTrimmed, SettingsError: As ``CursorKeeper.take_up`` does.
        """
        topic, name, settings = subscription.topic, subscription.group, subscription.settings
        policy = self._policy(topic)
        claims = self._claims(topic, name)
        filters = subscription.filter_chain()  # may refuse the subscription: the group has no place before
        cursor, attempts, is_paused = await self._cursors.take_up(topic, name, settings.start, claims)
        if self._is_stopped:
            raise BusClosed
        pipeline = Pipeline(
            subscription.handler,
            clock=self._clock,
            chain=self._chain,
            filters=filters,
            capabilities=subscription.capabilities,
            expired_is_dead_letter=policy.expired == "dead_letter",
            takes_lists=settings.batch_count_max > 1,
            retries_max=settings.backoff.retries_max,
            name=f"tidings-{topic}-{name}",
            threads_count_max=settings.workers,
        )
        group = Group(
            topic=topic,
            name=name,
            pipeline=pipeline,
            settings=settings,
            key_of=subscription.key_of,
            cursor=cursor,
            attempts=attempts,
            claims=claims,
            clock=self._clock,
            rng=self._rng,
            bury=self._redrives.bury,
            on_change=self.changed,
            on_worker_end=lambda group, worker: self._ended_workers.put_nowait((group, worker)),
            ack_deadline_ms=settings.ack_deadline_ms or policy.ack_deadline_ms,
            priority=policy.priority,
            alone=self._alone,
            read=lambda offset: record_at(log, topic, offset),
        )
        if is_paused:
            group.pause()
        subscription.group_state = group
        known = self.topics.get(topic)
        if known is None:
            known = self.topics[topic] = TopicTraffic(TopicFeed(log, topic, self._settings.read_ahead_count_max))
        self._groups[group] = None
        group.start()
        known.feed.attach(group)
        self._redrives.spawn(group)

    def _policy(self, topic: str) -> TopicPolicy:
        topics = self._settings.topics
        return topics.get(topic) or topics.get("*") or TopicPolicy()

    def changed(self, group: Group) -> None:
        """A group is through with an event, or was told to stand still: its place is to be stored, and there may be room."""
        group.is_change_wanted = False
        self._cursors.mark(group)
        topic = self.topics.get(group.topic)
        if topic is not None:
            topic.look_again()
            if topic.waiting:
                topic.wake_publishers()

    async def let_go(self, group: Group, timeout_s: float) -> None:
        """Stop one group; its handlers may finish within this time."""
        topic = self.topics.get(group.topic)
        if topic is None:
            return  # the bus was closed meanwhile, and has stopped it
        topic.feed.detach(group)
        topic.wake_publishers()
        self._redrives.let_go(group)
        await group.close(timeout_s)
        await self._cursors.let_go(group)
        self._groups.pop(group, None)
        # While that took its time, others may have come and gone, and the topic may have been begun anew.
        if topic.feed.is_idle and self.topics.get(group.topic) is topic:
            del self.topics[group.topic]
            topic.stop_watching()
            await topic.feed.close()

    async def stop(self, timeout_s: float) -> None:
        """Stop all groups, those too that are being let go, and turn away who waits to publish."""
        self._is_stopped = True
        groups = list(self._groups)
        if self._replacing is not None:
            self._replacing.cancel()
        for topic in self.topics.values():
            topic.turn_publishers_away()
        await asyncio.gather(*(topic.feed.close() for topic in self.topics.values()))
        redrives = self._redrives.stop()
        await asyncio.gather(*(group.close(timeout_s) for group in groups), *redrives, return_exceptions=True)
        await self._cursors.stop(groups)  # only now: whatever the handlers have still finished is in it
        self._groups.clear()
        self.topics.clear()
