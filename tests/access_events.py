"""The events that change access, for tests that need some."""

from __future__ import annotations

from tidings.access.administration import Grant, PolicyPut, Revoke, event_of
from tidings.access.resources import Action, Resource, ResourcePattern
from tidings.core.events import Event


def grant_event(
    subject: str, action: Action, resource: Resource | ResourcePattern, *, actor: str, reason: str | None = None
) -> Event:
    """Grants an action on a resource, or on all that a pattern covers."""
    return event_of(Grant(subject=subject, action=action, resource=_pattern(resource), reason=reason), actor=actor)


def revoke_event(
    subject: str, action: Action, resource: Resource | ResourcePattern, *, actor: str, reason: str | None = None
) -> Event:
    """Takes an action on a resource away, or on all that a pattern covers."""
    return event_of(Revoke(subject=subject, action=action, resource=_pattern(resource), reason=reason), actor=actor)


def policy_event(policy_id: str, text: str, *, actor: str, reason: str | None = None) -> Event:
    """Puts a policy into force."""
    return event_of(PolicyPut(policy_id=policy_id, text=text, reason=reason), actor=actor)


def _pattern(resource: Resource | ResourcePattern) -> ResourcePattern:
    return resource if isinstance(resource, ResourcePattern) else ResourcePattern(resource.kind, resource.name)
