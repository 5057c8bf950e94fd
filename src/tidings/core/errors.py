"""
The root of every error that Tidings raises on purpose.

    TidingsError
    ├── InvalidEvent            (``core.errors``)   the producer handed in something that cannot be stored
    │   ├── InvalidName             a topic, group, space, type or partition name breaks the grammar
    │   ├── InvalidPayload          not JSON, NaN, too large, too deep
    │   │   └── RepeatedKey             (``core.validation``)  an object has a key twice
    │   └── InvalidTimestamp        without a zone, or outside the years the log can order
    ├── SettingsError           (``core.errors``)   a setting is unknown or out of its range
    └── LogError ...            (``log.errors``)    what the commit log answers

Every error has a stable ``code`` (dotted lower snake, safe to match on), says whether trying again
can help (``retryable``), keeps its values as attributes and, where somebody can act, has a ``hint``. ``str(error)`` is the
description with the hint; an interface with a field for each takes ``describe()`` and ``hint``.

A class declares its values as annotations and its sentence as ``text``; the constructor follows from that:

    class UnknownTopic(LogError):
        code = "log.unknown_topic"
        text = "there is no topic {topic!r}"
        topic: str
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from inspect import get_annotations
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(eq_default=False)
class TidingsError(Exception):
    """
    The root: catch this to catch everything Tidings raises on purpose.

    A subclass's annotated attributes, after those of its base, are the parameters of its constructor, by place or by name.
    ``args`` has their values, except a ``hint`` that is given for each error.
    """

    code: ClassVar[str] = "tidings.error"
    retryable: ClassVar[bool] = False
    text: ClassVar[str] = ""
    """The description, a format string over the error's attributes; a class whose sentence needs logic has ``describe``."""
    hint: str | None = None
    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        own = [name for name, kind in get_annotations(cls).items() if not str(kind).startswith("ClassVar")]
        cls._fields = (*cls._fields, *(name for name in own if name not in cls._fields))

    def __init__(self, *values: Any, **named: Any) -> None:
        fields = self._fields
        if fields or named:
            given = dict(zip(fields, values, strict=False)) | named
            defaults = {name: getattr(type(self), name) for name in fields if hasattr(type(self), name)}
            held = defaults | given
            if len(given) != len(values) + len(named) or held.keys() != set(fields):
                raise TypeError(f"{type(self).__name__} takes ({', '.join(fields)})")
            vars(self).update(held)
            values = tuple(held[name] for name in fields if name != "hint")
        super().__init__(*values)

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]

    def describe(self) -> str:
        """What went wrong, without the hint."""
        return self.text.format_map(vars(self)) if self.text else super().__str__()

    def __str__(self) -> str:
        return self.describe() if self.hint is None else f"{self.describe()} (hint: {self.hint})"

    @property
    def public_text(self) -> str:
        """What went wrong, for others than the operator: nothing about the machine's files."""
        return self.describe()


class InvalidEvent(TidingsError):
    """An event cannot be stored as it is; ``field`` names the part at fault."""

    code = "event.invalid"
    text = "{field}: {problem}"
    field: str
    problem: str
    hint: str | None = None

    @classmethod
    def missing(cls, names: Sequence[str], hint: str) -> InvalidEvent:
        """Parts of the envelope that an event must have and this one has not, all of them in one sentence."""
        fields = ", ".join(f"meta.{name}" for name in names)
        return cls(fields, "is missing" if len(names) == 1 else "are missing", hint)


class InvalidName(InvalidEvent):
    """A name breaks the grammar of its kind."""

    code = "event.invalid_name"


class InvalidPayload(InvalidEvent):
    """The payload is not a JSON object, or breaks a limit."""

    code = "event.invalid_payload"


class InvalidTimestamp(InvalidEvent):
    """A time has no zone, or lies outside the years 1970 to 2261."""

    code = "event.invalid_timestamp"


class SettingsError(TidingsError):
    """A setting is unknown, or its value is out of range; ``path`` names it."""

    code = "settings.invalid"
    text = "setting {path}: {problem}"
    path: str
    problem: str
    hint: str | None = None
