"""One connection of a client without a token: what it can make a node hold, and what it is answered, whatever it sends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]  # has no stubs
import pytest
from prometheus_client import generate_latest

from tests.beyond import Beyond, crossed
from tests.integration.node_support import TalkEndpoint, on_both_loops, until
from tests.integration.test_connection_limits import CLOSE, frame
from tests.integration.test_connection_limits import raw as socket_to
from tidings.server.http_protocol import HEADERS_COUNT_MAX
from tidings.testing.node import RunningNode, running_node

MIB = 1 << 20
_GET = b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n"
_UPGRADE = b"GET /echo HTTP/1.1\r\nHost: n\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
_KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
_VERSION = b"Sec-WebSocket-Version: 13\r\n"


async def opened(node: RunningNode) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(node.url.rpartition(":")[2]))


async def exchange(node: RunningNode, data: bytes) -> bytes:
    """What a node answers to bytes until it closes the connection."""
    reader, writer = await opened(node)
    writer.write(data)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer


def held(node: RunningNode) -> int:
    memory = node.connections.memory
    return sum(memory.held_bytes(is_authenticated=known) for known in (False, True))


@pytest.mark.parametrize("size", [MIB, pytest.param(4 * MIB, marks=pytest.mark.heavy)])
async def test_pipelined_requests_are_parsed_as_they_are_answered(tmp_path: Path, size: int) -> None:
    """However much a client pipelines, the node holds one read of it; each request is answered, and all memory is returned."""
    count, peak = size // len(_GET), 0
    async with running_node(tmp_path, access_log=False) as node:
        reader, writer = await opened(node)
        answered = 0
        gc.collect()
        before = psutil.Process().memory_info().rss

        async def send() -> None:
            for _ in range(count // 100):
                writer.write(_GET * 100)
                await writer.drain()
            writer.write(_GET * (count % 100))

        sending = asyncio.ensure_future(send())
        async with asyncio.timeout(300):
            while answered < count:
                answered += (await reader.read(1 << 16)).count(b"HTTP/1.1 200")
                peak = max(peak, held(node))
        await sending
        grown = psutil.Process().memory_info().rss - before
        writer.close()
        await until(lambda: held(node) == 0)

    assert 0 < peak <= 2 * 65_536
    assert grown < 16 * MIB


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.heavy)])
async def test_clients_that_pipeline_and_do_not_read_are_held_to_a_read_each(tmp_path: Path, count: int) -> None:
    """Connections that send 312 KB each and read nothing cost the node some tens of kilobytes each, which it gets back."""
    data = _GET * (312_000 // len(_GET))
    async with running_node(tmp_path, access_log=False) as node:
        gc.collect()
        before = psutil.Process().memory_info().rss
        peers = [await opened(node) for _ in range(count)]
        for reader, writer in peers:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            assert reader is not None
            writer.transport.set_write_buffer_limits(high=0)
            writer.write(data)
        await until(lambda: node.connections.memory.held_bytes(is_authenticated=False) > 0)
        grown = psutil.Process().memory_info().rss - before - len(data)
        most = held(node)
        for _, writer in peers:
            writer.transport.abort()
        await until(lambda: held(node) == 0)

    assert most <= count * 2 * 65_536
    assert grown < 64 * MIB


@pytest.mark.bound("server.http_protocol.HEADERS_COUNT_MAX")
@crossed
async def test_a_request_with_more_headers_is_refused(tmp_path: Path, beyond: Beyond) -> None:
    """As many headers as allowed are answered; one more is 431 with its own code, and the connection ends."""
    start = b"GET /healthz HTTP/1.1\r\nHost: n\r\n"
    async with running_node(tmp_path) as node:
        most = await exchange(node, start + b"a:\r\n" * (HEADERS_COUNT_MAX - 2) + b"Connection: close\r\n\r\n")
        more = await exchange(node, start + b"a:\r\n" * (beyond(HEADERS_COUNT_MAX) - 1) + b"\r\n")

    assert most.startswith(b"HTTP/1.1 200 ")
    assert more.startswith(b"HTTP/1.1 431 ")
    assert b"node.too_many_headers" in more


async def test_the_head_of_an_answered_request_is_not_kept(tmp_path: Path) -> None:
    """A connection that idles behind an answer holds nothing of the request's headers."""
    value = b"x" * 50_000
    async with running_node(tmp_path) as node:
        reader, writer = await opened(node)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: n\r\nX-Long: " + value + b"\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: held(node) == 0)
        gc.collect()
        # Pairs of bytes are not tracked by the collector; the lists that hold them are.
        lists = [item for item in gc.get_objects() if type(item) is list and item and type(item[-1]) is tuple]
        kept = [headers for headers in lists if headers[-1] and type(headers[-1][0]) is bytes]
        kept = [headers for headers in kept if headers[-1] == (b"x-long", value)]
        writer.close()

    assert kept == []


@on_both_loops
@pytest.mark.parametrize("path", [b"/healthz", b"/v1/events?wait=20"], ids=["quick", "long poll"])
async def test_an_upgrade_behind_an_unanswered_request_is_refused(tmp_path: Path, path: bytes) -> None:
    """It is not granted before the answer is given; what is answered comes in order, and the connection ends soon."""
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}) as node:
        token = node.headers("root", roles=["admin"])["authorization"].encode()
        first = b"GET %b HTTP/1.1\r\nHost: n\r\nAuthorization: %b\r\n\r\n" % (path, token)
        answer = await exchange(node, first + _UPGRADE + _KEY + _VERSION + b"\r\n")
        opened_count = node.connections.opened_count

    statuses = re.findall(rb"HTTP/1\.1 (\d+)", answer)
    assert statuses == ([b"200", b"400"] if path == b"/healthz" else [])
    assert opened_count == 0


@on_both_loops
async def test_trailers_are_not_headers(tmp_path: Path) -> None:
    """A token, a request id and an origin in the trailers of a body count for nothing: a proxy has not seen them."""
    async with running_node(tmp_path) as node:
        token = node.headers("root", roles=["admin"])["authorization"].encode()
        head = b"POST /v1/events HTTP/1.1\r\nHost: n\r\nConnection: close\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        trailers = b"Authorization: %b\r\nX-Request-Id: mine\r\nOrigin: https://evil.example\r\n\r\n" % token
        answer = await exchange(node, head + b"2\r\n{}\r\n0\r\n" + trailers)

    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"mine" not in answer


@pytest.mark.parametrize("part", ["extension", "trailer"])
@pytest.mark.parametrize("factor", [1, 10])
async def test_a_body_has_as_little_besides_its_data_as_a_head(tmp_path: Path, part: str, factor: int) -> None:
    """A chunk extension or a trailer without end is refused when it is longer than a head may be, and is not collected."""
    head = b"POST /v1/events HTTP/1.1\r\nHost: n\r\nTransfer-Encoding: chunked\r\n\r\n"
    begin = b"1;" if part == "extension" else b"0\r\nX: "
    async with running_node(tmp_path, head_bytes_max=65_536) as node:
        reader, writer = await opened(node)
        writer.write(head + begin)
        answer = await asyncio.wait_for(reader.readuntil(b"}"), 20)  # no token: the body is not awaited
        with contextlib.suppress(ConnectionError):
            for _ in range(factor * 65_537 // 1_024 + 64):
                writer.write(b"x" * 1_024)
                await writer.drain()
            async with asyncio.timeout(20):
                await reader.read()
        writer.close()
        await until(lambda: held(node) == 0)

    assert answer.startswith(b"HTTP/1.1 401 ")


async def test_an_upgrade_may_have_as_long_a_head_as_any_request(tmp_path: Path) -> None:
    """More and longer headers than picows takes are no reason to close without a word."""
    long = b"".join(b"X-%d: %b\r\n" % (number, b"y" * 200) for number in range(240))
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}) as node:
        reader, writer = await opened(node)
        writer.write(_UPGRADE + _KEY + _VERSION + long + b"\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
        too_long = await exchange(node, _UPGRADE + _KEY + _VERSION + b"X: " + b"y" * 70_000 + b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 101 ")
    assert too_long.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (_UPGRADE + _KEY + b"Sec-WebSocket-Version: 99\r\n\r\n", 426),
        (_UPGRADE + _KEY + b"Sec-WebSocket-Version: 8\r\n\r\n", 426),
        (_UPGRADE + _KEY + b"Sec-WebSocket-Version: 7\r\n\r\n", 426),
        (_UPGRADE + _KEY + _VERSION + _VERSION + b"\r\n", 426),
        (_UPGRADE + _KEY + b"\r\n", 400),
        (_UPGRADE + _KEY + _KEY + _VERSION + b"\r\n", 400),
        (_UPGRADE + _KEY + _VERSION + b"Content-Length: 5\r\n\r\nhello", 400),
        (_UPGRADE + _KEY + _VERSION + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (_UPGRADE.replace(b"HTTP/1.1", b"HTTP/1.0") + _KEY + _VERSION + b"\r\n", 400),
        (_UPGRADE.replace(b"GET", b"POST") + _KEY + _VERSION + b"\r\n", 400),
    ],
)
@on_both_loops
async def test_a_handshake_that_is_not_valid_is_answered(tmp_path: Path, request_: bytes, status: int) -> None:
    """With a problem, a request id, and the version that is spoken here."""
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}) as node:
        answer = await exchange(node, request_)

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nsec-websocket-version: 13" in head
    assert b"\r\nx-request-id: rq-" in head
    assert (b"node.unknown_socket_version" if status == 426 else b"node.bad_handshake") in body


@pytest.mark.parametrize(
    ("code", "reply"),
    [
        *((code, 1002) for code in (0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65_535)),
        *((code, code) for code in (1000, 1003, 1007, 1014, 3000, 4999)),
    ],
)
async def test_a_close_code_that_must_not_be_sent_is_a_breach(tmp_path: Path, code: int, reply: int) -> None:
    """RFC 6455, 7.4: the peer gets 1002 for it, and any other code back."""
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}) as node:
        peer = await socket_to(node, "/echo")
        await peer.send(frame(CLOSE, code.to_bytes(2, "big")))
        assert await peer.close_code() == reply


async def test_a_breach_does_not_keep_the_socket(tmp_path: Path) -> None:
    """A peer that answers the close frame for a frame that cannot be read is let go at once."""
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}, close_timeout_s=60.0) as node:
        peer = await socket_to(node, "/echo")
        await peer.send(frame(0x3))
        async with asyncio.timeout(20):
            first = await asyncio.get_running_loop().sock_recv(peer.inner, 2)
        await peer.send(frame(CLOSE, b"\x03\xea"))
        await peer.close_code()
        await until(lambda: len(node.connections) == 0)

    assert first[0] == 0x80 | CLOSE


@on_both_loops
async def test_a_client_that_leaves_in_its_body_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No 500, no traceback: nothing of ours has failed."""
    caplog.set_level(logging.WARNING)
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        token = node.headers("root", roles=["admin"])["authorization"].encode()
        reader, writer = await opened(node)
        writer.write(
            b"POST /v1/events HTTP/1.1\r\nHost: n\r\nContent-Length: 9\r\nAuthorization: " + token + b"\r\n\r\n{"
        )
        await until(lambda: any(task for task in asyncio.all_tasks() if "Exchange.run" in str(task.get_coro())))
        writer.transport.abort()
        assert reader is not None
        counted = ""
        while '/v1/events",status="499"' not in counted:
            counted = (await client.get("/metrics")).text

    assert 'status="500"' not in counted
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


async def test_an_answer_that_does_not_await_the_body_is_read(tmp_path: Path) -> None:
    """A client that is still sending reads 413: the connection is not reset under it."""
    async with running_node(tmp_path, body_bytes_max=1_024) as node:
        token = node.headers("root", roles=["admin"])["authorization"]
        for _ in range(5):
            reader, writer = await opened(node)
            head = f"POST /v1/events HTTP/1.1\r\nHost: n\r\nContent-Length: 3000000\r\nAuthorization: {token}\r\n\r\n"
            writer.write(head.encode() + b"x" * 3_000_000)
            async with asyncio.timeout(20):
                answer = await reader.read()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"connection: close" in answer


async def test_answers_of_the_api_are_not_kept_by_caches(tmp_path: Path) -> None:
    """Whatever the status; a document that may be kept says so itself."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        answers = [await client.get(path) for path in ("/v1/topics", "/v1/nothing", "/v1/openapi.json")]

    assert [each.headers["x-content-type-options"] for each in answers] == ["nosniff"] * 3
    assert [each.headers["cache-control"] for each in answers] == ["no-store", "no-store", "no-cache"]


@pytest.mark.slow
def test_a_node_needs_no_uvicorn() -> None:
    """Users' own applications may use any version of it."""
    program = "import sys; sys.modules['uvicorn'] = None; import tidings.server.node"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


async def test_a_scrape_leaves_the_loop_to_others(tmp_path: Path) -> None:
    """With 1,000 groups the loop's own part of a scrape is short; the text is made in a thread, once for scrapes at the same time."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        assert node._parts is not None
        metrics = node._parts.metrics
        for number in range(1_000):
            series = metrics.handling._group("orders", f"group-{number}")
            series.seconds.counts[3] += 1
        await client.get("/metrics")
        before_s = time.thread_time()
        texts = await asyncio.gather(metrics.text(), metrics.text(), metrics.text())
        on_loop_s = time.thread_time() - before_s
        before_s = time.thread_time()
        generate_latest(node.registry)
        in_one_piece_s = time.thread_time() - before_s

    assert texts[0] is texts[1] is texts[2]
    assert texts[0].count(b"events_handle_seconds_bucket") > 20_000
    assert on_loop_s < in_one_piece_s / 3


async def test_metrics_name_what_is_served(tmp_path: Path) -> None:
    """A node does not count publishes by the bus's hook, so it has no families of it; and no family is untyped."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        text = (await client.get("/metrics")).text

    assert "events_publish_" not in text
    assert " untyped" not in text
