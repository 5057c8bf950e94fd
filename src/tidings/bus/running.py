"""
A started bus: its log, its store, and the groups that run on them.

A topic that has groups has one feed, made with its first group and closed after its last.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from tidings.core.clock import Clock, within
from tidings.log.encryption import Encryptor
from tidings.log.interface import Health, Log
from tidings.log.keys import NoSealingKey

from .admin import GroupAdmin
from .cursors import CursorSaver, bounds
from .delayed import DelayedEvents
from .delayed_records import AuthoriseDelayed
from .errors import BusClosed, DrainTimeout, SubscriptionExists
from .feed import TopicFeed
from .group import Group
from .handlers import Handler
from .members import Member
from .middleware import MetricsMiddleware, MiddlewareChain
from .pipeline import DeliveryPipeline
from .publishing import Publishing, TopicWindow
from .redrive import DeadLetterQueue
from .retry import record_at
from .settings import BusSettings, TopicPolicy
from .store import DeadLetter, GroupStore
from .subscription import Subscription, SubscriptionRegistry
from .worker import Worker

logger = logging.getLogger(__name__)


_T = TypeVar("_T")


class RunningBus:
    """
    What one bus runs between ``start`` and ``close``.

    Args:
        log, store: Where events are, and the groups' offsets, dead letters and claims.
        settings, chain, metrics: How the bus behaves, its middlewares, and those of them that count.
        registry: The subscriptions.
        clock, rng: Replaceable for tests.
        encryptor: Knows which spaces are encrypted: errors about their events are not logged in full.
        authorise_delayed: Checks delayed events when they are due.
    """

    def __init__(
        self,
        log: Log,
        store: GroupStore,
        *,
        settings: BusSettings,
        chain: MiddlewareChain,
        metrics: Sequence[MetricsMiddleware],
        registry: SubscriptionRegistry,
        clock: Clock,
        rng: random.Random,
        encryptor: Encryptor | None = None,
        authorise_delayed: AuthoriseDelayed | None = None,
    ) -> None:
        self.log = log
        self.store = store
        self.registry = registry
        self.settings = settings
        self.publishing = Publishing(log, chain=chain, metrics=metrics, clock=clock, settings=settings)
        self.cursors = CursorSaver(log, store, clock, settings)
        self.dead_letters = DeadLetterQueue(log, store, clock, self._count_dead_letter)
        self.delayed = DelayedEvents(
            log,
            store,
            self.publishing.store_at_once,
            clock,
            settings.delayed,
            authorise=authorise_delayed,
            is_shredded=functools.partial(_is_shredded, encryptor),
        )
        self.admin = GroupAdmin(log, store, clock, self)
        self._chain = chain
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._is_encrypted: Callable[[str], bool] = (lambda _: False) if encryptor is None else encryptor.protects
        self._windows = self.publishing.windows
        self._groups: dict[Group, None] = {}
        self._alone = asyncio.Lock()
        self._is_stopped = False
        self._releasing: dict[tuple[str, str], asyncio.Task[Any]] = {}
        """Groups that are being stopped, by topic and name."""
        self._membership_locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._ended_workers: asyncio.Queue[tuple[Group, Worker]] = asyncio.Queue()
        self._replacing = asyncio.create_task(self._replace_workers(), name="replace workers")

    async def _replace_workers(self) -> None:
        """
        Start another worker where one has ended that should not have, for as long as the bus runs.

        A task of its own, so that it ends too when a program ends all its tasks without closing the bus.
        """
        while True:
            group, worker = await self._ended_workers.get()
            group.replace(worker)

    def _worker_ended(self, group: Group, worker: Worker) -> None:
        self._ended_workers.put_nowait((group, worker))

    def _count_dead_letter(self, letter: DeadLetter) -> None:
        for metrics in self._metrics:
            if metrics.enabled and self._chain.flags.is_enabled(metrics.name):
                metrics.observe_dead_letter(letter.topic)

    def find_group(self, topic: str, name: str) -> Group | None:
        """The group, if it runs here."""
        subscription = self.registry.find(topic, name)
        return None if subscription is None else subscription.group_state

    def policy(self, topic: str) -> TopicPolicy:
        """What holds for every group of a topic."""
        topics = self.settings.topics
        return topics.get(topic) or topics.get("*") or TopicPolicy()

    async def start_group(self, subscription: Subscription) -> None:
        """
        Start a subscription's group from its stored position.

        Raises:
            BusClosed: The bus was closed meanwhile.
            CursorDamaged, EpochMismatch, PositionTrimmed, SettingsError: As ``CursorSaver.load`` does.
        """
        log, topic, name, settings = self.log, subscription.topic, subscription.group, subscription.settings
        policy = self.policy(topic)
        claims = self.store.claims(topic, name)
        filters = subscription.filter_chain()  # may refuse the subscription: the group has no position before
        cursor, attempts, is_paused, set_at = await self.cursors.load(topic, name, settings.start, claims)
        if self._is_stopped:
            raise BusClosed
        pipeline = DeliveryPipeline(
            clock=self._clock,
            chain=self._chain,
            filters=filters,
            capabilities=subscription.capabilities,
            expired_is_dead_letter=policy.expired == "dead_letter",
            takes_lists=settings.batch_count_max > 1,
            retries_max=settings.backoff.retries_max,
            topic=topic,
        )
        group = Group(
            topic=topic,
            name=name,
            members=subscription.members,
            pipeline=pipeline,
            settings=settings,
            key_of=subscription.key_of,
            cursor=cursor,
            attempts=attempts,
            claims=claims,
            clock=self._clock,
            rng=self._rng,
            is_encrypted=self._is_encrypted,
            dead_letter=self.dead_letters.add,
            on_change=self.group_changed,
            on_worker_end=self._worker_ended,
            ack_deadline_ms=settings.ack_deadline_ms or policy.ack_deadline_ms,
            priority=policy.priority,
            alone=self._alone,
            read=functools.partial(record_at, log, topic),
        )
        group.set_at = set_at
        if is_paused:
            group.pause()
        subscription.group_state = group
        window = self._windows.get(topic)
        if window is None:
            feed = TopicFeed(log, topic, self.settings.read_ahead_count_max, self._clock)
            window = self._windows[topic] = TopicWindow(feed)
        self._groups[group] = None
        group.start()
        window.feed.attach(group)
        self.dead_letters.redrive(group)

    def group_changed(self, group: Group) -> None:
        """A group is done with an event, was paused or resumed: its position is to be stored, and there may be room."""
        group.is_change_wanted = False
        self.cursors.mark(group)
        window = self._windows.get(group.topic)
        if window is not None:
            window.check_again()
            if window.waiting:
                window.wake_publishers()

    async def stop_group(self, group: Group, timeout_s: float) -> None:
        """Stop one group; its handlers may finish within this time."""
        window = self._windows.get(group.topic)
        if window is None:
            return  # the bus was closed meanwhile, and has stopped it
        window.feed.detach(group)
        window.wake_publishers()
        self.dead_letters.release(group)
        await group.close(timeout_s)
        await self.cursors.release(group)
        self._groups.pop(group, None)
        # Meanwhile others may have come and gone, and the topic may have another window.
        if window.feed.is_idle and self._windows.get(group.topic) is window:
            del self._windows[group.topic]
            window.stop_watching()
            await window.feed.close()

    async def subscribe(self, topic: str, group: str, handler: Handler | None, **options: Any) -> Subscription:
        """Register a subscription and start its group; see ``EventBus.subscribe``."""
        _, subscription = self.registry.register_subscription(topic, handler, group=group, **options)
        await self._start_or_remove(subscription)
        return subscription

    async def start_added(self) -> None:
        """Start the subscriptions that ``EventBus.subscriber`` has added since the bus runs."""
        while added := [each for each in self.registry.list() if each.is_added]:
            for subscription in added:
                subscription.is_added = False
                await self._start_or_remove(subscription)

    async def _start_or_remove(self, subscription: Subscription) -> None:
        try:
            await self.start_group(subscription)
        except BaseException:
            self.registry.remove(subscription.subscription_id)
            raise

    async def unsubscribe(self, subscription: Subscription, timeout_s: float | None = None) -> bool:
        """Stop a subscription; whether it was there. See ``EventBus.unsubscribe``."""
        await self.released(subscription.topic, subscription.group)
        if not self.registry.remove(subscription.subscription_id):
            return False
        group, subscription.group_state = subscription.group_state, None
        if group is not None:
            limit_s = self.settings.close_timeout_s if timeout_s is None else timeout_s
            await self.release(subscription.topic, subscription.group, self.stop_group(group, limit_s))
        return True

    async def join(self, topic: str, group: str, member: Member, **options: Any) -> Member:
        """Add a member to a shared group, which is started for its first one; see ``EventBus.join``."""
        async with self._membership_lock(topic, group):
            await self.released(topic, group)
            subscription = self.registry.find(topic, group)
            if subscription is None:
                if options.get("ack_deadline_ms") is None:
                    options["ack_deadline_ms"] = self.policy(topic).ack_deadline_ms
                subscription = await self.subscribe(topic, group, None, **options)
            elif not subscription.is_shared:
                raise SubscriptionExists(topic, group)
            member.subscription = subscription
            subscription.members.add(member)
        return member

    async def stop_unused(self, subscription: Subscription) -> None:
        """Stop a shared group that has no member any more."""
        async with self._membership_lock(subscription.topic, subscription.group):
            if not subscription.members:
                await self.unsubscribe(subscription)

    def _membership_lock(self, topic: str, group: str) -> asyncio.Lock:
        """Keeps starting a shared group and stopping it apart; there for as long as somebody holds or wants it."""
        return self._membership_locks.setdefault((topic, group), asyncio.Lock())

    async def drain(self, timeout_s: float) -> None:
        """Wait until every group has handled what is committed now; see ``EventBus.drain``."""
        deadline = self._clock.monotonic() + timeout_s
        waiting = [
            (subscription.group_state, bounds(self.log, subscription.topic)[1])
            for subscription in self.registry.list()
            if subscription.group_state is not None
        ]
        for group, end in waiting:
            handled = asyncio.ensure_future(self._handled(group, end))
            try:
                await within(self._clock, max(0.0, deadline - self._clock.monotonic()), handled)
                if not handled.done():
                    behind = {
                        (each.topic, each.name): each.count_behind(until) + self.dead_letters.is_redriving(each)
                        for each, until in waiting
                    }
                    raise DrainTimeout(timeout_s, {key: count for key, count in behind.items() if count})
            finally:
                handled.cancel()

    async def _handled(self, group: Group, end: int) -> None:
        await group.wait_until_handled(end)
        await self.dead_letters.redriven(group)

    def health(self) -> Health:
        """Whether events can be published, and whether they reach their groups."""
        health = self.log.health()
        if health.problem is not None:
            return health
        for name, window in self._windows.items():
            if window.feed.problem is not None:
                return msgspec.structs.replace(health, problem=f"topic {name!r}: {window.feed.problem}")
        for subscription in self.registry.list():
            group = subscription.group_state
            if group is not None and (problem := group.problem) is not None:
                where = f"group {group.name!r} of topic {group.topic!r}"
                return msgspec.structs.replace(health, problem=f"{where}: {problem}")
        return health

    def is_releasing(self, topic: str, group: str) -> bool:
        """Whether a group is being stopped."""
        return (topic, group) in self._releasing

    async def released(self, topic: str, group: str) -> None:
        """Wait until a group that is being stopped has stored its position: it may still finish events."""
        while (releasing := self._releasing.get((topic, group))) is not None:
            await asyncio.wait([releasing])

    async def release(self, topic: str, group: str, work: Coroutine[Any, Any, _T]) -> _T:
        """
        Stop a group and do what follows from that, while others who want the group wait.

        It goes on without a caller that gives up waiting: a group that is stopped by half would neither run nor have its position
        stored.
        """
        key = (topic, group)
        self._releasing[key] = task = asyncio.create_task(work, name=f"{topic}/{group} leaving")
        task.add_done_callback(lambda _: self._releasing.pop(key))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    async def restart_group(self, subscription: Subscription, offset: int) -> None:
        """Stop a subscription's group, set its position, and start it again from there."""
        group, subscription.group_state = subscription.group_state, None
        if group is not None:
            await self.stop_group(group, self.settings.close_timeout_s)
        try:
            is_paused = group is not None and group.is_paused
            await self.admin.move(subscription.topic, subscription.group, offset, is_paused=is_paused)
        finally:  # also from where it was, if the events there were dropped meanwhile
            await self.start_group(subscription)

    async def stop(self, timeout_s: float) -> None:
        """Stop all groups, those too that are being released, and refuse who waits to publish."""
        self._is_stopped = True
        groups = list(self._groups)
        self._replacing.cancel()
        await self.delayed.close()
        self.publishing.close()
        await asyncio.gather(*(window.feed.close() for window in self._windows.values()))
        redrives = self.dead_letters.stop()
        await asyncio.gather(*(group.close(timeout_s) for group in groups), *redrives, return_exceptions=True)
        await self.cursors.stop(groups)  # only now: whatever the handlers have still finished is in it
        self._groups.clear()
        self._windows.clear()
        if self._releasing:  # what is done to a group that has been stopped ends soon
            await asyncio.wait(self._releasing.values())
        for subscription in self.registry.list():
            subscription.group_state = None


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Nobody awaits the task any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed: %s", task.get_name(), error)


def _is_shredded(encryptor: Encryptor | None, space_id: str) -> bool:
    """Return whether the space was protected and has no key any more, as after ``tidings key shred``."""
    if encryptor is None or not encryptor.protects(space_id):
        return False
    try:
        encryptor.seal(space_id, b"", b"")
    except NoSealingKey:
        return True
    return False
