"""
The HTTP API: ``routes`` over a node's services.

Every request is somebody's (a bearer token, or nobody in particular where access is open), nothing is allowed that access does not
allow, and every refusal is a problem document with the error's own code. ``/v1/openapi.json`` and ``/v1/asyncapi.json`` describe all
of it, from the declarations that check it.
"""

from __future__ import annotations

from typing import Final

from starlette.responses import Response
from starlette.routing import BaseRoute

from ..envelope_history import EnvelopeHistory
from ..services import Services
from ..settings import ApiSettings
from . import access, apps, configuration, dead_letters, envelopes, gateway, groups, guard, publishing, reading, topics
from .documents import asyncapi_document, openapi_document
from .operations import JSON, Api, ApiOperation, Call, Places, json_answer, resources_of


async def _show_openapi(call: Call) -> Response:
    return json_answer(_OPENAPI, 200, {"cache-control": "no-cache"})


async def _show_asyncapi(call: Call) -> Response:
    return json_answer(_ASYNCAPI, 200, {"cache-control": "no-cache"})


OPERATIONS: Final[tuple[ApiOperation, ...]] = (
    *publishing.OPERATIONS,
    *reading.OPERATIONS,
    *envelopes.OPERATIONS,
    *topics.OPERATIONS,
    *groups.OPERATIONS,
    *dead_letters.OPERATIONS,
    *access.OPERATIONS,
    *apps.OPERATIONS,
    *guard.OPERATIONS,
    *gateway.OPERATIONS,
    *configuration.OPERATIONS,
    ApiOperation(
        method="GET",
        path="/v1/openapi.json",
        name="showOpenapi",
        summary="This document.",
        tag="documents",
        handle=_show_openapi,
        answers={200: {JSON: dict}},
        is_public=True,
    ),
    ApiOperation(
        method="GET",
        path="/v1/asyncapi.json",
        name="showAsyncapi",
        summary="The document of the sockets, in AsyncAPI 3.0.",
        tag="documents",
        handle=_show_asyncapi,
        answers={200: {JSON: dict}},
        is_public=True,
    ),
)
_OPENAPI: Final = openapi_document(OPERATIONS)
_ASYNCAPI: Final = asyncapi_document()


def routes(services: Services, settings: ApiSettings | None = None) -> list[BaseRoute]:
    """
    The routes of the API.

    Args:
        services: The parts of the node.
        settings: Bounds; the defaults if left out.
    """
    publishes = Places(max(1, services.settings.server.requests_max // 2))
    history = EnvelopeHistory(services.log, services.gateway, services.settings.server.default_app)
    return resources_of(Api(services, settings or ApiSettings(), publishes, history), OPERATIONS)
