"""
Filters made of filters, and the list of filters that a subscription has.

A filter that raised has neither matched nor not matched, and what is made of it keeps to that: a known no settles AND, a known
yes settles OR, whatever else failed and in whatever order; otherwise the failure stands. NOT of a failure is a failure. So a
broken filter never turns into a yes, and into a no only where every possible answer would have been one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import Event

from .base import Filter, FilterError, FilterResult, FilterStatistics, InvalidFilter

__all__ = ["CompoundFilter", "FilterChain", "Operator"]

Operator = Literal["AND", "OR", "NOT"]
_OPERATORS: Final = ("AND", "OR", "NOT")
_CHILDREN_COUNT_MAX: Final = 256
_DEPTH_MAX: Final = 32


def _settled(filters: Sequence[Filter], event: Event, settling: bool) -> bool:
    """Ask in order until an answer equals ``settling``; without one, the first failure stands."""
    failure: FilterError | None = None
    for child in filters:
        try:
            if child.check(event) is settling:
                return settling
        except FilterError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return not settling


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
                return _settled(self.filters, event, False)
            case "OR":
                return _settled(self.filters, event, True)
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
        return self.is_empty or _settled(self.filters, event, False)

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
