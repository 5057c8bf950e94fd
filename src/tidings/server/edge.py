"""
What stands before every route: request ids, the limit on bodies, counting, the access log, and the last answer to an error.

One ASGI middleware, because it is one story: a request comes in with or without an id, is bounded, is answered exactly once, and
leaves one line and one observation behind, whatever happened in between.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import orjson
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidings.core.clock import Clock

from .errors import (
    BodyTooLarge,
    InternalError,
    NodeError,
    NodeStopping,
    RequestRefused,
    TrafficRefused,
)
from .peers import UNIX
from .problems import PROBLEM_TYPE, problem_of
from .request_ids import ACCESS_LOGGER, REQUEST_ID_HEADER, legible, log_request, request_id_of
from .settings import ServerSettings
from .web_pages import check_page

__all__ = ["ACCESS_LOGGER", "REQUEST_ID", "Edge", "Observed"]

logger = logging.getLogger(__name__)

REQUEST_ID: contextvars.ContextVar[str | None] = contextvars.ContextVar("tidings_request_id", default=None)
"""The id of the request that is being answered; log lines carry it."""

_ID_HEADER: Final = REQUEST_ID_HEADER.encode()
_UNROUTED: Final = "(none)"
_SAFE: Final = frozenset({"GET", "HEAD"})
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

Observed = Callable[[str, str, int, float], None]
"""Told of each answered request: its method, its route's pattern, the status, the seconds it took."""


class Edge:
    """
    The outermost layer of the HTTP application.

    Args:
        app: What answers.
        settings: Gives the settings that hold now; they can be reloaded.
        clock: For the time a request takes.
        observed: Told of each request.
        is_open: Whether access is open, so that web pages have to be kept out here.
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
        exchange = _Exchange(scope, receive, send, self._settings().body_bytes_max)
        token = REQUEST_ID.set(exchange.request_id)
        started = self._clock.monotonic()
        if scope["method"] in _SAFE:
            self._reading[exchange] = asyncio.current_task()
        try:
            await self._answer(exchange, scope)
        finally:
            self._reading.pop(exchange, None)
            self._note(exchange, scope, self._clock.monotonic() - started)
            REQUEST_ID.reset(token)

    def check_page(self, headers: Iterable[tuple[bytes, bytes]], client: object) -> None:
        """
        Refuse what a foreign web page asks for, over HTTP or for a socket.

        Raises:
            OriginRefused, HostRefused: It may not.
        """
        check_page(headers, self._settings(), is_open=self._is_open, is_unix=client is None)

    def refusing(self, error: TrafficRefused) -> ASGIApp:
        """An application that answers a request that there is no place for, and does nothing else."""

        async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = _Exchange(scope, receive, send, self._settings().body_bytes_max)
            self.refused[error.code] += 1
            await exchange.refuse(error, error.status, {"retry-after": "1", "connection": "close"})
            self._note(exchange, scope, 0.0)

        return refuse

    def refused_below(
        self, error: TrafficRefused, headers: Iterable[tuple[bytes, bytes]], scope: Mapping[str, Any]
    ) -> tuple[str, bytes]:
        """
        The id and the body of an answer that is given below the application, to what is no whole request.

        Args:
            error: Why it is refused.
            headers: Those that came, names in lower case.
            scope: What is known of the request; method and path may be missing.
        """
        request_id = scope.get("state", {}).get("request_id") or request_id_of(headers)
        body = orjson.dumps(problem_of(error, error.status, request_id))
        self.refused[error.code] += 1
        method, path = scope.get("method", "?"), scope.get("path", "?")
        self._observed(method if method in _METHODS else "other", _UNROUTED, error.status, 0.0)
        if self._settings().access_log:
            peer = _peer_of(scope)
            log_request(method, path, error.status, 0.0, peer=peer, request_id=request_id, bytes_out=len(body))
        return request_id, body

    def dismiss(self) -> None:
        """
        The node is stopping: answer requests that only read, and that wait for something to come, without it.

        Whoever publishes is not cut off: what he was told, or not told, would then depend on the moment.
        """
        for exchange, task in self._reading.items():
            if not exchange.status and task is not None:
                exchange.is_dismissed = True
                task.cancel()

    async def _answer(self, exchange: _Exchange, scope: Scope) -> None:
        try:
            self.check_page(scope["headers"], scope.get("client"))
            exchange.check_declared_length()
            scope.setdefault("app", self._app)  # so that a router raises what it refuses, and we say it in our words
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not exchange.is_dismissed or exchange.status or task is None:
                raise
            task.uncancel()
            await exchange.refuse(NodeStopping(), NodeStopping.status)
        except TrafficRefused as error:
            await exchange.refuse(error, error.status)
        except HTTPException as error:
            refused = RequestRefused(scope["method"], scope["path"], error.status_code, str(error.detail))
            await exchange.refuse(refused, error.status_code, error.headers)
        except Exception:
            logger.exception("%s %s failed", scope["method"], legible(scope["path"]))
            # What went wrong is in our log under the request's id; the caller gets no glimpse of it.
            await exchange.refuse(InternalError(exchange.request_id), 500)

    def _note(self, exchange: _Exchange, scope: Scope, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path", _UNROUTED)
        status = exchange.status or 499
        self._observed(method, route, status, seconds)
        if self._settings().access_log:
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
        "_receive",
        "_send",
        "bytes_in",
        "bytes_out",
        "is_dismissed",
        "request_id",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, bytes_max: int) -> None:
        self._receive = receive
        self._send = send
        self._bytes_max = bytes_max
        self._declared: bytes | None = None
        self.bytes_in = self.bytes_out = self.status = 0
        self.is_dismissed = False
        for name, value in scope["headers"]:
            if name == b"content-length":
                self._declared = value
        self.request_id = request_id_of(scope["headers"])
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
            headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != _ID_HEADER]
            message = {**message, "headers": [*headers, (_ID_HEADER, self.request_id.encode())]}
        elif message["type"] == "http.response.body":
            self.bytes_out += len(message.get("body", b""))
        await self._send(message)

    async def refuse(self, error: NodeError, status: int, more: Mapping[str, str] | None = None) -> None:
        """Answer with a problem, unless an answer has begun: then all that is left is to end it."""
        if self.status:
            raise error
        body = orjson.dumps(problem_of(error, status, self.request_id))
        headers = [(b"content-type", PROBLEM_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in (more or {}).items()]
        if status == 413:
            headers.append((b"connection", b"close"))  # the rest of the body is not worth reading
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
