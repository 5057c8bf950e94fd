"""
From a token to what its bearer may do: the one way in for the HTTP API and the door of the groups.

Without a token there is no access, unless access is open by its settings. Topics that Tidings itself believes in are not published
to: whoever could write a grant into ``access`` by hand would need no other right, and an unchecked policy would close the book. Nor
are those of sync clients: that door checks each event's partitions and profile, and that its client is who it says.

An event's actor is who publishes it. Somebody else is named only by who was given the right to publish for that actor, as a gateway
is: otherwise everybody could write what others seem to have done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidings.access.administration import ACCESS_TOPIC
from tidings.access.book import AccessBook, Capsule
from tidings.access.context import anonymous
from tidings.access.errors import AuthFailed, TokenExpired, TokenRevoked
from tidings.access.resources import Action, actor, normal
from tidings.access.tokens import TokenVerifier
from tidings.bus.audit import AUDIT_TOPIC
from tidings.core.actors import Actor
from tidings.core.clock import Clock
from tidings.core.events import Event
from tidings.core.names import check_space, check_topic
from tidings.sync.dialects import DIALECTS

from ..event_rights import require_partitions
from .errors import ForeignActor, ReservedTopic

__all__ = ["Authority"]

_OWN_TOPICS: Final = frozenset({ACCESS_TOPIC, AUDIT_TOPIC, *(dialect.topic for dialect in DIALECTS)})


class Authority:
    """
    Who is asking.

    Args:
        verifier, book, clock: What tokens, grants and time say.
        is_open: Take those without a token for nobody in particular, who may do what open access lets everybody do.
    """

    def __init__(self, verifier: TokenVerifier, book: AccessBook, clock: Clock, *, is_open: bool = False) -> None:
        self._verifier = verifier
        self._book = book
        self._clock = clock
        self._is_open = is_open

    def of_header(self, authorization: str | None) -> Capsule:
        """
        What the sender of an ``Authorization`` header may do.

        Raises:
            AuthFailed: There is no token, or it cannot be believed.
        """
        if authorization is None:
            return self.of_token(None)
        scheme, _, token = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise AuthFailed
        return self.of_token(token.strip())

    def of_token(self, token: str | None) -> Capsule:
        """
        What the bearer of a token may do.

        Raises:
            AuthFailed: There is no token, or it cannot be believed.
        """
        if not token:
            if not self._is_open:
                raise AuthFailed
            return self._book.capsule(anonymous())
        capsule = self._book.capsule(self._verifier.verify(token))
        self.check(capsule)
        return capsule

    def check(self, capsule: Capsule) -> None:
        """
        Make sure that a capsule that has been held for a while still stands.

        Raises:
            TokenRevoked, TokenExpired: It does not.
        """
        if capsule.is_revoked:
            raise TokenRevoked(capsule.context.subject)
        expires_at_ns = capsule.context.expires_at_ns
        if expires_at_ns is not None and self._clock.now_ns() >= expires_at_ns:
            raise TokenExpired(expires_at_ns)

    def require_publish(self, capsule: Capsule, event: Event) -> None:
        """
        Make sure that an event may be published as it is; to Tidings' own topics none ever may.

        Raises:
            InvalidName: Topic or space break their grammar.
            ReservedTopic, ForeignActor, Forbidden, TokenRevoked, TokenExpired: It may not.
        """
        meta = event.meta
        name = check_topic(meta.topic)
        if name in _OWN_TOPICS:
            raise ReservedTopic(name)
        self.check(capsule)
        capsule.require_event(Action.PUBLISH, name, check_space(meta.space_id))
        require_partitions(capsule, meta.partitions)
        _require_actor(capsule, meta.actor)


def _require_actor(capsule: Capsule, given: str | Actor | Mapping[str, object] | None) -> None:
    """Make sure that an event's actor is its publisher, or one for whom that one may publish."""
    subject = capsule.context.subject
    if given == subject:
        return
    named = given.user_id if isinstance(given, Actor) else given.get("user_id") if isinstance(given, Mapping) else given
    if not isinstance(named, str) or not named:
        raise ForeignActor(subject, None)
    # Another spelling of a name would be stored as it is, and read as somebody else.
    if named != subject and (named != normal(named) or not capsule.allows(Action.PUBLISH, actor(named))):
        raise ForeignActor(subject, named)
