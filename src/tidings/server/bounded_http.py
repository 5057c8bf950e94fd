"""
uvicorn's HTTP protocol with the bounds that it lacks: on the length of a request's head, on the time that head, body and answer
take, and on the connections of one address; and with our own words, under a request id, where it refuses.

Without them a peer that sends nothing, or one header after another, or asks and never reads, holds a connection or memory for ever,
and a thousand such peers keep everybody else out.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .edge import Edge
from .errors import (
    BadHandshake,
    HeadTooLarge,
    MalformedRequest,
    TooManyConnections,
    TooManyRequests,
    TrafficRefused,
)
from .peers import UNIX, PeerCounts
from .problems import PROBLEM_TYPE
from .request_ids import REQUEST_ID_HEADER
from .settings import ServerSettings

__all__ = ["BoundedHttpProtocol"]

_SOCKET_VERSIONS: Final = (b"13", b"8", b"7")
"""What picows speaks; it would refuse others in words of its own."""
_SOCKET_KEY_BYTES: Final = 16
_PROBES: Final = ("/healthz", "/readyz")
_HEADER_LINE_BYTES: Final = 4
"""What a header takes beside its name and value."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """
    One HTTP connection.

    Args:
        settings: The bounds.
        edge: The application, for what is refused before it is asked.
        peers: The HTTP connections of each address.
        options: As uvicorn has them.
    """

    def __init__(self, settings: ServerSettings, edge: Edge, peers: PeerCounts, **options: Any) -> None:
        super().__init__(**options)
        self._settings = settings
        self._edge = edge
        self._peers = peers
        self._address: str | None = None
        """Under which it is counted, for as long as it is."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._head_bytes = 0
        self._parsed_bytes = 0
        self._is_between = True
        """Whether the next byte begins a request."""
        self._fresh_bytes = 0
        """What came with the first bytes of a request; of one that begins behind another in the same piece that is not known."""
        self._answering: RequestResponseCycle | None = None
        self._unread_since_s: float | None = None
        """Since when each look found something that the peer has not taken."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._address = UNIX if self.client is None else self.client[0]
        self._peers.entered(self._address)
        self._allow(self._settings.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._leave()
        if self._answering is not None and not self._answering.response_complete:
            # uvicorn tells the request that came last. With several on their way that is not the one being answered, which
            # would go on writing to nobody and fail.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
        self._fresh_bytes = len(data) if self._is_between else 0
        super().data_received(data)
        # Looked at only now: a short head and a long body may come in one piece.
        if self._is_in_head and self._head_bytes > self._settings.head_bytes_max and not self.transport.is_closing():
            self._refuse(HeadTooLarge(self._settings.head_bytes_max))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._is_between = True, False
        self._head_bytes, self._fresh_bytes = self._fresh_bytes, 0
        self._parsed_bytes = 0
        self._allow(self._settings.head_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._count_in_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_in_head(len(name) + len(value) + _HEADER_LINE_BYTES)
        super().on_header(name, value)

    def _count_in_head(self, size: int) -> None:
        """Headers count one by one, and trailers too: a head that came in one piece is no shorter for that."""
        self._parsed_bytes += size
        if self._parsed_bytes > self._settings.head_bytes_max:
            raise HeadTooLarge(self._settings.head_bytes_max)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._allow(self._settings.body_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._disarm()
        self._is_between = True
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        crowded = self._crowded()
        # Whether the process lives and is ready is always answered: a node with much to do must not be taken for a dead one.
        if crowded is not None and cycle.scope["path"] not in _PROBES:
            app = self._edge.refusing(crowded)
        super()._start_asgi_task(cycle, app)

    def _crowded(self) -> TrafficRefused | None:
        """Why there is no place for one more request, if there is none."""
        settings = self._settings
        if len(self.connections) > settings.requests_max or len(self.tasks) >= settings.requests_max:
            return TooManyRequests(settings.requests_max)
        if self._address is not None and self._peers.count(self._address) > settings.requests_per_address_max:
            return TooManyConnections(settings.requests_per_address_max, "from this address")
        return None

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
        problem = _handshake_problem(self.scope["method"], self.headers)
        if problem is not None:
            self._is_between = False  # the request is whole, and it is the one that is refused
            self._refuse(BadHandshake(problem))
            return
        try:
            self._edge.check_page(self.headers, self.client)
        except TrafficRefused as error:
            self._is_between = False
            self._refuse(error)
            return
        self._leave()  # from here on it is one of the sockets, and counted among them
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn does with bytes that it cannot make sense of, or that one of the callbacks here has refused."""
        is_too_large = self._parsed_bytes > self._settings.head_bytes_max
        self._refuse(HeadTooLarge(self._settings.head_bytes_max) if is_too_large else MalformedRequest())

    def _leave(self) -> None:
        if self._address is not None:
            self._peers.left(self._address)
            self._address = None

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

    def _refuse(self, error: TrafficRefused) -> None:
        """Answer below the application, and end the connection: what follows could not be told from what came."""
        self._disarm()
        answering = self._answering
        if answering is not None and not answering.response_complete:
            is_about_it = answering is self.cycle and answering.more_body and not self._is_in_head
            if answering.response_started or not is_about_it:
                # The peer would take it for the answer that it waits for, or for part of the one that it reads.
                self.transport.close()
                return
        scope: dict[str, Any] = {"client": self.client}
        headers: list[tuple[bytes, bytes]] = []
        if not self._is_between:  # else what is known is about the request before
            headers = self.headers
            scope |= {"path": self.url.partition(b"?")[0].decode("ascii", "replace"), **self.scope}
        request_id, body = self._edge.refused_below(error, headers, scope)
        head = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            *(f"{name.decode()}: {value.decode()}" for name, value in self.server_state.default_headers),
            f"content-type: {PROBLEM_TYPE}",
            f"content-length: {len(body)}",
            f"{REQUEST_ID_HEADER}: {request_id}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*head, "\r\n"]).encode() + body)
        self.transport.close()


def _handshake_problem(method: str, headers: list[tuple[bytes, bytes]]) -> str | None:
    """What keeps a request for a WebSocket from being one."""
    given = dict(headers)
    if method != "GET":
        return f"its method is {method}"
    if given.get(b"sec-websocket-version") not in _SOCKET_VERSIONS:
        return "its version is not spoken here"
    try:
        key = base64.b64decode(given.get(b"sec-websocket-key", b""), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    return None if len(key) == _SOCKET_KEY_BYTES else "it has no valid key"
