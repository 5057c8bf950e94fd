"""The attention gate admits, defers, boosts and drops; explains itself; and forgets nothing it owes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.beyond import Beyond, crossed
from tests.unit.cognition.support import Bus, BusDown, make_event
from tidings.cognition.attention import CONFIGURED, README, AttentionGate, GateAction, GateRequest
from tidings.cognition.attention.requests import GateActor, RequestQos, request_of
from tidings.cognition.resilience import RateSettings
from tidings.core.errors import InvalidName
from tidings.core.events import Event, SecurityBand
from tidings.log.interface import Verdict
from tidings.testing import VirtualClock

WORTHY = {"text": "Remember the important project meeting today, deadline this morning"}
DULL = {"text": "thanks ok hi", "context": {"recent_similar_requests": 9, "time_of_day": "late_night"}}
HOPELESS = {
    "text": "hello hi thanks ok test share send email post publish external work stress money politics",
    "context": {"recent_similar_requests": 9, "time_of_day": "late_night", "child_present": True},
    "attachments": [1, 2, 3, 4],
    "affect": {"valence": -1.0, "arousal": 0.0},
    "qos": {"device_thermal": "Critical"},
}


def gate(bus: Bus | None = None, **more: object) -> AttentionGate:
    return AttentionGate(VirtualClock(), publish=bus.publish if bus else None, **more)  # type: ignore[arg-type]


def ask(text: str = "a walk by the sea", **more: object) -> GateRequest:
    fields = {"request_id": "r", "actor": GateActor(person_id="p"), "space_id": "personal:p", "band": "GREEN"}
    return msgspec.convert({**fields, "text": text, **more}, GateRequest, from_attributes=True)


@pytest.mark.req("F109")
def test_admit_lets_a_worthy_event_in_and_a_hopeless_one_not() -> None:
    """Admission follows salience."""
    thalamus = gate()

    assert thalamus.admit(make_event(WORTHY, event_id="worthy"))
    assert not thalamus.admit(make_event(HOPELESS, event_id="hopeless"))


@pytest.mark.req("F110")
async def test_defer_queues_an_event_until_its_time() -> None:
    """A middling event waits in the gate's queue and comes back when it is due, to be judged anew."""
    clock = VirtualClock()
    thalamus = AttentionGate(clock)
    event = make_event(DULL)

    assert thalamus.defer(event)
    assert (thalamus.admit(event), thalamus.drop(event), thalamus.boost(event)) == (False, False, False)
    assert thalamus.deferred_count == 1
    due_s = thalamus.next_due_s()
    assert due_s is not None
    assert 30 <= due_s <= 45
    await clock.advance(due_s - 0.001)
    assert thalamus.take_due() == []
    await clock.advance(0.001)
    assert thalamus.take_due() == [event]
    assert thalamus.deferred_count == 0
    assert thalamus.defer(event)


@pytest.mark.req("F111")
def test_boost_raises_an_events_priority() -> None:
    """An urgent, valuable event goes first; it is admitted too."""
    event = make_event(WORTHY, priority=5)
    thalamus = gate()

    assert thalamus.boost(event)
    assert thalamus.boost(event)
    assert thalamus.admit(event)
    assert event.meta.priority == 7


@pytest.mark.req("F112")
def test_drop_refuses_the_irrelevant() -> None:
    """An event below the drop threshold is refused and queued nowhere."""
    thalamus = gate()

    assert thalamus.drop(make_event(HOPELESS))
    assert thalamus.deferred_count == 0


@given(st.dictionaries(st.sampled_from(["text", "content", "affect", "context", "qos"]), st.text(max_size=50)))
def test_exactly_one_answer_holds(payload: dict[str, str]) -> None:
    """Whatever the payload: dropped, deferred or admitted, and boosted only if admitted."""
    thalamus, event = gate(), make_event(payload)

    assert [thalamus.drop(event), thalamus.defer(event), thalamus.admit(event)].count(True) == 1
    assert thalamus.admit(event) or not thalamus.boost(event)


def test_the_trace_explains_the_decision() -> None:
    """Features, weights, score, thresholds, path and reasons are all there, and agree with the action."""
    response = gate().decide(ask())
    trace = response.trace

    assert trace.decision_path == ("policy", "capacity", "intents", "salience", "action", "routing")
    against = {"risk", "cost", "social_risk"}
    score = sum((-1 if name in against else 1) * trace.weights[name] * trace.features[name] for name in trace.features)
    assert trace.raw_score == pytest.approx(score)
    assert trace.load_shift == pytest.approx(0.1 * (0.3 - trace.load))
    assert trace.thresholds["admit"] <= trace.calibrated_priority < trace.thresholds["boost"]
    assert response.gate_decision.action is GateAction.ADMIT
    assert "above_admit_threshold" in response.gate_decision.reasons
    assert response.routing.topic == "bus.hippocampus.encode"
    assert response.routing.processing_ms_max == 30_000


def test_the_same_requests_get_the_same_answers() -> None:
    """Two gates that hear the same at the same times agree in everything."""
    requests = [ask("urgent meeting"), ask("ok"), ask("ok", band="RED"), ask("x" * 300), ask("ok", band="BLACK")]
    one, other = gate(), gate()

    assert [one.decide(each) for each in requests] == [other.decide(each) for each in requests]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (ask(band="BLACK"), "band_black"),
        (ask(band="MAUVE"), "band_unknown"),
        (ask(band=""), "missing:policy.band"),
        (ask(space_id=""), "missing:space_id"),
        (ask(request_id=""), "missing:request_id"),
        (ask(actor=GateActor(person_id="")), "missing:actor.person_id"),
        (ask("x" * 50_001), "text_too_long"),
        (ask("my password is x", band="RED"), "secret_in_restricted_band"),
    ],
)
def test_policy_fails_closed(asked: GateRequest, reason: str) -> None:
    """What is incomplete, unknown or forbidden is dropped at the first stage, with the reason."""
    response = gate().decide(asked)

    assert response.gate_decision.action is GateAction.DROP
    assert reason in response.gate_decision.reasons
    assert response.trace.decision_path == ("policy",)


def test_the_fast_path_skips_scoring_but_not_policy() -> None:
    """A fast request is admitted unscored; a BLACK one is still dropped."""
    fast = RequestQos(routing="fast-path")

    assert gate().decide(ask("ok", qos=fast)).gate_decision.reasons == ("fast_path",)
    assert gate().decide(ask("ok", qos=fast, band="BLACK")).gate_decision.action is GateAction.DROP


@pytest.mark.parametrize(
    ("asked", "obligation", "ms"),
    [
        (ask(band="RED"), "AUDIT_ACCESS", 5_000),
        (ask(band="AMBER"), "LOG_ACCESS", 15_000),
        (ask("write to a.b@example.org"), "REDACT_PII", 30_000),
        (ask("call (555) 123-4567"), "REDACT_PII", 30_000),
        (ask("123-45-6789"), "REDACT_PII", 30_000),
        (ask(actor=GateActor(person_id="p", role="guest")), "AUDIT_ACCESS", 30_000),
        (ask(actor=GateActor(person_id="p", role="child")), "AUDIT_ACCESS", 30_000),
        (ask(space_id="shared:household"), "AUDIT_ACCESS", 30_000),
    ],
)
def test_bands_people_and_spaces_bring_obligations(asked: GateRequest, obligation: str, ms: int) -> None:
    """Each adds what has to be done with the request, and the band limits the processing."""
    response = gate().decide(asked)

    assert obligation in response.gate_decision.obligations
    assert response.routing.processing_ms_max == ms


def test_an_event_without_band_or_actor_is_treated_with_care() -> None:
    """As AMBER and a guest's; a gate told to have no default refuses it."""
    event = make_event({"text": "x"}, band=None, actor=None)

    asked = request_of(event)
    assert (asked.band, asked.actor.role, asked.actor.device_trust) == ("AMBER", "guest", "low")
    assert gate(band_default=None).drop(event)


async def test_one_actors_haste_is_deferred() -> None:
    """Beyond its burst an actor waits a minute at priority 0.3; another one does not."""
    thalamus = gate(profile=msgspec.structs.replace(CONFIGURED, rate=RateSettings(per_second=2, burst=5)))
    answers = [thalamus.decide(ask()).gate_decision for _ in range(6)]

    assert [each.action for each in answers[:5]] == [GateAction.ADMIT] * 5
    assert (answers[5].action, answers[5].ttl_ms, answers[5].priority) == (GateAction.DEFER, 60_000, 0.3)
    assert answers[5].reasons == ("rate_limited",)
    assert thalamus.decide(ask(actor=GateActor(person_id="q"))).gate_decision.action is GateAction.ADMIT


def test_failures_behind_the_gate_open_the_breaker() -> None:
    """After five failures in a row requests are deferred."""
    thalamus = gate()
    for _ in range(5):
        thalamus.record_outcome(is_ok=False, latency_ms=1.0)

    assert thalamus.decide(ask()).gate_decision.reasons == ("breaker_open",)


def test_a_long_queue_behind_the_gate_defers_and_then_drops() -> None:
    """The work that waits is asked for with each request."""
    depth = 100
    thalamus = gate(queue_depth=lambda: depth)

    assert thalamus.decide(ask()).gate_decision.action is GateAction.DEFER
    depth = 200
    assert thalamus.decide(ask()).gate_decision.action is GateAction.DROP


async def test_a_full_deferred_queue_drops_and_says_so() -> None:
    """The queue is bounded; what finds no room is refused, not lost in silence."""
    bus = Bus()
    thalamus = gate(bus, profile=msgspec.structs.replace(CONFIGURED, deferred_count_max=2))
    events = [make_event(DULL, event_id=f"e{number}") for number in range(3)]

    answers = [(await thalamus.handle(event)).gate_decision for event in events]

    assert [each.action for each in answers] == [GateAction.DEFER, GateAction.DEFER, GateAction.DROP]
    assert "deferred_queue_full" in answers[2].reasons
    assert bus.on("bus.attention_gate.dropped")[0].payload["drop_reason"] == "resource_protection"


COMMON = {
    *("timestamp", "relay_circuit", "relay_decision", "content_id", "cognitive_load", "salience_score"),
    "hysteresis_state",
}


@pytest.mark.parametrize(
    ("event", "topic", "kind", "more"),
    [
        (
            make_event({"text": "a walk by the sea"}),
            "bus.attention_gate.admitted",
            "cognitive.attention.gate.admit",
            {"processing_priority", "admission_reason"},
        ),
        (
            make_event(WORTHY),
            "bus.attention_gate.admitted",
            "cognitive.attention.gate.boost",
            {"boost_factor", "boost_reason", "boosted_priority", "original_priority"},
        ),
        (
            make_event(DULL),
            "bus.attention_gate.deferred",
            "cognitive.attention.gate.defer",
            {"defer_duration_ms", "defer_reason", "retry_conditions", "queue_position"},
        ),
        (
            make_event(HOPELESS),
            "bus.attention_gate.dropped",
            "cognitive.attention.gate.drop",
            {"drop_reason"},
        ),
    ],
    ids=["admit", "boost", "defer", "drop"],
)
async def test_every_decision_is_told_and_audited(event: Event, topic: str, kind: str, more: set[str]) -> None:
    """One relay event of its shape and one audit event with the trace, neither with a word of the text."""
    bus = Bus()

    await gate(bus).handle(event)

    relay, audit = bus.events
    assert (relay.meta.topic, relay.meta.type) == (topic, kind)
    assert relay.payload.keys() == COMMON | more
    assert (audit.meta.topic, audit.meta.type) == ("bus.gate.decisions.audit", kind)
    assert audit.payload["trace"]["decision_path"]
    told = msgspec.json.encode([relay.payload, audit.payload]).decode()
    assert str(event.payload["text"]) not in told


async def test_a_malformed_request_is_told_as_an_error() -> None:
    """Beside the refusal there is an error event that names what is missing."""
    bus = Bus()

    await gate(bus).handle(make_event({"text": "x"}, band="MAUVE"))

    assert bus.on("bus.attention_gate.error")[0].payload["problem"] == "band_unknown"


async def test_a_decision_that_could_not_be_told_is_told_later() -> None:
    """A bus that refuses leaves the decision waiting, in order and under the same id."""
    bus = Bus()
    bus.failures = [BusDown()]
    thalamus = gate(bus)

    with pytest.raises(BusDown):
        await thalamus.handle(make_event(WORTHY))
    assert await thalamus.flush() == 2
    assert await thalamus.flush() == 0
    assert len(bus.events) == 2


async def test_a_later_process_hears_the_event_anew() -> None:
    """The bus delivers an event again after a crash: the new gate's decision stands beside the old one."""
    bus, event = Bus(), make_event(DULL)
    for seconds in (0, 60):
        clock = VirtualClock()
        await clock.advance(seconds)
        await AttentionGate(clock, publish=bus.publish).handle(event)

    assert len(bus.on("bus.attention_gate.deferred")) == 2


async def test_a_deferred_event_is_told_at_each_hearing() -> None:
    """Its second decision is an event of its own."""
    bus, clock = Bus(), VirtualClock()
    thalamus = AttentionGate(clock, publish=bus.publish)
    await thalamus.handle(make_event(DULL))
    await clock.advance(60)
    for event in thalamus.take_due():
        await thalamus.handle(event)

    assert len(bus.on("bus.attention_gate.deferred")) == 2


async def test_a_decision_that_can_never_be_stored_does_not_hold_up_the_others() -> None:
    """An event of a space that the log cannot name: its decisions are lost, counted and raised; the next one is told."""
    bus = Bus()
    thalamus = gate(bus)
    for event in (make_event(WORTHY, space_id="bad\nspace", event_id="bad"), make_event(WORTHY, event_id="good")):
        thalamus.admit(event)
    for _ in range(2):
        with pytest.raises(InvalidName):
            await thalamus.flush()

    assert await thalamus.flush() == 2
    assert thalamus.unpublished_lost_count == 2
    assert [event.meta.space_id for event in bus.events] == ["personal:alice"] * 2


@pytest.mark.parametrize("handle_count", [1, 100])
@pytest.mark.parametrize("is_list", [False, True])
async def test_concurrent_handles_publish_each_decision_once(handle_count: int, is_list: bool) -> None:
    """100 calls at once make 200 decision events: 200 publishes, or 2 lists; in the order of the calls."""
    bus = Bus()
    published: list[str] = []

    async def publish(event: Event) -> None:
        published.append(event.meta.event_id)
        await asyncio.sleep(0)
        await bus.publish(event)

    async def publish_many(events: Sequence[Event]) -> list[Verdict]:
        published.extend(event.meta.event_id for event in events)
        await asyncio.sleep(0)
        return await bus.publish_many(events)

    thalamus = gate(None, publish_many=publish_many) if is_list else AttentionGate(VirtualClock(), publish=publish)
    events = [make_event(WORTHY, event_id=f"e{number}", actor=f"p{number}") for number in range(handle_count)]
    await asyncio.gather(*map(thalamus.handle, events))

    assert len(published) == len(set(published)) == 2 * handle_count
    assert bus.calls <= (2 if is_list else 2 * handle_count)
    admitted = [event.payload["content_id"] for event in bus.on("bus.attention_gate.admitted")]
    assert admitted == [event.meta.event_id for event in events]
    assert await thalamus.flush() == 0


@pytest.mark.parametrize("is_list", [False, True])
async def test_concurrent_handles_all_raise_when_publishing_fails(is_list: bool) -> None:
    """One failed attempt fails all calls that wait; nothing is lost and the next flush publishes everything in order."""
    bus = Bus()
    bus.failures = [BusDown("no")]

    async def publish(event: Event) -> None:
        await asyncio.sleep(0)
        await bus.publish(event)

    async def publish_many(events: Sequence[Event]) -> list[Verdict]:
        await asyncio.sleep(0)
        return await bus.publish_many(events)

    thalamus = gate(None, publish_many=publish_many) if is_list else AttentionGate(VirtualClock(), publish=publish)
    events = [make_event(WORTHY, event_id=f"e{number}") for number in range(10)]
    errors = await asyncio.gather(*map(thalamus.handle, events), return_exceptions=True)

    assert [type(error) for error in errors] == [BusDown] * 10
    assert bus.calls == 1
    assert await thalamus.flush() == 20
    assert [event.payload["content_id"] for event in bus.on("bus.attention_gate.admitted")] == [
        event.meta.event_id for event in events
    ]


@pytest.mark.parametrize("is_list", [False, True])
async def test_a_cancelled_handle_leaves_publishing_to_the_next(is_list: bool) -> None:
    """The call that publishes is cancelled in the middle: the next one in line publishes for both."""
    bus, blocked = Bus(), asyncio.Event()
    is_first = True

    async def publish(event: Event) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            blocked.set()
            await asyncio.Event().wait()
        await bus.publish(event)

    async def publish_many(events: Sequence[Event]) -> list[Verdict]:
        nonlocal is_first
        if is_first:
            is_first = False
            blocked.set()
            await asyncio.Event().wait()
        return await bus.publish_many(events)

    thalamus = gate(None, publish_many=publish_many) if is_list else AttentionGate(VirtualClock(), publish=publish)
    first = asyncio.create_task(thalamus.handle(make_event(WORTHY, event_id="one")))
    await blocked.wait()
    second = asyncio.create_task(thalamus.handle(make_event(WORTHY, event_id="two")))
    await asyncio.sleep(0)
    first.cancel()
    await second

    assert [event.payload["content_id"] for event in bus.on("bus.attention_gate.admitted")] == ["one", "two"]


@pytest.mark.parametrize("is_list", [False, True])
async def test_only_the_owner_of_a_decision_that_cannot_be_stored_gets_its_error(is_list: bool) -> None:
    """The other calls return normally, with their decisions stored."""
    bus = Bus()
    thalamus = gate(None, publish_many=bus.publish_many) if is_list else gate(bus)
    events = [make_event(WORTHY, event_id=f"e{number}") for number in range(4)]
    events[2] = make_event(WORTHY, event_id="bad", space_id="bad\nspace")
    answers = await asyncio.gather(*map(thalamus.handle, events), return_exceptions=True)

    assert [isinstance(answer, InvalidName) for answer in answers] == [False, False, True, False]
    assert thalamus.unpublished_lost_count == 2
    assert len(bus.events) == 6


async def test_rate_limited_events_come_back_spread_over_time() -> None:
    """A burst of one actor comes back at the actor's rate and is admitted at its second hearing, all of it."""
    clock, event_count = VirtualClock(), 150
    thalamus = AttentionGate(clock)
    profile = thalamus.profile
    burst = profile.rate.burst
    for number in range(burst + event_count):
        thalamus.admit(make_event(WORTHY, event_id=f"e{number}"))
    assert thalamus.deferred_count == event_count
    admitted = 0
    while (due_s := thalamus.next_due_s()) is not None:
        await clock.advance(due_s - clock.monotonic())
        admitted += sum(map(thalamus.admit, thalamus.take_due()))

    assert admitted == event_count
    assert clock.monotonic() <= 60 + event_count / profile.rate.per_second


@pytest.mark.bound("cognition.attention.unpublished._COUNT_MAX")
@crossed
def test_unpublished_decisions_are_bounded_and_counted(beyond: Beyond) -> None:
    """Without a flush, a thousand decisions wait; the oldest beyond that are lost, and the gate counts them."""
    thalamus = gate()
    event_count = (beyond(1000) + 1) // 2
    for number in range(event_count):
        thalamus.drop(make_event({"text": "x"}, event_id=f"e{number}", band=SecurityBand.BLACK))

    assert thalamus.unpublished_lost_count == 2 * event_count - 1000


@pytest.mark.bound("cognition.attention.actions.RATE_DEFER_MS_MAX")
@crossed
async def test_rate_limited_events_wait_an_hour_at_most(beyond: Beyond) -> None:
    """At one event in 100 s, 36 fit into an hour: the turns of further ones start over after a minute."""
    profile = msgspec.structs.replace(CONFIGURED, rate=RateSettings(per_second=0.01, burst=1))
    thalamus = AttentionGate(VirtualClock(), profile, keeps_deferred=False)
    await thalamus.handle(make_event(WORTHY, event_id="first"))
    waits_ms = [
        (await thalamus.handle(make_event(WORTHY, event_id=f"e{number}"))).gate_decision.ttl_ms
        for number in range(beyond(36))
    ]

    assert waits_ms[:36] == [60_000 + 100_000 * number for number in range(36)]
    assert waits_ms[36] == 60_000
    assert max(waits_ms) <= 3_600_000


def test_metrics_have_their_names_and_labels() -> None:
    """Decisions by action and intent, latency, priority, queue depth, intents, breaker."""
    seen: dict[str, dict[str, str]] = {}
    thalamus = gate(metrics=lambda name, value, labels: seen.__setitem__(name, dict(labels)))

    thalamus.admit(make_event(WORTHY))
    thalamus.record_outcome(is_ok=True, latency_ms=1.0)

    assert seen.keys() == {
        *("gate_decisions_total", "gate_latency_seconds", "gate_priority_score", "gate_queue_depth", "breaker_state"),
        "intents_derived_total",
    }
    assert seen["gate_decisions_total"].keys() == {"action", "intent"}


def test_the_readme_profile_decides_by_its_own_thresholds() -> None:
    """A request that the configured profile admits is deferred by the other, and each trace shows why."""
    asked = ask("please share and send the photos")
    configured, readme = (gate(profile=profile).decide(asked) for profile in (CONFIGURED, README))

    assert configured.gate_decision.action is GateAction.ADMIT
    assert readme.gate_decision.action is GateAction.DEFER
    assert readme.trace.thresholds["admit"] < configured.trace.thresholds["admit"]


def test_hysteresis_is_reported() -> None:
    """A repeated decision grows stable, and the trace says what came before."""
    thalamus = gate()
    first, second = thalamus.decide(ask()), thalamus.decide(ask())

    assert (first.trace.previous_decision, first.trace.stability_count) == (None, 1)
    assert (second.trace.previous_decision, second.trace.stability_count) == ("ADMIT", 2)
