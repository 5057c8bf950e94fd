"""Predicates over the state of a subject: what watches wait for, and what chooses subjects to migrate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import re2  # type: ignore[import-untyped]

from tidings.core.validation import same_json

_PATTERN_CHARS_MAX: Final = 1000
_PATTERN_MEMORY_BYTES: Final = 256 * 1024

Number = int | float
Field = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Predicate(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """Looks at one key of a subject's state. It is false if the state is no object, or has no such key."""

    field: Field


class Equals(_Predicate, frozen=True, kw_only=True, tag="equals"):
    """The value is this one, as JSON has it: 1 is 1.0 and not true."""

    value: Any


class NotEquals(_Predicate, frozen=True, kw_only=True, tag="not_equals"):
    """There is a value, and it is another one."""

    value: Any


class GreaterThan(_Predicate, frozen=True, kw_only=True, tag="greater_than"):
    """The value is a number above this one."""

    value: Number


class LessThan(_Predicate, frozen=True, kw_only=True, tag="less_than"):
    """The value is a number below this one."""

    value: Number


class InRange(_Predicate, frozen=True, kw_only=True, tag="in_range"):
    """The value is a number between the two, neither of them included."""

    lower: Number
    upper: Number


class Hysteresis(_Predicate, frozen=True, kw_only=True, tag="hysteresis"):
    """True from when the value has risen above ``upper`` until it falls below ``lower``."""

    upper: Number
    lower: Number


class Regex(_Predicate, frozen=True, kw_only=True, tag="regex"):
    """The value is text in which the pattern (RE2: no look-around, no back-references) is found."""

    pattern: Annotated[str, msgspec.Meta(max_length=_PATTERN_CHARS_MAX)]


Predicate: TypeAlias = Equals | NotEquals | GreaterThan | LessThan | InRange | Hysteresis | Regex


def predicate_test(predicate: Predicate) -> Callable[[Any, bool], bool]:
    """
    A function of a subject's state, and of whether the predicate has been true so far.

    Raises:
        ValueError: The predicate makes no sense: a range without an inside, a pattern that is none.
    """
    decide = _decision(predicate)
    name = predicate.field

    def test(state: Any, was_true: bool) -> bool:
        return isinstance(state, Mapping) and name in state and decide(state[name], was_true)

    return test


def _decision(predicate: Predicate) -> Callable[[Any, bool], bool]:
    match predicate:
        case Equals(value=value):
            return lambda found, was_true: same_json(value, found)
        case NotEquals(value=value):
            return lambda found, was_true: not same_json(value, found)
        case GreaterThan(value=bound):
            return lambda found, was_true: _is_number(found) and found > bound
        case LessThan(value=bound):
            return lambda found, was_true: _is_number(found) and found < bound
        case InRange(lower=lower, upper=upper):
            if lower >= upper:
                raise ValueError(f"in_range: nothing is between {lower} and {upper}")
            return lambda found, was_true: _is_number(found) and lower < found < upper
        case Hysteresis(lower=lower, upper=upper):
            if lower > upper:
                raise ValueError(f"hysteresis: lower, {lower}, is above upper, {upper}")
            return lambda found, was_true: _is_number(found) and (found >= lower if was_true else found > upper)
        case Regex(pattern=pattern):
            found_in = _search(pattern)
            return lambda found, was_true: isinstance(found, str) and found_in(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _search(pattern: str) -> Callable[[str], bool]:
    # RE2, because whoever may create a watch may not stop the node: its time is linear in the text whatever the pattern.
    options = re2.Options()
    options.max_mem = _PATTERN_MEMORY_BYTES
    options.log_errors = False
    options.never_capture = True
    try:
        compiled = re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        raise ValueError(f"regex: {pattern[:80]!r} is no pattern: {_problem(error)}") from None
    return lambda text: compiled.search(text) is not None


def _problem(error: Exception) -> str:
    said = error.args[0] if error.args else ""
    return said.decode(errors="replace") if isinstance(said, bytes) else str(error)
