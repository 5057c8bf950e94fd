"""
One connection of the door ``/groups``: hello, memberships, deliveries and their answers, publishes, and how it ends.

Frames are those of ``wire.groups``. Nothing here waits: what takes time is handed to the door to look after. When the connection is
cut, what it had not answered is a failed attempt, as for a handler that ended its process, and goes to other members at once. When
it says goodbye properly, or is closed by us, what it had not answered goes on without being counted.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from tidings.access.book import Capsule
from tidings.access.errors import AccessError, AuthFailed, TokenRevoked
from tidings.access.resources import Action, group_of, topic
from tidings.bus import events as bus_events
from tidings.bus.events import ReceivedEvent
from tidings.bus.handlers import NotTried
from tidings.bus.members import Member
from tidings.core.clock import format_utc
from tidings.core.errors import TidingsError
from tidings.core.ids import new_event_id
from tidings.core.names import check_topic_and_group
from tidings.log.interface import Appended
from tidings.log.record import Record
from tidings.wire import groups as wire
from tidings.wire.events import EventDefaults, ItemVerdict, decode_event, error_info
from tidings.wire.transport import Transport, Upgrade

from .errors import InternalError, NodeError, NodeStopping
from .event_rights import may_get_of_topic
from .group_rights import require_membership
from .group_settings import options_in_effect
from .last_look import asked_again
from .services import refuse_when_full

if TYPE_CHECKING:
    from .groups_door import GroupsDoor

__all__ = ["GroupsConversation", "MembershipExists", "TooManyMemberships"]

logger = logging.getLogger(__name__)


class MembershipExists(NodeError):
    """A connection has one membership of that number already."""

    code = "groups.membership_exists"

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def describe(self) -> str:
        return f"this connection has a membership {self.number} already"


class TooManyMemberships(NodeError):
    """A connection has as many memberships as one may have."""

    code = "groups.too_many_memberships"
    hint = "open another connection; the limit is the setting groups.memberships_count_max"

    def __init__(self, count_max: int) -> None:
        super().__init__(count_max)
        self.count_max = count_max

    def describe(self) -> str:
        return f"one connection has at most {self.count_max} memberships"


class RemoteMember(Member):
    """One connection's membership of one group. ``slots`` is how many events it takes without having answered."""

    def __init__(self, conversation: GroupsConversation, number: int, topic_name: str, group: str, slots: int) -> None:
        super().__init__(slots)
        self.number = number
        self.topic = topic_name
        self.group = group
        self._conversation = conversation
        self._topic_resource = topic(topic_name)
        self._resource = group_of(topic_name, group)

    @property
    def room(self) -> int:
        return super().room if self._conversation.has_room else 0

    def may_receive(self) -> bool:
        """Neither leaving, nor revoked, nor expired, and still allowed to subscribe."""
        return super().may_receive() and self._conversation.is_valid() and self.is_allowed()

    def is_allowed(self) -> bool:
        """Whether topic and group are still allowed; if not, the membership ends."""
        capsule = self._conversation.capsule
        assert capsule is not None
        if capsule.allows(Action.SUBSCRIBE, self._topic_resource) and capsule.allows(Action.JOIN, self._resource):
            return True
        try:
            require_membership(capsule, self.topic, self.group)
        except AccessError as error:
            self._conversation.dismiss(self, error)
        return False

    def may_see(self, record: Record) -> bool:
        """Whether it may have this event of the topic: its space, and its partitions."""
        capsule = self._conversation.capsule
        return capsule is not None and may_get_of_topic(capsule, Action.SUBSCRIBE, record)

    def reached(self, seq: int) -> Awaitable[None] | None:
        """Rights are as of the access book: it must have seen every record up to the event."""
        return self._conversation.reached(seq)

    async def handle(self, event: ReceivedEvent) -> object:
        try:
            delivery = self._conversation.deliver(self, event)
        except (TidingsError, TypeError):
            self.release()
            raise
        try:
            answer = await delivery.answer
        except asyncio.CancelledError as error:
            self._conversation.withdraw(delivery, str(error))
            raise
        if isinstance(answer, NotTried):
            raise answer
        return answer

    def release(self) -> None:
        super().release()
        if self.is_leaving and self.taken == 0:
            self._conversation.dismiss(self, None)


class _Delivery:
    """An event that a member has."""

    __slots__ = ("answer", "member", "number")

    def __init__(self, number: int, member: RemoteMember) -> None:
        self.number = number
        self.member = member
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def end(self, answer: object) -> None:
        """The member has answered, or is lost. What comes after the first answer, or when nobody waits for it, does not count."""
        if not self.answer.done():
            self.answer.set_result(answer)
        self.member.release()


class GroupsConversation:
    """One connection."""

    def __init__(self, door: GroupsDoor, transport: Transport, upgrade: Upgrade) -> None:
        self.capsule: Capsule | None = None
        self._door = door
        self._transport = transport
        self._upgrade = upgrade
        self._opened_at = door.clock.monotonic()
        self._memberships: dict[int, RemoteMember] = {}
        self._deliveries: dict[int, _Delivery] = {}
        self._tags = itertools.count(1)
        self._publishing = 0
        self._is_paused = False
        self._is_closed = False
        self._answered = asyncio.Event()
        self._answered.set()

    # From the server

    def received(self, message: bytes) -> None:
        """A whole message came in."""
        if self._is_closed or not self.is_valid():
            return
        try:
            self._take(wire.decode_from_client(message))
        except wire.FrameInvalid as error:
            self.end(wire.CLOSE_PROTOCOL, error)
        except TokenRevoked as error:
            self.end(wire.CLOSE_REVOKED, error)
        except AuthFailed as error:
            self.end(wire.CLOSE_AUTH_FAILED, error)

    def drained(self) -> None:
        """What was buffered has left: members of this connection may have room again."""
        for membership in self._memberships.values():
            membership.wake()

    def closed(self, code: int) -> None:
        """The connection is gone."""
        self._let_go(is_goodbye=code in (wire.CLOSE_NORMAL, wire.CLOSE_GOING_AWAY))

    # From the door

    @property
    def unanswered_count(self) -> int:
        """Events that this peer has and has not answered."""
        return len(self._deliveries)

    @property
    def has_room(self) -> bool:
        """Whether more may be sent."""
        return not self._is_closed and self._transport.buffered_bytes < self._door.settings.buffered_bytes_max

    def is_valid(self) -> bool:
        """Whether the connection may go on; if not, it is closed with the reason."""
        if self._is_closed:
            return False
        if self.capsule is None:
            if self._door.clock.monotonic() - self._opened_at < self._door.settings.hello_timeout_s:
                return True
            self.end(wire.CLOSE_TIMED_OUT, wire.FrameInvalid("no hello came in time"))
            return False
        try:
            self._door.authority.check(self.capsule)
        except TokenRevoked as error:
            self.end(wire.CLOSE_REVOKED, error)
        except AuthFailed as error:
            self.end(wire.CLOSE_AUTH_FAILED, error)
        else:
            return True
        return False

    def look_again(self) -> None:
        """Rights have changed."""
        if self.capsule is not None and self.is_valid():
            for membership in list(self._memberships.values()):
                if membership.is_allowed():
                    membership.wake()  # what it may see may have become more

    async def finish(self) -> None:
        """Take nothing more from the groups; return when all that was delivered is answered."""
        for membership in self._memberships.values():
            membership.is_leaving = True
        await self._answered.wait()

    def end(self, code: int, error: TidingsError) -> None:
        """Close the connection, and say why."""
        if self._is_closed:
            return
        self._send(wire.Problem(error=error_info(error)))
        self._transport.close(code, error.code)
        # Closed by us: what was not answered goes on, and is not held against the event.
        self._let_go(is_goodbye=True)

    def reached(self, seq: int) -> Awaitable[None] | None:
        """See ``GroupsDoor``."""
        return self._door.reached(seq)

    def dismiss(self, membership: RemoteMember, error: TidingsError | None) -> None:
        """End one membership; what it has not answered goes to others."""
        if self._memberships.pop(membership.number, None) is None:
            return
        membership.is_leaving = True
        self._give_back(membership, is_goodbye=True)
        self._send(wire.Unsubscribed(id=membership.number, error=None if error is None else error_info(error)))
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
        self._send(
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
            self._send(wire.Withdrawn(tag=delivery.number, reason=reason))

    # Frames

    def _take(self, frame: wire.ClientFrame) -> None:
        if isinstance(frame, wire.Hello):
            self._hello(frame)
            return
        if isinstance(frame, wire.Ping):
            self._send(wire.Pong(ref=frame.ref))
            return
        if self.capsule is None:
            raise wire.FrameInvalid("the first message must be a hello")
        match frame:
            case wire.Ack():
                for number in frame.tags:
                    self._answer(number, bus_events.Ack())
            case wire.Nack():
                self._answer(
                    frame.tag, NotTried() if frame.is_returned else bus_events.Nack(frame.reason, delay_s=frame.delay_s)
                )
            case wire.Publish():
                self._publish(self.capsule, frame)
            case wire.Subscribe():
                self._subscribe(self.capsule, frame)
            case wire.Credit():
                self._set_credit(frame)
            case wire.Unsubscribe():
                self._unsubscribe(frame)

    def _hello(self, frame: wire.Hello) -> None:
        if self.capsule is not None:
            raise wire.FrameInvalid("there was a hello already")
        if frame.version != wire.PROTOCOL_VERSION:
            raise wire.FrameInvalid(f"version {frame.version} is not spoken here, only {wire.PROTOCOL_VERSION}")
        authority = self._door.authority
        header = self._upgrade.headers.get("authorization")
        capsule = authority.of_token(frame.token) if frame.token or header is None else authority.of_header(header)
        self.capsule = capsule
        self._transport.authenticated()
        expires_at_ns, settings = capsule.context.expires_at_ns, self._door.settings
        self._send(
            wire.Welcome(
                subject=capsule.context.subject,
                epoch=self._door.epoch,
                expires_at=None if expires_at_ns is None else format_utc(expires_at_ns).decode(),
                max_inflight_max=settings.member_inflight_max,
                memberships_max=settings.memberships_count_max,
                publishes_max=settings.publishes_count_max,
                message_bytes_max=self._door.message_bytes_max,
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
        try:
            topic_name, group = check_topic_and_group(frame.topic, frame.group)
            if frame.id in self._memberships:
                raise MembershipExists(frame.id)
            if len(self._memberships) >= self._door.settings.memberships_count_max:
                raise TooManyMemberships(self._door.settings.memberships_count_max)
            if self._door.is_shut:
                raise NodeStopping
            require_membership(capsule, topic_name, group)
        except TidingsError as error:
            self._send(wire.Unsubscribed(id=frame.id, error=error_info(error)))
            return
        max_inflight = min(frame.max_inflight, self._door.settings.member_inflight_max)
        membership = RemoteMember(self, frame.id, topic_name, group, max_inflight)
        self._memberships[frame.id] = membership
        self._door.spawn(self._or_end(self._join(capsule, membership, frame.options)))

    async def _join(self, capsule: Capsule, membership: RemoteMember, options: wire.GroupOptions) -> None:
        # Until the answer to the subscription is on its way, no event may be: the client would not know what to do with it.
        slots, membership.slots = membership.slots, 0
        try:
            async with self._door.creation.of(capsule, membership.topic, membership.group):
                await self._door.join(membership, options)
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
        self._send(wire.Subscribed(id=membership.number, max_inflight=slots, options=in_effect, differs=differs))
        membership.slots = slots
        membership.wake()

    def _set_credit(self, frame: wire.Credit) -> None:
        membership = self._memberships.get(frame.id)
        if membership is not None and membership.subscription is not None:
            membership.slots = min(frame.max_inflight, self._door.settings.member_inflight_max)
            membership.wake()

    def _unsubscribe(self, frame: wire.Unsubscribe) -> None:
        membership = self._memberships.get(frame.id)
        if membership is None:
            self._send(wire.Unsubscribed(id=frame.id))
            return
        membership.is_leaving = True
        if membership.taken == 0:
            self.dismiss(membership, None)

    def _publish(self, capsule: Capsule, frame: wire.Publish) -> None:
        self._publishing += 1
        if self._publishing >= self._door.settings.publishes_count_max and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._door.spawn(self._or_end(self._store(capsule, frame)))

    async def _store(self, capsule: Capsule, frame: wire.Publish) -> None:
        topic_name: str | None = None
        try:
            event = decode_event(frame.event, EventDefaults(actor=capsule.context.subject))
            topic_name = str(event.meta.topic)
            authority = self._door.authority
            authority.require_publish(capsule, event)
            refuse_when_full(self._door.bus.log)
            with asked_again(lambda stored: authority.require_publish(capsule, stored)):
                done = await self._door.bus.publish(event, timeout_s=self._door.settings.publish_timeout_s)
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
        self._send(wire.Published(ref=frame.ref, verdict=verdict))
        self._publishing -= 1
        if self._is_paused and self._publishing < self._door.settings.publishes_count_max // 2 + 1:
            self._is_paused = False
            self._transport.resume_reading()

    # Ending

    async def _or_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what a frame asked for. If it fails as nothing should, the peer is told: it would wait for its answer for ever."""
        try:
            await work
        except Exception:
            request_id = f"rq-{new_event_id()[3:]}"
            logger.exception("a request at /groups failed unexpectedly [%s]", request_id)
            self.end(wire.CLOSE_FAILED, InternalError(request_id))

    def _let_go(self, *, is_goodbye: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._door.forget(self)
        memberships, self._memberships = list(self._memberships.values()), {}
        for membership in memberships:
            membership.is_leaving = True
            self._give_back(membership, is_goodbye=is_goodbye)
            self._leave(membership)
        self._answered.set()

    def _give_back(self, membership: RemoteMember, *, is_goodbye: bool) -> None:
        for delivery in [each for each in self._deliveries.values() if each.member is membership]:
            del self._deliveries[delivery.number]
            if is_goodbye:
                delivery.end(NotTried())
            else:
                delivery.end(bus_events.Nack("the connection of the member that had it was cut", delay_s=0.0))
        if not self._deliveries:
            self._answered.set()

    def _leave(self, membership: RemoteMember) -> None:
        if membership.subscription is not None:
            self._door.spawn(self._door.bus.leave(membership))

    def _send(self, frame: wire.NodeFrame) -> None:
        if not self._is_closed:
            self._transport.send([wire.encode(frame)])
