"""
The bus: publish to the log, deliver to durable groups.

    bus = Bus("./workspace")

    @bus.subscriber("orders", group="billing", max_retries=5)
    async def bill(order: Order) -> None: ...

    await bus.publish("orders", {"number": "o-1"}, type="ORDER_PLACED", space="shared:shop")
    await bus.run()

``Bus``, as ``tidings`` exports it, is ``EventBus``. Starting is implicit. Every event is on disk before ``publish`` returns, and
before any group sees it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from threading import get_ident
from typing import Any, TypeVar, Unpack, overload

from tidings.access.audit import Audit
from tidings.core.errors import InvalidEvent, InvalidTimestamp, SettingsError, TidingsError
from tidings.core.events import Capability, Event
from tidings.core.names import check_topic, check_topic_and_group
from tidings.log.interface import Appended, Authorise, Duplicate, Query, Refused, Verdict
from tidings.log.reading import records
from tidings.log.retention import RetentionPlan

from .cursors import bounds
from .delayed_records import DelayedEvent, PublisherIdentity, due_ns_of
from .errors import InvalidHandler, TopicMismatch, UnknownGroup
from .events import ReceivedEvent
from .handlers import Handler
from .life import BusLife
from .members import LocalMember, Member
from .payloads import EnvelopeOptions, as_payload, bind_handler, checked_events, event_of, is_payload_type
from .publishing import Hold
from .running import RunningBus
from .settings import SubscriptionSettings, check_timeout
from .store import DeadLetter, DeadLetterFilter, DeadLetterState, GroupPosition, Reason
from .store.dead_letters import OPEN
from .subscription import SharedGroupOptions, Subscription, SubscriptionOptions, settings_of

_H = TypeVar("_H", bound=Handler)


class EventBus(BusLife):
    """
    Publishing and durable subscriptions for one workspace.

    Args:
        middlewares: What runs around publishing and handling. A path in this place is the workspace: ``Bus("./workspace")``.
        workspace: Where the log is. A relative path is resolved when the bus is made.
        settings: How the bus behaves.
        log_settings: How its log behaves.
        registry: Subscriptions to start with the bus.
        log: A log to use instead of opening the workspace's; it is not closed with the bus.
        store: Where groups are stored, with ``log``; files in the workspace if left out.
        open_log: Opens log and store at each start, instead of those in the workspace; the bus closes the log.
        clock, rng: Replaceable for tests.
        encryptor: Seals payloads at rest; with ``log``, the one that the log has.
        flags: Switches middlewares on and off by name, also while the bus runs.
        offsets_key: Seals the groups' offset files, so that an edit by other hands is noticed.
        authorise_delayed: Called with each delayed event when it is due; if it raises,
            the event is not published and the topic ``audit`` has the refusal; after a retryable error it is called again.
    """

    # Publishing

    @overload
    async def publish(
        self,
        event: Event,
        topic: str | None = None,
        *,
        delay: timedelta | None = None,
        at: datetime | None = None,
        timeout_s: float | None = None,
        authorise: Authorise | None = None,
        publisher: PublisherIdentity | None = None,
    ) -> Appended | Duplicate: ...

    @overload
    async def publish(
        self,
        event: str,
        topic: object,
        *,
        type: str | None = None,
        space: str,
        delay: timedelta | None = None,
        at: datetime | None = None,
        timeout_s: float | None = None,
        authorise: Authorise | None = None,
        **meta: Unpack[EnvelopeOptions],
    ) -> Appended | Duplicate: ...

    async def publish(self, event: Event | str, topic: object = None, **options: Any) -> Appended | Duplicate:
        """
        Store an event; returns when it is durable. Two forms::

            await bus.publish(Event(EventMeta("orders", "ORDER_PLACED", "shared:shop"), {"number": "o-1"}))
            await bus.publish("orders", {"number": "o-1"}, type="ORDER_PLACED", space="shared:shop")

        The payload is a mapping that JSON can hold, or a dataclass, msgspec Struct or pydantic model. Further fields of
        the envelope (``idem_key=...``) are keywords of the second form. Type may be left out if the topic is an ``EventType``.

        Waits while a live subscription of the topic has its window full, and while the disk is. ``timeout_s`` (else the
        setting ``publish_timeout_s``) limits both waits together; without either it waits for as long as it takes. ``authorise`` is
        called when the log accepts the event, after all waiting: see ``Log.append``. ``publisher`` is stored with a delayed event, for
        ``authorise_delayed``.

        With ``delay`` or ``at`` the event is stored now and published then, once, also if the process ends in between; hooks and
        ``authorise`` are asked now. The answer has the event's id, for ``cancel_delayed``, and the place of the record of topic
        ``schedule`` that holds it. What is due already is published at once.

        Raises:
            InvalidEvent, IdConflict: It cannot be stored; or the delay is negative, or the time has no zone.
            TopicMismatch: An event was given with a topic that is not its own.
            TooManyDelayed: As many delayed events wait as may.
            PublishTimeout: A window stayed full for too long; the event was not stored.
            StorageFull: The disk stayed full for too long; the event was not stored.
        """
        running, loop = self._running, self._loop
        if running is None or loop is None or get_ident() != self._thread_id or not loop.is_running():
            if self._client is not None:
                return await self._client.publish(event, topic, **options)
            running = await self._started()
        timeout_s = authorise = hold = None
        if options or topic is not None or not isinstance(event, Event) or event.payload.__class__ is not dict:
            event, timeout_s, authorise, hold = self._publish_options(running, event, topic, **options)
        chain = self._chain
        if hold is not None or (chain.middlewares and chain.publish_hooks):
            return await running.publishing.publish_in_chain(event, timeout_s, authorise, hold)
        return await running.publishing.store(event, timeout_s, authorise)

    def _publish_options(
        self,
        running: RunningBus,
        event: Event | str,
        topic: object,
        /,
        *,
        type: str | None = None,
        space: str | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
        timeout_s: float | None = None,
        authorise: Authorise | None = None,
        publisher: PublisherIdentity | None = None,
        **meta: Unpack[EnvelopeOptions],
    ) -> tuple[Event, float | None, Authorise | None, Hold | None]:
        """What ``publish`` is given beside a plain event: the event to store, and how."""
        if not isinstance(event, Event):
            event = event_of(event, topic, type, space, meta)
        elif type is not None or space is not None or meta:
            raise InvalidEvent("event", "is given with fields of the envelope, which it has itself")
        elif topic is not None and topic != event.meta.topic:
            raise TopicMismatch(_shown(topic), _shown(event.meta.topic))
        elif event.payload.__class__ is not dict and is_payload_type(event.payload.__class__):
            event = Event(event.meta, as_payload(event.payload))
        check_timeout(timeout_s)
        due_ns = None if delay is None and at is None else due_ns_of(self._clock, delay, at)
        if due_ns is None:
            return event, timeout_s, authorise, None
        hold = functools.partial(running.delayed.hold, due_ns=due_ns, authorise=authorise, publisher=publisher)
        return event, timeout_s, authorise, hold

    async def cancel_delayed(self, event_id: str, *, authorise: Authorise | None = None) -> bool:
        """
        Have a delayed event not published; whether it was still waiting. Then it never is, whatever happens.

        ``authorise`` is called with the event, if it waits; what it raises is raised, and the event stays.
        """
        if self._client is not None:
            return await self._client.cancel_delayed(event_id)
        return await (await self._started()).delayed.cancel(event_id, authorise)

    async def cancel_delayed_of(self, subject: str, *, dry_run: bool = False, audit: Audit | None = None) -> int:
        """
        Cancel all delayed events that a publisher submitted through a node. ``audit`` is the caller's.

        Returns:
            The number of events cancelled (with ``dry_run``: waiting).
        """
        running = await self._started()
        count = running.delayed.count_of(subject)
        if dry_run or not count:
            return count
        details = {"subject": subject, "count": count}
        async with (audit or Audit()).of(running.log, "delayed.cancel", details):
            return await running.delayed.cancel_of(subject)

    async def delayed_events(self, after: int = -1, *, subject: str | None = None) -> AsyncIterator[DelayedEvent]:
        """
        The events that wait for their time, in the order in which they were given; with ``after``, those behind this ``offset``; with
        ``subject``, those of one publisher.
        """
        async for event in (await self._started()).delayed.waiting(after, subject):
            yield event

    def delayed_count_of(self, subject: str) -> int:
        """The number of events that wait for a publisher; the bus must have been started."""
        return self._started_now.delayed.count_of(subject)

    async def publish_many(
        self, events: Sequence[Event], *, timeout_s: float | None = None, authorise: Authorise | None = None
    ) -> list[Verdict]:
        """
        Store events in order; one verdict each. A refused one does not keep the others from being stored.

        Waits as ``publish`` does, for all of them together no longer than ``timeout_s``. Events that fit into all windows are stored
        together, which costs far less than one by one.

        Raises:
            InvalidEvent: Something in the list is no ``Event``; nothing was stored.
            PublishTimeout: A window stayed full for too long; that event and those after it were not stored.
            StorageFull: The disk stayed full for too long; the same.
            BusClosed: The bus was closed meanwhile; the same.
        """
        check_timeout(timeout_s)
        if (client := self._client) is not None:

            async def one(event: Event) -> Verdict:
                try:
                    return await client.publish(event, timeout_s=timeout_s)
                except TidingsError as error:
                    return Refused(error)

            return await asyncio.gather(*map(one, checked_events(events)))
        return await (await self._started()).publishing.publish_many(checked_events(events), timeout_s, authorise)

    # Subscribing

    def subscriber(
        self,
        topic: str,
        *,
        group: str = "default",
        advanced_filters: Sequence[Any] = (),
        capabilities: Iterable[Capability] = (),
        key_of: Callable[[Event], object] | None = None,
        settings: SubscriptionSettings | None = None,
        **options: Unpack[SubscriptionOptions],
    ) -> Callable[[_H], _H]:
        """
        Subscribe the function below; the function itself stays as it is.

            @bus.subscriber("orders", group="billing", max_retries=5)
            async def bill(order: Order) -> None: ...

        Arguments and errors are those of ``subscribe``. The group starts with the bus: by ``run``, ``start``, ``async with`` or the
        first publish. On a bus that runs already, the next ``start`` starts it.
        """
        if callable(topic):
            raise InvalidHandler(topic, "the topic is missing", 'write @bus.subscriber("orders", group="billing")')

        def subscribe(handler: _H) -> _H:
            if not callable(handler):  # a decorator below that returns nothing, say
                problem = f"must be a function or a coroutine function, not {handler.__class__.__name__}"
                raise SettingsError("handler", problem)
            _, subscription = self._registry.register_subscription(
                topic,
                handler,
                group=group,
                advanced_filters=advanced_filters,
                capabilities=tuple(capabilities),
                key_of=key_of,
                settings=settings,
                **options,
            )
            subscription.is_added = self._running is not None
            return handler

        return subscribe

    async def subscribe(
        self,
        topic: str,
        group: str,
        handler: Handler,
        *,
        advanced_filters: Sequence[Any] = (),
        capabilities: Iterable[Capability] = (),
        key_of: Callable[[Event], object] | None = None,
        settings: SubscriptionSettings | None = None,
        **options: Unpack[SubscriptionOptions],
    ) -> Subscription:
        """
        Start handling a topic for a group, from the group's position.

        Args:
            topic, group: Together they name the group; a new one begins at the start of the topic unless told otherwise.
            handler: A function or coroutine function; its parameters say what it gets: the event, its payload as a type of
                yours, and more (see ``payloads``). It is done with an event when it returns ``Ack()`` or nothing; raising, or
                ``Nack()``, means to try again.
            advanced_filters: Only events that pass all of these reach the handler; the others are done with.
            capabilities: What the subscriber may see, for access middleware.
            key_of: The key for ``order="key"``; the space if left out.
            settings, options: All options at once, or singly as keywords: see ``SubscriptionOptions``.

        Raises:
            InvalidName: A name breaks the grammar.
            SubscriptionExists: The group has a subscription on this bus, or members that share it.
            CursorDamaged, EpochMismatch: The group's position cannot be read, or is of another history.
            PositionTrimmed: Events that the group has not seen were dropped; ``seek`` says where to go on.
            SettingsError: An option is unknown or out of its range.
            InvalidHandler: A parameter of the handler asks for something that there is not.
        """
        if handler is None:
            raise SettingsError("handler", "must be a function or a coroutine function, not NoneType")
        topic, group = check_topic_and_group(topic, group)
        running = await self._started()
        await running.released(topic, group)
        return await running.subscribe(
            topic,
            group,
            handler,
            advanced_filters=advanced_filters,
            capabilities=tuple(capabilities),
            key_of=key_of,
            settings=settings,
            **options,
        )

    async def join(
        self,
        topic: str,
        group: str,
        member: Handler | Member,
        *,
        workers: int = 1,
        deliveries_count_max: int = 256,
        **options: Unpack[SharedGroupOptions],
    ) -> Member:
        """
        Become one of those who share a group; each of its events goes to one of them. The group is started for its first member.

        Args:
            topic, group: Together they name the group.
            member: A handler, as for ``subscribe``; or a ``Member``, which may live elsewhere.
            workers: How many events a handler gets at once.
            deliveries_count_max: How many events all members together have at once; and how many that no member may see the
                group looks past.
            options: The group's, from its first member for as long as it has any: see ``SharedGroupOptions``.

        Returns:
            The member, for ``leave``.

        Raises:
            SubscriptionExists: A handler has the group to itself.
            InvalidName, CursorDamaged, EpochMismatch, PositionTrimmed, SettingsError: As ``subscribe`` does.
        """
        topic, group = check_topic_and_group(topic, group)
        if not isinstance(member, Member):
            if not callable(member):
                raise SettingsError("member", f"must be a function or a Member, not {type(member).__name__}")
            workers = settings_of(None, {"workers": workers}).workers
            member = LocalMember(bind_handler(member), workers, f"tidings-{topic}-{group}")
        if "batch_count_max" in options:
            raise SettingsError("batch_count_max", "members of a shared group get one event at a time")
        settings_of(None, options)  # also of a later member, whose options do not hold
        return await (await self._started()).join(topic, group, member, workers=deliveries_count_max, **options)

    async def leave(self, member: Member, timeout_s: float = 10.0) -> None:
        """
        End a membership: the member gets nothing more, and finishes what it is at within the time; the rest goes to others,
        and does not count as tried. The group is stopped after its last member, and keeps its position. Leaving twice is fine.
        """
        subscription = member.subscription
        if subscription is None:
            return
        await member.finish(self._clock, timeout_s)
        subscription.members.remove(member)
        if self._running is not None:
            await self._running.stop_unused(subscription)
        elif not subscription.members:
            self._registry.remove(subscription.subscription_id)

    async def unsubscribe(self, subscription: Subscription | str, timeout_s: float | None = None) -> bool:
        """
        Stop a subscription, given itself or its id; whether it was there. The group keeps its position.

        It is stopped also if the caller gives up waiting.
        """
        check_timeout(timeout_s)
        found = self._registry.get(subscription) if isinstance(subscription, str) else subscription
        if found is None:
            return False
        if self._running is None:
            return self._registry.remove(found.subscription_id)
        return await self._running.unsubscribe(found, timeout_s)

    def get_subscriptions(self, topic: str | None = None) -> list[Subscription]:
        """The subscriptions of this bus."""
        return self._registry.list(topic)

    # Dead letters

    async def dead_letters(
        self,
        topic: str,
        group: str | None = None,
        *,
        states: tuple[DeadLetterState, ...] = OPEN,
        reason: Reason | None = None,
        error_contains: str | None = None,
    ) -> list[DeadLetter]:
        """The events that groups of a topic have given up on: those that fit all that is given, in their order."""
        wanted = DeadLetterFilter(states=states, group=group, reason=reason, error_contains=error_contains)
        return await (await self._started()).store.dead_letters(topic, None, wanted)

    async def dead_letter(self, topic: str, letter_id: str) -> DeadLetter:
        """One dead letter, in whatever state."""
        return await (await self._started()).store.dead_letter(topic, letter_id)

    async def redrive(
        self,
        topic: str,
        ids: Sequence[str] | None = None,
        *,
        group: str | None = None,
        dry_run: bool = False,
        audit: Audit | None = None,
    ) -> list[DeadLetter]:
        """
        Try dead letters again, once: those named, or all (of a group). ``audit`` says who asks for it.

        They go to the group that failed, beside its other work; a group without a subscription gets them when it has one.
        Asking twice is asking once, and what was asked for survives a crash.

        Returns:
            The dead letters that are (with ``dry_run``: would be) tried again.
        """
        admin, wanted = (await self._started()).admin, DeadLetterFilter(group=group)
        return (await admin.redrive(topic, ids, wanted, dry_run=dry_run, audit=audit)).letters

    async def drop_dead_letters(self, topic: str, ids: Sequence[str], *, audit: Audit | None = None) -> None:
        """Give dead letters up for good. ``audit`` says who asks for it."""
        if ids is None:
            raise SettingsError("ids", "must be a list of ids, not None")  # which would be all of them
        await (await self._started()).admin.drop(topic, ids, audit=audit)

    # Reading and administration

    async def replay(
        self,
        topic: str,
        *,
        from_offset: int | None = None,
        to_offset: int | None = None,
        from_time: datetime | None = None,
        to_time: datetime | None = None,
        happened_from: datetime | None = None,
        happened_to: datetime | None = None,
    ) -> AsyncIterator[ReceivedEvent]:
        """
        Read a topic again, in the order of its offsets. No group moves.

        Args:
            topic: Which.
            from_offset, to_offset: Offsets, the first included, the second not.
            from_time, to_time: When the events were written, found without reading what was written earlier.
            happened_from, happened_to: When the events happened, by their ``meta.ts``. An event may have been written at any time
                after, so all of what the other bounds leave is looked at.

        Raises:
            InvalidTimestamp: A time is no ``datetime``, or one of when events happened has no time zone.
            SettingsError: An offset is no whole number.
        """
        log = (await self._started()).log
        for name, offset in (("from_offset", from_offset), ("to_offset", to_offset)):
            if offset is not None and (not isinstance(offset, int) or isinstance(offset, bool)):
                raise SettingsError(name, f"must be a whole number, not {offset!r}")
        times = {"from_time": from_time, "to_time": to_time}
        for name, bound in {**times, "happened_from": happened_from, "happened_to": happened_to}.items():
            if bound is not None and not isinstance(bound, datetime):
                raise InvalidTimestamp(name, f"must be a datetime, not {type(bound).__name__}")
            if bound is not None and name not in times and bound.utcoffset() is None:
                raise InvalidTimestamp(name, f"{bound.isoformat()} has no time zone")
        query = Query(
            topic=check_topic(topic), from_offset=from_offset, to_offset=to_offset, from_time=from_time, to_time=to_time
        )
        async for record in records(log, query):
            if happened_from is not None and record.meta.time < happened_from:
                continue
            if happened_to is not None and record.meta.time >= happened_to:
                continue
            yield ReceivedEvent(record, "", 1)

    async def position_of(self, topic: str, group: str) -> GroupPosition | TidingsError:
        """A group's position, a running one's as it is now, another's as it was last stored; or why it cannot be read."""
        return await (await self._started()).admin.position(topic, group)

    def lag(self, topic: str, group: str) -> int:
        """
        How many events of the topic a running group has not acknowledged.

        Raises:
            UnknownGroup: It does not run on this bus.
        """
        running = self._started_now.find_group(topic, group)
        if running is None:
            raise UnknownGroup(topic, group)
        _, end = bounds(self.log, topic)
        return end - (running.cursor.committed + 1) - running.cursor.early_count

    async def pause(self, topic: str, group: str, *, audit: Audit | None = None) -> None:
        """Deliver nothing more to a group until it is resumed, also after a restart. ``audit`` says who asks for it."""
        await (await self._started()).admin.pause(topic, group, audit=audit)

    async def resume(self, topic: str, group: str, *, audit: Audit | None = None) -> None:
        """Go on delivering to a group. ``audit`` says who asks for it."""
        await (await self._started()).admin.resume(topic, group, audit=audit)

    async def seek(self, topic: str, group: str, offset: int, *, audit: Audit | None = None) -> None:
        """
        Set a group's position: ``offset`` is the next it will get. Its subscription, if it has one, starts again from there,
        after handlers that are at work have finished or were cancelled (``close_timeout_s``); also if the caller gives up waiting.

        ``audit`` says who asks for it.

        Raises:
            UnknownGroup: There is none.
            SettingsError, PositionTrimmed: The topic has no such offset.
        """
        await (await self._started()).admin.seek(topic, group, offset, audit=audit)

    async def delete_group(self, topic: str, group: str, *, audit: Audit | None = None) -> None:
        """
        Forget a group's position. Its events stay in the log, its dead letters are kept. ``audit`` says who asks for it.

        Raises:
            UnknownGroup: There is none.
            SubscriptionExists: It has a subscription; end that first.
        """
        await (await self._started()).admin.delete(topic, group, audit=audit)

    async def compact(
        self,
        *topics: str,
        archived_through: Mapping[str, int] | None = None,
        keep_ids: bool = True,
        dry_run: bool = False,
        audit: Audit | None = None,
    ) -> RetentionPlan:
        """
        Drop the sealed segments that every group of their topic is through with, and that no dead letter needs.

        Args:
            topics: Only these; all of them if none is named.
            archived_through: For each topic the highest offset in the lake, where one is kept: what it lacks stays.
            keep_ids: Go on recognising duplicates of what is dropped. That takes some 300 bytes an event, so that with tiny payloads
                little is gained.
            dry_run: Decide only.
            audit: Who asks for it.

        Returns:
            What went (or would go), and why the rest stays.
        """
        admin = (await self._started()).admin
        return await admin.compact(
            *topics, archived_through=archived_through, keep_ids=keep_ids, dry_run=dry_run, audit=audit
        )

    async def groups(self, topic: str | None = None) -> list[tuple[str, str]]:
        """Topic and name of every group of this workspace, or of those of one topic, sorted."""
        return await (await self._started()).admin.groups(topic)


def _shown(topic: object) -> str:
    """A topic's name; of what is no name, what it is."""
    return str.__str__(topic) if isinstance(topic, str) else repr(topic)
