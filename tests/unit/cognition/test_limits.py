"""Rates and breakers hold to their numbers at the times they are told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidings.cognition.resilience import (
    BreakerSettings,
    BreakerState,
    CircuitBreaker,
    RateSettings,
    TokenBucket,
    TokenBuckets,
)


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    """Twenty at once, then ten a second."""
    bucket = TokenBucket(RateSettings(per_second=10, burst=20), 0.0)

    assert sum(bucket.take(0.0) for _ in range(100)) == 20
    assert sum(bucket.take(0.5) for _ in range(100)) == 5
    assert sum(bucket.take(1000.0) for _ in range(100)) == 20


@given(st.lists(st.floats(0, 100), max_size=200))
def test_a_bucket_never_exceeds_burst_plus_rate(times: list[float]) -> None:
    """Over any stretch from its start it gives at most burst + rate * time, whatever the clock does."""
    bucket = TokenBucket(RateSettings(per_second=2, burst=5), 0.0)
    given_out = sum(bucket.take(now_s) for now_s in times)

    assert given_out <= 5 + 2 * max(times, default=0.0) + 1e-6


def test_keys_have_buckets_of_their_own_and_are_bounded() -> None:
    """One actor's haste does not slow another, and old keys are forgotten."""
    buckets = TokenBuckets(RateSettings(per_second=1, burst=1), keys_max=3)

    assert buckets.take(("a", "s"), 0.0)
    assert not buckets.take(("a", "s"), 0.0)
    assert buckets.take(("b", "s"), 0.0)
    for number in range(100):
        buckets.take((str(number), "s"), 0.0)
    assert len(buckets) == 3


def test_a_breaker_opens_probes_and_closes() -> None:
    """Five failures open it for 30 s; three good probes close it, one bad one opens it again."""
    breaker = CircuitBreaker(BreakerSettings())
    for _ in range(4):
        breaker.record(False, 0.0)
    assert breaker.allow(0.0)
    breaker.record(False, 0.0)

    assert breaker.state(29.9) is BreakerState.OPEN
    assert not breaker.allow(29.9)
    assert [breaker.allow(30.0) for _ in range(4)] == [True, True, True, False]
    breaker.record(False, 31.0)
    assert not breaker.allow(60.9)
    assert [breaker.allow(61.0) for _ in range(3)] == [True] * 3
    for _ in range(3):
        breaker.record(True, 61.0)
    assert breaker.state(61.0) is BreakerState.CLOSED


def test_a_success_begins_the_count_anew() -> None:
    """Only failures in a row open it."""
    breaker = CircuitBreaker(BreakerSettings())
    for _ in range(3):
        for is_ok in (False, False, False, False, True):
            breaker.record(is_ok, 0.0)

    assert breaker.state(0.0) is BreakerState.CLOSED


def test_probes_that_never_report_do_not_hold_the_breaker() -> None:
    """After another timeout new probes are let through."""
    breaker = CircuitBreaker(BreakerSettings(failures_max=1, probes=1, open_s=10))
    breaker.record(False, 0.0)

    assert breaker.allow(10.0)
    assert not breaker.allow(15.0)
    assert breaker.allow(20.0)


def test_a_breaker_may_go_by_share() -> None:
    """A quarter of the calls of the last 30 s failing opens it; older failures do not count."""
    breaker = CircuitBreaker(BreakerSettings(failure_share=0.25, window_s=30, open_s=15))
    for _ in range(4):
        breaker.record(False, -100.0)
    for _ in range(9):
        breaker.record(True, 0.0)
    breaker.record(False, 0.0)
    breaker.record(False, 0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    breaker.record(False, 0.0)

    assert breaker.state(0.0) is BreakerState.OPEN
    assert breaker.state(15.0) is BreakerState.HALF_OPEN
