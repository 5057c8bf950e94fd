"""
What a record of the topic ``schedule`` holds: an event that waits for its time, its due time, and the identity that submitted it.

The record's payload is the event's envelope, without space and id, and its payload. The due time, the event's own id and the publisher are
in ``extra``: handed in again under its id or key, an event has the same content, whatever its time and its publisher.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

import msgspec

from tidings.core.clock import Clock, datetime_of
from tidings.core.errors import InvalidEvent
from tidings.core.events import Event, EventMeta
from tidings.core.ids import derived_id
from tidings.core.validation import UNREADABLE
from tidings.log.encoding import timestamp_ns
from tidings.log.record import Record
from tidings.wire.events import event_from_json

HELD: Final = "DELAYED_HELD"
MS_NS: Final = 1_000_000


class PublisherIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    Identity that submitted a delayed event to a node, and the part of its token's claims that covers the event.

    It is stored with the event, so that its rights can be checked again when the event is due.
    """

    subject: str
    client_id: str | None = None
    token_id: str | None = None
    roles: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    names_none_of: tuple[str, ...] = ()
    """Kinds of resources that bind the token and of which it names none that the event has."""
    has_rights: bool = True
    """False for an event of an earlier version, which stored the actor only: then only revocations count."""


class DelayedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event that waits for its time."""

    event_id: str
    due: datetime
    event: Event
    offset: int
    """Of the record that holds it, in the topic ``schedule``."""
    publisher: PublisherIdentity | None = None
    """``None`` for an event that was not submitted through a node."""


AuthoriseDelayed = Callable[[DelayedEvent], None]
"""Called when an event is due; raises an error if it may not be published."""


def due_ns_of(clock: Clock, delay: timedelta | None, at: datetime | None) -> int | None:
    """
    When an event is to be published, on a whole millisecond; ``None`` for at once.

    Raises:
        InvalidEvent: Both are given, or the delay is negative or none.
        InvalidTimestamp: The time has no zone, or is one that the log cannot order.
    """
    if delay is not None:
        if at is not None:
            raise InvalidEvent("at", "is given together with a delay", "give one of the two")
        if not isinstance(delay, timedelta) or delay < timedelta():
            raise InvalidEvent("delay", f"must be a timedelta that is not negative, not {delay!r}")
        try:
            at = datetime_of(clock.now_ns()) + delay
        except OverflowError:
            raise InvalidEvent("delay", "ends after the year 9999") from None
    due_ns = -(-timestamp_ns(at, "at") // MS_NS) * MS_NS
    return due_ns if due_ns > clock.now_ns() else None


def due_of(clock: Clock, event: Event, delay: timedelta | None, at: datetime | None) -> tuple[Event, datetime | None]:
    """
    For who has an event published elsewhere: when, ``None`` for at once; and the event, which without a time of its own happens then.

    Raises:
        InvalidEvent, InvalidTimestamp: As ``due_ns_of`` does.
    """
    due_ns = None if delay is None and at is None else due_ns_of(clock, delay, at)
    if due_ns is None:
        return event, None
    due = datetime_of(due_ns)
    if event.meta._ts is None:
        event = Event(EventMeta(**event.meta._values() | {"ts": due}), event.payload)
    return event, due


class HeldMeta(msgspec.Struct, frozen=True):
    """Fields of a held event's envelope that decide who may read it. Its space is that of the record."""

    topic: str
    type: str = ""
    partitions: tuple[str, ...] = ()


class HeldContent(msgspec.Struct, frozen=True):
    """The payload of a record that holds an event."""

    meta: HeldMeta
    payload: msgspec.Raw


_CONTENT: Final = msgspec.json.Decoder(HeldContent)


def holds_event(kind: str) -> bool:
    """Return whether a record of this type in the topic ``schedule`` holds an event."""
    return kind == HELD


def held_content(payload_json: bytes) -> HeldContent | None:
    """Return the event in a record's payload; ``None`` if it cannot be read: sealed without a key, or written by another program."""
    try:
        return _CONTENT.decode(payload_json)
    except UNREADABLE:
        return None


def held_id(event_id: str) -> str:
    """Return the id of the record that holds an event."""
    return derived_id("delayed", event_id)


class HeldDetails(msgspec.Struct, frozen=True):
    """Fields of a record that holds an event, beside its payload."""

    due_ms: int
    publishes: str
    """The event's own id."""
    publisher: PublisherIdentity | msgspec.UnsetType | None = msgspec.UNSET
    """Missing in records of earlier versions."""


def details_of(record: Record) -> HeldDetails:
    """
    Return the details of a record that holds an event.

    Raises:
        msgspec.ValidationError: Another program wrote it.
    """
    return msgspec.convert(record.meta.extra, HeldDetails)


def publisher_of(record: Record, about: HeldDetails) -> PublisherIdentity | None:
    """Return who submitted a held event: in records of earlier versions its actor; ``None`` for an event of the process itself."""
    publisher, actor = about.publisher, record.meta.actor
    if publisher is not msgspec.UNSET:
        return publisher
    subject = actor.get("user_id") if isinstance(actor, dict) else actor
    return PublisherIdentity(subject=subject, has_rights=False) if isinstance(subject, str) and subject else None


def size_of(envelope: object, event: Event) -> int:
    """Return about the size of the record that will hold an event; an event that cannot be stored has none."""
    try:
        return len(msgspec.json.encode({"meta": envelope, "payload": event.payload}))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return 0


def delayed_of(record: Record) -> DelayedEvent:
    """
    Return the event that a record holds.

    Raises:
        SealedPayload: Its space is sealed, and the key is not at hand.
        InvalidEvent: Another program wrote it.
    """
    held, about = record.payload, details_of(record)
    try:
        event_id, due = about.publishes, datetime_of(about.due_ms * MS_NS)
    except (OverflowError, ValueError) as error:
        raise InvalidEvent("extra.due_ms", "is not a time") from error
    try:
        held["meta"] = {"ts": due.isoformat()} | held["meta"] | {"space_id": record.meta.space_id, "event_id": event_id}
    except (KeyError, TypeError) as error:
        raise InvalidEvent("payload.meta", "is not an envelope") from error
    event = event_from_json(msgspec.json.encode(held))
    publisher = publisher_of(record, about)
    return DelayedEvent(event_id=event_id, due=due, event=event, offset=record.offset, publisher=publisher)
