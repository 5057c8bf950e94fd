"""Limits of a node's sockets and requests: beyond them a peer is refused or cut with the documented answer, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from picows import WSInvalidStatusError

from tests.beyond import Beyond, crossed
from tests.integration.events_support import LeapingClock
from tests.integration.node_support import Client, TalkEndpoint, connect, until
from tests.integration.test_connection_limits import frame, hello, raw
from tidings.core.errors import SettingsError
from tidings.core.events import Event, EventMeta
from tidings.server import settings as server_settings
from tidings.server.settings import load_settings
from tidings.testing.node import RunningNode, running_node
from tidings.wire import groups as wire


class Request:
    """A connection on which a test writes bytes and reads answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(5):
                await self.writer.drain()

    async def status(self) -> int | None:
        """The status of the next answer; ``None`` if the connection ends without one."""
        try:
            async with asyncio.timeout(20):
                line = await self.reader.readline()
        except ConnectionError:
            return None
        return int(line.split()[1]) if line else None

    async def ended(self) -> float:
        """Read to the end. Return the seconds that took."""
        started_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                while await self.reader.read(1 << 16):
                    pass
        return time.monotonic() - started_s


@contextlib.asynccontextmanager
async def request(node: RunningNode, data: bytes = b"") -> AsyncIterator[Request]:
    """Open a connection to the node, and send bytes."""
    host, _, port = node.url.rpartition("/")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    opened = Request(reader, writer)
    try:
        await opened.send(data)
        yield opened
    finally:
        writer.transport.abort()


async def is_alive(node: RunningNode) -> bool:
    """Whether the node answers a new client."""
    async with httpx.AsyncClient(base_url=node.url) as http:
        return (await http.get("/healthz")).status_code == 200


async def in_progress(node: RunningNode) -> bool:
    """Whether the node is answering a request beside this one."""
    async with httpx.AsyncClient(base_url=node.url) as http:
        text = (await http.get("/metrics")).text
    [value] = [line.split()[1] for line in text.splitlines() if line.startswith("tidings_http_requests_in_progress ")]
    return float(value) > 1


GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


# Requests


@pytest.mark.bound("server.settings.ServerSettings.head_bytes_max")
@crossed
async def test_a_longer_head_is_answered_with_431(tmp_path: Path, beyond: Beyond) -> None:
    """A head within the limit is answered; a longer one gets 431, and the connection ends."""
    async with running_node(tmp_path, head_bytes_max=8_192) as node:
        async with request(node, GET + b"X: " + b"x" * 8_000 + b"\r\n\r\n") as good:
            assert await good.status() == 200
        async with request(node, GET + b"X: " + b"x" * beyond(8_192) + b"\r\n\r\n") as long:
            assert await long.status() == 431
            await long.ended()


@pytest.mark.bound("server.settings.ServerSettings.body_bytes_max")
@crossed
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_larger_body_is_answered_with_413(tmp_path: Path, is_chunked: bool, beyond: Beyond) -> None:
    """A larger body is refused, announced or chunked, and nothing is stored."""
    async with running_node(tmp_path, body_bytes_max=10_000) as node:
        token = node.token("w", roles=["admin"])
        before = node.bus.log.position.seq
        body = json.dumps(
            {"meta": {"topic": "t", "type": "T", "space_id": "s"}, "payload": {"x": "x" * beyond(10_000)}}
        ).encode()

        async def pieces() -> AsyncIterator[bytes]:
            yield body

        headers = {"Authorization": f"Bearer {token}", "content-type": "application/json"}
        async with httpx.AsyncClient(base_url=node.url, headers=headers) as http:
            answer = await http.post("/v1/events", content=pieces() if is_chunked else body)
        assert answer.status_code == 413
        assert node.bus.log.position.seq == before


@pytest.mark.bound("server.settings.ServerSettings.head_timeout_s", "server.settings.ServerSettings.body_timeout_s")
@crossed
@pytest.mark.parametrize("part", ["head", "body"])
async def test_a_peer_that_takes_too_long_is_cut(tmp_path: Path, part: str, beyond: Beyond) -> None:
    """A peer that sends a byte now and then is cut when its time is up, however long it would go on."""
    limit_s = 0.3
    start = (
        b"GET /healthz HTTP/1.1\r\nX: "
        if part == "head"
        else b"POST /v1/events HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    )
    async with (
        running_node(tmp_path, head_timeout_s=limit_s, body_timeout_s=limit_s) as node,
        request(node, start) as slow,
    ):
        ended = asyncio.ensure_future(slow.ended())
        sent_s = 0.0
        while not ended.done() and sent_s < limit_s * beyond(1) + 10:
            await slow.send(b"x")
            await asyncio.wait([ended], timeout=0.1)
            sent_s += 0.1
        assert ended.done()
        assert sent_s < 10
        assert await is_alive(node)


@pytest.mark.bound("server.settings.ServerSettings.keep_alive_s")
@crossed
async def test_an_idle_connection_is_closed(tmp_path: Path, beyond: Beyond) -> None:
    """A connection that sends its next request in time is answered; one that idles for longer is closed."""
    async with running_node(tmp_path, keep_alive_s=1) as node, request(node, GET + b"\r\n") as kept:
        assert await kept.status() == 200
        async with asyncio.timeout(beyond(1) + 5):
            await kept.ended()


@pytest.mark.bound(
    "server.settings.ServerSettings.requests_max", "server.settings.ServerSettings.requests_per_address_max"
)
@crossed
@pytest.mark.parametrize("name", ["requests_max", "requests_per_address_max"])
async def test_one_more_http_connection_gets_503(tmp_path: Path, name: str, beyond: Beyond) -> None:
    """As many connections as allowed are served; each further one gets 503, and a probe is answered all the same."""
    limits: dict[str, Any] = {name: 3}
    async with running_node(tmp_path, **limits) as node, contextlib.AsyncExitStack() as stack:
        ask = b"GET /v1/topics HTTP/1.1\r\nHost: x\r\n\r\n"
        for _ in range(3):
            one = await stack.enter_async_context(request(node, ask))
            assert await one.status() == 401
        for _ in range(3, beyond(3)):
            more = await stack.enter_async_context(request(node, ask))
            assert await more.status() == 503
        assert await is_alive(node)


@pytest.mark.bound("server.settings.ServerSettings.answer_timeout_s")
@crossed
async def test_a_peer_that_does_not_read_its_response_is_cut(tmp_path: Path, beyond: Beyond) -> None:
    """A large answer that is not read ends the connection after the time; a reader gets all of it."""
    async with running_node(tmp_path, answer_timeout_s=1.0) as node:
        token = node.token("w", roles=["admin"])
        events = [Event(EventMeta("t", "T", "s"), {"x": "x" * 50_000}) for _ in range(200)]
        await node.bus.publish_many(events)
        ask = f"GET /v1/events?limit=1000 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nAccept: application/x-ndjson\r\n\r\n"
        async with request(node) as deaf:
            deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await deaf.send(ask.encode() * beyond(1))
            async with asyncio.timeout(15):
                while await in_progress(node):  # noqa: ASYNC110 - another process would have to tell
                    await asyncio.sleep(0.05)


# Sockets


@pytest.mark.bound(
    "server.settings.ServerSettings.connections_max",
    "server.settings.ServerSettings.connections_per_address_max",
    "server.settings.ServerSettings.unauthenticated_max",
    "server.settings.ServerSettings.unauthenticated_per_address_max",
)
@crossed
@pytest.mark.parametrize(
    "name",
    ["connections_max", "connections_per_address_max", "unauthenticated_max", "unauthenticated_per_address_max"],
)
async def test_one_more_socket_gets_503(tmp_path: Path, name: str, beyond: Beyond) -> None:
    """As many sockets as allowed are open; each further one gets 503; when one leaves there is a place again."""
    limits: dict[str, Any] = {name: 3}
    async with running_node(tmp_path, **limits) as node:
        clients: list[Client] = [await connect(f"{node.ws_url}/sync") for _ in range(3)]
        for _ in range(3, beyond(3)):
            with pytest.raises(WSInvalidStatusError, match="503"):
                await connect(f"{node.ws_url}/sync")
        clients[0].transport.disconnect(False)
        await until(lambda: len(node.connections) == 2)
        clients[0] = await connect(f"{node.ws_url}/sync")
        for client in clients:
            client.transport.disconnect(False)


@pytest.mark.bound("server.settings.ServerSettings.message_bytes_max")
@crossed
async def test_a_longer_message_closes_with_1009(tmp_path: Path, beyond: Beyond) -> None:
    """A message beyond the limit ends this connection and no other."""
    async with running_node(tmp_path, message_bytes_max=1 << 20) as node:
        one, other = await hello(node), await hello(node)
        one.say(b"x" * beyond(1 << 20))
        assert await one.ended() == 1009
        assert not other.is_gone


@pytest.mark.bound("server.settings.ServerSettings.control_frames_per_s_max")
@crossed
async def test_more_control_frames_close_with_1008(tmp_path: Path, beyond: Beyond) -> None:
    """As many pings as allowed are answered; more end the connection."""
    async with running_node(tmp_path, control_frames_per_s_max=10) as node:
        client = await hello(node)
        for _ in range(beyond(10) * 2):
            client.transport.send_ping(b"x")
        assert await client.ended() == 1008


@pytest.mark.bound(
    "server.settings.ServerSettings.unauthenticated_bytes_max",
    "server.settings.ServerSettings.unauthenticated_messages_max",
    "access.endpoint.ConnectionLimits.unauthenticated_messages_max",
)
@crossed
@pytest.mark.parametrize("kind", ["bytes", "messages"])
async def test_a_peer_without_a_token_sends_little(tmp_path: Path, kind: str, beyond: Beyond) -> None:
    """More bytes, or messages, before a token end the connection."""
    talk = TalkEndpoint(knows_everybody=False)
    async with running_node(
        tmp_path,
        endpoints={"/talk": talk},
        close_timeout_s=0.2,
        unauthenticated_bytes_max=4_096,
        unauthenticated_messages_max=5,
    ) as node:
        peer = await raw(node, "/talk")
        data = frame(1, b"x" * beyond(4_096)) if kind == "bytes" else frame(1, b"x") * beyond(5)
        await peer.send(data)
        assert await peer.close_code() in (1008, None)
        await until(lambda: not len(node.connections))


@pytest.mark.bound(
    "server.settings.ServerSettings.unauthenticated_timeout_s",
    "access.endpoint.ConnectionLimits.authentication_timeout_s",
)
@crossed
async def test_a_peer_without_a_token_has_little_time(tmp_path: Path, beyond: Beyond) -> None:
    """A socket that shows no token is closed in time, however long it would stay."""
    talk = TalkEndpoint(knows_everybody=False)
    async with running_node(
        tmp_path, endpoints={"/talk": talk}, close_timeout_s=0.2, unauthenticated_timeout_s=0.4
    ) as node:
        peer = await raw(node, "/talk")
        async with asyncio.timeout(0.4 * beyond(1) + 10):
            assert await peer.close_code() == 1008


@pytest.mark.bound("server.settings.ServerSettings.ping_interval_s", "server.settings.ServerSettings.close_timeout_s")
@crossed
async def test_a_silent_socket_is_cut(tmp_path: Path, beyond: Beyond) -> None:
    """A peer that answers no ping is disconnected, also if it does not answer the close."""
    talk = TalkEndpoint()
    async with running_node(tmp_path, endpoints={"/talk": talk}, ping_interval_s=0.2, close_timeout_s=0.2) as node:
        silent = await raw(node, "/talk")
        await until(lambda: len(node.connections) == 1)
        async with asyncio.timeout(0.2 * beyond(2) + 15):
            await until(lambda: not len(node.connections))
        silent.inner.close()


@pytest.mark.bound("server.settings.ServerSettings.metrics_series_max")
@crossed
async def test_topics_beyond_the_limit_share_a_series(tmp_path: Path, beyond: Beyond) -> None:
    """``/metrics`` names as many topics as allowed and counts the others together: no event is missing from the sum."""
    async with running_node(tmp_path, metrics_series_max=3) as node:
        for number in range(beyond(3)):
            await node.bus.publish(f"topic{number}", {}, type="T", space="s")
        async with httpx.AsyncClient(base_url=node.url) as http:
            text = (await http.get("/metrics")).text
        named = {line.split('topic="')[1].split('"')[0] for line in text.splitlines() if 'topic="topic' in line}
        assert len(named) <= 3


@pytest.mark.bound("server.settings.ServerSettings.stop_deadline_s")
@crossed
async def test_stopping_takes_no_longer_than_its_deadline(tmp_path: Path, beyond: Beyond) -> None:
    """A request that would wait longer does not hold up the stop."""
    limits: dict[str, Any] = {"stop_deadline_s": 0.5}
    async with running_node(tmp_path, **limits) as node:
        token = node.token("w", roles=["admin"])
        wait_s = 0.5 * beyond(1) + 5
        ask = f"GET /v1/events?topic=t&wait={wait_s} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
        async with request(node, ask.encode()):
            while not await in_progress(node):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
            started_s = time.monotonic()
            await node.stop()
            assert time.monotonic() - started_s < 4.5


# Files


@pytest.mark.bound("server.settings._CONFIG_BYTES_MAX", "server.settings._FILE_BYTES_MAX")
@crossed
def test_a_larger_settings_or_key_file_is_rejected(tmp_path: Path, beyond: Beyond) -> None:
    """A configuration or key file at the limit is read; a larger one raises ``SettingsError`` with its name."""
    config, keys = tmp_path / "node.toml", tmp_path / "keys.json"
    config.write_text("#" * server_settings._CONFIG_BYTES_MAX)
    load_settings(config)
    config.write_text("#" * beyond(server_settings._CONFIG_BYTES_MAX))
    with pytest.raises(SettingsError, match=r"node\.toml"):
        load_settings(config)
    config.write_text(f'[server]\nkey_set_file = "{keys}"\n')
    keys.write_text('{"keys": []}'.ljust(server_settings._FILE_BYTES_MAX))
    load_settings(config)
    keys.write_text('{"keys": []}'.ljust(beyond(server_settings._FILE_BYTES_MAX)))
    with pytest.raises(SettingsError, match="longer"):
        load_settings(config)


@pytest.mark.bound(
    "server.settings.ServerSettings.messages_per_s_max", "access.endpoint.ConnectionLimits.messages_per_s_max"
)
@crossed
async def test_messages_beyond_the_rate_are_read_later(tmp_path: Path, beyond: Beyond) -> None:
    """A second's worth is answered at once; the others in order when time has passed, and none is lost."""
    clock = LeapingClock()
    async with running_node(tmp_path, clock=clock, messages_per_s_max=10) as node:
        client = await hello(node)
        clock.leap(1.0)
        for number in range(beyond(10)):
            client.say(wire.encode(wire.Ping(ref=number)))
        heard = await client.hear(11)
        assert len(heard) < 1 + beyond(10)
        while len(heard) < 1 + beyond(10):
            clock.leap(1.0)
            heard = await client.hear(min(len(heard) + 10, 1 + beyond(10)))
        assert [json.loads(each)["ref"] for each in heard[1:]] == list(range(beyond(10)))


@pytest.mark.bound("server.settings.ServerSettings.write_buffer_bytes_max")
@crossed
async def test_a_peer_that_does_not_read_is_closed_with_1013(tmp_path: Path, beyond: Beyond) -> None:
    """What waits for a peer beyond what the kernel takes is bounded: at the limit the socket stays, and beyond it is closed. Others are served."""
    limit = 1 << 16
    talk = TalkEndpoint()
    async with running_node(
        tmp_path, endpoints={"/talk": talk}, close_timeout_s=60.0, write_buffer_bytes_max=limit
    ) as node:
        idle, other = await raw(node, "/talk"), await connect(f"{node.ws_url}/talk")
        await until(lambda: len(talk.talks) == 2)
        transport = talk.talks[0].transport
        [socket] = [each for each in node.connections._open if each is transport]
        piece = 4_096
        while not transport.buffered_bytes:
            transport.send([bytes(piece)])
            await asyncio.sleep(0)
        transport.send([bytes(limit - transport.buffered_bytes - 16)])
        await asyncio.sleep(0)
        at_limit = socket._close_code
        transport.send([bytes(beyond(limit) - limit + 16)])
        await until(lambda: socket._close_code is not None)
        assert (at_limit, socket._close_code) == (None, 1013)
        other.say(b"still here")
        assert await other.hear(1) == [b"still here"]
        idle.inner.close()


@pytest.mark.bound("server.settings.ServerSettings.dispatch_lag_max")
@crossed
async def test_a_node_whose_endpoints_are_behind_is_not_ready(tmp_path: Path, beyond: Beyond) -> None:
    """At the limit the node is ready; beyond it the probe says why, until the endpoints have caught up."""
    async with (
        running_node(tmp_path, dispatch_lag_max=5, dispatch_interval_s=1.0) as node,
        httpx.AsyncClient(base_url=node.url) as http,
    ):
        dispatcher = node.services.dispatcher

        async def fall_behind(lag: int) -> httpx.Response:
            """Commit records while the dispatcher still waits, and ask at once; again if it did not wait so long."""
            for _ in range(50):
                await dispatcher.reached(node.log.position.seq)
                await node.log.append(Event(EventMeta("demo", "NOTED", "s"), {}))
                await dispatcher.reached(node.log.position.seq)
                for _ in range(lag):
                    await node.log.append(Event(EventMeta("demo", "NOTED", "s"), {}))
                response = await http.get("/readyz")
                if dispatcher.lag == lag:
                    return response
            raise AssertionError("the dispatcher never waited")

        assert (await fall_behind(5)).status_code == 200
        refused = await fall_behind(beyond(5))
        assert refused.status_code == 503
        assert [reason["code"] for reason in refused.json()["reasons"]] == ["node.dispatcher_lag"]
        await dispatcher.reached(node.log.position.seq)
        assert (await http.get("/readyz")).status_code == 200
