"""Failed events are tried again by their type's plan; overload holds a fair share back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cognition.support import BusDown
from tidings.cognition.errors import InvalidRequest
from tidings.cognition.resilience import (
    FailureCategory,
    Level,
    PoisonWatch,
    PressureSample,
    RetryPlan,
    RetryStrategy,
    categorise,
    is_throttled,
    level_of,
    plan_of,
    retry_delay_s,
)
from tidings.core.errors import InvalidPayload

STEADY = random.Random(1)


def delays(plan: RetryPlan, category: FailureCategory = FailureCategory.PROCESSING) -> list[float | None]:
    bare = RetryPlan(
        strategy=plan.strategy,
        attempts_max=plan.attempts_max,
        delay_s=plan.delay_s,
        delay_s_max=plan.delay_s_max,
        jitter=0,
    )
    return [retry_delay_s(bare, failures, category, STEADY) for failures in range(1, plan.attempts_max + 1)]


@pytest.mark.parametrize(
    ("event_type", "expected"),
    [
        ("cognitive.memory.write.failed", [1.0, 2.0, 4.0, 8.0, None]),
        ("cognitive.recall.bundle.failed", [2.0, 4.0, None]),
        ("cognitive.attention.gate.defer", [0.5, None]),
        ("cognitive.learning.outcome.received", [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, None]),
        ("SOMETHING_ELSE", [1.0, 2.0, None]),
    ],
)
def test_each_type_has_its_plan(event_type: str, expected: list[float | None]) -> None:
    """Attempts and delays by type, before the jitter."""
    assert delays(plan_of(event_type)) == expected


def test_strategies_grow_their_way() -> None:
    """At once, by steps, following the breaker, or not at all."""

    def plan(strategy: RetryStrategy) -> RetryPlan:
        return RetryPlan(strategy=strategy, attempts_max=4)

    assert delays(plan(RetryStrategy.IMMEDIATE)) == [0.0, 0.0, 0.0, None]
    assert delays(plan(RetryStrategy.LINEAR)) == [1.0, 2.0, 3.0, None]
    assert delays(plan(RetryStrategy.CIRCUIT_BREAKER)) == [30.0, 30.0, 30.0, None]
    assert delays(plan(RetryStrategy.NO_RETRY)) == [None] * 4


def test_the_adaptive_strategy_looks_at_the_failure() -> None:
    """Half for a passing one, double for want of resources, double again when retries rarely help."""
    plan = RetryPlan(strategy=RetryStrategy.ADAPTIVE, jitter=0)

    assert retry_delay_s(plan, 1, FailureCategory.TRANSIENT, STEADY) == 0.5
    assert retry_delay_s(plan, 1, FailureCategory.RESOURCE, STEADY) == 2.0
    assert retry_delay_s(plan, 1, FailureCategory.RESOURCE, STEADY, retry_success_rate=0.49) == 4.0


@given(st.integers(1, 10_000), st.integers(0, 2**32), st.sampled_from(list(RetryStrategy)))
def test_delays_are_bounded_and_jittered_by_a_tenth(failures: int, seed: int, strategy: RetryStrategy) -> None:
    """Never above the cap, and the same seed gives the same delay."""
    plan = RetryPlan(strategy=strategy, attempts_max=20_000)
    one, other = (retry_delay_s(plan, failures, FailureCategory.SYSTEM, random.Random(seed)) for _ in range(2))

    assert one == other
    assert one is None or 0 <= one <= 300


def test_what_cannot_get_better_is_not_tried_again() -> None:
    """Validation failures and poison are given up at once."""
    assert retry_delay_s(RetryPlan(), 1, FailureCategory.VALIDATION, STEADY) is None
    assert retry_delay_s(RetryPlan(), 1, FailureCategory.POISON, STEADY) is None


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (InvalidPayload("payload", "bad"), FailureCategory.VALIDATION),
        (InvalidRequest("payload.content", "bad"), FailureCategory.VALIDATION),
        (ValueError(), FailureCategory.VALIDATION),
        (TimeoutError(), FailureCategory.TRANSIENT),
        (ConnectionResetError(), FailureCategory.TRANSIENT),
        (OSError(28, "full"), FailureCategory.RESOURCE),
        (BusDown(), FailureCategory.TRANSIENT),
        (ZeroDivisionError(), FailureCategory.PROCESSING),
    ],
)
def test_errors_fall_into_categories(error: Exception, category: FailureCategory) -> None:
    """By what they are and whether they say that trying again helps."""
    assert categorise(error) is category


def test_five_similar_failures_in_a_day_are_poison() -> None:
    """Of the same type, error and component; older ones do not count, and the memory is bounded."""
    watch = PoisonWatch(kinds_max=2)
    day_s = 86_400.0

    assert [watch.is_poison("t", "e", "c", float(at)) for at in range(5)] == [False] * 4 + [True]
    assert not watch.is_poison("t", "e", "other", 5.0)
    assert not watch.is_poison("t", "e", "c", day_s + 2)
    for number in range(10):
        watch.is_poison("t", "e", str(number), 0.0)
    assert not watch.is_poison("t", "e", "c", day_s + 3)


@pytest.mark.parametrize(
    ("sample", "loads", "level"),
    [
        (PressureSample(), (), Level.NONE),
        (PressureSample(load=0.56), (), Level.LOW),
        (PressureSample(queue_depth=100), (), Level.MEDIUM),
        (PressureSample(load=0.7), (0.5, 0.5, 0.56, 0.56), Level.HIGH),
        (PressureSample(load=0.7), (0.5, 0.5, 0.55, 0.55), Level.MEDIUM),
        (PressureSample(latency_s_p95=3.0), (), Level.CRITICAL),
        (PressureSample(load=0.95), (), Level.EMERGENCY),
        (PressureSample(queue_depth=1000), (), Level.EMERGENCY),
    ],
)
def test_pressure_has_levels(sample: PressureSample, loads: tuple[float, ...], level: Level) -> None:
    """By queue, latency and load; rising makes a warning weigh more."""
    assert level_of(sample, loads) is level


@pytest.mark.parametrize(("level", "priority"), [(Level.HIGH, 1), (Level.EMERGENCY, 1), (Level.EMERGENCY, 10)])
def test_the_share_held_back_is_the_levels(level: Level, priority: int) -> None:
    """Over many traces it comes to (1 - rate) * (1 - 0.5 * priority / 10)."""
    held = sum(is_throttled(f"trace-{number}", level, priority) for number in range(5000)) / 5000

    assert held == pytest.approx((1 - level.rate) * (1 - 0.05 * priority), abs=0.03)


@given(st.text(), st.sampled_from(list(Level)), st.integers(1, 9))
def test_throttling_repeats_itself_and_spares_priority(trace_id: str, level: Level, priority: int) -> None:
    """The same answer every time; what passes at one priority passes at a higher one; without pressure all pass."""
    held = is_throttled(trace_id, level, priority)

    assert held == is_throttled(trace_id, level, priority)
    assert held or not is_throttled(trace_id, level, priority + 1)
    assert not is_throttled(trace_id, Level.NONE, priority)
