"""
uvicorn's HTTP protocol with the bounds that it lacks: on the length of a request's head, and on the time that head, body and answer
take; and with our own words where it refuses.

Without them a peer that sends nothing, or one header after another, or asks and never reads, holds a connection or memory for ever,
and a thousand such peers keep everybody else out.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .errors import HeadTooLarge
from .problems import PROBLEM_TYPE, problem_of
from .settings import ServerSettings

__all__ = ["BoundedHttpProtocol"]


class BoundedHttpProtocol(HttpToolsProtocol):
    """
    One HTTP connection.

    Args:
        settings: The bounds.
        refusal: The ASGI application that answers when there are too many.
        options: As uvicorn has them.
    """

    def __init__(self, settings: ServerSettings, refusal: Any, **options: Any) -> None:
        super().__init__(**options)
        self._settings = settings
        self._refusal = refusal
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._head_bytes = 0
        self._answering: RequestResponseCycle | None = None
        self._unread_since_s: float | None = None
        """Since when each look found something that the peer has not taken."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._allow(self._settings.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._answering is not None and not self._answering.response_complete:
            # uvicorn tells the request that came last. With several on their way that is not the one being answered, which
            # would go on writing to nobody and fail.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # Looked at only now: a short head and a long body may come in one piece.
        if self._is_in_head and self._head_bytes > self._settings.head_bytes_max and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self._allow(self._settings.head_timeout_s)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._allow(self._settings.body_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        count_max = self._settings.requests_max
        is_busy = len(self.connections) > count_max or len(self.tasks) >= count_max
        # Whether the process lives is always answered: a node with much to do must not be taken for a dead one.
        is_refused = is_busy and cycle.scope["path"] != "/healthz"
        super()._start_asgi_task(cycle, self._refusal if is_refused else app)

    def on_response_complete(self) -> None:
        self._unread_since_s = None  # each answer has its own time
        super().on_response_complete()

    def look(self, now_s: float) -> None:
        """
        Cut a peer that does not read. To be called now and then.

        A connection that is closed counts too: it waits for its last bytes to be taken, and takes a place until then.
        """
        if not self.transport.get_write_buffer_size():
            self._unread_since_s = None
        elif self._unread_since_s is None:
            self._unread_since_s = now_s
        elif now_s - self._unread_since_s >= self._settings.answer_timeout_s:
            self.transport.abort()

    def handle_websocket_upgrade(self) -> None:
        self._disarm()
        super().handle_websocket_upgrade()

    def _allow(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse_head(self) -> None:
        error = HeadTooLarge(self._settings.head_bytes_max)
        body = orjson.dumps(problem_of(error, error.status))
        head = (
            f"HTTP/1.1 {error.status} Request Header Fields Too Large\r\ncontent-type: {PROBLEM_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
