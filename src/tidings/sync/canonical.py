"""
When two submissions say the same: equality by canonical JSON (RFC 8785).

Keys are sorted, numbers are doubles printed as ECMAScript prints them, so ``1``, ``1.0`` and ``1e0`` are equal and ``-0``
is ``0``. NaN, infinities and lone surrogates are no JSON and are refused before they get here.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import rfc8785

__all__ = ["is_same_json", "parse", "to_canonical"]

_SAFE_MAX: Final = 2**53 - 1


def parse(text: bytes | memoryview) -> Any:
    """
    Strict JSON: UTF-8, no NaN, no infinities (``1e400`` neither), no lone surrogates.

    Raises:
        ValueError: It is not that.
    """
    return orjson.loads(text)


def to_canonical(value: Any) -> bytes:
    """The canonical JSON of a parsed value."""
    return rfc8785.dumps(_as_doubles(value))


def is_same_json(value: Any, other: Any) -> bool:
    """Whether two parsed values have the same canonical JSON."""
    # Values that are equal and print alike with sorted keys are equal canonically too: the same tree was printed by the
    # same rules. The other way round does not hold (1 and 1.0), so only then the slow way decides.
    if orjson.dumps(value, option=orjson.OPT_SORT_KEYS) == orjson.dumps(other, option=orjson.OPT_SORT_KEYS):
        return True
    return to_canonical(value) == to_canonical(other)


def _as_doubles(value: Any) -> Any:
    """RFC 8785 knows doubles only: a whole number that a double cannot hold exactly becomes the nearest one."""
    if isinstance(value, dict):
        return {key: _as_doubles(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_doubles(inner) for inner in value]
    if type(value) is int and not -_SAFE_MAX <= value <= _SAFE_MAX:
        return float(value)
    return value
