"""Triggers fire when they are due and the moment is fit: once a slot, and never for a slot that has passed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.beyond import Beyond, crossed
from tests.unit.cognition.support import START, Bus, BusDown, make_event
from tidings.cognition.errors import InvalidRequest, TriggerLimit, UnknownTrigger
from tidings.cognition.prospective import (
    Conditions,
    DailyTime,
    Interval,
    Once,
    ProspectiveTrigger,
    RunnerSettings,
    Signals,
    Trigger,
    TriggerRunner,
    TriggerStatus,
    eligibility,
    fold,
)
from tidings.cognition.prospective.triggers import Schedule, next_fire
from tidings.core.clock import datetime_of
from tidings.core.events import Event, EventMeta
from tidings.testing import VirtualClock

BERLIN = ZoneInfo("Europe/Berlin")
HOURLY = Interval(every_seconds=3600, start_at=START)


def trigger(schedule: Schedule, **more: Any) -> Trigger:
    return Trigger(id="t", person_id="alice", space_id="personal:alice", title="tea", schedule=schedule, **more)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("arousal", "pressure", "value"), [(0.2, 0.1, 0.837), (1.0, 1.0, 0.15), (0.0, 0.0, 1.0), (3.0, 0.0, 0.0)]
)
def test_eligibility_follows_its_formula(arousal: float, pressure: float, value: float) -> None:
    """(1 - 0.5 a) (1 - 0.7 p), clipped."""
    assert eligibility(arousal, pressure) == pytest.approx(value)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_more_arousal_or_pressure_is_never_fitter(arousal: float, pressure: float, more: float) -> None:
    """Eligibility lies in 0..1 and falls with both."""
    base = eligibility(arousal, pressure)

    assert 0 <= base <= 1
    assert eligibility(max(arousal, more), pressure) <= base
    assert eligibility(arousal, max(pressure, more)) <= base


@pytest.mark.parametrize(
    ("schedule", "after", "fires", "expected"),
    [
        (Once(fire_at=START), START - timedelta(seconds=1), 0, START),
        (Once(fire_at=START), START, 0, None),
        (HOURLY, START - timedelta(days=9), 0, START),
        (HOURLY, START, 0, START + timedelta(hours=1)),
        (HOURLY, START + timedelta(minutes=125), 0, START + timedelta(hours=3)),
        (Interval(every_seconds=60, start_at=START, max_fires=2), START, 2, None),
        (
            Interval(every_seconds=60, start_at=START, end_at=START + timedelta(minutes=1)),
            START,
            0,
            START + timedelta(minutes=1),
        ),
        (Interval(every_seconds=60, start_at=START, end_at=START + timedelta(seconds=59)), START, 0, None),
    ],
)
def test_schedules_fire_strictly_after(
    schedule: Schedule, after: datetime, fires: int, expected: datetime | None
) -> None:
    """Once, and at intervals up to their end and their count."""
    assert next_fire(schedule, after, BERLIN, fires) == expected


@pytest.mark.parametrize(
    ("daily", "after", "expected"),
    [
        (DailyTime(time="08:00"), "2026-01-01T06:59:59+00:00", "2026-01-01T08:00+01:00"),
        (DailyTime(time="08:00"), "2026-01-01T07:00:00+00:00", "2026-01-02T08:00+01:00"),
        (DailyTime(time="08:00", days_of_week=frozenset({0})), "2026-01-01T00:00+00:00", "2026-01-05T08:00+01:00"),
        (DailyTime(time="08:00", days_of_week=frozenset({0})), "2026-01-05T08:00+01:00", "2026-01-12T08:00+01:00"),
        # Clocks go from 02:00 to 03:00 on 29 March 2026: 02:30 does not exist, 03:00 is the next time that does.
        (DailyTime(time="02:30"), "2026-03-28T12:00+01:00", "2026-03-29T03:00+02:00"),
        (DailyTime(time="02:30"), "2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"),
        # Clocks go back from 03:00 to 02:00 on 25 October 2026: 02:30 comes twice, and fires the first time only.
        (DailyTime(time="02:30"), "2026-10-24T12:00+02:00", "2026-10-25T02:30+02:00"),
        (DailyTime(time="02:30"), "2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"),
    ],
)
def test_a_time_of_day_goes_by_the_wall_clock(daily: DailyTime, after: str, expected: str) -> None:
    """On the days named, through both changes of the clocks."""
    assert next_fire(daily, at(after), BERLIN) == at(expected)


@given(st.integers(0, 365 * 24 * 3600), st.integers(0, 24 * 60 - 1), st.sets(st.integers(0, 6), min_size=1))
def test_a_daily_slot_always_lies_ahead(offset_s: int, minute: int, days: set[int]) -> None:
    """Strictly after, within eight days, on a named day, and asking again moves on."""
    after = START + timedelta(seconds=offset_s)
    daily = DailyTime(time=f"{minute // 60:02}:{minute % 60:02}", days_of_week=frozenset(days))
    found = next_fire(daily, after, BERLIN)

    assert found is not None
    assert after < found <= after + timedelta(days=8)
    assert found.astimezone(BERLIN).weekday() in days
    following = next_fire(daily, found, BERLIN)
    assert following is not None
    assert following > found


class World:
    """A runner on a virtual clock."""

    def __init__(self, **settings: Any) -> None:
        self.bus, self.clock = Bus(), VirtualClock()
        self.signals = Signals()
        self.runner = TriggerRunner(self.bus.publish, self.clock, self._signals, RunnerSettings(**settings))

    def _signals(self, trigger: Trigger) -> Signals:
        return self.signals

    async def run(self, seconds: float) -> None:
        running = asyncio.create_task(self.runner.run())
        await self.clock.advance(seconds)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    def told(self) -> list[str]:
        """What the triggers' history says; see ``fired`` for what others are told."""
        kinds = (kind.partition("PROS_TRIGGER_")[2] for kind in self.bus.types())
        return [word for word in kinds if word]

    def history(self, word: str) -> list[Event]:
        return self.bus.of_type(f"PROS_TRIGGER_{word}")

    def fired(self) -> list[ProspectiveTrigger]:
        """What the arbiter and the workspace are told."""
        told = self.bus.of_type("PROSPECTIVE_TRIGGER")
        return [msgspec.convert(event.payload, ProspectiveTrigger) for event in told]


async def test_a_trigger_fires_on_time_and_expires() -> None:
    """Told when it was made and when it fired, with eligibility and slot; then it is gone from the runner."""
    world = World()
    await world.runner.upsert(trigger(Once(fire_at=START + timedelta(seconds=100))), cause="c")
    world.signals = Signals(arousal=0.2, safety_pressure=0.1)
    await world.run(99.9)
    assert world.told() == ["UPSERTED"]
    await world.run(0.2)

    assert world.told() == ["UPSERTED", "FIRED"]
    (fired,) = world.history("FIRED")
    assert fired.meta.ts == START + timedelta(seconds=100)
    assert fired.payload["eligibility"] == pytest.approx(0.837)
    assert fired.payload["trigger"]["status"] == "EXPIRED"
    assert world.runner.triggers() == []


async def test_an_interval_fires_its_count() -> None:
    """Every half minute, three times, and no more."""
    world = World()
    await world.runner.upsert(trigger(Interval(every_seconds=30, start_at=START, max_fires=3)), cause="c")
    await world.run(1000)

    fired = world.bus.of_type("PROS_TRIGGER_FIRED")
    assert [(event.meta.ts - START).total_seconds() for event in fired] == [30, 60, 90]


async def test_a_trigger_made_while_the_runner_sleeps_is_not_late() -> None:
    """A change wakes the loop, which would else sleep for a minute."""
    world = World()
    running = asyncio.create_task(world.runner.run())
    await world.clock.advance(1)
    await world.runner.upsert(trigger(Once(fire_at=START + timedelta(seconds=5))), cause="c")
    await world.clock.advance(4)
    running.cancel()

    assert world.told() == ["UPSERTED", "FIRED"]
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.bound("cognition.prospective.runner.RunnerSettings.late_s_max")
@crossed
async def test_a_trigger_that_is_too_late_is_reported_as_missed(beyond: Beyond) -> None:
    """A trigger as late as allowed fires; one that is later does not, and is reported."""
    for late_s, result in ((60, "FIRED"), (beyond(60), "SKIPPED")):
        world = World()
        await world.runner.upsert(trigger(HOURLY), cause="c")
        world.clock.jump(3600 + late_s)
        await world.runner.fire_due()
        assert world.told()[1] == result
        if result == "SKIPPED":
            assert world.bus.events[1].payload["reasons"] == ["missed"]


async def test_missed_slots_are_said_once_and_never_made_up_for() -> None:
    """After a day of sleep an hourly trigger is skipped once, and fires at the next full hour."""
    world = World()
    await world.runner.upsert(trigger(HOURLY), cause="c")
    world.clock.jump(24 * 3600 + 1800)
    await world.runner.fire_due()

    assert world.told() == ["UPSERTED", "SKIPPED"]
    assert world.bus.events[1].payload["reasons"] == ["missed"]
    assert world.runner.triggers()[0].next_fire_at == START + timedelta(hours=25)
    await world.run(1800)
    assert world.told() == ["UPSERTED", "SKIPPED", "FIRED"]


@pytest.mark.parametrize(
    ("conditions", "signals", "reason"),
    [
        (Conditions(require_arousal_max=0.5), Signals(arousal=0.51), "arousal_too_high"),
        (Conditions(disallow_safety_pressure_min=0.6), Signals(safety_pressure=0.6), "safety_pressure"),
        (Conditions(tag_present="home"), Signals(tags=frozenset({"work"})), "tag_missing"),
    ],
)
async def test_a_condition_skips_the_slot(conditions: Conditions, signals: Signals, reason: str) -> None:
    """It is told with the reason, and the next slot stands."""
    world = World()
    world.signals = signals
    await world.runner.upsert(trigger(HOURLY, conditions=conditions), cause="c")
    await world.run(3600)

    assert world.told() == ["UPSERTED", "SKIPPED"]
    assert world.bus.events[1].payload["reasons"] == [reason]
    world.signals = Signals(tags=frozenset({"home"}))
    await world.run(3600)
    assert world.told()[-1] == "FIRED"


async def test_a_cooldown_skips_slots_that_follow_too_soon() -> None:
    """Half-hourly with an hour's cool-down: every other slot."""
    world = World()
    schedule = Interval(every_seconds=1800, start_at=START)
    await world.runner.upsert(trigger(schedule, conditions=Conditions(cooldown_seconds=3600)), cause="c")
    await world.run(4 * 1800)

    assert world.told() == ["UPSERTED", "FIRED", "SKIPPED", "FIRED", "SKIPPED"]


async def test_an_unfit_moment_is_skipped_when_asked_for() -> None:
    """With a least eligibility set."""
    world = World(eligibility_min=0.2)
    world.signals = Signals(arousal=1.0, safety_pressure=1.0)
    await world.runner.upsert(trigger(HOURLY), cause="c")
    await world.run(3600)

    assert world.bus.events[1].payload["reasons"] == ["not_eligible"]


@pytest.mark.parametrize("error", [ConnectionError(), RuntimeError("whatever"), AttributeError("arousal")])
async def test_not_knowing_the_moment_is_an_error_and_no_interruption(error: Exception) -> None:
    """Signals that cannot be had, for whatever reason: the slot is told as an error, the next one stands."""
    world = World()

    def broken(trigger: Trigger) -> Signals:
        raise error

    runner = TriggerRunner(world.bus.publish, world.clock, broken)
    await runner.upsert(trigger(HOURLY), cause="c")
    await world.clock.advance(3600)
    await runner.fire_due()

    assert world.told() == ["UPSERTED", "ERROR"]
    assert runner.triggers()[0].next_fire_at == START + timedelta(hours=2)


async def test_snoozing_moves_the_slot_and_cancelling_ends_it() -> None:
    """A snoozed trigger fires at the end of its pause, and then as planned; a cancelled one never."""
    world = World()
    await world.runner.upsert(trigger(HOURLY), cause="c")
    await world.runner.snooze("t", START + timedelta(minutes=90))
    await world.run(2 * 3600)
    fired = world.bus.of_type("PROS_TRIGGER_FIRED")
    assert [(event.meta.ts - START).total_seconds() for event in fired] == [5400, 7200]

    await world.runner.cancel("t")
    await world.run(4 * 3600)
    assert world.told() == ["UPSERTED", "SNOOZED", "FIRED", "FIRED", "CANCELLED"]
    with pytest.raises(UnknownTrigger):
        await world.runner.cancel("t")
    with pytest.raises(UnknownTrigger):
        await world.runner.snooze("t", START + timedelta(days=9))


async def test_a_draft_does_not_fire_until_it_is_activated() -> None:
    """Only ACTIVE and SNOOZED do."""
    world = World()
    await world.runner.upsert(trigger(HOURLY, status=TriggerStatus.DRAFT), cause="c")
    await world.run(3600)
    assert world.told() == ["UPSERTED"]
    await world.runner.upsert(trigger(HOURLY), cause="d")
    await world.run(3600)

    assert world.told() == ["UPSERTED", "UPSERTED", "FIRED"]


async def test_a_bus_that_is_down_delays_a_firing_but_does_not_lose_or_double_it() -> None:
    """Tried again each second, saying the same, whether or not the first try was stored after all."""
    world = World()
    await world.runner.upsert(trigger(Once(fire_at=START + timedelta(seconds=10))), cause="c")
    world.bus.failures = [BusDown(), BusDown()]
    world.bus.failures_after = [BusDown()]
    await world.run(11.5)
    assert world.told() == ["UPSERTED"]
    world.signals = Signals(arousal=1.0)
    await world.run(5)

    assert world.told() == ["UPSERTED", "FIRED"]
    assert world.history("FIRED")[0].payload["eligibility"] == 1.0
    assert len(world.fired()) == 1
    assert world.runner.triggers() == []
    assert world.bus.calls == 6


async def test_a_slot_that_another_runner_has_told_does_not_stop_this_one() -> None:
    """Two runners hold one trigger; the slower one learns that its slot is taken, says so and goes on."""
    world = World()
    await world.runner.upsert(trigger(HOURLY), cause="c")
    rival = TriggerRunner(world.bus.publish, world.clock)
    rival.restore(fold(world.bus.events))
    await world.clock.advance(3600)
    await world.runner.fire_due()
    await world.clock.advance(1)
    await rival.fire_due()

    assert world.told() == ["UPSERTED", "FIRED", "ERROR"]
    assert world.history("ERROR")[0].payload["problem"] == "log.id_conflict"
    assert len(world.fired()) == 1
    assert rival.triggers()[0].next_fire_at == START + timedelta(hours=2)


async def test_the_history_gives_the_triggers_back() -> None:
    """A new runner that folds the topic goes on where the old one stopped."""
    world = World()
    await world.runner.upsert(trigger(HOURLY), cause="c")
    await world.runner.upsert(msgspec.structs.replace(trigger(HOURLY), id="gone"), cause="d")
    await world.runner.cancel("gone")
    await world.run(3600)
    unrelated = make_event({"text": "x"})
    successor = TriggerRunner(world.bus.publish, world.clock)
    successor.restore(fold([unrelated, *world.bus.events]))

    assert successor.triggers() == world.runner.triggers()
    assert successor.triggers()[0].fires_count == 1
    await world.clock.advance(3600)
    await successor.fire_due()
    assert world.told()[-1] == "FIRED"


def upsert(payload: dict[str, Any], *, space_id: str = "personal:alice", event_id: str = "u") -> Event:
    meta = EventMeta(topic="prospective", type="PROS_TRIGGER_UPSERT", space_id=space_id, event_id=event_id, ts=START)
    return Event(meta, payload)


async def test_triggers_come_in_over_the_bus() -> None:
    """PROS_TRIGGER_UPSERT makes one; a second delivery is told once; what is no trigger is refused."""
    world = World()
    command = upsert({"trigger": msgspec.to_builtins(trigger(DailyTime(time="08:00"), tz="Europe/Berlin"))})
    await world.runner(command)
    await world.runner(command)

    assert world.told() == ["UPSERTED"]
    assert world.runner.triggers()[0].next_fire_at == datetime(2026, 1, 1, 7, tzinfo=UTC)
    with pytest.raises(InvalidRequest):
        await world.runner(upsert({"trigger": {"id": "x"}}))


@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        (Interval(every_seconds=29, start_at=START), {}),
        (Interval(every_seconds=30, start_at=START, max_fires=10_001), {}),
        (Once(fire_at=START.replace(tzinfo=None)), {}),
        (DailyTime(time="24:00"), {}),
        (DailyTime(time="08:00", days_of_week=frozenset({7})), {}),
        (DailyTime(time="08:00", days_of_week=frozenset()), {}),
        (HOURLY, {"tz": "Mars/Olympus"}),
        (HOURLY, {"id": ""}),
    ],
)
async def test_impossible_triggers_are_refused(schedule: Schedule, more: dict[str, Any]) -> None:
    """Before anything is told."""
    world = World()

    with pytest.raises(InvalidRequest):
        await world.runner.upsert(msgspec.structs.replace(trigger(schedule), **more), cause="c")
    assert world.bus.events == []


@pytest.mark.bound("cognition.prospective.runner.RunnerSettings.triggers_max")
@crossed
async def test_the_runner_is_bounded(beyond: Beyond) -> None:
    """It takes no more than it may; replacing one is always possible, and leaves no rest behind."""
    world = World(triggers_max=2)
    for name in ("a", "b"):
        await world.runner.upsert(msgspec.structs.replace(trigger(HOURLY), id=name), cause=name)
    for number in range(2, beyond(2)):
        with pytest.raises(TriggerLimit):
            await world.runner.upsert(msgspec.structs.replace(trigger(HOURLY), id=f"c{number}"), cause="c")
    for number in range(200):
        late = Once(fire_at=datetime_of(world.clock.now_ns()) + timedelta(days=number + 1))
        await world.runner.upsert(msgspec.structs.replace(trigger(late), id="a"), cause=f"a{number}")

    await world.clock.advance(3600)
    assert await world.runner.fire_due() == 1
