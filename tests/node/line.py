"""A line between client and node that can go dead, be cut, and be led to another node: what networks do to clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import urlsplit

__all__ = ["Line", "line_to"]

_CHUNK_BYTES: Final = 1 << 16


class Line:
    """
    Carries bytes both ways.

    Attributes:
        is_deaf: What the node says is lost on the way.
        upstream: The node's address as it is now; later connections go there.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.is_deaf = False
        self.lost = asyncio.Event()
        """Set when something that the node said was lost."""
        self.count = 0
        """Connections made so far."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where clients connect to."""
        assert self._server is not None
        return f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/sync"

    async def open(self) -> None:
        """Begin to carry."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)

    def cut(self) -> None:
        """End every connection at once, without a goodbye; the line itself works again."""
        self.is_deaf = False
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        """End it for good."""
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = urlsplit(self.upstream)
        self._writers.add(writer)
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(address.hostname, address.port)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self.count += 1
        self._writers.add(upstream_writer)
        pumps = [
            asyncio.create_task(self._pump(reader, upstream_writer, is_from_node=False)),
            asyncio.create_task(self._pump(upstream_reader, writer, is_from_node=True)),
        ]
        self._tasks.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (writer, upstream_writer):
                each.close()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._tasks.difference_update(pumps)
            self._writers -= {writer, upstream_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_from_node: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                if is_from_node and self.is_deaf:
                    self.lost.set()
                else:
                    writer.write(chunk)
                    await writer.drain()


@contextlib.asynccontextmanager
async def line_to(upstream: str) -> AsyncIterator[Line]:
    """A line to a node, closed at the end."""
    line = Line(upstream)
    await line.open()
    try:
        yield line
    finally:
        await line.close()
