"""
Who is asking, and what their token says they may do: made once from a token, and frozen.

| claim                                            | gives                        | on          |
|--------------------------------------------------|------------------------------|-------------|
| ``allowed_partitions``, ``allowed_partition_prefixes`` | all that is done to events   | partitions  |
| ``projectIds`` or ``project_ids``                    | all that is done to events   | projects    |
| ``topics``, ``topic_prefixes``                       | ``publish``, ``subscribe``, ``read`` | topics    |
| ``spaces``, ``space_prefixes``                       | ``publish``, ``subscribe``, ``read`` | spaces    |
| ``allowed_groups``, ``allowed_group_prefixes``       | ``join``, ``create``             | groups      |
| ``roles``                                          | what policies give the role  |             |
| ``read_only``                                      | takes: leaves ``read``, ``subscribe``, ``sync`` | everything |

Every event is in a topic and in a space, and what is done to it takes the right on both. A token that names spaces is bound to
them. One that has neither claim is not bound: what it may do to a topic it may do in every space. An empty list is a claim, and
leaves no space. A right on spaces alone opens nothing.

An event can also name partitions, and be in a project. A token that names partitions or projects is bound to them, whether it
asks for a project or for a topic. One that has no such claim has all of what it asked for, but for those that are revoked or
forbidden. An empty list is a claim here too.

A topic gives no group of it: that takes ``allowed_groups``, with names as ``orders/billing``, or a grant. No claim gives ``administer``,
nor moving, pausing or deleting a group, nor re-driving or dropping its dead letters; the role ``admin`` has it by the built-in policies.
"""

from __future__ import annotations

from typing import Final

import msgspec

from .resources import Action, Resource, ResourceKind

ADMIN_ROLE: Final = "admin"
ANONYMOUS: Final = "anonymous"
"""The subject of callers without a token, where access is open."""

_GROUP_ACTIONS: Final = frozenset({Action.JOIN, Action.CREATE})
_BUS_ACTIONS: Final = frozenset({Action.PUBLISH, Action.SUBSCRIBE, Action.READ})
_EVENT_ACTIONS: Final = _BUS_ACTIONS | {Action.SUBMIT, Action.SYNC}
_READING: Final = frozenset({Action.READ, Action.SUBSCRIBE, Action.SYNC})


class TokenClaims(msgspec.Struct, frozen=True, kw_only=True):
    """Rights as a token carries them. All names are in their normal form, and none is empty."""

    partitions: frozenset[str] = frozenset()
    partition_prefixes: tuple[str, ...] = ()
    projects: frozenset[str] = frozenset()
    topics: frozenset[str] = frozenset()
    topic_prefixes: tuple[str, ...] = ()
    spaces: frozenset[str] = frozenset()
    space_prefixes: tuple[str, ...] = ()
    groups: frozenset[str] = frozenset()
    """Topic and group, with a slash between them."""
    group_prefixes: tuple[str, ...] = ()
    roles: frozenset[str] = frozenset()
    is_read_only: bool = False
    """Its bearer may change nothing, whatever roles, grants and policies say."""
    names_none_of: frozenset[ResourceKind] = frozenset()
    """Kinds that the token speaks of without naming any: then it is bound to nothing, and not to everything."""

    def cover(self, action: Action, resource: Resource) -> bool:
        """Whether the claims give this by themselves; roles are the policies' affair."""
        kind, name = resource
        if kind == ResourceKind.PARTITION:
            return action in _EVENT_ACTIONS and _is_named(name, self.partitions, self.partition_prefixes)
        if kind == ResourceKind.PROJECT:
            return action in _EVENT_ACTIONS and name in self.projects
        if kind == ResourceKind.TOPIC:
            return action in _BUS_ACTIONS and _is_named(name, self.topics, self.topic_prefixes)
        if kind == ResourceKind.SPACE:
            return action in _BUS_ACTIONS and (
                not self.binds(kind) or _is_named(name, self.spaces, self.space_prefixes)
            )
        if kind == ResourceKind.GROUP:
            return action in _GROUP_ACTIONS and _is_named(name, self.groups, self.group_prefixes)
        return False

    def leave(self, action: Action) -> bool:
        """Whether the claims let anything give this."""
        return not self.is_read_only or action in _READING

    def binds(self, kind: ResourceKind) -> bool:
        """Whether the token says to which spaces, partitions or projects its rights on events extend."""
        if kind in self.names_none_of:
            return True
        if kind == ResourceKind.PARTITION:
            return bool(self.partitions or self.partition_prefixes)
        if kind == ResourceKind.PROJECT:
            return bool(self.projects)
        return kind == ResourceKind.SPACE and bool(self.spaces or self.space_prefixes)


def _is_named(name: str, names: frozenset[str], prefixes: tuple[str, ...]) -> bool:
    # An empty prefix would cover everything; whoever made these claims by hand did not mean that.
    return name in names or any(prefix and name.startswith(prefix) for prefix in prefixes)


class OperationContext(msgspec.Struct, frozen=True):
    """On whose behalf something is done, and until when that can be believed."""

    subject: str
    client_id: str | None = None
    """The device or program, where the token names one."""
    expires_at_ns: int | None = None
    """From this moment on the token is refused, allowance for skewed clocks included. ``None`` if it never expires."""
    token_id: str | None = None
    """What the token can be revoked by (``jti``)."""
    claims: TokenClaims = TokenClaims()
    user_id: str | None = None
    """Whom the token names as the user of an application (``userId``), apart from its subject."""
    trust: str | None = None
    """What the token was believed for: its key, audience and issuer. ``None`` if there was no token."""

    def is_expired(self, now_ns: int) -> bool:
        """Whether the token is no longer believed."""
        return self.expires_at_ns is not None and now_ns >= self.expires_at_ns


def anonymous(client_id: str | None = None) -> OperationContext:
    """Nobody in particular: may do nothing, unless access is open or a policy permits everybody."""
    return OperationContext(ANONYMOUS, client_id)
