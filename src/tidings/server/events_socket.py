"""The gateway within a node: its endpoint ``/events`` over the node's parts, and what it says of itself to the node's health."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from tidings.core.ids import new_event_id
from tidings.gateway.endpoint import EventsEndpoint
from tidings.gateway.event_types import EVENT_MANAGER
from tidings.gateway.settings import EventSettings

from .health import HealthManager, Reason
from .services import Services

_REPORTS_MISSED_MAX: Final = 3
"""So many reports of the gateway may be late before its silence means something."""


def events_endpoint(services: Services) -> EventsEndpoint:
    """The endpoint ``/events`` over a node's parts."""
    return EventsEndpoint(
        services.gateway,
        clock=services.clock,
        book=services.book,
        authenticator=services.authenticator,
        default_app=services.settings.server.default_app,
        new_trace_id=new_event_id,
    )


def gateway_timeout_s(settings: EventSettings) -> float:
    """How long the gateway may say nothing of itself."""
    return _REPORTS_MISSED_MAX * settings.telemetry.heartbeat_interval_ms / 1_000


def report_gateway(
    health: HealthManager,
    state: Literal["healthy", "degraded", "failed"],
    reasons: tuple[str, ...],
    metrics: Mapping[str, Any],
) -> None:
    """Pass on how the gateway is."""
    told = tuple(Reason(f"event.{reason}", f"the gateway: {reason.replace('_', ' ')}") for reason in reasons)
    health.report(EVENT_MANAGER, state, told, metrics)
