"""Rate and failure limits that know no clock: the caller says what time it is."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from typing import Annotated, Final

import msgspec

__all__ = ["BreakerSettings", "BreakerState", "CircuitBreaker", "RateSettings", "TokenBucket", "TokenBuckets"]

_OUTCOMES_MAX: Final = 10_000


class RateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """So many a second on average, so many at once."""

    per_second: Annotated[float, msgspec.Meta(gt=0)]
    burst: Annotated[int, msgspec.Meta(ge=1)]


class TokenBucket:
    """Holds up to ``burst`` tokens and gains ``per_second``; a full one at first."""

    __slots__ = ("_at_s", "_settings", "_tokens")

    def __init__(self, settings: RateSettings, now_s: float) -> None:
        self._settings = settings
        self._tokens = float(settings.burst)
        self._at_s = now_s

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
                # A probe whose outcome is never told would keep the breaker half open for ever: after another
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
