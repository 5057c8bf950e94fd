"""
Holding back and trying again: rate limits, circuit breakers, back-pressure levels, and retries by kind of failure.

Nothing here reads a clock or draws a random number: the caller says what time it is and brings the jitter.

Whether an event is held back under pressure follows from its trace id and the level alone, so that all events of one trace
pass or wait together, and a replay holds back what the first run did.
"""

from __future__ import annotations

import enum
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from tidings.core.errors import InvalidEvent, TidingsError

from .errors import InvalidRequest
from .ports import unit_hash
from .taxonomy import CognitiveEventType

_OUTCOMES_MAX: Final = 10_000


class RateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """So many a second on average, so many at once."""

    per_second: Annotated[float, msgspec.Meta(gt=0)]
    burst: Annotated[int, msgspec.Meta(ge=1)]


class TokenBucket:
    """Holds up to ``burst`` tokens and gains ``per_second``; a full one at first."""

    __slots__ = ("_at_s", "_settings", "_tokens", "_turn_s")

    def __init__(self, settings: RateSettings, now_s: float) -> None:
        self._settings = settings
        self._tokens = float(settings.burst)
        self._at_s = now_s
        self._turn_s = now_s

    def take(self, now_s: float) -> bool:
        """Take a token if there is one."""
        # A clock that went back gives nothing, and takes nothing.
        gained = max(0.0, now_s - self._at_s) * self._settings.per_second
        self._tokens = min(float(self._settings.burst), self._tokens + gained)
        self._at_s = max(self._at_s, now_s)
        # The sum of many small gains may fall short of a whole token by a rounding error.
        if self._tokens < 1.0 - 1e-9:
            return False
        self._tokens = max(0.0, self._tokens - 1.0)
        return True

    def turn(self, earliest_s: float, latest_s: float) -> float:
        """Return when to ask again after a refusal: successive turns are as far apart as tokens are gained."""
        turn_s = max(earliest_s, self._turn_s)
        if turn_s > latest_s:
            turn_s = earliest_s
        self._turn_s = turn_s + 1.0 / self._settings.per_second
        return turn_s


class TokenBuckets:
    """One bucket a key, for the ``keys_max`` keys seen last; a key that returns after that finds a full bucket."""

    __slots__ = ("_buckets", "_keys_max", "_settings")

    def __init__(self, settings: RateSettings, keys_max: int = 10_000) -> None:
        self._settings = settings
        self._keys_max = keys_max
        self._buckets: OrderedDict[tuple[str, ...], TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: tuple[str, ...], now_s: float) -> bool:
        """Take a token of ``key``'s."""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = TokenBucket(self._settings, now_s)
            if len(self._buckets) > self._keys_max:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return bucket.take(now_s)

    def turn(self, key: tuple[str, ...], earliest_s: float, latest_s: float) -> float:
        """Return when ``key``, which was just refused a token, should ask again; see ``TokenBucket.turn``."""
        return self._buckets[key].turn(earliest_s, latest_s)


class BreakerState(enum.StrEnum):
    """Whether calls pass."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"

    @property
    def level(self) -> int:
        """0 closed, 1 half open, 2 open: what the metric shows."""
        return list(BreakerState).index(self)


class BreakerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    When to open, and when to try again.

    Without ``failure_share`` the breaker opens after ``failures_max`` failures in a row; with it, when that share of
    the calls within ``window_s`` failed, of at least ``failures_max`` calls.
    """

    failures_max: Annotated[int, msgspec.Meta(ge=1)] = 5
    open_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    probes: Annotated[int, msgspec.Meta(ge=1)] = 3
    failure_share: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    window_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0


class CircuitBreaker:
    """Closed until calls fail; then open for a while; then lets probes through and closes when all succeed."""

    __slots__ = ("_failures", "_opened_s", "_outcomes", "_probes_ok", "_probes_out", "_settings")

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._opened_s: float | None = None
        self._probes_out = 0
        self._probes_ok = 0
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=_OUTCOMES_MAX)

    def state(self, now_s: float) -> BreakerState:
        """The state at ``now_s``."""
        if self._opened_s is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now_s - self._opened_s >= self._settings.open_s else BreakerState.OPEN

    def allow(self, now_s: float) -> bool:
        """Whether a call may pass now; half open, it counts as a probe."""
        match self.state(now_s):
            case BreakerState.CLOSED:
                return True
            case BreakerState.OPEN:
                return False
            case BreakerState.HALF_OPEN:
                # A probe whose outcome is never recorded would keep the breaker half open for ever: after another
                # ``open_s`` the probes are taken as lost and handed out anew.
                assert self._opened_s is not None
                if self._probes_out >= self._settings.probes:
                    if now_s - self._opened_s < 2 * self._settings.open_s:
                        return False
                    self._opened_s = now_s - self._settings.open_s
                    self._probes_out = self._probes_ok = 0
                self._probes_out += 1
                return True

    def record(self, is_ok: bool, now_s: float) -> None:
        """Tell how a call went."""
        state = self.state(now_s)
        if state is BreakerState.HALF_OPEN:
            if not is_ok:
                self._open(now_s)
                return
            self._probes_ok += 1
            if self._probes_ok >= self._settings.probes:
                self._opened_s = None
                self._failures = 0
                self._outcomes.clear()
            return
        if state is BreakerState.OPEN:
            return  # a call that began before it opened
        self._failures = 0 if is_ok else self._failures + 1
        self._outcomes.append((now_s, is_ok))
        if not is_ok and self._is_too_many(now_s):
            self._open(now_s)

    def _is_too_many(self, now_s: float) -> bool:
        settings = self._settings
        if settings.failure_share is None:
            return self._failures >= settings.failures_max
        while self._outcomes and now_s - self._outcomes[0][0] > settings.window_s:
            self._outcomes.popleft()
        failed = sum(not ok for _, ok in self._outcomes)
        return len(self._outcomes) >= settings.failures_max and failed / len(self._outcomes) >= settings.failure_share

    def _open(self, now_s: float) -> None:
        self._opened_s = now_s
        self._probes_out = self._probes_ok = 0


COGNITIVE_RATE: Final = RateSettings(per_second=1000.0, burst=100)
_LOW_SHARE: Final = 0.8
_RISE: Final = 1.1


class Level(enum.StrEnum):
    """How hard the brakes are on."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    CRITICAL = "critical"
    EMERGENCY = "emergency"

    @property
    def rate(self) -> float:
        """The share of events of the lowest priority that pass."""
        return _RATES[self]


_RATES: Final = {
    Level.NONE: 1.0,
    Level.LOW: 0.9,
    Level.MEDIUM: 0.7,
    Level.HIGH: 0.5,
    Level.CRITICAL: 0.25,
    Level.EMERGENCY: 0.1,
}


class PressureSample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the system."""

    queue_depth: int = 0
    latency_s_p95: float = 0.0
    load: float = 0.0


_WARNING: Final = (100, 1.0, 0.70)
_CRITICAL: Final = (500, 3.0, 0.85)
_EMERGENCY: Final = (1000, 5.0, 0.95)


def level_of(now: PressureSample, loads: Sequence[float] = ()) -> Level:
    """
    The level that a sample asks for.

    Args:
        now: The latest sample.
        loads: Loads before it, oldest first: when the younger half's mean exceeds the older half's by a tenth, a warning
            counts as ``HIGH`` and not as ``MEDIUM``.
    """
    if _reaches(now, _EMERGENCY):
        return Level.EMERGENCY
    if _reaches(now, _CRITICAL):
        return Level.CRITICAL
    if _reaches(now, _WARNING):
        return Level.HIGH if _is_rising(loads) else Level.MEDIUM
    return Level.LOW if _reaches(now, tuple(_LOW_SHARE * limit for limit in _WARNING)) else Level.NONE


def is_throttled(trace_id: str, level: Level, priority: int) -> bool:
    """Whether an event of this trace is held back; the higher its priority (1 to 10), the more seldom."""
    share = (1 - level.rate) * (1 - 0.5 * min(1.0, priority / 10))
    return unit_hash(f"{trace_id}{level.value}") < share


def _reaches(sample: PressureSample, limits: tuple[float, ...]) -> bool:
    queue, latency_s, load = limits
    return sample.queue_depth >= queue or sample.latency_s_p95 >= latency_s or sample.load >= load


def _is_rising(loads: Sequence[float]) -> bool:
    half = len(loads) // 2
    if half == 0:
        return False
    older, recent = loads[:half], loads[-half:]
    return sum(recent) / half > _RISE * sum(older) / half


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
