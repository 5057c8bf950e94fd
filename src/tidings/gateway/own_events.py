"""
From what a manager of the node announces to descriptors: one ``ManagerEvents`` for each manager, on that manager's own intake channel.

A flood of happenings must not become a flood of events, least of all of the gateway's own, whose delivery can cause further ones: of each name
at most ten events go in within a second. What comes beyond is merged into one at the end of it; ``count`` says of how many. What is put on record
is not merged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from tidings.access.announcements import Announcement
from tidings.core.clock import Clock
from tidings.core.errors import TidingsError

from .constants import OWN_EVENTS_PER_S_MAX
from .contexts import ReducedVisibility
from .descriptors import EventDescriptor

logger = logging.getLogger(__name__)


class Submitting(Protocol):
    """A manager's intake channel."""

    def submit(self, descriptor: EventDescriptor, proof: int) -> None:
        """Hand in a descriptor; raises a ``GatewayError`` if it is refused."""
        ...


class _Pace:
    """How much of one name was told of within a second."""

    __slots__ = ("begun_s", "last", "merged", "told")

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.told = 0
        self.merged = 0
        self.last: Announcement | None = None


class ManagerEvents:
    """
    One manager's way into the gateway.

    Args:
        channel: The manager's intake channel.
        clock: For the pace.
        node_id: Says in events of class ``system`` which node it is.
        new_trace_id: Gives each event's context its trace id.
    """

    def __init__(
        self,
        channel: Submitting,
        clock: Clock,
        *,
        node_id: str,
        new_trace_id: Callable[[], str],
    ) -> None:
        self._channel = channel
        self._node_id = node_id
        self._clock = clock
        self._new_trace_id = new_trace_id
        self._paces: dict[str, _Pace] = {}
        self._anchor = 0
        self.refused_count = 0

    def tell(self, announcement: Announcement) -> None:
        """Hand in what was announced, now or merged with what is announced within the same second. Never raises."""
        now_s = self._clock.monotonic()
        pace = self._paces.get(announcement.event_type)
        if pace is None or now_s - pace.begun_s >= 1.0:
            if pace is not None:
                self._hand_in_merged(pace)
            pace = self._paces[announcement.event_type] = _Pace(now_s)
        if pace.told < OWN_EVENTS_PER_S_MAX:
            pace.told += 1
            self._hand_in(announcement, 1)
        else:
            pace.merged += 1
            pace.last = announcement

    def flush(self, *, is_ending: bool = False) -> None:
        """Hand in what was merged and whose second is over; all of it at the end."""
        now_s = self._clock.monotonic()
        for name, pace in list(self._paces.items()):
            if is_ending or now_s - pace.begun_s >= 1.0:
                del self._paces[name]
                self._hand_in_merged(pace)

    def _hand_in_merged(self, pace: _Pace) -> None:
        if pace.last is not None:
            self._hand_in(pace.last, pace.merged)

    def _hand_in(self, announcement: Announcement, count: int) -> None:
        self._anchor += 1
        source, app_id = announcement.source_manager, announcement.app_id
        hints = {
            "requester_identity_id": announcement.requester_identity_id,
            "peer_identity_id": announcement.peer_identity_id,
        }
        event_class = announcement.event_type.partition(".")[0]
        summary = {**announcement.payload, "count": count}
        if event_class == "system":
            summary["node_id"] = self._node_id
        descriptor = EventDescriptor(
            source_manager=source,
            event_class=event_class,
            event_type=announcement.event_type,
            sequence_anchor_hint=self._anchor,
            operation_context=ReducedVisibility(source_manager=source, app_id=app_id, trace_id=self._new_trace_id()),
            app_id=app_id,
            domain_id=None,
            payload_summary=summary,
            scope_hint={name: value for name, value in hints.items() if value is not None},
        )
        try:
            self._channel.submit(descriptor, self._anchor)
        except TidingsError as error:
            # Refused and on record; what the event tells of has happened all the same.
            self.refused_count += 1
            logger.debug("%s of %s was refused: %s", announcement.event_type, source, error)
