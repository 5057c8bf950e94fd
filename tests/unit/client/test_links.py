"""Connections and waiting: order, bounds and ends, without a socket."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.client.support import ModelServer
from tidings.access.endpoint import Peer as RemotePeer
from tidings.access.endpoint import Transport
from tidings.client import EndpointConnector
from tidings.client.errors import ConnectFailed, LinkClosed
from tidings.client.link import Alarm, Inbox
from tidings.client.websocket import WebSocketConnector
from tidings.core.clock import within
from tidings.testing import VirtualClock
from tidings.wire.sync_frames import Connect, Disconnect, Heartbeat, encode


async def test_an_inbox_hands_out_all_that_waits_and_then_the_end() -> None:
    """Messages come in order, and the close code after the last of them."""
    inbox = Inbox(10, lambda: None, lambda: None)
    inbox.put(b"1")
    inbox.put(b"2")
    inbox.close(4003, "expired")

    assert await inbox.take() == [b"1", b"2"]
    with pytest.raises(LinkClosed) as caught:
        await inbox.take()
    assert (caught.value.close_code, caught.value.reason) == (4003, "expired")


async def test_a_full_inbox_stops_the_reading_until_it_is_emptied() -> None:
    """At its bound the inbox has the connection paused, once, and resumed when the messages were taken."""
    calls: list[str] = []
    inbox = Inbox(2, lambda: calls.append("pause"), lambda: calls.append("resume"))
    for message in (b"1", b"2", b"3"):
        inbox.put(message)

    assert calls == ["pause"]
    assert await inbox.take() == [b"1", b"2", b"3"]
    assert calls == ["pause", "resume"]


class EchoEndpoint:
    """Answers every message with itself, and notes how it ends."""

    def __init__(self) -> None:
        self.transport: Transport | None = None
        self.heard: list[bytes] = []
        self.code: int | None = None

    def admit(self, peer: RemotePeer) -> RemotePeer:
        return peer

    def open(self, transport: Transport, peer: RemotePeer) -> EchoEndpoint:
        self.transport = transport
        return self

    async def stop(self, deadline_s: float) -> None:
        assert self.transport is not None
        self.transport.close(1012)

    def received(self, message: bytes) -> None:
        self.heard.append(message)
        assert self.transport is not None
        self.transport.send([message])

    def ponged(self, payload: bytes) -> None:
        self.heard.append(b"pong " + payload)

    def drained(self) -> None:
        self.heard.append(b"drained")

    def closed(self, code: int) -> None:
        self.code = code


async def test_a_loopback_carries_messages_in_order() -> None:
    """What one side sends the other side gets, in order."""
    endpoint = EchoEndpoint()
    link = await EndpointConnector(endpoint).connect("ws://anywhere")
    for message in (b"1", b"2"):
        link.send(message)
    await asyncio.sleep(0)

    assert await link.receive() == [b"1", b"2"]
    assert endpoint.heard == [b"1", b"2"]


async def test_a_loopback_answers_pings_and_carries_what_many_share() -> None:
    """A ping is answered by the link itself, and messages that end in a suffix come whole."""
    endpoint = EchoEndpoint()
    link = await EndpointConnector(endpoint).connect("ws://anywhere")
    assert endpoint.transport is not None
    endpoint.transport.ping(b"12345678")
    endpoint.transport.send_shared((b"a", b"b"), b"!")
    await asyncio.sleep(0)

    assert await link.receive() == [b"a!", b"b!"]
    assert endpoint.heard == [b"pong 12345678"]


async def test_an_endpoint_that_pauses_hears_nothing_until_it_resumes() -> None:
    """Messages sent meanwhile wait, and keep their order."""
    endpoint = EchoEndpoint()
    link = await EndpointConnector(endpoint).connect("ws://anywhere")
    assert endpoint.transport is not None
    link.send(b"1")
    endpoint.transport.pause_reading()
    link.send(b"2")
    await asyncio.sleep(0)
    assert endpoint.heard == []

    endpoint.transport.resume_reading()
    await asyncio.sleep(0)

    assert endpoint.heard == [b"1", b"2"]


async def test_a_client_that_does_not_take_its_messages_fills_the_endpoints_buffer() -> None:
    """The endpoint sees how much is not taken, and hears when it was."""
    endpoint = EchoEndpoint()
    link = await EndpointConnector(endpoint, messages_max=2).connect("ws://anywhere")
    assert endpoint.transport is not None
    endpoint.transport.send([b"aa", b"bb", b"cc"])

    assert endpoint.transport.buffered_bytes > 0
    await link.receive()
    await asyncio.sleep(0)

    assert endpoint.transport.buffered_bytes == 0
    assert endpoint.heard == [b"drained"]


async def test_both_sides_hear_of_the_end() -> None:
    """A close by either side reaches the other with its code; what was said before still counts."""
    endpoint = EchoEndpoint()
    link = await EndpointConnector(endpoint).connect("ws://anywhere")
    link.send(b"last words")
    await link.close(1000)
    await asyncio.sleep(0)
    assert (endpoint.heard, endpoint.code) == ([b"last words"], 1000)

    link = await EndpointConnector(endpoint).connect("ws://anywhere")
    await endpoint.stop(0)
    link.send(b"too late")
    await asyncio.sleep(0)
    with pytest.raises(LinkClosed, match="1012"):
        await link.receive()
    assert endpoint.heard == [b"last words"]


async def test_the_model_server_of_these_tests_says_goodbye() -> None:
    """The stand-in answers heartbeats and closes after a disconnect, as the protocol has it."""
    server = ModelServer()
    link = await EndpointConnector(server).connect("ws://anywhere")
    for payload in (Connect(token="t", client_id="c"), Heartbeat(), Disconnect()):
        link.send(encode(payload, msg_id="1", timestamp=0))
    await asyncio.sleep(0)

    assert len(await link.receive()) == 2
    with pytest.raises(LinkClosed, match="1000"):
        await link.receive()


async def test_an_alarm_rings_at_the_last_moment_it_was_set_to() -> None:
    """Setting it later or earlier moves it; it rings once."""
    clock, rings = VirtualClock(), []
    alarm = Alarm(clock, lambda: rings.append(clock.monotonic()))
    alarm.set(5.0)
    await clock.advance(1)
    alarm.set(8.0)
    await clock.advance(6)
    assert rings == []

    alarm.set(7.5)
    await clock.advance(10)

    assert rings == [7.5]
    alarm.set(20.0)
    alarm.cancel()
    await clock.advance(10)
    assert rings == [7.5]


async def test_a_connection_that_is_cut_within_the_handshake_could_not_be_opened() -> None:
    """A node or proxy that hangs up without an answer is no more than a failure to connect, which is tried again."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectFailed, match="cut"):
            await WebSocketConnector().connect(f"ws://127.0.0.1:{port}/")


async def test_waiting_has_an_end() -> None:
    """The wait ends with what was waited for, or with its time."""
    clock = VirtualClock()
    never = asyncio.get_running_loop().create_future()

    assert not await clock.run_until(within(clock, 3.0, never))
    assert clock.monotonic() == 3.0
    never.set_result(None)
    assert await clock.run_until(within(clock, 3.0, never))
