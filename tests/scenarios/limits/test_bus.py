"""Limits of groups and of publishing: what a group holds, how often it retries, how long a publish waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tests.scenarios.bus.support import GROUP, SETTINGS, TOPIC, Recorder, World
from tidings.bus import ReceivedEvent, texts
from tidings.bus.errors import PublishTimeout
from tidings.bus.settings import BusSettings
from tidings.types import Ack


class Gate:
    """A handler that counts the events it holds, until it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.held = 0
        self.held_max = 0

    async def __call__(self, event: ReceivedEvent) -> Ack:
        self.held += 1
        self.held_max = max(self.held_max, self.held)
        await self.opened.wait()
        self.held -= 1
        return Ack()


async def subscribe(world: World, handler: Any, **options: Any) -> None:
    assert world.bus is not None
    await world.run(world.bus.subscribe(TOPIC, GROUP, handler, **options))


@pytest.mark.bound("bus.settings.SubscriptionSettings.max_inflight", "bus.settings.BusSettings.publish_timeout_s")
@crossed
async def test_publishing_waits_while_the_window_is_full(world: World, beyond: Beyond) -> None:
    """The publish that does not fit raises after its time and stores nothing; the window never holds more than its limit."""
    bus = await world.open(log_settings=SETTINGS, settings=BusSettings(publish_timeout_s=5.0))
    gate = Gate()
    await subscribe(world, gate, max_inflight=3, workers=100, stall_timeout_s=3_600)
    await world.publish(3)
    started_s = world.clock.monotonic()
    for number in range(3, beyond(3)):
        with pytest.raises(PublishTimeout):
            await world.run(bus.publish(world.event(number)))
    waited_s = world.clock.monotonic() - started_s
    assert waited_s == pytest.approx(5.0 * (beyond(3) - 3), rel=0.05)
    assert gate.held_max == 3
    gate.opened.set()
    await world.until(world.drained())
    assert await world.publish(1) == [3]


@pytest.mark.bound("bus.settings.SubscriptionSettings.max_inflight_bytes")
@crossed
async def test_one_larger_event_is_delivered_and_a_second_waits(world: World, beyond: Beyond) -> None:
    """An event beyond the window's bytes is delivered alone; the next publish waits until it has left."""
    bus = await world.open(log_settings=SETTINGS, settings=BusSettings(publish_timeout_s=5.0))
    gate = Gate()
    await subscribe(world, gate, max_inflight_bytes=1_000, workers=100, stall_timeout_s=3_600)
    await world.run(bus.publish(world.event(payload={"text": "x" * beyond(1_000)})))
    await world.until(lambda: gate.held == 1)
    with pytest.raises(PublishTimeout):
        await world.run(bus.publish(world.event(1)))
    gate.opened.set()
    await world.until(world.drained())
    assert (await world.run(bus.publish(world.event(1)))).offset == 1


@pytest.mark.bound("bus.settings.SubscriptionSettings.stall_timeout_s")
@crossed
async def test_publishers_stop_waiting_for_a_stalled_group(world: World, beyond: Beyond) -> None:
    """After ``stall_timeout_s`` without progress the group lags: events are stored, and delivered once it goes on."""
    await world.open(log_settings=SETTINGS)
    gate = Gate()
    await subscribe(world, gate, max_inflight=1, workers=1, stall_timeout_s=10.0)
    await world.publish(1)
    started_s = world.clock.monotonic()
    await world.publish(beyond(10), first=1)
    assert world.clock.monotonic() - started_s < 15.0  # Only the first one waited.
    gate.opened.set()
    await world.until(world.drained())


@pytest.mark.bound("bus.settings.SubscriptionSettings.waiting_retries_max")
@crossed
async def test_a_group_with_too_many_waiting_retries_takes_nothing_new(world: World, beyond: Beyond) -> None:
    """At the limit the group waits for its retries; publishers go on, and every event is handled in the end."""
    await world.open(log_settings=SETTINGS)
    broken = True
    recorder = Recorder(fails=lambda event: broken)
    await subscribe(world, recorder, waiting_retries_max=5, max_retries=100, workers=4, order="none")
    await world.publish(beyond(5))
    await world.until(lambda: len(set(recorder.offsets)) >= 5)
    await world.run(world.clock.sleep(0.2))
    assert len(set(recorder.offsets)) <= 5 + 4  # Those at work when the limit was reached join the waiting ones.
    broken = False
    await world.until(world.drained())
    assert set(recorder.offsets) == set(range(beyond(5)))


@pytest.mark.bound("bus.subscription.SharedGroupOptions.max_retries")
@crossed
async def test_an_event_is_tried_as_often_as_its_retries_allow(world: World, beyond: Beyond) -> None:
    """A handler that would succeed only after more attempts never gets them: the event is a dead letter."""
    bus = await world.open(log_settings=SETTINGS)
    attempts_needed = beyond(3) + 1  # one delivery and three retries are allowed
    recorder = Recorder(fails=lambda event: event.attempt < attempts_needed)
    await subscribe(world, recorder, max_retries=3)
    await world.publish(1)
    await world.until(world.drained())
    assert recorder.attempts_of(0) == [1, 2, 3, 4]
    [letter] = await bus.dead_letters(TOPIC)
    assert len(letter.attempts) == 4


@pytest.mark.bound("bus.settings.SubscriptionSettings.batch_count_max")
@crossed
async def test_a_handler_of_lists_never_gets_a_longer_one(world: World, beyond: Beyond) -> None:
    """A backlog beyond the limit comes in several lists, each at most as long, in order."""
    await world.open(log_settings=SETTINGS)
    await world.publish(beyond(7))
    lists: list[list[int]] = []

    async def handle(events: list[ReceivedEvent]) -> None:
        lists.append([event.offset for event in events])

    await subscribe(world, handle, batch_count_max=7, start="earliest")
    await world.until(world.drained())
    assert max(map(len, lists)) <= 7
    assert [offset for each in lists for offset in each] == list(range(beyond(7)))


@pytest.mark.bound("bus.settings.BusSettings.read_ahead_count_max")
@crossed
async def test_a_lagging_group_reads_a_longer_backlog_in_parts(world: World, beyond: Beyond) -> None:
    """Every event of a backlog beyond the limit is delivered, once and in order."""
    await world.open(log_settings=SETTINGS, settings=BusSettings(read_ahead_count_max=8))
    await world.publish(beyond(8))
    recorder = Recorder()
    await subscribe(world, recorder, start="earliest", workers=1)
    await world.until(world.drained())
    assert recorder.offsets == list(range(beyond(8)))


@pytest.mark.bound("bus.settings.BusSettings.close_timeout_s", "bus.group._UNWIND_S_MAX")
@crossed
async def test_closing_waits_for_a_handler_as_long_as_it_may(world: World, beyond: Beyond) -> None:
    """A handler that takes longer is cancelled; one that ignores that delays closing by at most the time to unwind."""
    bus = await world.open(log_settings=SETTINGS, settings=BusSettings(close_timeout_s=2.0))
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def handle(event: ReceivedEvent) -> None:
        begun.set()
        try:
            await world.clock.sleep(beyond(2))
        except asyncio.CancelledError:
            cancelled.set()
            await world.clock.sleep(beyond(1))

    await subscribe(world, handle)
    await world.publish(1)
    await world.until(begun.is_set)
    started_s = world.clock.monotonic()
    await world.run(bus.close())
    assert cancelled.is_set()
    assert world.clock.monotonic() - started_s == pytest.approx(3.0, abs=0.2)


@pytest.mark.bound("bus.texts._CHARS_MAX", "bus.texts._TRACEBACK_CHARS_MAX")
@crossed
async def test_long_texts_of_a_failure_are_truncated(world: World, beyond: Beyond) -> None:
    """The dead letter keeps the beginning of a long error and the end of a long traceback, and their lengths."""
    bus = await world.open(log_settings=SETTINGS)

    async def handle(event: ReceivedEvent) -> None:
        raise ValueError("e" * beyond(max(texts._CHARS_MAX, texts._TRACEBACK_CHARS_MAX)))

    await subscribe(world, handle, max_retries=0)
    await world.publish(1)
    await world.until(world.drained())
    [letter] = await bus.dead_letters(TOPIC)
    assert len(letter.error) <= texts._CHARS_MAX + 100
    assert "characters)" in letter.error
    assert len(letter.traceback) <= texts._TRACEBACK_CHARS_MAX + 100
    assert "characters left out" in letter.traceback
