"""Priorities become actions by threshold, band, load and a little inertia."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.cognition.attention.actions import (
    LoadMonitor,
    LoadView,
    Pressure,
    adapt,
    capacity,
    choose,
    defer_ms,
    estimated_delay_ms,
    gate_load,
)
from tidings.cognition.attention.requests import CONFIGURED, README, GateAction, LoadLimits, Thresholds
from tidings.core.events import SecurityBand

PLAIN = Thresholds()
GREEN = SecurityBand.GREEN
SHARES = st.floats(0, 1)


@pytest.mark.parametrize(
    ("priority", "action"),
    [
        (0.0, GateAction.DROP),
        (0.1999, GateAction.DROP),
        (0.2, GateAction.DEFER),
        (0.5999, GateAction.DEFER),
        (0.6, GateAction.ADMIT),
        (0.7999, GateAction.ADMIT),
        (0.8, GateAction.BOOST),
        (1.0, GateAction.BOOST),
    ],
)
def test_thresholds_divide_the_actions(priority: float, action: GateAction) -> None:
    """At the borders of drop, admit and boost."""
    assert choose(priority, GREEN, PLAIN).action is action


@given(SHARES, st.sampled_from([None, *GateAction]), SHARES)
def test_red_is_never_admitted_by_score(priority: float, previous: GateAction | None, load: float) -> None:
    """Its cap of 0.5 lies below the admission threshold, whatever came before."""
    choice = choose(priority, SecurityBand.RED, PLAIN, load=load, previous=previous, margin=0.02)

    assert choice.action in (GateAction.DROP, GateAction.DEFER)
    assert choice.priority <= 0.5


def test_amber_can_just_reach_a_boost() -> None:
    """Its cap is the boost threshold itself, also when the last decision was an admission."""
    assert choose(0.99, SecurityBand.AMBER, PLAIN).action is GateAction.BOOST
    assert choose(0.99, SecurityBand.AMBER, PLAIN, previous=GateAction.ADMIT, margin=0.02).action is GateAction.BOOST


@given(SHARES, SHARES, st.sampled_from(list(SecurityBand)), SHARES, st.sampled_from([None, *GateAction]))
def test_more_priority_never_fares_worse(
    one: float, other: float, band: SecurityBand, load: float, previous: GateAction | None
) -> None:
    """Of two priorities under the same circumstances, the higher gets an action at least as welcome."""
    low, high = sorted((one, other))
    actions = [choose(each, band, PLAIN, load=load, previous=previous, margin=0.02).action for each in (low, high)]

    assert actions[0].rank <= actions[1].rank


def test_a_trembling_score_does_not_flip_the_answer() -> None:
    """Within the margin the last decision holds, and says so; beyond it the answer changes."""
    assert choose(0.59, GREEN, PLAIN, previous=GateAction.ADMIT, margin=0.02).action is GateAction.ADMIT
    assert choose(0.59, GREEN, PLAIN, previous=GateAction.ADMIT, margin=0.02).is_held
    assert choose(0.61, GREEN, PLAIN, previous=GateAction.DEFER, margin=0.02).action is GateAction.DEFER
    assert choose(0.63, GREEN, PLAIN, previous=GateAction.DEFER, margin=0.02).action is GateAction.ADMIT
    assert not choose(0.63, GREEN, PLAIN, previous=GateAction.DEFER, margin=0.02).is_held


def test_load_takes_boosts_and_then_admissions_away() -> None:
    """A boost is granted below half load only, and above 0.9 an admission waits."""
    assert choose(0.9, GREEN, PLAIN, load=0.49).action is GateAction.BOOST
    assert choose(0.9, GREEN, PLAIN, load=0.5).action is GateAction.ADMIT
    assert choose(0.9, GREEN, PLAIN, load=0.91).action is GateAction.DEFER


@pytest.mark.parametrize(("priority", "ms"), [(0.2, 45_000), (0.5, 45_000), (0.59, 42_300)])
def test_a_deferral_is_shorter_for_the_more_salient(priority: float, ms: int) -> None:
    """30 s times (2 - max(0.5, priority))."""
    assert defer_ms(priority) == ms


@pytest.mark.parametrize(
    ("view", "admit", "boost"),
    [
        (LoadView(load=0.5), 0.60, 0.80),
        (LoadView(load=0.9), 0.60 + 0.02 + 0.1, 0.80 + 0.02 + 0.05),
        (LoadView(load=0.1), 0.60 - 0.02, 0.80 - 0.02),
        (LoadView(load=0.5, error_rate=0.1), 0.65, 0.80),
        (LoadView(load=0.5, error_rate=0.05), 0.60, 0.80),
        (LoadView(load=0.5, latency_ms_mean=150), 0.65, 0.80),
        (LoadView(load=0.5, latency_ms_mean=900), 0.90, 0.90),
    ],
)
def test_thresholds_follow_the_load(view: LoadView, admit: float, boost: float) -> None:
    """Up when busy, failing or slow, down when idle, by the given slopes."""
    adapted = adapt(PLAIN, view)

    assert adapted.admit == pytest.approx(admit)
    assert adapted.boost == pytest.approx(boost)


@given(
    st.builds(LoadView, load=SHARES, error_rate=SHARES, latency_ms_mean=st.floats(0, 1e5)),
    st.sampled_from([CONFIGURED, README]),
)
def test_adapted_thresholds_keep_their_order_and_bounds(view: LoadView, profile: object) -> None:
    """admit in 0.4..0.9, boost in 0.6..0.95, boost never below admit."""
    adapted = adapt(PLAIN if profile is CONFIGURED else README.thresholds, view)

    assert 0.4 <= adapted.admit <= 0.9
    assert 0.6 <= adapted.boost <= 0.95
    assert adapted.drop < adapted.admit <= adapted.boost


def test_gate_load_is_the_mean_of_four_pressures() -> None:
    """Each saturates at 1."""
    assert gate_load(latency_ms=100, error_rate=0.1, queue_depth=25, recent_decisions=250) == pytest.approx(0.375)
    assert gate_load(latency_ms=1e9, error_rate=1, queue_depth=10**6, recent_decisions=10**6) == 1.0


@pytest.mark.parametrize(
    ("pressure", "action", "reason"),
    [
        (Pressure(), None, ()),
        (Pressure(queue_depth=99, load=0.79, error_rate=0.09, latency_ms_p95=499), None, ()),
        (Pressure(queue_depth=100), GateAction.DEFER, ("queue_depth_high",)),
        (Pressure(queue_depth=200), GateAction.DROP, ("queue_depth_critical",)),
        (Pressure(load=0.8), GateAction.DEFER, ("load_high",)),
        (Pressure(load=0.95), GateAction.DROP, ("load_critical",)),
        (Pressure(error_rate=0.1), GateAction.DEFER, ("error_rate_high",)),
        (Pressure(error_rate=0.2), GateAction.DROP, ("error_rate_critical",)),
        (Pressure(latency_ms_p95=500), GateAction.DEFER, ("latency_p95_high",)),
        (Pressure(latency_ms_p95=1000, queue_depth=100), GateAction.DROP, ("latency_p95_critical",)),
    ],
)
def test_capacity_defers_and_then_refuses(
    pressure: Pressure, action: GateAction | None, reason: tuple[str, ...]
) -> None:
    """At the limits of queue, load, errors and latency."""
    assert capacity(pressure, LoadLimits()) == (action, reason)


@pytest.mark.parametrize(
    ("load", "queue", "ms"), [(0.5, 0, 0), (0.9, 0, 2000), (0.5, 10, 500), (0.9, 10, 2500), (1.0, 10_000, 60_000)]
)
def test_the_estimated_delay_grows_to_a_minute(load: float, queue: int, ms: int) -> None:
    """A second and more above 0.8 load, 50 ms for each that waits."""
    assert estimated_delay_ms(load, queue) == ms


def test_the_monitor_forgets_old_arrivals_and_waits_for_enough_outcomes() -> None:
    """Arrivals count for a minute; an error rate needs ten outcomes."""
    monitor = LoadMonitor(LoadLimits())
    for _ in range(500):
        monitor.arrived(0.0)
    for _ in range(9):
        monitor.finished(False, 10.0, 0.0)

    assert monitor.pressure(59.9, 0).load == 0.5
    assert monitor.pressure(60.0, 0).load == 0.0
    assert monitor.pressure(0.0, 0).error_rate == 0.0
    monitor.finished(True, 1000.0, 0.0)
    assert monitor.pressure(0.0, 0).error_rate == 0.9
    assert monitor.pressure(0.0, 0).latency_ms_p95 == 1000.0
    for _ in range(100_000):
        monitor.arrived(61.0)
    assert monitor.pressure(61.0, 0).load == 1.0
