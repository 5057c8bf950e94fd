"""The documents that describe the node, made from the declarations that check requests and frames: OpenAPI 3.1 and AsyncAPI 3.0."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final

import msgspec

from tidings import __version__
from tidings.wire import gateway, groups, sync_frames
from tidings.wire.events import EventIn
from tidings.wire.steward import answers, requests

from ..edge import PROBLEM_TYPE
from .constraints import NOTES, PATHS, WHOLE, constrain
from .envelopes import EnvelopeOut
from .operations import JSON, NDJSON, ApiOperation, OneOf

_REF: Final = "#/components/schemas/{name}"
_EVENT: Final = {
    "meta": {"topic": "orders", "type": "ORDER_PLACED", "space_id": "shared:shop"},
    "payload": {"number": 1, "cents": 1250},
}
_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")


class ProblemOut(msgspec.Struct, frozen=True, kw_only=True):
    """A problem document (RFC 9457). ``code`` is stable and safe to match on; ``errors.md`` lists them."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    hint: str | None = None
    request_id: str | None = None


def openapi_document(operations: Iterable[ApiOperation]) -> dict[str, Any]:
    """The document of these operations."""
    listed = list(operations)
    kinds = {id(kind): kind for operation in listed for kind in _kinds(operation)}
    flat = [ProblemOut, *kinds.values()]
    schemas, components = msgspec.json.schema_components(flat, ref_template=_REF)
    constrain(components)
    schema_of = {id(kind): schema for kind, schema in zip(flat, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in listed:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, schema_of, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidings",
            "version": __version__,
            "summary": "A durable event platform: publish, read, and look after groups, dead letters and access.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "security": [{"bearer": []}],
        "tags": [{"name": name} for name in dict.fromkeys(operation.tag for operation in listed)],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}},
            "schemas": components,
        },
    }


def _kinds(operation: ApiOperation) -> Iterable[Any]:
    contents = [operation.body, *operation.answers.values()]
    for content in contents:
        for kind in content.values():
            yield from kind.kinds if isinstance(kind, OneOf) else (kind,)
    if operation.query is not None:
        yield operation.query


def _described(operation: ApiOperation, schema_of: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": _parameters(operation, components),
        "responses": _responses(operation, schema_of),
    }
    if operation.is_public:
        described["security"] = []
    if operation.body:
        described["requestBody"] = {
            "required": _is_needed(operation, components),
            "content": _content(operation.body, schema_of),
        }
    if operation.name in NOTES:
        described["description"] = NOTES[operation.name]
    if operation.name == "publishEvents":
        described["requestBody"]["content"][JSON]["example"] = _EVENT
    return described


def _parameters(operation: ApiOperation, components: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": PATHS[name]}
        for name in _PARAMETER.findall(operation.path)
    ]
    if operation.query is not None:
        schema = components[operation.query.__name__]
        required = schema.get("required", ())
        found += [
            {"name": name, "in": "query", "required": name in required, "schema": _without_null(each)}
            for name, each in schema["properties"].items()
        ]
    if operation.name == "publishEvents":
        found.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "The dedupe key of an event that has none; with many events its place is added to it.",
                "schema": {"type": "string", "minLength": 1, "maxLength": 256},
            }
        )
    return found


def _is_needed(operation: ApiOperation, components: dict[str, Any]) -> bool:
    """Return whether a request without a body is refused: it is taken where all fields have defaults."""
    kind: Any = operation.body.get(JSON)
    return isinstance(kind, OneOf) or bool(components[kind.__name__].get("required")) or kind.__name__ in WHOLE


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A query parameter is left out instead of being null."""
    kinds = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    more = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    return {**kinds[0], **more}


def _responses(operation: ApiOperation, schema_of: dict[int, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, content in operation.answers.items():
        found[str(status)] = {"description": HTTPStatus(status).phrase, "content": _content(content, schema_of)}
    own = () if operation.is_public else (400, 401, 500, 503)
    for status in sorted({*own, *operation.problems}):
        found[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {PROBLEM_TYPE: {"schema": {"$ref": _REF.format(name="ProblemOut")}}},
        }
    return found


def _content(content: Any, schema_of: dict[int, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for media, kind in content.items():
        if isinstance(kind, OneOf):
            schema: Any = {"anyOf": [schema_of[id(each)] for each in kind.kinds]}
        else:
            schema = schema_of[id(kind)]
        if media == NDJSON:
            schema = {**schema, "description": "Each line is such a value."}
        shown[media] = {"schema": schema}
    return shown or {JSON: {}}


def asyncapi_document() -> dict[str, Any]:
    """The document."""
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for name, address, summary, incoming, outgoing, wrapped in (
        (
            "groups",
            "/groups",
            "Members of durable groups, and publishers, in other processes.",
            _members(groups.ClientFrame),
            _members(groups.NodeFrame),
            _as_it_is,
        ),
        (
            "sync",
            "/sync",
            "Offline-first clients: submit, catch up in pages, hear broadcasts. Each payload travels in an envelope.",
            _members(sync_frames.ClientPayload),
            _members(sync_frames.ServerPayload),
            _with_type,
        ),
        (
            "happenings",
            "/happenings",
            "The ledger: requests, subscriptions, plugins in other processes. One request is worked on at a time.",
            tuple(requests.REQUESTS.values()),
            _members(answers.Answers),
            _as_it_is,
        ),
        (
            "events",
            "/events",
            "The gateway: what was committed and what the node has to tell, as it happens, to whoever may read it.",
            _members(gateway.ClientFrame),
            (gateway.SubscribedEvents, gateway.EventsError, EnvelopeOut),
            _with_event,
        ),
    ):
        shown: dict[str, Any] = {}
        for direction, kinds in (("receive", incoming), ("send", outgoing)):
            listed = []
            for kind in kinds:
                key = f"{name}.{kind.__name__}"
                messages[key] = _message(name, kind, schemas, wrapped)
                shown[kind.__name__] = {"$ref": f"#/components/messages/{key}"}
                listed.append({"$ref": f"#/channels/{name}/messages/{kind.__name__}"})
            operations[f"{name}.{direction}"] = {
                "action": direction,
                "channel": {"$ref": f"#/channels/{name}"},
                "messages": listed,
            }
        channels[name] = {"address": address, "summary": summary, "messages": shown, "bindings": {"ws": {}}}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Tidings", "version": __version__, "license": {"name": "Apache-2.0"}},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": schemas},
    }


def _members(union: Any) -> tuple[type[msgspec.Struct], ...]:
    return typing.get_args(union)


_Schema = dict[str, Any]
_Wrapping = Callable[[type[msgspec.Struct], _Schema], _Schema]
_EVENT_NAMES: Final = {gateway.SubscribedEvents: "subscribed", gateway.EventsError: "error"}


def _as_it_is(kind: type[msgspec.Struct], schema: _Schema) -> _Schema:
    return schema


def _with_type(kind: type[msgspec.Struct], schema: _Schema) -> _Schema:
    properties = {"type": {"const": _wire_name(kind)}, "payload": schema}
    return {"type": "object", "properties": properties, "required": ["type", "payload"]}


def _with_event(kind: type[msgspec.Struct], schema: _Schema) -> _Schema:
    """What the node sends is the payload of a frame that names it; what a client sends is a frame itself."""
    if kind.__struct_config__.tag is not None:
        return schema
    name = {"const": _EVENT_NAMES[kind]} if kind in _EVENT_NAMES else {"type": "string"}
    properties = {"event": name, "payload": schema, "trace_id": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _message(endpoint: str, kind: type[msgspec.Struct], schemas: dict[str, Any], wrapped: _Wrapping) -> dict[str, Any]:
    """A message, and the schemas it needs; those of two endpoints are kept apart, as their structs may share names."""
    kinds = [kind, EventIn] if kind is groups.Publish else [kind]
    (schema, *_), components = msgspec.json.schema_components(
        kinds, ref_template=_REF.replace("{name}", f"{endpoint}.{{name}}")
    )
    for name, each in components.items():
        schemas[f"{endpoint}.{name}"] = _without_discriminators(each)
    payload = wrapped(kind, schema)
    return {"name": _wire_name(kind), "title": kind.__name__, "summary": _summary(kind), "payload": payload}


def _without_discriminators(schema: Any) -> Any:
    """Leave out OpenAPI's ``discriminator``: in AsyncAPI it is a text, and the tags of the structs say the same."""
    if isinstance(schema, dict):
        return {
            key: _without_discriminators(value)
            for key, value in schema.items()
            if not (key == "discriminator" and isinstance(value, dict) and "propertyName" in value)
        }
    return [_without_discriminators(each) for each in schema] if isinstance(schema, list) else schema


def _wire_name(kind: type[msgspec.Struct]) -> str:
    if kind in _EVENT_NAMES:
        return _EVENT_NAMES[kind]
    tag = kind.__struct_config__.tag
    return str(tag) if tag is not None else str(getattr(kind, "TYPE", getattr(kind, "type", kind.__name__)))


def _summary(kind: type[msgspec.Struct]) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0]
