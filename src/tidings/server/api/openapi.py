"""The OpenAPI 3.1 document, made from the declarations that check the requests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Final

import msgspec

from tidings import __version__

from ..problems import PROBLEM_TYPE
from .operations import JSON, NDJSON, OneOf, Operation

__all__ = ["ProblemOut", "openapi_document"]

_REF: Final = "#/components/schemas/{name}"
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


def openapi_document(operations: Iterable[Operation]) -> dict[str, Any]:
    """The document of these operations."""
    listed = list(operations)
    kinds = {id(kind): kind for operation in listed for kind in _kinds(operation)}
    flat = [ProblemOut, *kinds.values()]
    schemas, components = msgspec.json.schema_components(flat, ref_template=_REF)
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


def _kinds(operation: Operation) -> Iterable[Any]:
    contents = [operation.body, *operation.answers.values()]
    for content in contents:
        for kind in content.values():
            yield from kind.kinds if isinstance(kind, OneOf) else (kind,)
    if operation.query is not None:
        yield operation.query


def _described(operation: Operation, schema_of: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
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
        described["requestBody"] = {"content": _content(operation.body, schema_of)}
    return described


def _parameters(operation: Operation, components: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(operation.path)
    ]
    if operation.query is not None:
        schema = components[operation.query.__name__]
        required = schema.get("required", ())
        found += [
            {"name": name, "in": "query", "required": name in required, "schema": each}
            for name, each in schema["properties"].items()
        ]
    if operation.name == "publishEvents":
        found.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "The dedupe key of an event that has none; with many events its place is added to it.",
                "schema": {"type": "string", "maxLength": 256},
            }
        )
    return found


def _responses(operation: Operation, schema_of: dict[int, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, content in operation.answers.items():
        found[str(status)] = {"description": HTTPStatus(status).phrase, "content": _content(content, schema_of)}
    own = () if operation.is_public else (400, 401, 500)
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
        shown[media] = {"schema": schema}
        if media == NDJSON:
            shown[media]["description"] = "One JSON value a line."
    return shown or {JSON: {}}
