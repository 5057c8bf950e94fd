"""The gate recovers by itself: nothing that was once slow, dull or too much keeps others out for good."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.scenarios.bus.support import World
from tests.unit.cognition.support import Bus, make_event
from tidings.bus.events import Ack, Nack
from tidings.cognition.attention import CONFIGURED, AttentionGate, GateAction
from tidings.cognition.resilience import BreakerSettings, RateSettings
from tidings.core.events import Event, SecurityBand
from tidings.testing import VirtualClock

WELCOME = {"text": "please remember the important meeting today"}
DULL = {"text": "thanks ok hi", "context": {"recent_similar_requests": 9, "time_of_day": "late_night"}}


def welcome(name: str) -> Event:
    return make_event(WELCOME, event_id=name, actor=name, space_id=f"personal:{name}")


def red(name: str) -> Event:
    return make_event(WELCOME, event_id=name, actor=name, band=SecurityBand.RED)


def decided(gate: AttentionGate, event: Event) -> GateAction:
    """What the gate's four questions come to."""
    if gate.boost(event):
        return GateAction.BOOST
    return GateAction.ADMIT if gate.admit(event) else GateAction.DEFER if gate.defer(event) else GateAction.DROP


def test_a_few_slow_handlings_say_nothing() -> None:
    """Latency needs as many outcomes as errors do: nine slow ones move neither the limits nor the thresholds."""
    untouched, gate = AttentionGate(VirtualClock()), AttentionGate(VirtualClock())
    for _ in range(9):
        gate.record_outcome(is_ok=True, latency_ms=1200)

    assert gate.admit(welcome("a"))
    untouched.admit(welcome("a"))
    for name in ("b", "c"):
        assert decided(gate, make_event(DULL, event_id=name)) is decided(untouched, make_event(DULL, event_id=name))


@pytest.mark.parametrize(
    ("oks", "latency_ms", "reason"),
    [
        ([True] * 10, 1200.0, "latency_p95_critical"),
        ([True, True, True, False] * 5, 10.0, "error_rate_critical"),
    ],
)
async def test_what_is_critical_recovers_by_itself(oks: list[bool], latency_ms: float, reason: str) -> None:
    """Refused work yields no outcomes, so those there are must age: after a minute the gate lets in again."""
    clock = VirtualClock()
    gate = AttentionGate(clock)
    for is_ok in oks:
        gate.record_outcome(is_ok=is_ok, latency_ms=latency_ms)

    refused = await gate.handle(welcome("a"))
    assert (refused.gate_decision.action, refused.gate_decision.reasons) == (GateAction.DROP, (reason,))
    await clock.advance(59.9)
    assert gate.drop(welcome("b"))
    await clock.advance(0.1)
    assert gate.admit(welcome("c"))


async def test_an_event_that_never_becomes_salient_is_dropped_in_the_end() -> None:
    """RED cannot pass by score: after five hearings it is dropped with a reason of its own, told and audited as usual."""
    bus, clock = Bus(), VirtualClock()
    gate = AttentionGate(clock, publish=bus.publish)
    event = red("r")
    answers = [await gate.handle(event)]
    for _ in range(6):
        await clock.advance(60)
        answers += [await gate.handle(due) for due in gate.take_due()]

    assert [each.gate_decision.action for each in answers] == [*([GateAction.DEFER] * 4), GateAction.DROP]
    assert answers[-1].gate_decision.reasons[-1] == "hearings_exhausted"
    (dropped,) = bus.on("bus.attention_gate.dropped")
    assert dropped.payload["drop_reason"] == "attention_filter"
    assert len(bus.on("bus.attention_gate.deferred")) == 4
    assert len(bus.on("bus.gate.decisions.audit")) == 5
    assert gate.drop(event)
    assert gate.deferred_count == 0


async def test_what_is_dull_holds_up_nobody() -> None:
    """A hundred and fifty RED events wait; GREEN ones pass all the while."""
    clock = VirtualClock()
    gate = AttentionGate(clock)
    assert {decided(gate, red(f"r{number}")) for number in range(150)} == {GateAction.DEFER}
    seen = set()
    for minute in range(10):
        seen.add(decided(gate, welcome(f"g{minute}")))
        await clock.advance(60)
        for event in gate.take_due():
            gate.defer(event)

    assert seen == {GateAction.BOOST}
    assert gate.deferred_count == 0


def test_one_actors_haste_holds_up_nobody_else() -> None:
    """A hundred and fifty of its events wait for its rate; others pass."""
    gate = AttentionGate(VirtualClock())
    for number in range(170):
        gate.admit(make_event(WELCOME, event_id=f"h{number}", actor="hasty"))

    assert gate.deferred_count == 150
    assert gate.boost(welcome("calm"))


async def test_a_long_queue_empties() -> None:
    """
    Events that a broken back end put off come due one by one and are let in: those that still wait are not held against
    them. While they wait, new ones are put off; a hearing that only found the gate busy is no mark against an event.
    """
    clock = VirtualClock()
    gate = AttentionGate(clock, msgspec.structs.replace(CONFIGURED, breaker=BreakerSettings(open_s=600.0)))
    for _ in range(5):
        gate.record_outcome(is_ok=False, latency_ms=1.0)
    for number in range(120):
        assert gate.defer(welcome(f"e{number}"))
        await clock.advance(0.25)
    assert (await gate.handle(welcome("new"))).gate_decision.reasons == ("queue_depth_high",)
    admitted = set()
    for _ in range(80):
        await clock.advance(9)
        for event in gate.take_due():
            if gate.admit(event):
                admitted.add(event.meta.event_id)
                gate.record_outcome(is_ok=True, latency_ms=1.0)

    assert len(admitted) == 121
    assert gate.deferred_count == 0
    assert gate.boost(welcome("newer"))


async def test_an_event_that_only_the_load_keeps_out_is_not_called_dull() -> None:
    """Slow handlings raise what admission takes: an event above the usual threshold waits for as long as that lasts."""
    clock = VirtualClock()
    gate = AttentionGate(clock)
    event = make_event({"text": "a walk by the sea"})
    for _ in range(8):
        for _ in range(10):
            gate.record_outcome(is_ok=True, latency_ms=400.0)
        response = await gate.handle(event)
        assert response.gate_decision.action is GateAction.DEFER
        assert "admit_threshold_raised" in response.gate_decision.reasons
        await clock.advance(60)

    assert gate.admit(event)


async def test_a_deferral_holds_until_its_time_and_asking_then_is_a_new_hearing() -> None:
    """Heard once when asked again, it does not come out of the queue as well."""
    clock, bus = VirtualClock(), Bus()
    gate = AttentionGate(clock, publish=bus.publish)
    event = make_event(DULL)
    first = await gate.handle(event)
    wait_s = first.gate_decision.ttl_ms / 1000
    await clock.advance(wait_s - 1)
    assert await gate.handle(event) is first
    await clock.advance(1)
    second = await gate.handle(event)

    assert second is not first
    assert (gate.deferred_count, gate.take_due()) == (1, [])
    assert len(bus.on("bus.attention_gate.deferred")) == 2
    await clock.advance(60)
    assert gate.take_due() == [event]


def test_a_full_queue_is_counted_as_the_refusal_it_is() -> None:
    """The metric says what the answer says, and the answer is a refusal throughout."""
    counted: list[str] = []

    def count(name: str, value: float, labels: object) -> None:
        if name == "gate_decisions_total":
            assert isinstance(labels, dict)
            counted.append(labels["action"])

    gate = AttentionGate(VirtualClock(), msgspec.structs.replace(CONFIGURED, deferred_count_max=1), metrics=count)

    assert [decided(gate, red(name)) for name in "ab"] == [GateAction.DEFER, GateAction.DROP]
    assert counted == ["DEFER", "DROP"]


@pytest.mark.req("F110")
@pytest.mark.parametrize("keeps_deferred", [True, False])
async def test_a_durable_group_keeps_what_the_gate_defers(keeps_deferred: bool) -> None:
    """
    The documented way, on a bus: ``Nack`` with the deferral's time.

    An event that came in haste is let in at its second hearing, one that stays dull is dropped by the gate before the group
    runs out of attempts; nothing is a dead letter, and nothing is left in the gate's queue.
    """
    world = World()
    bus = await world.open()
    profile = msgspec.structs.replace(CONFIGURED, rate=RateSettings(per_second=0.025, burst=1))
    gate = AttentionGate(world.clock, profile, publish=bus.publish, keeps_deferred=keeps_deferred)
    heard: dict[str, list[GateAction]] = {}
    settled = asyncio.Semaphore(0)

    async def attend(event: Event) -> Ack | Nack:
        decision = (await gate.handle(event)).gate_decision
        heard.setdefault(event.meta.event_id, []).append(decision.action)
        if decision.action is GateAction.DEFER:
            return Nack("deferred by the gate", delay_s=decision.ttl_ms / 1000)
        settled.release()
        return Ack()

    async def scenario() -> int:
        await bus.subscribe(topic="bus.write.ingest", group="attention", handler=attend)
        for event in (make_event(WELCOME, event_id="one"), make_event(WELCOME, event_id="two"), red("red")):
            await bus.publish(event)
        for _ in range(3):
            await settled.acquire()
        return len(await bus.dead_letters("bus.write.ingest"))

    assert await world.run(scenario()) == 0
    await world.close()
    assert heard["red"] == [*([GateAction.DEFER] * 4), GateAction.DROP]
    assert sorted([heard["one"], heard["two"]], key=len) == [[GateAction.BOOST], [GateAction.DEFER, GateAction.BOOST]]
    assert gate.deferred_count == 0
