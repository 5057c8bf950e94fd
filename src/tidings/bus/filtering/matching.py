"""
Reading a field of an event by a dotted path, and comparing what was found with what is expected.

A path (``meta.priority``, ``meta.actor.user_id``, ``payload.items.0.status``) is split and checked once. Reading it from a delivered
event decodes no more than it needs: an envelope path reads the stored envelope while nobody has asked for (and so could have
changed) the event's own.

Comparing follows JSON, not Python: ``true`` is not 1, while 1 and 1.0 are the same number. Everything that depends on the
expected value alone (its kind, its pattern, its text) is decided when the comparison is built.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
import orjson

from tidings.core.events import GIVEN_NAMES, Event
from tidings.core.validation import same_json

from ..events import ReceivedEvent, stored_meta
from .base import InvalidFilter

Compare = Callable[[object], bool]


class _Missing(enum.Enum):
    MISSING = enum.auto()


MISSING: Final = _Missing.MISSING
"""There is no such field, as opposed to one that holds null."""


def comparison(kind: str, expected: object, match_type: str) -> Compare:
    """
    A function that tells whether a found value (or ``MISSING``) is what is expected.

    Args:
        kind: The filter's kind, for errors.
        expected: What to compare with.
        match_type: ``exact``, ``regex``, ``contains``, ``gt``, ``gte``, ``lt`` or ``lte``.

    Raises:
        InvalidFilter: ``expected`` cannot be compared in that way.
    """
    match match_type:
        case "exact":
            return _exact(kind, expected)
        case "regex":
            return _regex(kind, expected)
        case "contains":
            return _contains(kind, expected)
        case "gt" | "gte" | "lt" | "lte":
            return _order(kind, expected, match_type)
    raise InvalidFilter(kind, "match_type", f"{match_type!r} is not one that a value can be compared by")


def text_of(value: object) -> str | None:
    """A value as text: strings as they are, times in ISO form, the rest as JSON. None for null and for what is missing."""
    if isinstance(value, str):
        return str.__str__(value)  # an enum member's own str() is its name
    if value is None or value is MISSING:
        return None
    if isinstance(value, datetime):
        return value.isoformat()
    return orjson.dumps(value, default=_builtins).decode()


def written_form(kind: str, expected: object) -> Any:
    """``expected`` as JSON values, for ``to_dict``."""
    if isinstance(expected, re.Pattern):
        # Flags outside the pattern have no place in JSON, so they are written into it.
        flags = "".join(letter for letter, flag in _FLAGS.items() if expected.flags & flag)
        pattern = expected.pattern
        if not isinstance(pattern, str):
            raise InvalidFilter(kind, "expected", "a pattern over bytes has no written form")
        return f"(?{flags}){pattern}" if flags else pattern
    try:
        return orjson.loads(orjson.dumps(expected, default=_builtins))
    except (TypeError, orjson.JSONEncodeError) as error:
        raise InvalidFilter(kind, "expected", f"cannot be written as JSON: {error}") from error


_FLAGS: Final = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE, "a": re.ASCII}


def _builtins(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    return msgspec.to_builtins(value)


def _exact(kind: str, expected: object) -> Compare:
    if expected is None:
        return lambda value: value is None or value is MISSING
    if isinstance(expected, bool):
        return lambda value: value is expected
    if isinstance(expected, str):
        return lambda value: value == expected
    if isinstance(expected, int | float):
        return lambda value: value == expected and type(value) is not bool
    if isinstance(expected, datetime):
        return lambda value: value == expected
    if isinstance(expected, list | tuple | Mapping | msgspec.Struct):
        wanted = written_form(kind, expected)
        return lambda value: value is not MISSING and same_json(wanted, value)
    raise InvalidFilter(kind, "expected", f"must be a JSON value, not {type(expected).__name__}")


def _regex(kind: str, expected: object) -> Compare:
    if not isinstance(expected, str | re.Pattern):
        raise InvalidFilter(kind, "expected", f"must be a pattern, not {type(expected).__name__}")
    try:
        search = re.compile(expected).search
    except re.error as error:
        raise InvalidFilter(kind, "expected", f"is no regular expression: {error}") from error
    if isinstance(expected, re.Pattern) and not isinstance(expected.pattern, str):
        raise InvalidFilter(kind, "expected", "must be a pattern over text, not over bytes")

    def found(value: object) -> bool:
        text = text_of(value)
        return text is not None and search(text) is not None

    return found


def _contains(kind: str, expected: object) -> Compare:
    try:
        wanted = text_of(expected)
    except (TypeError, orjson.JSONEncodeError) as error:
        raise InvalidFilter(kind, "expected", f"has no text form: {error}") from error
    if not wanted:
        raise InvalidFilter(kind, "expected", "must hold some text: every text contains nothing")

    def found(value: object) -> bool:
        text = text_of(value)
        return text is not None and wanted in text

    return found


def _order(kind: str, expected: object, match_type: str) -> Compare:
    if not isinstance(expected, int | float) or isinstance(expected, bool) or math.isnan(expected):
        raise InvalidFilter(kind, "expected", f"must be a number for {match_type!r}, not {text_or_type(expected)}")
    bound = expected
    match match_type:
        case "gt":
            return lambda value: isinstance(value, int | float) and type(value) is not bool and value > bound
        case "gte":
            return lambda value: isinstance(value, int | float) and type(value) is not bool and value >= bound
        case "lt":
            return lambda value: isinstance(value, int | float) and type(value) is not bool and value < bound
        case _:
            return lambda value: isinstance(value, int | float) and type(value) is not bool and value <= bound


def text_or_type(value: object) -> str:
    """A value as an error message shows it."""
    return repr(value)[:80] if isinstance(value, str | int | float | bool) or value is None else type(value).__name__


# Paths

Reader = Callable[[Event], object]

_STEPS_MAX: Final = 64
_SCALARS: Final = (str, int, float, bool, type(None))


def compile_path(kind: str, path: object) -> Reader:
    """
    A function that reads the path's value from an event, or gives ``MISSING``.

    Raises:
        InvalidFilter: The path does not begin with ``meta.`` or ``payload.``, or has an empty or private step.
    """
    if not isinstance(path, str):
        raise InvalidFilter(kind, "path", f"must be a string, not {type(path).__name__}")
    root, *steps = path.split(".")
    if root not in ("meta", "payload") or not steps:
        raise InvalidFilter(
            kind, "path", f"{path[:80]!r} is not below meta or payload", hint="write meta.<field> or payload.<key>"
        )
    if len(steps) > _STEPS_MAX:
        raise InvalidFilter(kind, "path", f"has {len(steps)} steps; at most {_STEPS_MAX} are allowed")
    if "" in steps:
        raise InvalidFilter(kind, "path", f"{path[:80]!r} has an empty step")
    return _payload_reader(steps) if root == "payload" else _meta_reader(kind, steps)


def _meta_reader(kind: str, steps: list[str]) -> Reader:
    field, *rest = steps
    if field not in GIVEN_NAMES:
        if field.startswith("_"):
            raise InvalidFilter(kind, "path", f"meta.{field} is private")
        # Keys that are not the envelope's own are in ``extra``; a path need not say so.
        field, rest = "extra", steps
    if field == "ts":
        # The stored one is text; the event's own is a time, which is what a filter's writer has in mind.
        return lambda event: _walk(event.meta.ts, rest)
    if rest:
        return lambda event: _walk(getattr(stored_meta(event), field), rest)

    def read(event: Event) -> object:
        # ``stored_meta``, written out: this is the most common filter, and a call costs as much as the rest of it.
        if event.__class__ is ReceivedEvent:
            received: Any = event
            return getattr(received._meta or received.record.meta, field)
        return getattr(event.meta, field)

    return read


def _payload_reader(steps: list[str]) -> Reader:
    if len(steps) == 1:
        (key,) = steps
        return lambda event: event.payload.get(key, MISSING)
    return lambda event: _walk(event.payload, steps)


def _walk(value: object, steps: list[str]) -> object:
    for step in steps:
        # Asking for ``dict`` first: the check against an abstract class takes several times as long.
        if type(value) is dict or isinstance(value, Mapping):
            value = value.get(step, MISSING)
        elif isinstance(value, list | tuple):
            if not (step.isascii() and step.isdigit()) or int(step) >= len(value):
                return MISSING
            value = value[int(step)]
        elif isinstance(value, _SCALARS) or step.startswith("_"):
            return MISSING  # a string has attributes too, but none of them is data
        else:
            value = getattr(value, step, MISSING)
            if callable(value):
                return MISSING
        if value is MISSING:
            return MISSING
    return value
