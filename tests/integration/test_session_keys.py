"""Sessions end with the key that their token was believed for, at the token's end, and when it is revoked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import jwt
import msgspec
import orjson
import pytest

from tidings.access.administration import TokenRevocation, event_of
from tidings.access.settings import TokenSettings
from tidings.access.tokens import read_unverified
from tidings.server.settings import NodeSettings
from tidings.testing.node import TEST_SECRET, RunningNode, running_node
from tidings.wire import groups as wire

from .node_support import Client, connect, until


async def in_groups(node: RunningNode, token: str) -> Client:
    client = await connect(f"{node.ws_url}/groups")
    client.say(wire.encode(wire.Hello(token=token)))
    await client.hear(1)
    return client


async def in_sync(node: RunningNode, token: str) -> Client:
    client = await connect(f"{node.ws_url}/sync")
    payload = {"token": token, "client_id": "C1", "supported_profiles": ["canonical"]}
    frame = {"type": "connect", "msg_id": "m", "timestamp": 0, "protocol_version": "1.0", "payload": payload}
    client.say(orjson.dumps(frame))
    assert b'"connected"' in (await client.hear(1))[0]
    return client


async def in_legacy_sync(node: RunningNode, token: str) -> Client:
    client = await connect(f"{node.ws_url}/sync")
    payload = {"token": token, "clientId": "C1", "projectId": "x"}
    frame = {"type": "connect", "protocolVersion": "1.0", "msgId": "m", "timestamp": 0, "payload": payload}
    client.say(orjson.dumps(frame))
    assert b'"connected"' in (await client.hear(1))[0]
    return client


def with_tokens(node: RunningNode, **tokens: Any) -> NodeSettings:
    access = msgspec.structs.replace(
        node.settings.access, tokens=msgspec.structs.replace(node.settings.access.tokens, **tokens)
    )
    return msgspec.structs.replace(node.settings, access=access)


def claims(node: RunningNode, **more: Any) -> str:
    return node.token("alice", client_id="C1", partitions=["P"], projects=["x"], topics=["demo"], **more)


WAYS = pytest.mark.parametrize(
    ("enter", "code"), [(in_groups, 4403), (in_sync, 1008), (in_legacy_sync, 1008)], ids=["groups", "sync", "legacy"]
)


@WAYS
@pytest.mark.parametrize("change", [{"secret": "another secret, also 32 bytes and more"}, {"issuer": "new"}])
async def test_a_removed_key_ends_its_sessions(tmp_path: Path, enter: Any, code: int, change: dict[str, Any]) -> None:
    """After a reload without the key a session of it is closed with a code of its own; the token is refused too."""
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        token = claims(node)
        session = await enter(node, token)
        node.reload(with_tokens(node, **change))
        ended = await session.ended()
        again = await client.get("/v1/topics", headers={"authorization": f"Bearer {token}"})

    assert ended == code
    assert again.status_code == 401


@WAYS
async def test_a_reload_that_keeps_the_key_keeps_its_sessions(tmp_path: Path, enter: Any, code: int) -> None:
    """What else changes about tokens is no reason to send anybody away."""
    async with running_node(tmp_path) as node:
        session = await enter(node, claims(node))
        node.reload(with_tokens(node, leeway_s=7))
        async with httpx.AsyncClient(base_url=node.url) as client:
            await client.get("/healthz")  # whatever the node had to say to the session is here by now
        is_gone = session.is_gone
        node.reload(with_tokens(node, secret="another secret, also 32 bytes and more"))
        ended = await session.ended()

    assert not is_gone
    assert ended == code


@WAYS
async def test_a_revoked_token_ends_its_sessions(tmp_path: Path, enter: Any, code: int) -> None:
    """Its id is enough: other tokens of the subject stay."""
    async with running_node(tmp_path) as node:
        token = claims(node)
        session = await enter(node, token)
        token_id = read_unverified(token)[1]["jti"]
        await node.log.append(event_of(TokenRevocation(token_id=token_id), actor="test"))
        assert await session.ended() == code


@pytest.mark.parametrize(("enter", "code"), [(in_groups, 4401), (in_sync, 4003)], ids=["groups", "sync"])
async def test_a_session_ends_with_its_token(tmp_path: Path, enter: Any, code: int) -> None:
    """A silent connection is closed when its token has run out."""
    tokens = TokenSettings(secret=TEST_SECRET, leeway_s=0)
    async with running_node(tmp_path) as node:
        node.reload(with_tokens(node, leeway_s=tokens.leeway_s))
        session = await enter(node, claims(node, lifetime_s=1))
        assert await session.ended() == code


@pytest.mark.parametrize(
    ("payload", "key", "algorithm"),
    [
        ({"sub": "a"}, TEST_SECRET, "HS256"),
        ({"sub": "a", "exp": 4_000_000_000}, TEST_SECRET, "HS256"),
        ({"sub": "a", "exp": 4_000_000_000, "iat": 1_000_000_000}, TEST_SECRET, "HS256"),
        ({"sub": "a", "exp": "soon"}, TEST_SECRET, "HS256"),
        ({"sub": "a", "exp": 4_000_000_000}, "another secret, also 32 bytes and more", "HS256"),
        ({"sub": "a", "exp": 4_000_000_000}, "", "none"),
        ({"sub": "a", "exp": 4_000_000_000}, TEST_SECRET * 2, "HS512"),
    ],
    ids=["no end", "too long", "too long since", "no time", "foreign key", "no algorithm", "other algorithm"],
)
async def test_tokens_that_are_not_believed(tmp_path: Path, payload: dict[str, Any], key: str, algorithm: str) -> None:
    """Without an end, with one too far away, without our signature: no session over HTTP or a socket."""
    given = {**payload, "roles": ["admin"], "client_id": "C1"}
    token = jwt.encode(given, key or None, algorithm=algorithm)  # type: ignore[arg-type]  # "none" has no key
    async with running_node(tmp_path) as node, httpx.AsyncClient(base_url=node.url) as client:
        answer = await client.get("/v1/topics", headers={"authorization": f"Bearer {token}"})
        session = await connect(f"{node.ws_url}/groups")
        session.say(wire.encode(wire.Hello(token=token)))
        await until(lambda: session.is_gone)

    assert answer.status_code == 401
    assert session.close_code == 4401
