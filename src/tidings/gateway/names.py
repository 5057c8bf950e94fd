"""
The grammar of event names: ``graph.object_mutated``, ``app.contacts.message_created.v2``.

Two to eight segments in lower snake case, joined by dots. The first is the class; that of an app's event is ``app`` and the app's slug. A last
segment ``v2``, ``v3`` and so on is the version; a name without one is version 1.
"""

from __future__ import annotations

import enum
import re
from typing import Final

from .errors import InvalidDescriptor, ProtocolCode

NAME_CHARS_MAX: Final = 128
SEGMENTS_MAX: Final = 8
_SEGMENT: Final = r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*"
_NAME: Final = re.compile(rf"{_SEGMENT}(?:\.{_SEGMENT}){{1,{SEGMENTS_MAX - 1}}}")
_SLUG: Final = re.compile(_SEGMENT)
_VERSION: Final = re.compile(r"\.v([2-9]|[1-9][0-9]{1,5})\Z")
_LOOKS_LIKE_VERSION: Final = re.compile(r"v[0-9]+")


class EventClass(enum.StrEnum):
    """What decides on an event's queue, its kind of place, and who may ask for it; in the order of priority."""

    GRAPH = "graph"
    SECURITY = "security"
    APP = "app"
    """Of every app: ``app.<slug>`` is a channel within."""
    NETWORK = "network"
    SYSTEM = "system"


LOWER_CLASSES: Final = (EventClass.SYSTEM, EventClass.NETWORK, EventClass.APP, EventClass.SECURITY)
"""What waits, and is shed, before graph events are: the lowest first."""


def check_event_name(name: object) -> str:
    """
    The name, if it keeps to the grammar.

    Raises:
        InvalidDescriptor: It does not.
    """
    if not isinstance(name, str):
        raise InvalidDescriptor("event_type", "must be text", ProtocolCode.INVALID_TYPE)
    problem = None
    if len(name) > NAME_CHARS_MAX:
        problem = f"is longer than {NAME_CHARS_MAX} characters"
    elif _NAME.fullmatch(name) is None:
        problem = f"{name!r} is not 2 to {SEGMENTS_MAX} segments in lower snake case, joined by dots"
    elif any(_LOOKS_LIKE_VERSION.fullmatch(segment) for segment in name.split(".")[:-1]):
        problem = f"{name!r} has a version before its last segment"
    elif _LOOKS_LIKE_VERSION.fullmatch(name.rpartition(".")[2]) and _VERSION.search(name) is None:
        problem = f"{name!r}: versions are v2, v3 and so on; the name alone is version 1"
    elif name.startswith("app.") and name.count(".") < 2:
        problem = f"{name!r} names an app and no event"
    if problem is not None:
        raise InvalidDescriptor("event_type", problem, ProtocolCode.INVALID_ENCODING)
    return name


def channel_of(name: str) -> str:
    """The channel that an event of this name is told in: ``graph``, ``system``, ``network``, ``security`` or ``app.<slug>``."""
    first, _, rest = name.partition(".")
    return f"app.{rest.partition('.')[0]}" if first == "app" else first


def class_of(channel: str) -> EventClass | None:
    """The class of a channel; ``None`` if there is no such one."""
    if channel.startswith("app."):
        return EventClass.APP if _SLUG.fullmatch(channel, 4) else None
    return _CLASSES.get(channel)


_CLASSES: Final = {each.value: each for each in EventClass if each is not EventClass.APP}
