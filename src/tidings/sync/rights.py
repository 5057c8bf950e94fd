"""
What a connection may do: the only module of sync that knows the access package.

``ClientRights`` answers by the access book as it is now, so it can be held for a connection's life. ``AccessGate.seq`` tells when
answers may have changed.
"""

from __future__ import annotations

from tidings.access.book import AccessBook, Capsule
from tidings.access.errors import AuthFailed
from tidings.access.resources import Action, partition, project
from tidings.access.tokens import TokenVerifier

from .requests import Scope


class ClientRights:
    """The rights of one authenticated connection."""

    __slots__ = ("_capsule", "client_id", "expires_at_ns", "user_id")

    def __init__(self, capsule: Capsule) -> None:
        self._capsule = capsule
        context = capsule.context
        self.client_id = context.client_id
        """The client that the token was made out to."""
        self.user_id = context.user_id
        """The user that the token names (``userId``); ``None`` if it names none."""
        self.expires_at_ns = context.expires_at_ns
        """When the token ends."""

    @property
    def subject(self) -> str:
        """Whom the token speaks for."""
        return self._capsule.context.subject

    @property
    def is_revoked(self) -> bool:
        """Whether the token or its subject was revoked altogether."""
        return self._capsule.is_revoked

    def may_sync(self, scope: Scope) -> bool:
        """Whether it may read events of this project, and of all these partitions."""
        return self._may(Action.SYNC, scope)

    def may_submit(self, scope: Scope) -> bool:
        """Whether it may write events to this project, and to all these partitions."""
        return self._may(Action.SUBMIT, scope)

    def _may(self, action: Action, scope: Scope) -> bool:
        capsule = self._capsule
        if scope.project is None:
            return all(capsule.allows(action, partition(name)) for name in scope.partitions)
        if not capsule.allows(action, project(scope.project)):
            return False
        return all(capsule.extends_to(action, partition(name)) for name in scope.partitions)


class AccessGate:
    """Admits connections by their tokens and the access book."""

    __slots__ = ("_book", "_verifier")

    def __init__(self, book: AccessBook, verifier: TokenVerifier) -> None:
        self._book = book
        self._verifier = verifier

    @property
    def seq(self) -> int:
        """The seq of the last access record applied."""
        return self._book.seq

    def admit(self, token: str) -> ClientRights | None:
        """The rights that a token gives; ``None`` if it is not valid."""
        try:
            return ClientRights(self._book.capsule(self._verifier.verify(token)))
        except AuthFailed:
            return None
