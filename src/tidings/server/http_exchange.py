"""
One HTTP request and its answer, between an ASGI application and the connection.

Nothing here parses, and nothing waits for more than one part of a body: what comes ahead of the application is bounded by the connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import Any, Final, Protocol

from starlette.types import ASGIApp, Message, Scope

from .edge import legible
from .errors import TrafficRefused

logger = logging.getLogger(__name__)

_BODY_AHEAD_BYTES: Final = 65_536
"""With more of a body than this, reading pauses until the application takes it."""
_JOINED_BYTES: Final = 16_384
"""A shorter body leaves in one write with its head; a longer one is not copied."""
_LOGGED_CHARS_MAX: Final = 200
"""Of the path of an answered request, what is kept for a line of the log."""
_BODILESS: Final = (204, 304)
_CONTROL: Final = re.compile(b"[\x00-\x08\x0a-\x1f\x7f]")
_STATUS_LINES: Final = {int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}


class ExchangeConnection(Protocol):
    """The connection, as an exchange sees it."""

    is_ahead: bool
    """Whether as much of a body has come as may before the application takes it."""
    writable: asyncio.Event | None
    """Set when the peer has read enough; ``None`` while nothing waits for it."""

    @property
    def date_line(self) -> bytes:
        """The header line of the date."""
        ...

    def write(self, data: bytes) -> None:
        """Send a part of an answer."""
        ...

    def read_on(self) -> None:
        """Read more of the body."""
        ...

    def answered(self, exchange: Exchange) -> None:
        """An answer is complete."""
        ...

    def close(self) -> None:
        """End the connection when what was written has left."""
        ...


class Exchange:
    """One request and its answer: the scope, ``receive`` and ``send`` of an ASGI application."""

    __slots__ = (
        *(
            "_announced",
            "_body",
            "_connection",
            "_head",
            "_is_chunked",
            "_is_taken",
            "_waiter",
            "app",
            "awaits_continue",
        ),
        *(
            "failure",
            "held",
            "is_answered",
            "is_begun",
            "is_disconnected",
            "is_kept_alive",
            "is_whole",
            "scope",
            "size",
        ),
    )

    def __init__(self, connection: ExchangeConnection, scope: Scope, app: ASGIApp) -> None:
        self._connection = connection
        self.scope = scope
        self.app = app
        self._body: bytes | bytearray = b""
        self._is_taken = False
        """Whether ``receive`` has returned the end of the body."""
        self._waiter: asyncio.Event | None = None
        self._head = b""
        self._announced = 0
        self._is_chunked: bool | None = None
        self.size = self.held = 0
        """The bytes of head and body, and of these the bytes that are charged."""
        self.failure: TrafficRefused | None = None
        """Raised by ``receive``: the rest of the body will not come."""
        self.awaits_continue = False
        self.is_whole = False
        """Whether the body has come to its end."""
        self.is_begun = self.is_answered = self.is_disconnected = False
        self.is_kept_alive = True

    async def run(self) -> None:
        """Have the application answer; without a complete answer the connection is closed."""
        try:
            await self.app(self.scope, self.receive, self.send)
            if not self.is_answered and not self.is_disconnected:
                raise RuntimeError("the answer is not complete")
        except Exception:
            logger.exception("%s %s: the application failed", self.scope["method"], legible(self.scope["path"]))
            self._connection.close()

    async def receive(self) -> Message:
        """
        Return the next part of the body, or that the client has gone.

        Raises:
            TrafficRefused: The rest of the body is malformed, or there is no memory for it.
        """
        if self.awaits_continue:
            self.awaits_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._body or self.is_whole) or self._is_taken:
            if self.failure is not None or self.is_disconnected or self.is_answered:
                break
            waiter = self._waiter = self._waiter or asyncio.Event()
            self._connection.read_on()
            if self._waiter is waiter:
                await waiter.wait()
        if self.failure is not None:
            raise self.failure
        if self.is_disconnected or self.is_answered:
            return {"type": "http.disconnect"}
        body, self._body = self._body, b""
        self._is_taken = self.is_whole
        self._connection.is_ahead = False
        return {"type": "http.request", "body": bytes(body), "more_body": not self.is_whole}

    @property
    def is_awaited(self) -> bool:
        """Whether the application waits for more of the body."""
        return self._waiter is not None and not self.is_whole

    def wake(self) -> None:
        """Have ``receive`` look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.set()

    def take(self, body: bytes) -> bool:
        """Take a part of the body. Return whether as much has come as may before the application takes it."""
        if self._body:
            self._body = bytearray(self._body) if isinstance(self._body, bytes) else self._body
            self._body += body
        else:
            self._body = body
        if self._waiter is not None:
            self.wake()
        return len(self._body) > _BODY_AHEAD_BYTES

    def disconnect(self) -> None:
        """The client has gone."""
        self.is_disconnected = True
        self.wake()

    def drop_request(self) -> None:
        """Drop the head of a request that is answered: a connection keeps its last exchange, and is charged for none of it."""
        kept = ("type", "method", "http_version", "client")
        self.scope = {name: self.scope.get(name) for name in kept} | {"path": self.scope["path"][:_LOGGED_CHARS_MAX]}

    async def send(self, message: Message) -> None:
        """
        Take the next part of the answer.

        Raises:
            RuntimeError: It breaks the order of parts, or is longer or shorter than announced.
        """
        connection = self._connection
        if connection.writable is not None and not self.is_disconnected:
            await connection.writable.wait()
        if self.is_disconnected:
            return
        if not self.is_begun:
            self._begin(message["status"], message.get("headers", ()))
        elif self.is_answered:
            raise RuntimeError("the answer is complete")
        else:
            self._continue(message.get("body", b""), is_last=not message.get("more_body", False))

    def _begin(self, status: int, headers: Any) -> None:
        self.is_begun = True
        if self.awaits_continue:
            # The client may send the body it announced, or leave it out: what comes next could be either.
            self.awaits_continue = self.is_kept_alive = False
        lines = [_STATUS_LINES.get(status, b"HTTP/1.1 %d \r\n" % status), self._connection.date_line]
        for name, value in headers:
            if _CONTROL.search(value):
                raise RuntimeError(f"header {name!r} holds a control character")
            if name == b"content-length":
                self._is_chunked, self._announced = False, int(value)
            elif name == b"connection" and value == b"close":
                self.is_kept_alive = False
                continue
            lines += (name, b": ", value, b"\r\n")
        if self._is_chunked is None and self.scope["method"] != "HEAD" and status not in _BODILESS:
            self._is_chunked = self.scope["http_version"] == "1.1"
            if self._is_chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
            else:  # HTTP/1.0 does not know chunks: the end of the connection is the end of the body
                self.is_kept_alive, self._announced = False, -1
        if not self.is_kept_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if self._is_chunked or self._announced < 0:
            self._connection.write(head)
        else:  # each write is a system call and wakes the peer: a head that announces its body's length leaves with the body
            self._head = head

    def _continue(self, body: bytes, *, is_last: bool) -> None:
        if self.scope["method"] == "HEAD":
            body, self._announced = b"", 0
        elif self._is_chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
        elif self._announced >= 0:
            self._announced -= len(body)
            if self._announced < 0 or (is_last and self._announced):
                raise RuntimeError("the body is not as long as was announced")
        head, self._head = self._head, b""
        if len(body) > _JOINED_BYTES and head:
            self._connection.write(head)
            head = b""
        self._connection.write(head + body if head else body)
        if is_last:
            self.is_answered = True
            self.wake()
            self._connection.answered(self)
