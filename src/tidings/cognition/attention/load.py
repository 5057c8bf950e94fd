"""
How busy the gate and what lies behind it are, and what that means for the next request.

``LoadMonitor`` remembers (a minute of arrivals, a hundred outcomes: both bounded); ``capacity`` decides on the plain
numbers it gives. Outcomes age out: a gate that refuses everything hears of no new ones, and would stay shut for ever by
what it heard last.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import msgspec

from .actions import LoadView, gate_load
from .profiles import LoadLimits
from .requests import Action

__all__ = ["LoadMonitor", "Pressure", "capacity", "estimated_delay_ms"]

_MINUTE_S: Final = 60.0


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that load control looks at."""

    queue_depth: int = 0
    load: float = 0.0
    error_rate: float = 0.0
    latency_ms_p95: float = 0.0


def capacity(pressure: Pressure, limits: LoadLimits) -> tuple[Action | None, tuple[str, ...]]:
    """DROP or DEFER with the limits that were reached, or ``None`` when there is room."""
    pairs = (
        ("queue_depth", pressure.queue_depth, limits.queue_defer, limits.queue_drop),
        ("load", pressure.load, limits.load_defer, limits.load_drop),
        ("error_rate", pressure.error_rate, limits.error_rate_defer, limits.error_rate_drop),
        ("latency_p95", pressure.latency_ms_p95, limits.latency_ms_defer, limits.latency_ms_drop),
    )
    refused = tuple(f"{name}_critical" for name, value, _, drop_at in pairs if value >= drop_at)
    if refused:
        return Action.DROP, refused
    late = tuple(f"{name}_high" for name, value, defer_at, _ in pairs if value >= defer_at)
    return (Action.DEFER, late) if late else (None, ())


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
        outcomes = self._telling(now_s)
        return Pressure(
            queue_depth=queue_depth,
            load=self._recent(now_s) / self._limits.requests_per_minute_max,
            error_rate=_error_rate(outcomes),
            latency_ms_p95=_latency_ms_p95(outcomes),
        )

    def view(self, now_s: float, queue_depth: int) -> LoadView:
        """The numbers for the thresholds."""
        outcomes = self._telling(now_s)
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

    def _telling(self, now_s: float) -> list[_Outcome]:
        """The outcomes that still count; none while they are too few to tell anything."""
        fresh = [each for each in self._outcomes if now_s - each.at_s < self._limits.outcomes_age_s_max]
        return fresh if len(fresh) >= self._limits.outcomes_count_min else []


def _error_rate(outcomes: list[_Outcome]) -> float:
    return sum(not each.is_ok for each in outcomes) / len(outcomes) if outcomes else 0.0


def _latency_ms_p95(outcomes: list[_Outcome]) -> float:
    latencies = sorted(each.latency_ms for each in outcomes)
    return latencies[math.ceil(0.95 * len(latencies)) - 1] if latencies else 0.0
