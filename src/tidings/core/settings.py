"""
Settings are structs whose fields declare unit (in the name), type and range (``msgspec.Meta``); ``checked`` holds values to that.

Making a struct checks nothing, so whoever takes settings from a caller passes them through ``checked`` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec
import msgspec.inspect

from .errors import SettingsError
from .validation import explain

_S = TypeVar("_S", bound=msgspec.Struct)
_SHOWN_CHARS_MAX: Final = 64
_SECRET_WORDS: Final = ("secret", "password", "private")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one part. A subclass whose values must fit each other says so in ``conflicts``."""

    def conflicts(self) -> Iterable[tuple[str, str]]:
        """Each setting that does not fit the others, with the problem. Called when every value is within its range."""
        return ()


def checked(settings: _S, section: str = "") -> _S:
    """
    The settings, if every value has its type, lies within its range and fits the others.

    Args:
        section: Comes before every path in an error: ``access`` makes ``access.tokens.secret`` of ``tokens.secret``.

    Raises:
        SettingsError: One does not; it names the setting, its value (no secret's) and what is allowed.
    """
    try:
        values = msgspec.to_builtins(settings)
    except TypeError as error:
        raise SettingsError(section or type(settings).__name__, str(error)) from error
    return settings_from(type(settings), values, section, strict=True)


def settings_from(kind: type[_S], values: object, section: str = "", *, strict: bool = False) -> _S:
    """
    Settings from plain values, checked as ``checked`` does.

    Args:
        strict: Whether text is refused where a number is meant. What comes from the environment is text.

    Raises:
        SettingsError: A value does not fit.
    """
    try:
        settings = msgspec.convert(values, kind, strict=strict)
    except msgspec.ValidationError as error:
        problem, path = explain(error)
        value, allowed = _value_and_range(values, msgspec.inspect.type_info(kind), path)
        if value is not None and not is_secret(path):
            problem = f"{value[:_SHOWN_CHARS_MAX]} is not allowed: {problem}"
        raise SettingsError(
            _below(section, path) or kind.__name__, problem, f"give {allowed}" if allowed else None
        ) from None
    for path, problem in _conflicts(settings):
        raise SettingsError(_below(section, path), problem)
    return settings


def is_secret(name: str) -> bool:
    """Whether a setting of this name holds something that must not be shown."""
    name = name.rpartition(".")[2]
    return any(word in name for word in _SECRET_WORDS) and not name.endswith(("_file", "_max", "_min"))


def _below(section: str, path: str) -> str:
    return f"{section}.{path}".strip(".")


def _conflicts(settings: msgspec.Struct, section: str = "") -> Iterable[tuple[str, str]]:
    for name in settings.__struct_fields__:
        inner = getattr(settings, name)
        if isinstance(inner, msgspec.Struct):
            yield from _conflicts(inner, _below(section, name))
    if isinstance(settings, Settings):
        yield from ((_below(section, path), problem) for path, problem in settings.conflicts())


def _value_and_range(values: object, kind: msgspec.inspect.Type, path: str) -> tuple[str | None, str | None]:
    """The scalar at a path as text, and what its type allows; nothing where the path does not tell."""
    for name in path.split("."):
        fields = kind.fields if isinstance(kind, msgspec.inspect.StructType) else ()
        found = next((field.type for field in fields if field.encode_name == name), None)
        if found is None or not isinstance(values, Mapping) or name not in values:
            return None, None
        values, kind = values[name], found
    if values is not None and not isinstance(values, str | int | float):
        return None, None
    return repr(values), _range(kind)


def _range(kind: msgspec.inspect.Type) -> str | None:
    """What a scalar type allows, in words."""
    match kind:
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(found for each in types if (found := _range(each)) is not None)
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            bounds: dict[str, Any] = {
                "at least": kind.ge,
                "more than": kind.gt,
                "at most": kind.le,
                "less than": kind.lt,
            }
            noun = "a whole number" if isinstance(kind, msgspec.inspect.IntType) else "a number"
            return " ".join(
                [noun, " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)]
            ).strip()
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.NoneType():
            return "nothing"
        case _:
            return None
