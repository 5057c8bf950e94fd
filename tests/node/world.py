"""What the tests with JavaScript clients share: a node with clients of one project, and ways to look at both."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from tests.integration.node_support import connected
from tidings.log import Query
from tidings.log.reading import records
from tidings.testing.node import RunningNode, running_node

from .driving import JavaScript, JsClient, javascript

__all__ = ["PROJECT", "event", "joined", "made", "stored_ids", "submit_many", "token_of", "world"]

PROJECT: Final = "atlas"


@contextlib.asynccontextmanager
async def world(workspace: Path) -> AsyncIterator[tuple[RunningNode, JavaScript]]:
    """A node, and a process for its clients."""
    async with running_node(workspace) as node, javascript() as js:
        yield node, js


def token_of(node: RunningNode, name: str, *projects: str) -> str:
    """A token for a client of a project."""
    return node.token(f"user-of-{name}", client_id=name, projects=projects or (PROJECT,))


async def made(node: RunningNode, js: JavaScript, name: str, **options: Any) -> JsClient:
    """A client of the project that has not started yet."""
    given = {"url": f"{node.ws_url}/sync", "token": token_of(node, name), "projectId": PROJECT} | options
    return await js.client(name, **given)


async def joined(node: RunningNode, js: JavaScript, name: str, **options: Any) -> JsClient:
    """A client of the project, online and up to date."""
    client = await made(node, js, name, **options)
    await client.online()
    return client


def event(id: str, *, partition: str = "notes", **payload: Any) -> dict[str, Any]:
    """An event as an application hands it in."""
    return {
        "id": id,
        "partition": partition,
        "type": "note.put",
        "schemaVersion": 1,
        "payload": payload or {"text": id},
    }


async def stored_ids(node: RunningNode, topic: str = "sync.projects") -> list[str]:
    """The ids of what the log has of the dialect, in order."""
    return [record.meta.event_id async for record in records(node.log, Query(topic=topic))]


async def submit_many(node: RunningNode, name: str, count: int, batch_count: int = 1000) -> None:
    """Have a client commit many events, in batches that are larger than the package's own."""
    async with connected(f"{node.ws_url}/sync") as client:
        hello = {"token": token_of(node, name), "clientId": name, "projectId": PROJECT}
        client.say(_message("connect", hello))
        await client.hear(1)
        for start in range(0, count, batch_count):
            events = [
                event(f"m{number:06}") | {"projectId": PROJECT, "meta": {"clientId": name, "clientTs": number}}
                for number in range(start, min(start + batch_count, count))
            ]
            client.say(_message("submit_events", {"events": events}))
            # Two under way: the node is kept busy, and nothing piles up.
            await client.hear(start // batch_count)
        heard = await client.hear(1 + -(-count // batch_count))
    verdicts = [verdict for message in heard[1:] for verdict in json.loads(message)["payload"]["results"]]
    assert [verdict["status"] for verdict in verdicts] == ["committed"] * count


def _message(type: str, payload: dict[str, Any]) -> bytes:
    return json.dumps({"type": type, "protocolVersion": "1.0", "payload": payload}).encode()
