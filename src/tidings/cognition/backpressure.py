"""
Back-pressure on cognitive events: a level from the pressure, and a fair, repeatable choice of what to hold back.

Whether an event is held back follows from its trace id and the level alone, so that all events of one trace pass or wait
together, and a replay holds back what the first run did. The levels' own triggers start at "warning"; ``LOW`` is ours:
it begins at four fifths of a warning.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import msgspec

from .limits import RateSettings
from .ports import unit_hash

__all__ = ["COGNITIVE_RATE", "Level", "PressureSample", "is_throttled", "level_of"]

COGNITIVE_RATE: Final = RateSettings(per_second=1000.0, burst=100)
_LOW_SHARE: Final = 0.8
_RISE: Final = 1.1


class Level(enum.StrEnum):
    """How hard the brakes are on."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    CRITICAL = "critical"
    EMERGENCY = "emergency"

    @property
    def rate(self) -> float:
        """The share of events of the lowest priority that pass."""
        return _RATES[self]


_RATES: Final = {
    Level.NONE: 1.0,
    Level.LOW: 0.9,
    Level.MEDIUM: 0.7,
    Level.HIGH: 0.5,
    Level.CRITICAL: 0.25,
    Level.EMERGENCY: 0.1,
}


class PressureSample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the system."""

    queue_depth: int = 0
    latency_s_p95: float = 0.0
    load: float = 0.0


_WARNING: Final = (100, 1.0, 0.70)
_CRITICAL: Final = (500, 3.0, 0.85)
_EMERGENCY: Final = (1000, 5.0, 0.95)


def level_of(now: PressureSample, loads: Sequence[float] = ()) -> Level:
    """
    The level that a sample asks for.

    Args:
        now: The latest sample.
        loads: Loads before it, oldest first: when the younger half's mean exceeds the older half's by a tenth, a warning
            counts as ``HIGH`` and not as ``MEDIUM``.
    """
    if _reaches(now, _EMERGENCY):
        return Level.EMERGENCY
    if _reaches(now, _CRITICAL):
        return Level.CRITICAL
    if _reaches(now, _WARNING):
        return Level.HIGH if _is_rising(loads) else Level.MEDIUM
    return Level.LOW if _reaches(now, tuple(_LOW_SHARE * limit for limit in _WARNING)) else Level.NONE


def is_throttled(trace_id: str, level: Level, priority: int) -> bool:
    """Whether an event of this trace is held back; the higher its priority (1 to 10), the more seldom."""
    share = (1 - level.rate) * (1 - 0.5 * min(1.0, priority / 10))
    return unit_hash(f"{trace_id}{level.value}") < share


def _reaches(sample: PressureSample, limits: tuple[float, ...]) -> bool:
    queue, latency_s, load = limits
    return sample.queue_depth >= queue or sample.latency_s_p95 >= latency_s or sample.load >= load


def _is_rising(loads: Sequence[float]) -> bool:
    half = len(loads) // 2
    if half == 0:
        return False
    older, recent = loads[:half], loads[-half:]
    return sum(recent) / half > _RISE * sum(older) / half
