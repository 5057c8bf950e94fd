"""A watch does its action when its condition says so, once for each time, and says when it does not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from tests.unit.ledger.support import thawed
from tests.unit.schedule.support import LEVEL, RING, House, event, every, hot
from tidings.core.clock import SteadyClock
from tidings.core.events import Event
from tidings.happenings.filters import HappeningFilter
from tidings.happenings.variants import (
    AppointmentFired,
    ClockAdjusted,
    ClockTrustChanged,
    PluginEvent,
    WatchEvaluationThrottled,
)
from tidings.ledger import LedgerSettings
from tidings.ledger.catalogue import SetCatalogue, parse_catalogue
from tidings.ledger.claims import AnnounceSubject
from tidings.ledger.errors import InvalidCommand, LedgerError
from tidings.ledger.subjects import Addressing
from tidings.log.interface import Verdict
from tidings.log.memory import MemoryLog
from tidings.schedule.actions import ScheduledAction
from tidings.schedule.errors import BadSpec, QuotaExceeded
from tidings.schedule.watch_runner import WatchRunner
from tidings.schedule.watches import (
    WATCH_SCHEME,
    CreateWatch,
    FinishWatchFiring,
    NoteWatches,
    Watches,
    WatchSettings,
    watch_spec,
)
from tidings.testing import VirtualClock


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.open()
    yield house
    await house.close()


# Edge


@pytest.mark.req("H48", "H52")
async def test_each_event_that_matches_fires(house: House) -> None:
    """A watch on happenings alone fires for each of them, after its action was done, and says what came of it."""
    await house.watch(event("doors"))

    await house.emit("doors", "windows", "doors")

    assert house.rung == ["watch/ops/w/1/1", "watch/ops/w/1/2"]
    fired = {"type": "watch_fired", "creator": "ops", "watch_id": "w", "dispatch_outcome": "ok"}
    assert await house.told() == [fired, fired]
    entry = await house.runner.entry("ops", "w")
    assert entry is not None
    assert msgspec.json.decode(msgspec.json.encode(entry.to_json())) == {
        "creator": "ops",
        "spec": {"watch_id": "w", "condition": event("doors"), "trigger": {"kind": "edge"}},
        "action": RING,
        "state": "pending",
        "fires_completed": 2,
        "last_fired_ms": house.clock.now_ns() // 1_000_000,
    }


@pytest.mark.req("H48")
@pytest.mark.parametrize(
    ("shelf", "outcome"), [("hall.broken", "unavailable/bell_broken"), ("hall.nobody", "not_found/no_handler")]
)
async def test_a_failure_is_told_as_its_class(house: House, shelf: str, outcome: str) -> None:
    """A watch whose action fails has fired all the same; what went wrong is told by its class, as for appointments."""

    class BellBroken(LedgerError):
        """The bell makes no sound."""

        code = "test.bell_broken"
        error_class = InvalidCommand.error_class.UNAVAILABLE
        subclass = "bell_broken"

    async def broken(action: ScheduledAction, firing: str) -> None:
        raise BellBroken

    house.actions.register("hall.broken", broken)
    await house.watch(event("doors"), action={"target_shelf": shelf, "request_type": "ring"})

    await house.emit("doors")

    assert [each["dispatch_outcome"] for each in await house.told("watch_fired")] == [outcome]


@pytest.mark.req("H52")
async def test_a_state_fires_when_it_begins(house: House) -> None:
    """An edge on a subject's state fires when the predicate becomes true, not again while it stays so, and not for what held before."""
    await house.room(85)
    await house.watch(hot())

    await house.heat(90)
    assert house.rung == []
    await house.heat(70, 81, 95, 80, 99)
    await house.emit("anybody")

    assert len(house.rung) == 2


@pytest.mark.req("H52")
async def test_hysteresis_fires_once_until_it_was_low(house: House) -> None:
    """Between the bounds nothing begins: a value that wavers does not fire again."""
    await house.room()
    predicate = {"kind": "hysteresis", "field": "celsius", "upper": 80, "lower": 60}
    await house.watch({"kind": "subject_state", "canonical_id": "s1", "predicate": predicate})

    await house.heat(50, 85, 90, 70, 50, 85)

    assert len(house.rung) == 2


@pytest.mark.req("H52")
async def test_all_terms_may_come_one_after_another(house: House) -> None:
    """A composite of several happenings waits for the last of them, fires once, and then waits for all of them again."""
    await house.watch(every(event("a"), event("b")))

    await house.emit("a", "a", "c")
    assert house.rung == []
    await house.emit("b")
    assert len(house.rung) == 1
    await house.emit("b")
    assert len(house.rung) == 1
    await house.emit("a")
    assert len(house.rung) == 2


@pytest.mark.req("H52")
async def test_a_happening_and_a_state_go_together(house: House) -> None:
    """A happening that came first waits for the state; while the state lasts, each further happening fires."""
    await house.room(20)
    await house.watch(every(event("motion"), hot()))

    await house.emit("motion")
    await house.heat(85)
    assert len(house.rung) == 1
    await house.heat(86)
    assert len(house.rung) == 1
    await house.emit("motion")
    assert len(house.rung) == 2


async def test_any_term_is_enough_and_does_not_stick(house: House) -> None:
    """Of alternatives the first fires; a happening that comes while the state holds anyway leaves nothing behind."""
    await house.room(20)
    await house.watch({"kind": "composite", "op": "any", "terms": [event("motion"), hot()]})

    await house.emit("motion")
    assert len(house.rung) == 1
    await house.heat(85)
    assert len(house.rung) == 2
    await house.emit("motion")
    assert len(house.rung) == 2
    await house.heat(20, 85)
    assert len(house.rung) == 3


@pytest.mark.req("H52")
async def test_a_window_makes_a_silence_fire(house: House) -> None:
    """``not`` over a match with a window is true when nothing has come for that long: noticed by a timer, once for each silence."""
    await house.watch({"kind": "composite", "op": "not", "terms": [event("pulse", window_ms=60_000)]})

    await house.emit("pulse")
    await house.clock.advance(59)
    await house.emit("pulse")
    await house.clock.advance(59.9)
    assert house.rung == []
    await house.clock.advance(0.2)
    assert len(house.rung) == 1
    await house.emit("anybody")
    await house.clock.advance(600)
    assert len(house.rung) == 1
    await house.emit("pulse")
    await house.clock.advance(61)
    assert len(house.rung) == 2


async def test_an_exclusion_is_about_the_same_happening(house: House) -> None:
    """``not`` over a match without a window leaves out that happening, and no other."""
    await house.watch(every({"kind": "happening_match"}, {"kind": "composite", "op": "not", "terms": [event("noise")]}))

    await house.emit("noise")
    assert house.rung == []
    await house.emit("signal")
    assert len(house.rung) == 1


# Durations


@pytest.mark.req("H52")
async def test_a_duration_is_noticed_by_a_timer(house: House) -> None:
    """A state with a minimum duration fires when it has lasted that long, with no further happening, and once."""
    await house.room(20)
    await house.watch(hot(minimum_duration_ms=5000))

    await house.heat(85)
    await house.clock.advance(4.9)
    assert house.rung == []
    entry = await house.runner.entry("ops", "w")
    assert entry is not None
    assert entry.state == "matched"
    await house.clock.advance(0.2)
    assert len(house.rung) == 1
    await house.clock.advance(100)
    assert len(house.rung) == 1


@pytest.mark.req("H52")
async def test_a_duration_begins_again(house: House) -> None:
    """A state that ceases before its time begins again from nothing; unrelated happenings and other values change nothing."""
    await house.room(20)
    await house.watch(hot(minimum_duration_ms=5000))

    await house.heat(85)
    await house.clock.advance(4)
    await house.heat(20, 85)
    await house.clock.advance(4)
    await house.emit("anybody")
    await house.heat(90)
    assert house.rung == []
    await house.clock.advance(1.1)
    assert len(house.rung) == 1


async def test_the_longest_duration_of_a_tree_counts(house: House) -> None:
    """A tree has to hold for the longest time that one of its leaves asks for."""
    await house.room(20)
    await house.room(20, subject="s2")
    await house.watch(every(hot(minimum_duration_ms=1000), hot("s2", minimum_duration_ms=3000)))

    await house.heat(85)
    await house.clock.advance(10)
    await house.heat(85, subject="s2")
    await house.clock.advance(2.9)
    assert house.rung == []
    await house.clock.advance(0.2)
    assert len(house.rung) == 1


async def test_a_state_that_holds_already_has_its_duration_before_it(house: House) -> None:
    """How long something has held before it was watched is not known: it fires after its duration from then on."""
    await house.room(85)
    await house.watch(hot(minimum_duration_ms=5000))

    await house.clock.advance(4.9)
    assert house.rung == []
    await house.clock.advance(0.2)
    assert len(house.rung) == 1


@pytest.mark.parametrize("jump_s", [86_400, -86_400])
async def test_setting_the_clock_changes_no_duration(house: House, jump_s: float) -> None:
    """Durations and cooldowns are as long as they are, also if the clock is set by a day either way meanwhile."""
    await house.room(20)
    await house.watch(hot(minimum_duration_ms=5000), LEVEL)

    await house.heat(85)
    await house.clock.advance(2)
    house.clock.jump(jump_s)
    await house.clock.advance(2.9)
    assert house.rung == []
    await house.clock.advance(0.2)
    assert len(house.rung) == 1
    house.clock.jump(jump_s)
    await house.clock.advance(2)
    assert len(house.rung) == 3


@pytest.mark.parametrize("jump_s", [86_400, -86_400])
async def test_a_duration_goes_on_after_the_clock_was_set_and_a_restart(house: House, jump_s: float) -> None:
    """What has lasted for a while when the clock is set has lasted as long after a restart, by whatever clock."""
    await house.room(20)
    await house.watch(hot(minimum_duration_ms=5000), LEVEL)

    await house.heat(85)
    await house.clock.advance(2)
    house.clock.jump(jump_s)
    await house.ledger.happenings.emit_durable(ClockAdjusted(at_ms=0, delta_seconds=jump_s))
    await house.clock.advance(1)
    await house.reopen()
    await house.clock.advance(1.9)
    assert house.rung == []
    await house.clock.advance(0.2)
    assert len(house.rung) == 1


@pytest.mark.req("H49")
async def test_a_duration_waits_for_a_clock_that_is_trusted(house: House) -> None:
    """Under a clock that nobody trusts a duration is not believed: told once, and it fires as soon as the clock is trusted."""
    house.is_time_trusted = False
    await house.room(20)
    await house.watch(hot(minimum_duration_ms=5000))
    await house.watch(hot(), name="at_once")

    await house.heat(85)
    assert house.rung == ["watch/ops/at_once/2/1"]
    await house.clock.advance(6)
    await house.heat(86, 87)
    await house.clock.advance(60)
    missed = await house.told("watch_missed")
    assert missed == [{"type": "watch_missed", "creator": "ops", "watch_id": "w", "reason": "untrusted_time"}]
    house.is_time_trusted = True
    await house.ledger.happenings.emit_durable(ClockTrustChanged(at_ms=0, from_="untrusted", to="trusted"))
    await house.clock.advance(0)

    assert house.rung[1:] == ["watch/ops/w/1/1"]


# Level


@pytest.mark.req("H49", "H52")
async def test_a_level_pauses_after_it_fired(house: House) -> None:
    """Happenings within the cooldown of a level are not acted on, which is told once for each cooldown; the next one after it is."""
    await house.watch(event("doors"), LEVEL)

    await house.emit(*["doors"] * 5)
    assert len(house.rung) == 1
    assert [(each["type"], each.get("reason")) for each in await house.told()] == [
        ("watch_missed", "in_cooldown"),
        ("watch_fired", None),
    ]
    await house.clock.advance(1.1)
    assert len(house.rung) == 1
    await house.emit("doors", "doors")
    assert len(house.rung) == 2
    assert len(await house.told("watch_missed")) == 2


@pytest.mark.req("H52")
async def test_a_level_goes_on_while_its_state_lasts(house: House) -> None:
    """A level fires once a cooldown for as long as the condition holds, with no further happening; also if it held before."""
    await house.room(85)
    await house.watch(hot(), LEVEL)

    await house.clock.advance(3.5)
    assert len(house.rung) == 4
    await house.heat(20)
    await house.clock.advance(60)
    assert len(house.rung) == 4
    await house.heat(85)
    assert len(house.rung) == 5
    assert await house.told("watch_missed") == []


# Throttle


@pytest.mark.req("H51")
async def test_a_flood_is_throttled_and_told_once_a_second(house: House) -> None:
    """No more than 1000 happenings a second are shown to a watch; those left out are counted in one notice, by a timer if nothing comes."""
    await house.watch(event("sensor"))
    flood = [PluginEvent(at_ms=0, plugin="sensor", event_type="e", payload=None)] * 500

    for _ in range(5):
        for happening in flood:
            house.ledger.happenings.emit(happening)
        await house.clock.advance(0.1)

    assert await house.fired_count() == 1000
    assert await house.told("watch_evaluation_throttled") == []
    await house.clock.advance(1)
    assert await house.told("watch_evaluation_throttled") == [
        {"type": "watch_evaluation_throttled", "creator": "ops", "watch_id": "w", "dropped": 1500}
    ]
    await house.emit("sensor")
    assert await house.fired_count() == 1001
    await house.clock.advance(10)
    assert len(await house.told("watch_evaluation_throttled")) == 1


@pytest.mark.req("H51")
async def test_what_was_shown_and_what_was_left_out_add_up(house: House) -> None:
    """While a flood goes on there is one notice a second for each watch, and no happening is neither shown nor counted."""
    await house.close()
    await house.open(settings=WatchSettings(evaluations_per_second_max=10))
    await house.watch(event("sensor"))
    await house.watch(event("sensor"), name="other")
    told = house.ledger.happenings.subscribe(filter=HappeningFilter(variants=("watch_evaluation_throttled",)))

    for _ in range(35):
        for _ in range(20):
            house.ledger.happenings.emit(PluginEvent(at_ms=0, plugin="sensor", event_type="e", payload=None))
        await house.clock.advance(0.1)
    await house.clock.advance(5)

    notices = [each.happening for each in await told.recv_many()]
    for name in ("w", "other"):
        mine = [each for each in notices if isinstance(each, WatchEvaluationThrottled) and each.watch_id == name]
        assert len(mine) == 4
        assert all(later.at_ms - earlier.at_ms >= 1000 for earlier, later in itertools.pairwise(mine))
        entry = await house.runner.entry("ops", name)
        assert entry is not None
        assert entry.fires_completed == 40
        assert entry.fires_completed + sum(each.dropped for each in mine) == 35 * 20


async def test_what_a_flood_ends_with_is_seen(house: House) -> None:
    """Of states that are left out the last one is looked at when the second is over: a watch does not stay wrong."""
    await house.close()
    await house.open(settings=WatchSettings(evaluations_per_second_max=3))
    await house.room(20)
    await house.watch(hot())

    await house.heat(21, 22, 23, 24, 25, 85)
    assert house.rung == []
    await house.clock.advance(1)
    assert len(house.rung) == 1
    assert [each["dropped"] for each in await house.told("watch_evaluation_throttled")] == [3]


# Feedback


async def test_watches_do_not_see_each_other_fire(house: House) -> None:
    """What happens to watches is never evaluated: a watch on everything does not set off itself."""
    await house.watch({"kind": "happening_match"})
    await house.watch({"kind": "happening_match"}, name="other")

    told = AppointmentFired(at_ms=0, creator="c", appointment_id="a", fired_at_ms=0, dispatch_outcome="ok")
    await house.ledger.happenings.emit_durable(told)
    await house.clock.advance(10)

    assert sorted(house.rung) == ["watch/ops/other/2/1", "watch/ops/w/1/1"]


@pytest.mark.parametrize(("per_firing_count", "reason", "rings_max"), [(1, "feedback", 101), (2, "overloaded", 2 * 50)])
async def test_a_watch_whose_action_sets_it_off_is_stopped(
    house: House, per_firing_count: int, reason: str, rings_max: int
) -> None:
    """
    An action that brings about its own watch's condition goes round a hundred times, then the circle is cut and that is told; if it grows, by the
    number of firings that may wait. After that the watch works as before.
    """
    await house.close()
    await house.open(settings=WatchSettings(waiting_firings_max=50))
    rings = 0

    async def echo(action: ScheduledAction, firing: str) -> None:
        nonlocal rings
        rings += 1
        for _ in range(per_firing_count):
            told = PluginEvent(at_ms=0, plugin="doors", event_type="e", payload=None)
            await house.ledger.happenings.emit_durable(told)

    house.actions.register("hall.echo", echo)
    await house.watch(event("doors"), action={"target_shelf": "hall.echo", "request_type": "ring"})

    await house.emit("doors")
    await house.clock.advance(5)
    assert 50 < rings <= rings_max
    assert [each["reason"] for each in await house.told("watch_missed")] == [reason]
    house.actions.unregister("hall.echo")
    house.actions.register("hall.echo", house.ring)
    await house.emit("doors", "doors")
    assert len(house.rung) == 2


async def test_a_slow_action_makes_no_endless_queue(house: House) -> None:
    """
    Firings of a watch wait for one another. When as many wait as may, further ones are missed until all of those are done, and that is told;
    that they came while the action was done makes them no feedback.
    """
    house.gate = asyncio.Event()
    await house.close()
    await house.open(settings=WatchSettings(waiting_firings_max=150))
    await house.watch(event("doors"))

    await house.emit(*["doors"] * 151)
    assert len(house.rung) == 1
    house.gate.set()
    await house.clock.advance(0)
    assert await house.fired_count() == 150
    assert [each["reason"] for each in await house.told("watch_missed")] == ["overloaded"]
    await house.clock.advance(1)
    await house.emit("doors")
    assert await house.fired_count() == 151


# Subjects


async def test_a_watch_follows_its_subject_through_a_merge(house: House) -> None:
    """After a merge the new subject is watched, also by a watch that names an id retired before; the state begins anew."""
    await house.room(85)
    await house.room(20, subject="s2")
    await house.watch(hot("s2"))
    await house.merge("s1", "s2", "s3")
    await house.watch(hot("s2"), name="later")

    await house.heat(85, subject="s2")

    assert sorted(house.rung) == ["watch/ops/later/2/1", "watch/ops/w/1/1"]
    await house.reopen()
    await house.heat(20, 85, subject="s1")
    assert len(house.rung) == 4


async def test_a_state_that_comes_with_a_further_name_is_seen(house: House) -> None:
    """A plugin that gives a subject another name may set its state with that: told as any change of state, if it is one."""
    await house.room(20)
    await house.watch(hot())

    for name in ("oven", "stove"):
        await house.ledger.execute(
            AnnounceSubject(
                plugin="p",
                subject_type="room",
                addressings=(Addressing("room", "s1"), Addressing("room", name)),
                new_id="unused",
                state={"celsius": 90},
            )
        )
    await house.clock.advance(0)

    assert len(house.rung) == 1
    states = [each["new_state"] for each in await house.told("subject_state_changed")]
    assert states == [{"celsius": 20}, {"celsius": 90}]


async def test_a_watch_follows_its_subject_through_a_migration(house: House) -> None:
    """A subject that gets another type and id is watched on with the state it has: nothing begins by that."""
    await house.room(85)
    await house.room(20, subject="s2")
    await house.watch(hot())
    await house.watch(hot("s2"), name="other")
    await house.ledger.execute(SetCatalogue(catalogue=parse_catalogue('schema_version=1\n[[subjects]]\nname="hall"\n')))
    await house.ledger.grammar.migrate("room", {"kind": "rename", "to_type": "hall"}, admin="a")

    await house.heat(90)
    assert house.rung == []
    await house.heat(20, 90)
    await house.heat(90, subject="s2")

    assert house.rung == ["watch/ops/w/1/1", "watch/ops/other/2/1"]


# Issuing and cancelling


@pytest.mark.req("H50")
@pytest.mark.parametrize("who", ["operator", "org.example.player"])
async def test_either_side_cancels(house: House, who: str) -> None:
    """A cancelled watch fires no more and says who cancelled it; cancelling it again, or one nobody knows, changes and tells nothing."""
    await house.watch(event("doors"))

    assert await house.runner.cancel("ops", "w", cancelled_by=who)
    assert not await house.runner.cancel("ops", "w", cancelled_by="somebody else")
    assert not await house.runner.cancel("ops", "nobody's", cancelled_by=who)
    await house.emit("doors")

    assert house.rung == []
    assert await house.told() == [{"type": "watch_cancelled", "creator": "ops", "watch_id": "w", "cancelled_by": who}]
    assert [entry.state for entry in await house.runner.entries()] == ["cancelled"]


async def test_an_action_under_way_outlives_its_watch(house: House) -> None:
    """Cancelled while its action is done, a watch begins none of its further firings; what came of this one is told."""
    house.gate = asyncio.Event()
    await house.watch(event("doors"))
    await house.emit("doors", "doors")

    await house.runner.cancel("ops", "w", cancelled_by="operator")
    house.gate.set()
    await house.clock.advance(0)

    assert len(house.rung) == 1
    assert [each["type"] for each in await house.told()] == ["watch_cancelled", "watch_fired"]


async def test_the_outcome_of_a_replaced_watch_is_emitted_once(house: House) -> None:
    """What came of an action is stored again if the first time may have failed: also of a watch issued again meanwhile, it is emitted once."""
    house.gate = asyncio.Event()
    await house.watch(event("doors"))
    await house.emit("doors")
    await house.watch(event("windows"))
    finish = FinishWatchFiring(creator="ops", watch_id="w", issue=1, firing=1, fired_at_ms=1, dispatch_outcome="ok")

    for _ in range(2):
        await house.ledger.execute(finish)
    house.gate.set()
    await house.clock.advance(0)

    assert await house.fired_count() == 1


async def test_an_action_may_cancel_or_replace_its_own_watch(house: House) -> None:
    """An action that cancels its watch makes it one that fires once; one that issues it anew leaves the new one. Each firing is told."""

    async def once(action: ScheduledAction, firing: str) -> None:
        await house.runner.cancel("ops", "w", cancelled_by="itself")

    async def replace(action: ScheduledAction, firing: str) -> None:
        await house.watch(event("windows"), name="w2")

    house.actions.register("hall.once", once)
    house.actions.register("hall.replace", replace)
    await house.watch(event("doors"), action={"target_shelf": "hall.once", "request_type": "ring"})
    await house.watch(event("doors"), name="w2", action={"target_shelf": "hall.replace", "request_type": "ring"})

    await house.emit("doors")
    await house.emit("doors", "windows")

    assert house.rung == ["watch/ops/w2/3/1"]
    assert [(each["type"], each["watch_id"]) for each in await house.told()].count(("watch_fired", "w")) == 1
    entries = {entry.spec.watch_id: entry for entry in await house.runner.entries()}
    assert (entries["w"].state, entries["w"].fires_completed) == ("cancelled", 1)
    assert (entries["w2"].state, entries["w2"].fires_completed) == ("pending", 1)


async def test_issued_again_it_starts_afresh(house: House) -> None:
    """The same creator and id make the same watch, with its counters and its memory begun anew; another creator's is another."""
    await house.watch(every(event("a"), event("b")))
    await house.emit("a", "b", "a")
    await house.watch(every(event("a"), event("b")))
    await house.runner.create("others", {"watch_id": "w", "condition": event("c")}, RING)

    await house.emit("b")

    assert [(entry.creator, entry.fires_completed) for entry in await house.runner.entries()] == [
        ("ops", 0),
        ("others", 0),
    ]
    assert len(house.rung) == 1


async def test_there_may_be_so_many() -> None:
    """Creating more watches than allowed, of a creator or in all, is refused; those cancelled do not count, nor does issuing again."""
    house = House()
    await house.open(settings=WatchSettings(count_max=3, count_per_creator_max=2))
    spec = {"condition": event("doors")}
    await house.runner.create("a", spec | {"watch_id": "1"}, RING)
    await house.runner.create("a", spec | {"watch_id": "2"}, RING)
    await house.runner.create("a", spec | {"watch_id": "2"}, RING)
    with pytest.raises(QuotaExceeded):
        await house.runner.create("a", spec | {"watch_id": "3"}, RING)
    await house.runner.create("b", spec | {"watch_id": "1"}, RING)
    with pytest.raises(QuotaExceeded):
        await house.runner.create("c", spec | {"watch_id": "1"}, RING)
    await house.runner.cancel("a", "1", cancelled_by="a")

    await house.runner.create("c", spec | {"watch_id": "1"}, RING)

    assert len(await house.runner.entries()) == 4
    await house.close()


@pytest.mark.parametrize(
    ("spec", "action", "problem"),
    [
        ({"trigger": {"kind": "level", "cooldown_ms": 999}}, RING, "trigger.cooldown_ms"),
        ({"trigger": {"kind": "sometimes"}}, RING, "trigger"),
        ({"condition": None}, RING, "condition"),
        ({"note": "?"}, RING, "note"),
        ({}, {"target_shelf": "a.b"}, "action"),
        ({}, RING | {"payload": float("nan")}, None),
        ({"watch_id": 7}, RING, "watch_id"),
        *(
            ({"condition": {"kind": "happening_match", "filter": {"variants": [name]}}}, RING, "no watch is evaluated")
            for name in ("watch_created", "watch_fired", "watch_missed", "watch_cancelled")
        ),
        (
            {"condition": every({"kind": "happening_match", "filter": {"variants": ["custody_takn"]}}, hot())},
            RING,
            r"'custody_takn' is not a declared variant; did you mean custody_taken\?",
        ),
    ],
)
async def test_a_bad_spec_makes_no_watch(
    house: House, spec: dict[str, Any], action: dict[str, Any], problem: str | None
) -> None:
    """What is refused leaves no watch; the bound of a cooldown is a second."""
    given = {"watch_id": "w", "condition": event("doors")} | spec
    if problem is None:
        await house.runner.create("ops", given, action)
        assert (await house.runner.entries())[0].action.payload is None
        return
    with pytest.raises(BadSpec, match=problem):
        await house.runner.create("ops", given, action)

    assert await house.runner.entries() == []


@pytest.mark.parametrize(("creator", "watch_id"), [("", "w"), ("ops", ""), ("o\x00ps", "w"), ("ops", "w" * 5000)])
async def test_names_are_checked(house: House, creator: str, watch_id: str) -> None:
    """A creator and an id are names: not empty, of bounded length, without control characters."""
    with pytest.raises(InvalidCommand):
        await house.runner.create(creator, {"watch_id": watch_id, "condition": event("doors")}, RING)

    assert WATCH_SCHEME == "evo-watch"


async def test_a_watch_can_be_issued_while_nobody_evaluates(house: House) -> None:
    """A runner that was not started keeps watches, lists and cancels them; they begin with how things are at the start."""
    await house.runner.close()
    house.runner = WatchRunner(house.ledger, house.actions)
    await house.room(85)
    await house.watch(hot(), LEVEL)
    await house.watch(hot(), name="edge")
    await house.watch(event("doors"), name="gone")
    await house.runner.cancel("ops", "gone", cancelled_by="operator")
    await house.emit("doors")
    assert house.rung == []

    await house.runner.start()
    await house.clock.advance(0)

    assert house.rung == ["watch/ops/w/1/1"]
    assert [entry.state for entry in await house.runner.entries()] == ["matched", "cancelled", "matched"]


# Restart


async def test_a_restart_keeps_what_was_seen(house: House) -> None:
    """Latched happenings, counters, durations begun and cooldowns are there after a restart, and nothing fires a second time."""
    await house.room(20)
    await house.watch(every(event("a"), event("b")), name="pair")
    await house.watch(hot(minimum_duration_ms=5000), name="long")
    await house.watch(event("c"), {"kind": "level", "cooldown_ms": 10_000}, name="slow")
    await house.emit("a", "c")
    await house.heat(85)
    await house.clock.advance(3)
    assert house.rung == ["watch/ops/slow/3/1"]

    await house.reopen()
    await house.clock.advance(1.9)
    await house.emit("c")
    assert len(house.rung) == 1
    await house.clock.advance(0.2)
    assert house.rung[1:] == ["watch/ops/long/2/1"]
    await house.emit("b")
    assert house.rung[2:] == ["watch/ops/pair/1/1"]
    assert [entry.fires_completed for entry in await house.runner.entries()] == [1, 1, 1]


async def test_what_happens_while_nobody_evaluates_is_evaluated_later(house: House) -> None:
    """Happenings that were stored and not evaluated, as a crash leaves them, are evaluated at the next start; those evaluated are not again."""
    await house.watch(event("doors"))
    await house.emit("doors")
    await house.runner.close()
    await house.emit("doors", "doors")
    assert len(house.rung) == 1

    await house.ledger.close()
    await house.open()
    await house.clock.advance(0)

    assert house.rung == ["watch/ops/w/1/1", "watch/ops/w/1/2", "watch/ops/w/1/3"]


async def test_a_firing_without_an_outcome_is_dispatched_again_under_its_name(house: House) -> None:
    """An action that a crash interrupts is done again after the restart, under the same name, before those that waited behind it."""
    house.gate = asyncio.Event()
    await house.watch(event("doors"))
    await house.emit("doors", "doors")
    assert house.rung == ["watch/ops/w/1/1"]

    await house.close()
    house.gate.set()
    await house.open()
    await house.clock.advance(0)

    assert house.rung[1:] == ["watch/ops/w/1/1", "watch/ops/w/1/2"]
    assert await house.fired_count() == 2


class StoppingLog(MemoryLog):
    """A log that answers so many commits, and then never again, as if the machine had stopped."""

    left = -1

    def __init__(self) -> None:
        super().__init__()
        self.stopped = asyncio.Event()

    async def append_many(self, events: Sequence[Event], **more: Any) -> list[Verdict]:
        if self.left == 0:
            self.stopped.set()
            await asyncio.get_running_loop().create_future()
        self.left -= 1
        return await super().append_many(events, **more)


async def doors_and_heat(house: House) -> None:
    """Two watches, and what sets them off: three events, and a room that gets hot twice."""
    await house.open()
    await house.watch(event("doors"))
    await house.room(20)
    await house.watch(every(event("motion"), hot()), name="both")
    await house.emit("doors", "motion")
    await house.heat(85)
    await house.emit("doors", "motion", "doors")
    await house.heat(20)


async def test_a_crash_at_any_commit_loses_no_firing() -> None:
    """
    Wherever the machine stops, what is stored is evaluated to its end after the restart: each firing has its own number, is dispatched
    at least once under it, and is told once.
    """
    is_through = False
    for count in itertools.count(1):
        house = House()
        house.log = log = StoppingLog()
        log.left = count
        running, stopped = asyncio.create_task(doors_and_heat(house)), asyncio.create_task(log.stopped.wait())
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        is_through = running.done()
        await ended([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])

        log.left = -1
        await house.open()
        await house.clock.advance(0)

        told = [(each["type"], each.get("plugin")) for each in await house.told("plugin_event", "watch_fired")]
        entries = {entry.spec.watch_id: entry for entry in await house.runner.entries()}
        fired = entries["w"].fires_completed if "w" in entries else 0
        assert fired == told.count(("plugin_event", "doors"))
        assert {name for name in house.rung if "/w/" in name} == {f"watch/ops/w/1/{n + 1}" for n in range(fired)}
        numbers = {name for name in house.rung if "/both/" in name}
        assert len(numbers) == (entries["both"].fires_completed if "both" in entries else 0)
        assert told.count(("watch_fired", None)) == sum(entry.fires_completed for entry in entries.values())
        assert not any(entry.firings for entry in entries.values())
        await house.close()
        if is_through:
            break
    assert count > 20


async def test_a_crash_between_two_records_of_one_happening_fires_nothing_twice() -> None:
    """What many watches found is stored in several records; a crash between them leaves some evaluated and some not, and each fires once."""
    house = House()
    house.log = log = StoppingLog()
    await house.open()
    for number in range(60):
        await house.watch(event("doors"), name=str(number))
    log.left = 2  # the event, and the first record

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await house.emit("doors")
    await log.stopped.wait()
    await ended([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
    log.left = -1
    await house.open()
    await house.clock.advance(0)

    assert [entry.fires_completed for entry in await house.runner.entries()] == [1] * 60
    await house.close()


class GatedLog(MemoryLog):
    """A log whose commits wait while its gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def append_many(self, events: Sequence[Event], **more: Any) -> list[Verdict]:
        await self.gate.wait()
        return await super().append_many(events, **more)


async def test_closing_waits_for_what_was_evaluated() -> None:
    """A runner that is closed while it stores what many watches found stores all of it: the happening is not to be had again."""
    house = House()
    house.log = log = GatedLog()
    await house.open()
    for number in range(60):
        await house.watch(event("doors"), name=str(number))
    for plugin in ("windows", "doors"):  # the first has seqs for both written down
        house.ledger.happenings.emit(PluginEvent(at_ms=0, plugin=plugin, event_type="e", payload=None))
        if plugin == "windows":
            await house.clock.advance(0)
            log.gate.clear()
    await house.clock.advance(0)

    closing = asyncio.create_task(house.runner.close())
    await house.clock.advance(0)
    log.gate.set()
    await house.clock.run_until(closing)
    await house.ledger.close()
    await house.open()
    await house.clock.advance(0)

    assert len(set(house.rung)) == 60
    await house.close()


async def test_a_caller_that_gives_up_leaves_nothing_half_done() -> None:
    """A watch that was stored is evaluated, and one that was cancelled is not, also if whoever asked for that did not wait."""
    house = House()
    house.log = log = GatedLog()
    await house.open()
    await house.watch(event("doors"), name="old")
    log.gate.clear()
    asked = [
        asyncio.create_task(house.watch(event("doors"), name="new")),
        asyncio.create_task(house.runner.cancel("ops", "old", cancelled_by="operator")),
    ]
    await house.clock.advance(0)
    await ended(asked)
    log.gate.set()
    await house.clock.advance(0)

    await house.emit("doors")

    assert house.rung == ["watch/ops/new/2/1"]
    await house.close()


async def ended(tasks: list[asyncio.Task[Any]]) -> None:
    """Stop tasks where they are."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_history_that_is_gone_is_made_up_from_the_state(house: House) -> None:
    """If history no longer has what was not evaluated, the present state decides, and a watch fires if it has become true."""
    await house.close()
    await house.open(ledger=LedgerSettings(history_count_max=1))
    await house.room(20)
    await house.watch(hot())
    await house.runner.close()
    await house.heat(85, 86, 87)
    await house.clock.advance(120)

    await house.ledger.close()
    await house.open()
    await house.clock.advance(0)

    assert len(house.rung) == 1


async def test_a_commit_that_fails_is_made_up_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """If what was found cannot be stored, no action is done; evaluation begins anew from what is stored, and nothing is lost."""
    await house.watch(event("doors"))
    await house.room(20)
    await house.watch(hot(minimum_duration_ms=1000), name="hot")
    execute, failures = house.ledger.execute, 2

    async def failing(command: Any) -> Any:
        nonlocal failures
        if isinstance(command, NoteWatches) and failures:
            failures -= 1
            raise LedgerError
        return await execute(command)

    monkeypatch.setattr(house.ledger, "execute", failing)
    await house.emit("doors")
    assert house.rung == []
    await house.clock.advance(3)
    assert house.rung == ["watch/ops/w/1/1"]

    await house.heat(85)
    await house.clock.advance(0.9)
    failures = 1
    await house.clock.advance(5)
    assert house.rung[1:] == ["watch/ops/hot/2/1"]


async def test_a_slow_evaluation_loses_nothing(house: House) -> None:
    """More happenings at once than a subscriber holds are read from history."""
    await house.close()
    await house.open(ledger=LedgerSettings(buffer_count_max=4, history_count_max=None))
    await house.watch(event("doors"))

    await asyncio.gather(
        *(
            house.ledger.happenings.emit_durable(PluginEvent(at_ms=0, plugin="doors", event_type="e", payload=None))
            for _ in range(50)
        )
    )
    await house.clock.advance(0)

    assert await house.fired_count() == 50


# Many


async def test_a_happening_costs_what_it_concerns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hundreds of watches, a happening is shown to those only that look at such."""
    house = House()
    await house.open()
    watches = [
        CreateWatch(
            creator="ops",
            spec=watch_spec({"watch_id": str(n), "condition": event(f"p{n}")}),
            action=ScheduledAction(**RING),
            count_max=10_000,
            creator_count_max=10_000,
        )
        for n in range(500)
    ]
    await house.ledger.execute_many(watches)
    await house.runner.close()
    house.runner = WatchRunner(house.ledger, house.actions)
    await house.runner.start()
    evaluated: list[str] = []
    evaluate = house.runner._evaluate

    def noted(watch: Any, *more: Any) -> None:
        evaluated.append(watch.key.watch_id)
        evaluate(watch, *more)

    monkeypatch.setattr(house.runner, "_evaluate", noted)

    await house.emit("p7", "p499", "nobody")

    assert evaluated == ["7", "499"]
    await house.close()


async def test_many_watches_on_one_happening_leave_others_their_turns(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many look at the same happening, the loop goes on in between: at most a hundred are evaluated, and begun, in one turn of it."""
    count = 350
    await asyncio.gather(*(house.watch(event("doors"), name=f"w{number}") for number in range(count)))
    turns = 0
    per_turn: dict[tuple[str, int], int] = {}

    def counted(name: str) -> None:
        original = getattr(WatchRunner, name)

        def noted(*args: Any) -> Any:
            per_turn[name, turns] = per_turn.get((name, turns), 0) + 1
            return original(*args)

        monkeypatch.setattr(WatchRunner, name, noted)

    async def tick() -> None:
        nonlocal turns
        while len(house.rung) < count:
            turns += 1
            await asyncio.sleep(0)

    counted("_evaluate")
    counted("_work_off")
    ticking = asyncio.create_task(tick())
    await house.emit("doors")
    await ticking
    assert max(per_turn.values()) <= 100
    assert sum(times for (name, _), times in per_turn.items() if name == "_evaluate") == count
    assert len(set(house.rung)) == count


async def test_a_steady_clock_goes_on_when_the_other_is_set() -> None:
    """A steady clock agrees with the other at first, and is not set along with it."""
    clock = VirtualClock()
    steady = SteadyClock(clock)
    started_ns = clock.now_ns()
    await clock.advance(1.5)
    clock.jump(-3600)

    assert steady.now_ns() == started_ns + 1_500_000_000


async def test_a_snapshot_of_the_part_is_all_of_it(house: House) -> None:
    """Watches, what they remember, their counters and those cancelled of late are in a snapshot; a part made of it is the same."""
    await house.watch(every(event("a"), event("b")))
    await house.watch(event("c"), LEVEL, name="gone")
    await house.emit("a", "c")
    await house.runner.cancel("ops", "gone", cancelled_by="operator")

    part = await house.ledger.read(lambda state: state.part(Watches))

    again = thawed(part)
    assert again.freeze() == part.freeze()
    assert again.all() == part.all()
    assert (again.count, again.count_of("ops")) == (1, 1)
