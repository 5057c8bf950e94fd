"""Who acts, on what device, under which band and with which capabilities; and how urgent it is."""

from __future__ import annotations

import enum
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Annotated, Any, Literal

import msgspec


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


class EnvelopePart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    A structured part of an envelope. It can be read like the mapping it is stored as, and equals that mapping.

    So a handler may write ``actor.user_id`` or ``actor["user_id"]``, whichever way the producer gave the actor.
    """

    def __getitem__(self, key: str) -> Any:
        return self._stored()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored())

    def __len__(self) -> int:
        return len(self._stored())

    def __contains__(self, key: object) -> bool:
        return key in self._stored()

    def keys(self) -> KeysView[str]:
        """The fields that are given."""
        return self._stored().keys()

    def items(self) -> ItemsView[str, Any]:
        """The fields that are given, with their values."""
        return self._stored().items()

    def values(self) -> ValuesView[Any]:
        """The values of the fields that are given."""
        return self._stored().values()

    def get(self, key: str, default: Any = None) -> Any:
        """A field by name; ``default`` if it is not given."""
        return self._stored().get(key, default)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EnvelopePart):
            return type(self) is type(other) and self._stored() == other._stored()
        return isinstance(other, Mapping) and self._stored() == dict(other)

    def __hash__(self) -> int:
        return hash((type(self), msgspec.structs.astuple(self)))

    def _stored(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


Mapping.register(EnvelopePart)


class Actor(EnvelopePart, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The person or agent behind an event."""

    user_id: str
    caps: tuple[Capability, ...] = ()
    agent_id: str | None = None


class Device(EnvelopePart, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The device an event came from."""

    device_id: str
    platform: Literal["ios", "android", "macos", "windows", "linux", "web", "edge"] | None = None
    app_version: str | None = None
    locale: str | None = None


class QoS(EnvelopePart, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How urgent an event is and how it wants to travel."""

    priority: Annotated[int, msgspec.Meta(ge=1, le=10)] = 5
    latency_budget_ms: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    routing: Literal["fast-path", "gate-path"] = "gate-path"
    retries: Annotated[int, msgspec.Meta(ge=0, le=3)] = 0
    deadline_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None


def part_of(kind: type[EnvelopePart], stored: Any) -> Any:
    """
    What was read back, as the type it has the form of.

    A mapping that says more than the type can, or says it otherwise, stays a mapping: nothing is lost by reading.
    """
    if not isinstance(stored, Mapping):
        return stored
    try:
        part: object = msgspec.convert(stored, kind)
    except msgspec.ValidationError:
        return stored
    return part if part == stored else stored
