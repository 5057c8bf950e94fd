"""Who acts, on what device, under which band and with which capabilities; and how urgent it is."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec

__all__ = ["Actor", "Capability", "Device", "QoS", "SecurityBand"]


class SecurityBand(enum.StrEnum):
    """How sensitive an event is. Bands are ordered; the stricter one wins."""

    GREEN = "GREEN"
    AMBER = "AMBER"
    RED = "RED"
    BLACK = "BLACK"

    @property
    def rank(self) -> int:
        """0 for GREEN to 3 for BLACK."""
        return list(SecurityBand).index(self)

    def stricter(self, other: SecurityBand) -> SecurityBand:
        """The stricter of two bands: floors win."""
        return max(self, other, key=lambda band: band.rank)


class Capability(enum.StrEnum):
    """What an actor or a subscriber may do."""

    WRITE = "WRITE"
    RECALL = "RECALL"
    PROJECT = "PROJECT"
    SCHEDULE = "SCHEDULE"


class Actor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The person or agent behind an event."""

    user_id: str
    caps: tuple[Capability, ...] = ()
    agent_id: str | None = None


class Device(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The device an event came from."""

    device_id: str
    platform: Literal["ios", "android", "macos", "windows", "linux", "web", "edge"] | None = None
    app_version: str | None = None
    locale: str | None = None


class QoS(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How urgent an event is and how it wants to travel."""

    priority: Annotated[int, msgspec.Meta(ge=1, le=10)] = 5
    latency_budget_ms: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    routing: Literal["fast-path", "gate-path"] = "gate-path"
    retries: Annotated[int, msgspec.Meta(ge=0, le=3)] = 0
    deadline_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
