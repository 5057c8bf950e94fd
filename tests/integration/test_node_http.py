"""A node over HTTP: probes tell the truth through its life, metrics are bounded, TLS and Unix sockets carry everything."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import ipaddress
import json
import os
import shutil
import socket
import ssl
import stat
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.node_support import (
    ListeningEndpoint,
    TalkEndpoint,
    connected,
    on_both_loops,
    until,
    until_answered,
)
from tests.unit.pipeline.lake_support import all_records, archive, empty_lake
from tidings.core.clock import SYSTEM_CLOCK
from tidings.core.errors import TidingsError
from tidings.core.events import Event, EventMeta
from tidings.log.embedded.disk import File, OsDisk
from tidings.log.errors import LogFenced, WorkspaceBusy
from tidings.log.retention import plan_retention
from tidings.log.settings import LogSettings, TopicRetention
from tidings.server.edge import ACCESS_LOGGER
from tidings.server.errors import AddressInUse, AddressUnusable, CertificateUnusable, NodeNotStarted
from tidings.server.node import Node
from tidings.server.settings import NodeSettings
from tidings.testing.node import node_settings, running_node


def event(topic: str = "demo", number: int = 0) -> Event:
    return Event(EventMeta(topic, "NOTED", "shared:home"), {"n": number})


def certificate(folder: Path, name: str = "node") -> tuple[str, str]:
    """A fresh self-signed certificate for the loopback, and its key, as files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return str(cert_file), str(key_file)


# Probes


async def test_a_running_node_is_alive_and_ready(tmp_path: Path) -> None:
    """Both probes are green, and readiness says how far the log and the endpoints are."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        appended = await node.bus.publish(event())
        await node.services.dispatcher.reached(appended.seq)
        alive, ready = await client.get("/healthz"), await client.get("/readyz")

    assert (alive.status_code, alive.json()) == (200, {"alive": True})
    assert ready.status_code == 200
    assert ready.json() == {"ready": True, "reasons": [], "warnings": [], "seq": 1, "dispatched_seq": 1}


async def test_a_stopping_node_is_red_while_it_still_serves(tmp_path: Path) -> None:
    """From the moment it is told to stop, readiness is red; during the drain delay requests are still answered."""
    async with running_node(tmp_path, drain_delay_s=0.5) as node, httpx.AsyncClient(base_url=node.url) as client:
        stopping = asyncio.ensure_future(node.stop())
        await asyncio.sleep(0)
        ready, alive = await client.get("/readyz"), await client.get("/healthz")
        await stopping
        with pytest.raises(httpx.TransportError):
            await client.get("/healthz")

    assert ready.status_code == 503
    assert [reason["code"] for reason in ready.json()["reasons"]] == ["node.stopping"]
    assert alive.status_code == 200


async def test_a_failed_endpoint_turns_it_red_and_ends_its_conversations(tmp_path: Path) -> None:
    """An endpoint that missed commits closes its peers with 1011 rather than leave a gap; other endpoints go on; the probe says which."""
    good, bad = ListeningEndpoint(), ListeningEndpoint()
    async with (
        running_node(tmp_path, endpoints={"/good": good, "/bad": bad}) as node,
        connected(f"{node.ws_url}/good") as stays,
        connected(f"{node.ws_url}/bad") as ends,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        await node.bus.publish(event())
        assert await stays.hear(1) == await ends.hear(1) == [b"1"]
        bad.fails = True
        await node.bus.publish(event())
        assert await ends.ended() == 1011
        assert (await stays.hear(2))[:2] == [b"1", b"2"]  # what follows is on record of it
        ready = await client.get("/readyz", headers=node.headers("root", roles=["admin"]))

    assert ready.status_code == 503
    assert ready.json()["reasons"][0]["code"] == "node.listener_failed"
    assert "/bad" in ready.json()["reasons"][0]["detail"]


async def test_a_log_that_is_not_durable_warns(tmp_path: Path) -> None:
    """A node without sync serves, and says in its readiness that it can lose acknowledged events."""
    settings = msgspec.structs.replace(node_settings(), log=LogSettings(durability="none", journal_bytes=1 << 20))
    async with running_node(tmp_path, settings) as node, httpx.AsyncClient(base_url=node.url) as client:
        ready = await client.get("/readyz")

    assert ready.status_code == 200
    assert [warning["code"] for warning in ready.json()["warnings"]] == ["log.not_durable"]


class TroubledDisk(OsDisk):
    """The machine's disk, where writing below a folder fails on demand."""

    __slots__ = ("error", "folder")

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.error: int | None = None

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        file = super().open(path, create=create, write=write)
        return TroubledFile(self, file) if self.folder in path.parts else file


class TroubledFile:
    """A file on it."""

    def __init__(self, disk: TroubledDisk, inner: File) -> None:
        self._disk = disk
        self._inner = inner

    def write(self, byte_offset: int, data: bytes) -> None:
        if self._disk.error is not None:
            raise OSError(self._disk.error, os.strerror(self._disk.error))
        self._inner.write(byte_offset, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def test_a_broken_disk_turns_it_red_for_good(tmp_path: Path) -> None:
    """A write error fences the log: the publisher is told, readiness names it, reading goes on."""
    disk = TroubledDisk("journal")
    async with running_node(tmp_path, disk=disk) as node, httpx.AsyncClient(base_url=node.url) as client:
        await node.bus.publish(event())
        disk.error = errno.EIO
        with pytest.raises(LogFenced):
            await node.bus.publish(event())
        ready = await client.get("/readyz")
        alive = await client.get("/healthz")
        admin = node.headers("root", roles=["admin"])
        read = await client.get("/v1/events?topic=demo", headers=admin)
        disk.error = None

    assert ready.status_code == 503
    assert [reason["code"] for reason in ready.json()["reasons"]] == ["log.fenced"]
    assert alive.status_code == 200
    assert len(read.json()["events"]) == 1


async def test_a_full_disk_turns_it_red_until_there_is_room(tmp_path: Path) -> None:
    """While there is no room publishers wait and readiness says so; with room again both go on by themselves."""
    disk = TroubledDisk("wal")
    async with running_node(tmp_path, disk=disk) as node, httpx.AsyncClient(base_url=node.url) as client:

        async def codes() -> list[str]:
            return [reason["code"] for reason in (await client.get("/readyz")).json()["reasons"]]

        disk.error = errno.ENOSPC
        await node.bus.publish(event())
        await until_answered(codes, ["log.storage_full"])
        publishing = asyncio.ensure_future(node.bus.publish(event()))
        await asyncio.sleep(0.05)
        assert not publishing.done()
        disk.error = None
        assert (await publishing).seq == 2
        await until_answered(codes, [])


# What a request may cost


async def raw(node: Node, *parts: bytes) -> bytes:
    """What a node answers to bytes, until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rpartition(":")[2]))
    for part in parts:
        writer.write(part)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer


@on_both_loops
async def test_an_endless_head_is_refused(tmp_path: Path) -> None:
    """Header after header, without end: 431, and the connection ends."""
    pieces = [b"GET /healthz HTTP/1.1\r\nHost: n\r\n"]
    # No more than that: what the node has not read when it closes would reset the connection.
    while sum(map(len, pieces)) <= 2048:
        pieces.append(b"X-%d: y\r\n" % len(pieces))
    async with running_node(tmp_path, head_bytes_max=2048) as node:
        answer = await raw(node, *pieces)

    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"node.head_too_large" in answer


_SOCKET = b"GET /echo HTTP/1.1\r\nHost: n\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Request-Id: mine\r\n"
_KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@pytest.mark.parametrize(
    ("request_", "status", "code", "request_id"),
    [
        (b"GET / HTTP/1.1\r\nX-Request-Id: mine\r\nHost: n\r\nX: " + b"x" * 3000, 431, "node.head_too_large", "mine"),
        (b"\x00\x01 no request\r\n\r\n", 400, "node.malformed_request", None),
        (b"GET /a b HTTP/1.1\r\n\r\n", 400, "node.malformed_request", None),
        (
            b"GET / HTTP/1.1\r\nX-Request-Id: mine\r\nHost: n\r\nno header\r\n\r\n",
            400,
            "node.malformed_request",
            "mine",
        ),
        (
            b"GET / HTTP/1.1\r\nX-Request-Id: <not mine>\r\nHost: n\r\nno header\r\n\r\n",
            400,
            "node.malformed_request",
            None,
        ),
        (
            b"POST /v1/events HTTP/1.1\r\nHost: n\r\nX-Request-Id: mine\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            400,
            "node.malformed_request",
            "mine",
        ),
        (
            b"POST /v1/events HTTP/1.1\r\nHost: n\r\nX-Request-Id: mine\r\nContent-Length: 99999999999\r\n\r\n",
            413,
            "node.body_too_large",
            "mine",
        ),
        (_SOCKET + b"Sec-WebSocket-Version: 13\r\n\r\n", 400, "node.bad_handshake", "mine"),
        (_SOCKET + _KEY + b"\r\n", 400, "node.bad_handshake", "mine"),
        (_SOCKET.replace(b"GET", b"POST") + _KEY + b"\r\n", 400, "node.bad_handshake", "mine"),
        (
            _SOCKET.replace(b"/echo", b"/nowhere") + _KEY + b"Sec-WebSocket-Version: 13\r\n\r\n",
            404,
            "node.no_such_endpoint",
            "mine",
        ),
    ],
)
@on_both_loops
async def test_an_answer_that_no_route_gives_has_an_id_too(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    request_: bytes,
    status: int,
    code: str,
    request_id: str | None,
) -> None:
    """Header, problem and access log have one id, the request's own if it could be read; whoever was refused can name it."""
    caplog.set_level("INFO", ACCESS_LOGGER)
    async with running_node(
        tmp_path, endpoints={"/echo": TalkEndpoint()}, head_bytes_max=2048, access_log=True
    ) as node:
        answer = await raw(node, request_)

    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    (shown,) = [line.partition(": ")[2] for line in lines if line.lower().startswith("x-request-id: ")]
    problem = json.loads(body)
    assert lines[0].startswith(f"HTTP/1.1 {status} ")
    assert (problem["code"], problem["status"], problem["request_id"]) == (code, status, shown)
    assert shown == request_id or (request_id is None and shown.startswith("rq-"))
    logged = [(vars(each)["request_id"], vars(each)["status"]) for each in caplog.records if each.name == ACCESS_LOGGER]
    assert (shown, status) in logged


async def test_an_accepted_upgrade_is_answered_with_its_id(tmp_path: Path) -> None:
    """101 names the request as every other answer does."""
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rpartition(":")[2]))
        writer.write(_SOCKET + _KEY + b"Sec-WebSocket-Version: 13\r\n\r\n")
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    assert head.startswith(b"HTTP/1.1 101 ")
    assert b"x-request-id: mine\r\n" in head.lower()


@on_both_loops
async def test_garbage_after_an_answer_has_an_id_of_its_own(tmp_path: Path) -> None:
    """What follows an answered request on its connection is not refused under that one's id."""
    whole = b"GET /healthz HTTP/1.1\r\nHost: n\r\nX-Request-Id: mine\r\n\r\n"
    async with running_node(tmp_path) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rpartition(":")[2]))
        writer.write(whole)
        async with asyncio.timeout(20):
            first = await reader.readuntil(b'{"alive":true}')
            writer.write(b"\x00\x01\r\n\r\n")
            second = await reader.read()
        writer.close()
        await writer.wait_closed()

    assert b"x-request-id: mine\r\n" in first
    assert second.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: rq-" in second


@on_both_loops
async def test_what_cannot_be_read_is_not_answered_in_the_place_of_what_can(tmp_path: Path) -> None:
    """Garbage behind a request that is still being answered ends the connection; its 400 would be taken for that answer."""
    async with running_node(tmp_path) as node:
        token = node.headers("root", roles=["admin"])["authorization"].encode()
        waiting = b"GET /v1/events?wait=20 HTTP/1.1\r\nHost: n\r\nAuthorization: " + token + b"\r\n\r\n"
        answer = await raw(node, waiting + b"\x00\x01\r\n\r\n")

    assert answer == b""


@on_both_loops
async def test_a_peer_that_takes_its_time_is_cut(tmp_path: Path) -> None:
    """Nothing at all, half a head, half a body, half of the next head: each ends when its time is over."""
    head = b"POST /v1/events HTTP/1.1\r\nHost: n\r\nContent-Length: 10\r\n\r\n"
    whole = b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n"
    async with running_node(tmp_path, head_timeout_s=0.1, body_timeout_s=0.2) as node:
        answers = await asyncio.gather(
            raw(node), raw(node, whole[:20]), raw(node, head, b"half"), raw(node, whole, whole[:20])
        )

    silent, half_a_head, half_a_body, one_and_a_half = answers
    assert silent == half_a_head == b""
    assert b"HTTP/1.1 2" not in half_a_body
    assert one_and_a_half.startswith(b"HTTP/1.1 200 ")


@on_both_loops
async def test_quick_requests_are_not_cut_by_the_slow_ones_timers(tmp_path: Path) -> None:
    """A connection that is kept alive, and a socket, outlive the time that a head or a body may take."""
    async with (
        running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}, head_timeout_s=0.05, body_timeout_s=0.05) as node,
        httpx.AsyncClient(base_url=node.url) as client,
        connected(f"{node.ws_url}/echo") as talker,
    ):
        for _ in range(4):
            assert (await client.get("/healthz")).status_code == 200
            await asyncio.sleep(0.04)
        talker.say(b"still there")
        assert await talker.hear(1) == [b"still there"]


async def test_more_connections_than_allowed_get_503(tmp_path: Path) -> None:
    """Over ``requests_max`` a request is answered with 503 and when to come again; whether the node lives is told all the same."""
    async with running_node(tmp_path, requests_max=3) as node:
        port = int(node.url.rpartition(":")[2])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        async with httpx.AsyncClient(base_url=node.url) as client:
            refused = await client.get("/metrics", headers={"x-request-id": "mine"})
            alive, ready = await client.get("/healthz"), await client.get("/readyz")
            for _, writer in idle:
                writer.close()

            async def status() -> int:
                return (await client.get("/metrics")).status_code

            await until_answered(status, 200)

    assert (refused.status_code, refused.json()["code"]) == (503, "node.too_many_requests")
    assert (refused.headers["x-request-id"], refused.headers["retry-after"]) == ("mine", "1")
    assert refused.headers["content-type"] == "application/problem+json"
    assert (alive.status_code, ready.status_code) == (200, 200)


@on_both_loops
async def test_one_address_cannot_take_all_http_connections(tmp_path: Path) -> None:
    """Over the limit of its address a peer gets 503, another address is served, and the metric says why; a reload lifts it."""
    async with running_node(tmp_path, requests_per_address_max=2) as node:
        port = int(node.url.rpartition(":")[2])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with (
            httpx.AsyncClient(base_url=node.url) as crowded,
            httpx.AsyncClient(base_url=node.url, transport=elsewhere) as other,
        ):
            refused = await crowded.get("/metrics", headers={"x-request-id": "mine"})
            alive = await crowded.get("/healthz")
            served, metrics = await other.get("/readyz"), await other.get("/metrics")
            server = msgspec.structs.replace(node.settings.server, requests_per_address_max=3)
            plan = node.reload(msgspec.structs.replace(node.settings, server=server))

        async def status() -> int:
            async with httpx.AsyncClient(base_url=node.url) as later:
                return (await later.get("/metrics")).status_code

        await until_answered(status, 200)
        for _, writer in idle:
            writer.close()

    assert (refused.status_code, refused.json()["code"]) == (503, "node.too_many_connections")
    assert "from this address" in refused.json()["detail"]
    assert (refused.headers["x-request-id"], refused.headers["retry-after"]) == ("mine", "1")
    assert (alive.status_code, served.status_code) == (200, 200)
    assert samples(metrics.text)["tidings_http_refused_total"] == {("node.too_many_connections",): 1}
    assert plan.applied == ("server.requests_per_address_max",)


async def test_the_unix_socket_has_no_limit_per_address(tmp_path: Path) -> None:
    """Peers of the Unix socket are not told apart, so none is refused for another's sake: neither HTTP nor sockets."""
    path = tmp_path / "s"
    limits: dict[str, Any] = {"requests_per_address_max": 1, "connections_per_address_max": 1}
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}, unix_path=str(path), **limits) as node:
        idle = [await asyncio.open_unix_connection(str(path)) for _ in range(2)]
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(base_url="http://node", transport=transport) as client:
            answer = await client.get("/readyz")
        for reader, writer in idle:
            writer.write(_SOCKET + _KEY + b"Sec-WebSocket-Version: 13\r\n\r\n")
            async with asyncio.timeout(20):
                assert (await reader.readline()).startswith(b"HTTP/1.1 101 ")
        assert len(node.connections) == 2
        for _, writer in idle:
            writer.close()
        await until(lambda: len(node.connections) == 0)

    assert answer.status_code == 200


async def test_a_socket_is_not_counted_among_the_http_connections(tmp_path: Path) -> None:
    """An upgrade leaves its place to the next request, and an ended connection leaves nothing counted."""
    async with (
        running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}, requests_per_address_max=1) as node,
        connected(f"{node.ws_url}/echo"),
        connected(f"{node.ws_url}/echo"),
    ):

        async def status() -> int:
            async with httpx.AsyncClient(base_url=node.url) as client:
                return (await client.get("/readyz")).status_code

        assert await status() == 200
        await until_answered(status, 200)


# Metrics


def samples(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_metrics_count_what_happens(tmp_path: Path) -> None:
    """Log, dispatcher, sockets and requests are in the metrics, with what really happened."""
    async with (
        running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}) as node,
        connected(f"{node.ws_url}/echo") as talker,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        talker.say(b"hello")
        await talker.hear(1)
        await node.bus.publish_many([event(number=number) for number in range(3)])
        await node.services.dispatcher.reached(3)
        await client.get("/healthz")
        answer = await client.get("/metrics")

    found = samples(answer.text)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert found["tidings_log_seq"][()] == found["tidings_dispatcher_seq"][()] == 3
    assert found["tidings_log_records_total"][("demo",)] == 3
    assert found["tidings_connections"][("/echo",)] == 1
    assert found["tidings_socket_messages_total"] == {("in",): 1, ("out",): 1}
    assert found["tidings_http_requests_total"][("GET", "/healthz", "200")] == 1
    assert found["tidings_node_ready"][()] == found["tidings_log_durable"][()] == 1
    assert found["tidings_sync_connections"][()] == 0


async def test_topics_beyond_the_bound_are_counted_together(tmp_path: Path) -> None:
    """The number of series does not grow with the number of topics."""
    async with running_node(tmp_path, metrics_series_max=3) as node, httpx.AsyncClient(base_url=node.url) as client:
        await node.bus.publish_many([event(f"topic{number}") for number in range(10)])
        found = samples((await client.get("/metrics")).text)["tidings_log_records_total"]

    assert len(found) == 4
    assert found[("_other",)] == 7
    assert sum(found.values()) == 10


@pytest.mark.parametrize(("rule", "status"), [("loopback", 200), ("always", 200), ("never", 401)])
async def test_who_may_see_metrics(tmp_path: Path, rule: str, status: int) -> None:
    """Without a token the rule decides; with one, whoever may read the node may, and others may not."""
    async with (
        running_node(tmp_path, metrics_without_token=rule) as node,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        without = await client.get("/metrics")
        admin = await client.get("/metrics", headers=node.headers("root", roles=["admin"]))
        other = await client.get("/metrics", headers=node.headers("alice", topics=["demo"]))

    assert (without.status_code, admin.status_code) == (status, 200)
    assert other.status_code == (403 if rule == "never" else 200)


# Where it listens


@on_both_loops
async def test_tls(tmp_path: Path) -> None:
    """With a certificate the port speaks TLS only, for requests and sockets; a renewed certificate serves new connections."""
    cert, key = certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=cert)
    async with running_node(
        tmp_path, endpoints={"/echo": TalkEndpoint()}, tls_cert_file=cert, tls_key_file=key
    ) as node:
        assert node.url.startswith("https://")
        async with (
            httpx.AsyncClient(base_url=node.url, verify=trusting) as client,
            connected(f"{node.ws_url}/echo", tls=trusting) as talker,
        ):
            assert (await client.get("/readyz")).status_code == 200
            talker.say(b"x" * 100_000)
            assert await talker.hear(1) == [b"x" * 100_000]
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(node.url.replace("https", "http") + "/healthz")

        new_cert, new_key = certificate(tmp_path, "renewed")
        shutil.copy(new_cert, cert)
        shutil.copy(new_key, key)
        node.reload(node.settings)
        async with httpx.AsyncClient(base_url=node.url, verify=ssl.create_default_context(cafile=new_cert)) as client:
            assert (await client.get("/healthz")).status_code == 200


async def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A missing file, a key that does not fit, no PEM at all: refused before the log is opened."""
    cert, key = certificate(tmp_path)
    _, other_key = certificate(tmp_path, "other")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for bad_cert, bad_key in ((cert, other_key), (str(text), key), (str(tmp_path / "nowhere"), key)):
        node = Node(tmp_path / "workspace", node_settings(tls_cert_file=bad_cert, tls_key_file=bad_key))
        with pytest.raises(CertificateUnusable):
            await node.start()
    assert not (tmp_path / "workspace").exists()


@on_both_loops
async def test_a_unix_socket(tmp_path: Path) -> None:
    """The Unix socket is its owner's alone, carries requests and sockets, and is gone when the node is."""
    path = tmp_path / "node.sock"
    async with running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}, unix_path=str(path)) as node:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            assert (await client.get("/readyz")).status_code == 200
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(
            b"GET /echo HTTP/1.1\r\nHost: n\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x81\x82\x00\x00\x00\x00hi")
        echoed = await reader.readexactly(4)
        writer.close()
        await writer.wait_closed()
        assert b" 101 " in head
        assert echoed == b"\x81\x02hi"
        assert json.loads((tmp_path / ".bus" / "node.json").read_text())["unix"] == str(path)
        await until(lambda: not len(node.connections))
    assert not path.exists()


async def test_a_stale_unix_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    """What a killed node left behind is no obstacle; a socket that somebody listens on, or another file, is."""
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with running_node(tmp_path / "a", unix_path=str(path)):
        with pytest.raises(AddressInUse):
            await Node(tmp_path / "b", node_settings(unix_path=str(path))).start()
    path.write_text("a file of somebody")
    with pytest.raises(AddressUnusable):
        await Node(tmp_path / "c", node_settings(unix_path=str(path))).start()
    assert path.read_text() == "a file of somebody"


async def test_a_port_in_use_is_told_and_leaves_nothing_open(tmp_path: Path) -> None:
    """The second node on a port is refused by name, and its workspace is free again at once."""
    async with running_node(tmp_path / "a") as node:
        port = int(node.url.rpartition(":")[2])
        settings = node_settings()
        settings = msgspec.structs.replace(settings, server=msgspec.structs.replace(settings.server, port=port))
        with pytest.raises(AddressInUse, match=str(port)):
            await Node(tmp_path / "b", settings).start()
    async with running_node(tmp_path / "b"):
        pass


async def test_a_workspace_has_one_node(tmp_path: Path) -> None:
    """A second node on the same workspace is refused; the file says where the first one is, until it stops."""
    async with running_node(tmp_path) as node:
        with pytest.raises(WorkspaceBusy):
            await Node(tmp_path, node_settings()).start()
        told = json.loads((tmp_path / ".bus" / "node.json").read_text())
        nothing_else = {"unix": None, "certificate": None, "steward": None, "is_dev": False}
        assert told == {"url": node.url, "pid": os.getpid(), **nothing_else}
    assert not (tmp_path / ".bus" / "node.json").exists()


# Stopping and going on


async def test_stopping_says_goodbye_by_the_endpoints(tmp_path: Path) -> None:
    """Every endpoint is shut, its peers get its code, and nothing is left open."""
    endpoint = TalkEndpoint()
    async with running_node(tmp_path, endpoints={"/echo": endpoint}) as node:
        async with connected(f"{node.ws_url}/echo") as client:
            await until(lambda: endpoint.talks)
            await node.stop()
            assert await client.ended() == 4503
        assert endpoint.was_stopped
        assert len(node.connections) == 0


async def test_an_endpoint_that_does_not_shut_is_cut(tmp_path: Path) -> None:
    """An endpoint that ignores its deadline does not hold up the node; its peers are told by the node itself."""

    class Stubborn(TalkEndpoint):
        async def stop(self, deadline_s: float) -> None:
            await asyncio.Event().wait()

    endpoint = Stubborn()
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        await node.stop(0.1)
        assert await client.ended() == 1001


async def test_a_long_poll_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    """A reader that waits for something to come is told that the node is stopping, long before the deadline."""
    async with (
        running_node(tmp_path) as node,
        httpx.AsyncClient(base_url=node.url, headers=node.headers("root", roles=["admin"])) as client,
    ):

        async def answering() -> float:
            return samples((await client.get("/metrics")).text)["tidings_http_requests_in_progress"][()]

        poll = asyncio.ensure_future(client.get("/v1/events?topic=demo&wait=30"))
        await until_answered(answering, 2.0)
        async with asyncio.timeout(10):
            await node.stop(600.0)
            answer = await poll

    assert answer.status_code == 503
    assert answer.json()["code"] == "node.stopping"


async def test_hurrying_waits_for_nobody(tmp_path: Path) -> None:
    """A second order to stop ends at once what the first one waited for."""

    class Slow(TalkEndpoint):
        async def stop(self, deadline_s: float) -> None:
            await asyncio.sleep(deadline_s)

    async with running_node(tmp_path, endpoints={"/echo": Slow()}) as node:
        stopping = asyncio.ensure_future(node.stop(3600.0))
        await asyncio.sleep(0.05)
        assert not stopping.done()
        node.stop_now()
        async with asyncio.timeout(10):
            await stopping


async def test_a_node_goes_on_where_it_was(tmp_path: Path) -> None:
    """After a stop and a start the log is what it was, and the endpoints hear only what is new."""
    async with running_node(tmp_path) as node:
        await node.bus.publish(event())
        epoch = node.log.position.epoch
    endpoint = ListeningEndpoint()
    async with (
        running_node(tmp_path, endpoints={"/echo": endpoint}) as node,
        connected(f"{node.ws_url}/echo") as client,
    ):
        assert (node.log.position.seq, node.log.position.epoch) == (1, epoch)
        await node.bus.publish(event())
        assert await client.hear(1) == [b"2"]


@pytest.mark.parametrize(
    "change",
    [
        {"access": {"tokens": {"key_set": '{"keys": [{"kty": "oct"}]}'}}},
        {"sync": {"schemas": {"note": {"type": "no such type"}}}},
    ],
    ids=["keys", "schemas"],
)
async def test_a_reload_that_fails_changes_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    """If one part of the new settings cannot be used, no part of them is: the old tokens and limits go on."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        before = node.settings
        tree = msgspec.to_builtins(before)
        for section, values in change.items():
            tree[section] = merged(tree[section], values)
        tree["server"]["body_bytes_max"] = 1024
        with pytest.raises(TidingsError):
            node.reload(msgspec.convert(tree, NodeSettings))
        answer = await client.get("/v1/whoami", headers=node.headers("root", roles=["admin"]))

        assert answer.status_code == 200
        assert node.settings is before


def merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: merged(old.get(name), value) for name, value in new.items()}}
    return new


@pytest.mark.parametrize("has_lake", [True, False])
async def test_what_the_log_dropped_is_read_from_the_lake(tmp_path: Path, has_lake: bool) -> None:
    """With a lake a reader from the beginning gets everything there ever was; without, it is told what is gone."""
    base = node_settings()
    small = msgspec.structs.replace(base, log=LogSettings(journal_bytes=1 << 20, segment_lines_max=5))
    options: dict[str, Any] = {"lake_path": str(tmp_path / "lake")} if has_lake else {}
    async with (
        running_node(tmp_path / "w", small, **options) as node,
        httpx.AsyncClient(base_url=node.url, headers=node.headers("root", roles=["admin"])) as client,
    ):
        await node.bus.publish_many([event(number=number) for number in range(23)])
        archive(
            empty_lake(tmp_path, SYSTEM_CLOCK),
            await all_records(node.log),
            epoch=node.log.position.epoch,
            batch=1,
        )
        segments = node.log.topics()["demo"].segments
        rule = {"demo": TopicRetention(size_bytes_max=0)}
        await node.log.drop(plan_retention(segments, rule, now=datetime.datetime.now(datetime.UTC)))
        assert node.log.topics()["demo"].first_offset == 20
        page = (await client.get("/v1/events?topic=demo&since=0&limit=100")).json()
        if not has_lake:
            assert page["code"] == "log.position_trimmed"
            return
        found = page["events"]
        while not page["at_end"]:
            page = (await client.get(page["next"])).json()
            found += page["events"]

    assert [each["payload"]["n"] for each in found] == list(range(23))


async def test_reloading_changes_limits_of_a_running_node(tmp_path: Path) -> None:
    """New limits and a new secret hold for the next connection and the next token; the address is named as kept."""
    async with (
        running_node(tmp_path, endpoints={"/echo": TalkEndpoint()}) as node,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        old_headers = node.headers("root", roles=["admin"])

        def changed(settings: NodeSettings, **server: Any) -> NodeSettings:
            return msgspec.structs.replace(settings, server=msgspec.structs.replace(settings.server, **server))

        new = changed(node.settings, body_bytes_max=1024, port=1, metrics_without_token="never")
        tokens = msgspec.structs.replace(new.access.tokens, secret="another secret of more than thirty-two bytes")
        new = msgspec.structs.replace(new, access=msgspec.structs.replace(new.access, tokens=tokens))
        plan = node.reload(new)
        answer = await client.post("/v1/events", content=b"x" * 2000, headers=node.headers("root", roles=["admin"]))
        refused = await client.get("/v1/whoami", headers=old_headers)
        accepted = await client.get("/v1/whoami", headers=node.headers("root", roles=["admin"]))

    assert plan.applied == ("server.body_bytes_max", "access.tokens.secret")
    assert plan.kept == ("server.port", "server.metrics_without_token")
    assert answer.status_code == 413
    assert (refused.status_code, accepted.status_code) == (401, 200)


@pytest.mark.parametrize("part", ["bus", "ledger", "log", "registry"])
def test_a_part_of_a_node_that_was_not_started_is_refused_with_words(tmp_path: Path, part: str) -> None:
    """``@node.bus.subscriber`` at the top of a module raises ``NodeNotStarted``, which says where it goes."""
    node = Node(tmp_path, node_settings())
    with pytest.raises(NodeNotStarted, match=r"async with node"):
        getattr(node, part)
