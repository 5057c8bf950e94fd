"""
Finding a field of an event by a dotted path: ``meta.priority``, ``meta.actor.user_id``, ``payload.items.0.status``.

A path is split and checked once. Reading it from a delivered event decodes no more than it needs: an envelope path looks at
the stored envelope while nobody has asked for (and so could have changed) the event's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tidings.core.events import GIVEN_NAMES, Event

from ..events import ReceivedEvent
from .base import InvalidFilter
from .values import MISSING

__all__ = ["Reader", "compile_path", "stored_meta"]

Reader = Callable[[Event], object]

_STEPS_MAX: Final = 64
_SCALARS: Final = (str, int, float, bool, type(None))


def stored_meta(event: Event) -> Any:
    """The envelope, without making one: its fields have the same names either way, only ``ts`` may be text."""
    if event.__class__ is ReceivedEvent:
        received: Any = event
        return received._meta or received.record.meta
    return event.meta


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
