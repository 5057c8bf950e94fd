"""The settings of the endpoint ``/groups``, and a group's options as its members say them."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from tidings.bus.settings import SubscriptionSettings
from tidings.wire.groups import GroupOptions


class GroupsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the endpoint ``/groups``."""

    deliveries_count_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 256
    """Events of one group that are with its members, over all of them; and those that no member may see, before the group is stalled."""
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
    publishes_bytes_max: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 30)] = 8 << 20
    """Memory of the publishes of one connection that wait to be durable; with more, nothing more is read from it."""
    group_inflight_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    """Largest ``max_inflight`` of a group. Members that request more get this; so with the bounds below."""
    group_inflight_bytes_max: Annotated[int, msgspec.Meta(ge=1_024, le=1 << 40)] = 16 << 20
    """Largest ``max_inflight_bytes``."""
    group_inflight_bytes_total_max: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 40)] = 256 << 20
    """The ``max_inflight_bytes`` of all shared groups together. A new group gets at most an eighth of what is left, and at least 64 KiB."""
    group_waiting_retries_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1_000
    """Largest ``waiting_retries_max``."""
    group_retries_max: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 100
    """Largest ``max_retries``."""
    group_backoff_s_max: Annotated[float, msgspec.Meta(ge=0, le=86_400 * 7)] = 86_400.0
    """Longest time between two tries: ``backoff_max``, ``backoff_base``, and the delay that a member names."""
    group_stall_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 1.0
    """How long publishers wait for the full window of a group: its largest ``stall_timeout_s``, also while events leave the window."""
    group_stall_pause_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 30.0
    """How long publishers do not wait for the group after that, even if it has caught up."""


_SHARE: Final = 8
_WINDOW_BYTES_MIN: Final = 65_536


def options_given(options: GroupOptions, settings: GroupsSettings, others_bytes: int = 0) -> dict[str, Any]:
    """
    Return a member's options, within the node's bounds, as options of ``EventBus.join``. ``others_bytes`` is the sum of the windows of the
    other shared groups.

    An option over its bound gets the bound: the frame ``subscribed`` tells the options in effect, and names those that differ.
    """
    asked = {name: value for name in options.__struct_fields__ if (value := getattr(options, name)) is not None}
    defaults = SubscriptionSettings()
    share_bytes = max(_WINDOW_BYTES_MIN, (settings.group_inflight_bytes_total_max - others_bytes) // _SHARE)
    bounds: dict[str, tuple[float, float]] = {
        "max_inflight": (defaults.max_inflight, settings.group_inflight_max),
        "max_inflight_bytes": (defaults.max_inflight_bytes, min(settings.group_inflight_bytes_max, share_bytes)),
        "waiting_retries_max": (defaults.waiting_retries_max, settings.group_waiting_retries_max),
        "max_retries": (defaults.backoff.retries_max, settings.group_retries_max),
        "backoff_base": (defaults.backoff.base_s, settings.group_backoff_s_max),
        "backoff_max": (defaults.backoff.max_s, settings.group_backoff_s_max),
        "stall_timeout_s": (defaults.stall_timeout_s, settings.group_stall_timeout_s),
    }
    bounded = {name: min(asked.get(name, default), bound) for name, (default, bound) in bounds.items()}
    own = {"full_timeout_s": settings.group_stall_timeout_s, "stall_pause_s": settings.group_stall_pause_s}
    return {**asked, **bounded, **own}


def options_in_effect(settings: SubscriptionSettings) -> GroupOptions:
    """What holds for a group, as its members are told."""
    backoff = settings.backoff
    return GroupOptions(
        start=settings.start,
        max_inflight=settings.max_inflight,
        max_inflight_bytes=settings.max_inflight_bytes,
        waiting_retries_max=settings.waiting_retries_max,
        stall_timeout_s=settings.stall_timeout_s,
        backoff_base=backoff.base_s,
        backoff_mult=backoff.mult,
        backoff_max=backoff.max_s,
        max_retries=backoff.retries_max,
        order=settings.order,
        by_priority=settings.by_priority,
        ack_deadline_ms=settings.ack_deadline_ms,
    )
