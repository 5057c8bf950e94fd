"""The settings of the endpoint ``/groups``."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["GroupsSettings"]


class GroupsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the endpoint ``/groups``."""

    deliveries_count_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 256
    """Events of one group that are with its members or wait for one of them, over all members."""
    memberships_count_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 64
    """Memberships of one connection."""
    member_inflight_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1_000
    """Unanswered events of one membership; who asks for more gets this."""
    publishes_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    """Publishes of one connection that wait to be durable; with more, nothing more is read from it."""
    buffered_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=1 << 30)] = 4 << 20
    """What one connection may have waiting to be sent; with more, its members get nothing until it has drained."""
    hello_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0
    """A connection that has not said hello by then is closed."""
    publish_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=600)] = 30.0
    """How long a publish waits for the full window of a group; then it is refused, and may be tried again."""
    groups_count_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    """Groups of the workspace; through ``/groups`` no further one is made."""
    groups_per_topic_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1_000
    """Groups of one topic."""
    groups_per_subject_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 100
    """Groups that one subject has made and that still exist."""
