"""Opening, closing, seeking, pausing and subscribing at the same time: one of them comes first, and the bus stays whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from tests.scenarios.bus.support import GROUP, TOPIC, Recorder, World, soon
from tidings.bus import EventBus, ReceivedEvent
from tidings.bus.errors import BusClosed, SubscriptionExists
from tidings.core.errors import SettingsError
from tidings.core.events import Event, EventMeta
from tidings.subscription import SubscriptionRegistry
from tidings.types import Ack


def an_event(n: int = 0) -> Event:
    return Event(EventMeta(TOPIC, "NOTED", "shared:home"), {"n": n})


async def test_whoever_loses_patience_with_closing_leaves_a_bus_that_closes(tmp_path: Path) -> None:
    """The close goes on without its caller; then the bus can be started again, and so can another one."""
    release, began = asyncio.Event(), asyncio.Event()

    async def slow(_: ReceivedEvent) -> Ack:
        began.set()
        await release.wait()
        return Ack()

    bus = EventBus(workspace=tmp_path)
    await bus.subscribe(TOPIC, GROUP, slow)
    await bus.publish(an_event())
    await began.wait()
    closing = asyncio.create_task(bus.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert str(bus.state) == "stopping"
    release.set()
    await bus.close()
    assert str(bus.state) == "stopped"

    async with EventBus(workspace=tmp_path) as other:
        assert other.log.topics()[TOPIC].next_offset == 1
    await bus.start()
    assert (await bus.publish(an_event(1))).offset == 1
    await bus.close()


class Held:
    """A handler that answers when it is let go."""

    def __init__(self) -> None:
        self.began, self.release = asyncio.Event(), asyncio.Event()
        self.offsets: list[int] = []

    async def __call__(self, event: ReceivedEvent) -> Ack:
        self.began.set()
        await self.release.wait()
        self.offsets.append(event.offset)
        return Ack()


async def given_up(job: asyncio.Task[object]) -> None:
    """Let a job begin, then give up waiting for it."""
    for _ in range(3):
        await asyncio.sleep(0)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job


async def test_whoever_loses_patience_with_a_seek_leaves_a_group_that_runs(tmp_path: Path) -> None:
    """The seek waits for a handler at work, and is done without its caller; the group starts anew from the place."""
    held = Held()
    async with EventBus(workspace=tmp_path) as bus:
        await bus.subscribe(TOPIC, GROUP, held)
        await bus.publish(an_event())
        await held.began.wait()
        await bus.publish(an_event(1))
        seeking = asyncio.create_task(bus.seek(TOPIC, GROUP, 0))
        await soon(lambda: bus.log.topics().get("audit") is not None)
        await given_up(seeking)
        held.release.set()
        with pytest.raises(SubscriptionExists):  # the group is still somebody's
            await bus.subscribe(TOPIC, GROUP, held)

        await soon(lambda: held.offsets == [0, 0, 1])
        assert bus.lag(TOPIC, GROUP) == 0
        outcomes = [event.payload async for event in bus.replay("audit") if event.meta.type == "bus.group.seek.ended"]
    assert [told["outcome"] for told in outcomes] == ["done"]


async def test_whoever_loses_patience_with_unsubscribing_leaves_no_group_behind_that_works(tmp_path: Path) -> None:
    """Who subscribes next waits until the handler has answered and the place is stored, so nothing comes again."""
    held, next_one = Held(), Recorder()
    async with EventBus(workspace=tmp_path) as bus:
        subscription = await bus.subscribe(TOPIC, GROUP, held)
        await bus.publish(an_event())
        await held.began.wait()
        await given_up(asyncio.create_task(bus.unsubscribe(subscription)))

        subscribing = asyncio.create_task(bus.subscribe(TOPIC, GROUP, next_one))
        await asyncio.sleep(0)
        assert not subscribing.done()
        held.release.set()
        await subscribing
        await bus.publish(an_event(1))
        await soon(lambda: bool(next_one.events))
        assert held.offsets == [0]
        assert next_one.offsets == [1]


async def test_closing_stops_a_group_that_is_being_left_as_well(tmp_path: Path) -> None:
    """When the bus is closed no handler is at work, and the places of all groups are stored."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def hangs(_: ReceivedEvent) -> Ack:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return Ack()

    bus = EventBus(workspace=tmp_path)
    subscription = await bus.subscribe(TOPIC, GROUP, hangs)
    await bus.publish(an_event())
    await began.wait()
    leaving = asyncio.create_task(bus.unsubscribe(subscription))
    await asyncio.sleep(0)

    await bus.close(timeout_s=0)

    assert ended.is_set()
    assert await leaving


async def test_closing_while_starting_closes(tmp_path: Path) -> None:
    """What is being opened is closed once it is open."""
    bus = EventBus(workspace=tmp_path)
    starting = asyncio.create_task(bus.start())
    await asyncio.sleep(0)
    assert str(bus.state) == "starting"

    await bus.close()

    await starting
    assert str(bus.state) == "stopped"
    with pytest.raises(BusClosed):
        await bus.publish(an_event())


async def test_closing_while_a_group_is_taken_up_refuses_the_group(tmp_path: Path) -> None:
    """The subscriber is told; after the next start the same subscription is there in full."""
    bus = EventBus(workspace=tmp_path)
    await bus.start()
    got = Recorder()
    subscribing = asyncio.create_task(bus.subscribe(TOPIC, GROUP, got))
    await asyncio.sleep(0)
    await bus.close()
    with pytest.raises(BusClosed):
        await subscribing
    assert bus.get_subscriptions() == []

    await bus.start()
    await bus.subscribe(TOPIC, GROUP, got)
    await bus.publish(an_event())
    await soon(lambda: bus.lag(TOPIC, GROUP) == 0)
    await bus.close()
    assert got.offsets == [0]


async def test_a_seek_waits_for_the_group_that_leaves(world: World) -> None:
    """The place that a leaving group stores does not overwrite the one that was sought."""
    bus = await world.open()

    async def slow(_: ReceivedEvent) -> Ack:
        await world.clock.sleep(1)
        return Ack()

    subscription = await world.run(bus.subscribe(TOPIC, GROUP, slow))
    await world.publish(5)
    await world.clock.advance(2.5)
    leaving = asyncio.create_task(bus.unsubscribe(subscription, timeout_s=5))
    await asyncio.sleep(0)
    await world.run(bus.seek(TOPIC, GROUP, 0))
    await world.run(asyncio.wait_for(leaving, None))

    got = Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got))
    await world.until(world.drained())
    assert got.offsets == list(range(5))


@pytest.mark.parametrize("offset", [-1, 0.5, True, "0", None])
async def test_a_place_is_a_whole_number(world: World, offset: object) -> None:
    """Anything else is refused by name, and the group's place stays as it is."""
    bus = await world.open()
    await world.run(bus.subscribe(TOPIC, GROUP, Recorder()))
    await world.publish(3)
    await world.until(world.drained())

    with pytest.raises(SettingsError, match="whole number"):
        await world.run(bus.seek(TOPIC, GROUP, offset))  # type: ignore[arg-type]

    await world.close()
    bus = await world.open()
    got = Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got))
    await world.clock.advance(1)
    assert got.offsets == []


@pytest.mark.parametrize("order", ["strict", "key"])
async def test_a_paused_group_tries_nothing_again_in_order(world: World, order: Literal["strict", "key"]) -> None:
    """The event that failed waits with the others until the group is resumed."""
    bus = await world.open()
    got = Recorder(fails=lambda event: event.offset == 0 and event.attempt < 4)
    await world.run(bus.subscribe(TOPIC, GROUP, got, order=order, backoff_base=1.0, backoff_mult=1.0))
    await world.publish(2)
    await world.until(lambda: len(got.events) == 1)

    await bus.pause(TOPIC, GROUP)
    await world.clock.advance(600)
    assert len(got.events) == 1

    await bus.resume(TOPIC, GROUP)
    await world.until(world.drained())
    assert got.offsets == [0, 0, 0, 0, 1]


async def test_what_waits_for_a_retry_does_not_hold_up_a_group_that_lags(world: World) -> None:
    """With most of its window waiting for a second attempt, a group that catches up still gets what is left of it."""
    bus = await world.open()
    await world.publish(40)
    got = Recorder(fails=lambda event: event.offset < 8 and event.attempt == 1)
    await world.run(
        bus.subscribe(TOPIC, GROUP, got, max_inflight=10, backoff_base=3_000.0, backoff_max=3_000.0, max_retries=5)
    )
    world.rng.uniform = lambda a, b: b  # type: ignore[method-assign]

    await world.until(lambda: len(set(got.offsets)) == 40, seconds_max=60)


def test_a_group_has_one_subscription_in_a_registry() -> None:
    """Two would share one place, and each would take the other's acknowledgements for its own."""
    registry = SubscriptionRegistry()
    _, first = registry.register_subscription(TOPIC, Recorder())
    with pytest.raises(SubscriptionExists):
        registry.register_subscription(TOPIC, Recorder())

    registry.remove(first.subscription_id)
    registry.register_subscription(TOPIC, Recorder())


async def test_a_bus_that_was_never_started_says_so(tmp_path: Path) -> None:
    """Looking at groups starts the bus, or says that it has to be."""
    bus = EventBus(workspace=tmp_path)
    with pytest.raises(BusClosed):
        bus.admin  # noqa: B018 - reading it is what is tested
    await bus.position_of(TOPIC, GROUP)
    assert await bus.groups() == []
    await bus.close()
