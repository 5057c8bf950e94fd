"""One HTTP connection, below any route: what is written when, and when it is closed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tidings.core.clock import SYSTEM_CLOCK
from tidings.server.connections import Connections
from tidings.server.edge import Edge
from tidings.server.http import HttpServer
from tidings.server.memory import MemoryBudget
from tidings.server.settings import ServerSettings

Message = dict[str, Any]


class Peer:
    """The transport of a connection to an application that answers with the given messages, whatever it is asked."""

    def __init__(self, *messages: Message, reads: bool = True, **settings: Any) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False
        self.has_ended = asyncio.Event()
        self._messages = messages
        self._reads = reads
        values = ServerSettings(**settings)
        edge = Edge(self._answer, settings=lambda: values, clock=SYSTEM_CLOCK, observed=lambda *_: None)
        connections = cast(Connections, type("Some", (), {"settings": values, "memory": MemoryBudget(values)}))
        self._protocol: Any = HttpServer(edge, values, connections, SYSTEM_CLOCK)._protocol()
        self._protocol.connection_made(cast(Any, self))

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        while self._reads and (await receive()).get("more_body"):
            pass
        for message in self._messages:
            await send(dict(message))

    async def ask(self, request: bytes) -> list[bytes]:
        """What is written when this has come."""
        self.writes.clear()
        buffer = self._protocol.get_buffer(-1)
        buffer[: len(request)] = request
        self._protocol.buffer_updated(len(request))
        for _ in range(10):
            await asyncio.sleep(0)
        return list(self.writes)

    # As the protocol sees it

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.is_closed = True
        self.has_ended.set()

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: object = None) -> object:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def can_write_eof(self) -> bool:
        return False


GET = b"GET / HTTP/1.1\r\nhost: node\r\n\r\n"
SIZED: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}
OPEN: Message = {"type": "http.response.start", "status": 200, "headers": []}
BODY: Message = {"type": "http.response.body", "body": b"hello"}


async def test_an_answer_whose_length_is_known_leaves_in_one_write() -> None:
    """Head and body together; each of several requests that came together has its own, in order, and the connection stays open."""
    peer = Peer(SIZED, BODY)
    (answer,) = await peer.ask(GET)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nhello")
    assert [each[-5:] for each in await peer.ask(GET + GET)] == [b"hello", b"hello"]
    assert not peer.is_closed


async def test_the_head_of_a_stream_does_not_wait_for_its_first_part() -> None:
    """Whoever opens a stream knows that it is open, however long nothing comes; parts leave as they are made."""
    peer = Peer(OPEN, {**BODY, "more_body": True}, {"type": "http.response.body", "body": b""})
    head, part, end = await peer.ask(GET)
    assert head.endswith(b"transfer-encoding: chunked\r\n\r\n")
    assert (part, end) == (b"5\r\nhello\r\n", b"0\r\n\r\n")


async def test_an_answer_to_head_has_no_body() -> None:
    """But the length that it would have."""
    (answer,) = await Peer(SIZED, BODY).ask(GET.replace(b"GET", b"HEAD"))
    assert b"content-length: 5" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("start", "body"),
    [
        (SIZED, b"hell"),
        (SIZED, b"hello!"),
        ({**SIZED, "headers": [(b"location", b"/a\r\nset-cookie: b")]}, b""),
    ],
)
async def test_an_answer_that_would_mislead_is_not_sent(start: Message, body: bytes) -> None:
    """A body that is not as long as was said, or a header that holds another one, ends the connection."""
    peer = Peer(start, {**BODY, "body": body})
    assert await peer.ask(GET) == []
    assert peer.is_closed


async def test_an_idle_connection_is_closed_also_if_its_answer_came_before_its_body() -> None:
    """Time counts from the answer, or from when the rest of what was asked has come."""
    idle, early = Peer(SIZED, BODY, keep_alive_s=1), Peer(SIZED, BODY, reads=False, keep_alive_s=1)
    await idle.ask(GET)
    await early.ask(b"POST / HTTP/1.1\r\nhost: node\r\ncontent-length: 3\r\n\r\n")
    await early.ask(b"abc")
    assert not idle.is_closed
    assert not early.is_closed
    async with asyncio.timeout(30):
        await asyncio.gather(idle.has_ended.wait(), early.has_ended.wait())
