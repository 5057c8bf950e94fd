"""
The endpoint ``/groups``: members of durable groups, and publishers, in other processes.

A connection says hello with its token, then joins groups and publishes; the frames are those of ``wire.groups``. To the bus a remote member
is one of those who share a group (``EventBus.join``): it is given events up to the number it asked for, and its answers are a handler's.

When the connection is cut, what it had not answered is a failed attempt, as for a handler whose process ended, and goes to other members
at once. When it is closed properly, by the client or by us, what it had not answered is delivered again without being counted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import msgspec
import orjson

from tidings.access.authentication import Authenticator
from tidings.access.book import AccessBook, Capsule
from tidings.access.endpoint import Connection, Endpoint, EndReason, Memory, Peer, Transport
from tidings.access.errors import AccessError, AuthFailed, TokenExpired, TokenRevoked
from tidings.access.resources import Action, group_of, topic
from tidings.bus import events as bus_events
from tidings.bus.eventbus import EventBus
from tidings.bus.events import ReceivedEvent
from tidings.bus.handlers import NotTried
from tidings.bus.members import Member
from tidings.bus.texts import RaisedElsewhere
from tidings.core.clock import Clock, format_utc
from tidings.core.errors import TidingsError
from tidings.core.ids import new_event_id
from tidings.core.names import check_topic_and_group
from tidings.log.interface import Appended
from tidings.log.record import Record
from tidings.wire import groups as wire
from tidings.wire.events import EventDefaults, ItemVerdict, decode_event, error_info, time_of

from .delayed_rights import cancel_delayed, publisher_of
from .errors import InternalError, NodeError, NodeStopping
from .event_rights import may_get_of_topic, publish_right
from .group_rights import GroupCreation, require_membership
from .group_settings import GroupsSettings, options_given, options_in_effect
from .services import Services, refuse_when_full

logger = logging.getLogger(__name__)

_VALUE_BYTES: Final = 64
"""The memory of a decoded value besides its text."""
_CLOSED_IN_ORDER: Final = (None, wire.CLOSE_NORMAL, wire.CLOSE_GOING_AWAY)


class MembershipExists(NodeError):
    """A connection has one membership of that number already."""

    code = "groups.membership_exists"
    text = "this connection has a membership {number} already"
    number: int


class TooManyMemberships(NodeError):
    """A connection has as many memberships as one may have."""

    code = "groups.too_many_memberships"
    hint = "open another connection; the limit is the setting groups.memberships_count_max"
    text = "one connection has at most {count_max} memberships"
    count_max: int


class RemoteMember(Member):
    """One connection's membership of one group. ``slots`` is how many events it takes without having answered."""

    def __init__(
        self, connection: GroupsConnection, capsule: Capsule, number: int, topic_name: str, group: str, slots: int
    ) -> None:
        super().__init__(slots)
        self.number = number
        self.topic = topic_name
        self.group = group
        self.capsule = capsule
        self._connection = connection
        self._topic_resource = topic(topic_name)
        self._resource = group_of(topic_name, group)

    @property
    def room(self) -> int:
        return super().room if self._connection.has_room else 0

    def may_receive(self) -> bool:
        """Neither leaving, nor revoked, nor expired, and still allowed to subscribe."""
        return super().may_receive() and self._connection.is_valid() and self.is_allowed()

    def is_allowed(self) -> bool:
        """Whether topic and group are still allowed; if not, the membership ends."""
        capsule = self.capsule
        if capsule.allows(Action.SUBSCRIBE, self._topic_resource) and capsule.allows(Action.JOIN, self._resource):
            return True
        try:
            require_membership(capsule, self.topic, self.group)
        except AccessError as error:
            self._connection.dismiss(self, error)
        return False

    def may_see(self, record: Record) -> bool:
        """Whether it may have this event of the topic: its space, and its partitions."""
        return may_get_of_topic(self.capsule, Action.SUBSCRIBE, record)

    def reached(self, seq: int) -> Awaitable[None] | None:
        """Rights are as of the access book: it must have seen every record up to the event."""
        return self._connection.groups.reached(seq)

    async def handle(self, event: ReceivedEvent) -> object:
        try:
            delivery = self._connection.deliver(self, event)
        except (TidingsError, TypeError):
            self.release()
            raise
        try:
            answer = await delivery.answer
        except asyncio.CancelledError as error:
            self._connection.withdraw(delivery, str(error))
            raise
        if isinstance(answer, NotTried):
            raise answer
        return answer

    def release(self, *, is_returned: bool = False) -> None:
        super().release(is_returned=is_returned)
        if self.is_leaving and self.taken == 0:
            self._connection.dismiss(self, None)


class _Delivery:
    """An event that a member has."""

    __slots__ = ("answer", "member", "number")

    def __init__(self, number: int, member: RemoteMember) -> None:
        self.number = number
        self.member = member
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def end(self, answer: object) -> None:
        """The member has answered, or is lost. What comes after the first answer, or when nobody waits for it, does not count."""
        is_awaited = not self.answer.done()
        if is_awaited:
            self.answer.set_result(answer)
        self.member.release(is_returned=is_awaited and isinstance(answer, NotTried))


_Join = tuple[RemoteMember, wire.GroupOptions]


class _HeldPublish:
    """A publish that waits to be durable, with its charge."""

    __slots__ = ("_charge", "frame", "size_bytes")

    def __init__(self, frame: wire.Publish, size_bytes: int, memory: Memory) -> None:
        self.frame = frame
        self.size_bytes = size_bytes
        self._charge = memory.charge(size_bytes)
        self._charge.__enter__()

    def end(self) -> None:
        """Give the charge back."""
        self._charge.__exit__(None, None, None)


class GroupsConnection(Connection[_HeldPublish | wire.CancelDelayed | _Join]):
    """One connection."""

    charges_requests = False  # publishes are, with the values they decode to

    def __init__(self, groups: GroupsEndpoint, transport: Transport, peer: Peer) -> None:
        super().__init__(groups, transport)
        self.groups = groups
        self.work_count_max = groups.settings.publishes_count_max
        self._capsule: Capsule | None = None
        self._authorization = peer.headers.get("authorization")
        self._memberships: dict[int, RemoteMember] = {}
        self._deliveries: dict[int, _Delivery] = {}
        self._tags = itertools.count(1)
        self._publishes_bytes = 0
        self._answered = asyncio.Event()
        self._answered.set()

    # What the endpoint base calls

    def handle(self, message: bytes) -> None:
        """A message came in."""
        try:
            self._take(wire.decode_from_client(message))
        except wire.FrameInvalid as error:
            self._end_with(wire.CLOSE_PROTOCOL, error)
        except AuthFailed as error:
            self._end_with(wire.CLOSE_REVOKED if isinstance(error, TokenRevoked) else wire.CLOSE_AUTH_FAILED, error)

    async def work(self, request: _HeldPublish | wire.CancelDelayed | _Join) -> None:
        """Publish, take back what is to be published, or join a group."""
        if isinstance(request, _HeldPublish):
            try:
                await self._publish(request.frame)
            finally:
                self.abandoned(request)
        elif isinstance(request, wire.CancelDelayed):
            await self._cancel_delayed(request)
        else:
            await self._join(*request)

    def abandoned(self, request: _HeldPublish | wire.CancelDelayed | _Join) -> None:
        """Give back the memory of a publish that has ended, or never begins."""
        if isinstance(request, _HeldPublish):
            request.end()
            self._publishes_bytes -= request.size_bytes

    def farewell(self, why: EndReason, detail: str) -> tuple[Sequence[bytes], int, str]:
        """A problem frame, and a code that tells the client whether to come back."""
        rights, subject = self._capsule, "" if self._capsule is None else self._capsule.context.subject
        match why:
            case EndReason.STOPPING | EndReason.COMMITS_MISSED:
                return _farewell(wire.CLOSE_GOING_AWAY, NodeStopping())
            case EndReason.NOT_AUTHENTICATED:
                return _farewell(wire.CLOSE_TIMED_OUT, wire.FrameInvalid("no hello came in time"))
            case EndReason.REVOKED:
                return _farewell(wire.CLOSE_REVOKED, TokenRevoked(subject))
            case EndReason.EXPIRED:
                expires_at_ns = None if rights is None else rights.expires_at_ns
                return _farewell(wire.CLOSE_AUTH_FAILED, TokenExpired(expires_at_ns or 0))
            case EndReason.FAILED:
                request_id = f"rq-{new_event_id()[3:]}"
                logger.error("a connection of /groups is closed after a failure [%s]", request_id)
                return _farewell(wire.CLOSE_FAILED, InternalError(request_id))
            case _:
                return super().farewell(why, detail)

    def ended(self, code: int | None) -> None:
        """The connection is over. Unless it was cut, what it had not answered is not counted as an attempt."""
        memberships, self._memberships = list(self._memberships.values()), {}
        for membership in memberships:
            membership.is_leaving = True
            self._give_back(membership, is_counted=code not in _CLOSED_IN_ORDER)
            self._leave(membership)
        self._answered.set()

    def rights_changed(self) -> None:
        """A membership may have to end, or may see more."""
        for membership in list(self._memberships.values()):
            if membership.is_allowed():
                membership.wake()

    def has_room_again(self) -> None:
        """The members of this connection may be given more."""
        for membership in self._memberships.values():
            membership.wake()

    def has_backlog(self) -> bool:
        """As many publishes wait to be durable as may, in number or in bytes; then, until half of them are."""
        part = 2 if self._is_paused else 1
        count_max, bytes_max = self.work_count_max, self.groups.settings.publishes_bytes_max
        count = self.queued + self._working
        return count >= count_max // part + part - 1 or self._publishes_bytes > bytes_max // part

    async def finish(self) -> None:
        """Give its members nothing more; return when all that was delivered is answered, and all that was requested."""
        for membership in self._memberships.values():
            membership.is_leaving = True
        await self._answered.wait()  # answers are still read
        await super().finish()

    # What members call

    @property
    def has_room(self) -> bool:
        """Whether more may be sent."""
        return not self.is_closed and self.transport.buffered_bytes < self.groups.unsent_bytes_max

    @property
    def unanswered_count(self) -> int:
        """Events that this peer has and has not answered."""
        return len(self._deliveries)

    def dismiss(self, membership: RemoteMember, error: TidingsError | None) -> None:
        """End one membership; what it has not answered goes to others."""
        if self._memberships.pop(membership.number, None) is None:
            return
        membership.is_leaving = True
        self._give_back(membership, is_counted=False)
        self._say(wire.Unsubscribed(id=membership.number, error=None if error is None else error_info(error)))
        self._leave(membership)

    def deliver(self, member: RemoteMember, event: ReceivedEvent) -> _Delivery:
        """
        Send an event.

        Raises:
            TidingsError, TypeError: Its payload cannot be said in JSON.
        """
        record = event.record
        # The payload by way of the event: a middleware may have changed what this subscriber sees of it.
        payload = orjson.dumps(event.payload)
        content = b'{"offset":%d,"seq":%d,"meta":%b,"payload":%b}' % (
            record.offset,
            record.seq,
            bytes(record.meta_json),
            payload,
        )
        delivery = _Delivery(next(self._tags), member)
        self._deliveries[delivery.number] = delivery
        self._answered.clear()
        assert member.subscription is not None
        self._say(
            wire.Deliver(
                id=member.number,
                tag=delivery.number,
                attempt=event.attempt,
                record=msgspec.Raw(content),
                deadline_ms=member.subscription.settings.ack_deadline_ms,
            )
        )
        return delivery

    def withdraw(self, delivery: _Delivery, reason: str) -> None:
        """Tell the client that its answer no longer counts. Its slot is taken until it answers all the same."""
        if delivery.number in self._deliveries:
            self._say(wire.Withdrawn(tag=delivery.number, reason=reason))

    # Frames

    def _take(self, frame: wire.ClientFrame) -> None:
        if isinstance(frame, wire.Hello):
            self._hello(frame)
            return
        if isinstance(frame, wire.Ping):
            self._say(wire.Pong(ref=frame.ref))
            return
        if self._capsule is None:
            raise wire.FrameInvalid("the first message must be a hello")
        match frame:
            case wire.AckFrame():
                for number in frame.tags:
                    self._answer(number, bus_events.Ack())
            case wire.NackFrame():
                self._answer(frame.tag, _outcome_of(frame, self.groups.settings.group_backoff_s_max))
            case wire.Publish():
                self._hold(frame)
            case wire.CancelDelayed():
                self.enqueue(frame)
            case wire.Subscribe():
                self._subscribe(self._capsule, frame)
            case wire.Credit():
                self._set_credit(frame)
            case wire.Unsubscribe():
                self._unsubscribe(frame)

    def _hello(self, frame: wire.Hello) -> None:
        if self._capsule is not None:
            raise wire.FrameInvalid("there was a hello already")
        if frame.version != wire.PROTOCOL_VERSION:
            raise wire.FrameInvalid(f"version {frame.version} is not spoken here, only {wire.PROTOCOL_VERSION}")
        authenticator, header, settings = self.groups.authenticator, self._authorization, self.groups.settings
        capsule = (
            authenticator.of_token(frame.token, path=self.groups.name, entrance="connection")
            if frame.token or header is None
            else authenticator.of_header(header, path=self.groups.name, entrance="connection")
        )
        self._capsule = capsule
        self._authorization = None
        self.authenticated(capsule)
        expires_at_ns = capsule.expires_at_ns
        self._say(
            wire.Welcome(
                subject=capsule.context.subject,
                epoch=self.groups.epoch,
                expires_at=None if expires_at_ns is None else format_utc(expires_at_ns).decode(),
                max_inflight_max=settings.member_inflight_max,
                memberships_max=settings.memberships_count_max,
                publishes_max=settings.publishes_count_max,
                message_bytes_max=self.groups.message_bytes_max,
            )
        )

    def _answer(self, number: int, answer: object) -> None:
        delivery = self._deliveries.pop(number, None)
        if delivery is None:
            return  # answered twice, or for a membership that has ended: the event is elsewhere by now
        delivery.end(answer)
        if not self._deliveries:
            self._answered.set()

    def _subscribe(self, capsule: Capsule, frame: wire.Subscribe) -> None:
        settings = self.groups.settings
        try:
            topic_name, group = check_topic_and_group(frame.topic, frame.group)
            if frame.id in self._memberships:
                raise MembershipExists(frame.id)
            if len(self._memberships) >= settings.memberships_count_max:
                raise TooManyMemberships(settings.memberships_count_max)
            if not self.groups.is_open:
                raise NodeStopping
            require_membership(capsule, topic_name, group)
        except TidingsError as error:
            self._say(wire.Unsubscribed(id=frame.id, error=error_info(error)))
            return
        slots = min(frame.max_inflight, settings.member_inflight_max)
        membership = RemoteMember(self, capsule, frame.id, topic_name, group, slots)
        self._memberships[frame.id] = membership
        self.enqueue((membership, frame.options))

    async def _join(self, membership: RemoteMember, options: wire.GroupOptions) -> None:
        # Until the answer to the subscription is on its way, no event may be: the client would not know what to do with it.
        slots, membership.slots = membership.slots, 0
        groups = self.groups
        try:
            async with groups.creation.of(membership.capsule, membership.topic, membership.group):
                await groups.bus.join(
                    membership.topic,
                    membership.group,
                    membership,
                    deliveries_count_max=groups.settings.deliveries_count_max,
                    **options_given(options, groups.settings, groups.windows_bytes),
                )
        except TidingsError as error:
            self.dismiss(membership, error)
            return
        if self._memberships.get(membership.number) is not membership:
            self._leave(membership)  # cut, dismissed or closed meanwhile
            return
        assert membership.subscription is not None
        in_effect = options_in_effect(membership.subscription.settings)
        differs = [
            name for name in options.__struct_fields__ if getattr(options, name) not in (None, getattr(in_effect, name))
        ]
        self._say(wire.Subscribed(id=membership.number, max_inflight=slots, options=in_effect, differs=differs))
        membership.slots = slots
        membership.wake()

    def _set_credit(self, frame: wire.Credit) -> None:
        membership = self._memberships.get(frame.id)
        if membership is not None and membership.subscription is not None:
            membership.slots = min(frame.max_inflight, self.groups.settings.member_inflight_max)
            membership.wake()

    def _unsubscribe(self, frame: wire.Unsubscribe) -> None:
        membership = self._memberships.get(frame.id)
        if membership is None:
            self._say(wire.Unsubscribed(id=frame.id))
            return
        membership.is_leaving = True
        if membership.taken == 0:
            self.dismiss(membership, None)

    def _hold(self, frame: wire.Publish) -> None:
        """Queue a publish, or refuse it if there is no memory for it."""
        try:
            held = _HeldPublish(frame, _memory_of(frame), self.transport.memory)
        except TidingsError as error:
            verdict = ItemVerdict(index=0, verdict="refused", error=error_info(error))
            self._say(wire.Published(ref=frame.ref, verdict=verdict))
            return
        self._publishes_bytes += held.size_bytes
        self.enqueue(held)

    async def _publish(self, frame: wire.Publish) -> None:
        groups, capsule = self.groups, self._capsule
        assert capsule is not None
        topic_name: str | None = None
        try:
            event = decode_event(frame.event, EventDefaults(actor=capsule.context.subject))
            topic_name = str(event.meta.topic)
            authorise = publish_right(groups.authenticator, capsule, event)
            refuse_when_full(groups.bus.log)
            at = None if frame.at is None else time_of("at", frame.at)
            done = await groups.bus.publish(
                event,
                at=at,
                publisher=None if at is None else publisher_of(capsule, event),
                timeout_s=groups.settings.publish_timeout_s,
                authorise=authorise,
            )
        except TidingsError as error:
            verdict = ItemVerdict(index=0, verdict="refused", topic=topic_name, error=error_info(error))
        else:
            verdict = ItemVerdict(
                index=0,
                verdict="appended" if isinstance(done, Appended) else "duplicate",
                topic=topic_name,
                seq=done.seq,
                offset=done.offset,
                event_id=done.event_id,
            )
        self._say(wire.Published(ref=frame.ref, verdict=verdict))

    async def _cancel_delayed(self, frame: wire.CancelDelayed) -> None:
        groups, capsule = self.groups, self._capsule
        assert capsule is not None
        try:
            is_cancelled = await cancel_delayed(groups.authenticator, capsule, groups.bus, frame.event_id)
        except TidingsError as error:
            self._say(wire.DelayedCancelled(ref=frame.ref, error=error_info(error)))
        else:
            self._say(wire.DelayedCancelled(ref=frame.ref, is_cancelled=is_cancelled))

    # Within

    def _give_back(self, membership: RemoteMember, *, is_counted: bool) -> None:
        for delivery in [each for each in self._deliveries.values() if each.member is membership]:
            del self._deliveries[delivery.number]
            if is_counted:
                delivery.end(bus_events.Nack("the connection of the member that had it was cut", delay_s=0.0))
            else:
                delivery.end(NotTried())
        if not self._deliveries:
            self._answered.set()

    def _leave(self, membership: RemoteMember) -> None:
        if membership.subscription is not None:
            self.groups.spawn(self.groups.bus.leave(membership))

    def _say(self, frame: wire.NodeFrame) -> None:
        self.send([wire.encode(frame)])

    def _end_with(self, code: int, error: TidingsError) -> None:
        messages, code, reason = _farewell(code, error)
        self.close(code, reason, messages)


def _farewell(code: int, error: TidingsError) -> tuple[Sequence[bytes], int, str]:
    return [wire.encode(wire.Problem(error=error_info(error)))], code, error.code


class GroupsEndpoint(Endpoint[GroupsConnection]):
    """
    What answers at ``/groups``.

    Args:
        bus: Where events are published, and whose groups are joined.
        authenticator: Who is asking.
        book: Who may do what.
        clock: What time it is.
        epoch: The life of the log, told to clients.
        settings: Bounds.
        reached: Called with an event's seq before it is given to a member: ``None`` if the access book has seen that far, else
            something to wait for. It raises if the book will never get there.
        message_bytes_max: The longest message that the server lets through, told to clients; 0 if there is no limit.
    """

    takes_token_in_message = True

    def __init__(
        self,
        bus: EventBus,
        authenticator: Authenticator,
        book: AccessBook,
        *,
        clock: Clock,
        epoch: str,
        settings: GroupsSettings | None = None,
        reached: Callable[[int], Awaitable[None] | None] = lambda _: None,
        message_bytes_max: int = 0,
    ) -> None:
        super().__init__("/groups", clock, book)
        self.bus = bus
        self.settings = settings or GroupsSettings()
        self.creation = GroupCreation(bus, self.settings)
        self.reached = reached
        self.authenticator = authenticator
        self.epoch = epoch
        self.message_bytes_max = message_bytes_max
        self.authentication_timeout_s = self.settings.hello_timeout_s
        self.unsent_bytes_max = self.settings.buffered_bytes_max

    def has_token(self, peer: Peer) -> bool:
        return self.authenticator.accepts(peer.headers.get("authorization"))

    @property
    def windows_bytes(self) -> int:
        """The largest size of the windows of all shared groups together."""
        return sum(each.settings.max_inflight_bytes for each in self.bus.get_subscriptions() if each.is_shared)

    def connect(self, transport: Transport, peer: Peer) -> GroupsConnection:
        """A new connection."""
        return GroupsConnection(self, transport, peer)

    def metrics(self) -> Iterable[tuple[str, str, float]]:
        """What ``/metrics`` shows of groups."""
        counts = [len(each.members) for each in self.bus.get_subscriptions() if each.is_shared]
        yield "tidings_groups_connections", "Open connections of the endpoint /groups.", len(self.connections)
        yield "tidings_groups_shared", "Groups that are shared through the node.", len(counts)
        yield "tidings_groups_members", "Members of shared groups, here and elsewhere.", sum(counts)
        unanswered = sum(connection.unanswered_count for connection in self.connections)
        yield "tidings_groups_unanswered", "Events that remote members have and have not answered.", unanswered


def groups_endpoint(services: Services) -> GroupsEndpoint:
    """The endpoint over a node's parts."""
    dispatcher, settings = services.dispatcher, services.settings

    def reached(seq: int) -> Awaitable[None] | None:
        return None if dispatcher.seq >= seq else dispatcher.reached(seq)

    return GroupsEndpoint(
        services.bus,
        services.authenticator,
        services.book,
        clock=services.clock,
        epoch=services.log.position.epoch,
        settings=settings.groups,
        reached=reached,
        message_bytes_max=settings.server.message_bytes_max,
    )


def _memory_of(frame: wire.Publish) -> int:
    """Return about the memory that an event takes while it waits: its text, and its values once it is decoded."""
    text = bytes(frame.event)
    return 2 * len(text) + _VALUE_BYTES * (text.count(b",") + text.count(b"{") + text.count(b"["))


def _outcome_of(frame: wire.NackFrame, delay_s_max: float) -> NotTried | RaisedElsewhere | bus_events.Nack:
    """What the handler at the other end did, as one here would have."""
    if frame.is_returned:
        return NotTried()
    if frame.error_type is not None:
        return RaisedElsewhere(frame.error_type, frame.reason)
    delay_s = None if frame.delay_s is None else min(frame.delay_s, delay_s_max)
    return bus_events.Nack(frame.reason, delay_s=delay_s)
