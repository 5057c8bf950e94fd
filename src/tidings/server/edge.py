"""
What comes before every route: request ids, web pages, the limit on bodies, counting, the access log, and the answer to an error.

One ASGI middleware, because it is one story: a request comes in with or without an id, is bounded, is answered exactly once, and
leaves one line and one observation behind, whatever happened in between. Errors are answered with problem documents (RFC 9457) that have the
error's own code. Every answer has a request id, also one that is made before any route or endpoint is reached; an id that came with
the request is used if nothing in it could break a log line or a header.

A browser sends a page's requests from the user's own machine, so being reached from loopback proves nothing. It says which page it was
(``Origin``), and pages that are not allowed are refused, over HTTP as over WebSocket. A page whose own name was made to resolve to this
machine (DNS rebinding) is of the same origin to the browser; what gives it away is ``Host``. That is compared where access is open, and
wherever names are set.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, Final

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidings.access.guard import network_of
from tidings.core.clock import Clock
from tidings.core.errors import TidingsError
from tidings.core.ids import new_event_id

from .errors import (
    BodyTooLarge,
    HostRefused,
    InternalError,
    MethodNotAllowed,
    NodeStopping,
    OriginRefused,
    RequestRefused,
    TrafficRefused,
)
from .settings import ServerSettings

UNIX: Final = "unix"
"""What is used as the address where there is none."""


class PeerCounts:
    """Open connections by address, of IPv6 by its network. It holds no more entries than there are connections."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def entered(self, address: str) -> None:
        """A connection is open."""
        if address != UNIX:
            self._counts[network_of(address)] += 1

    def left(self, address: str) -> None:
        """A connection that was counted has closed."""
        if address != UNIX:
            network = network_of(address)
            self._counts[network] -= 1
            if not self._counts[network]:
                del self._counts[network]

    def count(self, address: str) -> int:
        """How many the address has; none if it is no address."""
        return self._counts.get(network_of(address), 0)


ACCESS_LOGGER: Final = "tidings.server.requests"
REQUEST_ID_HEADER: Final = "x-request-id"

_access: Final = logging.getLogger(ACCESS_LOGGER)
_HEADER: Final = REQUEST_ID_HEADER.encode()
_ACCEPTABLE: Final = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_SHOWN_CHARS_MAX: Final = 2_000
# What moves a terminal's cursor, begins a line, or turns the reading direction round.
_ILLEGIBLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def legible(text: str) -> str:
    """Text from outside, safe for a log line: control characters are written as escapes."""
    return _ILLEGIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def acceptable_id(given: bytes | None) -> str:
    """The id that was given, or a new one: one that could do harm is replaced, not repaired."""
    if given is not None and _ACCEPTABLE.fullmatch(given) is not None:
        return given.decode()
    return f"rq-{new_event_id()[3:]}"


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id of a request with these headers, whose names are in lower case; the last one given counts."""
    given: bytes | None = None
    for name, value in headers:
        if name == _HEADER:
            given = value
    return acceptable_id(given)


def log_request(
    method: str,
    path: str,
    status: int,
    seconds: float,
    *,
    peer: str,
    request_id: str,
    bytes_in: int = 0,
    bytes_out: int = 0,
) -> None:
    """Leave the line of one answered request."""
    if not _access.isEnabledFor(logging.INFO):
        return
    method, path = legible(method[:32]), legible(path[:_SHOWN_CHARS_MAX])
    _access.info(
        "%s %s %d %.1f ms",
        method,
        path,
        status,
        seconds * 1000,
        extra={
            "method": method,
            "path": path,
            "status": status,
            "duration_ms": round(seconds * 1000, 3),
            "bytes_in": bytes_in,
            "bytes_out": bytes_out,
            "peer": peer,
            "request_id": request_id,
        },
    )


PROBLEM_TYPE: Final = "application/problem+json"


def problem_of(error: TidingsError, status: int, request_id: str | None = None) -> dict[str, Any]:
    """The problem document of an error."""
    problem: dict[str, Any] = {
        "type": f"urn:tidings:error:{error.code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": error.public_text,
        "code": error.code,
        "retryable": error.retryable,
    }
    if error.hint is not None:
        problem["hint"] = error.hint
    if request_id is not None:
        problem["request_id"] = request_id
    return problem


_RETRY_AFTER_S: Final = 1
"""What ``Retry-After`` says with 503: what passes by itself mostly does so soon."""

_STATUSES: Final = {
    "event.invalid": 400,
    "event.invalid_name": 400,
    "event.invalid_payload": 400,
    "event.invalid_timestamp": 400,
    "event.repeated_key": 400,
    "settings.invalid": 400,
    "bus.topic_mismatch": 400,
    "bus.invalid_batch": 400,
    "access.invalid_change": 400,
    "access.invalid_policy": 400,
    "access.invalid_app": 400,
    "access.invalid_directive": 400,
    "gateway.declaration_refused": 400,
    "gateway.reload_vetoed": 409,
    "access.unknown_app": 404,
    "access.temporarily_denied": 503,
    "access.audit_unavailable": 503,
    "access.auth_failed": 401,
    "access.token_invalid": 401,
    "access.token_expired": 401,
    "access.token_revoked": 401,
    "access.forbidden": 403,
    "log.sealed_payload": 403,
    "log.unknown_topic": 404,
    "bus.unknown_group": 404,
    "bus.unknown_dead_letter": 404,
    "log.id_conflict": 409,
    "log.epoch_mismatch": 409,
    "log.position_ahead": 409,
    "bus.subscription_exists": 409,
    "bus.reserved_group": 409,
    "bus.cursor_damaged": 409,
    "log.no_sealing_key": 409,
    "log.position_trimmed": 410,
    "log.read_only": 503,
    "log.closed": 503,
    "bus.closed": 503,
}


def status_of(error: TidingsError) -> int:
    """
    The status to answer with.

    An error of the server's own says it itself. One that is not in the table is 503 if trying again can help, and 500 if not.
    """
    own = getattr(error, "status", None)
    if isinstance(own, int):
        return own
    return _STATUSES.get(error.code, 503 if error.retryable else 500)


def problem_parts(error: TidingsError, request_id: str | None) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of the answer to a request that met this error."""
    status = status_of(error)
    headers = {"content-type": PROBLEM_TYPE}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    elif status == 503 and error.retryable:
        headers["retry-after"] = str(getattr(error, "retry_after_s", _RETRY_AFTER_S))
    elif isinstance(error, MethodNotAllowed):
        headers["allow"] = ", ".join(error.allowed)
    headers.update(getattr(error, "headers", {}))
    return status, orjson.dumps(problem_of(error, status, request_id)), headers


def problem_response(error: TidingsError, request_id: str | None) -> Response:
    """The answer to a request that met this error."""
    status, body, headers = problem_parts(error, request_id)
    return Response(body, status, headers)


_NO_SNIFFING: Final = (b"x-content-type-options", b"nosniff")
_NEVER_STORED: Final = (b"cache-control", b"no-store")
_FOREIGN_SITES: Final = (b"cross-site", b"same-site")


def check_page(
    headers: Collection[tuple[bytes, bytes]], settings: ServerSettings, *, is_open: bool, is_unix: bool = False
) -> None:
    """
    Refuse what a foreign web page asks for. The node's own page, reached by an address or a name of the node, is not foreign.

    Args:
        headers: The request's, names in lower case; all of a repeated one count.
        settings: Which origins and hosts are allowed.
        is_open: Whether access is open, so that nothing else would keep a page out.
        is_unix: Whether it came by the Unix socket, where no browser gets.

    Raises:
        OriginRefused: The page is of an origin that is not allowed.
        HostRefused: The node is not known by the name that it was reached by.
    """
    has_origin = is_foreign = False
    for name, value in headers:
        if name == b"origin":
            has_origin = True
            origin = value.decode("latin-1")
            if (
                "*" not in settings.origins
                and origin not in settings.origins
                and not _is_own(origin, headers, settings)
            ):
                raise OriginRefused(origin[:200])
        elif name == b"sec-fetch-site" and value.strip().lower() in _FOREIGN_SITES:
            is_foreign = True
        elif name == b"host" and (is_open or settings.hosts) and not is_unix:
            host = value.decode("latin-1")
            if not is_own_host(host, settings):
                raise HostRefused(host[:200])
    # An image or a link of a foreign page names no origin; browsers still say that it is foreign.
    if is_foreign and not has_origin and is_open and "*" not in settings.origins:
        raise OriginRefused("another site")


def _is_own(origin: str, headers: Collection[tuple[bytes, bytes]], settings: ServerSettings) -> bool:
    """Whether a page came from where the request goes. By a name that is not the node's, that could be anybody's page."""
    hosts = {value.decode("latin-1") for name, value in headers if name == b"host"}
    return len(hosts) == 1 and origin.partition("://")[2] in hosts and is_own_host(hosts.pop(), settings)


def is_own_host(given: str, settings: ServerSettings) -> bool:
    """Whether a ``Host`` is an address, this machine, or a name that the settings have. A page cannot have an address for its name."""
    given = given.strip()
    name = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
    name = name.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost") or name == settings.host.lower():
        return True
    if name in {each.lower() for each in settings.hosts}:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


logger = logging.getLogger(__name__)

REQUEST_ID: contextvars.ContextVar[str | None] = contextvars.ContextVar("tidings_request_id", default=None)
"""The id of the request that is being answered; log lines carry it."""

_UNROUTED: Final = "(none)"
_SAFE: Final = frozenset({"GET", "HEAD"})
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

Observed = Callable[[str, str, int, float], None]
"""Called with each answered request: its method, its route's pattern, the status, the seconds it took."""


class Edge:
    """
    The outermost layer of the HTTP application.

    Args:
        app: What answers.
        settings: Gives the settings that hold now; they can be reloaded.
        clock: For the time a request takes.
        observed: Called for each request.
        is_open: Whether access is open, so that nothing else would keep web pages out.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Callable[[], ServerSettings],
        clock: Clock,
        observed: Observed,
        is_open: bool = False,
    ) -> None:
        self._app = app
        self._settings = settings
        self._clock = clock
        self._observed = observed
        self._is_open = is_open
        self.refused: Counter[str] = Counter()
        """Requests refused before any route was asked, by the error's code."""
        self._reading: dict[_Exchange, asyncio.Task[Any] | None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        settings, started = self._settings(), self._clock.monotonic()
        exchange = _Exchange(scope, receive, send, settings)
        token = REQUEST_ID.set(exchange.request_id)
        is_reading = scope["method"] in _SAFE
        if is_reading:
            self._reading[exchange] = asyncio.current_task()
        try:
            await self._answer(exchange, scope, settings)
        finally:
            if is_reading:
                del self._reading[exchange]
            self._note(exchange, scope, settings, self._clock.monotonic() - started)
            REQUEST_ID.reset(token)

    def check_page(self, headers: Collection[tuple[bytes, bytes]], client: object) -> None:
        """
        Refuse what a foreign web page asks for, over HTTP or for a socket.

        Raises:
            OriginRefused, HostRefused: It may not.
        """
        check_page(headers, self._settings(), is_open=self._is_open, is_unix=client is None)

    def refusing(self, error: TidingsError) -> ASGIApp:
        """An application that answers with this error, and ends the connection."""

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            settings = self._settings()
            exchange = _Exchange(scope, receive, send, settings)
            self.refused[error.code] += 1
            status, _, headers = problem_parts(error, exchange.request_id)
            del headers["content-type"]
            await exchange.refuse(error, status, {**headers, "connection": "close"})
            self._note(exchange, scope, settings, 0.0)

        return refuse

    def cancel_reads(self) -> None:
        """
        The node is stopping: answer requests that only read and wait for commits now.

        Publishes are not cancelled: whether one was stored would then be unknown to its publisher.
        """
        for exchange, task in self._reading.items():
            if not exchange.status and task is not None:
                exchange.is_cancelled = True
                task.cancel()

    async def _answer(self, exchange: _Exchange, scope: Scope, settings: ServerSettings) -> None:
        try:
            check_page(scope["headers"], settings, is_open=self._is_open, is_unix=scope.get("client") is None)
            exchange.check_declared_length()
            scope.setdefault("app", self._app)  # so that a router raises what it refuses, and we answer in our own form
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not exchange.is_cancelled or exchange.status or task is None:
                raise
            task.uncancel()
            await exchange.refuse(NodeStopping(), NodeStopping.status)
        except ClientDisconnect:
            pass  # in the middle of its body: there is nobody to answer
        except TrafficRefused as error:
            await exchange.refuse(error, error.status, error.headers)
        except HTTPException as error:
            refused = RequestRefused(scope["method"], scope["path"], error.status_code, str(error.detail))
            await exchange.refuse(refused, error.status_code, error.headers)
        except Exception:
            logger.exception("%s %s failed", scope["method"], legible(scope["path"]))
            # What went wrong is in our log under the request's id; the caller is not shown it.
            await exchange.refuse(InternalError(exchange.request_id), 500)

    def _note(self, exchange: _Exchange, scope: Scope, settings: ServerSettings, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", _UNROUTED)
        status = exchange.status or 499
        self._observed(method, route, status, seconds)
        if settings.access_log:
            log_request(
                scope["method"],
                scope["path"],
                status,
                seconds,
                peer=_peer_of(scope),
                request_id=exchange.request_id,
                bytes_in=exchange.bytes_in,
                bytes_out=exchange.bytes_out,
            )


def _peer_of(scope: Mapping[str, Any]) -> str:
    client = scope.get("client")
    return str(client[0]) if client else UNIX


class _Exchange:
    """One request and its answer, as they pass."""

    __slots__ = (
        "_bytes_max",
        "_declared",
        "_is_api",
        "_origins",
        "_page",
        "_receive",
        "_send",
        "bytes_in",
        "bytes_out",
        "is_cancelled",
        "request_id",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: ServerSettings) -> None:
        self._receive = receive
        self._send = send
        self._bytes_max = settings.body_bytes_max
        self._origins = settings.origins
        self._page: bytes | None = None
        self._declared: bytes | None = None
        self._is_api = scope["path"].startswith("/v1/")
        self.bytes_in = self.bytes_out = self.status = 0
        self.is_cancelled = False
        given: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"content-length":
                self._declared = value
            elif name == _HEADER:
                given = value
            elif name == b"origin":
                self._page = value
        self.request_id = acceptable_id(given)
        scope.setdefault("state", {})["request_id"] = self.request_id

    def check_declared_length(self) -> None:
        """Refuse a body that says itself that it is too long, before a byte of it is read."""
        if self._declared is not None and self._declared.isdigit() and int(self._declared[:20]) > self._bytes_max:
            raise BodyTooLarge(self._bytes_max)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.bytes_in += len(message.get("body", b""))
            if self.bytes_in > self._bytes_max:
                raise BodyTooLarge(self._bytes_max)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [(_HEADER, self.request_id.encode())]
            is_storable = not self._is_api
            for pair in message.get("headers", ()):
                name = pair[0].lower()
                if name != _HEADER:
                    headers.append(pair)
                    is_storable = is_storable or name == b"cache-control"
            if self._is_api:
                headers.append(_NO_SNIFFING)
                if not is_storable:
                    headers.append(_NEVER_STORED)
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            self.bytes_out += len(message.get("body", b""))
        await self._send(message)

    async def refuse(self, error: TidingsError, status: int, more: Mapping[str, str] | None = None) -> None:
        """Answer with a problem, unless an answer has begun: then all that is left is to end it."""
        if self.status:
            raise error
        body = orjson.dumps(problem_of(error, status, self.request_id))
        headers = [(b"content-type", PROBLEM_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in (more or {}).items()]
        if self._page is not None and {"*", self._page.decode("latin-1")}.intersection(self._origins):
            headers += [(b"access-control-allow-origin", self._page), (b"vary", b"Origin")]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
