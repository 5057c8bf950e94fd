"""
The client of the sync benches: as little work as possible for each message, so that what is measured is the server.

It speaks dialect A (the protocol's own) and B (that of ``insieme`` 2.1.0), the same program to every server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Literal

import orjson
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from .sync_serving import PROJECT, token_for

__all__ = ["BenchClient", "Dialect", "SyncFailed", "connect", "submit_frames"]

Dialect = Literal["a", "b"]
_TEXT: Final = WSMsgType.TEXT
_BROADCAST: Final = b'{"type":"event_broadcast"'
_S_MAX: Final = 300.0
_FRAME_BYTES_MAX: Final = 64 << 20


class SyncFailed(Exception):
    """The server answered otherwise than it should."""


class BenchClient(WSListener):
    """One connection. Broadcasts are counted as they come, everything else is kept for whoever waits for it."""

    def __init__(self, dialect: Dialect, client_id: str) -> None:
        self.dialect = dialect
        self.client_id = client_id
        self.broadcasts = 0
        self.listener: Callable[[bytes], None] | None = None
        """Told of each broadcast, if somebody wants to know."""
        self.answerer: Callable[[bytes], None] | None = None
        """Told of everything else, instead of keeping it."""
        self._transport: WSTransport | None = None
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._goal = -1
        self._is_there = asyncio.Event()
        self._number = 0
        self._is_gone = False

    # What picows calls

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        message = frame.get_payload_as_bytes()
        if frame.msg_type is not _TEXT:
            if frame.msg_type is WSMsgType.PING:
                transport.send_pong(message)
            elif frame.msg_type is WSMsgType.CLOSE:
                transport.disconnect(False)
        elif message.startswith(_BROADCAST):
            self.broadcasts += 1
            if self.listener is not None:
                self.listener(message)
            if self.broadcasts == self._goal:
                self._is_there.set()
        elif self.answerer is not None:
            self.answerer(message)
        else:
            self._answers.put_nowait(message)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self._is_gone = True
        self._answers.put_nowait(None)
        self._is_there.set()

    # What measurements call

    def say(self, frame: bytes) -> None:
        """Send one message."""
        assert self._transport is not None
        self._transport.send(_TEXT, frame)

    async def answer(self, type: bytes) -> bytes:
        """The next message that is no broadcast; it must be of this type."""
        message = await self._answers.get()
        if message is None or not message.startswith(b'{"type":"%b"' % type):
            raise SyncFailed(f"instead of {type.decode()}: {(message or b'the end')[:300]!r}")
        return message

    async def reach(self, broadcasts: int) -> None:
        """Wait until so many broadcasts have come."""
        self._goal = broadcasts
        if self.broadcasts < broadcasts:
            async with asyncio.timeout(_S_MAX):
                await self._is_there.wait()
        if self._is_gone:
            raise SyncFailed(f"{self.client_id} was sent away after {self.broadcasts} broadcasts")
        self._is_there.clear()

    def ask(self, type: str, payload: dict[str, Any]) -> None:
        """Send a message of the connection's dialect."""
        self._number += 1
        self.say(envelope(self.dialect, type, payload, self._number))

    async def submit(self, frames: list[bytes], window: int) -> int:
        """Send batches, so many under way at a time; how many events were committed."""
        committed = sent = 0
        for done in range(len(frames)):
            while sent < len(frames) and sent - done < window:
                self.say(frames[sent])
                sent += 1
            committed += (await self.answer(b"submit_events_result")).count(b'"status":"committed"')
        return committed

    async def page(self, partition: str, since: int, limit: int, *, subscribes: bool = False) -> dict[str, Any]:
        """Ask for one page of dialect A or B; its payload."""
        if self.dialect == "a":
            named = {"partitions": [partition], "since_committed_id": since, "limit": limit}
            self.ask("sync", named | ({"subscription_partitions": [partition]} if subscribes else {}))
        else:
            self.ask("sync", {"projectId": PROJECT, "sinceCommittedId": since, "limit": limit})
        payload: dict[str, Any] = orjson.loads(await self.answer(b"sync_response"))["payload"]
        return payload

    async def page_raw(self, partition: str, since: int, limit: int) -> bytes:
        """Ask for one page of dialect A; as it came."""
        self.ask("sync", {"partitions": [partition], "since_committed_id": since, "limit": limit})
        return await self.answer(b"sync_response")

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.disconnect(False)


async def connect(url: str, dialect: Dialect, client_id: str, token: str | None = None) -> BenchClient:
    """
    A connected client.

    Raises:
        SyncFailed: The server does not want it.
    """
    _, client = await ws_connect(
        lambda: BenchClient(dialect, client_id), url, max_frame_size=_FRAME_BYTES_MAX, websocket_handshake_timeout=60
    )
    assert isinstance(client, BenchClient)
    token = token_for(client_id) if token is None else token
    if dialect == "a":
        client.ask("connect", {"token": token, "client_id": client_id, "supported_profiles": ["canonical"]})
    else:
        client.ask("connect", {"token": token, "clientId": client_id, "projectId": PROJECT})
    await client.answer(b"connected")
    return client


def envelope(dialect: Dialect, type: str, payload: dict[str, Any], number: int) -> bytes:
    """One message."""
    if dialect == "a":
        head = {"type": type, "msg_id": f"m{number}", "timestamp": 0, "protocol_version": "1.0"}
    else:
        head = {"type": type, "msgId": f"m{number}", "timestamp": 0, "protocolVersion": "1.0"}
    return orjson.dumps({**head, "payload": payload})


def submit_frames(dialect: Dialect, client_id: str, partition: str, events: int, batch: int, run: str) -> list[bytes]:
    """Batches of events, ready to be sent. ``run`` makes the ids unlike those of other runs."""
    numbers = range(events)
    return [
        envelope(
            dialect,
            "submit_events",
            {
                "events": [
                    _item(dialect, client_id, partition, f"{run}-{n:07d}", n) for n in numbers[first : first + batch]
                ]
            },
            first,
        )
        for first in range(0, events, batch)
    ]


def _item(dialect: Dialect, client_id: str, partition: str, id: str, n: int) -> dict[str, Any]:
    data = {
        "list": "groceries",
        "item": f"item-{n}",
        "text": "two litres of milk, if they have any",
        "done": False,
        "n": n,
    }
    if dialect == "a":
        event = {"type": "event", "payload": {"schema": "item.put", "data": data}}
        return {"id": id, "partitions": [partition], "event": event}
    return {
        "id": id,
        "partition": partition,
        "projectId": PROJECT,
        "type": "item.put",
        "schemaVersion": 1,
        "payload": data,
        "meta": {"clientId": client_id, "clientTs": 1_767_225_600_000 + n},
    }
