"""
From a priority to an action: caps by band, thresholds that follow the load, hysteresis; and how busy the gate is.

Hysteresis is a Schmitt trigger: a boundary moves by ``margin`` away from the side the last decision was on, so that a score
that wavers around a threshold does not flip the answer with every request.

``LoadMonitor`` keeps a minute of arrivals and a hundred outcomes, both bounded; ``capacity`` decides on the plain numbers it
gives. Outcomes age out: a gate that refuses everything gets no new ones, and would otherwise refuse for ever.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import msgspec

from tidings.core.events import SecurityBand

from .requests import BAND_RULES, GateAction, LoadLimits, Thresholds

ADMIT_MAX, BOOST_MAX = 0.90, 0.95
ADMIT_MIN, BOOST_MIN = 0.40, 0.60
CAPACITY_DEFER_MS = 60_000
RATE_DEFER_MS_MAX = 3_600_000
"""The longest deferral of a rate-limited event. Turns beyond it start over after ``CAPACITY_DEFER_MS``."""
CAPACITY_PRIORITY = 0.3


class LoadView(msgspec.Struct, frozen=True, kw_only=True):
    """How busy things are, as the thresholds see it."""

    load: float = 0.0
    error_rate: float = 0.0
    latency_ms_mean: float = 0.0


class ActionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The action, the capped priority, and which rules spoke."""

    action: GateAction
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
    previous: GateAction | None = None,
    margin: float = 0.0,
) -> ActionChoice:
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
                (thresholds.drop, GateAction.DEFER),
                (thresholds.admit, GateAction.ADMIT),
                (boost_at, GateAction.BOOST),
            )
        )
        action = _level(capped, drop_at, admit_at, held_boost_at)
    is_held = action is not plain
    reasons.append(_THRESHOLD_REASON[action])
    if is_held:
        reasons.append("hysteresis")
    if action is GateAction.BOOST and load >= 0.5:
        action = GateAction.ADMIT
        reasons.append("no_boost_under_load")
    if action is GateAction.ADMIT and load > 0.9:
        action = GateAction.DEFER
        reasons.append("no_admission_under_load")
    return ActionChoice(action=action, priority=capped, reasons=tuple(reasons), is_held=is_held)


_THRESHOLD_REASON = {
    GateAction.DROP: "below_drop_threshold",
    GateAction.DEFER: "below_admit_threshold",
    GateAction.ADMIT: "above_admit_threshold",
    GateAction.BOOST: "above_boost_threshold",
}


def _level(priority: float, drop_at: float, admit_at: float, boost_at: float) -> GateAction:
    if priority < drop_at:
        return GateAction.DROP
    if priority >= boost_at:
        return GateAction.BOOST
    return GateAction.ADMIT if priority >= admit_at else GateAction.DEFER


def defer_ms(priority: float) -> int:
    """How long a request of low salience waits: 30 to 45 seconds, the more salient the shorter."""
    return round(30_000 * (2 - max(0.5, priority)))


_MINUTE_S: Final = 60.0


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that load control looks at."""

    queue_depth: int = 0
    load: float = 0.0
    error_rate: float = 0.0
    latency_ms_p95: float = 0.0


def capacity(pressure: Pressure, limits: LoadLimits) -> tuple[GateAction | None, tuple[str, ...]]:
    """DROP or DEFER with the limits that were reached, or ``None`` when there is room."""
    pairs = (
        ("queue_depth", pressure.queue_depth, limits.queue_defer, limits.queue_drop),
        ("load", pressure.load, limits.load_defer, limits.load_drop),
        ("error_rate", pressure.error_rate, limits.error_rate_defer, limits.error_rate_drop),
        ("latency_p95", pressure.latency_ms_p95, limits.latency_ms_defer, limits.latency_ms_drop),
    )
    refused = tuple(f"{name}_critical" for name, value, _, drop_at in pairs if value >= drop_at)
    if refused:
        return GateAction.DROP, refused
    late = tuple(f"{name}_high" for name, value, defer_at, _ in pairs if value >= defer_at)
    return (GateAction.DEFER, late) if late else (None, ())


def estimated_delay_ms(load: float, queue_depth: int) -> int:
    """How long a request that is put off now may have to wait; a minute at most."""
    over_ms = 1000 * (1 + 10 * (load - 0.8)) if load > 0.8 else 0.0
    return min(60_000, round(over_ms + 50 * max(0, queue_depth)))


class _Outcome(msgspec.Struct, frozen=True, gc=False):
    at_s: float
    is_ok: bool
    latency_ms: float


class LoadMonitor:
    """Counts arrivals and outcomes."""

    __slots__ = ("_arrivals", "_limits", "_outcomes")

    def __init__(self, limits: LoadLimits) -> None:
        self._limits = limits
        # At the limit the load reads 1.0 and everything is refused: counting further would change nothing.
        self._arrivals: deque[float] = deque(maxlen=limits.requests_per_minute_max)
        self._outcomes: deque[_Outcome] = deque(maxlen=limits.outcomes_count_max)

    def arrived(self, now_s: float) -> None:
        """A request came in."""
        self._arrivals.append(now_s)

    def finished(self, is_ok: bool, latency_ms: float, now_s: float) -> None:
        """A request was handled."""
        self._outcomes.append(_Outcome(now_s, is_ok, latency_ms))

    def pressure(self, now_s: float, queue_depth: int) -> Pressure:
        """The numbers for load control."""
        outcomes = self._counted(now_s)
        return Pressure(
            queue_depth=queue_depth,
            load=self._recent(now_s) / self._limits.requests_per_minute_max,
            error_rate=_error_rate(outcomes),
            latency_ms_p95=_latency_ms_p95(outcomes),
        )

    def view(self, now_s: float, queue_depth: int) -> LoadView:
        """The numbers for the thresholds."""
        outcomes = self._counted(now_s)
        mean = sum(each.latency_ms for each in outcomes) / len(outcomes) if outcomes else 0.0
        error_rate = _error_rate(outcomes)
        return LoadView(
            load=gate_load(
                latency_ms=mean,
                error_rate=error_rate,
                queue_depth=queue_depth,
                recent_decisions=self._recent(now_s),
            ),
            error_rate=error_rate,
            latency_ms_mean=mean,
        )

    def _recent(self, now_s: float) -> int:
        while self._arrivals and now_s - self._arrivals[0] >= _MINUTE_S:
            self._arrivals.popleft()
        return len(self._arrivals)

    def _counted(self, now_s: float) -> list[_Outcome]:
        """The outcomes that still count; none while they are too few to mean anything."""
        fresh = [each for each in self._outcomes if now_s - each.at_s < self._limits.outcomes_age_s_max]
        return fresh if len(fresh) >= self._limits.outcomes_count_min else []


def _error_rate(outcomes: list[_Outcome]) -> float:
    return sum(not each.is_ok for each in outcomes) / len(outcomes) if outcomes else 0.0


def _latency_ms_p95(outcomes: list[_Outcome]) -> float:
    latencies = sorted(each.latency_ms for each in outcomes)
    return latencies[math.ceil(0.95 * len(latencies)) - 1] if latencies else 0.0
