"""``/v1/gateway``: who is subscribed to events, and what the gateway counts. For whoever may read the node."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response

from tidings.access.resources import Action, node
from tidings.gateway.subscribers import ConnectionInfo
from tidings.gateway.telemetry import GatewayStats

from .operations import JSON, ApiOperation, Call, json_answer


class SubscriberList(msgspec.Struct, frozen=True, kw_only=True):
    """Who is subscribed, in the order of opening."""

    connections: list[ConnectionInfo]
    admitted: int
    """Connections that have a place, subscribed or not."""


async def list_connections(call: Call) -> Response:
    """Who is subscribed."""
    call.capsule.require(Action.READ, node())
    registry = call.api.services.gateway.registry
    return json_answer(SubscriberList(connections=registry.connections(), admitted=registry.admitted))


async def show_stats(call: Call) -> Response:
    """What is counted."""
    call.capsule.require(Action.READ, node())
    gateway = call.api.services.gateway
    return json_answer(gateway.telemetry.stats(gateway.pipeline_state()))


OPERATIONS: Final = (
    ApiOperation(
        method="GET",
        path="/v1/gateway/connections",
        name="listSubscribers",
        summary="List who is subscribed to events.",
        tag="gateway",
        handle=list_connections,
        answers={200: {JSON: SubscriberList}},
        problems=(403,),
    ),
    ApiOperation(
        method="GET",
        path="/v1/gateway/stats",
        name="showGateway",
        summary="Show what the gateway counts, and how it is.",
        tag="gateway",
        handle=show_stats,
        answers={200: {JSON: GatewayStats}},
        problems=(403,),
    ),
)
