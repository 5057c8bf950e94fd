"""An app's event type as the gateway declares it: one rule for what may be registered and for what may be told of."""

from __future__ import annotations

from tidings.access.apps import AppEventType
from tidings.access.visibility import Audience

from .event_types import EventDeclaration, app_declaration


def declaration_of(event_type: AppEventType) -> EventDeclaration:
    """
    The declaration of an app's event type.

    Raises:
        DeclarationRefused: There may be no such event type.
    """
    return app_declaration(
        event_type.event_type,
        slug=event_type.slug,
        fields=event_type.payload_fields,
        optional_fields=event_type.optional_fields,
        scope_anchors=("app_id", *event_type.scope_anchors),
        audience=Audience.APP if event_type.audience == "app" else Audience.READERS,
        is_object_scoped=event_type.is_object_scoped,
    )
