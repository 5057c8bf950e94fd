"""What the tests of the node share: doors to talk to, and a client of sockets that keeps what it hears."""

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

from tidings.log.record import Record
from tidings.server.services import Services
from tidings.wire.transport import Conversation, Transport, Upgrade

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


class Talk:
    """A conversation that notes everything and answers by a function."""

    def __init__(self, transport: Transport, upgrade: Upgrade, answer: Callable[[Talk, bytes], None]) -> None:
        self.transport = transport
        self.upgrade = upgrade
        self.heard: list[bytes] = []
        self.drained_count = 0
        self.closed_with: int | None = None
        self._answer = answer

    def received(self, message: bytes) -> None:
        self.heard.append(message)
        self._answer(self, message)

    def drained(self) -> None:
        self.drained_count += 1

    def closed(self, code: int) -> None:
        assert self.closed_with is None
        self.closed_with = code


def echo(talk: Talk, message: bytes) -> None:
    """Say the same."""
    talk.transport.send([message])


class TalkDoor:
    """A door whose conversations a test can look at."""

    def __init__(self, answer: Callable[[Talk, bytes], None] = echo, *, knows_everybody: bool = True) -> None:
        self._knows_everybody = knows_everybody
        self.talks: list[Talk] = []
        self.was_shut = False
        self._answer = answer

    def __call__(self, services: Services) -> TalkDoor:
        return self

    def open(self, transport: Transport, upgrade: Upgrade) -> Conversation:
        if self._knows_everybody:
            transport.authenticated()
        talk = Talk(transport, upgrade, self._answer)
        self.talks.append(talk)
        return talk

    async def shut(self, deadline_s: float) -> None:
        self.was_shut = True
        for talk in self.talks:
            talk.transport.close(4503, "shutting")


class ListeningDoor(TalkDoor):
    """A door that passes on what is committed, and fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def committed(self, records: Sequence[Record]) -> None:
        if self.fails:
            raise RuntimeError("as the test wanted")
        messages = tuple(b"%d" % record.seq for record in records)
        for talk in self.talks:
            talk.transport.send(messages)


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
