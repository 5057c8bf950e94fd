"""
One subscriber: what it has been sent and has not acknowledged, what waits for it, how fast it may be sent to, and whether it is still there.

The buffer has two parts, in one order: what was sent, and behind it what was not. An acknowledgement frees everything up to its envelope. When
both together would hold more than ``event.queue.per_connection``, the subscriber is too slow, and whoever offers more closes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from tidings.wire.gateway import CloseReason

from .contexts import RequestContext
from .refusals import SubscriptionClosed
from .resume_index import Retained
from .settings import EventSettings
from .telemetry import LatencyHistogram, LatencySummary

if TYPE_CHECKING:
    from tidings.access.book import Capsule

    from .filters import SubscriptionFilters

_BURST_S: Final = 1.0 + 1e-9
"""So much time's worth of envelopes may go out at once."""
PING_BYTES: Final = 8


class Sink(Protocol):
    """Where a subscriber's envelopes go: the connection's own end of the gateway."""

    def send(self, prefixes: tuple[bytes, ...]) -> bool:
        """
        Send each with the connection's own end of a frame behind it, in order. Never waits.

        Returns:
            Whether more may follow. If not, nothing is sent until ``Subscriber.resume_sending``.

        Raises:
            OSError: They were not sent, and will not be.
        """
        ...

    def ping(self, payload: bytes) -> None:
        """Ask whether somebody is there."""
        ...

    def close(self, reason: CloseReason, data: Mapping[str, object]) -> None:
        """The subscription is over: say why, and close the connection."""
        ...


class DeliveryBounds:
    """What holds for every subscriber, from the settings in force."""

    __slots__ = ("heartbeat_interval_s", "interval_s", "per_connection")

    def __init__(self) -> None:
        self.per_connection = 1
        self.interval_s = 1.0
        """The time that one envelope takes of a subscriber's pace: a second, divided by the rate."""
        self.heartbeat_interval_s = 1.0

    def apply(self, settings: EventSettings) -> None:
        """From now on these settings hold."""
        self.per_connection = settings.queue.per_connection
        self.interval_s = 1.0 / settings.delivery.max_msgs_per_sec
        self.heartbeat_interval_s = settings.delivery.heartbeat_interval_ms / 1_000


class Keeper(Protocol):
    """What a subscriber needs of the registry that it is in."""

    bounds: DeliveryBounds

    def now_s(self) -> float:
        """By the monotonic clock."""
        ...

    def released(self, entries: Sequence[Retained]) -> None:
        """These are no longer in the subscriber's buffer."""
        ...

    def acked(self, seconds: float) -> None:
        """An envelope was acknowledged so long after it was sent."""
        ...

    def send_failed(self, subscriber: Subscriber, entries: Sequence[Retained]) -> None:
        """These were not sent."""
        ...

    def has_room(self, subscriber: Subscriber) -> None:
        """What waits for the subscriber can go out."""
        ...


class ConnectionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One connection, for administrators."""

    connection_id: str
    identity_id: str | None
    app_id: str
    channels: tuple[str, ...]
    domain_id: str | None
    is_resumed: bool
    opened_s_ago: float
    heard_s_ago: float
    """Since a ping was answered, or the connection was opened."""
    unsent_count: int
    unacked_count: int
    delivered_count: int
    use: float
    """How full its buffer is, from 0 to 1."""
    ack_latency: LatencySummary | None
    """How long its acknowledgements took; ``None`` if there were none."""


class Subscriber:
    """
    One open subscription.

    Context, filters and rights' bearer never change. Made by ``SubscriberRegistry.open``.
    """

    __slots__ = (
        *("_bounds", "_keeper", "_paced_until_s", "_pings", "_pongs", "_sampled", "_sampled_s"),
        *(
            "ack_latency",
            "address",
            "connection_id",
            "context",
            "delivered_count",
            "filters",
            "first_ordinal",
            "heard_s",
        ),
        *("is_blocked", "is_open", "is_resumed", "last_ack_token", "next_ping_s", "number", "opened_s", "rate_max"),
        *("replayed_count", "rights", "send_failures", "sent", "sent_ordinal", "since", "sink", "unsent"),
    )

    def __init__(
        self,
        keeper: Keeper,
        sink: Sink,
        *,
        connection_id: str,
        number: int,
        context: RequestContext,
        rights: Capsule,
        filters: SubscriptionFilters,
        first_ordinal: int,
        since: int,
        address: str | None = None,
    ) -> None:
        self.connection_id: Final = connection_id
        self.address: Final = address
        self.number: Final = number
        """In the order of opening."""
        self.context: Final = context
        self.rights: Final = rights
        self.filters: Final = filters
        self.sink: Final = sink
        self.first_ordinal: Final = first_ordinal
        """The first that was, or is to be, sent to this subscriber; of a resumed one, that of its token."""
        self.since: Final = since
        """Every graph envelope with a higher seq that the subscriber may see comes here."""
        self.is_resumed = False
        self.replayed_count = 0
        self.is_open = True
        self.is_blocked = True
        """Nothing is sent now: ``resume_sending`` changes that."""
        self.sent: deque[Retained] | None = None  # idle subscribers are many, and an empty deque is not small
        """Sent, and not acknowledged."""
        self.unsent: deque[Retained] | None = None
        """Behind it."""
        self.sent_ordinal = first_ordinal - 1
        """The last that was sent; of a resumed one, at first that of its token."""
        self.last_ack_token: str | None = None
        self.delivered_count = 0
        self.send_failures = 0
        self.rate_max: int | None = None
        """A rate below that of the settings, if the guard has said so."""
        self.opened_s = self.heard_s = keeper.now_s()
        self.next_ping_s = 0.0
        self._keeper = keeper
        self._bounds = keeper.bounds
        self._paced_until_s = 0.0
        self._pings = self._pongs = 0
        self.ack_latency: LatencyHistogram | None = None
        """How long its acknowledgements took, once there were any."""
        self._sampled: Retained | None = None
        self._sampled_s = 0.0

    def __len__(self) -> int:
        """How many envelopes its buffer holds."""
        return (0 if self.sent is None else len(self.sent)) + (0 if self.unsent is None else len(self.unsent))

    def __bool__(self) -> bool:
        return True

    # What delivery calls

    def offer(self, run: Sequence[Retained], prefixes: tuple[bytes, ...], now_s: float) -> int:
        """
        Take envelopes into the buffer, and send them if nothing waits before them and the pace allows it.

        Returns:
            How many fit. Whoever could not leave all of them here closes the subscriber.
        """
        # This runs for every delivery there is: the ordinary case comes first, without a call.
        count, sent, bounds = len(run), self.sent, self._bounds
        if sent is None:
            sent = self.sent = deque()
        if not self.unsent and not self.is_blocked and len(sent) + count <= bounds.per_connection:
            paced_until_s = self._paced_until_s
            if paced_until_s < now_s:
                paced_until_s = now_s
            paced_until_s += count * (bounds.interval_s if self.rate_max is None else self._interval_s())
            if paced_until_s - now_s <= _BURST_S:
                self._paced_until_s = paced_until_s
                sent.extend(run)
                self._send(run, prefixes, now_s)
                return count
        room = bounds.per_connection - len(self)
        if count > room:
            return self.offer(run[:room], prefixes[:room], now_s) if room > 0 else 0
        if self.unsent is None:
            self.unsent = deque(run)
        else:
            self.unsent.extend(run)
        return count

    def preload(self, run: Sequence[Retained]) -> None:
        """Put what was missed into the buffer, before anything live."""
        if run:
            self.unsent = deque(run)
        self.is_resumed = True
        self.sent_ordinal = self.first_ordinal
        self.replayed_count = len(run)

    def flush(self, now_s: float) -> Sequence[Retained]:
        """Send as much of what waits as the pace allows; returns what went out."""
        unsent = self.unsent
        if not unsent or self.is_blocked:
            return ()
        interval_s = self._interval_s()
        begin_s = max(self._paced_until_s, now_s)
        count = min(len(unsent), int((_BURST_S - (begin_s - now_s)) / interval_s))
        if count <= 0:
            return ()
        self._paced_until_s = begin_s + count * interval_s
        run = [unsent.popleft() for _ in range(count)]
        if self.sent is None:
            self.sent = deque(run)
        else:
            self.sent.extend(run)
        self._send(run, tuple([each.prefix for each in run]), now_s)
        return () if self.send_failures else run

    def _interval_s(self) -> float:
        """The time that one envelope takes of the pace: a bucket as full as the time until it would be full again is short of a second."""
        interval_s = self._bounds.interval_s
        return interval_s if self.rate_max is None else max(interval_s, 1.0 / self.rate_max)

    def _send(self, run: Sequence[Retained], prefixes: tuple[bytes, ...], now_s: float) -> None:
        self.sent_ordinal = run[-1].ordinal or 0
        if self._sampled is None:
            self._sampled, self._sampled_s = run[0], now_s
        try:
            self.is_blocked = not self.sink.send(prefixes)
        except OSError:
            # Not tried again, neither here nor later: see ``SubscriberRegistry.send_failed``.
            self._keeper.send_failed(self, run)
        else:
            self.send_failures = 0
            self.delivered_count += len(run)

    def take_all(self) -> list[Retained]:
        """Empty the buffer: the subscriber is gone."""
        found = [*(self.sent or ()), *(self.unsent or ())]
        self.sent = self.unsent = self._sampled = None
        return found

    # What the connection calls

    def resume_sending(self) -> None:
        """Send, from now on or again: ``subscribed`` has been sent, or the transport has room again."""
        if self.is_blocked and self.is_open:
            self.is_blocked = False
            self._keeper.has_room(self)

    def ack(self, token: str) -> None:
        """
        The client is done with an envelope that it was sent, and with all before it.

        Raises:
            SubscriptionClosed: The token is of none that waits for its acknowledgement here: ``frame_invalid``.
        """
        sent: deque[Retained] = self.sent or deque()
        freed: list[Retained] = []
        for each in sent:
            freed.append(each)
            if each.envelope.resume_token == token:
                break
        else:
            raise SubscriptionClosed(
                CloseReason.FRAME_INVALID, "acknowledges no envelope that was sent and waits for it"
            )
        for _ in freed:
            sent.popleft()
        self.last_ack_token = token
        if self._sampled is not None and (self._sampled.ordinal or 0) <= (freed[-1].ordinal or 0):
            self._note_ack(self._keeper.now_s() - self._sampled_s)
            self._sampled = None
        self._keeper.released(freed)

    def _note_ack(self, seconds: float) -> None:
        if self.ack_latency is None:
            self.ack_latency = LatencyHistogram()
        self.ack_latency.observe(seconds)
        self._keeper.acked(seconds)

    def ponged(self, payload: bytes) -> None:
        """The client answered a ping. Only an answer to one of ours that has not been answered counts."""
        number = int.from_bytes(payload, "big")
        if len(payload) == PING_BYTES and self._pongs < number <= self._pings:
            self._pongs = number
            self.heard_s = self._keeper.now_s()

    # What the registry calls

    def ping(self) -> None:
        """Ask whether somebody is there."""
        self._pings += 1
        self.sink.ping(self._pings.to_bytes(PING_BYTES, "big"))

    def info(self) -> ConnectionInfo:
        """What administrators see of it."""
        now_s = self._keeper.now_s()
        return ConnectionInfo(
            connection_id=self.connection_id,
            identity_id=self.context.requester_identity_id,
            app_id=self.context.app_id,
            channels=tuple(map(str, self.filters.events)),
            domain_id=self.filters.domain_id,
            is_resumed=self.is_resumed,
            opened_s_ago=now_s - self.opened_s,
            heard_s_ago=now_s - self.heard_s,
            unsent_count=len(self.unsent or ()),
            unacked_count=len(self.sent or ()),
            delivered_count=self.delivered_count,
            use=len(self) / self._bounds.per_connection,
            ack_latency=None if self.ack_latency is None else self.ack_latency.summary(),
        )
