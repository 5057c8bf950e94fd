"""Health is the fold of what components say; each reason can be matched, and silence is noticed."""

from __future__ import annotations

from typing import Any

import pytest

from tidings.access.announcements import Announcement
from tidings.log.interface import Health
from tidings.server.errors import InvalidSignal
from tidings.server.health import (
    HealthManager,
    Reason,
    dispatcher_signal,
    durability_signal,
    log_signal,
    phase_signal,
)
from tidings.testing import VirtualClock

GOOD = Health(is_writable=True, is_durable=True)
SATURATED = (Reason("event.queue_saturated", "queues are full"),)


def codes(log: Health = GOOD, phase: str = "running", **state: Any) -> tuple[bool, list[str], list[str]]:
    health = HealthManager(VirtualClock())
    health.register("node", is_critical=True, ask=lambda: phase_signal(phase))
    health.register("log", is_critical=True, ask=lambda: log_signal(log))
    health.register("dispatcher", is_critical=True, ask=lambda: dispatcher_signal(**{"lag": 0, "lag_max": 5, **state}))
    health.register("durability", is_critical=False, ask=lambda: durability_signal(log))
    found = health.readiness()
    return found.is_ready, [each.code for each in found.reasons], [each.code for each in found.warnings]


@pytest.mark.parametrize(
    ("state", "reasons"),
    [
        ({}, []),
        ({"phase": "starting"}, ["node.starting"]),
        ({"phase": "stopping"}, ["node.stopping"]),
        ({"log": Health(is_writable=False, is_durable=True, problem="x")}, ["log.fenced"]),
        ({"log": Health(is_writable=False, is_durable=True, is_storage_full=True)}, ["log.storage_full"]),
        ({"lag": 5}, []),
        ({"lag": 6}, ["node.dispatcher_lag"]),
        ({"problems": ["/sync: failed"]}, ["node.listener_failed"]),
        ({"problems": ["x"], "has_stopped": True}, ["node.dispatcher_stopped"]),
        ({"phase": "stopping", "lag": 10}, ["node.stopping", "node.dispatcher_lag"]),
    ],
)
def test_reasons(state: dict[str, Any], reasons: list[str]) -> None:
    """Ready means no critical component with a reason against it; several reasons are all named."""
    assert codes(**state) == (not reasons, reasons, [])


def test_warnings_do_not_make_it_unready() -> None:
    """A log that is not durable is told and served all the same."""
    assert codes(Health(is_writable=True, is_durable=False)) == (True, [], ["log.not_durable"])


def reporting(clock: VirtualClock) -> tuple[HealthManager, list[Announcement]]:
    health = HealthManager(clock)
    told: list[Announcement] = []
    health.announcer.listener = told.append
    health.register("event_manager", is_critical=True, timeout_s=10.0)
    return health, told


async def test_a_component_that_falls_silent_is_unknown_then_degraded_then_failed() -> None:
    """A component that reports is not ready before its first report, and loses what it said step by step with each timeout."""
    clock = VirtualClock()
    health, _ = reporting(clock)
    assert not health.readiness().is_ready

    health.report("event_manager", "healthy")
    found = [health.snapshot().readiness]
    states = []
    for _ in range(4):
        states.append(health.snapshot().components["event_manager"].state)
        await clock.advance(10.0)
        found.append(health.snapshot().readiness)

    assert states == ["healthy", "unknown", "degraded", "failed"]
    assert found == ["ready", "not_ready", "not_ready", "not_ready", "not_ready"]


def test_each_change_of_a_component_is_told_once() -> None:
    """A report that changes nothing is not told; one that does is, and a critical component's trouble also as a matter of security."""
    health, told = reporting(VirtualClock())

    for _ in range(3):
        health.report("event_manager", "degraded", SATURATED)
    health.report("event_manager", "healthy")

    assert [each.event_type for each in told] == [
        "system.health_state_changed",
        "security.health_degraded",
        "system.health_state_changed",
    ]
    assert told[0].payload == {
        "component": "event_manager",
        "state": "degraded",
        "reasons": ("event.queue_saturated",),
        "previous_state": "unknown",
        "health_seq": 1,
    }
    assert told[2].payload["previous_state"] == "degraded"
    assert health.snapshot().last_transition == ("event_manager", "degraded", "healthy")


@pytest.mark.parametrize(
    ("component", "state", "reasons"),
    [
        ("nobody", "healthy", ()),
        ("event_manager", "healthy", SATURATED),
        ("event_manager", "failed", ()),
        ("event_manager", "unknown", SATURATED),
    ],
)
def test_a_signal_that_makes_no_sense_is_rejected_and_counted(component: str, state: Any, reasons: Any) -> None:
    """A signal of an unknown component, or one whose reasons do not fit its state, changes nothing."""
    health, _ = reporting(VirtualClock())

    with pytest.raises(InvalidSignal):
        health.report(component, state, reasons)

    assert health.rejected_count == 1
    assert health.snapshot().components["event_manager"].state == "unknown"


def test_a_failed_component_that_makes_no_progress_is_dead() -> None:
    """Liveness is the component's own word that its loop no longer runs."""
    health, _ = reporting(VirtualClock())

    health.report("event_manager", "failed", (Reason("event.engine_failed", "x"),), {"alive": False})

    assert health.snapshot().liveness == "dead"
