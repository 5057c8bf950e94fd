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
"""

from __future__ import annotations

from typing import ClassVar


class TidingsError(Exception):
    """The root: catch this to catch everything Tidings raises on purpose."""

    code: ClassVar[str] = "tidings.error"
    retryable: ClassVar[bool] = False
    hint: str | None = None

    def describe(self) -> str:
        """What went wrong, without the hint; subclasses say it in their own words."""
        return super().__str__()

    def __str__(self) -> str:
        return self.describe() if self.hint is None else f"{self.describe()} (hint: {self.hint})"

    @property
    def public_text(self) -> str:
        """What went wrong, for others than the operator: nothing about the machine's files."""
        return self.describe()


class InvalidEvent(TidingsError):
    """An event cannot be stored as it is; ``field`` names the part at fault."""

    code = "event.invalid"

    def __init__(self, field: str, problem: str, hint: str | None = None) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem
        self.hint = hint

    def describe(self) -> str:
        return f"{self.field}: {self.problem}"


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

    def __init__(self, path: str, problem: str, hint: str | None = None) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem
        self.hint = hint

    def describe(self) -> str:
        return f"setting {self.path}: {self.problem}"
