"""
What a producer hands in: an ``Event``, which is an ``EventMeta`` and a payload; and the one list of the envelope's fields.

Both shapes of ``EventMeta`` that the bus's document shows are accepted::

    EventMeta(topic="actions", type=EventType.ACTION_EXECUTED, space_id="shared:household")
    EventMeta(topic=EventType.WORKSPACE_BROADCAST, space_id="family-001", actor={"user_id": "alice"})

Construction checks nothing but its arguments' presence; the log checks an event when it is appended,
so that there is one place that refuses and one list of reasons.
"""

from __future__ import annotations

import enum
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from datetime import datetime
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from .clock import SYSTEM_CLOCK, datetime_of
from .ids import new_event_id


class SecurityBand(enum.StrEnum):
    """How sensitive an event is. Bands are ordered; the stricter one wins."""

    GREEN = "GREEN"
    AMBER = "AMBER"
    RED = "RED"
    BLACK = "BLACK"

    @property
    def rank(self) -> int:
        """0 for GREEN to 3 for BLACK."""
        return list(SecurityBand).index(self)

    def stricter(self, other: SecurityBand) -> SecurityBand:
        """The stricter of two bands: floors win."""
        return max(self, other, key=lambda band: band.rank)


class Capability(enum.StrEnum):
    """What an actor or a subscriber may do."""

    WRITE = "WRITE"
    RECALL = "RECALL"
    PROJECT = "PROJECT"
    SCHEDULE = "SCHEDULE"


class EnvelopePart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    A structured part of an envelope. It can be read like the mapping it is stored as, and equals that mapping.

    So a handler may write ``actor.user_id`` or ``actor["user_id"]``, whichever way the producer gave the actor.
    """

    def __getitem__(self, key: str) -> Any:
        return self._stored()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored())

    def __len__(self) -> int:
        return len(self._stored())

    def __contains__(self, key: object) -> bool:
        return key in self._stored()

    def keys(self) -> KeysView[str]:
        """The fields that are given."""
        return self._stored().keys()

    def items(self) -> ItemsView[str, Any]:
        """The fields that are given, with their values."""
        return self._stored().items()

    def values(self) -> ValuesView[Any]:
        """The values of the fields that are given."""
        return self._stored().values()

    def get(self, key: str, default: Any = None) -> Any:
        """A field by name; ``default`` if it is not given."""
        return self._stored().get(key, default)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EnvelopePart):
            return type(self) is type(other) and self._stored() == other._stored()
        return isinstance(other, Mapping) and self._stored() == dict(other)

    def __hash__(self) -> int:
        return hash((type(self), msgspec.structs.astuple(self)))

    def _stored(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


Mapping.register(EnvelopePart)


class Actor(EnvelopePart, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The person or agent behind an event."""

    user_id: str
    caps: tuple[Capability, ...] = ()
    agent_id: str | None = None


class Device(EnvelopePart, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The device an event came from."""

    device_id: str
    platform: Literal["ios", "android", "macos", "windows", "linux", "web", "edge"] | None = None
    app_version: str | None = None
    locale: str | None = None


class QoS(EnvelopePart, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How urgent an event is and how it wants to travel."""

    priority: Annotated[int, msgspec.Meta(ge=1, le=10)] = 5
    latency_budget_ms: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    routing: Literal["fast-path", "gate-path"] = "gate-path"
    retries: Annotated[int, msgspec.Meta(ge=0, le=3)] = 0
    deadline_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None


def part_of(kind: type[EnvelopePart], stored: Any) -> Any:
    """
    What was read back, as the type it has the form of.

    A mapping that says more than the type can, or says it otherwise, stays a mapping: nothing is lost by reading.
    """
    if not isinstance(stored, Mapping):
        return stored
    try:
        part: object = msgspec.convert(stored, kind)
    except msgspec.ValidationError:
        return stored
    return part if part == stored else stored


_now_ns: Final = SYSTEM_CLOCK.now_ns


class EnvelopeField(NamedTuple):
    """One field of the envelope. Its name is the same in Python, in JSON and in the tables of the lake."""

    name: str
    kind: Literal["text", "time", "number", "names", "object", "any"]
    """What is stored: text, a time in RFC 3339, a whole number, a set of names, a JSON object, or text or JSON."""
    attribute: str | None = None
    """The attribute of a CloudEvent that it is taken from."""
    is_required: bool = False
    """Whether every record has it."""
    is_from_log: bool = False
    """Whether the log writes it, and a producer cannot."""


# The one list of the envelope's fields, in the order a record has them. What names them again, because a type checker or a
# hot path needs literal names (``EventMeta``, ``RecordMeta``, ``EventMetaIn``, the line encoder), is held to it by
# tests/unit/core/test_envelope.py.
ENVELOPE: Final = (
    EnvelopeField("written_at", "time", is_required=True, is_from_log=True),
    EnvelopeField("topic", "text", "topic", is_required=True),
    EnvelopeField("type", "text", "type", is_required=True),
    EnvelopeField("space_id", "text", "spaceid", is_required=True),
    EnvelopeField("event_id", "text", is_required=True),
    EnvelopeField("ts", "time", "time", is_required=True),
    EnvelopeField("actor", "any", "actor"),
    EnvelopeField("trace_id", "text"),
    EnvelopeField("idem_key", "text", "idemkey"),
    EnvelopeField("ttl_sec", "number", "ttlsec"),
    EnvelopeField("device", "any"),
    EnvelopeField("partitions", "names", "partitions"),
    EnvelopeField("objects", "names", "objects"),
    EnvelopeField("app", "text", "app"),
    EnvelopeField("band", "text", "band"),
    EnvelopeField("priority", "any"),
    EnvelopeField("qos", "object"),
    EnvelopeField("extra", "object"),
    EnvelopeField("sealed", "object", is_from_log=True),
)
ENVELOPE_NAMES: Final = frozenset(field.name for field in ENVELOPE)
GIVEN_NAMES: Final = tuple(field.name for field in ENVELOPE if not field.is_from_log)
"""What a producer can give: the fields of ``EventMeta``."""
OPTIONAL_NAMES: Final = tuple(field.name for field in ENVELOPE if not (field.is_required or field.is_from_log))
"""What most events leave out."""
NAME_SETS: Final = tuple(field.name for field in ENVELOPE if field.kind == "names")
"""What holds names, none if left out."""


class EventType(str, enum.Enum):  # noqa: UP042 - the seed's class is ``(str, Enum)``, and its str() differs from StrEnum's
    """
    The event types the cognition pipelines exchange.

    The list is open: wherever a type is asked for, any name of the same grammar will do, be it a plain
    string or a member of your own ``str`` enum.
    """

    WORKSPACE_BROADCAST = "WORKSPACE_BROADCAST"
    HIPPO_ENCODE = "HIPPO_ENCODE"
    AFFECT_ANNOTATED = "AFFECT_ANNOTATED"
    METACOG_REPORT = "METACOG_REPORT"
    CORTEX_PREDICTION = "CORTEX_PREDICTION"
    ACTION_DECISION = "ACTION_DECISION"
    ACTION_EXECUTED = "ACTION_EXECUTED"
    PROSPECTIVE_TRIGGER = "PROSPECTIVE_TRIGGER"


class TypeName(str):
    """The type of an event, read back, that is no member of ``EventType``: a string with a member's attributes."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The type as plain text."""
        return str.__str__(self)

    @property
    def value(self) -> str:
        """The same."""
        return str.__str__(self)


_NO_NAMES: Final[tuple[str, ...]] = ()

_V = TypeVar("_V")


class _Optional(Generic[_V]):
    """A field that most events leave out: kept in ``_more``, so that leaving all of them out is one look."""

    __slots__ = ("_default", "_name")

    def __init__(self, default: _V) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, meta: EventMeta, owner: type) -> _V:
        more = meta._more
        return self._default if more is None else more.get(self._name, self._default)

    def __set__(self, meta: EventMeta, value: _V) -> None:
        if meta._more is None:
            meta._more = {}
        meta._more[self._name] = value


def _kept(names: Iterable[str]) -> Iterable[str]:
    """Names as given; an iterator would be empty on the second look, and a retry would then say something else."""
    return tuple(names) if names.__class__ is not tuple and isinstance(names, Iterator) else names


class EventMeta:
    """
    The envelope of one event.

    Args:
        topic: Where the event is stored. An ``EventType`` here also serves as the type.
        type: What kind of event it is.
        space_id: Whose data it is; required on everything.
        event_id: The producer's own id, and what dedupe compares. Left out, it is made when it is first
            read or, cheaper, by the log at commit.
        ts: When the event happened, with a zone; now if left out.
        actor: Who acted: a string such as ``device:phone1``, an ``Actor``, or a mapping.
        trace_id: Carried through every hop.
        idem_key: A second, topic- and space-wide dedupe key.
        ttl_sec: After this many seconds the event is no longer worth handling.
        device: Where it came from.
        partitions: The sets that sync clients ask for; an event may name several.
        objects: What it is about, each as ``<type>:<id>``: whoever subscribes to envelopes is told of them.
        app: The app that it belongs to; the node's default app if left out.
        band: How sensitive it is.
        priority: 1 to 10, or a word.
        qos: Urgency and routing in full.
        extra: Further keys, stored beside the others; readers that do not know them pass over them.
    """

    __slots__ = ("_event_id", "_more", "_ts", "_ts_ns", "space_id", "topic", "type")

    type: EventType | TypeName
    """Of a delivered event it has ``.name`` and ``.value``; one that you made has the text that you gave."""
    actor = _Optional[str | Actor | Mapping[str, Any] | None](None)
    trace_id = _Optional[str | None](None)
    idem_key = _Optional[str | None](None)
    ttl_sec = _Optional[int | None](None)
    device = _Optional[str | Device | Mapping[str, Any] | None](None)
    partitions = _Optional[Iterable[str]](())
    objects = _Optional[Iterable[str]](())
    app = _Optional[str | None](None)
    band = _Optional[SecurityBand | str | None](None)
    priority = _Optional[int | str | None](None)
    qos = _Optional[QoS | Mapping[str, Any] | None](None)
    extra = _Optional[Mapping[str, Any] | None](None)

    def __init__(
        self,
        topic: str,
        type: str | None = None,
        space_id: str | None = None,
        event_id: str | None = None,
        ts: datetime | None = None,
        actor: str | Actor | Mapping[str, Any] | None = None,
        trace_id: str | None = None,
        idem_key: str | None = None,
        ttl_sec: int | None = None,
        *,
        device: str | Device | Mapping[str, Any] | None = None,
        partitions: Iterable[str] = _NO_NAMES,
        objects: Iterable[str] = _NO_NAMES,
        app: str | None = None,
        band: SecurityBand | str | None = None,
        priority: int | str | None = None,
        qos: QoS | Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if type is None:
            if not isinstance(topic, enum.Enum):
                raise TypeError("EventMeta needs a type, or an EventType as its topic")
            type = topic
        if space_id is None:
            raise TypeError("EventMeta needs a space_id: every event belongs to a space")
        self.topic = topic
        self.type = type  # type: ignore[assignment]
        self.space_id = space_id
        self._event_id = event_id
        self._ts = ts
        self._ts_ns = 0 if ts is not None else _now_ns()
        self._more: dict[str, Any] | None = None
        # Most events carry nothing but what is required: they are made, and stored, faster for it.
        if (
            actor is not None
            or trace_id is not None
            or idem_key is not None
            or ttl_sec is not None
            or device is not None
            or partitions is not _NO_NAMES
            or objects is not _NO_NAMES
            or app is not None
            or band is not None
            or priority is not None
            or qos is not None
            or extra is not None
        ):
            more = self._more = {}
            if actor is not None:
                more["actor"] = actor
            if trace_id is not None:
                more["trace_id"] = trace_id
            if idem_key is not None:
                more["idem_key"] = idem_key
            if ttl_sec is not None:
                more["ttl_sec"] = ttl_sec
            if device is not None:
                more["device"] = device
            if partitions is not _NO_NAMES:
                more["partitions"] = _kept(partitions)
            if objects is not _NO_NAMES:
                more["objects"] = _kept(objects)
            if app is not None:
                more["app"] = app
            if band is not None:
                more["band"] = band
            if priority is not None:
                more["priority"] = priority
            if qos is not None:
                more["qos"] = qos
            if extra is not None:
                more["extra"] = extra

    @property
    def event_id(self) -> str:
        """The event's id; reading it fixes it."""
        if self._event_id is None:
            self._event_id = new_event_id()
        return self._event_id

    @event_id.setter
    def event_id(self, value: str) -> None:
        self._event_id = value

    @property
    def ts(self) -> datetime:
        """When the event happened."""
        if self._ts is None:
            self._ts = datetime_of(self._ts_ns)
        return self._ts

    @ts.setter
    def ts(self, value: datetime) -> None:
        self._ts = value

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in GIVEN_NAMES}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EventMeta) and self._meaning() == other._meaning()

    def _meaning(self) -> dict[str, Any]:
        """Its fields, less the differences that storing does away with: names are sets, no further keys are none."""
        values = self._values()
        for name in NAME_SETS:
            if not isinstance(values[name], str):
                values[name] = sorted(set(values[name]))
        values["extra"] = values["extra"] or None
        return values

    __hash__ = None  # type: ignore[assignment]  # mutable, like the dataclass of the bus's document

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._values().items() if value not in (None, ()))
        return f"EventMeta({shown})"


def with_types(meta: EventMeta) -> EventMeta:
    """
    An envelope that was read back, given the types that JSON has no words for: in place.

    The type becomes a member of ``EventType``, or a ``TypeName``; actor, device, wishes and band become what they have the form of.
    """
    member = EventType.__members__.get(meta.type)  # each member's value is its name
    meta.type = TypeName(meta.type) if member is None else member
    more = meta._more
    if more is not None:
        for name, kind in _PARTS.items():
            if more.get(name) is not None:
                more[name] = part_of(kind, more[name])
        if (band := SecurityBand.__members__.get(more.get("band", ""))) is not None:
            more["band"] = band
    return meta


_PARTS: Final[dict[str, type[EnvelopePart]]] = {"actor": Actor, "device": Device, "qos": QoS}


class Event:
    """An envelope and its payload: a mapping that JSON can hold."""

    __slots__ = ("meta", "payload")

    meta: EventMeta
    payload: Mapping[str, Any]

    def __init__(self, meta: EventMeta, payload: Mapping[str, Any]) -> None:
        self.meta = meta
        self.payload = payload

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and self.meta == other.meta and self.payload == other.payload

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Event(meta={self.meta!r}, payload={self.payload!r})"
