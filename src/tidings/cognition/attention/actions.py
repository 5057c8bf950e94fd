"""
From a priority to an action: caps by band, thresholds that follow the load, and a little inertia.

Hysteresis is a Schmitt trigger: a boundary moves by ``margin`` away from the side the last decision was on, so that a
score that trembles on a threshold does not flip the answer with every request.
"""

from __future__ import annotations

import msgspec

from tidings.core.actors import SecurityBand

from .profiles import BAND_RULES, Thresholds
from .requests import Action

__all__ = ["Choice", "LoadView", "adapt", "choose", "defer_ms", "gate_load"]

ADMIT_MAX, BOOST_MAX = 0.90, 0.95
ADMIT_MIN, BOOST_MIN = 0.40, 0.60
CAPACITY_DEFER_MS = 60_000
CAPACITY_PRIORITY = 0.3


class LoadView(msgspec.Struct, frozen=True, kw_only=True):
    """How busy things are, as the thresholds see it."""

    load: float = 0.0
    error_rate: float = 0.0
    latency_ms_mean: float = 0.0


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The action, the capped priority, and which rules spoke."""

    action: Action
    priority: float
    reasons: tuple[str, ...]
    is_held: bool
    """The last decision was kept, where the thresholds alone would have changed it."""


def gate_load(*, latency_ms: float, error_rate: float, queue_depth: int, recent_decisions: int) -> float:
    """The mean of four pressures, each in 0..1."""
    parts = (min(1.0, latency_ms / 200), min(1.0, 5 * error_rate), min(1.0, queue_depth / 100))
    return (sum(parts) + min(1.0, recent_decisions / 1000)) / 4


def adapt(base: Thresholds, view: LoadView) -> Thresholds:
    """The thresholds under a load: higher when busy, failing or slow, a little lower when idle."""
    admit, boost = base.admit, base.boost
    if view.load > 0.8:
        step = (view.load - 0.8) * 0.2
        admit = min(ADMIT_MAX, admit + step)
        boost = min(BOOST_MAX, boost + step)
    elif view.load < 0.3:
        step = (0.3 - view.load) * 0.1
        # A base below the floor stays where it was put: idleness never raises a threshold.
        admit = min(admit, max(ADMIT_MIN, admit - step))
        boost = min(boost, max(BOOST_MIN, boost - step))
    if view.error_rate > 0.05:
        admit += 0.5 * view.error_rate
    if view.latency_ms_mean > 100:
        admit += (view.latency_ms_mean - 100) / 1000
    if view.load > 0.8:
        admit += 0.1
        boost += 0.05
    admit = min(max(ADMIT_MAX, base.admit), admit)
    boost = min(max(BOOST_MAX, base.boost), boost)
    return Thresholds(drop=base.drop, admit=admit, boost=max(boost, admit))


def choose(
    priority: float,
    band: SecurityBand,
    thresholds: Thresholds,
    *,
    load: float = 0.0,
    previous: Action | None = None,
    margin: float = 0.0,
) -> Choice:
    """
    Decide on a priority.

    Args:
        priority: The calibrated priority in 0..1.
        band: Caps the priority, and for RED raises what a boost needs.
        thresholds: Adapted to the load already.
        load: A boost is granted only below 0.5; above 0.9 nothing is admitted.
        previous: The last action for the same source.
        margin: The hysteresis.
    """
    rule = BAND_RULES[band]
    capped = min(priority, rule.priority_max)
    reasons = [f"band_cap:{band.value}"] if capped < priority else []
    boost_at = max(thresholds.boost, rule.boost_min)

    plain = _level(capped, thresholds.drop, thresholds.admit, boost_at)
    action = plain
    if previous is not None:
        drop_at, admit_at, held_boost_at = (
            # A boundary is never raised past the band's cap, or what the cap just allows could not be reached again.
            at - margin if previous.rank >= above.rank else max(at, min(at + margin, rule.priority_max))
            for at, above in (
                (thresholds.drop, Action.DEFER),
                (thresholds.admit, Action.ADMIT),
                (boost_at, Action.BOOST),
            )
        )
        action = _level(capped, drop_at, admit_at, held_boost_at)
    is_held = action is not plain
    reasons.append(_THRESHOLD_REASON[action])
    if is_held:
        reasons.append("hysteresis")
    if action is Action.BOOST and load >= 0.5:
        action = Action.ADMIT
        reasons.append("no_boost_under_load")
    if action is Action.ADMIT and load > 0.9:
        action = Action.DEFER
        reasons.append("no_admission_under_load")
    return Choice(action=action, priority=capped, reasons=tuple(reasons), is_held=is_held)


_THRESHOLD_REASON = {
    Action.DROP: "below_drop_threshold",
    Action.DEFER: "below_admit_threshold",
    Action.ADMIT: "above_admit_threshold",
    Action.BOOST: "above_boost_threshold",
}


def _level(priority: float, drop_at: float, admit_at: float, boost_at: float) -> Action:
    if priority < drop_at:
        return Action.DROP
    if priority >= boost_at:
        return Action.BOOST
    return Action.ADMIT if priority >= admit_at else Action.DEFER


def defer_ms(priority: float) -> int:
    """How long a request of low salience waits: 30 to 45 seconds, the more salient the shorter."""
    return round(30_000 * (2 - max(0.5, priority)))
