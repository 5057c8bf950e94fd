"""
Decide what follows a firing: when the appointment fires next, and which occurrences fell into its action.

Plain values in, plain values out; the clock, and by how much it was set meanwhile, come in as arguments.
"""

from __future__ import annotations

from datetime import tzinfo
from typing import Final, NamedTuple

from .appointment_specs import AppointmentSpec, Catchup, CatchupWithinGrace, Drop, MissPolicy
from .recurrence import Periodic

_OVERLAPPED_COUNT_MAX: Final = 64
"""Occurrences that one firing reports as overlapped. Those beyond it count as one late occurrence."""


class AfterFiring(NamedTuple):
    """What follows a firing."""

    next_fire_ms: int | None
    """The next occurrence. It may have passed: then it fires late, or is reported as missed, as the policy says."""
    overlapped_ms: tuple[int, ...]
    """Occurrences that are not fired since the action was running, earliest first."""


def tolerance_ms(policy: MissPolicy, drop_tolerance_ms: int) -> int | None:
    """Return how late an occurrence may fire; ``None`` for however late."""
    match policy:
        case Catchup():
            return None
        case Drop():
            return drop_tolerance_ms
        case CatchupWithinGrace(grace_ms=grace_ms):
            return grace_ms


def after_firing(
    spec: AppointmentSpec,
    *,
    scheduled_ms: int,
    began_ms: int,
    now_ms: int,
    set_by_ms: int,
    fires_completed: int,
    tolerance_ms: int | None,
    local: tzinfo,
) -> AfterFiring:
    """
    Decide what follows a firing that has just ended.

    Occurrences after the action began have overlapped with it. The last of them fires now if that is not too late; the others are reported. An
    occurrence between ``scheduled_ms`` and ``began_ms`` passed before: it counts as one with the occurrence that fired late.

    Args:
        spec: The appointment.
        scheduled_ms: The occurrence that fired.
        began_ms: When its action began.
        now_ms: The present.
        set_by_ms: By how much the clock was set while the action ran. What comes at intervals moves with it.
        fires_completed: Fires, this one included.
        tolerance_ms: See ``tolerance_ms``.
        local: The machine's zone.

    Raises:
        BadRecurrence: The zone is no longer known.
    """
    previous_ms = scheduled_ms
    if isinstance(spec.recurrence, Periodic):
        # Never later than now, also if the clock was set in a way that is not known (over a crash): the next one is an interval away at most.
        previous_ms = min(scheduled_ms + set_by_ms, now_ms)
        began_ms += set_by_ms
    after_ms = max(previous_ms, began_ms)
    overlapped_ms: list[int] = []
    while True:
        next_ms = spec.next_fire_ms(after_ms, local=local, previous_ms=previous_ms, fires_completed=fires_completed)
        if next_ms is None or next_ms > now_ms:
            break
        if len(overlapped_ms) == _OVERLAPPED_COUNT_MAX:
            return AfterFiring(next_ms, tuple(overlapped_ms))
        overlapped_ms.append(next_ms)
        after_ms = next_ms
    if overlapped_ms and (tolerance_ms is None or now_ms - overlapped_ms[-1] <= tolerance_ms):
        next_ms = overlapped_ms.pop()
    return AfterFiring(next_ms, tuple(overlapped_ms))
