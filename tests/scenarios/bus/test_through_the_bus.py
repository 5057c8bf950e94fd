"""What stands around publishing and handling, shown on a bus: flags, order, access, safety, metrics, spans."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_trace_id

from tests.scenarios.bus.support import GROUP, TOPIC, Recorder, World
from tidings.bus import ReceivedEvent
from tidings.core.events import Event
from tidings.log.interface import Appended, Refused
from tidings.middleware import (
    ContentSafetyMiddleware,
    Decision,
    FeatureFlags,
    HandleContext,
    MetricsMiddleware,
    Middleware,
    MiddlewareError,
    PolicyDenied,
    PolicyMiddleware,
    PublishContext,
    RBACMiddleware,
    SubscriberRule,
    TracingMiddleware,
)
from tidings.types import Ack, Capability, Nack, SecurityBand

HOOKS: Final = ("before_publish", "after_publish", "before_handle", "on_error", "after_handle", "cleanup")
TRACE: Final = "0af7651916cd43dd8448eb211c80319c"


async def subscribe(world: World, handler: Any, group: str = GROUP, topic: str = TOPIC, **options: Any) -> None:
    assert world.bus is not None
    await world.run(world.bus.subscribe(topic=topic, group=group, handler=handler, **options))


def value(metrics: MetricsMiddleware, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def overheard(member: Middleware, notes: list[str]) -> Middleware:
    """The same middleware, with a note taken whenever one of its hooks is called."""

    def listen(hook: str) -> None:
        own = getattr(member, hook)

        def heard(*arguments: Any) -> Any:
            notes.append(f"{hook} {member.name}")
            return own(*arguments)

        setattr(member, hook, heard)

    for hook in HOOKS:
        listen(hook)
    return member


class Named(Middleware):
    """A middleware of the user's own."""

    def __init__(self, name: str, priority: int = 100) -> None:
        self.name = name
        self.priority = priority


# Flags and order


@pytest.mark.req("F83")
@pytest.mark.parametrize("batch", [1, 3])
async def test_a_flag_switches_a_middleware_while_the_bus_runs(world: World, batch: int) -> None:
    """Off, a middleware hears of no publish and no attempt; on again it hears of both; its neighbour hears of all."""
    flags = FeatureFlags({"switched": False})
    switched: list[str] = []
    steady: list[str] = []
    bus = await world.open(overheard(Named("switched"), switched), overheard(Named("steady"), steady), flags=flags)
    handled = 0

    async def handler(given: Any) -> Ack:
        nonlocal handled
        handled += len(given) if batch > 1 else 1
        return Ack()

    await subscribe(world, handler, batch_count_max=batch)

    async def heard_of_an_event(n: int) -> tuple[set[str], set[str]]:
        switched.clear()
        steady.clear()
        await world.publish(1, first=2 * n)
        await world.run(bus.publish_many([world.event(2 * n + 1)]))
        await world.until(world.drained())
        return set(switched), set(steady)

    every = ("before_publish", "after_publish", "before_handle", "after_handle", "cleanup")
    all_of_it = {f"{hook} switched" for hook in every}, {f"{hook} steady" for hook in every}
    assert await heard_of_an_event(0) == (set(), all_of_it[1]), "off from the start"
    flags.enable("switched")
    assert await heard_of_an_event(1) == all_of_it
    flags.disable("switched")
    assert await heard_of_an_event(2) == (set(), all_of_it[1])
    flags.enable("switched")
    assert await heard_of_an_event(3) == all_of_it
    assert handled == 8


@pytest.mark.req("F83")
async def test_the_only_middleware_of_a_bus_can_be_switched_too(world: World) -> None:
    """With nothing else in the way an event goes straight to its handler; that must not outlast the switch."""
    flags = FeatureFlags({"rbac": False})
    bus = await world.open(RBACMiddleware(), flags=flags)
    got = Recorder()
    await subscribe(world, got)

    for n, is_on in enumerate([False, True, False, True]):
        flags.switch("rbac", is_on)
        await world.publish(1, first=n)
        await world.until(world.drained())

    assert got.offsets == [0, 2]
    assert [letter.offset for letter in await bus.dead_letters(TOPIC, reason="denied")] == [1, 3]


@pytest.mark.req("F76", "F81")
@pytest.mark.parametrize("seed", range(3))
async def test_the_layers_stand_in_their_order_around_publish_and_handle(world: World, seed: int) -> None:
    """Tracing, metrics, access, safety, policy, one's own by priority, however they were listed; and back in reverse."""
    notes: list[str] = []
    members = [
        TracingMiddleware(),
        MetricsMiddleware(),
        RBACMiddleware(),
        ContentSafetyMiddleware(),
        PolicyMiddleware(lambda _: None, on_publish=lambda _: None),
        Named("early", 60),
        Named("mine"),
        Named("late", 200),
    ]
    order = [member.name for member in members]
    random.Random(seed).shuffle(members)
    await world.open(*(overheard(member, notes) for member in members))

    async def handler(event: ReceivedEvent) -> Ack:
        notes.append("handler")
        if event.attempt == 1:
            raise RuntimeError("not yet")
        return Ack()

    await subscribe(world, handler, capabilities=[Capability.RECALL])
    await world.publish(1)
    await world.until(world.drained())

    def way(hook: str, names: list[str]) -> list[str]:
        return [f"{hook} {name}" for name in names]

    back = order[::-1]
    assert [note for note in notes if "publish" in note] == [*way("before_publish", order), *way("after_publish", back)]
    assert [note for note in notes if "publish" not in note] == [
        *[*way("before_handle", order), "handler", *way("on_error", back), *way("after_handle", back)],
        *[*way("cleanup", back), *way("before_handle", order), "handler"],
        *[*way("after_handle", back), *way("cleanup", back)],
    ]


@pytest.mark.req("F81")
async def test_what_one_middleware_replaces_the_next_one_gets(world: World) -> None:
    """Replacements add up, before the log as before the handler; what the log holds no handling changes."""

    class Adds(Named):
        def _plus(self, event: Event, where: str) -> Event:
            return Event(event.meta, {"n": event.payload["n"], where: event.payload.get(where, "") + self.name})

        def before_publish(self, ctx: PublishContext) -> Event:
            return self._plus(ctx.event, "stored")

        def before_handle(self, ctx: HandleContext) -> Decision:
            return Decision.replace(
                Event(ctx.event.meta, {**ctx.event.payload, **self._plus(ctx.event, "got").payload})
            )

    bus = await world.open(Adds("b", 2), Adds("a", 1))
    got = Recorder()
    await subscribe(world, got)
    await world.publish(1)
    await world.run(bus.publish_many([world.event(1)]))
    await world.until(world.drained())

    assert [event.payload for event in got.events] == [{"n": n, "stored": "ab", "got": "ab"} for n in range(2)]
    assert [event.payload async for event in bus.replay(TOPIC)] == [{"n": n, "stored": "ab"} for n in range(2)]


# What keeps an event from its handler, or from the log


@pytest.mark.req("F77", "F136")
@pytest.mark.parametrize("kind", ["skip", "deny", "quarantine"])
@pytest.mark.parametrize("batch", [1, 4])
async def test_a_decision_keeps_the_handler_from_running(world: World, kind: str, batch: int) -> None:
    """Skipped is done with; denied and quarantined are dead letters at once; the others are handled, the group moves on."""
    decide = getattr(Decision, kind)
    bus = await world.open(PolicyMiddleware(lambda ctx: decide("because") if ctx.offset == 1 else None))
    got: list[int] = []

    async def handler(given: Any) -> Ack:
        got.extend(event.offset for event in (given if batch > 1 else [given]))
        return Ack()

    await subscribe(world, handler, batch_count_max=batch)
    started = world.clock.monotonic()
    await world.publish(3)
    await world.until(world.drained())

    assert got == [0, 2]
    assert world.clock.monotonic() - started < 0.1, "there is nothing to try again"
    letters = [(letter.offset, letter.reason, letter.retries) for letter in await bus.dead_letters(TOPIC)]
    assert letters == {"skip": [], "deny": [(1, "denied", 0)], "quarantine": [(1, "quarantined", 0)]}[kind]


@pytest.mark.req("F12", "F78", "F97", "F101")
async def test_each_subscriber_gets_what_its_capabilities_allow(world: World) -> None:
    """Of several groups of a topic each gets what it may have; the rest are its own dead letters, and nobody waits."""
    rules = {
        "narrow": SubscriberRule(band_max=SecurityBand.GREEN, spaces=frozenset({"shared:*"})),
        "trusted": SubscriberRule(allow_black=True),
        "listed": SubscriberRule(capabilities=frozenset({Capability.RECALL})),
    }
    metrics = MetricsMiddleware()
    bus = await world.open(metrics, RBACMiddleware({"*": ["RECALL"], "ACTION_DECISION": ["SCHEDULE"]}, rules=rules))
    groups = {name: Recorder() for name in ("none", "recall", "both", "narrow", "trusted", "listed")}
    recall, both = [Capability.RECALL], [Capability.RECALL, Capability.SCHEDULE]
    held = {"recall": recall, "both": both, "narrow": recall, "trusted": recall}
    for name, recorder in groups.items():
        await subscribe(world, recorder, name, capabilities=held.get(name, []))

    metas: list[dict[str, Any]] = [{}, {"band": "RED"}, {"band": "BLACK"}, {"space_id": "personal:ann"}]
    for n, meta in enumerate(metas):
        await world.publish(1, first=n, **meta)
    decision = world.event(4)
    decision.meta.type = "ACTION_DECISION"  # type: ignore[assignment]
    await world.run(bus.publish(decision))
    for name in groups:
        await world.until(world.drained(group=name))

    expected = {
        "none": [],
        "recall": [0, 1, 3],
        "both": [0, 1, 3, 4],
        "narrow": [0],
        "trusted": [0, 1, 2, 3],
        "listed": [0, 1, 3],
    }
    assert {name: recorder.offsets for name, recorder in groups.items()} == expected
    for name, offsets in expected.items():
        denied = await bus.dead_letters(TOPIC, name, reason="denied")
        assert [letter.offset for letter in denied] == [n for n in range(5) if n not in offsets]
        assert value(metrics, "events_handle_ok_total", topic=TOPIC, group=name) == len(offsets)
        assert value(metrics, "events_handle_err_total", topic=TOPIC, group=name) == 0, "it was not the handler's fault"
    assert value(metrics, "events_dlq_total", topic=TOPIC) == len(await bus.dead_letters(TOPIC)) == 15


UNSAFE: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "picture": ({"frame": "data:image/png;base64,AAAA"}, {}),
    "sound": ({"clips": [{"wav": "UklGR" + "A" * 100}]}, {}),
    "password": ({"login": {"Password": "hunter2-hunter2"}}, {}),
    "key": ({"note": "-----BEGIN PRIVATE KEY----- hunter2"}, {}),
    "signal": ({"n": 1}, {"extra": {"safety": {"quarantine": True}}}),
    "pressure": ({"n": 1}, {"extra": {"safety": {"pressure": 0.9}}}),
}


@pytest.mark.req("F136")
@pytest.mark.parametrize(("payload", "meta"), UNSAFE.values(), ids=list(UNSAFE))
async def test_unsafe_content_waits_in_quarantine(world: World, payload: dict[str, Any], meta: dict[str, Any]) -> None:
    """What no payload should hold reaches no handler; once somebody has looked at it, it can be let through."""
    flags = FeatureFlags({"content_safety": False})
    bus = await world.open(ContentSafetyMiddleware(), flags=flags)
    got = Recorder()
    await world.run(bus.publish(world.event(payload=payload, **meta)))
    flags.enable("content_safety")
    await subscribe(world, got)
    await world.publish(1, first=7)
    await world.until(world.drained())

    assert [event.payload for event in got.events] == [{"n": 7}]
    (letter,) = await bus.dead_letters(TOPIC)
    assert (letter.offset, letter.reason, letter.retries) == (0, "quarantined", 0)
    assert "hunter2" not in letter.error

    flags.disable("content_safety")
    await bus.redrive(TOPIC)
    await world.until(lambda: len(got.events) == 2)
    assert got.events[1].payload == payload


@pytest.mark.parametrize(("payload", "meta"), UNSAFE.values(), ids=list(UNSAFE))
async def test_raw_media_and_secrets_are_refused_before_anything_is_stored(
    world: World, payload: dict[str, Any], meta: dict[str, Any]
) -> None:
    """Alone and in a list nothing of them reaches the disk; an event that only carries a signal is stored, and waits."""
    bus = await world.open(ContentSafetyMiddleware())
    await subscribe(world, Recorder())
    good, unsafe = world.event(1), world.event(payload=payload, **meta)
    if meta:
        await world.run(bus.publish(unsafe))
        await world.until(world.drained())
        assert [letter.reason for letter in await bus.dead_letters(TOPIC)] == ["quarantined"]
        return

    with pytest.raises(MiddlewareError) as caught:
        await world.run(bus.publish(unsafe))
    verdicts = await world.run(bus.publish_many([good, unsafe]))
    await world.until(world.drained())

    assert isinstance(caught.value.cause, PolicyDenied)
    assert "hunter2" not in str(caught.value)
    assert [type(verdict) for verdict in verdicts] == [Appended, Refused]
    assert [event.payload async for event in bus.replay(TOPIC)] == [good.payload]
    assert await bus.dead_letters(TOPIC) == []
    await world.close()
    traces = (b"base64", b"UklGR", b"hunter2")
    assert [path for path, data in world.disk.tree().items() if any(trace in data for trace in traces)] == []


@pytest.mark.req("F84")
@pytest.mark.parametrize("hook", ["before_handle", "after_handle", "cleanup"])
@pytest.mark.parametrize("times", [2, 9])
async def test_a_hook_that_raises_fails_the_attempt(world: World, hook: str, times: int) -> None:
    """Whichever hook it is, the event is not acknowledged: it is tried again, and set aside if that does not help."""
    member = Named("fragile")
    left = times

    def raises(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise LookupError("fragile broke")

    setattr(member, hook, raises)
    bus = await world.open(member)
    got = Recorder()
    await subscribe(world, got, max_retries=3)
    await world.publish(1)
    await world.until(world.drained())

    letters = await bus.dead_letters(TOPIC)
    if times == 2:
        assert got.attempts_of(0)[-1] == 3
        assert letters == []
    else:
        assert [(letter.offset, letter.retries) for letter in letters] == [(0, 3)]
        assert "fragile broke" in letters[0].error


async def test_a_publish_that_is_stored_does_not_fail_afterwards(world: World) -> None:
    """A middleware that raises once the log has the event must not make the publisher send it again."""

    class Fragile(Middleware):
        def after_publish(self, ctx: PublishContext, verdict: object) -> None:
            raise LookupError("fragile broke")

    bus = await world.open(Fragile())

    assert await world.publish(1) == [0]
    assert isinstance((await world.run(bus.publish_many([world.event(1)])))[0], Appended)


# Metrics


@pytest.mark.req("F94", "F95", "F97")
@pytest.mark.parametrize("batch", [1, 4])
async def test_what_is_published_handled_and_given_up_is_counted(world: World, batch: int) -> None:
    """One by one and by the list, by topic and group: each publish, each attempt by how it ended, and each dead letter."""
    metrics = MetricsMiddleware()
    bus = await world.open(metrics)

    def answer(event: ReceivedEvent) -> Ack | Nack:
        return Nack("never") if event.payload["n"] in (1, 5) else Ack()

    async def one(event: ReceivedEvent) -> Ack | Nack:
        return answer(event)

    async def many(events: list[ReceivedEvent]) -> list[Ack | Nack]:
        return [answer(event) for event in events]

    await subscribe(world, one if batch == 1 else many, batch_count_max=batch, max_retries=2)
    await subscribe(world, Recorder(), "other")
    await world.publish(3)
    again = world.event(3, event_id="e3")
    many_events = [
        again,
        world.event(4),
        world.event(5),
        world.event(6, space_id=""),
        world.event(7, topic="elsewhere"),
    ]
    await world.run(bus.publish_many(many_events))
    await world.run(bus.publish(again))
    await world.until(world.drained())
    await world.until(world.drained(group="other"))

    assert value(metrics, "events_publish_count", topic=TOPIC) == 6, "what was there already, or refused, is no publish"
    assert value(metrics, "events_publish_count", topic="elsewhere") == 1
    assert value(metrics, "events_publish_seconds_count", topic=TOPIC) == 7
    learner = {"topic": TOPIC, "group": GROUP}
    assert value(metrics, "events_handle_ok_total", **learner) == 4
    assert value(metrics, "events_handle_err_total", **learner) == 2 * 3
    assert value(metrics, "events_handle_seconds_count", **learner) == 10
    assert value(metrics, "events_handle_ok_total", topic=TOPIC, group="other") == 6
    assert value(metrics, "events_handle_err_total", topic=TOPIC, group="other") == 0
    assert value(metrics, "events_dlq_total", topic=TOPIC) == 2
    assert value(metrics, "events_dlq_total", topic="elsewhere") == 0


@pytest.mark.req("F80", "F96")
async def test_times_are_those_that_passed_on_the_bus(world: World) -> None:
    """Handlers that take 0.4 s fill a window of one: publishes wait as long, and percentiles and the callback tell both."""
    told: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    metrics = MetricsMiddleware(lambda name, labels, given: told.setdefault(name, []).append((labels, given)))
    await world.open(metrics)

    async def handler(_: ReceivedEvent) -> Ack:
        await world.clock.sleep(0.4)
        return Ack()

    await subscribe(world, handler, max_inflight=1)
    await world.until(lambda: world.group().is_live)
    await world.publish(11)
    await world.until(world.drained())

    learner = {"topic": TOPIC, "group": GROUP}
    assert value(metrics, "events_handle_seconds_sum", **learner) == pytest.approx(11 * 0.4)
    assert value(metrics, "events_publish_seconds_sum", topic=TOPIC) == pytest.approx(10 * 0.4)
    for q in (0.5, 0.95, 0.99):
        for group in (GROUP, None):
            percentile = metrics.quantile(TOPIC, group, q)
            assert percentile is not None
            assert 0.25 <= percentile <= 0.5, "the bucket that 0.4 s is in"
    assert told["events_publish_count"] == [({"topic": TOPIC}, 1)] * 11
    assert told["events_handle_ok_total"] == [(learner, 1)] * 11
    assert [given for _, given in told["events_handle_seconds"]] == pytest.approx([0.4] * 11)
    assert [given for _, given in told["events_publish_seconds"]] == pytest.approx([0.0] + [0.4] * 10)


# Spans


class Spans:
    """A tracing middleware and what it exported."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.middleware = TracingMiddleware(provider)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


def own(span: ReadableSpan) -> dict[str, Any]:
    """The attributes that are not those of the semantic conventions."""
    return {name: value for name, value in (span.attributes or {}).items() if "." not in name}


def trace_of(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return format_trace_id(context.trace_id)


@pytest.mark.req("F79", "F91", "F92")
async def test_publishes_and_attempts_have_spans(world: World) -> None:
    """``events.publish`` and ``events.handle`` say where, what size, which try and how long; failures show."""
    spans = Spans()
    bus = await world.open(spans.middleware)

    async def handler(event: ReceivedEvent) -> Ack | Nack:
        await world.clock.sleep(0.25)
        return Ack() if event.attempt == 2 else Nack("not yet")

    await subscribe(world, handler)
    await world.publish(1)
    with pytest.raises(Exception, match="payload"):
        await world.run(bus.publish(world.event(payload={"x": {1}})))
    await world.until(world.drained())

    stored, refused = spans.named("events.publish")
    assert own(stored) == {"topic": TOPIC, "space_id": "shared:home", "size_bytes": 7, "offset": 0}
    assert (stored.status.status_code, refused.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    attempts = spans.named("events.handle")
    place = {"topic": TOPIC, "group": GROUP, "offset": 0, "lat_ms": pytest.approx(250)}
    assert [own(span) for span in attempts] == [
        {**place, "retries": 0, "outcome": "retry"},
        {**place, "retries": 1, "outcome": "acked"},
    ]
    assert [span.status.status_code for span in attempts] == [StatusCode.ERROR, StatusCode.UNSET]


@pytest.mark.req("F79", "F93")
@pytest.mark.parametrize("given", [None, TRACE])
async def test_one_trace_runs_through_every_hop(world: World, given: str | None) -> None:
    """From a publish through two handlers and a restart between them, all spans and envelopes have one trace."""
    spans = Spans()
    bus = await world.open(spans.middleware)

    async def passes_on(event: ReceivedEvent) -> Ack:
        await bus.publish(world.event(topic="second"))
        await bus.publish_many([world.event(1, topic="second")])
        return Ack()

    await subscribe(world, passes_on)
    await world.publish(1, trace_id=given)
    await world.until(world.drained())
    await world.close()
    await world.open(spans.middleware)
    got = Recorder()
    await subscribe(world, got, topic="second")
    await world.until(world.drained("second"))

    first, *inner = spans.named("events.publish")
    outer, *last = spans.named("events.handle")
    assert (len(inner), len(last)) == (2, 2)
    (trace_id,) = {trace_of(span) for span in (first, *inner, outer, *last)}
    assert given in (None, trace_id)
    assert {event.meta.trace_id for event in got.events} == {trace_id}
    context = outer.get_span_context()
    assert context is not None
    assert {span.parent.span_id for span in inner if span.parent is not None} == {context.span_id}
