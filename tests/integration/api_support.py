"""A client of the HTTP API that holds every answer against the node's own OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

from tidings.server.api import OPERATIONS
from tidings.server.api.documents import openapi_document
from tidings.server.settings import NodeSettings
from tidings.testing.node import RunningNode, running_node

DOCUMENT = json.loads(json.dumps(openapi_document(OPERATIONS)))


def validator(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]})


def documented(method: str, path: str) -> dict[str, Any] | None:
    """The document's entry for a request; literal paths come before those with parameters."""
    for template in sorted(DOCUMENT["paths"], key=lambda each: each.count("{")):
        pattern = re.sub(r"\{\w+\}", "[^/]+", template.replace(".", r"\."))
        if re.fullmatch(pattern, path) and method.lower() in DOCUMENT["paths"][template]:
            found: dict[str, Any] = DOCUMENT["paths"][template][method.lower()]
            return found
    return None


async def check(response: httpx.Response) -> None:
    """The answer is one that the document has: its status, its media type, its content."""
    await response.aread()
    operation = documented(response.request.method, response.request.url.path)
    if operation is None:
        assert response.status_code in (404, 405)
        return
    assert str(response.status_code) in operation["responses"], response.text
    content = operation["responses"][str(response.status_code)]["content"]
    media = response.headers["content-type"].partition(";")[0]
    assert media in content
    values = response.text.splitlines() if media == "application/x-ndjson" else [response.text]
    for value in values:
        validator(content[media]["schema"]).validate(json.loads(value))


@contextlib.asynccontextmanager
async def api(
    workspace: Path, settings: NodeSettings | None = None, **claims: Any
) -> AsyncIterator[tuple[RunningNode, httpx.AsyncClient]]:
    """A node and a checking client of it, whose token has these claims (an administrator's, if none are given)."""
    async with running_node(workspace, settings) as node:
        headers = node.headers("tester", **(claims or {"roles": ["admin"]}))
        async with httpx.AsyncClient(base_url=node.url, headers=headers, event_hooks={"response": [check]}) as client:
            yield node, client


def event(number: int = 0, *, topic: str = "demo", **meta: Any) -> dict[str, Any]:
    return {"meta": {"topic": topic, "type": "NOTED", "space_id": "home", **meta}, "payload": {"n": number}}


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until something holds that has no event of its own."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is in parts that tell nobody when they change
            await asyncio.sleep(0.005)
