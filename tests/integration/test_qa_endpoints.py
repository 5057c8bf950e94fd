"""Every way into a node, tried by somebody who may not: no token, a token that gives nothing, one that runs out."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from tests.integration.api_support import DOCUMENT
from tests.integration.node_support import connected, on_both_loops, until, until_answered
from tidings.access.administration import SubjectRevoked, event_of
from tidings.core.events import Event, EventMeta
from tidings.server.settings import NodeSettings
from tidings.testing.node import RunningNode, node_settings, running_node
from tidings.wire import groups as wire

PUBLIC = {"/v1/openapi.json", "/v1/asyncapi.json"}
OPERATIONS = [(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods]
BODIES: dict[str, Any] = {
    "/v1/events": {"meta": {"topic": "demo", "type": "NOTED", "space_id": "home"}, "payload": {}},
    "/v1/groups/{topic}/{group}/seek": {"to": "earliest"},
    "/v1/dead-letters/redrive": {"topic": "demo", "all": True},
    "/v1/dead-letters/drop": {"topic": "demo", "all": True},
}
QUERIES = {("delete", "/v1/delayed"): {"event_id": "ev-waiting"}}
SECRET_WORD = "what nobody else may see"


async def ask(client: httpx.AsyncClient, method: str, path: str) -> httpx.Response:
    for name, value in (("topic", "demo"), ("group", "g"), ("seq", "1"), ("id", "x")):
        path = path.replace(f"{{{name}}}", value)
    body = {"json": BODIES.get(path, {})} if method == "post" else {}
    return await client.request(method.upper(), path, params=QUERIES.get((method, path)), **body)


async def fill(node: RunningNode) -> None:
    await node.log.append(Event(EventMeta("demo", "NOTED", "home"), {"word": SECRET_WORD}))


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
async def test_an_operation_gives_nothing_to_who_has_no_right(tmp_path: Path, method: str, path: str) -> None:
    """Without a token each is answered with 401; with one that gives nothing, nothing is shown and nothing changes."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        await fill(node)
        stranger = await ask(client, method, path)
        client.headers.update(node.headers("nobody"))
        nobody = await ask(client, method, path)
        seq = node.log.position.seq

    assert seq == 1
    assert SECRET_WORD not in stranger.text + nobody.text
    if path in PUBLIC:
        assert (stranger.status_code, nobody.status_code) == (200, 200)
        return
    assert (stranger.status_code, stranger.json()["code"]) == (401, "access.auth_failed")
    if method == "post":
        assert nobody.status_code == 403
    elif nobody.status_code == 200:
        # A listing leaves out what may not be seen; `whoami` shows the caller itself.
        assert "demo" not in nobody.text
    else:
        assert nobody.status_code in (403, 404)


def strict() -> NodeSettings:
    """A node that gives tokens no leeway."""
    base = node_settings()
    tokens = msgspec.structs.replace(base.access.tokens, leeway_s=0)
    return msgspec.structs.replace(base, access=msgspec.structs.replace(base.access, tokens=tokens))


@pytest.mark.parametrize("ending", ["expiry", "revocation"])
async def test_a_member_of_a_group_is_closed_with_the_code_of_its_reason(tmp_path: Path, ending: str) -> None:
    """At /groups a token that runs out and one whose subject is revoked end the line, each with its own code."""
    async with running_node(tmp_path, strict()) as node, connected(f"{node.ws_url}/groups") as client:
        token = node.token(
            "worker", topics=["demo"], group_prefixes=["demo/"], lifetime_s=2 if ending == "expiry" else 3600
        )
        client.say(wire.encode(wire.Hello(token=token)))
        client.say(wire.encode(wire.Subscribe(id=1, topic="demo", group="g")))
        welcome, subscribed = await client.hear(2)
        if ending == "revocation":
            revocation = event_of(SubjectRevoked(subject="worker"), actor="test")
            await node.log.append_many([revocation, Event(EventMeta("demo", "NOTED", "home"), {"word": SECRET_WORD})])
        code = await client.ended()
        problem = wire.decode_from_node(client.heard[-1])

    assert isinstance(wire.decode_from_node(welcome), wire.Welcome)
    assert isinstance(wire.decode_from_node(subscribed), wire.Subscribed)
    assert code == (wire.CLOSE_AUTH_FAILED if ending == "expiry" else wire.CLOSE_REVOKED)
    assert isinstance(problem, wire.Problem)
    assert problem.error.code == ("access.token_expired" if ending == "expiry" else "access.token_revoked")
    assert SECRET_WORD.encode() not in b"".join(client.heard)


def deaf(port: int, requests: int) -> socket.socket:
    """A peer that asks for a public document again and again, and reads nothing."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    peer.connect(("127.0.0.1", port))
    peer.sendall(b"GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * requests)
    return peer


@on_both_loops
async def test_peers_that_never_read_their_answers_keep_nobody_out(tmp_path: Path) -> None:
    """Without a token, each takes a place and holds it; after the time for an answer it is cut, and there is room again."""
    options: dict[str, Any] = {"requests_max": 10, "answer_timeout_s": 1.0, "keep_alive_s": 1}
    async with running_node(tmp_path, **options) as node, httpx.AsyncClient(base_url=node.url, timeout=20) as client:
        port = urlsplit(node.url).port
        assert port is not None
        peers = [await asyncio.to_thread(deaf, port, requests) for requests in (1, 2, 30, 30, 30, 30, 30, 30, 30)]
        try:

            async def places() -> float:
                found = re.search(
                    r"^tidings_http_connections (\S+)$", (await client.get("/metrics")).text, re.MULTILINE
                )
                return 0.0 if found is None else float(found[1])

            await until_answered(places, 1.0)
        finally:
            for peer in peers:
                peer.close()
        assert (await client.get("/healthz")).status_code == 200


@on_both_loops
async def test_a_node_stops_in_time_although_nobody_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A peer that does not read its answer, or does not answer a goodbye, is cut at the deadline, without an error."""
    node = running_node(tmp_path, stop_deadline_s=0.5)
    async with node as running:
        port = urlsplit(running.url).port
        assert port is not None
        peers = [await asyncio.to_thread(deaf, port, 30) for _ in range(3)]
        await until(lambda: running.health().is_ready)
        started = time.monotonic()
        await running.stop()
        took_s = time.monotonic() - started
        for peer in peers:
            peer.close()

    assert took_s < 5
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []


async def test_a_long_poll_ends_with_its_token(tmp_path: Path) -> None:
    """A request that waits is answered with 401 when what comes is committed after its token has run out."""
    async with (
        running_node(tmp_path, strict()) as node,
        httpx.AsyncClient(base_url=node.url, headers=node.headers("a", topics=["demo"], lifetime_s=1)) as client,
    ):
        answer = await client.get("/v1/events?topic=demo&wait=2.5", timeout=20)

    assert (answer.status_code, answer.json()["code"]) == (401, "access.token_expired")
