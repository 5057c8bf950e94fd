"""Starting, closing gracefully, crashing, and what the next process finds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.bus.support import BUS, GROUP, TOPIC, Recorder, World
from tidings.bus import EventBus, EventBusState, ReceivedEvent, SubscriptionRegistry
from tidings.bus.errors import CursorDamaged
from tidings.bus.settings import BusSettings
from tidings.bus.store import GroupPosition
from tidings.bus.worker import Worker
from tidings.log.embedded.disk import read_file, replace_file
from tidings.types import Ack, Event, EventMeta, EventType


async def subscribe(world: World, handler: Any, group: str = GROUP, **options: Any) -> None:
    assert world.bus is not None
    await world.run(world.bus.subscribe(topic=TOPIC, group=group, handler=handler, **options))


@pytest.mark.req("F67")
async def test_the_bus_knows_its_state(tmp_path: Path) -> None:
    """Stopped, running, stopped again; starting and closing twice is fine; a closed bus can be started anew."""
    bus = EventBus(workspace=tmp_path)
    assert bus.state is EventBusState.STOPPED
    await bus.close()
    await asyncio.gather(bus.start(), bus.start())
    running: EventBusState = bus.state
    assert running is EventBusState.RUNNING
    await asyncio.gather(bus.close(), bus.close())
    stopped: EventBusState = bus.state
    assert stopped is EventBusState.STOPPED
    async with bus:
        await bus.publish(Event(EventMeta(topic=TOPIC, type=EventType.ACTION_EXECUTED, space_id="s"), {"n": 1}))
        assert bus.log.position.seq == 1


@pytest.mark.req("F67")
async def test_closing_lets_handlers_finish_within_the_time(world: World) -> None:
    """What is at work when the bus closes is finished and acknowledged; what only waited comes again."""
    bus = await world.open()
    done: list[int] = []

    async def handler(event: ReceivedEvent) -> Ack:
        await world.clock.sleep(2)
        done.append(event.offset)
        return Ack()

    await subscribe(world, handler, workers=2)
    await world.publish(6)
    await world.until(lambda: world.group().handling == 2)
    started = world.clock.monotonic()
    await world.run(bus.close(timeout_s=10))
    assert world.clock.monotonic() - started == pytest.approx(2, abs=0.1), "no longer than the handlers take"
    await world.close()

    await world.open()
    again = Recorder()
    await subscribe(world, again)
    await world.until(world.drained())

    assert sorted(done) == [0, 1]
    assert again.offsets == [2, 3, 4, 5]


@pytest.mark.parametrize("order", ["none", "strict", "key"])
async def test_closing_does_not_wait_for_a_retry(world: World, order: str) -> None:
    """An event that waits for its next attempt is not at work; the attempts it has had are remembered."""
    await world.open()
    await subscribe(world, Recorder(fails=lambda _: True), order=order, backoff_base=30.0)
    await world.publish(1)
    await world.until(lambda: world.group().stats.failed == 1)
    started = world.clock.monotonic()
    await world.close(timeout_s=10)
    assert world.clock.monotonic() - started < 0.1

    await world.open()
    again = Recorder()
    await subscribe(world, again)
    await world.until(world.drained())
    assert again.attempts_of(0) == [2]


@pytest.mark.req("F54")
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "killed"])
async def test_a_restart_redelivers_exactly_what_was_not_acknowledged(world: World, closes: bool) -> None:
    """With gaps left by slow and failing events, the next process gets the gaps and nothing else."""
    await world.open()
    never = asyncio.Event()

    async def handler(event: ReceivedEvent) -> Ack:
        if event.offset in (2, 7):
            await never.wait()
        if event.offset == 5:
            raise RuntimeError("not yet")
        return Ack()

    await subscribe(world, handler, workers=4, backoff_base=1000.0, backoff_max=1000.0)
    await world.publish(10)
    await world.until(lambda: world.group().stats.acked == 7)
    await world.clock.advance(0.1)
    await (world.close() if closes else world.kill())

    await world.open()
    again = Recorder()
    await subscribe(world, again)
    await world.until(world.drained())

    assert sorted(again.offsets) == [2, 5, 7]
    assert again.attempts_of(5) == [2]


async def test_a_killing_event_becomes_a_dead_letter_and_its_neighbours_are_spared(world: World) -> None:
    """
    An event whose handler ends the process is counted by the claim, tried six times and buried; events that were with
    other workers and other groups at those moments are handled, not buried with it.
    """
    lives = 0
    handled: dict[str, set[int]] = {GROUP: set(), "other": set()}
    deadly_attempts: list[int] = []
    died = asyncio.Event()

    def handler(name: str) -> Any:
        async def handle(event: ReceivedEvent) -> Ack:
            if name == GROUP and event.offset == 3:
                deadly_attempts.append(event.attempt)
                died.set()
                await asyncio.Event().wait()
            await world.clock.sleep(5)
            handled[name].add(event.offset)
            return Ack()

        return handle

    bus = await world.open()
    while lives < 10:
        lives += 1
        died.clear()
        await subscribe(world, handler(GROUP), workers=4)
        await subscribe(world, handler("other"), "other", workers=4)
        if lives == 1:
            await world.publish(8)
        await world.until(lambda: died.is_set() or all(world.drained(group=name)() for name in handled))
        if not died.is_set():
            break
        await world.kill()
        bus = await world.open()

    (letter,) = await bus.dead_letters(TOPIC)
    assert deadly_attempts == [1, 2, 3, 4, 5, 6]
    assert (letter.group, letter.offset, letter.retries) == (GROUP, 3, 5)
    assert "process ended" in letter.error
    assert len(letter.attempts) == 6
    assert handled == {GROUP: set(range(8)) - {3}, "other": set(range(8))}


async def test_a_killing_event_in_a_batch_is_found_out(world: World) -> None:
    """After a crash the events of the batch come one by one, so only the one that kills is counted on and buried."""
    died = asyncio.Event()
    handled: set[int] = set()

    async def handler(events: list[ReceivedEvent]) -> Ack:
        if any(event.offset == 3 for event in events):
            died.set()
            await asyncio.Event().wait()
        handled.update(event.offset for event in events)
        return Ack()

    bus = await world.open()
    await world.publish(8)
    lives = 0
    while lives < 10:
        lives += 1
        died.clear()
        await subscribe(world, handler, batch_count_max=8)
        await world.until(lambda: died.is_set() or world.drained()())
        if not died.is_set():
            break
        await world.kill()
        bus = await world.open()

    assert lives == 7
    assert [letter.offset for letter in await bus.dead_letters(TOPIC)] == [3]
    assert handled == set(range(8)) - {3}


@pytest.mark.req("F33", "F34")
async def test_the_offset_file_says_where_the_group_stands_and_never_goes_back(world: World) -> None:
    """The file has committed, segment and ts as the layout wants them; saves only ever move it forward."""
    await world.open()
    await subscribe(world, Recorder(), workers=3)
    seen: list[int] = []
    for n in range(30):
        await world.publish(1, first=n)
        await world.clock.advance(0.06)
        data = read_file(world.disk, BUS / "offsets" / f"{TOPIC}__{GROUP}.json")
        assert data is not None
        content = json.loads(data)
        assert {"crc", "committed", "segment", "ts", "seal"} <= set(content)
        seen.append(content["committed"])

    assert seen == sorted(seen)
    assert seen[-1] == 29


@pytest.mark.req("F49")
async def test_a_registry_is_taken_over_at_the_start(world: World) -> None:
    """Subscriptions registered apart from a bus run when a bus with that registry starts."""
    registry = SubscriptionRegistry()
    got = Recorder()
    registry.register_subscription(topic=TOPIC, handler=got, group=GROUP)

    await world.open(registry=registry)
    await world.publish(3)
    await world.until(world.drained())

    assert got.offsets == [0, 1, 2]


async def test_a_start_that_cannot_take_up_a_group_does_not_pretend(world: World) -> None:
    """If one registered group cannot be taken up the bus does not start, and says why."""
    await world.open()
    await subscribe(world, Recorder())
    await world.publish(1)
    await world.close()
    file = BUS / "offsets" / f"{TOPIC}__{GROUP}.json"
    for path in (file, file.with_name(file.name + ".bak")):
        replace_file(world.disk, path, b"")
    registry = SubscriptionRegistry()
    registry.register_subscription(topic=TOPIC, handler=Recorder(), group=GROUP)

    with pytest.raises(CursorDamaged):
        await world.open(registry=registry)

    assert world.bus is not None
    assert world.bus.state is EventBusState.STOPPED


async def test_positions_are_synced_less_often_than_stored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While events are acknowledged all the time, a position is stored each 50 ms and synced once a second."""
    bus = await world.open(settings=BusSettings(cursor_interval_ms=50, cursor_sync_interval_ms=1000))
    synced: list[bool] = []
    save = bus.store.save

    async def counting(topic: str, group: str, position: GroupPosition, *, sync: bool = True) -> None:
        synced.append(sync)
        await save(topic, group, position, sync=sync)

    await world.run(bus.subscribe(TOPIC, GROUP, Recorder()))
    monkeypatch.setattr(bus.store, "save", counting)
    for n in range(100):
        await world.publish(1, first=n)
        await world.clock.advance(0.05)

    assert 3 <= synced.count(True) <= 6
    assert synced.count(False) >= 40


async def test_members_of_this_process_share_a_group(world: World) -> None:
    """Each of two members that handle one event at a time has one at once; one that leaves gets no more."""
    bus = await world.open()
    got: dict[str, list[int]] = {"a": [], "b": []}
    release = asyncio.Event()

    def member(name: str) -> Any:
        async def handle(event: ReceivedEvent) -> Ack:
            got[name].append(event.offset)
            await release.wait()
            return Ack()

        return handle

    first = await world.run(bus.join(TOPIC, GROUP, member("a")))
    await world.run(bus.join(TOPIC, GROUP, member("b")))
    (subscription,) = bus.get_subscriptions(TOPIC)
    await world.publish(4)
    await world.until(lambda: all(got.values()))
    assert (len(subscription.members), got) == (2, {"a": [0], "b": [1]})
    release.set()
    await world.until(world.drained())
    await world.run(bus.leave(first))
    before = len(got["a"])
    await world.publish(3)
    await world.until(world.drained())

    assert (len(subscription.members), len(got["a"]), len(got["b"])) == (1, before, 7 - before)


async def test_a_worker_that_ends_by_a_fault_starts_again_after_a_second(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours that ends a worker each time it starts is not repeated as fast as it can be; afterwards the group goes on."""
    starts = 0
    conclude = Worker._conclude

    async def failing(worker: Worker) -> None:
        nonlocal starts
        starts += 1
        if starts <= 10:
            raise RuntimeError("a fault of ours")
        await conclude(worker)

    monkeypatch.setattr(Worker, "_conclude", failing)
    bus, got = await world.open(), Recorder()
    await world.run(bus.subscribe(TOPIC, GROUP, got))
    await world.publish(1)
    await world.clock.advance(4.5)
    assert 4 <= starts <= 6
    await world.clock.advance(10)

    assert (starts, got.offsets) == (11, [0])
