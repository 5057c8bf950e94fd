"""Each subscription has a window of its own, of the size it was given, and back-pressure acts as the settings say."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.bus.support import TOPIC, World, soon
from tidings.bus import BusSettings, EventBus, ReceivedEvent
from tidings.bus.errors import PublishTimeout
from tidings.core.events import Event, EventMeta
from tidings.types import Ack


class Gate:
    """A handler that waits until it is let through."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.entered: list[int] = []
        self.done: list[int] = []

    async def __call__(self, event: ReceivedEvent) -> Ack:
        self.entered.append(event.offset)
        await self.opened.wait()
        self.done.append(event.offset)
        return Ack()


async def subscribe(world: World, handler: Any, group: str, **options: Any) -> None:
    assert world.bus is not None
    await world.run(world.bus.subscribe(topic=TOPIC, group=group, handler=handler, **options))


@pytest.mark.req("F46", "F48")
async def test_every_subscription_has_a_queue_of_its_own_with_its_own_limit(world: World) -> None:
    """
    Three groups of one topic hold as many events as each may, not more; when one goes on it gets all of the topic, while the
    other two still hold what they held.
    """
    bus = await world.open()
    await world.publish(60)
    gates = {"three": (Gate(), 3), "ten": (Gate(), 10), "twenty": (Gate(), 20)}
    for name, (gate, size) in gates.items():
        await subscribe(world, gate, name, max_inflight=size, workers=60)
    await world.clock.advance(5)

    for gate, size in gates.values():
        assert gate.entered == list(range(size)), "workers enough for all, and the window lets no more in"
    gates["ten"][0].opened.set()
    await world.until(world.drained(group="ten"))

    assert gates["ten"][0].done == list(range(60))
    for name in ("three", "twenty"):
        gate, size = gates[name]
        assert (gate.entered, gate.done, bus.lag(TOPIC, name)) == (list(range(size)), [], 60)
    for name in ("three", "twenty"):
        gates[name][0].opened.set()
        await world.until(world.drained(group=name))
        assert gates[name][0].done == list(range(60))


@pytest.mark.req("F65")
async def test_a_window_bounds_what_its_subscription_holds_in_memory(tmp_path: Path) -> None:
    """Of a backlog of 40 MB a stuck group with a window of ten events of 40 kB holds a few pages, however long it is stuck."""
    backlog_bytes = 0
    async with EventBus(workspace=tmp_path) as bus:
        for _ in range(10):
            events = [Event(EventMeta(TOPIC, "X", "s"), {"n": n, "text": "x" * 40_000}) for n in range(100)]
            await bus.publish_many(events)
            backlog_bytes += 100 * 40_000
    gate = Gate()
    async with EventBus(workspace=tmp_path) as bus:
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            await bus.subscribe(TOPIC, "stuck", gate, max_inflight=10, workers=100)
            await soon(lambda: len(gate.entered) == 10)
            for _ in range(200):
                await asyncio.sleep(0)
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert len(gate.entered) == 10
        gate.opened.set()
        await soon(lambda: bus.lag(TOPIC, "stuck") == 0)

    assert 10 * 40_000 <= held < backlog_bytes / 4


@pytest.mark.req("F108")
@pytest.mark.parametrize("size", [1, 4, 9])
async def test_how_many_events_may_wait_is_a_setting(world: World, size: int) -> None:
    """Publishers are let in up to the window that the subscription was given, and held up at the next event."""
    bus = await world.open()
    gate = Gate()
    await subscribe(world, gate, "slow", max_inflight=size, stall_timeout_s=600.0)
    await world.until(lambda: world.group(group="slow").is_live)

    async def publish() -> None:
        for n in range(20):
            await bus.publish(world.event(n))

    publishing = asyncio.create_task(publish())
    await world.clock.advance(5)
    assert (bus.published_count, publishing.done()) == (size, False)
    gate.opened.set()
    await world.run(asyncio.wait_for(publishing, None))
    assert bus.published_count == 20


@pytest.mark.req("F108")
@pytest.mark.parametrize(("of_the_bus", "of_the_call", "waited"), [(2.5, None, 2.5), (2.5, 0.5, 0.5), (None, 7.0, 7.0)])
async def test_how_long_a_publisher_waits_is_a_setting(
    world: World, of_the_bus: float | None, of_the_call: float | None, waited: float
) -> None:
    """A full window holds a publisher up for the time of the bus's settings, or that of its call, and is then an error."""
    bus = await world.open(settings=BusSettings(publish_timeout_s=of_the_bus))
    gate = Gate()
    await subscribe(world, gate, "slow", max_inflight=1)
    await world.until(lambda: world.group(group="slow").is_live)
    await world.publish(1)
    began = world.clock.monotonic()

    with pytest.raises(PublishTimeout):
        await world.run(bus.publish(world.event(1), timeout_s=of_the_call))

    assert world.clock.monotonic() - began == pytest.approx(waited)
    assert bus.published_count == 1
