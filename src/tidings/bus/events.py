"""
What a handler gets, and what it answers.

A ``ReceivedEvent`` is an ``Event`` with its places and the number of this attempt. Envelope and payload are decoded when
they are first asked for, each group its own: a handler may change what it gets without anybody else seeing it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tidings.core.events import Event, EventMeta, with_types
from tidings.log.record import Record


class Ack:
    """The event is done with; the group's cursor may pass it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Ack()"


class Nack:
    """
    Try again later, as if the handler had raised.

    Args:
        reason: Why, for the attempt history and the dead letter.
        delay_s: When, instead of the back-off's own delay.
    """

    __slots__ = ("delay_s", "reason")

    def __init__(self, reason: str = "nack", delay_s: float | None = None) -> None:
        if delay_s is not None and not (isinstance(delay_s, int | float) and math.isfinite(delay_s)):
            raise TypeError(f"delay_s must be a number of seconds, not {delay_s!r}")
        self.reason = reason
        self.delay_s = delay_s

    def __repr__(self) -> str:
        return f"Nack({self.reason!r})"


class ReceivedEvent(Event):
    """An event as a group's handler gets it."""

    __slots__ = ("_meta", "_payload", "attempt", "group", "is_at_work", "record")

    def __init__(self, record: Record, group: str, attempt: int) -> None:
        self.record = record
        self.group = group
        self.attempt = attempt
        """1 for the first delivery to this group, counted when the event is handed out, across crashes too."""
        self.is_at_work = True
        """Whether its handler has not answered yet."""
        self._meta: EventMeta | None = None
        self._payload: Mapping[str, Any] | None = None

    @property
    def offset(self) -> int:
        """Its place in its topic."""
        return self.record.offset

    @property
    def seq(self) -> int:
        """Its place in the log."""
        return self.record.seq

    @property
    def topic(self) -> str:
        """Where it is stored."""
        return self.record.meta.topic

    @property
    def is_plain(self) -> bool:
        """Whether its envelope has none of the optional fields, and was not looked at. Costs no decoding."""
        return self._meta is None and self.record.is_plain

    @property
    def meta(self) -> EventMeta:
        """The envelope."""
        if self._meta is None:
            self._meta = meta_of(self.record)
        return self._meta

    @meta.setter
    def meta(self, meta: EventMeta) -> None:
        self._meta = meta

    @property
    def payload(self) -> Mapping[str, Any]:
        """The payload."""
        if self._payload is None:
            self._payload = self.record.payload
        return self._payload

    @payload.setter
    def payload(self, payload: Mapping[str, Any]) -> None:
        self._payload = payload


def meta_of(record: Record) -> EventMeta:
    """A record's envelope as the producer would have written it."""
    meta = record.meta
    given = EventMeta(
        topic=meta.topic,
        type=meta.type,
        space_id=meta.space_id,
        event_id=meta.event_id,
        ts=datetime.fromisoformat(meta.ts),
        actor=meta.actor,
        trace_id=meta.trace_id,
        idem_key=meta.idem_key,
        ttl_sec=meta.ttl_sec,
        device=meta.device,
        partitions=meta.partitions,
        objects=meta.objects,
        app=meta.app,
        band=meta.band,
        priority=meta.priority,
        qos=meta.qos,
        extra=meta.extra,
    )
    return with_types(given)


def stored_meta(event: Event) -> Any:
    """The envelope without decoding one: its fields have the same names either way, only ``ts`` may be text."""
    if event.__class__ is ReceivedEvent:
        received: Any = event
        return received._meta or received.record.meta
    return event.meta
