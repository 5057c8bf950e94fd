"""The client of the gateway's benches: as little work as possible for each frame, so that what is measured is the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Literal

import orjson
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from .sync_serving import PREFIX, token_for

__all__ = ["TOPIC", "EventsClient", "GatewayFailed", "Publisher", "SocketPublisher", "connect", "connect_many"]

TOPIC: Final = f"{PREFIX}-objects"
_TEXT: Final = WSMsgType.TEXT
_TOKEN: Final = b'"resume_token":"'
_TOKEN_CHARS: Final = 88
_S_MAX: Final = 300.0
_CONNECTING: Final = 64


class GatewayFailed(Exception):
    """The server answered otherwise than it should."""


class EventsClient(WSListener):
    """One subscriber. Frames are counted as they come; every so many, and the last, are acknowledged."""

    def __init__(self, acks_each: int) -> None:
        self.count = 0
        self.listener: Callable[[bytes], None] | None = None
        """Told of each envelope, if somebody wants to know."""
        self.last_token = ""
        self.close_code: int | None = None
        self._acks_each = acks_each
        self._since_ack = 0
        self.life = ""
        """Of the gateway, as the answer to the upgrade named it."""
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._goal = -1
        self._is_there = asyncio.Event()
        self._transport: WSTransport | None = None

    # What picows calls

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        self.life = transport.response.headers.get("Tidings-Life", "")

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        kind = frame.msg_type
        if kind is not _TEXT:
            if kind is WSMsgType.PING:
                transport.send_pong(frame.get_payload_as_bytes())
            elif kind is WSMsgType.CLOSE:
                self.close_code = int.from_bytes(frame.get_payload_as_bytes()[:2])
                transport.disconnect(False)
            return
        if not self._answer.done():
            self._answer.set_result(frame.get_payload_as_bytes())
            return
        self.count += 1
        if self._acks_each:
            self._since_ack += 1
            if self._since_ack >= self._acks_each or self.count == self._goal:
                message = frame.get_payload_as_bytes()
                at = message.index(_TOKEN) + len(_TOKEN)
                self.last_token = message[at : at + _TOKEN_CHARS].decode()
                transport.send(_TEXT, b'{"type":"ack","resume_token":"%b"}' % message[at : at + _TOKEN_CHARS])
                self._since_ack = 0
        if self.listener is not None:
            self.listener(frame.get_payload_as_bytes())
        if self.count == self._goal:
            self._is_there.set()

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        if not self._answer.done():
            self._answer.set_result(b"")
        self._is_there.set()

    # What measurements call

    def say(self, message: bytes) -> None:
        """Send one message."""
        assert self._transport is not None
        self._transport.send(_TEXT, message)

    async def answer(self) -> bytes:
        """The first message that came."""
        return await self._answer

    def aim(self, count: int) -> None:
        """So many envelopes are to come in all; the last of them is acknowledged."""
        self._goal = count
        self._is_there.clear()
        if self.count >= count:
            self._is_there.set()

    async def reached(self) -> None:
        """Wait until they have come."""
        async with asyncio.timeout(_S_MAX):
            await self._is_there.wait()
        if self.count < self._goal:
            raise GatewayFailed(f"a subscriber was sent away ({self.close_code}) after {self.count} of {self._goal}")

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.disconnect(False)


async def connect(
    url: str,
    name: str,
    *,
    kind: Literal["gateway", "bare"] = "gateway",
    acks_each: int = 32,
    token: str | None = None,
    resume_token: str | None = None,
    filters: Mapping[str, object] | None = None,
) -> EventsClient:
    """
    A subscriber of graph events, or with ``bare`` a mere listener.

    Raises:
        GatewayFailed: The server does not want it.
    """
    headers = {"Authorization": f"Bearer {token or token_for(name)}"} if kind == "gateway" else {}
    _, client = await ws_connect(
        lambda: EventsClient(acks_each if kind == "gateway" else 0),
        url,
        extra_headers=headers,
        websocket_handshake_timeout=60,
    )
    assert isinstance(client, EventsClient)
    if kind == "bare":
        client._answer.set_result(b"")
        return client
    if resume_token is not None:
        client.say(orjson.dumps({"type": "resume", "resume_token": resume_token}))
    client.say(
        orjson.dumps({"type": "subscribe", "app_id": "default", "subscription_type": "graph", **(filters or {})})
    )
    answer = await client.answer()
    if not answer.startswith(b'{"event":"subscribed"'):
        if resume_token is not None and b"http_catch_up" in answer:
            client.close()
            return client
        raise GatewayFailed(f"instead of subscribed: {answer[:300]!r}")
    return client


async def connect_many(
    url: str, name: str, count: int, *, kind: Literal["gateway", "bare"] = "gateway", acks_each: int = 32
) -> list[EventsClient]:
    """Many of them, some at a time, all of one identity."""
    gate = asyncio.Semaphore(_CONNECTING)
    token = token_for(name)

    async def one() -> EventsClient:
        async with gate:
            return await connect(url, name, kind=kind, acks_each=acks_each, token=token)

    return list(await asyncio.gather(*(one() for _ in range(count))))


class SocketPublisher(WSListener):
    """Publishes over a node's ``/groups``, as programs do that hold a connection."""

    def __init__(self) -> None:
        self.published = 0
        self.problem = ""
        self._transport: WSTransport | None = None
        self._has_answer = asyncio.Event()

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type is not _TEXT:
            return
        message = frame.get_payload_as_bytes()
        if b'"verdict":"appended"' in message:
            self.published += 1
        elif b'"welcome"' not in message:
            self.problem = message[:300].decode()
        self._has_answer.set()

    def publish(self, run: str, number: int) -> None:
        """Hand in one event, with the id ``RUN-NUMBER``."""
        assert self._transport is not None
        if self.problem:
            raise GatewayFailed(self.problem)
        self._transport.send(_TEXT, orjson.dumps({"type": "publish", "ref": number, "event": _event(run, number)}))

    async def finished(self, count: int) -> None:
        """Wait until so many were stored."""
        async with asyncio.timeout(_S_MAX):
            while self.published < count and not self.problem:
                self._has_answer.clear()
                await self._has_answer.wait()
        if self.problem:
            raise GatewayFailed(self.problem)

    @classmethod
    async def connected(cls, url: str) -> SocketPublisher:
        """One that is connected to a node, whichever of its endpoints the url is of."""
        _, client = await ws_connect(cls, url.replace("/events", "/groups"))
        assert isinstance(client, cls)
        assert client._transport is not None
        client._transport.send(_TEXT, orjson.dumps({"type": "hello", "token": token_for("publisher"), "version": 1}))
        await client._has_answer.wait()
        return client

    def close(self) -> None:
        """Hang up."""
        assert self._transport is not None
        self._transport.disconnect(False)


class Publisher:
    """
    Requests over HTTP, each on one of some connections, put together ahead.

    By hand, since a client of HTTP as programs use it needs more time for a request than the node does.
    """

    def __init__(self, url: str) -> None:
        self._host, self._port = url.removeprefix("ws://").split("/")[0].split(":")
        self._token = token_for("publisher")
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def request(self, run: str, first: int, count: int = 1) -> bytes:
        """The request that publishes so many events, with the ids ``RUN-NUMBER``."""
        events = [_event(run, number) for number in range(first, first + count)]
        return self._head("POST", "/v1/events", self._token, orjson.dumps(events if count > 1 else events[0]))

    async def publish(self, request: bytes) -> None:
        """
        Send a request, and wait for its answer.

        Raises:
            GatewayFailed: Not all events were stored.
        """
        status, body = await self._ask(request)
        if status not in (200, 201):
            raise GatewayFailed(f"{status}: {body[:300]!r}")

    async def envelopes(self, since: int, token: str, limit: int = 100) -> list[int]:
        """Read one page of envelopes; their seqs."""
        status, body = await self._ask(self._head("GET", f"/v1/envelopes?since={since}&limit={limit}", token))
        if status != 200:
            raise GatewayFailed(f"{status}: {body[:300]!r}")
        return [each["sequence_anchor"]["global_seq"] for each in orjson.loads(body)["envelopes"]]

    def close(self) -> None:
        """End all connections."""
        for _, writer in self._free:
            writer.close()

    def _head(self, method: str, path: str, token: str, body: bytes = b"") -> bytes:
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\nauthorization: Bearer {token}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _ask(self, request: bytes) -> tuple[int, bytes]:
        while True:
            is_used = bool(self._free)
            reader, writer = self._free.pop() if is_used else await asyncio.open_connection(self._host, self._port)
            writer.write(request)
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                break
            except (asyncio.IncompleteReadError, ConnectionError):
                if not is_used:  # else the server has closed it meanwhile, as it may
                    raise
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        self._free.append((reader, writer))
        return int(head[9:12]), body


def _event(run: str, number: int) -> dict[str, object]:
    meta = {
        "topic": TOPIC,
        "type": "ITEM_CHANGED",
        "space_id": "shared:bench",
        "event_id": f"{run}-{number:07d}",
        "objects": [f"item:{run}-{number:07d}"],
    }
    return {"meta": meta, "payload": {"text": "two litres of milk, if they have any", "n": number}}
