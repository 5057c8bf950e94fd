"""
The filters that users build: over one field, over what a JSONPath (RFC 9535) finds, by a function; and their written form.

A JSONPath reads the document ``{"meta": {...}, "payload": {...}}``, the envelope as the log writes it (fields that were not given are
absent, times are text). Two things make it fast enough for delivery:

- A path of names, indexes and wildcards alone, which is most of them, is walked here; the library, which keeps a record
  of every node it visits, is for the rest. Both give the same values in the same order, which a test checks.
- Answers are cached by content: for a path that reads the payload only, the stored payload's bytes decide the answer, so
  a retry, a second group with the same filter, or a repeated payload is neither decoded nor searched again. Once
  somebody has decoded the event's payload (and so may have changed it), the cache is not used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import GIVEN_NAMES, NAME_SETS, Event, EventMeta
from tidings.log.record import RecordMeta

from ..events import ReceivedEvent, stored_meta
from .base import CompoundFilter, Filter, InvalidFilter
from .matching import Compare, comparison, compile_path, written_form

SimpleMatch = Literal["exact", "regex", "contains", "gt", "lt", "gte", "lte"]
_SIMPLE_MATCH_TYPES: Final = ("exact", "regex", "contains", "gt", "lt", "gte", "lte")


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
        if match_type not in _SIMPLE_MATCH_TYPES:
            raise InvalidFilter(self.kind, "match_type", f"{match_type!r} is none of {', '.join(_SIMPLE_MATCH_TYPES)}")
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


# JSONPath

JSONPathMatch = Literal["exact", "contains", "regex", "any", "all"]
_JSONPATH_MATCH_TYPES: Final = ("exact", "contains", "regex", "any", "all")
_REMEMBERED_COUNT_MAX: Final = 256
_REMEMBERED_BYTES_MAX: Final = 4096
"""Longer payloads are not remembered: one filter's memory stays within about a megabyte."""


class JSONPathFilter(Filter):
    """
    Compare what a JSONPath finds in an event.

    Args:
        expression: An RFC 9535 query, for example ``$.payload.items[*].status``.
        expected: What to compare with. A path that finds nothing matches only an expected None.
        match_type: ``exact`` and ``any`` (some found value is equal), ``all`` (every one is), ``contains`` (part of some
            value's text), ``regex`` (found in some value's text).

    Raises:
        InvalidFilter: An argument is wrong; the error names it.
    """

    kind: ClassVar[str] = "jsonpath"

    def __init__(
        self, expression: str, expected: object, match_type: JSONPathMatch = "exact", *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if match_type not in _JSONPATH_MATCH_TYPES:
            raise InvalidFilter(
                self.kind, "match_type", f"{match_type!r} is none of {', '.join(_JSONPATH_MATCH_TYPES)}"
            )
        from .jsonpaths import compile_jsonpath  # its library takes a while to load, and few programs need it

        self._find = compile_jsonpath(self.kind, expression)
        compare_by = match_type if match_type in ("contains", "regex") else "exact"
        self._decide_found = _quantified(comparison(self.kind, expected, compare_by), expected, match_type == "all")
        # A second "$" may be a reference back to the root from inside a predicate.
        self._is_payload_only = expression.startswith(("$.payload", "$['payload']", '$["payload"]')) and (
            expression.count("$") == 1
        )
        self._remembered: dict[bytes, bool] = {}
        self.expression = expression
        self.expected = expected
        self.match_type = match_type
        super().__init__(f"{expression} {match_type} {str(expected)[:80]}", clock=clock)

    def decide(self, event: Event) -> bool:
        """Search the event and compare, or remember what came of the same content."""
        if not self._is_payload_only:
            return self._decide_found(self._find({"meta": _meta_document(event), "payload": event.payload}))
        content = _untouched_payload(event)
        if content is None:
            return self._decide_found(self._find({"payload": event.payload}))
        remembered = self._remembered.get(content)
        if remembered is None:
            remembered = self._decide_found(self._find({"payload": event.payload}))
            if len(self._remembered) >= _REMEMBERED_COUNT_MAX:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[content] = remembered
        return remembered

    def config(self) -> dict[str, Any]:
        """``expression``, ``expected`` and ``match_type``."""
        expected = written_form(self.kind, self.expected)
        return {"expression": self.expression, "expected": expected, "match_type": self.match_type}


def _untouched_payload(event: Event) -> bytes | None:
    """The payload as stored, if the event still says just that and it is short enough to remember."""
    if not isinstance(event, ReceivedEvent) or event._payload is not None:
        return None
    record = event.record
    if record.meta.sealed is not None or memoryview(record.payload_json).nbytes > _REMEMBERED_BYTES_MAX:
        return None
    return bytes(record.payload_json)


def _meta_document(event: Event) -> dict[str, Any]:
    meta: EventMeta | RecordMeta = stored_meta(event)
    if isinstance(meta, RecordMeta):
        document: dict[str, Any] = msgspec.to_builtins(meta)
        return document
    fields = {name: getattr(meta, name) for name in GIVEN_NAMES}
    fields |= {"topic": str.__str__(meta.topic), "type": str.__str__(meta.type), "ts": meta.ts.isoformat()}
    fields |= {name: list(fields[name]) or None for name in NAME_SETS}
    return {name: msgspec.to_builtins(value) for name, value in fields.items() if value is not None}


def _quantified(compare: Compare, expected: object, every: bool) -> Callable[[list[Any]], bool]:
    def decide(found: list[Any]) -> bool:
        if not found:
            return expected is None
        return all(map(compare, found)) if every else any(map(compare, found))

    return decide


# The written form

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
        Make a function known by a name; a name that is known gets the new function, in filters built from now on.

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
