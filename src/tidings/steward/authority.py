"""
What a connection may do, whichever way it came.

On the Unix socket: whoever can open it may read, subscribe and ask; the policy table decides on capabilities. At ``/happenings``: the rights
of the token on the topic ``ledger``, asked again for every request and before every frame.

| right on the topic ``ledger`` | gives                                                                           |
|-------------------------------|---------------------------------------------------------------------------------|
| ``read``                      | snapshots and projections                                                       |
| ``subscribe``                 | subscriptions                                                                   |
| ``publish``                   | requests, custody, and the capability ``plugins``; the plugin is the subject itself, or an actor it may publish for |
| ``administer``                | every other capability                                                          |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol

from tidings.access.administration import SYSTEM_SPACE
from tidings.access.endpoint import Rights
from tidings.access.errors import Forbidden
from tidings.access.resources import Action, actor, normal, topic
from tidings.ledger.records import LEDGER_TOPIC

from .capabilities import CAPABILITIES, CapabilityPolicy, PeerCredentials

if TYPE_CHECKING:
    from tidings.access.book import Capsule

    from .serving import ServedPlugin

PLUGINS: Final = "plugins"
"""The capability to be a plugin."""

Need = Literal["nothing", "read", "subscribe", "act"]
_ACTIONS: Final = {"read": Action.READ, "subscribe": Action.SUBSCRIBE, "act": Action.PUBLISH}


class Authority(Rights, Protocol):
    """The rights of one connection."""

    def require(self, need: Need) -> None:
        """
        Go on only if this may be done.

        Raises:
            AccessError: It may not.
        """
        ...

    def require_publishing(self, topic_name: str, space_name: str) -> None:
        """
        Go on only if the peer may have events published there.

        Raises:
            AccessError: It may not.
        """
        ...

    def require_name(self, name: str) -> None:
        """
        Go on only if the peer may speak in this name, a plugin's or an administrator's.

        Raises:
            AccessError: It may not.
        """
        ...

    def may_have(self, capability: str) -> bool:
        """Whether a capability may be granted; asked again whenever it is used."""
        ...

    def settled(self) -> Awaitable[None] | None:
        """Something to wait for before what was read now is shown: until then rights may be older than it."""
        ...


class SocketAuthority:
    """
    A peer of the Unix socket.

    Args:
        policy: Who gets which capability.
        peer: Who it is; ``None`` if the kernel did not say.
    """

    expires_at_ns = None
    is_revoked = False

    def __init__(self, policy: CapabilityPolicy, peer: PeerCredentials | None) -> None:
        self._policy = policy
        self._peer = peer

    @property
    def subject(self) -> str:
        return "operator" if self._peer is None else f"uid:{self._peer.uid}"

    def require(self, need: Need) -> None:
        """Whoever could open the socket may."""

    def require_publishing(self, topic_name: str, space_name: str) -> None:
        """The capability is enough."""

    def require_name(self, name: str) -> None:
        """The capability is enough."""

    def may_have(self, capability: str) -> bool:
        return self._policy.grants(capability, self._peer)

    def settled(self) -> None:
        """There is nothing to wait for."""


class TokenAuthority:
    """
    The bearer of a token.

    Args:
        capsule: Its rights.
        settled: See ``Authority``.
    """

    def __init__(self, capsule: Capsule, settled: Callable[[], Awaitable[None] | None]) -> None:
        self._capsule = capsule
        self.settled = settled

    @property
    def expires_at_ns(self) -> int | None:
        return self._capsule.expires_at_ns

    @property
    def is_revoked(self) -> bool:
        return self._capsule.is_revoked

    @property
    def subject(self) -> str:
        return self._capsule.context.subject

    def require(self, need: Need) -> None:
        if need != "nothing":
            self._capsule.require_event(_ACTIONS[need], LEDGER_TOPIC, SYSTEM_SPACE)

    def require_publishing(self, topic_name: str, space_name: str) -> None:
        self._capsule.require_event(Action.PUBLISH, topic_name, space_name)

    def require_name(self, name: str) -> None:
        if name != self.subject and (name != normal(name) or not self._capsule.allows(Action.PUBLISH, actor(name))):
            raise Forbidden(self.subject, Action.PUBLISH, actor(name))

    def may_have(self, capability: str) -> bool:
        if capability not in CAPABILITIES:
            return False
        if capability == PLUGINS:
            return self._capsule.allows_event(Action.PUBLISH, LEDGER_TOPIC, SYSTEM_SPACE)
        return self._capsule.allows(Action.ADMINISTER, topic(LEDGER_TOPIC))


class Caller(Protocol):
    """Who asks: a connection, or the tool that opened the workspace itself."""

    authority: Authority | None
    """None until it has authenticated; nothing is performed before."""
    granted: frozenset[str]
    """The capabilities that it negotiated."""
    served: ServedPlugin | None
    """The plugin that is at its other end."""

    @property
    def is_full(self) -> bool:
        """Whether it has more to take than it may leave with us."""
        ...

    def hold_memory(self, size: int) -> None:
        """
        Charge memory that is held until the connection ends.

        Raises:
            TidingsError: The connection may not hold as much.
        """
        ...

    def send(self, messages: Sequence[bytes]) -> None:
        """Send frames that are no answers."""
        ...
