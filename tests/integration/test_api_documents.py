"""The documents are true: every route stands in them, and they are what they say they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from starlette.routing import Route

from tidings.server.api import OPERATIONS, routes
from tidings.server.api.documents import asyncapi_document
from tidings.testing.node import running_node
from tidings.wire import gateway
from tidings.wire import groups as wire
from tidings.wire.events import ErrorInfo, ItemVerdict

from .api_support import DOCUMENT, api
from .events_support import events_node, subscriber, tell


async def test_every_route_is_documented(tmp_path: Path) -> None:
    """The paths of the document are those that are routed, with the same methods."""
    async with running_node(tmp_path) as node:
        routed = {route.path for route in routes(node.services) if isinstance(route, Route)}

    assert set(DOCUMENT["paths"]) == routed - {"/v1/{path:path}"}
    assert {(each.path, each.method.lower()) for each in OPERATIONS} == {
        (path, method) for path, methods in DOCUMENT["paths"].items() for method in methods
    }


def test_the_document_is_whole() -> None:
    """Operation ids are unique, every reference leads to a schema, every schema is one, every parameter is described."""
    operations = [each for methods in DOCUMENT["paths"].values() for each in methods.values()]
    names = [each["operationId"] for each in operations]
    schemas = DOCUMENT["components"]["schemas"]

    assert len(set(names)) == len(names)
    assert {ref.removeprefix("#/components/schemas/") for ref in refs_of(DOCUMENT)} <= set(schemas)
    for schema in schemas.values():
        jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]})
    for path, methods in DOCUMENT["paths"].items():
        for each in methods.values():
            named = {one["name"] for one in each["parameters"] if one["in"] == "path"}
            assert all(f"{{{name}}}" in path for name in named)
            assert path.count("{") == len(named)


def refs_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for each in value.values() for ref in refs_of(each)]
    return [ref for each in value for ref in refs_of(each)] if isinstance(value, list) else []


async def test_the_documents_are_served_as_they_are(tmp_path: Path) -> None:
    """Both documents are there without a token; the OpenAPI one is the one that the tests hold answers against."""
    async with api(tmp_path) as (_, client):
        served = await client.get("/v1/openapi.json", headers={"authorization": ""})
        sockets = (await client.get("/v1/asyncapi.json")).json()

    assert served.json() == DOCUMENT
    assert served.json()["openapi"] == "3.1.0"
    assert sockets["asyncapi"] == "3.0.0"
    assert {name: channel["address"] for name, channel in sockets["channels"].items()} == {
        "events": "/events",
        "groups": "/groups",
        "happenings": "/happenings",
        "sync": "/sync",
    }
    known = {f"#/components/schemas/{name}" for name in sockets["components"]["schemas"]}
    known |= {f"#/components/messages/{name}" for name in sockets["components"]["messages"]}
    known |= {f"#/channels/{name}" for name in sockets["channels"]}
    known |= {
        f"#/channels/{name}/messages/{each}" for name, one in sockets["channels"].items() for each in one["messages"]
    }
    assert set(refs_of(sockets)) <= known


FRAMES: list[Any] = [
    wire.Hello(token="t"),
    wire.Subscribe(id=1, topic="a", group="b", options=wire.GroupOptions(start="latest", max_retries=3)),
    wire.Credit(id=1, max_inflight=0),
    wire.AckFrame(tags=[1, 2]),
    wire.NackFrame(tag=1, reason="r", delay_s=0.5),
    wire.Unsubscribe(id=1),
    wire.Welcome(subject="s", epoch="e"),
    wire.Subscribed(id=1, max_inflight=2, options=wire.GroupOptions(order="key"), differs=["order"]),
    wire.Withdrawn(tag=1, reason="late"),
    wire.Unsubscribed(id=1, error=ErrorInfo(code="a.b", detail="d")),
    wire.Published(ref=1, verdict=ItemVerdict(index=0, verdict="appended", seq=1, offset=0, event_id="x")),
    wire.Problem(error=ErrorInfo(code="a.b", detail="d")),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_frames_fit_the_asyncapi_document(frame: Any) -> None:
    """A frame as it is sent is valid by the schema that the document has for it."""
    document = json.loads(json.dumps(asyncapi_document()))
    message = document["components"]["messages"][f"groups.{type(frame).__name__}"]

    jsonschema_rs.validator_for({**message["payload"], "components": document["components"]}).validate(
        json.loads(wire.encode(frame))
    )


async def test_frames_of_the_gateway_fit_the_asyncapi_document(tmp_path: Path) -> None:
    """What a client and a node say at ``/events`` is valid by the schemas that the document has for it, and nothing else is."""
    document = json.loads(json.dumps(asyncapi_document()))

    def fits(name: str, message: bytes) -> bool:
        schema = document["components"]["messages"][f"events.{name}"]["payload"]
        checked = jsonschema_rs.validator_for({**schema, "components": document["components"]})
        return bool(checked.is_valid(json.loads(message)))

    async with events_node(tmp_path) as node, subscriber(node) as alice:
        await alice.subscribed()
        await tell(node, "order:1")
        await alice.heard(1)
        alice.say(type="ack", resume_token="none")
        await alice.refusal()
    names = ("SubscribedEvents", "EnvelopeOut", "EventsError")

    assert [[fits(name, each) for each in alice.client.heard] for name in names] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]
    frames: list[gateway.ClientFrame] = [
        gateway.SubscribeEvents(app_id="default", channels=("graph.*",)),
        gateway.AckEvent("a"),
        gateway.ResumeEvents("a"),
    ]
    assert [fits(type(each).__name__, gateway.encode(each)) for each in frames] == [True] * 3
