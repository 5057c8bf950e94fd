"""
When two submissions say the same: equality by canonical JSON (RFC 8785).

Keys are sorted, numbers are doubles printed as ECMAScript prints them, so ``1``, ``1.0`` and ``1e0`` are equal and ``-0``
is ``0``. NaN, infinities and lone surrogates are no JSON and are refused before they get here.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import rfc8785

from tidings.core.strict_json import parse_strict

__all__ = ["is_same_json", "parse", "to_canonical"]

_SAFE_MAX: Final = 2**53 - 1


def parse(text: bytes | memoryview) -> Any:
    """
    Strict JSON: UTF-8, no NaN, no infinities (``1e400`` neither), no lone surrogates, no key twice.

    Raises:
        RepeatedKey: An object has a key twice.
        ValueError: It is not JSON, or deeper than parsers take.
    """
    return parse_strict(text)


def to_canonical(value: Any) -> bytes:
    """The canonical JSON of a parsed value, however deep it is."""
    parts: list[bytes] = []
    waiting: list[Any] = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, _Written):
            parts.append(found.text)
        elif isinstance(found, dict):
            waiting.append(_END_OF_OBJECT)
            # In the order of UTF-16's units, as ECMAScript compares; the last first, since they are taken from the end.
            names = sorted(found, key=lambda name: name.encode("utf-16-be"), reverse=True)
            for place, name in enumerate(names, 1):
                comma = b"," if place < len(names) else b""
                waiting += [found[name], _Written(comma + rfc8785.dumps(name) + b":")]
            parts.append(b"{")
        elif isinstance(found, list):
            waiting.append(_END_OF_LIST)
            for place, inner in enumerate(reversed(found), 1):
                waiting.append(inner)
                if place < len(found):
                    waiting.append(_COMMA)
            parts.append(b"[")
        else:
            parts.append(rfc8785.dumps(_as_double(found)))
    return b"".join(parts)


class _Written:
    """A part of the text that is ready."""

    __slots__ = ("text",)

    def __init__(self, text: bytes) -> None:
        self.text = text


_END_OF_OBJECT: Final = _Written(b"}")
_END_OF_LIST: Final = _Written(b"]")
_COMMA: Final = _Written(b",")


def is_same_json(value: Any, other: Any) -> bool:
    """Whether two parsed values have the same canonical JSON."""
    # Values that are equal and print alike with sorted keys are equal canonically too: the same tree was printed by the
    # same rules. The other way round does not hold (1 and 1.0), so only then the slow way decides.
    try:
        if orjson.dumps(value, option=orjson.OPT_SORT_KEYS) == orjson.dumps(other, option=orjson.OPT_SORT_KEYS):
            return True
    except orjson.JSONEncodeError:  # deeper than it writes
        pass
    return to_canonical(value) == to_canonical(other)


def _as_double(value: Any) -> Any:
    """RFC 8785 knows doubles only: a whole number that a double cannot hold exactly becomes the nearest one."""
    return float(value) if type(value) is int and not -_SAFE_MAX <= value <= _SAFE_MAX else value
