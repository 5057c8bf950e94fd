"""
CloudEvents 1.0 in and out: structured, batched and binary.

| CloudEvents                       | Tidings                                                                        |
|-----------------------------------|--------------------------------------------------------------------------------|
| ``source`` and ``id`` together        | ``event_id`` (``<source>#<id>``, a digest of it if too long): that pair is what is unique |
| ``type``                            | ``type``; one that is not a type's name is kept, beside a name made from it      |
| ``time``                            | ``ts``                                                                           |
| ``data``, a JSON object             | the payload                                                                    |
| other ``data``, ``data_base64``       | the payload ``{"data": ...}`` or ``{"data_base64": ...}``                          |
| no data at all                    | the payload ``{}``                                                               |
| extension ``topic``, ``spaceid``      | ``topic``, ``space_id``; else those of the request's parameters                  |
| extensions ``partitions``, ``objects``  | ``partitions``, ``objects``, separated by blanks                                   |
| ``idemkey``, ``ttlsec``, ``actor``, ``band``, ``app`` | ``idem_key``, ``ttl_sec``, ``actor``, ``band``, ``app``                            |
| ``traceparent``                     | kept, and its trace id as ``trace_id``                                           |
| ``source``, ``id``, ``subject``, all others | ``extra.cloudevents``, from where they come back out                                |

``source`` and ``subject`` say what an event is about, and are the publisher's own word. Who published it is ``actor``, which access
has looked at.

Sans-I/O: mappings in, events out, and records in, mappings out.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import unicodedata
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from tidings.core.errors import InvalidEvent, InvalidName, InvalidPayload
from tidings.core.events import ENVELOPE, NAME_SETS, Event
from tidings.core.names import EVENT_ID_BYTES_MAX, NAME_CHARS_MAX, check_type
from tidings.core.validation import UNREADABLE, explain, refuse_repeated_keys
from tidings.log.record import Record
from tidings.wire.events import EventDefaults, EventIn, EventMetaIn, event_of

CLOUDEVENT: Final = "application/cloudevents+json"
CLOUDEVENTS_BATCH: Final = "application/cloudevents-batch+json"

_VERSION: Final = "1.0"
_NAME: Final = re.compile(r"[a-z0-9]{1,64}")
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_NO_WORD: Final = re.compile(r"[^A-Za-z0-9-]+")
_NO_URI: Final = re.compile(r"[\s\x00-\x1f\x7f]")
_NOT_EMPTY: Final = frozenset({"subject", "datacontenttype", "dataschema"})
_URIS: Final = frozenset({"source", "dataschema"})
_KEPT: Final = "cloudevents"
_SHAPE: Final = "data_shape"
"""In what is kept: how the payload holds the data, where it is not the data itself. No attribute can be called so."""
_NO_DATA: Final = "none"
_GIVEN_BY_META: Final = frozenset({"specversion", "type", "time"})
_OWN: Final = frozenset(field.attribute for field in ENVELOPE if field.attribute not in ("type", "time", None))


class CloudEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """For the document: the attributes that every CloudEvent has, and ours; others may be beside them."""

    specversion: str
    id: str
    source: str
    type: str
    time: str | None = None
    subject: str | None = None
    datacontenttype: str | None = None
    dataschema: str | None = None
    data: Any = None
    data_base64: str | None = None
    topic: str | None = None
    spaceid: str | None = None
    partitions: str | None = None
    objects: str | None = None
    app: str | None = None


def from_structured(given: object, defaults: EventDefaults) -> Event:
    """
    The event of a CloudEvent in JSON.

    Raises:
        InvalidEvent: It is none.
    """
    if not isinstance(given, dict):
        raise InvalidPayload("event", "a CloudEvent is a JSON object")
    attributes = {name: value for name, value in given.items() if name not in ("data", "data_base64")}
    if "data_base64" in given:
        if "data" in given:
            raise InvalidPayload("data", "has both data and data_base64")
        return _event(attributes, *_binary(given["data_base64"]), defaults)
    if "data" not in given:
        return _event(attributes, {}, _NO_DATA, defaults)
    return _event(attributes, *_shaped(given["data"]), defaults)


def from_binary(headers: Mapping[str, str], body: bytes, defaults: EventDefaults) -> Event:
    """
    The event of a request whose headers are the attributes and whose body is the data.

    Raises:
        InvalidEvent: It is none.
    """
    attributes: dict[str, Any] = {
        name[3:]: unquote(_unquoted(value.strip())) for name, value in headers.items() if name.startswith("ce-")
    }
    media = headers.get("content-type", "")
    if media:
        attributes["datacontenttype"] = media
    if not body:
        return _event(attributes, {}, _NO_DATA, defaults)
    kind = media.partition(";")[0].strip().lower()
    if not (kind == "application/json" or kind.endswith("+json") or not kind):
        return _event(attributes, *_binary(base64.b64encode(body).decode()), defaults)
    refuse_repeated_keys(body, "data")
    try:
        data = msgspec.json.decode(body)
    except UNREADABLE as error:
        raise InvalidPayload("data", f"is not JSON: {error}") from error
    return _event(attributes, *_shaped(data), defaults)


def trace_id_of(parent: str) -> str | None:
    """Return the trace id in a ``traceparent`` of the W3C's Trace Context; ``None`` if it is not valid."""
    match = _TRACEPARENT.fullmatch(parent)
    if match is None or parent.startswith("ff") or not int(match[1], 16) or not int(parent[36:52], 16):
        return None
    return match[1]


def _unquoted(value: str) -> str:
    """Return a header's value without its quotes and the backslashes within, as section 3.1.3.2 of the HTTP binding has it."""
    if len(value) < 2 or value[0] != '"' or value[-1] != '"':
        return value
    return _ESCAPED.sub(r"\1", value[1:-1])


def name_of_type(kind: str) -> str:
    """Return an event type for a CloudEvent's type: unchanged if it is one; else its ASCII words, joined by dots, with a digest if cut."""
    try:
        return check_type(kind)
    except InvalidName:
        pass
    plain = unicodedata.normalize("NFKD", kind).encode("ascii", "ignore").decode()
    name = ".".join(word for part in _NO_WORD.split(plain) if (word := part.strip("-")))
    if name and len(name) <= NAME_CHARS_MAX:
        return name
    digest = hashlib.sha256(kind.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{name[: NAME_CHARS_MAX - 17].strip('.-')}.{digest}".lstrip(".")


def _shaped(data: object) -> tuple[dict[str, Any], str | None]:
    return (data, None) if isinstance(data, dict) else ({"data": data}, "data")


def _binary(text: object) -> tuple[dict[str, Any], str | None]:
    try:
        if not isinstance(text, str):
            raise TypeError
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise InvalidPayload("data_base64", "is not base64") from error
    return {"data_base64": text}, "data_base64"


def _event(attributes: Mapping[str, Any], payload: dict[str, Any], shape: str | None, defaults: EventDefaults) -> Event:
    if attributes.get("specversion") != _VERSION:
        raise InvalidEvent("specversion", f"must be {_VERSION!r}, not {attributes.get('specversion')!r}")
    for name, value in attributes.items():
        if _NAME.fullmatch(name) is None:
            raise InvalidEvent(name[:64], "is no attribute's name: lower-case letters and digits")
        if not isinstance(value, str | int | bool) and value is not None:
            raise InvalidEvent(name, "an attribute is text, a whole number or a boolean")
        if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 31) <= value < 1 << 31:
            raise InvalidEvent(name, "a whole number must fit into 32 bits; send it as text")
        if name in _NOT_EMPTY and value == "":
            raise InvalidEvent(name, "must not be empty; leave it out")
        if name in _URIS and isinstance(value, str) and _NO_URI.search(value):
            raise InvalidEvent(name, "is a URI: without blanks and control characters")
    for name in ("id", "source", "type"):
        if not isinstance(attributes.get(name), str) or not attributes[name]:
            raise InvalidEvent(name, "is missing")
    kept = {
        name: value for name, value in attributes.items() if name not in _GIVEN_BY_META | _OWN and value is not None
    }
    kind = name_of_type(attributes["type"])
    if kind != attributes["type"]:
        kept["type"] = attributes["type"]
    if shape is not None:
        kept[_SHAPE] = shape
    meta = {field.name: attributes.get(field.attribute) for field in ENVELOPE if field.attribute is not None}
    meta |= {
        "type": kind,
        "event_id": _event_id(attributes["source"], attributes["id"]),
        "trace_id": trace_id_of(str(attributes.get("traceparent", ""))),
        "extra": {_KEPT: kept},
    }
    meta |= {name: str(attributes.get(name) or "").split() for name in NAME_SETS}
    try:
        # Not strict: headers carry numbers as text.
        given = EventIn(meta=msgspec.convert(meta, EventMetaIn, strict=False), payload=payload)
    except msgspec.ValidationError as error:
        problem, path = explain(error, "event")
        raise InvalidEvent(path, problem) from error
    return event_of(given, defaults)


def _event_id(source: str, number: str) -> str:
    whole = f"{source}#{number}"
    if len(whole.encode(errors="surrogatepass")) <= EVENT_ID_BYTES_MAX:
        return whole
    return f"ce-{hashlib.sha256(whole.encode(errors='surrogatepass')).hexdigest()}"


def _type_of(kind: str, kept: object) -> str:
    """Return the type that a CloudEvent came in with, if the record's type was made from it."""
    return kept if isinstance(kept, str) and kept and name_of_type(kept) == kind else kind


def to_cloudevent(record: Record) -> dict[str, Any]:
    """
    A record as a CloudEvent; one that came in as a CloudEvent gets its own attributes back.

    One whose payload is encrypted, and not for this node to open, has no data and says ``sealed``: it must not keep the others
    on its page from being read.
    """
    meta = record.meta
    found = (meta.extra or {}).get(_KEPT)
    found = found if isinstance(found, dict) else {}
    shape = found.get(_SHAPE)
    # Any publisher may have written it: only what can be an attribute is shown as one.
    kept = {
        name: value
        for name, value in found.items()
        if _NAME.fullmatch(name) is not None
        and name not in _GIVEN_BY_META | _OWN
        and isinstance(value, str | int | bool)
    }
    shown: dict[str, Any] = {
        "specversion": _VERSION,
        "id": meta.event_id,
        "source": f"/topics/{meta.topic}",
        "type": _type_of(meta.type, found.get("type")),
        "time": meta.ts,
        "datacontenttype": "application/json",
        **kept,
        "topic": meta.topic,
        "spaceid": meta.space_id,
        "seq": record.seq,
        "offset": record.offset,
    }
    shown |= {name: " ".join(names) for name in NAME_SETS if (names := getattr(meta, name))}
    more = {"traceid": meta.trace_id, "idemkey": meta.idem_key, "ttlsec": meta.ttl_sec, "app": meta.app}
    shown |= {name: value for name, value in more.items() if value is not None}
    actor = meta.actor.get("user_id") if isinstance(meta.actor, dict) else meta.actor
    if isinstance(actor, str):
        shown["actor"] = actor
    if meta.sealed is not None:
        shown["sealed"] = True
    elif shape in ("data", "data_base64"):
        shown[shape] = record.payload.get(shape)
    elif shape == _NO_DATA:
        if "datacontenttype" not in kept:
            del shown["datacontenttype"]
    else:
        shown["data"] = record.payload
    return shown
