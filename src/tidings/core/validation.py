"""
Values from outside, in one place for every package: reading JSON strictly, comparing it, and how a decoder's refusal becomes ours.

Parsers keep the last of two equal keys and say nothing. Whoever checks such a text and whoever reads it later may then see
different things, so an object that has a key twice is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import orjson

from .errors import InvalidPayload


class RepeatedKey(InvalidPayload, ValueError):
    """An object in the text has one key twice."""

    code = "event.repeated_key"

    def __init__(self, field: str, key: str) -> None:
        InvalidPayload.__init__(self, field, f"has the key {key[:64]!r} twice", "give each key of an object once")
        self.key = key


class RepeatingObject(dict[str, Any]):
    """An object that had a key twice in its text; the last value is here."""


def parse_strict(text: bytes | memoryview, field: str = "json") -> Any:
    """
    The value of JSON text: UTF-8, no NaN, no infinities, no lone surrogates, no key twice in one object.

    Args:
        field: What an error calls the text.

    Raises:
        RepeatedKey: An object has a key twice.
        ValueError: It is not JSON, or nests deeper than 250 levels or so.
    """
    text = bytes(text)
    value = orjson.loads(text)
    # What a parser drops takes its quotes along. So the value, written again, has fewer of them exactly if it lost a key.
    try:
        written = orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise ValueError("nests too deep") from error
    if _quotes(text) != _quotes(written):
        raise RepeatedKey(field, _repeated_key(text))
    return value


def refuse_repeated_keys(text: bytes, field: str) -> None:
    """
    Go on only if no object of the text has a key twice. What is no JSON at all is left for the caller's own parser to say.

    Raises:
        RepeatedKey: One has.
    """
    try:
        parse_strict(text, field)
    except RepeatedKey:
        raise
    except ValueError:
        return


def parse_marking_repeats(text: bytes) -> Any:
    """The value of JSON text that has a key twice somewhere, to find out where: such objects are ``RepeatingObject``."""

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        return found if len(found) == len(pairs) else RepeatingObject(found)

    return json.loads(text, object_pairs_hook=made)


def same_json(wanted: object, value: object) -> bool:
    """Equal as JSON: ``true`` is not 1, 1 is 1.0. ``wanted`` is plain; ``value`` may hold tuples, mappings and structs."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(wanted, dict):
        return (
            isinstance(value, Mapping)
            and len(wanted) == len(value)
            and all(key in value and same_json(item, value[key]) for key, item in wanted.items())
        )
    if isinstance(wanted, list):
        return (
            isinstance(value, list | tuple)
            and len(wanted) == len(value)
            and all(same_json(item, other) for item, other in zip(wanted, value, strict=True))
        )
    return wanted == value and (type(wanted) is bool) == (type(value) is bool)


def _quotes(text: bytes) -> int:
    """How many quotation marks begin or end a string."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return text.count(b'"')


def _repeated_key(text: bytes) -> str:
    """The first key that an object has twice."""
    found: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        if len(pairs) > 1 and not found:
            counts = Counter(name for name, _ in pairs)
            found.extend(name for name, count in counts.items() if count > 1)

    json.loads(text, object_pairs_hook=look)
    return found[0] if found else ""


UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that decoding JSON raises for text that is no JSON, or not of the type that is asked for."""
_PLACE: Final = re.compile(r"(.*) - at `(?:key` in `)?\$\.?(.*)`", re.DOTALL)


def reread(value: object, kind: Any, refuse: Callable[[str, str], Exception], *, bytes_max: int | None = None) -> Any:
    """
    A value as it is read back from its JSON: what would be stored otherwise than it is now is found here, not after a restart.

    Args:
        value: Of the kind, or what JSON has for it.
        kind: Of what type it is to be.
        refuse: Makes the error to raise, of the path of the field at fault (empty for the whole) and the problem.
        bytes_max: How long its JSON may be.
    """
    try:
        encoded = msgspec.json.encode(value)
        if bytes_max is not None and len(encoded) > bytes_max:
            raise refuse("", f"is {len(encoded)} bytes of JSON; at most {bytes_max} are allowed")
        return msgspec.json.decode(encoded, type=kind)
    except msgspec.ValidationError as error:
        problem, path = explain(error)
        raise refuse(path, problem) from None
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise refuse("", str(error)) from None


def explain(error: BaseException, whole: str = "") -> tuple[str, str]:
    """
    What a decoder found wrong, and the path of the field it found it in.

    Args:
        error: What ``msgspec`` raised.
        whole: The path to give if the value is wrong as a whole.
    """
    found = _PLACE.fullmatch(str(error))
    return (found[1], found[2] or whole) if found else (str(error), whole)
