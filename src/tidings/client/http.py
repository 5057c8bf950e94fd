"""
``HttpClient``: publishing to a node and reading from it over plain HTTP, for programs that need no subscription.

    async with HttpClient("http://127.0.0.1:8787", token) as node:
        await node.publish(Event(meta=EventMeta(...), payload={...}))
        async for record in node.follow(topic="actions"):
            ...

Every event is sent with an id and a time of its own, so a request whose answer was lost is simply sent again: nothing is stored
twice. What passes by itself (503, a connection that breaks) is tried again a few times, after a random delay that grows.
"""

from __future__ import annotations

import functools
import random
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import httpx
import msgspec

from tidings.bus.delayed_records import due_of
from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import Event
from tidings.log.interface import Appended, Duplicate
from tidings.log.record import Record
from tidings.wire.events import ErrorInfo, ItemVerdict, WaitingEvent, WaitingEvents, event_to_wire

from .errors import RemoteRefused, RemoteUnavailable
from .reconnecting import full_jitter, retry_after_of

_RETRY_S_MIN: Final = 0.2
_RETRY_S_MAX: Final = 5.0
_TIMEOUT_S: Final = 30.0
_WAIT_S: Final = 20.0
_JSON: Final = {"content-type": "application/json"}


class FetchedPage(msgspec.Struct, frozen=True):
    """Some events, and how to go on."""

    events: list[Record]
    next: str
    """The address of the next page; at the end, of what comes later."""
    at_end: bool
    epoch: str
    seq: int
    """The last seq committed when the page was made."""


class ReceivedEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """One event. It says what has happened and to what; what it was is read elsewhere, as with ``GET /v1/events/{seq}``."""

    event_type: str
    event_id: str
    sequence_anchor: dict[str, int]
    """``global_seq``, or for other classes than graph ``event_seq``, a count of the source."""
    scope: dict[str, str]
    """Of ``app_id``, ``domain_id``, ``requester_identity_id`` and ``peer_identity_id`` those that it has."""
    payload_summary: dict[str, Any]
    source_manager: str
    emitted_at: int
    audience_contract: str
    resume_token: str

    @property
    def seq(self) -> int | None:
        """The seq of the record that a graph event tells of."""
        return self.sequence_anchor.get("global_seq")

    @property
    def objects(self) -> list[str]:
        """What a graph event is about, each ``<type>:<id>``."""
        return list(self.payload_summary.get("object_ids", ()))


class EnvelopePage(msgspec.Struct, frozen=True):
    """Some envelopes, and how to go on."""

    envelopes: list[ReceivedEnvelope]
    next_since: int
    """Every graph envelope up to this seq is on this page or on those before it."""
    at_end: bool
    epoch: str


class _Published(msgspec.Struct, frozen=True):
    verdict: str
    seq: int
    offset: int
    event_id: str


class _Cancelled(msgspec.Struct, frozen=True):
    cancelled: bool


class _PublishedMany(msgspec.Struct, frozen=True):
    verdicts: list[ItemVerdict]


class _Problem(msgspec.Struct, frozen=True):
    code: str = "http.unknown"
    detail: str = ""
    retryable: bool = False
    hint: str | None = None


@functools.cache
def _trusted() -> ssl.SSLContext:
    """What the certificates of nodes are held against: read once, since that takes longer than many requests."""
    return httpx.create_ssl_context()


class HttpClient:
    """
    A node over HTTP.

    Args:
        url: The node's address: ``http://127.0.0.1:8787``.
        token: Who we are.
        tries_max: How often a request is sent before the failure is raised.
        transport: Instead of the network, for tests.
        clock, rng: Replaceable for tests.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        tries_max: int = 4,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self.url = url
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=_TIMEOUT_S, transport=transport, verify=_trusted()
        )
        self._tries_max = tries_max
        self._clock = clock
        self._rng = rng or random.Random()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def publish(
        self, event: Event, *, delay: timedelta | None = None, at: datetime | None = None
    ) -> Appended | Duplicate:
        """
        Store an event; returns when it is durable at the node. With ``delay`` or ``at`` the node publishes it then, as
        ``EventBus.publish`` does.

        Raises:
            RemoteRefused: The node refused it.
            RemoteUnavailable: The node was not reached; whether the event was stored is unknown, and publishing it again settles
                that.
            InvalidPayload: It cannot be said in JSON.
        """
        event, due = due_of(self._clock, event, delay, at)
        when = {} if due is None else {"at": due.isoformat()}
        answer = await self._ask("POST", "/v1/events", content=event_to_wire(event), headers=_JSON, params=when)
        done = msgspec.json.decode(answer.content, type=_Published)
        kind = Appended if done.verdict == "appended" else Duplicate
        return kind(done.seq, done.offset, done.event_id)

    async def cancel_delayed(self, event_id: str) -> bool:
        """
        Have an event that waits for its time not published; whether it was still waiting, and may be published by us.

        Raises:
            RemoteRefused: The node refused.
            RemoteUnavailable: The node was not reached.
        """
        answer = await self._ask("DELETE", "/v1/delayed", params={"event_id": event_id})
        return msgspec.json.decode(answer.content, type=_Cancelled).cancelled

    async def delayed_events(self) -> AsyncIterator[WaitingEvent]:
        """
        The events that wait for their time, of those that we may publish, in the order in which they were given.

        Raises:
            RemoteRefused: The node refused.
            RemoteUnavailable: The node was not reached.
        """
        after: int | None = -1
        while after is not None:
            answer = await self._ask("GET", "/v1/delayed", params={"after": after})
            page = msgspec.json.decode(answer.content, type=WaitingEvents)
            for each in page.delayed:
                yield each
            after = page.next_after

    async def publish_many(self, events: Sequence[Event]) -> list[ItemVerdict]:
        """
        Store events in order; a verdict each. A refused one keeps no other from being stored.

        Raises:
            RemoteRefused, RemoteUnavailable, InvalidPayload: as for ``publish``, for all of them.
        """
        body = b"[%b]" % b",".join(event_to_wire(event) for event in events)
        answer = await self._ask("POST", "/v1/events", content=body, headers=_JSON)
        return msgspec.json.decode(answer.content, type=_PublishedMany).verdicts

    async def read(
        self,
        *,
        topic: str | None = None,
        partitions: Iterable[str] = (),
        types: Iterable[str] = (),
        since: int | None = None,
        until: int | None = None,
        from_time: datetime | None = None,
        to_time: datetime | None = None,
        backwards: bool = False,
        limit: int = 100,
        wait_s: float = 0.0,
    ) -> FetchedPage:
        """
        One page of what the caller may read.

        Raises:
            RemoteRefused: ``error_code`` is ``log.position_trimmed`` if records that were asked for are gone.
            RemoteUnavailable: The node was not reached.
        """
        given: dict[str, Any] = {
            "topic": topic,
            "since": since,
            "until": until,
            "from_time": None if from_time is None else from_time.isoformat(),
            "to_time": None if to_time is None else to_time.isoformat(),
            "backwards": "true" if backwards else None,
            "limit": limit,
            "wait": wait_s or None,
            "partition": list(partitions),
            "type": list(types),
        }
        params = {name: value for name, value in given.items() if value is not None}
        return await self._page("/v1/events", params)

    async def follow(
        self, *, topic: str | None = None, partitions: Iterable[str] = (), types: Iterable[str] = (), since: int = 0
    ) -> AsyncIterator[Record]:
        """
        Every event after ``since``, then each further one as it is committed; ends only by an error.

        Raises:
            RemoteRefused, RemoteUnavailable: as for ``read``.
        """
        page = await self.read(topic=topic, partitions=partitions, types=types, since=since, limit=1000, wait_s=_WAIT_S)
        while True:
            for record in page.events:
                yield record
            page = await self._page(page.next)

    async def whoami(self) -> dict[str, Any]:
        """What the node makes of our token."""
        shown: dict[str, Any] = (await self._ask("GET", "/v1/whoami")).json()
        return shown

    async def _page(self, address: str, params: Mapping[str, Any] | None = None) -> FetchedPage:
        answer = await self._ask("GET", address, params=params)
        return msgspec.json.decode(answer.content, type=FetchedPage)

    async def read_envelopes(
        self,
        *,
        since: int,
        until: int | None = None,
        epoch: str | None = None,
        app: str | None = None,
        domain_id: str | None = None,
        object_ids: Iterable[str] = (),
        event_types: Iterable[str] = (),
        limit: int = 1000,
    ) -> EnvelopePage:
        """
        One page of the graph envelopes that the caller may see, as the node's socket ``/events`` would have delivered them.

        Raises:
            RemoteRefused, RemoteUnavailable: as for ``read``.
        """
        given: dict[str, Any] = {
            "since": since,
            "until": until,
            "epoch": epoch,
            "app": app,
            "domain_id": domain_id,
            "limit": limit,
            "object_id": list(object_ids),
            "event_type": list(event_types),
        }
        params = {name: value for name, value in given.items() if value is not None}
        answer = await self._ask("GET", "/v1/envelopes", params=params)
        return msgspec.json.decode(answer.content, type=EnvelopePage)

    async def _ask(self, method: str, address: str, **request: Any) -> httpx.Response:
        failures = 0
        while True:
            try:
                answer = await self._http.request(method, address, **request)
            except httpx.TransportError as error:
                failure: RemoteUnavailable | RemoteRefused = RemoteUnavailable(
                    self.url, str(error) or type(error).__name__
                )
            else:
                if answer.is_success:
                    return answer
                failure = RemoteRefused(_error_of(answer), answer.status_code, retry_after_of(answer.headers))
                if not failure.may_retry:
                    raise failure
            failures += 1
            if failures >= self._tries_max:
                raise failure
            await self._clock.sleep(full_jitter(failures, _RETRY_S_MIN, _RETRY_S_MAX, self._rng))


def _error_of(answer: httpx.Response) -> ErrorInfo:
    """What a refusal says; a proxy in between may say it in other words."""
    try:
        problem = msgspec.json.decode(answer.content, type=_Problem)
    except msgspec.DecodeError:
        problem = _Problem(retryable=answer.status_code in (502, 503, 504))
    return ErrorInfo(
        code=problem.code,
        detail=problem.detail or f"the answer was {answer.status_code} {answer.reason_phrase}",
        retryable=problem.retryable,
        hint=problem.hint,
    )
