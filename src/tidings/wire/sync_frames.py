"""
The messages of the sync protocol, for both ends: close codes, errors, the frames of dialect A (snake case) and those of the
camel-case dialects B and C.

A message is an envelope around a payload. ``decode_from_client`` and ``decode_from_server`` check the envelope,
then the payload by its type; ``encode`` is the other way round. Unknown fields are ignored. What is wrong with a frame is an
error of its own type, so that each end can choose its answer:

    SyncFrameError
    ├── MalformedFrame          not JSON, or a field is missing or of the wrong type
    ├── UnknownMessageType      the envelope is fine, its type is none of ours
    └── UnsupportedVersion      the envelope names a protocol version that this end does not speak

The camel-case dialects are those of the public JavaScript client ``insieme``: B (2.1.0) has one project a connection and one
partition an event, C (1.3.0) has partitions like dialect A. All say version "1.0"; the spelling of ``protocolVersion`` tells camel
from snake, ``projectId`` in ``connect`` tells B from C.

An event's own JSON stays bytes (``msgspec.Raw``): a server passes it on as it came.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tidings.core.errors import TidingsError
from tidings.core.validation import UNREADABLE, explain


class CloseCode(enum.IntEnum):
    """Why a connection was closed, and so what its client should do next."""

    NORMAL = 1000
    """The client disconnected."""
    VERSION = 1002
    """Version or profile do not fit: do not connect again before one side was updated."""
    AUTH_FAILED = 1008
    """The token was not accepted, or what it allowed is not allowed any more: come back with another one."""
    SERVER_ERROR = 1011
    """Something failed here: come back and send again."""
    RESTART = 1012
    """The server is stopping: come back later."""
    TRY_AGAIN_LATER = 1013
    """There is too much to send or too many are connected: come back and catch up by sync."""
    REPLACED = 4001
    """The same client has connected again elsewhere: do not come back by yourself."""
    SILENT = 4002
    """Nothing was heard for too long: come back."""
    TOKEN_EXPIRED = 4003
    """The token has run out: come back with a fresh one."""


class SyncFrameError(TidingsError):
    """The root of what is wrong with a frame."""

    code = "sync.frame"


class MalformedFrame(SyncFrameError):
    """A message is not JSON, or one of its fields is missing or of the wrong type."""

    code = "sync.malformed_frame"
    problem: str
    type: str | None = None
    field: str = ""

    def describe(self) -> str:
        at = f" ({self.field})" if self.field else ""
        return f"{self.type or 'message'}: {self.problem}{at}"


class UnknownMessageType(SyncFrameError):
    """The envelope is whole, but nobody knows its type."""

    code = "sync.unknown_message_type"
    text = "unknown message type {type!a:.80}"
    type: str


class UnsupportedVersion(SyncFrameError):
    """The message is of a protocol version that this end does not speak."""

    code = "sync.unsupported_version"
    text = "protocol version {requested!a:.80} is not supported"
    requested: str


PROTOCOL_VERSION: Final = "1.0"

Count = Annotated[int, msgspec.Meta(ge=0)]
Millis = int | float
"""Milliseconds since 1970."""
Text = Annotated[str, msgspec.Meta(min_length=1)]

ErrorCode = Literal[
    "auth_failed",
    "bad_request",
    "validation_failed",
    "forbidden",
    "rate_limited",
    "server_error",
    "protocol_version_unsupported",
    "profile_unsupported",
]


class MessageEnvelope(msgspec.Struct, frozen=True, gc=False):
    """What every message carries. ``msg_id`` is for tracing only; ``timestamp`` is the sender's clock and decides nothing."""

    type: str
    msg_id: str
    timestamp: Millis
    payload: Raw
    protocol_version: str


# From the client


class Connect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first message: who is there, and which profiles it speaks."""

    TYPE: ClassVar[str] = "connect"
    token: str
    client_id: Text
    last_committed_id: Count | None = None
    supported_profiles: list[str] | None = None
    """Absent means ``compatibility`` only."""
    required_profile: str | None = None
    required_tree_policy: str | None = None


class SubmitItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One draft. ``event`` is ``{"type": ..., "payload": {...}}``, as JSON."""

    id: Text
    partitions: list[str]
    event: Raw
    client_id: str | None = None
    partition: Raw | UnsetType = UNSET
    """Never legal; here so that it can be refused instead of passed over."""


class SubmitEvents(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch of drafts."""

    TYPE: ClassVar[str] = "submit_events"
    events: list[SubmitItem]
    client_id: str | None = None
    partition: Raw | UnsetType = UNSET


class Sync(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for a page of committed events, and may replace the set of subscriptions."""

    TYPE: ClassVar[str] = "sync"
    partitions: list[str]
    since_committed_id: Count
    subscription_partitions: list[str] | UnsetType = UNSET
    limit: int | UnsetType = UNSET
    want_snapshot: bool = False
    """Extension: send the state of tree partitions in place of their history."""
    client_id: str | None = None
    partition: Raw | UnsetType = UNSET


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sign of life."""

    TYPE: ClassVar[str] = "heartbeat"
    client_id: str | None = None


class Disconnect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The client disconnects."""

    TYPE: ClassVar[str] = "disconnect"
    reason: str | None = None
    client_id: str | None = None


# From the server


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What this connection may send; fixed for its life."""

    profile: str
    accepted_event_types: list[str]
    tree_policy: str | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The server's bounds, as it advertises them."""

    max_batch_size: int | None = None
    sync_limit_min: int | None = None
    sync_limit_max: int | None = None
    max_message_bytes: int | None = None
    max_in_flight_drafts: int | None = None


class Connected(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``connect``."""

    TYPE: ClassVar[str] = "connected"
    client_id: str
    server_time: Millis
    server_last_committed_id: int
    """Of the whole log."""
    capabilities: Capabilities
    model_version: int | UnsetType = UNSET
    limits: Limits | UnsetType = UNSET


class ItemError(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why an item was rejected; ``field`` is a dotted path from the item."""

    field: str = ""
    message: str = ""


class ItemResult(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one item."""

    id: str
    status: Literal["committed", "rejected"]
    status_updated_at: Millis
    committed_id: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    errors: list[ItemError] | UnsetType = UNSET


class SubmitResult(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts on a batch, in the order of its items."""

    TYPE: ClassVar[str] = "submit_events_result"
    results: list[ItemResult]


class CommittedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A committed event, as pages and broadcasts carry it."""

    id: str
    client_id: str
    partitions: list[str]
    committed_id: int
    event: Raw
    status_updated_at: Millis


class EventBroadcast(CommittedEvent, frozen=True, kw_only=True):
    """A committed event of another connection."""

    TYPE: ClassVar[str] = "event_broadcast"


class StateSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Extension: the state of tree partitions after all events up to ``committed_id``."""

    committed_id: int
    state: dict[str, Raw]
    """By partition."""


class SyncResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a sync cycle."""

    TYPE: ClassVar[str] = "sync_response"
    partitions: list[str]
    effective_subscriptions: list[str]
    events: list[CommittedEvent]
    next_since_committed_id: int
    sync_to_committed_id: int
    has_more: bool
    model_version: int | UnsetType = UNSET
    pruned_through_committed_id: int | UnsetType = UNSET
    """Extension: events up to here may be missing from this cycle, since the server no longer has them."""
    snapshot: StateSnapshot | UnsetType = UNSET


class HeartbeatAck(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a heartbeat."""

    TYPE: ClassVar[str] = "heartbeat_ack"


class ErrorFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A request failed as a whole, or the connection is about to be closed."""

    TYPE: ClassVar[str] = "error"
    code: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class VersionChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The server's model changed while the connection was open."""

    TYPE: ClassVar[str] = "version_changed"
    old_model_version: int
    new_model_version: int


ClientPayload = Connect | SubmitEvents | Sync | Heartbeat | Disconnect
ServerPayload = Connected | SubmitResult | EventBroadcast | SyncResponse | HeartbeatAck | ErrorFrame | VersionChanged

_ENVELOPE: Final = msgspec.json.Decoder(MessageEnvelope)
_FROM_CLIENT: Final[dict[str, msgspec.json.Decoder[ClientPayload]]] = {
    kind.TYPE: msgspec.json.Decoder(kind) for kind in get_args(ClientPayload)
}
_FROM_SERVER: Final[dict[str, msgspec.json.Decoder[ServerPayload]]] = {
    kind.TYPE: msgspec.json.Decoder(kind) for kind in get_args(ServerPayload)
}
_ENCODER: Final = msgspec.json.Encoder()

P = TypeVar("P")


def decode_from_client(message: bytes) -> tuple[MessageEnvelope, ClientPayload]:
    """
    A client's message, for the server.

    Raises:
        MalformedFrame, UnknownMessageType, UnsupportedVersion: It is not one.
    """
    return _decode(message, _FROM_CLIENT)


def decode_from_server(message: bytes) -> tuple[MessageEnvelope, ServerPayload]:
    """
    A server's message, for the client.

    Raises:
        MalformedFrame, UnknownMessageType, UnsupportedVersion: It is not one.
    """
    return _decode(message, _FROM_SERVER)


def encode(payload: ClientPayload | ServerPayload, *, msg_id: str, timestamp: Millis) -> bytes:
    """A whole message. Raw JSON inside ``payload`` is taken as it is."""
    return _ENCODER.encode(
        MessageEnvelope(payload.TYPE, msg_id, timestamp, Raw(_ENCODER.encode(payload)), PROTOCOL_VERSION)
    )


def is_supported_version(version: str) -> bool:
    """Whether this end speaks ``version``: any ``1.x``, since minor versions only add."""
    major, dot, minor = version.partition(".")
    return major == "1" and dot == "." and minor.isascii() and minor.isdigit()


def _decode(message: bytes, decoders: dict[str, msgspec.json.Decoder[P]]) -> tuple[MessageEnvelope, P]:
    try:
        envelope = _ENVELOPE.decode(message)
    except UNREADABLE as error:
        raise malformed(error, None) from error
    # Before the payload is looked at: another version's payload may look like anything.
    if not is_supported_version(envelope.protocol_version):
        raise UnsupportedVersion(envelope.protocol_version)
    decoder = decoders.get(envelope.type)
    if decoder is None:
        raise UnknownMessageType(envelope.type)
    try:
        return envelope, decoder.decode(envelope.payload)
    except UNREADABLE as error:
        raise malformed(error, envelope.type) from error


def malformed(error: Exception, type: str | None) -> MalformedFrame:
    """What a decoder found wrong, as a ``MalformedFrame`` with the field's path from the payload."""
    problem, path = explain(error)
    if type is not None and path:
        path = f"payload.{path}" if not path.startswith("[") else f"payload{path}"
    return MalformedFrame(problem[:200], type, path)


JsonObject = dict[str, Any]


class CamelEnvelope(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """What every message carries. ``msg_id`` is echoed on direct answers, and left out if there was none."""

    type: str
    payload: Raw
    protocol_version: str
    msg_id: str | None = None


class CamelConnect(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``connect`` of B and C."""

    token: str
    client_id: Text
    project_id: Text | None = None


class CamelSubmit(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``submit_events``: items stay JSON, since one bad item must not fail the others."""

    events: list[Raw]


class ProjectMeta(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Who made an event of B or C, and when by its own clock. Further fields come back as they were sent."""

    client_ts: int | float
    client_id: Text | UnsetType = UNSET


class ProjectItem(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One event of B: these fields and no others are stored and come back."""

    id: Text
    partition: Text
    project_id: Text
    user_id: Text | UnsetType = UNSET
    type: Text
    schema_version: Annotated[int, msgspec.Meta(ge=1)]
    payload: JsonObject
    meta: ProjectMeta


class LegacyItem(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One event of C. Its client compares project and user with what it sent, though nothing else looks at them."""

    id: Text
    partitions: list[str]
    project_id: str | UnsetType = UNSET
    user_id: str | UnsetType = UNSET
    type: Text
    payload: JsonObject
    meta: ProjectMeta


class ProjectSync(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``sync`` of B."""

    since_committed_id: Count
    project_id: Text | None = None
    limit: int | None = None


class LegacySync(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``sync`` of C: what it asks for is also what it subscribes to."""

    partitions: list[str]
    since_committed_id: Count
    limit: int | None = None


_CAMEL_ENVELOPE: Final = msgspec.json.Decoder(CamelEnvelope)


def decode_camel_envelope(message: bytes) -> CamelEnvelope:
    """
    The envelope, if it is one of a version that we speak.

    Raises:
        MalformedFrame, UnsupportedVersion: It is not.
    """
    try:
        envelope = _CAMEL_ENVELOPE.decode(message)
    except UNREADABLE as error:
        raise malformed(error, None) from error
    if not is_supported_version(envelope.protocol_version):
        raise UnsupportedVersion(envelope.protocol_version)
    return envelope


def decode_camel(payload: Raw, decoder: msgspec.json.Decoder[Any], type: str) -> Any:
    """
    A payload, by its decoder.

    Raises:
        MalformedFrame: It does not fit.
    """
    try:
        return decoder.decode(payload)
    except UNREADABLE as error:
        raise malformed(error, type) from error


def encode_camel(type: str, payload: bytes, msg_id: str | None, timestamp: int) -> bytes:
    """A whole message. An absent ``msgId`` stays absent: the client drops a message where it is null."""
    if msg_id is None:
        return b'{"type":"%b","protocolVersion":"1.0","timestamp":%d,"payload":%b}' % (
            type.encode(),
            timestamp,
            payload,
        )
    return b'{"type":"%b","protocolVersion":"1.0","msgId":%b,"timestamp":%d,"payload":%b}' % (
        type.encode(),
        msgspec.json.encode(msg_id),
        timestamp,
        payload,
    )
