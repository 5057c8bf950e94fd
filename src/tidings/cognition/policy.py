"""
Policy bands: how sensitive a thing is under the circumstances, and what may then be done with it.

Bands are ordered GREEN, AMBER, RED, BLACK. Circumstances only ever raise a band (floors win), and of several verdicts
the strictest holds (DENY over ALLOW_REDACTED over ALLOW).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

import msgspec

from tidings.core.events import SecurityBand

_AROUSAL_FLOOR: Final = 0.7
_VALENCE_DOWNSHIFT: Final = -0.4
_PRESSURE_FLOOR: Final = 0.6
_NIGHT_FROM_HOUR: Final = 22
_NIGHT_TO_HOUR: Final = 6


class PolicyOperation(enum.StrEnum):
    """What somebody wants to do with a thing."""

    WRITE = "write"
    RECALL = "recall"
    SHARE = "share"
    PROJECT = "project"

    @property
    def is_risky(self) -> bool:
        """Whether it carries data out of its space."""
        return self in (PolicyOperation.SHARE, PolicyOperation.PROJECT)


class PolicyVerdict(enum.StrEnum):
    """May it be done, laxest first."""

    ALLOW = "ALLOW"
    ALLOW_REDACTED = "ALLOW_REDACTED"
    DENY = "DENY"


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What the attribute rules look at."""

    operation: PolicyOperation = PolicyOperation.WRITE
    is_screen_locked: bool = False
    is_low_on_resources: bool = False
    is_minor: bool = False
    local_hour: int | None = None
    arousal: float = 0.0
    valence: float = 0.0
    safety_pressure: float = 0.0


def effective_band(band: SecurityBand, circumstances: Circumstances) -> tuple[SecurityBand, tuple[str, ...]]:
    """The band that holds under the circumstances, and the rules that made AMBER the least."""
    seen = circumstances
    hour = seen.local_hour
    is_night = hour is not None and (hour >= _NIGHT_FROM_HOUR or hour < _NIGHT_TO_HOUR)
    rules = {
        "locked_or_low_resources": (seen.is_screen_locked or seen.is_low_on_resources) and seen.operation.is_risky,
        "minor_at_night": seen.is_minor and is_night,
        "high_arousal": seen.arousal >= _AROUSAL_FLOOR,
        "distress": seen.arousal >= _AROUSAL_FLOOR and seen.valence <= _VALENCE_DOWNSHIFT,
        "safety_pressure": seen.safety_pressure >= _PRESSURE_FLOOR,
    }
    reasons = tuple(name for name, holds in rules.items() if holds)
    return (band.stricter(SecurityBand.AMBER) if reasons else band), reasons


def verdict(band: SecurityBand, operation: PolicyOperation) -> PolicyVerdict:
    """What a band allows: BLACK is never shared or projected, RED never projected; both are else shown redacted."""
    if band is SecurityBand.BLACK and operation.is_risky:
        return PolicyVerdict.DENY
    if band is SecurityBand.RED and operation is PolicyOperation.PROJECT:
        return PolicyVerdict.DENY
    if band.rank >= SecurityBand.RED.rank or (band is SecurityBand.AMBER and operation.is_risky):
        return PolicyVerdict.ALLOW_REDACTED
    return PolicyVerdict.ALLOW


def strictest(verdicts: Iterable[PolicyVerdict]) -> PolicyVerdict:
    """The verdict that holds when several were given; none at all is a denial."""
    order = list(PolicyVerdict)
    return max(verdicts, key=order.index, default=PolicyVerdict.DENY)
