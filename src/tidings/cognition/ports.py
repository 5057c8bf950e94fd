"""What the cognitive layer takes from outside (somewhere to publish, somewhere to count), and small functions all of it uses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tidings.core.events import Event

from .errors import InvalidRequest

Publish: TypeAlias = Callable[[Event], Awaitable[object]]
"""Stores an event durably; returns when that is done, raises when it is not."""


class MetricSink(Protocol):
    """Takes one measurement: a name, a value, and labels of few distinct values."""

    def __call__(self, name: str, value: float, labels: Mapping[str, str]) -> None: ...


def no_metrics(name: str, value: float, labels: Mapping[str, str]) -> None:
    """The sink for those who do not measure."""


def clip01(value: float) -> float:
    """``value``, or the nearer end of 0..1."""
    return min(1.0, max(0.0, value))


def sigmoid(x: float) -> float:
    """``1 / (1 + e^-x)``, without overflow at either end."""
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    grown = math.exp(x)
    return grown / (1.0 + grown)


def unit_hash(text: str) -> float:
    """A number in [0, 1) that stands for ``text``, the same in every process."""
    # 53 bits: what a float holds exactly, so that the largest one is still below 1.
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 11) / (1 << 53)


def zone_of(name: str) -> ZoneInfo:
    """
    The zone of a name.

    Raises:
        InvalidRequest: There is none.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidRequest("tz", f"{name[:80]!r} is not a time zone") from error
