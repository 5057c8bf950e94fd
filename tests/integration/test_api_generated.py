"""Requests that are generated from the document: no server error, no answer that the document does not have, nothing valid refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration.api_support import DOCUMENT, validator
from tidings.server.api import OPERATIONS
from tidings.server.api.documents import asyncapi_document
from tidings.server.settings import ApiSettings
from tidings.testing.node import node_settings, running_node

DENYING = {"applyDirective", "putPolicy", "revoke"}
"""They would keep the test itself out."""
BEYOND_THE_SCHEMA = {
    "cancelDelayedEvent": "one of two parameters",
    "changeApp": "names of apps and event types that fit each other",
    "changeConfig": "the names of settings",
    "grant": "a resource's name has a grammar for each kind",
    "listDeadLetters": "times have a range",
    "dropOldSegments": "integers with a fraction of zero, or beyond 64 bits",
    "publishEvents": "delay_s or at, and a topic in the event or beside it",
    "readEnvelopes": "until is for pages, an epoch is a log's own",
    "readEvents": "an epoch is a log's own, offsets need a topic",
    "removeApp": "an app that is always there",
    "seekGroup": "integers with a fraction of zero",
}
"""Operations of which more is refused than JSON Schema can say, and what."""


def test_the_openapi_document_is_valid() -> None:
    """The official validator has nothing to say about it."""
    assert [error.message for error in OpenAPIV31SpecValidator(DOCUMENT).iter_errors()] == []


def test_the_asyncapi_document_has_no_object_where_the_specification_has_a_text() -> None:
    """In AsyncAPI a schema's ``discriminator`` is the name of a property; OpenAPI has an object there. Every schema is one."""

    def objects_of(value: Any, path: str) -> list[str]:
        if isinstance(value, list):
            return [each for item in value for each in objects_of(item, path)]
        if not isinstance(value, dict):
            return []
        own = [path] if isinstance(value.get("discriminator"), dict) and not path.endswith("/properties") else []
        return own + [each for key, item in value.items() for each in objects_of(item, f"{path}/{key}")]

    document = asyncapi_document()
    assert objects_of(document, "") == []
    for schema in document["components"]["schemas"].values():
        jsonschema_rs.validator_for({**schema, "components": document["components"]})


@pytest.mark.parametrize("count", [4, pytest.param(25, marks=pytest.mark.heavy)])
async def test_generated_requests_are_answered_as_documented(count: int, tmp_path: Path) -> None:
    """Of every operation some requests that fit the document; the same in every run."""
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    chosen = settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def check(operation: Any, url: str, headers: dict[str, str]) -> None:
        name = operation.definition.raw["operationId"]

        @seed(1)
        @chosen
        @given(case=operation.as_strategy())
        def requests_fit(case: Any) -> None:
            response = case.call(base_url=url, headers=headers, timeout=40)
            checks = [not_a_server_error, status_code_conformance, response_schema_conformance]
            case.validate_response(response, checks=checks)
            if name not in BEYOND_THE_SCHEMA:
                assert response.status_code not in (400, 415, 422), (name, response.text)

        if name not in DENYING:
            requests_fit()

    def run(url: str, headers: dict[str, str]) -> None:
        for result in schema.get_all_operations():
            operation: Any = result.ok()  # type: ignore[union-attr]  # an error would end the test
            check(operation, url, headers)

    given_settings = msgspec.structs.replace(node_settings(), api=ApiSettings(wait_s_max=0.05))
    async with running_node(tmp_path, given_settings) as node:
        await asyncio.to_thread(run, node.url, node.headers("root", roles=["admin"]))


def test_the_exceptions_are_operations() -> None:
    """Neither set names an operation that is gone."""
    assert {*DENYING, *BEYOND_THE_SCHEMA} <= {operation.name for operation in OPERATIONS}


def test_the_document_has_what_the_node_checks() -> None:
    """Needed bodies, the bounds of a seq and of a wait, times, the grammar of names, and a body whose type may be left out."""
    paths, schemas = DOCUMENT["paths"], DOCUMENT["components"]["schemas"]

    def parameter(path: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in paths[path]["get"]["parameters"] if each["name"] == name)[
            "schema"
        ]
        return found

    assert paths["/v1/config"]["patch"]["requestBody"]["required"]
    assert paths["/v1/events"]["post"]["requestBody"]["required"]
    assert not paths["/v1/groups/{topic}/{group}/pause"]["post"]["requestBody"]["required"]
    assert parameter("/v1/events/{seq}", "seq")["minimum"] == 1
    assert parameter("/v1/events", "wait")["maximum"] == 600
    assert parameter("/v1/events", "from_time")["format"] == "date-time"
    assert schemas["RetentionBody"]["properties"]["rules"]["minProperties"] == 1
    for name in ("", "*", "a b", "a__b", "_a", "x" * 129):
        assert not validator(parameter("/v1/topics/{topic}", "topic")).is_valid(name)
    assert validator(parameter("/v1/topics/{topic}", "topic")).is_valid("orders.eu")
    body = paths["/v1/apps"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert validator(body).is_valid({"slug": "0"})
