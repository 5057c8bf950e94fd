"""
A filter over what a JSONPath (RFC 9535) finds in an event.

The document is ``{"meta": {...}, "payload": {...}}``, the envelope as the log writes it (fields that were not given are
absent, times are text). Two things make it fast enough for a delivery path:

- A path of names, indexes and wildcards alone, which is most of them, is walked here; the library, which keeps a record
  of every node it visits, is for the rest. Both give the same values in the same order, which a test holds them to.
- Answers are remembered by content: for a path that reads the payload only, the stored payload's bytes decide the answer, so
  a retry, a second group with the same filter, or a repeated payload is neither decoded nor searched again. Once
  somebody has decoded the event's payload (and so may have changed it), the memory is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal

import msgspec
from jsonpath import CompoundJSONPath, JSONPathEnvironment, JSONPathError
from jsonpath.segments import JSONPathChildSegment
from jsonpath.selectors import IndexSelector, NameSelector, WildcardSelector

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.events import GIVEN_NAMES, Event, EventMeta
from tidings.log.record import RecordMeta

from ..events import ReceivedEvent
from .base import Filter, InvalidFilter
from .paths import stored_meta
from .values import MISSING, Compare, comparison, written_form

__all__ = ["JSONPathFilter", "JSONPathMatch"]

JSONPathMatch = Literal["exact", "contains", "regex", "any", "all"]
_MATCH_TYPES: Final = ("exact", "contains", "regex", "any", "all")
_EXPRESSION_CHARS_MAX: Final = 4096
_REMEMBERED_COUNT_MAX: Final = 256
_REMEMBERED_BYTES_MAX: Final = 4096
"""Longer payloads are not remembered: one filter's memory stays within about a megabyte."""


class _Environment(JSONPathEnvironment):
    # The log takes payloads up to 250 levels deep; the library's own limit is 100.
    max_recursion_depth = 300


_STRICT: Final = _Environment(strict=True)
_Step = tuple[Literal["name"], str] | tuple[Literal["index"], int] | tuple[Literal["wild"], None]


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
        if match_type not in _MATCH_TYPES:
            raise InvalidFilter(self.kind, "match_type", f"{match_type!r} is none of {', '.join(_MATCH_TYPES)}")
        self._find = _compile(self.kind, expression)
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
    fields["partitions"] = list(meta.partitions) or None
    return {name: msgspec.to_builtins(value) for name, value in fields.items() if value is not None}


def _quantified(compare: Compare, expected: object, every: bool) -> Callable[[list[Any]], bool]:
    def decide(found: list[Any]) -> bool:
        if not found:
            return expected is None
        return all(map(compare, found)) if every else any(map(compare, found))

    return decide


def _compile(kind: str, expression: object) -> Callable[[Any], list[Any]]:
    if not isinstance(expression, str):
        raise InvalidFilter(kind, "expression", f"must be a string, not {type(expression).__name__}")
    if len(expression) > _EXPRESSION_CHARS_MAX:
        raise InvalidFilter(kind, "expression", f"is longer than {_EXPRESSION_CHARS_MAX} characters")
    if not expression.startswith("$"):
        raise InvalidFilter(kind, "expression", f"{expression[:80]!r} does not start with $")
    try:
        path = _STRICT.compile(expression)
    except (JSONPathError, RecursionError) as error:
        problem = str(error).partition("\n")[0]
        raise InvalidFilter(kind, "expression", f"{expression[:80]!r} is no JSONPath: {problem}") from error
    if isinstance(path, CompoundJSONPath):
        raise InvalidFilter(kind, "expression", "must be one path")
    steps: list[_Step] = []
    for segment in path.segments:
        if type(segment) is not JSONPathChildSegment or len(segment.selectors) != 1:
            return path.findall
        selector = segment.selectors[0]
        if type(selector) is NameSelector:
            steps.append(("name", selector.name))
        elif type(selector) is IndexSelector:
            steps.append(("index", selector.index))
        elif type(selector) is WildcardSelector:
            steps.append(("wild", None))
        else:
            return path.findall
    return lambda document: _walk(document, steps)


def _walk(document: object, steps: list[_Step]) -> list[Any]:
    values = [document]
    for step in steps:
        found: list[Any] = []
        for value in values:
            if step[0] == "name":
                if (type(value) is dict or isinstance(value, Mapping)) and (
                    item := value.get(step[1], MISSING)
                ) is not MISSING:
                    found.append(item)
            elif step[0] == "index":
                if isinstance(value, list | tuple) and -len(value) <= step[1] < len(value):
                    found.append(value[step[1]])
            elif isinstance(value, Mapping):
                found.extend(value.values())
            elif isinstance(value, list | tuple):
                found.extend(value)
        values = found
        if not values:
            break
    return values
