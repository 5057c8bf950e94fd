"""
``POST /v1/events``: one event, or many with a verdict each, as JSON, JSON Lines or CloudEvents.

Every event is durable before it is answered. One event is answered for itself: 201, 200 for a duplicate, a problem if it is
refused. Many are answered together with 200, and each has its verdict; one that is refused keeps no other from being stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Final, TypedDict, TypeVar

import msgspec
from starlette.responses import Response

from tidings.bus.errors import BusClosed, PublishTimeout
from tidings.core.errors import TidingsError
from tidings.core.events import Event
from tidings.core.names import check_idem_key
from tidings.core.validation import UNREADABLE, refuse_repeated_keys
from tidings.log.errors import LogClosed, LogFenced, ReadOnlyLog, StorageFull
from tidings.log.interface import Appended, Refused, Verdict
from tidings.wire.events import (
    EventDefaults,
    EventIn,
    ItemVerdict,
    WaitingEvent,
    WaitingEvents,
    decode_event,
    error_info,
    time_of,
)

from ..delayed_rights import cancel_delayed, may_cancel, publisher_of
from ..errors import BadRequest, TooManyEvents, TooManyPartitions, UnsupportedMedia
from ..event_rights import PublishRights, publish_questions, publish_right
from ..services import refuse_when_full
from .cloudevents import CLOUDEVENT, CLOUDEVENTS_BATCH, CloudEvent, from_binary, from_structured, trace_id_of
from .operations import JSON, NDJSON, ApiOperation, Call, JsonAnswer, OneOf, json_answer

_TRACESTATE_CHARS_MAX: Final = 512
"""A longer header is left out, as the W3C's recommendation allows."""
_LOOKED_AT_MAX: Final = 1_000
"""Delayed events that one page looks at."""
Draft = Event | TidingsError
_T = TypeVar("_T")
_SLICE_PARTITIONS_MAX: Final = 2_048
"""Partitions that the events stored together name; their rights may have to be decided again in one step."""
_ALL_FAIL: Final = (StorageFull, LogFenced, LogClosed, ReadOnlyLog, BusClosed)
"""What is not one event's own fault: the request as a whole is to be tried again."""


class PublishQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for events that do not say it themselves; and when they are to be published, if not now."""

    topic: str | None = None
    space_id: str | None = None
    delay_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """So many seconds from now."""
    at: str | None = None
    """At this time, in RFC 3339."""


class CancelQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which events are meant: one by its id, or all that an actor submitted."""

    event_id: str | None = None
    actor: str | None = None
    dry_run: bool = False
    """With ``actor``: count the events only."""


class DelayedQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of the events that wait."""

    after: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Those behind this place: ``next_after`` of the page before."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100
    actor: str | None = None
    """Those that this subject submitted."""


class CancelledEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a delayed event was still waiting; then it is never published."""

    event_id: str
    cancelled: bool


class CancelledOfActor(msgspec.Struct, frozen=True, kw_only=True):
    """The number of delayed events of an actor that were, or with ``dry_run`` would be, cancelled."""

    actor: str
    count: Annotated[int, msgspec.Meta(ge=0)]
    carried_out: bool


class PublishedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event is durable, or was before."""

    verdict: str
    topic: str
    seq: int
    offset: int
    event_id: str
    epoch: str


class PublishedMany(msgspec.Struct, frozen=True, kw_only=True):
    """What became of each event, in the order of the request."""

    appended: Annotated[int, msgspec.Meta(ge=0)]
    duplicate: Annotated[int, msgspec.Meta(ge=0)]
    refused: Annotated[int, msgspec.Meta(ge=0)]
    epoch: str
    verdicts: list[ItemVerdict]


async def publish(call: Call) -> Response:
    """
    Store what the body holds, if it need not wait for the disk, nor behind too many others.

    A place among those that publish is taken when the body is here, so that slow bodies keep no publisher out.
    """
    refuse_when_full(call.api.services.log)
    query = call.query(PublishQuery)
    when = _when(query)
    defaults = EventDefaults(
        topic=query.topic, space_id=query.space_id, idem_key=_idempotency_key(call), actor=call.subject
    )
    body = await call.content()
    refuse_when_full(call.api.services.log)
    with call.api.publishes.take(call.subject):
        return await _publish(call, body, defaults, when)


async def _publish(call: Call, body: bytes, defaults: EventDefaults, when: When) -> Response:
    headers = call.headers
    if "ce-specversion" in headers:
        return await _publish_one(call, from_binary(headers, body, defaults), when)
    match call.media_type:
        case "application/json":
            if body.lstrip()[:1] != b"[":
                return await _publish_one(call, decode_event(body, defaults), when)
            return await _publish_many(
                call, await _from_array(body, defaults, call.api.settings.events_count_max), when
            )
        case "application/x-ndjson" | "application/jsonl" | "application/ndjson":
            return await _publish_many(
                call, await _from_lines(body, defaults, call.api.settings.events_count_max), when
            )
        case "application/cloudevents+json":
            return await _publish_one(call, from_structured(_decoded(body), defaults), when)
        case "application/cloudevents-batch+json":
            return await _publish_many(
                call, await _from_batch(body, defaults, call.api.settings.events_count_max), when
            )
        case media:
            raise UnsupportedMedia(media, call.operation.body)


class When(TypedDict, total=False):
    """When events are to be published, as ``EventBus.publish`` takes it; nothing for now."""

    delay: timedelta
    at: datetime


def _when(query: PublishQuery) -> When:
    if query.at is not None:
        if query.delay_s is not None:
            raise BadRequest("query.at", "is given together with delay_s")
        return {"at": time_of("query.at", query.at)}
    if query.delay_s is None:
        return {}
    try:
        return {"delay": timedelta(seconds=query.delay_s)}
    except (OverflowError, ValueError):
        raise BadRequest("query.delay_s", "is too long") from None


async def list_delayed(call: Call) -> Response:
    """List delayed events that the caller may publish, and so cancel. A page looks at a bounded number of events."""
    query = call.query(DelayedQuery)
    page: list[WaitingEvent] = []
    offset, looked_at = query.after, 0
    async for delayed in call.api.services.bus.delayed_events(query.after, subject=query.actor):
        if len(page) == query.limit or looked_at == _LOOKED_AT_MAX:
            return json_answer(WaitingEvents(delayed=page, next_after=offset))
        offset = delayed.offset
        looked_at += 1
        if may_cancel(call.capsule, delayed.event):
            meta, publisher = delayed.event.meta, delayed.publisher
            page.append(
                WaitingEvent(
                    event_id=delayed.event_id,
                    due=delayed.due,
                    topic=str(meta.topic),
                    type=str(meta.type),
                    space_id=str(meta.space_id),
                    actor=None if publisher is None else publisher.subject,
                )
            )
    return json_answer(WaitingEvents(delayed=page, next_after=None))


async def cancel(call: Call) -> Response:
    """Cancel one delayed event that the caller may publish, or all of one actor."""
    query, services = call.query(CancelQuery), call.api.services
    if (query.event_id is None) == (query.actor is None):
        raise BadRequest("query", "must have either event_id or actor")
    if query.actor is not None:
        return await _cancel_of(call, query.actor, dry_run=query.dry_run)
    if query.dry_run:
        raise BadRequest("query.dry_run", "goes with actor only")
    assert query.event_id is not None
    is_cancelled = await cancel_delayed(services.authenticator, call.capsule, services.bus, query.event_id)
    return json_answer(CancelledEvent(event_id=query.event_id, cancelled=is_cancelled))


async def _cancel_of(call: Call, actor: str, *, dry_run: bool) -> Response:
    """Cancel all events that a subject submitted: its own right, and an administrator's."""
    services = call.api.services
    if actor != call.subject:
        services.authenticator.require_administrator(call.capsule, "delayed.cancel")
    count = await services.bus.cancel_delayed_of(actor, dry_run=dry_run, audit=call.audit())
    return json_answer(CancelledOfActor(actor=actor, count=count, carried_out=not dry_run))


_SLICE_BYTES: Final = 65_536
"""Of the events of a request, what is decoded before others get their turn."""
_BLANK_LINES_MAX: Final = 16
"""How many times more lines than events a body may have: blank lines are skipped."""


def _idempotency_key(call: Call) -> str | None:
    """The header's value; the draft of its standard writes it in quotes, most clients do not."""
    given = call.headers.get("idempotency-key")
    if given is None:
        return None
    key = given.strip()
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1]
    try:
        return check_idem_key(key)
    except TidingsError as error:
        raise BadRequest("Idempotency-Key", error.describe()) from error


def _decoded(body: bytes) -> object:
    refuse_repeated_keys(body, "body")
    try:
        return msgspec.json.decode(body)
    except UNREADABLE as error:
        raise BadRequest("body", f"is not JSON: {error}") from error


def _items(body: bytes) -> list[msgspec.Raw]:
    try:
        return msgspec.json.decode(body, type=list[msgspec.Raw])
    except UNREADABLE as error:
        raise BadRequest("body", f"is not a JSON array: {error}") from error


async def _from_array(body: bytes, defaults: EventDefaults, count_max: int) -> list[Draft]:
    return await _drafts((bytes(item) for item in _bounded(_items(body), count_max)), defaults)


async def _from_lines(body: bytes, defaults: EventDefaults, count_max: int) -> list[Draft]:
    line_count = body.count(b"\n")
    if line_count > _BLANK_LINES_MAX * count_max:  # a line each takes many times the body's bytes
        raise TooManyEvents(line_count, count_max)
    lines = [line for line in body.split(b"\n") if line.strip()]
    return await _drafts(_bounded(lines, count_max), defaults)


async def _drafts(items: Iterable[bytes], defaults: EventDefaults) -> list[Draft]:
    """Decode events, a slice of their bytes at a time."""
    drafts: list[Draft] = []
    decoded_bytes = 0
    for index, item in enumerate(items):
        try:
            drafts.append(decode_event(item, _for_item(defaults, index)))
        except TidingsError as error:
            drafts.append(error)
        decoded_bytes += len(item)
        if decoded_bytes > _SLICE_BYTES:
            decoded_bytes = 0
            await asyncio.sleep(0)
    return drafts


async def _from_batch(body: bytes, defaults: EventDefaults, count_max: int) -> list[Draft]:
    drafts: list[Draft] = []
    decoded_bytes = 0
    for index, item in enumerate(_bounded(_items(body), count_max)):
        try:
            drafts.append(from_structured(_decoded(bytes(item)), _for_item(defaults, index)))
        except TidingsError as error:
            drafts.append(error)
        decoded_bytes += len(item)
        if decoded_bytes > _SLICE_BYTES:
            decoded_bytes = 0
            await asyncio.sleep(0)
    return drafts


def _for_item(defaults: EventDefaults, index: int) -> EventDefaults:
    """One key for the request is one key an event: its place in the request is added."""
    if defaults.idem_key is None:
        return defaults
    return msgspec.structs.replace(defaults, idem_key=f"{defaults.idem_key}#{index}")


def _bounded(items: Sequence[_T], count_max: int) -> Sequence[_T]:
    if len(items) > count_max:
        raise TooManyEvents(len(items), count_max)
    return items


def _traced(call: Call, event: Event) -> Event:
    """Give an event without a trace of its own that of the request: the headers ``traceparent`` and ``tracestate``."""
    given = call.headers.get("traceparent")
    if given is None:
        return event
    meta, parent = event.meta, given.strip()
    trace_id = trace_id_of(parent)
    extra = {} if meta.extra is None else meta.extra
    if trace_id is None or meta.trace_id is not None or "traceparent" in extra:
        return event
    state = call.headers.get("tracestate", "").strip()
    carrier = {"traceparent": parent} | ({"tracestate": state} if 0 < len(state) <= _TRACESTATE_CHARS_MAX else {})
    meta.trace_id, meta.extra = trace_id, {**extra, **carrier}
    return event


async def _publish_one(call: Call, event: Event, when: When) -> Response:
    services = call.api.services
    event = _traced(call, event)
    authorise = publish_right(services.authenticator, call.capsule, event)
    publisher = publisher_of(call.capsule, event) if when else None
    done = await services.bus.publish(
        event, timeout_s=call.api.settings.publish_timeout_s, authorise=authorise, publisher=publisher, **when
    )
    is_new = isinstance(done, Appended)
    answer = PublishedEvent(
        verdict="appended" if is_new else "duplicate",
        topic=str.__str__(event.meta.topic),
        seq=done.seq,
        offset=done.offset,
        event_id=done.event_id,
        epoch=services.log.position.epoch,
    )
    return json_answer(answer, 201 if is_new else 200, {"location": f"/v1/events/{done.seq}"})


async def _publish_many(call: Call, drafts: list[Draft], when: When) -> Response:
    count_max = call.api.settings.partitions_count_max
    count = len({name for draft in drafts if isinstance(draft, Event) for name in draft.meta.partitions})
    if count > count_max:
        raise TooManyPartitions(count, count_max)
    drafts = [_traced(call, draft) if isinstance(draft, Event) else draft for draft in drafts]
    rights = PublishRights(call.api.services.authenticator, call.capsule)
    questions = (each for draft in drafts if isinstance(draft, Event) for each in publish_questions(draft))
    await call.capsule.decide_ahead(questions)
    verdicts: list[ItemVerdict] = []
    for start, end in _slices(drafts):
        permitted = [_permitted(rights, draft) for draft in drafts[start:end]]
        stored = iter(await _store(call, rights, [draft for draft in permitted if isinstance(draft, Event)], when))
        verdicts += [
            _shown(index, draft, next(stored) if isinstance(draft, Event) else Refused(draft))
            for index, draft in enumerate(permitted, start)
        ]
    counts = {name: sum(each.verdict == name for each in verdicts) for name in ("appended", "duplicate", "refused")}
    epoch = call.api.services.log.position.epoch
    if call.accepts(JSON, NDJSON) == NDJSON:
        body = b"".join(msgspec.json.encode(each) + b"\n" for each in verdicts)
        return JsonAnswer(body, 200, {"tidings-epoch": epoch}, NDJSON)
    return json_answer(PublishedMany(**counts, epoch=epoch, verdicts=verdicts))


def _slices(drafts: Sequence[Draft]) -> Iterator[tuple[int, int]]:
    """Cut events into runs that name a bounded number of partitions: other tasks run while each is stored. Most requests are one run."""
    start = count = 0
    for index, draft in enumerate(drafts):
        named = len(tuple(draft.meta.partitions)) if isinstance(draft, Event) else 0
        if count and count + named > _SLICE_PARTITIONS_MAX:
            yield start, index
            start, count = index, 0
        count += named
    if drafts:
        yield start, len(drafts)


def _permitted(rights: PublishRights, draft: Draft) -> Draft:
    if isinstance(draft, Event):
        try:
            rights.allow(draft)
        except TidingsError as error:
            return error
    return draft


async def _store(call: Call, rights: PublishRights, events: list[Event], when: When) -> Sequence[Verdict]:
    bus, timeout_s, authorise = call.api.services.bus, call.api.settings.publish_timeout_s, rights.authorise
    if not when and not any(bus.get_subscriptions(topic) for topic in {str(event.meta.topic) for event in events}):
        return await bus.publish_many(events, timeout_s=timeout_s, authorise=authorise)

    # A topic with groups: one of them may have its window full, and a request cannot wait for as long as that takes.
    async def one(event: Event) -> Verdict:
        try:
            publisher = publisher_of(call.capsule, event) if when else None
            return await bus.publish(event, timeout_s=timeout_s, authorise=authorise, publisher=publisher, **when)
        except PublishTimeout as error:
            return Refused(error)
        except _ALL_FAIL:
            raise
        except TidingsError as error:
            return Refused(error)

    return await asyncio.gather(*(one(event) for event in events))


def _shown(index: int, draft: Draft, verdict: Verdict) -> ItemVerdict:
    topic = str(draft.meta.topic) if isinstance(draft, Event) else None
    if isinstance(verdict, Refused):
        return ItemVerdict(index=index, verdict="refused", topic=topic, error=error_info(verdict.error))
    return ItemVerdict(
        index=index,
        verdict="appended" if isinstance(verdict, Appended) else "duplicate",
        topic=topic,
        seq=verdict.seq,
        offset=verdict.offset,
        event_id=verdict.event_id,
    )


OPERATIONS: Final = (
    ApiOperation(
        method="POST",
        path="/v1/events",
        name="publishEvents",
        summary="Store one event, or many with a verdict each; each is durable before it is answered.",
        tag="events",
        handle=publish,
        query=PublishQuery,
        body_bytes_max=None,
        body={
            JSON: OneOf(EventIn, list[EventIn]),
            NDJSON: EventIn,
            CLOUDEVENT: CloudEvent,
            CLOUDEVENTS_BATCH: list[CloudEvent],
        },
        answers={
            200: {JSON: OneOf(PublishedEvent, PublishedMany), NDJSON: ItemVerdict},
            201: {JSON: PublishedEvent},
        },
        problems=(403, 409, 413, 415, 503),
    ),
    ApiOperation(
        method="GET",
        path="/v1/delayed",
        name="listDelayedEvents",
        summary="The events that wait for their time, of those that one may publish.",
        tag="events",
        handle=list_delayed,
        query=DelayedQuery,
        answers={200: {JSON: WaitingEvents}},
        problems=(403, 503),
    ),
    ApiOperation(
        method="DELETE",
        path="/v1/delayed",
        name="cancelDelayedEvent",
        summary="Cancel an event that waits for its time, with the right to publish it; or all of an actor, as that actor or an administrator.",
        tag="events",
        handle=cancel,
        query=CancelQuery,
        answers={200: {JSON: OneOf(CancelledEvent, CancelledOfActor)}},
        problems=(403, 503),
    ),
)
