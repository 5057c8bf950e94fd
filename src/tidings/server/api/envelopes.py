"""
``GET /v1/envelopes``: the graph envelopes that ``/events`` would have delivered, made again from the records, in pages or as server-sent events.

What a caller sees is decided as at the socket: by the same filters, and by its rights as they are now, after the access book has seen every record
that is shown. A page never ends within a seq, so ``since`` is all it takes to go on. With ``Accept: text/event-stream`` the pages are followed by
what happens from then on: such a stream is a subscriber like any other, with its place among the connections, its pace and its buffer, and is
acknowledged by being read. The id of an event is a seq, and is sent when that seq is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidings.access.context import ANONYMOUS
from tidings.access.errors import TokenExpired, TokenRevoked
from tidings.access.resources import Action, node
from tidings.core.clock import Clock, within
from tidings.core.errors import TidingsError
from tidings.core.names import check_app
from tidings.gateway.contexts import RequestContext
from tidings.gateway.refusals import AppNotFound, FilterDenied, SubscriptionClosed, SubscriptionRefused
from tidings.gateway.registry import Admission, Subscriber
from tidings.log.errors import EpochMismatch, LogClosed, PositionAhead
from tidings.log.interface import Query
from tidings.wire.gateway import CloseReason, SubscribeEvents, error_frame

from ..errors import BadRequest
from .operations import JSON, ApiOperation, Call, JsonAnswer, escape_separators

EVENT_STREAM: Final = "text/event-stream"
_GRAPH: Final = "graph"
_RETRY_MS: Final = 3_000
"""After which a client connects again, as the stream tells it."""
_CHECK_S: Final = 0.5
"""How often it is looked whether a stream's token is still good, and whether the node stops."""
_HEADERS: Final = [
    (b"content-type", EVENT_STREAM.encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

Place = Annotated[int, msgspec.Meta(ge=0, le=10**18 - 1)]


class EnvelopesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to read: the filters of a subscription, and where. ``since`` is excluded, ``until`` included; without ``since`` from the oldest on."""

    since: Place | None = None
    until: Place | None = None
    limit: Annotated[int, msgspec.Meta(ge=1)] = 100
    epoch: str | None = None
    app: str | None = None
    domain_id: str | None = None
    object_id: tuple[str, ...] = ()
    event_type: tuple[str, ...] = ()


class EnvelopeOut(msgspec.Struct, frozen=True, kw_only=True):
    """An envelope, as the socket has it, but with an id and a token of its own; its place is its seq."""

    audience_contract: str
    emitted_at: int
    event_id: str
    event_type: str
    payload_summary: dict[str, Any]
    resume_token: str
    scope: dict[str, str]
    sequence_anchor: dict[str, int]
    source_manager: str


class EnvelopesPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some envelopes, and how to go on."""

    envelopes: list[EnvelopeOut]
    next_since: int
    """All up to this seq that may be seen are on this page, or on those before it."""
    at_end: bool
    """Nothing more was there to read. A page can be empty and not be the end."""
    epoch: str


class _Found(NamedTuple):
    """Envelopes by seq, in order, and how far everything was looked at."""

    envelopes: list[tuple[int, bytes]]
    next_since: int
    at_end: bool


class _Reader:
    """
    Reads envelopes for one caller.

    Raises:
        BadRequest: The filters make no sense.
        AppNotFound, FilterDenied: There is no such app, or the filters ask for what the caller may not see.
    """

    def __init__(self, call: Call, asked: EnvelopesQuery, context: RequestContext) -> None:
        services = call.api.services
        self._call = call
        self._gateway = services.gateway
        if not services.apps.is_enabled(context.app_id):
            raise AppNotFound(context.app_id)
        self.context = context
        self.wanted = SubscribeEvents(
            app_id=context.app_id,
            subscription_type=None if asked.event_type else _GRAPH,
            channels=asked.event_type or None,
            domain_id=asked.domain_id,
            object_ids=asked.object_id or None,
        )
        if any(not each.startswith(f"{_GRAPH}.") for each in asked.event_type):
            raise BadRequest("query.event_type", "only graph events are made of records, and can be read again")
        try:
            self._filters = self._gateway.rules.settle(self.wanted, self.context, call.capsule)
        except SubscriptionClosed as error:
            if error.close_reason is CloseReason.PERMISSION_DENIED:
                raise FilterDenied(error.problem) from error
            raise BadRequest("query", error.problem) from error
        self._epoch = asked.epoch

    def check_place(self, since: int | None) -> None:
        """
        Refuse a place of another log, or behind the end of this one: what is committed next would be passed over.

        Raises:
            EpochMismatch, PositionAhead: It is one.
        """
        end = self._call.api.services.log.position
        if self._epoch not in (None, end.epoch):
            raise EpochMismatch(self._epoch, end.epoch)
        if since is not None and since > end.seq:
            raise PositionAhead(since, end.seq)

    async def page(self, since: int | None, until: int | None, limit: int) -> _Found:
        """Read on until something fits, the log ends, or enough was looked at; at most ``limit`` envelopes, but those of a seq together."""
        services, settings, rights = self._call.api.services, self._call.api.settings, self._call.capsule
        gateway, history = services.gateway, self._call.api.envelopes
        query, effort = Query(since=since, until=until, epoch=self._epoch), 0
        found: list[tuple[int, bytes]] = []
        while True:
            page = await history.read(query, bytes_max=settings.page_bytes_max)
            await services.dispatcher.reached(page.through_seq)
            services.authenticator.check(rights)
            gateway.issuer.require()
            decided, is_included = None, False
            for seq, kind, retained, encoded in page.told:
                if kind is not decided or self._filters.object_ids is not None:
                    decided = kind
                    is_included = gateway.rules.includes(self._filters, self.context, rights, retained)
                if is_included:
                    if len(found) >= limit and seq != found[-1][0]:
                        return _Found(found, found[-1][0], at_end=False)
                    found.append((seq, encoded))
            effort += page.effort
            if page.at_end or effort >= (limit if found else settings.scan_count_max):
                return _Found(found, page.through_seq, page.at_end)
            await asyncio.sleep(0)
            query = page.next


async def read(call: Call) -> Response:
    """One page, or a stream."""
    asked = call.query(EnvelopesQuery)
    gateway, context = call.api.services.gateway, _context(call, asked)
    limit = min(asked.limit, call.api.settings.page_count_max)
    if call.accepts(JSON, EVENT_STREAM) == EVENT_STREAM and call.method == "GET":
        since, address = _since(call, asked), call.address
        try:
            reader = _Reader(call, asked, context)
        except (SubscriptionRefused, BadRequest) as error:
            reason = error.reason if isinstance(error, SubscriptionRefused) else CloseReason.FILTER_INVALID.reason
            gateway.telemetry.rejected(context, reason, cause=error.describe(), address=address)
            raise
        reader.check_place(since)
        return _Stream(call, reader, gateway.admit(context, address=address), since, limit)
    reader = _Reader(call, asked, context)
    reader.check_place(asked.since)
    found = await reader.page(asked.since, asked.until, limit)
    body = b'{"envelopes":[%b],"next_since":%d,"at_end":%b,"epoch":%b}' % (
        b",".join(envelope for _, envelope in found.envelopes),
        found.next_since,
        msgspec.json.encode(found.at_end),
        msgspec.json.encode(call.api.services.log.position.epoch),
    )
    return JsonAnswer(body)


def _context(call: Call, asked: EnvelopesQuery) -> RequestContext:
    """Who is asking, and in which app."""
    return RequestContext(
        app_id=check_app("query.app", asked.app or call.api.services.settings.server.default_app),
        requester_identity_id=call.subject,
        trace_id=call.request_id,
        device_id=call.capsule.context.client_id,
        capability=Action.SUBSCRIBE.value,
        is_admin=call.capsule.allows(Action.ADMINISTER, node()),
    )


def _since(call: Call, asked: EnvelopesQuery) -> int | None:
    """Where a stream begins: behind the last event that the client has had, as its own reconnecting says; else where the query says."""
    if asked.until is not None:
        raise BadRequest("query.until", "a stream has no end")
    last = call.headers.get("last-event-id")
    if last is None:
        return asked.since
    if not (last.isascii() and last.isdigit() and len(last) <= 18):
        raise BadRequest("header.last-event-id", f"{last[:40]!r} is no seq")
    return int(last)


class _Sink:
    """Where the gateway leaves what a stream is to send. ``admission``: a stream that is closed has no place, however long its last words take."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._arrived = asyncio.Event()
        self.prefixes: list[bytes] = []
        self.pings: list[bytes] = []
        self.closed: CloseReason | None = None

    def send(self, prefixes: tuple[bytes, ...]) -> bool:
        self.prefixes += prefixes
        self._arrived.set()
        return True

    def ping(self, payload: bytes) -> None:
        self.pings.append(payload)
        self._arrived.set()

    def close(self, reason: CloseReason, data: Mapping[str, object]) -> None:
        self.closed = reason
        self._admission.release()
        self._arrived.set()

    async def wait(self, clock: Clock) -> None:
        """Wait until there is something to do, but not for long."""
        arrived = asyncio.ensure_future(self._arrived.wait())
        try:
            await within(clock, _CHECK_S, arrived)
        finally:
            arrived.cancel()
        self._arrived.clear()


class _Told(msgspec.Struct):
    """What of an envelope says where it stands."""

    resume_token: str
    payload_summary: dict[str, Any]
    sequence_anchor: dict[str, int]


_TOLD: Final = msgspec.json.Decoder(_Told)


class _Stream(Response):
    """A stream of server-sent events: what is there after ``since``, if that is given, and what happens from then on."""

    def __init__(self, call: Call, reader: _Reader, admission: Admission, since: int | None, limit: int) -> None:
        super().__init__(media_type=EVENT_STREAM)
        self._services = call.api.services
        self._rights = call.capsule
        self._reader = reader
        self._admission = admission
        self._position = since
        """The last seq that is complete, as far as the client was told."""
        self._limit = limit
        self._sink = _Sink(admission)
        self._subscriber: Subscriber | None = None
        self._lead = b"retry: %d\n" % _RETRY_MS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        registry = self._services.gateway.registry
        talking = leaving = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            talking = asyncio.ensure_future(self._talk(send))
            leaving = asyncio.ensure_future(_left(receive))
            await asyncio.wait({talking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if talking.done():
                await talking
        finally:
            tasks = [task for task in (talking, leaving) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._subscriber is not None:
                registry.close(self._subscriber, None)
            self._admission.release()

    async def _talk(self, send: Send) -> None:
        gateway, is_on_record = self._services.gateway, False
        registry = gateway.registry
        try:
            await self._catch_up(send, None)
            is_on_record = True  # by the registry, whatever comes of it
            self._subscriber = await registry.open(self._admission, self._rights, self._reader.wanted, self._sink)
            if self._position is None:
                self._position = self._subscriber.since
                await self._send_blocks(send, b"id: %d\n\n" % self._position)
            await self._catch_up(send, self._subscriber.since)
            self._subscriber.resume_sending()
            await self._follow(send, self._subscriber)
        except SubscriptionClosed as error:
            reason, problem = error.close_reason, error.problem
        except (TokenExpired, TokenRevoked) as error:
            reason, problem = CloseReason.AUTH_FAILED, error.public_text
        except TidingsError as error:
            is_stopping = isinstance(error, LogClosed)
            reason, problem = CloseReason.SHUTDOWN if is_stopping else CloseReason.INTERNAL_ERROR, error.public_text
        if self._subscriber is not None:
            registry.close(self._subscriber, reason)
        elif not is_on_record and reason is not CloseReason.SHUTDOWN:
            context, address = self._reader.context, self._admission.address
            gateway.telemetry.rejected(context, reason.reason, cause=problem, address=address, is_offence=False)
        # Told as at the socket.
        await _write(send, b"event: closed\ndata: %b\n\n" % _payload_of(error_frame(reason, problem, "")))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _catch_up(self, send: Send, until: int | None) -> None:
        """Send what is there, if it is known from where on."""
        while self._position is not None and (until is None or self._position < until):
            self._check()
            found = await self._reader.page(self._position, until, self._limit)
            seqs = [seq for seq, _ in found.envelopes]
            events = [
                _event(envelope, seq if seqs[at + 1 : at + 2] != [seq] else None)
                for at, (seq, envelope) in enumerate(found.envelopes)
            ]
            if seqs[-1:] != [found.next_since]:  # else the last event has this id
                events.append(b"id: %d\n\n" % found.next_since)
            self._position = found.next_since
            await self._send_blocks(send, b"".join(events))
            if found.at_end:
                return

    async def _follow(self, send: Send, subscriber: Subscriber) -> None:
        """Send what happens, until the subscription or the right to it ends."""
        sink = self._sink
        while True:
            await sink.wait(self._services.clock)
            self._check()
            prefixes, sink.prefixes = sink.prefixes, []
            pings, sink.pings = sink.pings, []
            if prefixes:
                told = [_TOLD.decode(_payload_of(prefix)) for prefix in prefixes]
                await self._send_blocks(send, b"".join(map(self._next, prefixes, told)))
                if subscriber.is_open:
                    subscriber.ack(told[-1].resume_token)
            if pings:
                await _write(send, b": still here\n\n")
                subscriber.ponged(pings[-1])
            if sink.closed is not None:
                raise SubscriptionClosed(sink.closed, sink.closed.reason)

    async def _send_blocks(self, send: Send, blocks: bytes) -> None:
        """Send blocks of a stream. The first has the time after which a client that lost the stream is to connect again."""
        if blocks:
            lead, self._lead = self._lead, b""
            await _write(send, lead + blocks)

    def _check(self) -> None:
        """
        Make sure that the stream may go on.

        Raises:
            SubscriptionClosed: The node is stopping, or a stream that still catches up would not be let in now.
            TokenExpired, TokenRevoked: The right to it has ended.
        """
        services, context = self._services, self._reader.context
        if not services.gateway.registry.is_open:
            raise SubscriptionClosed(CloseReason.SHUTDOWN, "the node is stopping")
        services.authenticator.check(self._rights)
        if self._subscriber is not None:
            return  # then the registry closes it
        if not services.apps.is_enabled(context.app_id):
            raise SubscriptionClosed(CloseReason.PERMISSION_DENIED, f"there is no app {context.app_id!r}")
        identity, address = context.requester_identity_id, self._admission.address
        is_named = identity != ANONYMOUS
        verdict = services.guard.admit(
            identity=identity, app=context.app_id, address=address, has_token=lambda: is_named
        )
        if not verdict.is_allowed:
            raise SubscriptionClosed(CloseReason.SUBSCRIPTION_REJECTED, "denied for a time")

    def _next(self, prefix: bytes, told: _Told) -> bytes:
        """An event, with its seq as the id if it is the last of it; of one that was sent before, nothing."""
        seq, summary = told.sequence_anchor["global_seq"], told.payload_summary
        assert self._position is not None
        if seq <= self._position:
            return b""
        passed = b""
        is_last = summary.get("part") == summary.get("parts")
        if seq - 1 > self._position and not is_last:
            # All before it is complete, also what a filter has left the end of out of. The last part of an event has an id of its own.
            self._position = seq - 1
            passed = b"id: %d\n\n" % self._position
        if is_last:
            self._position = seq
        return passed + _event(_payload_of(prefix), seq if is_last else None)


def _payload_of(frame: bytes) -> bytes:
    """The envelope in a frame of the socket, whole or up to its trace id."""
    return frame[frame.index(b',"payload":') + len(b',"payload":') : frame.rindex(b',"trace_id":')]


def _event(envelope: bytes, seq: int | None) -> bytes:
    """An envelope as an event; its own type is in it."""
    envelope = escape_separators(envelope)
    return b"data: %b\n\n" % envelope if seq is None else b"id: %d\ndata: %b\n\n" % (seq, envelope)


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


OPERATIONS: Final = (
    ApiOperation(
        method="GET",
        path="/v1/envelopes",
        name="readEnvelopes",
        summary="Read the graph envelopes that /events would have delivered, in pages or as a stream that goes on.",
        tag="events",
        handle=read,
        query=EnvelopesQuery,
        answers={200: {JSON: EnvelopesPage, EVENT_STREAM: str}},
        problems=(403, 404, 409, 410, 503),
    ),
)
