"""
The fourth engine: who is subscribed, from admission to the end.

Nobody is registered before everything about them was checked: that there is room for one more, that their filters can stand, that a token they
show is good, and that it is on record. Whatever fails leaves nothing behind. A subscription ends in one place, ``close``, for one of the reasons
that the wire knows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from tidings.access.book import Capsule
from tidings.access.context import ANONYMOUS
from tidings.access.errors import AuditUnavailable
from tidings.access.guard import Directive, DosGuard
from tidings.access.visibility import CapsuleIssuer
from tidings.core.clock import Clock
from tidings.wire.gateway import CloseReason, SubscribeEvents

from .ceiling import Ceiling
from .constants import ENTRIES_PER_ENVELOPE, SEND_FAILURES_MAX
from .contexts import RequestContext
from .filters import FilterRules, SubscriptionFilters
from .matching import Matching
from .names import EventClass, class_of
from .refusals import AdmissionDenied, SubscriptionClosed
from .resume_index import ResumeIndex, Retained
from .resume_tokens import ResumeTokens
from .resuming import ResumePoints
from .settings import EventSettings, WebSocketSettings
from .subscribers import ConnectionInfo, DeliveryBounds, Sink, Subscriber
from .telemetry import Telemetry

__all__ = ["Admission", "ConnectionInfo", "Sink", "Subscriber", "SubscriberRegistry"]

_OVER_LIMIT: Final = "ERR_RESOURCE_RATE_LIMIT"
_OVER_OWN_LIMIT: Final = "ERR_RESOURCE_PEER_LIMIT"
_RETRY_AFTER_OWN_LIMIT_S: Final = 30
_IDENTITIES_MAX: Final = 10_000
"""Identities whose new connections are counted; the one that was seen longest ago makes room."""
"""Long enough that who comes again as told is not taken for a flood."""
_NameT = TypeVar("_NameT")
_NOT_FORCED: Final = (None, CloseReason.SHUTDOWN, CloseReason.TAKEN_OVER)


class Admission:
    """A place for one connection, from before the upgrade until ``release``."""

    __slots__ = ("_registry", "address", "context")

    def __init__(self, registry: SubscriberRegistry, context: RequestContext, address: str | None) -> None:
        self.context: Final = context
        self.address: Final = address
        self._registry: SubscriberRegistry | None = registry

    @property
    def is_released(self) -> bool:
        """Whether the place was given back."""
        return self._registry is None

    def release(self) -> None:
        """The connection is over. Releasing twice is fine."""
        if self._registry is not None:
            self._registry.give_back(self)
            self._registry = None


class SubscriberRegistry:
    """
    Who is subscribed.

    Args:
        settings: The limits in force.
        clock: For heartbeats and paces.
        rules: Which filters can stand.
        issuer: The access layer: says whether it can decide now.
        matching: Finds who is meant by an event; is told of who comes and goes.
        index: The envelopes that are kept for those who come back.
        tokens: Reads resume tokens.
        ceiling: Counts the entries of buffers.
        guard: May keep newcomers out.
        telemetry: Hears of everything.
        graph_seq: The seq of the last graph event that was taken in.
        new_connection_id: 32 hexadecimal digits.
        wake: Something can be sent.
    """

    def __init__(
        self,
        settings: EventSettings,
        *,
        clock: Clock,
        rules: FilterRules,
        issuer: CapsuleIssuer,
        matching: Matching,
        index: ResumeIndex,
        tokens: ResumeTokens,
        ceiling: Ceiling,
        guard: DosGuard,
        telemetry: Telemetry,
        graph_seq: Callable[[], int],
        new_connection_id: Callable[[], str],
        wake: Callable[[], None],
    ) -> None:
        self.bounds = DeliveryBounds()
        self.waiting: Final[dict[Subscriber, None]] = {}
        """Subscribers for whom something waits that can be sent when the pace allows it."""
        self.since_max = 0
        """No subscriber's ``since`` is above it."""
        self.is_open = True
        self._clock = clock
        self._rules = rules
        self._issuer = issuer
        self._matching = matching
        self._index = index
        self._points = ResumePoints(index, tokens, rules, graph_seq)
        self._ceiling = ceiling
        self._guard = guard
        self._telemetry = telemetry
        self._graph_seq = graph_seq
        self._new_connection_id = new_connection_id
        self._wake = wake
        self._limits: WebSocketSettings = settings.websocket
        self._subscribers: dict[Subscriber, None] = {}
        self._admitted = 0
        self._admitted_of_identity: Counter[str | None] = Counter()
        self._admitted_of_app: Counter[str] = Counter()
        self._of_identity: dict[str | None, dict[Subscriber, None]] = {}
        self._attempts: OrderedDict[str | None, tuple[float, float]] = OrderedDict()
        """What is left of each identity's allowance for new connections, and when that was."""
        self._pings: deque[Subscriber] = deque()
        self._number = 0
        self.apply(settings)

    def __len__(self) -> int:
        return len(self._subscribers)

    @property
    def is_heard(self) -> bool:
        """Whether somebody is subscribed, or could come back with a token."""
        return bool(self._subscribers) or self._points.has_ended

    def __iter__(self) -> Iterator[Subscriber]:
        return iter(list(self._subscribers))

    # Admission

    @property
    def admitted(self) -> int:
        """Connections that have a place, subscribed or not."""
        return self._admitted

    def admit(self, context: RequestContext, *, address: str | None = None) -> Admission:
        """
        A place for a new connection, before it is upgraded. Whoever gets one releases it when the connection is over.

        Raises:
            AdmissionDenied: The guard keeps newcomers out, or a limit is reached.
        """
        identity, app = context.requester_identity_id, context.app_id
        verdict = self._guard.admit(
            identity=identity, app=app, address=address, has_token=lambda: identity != ANONYMOUS
        )
        is_paced = not verdict.is_allowed
        try:
            if not verdict.is_allowed:
                raise AdmissionDenied(f"denied for a time ({verdict.reason_code})", _OVER_LIMIT, verdict.retry_after_s)
            if wait_s := self._take_attempt(identity):
                rate_max = self._limits.max_attempts_per_min_per_identity
                is_paced = True
                raise AdmissionDenied(f"more than {rate_max} new connections a minute", _OVER_LIMIT, math.ceil(wait_s))
            return self._place_for(context, address)
        except AdmissionDenied as error:
            self._telemetry.rejected(
                context,
                error.reason,
                cause=error.problem,
                address=address,
                is_denied=is_paced,
                is_offence=error.protocol_code == _OVER_OWN_LIMIT,
            )
            raise

    def _take_attempt(self, identity: str | None) -> float:
        """
        Take the allowance for one new connection; return the seconds until there is one, 0 if it was there.

        All connections that an identity may have can come back at once, as after a restart of the node.
        """
        limits, now_s = self._limits, self.now_s()
        per_s = limits.max_attempts_per_min_per_identity / 60.0
        count_max = float(max(limits.max_attempts_per_min_per_identity, limits.max_connections_per_identity))
        left, at_s = self._attempts.pop(identity, (count_max, now_s))
        left = min(count_max, left + (now_s - at_s) * per_s)
        wait_s = 0.0 if left >= 1.0 else (1.0 - left) / per_s
        self._attempts[identity] = (left - 1.0 if left >= 1.0 else left), now_s
        if len(self._attempts) > _IDENTITIES_MAX:
            self._attempts.popitem(last=False)
        return wait_s

    def _place_for(self, context: RequestContext, address: str | None) -> Admission:
        identity, app, limits = context.requester_identity_id, context.app_id, self._limits
        if self._admitted >= limits.max_connections:
            raise AdmissionDenied(f"{self._admitted} connections are open", _OVER_LIMIT)
        if self._admitted_of_identity[identity] >= limits.max_connections_per_identity:
            raise AdmissionDenied(
                f"{self._admitted_of_identity[identity]} connections of the identity are open",
                _OVER_OWN_LIMIT,
                _RETRY_AFTER_OWN_LIMIT_S,
            )
        per_app = limits.max_connections_per_app
        if per_app is not None and self._admitted_of_app[app] >= per_app:
            raise AdmissionDenied(f"{self._admitted_of_app[app]} connections of the app are open", _OVER_LIMIT)
        self._admitted += 1
        self._admitted_of_identity[identity] += 1
        self._admitted_of_app[app] += 1
        return Admission(self, context, address)

    def give_back(self, admission: Admission) -> None:
        """A place is free again; see ``Admission.release``."""
        self._admitted -= 1
        _count_down(self._admitted_of_identity, admission.context.requester_identity_id)
        _count_down(self._admitted_of_app, admission.context.app_id)

    # Opening

    async def open(
        self,
        admission: Admission,
        rights: Capsule,
        frame: SubscribeEvents,
        sink: Sink,
        *,
        resume_token: str | None = None,
    ) -> Subscriber:
        """
        Subscribe. Nothing is sent before ``Subscriber.resume_sending``.

        Raises:
            SubscriptionClosed: It is refused; nothing is registered. That is on record.
        """
        context = admission.context
        try:
            return await self._open(admission, rights, frame, sink, resume_token)
        except SubscriptionClosed as error:
            reason = error.close_reason
            self._telemetry.rejected(
                context,
                "acl_denied" if reason is CloseReason.PERMISSION_DENIED else reason.reason,
                cause=error.problem,
                address=admission.address,
                # A token that is not good is none: a node that starts again makes every token worthless.
                is_offence=reason in (CloseReason.FILTER_INVALID, CloseReason.PERMISSION_DENIED),
            )
            if reason is CloseReason.RESUME_INVALID:
                self._telemetry.resume_refused(context, "", error.problem)
            raise

    async def _open(
        self, admission: Admission, rights: Capsule, frame: SubscribeEvents, sink: Sink, resume_token: str | None
    ) -> Subscriber:
        context = admission.context
        identity = context.requester_identity_id
        verdict = self._guard.admit(
            identity=identity, app=context.app_id, address=admission.address, has_token=lambda: identity != ANONYMOUS
        )
        if self._issuer.unavailable_for is not None:
            # Everything is denied now, and it would be wrong to say that it is this subscriber who may not.
            raise SubscriptionClosed(CloseReason.SUBSCRIPTION_REJECTED, "access cannot be decided now")
        if not verdict.is_allowed:  # since it was admitted
            raise SubscriptionClosed(CloseReason.SUBSCRIPTION_REJECTED, f"denied for a time ({verdict.reason_code})")
        filters = self._rules.settle(frame, context, rights)
        if resume_token is None:
            subscriber = self._make(admission, rights, filters, sink, self._index.last_ordinal + 1, self._graph_seq())
            older = None
        else:
            subscriber, older = await self._resume(resume_token, admission, rights, filters, sink)
        # From here on nothing else gets its turn: what was looked for above is all there was.
        if not self.is_open or admission.is_released:
            self.released(subscriber.take_all())
            raise SubscriptionClosed(CloseReason.SUBSCRIPTION_REJECTED, "the connection or the gateway is closing")
        try:
            channels = tuple(map(str, filters.events))
            self._telemetry.opened(context, subscriber.connection_id, channels=channels)
        except AuditUnavailable as error:
            self.released(subscriber.take_all())
            raise SubscriptionClosed(CloseReason.INTERNAL_ERROR, "subscribing cannot be put on record") from error
        subscriber.rate_max = verdict.msgs_per_sec_max
        self._register(subscriber)
        if older is not None:
            self.close(older, CloseReason.TAKEN_OVER)
        if resume_token is not None:
            self._telemetry.resume_accepted(context, subscriber.connection_id, subscriber.replayed_count)
        return subscriber

    def _make(
        self,
        admission: Admission,
        rights: Capsule,
        filters: SubscriptionFilters,
        sink: Sink,
        first_ordinal: int,
        since: int,
    ) -> Subscriber:
        self._number += 1
        return Subscriber(
            self,
            sink,
            connection_id=self._new_connection_id(),
            number=self._number,
            context=admission.context,
            rights=rights,
            filters=filters,
            first_ordinal=first_ordinal,
            since=since,
            address=admission.address,
        )

    def _register(self, subscriber: Subscriber) -> None:
        self._subscribers[subscriber] = None
        self._of_identity.setdefault(subscriber.context.requester_identity_id, {})[subscriber] = None
        if not subscriber.is_resumed and subscriber.since > self.since_max:
            self.since_max = subscriber.since
        subscriber.next_ping_s = self.now_s() + self.bounds.heartbeat_interval_s
        self._pings.append(subscriber)
        self._matching.add(subscriber)

    async def _resume(
        self, token: str, admission: Admission, rights: Capsule, filters: SubscriptionFilters, sink: Sink
    ) -> tuple[Subscriber, Subscriber | None]:
        """A subscriber whose buffer holds what was missed, and the connection that it takes over from, if that is still open."""
        context, points = admission.context, self._points
        open_ones = self._of_identity.get(context.requester_identity_id, {})
        point = points.find(token, context, rights, filters, open_ones)
        subscriber = self._make(admission, rights, filters, sink, point.ordinal or 0, points.seq_at(point))
        missed = await points.missed(token, point, subscriber, self.bounds.per_connection)
        open_ones = self._of_identity.get(context.requester_identity_id, {})
        points.find(token, context, rights, filters, open_ones)
        self._hold(missed, token)
        subscriber.preload(missed)
        return subscriber, points.taken_over(point, subscriber, open_ones)

    def _hold(self, missed: Sequence[Retained], token: str) -> None:
        """Count what a replay brings back; refuse it if there is no room."""
        back = sum(not each.holders for each in missed)
        if self._ceiling.room < len(missed) + back * ENTRIES_PER_ENVELOPE:
            raise self._points.refusal(token, "there is no room for what was missed")
        for each in missed:
            if not each.holders:
                self._ceiling.hold_again(each.envelope.source_manager)
            each.holders += 1
        self._ceiling.hold_entries(len(missed))

    # Ending

    def close(self, subscriber: Subscriber, reason: CloseReason | None, *, cause: str = "") -> None:
        """End a subscription; ``None`` if its client has gone. Closing twice is fine."""
        if not subscriber.is_open:
            return
        subscriber.is_open = False
        del self._subscribers[subscriber]
        self.waiting.pop(subscriber, None)
        self._matching.remove(subscriber)
        identity = subscriber.context.requester_identity_id
        of_identity = self._of_identity[identity]
        del of_identity[subscriber]
        if not of_identity:
            del self._of_identity[identity]
        self._points.ended(subscriber)
        dropped = Counter(each.event_class for each in subscriber.unsent or ())
        self.released(subscriber.take_all())
        name = "client" if reason is None else reason.reason
        for event_class, count in dropped.items():
            self._telemetry.dropped(event_class, name, count)
        is_forced = reason not in _NOT_FORCED
        self._telemetry.ended(subscriber.context, subscriber.connection_id, name, is_forced=is_forced, cause=cause)
        if reason is not None:
            data: Mapping[str, object] = {"reason": "shutdown"} if reason is CloseReason.SHUTDOWN else {}
            subscriber.sink.close(reason, data)

    def close_all(self, reason: CloseReason, *, count_max: int | None = None) -> None:
        """End every subscription, or so many, in the order of their opening."""
        for each in list(itertools.islice(self._subscribers, count_max)):
            self.close(each, reason)

    def shed_one(self) -> bool:
        """Close the connection with the fullest buffer, of several the one opened first; says whether there was one that held anything."""
        fullest = max(self._subscribers, key=lambda each: (len(each), -each.number), default=None)
        if fullest is None or not len(fullest):
            return False
        self.close(fullest, CloseReason.QUEUE_FULL)
        return True

    def graph_event_lost(self) -> None:
        """A graph event could not be taken in: whoever would have got it must not go on as if there had been none, nor resume across it."""
        self._points.graph_event_lost()
        for each in self:
            if any(class_of(channel) is EventClass.GRAPH for channel in each.filters.channels):
                self.close(each, CloseReason.QUEUE_FULL)

    def app_changed(self, is_enabled: Callable[[str], bool]) -> None:
        """Apps have come or gone: subscribers in one that is no longer there may see nothing."""
        for each in self:
            if not is_enabled(each.context.app_id):
                self.close(each, CloseReason.PERMISSION_DENIED)

    def apply_directive(self, directive: Directive) -> int:
        """Do what the guard says with those who are there; returns how many were closed."""
        closed = 0
        for each in self:
            context = each.context
            if directive.reach == "unauthenticated" and context.requester_identity_id != ANONYMOUS:
                continue
            if not directive.covers(
                identity=context.requester_identity_id,
                app=context.app_id,
                address=each.address,
                connection=each.connection_id,
            ):
                continue
            if directive.closes:
                closed += 1
                self.close(each, CloseReason.SUBSCRIPTION_REJECTED, cause=directive.reason_code)
            elif not directive.is_denial:
                each.rate_max = directive.msgs_per_sec_max
        self._telemetry.directive_applied(directive, closed)
        return closed

    # Time

    def tick(self, now_s: float) -> None:
        """Ping who is due, and close who has not answered for two intervals."""
        interval_s = self.bounds.heartbeat_interval_s
        pings = self._pings
        while pings and (not pings[0].is_open or pings[0].next_ping_s <= now_s):
            subscriber = pings.popleft()
            if not subscriber.is_open:
                continue
            if now_s - subscriber.heard_s >= 2 * interval_s:
                self.close(subscriber, CloseReason.HEARTBEAT_TIMEOUT)
                continue
            if subscriber.rate_max is not None:
                subscriber.rate_max = self._rate_left(subscriber)
            subscriber.next_ping_s = now_s + interval_s
            pings.append(subscriber)
            subscriber.ping()

    def _rate_left(self, subscriber: Subscriber) -> int | None:
        """The rate that directives in force leave a subscriber; they end by themselves."""
        context = subscriber.context
        identity = context.requester_identity_id
        verdict = self._guard.admit(
            identity=identity, app=context.app_id, address=subscriber.address, has_token=lambda: identity != ANONYMOUS
        )
        return verdict.msgs_per_sec_max if verdict.is_allowed else subscriber.rate_max

    # Settings

    def apply(self, settings: EventSettings) -> None:
        """From now on these settings hold."""
        self._limits = settings.websocket
        self.bounds.apply(settings)
        latest_s = self.now_s() + self.bounds.heartbeat_interval_s
        for each in self._pings:  # in their order still: nobody's next ping moves past another's
            each.next_ping_s = min(each.next_ping_s, latest_s)

    def in_use(self) -> tuple[int, int, int]:
        """Connections, the most of one identity, and the fullest buffer: what new limits must not go below."""
        return (
            self._admitted,
            max(self._admitted_of_identity.values(), default=0),
            max(map(len, self._subscribers), default=0),
        )

    def most_of_app(self) -> int:
        """The most connections of one app."""
        return max(self._admitted_of_app.values(), default=0)

    # What subscribers call

    def now_s(self) -> float:
        """By the monotonic clock."""
        return self._clock.monotonic()

    def released(self, entries: Sequence[Retained]) -> None:
        """These are no longer in somebody's buffer."""
        if entries:
            self._ceiling.release_entries(len(entries))
            for each in entries:  # as ``let_go``, without a call for each of what every acknowledgement frees
                each.holders -= 1
                if not each.holders:
                    self._ceiling.release_envelope(each.envelope.source_manager)

    def let_go(self, retained: Retained) -> None:
        """One queue or buffer less holds an envelope."""
        retained.holders -= 1
        if not retained.holders:
            self._ceiling.release_envelope(retained.envelope.source_manager)

    def acked(self, seconds: float) -> None:
        """An envelope was acknowledged so long after it was sent."""
        self._telemetry.acked(seconds)

    def send_failed(self, subscriber: Subscriber, entries: Sequence[Retained]) -> None:
        """
        These were not sent, and will not be.

        A subscriber that would miss a graph event is closed at once, as it could not know; others when it has happened several times in a row.
        """
        subscriber.send_failures += 1
        self._telemetry.send_failed()
        is_graph = any(each.event_class is EventClass.GRAPH for each in entries)
        if is_graph or subscriber.send_failures >= SEND_FAILURES_MAX:
            self.close(subscriber, CloseReason.INTERNAL_ERROR, cause="sending failed")

    def has_room(self, subscriber: Subscriber) -> None:
        """What waits for a subscriber can go out."""
        if subscriber.unsent:
            self.waiting[subscriber] = None
            self._wake()

    def connections(self) -> list[ConnectionInfo]:
        """Who is subscribed, in the order of opening."""
        return [each.info() for each in self._subscribers]


def _count_down(counter: Counter[_NameT], name: _NameT) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]
