"""Limits of appointments and watches: at the limit they are made; beyond it they are rejected, wait, or are reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from tests.beyond import Beyond, crossed
from tests.unit.schedule.diary import RING, SETTINGS, Diary
from tests.unit.schedule.support import House, event
from tidings.core.errors import TidingsError
from tidings.schedule import actions, appointment_specs, conditions, recurrence, watches
from tidings.schedule.appointments import AppointmentState
from tidings.schedule.errors import BadSpec, QuotaExceeded
from tidings.schedule.time_trust import TimeTrust
from tidings.schedule.watches import WatchSettings

Spec = dict[str, Any]


@pytest.fixture
async def diary() -> AsyncIterator[Diary]:
    made = Diary()
    await made.open()
    yield made
    made.gate = None
    await made.close()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    await made.open()
    yield made
    made.gate = None
    await made.close()


async def opened(**settings: Any) -> Diary:
    diary = Diary()
    await diary.open(msgspec.structs.replace(SETTINGS, **settings))
    return diary


ACTIONS: dict[str, tuple[int, Callable[[int], Spec]]] = {
    "payload": (actions.ACTION_PAYLOAD_BYTES_MAX, lambda size: {**RING, "payload": "x" * (size - 2)}),
    "shelf": (actions.NAME_CHARS_MAX, lambda size: {**RING, "target_shelf": "hall." + "b" * (size - 5)}),
    "request type": (actions.NAME_CHARS_MAX, lambda size: {**RING, "request_type": "r" * size}),
}


@pytest.mark.bound("schedule.actions.ACTION_PAYLOAD_BYTES_MAX", "schedule.actions.NAME_CHARS_MAX")
@crossed
@pytest.mark.parametrize(("limit", "action"), list(ACTIONS.values()), ids=list(ACTIONS))
async def test_a_larger_action_is_rejected(
    diary: Diary, limit: int, action: Callable[[int], Spec], beyond: Beyond
) -> None:
    """An appointment with an action beyond the limit raises and is not listed; at the limit it is made."""
    spec: Spec = {"appointment_id": "a", "recurrence": {"kind": "one_shot", "fire_at_ms": diary.at(5)}}
    with pytest.raises(TidingsError):
        await diary.runner.create("ann", spec, action(beyond(limit)))
    assert (await diary.runner.create("ann", spec, action(limit))).state is AppointmentState.PENDING


@pytest.mark.bound("schedule.recurrence.MOMENT_MS_MAX", "schedule.recurrence.SPAN_MS_MAX")
@crossed
async def test_a_time_beyond_the_calendar_is_rejected(diary: Diary, beyond: Beyond) -> None:
    """A later moment, and a longer interval, raise; the last ones that are allowed are taken."""
    last, longest = recurrence.MOMENT_MS_MAX, 100 * recurrence.SPAN_MS_MAX
    with pytest.raises(TidingsError):
        await diary.book({"recurrence": {"kind": "one_shot", "fire_at_ms": beyond(last)}})
    with pytest.raises(TidingsError):
        await diary.book({"recurrence": {"kind": "periodic", "interval_ms": beyond(longest)}})
    await diary.book({"recurrence": {"kind": "one_shot", "fire_at_ms": last}})
    await diary.book({"recurrence": {"kind": "periodic", "interval_ms": longest}}, appointment_id="b")


@pytest.mark.bound("schedule.appointment_specs._SPEC_BYTES_MAX")
@crossed
async def test_a_larger_specification_is_rejected(diary: Diary, beyond: Beyond) -> None:
    """An appointment whose specification is larger as JSON raises."""
    text = "x" * beyond(appointment_specs._SPEC_BYTES_MAX)
    with pytest.raises(TidingsError):
        await diary.book({"recurrence": {"kind": "cron", "expression": text}})


@pytest.mark.bound("schedule.watches._SPEC_BYTES_MAX")
@crossed
async def test_a_larger_watch_is_rejected(house: House, beyond: Beyond) -> None:
    """A watch whose specification is larger as JSON raises."""
    with pytest.raises(TidingsError):
        await house.watch(event("p" * beyond(watches._SPEC_BYTES_MAX)))


@pytest.mark.bound(
    "schedule.settings.ScheduleSettings.appointments_max",
    "schedule.settings.ScheduleSettings.appointments_per_creator_max",
)
@crossed
@pytest.mark.parametrize("of_creator", [False, True])
async def test_one_more_appointment_is_rejected(of_creator: bool, beyond: Beyond) -> None:
    """As many as allowed are made; each further one raises ``QuotaExceeded``; cancelling one makes space."""
    name = "appointments_per_creator_max" if of_creator else "appointments_max"
    diary = await opened(**{name: 3})
    for number in range(3):
        await diary.once(1000, appointment_id=f"a{number}")
    for number in range(3, beyond(3)):
        with pytest.raises(QuotaExceeded):
            await diary.once(1000, appointment_id=f"a{number}")
    await diary.runner.cancel("ann", "a0", cancelled_by="ann")
    await diary.once(1000, appointment_id="one more")
    await diary.close()


@pytest.mark.bound("schedule.settings.ScheduleSettings.dispatches_max")
@crossed
async def test_further_due_actions_wait(beyond: Beyond) -> None:
    """No more actions run at once than allowed; the others run afterwards, each once."""
    diary = await opened(dispatches_max=3)
    diary.gate = asyncio.Event()
    for number in range(beyond(3)):
        await diary.once(5, appointment_id=f"a{number}")
    await diary.clock.advance(10)
    assert len(diary.rung) == 3
    diary.gate.set()
    await diary.clock.advance(10)
    assert len({firing for _, firing in diary.rung}) == len(diary.rung) == beyond(3)
    await diary.close()


@pytest.mark.bound("schedule.settings.ScheduleSettings.finished_appointments_max")
@crossed
async def test_the_oldest_finished_appointment_is_no_longer_listed(beyond: Beyond) -> None:
    """Only the appointments that ended last are listed."""
    diary = await opened(finished_appointments_max=3)
    for number in range(beyond(3)):
        await diary.once(number + 1, appointment_id=f"a{number:02}")
    await diary.clock.advance(beyond(3) + 5)
    listed = [entry.spec.appointment_id for entry in await diary.runner.entries()]
    assert listed == [f"a{number:02}" for number in range(beyond(3) - 3, beyond(3))]
    await diary.close()


@pytest.mark.bound("schedule.settings.ScheduleSettings.clock_tolerance_s")
@crossed
async def test_a_clock_that_was_not_adjusted_for_longer_is_stale(beyond: Beyond) -> None:
    """Within the tolerance the clock is trusted; after it, the clock is reported as stale, and appointments still fire."""
    diary = await opened(clock_tolerance_s=100.0, clock_poll_interval_s=0.5)
    await diary.clock.advance(10)
    diary.is_synced = False
    await diary.clock.advance(99)
    states = [diary.trust.state]
    await diary.clock.advance(beyond(100) - 99 + 1)
    states.append(diary.trust.state)
    assert states == [TimeTrust.TRUSTED, TimeTrust.STALE]
    await diary.once(diary.clock.monotonic() + 5)
    await diary.clock.advance(10)
    assert len(diary.rung) == 1
    await diary.close()


# Watches


def nested(depth: int) -> Spec:
    condition: Spec = event("p")
    for _ in range(depth):
        condition = {"kind": "composite", "op": "all", "terms": [condition]}
    return condition


@pytest.mark.bound("schedule.conditions.DEPTH_MAX", "schedule.conditions.LEAF_COUNT_MAX")
@crossed
async def test_a_larger_condition_is_rejected(house: House, beyond: Beyond) -> None:
    """A condition that nests deeper, or has more leaves, raises ``BadSpec``; at the limit the watch is made."""
    with pytest.raises(BadSpec):
        await house.watch(nested(beyond(conditions.DEPTH_MAX)))
    await house.watch(nested(conditions.DEPTH_MAX), name="deep")
    leaves = [event(f"p{number}") for number in range(beyond(conditions.LEAF_COUNT_MAX))]
    with pytest.raises(BadSpec):
        await house.watch({"kind": "composite", "op": "any", "terms": leaves})
    await house.watch({"kind": "composite", "op": "any", "terms": leaves[: conditions.LEAF_COUNT_MAX]}, name="wide")


@pytest.mark.bound("schedule.watches.WatchSettings.count_max", "schedule.watches.WatchSettings.count_per_creator_max")
@crossed
@pytest.mark.parametrize("name", ["count_max", "count_per_creator_max"])
async def test_one_more_watch_is_rejected(name: str, beyond: Beyond) -> None:
    """As many watches as allowed are made; each further one raises ``QuotaExceeded``."""
    house = House()
    await house.open(settings=WatchSettings(**{name: 3}))
    for number in range(3):
        await house.watch(event("p"), name=f"w{number}")
    for number in range(3, beyond(3)):
        with pytest.raises(QuotaExceeded):
            await house.watch(event("p"), name=f"w{number}")
    await house.close()


@pytest.mark.bound("schedule.watches.WatchSettings.evaluations_per_second_max")
@crossed
async def test_happenings_beyond_the_rate_are_skipped_and_counted(beyond: Beyond) -> None:
    """A watch evaluates as many happenings a second as allowed, and reports the number of the others."""
    house = House()
    await house.open(settings=WatchSettings(evaluations_per_second_max=5))
    await house.watch(event("p"))
    await house.emit(*["p"] * beyond(5))
    await house.clock.advance(3)
    throttled = [told for told in await house.told() if told["type"] == "watch_evaluation_throttled"]
    assert len(house.rung) == 5
    assert sum(told["dropped"] for told in throttled) == beyond(5) - 5
    await house.close()


@pytest.mark.bound(
    "schedule.watches.WatchSettings.dispatches_max", "schedule.watches.WatchSettings.waiting_firings_max"
)
@crossed
async def test_firings_wait_for_an_action_and_are_missed_beyond_the_limit(beyond: Beyond) -> None:
    """As many firings as allowed run or wait; further ones are reported as missed until all of those are done."""
    house = House()
    await house.open(settings=WatchSettings(dispatches_max=1, waiting_firings_max=4))
    house.gate = asyncio.Event()
    await house.watch(event("p"))
    await house.emit(*["p"] * (1 + beyond(4)))
    assert len(house.rung) == 1
    house.gate.set()
    await house.clock.advance(5)
    kinds = [told["type"] for told in await house.told()]
    assert kinds.count("watch_fired") == len(house.rung) == 4
    assert kinds.count("watch_missed") >= 1
    await house.close()


@pytest.mark.bound("schedule.watches.CANCELLED_COUNT_MAX")
@crossed
async def test_the_oldest_cancelled_watch_is_no_longer_listed(monkeypatch: pytest.MonkeyPatch, beyond: Beyond) -> None:
    """As many cancelled watches as allowed are listed, the latest ones; a watch that is not cancelled stays."""
    monkeypatch.setattr(watches, "CANCELLED_COUNT_MAX", 3)
    house = House()
    await house.open()
    await house.watch(event("p"), name="stays")
    for number in range(beyond(3)):
        await house.watch(event("p"), name=f"w{number:02}")
        [creator] = {entry.creator for entry in await house.runner.entries()}
        assert await house.runner.cancel(creator, f"w{number:02}", cancelled_by=creator)
    listed = sorted(entry.key[1] for entry in await house.runner.entries())
    assert listed == ["stays", *(f"w{number:02}" for number in range(beyond(3) - 3, beyond(3)))]
    await house.close()
