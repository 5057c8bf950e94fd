"""
The frames of the camel-case dialects, as the public JavaScript client ``insieme`` sends and reads them.

B (2.1.0) has one project a connection and one partition an event; C (1.3.0) has partitions like dialect A. Both say
version "1.0", as dialect A does: the spelling of ``protocolVersion`` tells camel from snake, ``projectId`` in ``connect``
tells B from C.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tidings.core.validation import UNREADABLE

from .sync_errors import UnsupportedVersion
from .sync_frames import is_supported_version, malformed

__all__ = [
    "CamelConnect",
    "CamelEnvelope",
    "CamelSubmit",
    "LegacyItem",
    "LegacySync",
    "ProjectItem",
    "ProjectMeta",
    "ProjectSync",
    "decode_camel",
    "decode_camel_envelope",
    "encode_camel",
]

Count = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
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
    """Who made an event of B, and when by its own clock. Further fields come back as they were sent."""

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
    meta: JsonObject | UnsetType = UNSET


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


_ENVELOPE: Final = msgspec.json.Decoder(CamelEnvelope)


def decode_camel_envelope(message: bytes) -> CamelEnvelope:
    """
    The envelope, if it is one of a version that we speak.

    Raises:
        MalformedFrame, UnsupportedVersion: It is not.
    """
    try:
        envelope = _ENVELOPE.decode(message)
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
