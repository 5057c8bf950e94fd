"""Dead letters: what is kept of them, and how they are tried again."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.bus.support import BUS, GROUP, TOPIC, Recorder, World
from tidings.bus import ReceivedEvent
from tidings.bus.errors import UnknownDeadLetter
from tidings.bus.settings import BusSettings
from tidings.log.embedded.disk import Disk, read_file
from tidings.log.segment import is_whole
from tidings.types import Ack


async def subscribe(world: World, handler: Any, group: str = GROUP, **options: Any) -> None:
    assert world.bus is not None
    options = {"max_retries": 1, "backoff_base": 0.01} | options
    await world.run(world.bus.subscribe(topic=TOPIC, group=group, handler=handler, **options))


async def with_letters(world: World, count: int = 3) -> Recorder:
    """A world in which a group has given up on so many events."""
    await world.open()
    handler = Recorder(fails=lambda _: True)
    await subscribe(world, handler)
    await world.publish(count)
    await world.until(world.drained())
    return handler


@pytest.mark.req("F35", "F36", "F60")
async def test_a_letter_says_what_happened(world: World) -> None:
    """A dead letter has the event, its group and place, the error and where it was raised, and every attempt's error."""
    await with_letters(world, 2)
    assert world.bus is not None

    first, second = await world.bus.dead_letters(TOPIC)

    assert (first.topic, first.group, first.offset, first.seq) == (TOPIC, GROUP, 0, 1)
    assert (first.error, first.error_type, first.retries) == ("no luck with 0", "builtins.RuntimeError", 1)
    assert [attempt.error for attempt in first.attempts] == ["no luck with 0"] * 2
    assert all(attempt.at.startswith("2026-01-01T") for attempt in first.attempts)
    assert first.traceback_digest == second.traceback_digest, "failures at one place in the code are told together"
    assert first.event["payload"] == {"n": 0}
    assert first.event["meta"]["event_id"] == first.event_id
    data = read_file(world.disk, BUS / "dlq" / f"{TOPIC}.dlq.jsonl")
    assert data is not None
    assert all(is_whole(line) for line in data.splitlines())


async def test_letters_can_be_filtered_and_shown(world: World) -> None:
    """Letters are found by group, reason, state and words of the error; one is shown by its id."""
    handler = await with_letters(world, 2)
    bus = world.bus
    assert bus is not None
    await subscribe(world, handler, "other")
    await world.until(world.drained(group="other"))

    assert len(await bus.dead_letters(TOPIC)) == 4
    assert [letter.offset for letter in await bus.dead_letters(TOPIC, "other")] == [0, 1]
    assert [letter.id for letter in await bus.dead_letters(TOPIC, GROUP, error_contains="with 1")] == [f"{GROUP}-1"]
    assert await bus.dead_letters(TOPIC, reason="expired") == []
    assert await bus.dead_letters(TOPIC, states=("dropped",)) == []
    assert (await bus.dead_letter(TOPIC, f"{GROUP}-1")).offset == 1
    with pytest.raises(UnknownDeadLetter):
        await bus.dead_letter(TOPIC, "nobody-1")


async def test_a_dry_run_changes_nothing(world: World) -> None:
    """A dry run names the letters that would be tried again, and tries none."""
    handler = await with_letters(world)
    bus = world.bus
    assert bus is not None
    before = len(handler.events)

    named = await bus.redrive(TOPIC, dry_run=True)
    await world.clock.advance(60)

    assert [letter.offset for letter in named] == [0, 1, 2]
    assert len(handler.events) == before
    assert {letter.state for letter in await bus.dead_letters(TOPIC)} == {"dead"}


async def test_redriven_letters_go_to_their_group_only_and_move_no_cursor(world: World) -> None:
    """One by one or in bulk, letters are handled by the group that failed; its cursor and other groups stay."""
    handler = await with_letters(world)
    bus = world.bus
    assert bus is not None
    other = Recorder()
    await subscribe(world, other, "other")
    await world.until(world.drained(group="other"))
    handler.fails = lambda _: False
    handler.events.clear()
    place = (world.group().cursor.committed, world.group().cursor.ranges)

    await bus.redrive(TOPIC, [f"{GROUP}-1"])
    await world.until(lambda: handler.offsets == [1])
    await bus.redrive(TOPIC)
    await world.until(lambda: len(handler.events) == 3)
    await world.clock.advance(1)

    assert handler.offsets == [1, 0, 2]
    assert [event.attempt for event in handler.events] == [3, 3, 3], "attempts go on from the two before"
    assert other.offsets == [0, 1, 2]
    assert (world.group().cursor.committed, world.group().cursor.ranges) == place
    assert await bus.dead_letters(TOPIC) == []
    assert [letter.redrives for letter in await bus.dead_letters(TOPIC, states=("redriven",))] == [1, 1, 1]


async def test_asking_twice_is_asking_once(world: World) -> None:
    """Two requests at once, and one for what went through already, give one delivery each."""
    handler = await with_letters(world)
    bus = world.bus
    assert bus is not None
    handler.fails = lambda _: False
    handler.events.clear()

    await bus.redrive(TOPIC)
    await bus.redrive(TOPIC)
    await world.clock.advance(1)
    again = await bus.redrive(TOPIC, [f"{GROUP}-0"])
    await world.clock.advance(1)

    assert handler.offsets == [0, 1, 2]
    assert again == []


async def test_many_letters_are_read_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many letters are tried again, or would be, their file is not read once for each of them."""
    count = 40
    handler = await with_letters(world, count)
    bus = world.bus
    assert bus is not None
    handler.fails = lambda _: False
    handler.events.clear()
    reads = 0

    def counted(disk: Disk, path: Path) -> bytes | None:
        nonlocal reads
        reads += 1
        return read_file(disk, path)

    monkeypatch.setattr("tidings.bus.store.dead_letter_files.read_file", counted)
    ids = [f"{GROUP}-{offset}" for offset in range(count)]
    assert len(await bus.redrive(TOPIC, ids, dry_run=True)) == count
    assert reads <= 2
    await bus.redrive(TOPIC)
    await world.until(lambda: len(handler.events) == count)
    await world.clock.advance(1)

    assert handler.offsets == list(range(count))
    assert reads <= 10
    assert await bus.dead_letters(TOPIC) == []


async def test_a_letter_dropped_meanwhile_is_not_tried(world: World) -> None:
    """A letter that is given up while those before it are tried again does not reach its handler."""
    handler = await with_letters(world)
    bus = world.bus
    assert bus is not None

    async def drops_the_last(event: ReceivedEvent) -> Ack:
        handler.events.append(event)
        if event.offset == 0:
            await bus.drop_dead_letters(TOPIC, [f"{GROUP}-2"])
        return Ack()

    handler.events.clear()
    await world.run(bus.unsubscribe(bus.get_subscriptions(TOPIC)[0]))
    await subscribe(world, drops_the_last)
    await bus.redrive(TOPIC)
    await world.clock.advance(1)

    assert handler.offsets == [0, 1]
    assert (await bus.dead_letter(TOPIC, f"{GROUP}-2")).state == "dropped"


async def test_a_letter_that_fails_again_is_dead_again(world: World) -> None:
    """A re-drive is one attempt; a letter that fails it is dead with the new error, and can be asked for once more."""
    handler = await with_letters(world, 1)
    bus = world.bus
    assert bus is not None
    handler.events.clear()

    for _ in range(2):
        await bus.redrive(TOPIC)
        await world.clock.advance(1)

    letter = await bus.dead_letter(TOPIC, f"{GROUP}-0")
    assert handler.attempts_of(0) == [3, 4]
    assert (letter.state, letter.redrives, letter.error) == ("dead", 2, "no luck with 0")


async def test_an_unknown_letter_in_a_list_stops_the_whole_request(world: World) -> None:
    """A list with an unknown id is refused as a whole: none of the others is tried."""
    handler = await with_letters(world)
    bus = world.bus
    assert bus is not None
    handler.events.clear()

    with pytest.raises(UnknownDeadLetter):
        await bus.redrive(TOPIC, [f"{GROUP}-0", "nobody-1"])
    await world.clock.advance(1)

    assert handler.events == []


async def test_a_bulk_redrive_goes_on_after_a_crash(world: World) -> None:
    """What was asked for and not yet tried when the process ended is tried by the next one."""
    handler = await with_letters(world, 5)
    bus = world.bus
    assert bus is not None
    seen: list[int] = []

    async def slow(event: ReceivedEvent) -> Ack:
        seen.append(event.offset)
        await world.clock.sleep(10)
        return Ack()

    await world.run(bus.unsubscribe(bus.get_subscriptions()[0]))
    await bus.redrive(TOPIC)
    await subscribe(world, slow)
    await world.until(lambda: seen == [0, 1, 2])
    await world.kill()
    bus = await world.open()
    handler.fails = lambda _: False
    handler.events.clear()
    await subscribe(world, handler)
    await world.until(lambda: len(handler.events) == 3)
    await world.clock.advance(1)

    assert handler.offsets == [2, 3, 4]
    assert handler.attempts_of(2) == [4], "the try that the crash cut short counts"
    assert await bus.dead_letters(TOPIC) == []


async def test_a_redrive_that_ends_the_process_each_time_is_given_up(world: World) -> None:
    """A letter whose re-drive kills the process is not tried for ever: it is dead again, and says so."""
    await with_letters(world, 1)
    bus = world.bus
    assert bus is not None
    await world.run(bus.unsubscribe(bus.get_subscriptions()[0]))
    await bus.redrive(TOPIC)
    tries: list[int] = []

    async def deadly(event: ReceivedEvent) -> Ack:
        tries.append(event.attempt)
        await world.clock.sleep(1000)
        return Ack()

    for _ in range(5):
        count = len(tries)
        await subscribe(world, deadly)
        await world.clock.advance(1)
        await world.kill()
        bus = await world.open()
        if len(tries) == count:
            break

    letter = await bus.dead_letter(TOPIC, f"{GROUP}-0")
    assert len(tries) == 2, "as many as a first delivery and its one retry"
    assert letter.state == "dead"
    assert "the process ended" in letter.error


async def test_a_dropped_letter_stays_dropped(world: World) -> None:
    """What is given up for good is not tried again, and its file still tells of it."""
    handler = await with_letters(world, 2)
    bus = world.bus
    assert bus is not None
    handler.events.clear()

    await bus.drop_dead_letters(TOPIC, [f"{GROUP}-0"])
    asked = await bus.redrive(TOPIC, [f"{GROUP}-0"])
    await world.clock.advance(1)

    assert asked == []
    assert handler.events == []
    assert [letter.offset for letter in await bus.dead_letters(TOPIC)] == [1]
    assert (await bus.dead_letter(TOPIC, f"{GROUP}-0")).state == "dropped"


async def test_a_letter_outlives_its_record(world: World) -> None:
    """A letter carries its event: the re-drive works when the group is subscribed long after."""
    handler = await with_letters(world, 1)
    await world.close()
    bus = await world.open()
    handler.fails = lambda _: False
    handler.events.clear()
    await bus.redrive(TOPIC)

    await subscribe(world, handler)
    await world.until(lambda: len(handler.events) == 1)

    assert handler.events[0].payload == {"n": 0}


@pytest.mark.req("F131")
async def test_the_cursor_waits_for_a_letter_that_cannot_be_stored(world: World) -> None:
    """While the dead letters' disk fails, the event is not passed over; when it works again the letter is stored once."""
    bus = await world.open()
    world.disk.fail_next("open", errno.EIO, path_contains="dlq", times=3)
    handler = Recorder(fails=lambda event: event.offset == 0)
    await subscribe(world, handler, max_retries=0)
    await world.publish(3)
    await world.clock.advance(1.5)
    assert world.group().cursor.committed == -1
    assert world.group().cursor.ranges == [] or world.group().cursor.ranges == [(1, 2)]

    await world.until(world.drained())

    assert [letter.offset for letter in await bus.dead_letters(TOPIC)] == [0]
    assert handler.attempts_of(0) == [1]


@pytest.mark.req("F131")
async def test_cursors_that_cannot_be_stored_are_stored_later(world: World) -> None:
    """A disk that refuses offset files for a while costs nothing but later saves; delivery goes on."""
    await world.open()
    handler = Recorder()
    await subscribe(world, handler)
    world.disk.fail_next("write", errno.EIO, path_contains="offsets", times=5)
    await world.publish(10)
    await world.until(world.drained())
    await world.clock.advance(2)
    await world.kill()

    await world.open()
    again = Recorder()
    await subscribe(world, again)
    await world.until(world.drained())

    assert handler.offsets == list(range(10))
    assert again.events == []


@pytest.mark.parametrize("is_sought", [False, True])
async def test_a_dead_letter_outlives_a_position_that_was_not_stored(world: World, is_sought: bool) -> None:
    """After a crash between the two, the event is not delivered again, and a redrive delivers it once; after a seek back it is."""
    slow = BusSettings(cursor_interval_ms=60_000)
    bus, got = await world.open(settings=slow), Recorder(fails=lambda event: event.offset == 1)
    await world.run(bus.subscribe(TOPIC, GROUP, got, max_retries=1))
    await world.publish(3)
    await world.until(lambda: got.attempts_of(1) == [1, 2] and 2 in got.offsets)
    await world.until(world.drained())
    await world.kill()

    bus, got = await world.open(settings=slow), Recorder()
    if is_sought:
        await world.clock.advance(1)
        await world.run(bus.seek(TOPIC, GROUP, 0))
    await world.run(bus.subscribe(TOPIC, GROUP, got))
    await world.until(world.drained())
    assert sorted(got.offsets) == ([0, 1, 2] if is_sought else [0, 2])
    (letter,) = await world.run(bus.dead_letters(TOPIC))
    assert letter.offset == 1
    await world.run(bus.redrive(TOPIC, [letter.id]))
    await world.run(bus.drain())

    assert got.offsets.count(1) == (2 if is_sought else 1)
    assert await world.run(bus.dead_letters(TOPIC)) == []
