"""
One connection's rights, decided once each and kept until access changes.

A capsule is made when somebody connects and held for as long as they stay. It never grows stale: before it answers from what it
remembers it compares its version with the book's, so a revocation is in force with the first question after it was applied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .errors import Forbidden, TokenRevoked
from .resources import Action, Resource, ResourceKind, normal, space, topic

if TYPE_CHECKING:
    from .book import AccessBook
    from .context import OperationContext

__all__ = ["Capsule", "Explanation"]


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why something is allowed or not."""

    is_allowed: bool
    seq: int
    """The last access record that was taken into account."""
    is_claimed: bool = False
    """The token's claims give it."""
    granted_at: int | None = None
    """The grant that counts, by its seq."""
    revoked_at: int | None = None
    """The revocation that counts, by its seq."""
    is_revoked: bool = False
    """The token or the subject as a whole was revoked."""
    reasons: tuple[str, ...] = ()
    """The policies that settled it; none if nothing permits it."""
    errors: tuple[str, ...] = ()
    """What could not be evaluated or read, and so denies."""


class Capsule:
    """
    What one bearer of a token may do.

    Made by ``AccessBook.capsule``.
    """

    __slots__ = ("_book", "_count_max", "_decisions", "_forbidden", "_marks", "_version", "context")

    def __init__(self, book: AccessBook, context: OperationContext, *, decisions_count_max: int) -> None:
        self.context = context
        self._book = book
        self._count_max = decisions_count_max
        self._decisions: dict[tuple[Action, Resource], bool] = {}
        self._forbidden: dict[tuple[Action, Resource], bool] = {}
        self._version = book.version
        self._marks = book.marks(context)

    def allows(self, action: Action, resource: Resource) -> bool:
        """Whether this may be done, as of the last access record applied to the book."""
        if self._version != self._book.version:
            self._catch_up()
        allowed = self._decisions.get((action, resource))
        return self._decide(action, resource) if allowed is None else allowed

    def forbids(self, action: Action, resource: Resource) -> bool:
        """Whether something forbids this: a revocation, or a policy. What nobody has permitted is not forbidden by that."""
        if self._version != self._book.version:
            self._catch_up()
        forbidden = self._forbidden.get((action, resource))
        if forbidden is None:
            found = self.explain(action, resource)
            forbidden = not found.is_allowed and bool(found.reasons or found.errors or found.is_revoked)
            if len(self._forbidden) >= self._count_max:
                self._forbidden.clear()
            self._forbidden[action, resource] = forbidden
        return forbidden

    def require(self, action: Action, resource: Resource) -> None:
        """
        Go on only if this may be done.

        Raises:
            TokenRevoked: The token or its subject was revoked.
            Forbidden: It may not.
        """
        if not self.allows(action, resource):
            if self.is_revoked:
                raise TokenRevoked(self.context.subject)
            raise Forbidden(self.context.subject, action, resource)

    def extends_to(self, action: Action, resource: Resource) -> bool:
        """
        Whether a right on a project or topic is one on this partition or project of its events too.

        A token that names such is bound to them; one that names none has all that nothing forbids.
        """
        if self.context.claims.binds(resource.kind):
            return self.allows(action, resource)
        return not self.forbids(action, resource)

    def allows_event(self, action: Action, topic_name: str, space_id: str) -> bool:
        """Whether this may be done to events of a topic in a space: it takes the right on both."""
        return self.allows(action, topic(topic_name)) and self.allows(action, space(space_id))

    def require_event(self, action: Action, topic_name: str, space_id: str) -> None:
        """
        Go on only if this may be done to events of a topic in a space.

        Raises:
            TokenRevoked: The token or its subject was revoked.
            Forbidden: It may not; the error names the one of the two that is missing.
        """
        self.require(action, topic(topic_name))
        self.require(action, space(space_id))

    @property
    def is_revoked(self) -> bool:
        """Whether the token or the subject itself was revoked: there is nothing left to ask for."""
        return self._book.is_revoked(self.context)

    def explain(self, action: Action, resource: Resource) -> Explanation:
        """Why ``allows`` answers as it does."""
        return self._book.explain(self.context, action, _in_normal_form(resource))

    def _catch_up(self) -> None:
        # Somebody else's grant leaves what is remembered here true; only a change that concerns this bearer does not.
        marks = self._book.marks(self.context)
        if marks != self._marks:
            self._decisions.clear()
            self._forbidden.clear()
            self._marks = marks
        self._version = self._book.version

    def _decide(self, action: Action, resource: Resource) -> bool:
        allowed = self.explain(action, resource).is_allowed
        if len(self._decisions) >= self._count_max:
            self._decisions.clear()
        self._decisions[action, resource] = allowed
        return allowed


def _in_normal_form(resource: Resource) -> Resource:
    return Resource(ResourceKind(resource.kind), normal(resource.name))
