"""What one connection may sync and submit, by the access book as it is now: so it can be held for the connection's life."""

from __future__ import annotations

from collections.abc import Iterable

from tidings.access.book import Capsule
from tidings.access.errors import Forbidden, TokenExpired
from tidings.access.resources import Action, partition, project

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

    @property
    def version(self) -> int:
        """What was decided holds while this stays the same, until the token expires."""
        return self._capsule.version

    async def decide_ahead(self, action: Action, names: Iterable[str]) -> None:
        """Decide about many partitions in slices, between which other tasks run."""
        await self._capsule.decide_ahead((action, partition(name)) for name in names)

    def may_sync(self, scope: Scope) -> bool:
        """Whether it may read events of this project, and of all these partitions."""
        return self._may(Action.SYNC, scope)

    def may_submit(self, scope: Scope) -> bool:
        """Whether it may write events to this project, and to all these partitions."""
        return self._may(Action.SUBMIT, scope)

    def require_submit(self, scope: Scope, now_ns: int, *, as_of: int | None = None) -> None:
        """
        Make sure that it may write there now.

        Args:
            scope: Where.
            now_ns: The time.
            as_of: The ``version`` at which it was allowed to; the scope is decided again only if that has changed.

        Raises:
            TokenExpired, Forbidden: It may not.
        """
        if self.expires_at_ns is not None and now_ns >= self.expires_at_ns:
            raise TokenExpired(self.expires_at_ns)
        if as_of != self.version and not self.may_submit(scope):
            resource = partition(scope.partitions[0]) if scope.project is None else project(scope.project)
            raise Forbidden(self.subject, Action.SUBMIT, resource)

    def _may(self, action: Action, scope: Scope) -> bool:
        capsule = self._capsule
        if scope.project is None:
            return all(capsule.allows(action, partition(name)) for name in scope.partitions)
        if not capsule.allows(action, project(scope.project)):
            return False
        return all(capsule.extends_to(action, partition(name)) for name in scope.partitions)
