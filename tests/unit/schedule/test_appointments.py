"""An appointment fires once at each of its times, tells what becomes of it, and outlives the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tests.unit.schedule.diary import RING, SETTINGS, Diary
from tidings.bus import EventBus
from tidings.bus.store.memory import MemoryGroupStore
from tidings.ledger.errors import ErrorClass, InvalidCommand, LedgerError, PluginFailure
from tidings.log.interface import Query
from tidings.log.reading import records
from tidings.schedule.actions import Actions
from tidings.schedule.appointments import APPOINTMENT_SCHEME, AppointmentEntry, AppointmentState
from tidings.schedule.errors import BadRecurrence, BadSpec, QuotaExceeded
from tidings.schedule.settings import ScheduleSettings

DAY_S = 86_400.0


@pytest.fixture
async def diary() -> AsyncIterator[Diary]:
    """A diary that is open."""
    made = Diary()
    await made.open()
    yield made
    made.gate = None
    await made.close()


@pytest.fixture
async def patient() -> AsyncIterator[Diary]:
    """A diary whose actions may take an hour."""
    made = Diary()
    made.action_s_max = 3600.0
    await made.open()
    yield made
    made.gate = None
    await made.close()


# Firing


@pytest.mark.req("H43")
async def test_one_that_happens_once(diary: Diary) -> None:
    """At its time the action is done, once, and it is told that this went well; then there is nothing left."""
    entry = await diary.once(5)
    assert (entry.next_fire_ms, entry.state) == (diary.at(5), AppointmentState.PENDING)

    await diary.clock.advance(60)

    assert diary.ring_times == [5.0]
    assert await diary.told() == [("fired", 5.0, 5.0, "ok")]
    done = await diary.entry()
    assert (done.state, done.next_fire_ms, done.fires_completed, done.last_fired_at_ms) == (
        AppointmentState.FIRED,
        None,
        1,
        diary.at(5),
    )


@pytest.mark.req("H43")
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (PluginFailure(ErrorClass.UNAVAILABLE, "asleep", "device_asleep"), "unavailable/device_asleep"),
        (InvalidCommand("volume", "is too high"), "contract_violation/invalid"),
        (RuntimeError("out of luck"), "internal"),
    ],
)
async def test_one_whose_action_fails(diary: Diary, error: Exception, outcome: str) -> None:
    """What failed has fired all the same; the outcome is the class of the error, and never its text."""
    diary.error = error
    await diary.every(5, max_fires=2)

    await diary.clock.advance(60)

    assert await diary.told() == [("fired", 5.0, 5.0, outcome), ("fired", 10.0, 10.0, outcome)]


async def test_intervals_do_not_drift(diary: Diary) -> None:
    """What comes at intervals comes at multiples of them, however long its action takes, and stops after the last."""
    diary.gate = asyncio.Event()
    await diary.every(2, max_fires=3)
    await diary.clock.advance(2.7)
    diary.gate.set()

    await diary.clock.advance(60)

    assert diary.ring_times == [2.0, 4.0, 6.0]
    assert (await diary.entry()).fires_completed == 3


async def test_an_action_that_takes_longer_than_its_interval(diary: Diary) -> None:
    """An occurrence waits for the end of the action; of those that fell into it the last fires, and the others are reported as missed."""
    diary.gate = asyncio.Event()
    await diary.every(2)
    await diary.clock.advance(7)
    assert diary.ring_times == [2.0]
    assert (await diary.entry()).state is AppointmentState.FIRING
    diary.gate.set()

    await diary.clock.advance(3.5)

    assert diary.ring_times == [2.0, 7.0, 8.0, 10.0]
    assert (await diary.told())[:2] == [("fired", 7.0, 2.0, "ok"), ("missed", 7.0, 4.0, "overlapped")]


CRON = {"recurrence": {"kind": "cron", "expr": "* * * * *"}}
PERIODIC = {"recurrence": {"kind": "periodic", "interval_ms": 60_000}}


@pytest.mark.parametrize("rule", [CRON, PERIODIC])
@pytest.mark.parametrize(
    ("policy", "action_s", "overlapped", "fires_late"),
    [
        ({"kind": "catchup"}, 210.0, [120.0, 180.0], 240.0),
        ({"kind": "catchup_within_grace", "grace_ms": 30_000}, 210.0, [120.0, 180.0], 240.0),
        ({"kind": "catchup_within_grace", "grace_ms": 29_999}, 210.0, [120.0, 180.0, 240.0], None),
        ({"kind": "drop"}, 210.0, [120.0, 180.0, 240.0], None),
        ({"kind": "drop"}, 181.0, [120.0, 180.0], 240.0),
        ({"kind": "drop"}, 59.9, [], None),
    ],
)
async def test_occurrences_that_fall_into_an_action(
    patient: Diary,
    rule: dict[str, Any],
    policy: dict[str, Any],
    action_s: float,
    overlapped: list[float],
    fires_late: float | None,
) -> None:
    """Every occurrence of five minutes either fires or is reported as missed, once; the policy decides about the last of those."""
    patient.gate = asyncio.Event()
    await patient.book(rule, miss_policy=policy)
    await patient.clock.advance(60 + action_s)
    patient.gate.set()
    await patient.clock.advance(400 - 60 - action_s)

    told = await patient.told()
    assert [each[2] for each in told if each[0] == "missed"] == overlapped
    assert {each[-1] for each in told if each[0] == "missed"} <= {"overlapped"}
    late = [] if fires_late is None else [60 + action_s]
    regular = [moment for moment in (120.0, 180.0, 240.0, 300.0, 360.0) if moment > 60 + action_s]
    assert patient.ring_times == [60.0, *late, *regular]


@pytest.mark.bound("schedule.after_firing._OVERLAPPED_COUNT_MAX")
@crossed
async def test_more_occurrences_in_an_action_than_are_reported_one_by_one(patient: Diary, beyond: Beyond) -> None:
    """64 are reported each; those beyond count as one late occurrence, here one that is missed; what comes then fires."""
    patient.gate = asyncio.Event()
    count = beyond(64)
    await patient.every(1, miss_policy={"kind": "drop"})
    await patient.clock.advance(1 + count + 0.5)
    patient.gate.set()
    await patient.clock.advance(1)

    missed = [each for each in await patient.told() if each[0] == "missed"]
    assert [each[2] for each in missed[:64]] == [float(moment) for moment in range(2, 66)]
    assert {each[-1] for each in missed[:64]} == {"overlapped"}
    # Beyond by one, the one left is no more than a second late, and fires.
    assert [each[2:] for each in missed[64:]] == ([] if count == 65 else [(66.0, "drop_policy")])
    assert len(patient.rung) > 1


@pytest.mark.parametrize("jump_s", [-DAY_S, -30.0, 45.5, DAY_S])
@pytest.mark.parametrize("is_noticed", [False, True])
async def test_intervals_keep_their_distance_when_the_clock_is_set_during_an_action(
    diary: Diary, jump_s: float, is_noticed: bool
) -> None:
    """Every 60 s, an action of 20 s, the clock set in the middle: the next one comes 60 s of passed time after the first."""
    diary.gate = asyncio.Event()
    await diary.every(60)
    await diary.clock.advance(70)
    diary.clock.jump(jump_s)
    if is_noticed:
        await diary.clock.advance(6)
        diary.gate.set()
        await diary.clock.advance(4)
    else:
        diary.gate.set()
        await diary.clock.advance(10)
    await diary.clock.advance(180)

    assert diary.ring_times == [60.0, 120.0, 180.0, 240.0]
    assert [each[0] for each in await diary.told()] == ["fired"] * 4


@pytest.mark.parametrize("jump_s", [-DAY_S, -1.0, DAY_S])
async def test_intervals_go_on_after_a_crash_in_an_action_and_a_clock_that_was_set(diary: Diary, jump_s: float) -> None:
    """Killed in the action and started with another clock: the action is done again, and the next one comes an interval later at most."""
    await diary.every(60)
    diary.gate = asyncio.Event()
    await diary.clock.advance(70)
    await diary.kill()
    diary.clock.jump(jump_s)

    await diary.open()
    await diary.clock.advance(200)

    times = diary.ring_times
    assert times[:2] == [60.0, 70.0]
    assert len(diary.rung) - 1 == len({name for _, name in diary.rung})
    assert all(0 < later - earlier <= 60 for earlier, later in pairwise(times))
    assert times[-1] >= 210


async def test_a_calendar_occurrence_that_has_fired_does_not_fire_again_when_the_clock_is_set_back(
    diary: Diary,
) -> None:
    """Set back by an hour during the action: the next minute is the one after the occurrence that fired."""
    diary.gate = asyncio.Event()
    await diary.book(CRON)
    await diary.clock.advance(65)
    diary.clock.jump(-3600)
    diary.gate.set()
    await diary.clock.advance(3600 + 60)

    assert len({name for _, name in diary.rung}) == len(diary.rung) == 2


@pytest.mark.req("H46")
async def test_days_in_a_zone() -> None:
    """A daily time holds in its own zone, in the machine's if none is given; cron without a zone is in UTC; left-out dates are left out."""
    diary = Diary()
    await diary.open(ScheduleSettings(local_zone="Europe/Berlin", clock_poll_interval_s=3600))
    half_past = {"recurrence": {"kind": "daily"}, "time": "06:30"}
    await diary.book(half_past, appointment_id="local")
    await diary.book(half_past | {"zone": {"kind": "anchored", "zone": "Asia/Tokyo"}}, appointment_id="tokyo")
    await diary.book({"recurrence": {"kind": "cron", "expr": "30 6 * * *"}}, appointment_id="cron")
    await diary.book(half_past | {"zone": {"kind": "utc"}, "except": ["2026-01-01"]}, appointment_id="late")
    await diary.book(half_past | {"zone": {"kind": "utc"}, "end_time_ms": diary.at(7 * 3600)}, appointment_id="ended")

    await diary.clock.advance(DAY_S * 1.5)

    names = [(at / 3600, name.split("/")[2]) for at, name in diary.rung]
    assert names == [
        (5.5, "local"),
        (6.5, "cron"),
        (6.5, "ended"),
        (21.5, "tokyo"),
        (29.5, "local"),
        (30.5, "cron"),
        (30.5, "late"),
    ]
    assert (await diary.entry("ended")).state is AppointmentState.FIRED
    await diary.close()


@pytest.mark.req("H46")
@pytest.mark.parametrize(
    ("start", "recurrence", "hours"),
    [
        # In Berlin the clocks go from 02:00 to 03:00 at 01:00 UTC, and back at the same time in autumn.
        ("2026-03-28T00:00:00Z", {"kind": "daily"}, [1.5, 25.0, 48.5]),
        ("2026-03-28T00:00:00Z", {"kind": "cron", "expr": "0,30 2 * * *"}, [1.0, 1.5, 25.0, 48.0, 48.5]),
        ("2026-10-24T00:00:00Z", {"kind": "daily"}, [0.5, 24.5, 49.5]),
        ("2026-10-24T00:00:00Z", {"kind": "cron", "expr": "30 * 25 10 *"}, None),
    ],
)
async def test_hours_that_are_missing_or_come_twice(
    start: str, recurrence: dict[str, Any], hours: list[float] | None
) -> None:
    """An appointment in an hour that the clocks skip fires once, right after it; in one that comes twice, the first time."""
    diary = Diary(start=start)
    await diary.open(ScheduleSettings(clock_poll_interval_s=3600))
    zone = {"kind": "anchored", "zone": "Europe/Berlin"}
    await diary.book({"recurrence": recurrence, "time": "02:30", "zone": zone})

    await diary.clock.advance(2.2 * DAY_S)

    fired = [at / 3600 for at in diary.ring_times]
    # The last one: once for each of the 24 hours that the clocks show, of the 25 that pass.
    expected = [22.5 + n + (n > 2) for n in range(24)] if hours is None else hours
    assert fired == expected
    await diary.close()


async def test_an_action_that_publishes(diary: Diary) -> None:
    """An action may be an event for a topic."""
    bus = EventBus(log=diary.log, store=MemoryGroupStore(diary.clock), clock=diary.clock)
    diary.runner._actions = Actions(publish=bus.publish, clock=diary.clock)
    action = {"topic": "alarms", "event_type": "WAKE_UP", "space": "shared:house", "payload": {"who": "ann"}}
    spec = {"appointment_id": "a", "recurrence": {"kind": "one_shot", "fire_at_ms": diary.at(5)}}
    await diary.runner.create("ann", spec, action)

    await diary.clock.advance(10)

    found = [record async for record in records(diary.log, Query(topic="alarms"))]
    assert [(record.meta.type, record.payload) for record in found] == [("WAKE_UP", {"who": "ann"})]
    assert await diary.told() == [("fired", 5.0, 5.0, "ok")]
    await diary.clock.run_until(bus.close())


# Approaching


@pytest.mark.req("H42")
async def test_the_approach_is_told_once(diary: Diary) -> None:
    """When the lead time begins it is told how far away the occurrence is; at once for one that is nearer already, and once for each."""
    await diary.once(60, pre_fire_ms=10_000, appointment_id="far")
    await diary.once(4, pre_fire_ms=10_000, appointment_id="near")
    assert (await diary.entry("far")).state is AppointmentState.PENDING

    await diary.clock.advance(51)
    assert (await diary.entry("far")).state is AppointmentState.APPROACHING
    await diary.clock.advance(60)

    assert await diary.told() == [
        ("approaching", 0.0, 4.0, 4000),
        ("fired", 4.0, 4.0, "ok"),
        ("approaching", 50.0, 60.0, 10_000),
        ("fired", 60.0, 60.0, "ok"),
    ]


@pytest.mark.req("H42")
async def test_each_occurrence_approaches(diary: Diary) -> None:
    """Of one that recurs, each occurrence's approach is told; setting the clock back does not tell it again."""
    await diary.book({"recurrence": {"kind": "cron", "expr": "* * * * *"}}, pre_fire_ms=10_000, max_fires=2)
    await diary.clock.advance(55)
    diary.clock.jump(-30)

    await diary.clock.advance(180)

    assert [told[0] for told in await diary.told()] == ["approaching", "fired", "approaching", "fired"]


# Missing


@pytest.mark.req("H44")
@pytest.mark.parametrize(
    ("policy", "late_s", "expected"),
    [
        ({"kind": "drop"}, 0.9, ("fired", "ok")),
        ({"kind": "drop"}, 2, ("missed", "drop_policy")),
        ({"kind": "catchup_within_grace", "grace_ms": 60_000}, 60, ("fired", "ok")),
        ({"kind": "catchup_within_grace", "grace_ms": 60_000}, 61, ("missed", "grace_window_exceeded")),
        (None, 300, ("fired", "ok")),
        (None, 301, ("missed", "grace_window_exceeded")),
        ({"kind": "catchup"}, 30 * DAY_S, ("fired", "ok")),
    ],
)
async def test_what_was_due_while_nobody_looked(
    diary: Diary, policy: dict[str, Any] | None, late_s: float, expected: tuple[str, str]
) -> None:
    """After a time without a process, the policy decides: dropped, made up for, or made up for if not too late; once, with the reason."""
    await diary.once(5, **({} if policy is None else {"miss_policy": policy}))
    await diary.close()
    diary.clock.jump(5 + late_s)  # no process runs: nobody has to be woken on the way

    await diary.open()
    await diary.clock.advance(60)

    assert [(told[0], told[-1]) for told in await diary.told()] == [expected]
    done = await diary.entry()
    assert (done.state, done.fires_completed) == (AppointmentState.FIRED, int(expected[0] == "fired"))


@pytest.mark.req("H44")
async def test_several_missed_occurrences_are_one(diary: Diary) -> None:
    """Of many occurrences that passed, one is told as missed; the last is made up for if it is in time, and what is missed is no fire."""
    await diary.every(60, miss_policy={"kind": "catchup_within_grace", "grace_ms": 30_000}, max_fires=2)
    await diary.close()
    diary.clock.jump(60 * 10 + 20)

    await diary.open()
    await diary.clock.advance(100)

    told = await diary.told()
    assert [(each[0], each[-1]) for each in told] == [
        ("missed", "grace_window_exceeded"),
        ("fired", "ok"),
        ("fired", "ok"),
    ]
    assert told[0][2] == 60.0
    assert [each[1] for each in told[1:]] == [620.0, 660.0]


@pytest.mark.req("H44")
async def test_an_untrusted_clock(diary: Diary) -> None:
    """While nothing says that the clock is right, what is due is told as missed, once, and fires when the clock is trusted."""
    await diary.close()
    diary.is_synced = False
    await diary.open()
    await diary.once(5)
    await diary.clock.advance(7)
    assert await diary.told() == [("missed", 5.0, 5.0, "untrusted_time")]
    assert diary.rung == []

    diary.is_synced = True
    await diary.clock.advance(60)

    assert await diary.told() == [("missed", 5.0, 5.0, "untrusted_time"), ("fired", 10.0, 10.0, "ok")]


@pytest.mark.req("H44")
async def test_a_clock_that_is_trusted_too_late(diary: Diary) -> None:
    """What is too late when the clock is trusted was told as missed already; it is passed over, also across a restart."""
    await diary.close()
    diary.is_synced = False
    await diary.open()
    await diary.once(5, miss_policy={"kind": "drop"})
    await diary.clock.advance(60)
    await diary.close()
    await diary.open()
    await diary.clock.advance(60)
    diary.is_synced = True

    await diary.clock.advance(60)

    assert [told[-1] for told in await diary.told()] == ["untrusted_time"]
    assert (await diary.entry()).state is AppointmentState.FIRED


async def test_a_stale_clock_will_do(diary: Diary) -> None:
    """A clock that was right until lately is good enough to fire by."""
    await diary.close()
    await diary.open(ScheduleSettings(clock_tolerance_s=10))
    diary.is_synced = False
    await diary.clock.advance(60)
    await diary.once(65)

    await diary.clock.advance(10)

    assert (str(diary.trust.state), diary.ring_times) == ("stale", [65.0])


# The clock is set


async def test_a_clock_that_jumps_a_day_forward(diary: Diary) -> None:
    """What a jump makes due is a day late, and the policy decides; what comes at intervals keeps its distance, and so misses nothing."""
    await diary.once(3600, appointment_id="dropped")
    await diary.once(3600, appointment_id="made up for", miss_policy={"kind": "catchup"})
    await diary.every(10, appointment_id="interval", max_fires=2)
    await diary.clock.advance(5)

    diary.clock.jump(DAY_S)
    await diary.clock.advance(30)

    assert [(told[0], told[-1]) for told in await diary.told()] == [
        ("missed", "grace_window_exceeded"),
        ("fired", "ok"),
        ("fired", "ok"),
        ("fired", "ok"),
    ]
    # It was due at 10: the clock was found to have been set, and everything waits for the next look at it.
    assert [at for at, name in diary.rung if "interval" in name] == [15.0, 20.0]


@pytest.mark.req("H47")
async def test_a_clock_that_jumps_a_day_back(diary: Diary) -> None:
    """An occurrence that has fired does not fire again; the next is the one after it. Intervals go on."""
    await diary.book({"recurrence": {"kind": "cron", "expr": "* * * * *"}}, appointment_id="cron")
    await diary.every(10, appointment_id="interval")
    await diary.clock.advance(65)
    before = len(diary.rung)
    assert before == 7

    diary.clock.jump(-DAY_S)
    await diary.clock.advance(60)
    assert [name.split("/")[2] for _, name in diary.rung[before:]] == ["interval"] * 6
    diary.clock.jump(DAY_S)
    await diary.clock.advance(60)

    fired = [name for _, name in diary.rung]
    assert len(set(fired)) == len(fired)
    assert sum("cron" in name for name in fired) == 3


# Cancelling


@pytest.mark.req("H45")
async def test_cancelling_says_who(diary: Diary) -> None:
    """Either side may cancel; it is told who did, once, and nothing fires after that."""
    for name, by in (("one", "ann"), ("two", "operator")):
        await diary.once(5, appointment_id=name)
        assert await diary.runner.cancel("ann", name, cancelled_by=by) is True
        assert await diary.runner.cancel("ann", name, cancelled_by=by) is False
    assert await diary.runner.cancel("ann", "unknown", cancelled_by="ann") is False

    await diary.clock.advance(60)

    assert await diary.told() == [("cancelled", 0.0, "ann"), ("cancelled", 0.0, "operator")]
    assert diary.rung == []
    assert (await diary.entry("one")).state is AppointmentState.CANCELLED


async def test_cancelling_while_it_fires(diary: Diary) -> None:
    """An action that is under way is done to its end and told; the appointment stays cancelled."""
    diary.gate = asyncio.Event()
    await diary.every(5)
    await diary.clock.advance(6)
    assert await diary.runner.cancel("ann", "a", cancelled_by="ann") is True
    diary.gate.set()

    await diary.clock.advance(60)

    assert [told[0] for told in await diary.told()] == ["cancelled", "fired"]
    entry = await diary.entry()
    assert (entry.state, entry.fires_completed) == (AppointmentState.CANCELLED, 0)


async def test_issuing_again_starts_afresh(diary: Diary) -> None:
    """The same id again is a new appointment: the old time no longer counts, and counters are at 0. Creators do not share ids."""
    await diary.every(5, max_fires=9)
    await diary.once(8, creator="bob")
    await diary.clock.advance(6)
    await diary.every(7)
    assert (await diary.entry()).fires_completed == 0

    await diary.clock.advance(8)

    assert diary.ring_times == [5.0, 8.0, 13.0]


# Restarts


@pytest.mark.req("H47")
@pytest.mark.parametrize("is_killed", [False, True])
async def test_appointments_outlive_the_process(diary: Diary, is_killed: bool) -> None:
    """After a restart every appointment goes on where it was, with its counters, and each occurrence fires once."""
    await diary.every(10, max_fires=3)
    await diary.once(15, appointment_id="b")
    await diary.clock.advance(12)
    await (diary.kill() if is_killed else diary.close())
    await diary.clock.advance(2)

    await diary.open()
    assert (await diary.entry()).fires_completed == 1
    await diary.clock.advance(60)

    assert diary.ring_times == [10.0, 15.0, 20.0, 30.0]
    assert [told[0] for told in await diary.told()] == ["fired"] * 4
    assert (await diary.entry()).fires_completed == 3


@pytest.mark.req("H47")
@pytest.mark.parametrize("policy", ["drop", "catchup"])
async def test_a_crash_while_an_action_is_under_way(diary: Diary, policy: str) -> None:
    """What had begun to fire is dispatched again under the same name, however late that is, and told as fired once."""
    await diary.once(5, miss_policy={"kind": policy})
    diary.gate = asyncio.Event()
    await diary.clock.advance(6)
    assert (await diary.entry()).state is AppointmentState.FIRING
    await diary.kill()
    diary.clock.jump(DAY_S)

    await diary.open()
    await diary.clock.advance(60)

    assert len(diary.rung) == 2
    assert len({name for _, name in diary.rung}) == 1
    assert [(told[0], told[-1]) for told in await diary.told()] == [("fired", "ok")]


@pytest.mark.req("H47")
async def test_a_snapshot_has_all_of_it(diary: Diary) -> None:
    """What comes back from a snapshot is what was there: every kind of spec, states, counters and order."""
    zone = {"kind": "anchored", "zone": "Asia/Tokyo"}
    specs: list[dict[str, Any]] = [
        {"recurrence": {"kind": "one_shot", "fire_at_ms": diary.at(1)}},
        {
            "recurrence": {"kind": "one_shot", "fire_at_ms": diary.at(900)},
            "must_wake_device": True,
            "wake_pre_arm_ms": 5,
        },
        {"recurrence": {"kind": "periodic", "interval_ms": 2000}, "max_fires": 7, "pre_fire_ms": 500},
        {"recurrence": {"kind": "daily"}, "time": "06:30", "except": ["2026-02-01"], "zone": zone},
        {"recurrence": {"kind": "weekdays"}, "time": "06:30:15", "miss_policy": {"kind": "drop"}},
        {"recurrence": {"kind": "weekends"}, "time": "06:30", "miss_policy": {"kind": "catchup"}},
        {"recurrence": {"kind": "weekly", "days": ["mon", "fri"]}, "time": "06:30", "zone": {"kind": "utc"}},
        {"recurrence": {"kind": "monthly", "day_of_month": 31}, "time": "06:30", "end_time_ms": diary.at(DAY_S * 99)},
        {"recurrence": {"kind": "yearly", "month": 2, "day": 29}, "time": "06:30"},
        {
            "recurrence": {"kind": "cron", "expr": "0 5 * * 1-5"},
            "miss_policy": {"kind": "catchup_within_grace", "grace_ms": 7},
        },
    ]
    for number, spec in enumerate(specs):
        await diary.book(spec, appointment_id=f"a{number}")
    await diary.once(5, appointment_id="cancelled")
    await diary.runner.cancel("ann", "cancelled", cancelled_by="ann")
    await diary.clock.advance(3)
    before = await diary.runner.entries()
    await diary.ledger.take_snapshot()
    await diary.kill()

    await diary.open()

    assert await diary.runner.entries() == before
    assert {entry.spec.recurrence.__struct_config__.tag for entry in before} == {
        "one_shot", "periodic", "daily", "weekdays", "weekends", "weekly", "monthly", "yearly", "cron",
    }  # fmt: skip
    await diary.clock.advance(2)
    assert [name.split("/")[2] for _, name in diary.rung] == ["a0", "a2", "a2"]


# Waking


async def test_the_machine_is_woken(diary: Diary) -> None:
    """The hook is told the first moment for which the machine must be awake, whenever that changes."""
    await diary.once(100, appointment_id="no matter")
    await diary.once(90, appointment_id="late", must_wake_device=True, wake_pre_arm_ms=3000)
    await diary.once(60, appointment_id="early", must_wake_device=True)
    await diary.clock.advance(61)
    await diary.runner.cancel("ann", "late", cancelled_by="ann")

    assert diary.wakes == [diary.at(87), diary.at(60), diary.at(87), None]


# Limits and bad input


async def test_quotas() -> None:
    """There may be so many in all and of one creator; issuing again needs no room, and what has finished takes none."""
    diary = Diary()
    settings = ScheduleSettings(appointments_max=3, appointments_per_creator_max=2, finished_appointments_max=1)
    await diary.open(settings)
    for name in ("a", "b"):
        await diary.once(5, appointment_id=name)
    with pytest.raises(QuotaExceeded, match="'ann' has 2 appointments"):
        await diary.once(5, appointment_id="c")
    await diary.once(6, appointment_id="b")
    await diary.once(100, creator="bob")
    with pytest.raises(QuotaExceeded, match="the ledger has 3 appointments"):
        await diary.once(100, creator="eve")

    await diary.clock.advance(10)
    await diary.once(100, appointment_id="c")

    # Of the two that have fired, the one that did so first is forgotten.
    assert [entry.spec.appointment_id for entry in await diary.runner.entries()] == ["b", "c", "a"]
    assert (await diary.entry("b")).state is AppointmentState.FIRED
    await diary.close()


async def test_many_at_once() -> None:
    """Appointments that are issued together are answered one by one, in their order; one that cannot be understood keeps all from being issued."""
    diary = Diary()
    await diary.open(ScheduleSettings(appointments_per_creator_max=15))
    many = [
        ({"appointment_id": f"a{n:02}", "recurrence": {"kind": "one_shot", "fire_at_ms": diary.at(n)}}, RING)
        for n in range(20)
    ]
    with pytest.raises(BadRecurrence):
        await diary.runner.create_many("ann", [*many, ({"appointment_id": "b", "recurrence": {"kind": "daily"}}, RING)])
    assert await diary.runner.entries() == []

    results = await diary.runner.create_many("ann", many)

    issued = [entry.spec.appointment_id for entry in results if isinstance(entry, AppointmentEntry)]
    assert issued == [f"a{n:02}" for n in range(15)]
    assert [isinstance(result, QuotaExceeded) for result in results[15:]] == [True] * 5
    await diary.clock.advance(20)
    assert diary.ring_times == [float(n) for n in range(15)]
    await diary.close()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({}, "spec"),
        ({"recurrence": {"kind": "hourly"}}, "recurrence.kind"),
        ({"recurrence": {"kind": "daily"}}, "time"),
        ({"recurrence": {"kind": "daily"}, "time": "06:30", "colour": 1}, "spec"),
        ({"recurrence": {"kind": "daily"}, "time": "06:30", "except": ["soon"]}, "except"),
        ({"recurrence": {"kind": "daily"}, "time": "06:30", "except": ["20261224"]}, "except"),
        ({"recurrence": {"kind": "daily", "time": "06:30"}, "time": "06:30"}, "recurrence"),
        ({"recurrence": {"kind": "daily"}, "time": "06:30", "zone": {"kind": "local", "zone": "Asia/Tokyo"}}, "zone"),
        ({"recurrence": {"kind": "daily"}, "time": "06:30", "zone": {"kind": "anchored", "zone": "Mars"}}, "zone"),
        ({"recurrence": {"kind": "periodic", "interval_ms": 0}}, "recurrence.interval_ms"),
        ({"recurrence": {"kind": "weekly", "days": []}, "time": "06:30"}, "recurrence.days"),
        ({"recurrence": {"kind": "weekly", "days": ["someday"]}, "time": "06:30"}, "recurrence.days[0]"),
        ({"recurrence": {"kind": "monthly", "day_of_month": 32}, "time": "06:30"}, "recurrence.day_of_month"),
        ({"recurrence": {"kind": "yearly", "month": 13, "day": 1}, "time": "06:30"}, "recurrence.month"),
        ({"recurrence": {"kind": "yearly", "month": 1, "day": 0}, "time": "06:30"}, "recurrence.day"),
        ({"recurrence": {"kind": "cron", "expr": "0 " * 200}}, "recurrence.expr"),
        ({"recurrence": {"kind": "one_shot", "fire_at_ms": -1}}, "recurrence.fire_at_ms"),
        ({"recurrence": {"kind": "one_shot", "fire_at_ms": 1e300}}, "recurrence.fire_at_ms"),
        ({"recurrence": {"kind": "cron", "expr": "0 0 30 2 *"}}, "recurrence"),
        ({"recurrence": {"kind": "cron", "expr": "0 0 29 2 1#6"}}, "recurrence"),
        ({"recurrence": {"kind": "daily"}, "time": "06:30", "max_fires": 0}, "max_fires"),
        ({"recurrence": {"kind": "daily"}, "time": "06:30", "pre_fire_ms": -1}, "pre_fire_ms"),
        ({"recurrence": {"kind": "daily"}, "time": "06:30", "except": ["2026-01-01"] * 9000}, "spec"),
    ],
)
async def test_a_spec_that_cannot_be_kept_is_refused(diary: Diary, spec: dict[str, Any], field: str) -> None:
    """An unknown rule, a time, date, zone or number that is none: refused, and the error names it. Nothing is stored."""
    with pytest.raises(BadRecurrence) as refused:
        await diary.book(spec)

    assert refused.value.field == field
    assert refused.value.error_class is ErrorClass.CONTRACT_VIOLATION
    assert await diary.runner.entries() == []


@pytest.mark.parametrize(
    ("creator", "appointment_id", "action", "kind"),
    [
        ("", "a", RING, InvalidCommand),
        ("ann", "a\0b", RING, InvalidCommand),
        ("ann", "x" * 5000, RING, InvalidCommand),
        ("ann", "a", {"target_shelf": "hall.bell"}, BadSpec),
        ("ann", "a", RING | {"topic": "t"}, BadSpec),
    ],
)
async def test_names_and_actions_are_checked(
    diary: Diary, creator: str, appointment_id: str, action: dict[str, Any], kind: type[LedgerError]
) -> None:
    """A name that is none, and an action that is none or two, are refused."""
    spec = {"appointment_id": appointment_id, "recurrence": {"kind": "one_shot", "fire_at_ms": diary.at(5)}}
    with pytest.raises(kind):
        await diary.runner.create(creator, spec, action)


async def test_one_that_is_over_before_it_begins(diary: Diary) -> None:
    """An end before the first occurrence is refused, and nothing is kept; an end at the first occurrence leaves that one."""
    with pytest.raises(BadRecurrence, match=r"end_time_ms.*before the first occurrence"):
        await diary.every(10, end_time_ms=diary.at(9.999))
    assert await diary.runner.entries() == []

    await diary.every(10, end_time_ms=diary.at(10))
    await diary.clock.advance(30)
    assert diary.ring_times == [10.0]


async def test_what_clients_see(diary: Diary) -> None:
    """An entry shows its spec with all fields and its zone, its action, how often it fired, and is pending until it has finished."""
    diary.gate = asyncio.Event()
    entry = await diary.every(10)
    await diary.clock.advance(11)

    assert (await diary.entry()).to_json() == {
        "creator": "ann",
        "spec": {
            "appointment_id": "a",
            "recurrence": {"kind": "periodic", "interval_ms": 10_000},
            "time": None,
            "zone": {"kind": "local"},
            "end_time_ms": None,
            "max_fires": None,
            "except": (),
            "miss_policy": {"kind": "catchup_within_grace", "grace_ms": 300_000},
            "pre_fire_ms": None,
            "must_wake_device": False,
            "wake_pre_arm_ms": None,
        },
        "action": RING,
        "state": "pending",
        "fires_completed": 0,
        "next_fire_ms": diary.at(10),
    }
    assert entry.next_fire_ms == diary.at(10)
    assert APPOINTMENT_SCHEME == "evo-appointment"
    diary.gate.set()


async def test_more_at_once_than_may_be_under_way() -> None:
    """No more actions are under way at once than may be; what is due meanwhile follows as they end."""
    diary = Diary()
    await diary.open(ScheduleSettings(dispatches_max=2, local_zone=SETTINGS.local_zone))
    diary.gate = asyncio.Event()
    for number in range(5):
        await diary.once(5, appointment_id=f"a{number}")
    await diary.clock.advance(6)
    assert len(diary.rung) == 2
    diary.gate.set()

    await diary.clock.advance(0)

    assert [name.split("/")[2] for _, name in diary.rung] == ["a0", "a1", "a2", "a3", "a4"]
    await diary.close()
