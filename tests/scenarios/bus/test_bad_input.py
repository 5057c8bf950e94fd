"""Handlers, middleware, filters, names and files that are not what they should be: each has one outcome."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.bus.support import BUS, GROUP, TOPIC, Recorder, World, soon
from tidings.bus import EventBus, ReceivedEvent
from tidings.bus.errors import BusClosed, CursorDamaged, SubscriptionExists, TopicMismatch
from tidings.bus.filtering import InvalidFilter
from tidings.core.errors import InvalidName, InvalidPayload, SettingsError
from tidings.core.events import Event, EventMeta, EventType
from tidings.filters import CustomFunctionFilter, SimpleFilter
from tidings.log import LogSettings
from tidings.log.embedded.disk import read_file, replace_file
from tidings.log.errors import CorruptLog, EpochMismatch, WorkspaceBusy
from tidings.log.segment import encode_line
from tidings.middleware import Middleware
from tidings.types import Ack


async def subscribe(world: World, handler: Any, group: str = GROUP, topic: str = TOPIC, **options: Any) -> None:
    assert world.bus is not None
    await world.run(world.bus.subscribe(topic=topic, group=group, handler=handler, **options))


@pytest.mark.parametrize("answer", [True, "Ack", Ack, [Ack()], {"ack": True}])
async def test_a_wrong_answer_is_a_failed_attempt(world: World, answer: object) -> None:
    """A handler that returns something else than Ack or Nack has not acknowledged anything."""
    bus = await world.open()

    async def handler(_: ReceivedEvent) -> object:
        return answer

    await subscribe(world, handler, max_retries=1)
    await world.publish(1)
    await world.until(world.drained())

    (letter,) = await bus.dead_letters(TOPIC)
    assert letter.error_type.endswith("InvalidAnswer")
    assert "neither Ack() nor Nack()" in letter.error


async def test_a_handler_that_returns_nothing_has_acknowledged(world: World) -> None:
    """Its event is done with after one attempt, and no dead letter."""
    bus = await world.open()
    got: list[int] = []

    async def handler(event: ReceivedEvent) -> None:
        got.append(event.offset)

    await subscribe(world, handler)
    await world.publish(2)
    await world.until(world.drained())

    assert got == [0, 1]
    assert await bus.dead_letters(TOPIC) == []


@pytest.mark.parametrize("answer", ["short", "word"])
async def test_a_wrong_answer_for_a_batch_fails_each_of_its_events(world: World, answer: str) -> None:
    """A batch handler that answers for too many, or with a word, has acknowledged none."""
    bus = await world.open()

    async def handler(events: list[ReceivedEvent]) -> object:
        return {"short": [Ack()] * (len(events) + 1), "word": "done"}[answer]

    await subscribe(world, handler, batch_count_max=4, max_retries=0)
    await world.publish(3)
    await world.until(world.drained())

    assert [letter.offset for letter in await bus.dead_letters(TOPIC)] == [0, 1, 2]


async def test_a_handler_that_hangs_holds_up_its_worker_only(world: World) -> None:
    """Without a deadline a hanging handler keeps one worker; others go on, and closing does not wait for ever."""
    await world.open()
    got: list[int] = []

    async def handler(event: ReceivedEvent) -> Ack:
        if event.offset == 0:
            await asyncio.Event().wait()
        got.append(event.offset)
        return Ack()

    await subscribe(world, handler, workers=2)
    await world.publish(5)
    await world.until(lambda: len(got) == 4)
    started = world.clock.monotonic()
    await world.close(timeout_s=3)
    assert world.clock.monotonic() - started == pytest.approx(3, abs=0.1)

    await world.open()
    again = Recorder()
    await subscribe(world, again)
    await world.until(world.drained())
    assert again.offsets == [0]


async def test_a_handler_that_will_not_stop_is_left_behind(world: World) -> None:
    """A handler that swallows its cancellation cannot keep the bus from closing."""
    bus = await world.open()
    release = asyncio.Event()

    async def handler(_: ReceivedEvent) -> Ack:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return Ack()

    await subscribe(world, handler)
    await world.publish(1)
    await world.until(lambda: world.group().handling == 1)
    started = world.clock.monotonic()

    await world.run(bus.close(1))

    assert world.clock.monotonic() - started < 5
    release.set()


async def test_a_handler_that_was_left_behind_changes_nothing_when_it_ends(world: World) -> None:
    """Its answer comes after the group's place was stored, so it does not count: the event comes again, and is no dead letter."""
    bus = await world.open()
    release = asyncio.Event()
    tasks: list[asyncio.Task[object] | None] = []

    async def handler(_: ReceivedEvent) -> Ack:
        tasks.append(asyncio.current_task())
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        raise ValueError("too late")

    await subscribe(world, handler, max_retries=0)
    await world.publish(1)
    await world.until(lambda: world.group().handling == 1)
    await world.run(bus.close(0))

    release.set()
    (task,) = tasks
    assert task is not None
    await world.run(asyncio.wait([task]))
    assert task.cancelled()
    await world.close()
    again = await world.open()
    assert await again.dead_letters(TOPIC) == []


async def test_a_plain_function_runs_beside_the_loop() -> None:
    """A handler that blocks as a plain function holds up its own worker, not the loop or another group."""
    world = World()
    bus = await world.open()
    release = threading.Event()
    blocked: list[int] = []

    def block(event: ReceivedEvent) -> Ack:
        release.wait(30)
        blocked.append(event.offset)
        return Ack()

    got = Recorder()
    await bus.subscribe(topic=TOPIC, group="blocked", handler=block)
    await bus.subscribe(topic=TOPIC, group="free", handler=got)
    for n in range(3):
        await bus.publish(world.event(n))
    await soon(lambda: bus.lag(TOPIC, "free") == 0)
    assert blocked == []
    release.set()
    await soon(lambda: bus.lag(TOPIC, "blocked") == 0)
    assert blocked == [0, 1, 2]
    await world.close()


async def test_a_coroutine_that_blocks_the_loop_delays_everything_and_loses_nothing(world: World) -> None:
    """A coroutine that blocks stops the whole loop for that time; when it returns all goes on, and nothing is missing."""
    await world.open()
    other = Recorder()
    release = threading.Event()

    async def handler(event: ReceivedEvent) -> Ack:
        if event.offset == 0:
            threading.Timer(0.01, release.set).start()
            release.wait(30)
        return Ack()

    await subscribe(world, handler)
    await subscribe(world, other, "other")
    await world.publish(5)
    await world.until(world.drained())
    await world.until(world.drained(group="other"))

    assert other.offsets == list(range(5))


@pytest.mark.parametrize("max_inflight", [1, 2, 100])
async def test_a_handler_may_publish_to_its_own_topic(world: World, max_inflight: int) -> None:
    """A handler that publishes to its own topic never waits for itself, however small the window."""
    bus = await world.open()
    got: list[int] = []

    async def handler(event: ReceivedEvent) -> Ack:
        got.append(event.payload["n"])
        if event.payload["n"] < 20:
            await bus.publish(world.event(event.payload["n"] + 1))
        return Ack()

    await subscribe(world, handler, max_inflight=max_inflight, workers=1)
    await world.publish(1)
    await world.until(lambda: len(got) == 21)

    assert got == list(range(21))


class Broken(Middleware):
    """A middleware that raises in one of its hooks."""

    name = "broken"

    def before_handle(self, ctx: Any) -> None:
        if ctx.event.offset == 1:
            raise ValueError("broken before")


@pytest.mark.req("F84")
async def test_a_middleware_that_raises_is_a_failed_attempt(world: World) -> None:
    """An error in a middleware counts like one in the handler, which is not called; the event ends as a dead letter."""
    bus = await world.open(Broken())
    got = Recorder()

    await subscribe(world, got, max_retries=2)
    await world.publish(3)
    await world.until(world.drained())

    assert got.offsets == [0, 2]
    (letter,) = await bus.dead_letters(TOPIC)
    assert (letter.offset, letter.retries) == (1, 2)
    assert "broken before" in letter.error


@pytest.mark.req("F50", "F89")
async def test_a_filter_that_never_matches_lets_the_group_pass_everything(world: World) -> None:
    """Events that a filter keeps out are done with: the cursor passes them, and nothing piles up."""
    await world.open()
    got = Recorder()

    await subscribe(world, got, advanced_filters=[SimpleFilter("payload.n", -1, "exact")], max_inflight=3)
    await world.publish(50)
    await world.until(world.drained())

    assert got.events == []
    assert world.group().cursor.committed == 49
    assert world.group().filtered_count == 50


async def test_a_filter_that_raises_is_a_failed_attempt(world: World) -> None:
    """Whether an event passes a broken filter is not known, so it is not passed over."""
    bus = await world.open()

    def broken(event: Event) -> bool:
        raise LookupError("no such thing")

    await subscribe(world, Recorder(), advanced_filters=[CustomFunctionFilter(broken, "broken")], max_retries=0)
    await world.publish(1)
    await world.until(world.drained())

    assert len(await bus.dead_letters(TOPIC)) == 1


async def test_a_key_function_that_raises_stops_nobody(world: World) -> None:
    """An event without a key keeps the order of its space; the feed and other groups go on."""
    await world.open()
    got, other = Recorder(), Recorder()

    await subscribe(world, got, order="key", workers=3, key_of=lambda event: event.payload["missing"])
    await subscribe(world, other, "other")
    await world.publish(5)
    await world.until(world.drained())
    await world.until(world.drained(group="other"))

    assert got.offsets == other.offsets == list(range(5))


async def test_odd_priorities_stop_nobody(world: World) -> None:
    """A priority that is no number or known word counts as a middling one."""
    await world.open()
    got = Recorder()

    await subscribe(world, got, by_priority=True)
    odd: list[dict[str, Any]] = [{"priority": "purple"}, {"qos": {"priority": "high"}}, {"qos": {"priority": [1]}}]
    for n, meta in enumerate(odd):
        await world.publish(1, first=n, **meta)
    await world.until(world.drained())

    assert sorted(got.offsets) == [0, 1, 2]


@pytest.mark.parametrize("name", ["../up", "a/b", "", "a__b", "a.", "/etc/passwd", "x" * 200, "nul\0", None, 7])
async def test_a_group_name_cannot_be_a_path(world: World, name: Any) -> None:
    """A group name that would lead out of the folder, or break the file name, is refused before anything is made."""
    bus = await world.open()

    with pytest.raises(InvalidName):
        await bus.subscribe(topic=TOPIC, group=name, handler=Recorder())

    assert await bus.groups() == []
    assert bus.get_subscriptions() == []


@pytest.mark.req("F7", "F8", "F17", "F18")
async def test_what_cannot_be_stored_is_refused_before_anything_is_written(world: World) -> None:
    """A bad topic, a payload that is no JSON, another topic than the event's own: each is refused, nothing is stored."""
    bus = await world.open()

    with pytest.raises(InvalidName):
        await bus.publish(world.event(topic="no/path"))
    with pytest.raises(InvalidPayload):
        await bus.publish(world.event(payload={"x": object()}))
    with pytest.raises(TopicMismatch):
        await bus.publish(world.event(), "elsewhere")

    assert bus.log.position.seq == 0


async def test_a_group_has_one_subscription_a_bus(world: World) -> None:
    """A second subscription of a group is refused, also when both ask at the same moment."""
    bus = await world.open()

    both = await asyncio.gather(
        bus.subscribe(topic=TOPIC, group=GROUP, handler=Recorder()),
        bus.subscribe(topic=TOPIC, group=GROUP, handler=Recorder()),
        return_exceptions=True,
    )

    assert [type(each) for each in both].count(SubscriptionExists) == 1
    assert len(bus.get_subscriptions()) == 1


async def test_one_joins_while_another_leaves(world: World) -> None:
    """Whoever takes a group over waits until the one before has stored its place: no event is handled by both."""
    bus = await world.open()
    got: list[str] = []

    def handler(name: str) -> Any:
        async def handle(event: ReceivedEvent) -> Ack:
            await world.clock.sleep(1)
            got.append(f"{name}{event.offset}")
            return Ack()

        return handle

    await subscribe(world, handler("old"))
    await world.publish(4)
    await world.until(lambda: len(got) == 1)

    async def swap() -> None:
        leaving = asyncio.create_task(bus.unsubscribe(bus.get_subscriptions()[0]))
        await asyncio.sleep(0)
        await bus.subscribe(topic=TOPIC, group=GROUP, handler=handler("new"))
        await leaving

    await world.run(swap())
    await world.until(world.drained())

    assert got == ["old0", "old1", "new2", "new3"]


async def test_one_that_leaves_slowly_does_not_take_a_newcomers_feed_away(world: World) -> None:
    """While one group is still leaving, the topic may be left by all and begun anew; the newcomer is fed and can leave."""
    bus = await world.open()

    async def slow(_: ReceivedEvent) -> Ack:
        await world.clock.sleep(5)
        return Ack()

    got = Recorder()
    leaver = await world.run(bus.subscribe(TOPIC, "slow", slow))
    quick = await world.run(bus.subscribe(TOPIC, "quick", Recorder()))
    await world.publish(1)
    await world.until(lambda: world.group(group="slow").handling == 1)

    async def swap() -> None:
        leaving = asyncio.create_task(bus.unsubscribe(leaver))
        await asyncio.sleep(0)
        await bus.unsubscribe(quick)
        newcomer = await bus.subscribe(TOPIC, "new", got)
        await leaving
        await bus.publish(world.event(1))
        while bus.lag(TOPIC, "new"):
            await world.clock.sleep(0.01)
        assert await bus.unsubscribe(newcomer)

    await world.run(swap())

    assert got.offsets == [0, 1]


async def test_topics_survive_any_coming_and_going(world: World) -> None:
    """Groups that leave slowly do not take away the feed of those that came meanwhile."""
    bus = await world.open()
    rng = random.Random(3)
    counts = {name: Recorder() for name in "abc"}

    async def come_and_go(name: str) -> None:
        for _ in range(15):
            subscription = await bus.subscribe(topic=TOPIC, group=name, handler=counts[name])
            await world.clock.sleep(rng.random())
            await bus.unsubscribe(subscription)
            await world.clock.sleep(rng.random() * 0.2)
        await bus.subscribe(topic=TOPIC, group=name, handler=counts[name])

    async def publish() -> None:
        for n in range(200):
            await bus.publish(world.event(n))
            await world.clock.sleep(rng.random() * 0.05)

    await world.run(asyncio.wait_for(asyncio.gather(*(come_and_go(name) for name in "abc"), publish()), None))
    for name in "abc":
        await world.until(world.drained(group=name))
        assert counts[name].offsets == list(range(200))


# Offset files

FILE = BUS / "offsets" / f"{TOPIC}__{GROUP}.json"
BACKUP = FILE.with_name(FILE.name + ".bak")


async def with_a_place(world: World, count: int = 5) -> None:
    """A world in which a group is done with so many events, and everything is closed."""
    await world.open()
    await subscribe(world, Recorder())
    await world.publish(count)
    await world.until(world.drained())
    await world.close()


@pytest.mark.req("F69")
@pytest.mark.parametrize("damage", [b"", b"{", b'{"committed": 4}', bytes(200), b"\n"])
async def test_a_damaged_offset_file_is_passed_over_for_its_backup(world: World, damage: bytes) -> None:
    """An offset file that is empty or cut leads to the last intact one; what was acknowledged since comes again."""
    await with_a_place(world)
    backup = read_file(world.disk, BACKUP)
    assert backup is not None
    place = json.loads(backup)["committed"]
    replace_file(world.disk, FILE, damage)
    await world.open()
    await world.publish(2, first=5)
    got = Recorder()

    await subscribe(world, got)
    await world.until(world.drained())

    assert got.offsets == list(range(place + 1, 7)), "all since the backup, and nothing before it"
    assert world.group().cursor.committed == 6
    await world.close()
    assert read_file(world.disk, BACKUP) != damage, "what was damaged does not become the backup"


async def test_a_group_without_a_whole_file_is_not_guessed(world: World) -> None:
    """With file and backup both damaged the group is refused by name, nothing is moved, and seeking repairs it."""
    await with_a_place(world)
    replace_file(world.disk, FILE, b"")
    replace_file(world.disk, BACKUP, b"{")
    bus = await world.open()

    with pytest.raises(CursorDamaged) as caught:
        await subscribe(world, Recorder())
    assert caught.value.path == str(FILE)
    assert caught.value.hint is not None
    assert bus.get_subscriptions() == []

    await world.run(bus.seek(TOPIC, GROUP, 3))
    got = Recorder()
    await subscribe(world, got)
    await world.until(world.drained())
    assert got.offsets == [3, 4]


async def test_an_offset_file_from_the_future_is_evidence_of_loss(world: World) -> None:
    """A place beyond the log says that events are gone: the log refuses to open, as for any lost data."""
    await with_a_place(world)
    epoch = await epoch_of(world)
    replace_file(world.disk, FILE, encode_line(b'"committed":99,"segment":1,"ts":"","epoch":"%b"}' % epoch.encode()))

    with pytest.raises(CorruptLog):
        await world.open()


async def epoch_of(world: World) -> str:
    bus = await world.open()
    epoch = bus.log.position.epoch
    await world.close()
    return epoch


async def test_an_offset_file_of_another_epoch_is_refused(world: World) -> None:
    """A place that was counted in another life of the log is refused, never guessed."""
    await with_a_place(world)
    replace_file(world.disk, FILE, encode_line(b'"committed":2,"segment":1,"ts":"","epoch":"of-old"}'))
    await world.open()

    with pytest.raises(EpochMismatch):
        await subscribe(world, Recorder())


async def test_a_second_process_is_told_who_has_the_workspace(tmp_path: Path) -> None:
    """A bus on a workspace that another one has open gets a typed answer with a hint, and nothing is changed."""
    first = EventBus(workspace=tmp_path)
    await first.start()
    second = EventBus(workspace=tmp_path)

    with pytest.raises(WorkspaceBusy) as caught:
        await second.publish(Event(EventMeta(topic=TOPIC, type=EventType.ACTION_EXECUTED, space_id="s"), {}))

    assert caught.value.hint is not None
    await first.close()
    await second.start()
    await second.close()


async def test_a_closed_bus_is_not_opened_by_a_late_publisher(world: World) -> None:
    """After closing, publishing and subscribing are refused; only starting opens the bus again."""
    bus = await world.open()
    await world.run(bus.close())

    with pytest.raises(BusClosed):
        await bus.publish(world.event())
    with pytest.raises(BusClosed):
        await bus.subscribe(topic=TOPIC, group=GROUP, handler=Recorder())
    await bus.start()
    await world.publish(1)


@pytest.mark.parametrize("layout", ["flat", "space"])
async def test_the_longest_names_make_files(tmp_path: Path, layout: str) -> None:
    """
    A topic, a group and a space with names as long as they may be have all their files: segments, seals, kept ids, a
    cursor that is saved and saved again, dead letters.
    """
    topic, group, space = "t" * 128, "g" * 112, "s" * 128
    settings = LogSettings(journal_bytes=1 << 20, segment_lines_max=2, layout=layout)  # type: ignore[arg-type]

    handled = Recorder(fails=lambda event: event.offset == 1)
    for count in (5, 10):
        async with EventBus(workspace=tmp_path, log_settings=settings) as bus:
            await bus.subscribe(topic, group, handled, max_retries=0)
            await bus.publish_many([Event(EventMeta(topic, "NOTED", space, partitions=["p"]), {}) for _ in range(5)])
            async with asyncio.timeout(60):
                while len(handled.events) < count or not await bus.dead_letters(topic):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0)
            await bus.compact()
            assert await bus.groups() == [(topic, group)]
            assert [letter.offset for letter in await bus.dead_letters(topic)] == [1]


async def test_a_group_and_topic_too_long_for_a_file_are_refused(tmp_path: Path) -> None:
    """Two names that are too long together are refused before anything is stored, and the limit is told."""
    async with EventBus(workspace=tmp_path) as bus:
        with pytest.raises(InvalidName, match="241 characters together with its topic; at most 240 are allowed"):
            await bus.subscribe("t" * 128, "g" * 113, Recorder())
        with pytest.raises(InvalidName, match="at most 240"):
            await bus.seek("t" * 128, "g" * 113, 0)
        assert await bus.groups() == []


@pytest.mark.parametrize(
    ("option", "error"), [({"advanced_filters": [5]}, InvalidFilter), ({"key_of": 5}, SettingsError)]
)
async def test_a_subscription_that_is_refused_makes_no_group(
    world: World, option: dict[str, Any], error: type[Exception]
) -> None:
    """What nobody runs and nobody has would hold the topic's events for ever."""
    bus = await world.open()
    with pytest.raises(error):
        await subscribe(world, Recorder(), **option)
    assert await bus.groups() == []
    assert bus.get_subscriptions() == []
