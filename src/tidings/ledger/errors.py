"""
What the ledger answers when it cannot do what it was asked.

Every error has an ``error_class`` and a ``subclass``: what clients of the socket are told. Whether trying again helps follows from the
class.
"""

from __future__ import annotations

import enum
from typing import ClassVar

from tidings.core.errors import TidingsError


class ErrorClass(enum.StrEnum):
    """What kind of failure it is."""

    TRANSIENT = "transient"
    UNAVAILABLE = "unavailable"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    CONTRACT_VIOLATION = "contract_violation"
    NOT_FOUND = "not_found"
    PERMISSION_DENIED = "permission_denied"
    MISCONFIGURATION = "misconfiguration"
    TRUST_VIOLATION = "trust_violation"
    TRUST_EXPIRED = "trust_expired"
    PROTOCOL_VIOLATION = "protocol_violation"
    INTERNAL = "internal"

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self in (ErrorClass.TRANSIENT, ErrorClass.UNAVAILABLE, ErrorClass.RESOURCE_EXHAUSTED)


class LedgerError(TidingsError):
    """The root of what the ledger refuses."""

    code = "ledger.error"
    error_class: ClassVar[ErrorClass] = ErrorClass.CONTRACT_VIOLATION
    subclass: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.retryable = cls.error_class.is_retryable


class UnknownSubject(LedgerError):
    """Nothing is known under this addressing or id."""

    code = "ledger.unknown_subject"
    error_class = ErrorClass.NOT_FOUND
    subclass = "unknown_subject"
    text = "no subject is known as {name!r}"
    name: str


class NotClaimant(LedgerError):
    """A plugin wants to take back what another one claims."""

    code = "ledger.not_claimant"
    subclass = "not_claimant"
    text = "{plugin!r} does not claim {what}"
    plugin: str
    what: str


class InvalidCommand(LedgerError):
    """A value of a command cannot be used; ``field`` names it."""

    code = "ledger.invalid"
    subclass = "invalid"
    text = "{field}: {problem}"
    field: str
    problem: str
