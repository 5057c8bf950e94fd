"""When a failed event is tried again."""

from __future__ import annotations

import random

import pytest

from tidings.bus.retry import delay_cap_s, next_retry_s
from tidings.bus.settings import Backoff, SubscriptionSettings
from tidings.bus.subscription import settings_of


@pytest.mark.req("F59")
def test_the_defaults_are_the_documents() -> None:
    """Half a second, doubled each time, at most thirty seconds, five retries."""
    assert Backoff() == Backoff(base_s=0.5, mult=2.0, max_s=30.0, retries_max=5)
    assert SubscriptionSettings().backoff == settings_of(None, {}).backoff == Backoff()


@pytest.mark.req("F57")
def test_caps_grow_up_to_the_limit() -> None:
    """The cap after the i-th failure is base * mult ** i, from 0, and never more than the limit."""
    assert [delay_cap_s(Backoff(), failures) for failures in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    ("backoff", "failures", "cap"),
    [
        (Backoff(base_s=0.001, mult=2000.0), 2, 2.0),
        (Backoff(base_s=0.0), 5000, 0.0),
        (Backoff(base_s=1.0, mult=1.0), 5000, 1.0),
        (Backoff(base_s=1.0, mult=1e300), 3, 30.0),
        (Backoff(), 100_000, 30.0),
        (Backoff(base_s=5.0, max_s=0.0), 1, 0.0),
    ],
)
def test_extreme_backoffs_have_the_cap_of_the_formula(backoff: Backoff, failures: int, cap: float) -> None:
    """A steep factor, a base of nothing and a very long row of failures all follow the formula."""
    assert delay_cap_s(backoff, failures) == pytest.approx(cap)


@pytest.mark.req("F58", "F126")
def test_the_delay_is_drawn_evenly_from_zero_to_the_cap() -> None:
    """Full jitter: the delays fill the whole range, and their mean is half the cap."""
    rng = random.Random(1)
    retries = [next_retry_s(Backoff(), 3, rng) for _ in range(4000)]
    delays = [delay_s for delay_s in retries if delay_s is not None]

    assert len(delays) == 4000
    assert 0 <= min(delays) < 0.01
    assert 1.99 < max(delays) <= 2
    assert sum(delays) / len(delays) == pytest.approx(1, abs=0.03)


@pytest.mark.req("F60")
def test_after_the_last_retry_there_is_none() -> None:
    """Five retries may follow the first delivery; the sixth failure is the last. With none allowed, the first is."""
    rng = random.Random(1)

    assert [next_retry_s(Backoff(), failures, rng) is not None for failures in range(1, 8)] == [True] * 5 + [False] * 2
    assert next_retry_s(Backoff(retries_max=0), 1, rng) is None


def test_a_handlers_own_delay_is_taken_as_it_is() -> None:
    """A delay that the handler names is neither drawn nor capped, but never negative."""
    rng = random.Random(1)

    assert next_retry_s(Backoff(), 1, rng, 90.0) == 90.0
    assert next_retry_s(Backoff(), 1, rng, -1.0) == 0.0
