"""
From an event to a line: everything is checked here, before anything is written.

``EventEncoder.check`` turns an event into an ``EventDraft`` or raises the one typed error that names the field at fault;
``encode`` puts a draft at its place. Between the two the engine looks for duplicates and gives out
offset and seq. Both engines use this module, so they refuse the same things for the same reasons.

``check_event`` and its siblings check without storing. They are the log's own checks, so a yes here is a yes there, but for what
only the log knows (whether the event is a repetition).
"""

from __future__ import annotations

import enum
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
import orjson

from tidings.core import names
from tidings.core.clock import ns_of
from tidings.core.errors import InvalidEvent, InvalidPayload, InvalidTimestamp
from tidings.core.events import ENVELOPE_NAMES, OPTIONAL_NAMES, Event, EventMeta, QoS, SecurityBand

from .encryption import Encryptor, open_payload, seal_payload
from .errors import SealedPayload
from .line_codec import encode_before_id, encode_record_line, holds_null
from .record import Record
from .segment import space_folder
from .settings import LogSettings

# What JSON cannot say must be refused, not rewritten: no datetimes, dataclasses or subclasses on the quiet.
_STRICT: Final = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS
_BANDS: Final = tuple(SecurityBand)
_LARGE_BYTES: Final = 4 * 1024
_OPENING_BRACE: Final = ord("{")
_HEADS_MAX: Final = 10_000
_REST_BYTES_MAX: Final = 64 * 1024
_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9_.:|@/\-]{1,256}", re.ASCII)
_TS_NS_MAX: Final = ns_of(datetime.fromisoformat("2262-01-01T00:00:00+00:00"))
WRITTEN_NS_MAX: Final = ns_of(datetime.fromisoformat("2100-01-01T00:00:00+00:00"))
"""A clock that says more is wrong. Times of writing never go back, so one such record would give its time to all later ones."""


class EnvelopeHead:
    """The checked, encoded part of an envelope that many events share."""

    __slots__ = ("json", "space_id", "topic", "type")

    def __init__(self, meta: EventMeta) -> None:
        self.topic = names.check_topic(meta.topic)
        self.type = names.check_type(meta.type)
        self.space_id = names.check_space(meta.space_id)
        self.json = b'"topic":%b,"type":%b,"space_id":%b,' % (
            orjson.dumps(self.topic),
            orjson.dumps(self.type),
            orjson.dumps(self.space_id),
        )


class EventDraft(msgspec.Struct, gc=False):
    """An event that may be stored: checked and encoded, but for its place."""

    head: EnvelopeHead
    event_id: str
    """The producer's; or, once the event is accepted, the one the log made; empty until then."""
    ts_us: int
    """When it happened, in microseconds since 1970."""
    payload: bytes
    rest: bytes = b""
    """The optional part of the envelope."""
    idem_key: str | None = None
    partitions: tuple[str, ...] = ()
    is_given: bool = False
    """Whether the producer gave the id."""
    needs_slow_path: bool = False
    """Whether more than a place in the next batch has to be found for it: it may be a duplicate, must be sealed, or is
    so large that bytes have to be counted."""
    plain: bytes | None = None
    """Of a sealed draft: the payload before it was."""


def written_ns(now_ns: int, last_ns: int) -> int:
    """Return the time of writing for a record: never before that of the last one, and never from a clock that cannot be right."""
    return last_ns if now_ns >= WRITTEN_NS_MAX else max(now_ns, last_ns)


class EventEncoder:
    """Checks and encodes events for one log."""

    def __init__(self, settings: LogSettings, encryptor: Encryptor | None = None) -> None:
        self._payload_bytes_max = settings.payload_bytes_max
        self._payload_depth_max = settings.payload_depth_max
        # A level takes two bytes at least, so a short payload cannot be deep.
        self._harmless_bytes = min(settings.payload_bytes_max, 2 * settings.payload_depth_max)
        self._encryptor = encryptor
        self._is_quick = encryptor is None
        self._is_by_space = settings.layout == "space"
        self._heads: dict[tuple[str, str, str], EnvelopeHead] = {}
        self._rests: dict[tuple[str | None, tuple[str, ...]], tuple[bytes, None, tuple[str, ...]]] = {}
        self._last_ts: datetime | None = None
        self._last_ts_us = 0

    def check(self, event: Event) -> EventDraft:
        """
        Check an event and encode all of it but its place.

        Raises:
            InvalidEvent: It cannot be stored as it is.
        """
        meta = event.meta
        try:
            head = self._heads[meta.topic, meta.type, meta.space_id]
        except (KeyError, TypeError):
            head = self._new_head(meta)
        try:
            payload = orjson.dumps(event.payload, None, _STRICT)
        except (orjson.JSONEncodeError, RecursionError) as error:
            payload = self._encode_again(event.payload, error)
        if len(payload) > self._harmless_bytes or holds_null(payload) or payload[0] != _OPENING_BRACE:
            self._check_payload(event.payload, payload)
        if meta._event_id is None and meta._ts is None and not meta._more and self._is_quick:
            return EventDraft(head, "", meta._ts_ns // 1000, payload, b"", None, (), False, len(payload) > _LARGE_BYTES)
        return self._check_more(meta, head, payload)

    def _check_more(self, meta: EventMeta, head: EnvelopeHead, payload: bytes) -> EventDraft:
        """For events that carry more than is required, and spaces that are encrypted."""
        event_id = meta._event_id
        if event_id is not None and (type(event_id) is not str or _PLAIN_ID.fullmatch(event_id) is None):
            event_id = names.check_event_id(event_id)
        ts = meta._ts
        if ts is None:
            ts_us = meta._ts_ns // 1000
        elif ts is self._last_ts:  # the events of a batch often share one
            ts_us = self._last_ts_us
        else:
            ts_us = timestamp_ns(ts) // 1000
            self._last_ts, self._last_ts_us = ts, ts_us
        rest, idem_key, partitions = self._rest_of(meta._more) if meta._more else (b"", None, ())
        is_given = event_id is not None
        needs_slow_path = (
            is_given
            or idem_key is not None
            or len(payload) > _LARGE_BYTES
            or (not self._is_quick and self._seals(head.space_id))
        )
        return EventDraft(head, event_id or "", ts_us, payload, rest, idem_key, partitions, is_given, needs_slow_path)

    def _rest_of(self, more: Mapping[str, Any]) -> tuple[bytes, str | None, tuple[str, ...]]:
        """
        The optional part of an envelope, with the checked dedupe key and partitions.

        Two kinds are common and made faster: a dedupe key alone, and the partitions of one actor, as sync clients have them.
        """
        idem_key = more.get("idem_key")
        if len(more) == 1 and type(idem_key) is str and _PLAIN_ID.fullmatch(idem_key) is not None:
            return b',"idem_key":"%b"' % idem_key.encode(), idem_key, ()
        actor, partitions = more.get("actor"), more.get("partitions")
        if (
            type(partitions) is not tuple
            or len(more) != (1 if actor is None else 2)
            or not (actor is None or type(actor) is str)
        ):
            return _encode_rest(more)
        key = (actor, partitions)
        try:
            known = self._rests.get(key)
        except TypeError:
            known = None
        if known is None:
            rest, _, names_of = _encode_rest(more)
            if len(self._rests) >= _HEADS_MAX:
                self._rests.clear()
            known = self._rests[key] = (rest, None, names_of)
        return known

    def _seals(self, space_id: str) -> bool:
        return self._encryptor is not None and self._encryptor.protects(space_id)

    def seal(self, draft: EventDraft) -> EventDraft:
        """
        The draft as it is stored: its payload encrypted, if its space is protected. It must have its id.

        Raises:
            NoSealingKey: The space's keys were destroyed.
        """
        encryptor, head = self._encryptor, draft.head
        if encryptor is None or not encryptor.protects(head.space_id):
            return draft
        bound_to = _bound_to(head.topic, head.space_id, draft.event_id)
        sealed, payload = seal_payload(encryptor, head.space_id, draft.payload, bound_to)
        rest = draft.rest + b',"sealed":' + msgspec.json.encode(sealed)
        return msgspec.structs.replace(draft, payload=payload, rest=rest, plain=draft.payload)

    def _new_head(self, meta: EventMeta) -> EnvelopeHead:
        head = EnvelopeHead(meta)
        if self._is_by_space:
            space_folder(head.space_id)
        if len(self._heads) >= _HEADS_MAX:
            self._heads.clear()
        self._heads[head.topic, head.type, head.space_id] = head
        return head

    def _encode_again(self, payload: object, error: Exception) -> bytes:
        """A mapping that is not a dict is as good as one; anything else is refused."""
        if type(payload) is not dict and isinstance(payload, Mapping):
            try:
                return orjson.dumps(dict(payload), None, _STRICT)
            except (orjson.JSONEncodeError, RecursionError) as again:
                error = again
        problem = _encode_problem(error)
        if problem == _TOO_DEEP or not isinstance(payload, Mapping):
            raise InvalidPayload("payload", problem) from error
        key: object = _key_at_fault(payload, None)
        place = f"payload.{key}" if isinstance(key, str) and key.isidentifier() and len(key) <= 64 else "payload"
        hint = "publish str(value), or a dataclass or model with that field: its dates, decimals and enums become text"
        raise InvalidPayload(place, problem, hint) from error

    def _check_payload(self, payload: object, encoded: bytes) -> None:
        """The checks that a short payload without a null passes by its looks."""
        if encoded[0] != _OPENING_BRACE:
            raise InvalidPayload("payload", f"must be a JSON object, not {type(payload).__name__}")
        if len(encoded) > self._payload_bytes_max:
            raise InvalidPayload(
                "payload",
                f"is {len(encoded)} bytes of JSON; at most {self._payload_bytes_max} are allowed",
                hint="store large content elsewhere and publish a reference, or raise payload_bytes_max",
            )
        # The encoder writes NaN and infinities as null. Only a payload that holds a null can have hidden one.
        if holds_null(encoded):
            _refuse_hidden_null(payload, "payload")
        depth_max = self._payload_depth_max
        if encoded.count(b"{") + encoded.count(b"[") > depth_max and _depth(encoded, depth_max) > depth_max:
            raise InvalidPayload("payload", f"nests deeper than {depth_max} levels")

    @staticmethod
    def encode(draft: EventDraft, offset: int, seq: int, written_at: bytes) -> bytes:
        """The line of a draft that has its id, at its place, newline included."""
        before_id = encode_before_id(written_at, draft.head.json)
        return encode_record_line(offset, seq, before_id, draft.event_id, draft.ts_us, draft.rest, draft.payload)


def unsealed(record: Record, encryptor: Encryptor | None) -> Record:
    """The record with its payload decrypted, if it is sealed and a key is at hand; else as it is."""
    if encryptor is None or record.meta.sealed is None:
        return record
    meta, sealed = record.meta, record.meta.sealed
    bound_to = _bound_to(meta.topic, meta.space_id, meta.event_id)
    try:
        payload = open_payload(encryptor, meta.space_id, sealed, bytes(record.payload_json), bound_to)
    except SealedPayload:  # a key that is gone must not hide the records around it
        return record
    return Record.of(record.offset, record.seq, msgspec.structs.replace(meta, sealed=None), msgspec.Raw(payload))


def same_draft(draft: EventDraft, other: EventDraft) -> bool:
    """Whether two drafts say the same; see ``same_content``."""
    payload, others = draft.plain or draft.payload, other.plain or other.payload
    return _places(draft) == _places(other) and (payload == others or _canonical(payload) == _canonical(others))


def same_content(draft: EventDraft, record: Record) -> bool:
    """
    Whether a draft says the same as a record: same topic, type, space, partitions and payload.

    Times, actor and trace are left out: an honest retry may have been rebuilt elsewhere. For the same
    reason the order of keys does not count, nor whether a whole number is written ``1`` or ``1.0``.

    Raises:
        SealedPayload: The record's payload is encrypted, so the two cannot be compared.
    """
    if _places(draft) != _places(record):
        return False
    if record.meta.sealed is not None:
        raise SealedPayload(record.meta.space_id, record.meta.sealed.key)
    stored = bytes(record.payload_json)
    return stored == draft.payload or _canonical(stored) == _canonical(draft.payload)


def content_digest(source: EventDraft | Record) -> bytes:
    """
    16 bytes that are equal for a draft and a record exactly if ``same_content`` says so: what is left of
    a record when only its id is remembered.

    Raises:
        SealedPayload: The record's payload is encrypted.
    """
    if isinstance(source, Record):
        if source.meta.sealed is not None:
            raise SealedPayload(source.meta.space_id, source.meta.sealed.key)
        payload = bytes(source.payload_json)
    else:
        payload = source.payload
    return hashlib.blake2b(orjson.dumps(_places(source)) + _canonical(payload), digest_size=16).digest()


def _places(source: EventDraft | Record) -> tuple[str, str, str, tuple[str, ...]]:
    if isinstance(source, Record):
        meta = source.meta
        return meta.topic, meta.type, meta.space_id, meta.partitions
    head = source.head
    return head.topic, head.type, head.space_id, source.partitions


_TEXT_OR_WHOLE: Final = re.compile(rb'("(?:[^"\\]++|\\.)*+")|(-?[0-9]+)\.0(?![0-9])')


def _canonical(payload: bytes) -> bytes:
    """The same bytes for all payloads that are equal: keys in order, whole numbers without a fraction."""
    text = orjson.dumps(orjson.loads(payload), option=orjson.OPT_SORT_KEYS)
    return _TEXT_OR_WHOLE.sub(lambda found: found[1] or found[2], text) if b".0" in text else text


def _bound_to(topic: str, space_id: str, event_id: str) -> bytes:
    """What a sealed payload is tied to, so that it cannot be moved to another record."""
    return orjson.dumps([topic, space_id, event_id])


def timestamp_ns(ts: object, field: str = "meta.ts") -> int:
    """
    A time that the log can order, in nanoseconds since 1970.

    Raises:
        InvalidTimestamp: It is none.
    """
    if not isinstance(ts, datetime):
        raise InvalidTimestamp(field, f"must be a datetime, not {type(ts).__name__}")
    if ts.utcoffset() is None:
        raise InvalidTimestamp(
            field, f"{ts.isoformat()} has no time zone", hint="use datetime.now(timezone.utc), not utcnow()"
        )
    ns = ns_of(ts)
    if not 0 <= ns < _TS_NS_MAX:
        raise InvalidTimestamp(field, f"{ts.isoformat()} is outside the years 1970 to 2261")
    return ns


def _check_partitions(partitions: Any) -> tuple[str, ...] | None:
    return names.check_partitions(partitions) or None if partitions else None


def _check_ttl(ttl_sec: object) -> object:
    if type(ttl_sec) is not int or ttl_sec < 0:
        raise InvalidEvent("meta.ttl_sec", f"must be a whole number of seconds, not {ttl_sec!r}")
    return ttl_sec


def _check_trace_id(trace_id: object) -> object:
    if not isinstance(trace_id, str):
        raise InvalidEvent("meta.trace_id", f"must be a string, not {type(trace_id).__name__}")
    return trace_id


def _check_priority(priority: object) -> object:
    if type(priority) not in (int, str):
        raise InvalidEvent("meta.priority", f"must be a number or a word, not {type(priority).__name__}")
    return priority


def _check_band(band: object) -> object:
    if band not in _BANDS:
        raise InvalidEvent("meta.band", f"must be one of {', '.join(SecurityBand)}, not {band!r}")
    return band


def _check_qos(qos: object) -> object:
    if not isinstance(qos, Mapping | QoS):
        raise InvalidEvent("meta.qos", f"must be a mapping, not {type(qos).__name__}")
    return qos


def _check_extra(extra: object) -> object:
    if not isinstance(extra, Mapping):
        raise InvalidEvent("meta.extra", f"must be a mapping, not {type(extra).__name__}")
    if extra and (taken := sorted(set(extra) & ENVELOPE_NAMES)):
        raise InvalidEvent("meta.extra", f"must not repeat the envelope's own key {taken[0]!r}")
    return extra or None


_CHECKS: Final[dict[str, Callable[[Any], object]]] = {
    "trace_id": _check_trace_id,
    "idem_key": names.check_idem_key,
    "ttl_sec": _check_ttl,
    "partitions": _check_partitions,
    "objects": lambda objects: names.check_objects(objects) or None,
    "app": lambda app: names.check_app("meta.app", app),
    "band": _check_band,
    "priority": _check_priority,
    "qos": _check_qos,
    "extra": _check_extra,
}


def _encode_rest(more: Mapping[str, Any]) -> tuple[bytes, str | None, tuple[str, ...]]:
    """The optional part of an envelope, as ``,"key":value`` pairs, with the checked dedupe key and partitions."""
    present: dict[str, Any] = {}
    for name in OPTIONAL_NAMES:  # in the order that a record has them
        value = more.get(name)
        if value is not None and name in _CHECKS:
            value = _CHECKS[name](value)
        if value is not None:
            present[name] = value
    try:
        encoded = orjson.dumps(present, _plain, _STRICT)
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise InvalidEvent(f"meta.{_key_at_fault(present, _plain)}", _encode_problem(error)) from error
    if len(encoded) > _REST_BYTES_MAX:
        raise InvalidEvent(
            "meta",
            f"is {len(encoded)} bytes of JSON beside its names and times; at most {_REST_BYTES_MAX} are allowed",
            hint="the envelope is for what routes an event; content belongs in the payload",
        )
    if b"null" in encoded:
        for key, value in present.items():
            _refuse_hidden_null(value, f"meta.{key}")
    return b"," + encoded[1:-1] if present else b"", present.get("idem_key"), present.get("partitions", ())


def _key_at_fault(present: Mapping[str, object], default: Callable[[object], object] | None) -> str:
    for key, value in present.items():
        try:
            orjson.dumps({key: value}, default, _STRICT)
        except (orjson.JSONEncodeError, RecursionError):
            return key
    return next(iter(present))


def _plain(value: object) -> object:
    """For the encoder: our own structs, mappings and string enums as plain JSON values."""
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


_TOO_DEEP: Final = "nests too deep to be encoded"


def _encode_problem(error: Exception) -> str:
    text = str(error)
    if "Recursion" in text or isinstance(error, RecursionError):
        return _TOO_DEEP
    return f"cannot be stored as JSON: {text}"


def _refuse_hidden_null(value: object, path: str) -> None:
    """Raise if a float that JSON has no word for is somewhere in ``value``."""
    stack: list[tuple[str, object]] = [(path, value)]
    while stack:
        place, item = stack.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                raise InvalidPayload(place, f"{item} is not a JSON number")
        elif isinstance(item, enum.Enum):
            stack.append((place, item.value))
        elif isinstance(item, Mapping):
            stack.extend((f"{place}.{key}", inner) for key, inner in item.items())
        elif isinstance(item, list | tuple):
            stack.extend((f"{place}[{index}]", inner) for index, inner in enumerate(item))


# Possessive: a quantifier that could go back would remember each step through a string of megabytes.
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"')
_ONE_KIND: Final = bytes.maketrans(b"[]", b"{}")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"{}[]"))
_NO_MARKS: Final = bytes(set(range(256)) - set(b'{}[]"'))


def _depth(encoded: bytes, depth_max: int) -> int:
    """How deep JSON nests, as far as one beyond ``depth_max``."""
    if b"\\" not in encoded:
        # Without escapes every quote begins or ends a string. Two that meet are an empty string, or the border of two, which may as well be
        # one: without them next to nothing is left for the expression, which takes far longer.
        marks = encoded.translate(None, _NO_MARKS)
        if len(marks) <= len(encoded) // 2:  # else the copies would take more room than they save time
            encoded = marks.replace(b'""', b"")
        del marks
    brackets = _STRING.sub(b"", encoded).translate(_ONE_KIND, _NO_BRACKETS)
    depth = 0
    while brackets and depth <= depth_max:
        brackets = brackets.replace(b"{}", b"")  # the innermost level
        depth += 1
    return depth


def check_event(event: Event, settings: LogSettings | None = None) -> None:
    """
    Check all of an event.

    Args:
        event: What would be published. It stays as it is.
        settings: The limits; those that a log has by default if left out.

    Raises:
        InvalidEvent: It would be refused; ``field`` names what is at fault, and ``problem`` says why.
    """
    EventEncoder(settings or LogSettings()).check(event)


def check_envelope(meta: EventMeta, settings: LogSettings | None = None) -> None:
    """
    Check an envelope, whatever its payload is.

    Raises:
        InvalidEvent: As ``check_event``.
    """
    check_event(Event(meta, {}), settings)


def check_payload(payload: Mapping[str, Any], settings: LogSettings | None = None) -> None:
    """
    Check a payload, whatever its envelope is.

    Raises:
        InvalidPayload: As ``check_event``.
    """
    check_event(Event(EventMeta("any", "ANY", "any"), payload), settings)
