"""Filters in written form: building them from it, with functions looked up by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import Event

from .base import Filter, InvalidFilter
from .compound import CompoundFilter
from .jsonpath import JSONPathFilter
from .simple import CustomFunctionFilter, SimpleFilter

__all__ = ["FilterManager", "is_error_event", "is_high_priority"]

_DEPTH_MAX: Final = 32
_FUNCTIONS_COUNT_MAX: Final = 1024
_HIGH: Final = 8
_HIGH_WORDS: Final = frozenset({"high", "urgent", "critical"})
_ERROR_STATES: Final = frozenset({"error", "failed", "failure"})


def is_high_priority(event: Event) -> bool:
    """Whether the event's priority, or that of its QoS, is 8 to 10 or one of high, urgent, critical."""
    meta = event.meta
    qos = meta.qos
    of_qos = qos.get("priority") if isinstance(qos, Mapping) else getattr(qos, "priority", None)
    return _is_high(meta.priority) or _is_high(of_qos)


def is_error_event(event: Event) -> bool:
    """Whether the event tells of a failure: by its type, its payload's status, or an error in its payload."""
    words = str.__str__(event.meta.type).lower().replace("-", "_").split("_")
    if not _ERROR_STATES.isdisjoint(words):
        return True
    payload = event.payload
    return bool(payload.get("error")) or str(payload.get("status", "")).lower() in _ERROR_STATES


def _is_high(priority: object) -> bool:
    if isinstance(priority, str):
        return priority.lower() in _HIGH_WORDS
    return isinstance(priority, int | float) and priority >= _HIGH


class FilterManager:
    """
    Builds filters from their written form.

    Args:
        functions: Functions by name, beside ``is_high_priority`` and ``is_error_event``.
        clock: What the filters' evaluation times are measured by.
    """

    def __init__(
        self, functions: Mapping[str, Callable[[Event], bool]] | None = None, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._clock = clock
        self._functions: dict[str, Callable[[Event], bool]] = {
            "is_high_priority": is_high_priority,
            "is_error_event": is_error_event,
        }
        for name, function in (functions or {}).items():
            self.register_function(name, function)

    @property
    def functions(self) -> tuple[str, ...]:
        """The names that ``custom_function`` filters may have."""
        return tuple(sorted(self._functions))

    def register_function(self, name: str, function: Callable[[Event], bool]) -> None:
        """
        Make a function known by a name; a name taken before stands for the new function in filters built from now on.

        Raises:
            InvalidFilter: It cannot serve as a filter.
        """
        CustomFunctionFilter(function, name)
        if name not in self._functions and len(self._functions) >= _FUNCTIONS_COUNT_MAX:
            raise InvalidFilter("custom_function", "name", f"there are {_FUNCTIONS_COUNT_MAX} functions already")
        self._functions[name] = function

    def from_dict(self, written: Mapping[str, Any]) -> Filter:
        """
        Build a filter from what ``Filter.to_dict`` gave.

        Raises:
            InvalidFilter: The form is wrong, or names a function that is not known here.
        """
        return self._build(written, 1)

    def _build(self, written: object, depth: int) -> Filter:
        if depth > _DEPTH_MAX:
            raise InvalidFilter("compound", "filters", f"are nested more than {_DEPTH_MAX} deep")
        if not isinstance(written, Mapping):
            raise InvalidFilter("written", "filter", f"must be a mapping, not {type(written).__name__}")
        kind, config = written.get("type"), written.get("config")
        if not isinstance(kind, str) or kind not in _ARGUMENTS:
            raise InvalidFilter("written", "type", f"{kind!r} is none of {', '.join(_ARGUMENTS)}")
        if not isinstance(config, Mapping):
            raise InvalidFilter(kind, "config", "must be a mapping")
        required, optional = _ARGUMENTS[kind]
        for name in required:
            if name not in config:
                raise InvalidFilter(kind, name, "is missing")
        for name in config:
            if name not in required and name not in optional:
                raise InvalidFilter(kind, str(name)[:80], "is no argument of this filter")
        arguments: dict[str, Any] = dict(config)
        match kind:
            case "simple":
                return SimpleFilter(**arguments, clock=self._clock)
            case "jsonpath":
                return JSONPathFilter(**arguments, clock=self._clock)
            case "compound":
                children = arguments["filters"]
                if not isinstance(children, list | tuple):
                    raise InvalidFilter(kind, "filters", f"must be a list, not {type(children).__name__}")
                arguments["filters"] = [self._build(child, depth + 1) for child in children]
                return CompoundFilter(**arguments, clock=self._clock)
        name = arguments["name"]
        function = self._functions.get(name) if isinstance(name, str) else None
        if function is None:
            known = ", ".join(self.functions)
            raise InvalidFilter(kind, "name", f"no function {str(name)[:80]!r} is known", hint=f"known are {known}")
        return CustomFunctionFilter(function, name, clock=self._clock)


_ARGUMENTS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "simple": (("path", "expected"), ("match_type",)),
    "jsonpath": (("expression", "expected"), ("match_type",)),
    "compound": (("operator", "filters"), ("name",)),
    "custom_function": (("name",), ()),
}
