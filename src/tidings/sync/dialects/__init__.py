"""
The dialects of the sync protocol: messages in, requests out; answers in, messages out. Nothing here decides or remembers.

``seed`` is the protocol's own dialect (A), ``camel`` has those of the JavaScript client 2.1.0 (B) and 1.3.0 (C). Which one a client
speaks is decided by how it spells, since all of them give the same version: ``protocolVersion`` is camel case; with ``projectId`` in its
``connect`` that is B, without it C. Everything else, also what cannot be read at all, is answered in the protocol's own dialect.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tidings.core.validation import UNREADABLE

from .camel import LEGACY, PROJECTS
from .dialect import Dialect
from .seed import SEED

__all__ = ["DIALECTS", "choose_dialect"]

DIALECTS: Final[tuple[Dialect, ...]] = (SEED, PROJECTS, LEGACY)


class _Envelope(msgspec.Struct, gc=False):
    type: Any = None
    protocol_version: Raw | UnsetType = UNSET
    protocolVersion: Raw | UnsetType = UNSET
    payload: Raw | UnsetType = UNSET


class _Payload(msgspec.Struct, gc=False):
    projectId: Raw | UnsetType = UNSET


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_PAYLOAD: Final = msgspec.json.Decoder(_Payload)


def choose_dialect(message: bytes) -> Dialect:
    """The dialect of a client's message. Never fails: what is wrong with it is found out when it is decoded."""
    try:
        envelope = _ENVELOPE.decode(message)
        if envelope.protocol_version is not UNSET or envelope.protocolVersion is UNSET:
            return SEED
        if envelope.type != "connect" or envelope.payload is UNSET:
            return PROJECTS
        return LEGACY if _PAYLOAD.decode(envelope.payload).projectId is UNSET else PROJECTS
    except UNREADABLE:
        return SEED
