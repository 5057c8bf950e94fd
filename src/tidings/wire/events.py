"""
An event on its way to a node, and what became of it: JSON shapes that the HTTP API and the groups endpoint share.

``{"meta": {"topic": ..., "type": ..., "space_id": ...}, "payload": {...}}``, as a stored record has it, less its places. Unknown
keys are refused by name: a misspelt ``partition`` must not store an event that belongs nowhere. What an envelope may say is
checked by the log, in one place for all endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tidings.core.errors import InvalidEvent, InvalidPayload, InvalidTimestamp, TidingsError
from tidings.core.events import NAME_SETS, OPTIONAL_NAMES, Event, EventMeta, with_types
from tidings.core.validation import UNREADABLE, explain, refuse_repeated_keys

Count = Annotated[int, msgspec.Meta(ge=0)]


class EventMetaIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The envelope of an event to publish; ``topic`` and ``space_id`` may come from the request's own defaults."""

    type: str
    topic: str | None = None
    space_id: str | None = None
    event_id: str | None = None
    ts: str | None = None
    actor: str | dict[str, Any] | None = None
    trace_id: str | None = None
    idem_key: str | None = None
    ttl_sec: Count | None = None
    device: str | dict[str, Any] | None = None
    partitions: list[str] = []
    objects: list[str] = []
    app: str | None = None
    band: str | None = None
    priority: int | str | None = None
    qos: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None


class EventIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event to publish."""

    meta: EventMetaIn
    payload: dict[str, Any]


class EventDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for events that do not say it themselves."""

    topic: str | None = None
    space_id: str | None = None
    idem_key: str | None = None
    actor: str | None = None


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error's parts, as far as somebody at the other end can use them."""

    code: str
    detail: str
    retryable: bool = False
    hint: str | None = None


class ItemVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    What became of one event.

    ``appended``: durable at this place. ``duplicate``: was committed before, at this place; nothing was written. ``refused``: not
    stored; ``error`` says why. With ``refused`` and a retryable error, sending the same event again can help.
    """

    index: Count
    verdict: Literal["appended", "duplicate", "refused"]
    topic: str | None = None
    seq: int | UnsetType = UNSET
    offset: int | UnsetType = UNSET
    event_id: str | None = None
    error: ErrorInfo | None = None


def error_info(error: TidingsError) -> ErrorInfo:
    """An error for the other end."""
    return ErrorInfo(code=error.code, detail=error.public_text, retryable=error.retryable, hint=error.hint)


_DECODER: Final = msgspec.json.Decoder(EventIn)


def decode_event(data: bytes | msgspec.Raw, defaults: EventDefaults) -> Event:
    """
    The event in JSON text.

    Raises:
        InvalidEvent: It is none.
    """
    refuse_repeated_keys(bytes(data), "event")
    try:
        given = _DECODER.decode(data)
    except msgspec.ValidationError as error:
        problem, path = explain(error, "event")
        raise InvalidEvent(path, problem, hint="see the schema EventIn in /v1/openapi.json") from error
    except UNREADABLE as error:
        raise InvalidPayload("event", f"is not JSON: {error}") from error
    return event_of(given, defaults)


def event_of(given: EventIn, defaults: EventDefaults) -> Event:
    """
    What was given, completed by the defaults, as an event; the log checks the rest.

    Raises:
        InvalidEvent: Something that every event needs is missing, or the time is none.
    """
    meta = given.meta
    topic, space_id = meta.topic or defaults.topic, meta.space_id or defaults.space_id
    for name, value in (("topic", topic), ("space_id", space_id)):
        if value is None:
            raise InvalidEvent(f"meta.{name}", "is missing", hint="every event has a topic, a type and a space")
    values = msgspec.structs.asdict(meta)  # the fields are those of ``EventMeta``
    values |= {"topic": topic, "space_id": space_id} | {name: tuple(values[name]) for name in NAME_SETS}
    values["ts"] = None if meta.ts is None else time_of("meta.ts", meta.ts)
    values["actor"] = defaults.actor if meta.actor is None else meta.actor
    values["idem_key"] = meta.idem_key or defaults.idem_key
    return Event(EventMeta(**values), given.payload)


def event_from_json(data: bytes) -> Event:
    """
    The event that ``event_to_wire`` wrote: the same event, types of its parts included.

    Raises:
        InvalidEvent: The text is none.
    """
    event = decode_event(data, EventDefaults())
    with_types(event.meta)
    return event


def time_of(field: str, text: str) -> datetime:
    """
    A time in RFC 3339.

    Raises:
        InvalidTimestamp: It is none, or has no zone.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidTimestamp(field, f"{text[:64]!r} is not a time such as 2026-03-01T12:00:00Z") from error
    if moment.utcoffset() is None:
        raise InvalidTimestamp(field, f"{text[:64]!r} has no time zone", hint="add Z, or an offset such as +01:00")
    return moment


def event_to_wire(event: Event) -> bytes:
    """
    An event as the JSON that ``decode_event`` takes. It always carries its id and its time, so that sending it again is the
    same event.

    Raises:
        InvalidPayload: Part of it cannot be said in JSON.
    """
    meta = event.meta
    shown: dict[str, Any] = {
        "topic": str.__str__(meta.topic),
        "type": str.__str__(meta.type),
        "space_id": meta.space_id,
        "event_id": meta.event_id,
        "ts": meta.ts.isoformat(),
    }
    for name in OPTIONAL_NAMES:
        value = getattr(meta, name)
        if name in NAME_SETS:
            value = list(value) or None
        if value is not None:
            shown[name] = dict(value) if isinstance(value, Mapping) else value
    try:
        return msgspec.json.encode({"meta": shown, "payload": dict(event.payload)})
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidPayload("event", f"cannot be sent as JSON: {error}") from error


class WaitingEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event that waits for its time."""

    event_id: str
    due: datetime
    topic: str
    type: str
    space_id: str
    actor: str | None = None
    """Subject that submitted it; null for an event of the node's own process."""


class WaitingEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Events that wait, in the order in which they were given."""

    delayed: list[WaitingEvent]
    next_after: int | None
    """For the next page; null after the last. A page may be empty and not be the last."""
