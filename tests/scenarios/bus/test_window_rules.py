"""What a window is: what a group holds for its workers, in events and bytes; what waits for a retry is not in it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from tests.scenarios.bus.support import GROUP, TOPIC, Recorder, World
from tidings.bus import EventBus, ReceivedEvent
from tidings.bus.errors import PublishTimeout
from tidings.types import Ack, Nack


class Gate:
    """A handler that waits until it is let through."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.got: list[int] = []

    async def __call__(self, event: ReceivedEvent) -> None:
        await self.opened.wait()
        self.got.append(event.offset)


async def subscribe(world: World, handler: Any, group: str = GROUP, **options: Any) -> None:
    assert world.bus is not None
    await world.run(world.bus.subscribe(topic=TOPIC, group=group, handler=handler, **options))
    await world.until(lambda: world.group(group=group).is_live)


async def publish_all(world: World, bus: EventBus, count: int, **payload: Any) -> None:
    for n in range(count):
        await bus.publish(world.event(n, payload={"n": n} | payload))


@pytest.mark.req("F24", "F48")
async def test_each_subscription_has_a_window_of_its_own_that_publishers_wait_for(world: World) -> None:
    """With windows of three and five, the fourth publish waits, and the sixth when the first group has gone on."""
    bus = await world.open()
    narrow, wide = Gate(), Gate()
    await subscribe(world, narrow, "narrow", max_inflight=3)
    await subscribe(world, wide, "wide", max_inflight=5)

    publishing = asyncio.create_task(publish_all(world, bus, 9))
    await world.clock.advance(5)
    assert bus.published_count == 3
    narrow.opened.set()
    await world.clock.advance(5)
    assert bus.published_count == 5
    assert (world.group(group="narrow").pending, world.group(group="wide").pending) == (0, 5)

    wide.opened.set()
    await world.run(asyncio.wait_for(publishing, None))
    await world.until(world.drained(group="wide"))
    assert narrow.got == wide.got == list(range(9))


async def test_events_that_wait_for_a_retry_hold_up_neither_group_nor_publishers(world: World) -> None:
    """Ten refusals of half a minute each fill a window of ten; all that follows is published and handled within a second."""
    bus = await world.open()
    done: list[int] = []

    async def handler(event: ReceivedEvent) -> Ack | Nack:
        if event.offset < 10 and event.attempt == 1:
            return Nack("later", delay_s=30.0)
        done.append(event.offset)
        return Ack()

    await subscribe(world, handler, max_inflight=10)
    started = world.clock.monotonic()
    await world.publish(60)
    await world.until(lambda: len(done) == 50)
    assert world.clock.monotonic() - started < 1
    assert (world.group().pending, world.group().pending_bytes, bus.lag(TOPIC, GROUP)) == (0, 0, 10)

    await world.until(world.drained())
    assert world.clock.monotonic() - started >= 30
    assert done == [*range(10, 60), *range(10)]


async def test_what_waits_for_a_retry_comes_again_after_a_restart(world: World) -> None:
    """Its offset is not acknowledged and its attempts are counted, so the next process tries it for the second time."""
    bus = await world.open()

    async def later(_: ReceivedEvent) -> Nack:
        return Nack("later", delay_s=600.0)

    await subscribe(world, later)
    await world.publish(3)
    await world.until(lambda: world.group().stats.failed == 3)
    await world.close()

    bus = await world.open()
    got = Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got))
    await world.until(world.drained())
    assert [(event.offset, event.attempt) for event in got.events] == [(0, 2), (1, 2), (2, 2)]


async def test_a_group_with_too_many_waiting_retries_takes_in_nothing_new_and_nobody_waits_for_it(world: World) -> None:
    """Beyond the bound, and what was in its window, it holds nothing; when retries are through it goes on, and misses nothing."""
    bus = await world.open()
    got: list[int] = []

    async def handler(event: ReceivedEvent) -> Ack | Nack:
        if event.attempt == 1:
            return Nack("later", delay_s=30.0)
        got.append(event.offset)
        return Ack()

    await subscribe(world, handler, max_inflight=4, waiting_retries_max=6)
    await world.publish(100)
    await world.clock.advance(5)
    assert bus.published_count == 100
    assert len(world.group().attempts) <= 10
    assert world.group().stats.delivered <= 10

    await world.until(world.drained())
    assert sorted(got) == list(range(100))


@pytest.mark.req("F65")
async def test_a_window_is_bounded_in_bytes_too(world: World) -> None:
    """With room for a thousand events and for 100 kB, publishers of 10 kB wait at ten; nothing is lost when it opens."""
    bus = await world.open()
    gate = Gate()
    await subscribe(world, gate, max_inflight=1000, max_inflight_bytes=100_000)

    publishing = asyncio.create_task(publish_all(world, bus, 40, pad="x" * 9_900))
    await world.clock.advance(5)
    assert not publishing.done()
    assert 8 <= world.group().pending <= 10
    assert world.group().pending_bytes <= 100_000

    gate.opened.set()
    await world.run(asyncio.wait_for(publishing, None))
    await world.until(world.drained())
    assert gate.got == list(range(40))


async def test_a_backlog_of_large_events_is_read_as_the_bytes_allow(world: World) -> None:
    """A group that lags holds no more bytes than its window; one event larger than all of it comes alone."""
    await world.open()
    await world.publish(1)
    bus = world.bus
    assert bus is not None
    sizes = [9_000] * 20 + [500_000] + [9_000] * 20
    for n, size in enumerate(sizes):
        await world.run(bus.publish(world.event(n, payload={"pad": "x" * size})))
    held: list[tuple[int, int]] = []

    async def handler(_: ReceivedEvent) -> None:
        held.append((world.group().pending, world.group().pending_bytes))
        await world.clock.sleep(0.001)

    await subscribe(world, handler, max_inflight_bytes=50_000)
    await world.until(world.drained())
    assert len(held) == 42
    assert all(size <= 50_000 or count == 1 for count, size in held)
    assert max(size for _, size in held) > 500_000


@pytest.mark.parametrize("options", [{}, {"order": "strict"}, {"ack_deadline_ms": 600_000}])
async def test_a_stuck_group_holds_up_its_neighbours_for_a_bounded_time_only(
    world: World, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """After the time of the setting publishers go on, health and log say for whom they do not wait, and it loses nothing."""
    bus = await world.open()
    gate, neighbour = Gate(), Recorder()
    await subscribe(world, gate, max_inflight=3, stall_timeout_s=20.0, **options)
    await subscribe(world, neighbour, "neighbour", max_inflight=3)

    publishing = asyncio.create_task(publish_all(world, bus, 30))
    await world.clock.advance(19)
    assert bus.published_count == 3
    with caplog.at_level(logging.WARNING):
        await world.clock.advance(7)
    assert publishing.done()
    await world.until(world.drained(group="neighbour"))
    assert "publishers do not wait for it" in caplog.text
    assert "publishers do not wait for it" in str(bus.health().problem)
    assert world.group().pending == 3

    gate.opened.set()
    await world.until(world.drained())
    await world.until(lambda: world.group().is_live)
    assert gate.got == list(range(30))
    assert bus.health().problem is None
    gate.opened.clear()
    again = asyncio.create_task(publish_all(world, bus, 5))
    await world.clock.advance(5)
    assert not again.done()
    gate.opened.set()
    await world.run(asyncio.wait_for(again, None))


async def test_a_slow_group_that_makes_progress_holds_publishers_back(world: World) -> None:
    """Each event takes most of the time of the setting; the group stays live, and its window is never exceeded."""
    bus = await world.open()

    async def slow(_: ReceivedEvent) -> None:
        await world.clock.sleep(8.0)

    await subscribe(world, slow, max_inflight=2, stall_timeout_s=10.0)
    publishing = asyncio.create_task(publish_all(world, bus, 12))
    most = 0
    while not publishing.done():
        await world.clock.advance(1)
        most = max(most, bus.lag(TOPIC, GROUP))
    assert most <= 3
    assert world.group().is_live


async def test_publishers_that_give_up_do_not_keep_a_stuck_group_live(world: World) -> None:
    """Whether one publisher waits for long or many for a short time each, the group is left behind after the same time."""
    bus = await world.open()
    gate = Gate()
    await subscribe(world, gate, max_inflight=1, stall_timeout_s=10.0)
    await world.publish(1)
    refused = 0
    started = world.clock.monotonic()
    while True:
        try:
            await world.run(bus.publish(world.event(1), timeout_s=1.0))
            break
        except PublishTimeout:
            refused += 1
    assert 9 <= refused <= 12
    assert 9 <= world.clock.monotonic() - started <= 13


@pytest.mark.req("F24")
async def test_a_task_that_outlives_its_handler_waits_like_any_publisher(world: World) -> None:
    """While its handler is at work it publishes freely; afterwards the window counts for it."""
    bus = await world.open()
    gate, started = Gate(), asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    sent = 0

    async def stream() -> None:
        nonlocal sent
        await started.wait()
        for n in range(50):
            await bus.publish(world.event(n))
            sent += 1

    async def handler(event: ReceivedEvent) -> None:
        if event.offset == 0:
            tasks.append(asyncio.create_task(stream()))
        else:
            await gate(event)

    await subscribe(world, handler, max_inflight=3)
    await world.publish(1)
    await world.until(world.drained())
    started.set()
    await world.clock.advance(5)
    assert sent == 3
    gate.opened.set()
    await world.run(asyncio.wait_for(tasks[0], None))


@pytest.mark.parametrize("options", [{}, {"ack_deadline_ms": 60_000}, {"batch_count_max": 2}])
async def test_a_handler_that_publishes_in_tasks_it_waits_for_does_not_wait_for_itself(
    world: World, options: dict[str, Any]
) -> None:
    """With one worker and a window of one, a handler gathers publishes to its own topic, and is done at once."""
    bus = await world.open()
    got: list[int] = []

    async def handler(events: Any) -> None:
        for event in events if isinstance(events, list) else [events]:
            if event.offset == 0:
                await asyncio.gather(*(bus.publish(world.event(n)) for n in range(1, 6)))
                await asyncio.gather(bus.publish_many([world.event(n) for n in range(6, 9)]))
            got.append(event.offset)

    await subscribe(world, handler, workers=1, max_inflight=1, **options)
    started = world.clock.monotonic()
    await world.publish(1)
    await world.until(lambda: len(got) == 9)
    assert world.clock.monotonic() - started < 1
