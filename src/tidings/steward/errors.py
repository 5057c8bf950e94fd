"""
What the steward refuses by itself, and how every error looks on its wire.

Whatever a part of Tidings raises on purpose becomes a class that clients know, with a subclass and the error's own values as details. What is
not known there is ``internal``, and says nothing about the machine.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tidings.access.errors import AccessError, AuthFailed, Forbidden, TokenExpired, TokenRevoked
from tidings.core.errors import InvalidEvent, TidingsError
from tidings.happenings.errors import (
    CursorTooOld,
    InvalidCoalescing,
    InvalidCursor,
    InvalidHappening,
    InvalidHappeningFilter,
)
from tidings.ledger.errors import ErrorClass, LedgerError
from tidings.log.errors import EpochMismatch
from tidings.wire.steward.answers import RefusalFrame, error_frame
from tidings.wire.steward.requests import RequestInvalid

_INVALID_REQUEST: Final = (ErrorClass.PROTOCOL_VIOLATION, "invalid_json")
_CLASSES: Final[dict[type[TidingsError], tuple[ErrorClass, str]]] = {
    RequestInvalid: _INVALID_REQUEST,
    InvalidHappeningFilter: _INVALID_REQUEST,
    InvalidCursor: _INVALID_REQUEST,
    InvalidCoalescing: (ErrorClass.CONTRACT_VIOLATION, "coalesce_invalid"),
    InvalidHappening: (ErrorClass.CONTRACT_VIOLATION, "invalid"),
    InvalidEvent: (ErrorClass.CONTRACT_VIOLATION, "invalid"),
    EpochMismatch: (ErrorClass.CONTRACT_VIOLATION, "epoch_mismatch"),
    CursorTooOld: (ErrorClass.CONTRACT_VIOLATION, "replay_window_exceeded"),
    Forbidden: (ErrorClass.PERMISSION_DENIED, "forbidden"),
    TokenExpired: (ErrorClass.TRUST_EXPIRED, "token_expired"),
    TokenRevoked: (ErrorClass.TRUST_VIOLATION, "token_revoked"),
    AuthFailed: (ErrorClass.TRUST_VIOLATION, "not_authenticated"),
    AccessError: (ErrorClass.PERMISSION_DENIED, "forbidden"),
}
_DETAILS: Final[dict[type[TidingsError], tuple[str, ...]]] = {CursorTooOld: ("oldest_available_seq", "current_seq")}


class CapabilityNotGranted(LedgerError):
    """An operation needs a capability that this connection has not negotiated, or may no longer have."""

    code = "steward.capability_not_granted"
    error_class = ErrorClass.PERMISSION_DENIED
    text = "{op} takes the capability {capability}, which was not granted"
    hint = "ask for it with the operation negotiate"
    op: str
    capability: str


class InvalidBase64(LedgerError):
    """A payload is no base64."""

    code = "steward.invalid_payload"
    subclass = "invalid_base64"
    text = "payload_b64 is no base64: {problem}"
    problem: str


def error_frame_of(error: TidingsError) -> RefusalFrame:
    """An error as the answer to a request."""
    if isinstance(error, CapabilityNotGranted):
        return error_frame(error.error_class, error.describe(), f"{error.capability}_not_granted")
    if isinstance(error, LedgerError):
        return error_frame(error.error_class, error.describe(), error.subclass, **_values(error, error._fields))
    for kind in type(error).__mro__:
        if kind in _CLASSES:
            error_class, subclass = _CLASSES[kind]
            return error_frame(error_class, error.public_text, subclass, **_values(error, _DETAILS.get(kind, ())))
    error_class = ErrorClass.UNAVAILABLE if error.retryable else ErrorClass.INTERNAL
    return error_frame(error_class, error.public_text, "", code=error.code)


def ends_connection(error: TidingsError) -> bool:
    """Whether nothing follows the refusal: of a subscription that was understood and cannot be had."""
    return isinstance(error, InvalidCoalescing | CursorTooOld | EpochMismatch)


def _values(error: TidingsError, names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins({name: getattr(error, name) for name in names if name != "hint"})
    return found
