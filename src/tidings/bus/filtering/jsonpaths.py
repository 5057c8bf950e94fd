"""JSONPath expressions, compiled. Loaded by the first filter that has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from jsonpath import CompoundJSONPath, JSONPathEnvironment, JSONPathError
from jsonpath.segments import JSONPathChildSegment
from jsonpath.selectors import IndexSelector, NameSelector, WildcardSelector

from .base import InvalidFilter
from .matching import MISSING

_EXPRESSION_CHARS_MAX: Final = 4096


class _Environment(JSONPathEnvironment):
    # The log takes payloads up to 250 levels deep; the library's own limit is 100.
    max_recursion_depth = 300


_STRICT: Final = _Environment(strict=True)
_Step = tuple[Literal["name"], str] | tuple[Literal["index"], int] | tuple[Literal["wild"], None]


def compile_jsonpath(kind: str, expression: object) -> Callable[[Any], list[Any]]:
    """What finds the values of an expression in a document. Raises ``InvalidFilter`` if it is none."""
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
    return lambda document: _walk_path(document, steps)


def _walk_path(document: object, steps: list[_Step]) -> list[Any]:
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
