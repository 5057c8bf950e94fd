"""Hours of traffic in virtual time: nothing is lost, and nothing grows."""

from __future__ import annotations

import random

import pytest

from tests.scenarios.bus.support import TOPIC, World
from tidings.bus import BusSettings, ReceivedEvent
from tidings.log.settings import LogSettings
from tidings.types import Ack, Nack

HOUR_S = 3600


@pytest.mark.slow
@pytest.mark.req("F66")
@pytest.mark.parametrize("hours", [6, pytest.param(24, marks=pytest.mark.heavy)])
async def test_hours_of_traffic_stay_within_their_bounds(world: World, hours: int) -> None:
    """
    Three groups, one of them flaky and one that sleeps every other hour, take hours of traffic; queues, islands,
    histories and tasks stay within their limits all the time, and at its end every event was acknowledged or buried.
    """
    settings = BusSettings(read_ahead_count_max=64, cursor_interval_ms=5_000, cursor_sync_interval_ms=60_000)
    bus = await world.open(settings=settings, log_settings=LogSettings(segment_lines_max=500, recent_bytes_max=4096))
    rng = random.Random(11)
    counts = dict.fromkeys(("steady", "flaky", "sleepy"), 0)
    bounds = dict.fromkeys(("pending", "islands", "attempts", "tasks"), 0)

    def look() -> None:
        groups = [world.group(group=name) for name in counts]
        bounds["pending"] = max(bounds["pending"], *(group.pending for group in groups))
        bounds["islands"] = max(bounds["islands"], *(len(group.cursor.ranges) for group in groups))
        bounds["attempts"] = max(bounds["attempts"], *(len(group.attempts) for group in groups))
        bounds["tasks"] = max(bounds["tasks"], *(len(group._tasks) for group in groups))

    def handler(name: str, failure_share: float) -> object:
        async def handle(event: ReceivedEvent) -> Ack | Nack:
            if rng.random() < failure_share and event.offset % 10 == 0:
                return Nack("flaky")
            counts[name] += 1
            return Ack()

        return handle

    for name, share in (("steady", 0.0), ("flaky", 0.9), ("sleepy", 0.0)):
        await world.run(bus.subscribe(TOPIC, name, handler(name, share), max_inflight=50, workers=2))  # type: ignore[arg-type]

    async def traffic() -> int:
        published = 0
        for hour in range(hours):
            await (bus.pause if hour % 2 else bus.resume)(TOPIC, "sleepy")
            for _ in range(60):
                for _ in range(rng.randint(0, 6)):
                    await bus.publish(world.event(published))
                    published += 1
                look()
                await world.clock.sleep(60)
        await bus.resume(TOPIC, "sleepy")
        return published

    published = await world.run(traffic())
    for name in counts:
        await world.until(world.drained(group=name))
    letters = await bus.dead_letters(TOPIC)

    assert published > 125 * hours
    assert counts["steady"] == counts["sleepy"] == published
    assert counts["flaky"] + len(letters) == published
    assert len(letters) > 2 * hours
    assert bounds["pending"] <= 50
    assert bounds["islands"] <= 50
    assert bounds["attempts"] <= 50
    assert bounds["tasks"] <= 50
    for name in counts:
        group = world.group(group=name)
        assert (group.pending, len(group.attempts), len(group._histories), group.cursor.ranges) == (0, 0, 0, [])
