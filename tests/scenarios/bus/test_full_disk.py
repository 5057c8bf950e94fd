"""A full disk, as those see it who hold a bus: publishers wait no longer than they were told to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.scenarios.bus.support import World
from tidings.bus import BusSettings, EventBus, Publisher, PublisherSettings
from tidings.log.errors import StorageFull

PAD = "x" * 900_000


async def fill(world: World, bus: EventBus) -> None:
    """Publish until there is no room for more."""
    world.disk.capacity_bytes = world.disk.used_bytes

    async def publish() -> None:
        while True:
            await bus.publish(world.event(payload={"pad": PAD}), timeout_s=0.001)

    with pytest.raises(StorageFull):
        await world.run(publish())
    assert bus.health().is_storage_full


def publish_one(world: World, bus: EventBus) -> Awaitable[Any]:
    return bus.publish(world.event(), timeout_s=3.0)


def publish_list(world: World, bus: EventBus) -> Awaitable[Any]:
    return bus.publish_many([world.event(n) for n in range(4)], timeout_s=3.0)


@pytest.mark.parametrize("publish", [publish_one, publish_list])
@pytest.mark.parametrize("settings", [BusSettings(), BusSettings(storage_full_timeout_s=60.0)])
async def test_the_time_given_to_a_publish_holds_for_a_full_disk_too(
    world: World, publish: Callable[[World, EventBus], Awaitable[Any]], settings: BusSettings
) -> None:
    """``timeout_s`` is the whole time of a publish, of one event or of a list: then it raises StorageFull."""
    bus = await world.open(settings=settings)
    await world.publish(1)
    await fill(world, bus)

    started = world.clock.monotonic()
    with pytest.raises(StorageFull):
        await world.run(publish(world, bus))

    assert world.clock.monotonic() - started == pytest.approx(3.0)


async def test_the_setting_for_a_publish_holds_for_a_full_disk_too(world: World) -> None:
    """``publish_timeout_s`` limits every publish that says nothing else, whatever it waits for."""
    bus = await world.open(settings=BusSettings(publish_timeout_s=2.0))
    await world.publish(1)
    await fill(world, bus)

    started = world.clock.monotonic()
    with pytest.raises(StorageFull):
        await world.run(bus.publish(world.event()))

    assert world.clock.monotonic() - started == pytest.approx(2.0)


async def test_a_publisher_on_a_full_disk_answers_within_its_time(world: World) -> None:
    """All tries of a publisher, and the pauses between them, together take no longer than ``timeout_s``."""
    bus = await world.open()
    publisher = Publisher(bus, PublisherSettings(timeout_s=5.0, retries_max=10), clock=world.clock)
    await world.publish(1)
    await fill(world, bus)

    started = world.clock.monotonic()
    results = await world.run(publisher.publish_batch([world.event(n) for n in range(3)]))

    assert world.clock.monotonic() - started == pytest.approx(5.0)
    assert [type(result.error) for result in results] == [StorageFull] * 3
    assert bus.log.position.seq == bus.published_count


async def test_a_publish_waits_half_a_minute_for_room_unless_it_is_given_more(world: World) -> None:
    """With the default settings a publish ends with StorageFull after 30 seconds, and the error says what is missing."""
    bus = await world.open()
    await world.publish(1)
    await fill(world, bus)

    started = world.clock.monotonic()
    with pytest.raises(StorageFull) as caught:
        await world.run(bus.publish(world.event()))

    assert world.clock.monotonic() - started == pytest.approx(30.0)
    assert caught.value.problem is not None
    assert "free" in str(caught.value)
