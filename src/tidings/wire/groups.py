"""
The frames of the endpoint ``/groups``, for both ends: members of a durable group that live in other processes.

One JSON object a message, told apart by ``type``. A client begins with ``hello``; the node answers ``welcome`` or closes. Then the
client subscribes, as often as it likes; ``id`` is its own number for a membership. The node sends ``deliver``, never more than
``max_inflight`` unanswered ones a membership; each is answered with ``ack`` or ``nack`` by its ``tag``. ``withdrawn`` says that an
answer is no longer waited for (the deadline passed, the group was moved): the client stops the handler and still answers, since
its place among the unanswered is given back by the answer only. What was not answered when a connection breaks goes to other
members at once.

Unknown fields are passed over, so that either end may be the newer one; an unknown type is a breach of the protocol.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from tidings.core.errors import TidingsError
from tidings.core.validation import UNREADABLE, RepeatedKey, RepeatingObject, parse_marking_repeats, parse_strict

from .events import ErrorInfo, ItemVerdict

PROTOCOL_VERSION: Final = 1

CLOSE_NORMAL: Final = 1000
CLOSE_GOING_AWAY: Final = 1001
"""The node stops; connect again in a while."""
CLOSE_FAILED: Final = 1011
"""Something failed in the node; connect again, and send again what was not answered."""
CLOSE_TOO_BUSY: Final = 1013
"""The node has too many of something; connect again later."""
CLOSE_PROTOCOL: Final = 4400
"""The client broke the protocol; connecting again as it is does not help."""
CLOSE_AUTH_FAILED: Final = 4401
"""The token is not accepted, or has expired; connect again with another."""
CLOSE_REVOKED: Final = 4403
"""The token or its subject was revoked; connecting again does not help."""
CLOSE_TIMED_OUT: Final = 4408
"""No hello came in time."""

MEMBER_INFLIGHT_MAX: Final = 10_000
"""The most events that a membership can ask for without having answered; a node may allow fewer."""

Number = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400 * 7)]


class FrameInvalid(TidingsError):
    """A message is not JSON, of no known type, or one of its fields is missing or wrong."""

    code = "groups.malformed_frame"
    text = "the message is not understood: {problem}"
    problem: str


class GroupOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """
    How a group reads its topic; what is left out is the bus's default.

    They belong to the group, not to the member: those of the first member hold for as long as the group has members, and
    ``subscribed`` tells each which they are.
    """

    start: Literal["earliest", "latest"] | Number | None = None
    max_inflight: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    max_inflight_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] | None = None
    waiting_retries_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    stall_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None
    backoff_base: Seconds | None = None
    backoff_mult: Annotated[float, msgspec.Meta(ge=1, le=1_000)] | None = None
    backoff_max: Seconds | None = None
    max_retries: Annotated[int, msgspec.Meta(ge=0, le=1_000)] | None = None
    order: Literal["none", "key", "strict"] | None = None
    by_priority: bool | None = None
    ack_deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)] | None = None


# From the client


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True, forbid_unknown_fields=True):
    """The first message: who is there."""

    token: str = ""
    version: int = PROTOCOL_VERSION
    name: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """What the client calls itself, for logs."""


class Subscribe(
    msgspec.Struct, frozen=True, tag="subscribe", kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Become a member of a group."""

    id: Number
    topic: Text
    group: Text
    max_inflight: Annotated[int, msgspec.Meta(ge=1, le=MEMBER_INFLIGHT_MAX)] = 16
    """How many events this member takes without having answered."""
    options: GroupOptions = GroupOptions()


class Credit(msgspec.Struct, frozen=True, tag="credit", kw_only=True, forbid_unknown_fields=True):
    """From now on, take so many events without an answer; 0 takes a rest."""

    id: Number
    max_inflight: Annotated[int, msgspec.Meta(ge=0, le=MEMBER_INFLIGHT_MAX)]


class AckFrame(msgspec.Struct, frozen=True, tag="ack", kw_only=True, forbid_unknown_fields=True):
    """These deliveries are done with."""

    tags: Annotated[list[Number], msgspec.Meta(min_length=1, max_length=10_000)]


class NackFrame(msgspec.Struct, frozen=True, tag="nack", kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """This delivery failed; it comes again, to whichever member, after the delay or the back-off's own."""

    tag: Number
    reason: Annotated[str, msgspec.Meta(max_length=4_096)] = "nack"
    delay_s: Seconds | None = None
    is_returned: bool = False
    """It was not tried at all: it goes to another member at once, and does not count as an attempt."""
    error_type: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    """What the handler raised, by the name of its class with that of its module; left out if it answered so itself."""


class Unsubscribe(msgspec.Struct, frozen=True, tag="unsubscribe", kw_only=True, forbid_unknown_fields=True):
    """Take nothing more; ``unsubscribed`` comes when all that was delivered is answered."""

    id: Number


class Publish(msgspec.Struct, frozen=True, tag="publish", kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Store an event; ``ref`` is the client's own number for the answer."""

    ref: Number
    event: msgspec.Raw
    at: Text | None = None
    """When it is to be published, in RFC 3339; left out for at once."""


class CancelDelayed(msgspec.Struct, frozen=True, tag="cancel_delayed", kw_only=True, forbid_unknown_fields=True):
    """Have an event that waits for its time not published; ``ref`` is the client's own number for the answer."""

    ref: Number
    event_id: Text


class Ping(msgspec.Struct, frozen=True, tag="ping", kw_only=True, forbid_unknown_fields=True):
    """Is anybody there? Answered with ``pong``, also before the hello."""

    ref: Number = 0


# From the node


class Pong(msgspec.Struct, frozen=True, tag="pong", kw_only=True):
    """Yes."""

    ref: Number = 0


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True, omit_defaults=True):
    """The token is accepted."""

    subject: str
    epoch: str
    """The life of the log that offsets and seqs are counted in."""
    expires_at: str | None = None
    """When the token does, and the connection is closed."""
    version: int = PROTOCOL_VERSION
    max_inflight_max: int = 0
    memberships_max: int = 0
    publishes_max: int = 0
    """Publishes that may wait for their answer; with more the node stops reading."""
    message_bytes_max: int = 0
    """A longer message closes the connection; 0 if the node does not say."""


class Subscribed(msgspec.Struct, frozen=True, tag="subscribed", kw_only=True, omit_defaults=True):
    """The membership holds."""

    id: Number
    max_inflight: int
    options: GroupOptions
    """Those in effect."""
    differs: list[str] = []
    """Options that this member asked for otherwise."""


class Deliver(msgspec.Struct, frozen=True, tag="deliver", kw_only=True, omit_defaults=True):
    """An event for a membership."""

    id: Number
    tag: Number
    attempt: int
    record: msgspec.Raw
    """``offset``, ``seq``, ``meta`` and ``payload``."""
    deadline_ms: int | None = None
    """An answer that takes longer comes too late."""


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn", kw_only=True):
    """No answer to this delivery counts any more."""

    tag: Number
    reason: str


class Unsubscribed(msgspec.Struct, frozen=True, tag="unsubscribed", kw_only=True, omit_defaults=True):
    """The membership has ended; with an error if the client did not ask for it, or could not have it."""

    id: Number
    error: ErrorInfo | None = None


class Published(msgspec.Struct, frozen=True, tag="published", kw_only=True):
    """What became of an event."""

    ref: Number
    verdict: ItemVerdict


class DelayedCancelled(msgspec.Struct, frozen=True, tag="delayed_cancelled", kw_only=True, omit_defaults=True):
    """Whether an event was still waiting, and now is not; or why it was not cancelled."""

    ref: Number
    is_cancelled: bool = False
    error: ErrorInfo | None = None


class Problem(msgspec.Struct, frozen=True, tag="problem", kw_only=True):
    """Why the node closes the connection, which follows."""

    error: ErrorInfo


ClientFrame = Hello | Subscribe | Credit | AckFrame | NackFrame | Unsubscribe | Publish | CancelDelayed | Ping
NodeFrame = Welcome | Subscribed | Deliver | Withdrawn | Unsubscribed | Published | DelayedCancelled | Problem | Pong

_FROM_CLIENT: Final = msgspec.json.Decoder(ClientFrame)
_FROM_NODE: Final = msgspec.json.Decoder(NodeFrame)
encode: Final = msgspec.json.Encoder().encode


_PUBLISH_QUOTES: Final = 8
"""Those of ``type``, ``publish``, ``ref`` and ``event``: with no more of them around an event, no name is there twice."""


def decode_from_client(message: bytes) -> ClientFrame:
    """
    What a client sent.

    Raises:
        FrameInvalid: It is none of ours.
    """
    try:
        frame: ClientFrame = _FROM_CLIENT.decode(message)
    except UNREADABLE as error:
        raise FrameInvalid(str(error)[:300]) from error
    if type(frame) is Publish and message.count(b'"') - bytes(frame.event).count(b'"') == _PUBLISH_QUOTES:
        return frame
    try:
        parse_strict(message)
    except RepeatedKey as error:
        # A published event is judged by itself, and refused by its own verdict.
        if not isinstance(frame, Publish) or isinstance(parse_marking_repeats(message), RepeatingObject):
            raise FrameInvalid(error.problem) from error
    except ValueError:
        pass  # too deep for this parser: only an event can be, and that is judged by itself
    return frame


def decode_from_node(message: bytes) -> NodeFrame:
    """
    What a node sent.

    Raises:
        FrameInvalid: It is none of ours.
    """
    try:
        frame: NodeFrame = _FROM_NODE.decode(message)
    except UNREADABLE as error:
        raise FrameInvalid(str(error)[:300]) from error
    return frame
