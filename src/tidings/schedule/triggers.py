"""
Triggers: when a watch fires whose condition holds. No clock, no I/O.

``edge`` fires when the condition begins to hold, and not again before it has ceased to. A condition about happenings alone begins anew
with each happening that makes it hold. ``level`` fires as long as it holds, with a pause (``cooldown_ms``) in between.

A condition with a duration begins to hold for the trigger when it has held for that long, and only a clock that is trusted can tell.

``step`` is the whole of it: from what a watch remembers and one happening, or a moment that has come, to what it remembers then,
whether it fires or says why not, and when to look again.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from tidings.happenings.happening import AnyHappening

from .conditions import Leaves, Tree

COOLDOWN_MS_MIN: Final = 1000
IN_COOLDOWN: Final = "in_cooldown"
UNTRUSTED_TIME: Final = "untrusted_time"


class EdgeTrigger(msgspec.Struct, frozen=True, tag_field="kind", tag="edge", forbid_unknown_fields=True):
    """Fire when the condition begins to hold."""


class LevelTrigger(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="level", forbid_unknown_fields=True
):
    """Fire while the condition holds, and then not for ``cooldown_ms``."""

    cooldown_ms: Annotated[int, msgspec.Meta(ge=COOLDOWN_MS_MIN, le=2**53)]


Trigger: TypeAlias = EdgeTrigger | LevelTrigger
EDGE: Final = EdgeTrigger()


class WatchMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a watch remembers between happenings."""

    leaves: Leaves
    entered_at_ms: int | None = None
    """Since when the condition has held; none if it does not."""
    is_spent: bool = False
    """Whether an edge has fired since then."""
    cooldown_until_ms: int | None = None
    told: str = ""
    """Why it did not fire, as was told last; told once for as long as the reason lasts."""


def shifted(memory: WatchMemory, by_ms: int) -> WatchMemory:
    """The same with all moments later by so much: as another clock has them."""
    if not by_ms:
        return memory

    def later(moment_ms: int | None) -> int | None:
        return None if moment_ms is None else moment_ms + by_ms

    leaves = msgspec.structs.replace(memory.leaves, latched_at_ms=tuple(map(later, memory.leaves.latched_at_ms)))
    return msgspec.structs.replace(
        memory,
        leaves=leaves,
        entered_at_ms=later(memory.entered_at_ms),
        cooldown_until_ms=later(memory.cooldown_until_ms),
    )


class TriggerStep(NamedTuple):
    """What came of a happening, or of a moment."""

    memory: WatchMemory
    is_fired: bool = False
    missed: str | None = None
    """Why it did not fire, if that is to be told."""
    look_at_ms: int | None = None
    """When to look again though nothing has happened; none if there is no need."""


def first_memory(tree: Tree, leaves: Leaves, at_ms: int) -> WatchMemory:
    """
    What a new watch remembers.

    A condition that holds already has not begun to: an edge waits for the next time. One with a duration has yet to hold for that long.
    """
    is_true = tree.holds(leaves, at_ms)
    return WatchMemory(
        leaves=leaves,
        entered_at_ms=at_ms if is_true else None,
        is_spent=is_true and not tree.duration_ms and not tree.is_momentary,
    )


def step(
    tree: Tree,
    trigger: Trigger,
    memory: WatchMemory,
    at_ms: int,
    *,
    happening: AnyHappening | None = None,
    is_time_trusted: bool = True,
) -> TriggerStep:
    """
    Take in one happening, or see whether the moment has changed anything.

    Args:
        tree: The watch's condition.
        trigger: Its trigger.
        memory: What it remembers.
        at_ms: Now. It need not be the time of day, but must not be set: a duration is the difference of two such times.
        happening: What has happened.
        is_time_trusted: Whether durations can be relied on.
    """
    memory = _not_from_the_future(tree, trigger, memory, at_ms)
    leaves, hits = memory.leaves, frozenset[int]()
    if happening is not None:
        leaves, hits = tree.taken(leaves, happening, at_ms), tree.hits(happening)
    if not tree.holds(leaves, at_ms, hits):
        told = memory.told if memory.told == IN_COOLDOWN else ""
        memory = WatchMemory(leaves=leaves, cooldown_until_ms=memory.cooldown_until_ms, told=told)
        return TriggerStep(memory, look_at_ms=tree.next_change_ms(leaves, at_ms))
    is_event = tree.is_momentary and happening is not None
    since_ms = at_ms if memory.entered_at_ms is None or is_event else memory.entered_at_ms
    memory = msgspec.structs.replace(memory, leaves=leaves, entered_at_ms=since_ms)
    change_ms = tree.next_change_ms(leaves, at_ms)
    if isinstance(trigger, EdgeTrigger) and memory.is_spent and not is_event:
        # It goes on holding. What has come meanwhile must not make it hold beyond that.
        return TriggerStep(_settled(tree, memory, at_ms), look_at_ms=change_ms)
    held_ms = since_ms + tree.duration_ms
    if at_ms < held_ms:
        return TriggerStep(memory, look_at_ms=_earlier(held_ms, change_ms))
    until_ms = memory.cooldown_until_ms
    if isinstance(trigger, LevelTrigger) and until_ms is not None and at_ms < until_ms:
        missed = IN_COOLDOWN if happening is not None and memory.told != IN_COOLDOWN else None
        memory = msgspec.structs.replace(memory, told=IN_COOLDOWN if happening is not None else memory.told)
        if not tree.holds(leaves, at_ms):  # it held for this very happening
            memory = msgspec.structs.replace(memory, entered_at_ms=None)
            return TriggerStep(memory, missed=missed, look_at_ms=change_ms)
        return TriggerStep(memory, missed=missed, look_at_ms=_earlier(until_ms, change_ms))
    if tree.duration_ms and not is_time_trusted:
        missed = UNTRUSTED_TIME if memory.told != UNTRUSTED_TIME else None
        return TriggerStep(msgspec.structs.replace(memory, told=UNTRUSTED_TIME), missed=missed, look_at_ms=change_ms)
    if isinstance(trigger, LevelTrigger):
        until_ms = at_ms + trigger.cooldown_ms
        memory = msgspec.structs.replace(memory, cooldown_until_ms=until_ms)
    memory = _settled(tree, msgspec.structs.replace(memory, is_spent=isinstance(trigger, EdgeTrigger), told=""), at_ms)
    change_ms = tree.next_change_ms(memory.leaves, at_ms)
    is_on = isinstance(trigger, LevelTrigger) and memory.entered_at_ms is not None
    return TriggerStep(memory, is_fired=True, look_at_ms=_earlier(until_ms, change_ms) if is_on else change_ms)


def _settled(tree: Tree, memory: WatchMemory, at_ms: int) -> WatchMemory:
    """The memory after what was latched has done its part: the condition may have ceased to hold by that."""
    leaves = tree.released(memory.leaves)
    if tree.holds(leaves, at_ms):
        return msgspec.structs.replace(memory, leaves=leaves)
    return WatchMemory(leaves=leaves, cooldown_until_ms=memory.cooldown_until_ms, told=memory.told)


def _not_from_the_future(tree: Tree, trigger: Trigger, memory: WatchMemory, at_ms: int) -> WatchMemory:
    """Moments later than now were stored before the clock was set back: take them for now, so that nothing waits for them again."""
    until_ms = memory.cooldown_until_ms
    cooldown_ms = trigger.cooldown_ms if isinstance(trigger, LevelTrigger) else 0
    since_ms = memory.entered_at_ms
    return msgspec.structs.replace(
        memory,
        leaves=tree.clipped(memory.leaves, at_ms),
        entered_at_ms=None if since_ms is None else min(since_ms, at_ms),
        cooldown_until_ms=None if until_ms is None else min(until_ms, at_ms + cooldown_ms),
    )


def _earlier(one_ms: int | None, other_ms: int | None) -> int | None:
    return min((each for each in (one_ms, other_ms) if each is not None), default=None)
