"""
The frames of the endpoint ``/events`` and the reasons for which it closes, for both ends.

A client connects with its token (``/events?app=SLUG``), sends at most one ``resume`` and then exactly one ``subscribe``, and is answered with
``subscribed`` or with ``error`` and a close. What follows from the node are envelopes; the client sends ``ack`` with the resume token of the last
one that it is done with, which covers all before it on the same connection. Heartbeats are WebSocket pings of eight bytes.

Everything is one JSON object a text message, with sorted keys, without white space. Unknown fields and repeated keys are refused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import orjson

from tidings.core.errors import TidingsError
from tidings.core.validation import UNREADABLE, parse_strict

__all__ = [
    "FRAME_BYTES_MAX",
    "RESUME_TOKEN_CHARS_MAX",
    "AckEvent",
    "ClientFrame",
    "CloseReason",
    "ErrorDetail",
    "EventFrame",
    "EventFrameInvalid",
    "EventsError",
    "Reconnect",
    "ResumeEvents",
    "SubscribeEvents",
    "SubscribedEvents",
    "decode_from_client",
    "decode_from_node",
    "encode",
    "error_frame",
    "error_of",
    "event_prefix",
    "event_suffix",
    "subscribed_frame",
]

FRAME_BYTES_MAX: Final = 16_384
"""The longest message that a client may send."""
RESUME_TOKEN_CHARS_MAX: Final = 256
"""No resume token is longer."""


class EventFrameInvalid(TidingsError):
    """A message is not JSON, of no known type, or one of its fields is missing, unknown or wrong."""

    code = "gateway.malformed_frame"
    text = "the message is not understood: {problem}"
    problem: str


# Closing


class Reconnect(enum.StrEnum):
    """What a client does whose connection was closed. Whoever comes back waits longer each time."""

    RESUME = "resume"
    """Connect again, and resume with the token of the last envelope."""
    CATCH_UP = "catch_up"
    """Connect again without a token, and read over HTTP what was missed: no token would be good."""
    NEW_TOKEN = "new_token"
    """Connect again with another access token, and resume."""
    NO = "no"
    """Connecting again as it is does not help."""


class CloseReason(enum.Enum):
    """Why the node closes a connection: the reason's name, the close code, the error's code and what the client is to do."""

    FRAME_INVALID = ("frame_invalid", 4400, "network_rejected", Reconnect.NO)
    """A message that is malformed, unknown, too long or binary; an ``ack`` that is not in order; a message at the wrong moment."""
    AUTH_FAILED = ("auth_failed", 4401, "auth_invalid", Reconnect.NEW_TOKEN)
    """The token has expired or was revoked since."""
    PERMISSION_DENIED = ("permission_denied", 4403, "acl_denied", Reconnect.NO)
    """App, domain, administration or peers: a right is missing."""
    HEARTBEAT_TIMEOUT = ("heartbeat_timeout", 4408, "network_rejected", Reconnect.RESUME)
    """Two intervals without an answer to a ping."""
    RESUME_INVALID = ("resume_invalid", 4409, "network_rejected", Reconnect.CATCH_UP)
    """The resume token is of no use, for whatever cause."""
    TAKEN_OVER = ("taken_over", 4410, "network_rejected", Reconnect.NO)
    """Another connection of the same identity has resumed where this one stood."""
    BUFFER_OVERFLOW = ("buffer_overflow", 4413, "network_rejected", Reconnect.RESUME)
    """More envelopes than the buffer holds were not acknowledged."""
    FILTER_INVALID = ("filter_invalid", 4422, "network_rejected", Reconnect.NO)
    """A filter that makes no sense, or that the channel does not have."""
    SUBSCRIPTION_REJECTED = ("subscription_rejected", 4429, "network_rejected", Reconnect.RESUME)
    """A limit, a directive against abuse, or no ``subscribe`` in time."""
    QUEUE_FULL = ("queue_full", 4503, "network_rejected", Reconnect.CATCH_UP)
    """The node had no room; envelopes may be missing that no token brings back."""
    SHUTDOWN = ("shutdown", 1001, "network_rejected", Reconnect.CATCH_UP)
    """The node stops; tokens of this life of it end with it."""
    INTERNAL_ERROR = ("internal_error", 1011, "internal_error", Reconnect.CATCH_UP)
    """Something failed in the node."""

    def __init__(self, reason: str, code: int, error: str, reconnect: Reconnect) -> None:
        self.reason = reason
        self.code = code
        self.error = error
        self.reconnect = reconnect

    @classmethod
    def of_code(cls, code: int) -> CloseReason | None:
        """The reason of a close code; ``None`` if it is none of the gateway's own, as after a cut."""
        return _BY_CODE.get(code)


_BY_CODE: Final = {each.code: each for each in CloseReason}
_CATEGORIES: Final = {"network_rejected": "network", "acl_denied": "acl", "internal_error": "internal"}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error, as the frame ``error`` tells it: all four fields, always."""

    code: str
    category: str
    message: str
    data: dict[str, Any]


# From the client


class SubscribeEvents(
    msgspec.Struct, frozen=True, tag="subscribe", kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """
    What the client wants to see: one ``subscription_type``, narrowed or not by an ``event_type``, or several ``channels``.

    Only its form is checked here; whether its names and counts make sense is the gateway's to say.
    """

    app_id: str
    subscription_type: str | None = None
    """``graph``, ``system``, ``network``, ``security`` or ``app.<slug>``."""
    event_type: str | None = None
    channels: tuple[str, ...] | None = None
    """Families as ``graph.*``, or event types."""
    domain_id: str | None = None
    object_ids: tuple[str, ...] | None = None
    peer_identity_id: str | None = None


class AckEvent(msgspec.Struct, frozen=True, tag="ack", forbid_unknown_fields=True):
    """The client is done with this envelope, and with all before it on this connection."""

    resume_token: str


class ResumeEvents(msgspec.Struct, frozen=True, tag="resume", forbid_unknown_fields=True):
    """The client has had this envelope, on an earlier connection, and all before it."""

    resume_token: str


ClientFrame = SubscribeEvents | AckEvent | ResumeEvents

_FROM_CLIENT: Final = msgspec.json.Decoder(ClientFrame)
_ACK_QUOTES: Final = 8
"""Those of its two names and its two values: with no more of them, no name is there twice."""


def decode_from_client(message: bytes) -> ClientFrame:
    """
    What a client sent.

    Raises:
        EventFrameInvalid: It is none of ours.
    """
    if len(message) > FRAME_BYTES_MAX:
        raise EventFrameInvalid(f"it is longer than {FRAME_BYTES_MAX} bytes")
    try:
        frame: ClientFrame = _FROM_CLIENT.decode(message)
        if type(frame) is not AckEvent or message.count(b'"') != _ACK_QUOTES:
            parse_strict(message, "message")
    except (*UNREADABLE, ValueError) as error:
        raise EventFrameInvalid(str(error)[:300]) from error
    except TidingsError as error:
        raise EventFrameInvalid(error.describe()[:300]) from error
    return frame


def encode(frame: ClientFrame) -> bytes:
    """A frame as the client sends it."""
    return msgspec.json.encode(frame)


# From the node


LIFE_HEADER: Final = "Tidings-Life"
"""In the answer to an upgrade: names the life of the gateway, which ends with the node's process. Resume tokens of another life are of no use."""


class SubscribedEvents(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of ``subscribed``: the answer to ``subscribe``."""

    connection_id: str
    heartbeat_interval_ms: int
    per_connection: int
    """Envelopes that may wait for an ``ack``."""
    replayed: int
    """How many of the envelopes that follow were missed and are sent now."""
    resumed: bool
    since: int
    """Every graph envelope with a higher seq that the client may see comes on this connection."""


class EventFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Anything that the node sends: ``subscribed``, ``error``, or an event by its name with its envelope as the payload."""

    event: str
    payload: msgspec.Raw
    trace_id: str


class EventsError(msgspec.Struct, frozen=True):
    """The payload of ``error``: why the connection is closed next."""

    error: ErrorDetail


_FROM_NODE: Final = msgspec.json.Decoder(EventFrame)


def decode_from_node(message: bytes) -> EventFrame:
    """
    What the node sent; ``payload`` is decoded by who knows from ``event`` what it is.

    Raises:
        EventFrameInvalid: It is none of ours.
    """
    try:
        return _FROM_NODE.decode(message)
    except UNREADABLE as error:
        raise EventFrameInvalid(str(error)[:300]) from error


def event_prefix(event_type: str, envelope_json: bytes) -> bytes:
    """The frame of an envelope up to the trace id, the same for all who get it."""
    return b'{"event":"%b","payload":%b,"trace_id":' % (event_type.encode(), envelope_json)


def event_suffix(trace_id: str) -> bytes:
    """The rest of every frame of one connection."""
    return orjson.dumps(trace_id) + b"}"


def subscribed_frame(payload: SubscribedEvents, trace_id: str) -> bytes:
    """The frame ``subscribed``."""
    return event_prefix("subscribed", orjson.dumps(msgspec.structs.asdict(payload))) + event_suffix(trace_id)


def error_frame(
    reason: CloseReason,
    message: str,
    trace_id: str,
    *,
    error: str | None = None,
    data: Mapping[str, object] | None = None,
) -> bytes:
    """The frame ``error``, which comes before a close. ``error`` is a code in place of the reason's own."""
    code = error or reason.error
    detail = {
        "category": _CATEGORIES.get(code, "auth"),
        "code": code,
        "data": {"reason": reason.reason, **(data or {})},
        "message": message,
    }
    payload = orjson.dumps({"error": detail}, option=orjson.OPT_SORT_KEYS)
    return event_prefix("error", payload) + event_suffix(trace_id)


def error_of(frame: EventFrame) -> ErrorDetail:
    """
    What an ``error`` frame says.

    Raises:
        EventFrameInvalid: It says nothing legible.
    """
    try:
        return msgspec.json.decode(frame.payload, type=EventsError).error
    except UNREADABLE as error:
        raise EventFrameInvalid(str(error)[:300]) from error
