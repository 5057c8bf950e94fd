"""
Which consumer gets a cognitive event: health rules, one score, five strategies, and when a group should grow.

Plain values in, names out. ``Router`` remembers only whose turn it is and which session sticks to whom, bounded.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from .errors import NoHealthyConsumer
from .ports import unit_hash
from .taxonomy import RoutingStrategy

CONCURRENT_MAX: Final = 10
QUEUE_FULL: Final = 100
SUCCESS_RATE_MIN: Final = 0.8
LOAD_MAX: Final = 0.95
LATENCY_MS_MAX: Final = 5000.0
_SESSIONS_MAX: Final = 10_000


class ConsumerState(enum.StrEnum):
    """How a consumer is, by the failures it had in a row."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"
    FAILED = "failed"


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one consumer."""

    consumer_id: str
    concurrent: int = 0
    queue_depth: int = 0
    success_rate: float = 1.0
    latency_ms: float = 0.0
    consecutive_failures: int = 0
    heartbeat_s: float = 0.0
    specialised_in: frozenset[str] = frozenset()

    @property
    def load(self) -> float:
        """How busy it is, in 0..1."""
        return consumer_load(self.concurrent, self.queue_depth)

    @property
    def state(self) -> ConsumerState:
        """Its state by consecutive failures: 1 degraded, 3 unhealthy, 5 failed."""
        for state, failures in _STATES:
            if self.consecutive_failures >= failures:
                return state
        return ConsumerState.HEALTHY

    def is_healthy(self, now_s: float, heartbeat_s_max: float = 60.0) -> bool:
        """Whether it may be given work: succeeding, not overloaded, quick, and heard of lately."""
        return (
            self.success_rate >= SUCCESS_RATE_MIN
            and self.load < LOAD_MAX
            and self.latency_ms < LATENCY_MS_MAX
            and self.state in (ConsumerState.HEALTHY, ConsumerState.DEGRADED)
            and now_s - self.heartbeat_s <= heartbeat_s_max
        )


_STATES: Final = ((ConsumerState.FAILED, 5), (ConsumerState.UNHEALTHY, 3), (ConsumerState.DEGRADED, 1))


def consumer_load(concurrent: int, queue_depth: int) -> float:
    """The mean of how full its hands and its queue are."""
    return (min(1.0, concurrent / CONCURRENT_MAX) + min(1.0, queue_depth / QUEUE_FULL)) / 2


def score(consumer: Consumer, event_type: str, priority: int) -> float:
    """How well a consumer suits an event; more is better."""
    base = (1 - consumer.load) * consumer.success_rate**2
    if event_type in consumer.specialised_in:
        base += 0.2
    return base * min(2.0, priority / 5) - max(0.0, (consumer.latency_ms - 1000) / 10_000)


class Router:
    """Chooses consumers by a strategy."""

    def __init__(self, strategy: RoutingStrategy, *, heartbeat_s_max: float = 60.0) -> None:
        self._strategy = strategy
        self._heartbeat_s_max = heartbeat_s_max
        self._last: str | None = None
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def route(
        self, consumers: Sequence[Consumer], *, event_type: str, priority: int, session_id: str | None, now_s: float
    ) -> list[str]:
        """
        The ids of the consumers that get the event.

        Raises:
            NoHealthyConsumer: None of them may be given work.
        """
        healthy = sorted(
            (each for each in consumers if each.is_healthy(now_s, self._heartbeat_s_max)),
            key=lambda each: each.consumer_id,
        )
        if not healthy:
            raise NoHealthyConsumer(event_type, len(consumers))
        match self._strategy:
            case RoutingStrategy.BROADCAST:
                return [each.consumer_id for each in healthy]
            case RoutingStrategy.ROUND_ROBIN:
                return [self._next(healthy)]
            case RoutingStrategy.PRIORITY:
                return [max(healthy, key=lambda each: score(each, event_type, priority)).consumer_id]
            case RoutingStrategy.COGNITIVE_LOAD:
                return [min(healthy, key=lambda each: each.load).consumer_id]
            case RoutingStrategy.STICKY_SESSION:
                return [self._next(healthy) if session_id is None else self._stuck(healthy, session_id)]

    def _next(self, healthy: list[Consumer]) -> str:
        # By name and not by index: the list may have changed since the last turn.
        ids = [each.consumer_id for each in healthy]
        self._last = next((each for each in ids if self._last is None or each > self._last), ids[0])
        return self._last

    def _stuck(self, healthy: list[Consumer], session_id: str) -> str:
        ids = {each.consumer_id for each in healthy}
        chosen = self._sessions.get(session_id)
        if chosen not in ids:
            # The highest hash wins: when a consumer leaves, only its own sessions move.
            chosen = max(ids, key=lambda each: (unit_hash(f"{session_id}|{each}"), each))
        assert chosen is not None
        self._sessions[session_id] = chosen
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return chosen


class ScalingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How large a group of consumers may be, and when it changes."""

    consumers_min: Annotated[int, msgspec.Meta(ge=1)] = 1
    consumers_max: Annotated[int, msgspec.Meta(ge=1)] = 10
    consumers_target: Annotated[int, msgspec.Meta(ge=1)] = 3
    queue_up: float = 50.0
    latency_ms_up: float = 2000.0
    queue_down: int = 10
    load_down: float = 0.3
    cooldown_s: float = 60.0


def scale_step(
    consumers: Sequence[Consumer], settings: ScalingSettings, *, now_s: float, scaled_s: float | None
) -> int:
    """+1, -1 or 0: how the group's size should change. An idle group shrinks to its target, and to no less."""
    count = len(consumers)
    if count < settings.consumers_min:
        return 1
    if scaled_s is not None and now_s - scaled_s < settings.cooldown_s:
        return 0
    queue_mean = sum(each.queue_depth for each in consumers) / count
    latency_mean = sum(each.latency_ms for each in consumers) / count
    if queue_mean > settings.queue_up or latency_mean > settings.latency_ms_up:
        return 1 if count < settings.consumers_max else 0
    is_idle = all(each.queue_depth <= settings.queue_down and each.load <= settings.load_down for each in consumers)
    floor = max(settings.consumers_min, min(settings.consumers_target, settings.consumers_max))
    return -1 if is_idle and count > floor else 0
