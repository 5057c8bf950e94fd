"""Durable groups as the API shows them: their status, who is at work in them, what a seek would do."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidings.bus.group import Group
from tidings.bus.subscription import Subscription

from ..services import Services

State = Literal["running", "paused", "idle", "damaged", "other_epoch", "trimmed", "stuck"]


class GroupOut(msgspec.Struct, frozen=True, kw_only=True):
    """One group. What cannot be known is null."""

    topic: str
    group: str
    state: State
    """``idle``: nobody handles it now. ``damaged``, ``other_epoch``, ``trimmed``: it cannot start as it is. ``stuck``: a worker ended."""
    committed: int | None
    """The last offset up to which everything is acknowledged."""
    next_offset: int
    """The topic's: the offset that its next event will get."""
    lag: int | None
    acknowledged_early: int
    """Events acknowledged beyond the first that is not."""
    failed_attempts: int
    """Of events that will be tried again."""
    is_paused: bool
    members: int | None
    """Who shares it, here and at the other end of connections; null if a handler in the node has it to itself."""
    handling: int
    """Events that are with a handler, here or at the other end of a connection."""
    delivered: int
    acked: int
    retried: int
    dead_lettered: int
    """Counted since the group was last started."""
    oldest_unacked_age_s: float | None
    problem: str | None


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """What a seek does."""

    topic: str
    group: str
    carried_out: bool
    committed: int | None
    next_offset: int
    """The next event that the group gets."""
    redelivered: int | None
    skipped: int | None
    audit_seq: int | None = None


def subscription_of(services: Services, topic: str, group: str) -> Subscription | None:
    """The group's subscription on the node's bus."""
    return next((each for each in services.bus.get_subscriptions(topic) if each.group == group), None)


async def look_at(services: Services, topic: str, group: str) -> GroupOut:
    """One group, as operators see it."""
    status = await services.bus.admin.status(topic, group)
    subscription = subscription_of(services, topic, group)
    running = subscription.group_state if subscription is not None else None
    state: State = "paused" if status.is_paused else "running" if running is not None else "idle"
    state = status.obstacle or state
    problem = None if status.error is None else status.error.public_text  # readers of the topic see this
    if running is not None and running.problem is not None:
        state, problem = "stuck", str(running.problem)
    return GroupOut(
        topic=topic,
        group=group,
        state=state,
        committed=status.committed,
        next_offset=status.next_offset,
        lag=status.lag,
        acknowledged_early=status.acknowledged_early,
        failed_attempts=status.failed_attempts,
        is_paused=status.is_paused,
        members=_member_count(subscription),
        oldest_unacked_age_s=status.oldest_unacked_age_s,
        problem=problem,
        **_counts(running),
    )


def _counts(running: Group | None) -> dict[str, int]:
    if running is None:
        return dict.fromkeys(("handling", "delivered", "acked", "retried", "dead_lettered"), 0)
    stats = running.stats
    return {
        "handling": running.handling,
        "delivered": stats.delivered,
        "acked": stats.acked,
        "retried": stats.retried,
        "dead_lettered": stats.dead_lettered,
    }


def _member_count(subscription: Subscription | None) -> int | None:
    if subscription is None:
        return 0
    return len(subscription.members) if subscription.is_shared else None
