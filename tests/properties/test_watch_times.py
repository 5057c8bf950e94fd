"""When a watch on a state fires, against a simple calculation over the whole course of that state; restarts change nothing."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.schedule.support import House, hot
from tidings.schedule.actions import ScheduledAction

STEP_MS = 100
END_MS = 8_000

Course = list[tuple[int, bool, bool]]
"""After so many steps it is hot or not, and the ledger is closed and opened again before that or not."""


def expected_ms(course: Course, duration_ms: int, cooldown_ms: int | None) -> list[int]:
    """When the watch has to fire: for each time in which it was hot without a break, by the rules of the trigger."""
    changes, now_ms = [], 0
    for steps, is_hot, _ in course:
        now_ms += steps * STEP_MS
        changes.append((now_ms, is_hot))
    changes.append((now_ms + END_MS, False))
    fires: list[int] = []
    began_ms: int | None = None
    cooldown_until_ms = 0
    for at_ms, is_hot in changes:
        if is_hot and began_ms is None:
            began_ms = at_ms
        elif not is_hot and began_ms is not None:
            # A change and a timer at the same moment: whichever comes first is right, so courses avoid it (see below).
            fire_ms = began_ms + duration_ms
            if cooldown_ms is None:
                fires += [fire_ms] if fire_ms < at_ms else []
            else:
                fire_ms = max(fire_ms, cooldown_until_ms)
                while fire_ms < at_ms:
                    fires.append(fire_ms)
                    cooldown_until_ms = fire_ms = fire_ms + cooldown_ms
            began_ms = None
    return fires


async def fired_ms(course: Course, duration_ms: int, cooldown_ms: int | None) -> list[int]:
    """When it does."""
    house = House()
    await house.open()
    await house.room(20)
    started_ns = house.clock.now_ns()
    fires: list[int] = []

    async def note(action: ScheduledAction, firing: str) -> None:
        fires.append((house.clock.now_ns() - started_ns) // 1_000_000)

    house.ring = note  # type: ignore[method-assign]
    house.actions.unregister("hall.bell")
    house.actions.register("hall.bell", note)
    trigger = None if cooldown_ms is None else {"kind": "level", "cooldown_ms": cooldown_ms}
    await house.watch(hot(minimum_duration_ms=duration_ms), trigger)
    for steps, is_hot, is_reopened in course:
        await house.clock.advance(steps * STEP_MS / 1000)
        if is_reopened:
            await house.reopen()
        await house.heat(85 if is_hot else 20)
    await house.clock.advance((END_MS - 1) / 1000)
    await house.close()
    return fires


@given(
    course=st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.booleans()), max_size=8),
    duration_ms=st.sampled_from([0, 250, 1050]),  # no multiple of a step, or none: no timer meets a change
    cooldown_ms=st.sampled_from([None, 1037]),
)
@settings(max_examples=40, deadline=None)
def test_a_watch_fires_when_it_has_to(course: Course, duration_ms: int, cooldown_ms: int | None) -> None:
    """Edge or level, with a duration or without: it fires at the very moments that the course of the state says, across restarts."""
    assert asyncio.run(fired_ms(course, duration_ms, cooldown_ms)) == expected_ms(course, duration_ms, cooldown_ms)
