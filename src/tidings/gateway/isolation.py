"""One app and one domain: what an event's scope is, and that nothing in its descriptor reaches beyond it."""

from __future__ import annotations

from tidings.access.visibility import Audience

from .contexts import RequestContext
from .descriptors import EventDescriptor
from .envelopes import EventScope
from .errors import CrossAppViolation, InvalidDescriptor, ProtocolCode, ScopeViolation
from .event_types import EventDeclaration
from .names import EventClass


def scope_of(descriptor: EventDescriptor, declaration: EventDeclaration) -> EventScope:
    """
    Who may observe an event, as far as its descriptor says it. A hint narrows; it never widens.

    Raises:
        CrossAppViolation: It names more than one app.
        ScopeViolation: It names more than one domain, an anchor that its type did not declare, or parts of it disagree.
        InvalidDescriptor: It lacks what events of its class are anchored to.
    """
    context, hint, app_id, domain_id = (
        descriptor.operation_context,
        descriptor.scope_hint,
        descriptor.app_id,
        descriptor.domain_id,
    )
    event_class = declaration.event_class
    is_of_app = event_class is EventClass.GRAPH or event_class is EventClass.APP
    for other in (
        context.app_id,
        hint.get("app_id", app_id),
        descriptor.event_class[4:] if event_class is EventClass.APP else app_id,
    ):
        if other != app_id:
            raise CrossAppViolation(
                "app_id", f"names two apps, {app_id!r} and {other!r}", ProtocolCode.INVALID_IDENTIFIER
            )
    if hint and not hint.keys() <= declaration.scope_anchors:
        undeclared = ", ".join(sorted(hint.keys() - declaration.scope_anchors))
        raise ScopeViolation(
            "scope_hint", f"{declaration.event_type} declares no anchor {undeclared}", ProtocolCode.SCOPE_EXCEEDED
        )
    if is_of_app and domain_id is None:
        raise InvalidDescriptor("domain_id", f"is needed for {event_class} events", ProtocolCode.MISSING_FIELD)
    scope = descriptor.read_scope
    if (declaration.audience is Audience.READERS) != (scope is not None):
        raise InvalidDescriptor(
            "read_scope",
            "is what reading takes: for events that are read by right, and no others",
            ProtocolCode.MISSING_FIELD,
        )
    is_request = isinstance(context, RequestContext)
    for domain in (
        hint.get("domain_id", domain_id),
        domain_id if scope is None else scope.topic,
        domain_id if is_request or context.domain_id is None else context.domain_id,  # type: ignore[union-attr]
    ):
        if domain != domain_id:
            raise ScopeViolation(
                "domain_id", f"names two domains, {domain_id!r} and {domain!r}", ProtocolCode.INVALID_IDENTIFIER
            )
    requester = context.requester_identity_id if isinstance(context, RequestContext) else None
    hinted = hint.get("requester_identity_id")
    if is_of_app:
        if hinted is not None and requester is not None and hinted != requester:
            raise ScopeViolation(
                "scope_hint", "its requester is not that of the context", ProtocolCode.INVALID_IDENTIFIER
            )
        return EventScope(
            app_id=app_id,
            domain_id=domain_id,
            requester_identity_id=hinted,
            peer_identity_id=hint.get("peer_identity_id"),
        )
    if event_class is EventClass.NETWORK:
        peer = hint.get("peer_identity_id")
        if peer is None:
            raise InvalidDescriptor(
                "scope_hint", "network events name their peer_identity_id", ProtocolCode.MISSING_FIELD
            )
        return EventScope(peer_identity_id=peer)
    if event_class is EventClass.SECURITY:
        # The subject of the event, who need not be the one that asked for it.
        subject = requester if hinted is None else hinted
        return EventScope(app_id=hint.get("app_id"), domain_id=hint.get("domain_id"), requester_identity_id=subject)
    return EventScope(app_id=hint.get("app_id"), domain_id=hint.get("domain_id"))
