"""
The gate's settings: weights, thresholds, limits; and the two named profiles.

The sources give two sets of numbers. ``CONFIGURED`` is the one that was in force and is the default; ``README`` is the
one that was written down. Where the second is silent (the bump's beta, queue and latency limits) it has the first's
value; where it has no weight for a feature, that feature counts for nothing.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from tidings.core.actors import SecurityBand

from ..limits import BreakerSettings, RateSettings

__all__ = [
    "BAND_RULES",
    "CONFIGURED",
    "PROFILES",
    "README",
    "BandRule",
    "GateProfile",
    "LoadLimits",
    "Thresholds",
    "Weights",
]

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much each feature counts. Risk, cost and social risk count against."""

    urgency: Weight = 1.0
    novelty: Weight = 0.8
    value: Weight = 0.9
    risk: Weight = 0.7
    cost: Weight = 0.6
    social_risk: Weight = 0.5
    arousal: Weight = 0.4
    valence: Weight = 0.2
    context_bump: Weight = 0.3
    temporal_fit: Weight = 0.3
    personal_relevance: Weight = 0.0
    goal_alignment: Weight = 0.0


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Priorities at which the action changes."""

    drop: Share = 0.20
    admit: Share = 0.60
    boost: Share = 0.80


class LoadLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At the first number of each pair requests are deferred, at the second refused."""

    queue_defer: int = 100
    queue_drop: int = 200
    load_defer: Share = 0.80
    load_drop: Share = 0.95
    requests_per_minute_max: Annotated[int, msgspec.Meta(ge=1)] = 1000
    error_rate_defer: Share = 0.10
    error_rate_drop: Share = 0.20
    outcomes_count_max: Annotated[int, msgspec.Meta(ge=1)] = 100
    outcomes_count_min: Annotated[int, msgspec.Meta(ge=1)] = 10
    """Fewer outcomes than this say nothing, neither of errors nor of latency."""
    outcomes_age_s_max: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Older outcomes no longer count, so that what was refused for them is let in again."""
    latency_ms_defer: float = 500.0
    latency_ms_drop: float = 1000.0


class GateProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the gate's decisions depend on besides the request and the load."""

    name: str
    weights: Weights = Weights()
    thresholds: Thresholds = Thresholds()
    bias: float = 0.0
    temperature: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    calibration_a: float = 1.0
    calibration_b: float = 0.0
    rate: RateSettings = RateSettings(per_second=10.0, burst=20)
    breaker: BreakerSettings = BreakerSettings()
    limits: LoadLimits = LoadLimits()
    hysteresis_margin: Share = 0.02
    text_chars_max: Annotated[int, msgspec.Meta(ge=1)] = 50_000
    deferred_count_max: Annotated[int, msgspec.Meta(ge=1)] = 200
    low_salience_hearings_max: Annotated[int, msgspec.Meta(ge=1)] = 5
    """An event that is not salient enough at so many hearings is dropped at the last; a hearing that only found the gate
    busy does not count. Fewer than a durable group's six deliveries: the gate decides before the group gives up."""
    remembered_count_max: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    """Actors, sources and decisions that the gate remembers, each; the ones unused for longest are forgotten."""


CONFIGURED: Final = GateProfile(name="configured")
README: Final = GateProfile(
    name="readme",
    weights=Weights(
        urgency=1.2,
        novelty=0.8,
        value=0.6,
        risk=1.4,
        cost=0.9,
        social_risk=1.0,
        arousal=0.3,
        valence=0.0,
        context_bump=0.3,
        temporal_fit=0.0,
    ),
    thresholds=Thresholds(admit=0.55, boost=0.75, drop=0.20),
    rate=RateSettings(per_second=2.0, burst=5),
    breaker=BreakerSettings(failure_share=0.25, window_s=30.0, open_s=15.0),
)
PROFILES: Final = {profile.name: profile for profile in (CONFIGURED, README)}


class BandRule(msgspec.Struct, frozen=True, kw_only=True):
    """What a band does to a request."""

    priority_max: float
    boost_min: float
    processing_ms_max: int
    risk: float


BAND_RULES: Final = {
    SecurityBand.GREEN: BandRule(priority_max=1.0, boost_min=0.0, processing_ms_max=30_000, risk=0.0),
    SecurityBand.AMBER: BandRule(priority_max=0.8, boost_min=0.0, processing_ms_max=15_000, risk=0.3),
    SecurityBand.RED: BandRule(priority_max=0.5, boost_min=0.9, processing_ms_max=5_000, risk=0.6),
    SecurityBand.BLACK: BandRule(priority_max=0.3, boost_min=1.0, processing_ms_max=0, risk=0.8),
}
