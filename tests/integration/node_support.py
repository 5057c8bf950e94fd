"""What the tests of the node share: endpoints to talk to, and a client of sockets that keeps what it hears."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import pytest
import uvloop
from picows import WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from tidings.access.endpoint import Connection, Endpoint, Peer, Transport
from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.record import Record
from tidings.server.services import Services

SECONDS_MAX: Final = 20.0


async def until(condition: Callable[[], object]) -> None:
    """Wait until something holds, within the time that a test has."""
    async with asyncio.timeout(SECONDS_MAX):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def until_answered(ask: Callable[[], Awaitable[object]], wanted: object) -> None:
    """Ask again and again until the answer is the wanted one, within the time that a test has."""
    async with asyncio.timeout(SECONDS_MAX):
        while await ask() != wanted:  # noqa: ASYNC110 - the one who is asked is another process
            await asyncio.sleep(0.01)


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the loop that a node runs on, and on Python's own."""

    def run(*, loop_factory: Callable[[], asyncio.AbstractEventLoop], **arguments: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(**arguments))

    own = inspect.signature(test)
    one_more = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    functools.update_wrapper(run, test)
    del run.__wrapped__  # type: ignore[attr-defined]  # its signature is not this one's
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), one_more])  # type: ignore[attr-defined]
    both = [asyncio.new_event_loop, uvloop.new_event_loop]
    marked: Callable[..., None] = pytest.mark.parametrize("loop_factory", both, ids=["asyncio", "uvloop"])(run)
    return marked


class Everything:
    """The rights of somebody who may stay."""

    subject = "somebody"
    expires_at_ns = None
    is_revoked = False


class Talk(Connection[None]):
    """A connection that notes everything and answers by a function."""

    def __init__(self, endpoint: TalkEndpoint, transport: Transport, peer: Peer) -> None:
        super().__init__(endpoint, transport)
        self.peer = peer
        self.heard: list[bytes] = []
        self.drained_count = 0
        self.is_busy = False
        self.closed_with: int | None = None
        self.ponged_with: list[bytes] = []
        self._answer = endpoint.answer

    def handle(self, message: bytes) -> None:
        self.heard.append(message)
        self._answer(self, message)

    async def work(self, request: None) -> None:
        """Nothing is queued: whatever is heard is answered at once."""

    def ponged(self, payload: bytes) -> None:
        self.ponged_with.append(payload)

    def has_room_again(self) -> None:
        self.drained_count += 1

    def has_backlog(self) -> bool:
        return self.is_busy

    def closed(self, code: int) -> None:
        assert self.closed_with is None
        self.closed_with = code
        super().closed(code)


def echo(talk: Talk, message: bytes) -> None:
    """Say the same."""
    talk.send([message])


class TalkEndpoint(Endpoint[Talk]):
    """An endpoint whose connections a test can look at."""

    unsent_bytes_max = 1 << 30
    authentication_timeout_s = 3600.0

    def __init__(self, answer: Callable[[Talk, bytes], None] = echo, *, knows_everybody: bool = True) -> None:
        super().__init__("/talk", SYSTEM_CLOCK)
        self._knows_everybody = knows_everybody
        self.talks: list[Talk] = []
        self.was_stopped = False
        self.answer = answer

    def __call__(self, services: Services) -> TalkEndpoint:
        return self

    def connect(self, transport: Transport, peer: Peer) -> Talk:
        talk = Talk(self, transport, peer)
        if self._knows_everybody:
            talk.authenticated(Everything())
        self.talks.append(talk)
        return talk

    async def stop(self, deadline_s: float) -> None:
        self.was_stopped = True
        for talk in self.talks:
            talk.close(4503, "stopping")
        await super().stop(deadline_s)


class ListeningEndpoint(TalkEndpoint):
    """An endpoint that passes on what is committed, and fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def deliver(self, records: Sequence[Record]) -> None:
        if self.fails:
            raise RuntimeError("as the test wanted")
        messages = tuple(b"%d" % record.seq for record in records)
        for talk in self.talks:
            talk.send(messages)


class Client(WSListener):
    """A client of a socket."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.close_code: int | None = None
        self.close_reason = ""
        self.is_gone = False
        self.transport: WSTransport

    def on_ws_connected(self, transport: WSTransport) -> None:
        self.transport = transport

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type == WSMsgType.CLOSE:
            payload = frame.get_payload_as_bytes()
            self.close_code, self.close_reason = int.from_bytes(payload[:2]), payload[2:].decode()
            transport.disconnect()
        elif frame.msg_type in (WSMsgType.TEXT, WSMsgType.BINARY):
            self.heard.append(frame.get_payload_as_bytes())

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self.is_gone = True

    def say(self, message: bytes, kind: WSMsgType = WSMsgType.TEXT, **flags: Any) -> None:
        self.transport.send(kind, message, **flags)

    async def hear(self, count: int) -> list[bytes]:
        await until(lambda: len(self.heard) >= count or self.is_gone)
        return self.heard

    async def ended(self) -> int | None:
        await until(lambda: self.is_gone)
        return self.close_code


async def connect(url: str, *, tls: ssl.SSLContext | None = None, **options: Any) -> Client:
    """An open socket."""
    _, client = await ws_connect(Client, url, ssl_context=tls, **options)
    assert isinstance(client, Client)
    return client


@contextlib.asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Client]:
    """An open socket, closed at the end."""
    client = await connect(url, **options)
    try:
        yield client
    finally:
        client.transport.disconnect(False)
        await until(lambda: client.is_gone)
