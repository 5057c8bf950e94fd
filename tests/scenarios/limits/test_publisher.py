"""Limits of a publisher: longer lists are rejected, and it gives up after its retries or its time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.beyond import Beyond, crossed
from tests.scenarios.bus.support import SETTINGS, World
from tidings.bus.errors import InvalidBatch
from tidings.bus.publisher import Publisher, PublisherSettings
from tidings.core.events import Event
from tidings.log.errors import StorageFull
from tidings.log.interface import Refused, Verdict


@pytest.mark.bound("bus.publisher.PublisherSettings.batch_count_max")
@crossed
async def test_a_longer_list_is_rejected(world: World, beyond: Beyond) -> None:
    """A list at the limit is stored; a longer one raises, and nothing of it is stored."""
    bus = await world.open(log_settings=SETTINGS)
    publisher = Publisher(bus, PublisherSettings(batch_count_max=5), clock=world.clock)
    with pytest.raises(InvalidBatch):
        await world.run(publisher.publish_batch([world.event(number) for number in range(beyond(5))]))
    results = await world.run(publisher.publish_batch([world.event(number) for number in range(5)]))
    assert [result.seq for result in results] == [1, 2, 3, 4, 5]


@pytest.mark.bound("bus.publisher.PublisherSettings.retries_max", "bus.publisher.PublisherSettings.timeout_s")
@crossed
@pytest.mark.parametrize("kind", ["retries", "time"])
async def test_a_publisher_gives_up(world: World, monkeypatch: pytest.MonkeyPatch, kind: str, beyond: Beyond) -> None:
    """A disk that is full for longer than the retries, or the time, allow fails the publish; one attempt less and it succeeds."""
    bus = await world.open(log_settings=SETTINGS)
    needed = 0
    calls = 0
    publish_many = bus.publish_many

    async def refuse(events: Sequence[Event], **options: object) -> Sequence[Verdict]:
        nonlocal calls
        calls += 1
        if calls <= needed:
            return [Refused(StorageFull("no room"))] * len(events)
        return await publish_many(events)

    monkeypatch.setattr(bus, "publish_many", refuse)
    settings = PublisherSettings(retry_delay_s=1.0, retry_mult=1.0, retries_max=3, timeout_s=1e6)
    if kind == "time":
        settings = msgspec.structs.replace(settings, retries_max=1_000, timeout_s=3.0)
    publisher = Publisher(bus, settings, clock=world.clock)
    needed = 3
    assert (await world.run(publisher.publish(world.event()))).success is True
    calls, needed = 0, beyond(3)
    result = await world.run(publisher.publish(world.event()))
    assert (result.success, result.retry_count) == (False, 3)
