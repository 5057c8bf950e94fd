"""What the tests of the steward share: a node in process with a socket, a catalogue, and clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from tests.integration.node_support import SECONDS_MAX
from tests.integration.steward.test_steward_process import CATALOGUE
from tidings.client.ledger import LedgerClient
from tidings.steward.settings import NodeLedgerSettings, StewardSettings
from tidings.testing.node import RunningNode, node_settings, running_node


@contextlib.asynccontextmanager
async def stewarding(
    folder: Path,
    *,
    catalogue: str = CATALOGUE,
    steward: dict[str, Any] | None = None,
    ledger: dict[str, Any] | None = None,
    log: dict[str, Any] | None = None,
    **server: Any,
) -> AsyncIterator[RunningNode]:
    """A node with a steward socket at ``folder/s``."""
    (folder / "catalogue.toml").write_text(catalogue)
    given = node_settings(**server)
    settings = msgspec.structs.replace(
        given,
        log=msgspec.structs.replace(given.log, **(log or {})),
        steward=StewardSettings(socket_path=str(folder / "s"), **(steward or {})),
        ledger=NodeLedgerSettings(catalogue_file=str(folder / "catalogue.toml"), **(ledger or {})),
    )
    async with running_node(folder / "workspace", settings) as node:
        yield node


class SocketClient:
    """A connection to the socket, for tests that do not block the loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, folder: Path) -> SocketClient:
        return cls(*await asyncio.open_unix_connection(folder / "s", limit=1 << 27))

    def send(self, op: str, **fields: Any) -> None:
        body = json.dumps({"op": op, **fields}).encode()
        self.writer.write(struct.pack(">I", len(body)) + body)

    async def receive(self) -> Any:
        """The next frame; ``None`` at the end."""
        async with asyncio.timeout(SECONDS_MAX):
            try:
                (size,) = struct.unpack(">I", await self.reader.readexactly(4))
                return json.loads(await self.reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionError):
                return None

    async def ask(self, op: str, **fields: Any) -> Any:
        self.send(op, **fields)
        return await self.receive()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def client_of(node: RunningNode, token: str, *capabilities: str, **options: Any) -> LedgerClient:
    """A client of ``/happenings``."""
    return LedgerClient(node.url, token=token, capabilities=capabilities, **options)


def refused_with(answer: Any) -> tuple[str, str | None]:
    """Class and subclass of a refusal."""
    error = answer["error"]
    return error["class"], error.get("details", {}).get("subclass")
