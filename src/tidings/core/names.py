"""
The grammar of names: topics, groups, types, spaces, partitions, objects, apps.

Topic and group names become file names (``<topic>.<segment>.jsonl``, ``<topic>__<group>.json``), so
their alphabet is one that no file system, shell or URL treats specially, and ``__`` is kept for the
joint. Spaces and partitions never become paths unescaped; they only have to be text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sized
from typing import Final

from .errors import InvalidName

NAME_CHARS_MAX: Final = 128
TOPIC_AND_GROUP_CHARS_MAX: Final = 240
"""So that ``<topic>__<group>.json`` is no longer than the 255 bytes of a file system, with ``.bak.new`` behind it."""
SPACE_BYTES_MAX: Final = 128
EVENT_ID_BYTES_MAX: Final = 256
PARTITION_BYTES_MAX: Final = 128
PARTITION_COUNT_MAX: Final = 64
OBJECT_BYTES_MAX: Final = 256
OBJECT_COUNT_MAX: Final = 1_000
_REPEATS_MAX: Final = 16
"""How many times longer than its limit a list of names may be that repeats some."""
APP_CHARS_MAX: Final = 64
SYNC_TOPICS: Final = frozenset({"sync", "sync.projects", "sync.legacy"})
"""Where the events of sync clients are: they come in through ``/sync`` only."""

# One or more words joined by single dots; a word is letters, digits, ``_``, ``-``, ``@`` or ``:``.
_PATH_NAME: Final = re.compile(r"[A-Za-z0-9_@:\-]+(?:\.[A-Za-z0-9_@:\-]+)*", re.ASCII)
OBJECT_ID: Final = re.compile(r"[a-z][a-z0-9]*(?:[_.\-][a-z0-9]+)*:.+", re.ASCII | re.DOTALL)
_APP: Final = re.compile(r"[a-z0-9][a-z0-9._\-]*", re.ASCII)
_CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def check_topic(topic: object) -> str:
    """Return ``topic`` as a plain string, or say what is wrong with it."""
    return _path_name("meta.topic", topic)


def check_group(group: object) -> str:
    """Return ``group`` as a plain string, or say what is wrong with it."""
    return _path_name("group", group)


def check_topic_and_group(topic: object, group: object) -> tuple[str, str]:
    """Return both as plain strings. The two are joined to a file name, which a file system must take."""
    names = check_topic(topic), check_group(group)
    together = sum(map(len, names))
    if together > TOPIC_AND_GROUP_CHARS_MAX:
        raise InvalidName(
            "group",
            f"has {together} characters together with its topic; at most {TOPIC_AND_GROUP_CHARS_MAX} are allowed",
            hint="the two make up a file's name: use a shorter one",
        )
    return names


def check_type(kind: object) -> str:
    """Return an event type as a plain string. The grammar is the topic's: ``ACTION_EXECUTED``, ``a.b.c``."""
    return _path_name("meta.type", kind)


def _path_name(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidName(field, f"must be a non-empty string, not {_shown(value)}")
    name = str.__str__(value)  # an enum member's own text, whatever its class prints
    if len(name) > NAME_CHARS_MAX:
        raise InvalidName(field, f"is {len(name)} characters long; at most {NAME_CHARS_MAX} are allowed")
    if _PATH_NAME.fullmatch(name) is None:
        raise InvalidName(
            field,
            f"{_shown(name)} is not a valid name",
            hint="use letters, digits, '_', '-', '@', ':' and single dots between words; no path separators",
        )
    # Were "a_" or "_b" allowed, the topics "a_" and "a" would share the file "a___b" with the groups "b" and "_b".
    if "__" in name or name[0] in "_-" or name[-1] == "_":
        raise InvalidName(field, f"{_shown(name)} must not contain '__', start with '_' or '-', nor end with '_'")
    return name


def check_space(space_id: object) -> str:
    """Return a space id: any text of up to 128 bytes without control characters."""
    return _text("meta.space_id", space_id, SPACE_BYTES_MAX)


def check_event_id(event_id: object) -> str:
    """Return an event id: any text of up to 256 bytes without control characters."""
    return _text("meta.event_id", event_id, EVENT_ID_BYTES_MAX)


def check_idem_key(idem_key: object) -> str:
    """Return an idempotency key; the rules are an event id's."""
    return _text("meta.idem_key", idem_key, EVENT_ID_BYTES_MAX)


def _check_count(field: str, kind: str, names: Iterable[object], count_max: int) -> None:
    """Reject a list that is far too long before its names are looked at. A list that repeats names may be somewhat longer."""
    if isinstance(names, Sized) and len(names) > _REPEATS_MAX * count_max:
        raise InvalidName(field, f"names {len(names)} {kind}; at most {count_max} are allowed")


def check_partitions(partitions: Iterable[object]) -> tuple[str, ...]:
    """
    Return partition names as they are stored: NFC, without repeats, in UTF-8 byte order.

    Two spellings that differ only in Unicode form are one partition.
    """
    if isinstance(partitions, str | bytes) or not isinstance(partitions, Iterable):
        raise InvalidName("meta.partitions", f"must be a list of names, not {_shown(partitions)}")
    _check_count("meta.partitions", "partitions", partitions, PARTITION_COUNT_MAX)
    names = {unicodedata.normalize("NFC", _text("meta.partitions", name, PARTITION_BYTES_MAX)) for name in partitions}
    for name in names:  # normalising may lengthen a name
        _text("meta.partitions", name, PARTITION_BYTES_MAX)
    if len(names) > PARTITION_COUNT_MAX:
        raise InvalidName(
            "meta.partitions", f"names {len(names)} partitions; at most {PARTITION_COUNT_MAX} are allowed"
        )
    return tuple(sorted(names, key=str.encode))


def check_object(field: str, name: object) -> str:
    """Return an object's id, ``<type>:<id>``: a lower-case type, and any text without control characters; NFC, up to 256 bytes in all."""
    text = unicodedata.normalize("NFC", _text(field, name, OBJECT_BYTES_MAX))
    if OBJECT_ID.fullmatch(_text(field, text, OBJECT_BYTES_MAX)) is None:
        raise InvalidName(field, f"{_shown(text)} is not an object", hint="write type and id: order:42")
    return text


def check_objects(objects: Iterable[object]) -> tuple[str, ...]:
    """Return object ids as they are stored: NFC, without repeats, in UTF-8 byte order."""
    if isinstance(objects, str | bytes) or not isinstance(objects, Iterable):
        raise InvalidName("meta.objects", f"must be a list of objects, not {_shown(objects)}")
    _check_count("meta.objects", "objects", objects, OBJECT_COUNT_MAX)
    names = {check_object("meta.objects", name) for name in objects}
    if len(names) > OBJECT_COUNT_MAX:
        raise InvalidName("meta.objects", f"names {len(names)} objects; at most {OBJECT_COUNT_MAX} are allowed")
    return tuple(sorted(names, key=str.encode))


def check_app(field: str, app: object) -> str:
    """Return an app's slug: up to 64 of lower-case letters, digits, ``.``, ``_`` and ``-``, the first a letter or digit."""
    if not isinstance(app, str) or len(app) > APP_CHARS_MAX or _APP.fullmatch(app) is None:
        hint = f"up to {APP_CHARS_MAX} lower-case letters, digits, '.', '_' and '-'; the first a letter or digit"
        raise InvalidName(field, f"{_shown(app)} is not an app", hint)
    return str.__str__(app)


def snake_case(name: str) -> str:
    """A class's name as JSON has it: ``DoorOpened`` is ``door_opened``."""
    return _CAPITAL.sub("_", name).lower()


def _text(field: str, value: object, bytes_max: int) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidName(field, f"must be a non-empty string, not {_shown(value)}")
    text = str.__str__(value)
    if _CONTROL.search(text) is not None:
        raise InvalidName(field, f"{_shown(text)} holds a control character or a lone surrogate")
    size = len(text.encode())
    if size > bytes_max:
        raise InvalidName(field, f"is {size} bytes long; at most {bytes_max} are allowed")
    return text


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
