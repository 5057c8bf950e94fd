"""A filter over one field, and one that asks a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import Event

from .base import Filter, InvalidFilter
from .paths import compile_path
from .values import comparison, written_form

__all__ = ["CustomFunctionFilter", "SimpleFilter", "SimpleMatch"]

SimpleMatch = Literal["exact", "regex", "contains", "gt", "lt", "gte", "lte"]
_MATCH_TYPES: Final = ("exact", "regex", "contains", "gt", "lt", "gte", "lte")


class SimpleFilter(Filter):
    """
    Compare one field of an event.

    Args:
        path: ``meta.<field>`` or ``payload.<key>``, with dots into mappings, structs and (by number) lists.
        expected: What to compare with. A field that is missing matches only an expected None.
        match_type: ``exact``; ``regex`` (found anywhere in the value's text); ``contains`` (part of the value's text);
            ``gt``, ``gte``, ``lt``, ``lte`` (numbers; anything else does not match).

    Raises:
        InvalidFilter: An argument is wrong; the error names it.
    """

    kind: ClassVar[str] = "simple"

    def __init__(
        self, path: str, expected: object, match_type: SimpleMatch = "exact", *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if match_type not in _MATCH_TYPES:
            raise InvalidFilter(self.kind, "match_type", f"{match_type!r} is none of {', '.join(_MATCH_TYPES)}")
        self._read = compile_path(self.kind, path)
        self._compare = comparison(self.kind, expected, match_type)
        self.path = path
        self.expected = expected
        self.match_type = match_type
        super().__init__(f"{path} {match_type} {str(expected)[:80]}", clock=clock)

    def decide(self, event: Event) -> bool:
        """Read the field and compare."""
        return self._compare(self._read(event))

    def config(self) -> dict[str, Any]:
        """``path``, ``expected`` and ``match_type``."""
        expected = written_form(self.kind, self.expected)
        return {"path": self.path, "expected": expected, "match_type": self.match_type}


class CustomFunctionFilter(Filter):
    """
    Ask a function.

    Args:
        function: Takes the event, says whether it is wanted. Not a coroutine function: filters run before a worker takes
            the event on, and must not wait.
        name: What ``FilterManager`` looks the function up by; the function's own name if left out.

    Raises:
        InvalidFilter: An argument is wrong; the error names it.
    """

    kind: ClassVar[str] = "custom_function"

    def __init__(
        self, function: Callable[[Event], bool], name: str | None = None, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if not callable(function):
            raise InvalidFilter(self.kind, "function", f"must be callable, not {type(function).__name__}")
        if inspect.iscoroutinefunction(function):
            raise InvalidFilter(self.kind, "function", "must not be a coroutine function: filters do not wait")
        name = getattr(function, "__name__", type(function).__name__) if name is None else name
        if not isinstance(name, str) or not name:
            raise InvalidFilter(self.kind, "name", "must be a non-empty string")
        self._function = function
        super().__init__(name, clock=clock)

    def decide(self, event: Event) -> bool:
        """Call the function."""
        answer: object = self._function(event)
        if answer is True or answer is False:
            return answer
        if inspect.isawaitable(answer):
            # Any awaitable is true; taking it for an answer would let every event pass.
            if inspect.iscoroutine(answer):
                answer.close()
            raise TypeError("the function returned an awaitable; filters do not wait")
        return bool(answer)

    def config(self) -> dict[str, Any]:
        """``name``; the function itself is not written down."""
        return {"name": self.name}
