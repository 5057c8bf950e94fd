"""
JSON of sync clients: when two submissions are equal, and what a repeated key means.

Equality is that of canonical JSON (RFC 8785): keys are sorted, numbers are doubles printed as ECMAScript prints them, so ``1``,
``1.0`` and ``1e0`` are equal and ``-0`` is ``0``. NaN, infinities and lone surrogates are no JSON and are refused before they get here.

A key twice inside an item makes that item invalid, as other items can be good. Around the items it cannot be known which of the
two was meant, and the message is refused as a whole.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import rfc8785

from tidings.core.validation import RepeatedKey, RepeatingObject, parse_marking_repeats, parse_strict
from tidings.wire.sync_frames import ItemError, MalformedFrame

from .requests import Request, SubmitRequest

_SAFE_MAX: Final = 2**53 - 1


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


def judge_repeated_keys(message: bytes, request: Request) -> None:
    """
    Mark items of a request whose own keys are repeated in the message. What is within an event the dialects find themselves.

    Raises:
        MalformedFrame: A key is repeated outside of the items.
    """
    try:
        parse_strict(message)
    except RepeatedKey as error:
        if not isinstance(request, SubmitRequest):
            raise MalformedFrame(error.problem) from error
        envelope = parse_marking_repeats(message)
        payload = envelope["payload"]
        if isinstance(envelope, RepeatingObject) or isinstance(payload, RepeatingObject):
            raise MalformedFrame(error.problem, "submit_events") from error
        for item, given in zip(request.items, payload["events"], strict=False):
            if isinstance(given, RepeatingObject) and not item.errors:
                item.errors = (ItemError(field="", message=error.problem),)
    except ValueError:
        return  # too deep for this parser; what it means for an item its dialect has said
