"""Who waits for whom: publishers for live groups with a full window, and for room on the disk; nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tests.scenarios.bus.support import GROUP, TOPIC, Recorder, World
from tidings.bus import BusSettings, EventBus, ReceivedEvent
from tidings.bus.errors import BusClosed, PublishTimeout
from tidings.core.errors import InvalidName
from tidings.core.events import Event, EventMeta
from tidings.log.errors import StorageFull
from tidings.log.interface import Appended, Duplicate, Refused, Verdict
from tidings.log.settings import LogSettings
from tidings.middleware import MetricsMiddleware
from tidings.types import Ack


class Gate:
    """A handler that waits until it is let through."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.got: list[int] = []

    async def __call__(self, event: ReceivedEvent) -> Ack:
        await self.opened.wait()
        self.got.append(event.offset)
        return Ack()


def stored(verdicts: list[Verdict]) -> list[Appended | Duplicate]:
    """The verdicts, none of them a refusal."""
    assert not any(isinstance(verdict, Refused) for verdict in verdicts)
    return [verdict for verdict in verdicts if not isinstance(verdict, Refused)]


async def subscribe(world: World, handler: Any, group: str = GROUP, **options: Any) -> None:
    assert world.bus is not None
    await world.run(world.bus.subscribe(topic=TOPIC, group=group, handler=handler, **options))
    await world.until(lambda: world.group(group=group).is_live)


async def publish_in_background(world: World, bus: EventBus, count: int) -> asyncio.Task[list[int]]:
    async def job() -> list[int]:
        return [(await bus.publish(world.event(n))).offset for n in range(count)]

    task = asyncio.create_task(job())
    await world.clock.advance(5)
    return task


@pytest.mark.req("F24", "F42", "F126")
async def test_a_publisher_waits_while_a_live_window_is_full(world: World) -> None:
    """With a window of three, the fourth publish waits until an event is acknowledged; then all go through in order."""
    bus = await world.open()
    gate = Gate()
    await subscribe(world, gate, max_inflight=3)

    publishing = await publish_in_background(world, bus, 10)
    assert bus.published_count == 3
    assert world.group().pending == 3

    gate.opened.set()
    assert await world.run(asyncio.wait_for(publishing, None)) == list(range(10))
    await world.until(world.drained())
    assert gate.got == list(range(10))


async def test_many_publishers_together_do_not_overfill_a_window(world: World) -> None:
    """However many publish at once, what is not acknowledged stays within the window."""
    bus = await world.open()
    most = 0

    async def handler(_: ReceivedEvent) -> Ack:
        nonlocal most
        most = max(most, world.group().pending)
        await world.clock.sleep(0.001)
        return Ack()

    await subscribe(world, handler, max_inflight=4, workers=2)
    await world.run(asyncio.wait_for(asyncio.gather(*(bus.publish(world.event(n)) for n in range(100))), None))
    await world.until(world.drained())

    assert most <= 4
    assert world.group().stats.acked == 100


async def test_a_list_of_events_goes_in_as_far_as_the_window_is_open(world: World) -> None:
    """Of a list, those that fit are stored together; the rest follows as events are acknowledged, in order, none twice."""
    bus = await world.open()
    gate = Gate()
    await subscribe(world, gate, max_inflight=3)

    publishing = asyncio.create_task(bus.publish_many([world.event(n) for n in range(10)]))
    await world.clock.advance(5)
    assert bus.published_count == 3
    assert world.group().pending == 3

    gate.opened.set()
    verdicts = await world.run(asyncio.wait_for(publishing, None))
    await world.until(world.drained())
    assert [verdict.offset for verdict in stored(verdicts)] == gate.got == list(range(10))
    assert bus.published_count == 10


async def test_lists_and_single_events_together_do_not_overfill_a_window(world: World) -> None:
    """However many publish at once, one by one or by the list, what is not acknowledged stays within the window."""
    bus = await world.open()
    most = 0

    async def handler(_: ReceivedEvent) -> Ack:
        nonlocal most
        most = max(most, world.group().pending)
        await world.clock.sleep(0.001)
        return Ack()

    await subscribe(world, handler, max_inflight=4, workers=2)
    lists = [bus.publish_many([world.event(20 * n + m) for m in range(20)]) for n in range(4)]
    singles = [bus.publish(world.event(n)) for n in range(80, 120)]
    await world.run(asyncio.wait_for(asyncio.gather(*lists, *singles), None))
    await world.until(world.drained())

    assert most <= 4
    assert world.group().stats.acked == 120


async def test_a_full_window_of_one_topic_holds_up_what_follows_in_the_list(world: World) -> None:
    """Events of other topics that come before it in the list are stored; those behind it wait, so that order is kept."""
    bus = await world.open()
    gate = Gate()
    await subscribe(world, gate, max_inflight=2)
    events = [world.event(n, topic="other" if n in (0, 3, 5) else TOPIC) for n in range(6)]

    publishing = asyncio.create_task(bus.publish_many(events))
    await world.clock.advance(5)

    assert {name: info.next_offset for name, info in bus.log.topics().items()} == {"other": 2, TOPIC: 2}
    gate.opened.set()
    verdicts = await world.run(asyncio.wait_for(publishing, None))
    assert [verdict.seq for verdict in stored(verdicts)] == [1, 2, 3, 4, 5, 6]


async def test_of_a_list_only_what_was_stored_in_time_is_there(world: World) -> None:
    """With a limit the publisher of a list is told which group is full; sent again, nothing is stored twice."""
    bus = await world.open()
    gate = Gate()
    await subscribe(world, gate, max_inflight=2)
    events = [world.event(n) for n in range(5)]

    with pytest.raises(PublishTimeout):
        await world.run(bus.publish_many(events, timeout_s=1.0))
    assert bus.log.topics()[TOPIC].next_offset == 2

    gate.opened.set()
    verdicts = await world.run(bus.publish_many(events))
    await world.until(world.drained())
    assert [type(verdict) for verdict in verdicts] == [Duplicate] * 2 + [Appended] * 3
    assert gate.got == list(range(5))


async def test_a_refused_event_of_a_list_takes_no_room(world: World) -> None:
    """An event that cannot be stored gets its verdict, and the window is as wide as before."""
    bus = await world.open()
    got = Recorder()
    await subscribe(world, got, max_inflight=2)
    events = [world.event(n, payload={"n": float("nan")} if n % 2 else None) for n in range(20)]
    events[9].meta.topic = ["no", "name"]  # type: ignore[assignment]

    with pytest.raises(InvalidName):
        await world.run(bus.publish(events[9]))
    verdicts = await world.run(asyncio.wait_for(bus.publish_many(events), None))

    assert [isinstance(verdict, Refused) for verdict in verdicts] == [bool(n % 2) for n in range(20)]
    await world.until(world.drained())
    assert got.offsets == list(range(10))


async def test_a_handler_may_publish_a_list_to_its_own_topic(world: World) -> None:
    """It does not wait for the window that it is in itself."""
    bus = await world.open()
    got: list[int] = []

    async def handler(event: ReceivedEvent) -> Ack:
        got.append(event.offset)
        if event.offset == 0:
            await bus.publish_many([world.event(n) for n in range(1, 6)])
        return Ack()

    await subscribe(world, handler, max_inflight=1)
    await world.publish(1)
    await world.until(lambda: len(got) == 6)

    assert got == list(range(6))


async def test_a_list_that_meets_a_full_disk_waits_for_room(world: World) -> None:
    """Storage that is full is back-pressure for a list too: all of it is stored once there is room, none of it twice."""
    bus = await world.open(log_settings=LogSettings(journal_bytes=1 << 20, journal_count_max=2))
    got = Recorder()
    await world.run(bus.subscribe(topic=TOPIC, group=GROUP, handler=got))
    await world.publish(1)
    world.disk.capacity_bytes = world.disk.used_bytes

    events = [world.event(n, payload={"n": n, "pad": "x" * 400_000}) for n in range(8)]
    publishing = asyncio.create_task(bus.publish_many(events))
    await world.clock.advance(2)
    assert not publishing.done()
    assert bus.health().is_storage_full

    world.disk.capacity_bytes = None
    verdicts = await world.run(asyncio.wait_for(publishing, None))
    await world.until(world.drained())
    assert [verdict.event_id for verdict in stored(verdicts)] == [event.meta.event_id for event in events]
    assert got.offsets == list(range(9))


@pytest.mark.parametrize("timeout_s", [0, 2.5])
async def test_a_publisher_may_limit_its_wait(world: World, timeout_s: float) -> None:
    """With a timeout, also of nothing, the publisher is told which group is full, and the event is not stored."""
    bus = await world.open()
    await subscribe(world, Gate(), max_inflight=1)
    await world.publish(1)
    started = world.clock.monotonic()

    with pytest.raises(PublishTimeout) as caught:
        await world.run(bus.publish(world.event(1), timeout_s=timeout_s))

    assert (caught.value.group, caught.value.retryable) == (GROUP, True)
    assert world.clock.monotonic() - started == pytest.approx(timeout_s, abs=0.02)
    assert bus.log.topics()[TOPIC].next_offset == 1


async def test_publishers_that_give_up_leave_nothing_behind(world: World) -> None:
    """However many publishers time out or are cancelled at a full window, the bus keeps nothing of them."""
    bus = await world.open()
    await subscribe(world, Gate(), max_inflight=1)
    await world.publish(1)
    for n in range(20):
        with pytest.raises(PublishTimeout):
            await world.run(bus.publish(world.event(n), timeout_s=0.1))
    waiting = [asyncio.create_task(bus.publish(world.event(n))) for n in range(20)]
    await world.clock.advance(1)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)

    assert bus._started_now.publishing.windows[TOPIC].waiting == []
    assert bus.log.topics()[TOPIC].next_offset == 1


async def test_the_bus_can_limit_every_wait(world: World) -> None:
    """The limit in the settings holds for publishers that name none."""
    bus = await world.open(settings=BusSettings(publish_timeout_s=1.0))
    await subscribe(world, Gate(), max_inflight=1)
    await world.publish(1)

    with pytest.raises(PublishTimeout):
        await world.run(bus.publish(world.event(1)))


async def test_a_group_that_is_away_or_paused_holds_nobody_up(world: World) -> None:
    """Without a live subscription, or with a paused one, publishing goes on and the backlog waits in the log."""
    bus = await world.open()
    gate = Gate()
    await subscribe(world, gate, max_inflight=2)
    waiting = await publish_in_background(world, bus, 5)
    assert bus.published_count == 2

    await bus.pause(TOPIC, GROUP)
    await world.run(asyncio.wait_for(waiting, None))
    assert world.group().pending <= 2
    await world.run(bus.unsubscribe(bus.get_subscriptions()[0], timeout_s=0))
    await world.publish(50, first=5)

    assert bus.published_count == 55


async def test_leaving_frees_the_publishers_that_waited(world: World) -> None:
    """When the full group leaves, those who waited for it go on."""
    bus = await world.open()
    await subscribe(world, Gate(), max_inflight=1)
    waiting = await publish_in_background(world, bus, 3)

    await world.run(bus.unsubscribe(bus.get_subscriptions()[0], timeout_s=0))

    assert await world.run(asyncio.wait_for(waiting, None)) == [0, 1, 2]


async def test_closing_tells_the_publishers_that_wait(world: World) -> None:
    """A publisher that waits for a window when the bus closes gets a typed answer; its event was not stored."""
    bus = await world.open()
    await subscribe(world, Gate(), max_inflight=1)
    waiting = await publish_in_background(world, bus, 2)

    await world.run(bus.close(0))

    with pytest.raises(BusClosed):
        await waiting
    assert world.log is not None
    assert world.log.topics()[TOPIC].next_offset == 1


@pytest.mark.req("F66")
async def test_a_backlog_is_worked_off_within_the_window(world: World) -> None:
    """A group that comes late to a long topic never holds more than its window, and ends up fed from memory."""
    bus = await world.open(settings=BusSettings(read_ahead_count_max=64))
    for first in range(0, 5_000, 500):
        await world.run(bus.publish_many([world.event(n) for n in range(first, first + 500)]))
    most, count = 0, 0

    async def handler(_: ReceivedEvent) -> Ack:
        nonlocal most, count
        most, count = max(most, world.group().pending), count + 1
        return Ack()

    await world.run(bus.subscribe(topic=TOPIC, group=GROUP, handler=handler, max_inflight=100))
    await world.until(world.drained())
    await world.until(lambda: world.group().is_live)

    assert count == 5_000
    assert most <= 100
    assert len(world.group().cursor.ranges) == 0


async def test_a_slow_group_does_not_slow_its_neighbour(world: World) -> None:
    """A lagging group reads for itself; a live one beside it goes on being fed."""
    bus = await world.open()
    quick, gate = Recorder(), Gate()
    await subscribe(world, quick, "quick")
    await world.run(bus.subscribe(topic=TOPIC, group="slow", handler=gate, max_inflight=2))
    await bus.pause(TOPIC, "slow")
    await world.publish(50)
    await world.until(world.drained(group="quick"))
    assert bus.lag(TOPIC, "slow") == 50

    gate.opened.set()
    await bus.resume(TOPIC, "slow")
    await world.until(world.drained(group="slow"))

    assert gate.got == quick.offsets == list(range(50))


@pytest.mark.req("F25", "F72")
async def test_a_full_disk_is_back_pressure_with_a_metric_and_a_health_signal(world: World) -> None:
    """While the disk is full a publisher waits, the metric is up and health says why; with room it goes on."""
    metrics = MetricsMiddleware()
    bus = await world.open(metrics, log_settings=LogSettings(journal_bytes=1 << 20, journal_count_max=2))
    got = Recorder()
    await world.run(bus.subscribe(topic=TOPIC, group=GROUP, handler=got))
    await world.publish(1)
    world.disk.capacity_bytes = world.disk.used_bytes

    # Segments have to grow even where the journal has room, so some publish meets the limit.
    waiting = asyncio.create_task(bus.publish(world.event(payload={"pad": "x" * 900_000})))
    for n in range(3):
        await asyncio.wait({waiting}, timeout=0)
        await world.clock.advance(2)
        if not waiting.done():
            break
        waiting = asyncio.create_task(bus.publish(world.event(n, payload={"pad": "x" * 900_000})))
    assert not waiting.done()
    assert bus.health().is_storage_full
    assert storage_full(metrics) == 1

    world.disk.capacity_bytes = None
    await world.run(asyncio.wait_for(waiting, None))
    await world.until(world.drained())

    assert not bus.health().is_storage_full
    assert storage_full(metrics) == 0
    assert got.offsets == list(range(bus.log.topics()[TOPIC].next_offset))


def storage_full(metrics: MetricsMiddleware) -> float | None:
    return metrics.registry.get_sample_value("events_storage_full")


@pytest.mark.parametrize("is_list", [False, True])
async def test_the_metric_goes_down_with_the_first_event_that_fits_again(world: World, is_list: bool) -> None:
    """Also if nobody waited for the room: a publisher that gave up leaves no alarm behind."""
    metrics = MetricsMiddleware()
    bus = await world.open(metrics, settings=BusSettings(storage_full_timeout_s=3.0))
    await world.publish(1)
    world.disk.capacity_bytes = world.disk.used_bytes

    async def fill() -> None:
        for n in range(5):
            await bus.publish(world.event(n, payload={"pad": "x" * 900_000}))

    with pytest.raises(StorageFull):
        await world.run(fill())
    assert storage_full(metrics) == 1

    world.disk.capacity_bytes = None
    await world.clock.advance(1)
    await world.run(bus.publish_many([world.event(9)]) if is_list else bus.publish(world.event(9)))

    assert storage_full(metrics) == 0


@pytest.mark.bound("bus.settings.BusSettings.storage_full_timeout_s")
@crossed
async def test_the_wait_for_a_full_disk_can_be_limited(world: World, beyond: Beyond) -> None:
    """With a limit, the publisher gets StorageFull when it is over, and nothing was stored."""
    bus = await world.open(settings=BusSettings(storage_full_timeout_s=3.0))
    await world.publish(1)
    world.disk.capacity_bytes = world.disk.used_bytes

    async def fill() -> None:
        for n in range(5):
            await bus.publish(world.event(n, payload={"pad": "x" * 900_000}))

    publishing = asyncio.ensure_future(fill())
    await world.clock.advance(2.9)
    assert not publishing.done()
    stored = bus.log.position.seq
    await world.clock.advance(beyond(3) - 2.9)
    world.disk.capacity_bytes = None
    with pytest.raises(StorageFull):
        await world.run(publishing)
    assert bus.log.position.seq == stored


async def test_a_list_waits_for_a_group_that_has_only_just_subscribed(tmp_path: Path) -> None:
    """A new group of a topic is live when ``subscribe`` returns: its window counts from the first event on."""
    gate = Gate()
    async with EventBus(workspace=tmp_path) as bus:
        await bus.subscribe(TOPIC, GROUP, gate, max_inflight=5)
        events = [Event(EventMeta(TOPIC, "NOTED", "shared:home"), {"n": n}) for n in range(20)]
        with pytest.raises(PublishTimeout):
            await bus.publish_many(events, timeout_s=0)
        assert bus.log.topics()[TOPIC].next_offset == 5
        gate.opened.set()
        verdicts = stored(await bus.publish_many(events))
        assert [type(verdict) for verdict in verdicts] == [Duplicate] * 5 + [Appended] * 15


async def test_one_publisher_of_large_events_waits_for_the_bytes_of_a_window(tmp_path: Path) -> None:
    """Events that come one after another fill a window of bytes, and the group stays live; it is not left behind."""
    gate = Gate()
    async with EventBus(workspace=tmp_path) as bus:
        await bus.subscribe(TOPIC, GROUP, gate, max_inflight_bytes=3_000_000)
        event = {"text": "x" * 1_000_000}

        async def publish_all() -> None:
            for n in range(20):
                await bus.publish(Event(EventMeta(TOPIC, "NOTED", "shared:home"), {**event, "n": n}), timeout_s=0)

        with pytest.raises(PublishTimeout):
            await publish_all()
        assert bus.log.topics()[TOPIC].next_offset <= 3
        gate.opened.set()
