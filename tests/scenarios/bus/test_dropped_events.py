"""Groups and retention: events that are gone are never passed over in silence."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.crash.support import settled
from tests.scenarios.bus.support import GROUP, TOPIC, Recorder, World
from tidings.log.errors import PositionTrimmed
from tidings.log.retention import plan_retention
from tidings.log.settings import LogSettings, TopicRetention

SMALL = LogSettings(journal_bytes=1 << 20, journal_count_max=2, segment_lines_max=4, recent_bytes_max=0)
SPACES = LogSettings(journal_bytes=1 << 20, journal_count_max=2, segment_lines_max=2, layout="space")


async def subscribe(world: World, handler: Any, group: str = GROUP, **options: Any) -> None:
    assert world.bus is not None
    await world.run(world.bus.subscribe(topic=TOPIC, group=group, handler=handler, **options))


async def drop_sealed(world: World, space_id: str | None = None) -> None:
    """Drop every sealed segment of the topic (of a space's part of it)."""
    log = world.log
    assert log is not None
    await settled(log)
    segments = [each for each in log.topics()[TOPIC].segments if space_id in (None, each.space_id)]
    rule = {TOPIC: TopicRetention(size_bytes_max=0)}
    await log.drop(plan_retention(segments, rule, now=datetime(2026, 6, 1, tzinfo=UTC)))


async def test_a_group_whose_events_are_gone_is_told(world: World) -> None:
    """A group that has not seen what retention dropped is refused with the place where the log begins; seek goes on."""
    bus = await world.open(log_settings=SMALL)
    got = Recorder()
    await subscribe(world, got)
    await world.publish(2)
    await world.until(world.drained())
    await world.run(bus.unsubscribe(bus.get_subscriptions()[0]))
    await world.publish(10, first=2)
    await drop_sealed(world)
    first = bus.log.topics()[TOPIC].first_offset
    assert first > 2

    with pytest.raises(PositionTrimmed) as caught:
        await subscribe(world, got)
    assert (caught.value.asked, caught.value.first) == (2, first)
    with pytest.raises(PositionTrimmed):
        await bus.seek(TOPIC, GROUP, 1)

    await world.run(bus.seek(TOPIC, GROUP, first))
    await subscribe(world, got)
    await world.until(world.drained())
    assert got.offsets == [0, 1, *range(first, 12)]


async def test_a_new_group_begins_at_the_first_event_kept(world: World) -> None:
    """Earliest means the earliest that is there; an offset before it is refused."""
    bus = await world.open(log_settings=SMALL)
    await world.publish(10)
    await drop_sealed(world)
    first = bus.log.topics()[TOPIC].first_offset
    got = Recorder()

    with pytest.raises(PositionTrimmed):
        await subscribe(world, Recorder(), "other", start=0)
    await subscribe(world, got)
    await world.until(world.drained())

    assert got.offsets == list(range(first, 10))


async def test_a_gap_in_the_offsets_does_not_hold_the_mark_up(world: World) -> None:
    """Where one space's part of a topic was dropped, groups pass over the gap and their mark reaches the end."""
    bus = await world.open(log_settings=SPACES)
    for n in range(16):
        await world.publish(1, first=n, space_id="shared:home" if n < 3 or n > 12 else "person:ana")
    await drop_sealed(world, "person:ana")
    kept = [event.offset async for event in bus.replay(TOPIC)]
    assert kept != list(range(kept[0], 16)), "there is a gap to pass over"
    got = Recorder()

    await subscribe(world, got, workers=2)
    await world.until(world.drained())

    assert sorted(got.offsets) == kept
    assert (world.group().cursor.committed, world.group().cursor.ranges) == (15, [])
