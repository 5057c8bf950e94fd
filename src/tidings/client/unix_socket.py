"""The client's connection over a Unix socket: frames of the steward's wire."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from tidings.wire.steward.frames import FrameReader, FramingFault, framed

from .errors import ConnectFailed
from .link import Inbox, Link

_INBOX_COUNT_MAX: Final = 256


class UnixConnector:
    """Opens connections to a steward's Unix socket; the address is its path."""

    async def connect(self, url: str) -> Link:
        """
        Open one.

        Raises:
            ConnectFailed: It could not be opened.
        """
        try:
            _, link = await asyncio.get_running_loop().create_unix_connection(_UnixLink, url)
        except OSError as error:
            raise ConnectFailed(url, error.strerror or str(error)) from error
        return link


class _UnixLink(asyncio.Protocol):
    def __init__(self) -> None:
        self.headers: Mapping[str, str] = {}
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._inbox = Inbox(_INBOX_COUNT_MAX, self._pause, self._resume)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._inbox.put(message)
        except FramingFault as error:
            self._inbox.close(1002, str(error))
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._inbox.close(1000 if error is None else 1006, "" if error is None else str(error))
        if not self._ended.done():
            self._ended.set_result(None)

    @property
    def is_open(self) -> bool:
        return self._inbox.is_open

    def send(self, message: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(message))

    async def receive(self) -> list[bytes]:
        return await self._inbox.take()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self._inbox.close(code, reason)
        if self._transport is not None:
            self._transport.close()
        await asyncio.shield(self._ended)

    def _pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
