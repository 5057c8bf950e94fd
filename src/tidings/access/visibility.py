"""
What it takes to read an event, as a value that does not change: made once for each envelope, asked of each subscriber without a decision.

``ReadScope`` names the resources that reading takes: the same over HTTP, at every endpoint and in the gateway. A ``ReadCapsule`` binds such a
scope to one event: its origin, its objects and the state of access when it was made.
"""

from __future__ import annotations

import msgspec


class ReadScope(msgspec.Struct, frozen=True):
    """The resources that it takes the right to read: topic and space, one of the partitions if there are any, the project if there is one."""

    topic: str
    space_id: str
    partitions: tuple[str, ...] = ()
    project: str | None = None


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a capsule: one for each envelope."""

    origin_identity_id: str | None
    app_id: str
    domain_id: str
    subscription_type: str
    object_ids: tuple[str, ...]
    scope: ReadScope


class ReadCapsule(msgspec.Struct, frozen=True, kw_only=True):
    """Who may read one event. Small, without secrets, and of no use for another event."""

    capsule_id: str
    """The hash of the request."""
    app_id: str
    domain_id: str
    subscription_type: str
    origin_identity_id: str | None
    object_digest: str
    scope: ReadScope
    acl_epoch: int
    """The last access record that was known when it was made."""
