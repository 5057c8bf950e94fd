"""Trying dead letters again: within the group's own bounds, and with what came of it in the letter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.scenarios.bus.support import GROUP, TOPIC, Recorder, World
from tidings.bus import BusSettings, DeadLetter, ReceivedEvent, TopicPolicy
from tidings.middleware import FeatureFlags, MetricsMiddleware
from tidings.types import Ack


async def fail(_: ReceivedEvent) -> Ack:
    raise ValueError("one")


async def letters_of(world: World, condition: Callable[[list[DeadLetter]], bool]) -> list[DeadLetter]:
    """The letters, once the condition holds."""
    bus = world.bus
    assert bus is not None

    async def poll() -> list[DeadLetter]:
        while True:
            letters = await bus.dead_letters(TOPIC, states=("dead", "requested", "trying", "redriven", "dropped"))
            if condition(letters):
                return letters
            await world.clock.sleep(0.01)

    return await world.run(poll())


async def bury(world: World, count: int, **options: object) -> None:
    """Have a group give up on so many events, and leave."""
    bus = world.bus
    assert bus is not None
    subscription = await world.run(bus.subscribe(TOPIC, GROUP, fail, max_retries=0))
    await world.publish(count, **options)  # type: ignore[arg-type]
    await world.until(world.drained())
    await world.run(bus.unsubscribe(subscription))


async def test_the_deadline_holds_for_a_redrive(world: World) -> None:
    """A handler that hangs fails the letter in time, and the next letter has its turn."""
    bus = await world.open()
    await bury(world, 2)

    async def hang(_: ReceivedEvent) -> Ack:
        await asyncio.get_running_loop().create_future()
        return Ack()

    await world.run(bus.subscribe(TOPIC, GROUP, hang, ack_deadline_ms=100))
    await world.run(bus.redrive(TOPIC))
    letters = await letters_of(world, lambda all_: [each.redrives for each in all_] == [1, 1])

    letters = await letters_of(world, lambda all_: all(each.state == "dead" for each in all_))
    assert [letter.error_type for letter in letters] == ["tidings.bus.errors.HandlerTimeout"] * 2


async def test_a_paused_group_gets_no_letters_until_it_is_resumed(world: World) -> None:
    """Also those asked for before it started, and those asked for while it tries others."""
    bus = await world.open()
    await bury(world, 3)
    got = Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got))
    await bus.pause(TOPIC, GROUP)
    await world.close()

    bus = await world.open()
    await world.run(bus.redrive(TOPIC))
    await world.run(bus.subscribe(TOPIC, GROUP, got))
    await world.clock.advance(60)
    assert got.events == []

    await bus.resume(TOPIC, GROUP)
    await letters_of(world, lambda all_: all(each.state == "redriven" for each in all_))
    assert got.offsets == [0, 1, 2]


async def test_a_redrive_that_fails_tells_the_new_error(world: World) -> None:
    """Error, type and digest are those of the last attempt, and the attempt is in the history."""
    bus = await world.open()
    await bury(world, 1)
    (before,) = await world.run(bus.dead_letters(TOPIC))

    async def otherwise(_: ReceivedEvent) -> Ack:
        raise KeyError("two")

    await world.run(bus.subscribe(TOPIC, GROUP, otherwise))
    await world.run(bus.redrive(TOPIC))
    (after,) = await letters_of(world, lambda all_: [(each.state, each.redrives) for each in all_] == [("dead", 1)])

    assert (before.error_type, after.error_type) == ("builtins.ValueError", "builtins.KeyError")
    assert after.error == "'two'"
    assert after.traceback_digest != before.traceback_digest
    assert [attempt.error for attempt in after.attempts] == ["one", "'two'"]


async def test_a_redrive_of_an_expired_letter_is_handled(world: World) -> None:
    """Whoever asks for it wants it handled after all, however old it is."""
    bus = await world.open(settings=BusSettings(topics={TOPIC: TopicPolicy(expired="dead_letter")}))
    await world.publish(1, ttl_sec=10)
    await world.clock.advance(60)
    got = Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got))
    await world.until(world.drained())
    assert got.events == []

    await world.run(bus.redrive(TOPIC))
    await letters_of(world, lambda all_: [each.state for each in all_] == ["redriven"])
    assert got.offsets == [0]


async def test_ids_and_a_group_narrow_together(world: World) -> None:
    """A letter that is named and is another group's is passed over."""
    bus = await world.open()
    await bury(world, 1)

    assert await world.run(bus.redrive(TOPIC, [f"{GROUP}-0"], group="other")) == []
    (letter,) = await world.run(bus.dead_letters(TOPIC))
    assert letter.state == "dead"


async def test_an_event_that_fails_anew_after_its_letter_was_dropped_is_a_letter_again(world: World) -> None:
    """A group that is set back, and fails again, has lost nothing in silence."""
    bus = await world.open()
    await bury(world, 1)
    await world.run(bus.drop_dead_letters(TOPIC, [f"{GROUP}-0"]))
    assert await world.run(bus.dead_letters(TOPIC)) == []

    await world.run(bus.subscribe(TOPIC, GROUP, fail, max_retries=0))
    await world.run(bus.seek(TOPIC, GROUP, 0))
    await world.until(world.drained())

    assert [letter.id for letter in await world.run(bus.dead_letters(TOPIC))] == [f"{GROUP}-0"]


async def test_a_redrive_that_ends_the_process_takes_no_neighbour_along(world: World) -> None:
    """An event that was at work beside it each time is not counted for it more than once."""
    bus = await world.open()
    await bury(world, 1)
    await world.run(bus.redrive(TOPIC))
    await world.publish(1, first=1)

    attempts: list[int] = []
    for _ in range(6):
        is_killing = False

        async def handler(event: ReceivedEvent) -> Ack:
            nonlocal is_killing
            if event.offset == 0:
                is_killing = True
                await asyncio.get_running_loop().create_future()
            attempts.append(event.attempt)
            await world.clock.sleep(0.2)
            return Ack()

        await world.run(bus.subscribe(TOPIC, GROUP, handler, max_retries=3))
        for _ in range(20):
            await world.clock.advance(0.05)
            if is_killing:
                break
        await world.kill()
        bus = await world.open()

    assert max(attempts) <= 2
    (letter,) = await world.run(bus.dead_letters(TOPIC))
    assert (letter.offset, letter.state) == (0, "dead")
    assert "the process ended" in letter.error


@pytest.mark.req("F62")
async def test_an_expired_event_is_counted_and_traced_as_such(world: World) -> None:
    """It is neither good nor bad: a counter of its own says how many were too old."""
    metrics = MetricsMiddleware()
    bus = await world.open(metrics)
    await world.publish(2, ttl_sec=10)
    await world.clock.advance(60)
    got = Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got))
    await world.until(world.drained())

    labels = {"topic": TOPIC, "group": GROUP}
    assert metrics.registry.get_sample_value("events_expired_total", labels) == 2
    assert not metrics.registry.get_sample_value("events_handle_err_total", labels)
    assert got.events == []


async def test_metrics_that_are_switched_off_count_no_letters(world: World) -> None:
    """A member that is off takes part in nothing."""
    metrics = MetricsMiddleware()
    flags = FeatureFlags({"metrics": False})
    bus = await world.open(metrics, flags=flags)
    await world.run(bus.subscribe(TOPIC, GROUP, fail, max_retries=0))
    await world.publish(1)
    await world.until(world.drained())
    assert not metrics.registry.get_sample_value("events_dlq_total", {"topic": TOPIC})

    flags.enable("metrics")
    await world.publish(1, first=1)
    await world.until(world.drained())
    assert metrics.registry.get_sample_value("events_dlq_total", {"topic": TOPIC}) == 1
