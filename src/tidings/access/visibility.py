"""
What it takes to read an event, as a value that does not change: made once for each envelope, asked of each subscriber without a decision.

``ReadScope`` names the resources that reading takes: the same over HTTP, at every endpoint and in the gateway. A ``ReadCapsule`` binds such a
scope to one event: its origin, its objects and the state of access when it was made. A capsule grants nothing by itself: whether somebody is
among its audience is decided by that one's own rights, as they are when it is asked.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from .errors import AccessUnavailable
from .resources import Action, node, partition, project, space, topic

if TYPE_CHECKING:
    from .book import AccessBook, Capsule

OBJECTS_COUNT_MAX: Final = 64
"""Objects of one event: what a capsule is made for is bounded."""
CAPSULE_BYTES_MAX: Final = 2048
"""A capsule that would be larger is not made."""


class ReadScope(msgspec.Struct, frozen=True):
    """The resources that it takes the right to read: topic and space, one of the partitions if there are any, the project if there is one."""

    topic: str
    space_id: str
    partitions: tuple[str, ...] = ()
    project: str | None = None
    inner: ReadScope | None = None
    """Scope of the event that the record holds, of a delayed event: reading takes the rights on both."""
    is_readable: bool = True
    """False for a record that holds an event of unknown scope: no subject may read it."""


class Audience(enum.Enum):
    """Who may see an event, before any filter."""

    READERS = "readers"
    """Whoever may read what it tells of: see ``ReadScope``."""
    ADMINISTRATORS = "administrators"
    """Whoever may administer the node."""
    OBSERVERS = "observers"
    """Whoever may read of the node: who its peers are. A peer may see what is about itself."""
    APP = "app"
    """Everybody in the app."""


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a capsule: one for each envelope."""

    origin_identity_id: str | None
    app_id: str
    domain_id: str | None
    subscription_type: str
    object_ids: tuple[str, ...] = ()
    audience: Audience = Audience.READERS
    scope: ReadScope | None = None
    """What ``READERS`` need; for no other audience."""


class ReadCapsule(msgspec.Struct, frozen=True, kw_only=True):
    """Who may read one event. Small, without secrets, and of no use for another event."""

    app_id: str
    domain_id: str | None
    subscription_type: str
    origin_identity_id: str | None
    object_digest: str
    audience: Audience
    scope: ReadScope | None
    acl_epoch: int
    """The last access record that was known when it was made."""

    @property
    def capsule_id(self) -> str:
        """The hash of what it was asked for with."""
        scope = self.scope
        return _digest(
            self.app_id,
            self.domain_id,
            self.subscription_type,
            self.origin_identity_id,
            self.object_digest,
            self.audience.value,
            None if scope is None else msgspec.structs.astuple(scope),
        )

    def fits(self, request: ReadRequest) -> bool:
        """Whether it was made for exactly this."""
        return (
            self.app_id == request.app_id
            and self.domain_id == request.domain_id
            and self.subscription_type == request.subscription_type
            and self.origin_identity_id == request.origin_identity_id
            and self.audience is request.audience
            and self.scope == request.scope
            and self.object_digest == _digest(*sorted(request.object_ids))
        )

    def admits(self, rights: Capsule) -> bool:
        """Whether the bearer of these rights is among the audience, now. Of ``APP`` and of a peer itself the rights say nothing."""
        match self.audience:
            case Audience.READERS:
                return self.scope is not None and may_read(rights, Action.READ, self.scope)
            case Audience.ADMINISTRATORS:
                return rights.allows(Action.ADMINISTER, node())
            case Audience.OBSERVERS:
                return may_observe_peers(rights)
            case Audience.APP:
                return not rights.is_revoked


class CapsuleDenied(msgspec.Struct, frozen=True):
    """No capsule: nobody may see the event."""

    reason: str


def may_read(rights: Capsule, action: Action, scope: ReadScope) -> bool:
    """Whether what is in this scope may be shown: ``action`` is how it is asked for."""
    return rights.allows(action, topic(scope.topic)) and may_read_of_topic(rights, action, scope)


def may_read_of_topic(rights: Capsule, action: Action, scope: ReadScope) -> bool:
    """The same for whoever has the right on the topic."""
    if not scope.is_readable or not rights.allows(action, space(scope.space_id)):
        return False
    if scope.inner is not None and not may_read(rights, action, scope.inner):
        return False
    if not scope.partitions:
        return True
    if scope.project is not None and not rights.extends_to(action, project(scope.project)):
        return False
    return any(rights.extends_to(action, partition(name)) for name in scope.partitions)


def may_observe_peers(rights: Capsule) -> bool:
    """Whether the node's peers may be shown."""
    return rights.allows(Action.READ, node()) or rights.allows(Action.ADMINISTER, node())


def _digest(*parts: object) -> str:
    # Python's own form of a tuple: no two tuples of texts have the same.
    return hashlib.blake2b(repr(parts).encode(errors="backslashreplace"), digest_size=16).hexdigest()


class CapsuleIssuer:
    """
    Makes capsules, for as long as it is known who may do what.

    Args:
        book: The access book. A closed one denies everything, and no capsule is made.
    """

    def __init__(self, book: AccessBook) -> None:
        self._book = book
        self._version = -1
        self._closed_by: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """Changes with everything that can change a decision."""
        return self._book.version

    @property
    def unavailable_for(self) -> str | None:
        """Why access cannot be decided now; ``None`` if it can."""
        if self._version != self._book.version:
            self._version = self._book.version
            self._closed_by = self._book.closed_by()
        return self._closed_by[0] if self._closed_by else None

    def require(self) -> None:
        """
        Go on only if it can be decided who may see what.

        Raises:
            AccessUnavailable: The access book is closed: nothing is decided.
        """
        if (problem := self.unavailable_for) is not None:
            raise AccessUnavailable(problem)

    def issue(self, batch: Sequence[ReadRequest]) -> list[ReadCapsule | CapsuleDenied]:
        """
        A capsule for each request, or why there is none.

        Raises:
            AccessUnavailable: The access book is closed: nothing is decided.
        """
        self.require()
        epoch = self._book.seq
        return [_capsule(request, epoch) for request in batch]


def _capsule(request: ReadRequest, epoch: int) -> ReadCapsule | CapsuleDenied:
    if (request.audience is Audience.READERS) != (request.scope is not None):
        return CapsuleDenied("it does not say what it takes to read it, or says it of what is not read by right")
    if len(request.object_ids) > OBJECTS_COUNT_MAX:
        return CapsuleDenied(f"it names more than {OBJECTS_COUNT_MAX} objects")
    capsule = ReadCapsule(
        app_id=request.app_id,
        domain_id=request.domain_id,
        subscription_type=request.subscription_type,
        origin_identity_id=request.origin_identity_id,
        object_digest=_digest(*sorted(request.object_ids)),
        audience=request.audience,
        scope=request.scope,
        acl_epoch=epoch,
    )
    if len(msgspec.json.encode(capsule)) > CAPSULE_BYTES_MAX:
        return CapsuleDenied("it names more partitions than a capsule holds")
    return capsule
