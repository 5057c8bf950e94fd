"""What a node keeps from web pages, from strangers and from its own log: origins, names, content types, paths, heads."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tidings.access.settings import AccessSettings
from tidings.server.node import Node
from tidings.server.settings import NodeSettings, ServerSettings
from tidings.testing.node import RunningNode, running_node

from .api_support import event

OPEN = NodeSettings(server=ServerSettings(port=0), access=AccessSettings(is_open=True))


async def raw(node: Node | RunningNode, request: bytes) -> bytes:
    """What the node answers to bytes, up to the end of the connection."""
    _, _, address = node.url.rpartition("/")
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(10):
        answer = await reader.read(200_000)
    writer.close()
    return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def upgrade(headers: str) -> bytes:
    key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    return f"GET /groups HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{key}{headers}\r\n".encode()


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000"])
async def test_a_page_of_another_origin_is_refused_over_http(tmp_path: Path, origin: str, method: str) -> None:
    """A page that is not allowed gets 403 for reading and for writing, where access is open too."""
    async with Node(tmp_path, OPEN) as node, httpx.AsyncClient(base_url=node.url) as client:
        body = {"json": event()} if method == "POST" else {}
        answer = await client.request(method, "/v1/events?topic=demo", headers={"origin": origin}, **body)  # type: ignore[arg-type]
        stored = node.log.position.seq

    assert (answer.status_code, answer.json()["code"], stored) == (403, "node.origin_refused", 0)


async def test_an_origin_that_is_set_is_let_in(tmp_path: Path) -> None:
    """The setting ``server.origins`` counts for HTTP as for sockets."""
    server = ServerSettings(port=0, origins=("https://app.example",))
    settings = NodeSettings(server=server, access=AccessSettings(is_open=True))
    async with Node(tmp_path, settings) as node, httpx.AsyncClient(base_url=node.url) as client:
        answer = await client.post("/v1/events", json=event(), headers={"origin": "https://app.example"})
        socket = await raw(node, upgrade("Host: 127.0.0.1\r\nOrigin: https://evil.example\r\n"))

    assert answer.status_code == 201
    assert status(socket) == 403


async def test_a_page_of_an_origin_that_is_set_gets_the_answers(tmp_path: Path) -> None:
    """A browser that asks first is told that it may, with a token too; each answer, also a refusal at the node's edge, says whose page may see it; to others it says nothing."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    page = {"origin": "https://app.example"}
    origins = ("https://app.example",)
    async with running_node(tmp_path, origins=origins) as node, httpx.AsyncClient(base_url=node.url) as client:
        first = await client.options("/v1/events", headers={**page, **asked})
        answers = [
            await client.post("/v1/events", json=event(), headers={**page, **who})
            for who in (node.headers("root", roles=["admin"]), {})
        ]
        answers.append(await client.get("/nowhere", headers=page))
        module = await client.get("/client/events.js", headers=page)
        stranger = await client.options("/v1/events", headers={"origin": "https://evil.example", **asked})
        program = await client.get("/client/events.js")

    assert (first.status_code, first.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert "authorization" in first.headers["access-control-allow-headers"]
    assert [each.status_code for each in answers] == [201, 401, 404]
    assert {each.headers.get("access-control-allow-origin") for each in (*answers, module)} == {"https://app.example"}
    assert stranger.status_code == 403
    assert not any(name.startswith("access-control") for name in (*stranger.headers, *program.headers))


async def test_the_second_of_two_origins_counts_too(tmp_path: Path) -> None:
    """Who sends a good origin and a bad one is refused, whichever comes first."""
    server = ServerSettings(port=0, origins=("https://app.example",))
    good, bad = "Origin: https://app.example\r\n", "Origin: https://evil.example\r\n"
    async with Node(tmp_path, NodeSettings(server=server)) as node:
        answers = [await raw(node, upgrade(f"Host: x\r\n{both}")) for both in (good + bad, bad + good)]

    assert [status(answer) for answer in answers] == [403, 403]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_an_image_of_a_foreign_page_is_refused_where_access_is_open(tmp_path: Path, site: str) -> None:
    """A request without an origin that the browser calls foreign is refused."""
    async with Node(tmp_path, OPEN) as node, httpx.AsyncClient(base_url=node.url) as client:
        answer = await client.get("/v1/topics", headers={"sec-fetch-site": site})

    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("evil.example", 421),
        ("evil.example:8787", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("[::1]:8787", 200),
        ("localhost:8787", 200),
        ("app.localhost", 200),
        ("192.0.2.7", 200),
        ("bus.example", 200),
    ],
)
async def test_a_foreign_name_is_refused_where_access_is_open(tmp_path: Path, host: str, expected: int) -> None:
    """A page whose name was made to lead here gets nothing, over HTTP and for sockets."""
    server = ServerSettings(port=0, hosts=("bus.example",))
    settings = NodeSettings(server=server, access=AccessSettings(is_open=True))
    async with Node(tmp_path, settings) as node, httpx.AsyncClient(base_url=node.url) as client:
        answer = await client.get("/v1/topics", headers={"host": host})
        socket = await raw(node, upgrade(f"Host: {host}\r\nX-Request-Id: r\r\n").replace(b"/groups", b"/nowhere"))

    assert answer.status_code == expected
    assert status(socket) == (404 if expected == 200 else 421)


async def test_metrics_are_not_shown_to_a_foreign_name(tmp_path: Path) -> None:
    """What loopback may see without a token is not for a page that comes from loopback under a name of its own."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        near = await client.get("/metrics")
        page = await client.get("/metrics", headers={"host": "evil.example"})

    assert (near.status_code, page.status_code) == (200, 401)


@pytest.mark.parametrize("media", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize("path", ["/v1/events", "/v1/access/grants", "/v1/dead-letters/drop"])
async def test_a_body_says_what_it_is(tmp_path: Path, path: str, media: str | None) -> None:
    """A body without a type, or of one that a page can send unasked, is refused with 415."""
    async with Node(tmp_path, OPEN) as node, httpx.AsyncClient(base_url=node.url) as client:
        content = json.dumps(event()).encode()
        answer = await client.post(path, content=content, headers={} if media is None else {"content-type": media})
        stored = node.log.position.seq

    assert (answer.status_code, answer.json()["code"], stored) == (415, "api.unsupported_media", 0)


async def test_control_characters_of_a_path_do_not_reach_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A line of the access log shows them as escapes, whoever formats it."""
    caplog.set_level(logging.INFO)
    async with running_node(tmp_path, access_log=True) as node, httpx.AsyncClient(base_url=node.url) as client:
        await client.get("/v1/%1b[2J%0d%0a%c2%9b31m%e2%80%ae%7f/x")
        await raw(node, b"GET /nowhere%1b[31m HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")

    lines: list[Any] = [record for record in caplog.records if record.name == "tidings.server.requests"]
    shown = "".join(line.getMessage() + line.path for line in lines)
    assert "[2J" in shown
    assert "[31m" in shown
    assert [letter for letter in shown if not letter.isprintable()] == []


@pytest.mark.parametrize("size", [66_000, 70_000, 200_000])
async def test_a_head_that_comes_in_one_piece_is_bounded_too(tmp_path: Path, size: int) -> None:
    """70 KB of head are over a bound of 64, also if they arrive with one read and end properly."""
    header = b"X-Long: " + b"a" * (size // 10) + b"\r\n"
    async with running_node(tmp_path) as node:
        answer = await raw(node, b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + header * 10 + b"\r\n")
        short = await raw(
            node, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header[:900] + b"\r\n\r\n"
        )

    assert status(answer) == 431
    assert status(short) == 200


async def test_trailers_are_bounded_too(tmp_path: Path) -> None:
    """Headers after a chunked body count like those before it."""
    head = b"POST /v1/events HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    async with running_node(tmp_path) as node:
        answer = await raw(node, head + b"X-Long: aaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 4_000)

    assert status(answer) in (401, 431)
    assert b"node.head_too_large" in answer or b"access.auth_failed" in answer


async def test_a_conflict_does_not_tell_where_the_other_event_is(tmp_path: Path) -> None:
    """Who uses an id of a space that it may not read learns that the id is taken, and nothing else."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        owner = node.headers("owner", topics=["demo"], spaces=["private"])
        other = node.headers("other", topics=["demo"], spaces=["home"])
        taken = await client.post("/v1/events", json=event(1, space_id="private", event_id="wanted"), headers=owner)
        single = await client.post("/v1/events", json=event(2, event_id="wanted"), headers=other)
        many = await client.post("/v1/events", json=[event(2, event_id="wanted")], headers=other)
        cloud = {"ce-specversion": "1.0", "ce-id": "wanted", "ce-source": "s", "ce-type": "NOTED"}
        await client.post("/v1/events?topic=demo&space_id=private", json={"n": 1}, headers={**owner, **cloud})
        binary = await client.post("/v1/events?topic=demo&space_id=home", json={"n": 2}, headers={**other, **cloud})

    seq = taken.json()["seq"]
    assert (single.status_code, binary.status_code) == (409, 409)
    assert many.json()["verdicts"][0]["error"]["code"] == "log.id_conflict"
    for answer in (single, many, binary):
        assert f"seq {seq}" not in answer.text
        assert answer.json().get("seq") is None
    assert many.json()["verdicts"][0].get("seq") is None


async def test_strangers_are_not_told_where_the_workspace_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer to somebody without a token names the folder; an operator's token gets the details."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        log = node.services.log
        found = log.health()
        broken = msgspec.structs.replace(found, is_writable=False, problem=f"{tmp_path}/x is broken")
        monkeypatch.setattr(type(log), "health", lambda self: broken)
        paths = ["/", "/readyz", "/healthz", "/metrics", "/v1", "/v1/nothing", "/sync", "/v1/events", "/../../etc"]
        answers = [await client.get(path) for path in paths]
        details = await client.get("/readyz", headers=node.headers("root", roles=["admin"]))

    assert [path for path, answer in zip(paths, answers, strict=True) if str(tmp_path) in answer.text] == []
    assert answers[1].status_code == 503
    assert str(tmp_path) in details.text


async def test_a_full_disk_names_no_path_to_publishers(tmp_path: Path) -> None:
    """The refusal of an event says that there is no room, not where."""
    from tidings.log.errors import CorruptLog, LogFenced, StorageFull
    from tidings.server.edge import problem_of
    from tidings.wire.events import error_info

    errors = [StorageFull(str(tmp_path)), LogFenced(f"{tmp_path}: EIO"), CorruptLog(tmp_path, 7, "torn")]
    told = json.dumps([problem_of(error, 503) for error in errors]) + repr([error_info(error) for error in errors])

    assert str(tmp_path) not in told


async def test_a_node_without_keys_is_not_ready_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody could use it: the log says what to do, and readiness is red with a reason of its own."""
    caplog.set_level(logging.WARNING)
    settings = NodeSettings(server=ServerSettings(port=0))
    async with Node(tmp_path, settings) as node, httpx.AsyncClient(base_url=node.url) as client:
        ready = await client.get("/readyz")

    assert ready.status_code == 503
    assert [reason["code"] for reason in ready.json()["reasons"]] == ["access.no_keys"]
    assert any("NOBODY CAN USE THIS NODE" in line and "TIDINGS_JWT_SECRET" in line for line in caplog.messages)
