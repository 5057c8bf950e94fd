"""
What requests must fulfil beside the types of their structs, for the OpenAPI document: the grammar of names, times, and fields that exclude others.

Handlers check the same when they read a value, with errors of their own: a name is checked where it is used, whichever endpoint it came by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidings.core.names import (
    APP_CHARS_MAX,
    EVENT_ID_BYTES_MAX,
    NAME_CHARS_MAX,
    OBJECT_BYTES_MAX,
    OBJECT_COUNT_MAX,
    PARTITION_BYTES_MAX,
    PARTITION_COUNT_MAX,
    SPACE_BYTES_MAX,
)

_Schema = dict[str, Any]

_NAME: Final[_Schema] = {
    "type": "string",
    "minLength": 1,
    "maxLength": NAME_CHARS_MAX,
    "pattern": r"^(?![_\-])(?!.*__)(?!.*_$)[A-Za-z0-9_@:\-]+(\.[A-Za-z0-9_@:\-]+)*$",
}
_APP: Final[_Schema] = {
    "type": "string",
    "minLength": 1,
    "maxLength": APP_CHARS_MAX,
    "pattern": r"^[a-z0-9][a-z0-9._\-]*$",
}
_TIME: Final[_Schema] = {"type": "string", "format": "date-time"}
_SEQ: Final[_Schema] = {"type": "integer", "minimum": 1, "maximum": 10**18 - 1}
_NO_CONTROL: Final = r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+$"


def _text(bytes_max: int) -> _Schema:
    return {"type": "string", "minLength": 1, "maxLength": bytes_max, "pattern": _NO_CONTROL}


def _having(field: str) -> _Schema:
    return {"required": [field], "properties": {field: {"not": {"type": "null"}}}}


_OBJECT: Final[_Schema] = {
    **_text(OBJECT_BYTES_MAX),
    "pattern": r"^[a-z][a-z0-9]*([_.\-][a-z0-9]+)*:[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+$",
}
_PARTITIONS: Final[_Schema] = {"type": "array", "items": _text(PARTITION_BYTES_MAX), "maxItems": PARTITION_COUNT_MAX}
_CHANGE: Final[_Schema] = {
    "resource": {
        "anyOf": [
            {
                "type": "string",
                "description": "As the tool writes it: ``topic:orders``, ``partition:home-*``, ``node``.",
            },
            {"$ref": "#/components/schemas/ResourcePattern"},
        ]
    }
}

PATHS: Final[Mapping[str, _Schema]] = {
    "topic": _NAME,
    "group": _NAME,
    "slug": _APP,
    "seq": _SEQ,
    "id": {"type": "string", "minLength": 1},
}
"""Parameters of paths."""

FIELDS: Final[Mapping[str, Mapping[str, _Schema]]] = {
    "PublishQuery": {"topic": _NAME, "space_id": _text(SPACE_BYTES_MAX), "at": _TIME},
    "CancelQuery": {"event_id": _text(EVENT_ID_BYTES_MAX)},
    "ReadQuery": {
        "topic": _NAME,
        "partition": {"type": "array", "items": _text(PARTITION_BYTES_MAX)},
        "event_id": _text(EVENT_ID_BYTES_MAX),
        "type": {"type": "array", "items": _NAME},
        "from_time": _TIME,
        "to_time": _TIME,
    },
    "EnvelopesQuery": {"app": _APP, "object_id": {"type": "array", "items": _OBJECT}},
    "GroupsQuery": {"topic": _NAME},
    "DeadLettersQuery": {"topic": _NAME, "since": _TIME},
    "RetentionBody": {
        "rules": {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"anyOf": [_NAME, {"const": "*"}]},
            "additionalProperties": {"$ref": "#/components/schemas/TopicRetention"},
        }
    },
    "DeadLettersBody": {"topic": _NAME, "since": _TIME},
    "SeekBody": {"to_time": _TIME},
    "EventMetaIn": {
        "type": _NAME,
        "topic": _NAME,
        "space_id": _text(SPACE_BYTES_MAX),
        "event_id": _text(EVENT_ID_BYTES_MAX),
        "idem_key": _text(EVENT_ID_BYTES_MAX),
        "ts": _TIME,
        "partitions": _PARTITIONS,
        "objects": {"type": "array", "items": _OBJECT, "maxItems": OBJECT_COUNT_MAX},
        "app": _APP,
    },
    "CloudEvent": {
        "specversion": {"const": "1.0"},
        "id": _text(EVENT_ID_BYTES_MAX),
        "source": {"type": "string", "minLength": 1},
        "type": {"type": "string", "minLength": 1},
        "time": _TIME,
        "topic": _NAME,
        "spaceid": _text(SPACE_BYTES_MAX),
        "app": _APP,
    },
    "Grant": _CHANGE,
    "Revoke": _CHANGE,
    "AppRegistered": {"slug": _APP},
    "AppEnabled": {"slug": _APP},
    "AppEventType": {"slug": _APP, "topic": _NAME, "record_type": _NAME},
    "Directive": {
        "target": {"type": "string", "pattern": r"^(all|(identity|app|address|connection):.+)$"},
        "reason_code": {"type": "string", "maxLength": 64, "pattern": r"^[a-z][a-z0-9]*([._][a-z0-9]+)*$"},
    },
}
"""Fields of query parameters and bodies, by the name of their struct."""

DEFAULT_TYPES: Final = ("Grant", "Revoke", "PolicyPut", "AppRegistered")
"""Changes that are meant where a body has no ``type``."""

WHOLE: Final[Mapping[str, _Schema]] = {
    "SeekBody": {"oneOf": [_having("to_offset"), _having("to_time"), _having("to")]},
    "DeadLettersBody": {
        "anyOf": [
            {"required": ["ids"], "properties": {"ids": {"minItems": 1}}},
            {"required": ["all"], "properties": {"all": {"const": True}}},
            *(_having(name) for name in ("group", "reason", "error_type", "error_contains", "since")),
        ]
    },
}
"""What holds for a body as a whole."""

NOTES: Final[Mapping[str, str]] = {
    "publishEvents": "``delay_s`` and ``at`` exclude each other.",
    "cancelDelayedEvent": "Give ``event_id`` or ``actor``, not both.",
    "readEvents": "``from_offset`` and ``to_offset`` need ``topic``: offsets count within it.",
    "readEnvelopes": "``until`` is for pages: a stream has no end.",
}
"""Parameters that exclude or need each other, by operation: OpenAPI has no other place for that."""


def constrain(components: dict[str, Any]) -> None:
    """Add to the schemas of requests what their structs do not express."""
    for name, fields in FIELDS.items():
        properties = components[name]["properties"]
        for field, schema in fields.items():
            properties[field] = _constrained(properties[field], schema)
    for name in DEFAULT_TYPES:
        components[name]["required"] = [each for each in components[name]["required"] if each != "type"]
    for name, schema in WHOLE.items():
        components[name].update(schema)


def _constrained(schema: _Schema, constraint: _Schema) -> _Schema:
    kept: _Schema = {key: schema[key] for key in ("default", "description") if key in schema}
    if any(each == {"type": "null"} for each in schema.get("anyOf", ())):
        return {"anyOf": [constraint, {"type": "null"}], **kept}
    return {**constraint, **kept}
