"""The gateway's settings: the namespace ``event``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from tidings.core.settings import Settings


class WebSocketSettings(Settings, frozen=True, kw_only=True):
    """How many may connect."""

    max_connections: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 256
    """Subscribers at a time, streams of server-sent events included."""
    max_connections_per_identity: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 8
    """Of one identity."""
    max_connections_per_app: Annotated[int, msgspec.Meta(ge=1, le=65_535)] | None = None
    """Of one app; not limited if left out."""
    max_attempts_per_min_per_identity: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 120
    """New connections and streams of one identity; a minute's worth may come at once. Each is on record, so their rate is limited."""


class QueueSettings(Settings, frozen=True, kw_only=True):
    """How much may wait."""

    per_connection: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 256
    """Envelopes that a subscriber has not acknowledged; one more closes its connection."""
    total_ceiling: Annotated[int, msgspec.Meta(ge=64, le=100_000_000)] = 65_536
    """Events between intake and acknowledgement, over all subscribers. Takes effect at the next start."""


class DeliverySettings(Settings, frozen=True, kw_only=True):
    """How envelopes go out."""

    heartbeat_interval_ms: Annotated[int, msgspec.Meta(ge=5_000, le=300_000)] = 15_000
    """Between two pings; two intervals without an answer end a connection."""
    resume_window: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1_024
    """Envelopes of each class that are kept for those who come back."""
    max_msgs_per_sec: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    """Envelopes a second to one subscriber; more wait in its buffer."""


class TelemetrySettings(Settings, frozen=True, kw_only=True):
    """What the gateway says of itself."""

    emit_samples: bool = False
    """Log a sample of what is delivered: type and app, nothing else."""
    heartbeat_interval_ms: Annotated[int, msgspec.Meta(ge=100, le=60_000)] = 5_000
    """Between two reports to the node's health."""
    degraded_threshold_ms: Annotated[int, msgspec.Meta(ge=100, le=3_600_000)] = 10_000
    """Saturation that lasts longer is told as ``system.event_pipeline_degraded``."""


class SecuritySettings(Settings, frozen=True, kw_only=True):
    """What only administrators may subscribe to."""

    admin_channels: tuple[str, ...] = ("system.*", "security.*")
    """Event types, or families as ``network.*``. ``system.*`` and ``security.*`` always are. Takes effect at the next start."""


class EventSettings(Settings, frozen=True, kw_only=True):
    """Everything about the gateway."""

    websocket: WebSocketSettings = WebSocketSettings()
    queue: QueueSettings = QueueSettings()
    delivery: DeliverySettings = DeliverySettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    security: SecuritySettings = SecuritySettings()

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Limits that exceed each other."""
        if self.websocket.max_connections_per_identity > self.websocket.max_connections:
            yield "websocket.max_connections_per_identity", "is above websocket.max_connections"
        per_app = self.websocket.max_connections_per_app
        if per_app is not None and per_app > self.websocket.max_connections:
            yield "websocket.max_connections_per_app", "is above websocket.max_connections"
        if self.queue.total_ceiling < self.queue.per_connection:
            yield "queue.total_ceiling", "is below queue.per_connection"
        if self.telemetry.degraded_threshold_ms < self.telemetry.heartbeat_interval_ms:
            yield "telemetry.degraded_threshold_ms", "is below telemetry.heartbeat_interval_ms"


NOT_RELOADABLE: Final = ("queue.total_ceiling", "security.admin_channels")
"""What a running gateway cannot change."""
