"""Consumers are chosen by health, score and strategy; groups grow and shrink within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.cognition.errors import NoHealthyConsumer
from tidings.cognition.routing import (
    Consumer,
    ConsumerState,
    Router,
    ScalingSettings,
    consumer_load,
    scale_step,
    score,
)
from tidings.cognition.taxonomy import RoutingStrategy

A, B, C = (Consumer(consumer_id=name) for name in "abc")


def choose(router: Router, consumers: list[Consumer], session_id: str | None = None) -> list[str]:
    return router.route(consumers, event_type="x", priority=5, session_id=session_id, now_s=0.0)


def test_the_score_follows_its_formula() -> None:
    """((1 - load) * success^2 + 0.2) * min(2, priority / 5) - latency's share."""
    consumer = Consumer(
        consumer_id="a",
        concurrent=2,
        queue_depth=40,
        success_rate=0.9,
        latency_ms=3000,
        specialised_in=frozenset({"x"}),
    )

    assert consumer_load(2, 40) == pytest.approx(0.3)
    assert score(consumer, "x", 5) == pytest.approx(0.7 * 0.81 + 0.2 - 0.2)
    assert score(consumer, "y", 10) == pytest.approx(0.7 * 0.81 * 2 - 0.2)


@given(st.integers(0, 100), st.integers(0, 1000), st.integers(0, 1000))
def test_more_load_never_scores_better(concurrent: int, queue: int, more: int) -> None:
    """A longer queue cannot help a consumer."""
    one, other = (Consumer(consumer_id="a", concurrent=concurrent, queue_depth=each) for each in (queue, queue + more))

    assert score(other, "x", 5) <= score(one, "x", 5)
    assert 0 <= other.load <= 1


@pytest.mark.parametrize(
    ("consumer", "is_healthy"),
    [
        (A, True),
        (Consumer(consumer_id="a", success_rate=0.79), False),
        (Consumer(consumer_id="a", concurrent=10, queue_depth=90), False),
        (Consumer(consumer_id="a", latency_ms=5000), False),
        (Consumer(consumer_id="a", consecutive_failures=2), True),
        (Consumer(consumer_id="a", consecutive_failures=3), False),
        (Consumer(consumer_id="a", heartbeat_s=-61), False),
    ],
)
def test_health_has_its_limits(consumer: Consumer, is_healthy: bool) -> None:
    """Success, load, latency, failures in a row, and a heartbeat."""
    assert consumer.is_healthy(0.0) is is_healthy


def test_states_go_by_failures_in_a_row() -> None:
    """1 degraded, 3 unhealthy, 5 failed."""
    states = [Consumer(consumer_id="a", consecutive_failures=count).state for count in (0, 1, 2, 3, 4, 5, 9)]

    healthy, degraded, unhealthy, failed = ConsumerState
    assert states == [healthy, degraded, degraded, unhealthy, unhealthy, failed, failed]


def test_each_strategy_chooses_its_way() -> None:
    """All, in turn, the best score, the least load."""
    busy = Consumer(consumer_id="a", queue_depth=50, specialised_in=frozenset({"x"}))

    assert choose(Router(RoutingStrategy.BROADCAST), [B, A]) == ["a", "b"]
    turns = Router(RoutingStrategy.ROUND_ROBIN)
    assert [choose(turns, [A, B, C])[0] for _ in range(4)] == ["a", "b", "c", "a"]
    assert choose(turns, [A, C]) == ["c"]
    assert choose(Router(RoutingStrategy.PRIORITY), [busy, Consumer(consumer_id="b", queue_depth=60)]) == ["a"]
    assert choose(Router(RoutingStrategy.COGNITIVE_LOAD), [busy, B]) == ["b"]


def test_a_session_sticks_and_moves_only_when_it_must() -> None:
    """The same consumer while it is healthy; when one leaves only its own sessions move, and they do not move back."""
    router = Router(RoutingStrategy.STICKY_SESSION)
    sessions = [f"s{number}" for number in range(50)]
    first = {each: choose(router, [A, B, C], each)[0] for each in sessions}

    assert {each: choose(router, [C, B, A], each)[0] for each in sessions} == first
    assert set(first.values()) == {"a", "b", "c"}
    after = {each: choose(router, [A, B], each)[0] for each in sessions}
    assert all(after[each] == first[each] for each in sessions if first[each] != "c")
    assert {each: choose(router, [A, B, C], each)[0] for each in sessions} == after


def test_without_a_healthy_consumer_nobody_is_chosen() -> None:
    """It is an error that may pass."""
    with pytest.raises(NoHealthyConsumer) as caught:
        choose(Router(RoutingStrategy.BROADCAST), [Consumer(consumer_id="a", success_rate=0.1)])
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("consumers", "scaled_s", "step"),
    [
        ([], None, 1),
        ([Consumer(consumer_id="a", queue_depth=51)], None, 1),
        ([Consumer(consumer_id="a", queue_depth=51)], -59.0, 0),
        ([Consumer(consumer_id="a", latency_ms=2001)], -60.0, 1),
        ([Consumer(consumer_id=str(each), queue_depth=99) for each in range(10)], None, 0),
        ([Consumer(consumer_id=str(each)) for each in range(4)], None, -1),
        ([Consumer(consumer_id=str(each)) for each in range(3)], None, 0),
        ([Consumer(consumer_id=str(each), queue_depth=11 * (each == 0)) for each in range(4)], None, 0),
    ],
)
def test_a_group_grows_and_shrinks_within_bounds(consumers: list[Consumer], scaled_s: float | None, step: int) -> None:
    """Up under queues or latency, down when all are idle, never past its bounds nor within the cool-down."""
    assert scale_step(consumers, ScalingSettings(), now_s=0.0, scaled_s=scaled_s) == step
