"""
What a connection may do, as the sync door asks it: the only module here that knows the access package.

A permission is a position: an ``Authority`` answers by the book as it stands, so it can be held for a connection's life.
``Gate.seq`` tells when answers may have changed.
"""

from __future__ import annotations

from typing import Protocol

from tidings.access.book import AccessBook
from tidings.access.capsule import Capsule
from tidings.access.errors import AuthFailed
from tidings.access.resources import Action, partition, project
from tidings.access.tokens import TokenVerifier

from .requests import Scope

__all__ = ["AccessGate", "Authority", "CapsuleAuthority", "Gate"]


class Authority(Protocol):
    """The rights of one authenticated connection."""

    @property
    def subject(self) -> str:
        """Whom the token speaks for."""
        ...

    @property
    def client_id(self) -> str | None:
        """The client that the token was made out to."""
        ...

    @property
    def user_id(self) -> str | None:
        """The user that the token names (``userId``); ``None`` if it names none."""
        ...

    @property
    def expires_at_ns(self) -> int | None:
        """When the token ends."""
        ...

    @property
    def is_revoked(self) -> bool:
        """Whether the token or its subject was revoked altogether."""
        ...

    def may_sync(self, scope: Scope) -> bool:
        """Whether it may read events of this project, and of all these partitions."""
        ...

    def may_submit(self, scope: Scope) -> bool:
        """Whether it may write events to this project, and to all these partitions."""
        ...


class Gate(Protocol):
    """Who may come in."""

    @property
    def seq(self) -> int:
        """The seq of the last access record that answers take into account."""
        ...

    def admit(self, token: str) -> Authority | None:
        """The rights that a token stands for; ``None`` if it is not to be believed."""
        ...


class CapsuleAuthority:
    """An ``Authority`` by the access book."""

    __slots__ = ("_capsule",)

    def __init__(self, capsule: Capsule) -> None:
        self._capsule = capsule

    @property
    def subject(self) -> str:
        """Whom the token speaks for."""
        return self._capsule.context.subject

    @property
    def client_id(self) -> str | None:
        """The client that the token was made out to."""
        return self._capsule.context.client_id

    @property
    def user_id(self) -> str | None:
        """The user that the token names (``userId``); ``None`` if it names none."""
        return self._capsule.context.user_id

    @property
    def expires_at_ns(self) -> int | None:
        """When the token ends."""
        return self._capsule.context.expires_at_ns

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
    """A ``Gate`` by tokens and the access book."""

    __slots__ = ("_book", "_verifier")

    def __init__(self, book: AccessBook, verifier: TokenVerifier) -> None:
        self._book = book
        self._verifier = verifier

    @property
    def seq(self) -> int:
        """The seq of the last access record applied."""
        return self._book.seq

    def admit(self, token: str) -> Authority | None:
        """The rights that a token stands for; ``None`` if it is not to be believed."""
        try:
            return CapsuleAuthority(self._book.capsule(self._verifier.verify(token)))
        except AuthFailed:
            return None
