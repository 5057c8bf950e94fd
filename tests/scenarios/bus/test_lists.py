"""Lists of events: stored in order, whatever stands around publishing, and whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.scenarios.bus.support import GROUP, TOPIC, Recorder, World, soon
from tidings.bus import EventBus, Publisher, PublisherSettings, ReceivedEvent
from tidings.bus.errors import BusClosed, PublishTimeout
from tidings.bus.settings import BusSettings
from tidings.core.events import Event, EventMeta
from tidings.log.interface import Appended, Duplicate, Refused, Verdict
from tidings.log.settings import LogSettings
from tidings.middleware import MetricsMiddleware, Middleware, PublishContext, TracingMiddleware
from tidings.types import Ack


async def hold(_: ReceivedEvent) -> Ack:
    await asyncio.get_running_loop().create_future()
    return Ack()


class Lazy(Middleware):
    """Takes longer for the events that come first, refuses one, and keeps what it is told."""

    name = "lazy"

    def __init__(self, world: World) -> None:
        self._world = world
        self.asked: list[int] = []
        self.told: list[tuple[int, type]] = []

    async def before_publish(self, ctx: PublishContext) -> None:
        n = ctx.event.payload["n"]
        self.asked.append(n)
        await self._world.clock.sleep(1 / (n + 1))
        if n == 3:
            raise ValueError("not three")

    def after_publish(self, ctx: PublishContext, verdict: Verdict | Exception) -> None:
        self.told.append((ctx.event.payload["n"], type(verdict)))


async def test_order_is_kept_with_hooks_that_take_their_time(world: World) -> None:
    """Each event is asked for in turn and told of in turn; one that is refused is left out, and the rest is in order."""
    lazy = Lazy(world)
    bus = await world.open(lazy)
    got = Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got))

    verdicts = await world.run(bus.publish_many([world.event(n) for n in range(8)]))
    await world.until(world.drained())

    assert [type(verdict) for verdict in verdicts] == [Appended] * 3 + [Refused] + [Appended] * 4
    assert [event.payload["n"] for event in got.events] == [0, 1, 2, 4, 5, 6, 7]
    assert lazy.asked == list(range(8))
    assert sorted(n for n, _ in lazy.told) == list(range(8))
    assert [n for n, kind in lazy.told if kind is Appended] == [0, 1, 2, 4, 5, 6, 7]


async def test_spans_of_a_list_stand_side_by_side(world: World) -> None:
    """Each event of a list has a span and a trace of its own, as if it were published alone."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    metrics = MetricsMiddleware()
    bus = await world.open(TracingMiddleware(provider), metrics)

    await world.run(bus.publish_many([world.event(n) for n in range(5)]))

    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["events.publish"] * 5
    assert [span.attributes["offset"] for span in spans if span.attributes] == list(range(5))
    assert len({span.context.trace_id for span in spans if span.context}) == 5
    assert metrics.registry.get_sample_value("events_publish_count", {"topic": TOPIC}) == 5


async def test_a_timeout_in_a_list_with_hooks_stores_nothing_behind_it(world: World) -> None:
    """What comes after the event whose window is full is not stored, though its own topic has room; all of them are told."""
    lazy = Lazy(world)
    bus = await world.open(lazy)
    await world.run(bus.subscribe(TOPIC, GROUP, hold, max_inflight=1))
    await world.until(lambda: world.group().is_live)
    await world.publish(1)
    lazy.told.clear()

    events = [world.event(4, topic="other"), world.event(5), world.event(6, topic="other")]
    with pytest.raises(PublishTimeout):
        await world.run(bus.publish_many(events, timeout_s=1.0))

    assert bus.log.topics()["other"].next_offset == 1
    assert sorted(lazy.told) == [(4, Appended), (5, PublishTimeout), (6, PublishTimeout)]


async def test_order_is_kept_across_a_full_disk(world: World) -> None:
    """What did not fit at first is stored before what did: offsets are in the order of the list."""
    bus = await world.open(log_settings=LogSettings(journal_bytes=1 << 20, journal_count_max=2))
    await world.publish(1)
    world.disk.capacity_bytes = world.disk.used_bytes
    sizes = [900_000, 900_000, 10, 10, 10, 10]
    events = [world.event(n, payload={"n": n, "pad": "x" * size}) for n, size in enumerate(sizes)]

    publishing = asyncio.create_task(bus.publish_many(events))
    await world.clock.advance(2)
    world.disk.capacity_bytes = None
    verdicts = await world.run(asyncio.wait_for(publishing, None))

    assert [verdict.offset for verdict in verdicts if isinstance(verdict, Appended | Duplicate)] == list(range(1, 7))


async def test_the_last_group_may_leave_while_a_list_is_stored(tmp_path: Path) -> None:
    """Also if it comes back, and the topic is begun anew: windows count as before, and nothing is left over."""

    def events(count: int) -> list[Event]:
        return [Event(EventMeta(TOPIC, "NOTED", "shared:home"), {"n": n}) for n in range(count)]

    got = 0

    async def handler(_: ReceivedEvent) -> Ack:
        nonlocal got
        got += 1
        return Ack()

    async with EventBus(workspace=tmp_path, settings=BusSettings(close_timeout_s=0.05)) as bus:
        subscription = await bus.subscribe(TOPIC, GROUP, handler, max_inflight=100_000)
        await soon(lambda: subscription.group_state is not None and subscription.group_state.is_live)
        publishing = asyncio.create_task(bus.publish_many(events(20_000)))
        await asyncio.sleep(0)
        await bus.unsubscribe(subscription)
        assert len(await publishing) == 20_000

        subscription = await bus.subscribe(TOPIC, GROUP, hold, max_inflight=100_000)
        publishing = asyncio.create_task(bus.publish_many(events(20_000)))
        await asyncio.sleep(0)
        await bus.seek(TOPIC, GROUP, 0)
        await publishing
        assert bus._started_now.publishing.windows[TOPIC].publishing == 0


@pytest.mark.parametrize("is_list", [True, False], ids=["a list", "behind a hook"])
async def test_whoever_comes_to_a_full_window_while_the_bus_closes_is_told(world: World, is_list: bool) -> None:
    """Nobody waits for a group that will not make room any more."""

    class Slow(Middleware):
        name = "slow"

        async def before_publish(self, ctx: PublishContext) -> None:
            await world.clock.sleep(0.5)

    bus = await world.open(*([] if is_list else [Slow()]))
    closing: list[asyncio.Task[None]] = []

    async def slow(_: ReceivedEvent) -> Ack:
        await world.clock.sleep(60)
        return Ack()

    await world.run(bus.subscribe(TOPIC, GROUP, slow, max_inflight=2))
    await world.until(lambda: world.group().is_live)
    await world.publish(2)
    if is_list:
        publishing: asyncio.Task[Any] = asyncio.create_task(bus.publish_many([world.event(n) for n in range(10)]))
    else:
        publishing = asyncio.create_task(bus.publish(world.event(3)))
        await world.clock.advance(0.1)
    closing.append(asyncio.create_task(bus.close(10)))

    with pytest.raises(BusClosed):
        await world.run(asyncio.wait_for(publishing, None))
    await world.run(asyncio.wait_for(closing[0], None))


async def test_a_publisher_that_is_cancelled_as_it_is_woken_is_cancelled(world: World) -> None:
    """Two things at once in one turn of the loop: the publisher ends as it was told to, and nothing is left behind."""
    bus = await world.open()
    await world.run(bus.subscribe(TOPIC, GROUP, hold, max_inflight=1))
    await world.until(lambda: world.group().is_live)
    await world.publish(1)
    waiting = asyncio.create_task(bus.publish(world.event(1)))
    await world.clock.advance(1)

    waiting.cancel()
    bus._started_now.publishing.windows[TOPIC].wake_publishers()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert bus._started_now.publishing.windows[TOPIC].waiting == []


async def test_a_long_list_through_a_narrow_window_is_looked_at_piece_by_piece(world: World) -> None:
    """What one look costs does not grow with the list that is still to come."""
    bus = await world.open()
    got = Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got, max_inflight=10))
    await world.until(lambda: world.group().is_live)
    looked_at: list[int] = []

    class Watched(list[Event]):
        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            if isinstance(index, slice):
                looked_at.append(len(found))
            return found

    await world.run(bus.publish_many(Watched(world.event(n) for n in range(3_000))))
    await world.until(world.drained())

    assert got.offsets == list(range(3_000))
    assert max(looked_at[1:]) <= 1024


# A publisher's batch


@pytest.mark.req("F22", "F133")
async def test_a_batch_is_checked_one_by_one_and_stored_as_one(world: World) -> None:
    """Bad events are told by the part at fault, the good ones are in the log in their order, by one write to the journal."""
    bus = await world.open()
    got = Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got))
    bad = {3: world.event(3, space_id=""), 7: world.event(7, payload={"x": float("nan")})}
    events = [bad.get(n) or world.event(n) for n in range(50)]
    calls = world.disk.calls

    results = await world.run(Publisher(bus, clock=world.clock).publish_batch(events))
    syncs = [
        call for call in world.disk.trace if call.number > calls and call.op == "sync" and "journal" in str(call.path)
    ]
    await world.until(world.drained())

    assert [at for at, result in enumerate(results) if not result.success] == [3, 7]
    assert [getattr(results[at].error, "field", None) for at in (3, 7)] == ["meta.space_id", "payload.x"]
    assert [event.payload["n"] for event in got.events] == [n for n in range(50) if n not in bad]
    assert [result.seq for result in results if result.success] == list(range(1, 49))
    assert len(syncs) == 1


@pytest.mark.req("F22")
async def test_a_batch_keeps_its_order_with_hooks_that_take_their_time(world: World) -> None:
    """However long a middleware takes over single events, a batch is stored in its order."""
    bus = await world.open(Lazy(world))
    publisher = Publisher(bus, PublisherSettings(timeout_s=60.0), clock=world.clock)

    results = await world.run(publisher.publish_batch([world.event(n) for n in range(8)]))

    assert [result.success for result in results] == [n != 3 for n in range(8)]
    assert [event.payload["n"] async for event in bus.replay(TOPIC)] == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.req("F22")
async def test_a_batch_that_runs_out_of_time_says_which_events_are_stored(world: World) -> None:
    """A window of five takes five: these are told as stored, the others as timed out, and the log agrees."""
    bus = await world.open()
    await world.run(bus.subscribe(TOPIC, GROUP, hold, max_inflight=5))
    await world.until(lambda: world.group().is_live)

    results = await world.run(Publisher(bus, clock=world.clock).publish_batch([world.event(n) for n in range(20)]))

    stored = [event.payload["n"] async for event in bus.replay(TOPIC)]
    assert [at for at, result in enumerate(results) if result.success] == stored == list(range(len(stored)))
    assert 5 <= len(stored) < 20
    assert {type(result.error) for result in results[len(stored) :]} == {PublishTimeout}
