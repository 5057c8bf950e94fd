"""
The base of every filter, filters joined by AND, OR and NOT, and the list of filters that a subscription has.

A filter that raises has not answered. ``matches`` is then false and ``evaluate`` has the error; ``check`` raises ``FilterError``.
A bus must not take a broken filter's false for an answer, because a filtered-out event is acknowledged: it calls ``check`` (or
looks at ``FilterResult.error``) and tries such an event again later.

Joined filters keep to that: one that is known to be false decides AND, one that is known to be true decides OR, whatever else
failed and in whatever order; otherwise the failure is raised. NOT of a failure is a failure. So a broken filter never turns into
a match, and into a mismatch only where every possible answer would have been one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import Event

from ..errors import BusError

_MS_PER_S: Final = 1000.0
_SHOWN_MAX: Final = 200
_TIMED_EVERY: Final = 16
Operator = Literal["AND", "OR", "NOT"]
_OPERATORS: Final = ("AND", "OR", "NOT")
_CHILDREN_COUNT_MAX: Final = 256
_DEPTH_MAX: Final = 32


class InvalidFilter(BusError):
    """A filter cannot be built as it was described; ``argument`` names the part at fault."""

    code = "bus.invalid_filter"
    text = "{kind} filter, {argument}: {problem}"
    kind: str
    argument: str
    problem: str
    hint: str | None = None


class FilterError(BusError):
    """A filter raised, so whether it matches the event is not known."""

    code = "bus.filter_failed"
    retryable = True
    hint = "the event is tried again; if the filter keeps raising, it becomes a dead letter with this error"
    filter_name: str
    cause: Exception

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


def _combined(filters: Sequence[Filter], event: Event, deciding: bool) -> bool:
    """Ask in order until an answer equals ``deciding``; without one, the first failure is raised."""
    failure: FilterError | None = None
    for child in filters:
        try:
            if child.check(event) is deciding:
                return deciding
        except FilterError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return not deciding


class CompoundFilter(Filter):
    """
    Join filters with AND, OR or NOT, asked in order and no further than needed.

    Args:
        operator: ``AND``, ``OR`` or ``NOT`` (of exactly one).
        filters: At least one.
        name: Shown in errors and statistics; made of the parts' names if left out.

    Raises:
        InvalidFilter: An argument is wrong; the error names it.
    """

    kind: ClassVar[str] = "compound"

    def __init__(
        self, operator: Operator, filters: Sequence[Filter], name: str | None = None, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if operator not in _OPERATORS:
            raise InvalidFilter(self.kind, "operator", f"{operator!r} is none of {', '.join(_OPERATORS)}")
        self.filters = _checked(self.kind, filters)
        if not self.filters:
            raise InvalidFilter(self.kind, "filters", "must be at least one")
        if operator == "NOT" and len(self.filters) != 1:
            raise InvalidFilter(self.kind, "filters", f"NOT takes exactly one, not {len(self.filters)}")
        self.operator = operator
        self._given_name = name
        self._depth: int = 1 + max(child._depth if isinstance(child, CompoundFilter) else 0 for child in self.filters)
        if self._depth > _DEPTH_MAX:
            raise InvalidFilter(self.kind, "filters", f"are nested more than {_DEPTH_MAX} deep")
        super().__init__(f"{operator}({len(self.filters)})" if name is None else name, clock=clock)

    def decide(self, event: Event) -> bool:
        """Ask the parts and join their answers."""
        match self.operator:
            case "AND":
                return _combined(self.filters, event, False)
            case "OR":
                return _combined(self.filters, event, True)
        return not self.filters[0].check(event)

    def config(self) -> dict[str, Any]:
        """``operator``, ``filters`` (their written forms) and, if it was given, ``name``."""
        config: dict[str, Any] = {"operator": self.operator, "filters": [child.to_dict() for child in self.filters]}
        if self._given_name is not None:
            config["name"] = self._given_name
        return config


class FilterChain:
    """
    A subscription's filters: an event is wanted if all of them want it. An empty chain wants everything.

    Args:
        filters: Asked in order, until one says no.

    Raises:
        InvalidFilter: Something in the list is no filter.
    """

    __slots__ = ("_clock", "filters", "is_empty")

    def __init__(self, filters: Sequence[Filter] = (), *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.filters = _checked("chain", filters)
        self.is_empty = not self.filters
        """Whether asking can be left out."""
        self._clock = clock

    def check(self, event: Event) -> bool:
        """
        Whether the event is wanted.

        Raises:
            FilterError: A filter raised and no other said no. The event must not be taken as filtered out.
        """
        return self.is_empty or _combined(self.filters, event, False)

    def matches(self, event: Event) -> bool:
        """Whether the event is wanted; no if a filter raises."""
        try:
            return self.check(event)
        except FilterError:
            return False

    def evaluate(self, event: Event) -> FilterResult:
        """Whether the event is wanted, how long that took, and what went wrong. Never raises."""
        started = self._clock.monotonic()
        metadata: dict[str, Any] = {"type": "chain", "filters": len(self.filters)}
        error: str | None = None
        matched = False
        try:
            matched = self.check(event)
        except FilterError as failure:
            error = failure.describe()
            metadata["failed"] = failure.filter_name
        return FilterResult(matched, error, (self._clock.monotonic() - started) * 1000.0, metadata)

    @property
    def statistics(self) -> list[FilterStatistics]:
        """What each filter has done so far, in order."""
        return [child.statistics for child in self.filters]


def _checked(kind: str, filters: Sequence[Filter]) -> tuple[Filter, ...]:
    if isinstance(filters, str) or not isinstance(filters, Sequence):
        raise InvalidFilter(kind, "filters", f"must be a list, not {type(filters).__name__}")
    if len(filters) > _CHILDREN_COUNT_MAX:
        raise InvalidFilter(kind, "filters", f"are {len(filters)}; at most {_CHILDREN_COUNT_MAX} are allowed")
    for at, child in enumerate(filters):
        if not isinstance(child, Filter):
            raise InvalidFilter(kind, f"filters[{at}]", f"is no filter but {type(child).__name__}")
    return tuple(filters)
