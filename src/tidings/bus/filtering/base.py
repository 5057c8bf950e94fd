"""
What every filter is: a question about one event, with an answer that is never lost.

A filter that raises has not answered. ``matches`` then says no and ``evaluate`` says no with the error; ``check`` raises
``FilterError``. A bus must not take the no of a broken filter for an answer, because a filtered-out event counts as done:
it asks ``check`` (or looks at ``FilterResult.error``) and tries such an event again later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import Event

from ..errors import BusError

__all__ = ["Filter", "FilterError", "FilterResult", "FilterStatistics", "InvalidFilter"]

_MS_PER_S: Final = 1000.0
_SHOWN_MAX: Final = 200
_TIMED_EVERY: Final = 16


class InvalidFilter(BusError):
    """A filter cannot be built as it was described; ``argument`` names the part at fault."""

    code = "bus.invalid_filter"

    def __init__(self, kind: str, argument: str, problem: str, hint: str | None = None) -> None:
        super().__init__(kind, argument, problem)
        self.kind = kind
        self.argument = argument
        self.problem = problem
        self.hint = hint

    def describe(self) -> str:
        return f"{self.kind} filter, {self.argument}: {self.problem}"


class FilterError(BusError):
    """A filter raised, so whether it matches the event is not known."""

    code = "bus.filter_failed"
    retryable = True
    hint = "the event is tried again; if the filter keeps raising, it becomes a dead letter with this error"

    def __init__(self, filter_name: str, cause: Exception) -> None:
        super().__init__(filter_name, cause)
        self.filter_name = filter_name
        self.cause = cause

    def describe(self) -> str:
        return f"filter {self.filter_name!r} raised {type(self.cause).__name__}: {str(self.cause)[:_SHOWN_MAX]}"


class FilterResult(msgspec.Struct, frozen=True):
    """What came of one evaluation."""

    matches: bool
    error: str | None = None
    """Why there is no answer; ``matches`` is then false but means nothing."""
    execution_time_ms: float = 0.0
    metadata: dict[str, Any] = {}
    """``filter`` and ``type`` name what was asked; after an error, ``failed`` names the filter that raised."""


class FilterStatistics(msgspec.Struct, frozen=True):
    """What a filter has done since it was made."""

    name: str
    evaluations: int
    matches: int
    errors: int
    average_time_ms: float
    """Over the first and then every sixteenth evaluation, and all of those by ``evaluate``."""


class Filter(ABC):
    """
    The base of all filters. Write your own by giving ``decide``.

    Args:
        name: Shown in errors and statistics.
        clock: What evaluation times are measured by.
    """

    kind: ClassVar[str] = "filter"

    def __init__(self, name: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.name = name
        self._monotonic = clock.monotonic
        self._evaluations = 0
        self._matches = 0
        self._errors = 0
        self._timed = 0
        self._time_s = 0.0
        self._last_time_s = 0.0

    @abstractmethod
    def decide(self, event: Event) -> bool:
        """Whether the event is wanted. May raise; must not change the event."""

    def check(self, event: Event) -> bool:
        """
        Whether the event is wanted.

        Raises:
            FilterError: The filter raised.
        """
        self._evaluations += 1
        # Reading the clock twice takes longer than most filters do, so the average is taken over a sample.
        if self._evaluations % _TIMED_EVERY == 1:
            return self._check_timed(event)
        try:
            matched = bool(self.decide(event))  # a class of your own may answer as ``re.search`` does
        except Exception as error:
            self._errors += 1
            if isinstance(error, FilterError):
                raise
            raise FilterError(self.name, error) from error
        if matched:
            self._matches += 1
        return matched

    def _check_timed(self, event: Event) -> bool:
        started = self._monotonic()
        try:
            matched = bool(self.decide(event))
        except Exception as error:
            self._errors += 1
            if isinstance(error, FilterError):
                raise
            raise FilterError(self.name, error) from error
        finally:
            self._last_time_s = self._monotonic() - started
            self._time_s += self._last_time_s
            self._timed += 1
        if matched:
            self._matches += 1
        return matched

    def matches(self, event: Event) -> bool:
        """Whether the event is wanted; no if the filter raises."""
        try:
            return self.check(event)
        except FilterError:
            return False

    def evaluate(self, event: Event) -> FilterResult:
        """Whether the event is wanted, how long that took, and what went wrong. Never raises."""
        self._evaluations += 1
        metadata: dict[str, Any] = {"filter": self.name, "type": self.kind}
        error: str | None = None
        matched = False
        try:
            matched = self._check_timed(event)
        except FilterError as failure:
            error = failure.describe()
            metadata["failed"] = failure.filter_name
        return FilterResult(matched, error, self._last_time_s * _MS_PER_S, metadata)

    @property
    def statistics(self) -> FilterStatistics:
        """What this filter has done so far."""
        average_ms = self._time_s / self._timed * _MS_PER_S if self._timed else 0.0
        return FilterStatistics(self.name, self._evaluations, self._matches, self._errors, average_ms)

    def config(self) -> dict[str, Any]:
        """The arguments it would be built from again, as JSON values."""
        raise InvalidFilter(self.kind, "config", "a filter class of your own has no written form unless it gives one")

    def to_dict(self) -> dict[str, Any]:
        """
        Its written form, ``{"type": ..., "config": {...}}``; ``FilterManager.from_dict`` reads it.

        Raises:
            InvalidFilter: It has none.
        """
        return {"type": self.kind, "config": self.config()}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
