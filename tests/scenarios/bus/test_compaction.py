"""Segments that every group is through with can go; whatever somebody still needs stays."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.scenarios.bus.support import SETTINGS, TOPIC, Recorder, World

CUT = replace(SETTINGS, segment_lines_max=10)


@pytest.mark.req("F73", "F134")
async def test_what_every_group_has_passed_goes(world: World) -> None:
    """Only segments behind the slowest group are dropped, and a dry run drops none."""
    bus = await world.open(log_settings=CUT)
    fast, slow = Recorder(), Recorder(fails=lambda event: event.offset == 25)
    await world.run(bus.subscribe(topic=TOPIC, group="fast", handler=fast))
    await world.run(bus.subscribe(topic=TOPIC, group="slow", handler=slow, backoff_base=1e6, backoff_max=1e6))
    await world.publish(45)
    await world.until(world.drained(group="fast"))
    await world.until(lambda: len(slow.events) == 45)
    await world.clock.advance(60)  # the cursors are stored now and then

    planned = await world.run(bus.compact(dry_run=True))
    assert len(bus.log.topics()[TOPIC].segments) == 5
    plan = await world.run(bus.compact())

    assert [decision.segment.number for decision in plan.drops] == [1, 2]
    assert plan.drops == planned.drops
    assert bus.log.topics()[TOPIC].first_offset == 20
    assert [event.offset async for event in bus.replay(TOPIC)] == list(range(20, 45))


@pytest.mark.req("F134")
async def test_a_topic_that_nobody_reads_and_one_that_sync_clients_may_ask_for_stay(world: World) -> None:
    """Without a group nothing counts as consumed; what names a partition stays, and so does what the lake lacks."""
    bus = await world.open(log_settings=CUT)
    got = Recorder()
    await world.run(bus.subscribe(topic=TOPIC, group="g", handler=got))
    await world.run(bus.subscribe(topic="shared", group="g", handler=got))
    await world.publish(25)
    await world.publish(25, topic="unread")
    await world.publish(25, topic="shared", partitions=["home"])
    await world.until(world.drained(group="g"))
    await world.until(world.drained("shared", "g"))
    await world.clock.advance(60)

    assert (await world.run(bus.compact("unread", "shared"))).drops == ()
    assert (await world.run(bus.compact(archived_through={TOPIC: 9}))).drops[0].segment.number == 1
    assert [d.segment.number for d in (await world.run(bus.compact(TOPIC))).drops] == [2]
