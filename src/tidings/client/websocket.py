"""The sync client's connection over a WebSocket (picows)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final

import msgspec
import picows

from .errors import ConnectFailed
from .link import Inbox
from .reconnecting import retry_after_of

_NO_CODE: Final = 1006
_CLOSE_S_MAX: Final = 5.0


class WebSocketConnector:
    """
    Opens WebSocket connections.

    Args:
        ssl_context: For ``wss``; the system's own unless given.
        messages_max: Messages received and not taken, before the socket is no longer read.
        message_bytes_max: A larger message closes the connection.
        silence_s: After so long without a word the other end is asked whether it is there, and must answer within as long; never unless
            given, which is right for protocols that ask by themselves.
        headers: What the request for the upgrade has beside its own.
    """

    def __init__(
        self,
        *,
        ssl_context: ssl.SSLContext | None = None,
        messages_max: int = 256,
        message_bytes_max: int = 64 << 20,
        silence_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._headers = dict(headers or {})
        self._silence_s = silence_s
        self._ssl_context = ssl_context
        self._messages_max = messages_max
        self._message_bytes_max = message_bytes_max

    async def connect(self, url: str) -> _WebSocketLink:
        """
        Open one. The caller bounds the time that it may take.

        Raises:
            ConnectFailed: It could not be opened.
        """
        try:
            _, link = await picows.ws_connect(
                lambda: _WebSocketLink(self._messages_max, self._message_bytes_max),
                url,
                ssl_context=self._ssl_context,
                extra_headers=self._headers,
                websocket_handshake_timeout=None,
                max_frame_size=self._message_bytes_max,
                enable_auto_ping=self._silence_s is not None,
                auto_ping_idle_timeout=self._silence_s or 0.0,
                auto_ping_reply_timeout=self._silence_s or 0.0,
            )
        except picows.WSInvalidStatusError as error:
            answer, problem = error.response, _detail_of(error.raw_body) or str(error)
            if answer is None:
                raise ConnectFailed(url, problem) from error
            raise ConnectFailed(url, problem, int(answer.status), retry_after_of(answer.headers)) from error
        except (OSError, picows.WSError, ValueError) as error:
            raise ConnectFailed(url, str(error) or type(error).__name__) from error
        if not isinstance(link, _WebSocketLink):  # what picows gives for one that was cut within the handshake
            raise ConnectFailed(url, "the connection was cut while it was opened")
        return link


class _Problem(msgspec.Struct, frozen=True):
    detail: str = ""


def _detail_of(body: bytes | None) -> str:
    """What a problem document says, if one was sent; it may have come cut off."""
    try:
        return msgspec.json.decode(body or b"{}", type=_Problem).detail
    except msgspec.DecodeError:
        return ""


class _WebSocketLink(picows.WSListener):
    def __init__(self, messages_max: int, message_bytes_max: int) -> None:
        self._transport: picows.WSTransport | None = None
        self._inbox = Inbox(messages_max, self._pause, self._resume)
        self._parts = bytearray()
        self._bytes_max = message_bytes_max
        self._code, self._reason = _NO_CODE, ""
        self.headers: Mapping[str, str] = {}

    # What picows calls

    def on_ws_connected(self, transport: picows.WSTransport) -> None:
        self._transport = transport
        self.headers = transport.response.headers

    def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
        if frame.msg_type == picows.WSMsgType.CLOSE:
            body = frame.get_payload_as_bytes()
            if len(body) >= 2:  # read here: the library's own enumeration has no private codes
                self._code, self._reason = int.from_bytes(body[:2]), body[2:].decode(errors="replace")
            if not transport.is_close_frame_sent:
                transport.send_close(frame.get_close_code())
            transport.disconnect()
            return
        if frame.msg_type not in (picows.WSMsgType.TEXT, picows.WSMsgType.BINARY, picows.WSMsgType.CONTINUATION):
            return
        if frame.fin and not self._parts:
            self._inbox.put(frame.get_payload_as_bytes())
            return
        self._parts += frame.get_payload_as_memoryview()
        if len(self._parts) > self._bytes_max:
            transport.disconnect()
        elif frame.fin:
            self._inbox.put(bytes(self._parts))
            self._parts.clear()

    def on_ws_disconnected(self, transport: picows.WSTransport) -> None:
        self._inbox.close(self._code, self._reason)

    # What the client calls

    @property
    def is_open(self) -> bool:
        """Whether nothing is known of its end."""
        return self._inbox.is_open

    def send(self, message: bytes) -> None:
        """Send one text message."""
        if self._transport is not None and not self._transport.is_disconnected:
            self._transport.send(picows.WSMsgType.TEXT, message)

    async def receive(self) -> list[bytes]:
        """The messages that have come."""
        return await self._inbox.take()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close it; a peer that does not answer is cut off."""
        transport = self._transport
        if transport is None or transport.is_disconnected:
            return
        self._inbox.close(code, reason)
        transport.send_close(code, reason.encode())  # type: ignore[arg-type]  # any number will do
        transport.disconnect()
        try:
            async with asyncio.timeout(_CLOSE_S_MAX):
                await transport.wait_disconnected()
        except TimeoutError:
            transport.disconnect(graceful=False)

    def _pause(self) -> None:
        if self._transport is not None:
            self._transport.underlying_transport.pause_reading()

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_disconnected:
            self._transport.underlying_transport.resume_reading()
