"""A trigger belongs to its space, and what others hear of its firing follows from its slot."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.cognition.support import START, Bus, BusDown
from tidings.bus import EventBus
from tidings.bus.events import Ack
from tidings.cognition.errors import InvalidRequest, UnknownTrigger
from tidings.cognition.prospective import (
    Conditions,
    Interval,
    Once,
    ProspectiveTrigger,
    Signals,
    Trigger,
    TriggerRunner,
    fold,
)
from tidings.core.clock import SYSTEM_CLOCK
from tidings.core.events import Event, EventMeta
from tidings.testing import VirtualClock

HOURLY = Interval(every_seconds=3600, start_at=START)


def trigger(person: str = "alice", **more: Any) -> Trigger:
    given = {"schedule": HOURLY, "title": f"tea for {person}", **more}
    return Trigger(id="tea", person_id=person, space_id=f"personal:{person}", **given)


def told(
    space_id: str, payload: dict[str, Any], *, kind: str = "PROS_TRIGGER_UPSERT", event_id: str | None = None
) -> Event:
    meta = EventMeta("prospective", kind, space_id)
    if event_id is not None:
        meta.event_id = event_id
    return Event(meta, payload)


def plain(held: Trigger) -> dict[str, Any]:
    return {"trigger": msgspec.to_builtins(held)}


@pytest.mark.req("F99")
async def test_a_trigger_cannot_be_replaced_from_another_space(caplog: pytest.LogCaptureFixture) -> None:
    """Bob's command about Alice's trigger is refused with the reason, counted and logged; hers fires as she made it."""
    bus, clock = Bus(), VirtualClock()
    counted: list[tuple[str, float, dict[str, str]]] = []
    runner = TriggerRunner(
        bus.publish, clock, metrics=lambda name, value, labels: counted.append((name, value, dict(labels)))
    )
    await runner.upsert(trigger(), cause="c")
    forged = plain(trigger(title="wire money to bob", action="run_procedure"))

    with pytest.raises(InvalidRequest, match="'personal:alice', and the event comes from 'personal:bob'") as refused:
        await runner(told("personal:bob", forged, event_id="evil"))

    assert refused.value.field == "trigger.space_id"
    assert counted == [("trigger_refusals_total", 1.0, {"field": "trigger.space_id"})]
    assert "refused PROS_TRIGGER_UPSERT evil" in caplog.text
    assert [held.title for held in runner.triggers()] == ["tea for alice"]
    await clock.advance(3600)
    await runner.fire_due()
    (fired,) = bus.of_type("PROSPECTIVE_TRIGGER")
    assert (fired.payload["title"], fired.payload["action"]) == ("tea for alice", "notify")


async def test_two_spaces_may_use_one_id() -> None:
    """Neither trigger knows of the other: both fire at the same slot, each in its space and once."""
    bus, clock = Bus(), VirtualClock()
    runner = TriggerRunner(bus.publish, clock)
    for person in ("alice", "bob"):
        await runner(told(f"personal:{person}", plain(trigger(person))))
    await clock.advance(3600)
    await runner.fire_due()

    fired = bus.of_type("PROSPECTIVE_TRIGGER")
    assert [(event.meta.space_id, event.payload["title"]) for event in fired] == [
        ("personal:alice", "tea for alice"),
        ("personal:bob", "tea for bob"),
    ]
    assert bus.of_type("PROS_TRIGGER_ERROR") == []
    assert list(fold(bus.events)) == [("personal:alice", "tea"), ("personal:bob", "tea")]


async def test_an_id_that_two_spaces_use_needs_the_space() -> None:
    """Snoozing and cancelling by such an id alone is refused; with the space, the other's trigger stays as it is."""
    bus, clock = Bus(), VirtualClock()
    runner = TriggerRunner(bus.publish, clock)
    for person in ("alice", "bob"):
        await runner.upsert(trigger(person), cause=person)
    later = START + timedelta(minutes=90)

    with pytest.raises(InvalidRequest, match="2 spaces have a trigger 'tea'"):
        await runner.cancel("tea")
    with pytest.raises(InvalidRequest, match="2 spaces have a trigger 'tea'"):
        await runner.snooze("tea", later)
    with pytest.raises(UnknownTrigger):
        await runner.cancel("tea", space_id="personal:carol")
    await runner.snooze("tea", later, space_id="personal:bob")
    await runner.cancel("tea", space_id="personal:alice")

    assert [(held.space_id, held.next_fire_at) for held in runner.triggers()] == [("personal:bob", later)]


async def test_a_forged_history_changes_nothing() -> None:
    """What no runner would tell is passed over: a trigger of another space, and what is no trigger at all."""
    bus, clock = Bus(), VirtualClock()
    runner = TriggerRunner(bus.publish, clock)
    await runner.upsert(trigger(), cause="c")
    forged = [
        told("personal:bob", plain(trigger(title="wire money")), kind="PROS_TRIGGER_UPSERTED"),
        told("personal:bob", plain(trigger(status="CANCELLED")), kind="PROS_TRIGGER_CANCELLED"),
        told("personal:bob", {}, kind="PROS_TRIGGER_UPSERTED"),
    ]
    successor = TriggerRunner(bus.publish, clock)
    successor.restore(fold([*bus.events, *forged]))

    assert successor.triggers() == runner.triggers()


async def test_a_refused_command_is_a_dead_letter_and_holds_nobody_up(tmp_path: Path) -> None:
    """On the bus: the reason stands in the dead letter, and the command behind it is obeyed."""
    heard: asyncio.Queue[Event] = asyncio.Queue()

    async def listen(event: Event) -> Ack:
        heard.put_nowait(event)
        return Ack()

    async with EventBus(workspace=tmp_path) as bus:
        runner = TriggerRunner(bus.publish, SYSTEM_CLOCK)
        await bus.subscribe("prospective", "runner", runner, max_retries=0)
        await bus.subscribe("prospective", "listener", listen)
        await bus.publish(told("personal:bob", plain(trigger()), event_id="evil"))
        await bus.publish(told("personal:bob", plain(trigger("bob"))))
        while (await asyncio.wait_for(heard.get(), 10)).meta.type != "PROS_TRIGGER_UPSERTED":
            pass
        (letter,) = await bus.dead_letters("prospective", "runner")

    assert letter.event["meta"]["event_id"] == "evil"
    assert "trigger.space_id: is 'personal:alice'" in letter.error
    assert [held.space_id for held in runner.triggers()] == ["personal:bob"]


async def test_a_firing_is_told_to_those_who_act_on_it() -> None:
    """PROSPECTIVE_TRIGGER on topic prospective, in the trigger's space: who, what and for which slot."""
    bus, clock = Bus(), VirtualClock()
    runner = TriggerRunner(bus.publish, clock)
    await runner.upsert(trigger(args={"cups": 2}), cause="c")
    await clock.advance(3601)
    await runner.fire_due()

    (event,) = bus.of_type("PROSPECTIVE_TRIGGER")
    assert (event.meta.topic, event.meta.space_id, event.meta.actor) == ("prospective", "personal:alice", "alice")
    assert msgspec.convert(event.payload, ProspectiveTrigger) == ProspectiveTrigger(
        id="tea",
        person_id="alice",
        space_id="personal:alice",
        title="tea for alice",
        action="notify",
        slot=START + timedelta(hours=1),
        args={"cups": 2},
    )
    assert len(bus.of_type("PROS_TRIGGER_FIRED")) == 1


async def test_a_slot_that_is_skipped_tells_nobody_to_act() -> None:
    """PROSPECTIVE_TRIGGER is for firings only."""
    bus, clock = Bus(), VirtualClock()
    runner = TriggerRunner(bus.publish, clock, lambda trigger: Signals(arousal=1.0))
    await runner.upsert(trigger(conditions=Conditions(require_arousal_max=0.5)), cause="c")
    await clock.advance(3600)
    await runner.fire_due()

    assert bus.types() == ["PROS_TRIGGER_UPSERTED", "PROS_TRIGGER_SKIPPED"]


async def test_a_crash_between_the_two_events_of_a_firing_loses_and_doubles_nothing() -> None:
    """The next runner tells the slot again, later: one event to act on, one in the history."""
    bus, clock = Bus(), VirtualClock()
    first = TriggerRunner(bus.publish, clock)
    await first.upsert(trigger(schedule=Once(fire_at=START + timedelta(hours=1))), cause="c")
    bus.refused_types["PROS_TRIGGER_FIRED"] = BusDown()
    await clock.advance(3600)
    with pytest.raises(BusDown):
        await first.fire_due()
    bus.refused_types.clear()
    await clock.advance(20)
    successor = TriggerRunner(bus.publish, clock)
    successor.restore(fold(bus.events))
    await successor.fire_due()

    assert bus.types() == ["PROS_TRIGGER_UPSERTED", "PROSPECTIVE_TRIGGER", "PROS_TRIGGER_FIRED"]


async def test_a_slot_that_another_runner_has_skipped_does_not_fire() -> None:
    """Fired or skipped, a slot has one id: the second runner's firing reaches nobody, and is told as an error."""
    bus, clock = Bus(), VirtualClock()
    wary = TriggerRunner(bus.publish, clock, lambda trigger: Signals(arousal=1.0))
    await wary.upsert(trigger(conditions=Conditions(require_arousal_max=0.5)), cause="c")
    calm = TriggerRunner(bus.publish, clock)
    calm.restore(fold(bus.events))
    await clock.advance(3600)
    await wary.fire_due()
    await calm.fire_due()

    assert bus.types() == ["PROS_TRIGGER_UPSERTED", "PROS_TRIGGER_SKIPPED", "PROS_TRIGGER_ERROR"]


async def test_a_snooze_needs_a_moment_with_a_zone() -> None:
    """A time without one is refused by name, and the trigger stays as it is."""
    bus, clock = Bus(), VirtualClock()
    runner = TriggerRunner(bus.publish, clock)
    await runner.upsert(trigger(), cause="c")

    with pytest.raises(InvalidRequest, match="until: has no zone"):
        await runner.snooze("tea", datetime(2026, 1, 2, tzinfo=UTC).replace(tzinfo=None))
    assert bus.types() == ["PROS_TRIGGER_UPSERTED"]
