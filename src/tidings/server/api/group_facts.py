"""
Where the durable groups stand: a running one as it is now, one that is not running as it was last stored.

Also what moving a group comes to, before it is done: how many events come again, and how many never come.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from tidings.bus.cursor import Cursor
from tidings.bus.errors import CursorDamaged, UnknownGroup
from tidings.bus.group import Group
from tidings.bus.offsets import GroupPlace, OffsetStore
from tidings.bus.subscription import Subscription
from tidings.core.clock import ns_of
from tidings.core.errors import TidingsError
from tidings.log.embedded.disk import OsDisk
from tidings.log.embedded.engine import EmbeddedLog
from tidings.log.errors import EpochMismatch, PositionTrimmed
from tidings.log.interface import Query

from ..services import Services
from ..shared_group import SharedGroup

__all__ = ["GroupOut", "Move", "known_group", "look_at", "place_of", "plan_move", "shared_of", "subscription_of"]

_NAMED_COUNT_MAX = 10


class GroupOut(msgspec.Struct, frozen=True, kw_only=True):
    """One group. What cannot be known is null."""

    topic: str
    group: str
    state: Literal["running", "paused", "idle", "damaged", "other_epoch", "trimmed", "stuck"]
    """``idle``: nobody handles it now. ``damaged``, ``other_epoch``, ``trimmed``: it cannot start as it is. ``stuck``: a worker ended."""
    committed: int | None
    """The last offset up to which everything is acknowledged."""
    next_offset: int
    """The topic's: the offset that its next event will get."""
    lag: int | None
    acknowledged_early: int
    """Events acknowledged beyond the first that is not."""
    failed_deliveries: int
    """Of events that will be tried again."""
    is_paused: bool
    members: int | None
    """Who shares it, here and at the other end of connections; null if a handler in the node has it to itself."""
    handling: int
    """Events that are with a handler, or wait for a free member."""
    delivered: int
    acked: int
    retried: int
    buried: int
    """Counted since the group was last started."""
    oldest_unacked_age_s: float | None
    problem: str | None


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """What moving a group comes to."""

    topic: str
    group: str
    carried_out: bool
    committed: int | None
    next_offset: int
    """The next event that the group gets."""
    comes_again: int | None
    passed_over: int | None
    audit_seq: int | None = None


def subscription_of(services: Services, topic: str, group: str) -> Subscription | None:
    """The group's subscription on the node's bus."""
    return next((each for each in services.bus.get_subscriptions(topic) if each.group == group), None)


def known_group(services: Services, topic: str, group: str) -> None:
    """
    Make sure that there is such a group.

    Raises:
        UnknownGroup: There is not; the hint names some that there are.
    """
    groups = services.bus.groups(topic)
    if (topic, group) in groups or subscription_of(services, topic, group) is not None:
        return
    error = UnknownGroup(topic, group)
    names = ", ".join(name for _, name in groups[:_NAMED_COUNT_MAX])
    error.hint = f"the topic has: {names}" if names else "the topic has no groups"
    raise error


async def place_of(services: Services, topic: str, group: str) -> GroupPlace | TidingsError:
    """Where a group stands, or why that is not known."""
    subscription = subscription_of(services, topic, group)
    if subscription is not None and subscription.group_state is not None:
        state = subscription.group_state
        return GroupPlace(state.cursor.copy(), dict(state.attempts), state.is_paused)
    log = services.log
    if not isinstance(log, EmbeddedLog):
        return UnknownGroup(topic, group)
    store = OffsetStore(OsDisk(), log.layout.offsets, services.clock, log.position.epoch)
    try:
        return await asyncio.to_thread(store.load, topic, group) or GroupPlace(Cursor(), {}, False)
    except (CursorDamaged, EpochMismatch) as error:
        return error


async def look_at(services: Services, topic: str, group: str) -> GroupOut:
    """One group, as operators see it."""
    info = services.log.topics().get(topic)
    next_offset = info.next_offset if info is not None else 0
    place = await place_of(services, topic, group)
    subscription = subscription_of(services, topic, group)
    running = subscription.group_state if subscription is not None else None
    state: Literal["running", "paused", "idle", "damaged", "other_epoch", "trimmed", "stuck"]
    problem: str | None = None
    age_s: float | None = None
    if isinstance(place, TidingsError):
        state = "other_epoch" if isinstance(place, EpochMismatch) else "damaged"
        problem = str(place)
        cursor, failed, is_paused = None, 0, False
    else:
        cursor, failed, is_paused = place.cursor, sum(place.attempts.values()), place.paused
        state = "paused" if is_paused else "running" if running is not None else "idle"
        try:
            age_s = await _oldest_age_s(services, topic, cursor.committed + 1)
        except PositionTrimmed as error:
            state, problem = "trimmed", str(error)
        if running is not None and running.problem is not None:
            state, problem = "stuck", str(running.problem)
    return GroupOut(
        topic=topic,
        group=group,
        state=state,
        committed=None if cursor is None else cursor.committed,
        next_offset=next_offset,
        # The cursor may have moved after the log was looked at.
        lag=None if cursor is None else max(0, next_offset - (cursor.committed + 1) - cursor.early_count),
        acknowledged_early=0 if cursor is None else cursor.early_count,
        failed_deliveries=failed,
        is_paused=is_paused,
        members=_member_count(subscription),
        oldest_unacked_age_s=age_s,
        problem=problem,
        **_counts(running),
    )


def _counts(running: Group | None) -> dict[str, int]:
    if running is None:
        return dict.fromkeys(("handling", "delivered", "acked", "retried", "buried"), 0)
    stats = running.stats
    return {
        "handling": running.handling,
        "delivered": stats.delivered,
        "acked": stats.acked,
        "retried": stats.retried,
        "buried": stats.buried,
    }


def _member_count(subscription: Subscription | None) -> int | None:
    if subscription is None:
        return 0
    shared = shared_of(subscription)
    return None if shared is None else len(shared.members)


def shared_of(subscription: Subscription) -> SharedGroup | None:
    """The members of a group, if it is shared."""
    owner = getattr(subscription.handler, "__self__", None)
    return owner if isinstance(owner, SharedGroup) else None


async def _oldest_age_s(services: Services, topic: str, offset: int) -> float | None:
    page = await services.log.read(Query(topic=topic, from_offset=offset), limit=1)
    if not page.records:
        return None
    return max(0.0, (services.clock.now_ns() - ns_of(page.records[0].meta.written_time)) / 1e9)


def plan_move(topic: str, group: str, before: GroupPlace | TidingsError, target: int) -> Move:
    """What moving a group to an offset would come to."""
    committed = comes_again = passed_over = None
    if isinstance(before, GroupPlace):
        committed = before.cursor.committed
        early = sum(max(0, min(last, target - 1) - first + 1) for first, last in before.cursor.ranges)
        comes_again = max(0, committed + 1 - target) + before.cursor.early_count - early
        passed_over = max(0, target - (committed + 1)) - early
    return Move(
        topic=topic,
        group=group,
        carried_out=False,
        committed=committed,
        next_offset=target,
        comes_again=comes_again,
        passed_over=passed_over,
    )
