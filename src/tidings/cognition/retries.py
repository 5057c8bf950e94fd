"""
What to do with a cognitive event that failed: try again when, or give up why.

By type and by kind of failure. Chance (the jitter) comes in as an argument.
"""

from __future__ import annotations

import enum
import random
from collections import OrderedDict, deque
from typing import Annotated, Final

import msgspec

from tidings.core.errors import InvalidEvent, TidingsError

from .errors import InvalidRequest
from .taxonomy import CognitiveEventType

__all__ = ["FailureCategory", "PoisonWatch", "RetryPlan", "RetryStrategy", "categorise", "plan_of", "retry_delay_s"]


class RetryStrategy(enum.StrEnum):
    """How delays grow."""

    IMMEDIATE = "immediate"
    EXPONENTIAL = "exponential"
    LINEAR = "linear"
    ADAPTIVE = "adaptive"
    CIRCUIT_BREAKER = "circuit_breaker"
    NO_RETRY = "no_retry"


class FailureCategory(enum.StrEnum):
    """Why something failed."""

    TRANSIENT = "transient"
    RESOURCE = "resource"
    VALIDATION = "validation"
    PROCESSING = "processing"
    COORDINATION = "coordination"
    POISON = "poison"
    SYSTEM = "system"

    @property
    def is_retried(self) -> bool:
        """Whether trying again can help."""
        return self not in (FailureCategory.VALIDATION, FailureCategory.POISON)


class RetryPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often and when."""

    strategy: RetryStrategy = RetryStrategy.EXPONENTIAL
    attempts_max: Annotated[int, msgspec.Meta(ge=1)] = 3
    delay_s: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    delay_s_max: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    multiplier: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    jitter: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1


_DEFAULT: Final = RetryPlan()
_BY_FAMILY: Final = {
    "memory": RetryPlan(attempts_max=5, delay_s=1.0),
    "recall": RetryPlan(strategy=RetryStrategy.ADAPTIVE, attempts_max=3, delay_s=2.0),
    "attention": RetryPlan(strategy=RetryStrategy.LINEAR, attempts_max=2, delay_s=0.5),
}
_BY_TYPE: Final = {CognitiveEventType.OUTCOME_RECEIVED: RetryPlan(attempts_max=7, delay_s=0.5)}


def plan_of(event_type: str) -> RetryPlan:
    """The plan of an event type; types outside the taxonomy have the default one."""
    if event_type not in set(CognitiveEventType):
        return _DEFAULT
    kind = CognitiveEventType(event_type)
    return _BY_TYPE.get(kind) or _BY_FAMILY.get(kind.family, _DEFAULT)


def categorise(error: BaseException) -> FailureCategory:
    """The category of an exception."""
    if isinstance(error, InvalidEvent | InvalidRequest | ValueError | TypeError | LookupError):
        return FailureCategory.VALIDATION
    if isinstance(error, TimeoutError | ConnectionError):
        return FailureCategory.TRANSIENT
    if isinstance(error, MemoryError | OSError):
        return FailureCategory.RESOURCE
    if isinstance(error, TidingsError):
        return FailureCategory.TRANSIENT if error.retryable else FailureCategory.PROCESSING
    return FailureCategory.PROCESSING


def retry_delay_s(
    plan: RetryPlan,
    failures: int,
    category: FailureCategory,
    rng: random.Random,
    *,
    retry_success_rate: float = 1.0,
    breaker_open_s: float = 30.0,
) -> float | None:
    """
    When to try again after ``failures`` failures (at least 1), in seconds; ``None`` to give up.

    Args:
        plan: The type's plan.
        failures: How often it failed so far.
        category: Validation failures and poison are given up at once.
        rng: For the jitter.
        retry_success_rate: How often retries have helped lately; below a half, the adaptive strategy waits longer.
        breaker_open_s: What a plan that follows a circuit breaker waits for.
    """
    if plan.strategy is RetryStrategy.NO_RETRY or not category.is_retried or failures >= plan.attempts_max:
        return None
    # 2**64 seconds are past any cap; a larger exponent would only overflow.
    grown = plan.delay_s * plan.multiplier ** min(failures - 1, 64)
    match plan.strategy:
        case RetryStrategy.IMMEDIATE:
            return 0.0
        case RetryStrategy.LINEAR:
            delay_s = plan.delay_s * failures
        case RetryStrategy.EXPONENTIAL:
            delay_s = grown
        case RetryStrategy.ADAPTIVE:
            factor = {FailureCategory.TRANSIENT: 0.5, FailureCategory.RESOURCE: 2.0}.get(category, 1.0)
            delay_s = grown * factor * (2.0 if retry_success_rate < 0.5 else 1.0)
        case RetryStrategy.CIRCUIT_BREAKER:
            delay_s = max(grown, breaker_open_s)
    jittered = min(delay_s, plan.delay_s_max) * rng.uniform(1 - plan.jitter, 1 + plan.jitter)
    return min(jittered, plan.delay_s_max)


class PoisonWatch:
    """
    Tells a poison event from a run of bad luck: five similar failures within a day.

    Similar means the same event type, error type and component. Remembers the kinds of failure seen last, bounded.
    """

    def __init__(self, *, failures: int = 5, window_s: float = 86_400.0, kinds_max: int = 1000) -> None:
        self._failures = failures
        self._window_s = window_s
        self._kinds_max = kinds_max
        self._seen: OrderedDict[tuple[str, str, str], deque[float]] = OrderedDict()

    def is_poison(self, event_type: str, error_type: str, component: str, now_s: float) -> bool:
        """Note a failure; say whether it makes a poison of its kind."""
        key = (event_type, error_type, component)
        times = self._seen.setdefault(key, deque(maxlen=self._failures))
        self._seen.move_to_end(key)
        if len(self._seen) > self._kinds_max:
            self._seen.popitem(last=False)
        times.append(now_s)
        return len(times) == self._failures and now_s - times[0] <= self._window_s
