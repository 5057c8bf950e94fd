"""
CloudEvents 1.0 in and out: structured, batched and binary.

| CloudEvents                       | Tidings                                                                        |
|-----------------------------------|--------------------------------------------------------------------------------|
| ``source`` and ``id`` together        | ``event_id`` (``<source>#<id>``, a digest of it if too long): that pair is what is unique |
| ``type``                            | ``type``                                                                         |
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
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from tidings.core.errors import InvalidEvent, InvalidPayload
from tidings.core.events import ENVELOPE, NAME_SETS, Event
from tidings.core.names import EVENT_ID_BYTES_MAX
from tidings.core.validation import UNREADABLE, explain, refuse_repeated_keys
from tidings.log.record import Record
from tidings.wire.events import EventDefaults, EventIn, EventMetaIn, event_of

CLOUDEVENT: Final = "application/cloudevents+json"
CLOUDEVENTS_BATCH: Final = "application/cloudevents-batch+json"

_VERSION: Final = "1.0"
_NAME: Final = re.compile(r"[a-z0-9]{1,64}")
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
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
        name[3:]: unquote(value.strip().strip('"')) for name, value in headers.items() if name.startswith("ce-")
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
    for name in ("id", "source", "type"):
        if not isinstance(attributes.get(name), str) or not attributes[name]:
            raise InvalidEvent(name, "is missing")
    kept = {
        name: value for name, value in attributes.items() if name not in _GIVEN_BY_META | _OWN and value is not None
    }
    if shape is not None:
        kept[_SHAPE] = shape
    trace = _TRACEPARENT.fullmatch(str(attributes.get("traceparent", "")))
    meta = {field.name: attributes.get(field.attribute) for field in ENVELOPE if field.attribute is not None}
    meta |= {
        "event_id": _event_id(attributes["source"], attributes["id"]),
        "trace_id": None if trace is None else trace[1],
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
        "type": meta.type,
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
