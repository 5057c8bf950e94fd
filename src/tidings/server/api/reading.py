"""
``GET /v1/events``: pages of what was committed, as JSON, JSON Lines or CloudEvents, and one event by its seq.

A caller sees the records of topics, spaces and partitions that it may read; others are passed over as if they were not there. What a page may
show is decided after the access book has seen every record on it: nothing that was committed after a revocation is shown to the one who
lost the right, however fast it asks. ``wait`` keeps an empty read open until something comes.
"""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import msgspec
from starlette.responses import Response

from tidings.access.administration import ACCESS_TOPIC
from tidings.access.resources import Action, topic
from tidings.core.names import check_topic
from tidings.log.errors import LogClosed, PositionTrimmed
from tidings.log.interface import Page, Query
from tidings.log.record import Record, RecordMeta
from tidings.wire.events import time_of

from ..errors import BadRequest, UnknownEvent
from ..event_rights import may_get
from .cloudevents import CLOUDEVENT, CLOUDEVENTS_BATCH, CloudEvent, to_cloudevent
from .operations import JSON, NDJSON, ApiOperation, Call, JsonAnswer

_WIDTH_MIN: Final = 256
"""Records that are looked at together once a page had none to show."""
_WAKE_INTERVAL_S: Final = 0.1
"""Reads of all topics that wait are woken at most this often: each commit wakes all of them."""

Place = Annotated[int, msgspec.Meta(ge=0, le=10**18 - 1)]


class ReadQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to read. Conditions are joined by and; ``since`` is excluded, ``until`` included."""

    topic: str | None = None
    partition: tuple[str, ...] = ()
    type: tuple[str, ...] = ()
    event_id: str | None = None
    since: Place | None = None
    until: Place | None = None
    from_offset: Place | None = None
    to_offset: Place | None = None
    from_time: str | None = None
    to_time: str | None = None
    backwards: bool = False
    limit: Annotated[int, msgspec.Meta(ge=1)] = 100
    wait: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0
    epoch: str | None = None
    known_drops: Place = 0


class RecordOut(msgspec.Struct, frozen=True, kw_only=True):
    """A committed event."""

    offset: int
    seq: int
    meta: RecordMeta
    payload: dict[str, Any] | str
    """Text if it is encrypted and this node has no key."""


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some events, and how to go on."""

    events: list[RecordOut]
    next: str
    """Where the next page is, also at the end: there it is what comes later."""
    at_end: bool
    """Nothing more was there to read. A page can be empty and not be the end."""
    epoch: str
    seq: int
    """The last seq committed when the page was made."""


async def read(call: Call) -> Response:
    """One page."""
    asked = call.query(ReadQuery)
    query = _query_of(asked)
    limit = min(asked.limit, call.api.settings.page_count_max)
    if asked.topic is not None:
        call.capsule.require(Action.READ, topic(asked.topic))
    log = call.api.services.log
    seen = log.position.seq
    records, following, at_end = await _gather(call, asked, query, limit)
    if not records and at_end and asked.wait > 0 and not asked.backwards:
        records, following, at_end = await _wait(call, asked, following, limit)
    if at_end and not records:
        following = _after_nothing(query, following, seen)
    epoch, seq = log.position.epoch, log.position.seq
    url = _next_url(asked, following, epoch)
    headers = {"link": f'<{url}>; rel="next"', "tidings-at-end": str(at_end).lower(), "tidings-epoch": epoch}
    match call.accepts(JSON, NDJSON, CLOUDEVENTS_BATCH):
        case "application/x-ndjson":
            return JsonAnswer(b"".join(record.to_json() + b"\n" for record in records), 200, headers, NDJSON)
        case "application/cloudevents-batch+json":
            shown = msgspec.json.encode([to_cloudevent(record) for record in records])
            return JsonAnswer(shown, 200, headers, CLOUDEVENTS_BATCH)
        case _:
            # Records are JSON already; only what is around them is made here.
            body = b'{"events":[%b],"next":%b,"at_end":%b,"epoch":%b,"seq":%d}' % (
                b",".join(record.to_json() for record in records),
                msgspec.json.encode(url),
                msgspec.json.encode(at_end),
                msgspec.json.encode(epoch),
                seq,
            )
            return JsonAnswer(body, 200, headers)


async def read_one(call: Call) -> Response:
    """One event by its seq."""
    text = call.path("seq")
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 18) or int(text) < 1:
        raise BadRequest("path.seq", f"{text[:40]!r} is no seq: they count from 1")
    seq = int(text)
    try:
        page = await call.api.services.log.read(Query(since=seq - 1, until=seq), limit=1)
    except PositionTrimmed as error:
        raise UnknownEvent(seq) from error
    if page.records:
        await call.api.services.dispatcher.reached(seq)
    if not page.records or not may_get(call.capsule, Action.READ, page.records[0]):
        raise UnknownEvent(seq)  # what may not be seen is not said to exist
    (record,) = page.records
    if call.accepts(JSON, CLOUDEVENT) == CLOUDEVENT:
        return JsonAnswer(msgspec.json.encode(to_cloudevent(record)), 200, None, CLOUDEVENT)
    return JsonAnswer(record.to_json())


def _query_of(asked: ReadQuery) -> Query:
    if asked.topic is None and (asked.from_offset, asked.to_offset) != (None, None):
        raise BadRequest("query.topic", "is missing: offsets count within a topic")
    return Query(
        topic=None if asked.topic is None else check_topic(asked.topic),
        partitions=asked.partition,
        event_ids=() if asked.event_id is None else (asked.event_id,),
        since=asked.since,
        until=asked.until,
        from_offset=asked.from_offset,
        to_offset=asked.to_offset,
        from_time=None if asked.from_time is None else time_of("query.from_time", asked.from_time),
        to_time=None if asked.to_time is None else time_of("query.to_time", asked.to_time),
        backwards=asked.backwards,
        epoch=asked.epoch,
        known_drops=asked.known_drops,
    )


async def _gather(call: Call, asked: ReadQuery, query: Query, limit: int) -> tuple[list[Record], Query, bool]:
    """
    Read on until something fits, the log ends, or enough was looked at.

    A page of the log is taken whole or not at all, so that ``next`` is the log's own: a page of ours ends where one of the log's
    does, and has as many records at most.
    """
    services, settings = call.api.services, call.api.settings
    scanned, width = 0, limit
    while True:
        page: Page = await services.log.read(query, limit=width, bytes_max=settings.page_bytes_max)
        if page.records:
            await services.dispatcher.reached(max(page.records[0].seq, page.records[-1].seq))
        fits = [_fits(call, asked, record) for record in page.records]
        if sum(fits) > limit:
            # Read again from the first that fits on: each of the two pages ends where one of the log's does.
            if first := fits.index(True):
                query = (await services.log.read(query, limit=first, bytes_max=settings.page_bytes_max)).next
            page = await services.log.read(query, limit=limit, bytes_max=settings.page_bytes_max)
            fits = [_fits(call, asked, record) for record in page.records]
        found = [record for record, does_fit in zip(page.records, fits, strict=True) if does_fit]
        scanned += max(1, len(page.records))
        query = page.next
        if found or page.at_end or scanned >= settings.scan_count_max:
            return found, query, page.at_end
        # Nothing fits: look at more at once, since a page costs about the same however short it is.
        width = max(limit, _WIDTH_MIN)
        await asyncio.sleep(0)


def _after_nothing(asked: Query, following: Query, seen: int) -> Query:
    """
    How to go on where nothing was shown: the same whether nothing was there, or what there was may not be seen.

    Were the next page to begin at the oldest record kept, what came and was dropped in between would be passed over in silence.
    """
    if asked.backwards or following.from_offset is not None:
        return following  # offsets count within a topic that the caller may read
    end = seen if asked.until is None else min(seen, asked.until)
    return msgspec.structs.replace(following, since=max(asked.since or 0, end))


def _fits(call: Call, asked: ReadQuery, record: Record) -> bool:
    if asked.type and record.meta.type not in asked.type:
        return False
    return may_get(call.capsule, Action.READ, record)


async def _wait(call: Call, asked: ReadQuery, query: Query, limit: int) -> tuple[list[Record], Query, bool]:
    """Read again after each commit, until something fits or the time is up. A change of access wakes it too: it may end the right to wait."""
    services = call.api.services
    clock, log = services.clock, services.log
    deadline = clock.monotonic() + min(asked.wait, call.api.settings.wait_s_max)
    woken_s = -math.inf
    timer = asyncio.ensure_future(clock.sleep(max(0.0, deadline - clock.monotonic())))
    try:
        while True:
            # Looked up before reading: waiting for more than this cannot sleep through anything.
            seen = log.position.seq
            records, query, at_end = await _gather(call, asked, query, limit)
            await services.dispatcher.reached(seen)
            call.api.services.authenticator.check(call.capsule)
            if asked.topic is not None:
                call.capsule.require(Action.READ, topic(asked.topic))
            if records or not at_end or timer.done():
                return records, query, at_end
            names = {query.topic} if query.topic is None else {query.topic, ACCESS_TOPIC}
            commits = [asyncio.ensure_future(log.wait(seen, name)) for name in names]
            try:
                await asyncio.wait({*commits, timer}, return_when=asyncio.FIRST_COMPLETED)
                rest_s = woken_s + _WAKE_INTERVAL_S - clock.monotonic()
                if query.topic is None and rest_s > 0.0 and not timer.done():
                    await clock.sleep(min(rest_s, max(0.0, deadline - clock.monotonic())))
                woken_s = clock.monotonic()
            finally:
                for commit in commits:
                    commit.cancel()
                ended = await asyncio.gather(*commits, return_exceptions=True)
            for outcome in ended:
                if isinstance(outcome, LogClosed):
                    raise outcome
    finally:
        timer.cancel()
        await asyncio.gather(timer, return_exceptions=True)


def _next_url(asked: ReadQuery, following: Query, epoch: str) -> str:
    """The same question, from where this page ended."""
    values: list[tuple[str, str]] = [("epoch", epoch)]
    given: dict[str, object] = {
        "topic": asked.topic,
        "since": following.since,
        "until": following.until,
        "from_offset": following.from_offset,
        "to_offset": following.to_offset,
        "from_time": asked.from_time,
        "to_time": asked.to_time,
        "event_id": asked.event_id,
        "limit": asked.limit,
        "wait": asked.wait or None,
        "known_drops": following.known_drops or None,
        "backwards": "true" if asked.backwards else None,
    }
    values += [(name, str(value)) for name, value in given.items() if value is not None]
    values += [("partition", each) for each in asked.partition]
    values += [("type", each) for each in asked.type]
    return f"/v1/events?{urlencode(values)}"


OPERATIONS: Final = (
    ApiOperation(
        method="GET",
        path="/v1/events",
        name="readEvents",
        summary="Read a page of committed events, oldest first; of topics and spaces that the caller may read.",
        tag="events",
        handle=read,
        query=ReadQuery,
        answers={200: {JSON: EventPage, NDJSON: RecordOut, CLOUDEVENTS_BATCH: list[CloudEvent]}},
        problems=(403, 409, 410, 503),
    ),
    ApiOperation(
        method="GET",
        path="/v1/events/{seq}",
        name="readEvent",
        summary="Read one event by its seq.",
        tag="events",
        handle=read_one,
        answers={200: {JSON: RecordOut, CLOUDEVENT: CloudEvent}},
        problems=(404, 503),
    ),
)
