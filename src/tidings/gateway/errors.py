"""
What the gateway answers to the managers of the node, and at its own start.

    GatewayError
    ├── DescriptorRefused       intake did not take a descriptor
    │   ├── InvalidDescriptor       something is missing, of the wrong kind, or not well-formed
    │   ├── ScopeViolation          it reaches beyond one app, one domain or what its source may tell of
    │   │   └── CrossAppViolation       it names more than one app
    │   └── QueueFull               there is no room for it now, or its class is paused
    ├── SourceRefused           a manager gets no channel
    └── DeclarationRefused      an event type cannot be declared like this

What intake refuses has the names, protocol codes and interface codes that every node of this kind uses. What ends a subscriber's connection is
``wire.gateway.CloseReason``.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final

from tidings.core.errors import TidingsError


class ProtocolCode(enum.StrEnum):
    """Which rule was broken, by the names that all interfaces use."""

    MISSING_FIELD = "ERR_STRUCT_MISSING_FIELD"
    INVALID_TYPE = "ERR_STRUCT_INVALID_TYPE"
    INVALID_ENCODING = "ERR_STRUCT_INVALID_ENCODING"
    INVALID_IDENTIFIER = "ERR_STRUCT_INVALID_IDENTIFIER"
    SCOPE_EXCEEDED = "ERR_AUTH_SCOPE_EXCEEDED"
    RATE_LIMIT = "ERR_RESOURCE_RATE_LIMIT"


_INTERFACE_CODES: Final = {
    ProtocolCode.INVALID_IDENTIFIER: "identifier_invalid",
    ProtocolCode.SCOPE_EXCEEDED: "acl_denied",
    ProtocolCode.RATE_LIMIT: "network_rejected",
}


class GatewayError(TidingsError):
    """The root of what the gateway refuses."""

    code = "gateway.error"


class DescriptorRefused(GatewayError):
    """The root of what intake refuses: nothing of the descriptor was taken."""

    code = "gateway.descriptor_refused"
    name: ClassVar[str] = "descriptor_refused"
    """The error's name among managers."""
    text = "{field}: {problem}"
    field: str
    problem: str
    protocol_code: ProtocolCode

    @property
    def interface_code(self) -> str:
        """What an interface says in its place."""
        return _INTERFACE_CODES.get(self.protocol_code, "envelope_invalid")


class InvalidDescriptor(DescriptorRefused):
    """Something is missing, of the wrong kind, or not well-formed."""

    code = "gateway.invalid_descriptor"
    name = "invalid_descriptor"
    hint = "the manager that told of the event has to be corrected"


class ScopeViolation(DescriptorRefused):
    """It names more than one app or domain, or something that its source may not tell of."""

    code = "gateway.scope_violation"
    name = "scope_violation"
    hint = "an event concerns one app and one domain, and is told by the manager that is in charge of its type"


class CrossAppViolation(ScopeViolation):
    """It names more than one app: that is recorded as a violation of security."""

    code = "gateway.cross_app_violation"


class QueueFull(DescriptorRefused):
    """There is no room for it now, its class is paused, or the gateway is not running."""

    code = "gateway.queue_full"
    name = "queue_full"
    retryable = True
    hint = "raise event.queue.total_ceiling, or look with `tidings gateway connections` for who reads too slowly"
    manager_code: ClassVar[str] = "ERR_MNG_EVENT_BUFFER_OVERFLOW"
    protocol_code: ProtocolCode = ProtocolCode.RATE_LIMIT


class DeclarationRefused(GatewayError):
    """An event type cannot be declared like this."""

    code = "gateway.declaration_refused"
    hint = "fields of a published type never change: declare a new version, as name.v2"
    text = "{event_type!r}: {problem}"
    event_type: str
    problem: str


class SourceRefused(GatewayError):
    """A manager cannot get a channel into the gateway."""

    code = "gateway.source_refused"
    hint = "each manager has one channel, made when the node is put together"
    text = "{source_manager!r} gets no channel: there is no such manager, it has one, or the gateway has started"
    source_manager: str
