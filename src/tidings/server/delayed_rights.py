"""
Rights on delayed events: checked when one is submitted, when one is due, and when a client lists or cancels some.

A token may have expired when an event is due, so the event is stored with its publisher (``publisher_of``): the subject, the token's id, and
the claims that cover the event. ``authorise_delayed`` takes grants, revocations and policies as they are then. An event that was refused is
never published. While the access book is closed, events wait.

Listing and cancelling take the right to publish the event. An event that the caller may not publish is treated as unknown.
"""

from __future__ import annotations

from typing import Final

from tidings.access.authentication import Authenticator
from tidings.access.book import AccessBook, Capsule
from tidings.access.context import OperationContext, TokenClaims
from tidings.access.errors import AccessUnavailable, Forbidden, TokenRevoked
from tidings.access.resources import Action, Resource, ResourceKind, node, normal, partition, space, topic
from tidings.bus.delayed_records import DelayedEvent, PublisherIdentity
from tidings.bus.eventbus import EventBus
from tidings.core.errors import TidingsError
from tidings.core.events import Event

from .event_rights import require_publish_by

_BINDING: Final = (ResourceKind.SPACE, ResourceKind.PARTITION)


def publisher_of(capsule: Capsule, event: Event) -> PublisherIdentity:
    """Return what is stored with a delayed event so that ``authorise_delayed`` can check it. The event's topic and space are valid names."""
    context, claims, meta = capsule.context, capsule.context.claims, event.meta
    covered = {
        kind: tuple(resource.name for resource in resources if claims.cover(Action.PUBLISH, resource))
        for kind, resources in (
            (ResourceKind.TOPIC, [topic(normal(meta.topic))]),
            (ResourceKind.SPACE, [space(normal(meta.space_id))] if claims.binds(ResourceKind.SPACE) else []),
            (ResourceKind.PARTITION, [partition(normal(name)) for name in meta.partitions]),
        )
    }
    return PublisherIdentity(
        subject=context.subject,
        client_id=context.client_id,
        token_id=context.token_id,
        roles=tuple(sorted(claims.roles)),
        topics=covered[ResourceKind.TOPIC],
        spaces=covered[ResourceKind.SPACE],
        partitions=covered[ResourceKind.PARTITION],
        names_none_of=tuple(kind.value for kind in _BINDING if claims.binds(kind) and not covered[kind]),
    )


class DelayedRights:
    """
    Checks delayed events when they are due: ``EventBus(authorise_delayed=...)``.

    Args:
        book: The access book.
    """

    def __init__(self, book: AccessBook) -> None:
        self._book = book

    def __call__(self, delayed: DelayedEvent) -> None:
        """
        Make sure that the publisher of a delayed event may publish it now. Events of this process are not checked.

        Raises:
            AccessUnavailable: The access book is closed; the event waits.
            TokenRevoked, Forbidden, NodeError: It may not.
        """
        publisher = delayed.publisher
        if publisher is None:
            return
        if closed_by := self._book.closed_by():
            raise AccessUnavailable(closed_by[0])
        capsule = self._book.capsule(_context_of(publisher))
        if publisher.has_rights:
            require_publish_by(capsule, delayed.event)
        else:
            _require_not_forbidden(capsule, delayed.event)


def _context_of(publisher: PublisherIdentity) -> OperationContext:
    claims = TokenClaims(
        roles=frozenset(publisher.roles),
        topics=frozenset(publisher.topics),
        spaces=frozenset(publisher.spaces),
        partitions=frozenset(publisher.partitions),
        names_none_of=frozenset(ResourceKind(kind) for kind in publisher.names_none_of),
    )
    return OperationContext(publisher.subject, publisher.client_id, token_id=publisher.token_id, claims=claims)


def _require_not_forbidden(capsule: Capsule, event: Event) -> None:
    """An event of an earlier version: its publisher's claims are unknown."""
    meta = event.meta
    if capsule.is_revoked:
        raise TokenRevoked(capsule.subject)
    resources: list[Resource] = [topic(str(meta.topic)), space(str(meta.space_id)), *map(partition, meta.partitions)]
    for resource in resources:
        if capsule.forbids(Action.PUBLISH, resource):
            raise Forbidden(capsule.subject, Action.PUBLISH, resource)


def may_cancel(capsule: Capsule, event: Event) -> bool:
    """
    Return whether a caller may list and cancel a delayed event: it takes the right to publish it. For an event without an actor, which only
    the node's own process submits, it takes the right to administer the node.
    """
    if event.meta.actor is None:
        return capsule.allows(Action.ADMINISTER, node())
    try:
        require_publish_by(capsule, event)
    except TidingsError:
        return False
    return True


async def cancel_delayed(authenticator: Authenticator, capsule: Capsule, bus: EventBus, event_id: str) -> bool:
    """
    Cancel a delayed event. Return whether it was waiting and the caller may publish it: an event that it may not publish counts as unknown.

    Raises:
        TokenRevoked, TokenExpired: The caller's token no longer holds.
        StorageFull, BusClosed: It cannot be cancelled now.
    """
    authenticator.check(capsule)

    def authorise(event: Event) -> None:
        if not may_cancel(capsule, event):
            raise _NotAllowed

    try:
        return await bus.cancel_delayed(event_id, authorise=authorise)
    except _NotAllowed:
        return False


class _NotAllowed(Exception):
    pass
