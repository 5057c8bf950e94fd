"""An event that is published with a delay is published once, at its time, whatever happens in between."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.integration.cli.support import invoke
from tests.scenarios.bus.support import SETTINGS, TOPIC, Recorder, World, soon
from tidings.access.errors import AccessUnavailable
from tidings.bus import EventBus
from tidings.bus.delayed import DelayedEvents
from tidings.bus.delayed_records import DelayedEvent, PublisherIdentity
from tidings.bus.errors import BusClosed, ReservedGroup
from tidings.bus.store import GroupPosition
from tidings.core.clock import datetime_of
from tidings.core.errors import InvalidEvent, InvalidTimestamp
from tidings.core.events import Event, EventMeta
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.errors import IdConflict, StorageFull
from tidings.log.interface import Appended, Duplicate, Query
from tidings.log.keys import KeyFile
from tidings.log.reading import records
from tidings.log.settings import TopicRetention
from tidings.middleware import Middleware, MiddlewareError, PublishContext
from tidings.testing import VirtualClock

MINUTE = timedelta(minutes=1)


async def stored(world: World, topic: str = TOPIC) -> list[tuple[str, str]]:
    """The events of a topic: id and when it was written."""
    assert world.log is not None
    found = [record async for record in records(world.log, Query(topic=topic))]
    return [(record.meta.event_id, record.meta.written_at) for record in found]


def later(world: World, delay: timedelta) -> str:
    moment = datetime_of(world.clock.now_ns()) + delay
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def test_it_is_published_at_its_time(world: World) -> None:
    """With a delay or a time, an event reaches its group then and not before, under the id that was answered."""
    bus, got = await world.open(), Recorder()
    await world.run(bus.subscribe(TOPIC, "learner", got))
    now = datetime_of(world.clock.now_ns())
    second = await world.run(bus.publish(TOPIC, {"n": 2}, type="T", space="s", at=now + 2 * MINUTE, priority=7))
    first = await world.run(bus.publish(TOPIC, {"n": 1}, type="T", space="s", delay=MINUTE, actor="device:phone"))
    expected = [(first.event_id, later(world, MINUTE)), (second.event_id, later(world, 2 * MINUTE))]

    await world.clock.advance(59.9)
    assert got.events == []
    assert [each.event_id async for each in bus.delayed_events()] == [second.event_id, first.event_id]
    await world.clock.advance(121)

    assert await stored(world) == expected
    assert [(event.meta.event_id, dict(event.payload)) for event in got.events] == [
        (first.event_id, {"n": 1}),
        (second.event_id, {"n": 2}),
    ]
    assert [event.meta.ts for event in got.events] == [now + MINUTE, now + 2 * MINUTE]
    assert (got.events[0].meta.actor, got.events[1].meta.priority) == ("device:phone", 7)
    assert [each async for each in bus.delayed_events()] == []


async def test_what_is_due_at_once_comes_in_the_order_given(world: World) -> None:
    """Events that are due at the same moment are published in the order in which they were given; what is due already, at once."""
    bus = await world.open()
    due = datetime_of(world.clock.now_ns()) + MINUTE
    answers = [await world.run(bus.publish(world.event(n, event_id=f"e-{9 - n}"), at=due)) for n in range(5)]
    past = await world.run(bus.publish(world.event(event_id="past"), at=due - 2 * MINUTE))

    await world.clock.advance(61)

    assert [event_id for event_id, _ in await stored(world)] == ["past", *(answer.event_id for answer in answers)]
    assert past.offset == 0


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("down_s", [10.0, 3600.0])
async def test_it_survives_the_process(world: World, is_killed: bool, down_s: float) -> None:
    """After a restart, an event that is not due yet is published at its time, and one that was due meanwhile at once; each once."""
    bus = await world.open()
    await world.run(bus.publish(world.event(event_id="later"), delay=MINUTE))
    due = later(world, MINUTE)
    await (world.kill() if is_killed else world.close())
    await world.clock.advance(down_s)

    started = later(world, timedelta())
    await world.open()
    await world.clock.advance(300)

    assert await stored(world) == [("later", max(due, started))]
    await world.kill()
    await world.open()
    await world.clock.advance(300)
    assert len(await stored(world)) == 1


async def test_a_crash_between_publishing_and_saying_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that was published, and whose process ended before that was noted, is not published again."""
    bus = await world.open()
    await world.run(bus.publish(world.event(event_id="once"), delay=MINUTE))
    never = asyncio.get_running_loop().create_future()
    with monkeypatch.context() as patch:
        patch.setattr(DelayedEvents, "_settle", lambda *_: never)
        await world.clock.advance(61)
        assert len(await stored(world)) == 1
        await world.kill()

    await world.open()
    await world.clock.advance(300)

    assert [event_id for event_id, _ in await stored(world)] == ["once"]
    # And it is known to be settled by now: nothing is tried when the next process starts.
    assert world.bus is not None
    assert [each async for each in world.bus.delayed_events()] == []


async def test_one_that_is_stored_and_not_yet_answered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event whose process ends between storing it and answering is published at its time, whatever was settled around it."""
    bus = await world.open()
    log, never = world.log, asyncio.get_running_loop().create_future()
    assert log is not None
    append = log.append

    async def append_and_hang(event: Event, **options: Any) -> Any:
        appended = await append(event, **options)
        if event.meta.type == "DELAYED_HELD" and "hangs" in str(event.meta.extra):
            await never
        return appended

    monkeypatch.setattr(log, "append", append_and_hang)
    await world.run(bus.publish(world.event(event_id="other"), delay=MINUTE))
    hanging = asyncio.ensure_future(bus.publish(world.event(event_id="hangs"), delay=2 * MINUTE))
    await world.clock.advance(61)
    assert [event_id for event_id, _ in await stored(world)] == ["other"]
    hanging.cancel()
    await world.kill()

    await world.open()
    await world.clock.advance(61)

    assert [event_id for event_id, _ in await stored(world)] == ["other", "hangs"]


async def test_a_bus_that_is_closed_meanwhile(world: World) -> None:
    """Closing ends the wait and leaves no task behind; a bus that closes holds nothing more, and what it held is published by the next."""
    bus = await world.open()
    await world.run(bus.publish(world.event(event_id="held"), delay=MINUTE))
    running = bus._running
    assert running is not None
    await world.close()
    with pytest.raises(BusClosed):
        await running.delayed.hold(world.event(), world.clock.now_ns() + 10**12, None)
    await world.clock.advance(61)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "delayed events"]

    await world.open()
    await world.clock.advance(1)

    assert [event_id for event_id, _ in await stored(world)] == ["held"]


@pytest.mark.parametrize("ends", ["not", "closed", "killed"])
async def test_a_cancelled_event_is_never_published(world: World, ends: str) -> None:
    """Cancelling says whether the event was still waiting; if so it is not published, also after a restart."""
    bus = await world.open()
    for event_id in ("a", "b"):
        await world.run(bus.publish(world.event(event_id=event_id), delay=MINUTE))
    assert await world.run(bus.cancel_delayed("a")) is True
    assert await world.run(bus.cancel_delayed("a")) is False
    assert await world.run(bus.cancel_delayed("unknown")) is False
    if ends != "not":
        await (world.kill() if ends == "killed" else world.close())
        bus = await world.open()

    await world.clock.advance(61)

    assert [event_id for event_id, _ in await stored(world)] == ["b"]
    assert await world.run(bus.cancel_delayed("b")) is False


async def test_a_clock_that_is_set(world: World) -> None:
    """It goes by the wall clock: after a jump back it waits until the clock shows the time, and a jump past that makes it due; once."""
    bus = await world.open()
    await world.run(bus.publish(world.event(event_id="e"), delay=MINUTE))

    world.clock.jump(-86_400)
    await world.clock.advance(70)
    assert await stored(world) == []
    world.clock.jump(86_400)
    await world.clock.advance(5)
    assert len(await stored(world)) == 1
    world.clock.jump(-86_400)
    await world.clock.advance(70)
    assert len(await stored(world)) == 1


async def test_given_again_it_is_the_same_event(world: World) -> None:
    """An id or a key that is given again says the same event: it is a duplicate, and the first time counts. Another event is refused."""
    bus = await world.open()
    first = await world.run(bus.publish(world.event(1, event_id="e"), delay=MINUTE))
    again = await world.run(bus.publish(world.event(1, event_id="e"), delay=5 * MINUTE))
    by_key = await world.run(bus.publish(TOPIC, {"n": 2}, type="T", space="s", idem_key="k", delay=MINUTE))
    key_again = await world.run(bus.publish(TOPIC, {"n": 2}, type="T", space="s", idem_key="k", delay=MINUTE))
    due = later(world, MINUTE)
    with pytest.raises(IdConflict, match="'e' already"):
        await world.run(bus.publish(world.event(2, event_id="e"), delay=MINUTE))

    assert isinstance(first, Appended)
    assert again == Duplicate(first.seq, first.offset, "e")
    assert isinstance(key_again, Duplicate)
    assert key_again.event_id == by_key.event_id
    await world.clock.advance(600)
    assert await stored(world) == [("e", due), (by_key.event_id, due)]


async def test_the_id_of_a_published_event(world: World) -> None:
    """An id that was published already is answered as without a delay, and nothing waits: a duplicate, or refused for another event."""
    bus = await world.open()
    first = await world.run(bus.publish(world.event(1, event_id="e")))

    again = await world.run(bus.publish(world.event(1, event_id="e"), delay=MINUTE))
    with pytest.raises(IdConflict, match="'e' already"):
        await world.run(bus.publish(world.event(2, event_id="e"), delay=MINUTE))

    assert again == Duplicate(first.seq, first.offset, "e")
    assert [each async for each in bus.delayed_events()] == []


async def test_published_meanwhile_it_cannot_be_cancelled(world: World) -> None:
    """An event that somebody published without a delay while it waited is not told as cancelled, and is not published again."""
    bus = await world.open()
    await world.run(bus.publish(world.event(1, event_id="e"), delay=MINUTE))
    await world.run(bus.publish(world.event(1, event_id="e")))

    assert not await world.run(bus.cancel_delayed("e"))
    assert [each async for each in bus.delayed_events()] == []
    await world.clock.advance(61)
    assert [event_id for event_id, _ in await stored(world)] == ["e"]


async def test_retention_keeps_what_waits(world: World) -> None:
    """Segments of what is settled go, those with an event that still waits stay, and it is published after that."""
    settings = replace(SETTINGS, segment_lines_max=4, retention={"*": TopicRetention(consumed=True)})
    bus = await world.open(log_settings=settings)
    for n in range(8):
        await world.run(bus.publish(world.event(n), delay=MINUTE))
    await world.run(bus.publish(world.event(event_id="waits"), delay=10 * MINUTE))
    await world.clock.advance(61)
    for n in range(20):
        await world.run(bus.publish(world.event(n), delay=MINUTE))
    await world.clock.advance(61)
    await world.close()

    bus = await world.open(log_settings=settings)
    plan = await world.run(bus.compact())

    dropped = [drop.segment.last_offset for drop in plan.drops if drop.segment.topic == "schedule"]
    assert dropped == [3, 7]
    await world.clock.advance(600)
    assert "waits" in [event_id for event_id, _ in await stored(world)]
    await world.run(bus.compact())
    assert [each async for each in bus.delayed_events()] == []


async def test_a_slow_group_holds_up_no_other(world: World) -> None:
    """A topic whose group is stuck, with its window full, still gets its delayed events, and so do others."""
    bus = await world.open()
    stuck: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(event: Event) -> None:
        await stuck

    await world.run(bus.subscribe(TOPIC, "slow", wait, max_inflight=1))
    await world.publish(1)
    for topic in (TOPIC, TOPIC, "other"):
        await world.run(bus.publish(world.event(topic=topic), delay=MINUTE))

    await world.clock.advance(61)

    assert (len(await stored(world)), len(await stored(world, "other"))) == (3, 1)
    stuck.set_result(None)


async def test_middleware_sees_it_when_it_is_given(world: World) -> None:
    """Hooks run once, when the event is handed in: they may change or refuse it, and the caller hears of that."""
    seen: list[str] = []

    class Stamp(Middleware):
        async def before_publish(self, context: PublishContext) -> None:
            seen.append(context.event.meta.event_id)
            if context.event.payload["n"] == 0:
                raise InvalidEvent("payload.n", "is nothing")
            context.event = Event(context.event.meta, {"n": 100})

    bus, got = await world.open(Stamp()), Recorder()
    await world.run(bus.subscribe(TOPIC, "learner", got))
    await world.run(bus.publish(world.event(1, event_id="e"), delay=MINUTE))
    with pytest.raises(MiddlewareError, match="is nothing"):
        await world.run(bus.publish(world.event(0), delay=MINUTE))

    await world.clock.advance(61)

    assert [dict(event.payload) for event in got.events] == [{"n": 100}]
    assert seen.count("e") == 1


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        ({"delay": timedelta(seconds=-1)}, InvalidEvent, "delay"),
        ({"delay": 5}, InvalidEvent, "delay"),
        ({"delay": timedelta.max}, InvalidEvent, "delay"),
        ({"at": datetime(2030, 1, 1)}, InvalidTimestamp, "at"),  # noqa: DTZ001 - that is the fault
        ({"at": "tomorrow"}, InvalidTimestamp, "at"),
        ({"at": datetime(2262, 1, 1, tzinfo=UTC)}, InvalidTimestamp, "at"),
        ({"at": datetime(2030, 1, 1, tzinfo=UTC), "delay": MINUTE}, InvalidEvent, "at"),
        ({"delay": MINUTE, "topic": "schedule"}, InvalidEvent, "meta.topic"),
        ({"delay": MINUTE, "ttl_sec": -1}, InvalidEvent, "meta.ttl_sec"),
        ({"delay": MINUTE, "payload": {"n": float("nan")}}, InvalidEvent, "payload"),
    ],
)
async def test_what_cannot_be_published_then_is_refused_now(
    world: World, options: dict[str, Any], kind: type[InvalidEvent], field: str
) -> None:
    """A delay or time that is none, and an event that the log would refuse later, are refused at once, and nothing is stored."""
    bus = await world.open()
    when = {name: options.pop(name) for name in ("delay", "at") if name in options}
    with pytest.raises(kind) as refused:
        await world.run(bus.publish(world.event(**options), **when))

    assert refused.value.field.startswith(field)
    assert await stored(world, "schedule") == []


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """Keys for one space."""
    path = tmp_path / "keys.json"
    for command in (("create", path), ("add", path, "shared:secret")):
        assert invoke("key", *command).exit_code == 0
    return path


async def test_a_delayed_event_of_a_sealed_space_is_sealed(
    tmp_path: Path, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits is encrypted like everything of its space; without the key it keeps waiting, and with it it is published."""
    workspace, clock = tmp_path / "w", VirtualClock()
    encryptor = AesGcmEncryptor(KeyFile(key_file))
    event = Event(EventMeta("notes", "NOTE", "shared:secret", "e"), {"text": "a plain word"})

    async with EventBus(workspace=workspace, encryptor=encryptor, clock=clock) as bus:
        await bus.publish(event, delay=MINUTE)
    assert b"a plain word" not in b"".join(path.read_bytes() for path in workspace.rglob("*") if path.is_file())
    await clock.advance(61)
    async with EventBus(workspace=workspace, clock=clock) as bus:
        await soon(lambda: "a delayed event cannot be read" in caplog.text)
        assert [record async for record in records(bus.log, Query(topic="notes"))] == []
    async with EventBus(workspace=workspace, encryptor=encryptor, clock=clock) as bus:
        got = Recorder()
        await bus.subscribe("notes", "all", got)
        await soon(lambda: bool(got.events))
        assert dict(got.events[0].payload) == {"text": "a plain word"}


async def test_what_is_due_after_a_restart_is_published_in_the_order_of_its_times(world: World) -> None:
    """Events that became due while no process ran: by their times, whatever the order in which they were given."""
    bus = await world.open()
    hours = [4, 1, 3, 2, 1]
    for n, hour in enumerate(hours):
        await world.run(bus.publish(world.event(n, event_id=f"{hour}-{n}"), delay=timedelta(hours=hour)))
    await world.kill()
    await world.clock.advance(5 * 3600)

    await world.open()
    await world.clock.advance(1)

    assert [event_id for event_id, _ in await stored(world)] == ["1-1", "1-4", "2-3", "3-2", "4-0"]


async def test_a_cancellation_that_fails_leaves_the_event_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk when an event, or all of a publisher, are cancelled: the error is raised, and they are published at their time."""
    bus = await world.open()
    ann = PublisherIdentity(subject="ann")
    for event_id in ("e", "f"):
        await world.run(bus.publish(world.event(event_id=event_id), delay=MINUTE, publisher=ann))

    async def full(*_: object) -> None:
        raise StorageFull("/data")

    with monkeypatch.context() as patch:
        patch.setattr(DelayedEvents, "_settle", full)
        for cancelling in (bus.cancel_delayed("e"), bus._started_now.delayed.cancel_of("ann")):
            with pytest.raises(StorageFull):
                await world.run(cancelling)
        assert [each.event_id async for each in bus.delayed_events()] == ["e", "f"]
    await world.clock.advance(61)

    assert [event_id for event_id, _ in await stored(world)] == ["e", "f"]
    assert bus.delayed_count_of("ann") == 0


async def test_a_caller_that_gives_up_leaves_an_event_that_is_published(world: World) -> None:
    """A publish that is cancelled while it is stored counts no longer than the event waits, and holds up no retention."""
    bus = await world.open()
    publishing = asyncio.ensure_future(
        bus.publish(world.event(event_id="e"), delay=MINUTE, publisher=PublisherIdentity(subject="ann"))
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    publishing.cancel()
    await asyncio.wait([publishing])
    await world.clock.advance(61)

    assert [event_id for event_id, _ in await stored(world)] == ["e"]
    assert (bus.delayed_count_of("ann"), bus._started_now.delayed._unsettled) == (0, {})


async def test_an_event_that_may_be_published_later_is_retried(world: World) -> None:
    """While its rights are unknown, an event is checked again every five seconds; it can be cancelled meanwhile."""
    asked: list[str] = []

    def authorise(delayed: DelayedEvent) -> None:
        asked.append(delayed.event_id)
        if len(asked) < 4:
            raise AccessUnavailable("the book is closed")

    bus = await world.open(authorise_delayed=authorise)
    for event_id in ("e", "f"):
        await world.run(bus.publish(world.event(event_id=event_id), delay=MINUTE))
    await world.clock.advance(61)
    assert (asked, await stored(world)) == (["e", "f"], [])
    assert await world.run(bus.cancel_delayed("f")) is True
    await world.clock.advance(11)

    assert asked == ["e", "f", "e", "e"]
    assert [event_id for event_id, _ in await stored(world)] == ["e"]


async def test_a_delayed_event_of_a_shredded_space_is_given_up(tmp_path: Path, key_file: Path) -> None:
    """Without any key of its space the event is settled when it is due: it no longer keeps the records of the topic."""
    workspace, clock, keys = tmp_path / "w", VirtualClock(), KeyFile(key_file)
    event = Event(EventMeta("notes", "NOTE", "shared:secret", "e"), {"text": "a plain word"})
    async with EventBus(workspace=workspace, encryptor=AesGcmEncryptor(keys), clock=clock) as bus:
        await bus.publish(event, delay=MINUTE)
    keys.shred("shared:secret")
    await clock.advance(61)

    for _ in range(2):
        async with EventBus(workspace=workspace, encryptor=AesGcmEncryptor(keys), clock=clock) as bus:
            await soon(lambda bus=bus: bus.delayed_count == 0)  # type: ignore[misc]
            await soon(lambda bus=bus: not bus._started_now.delayed._waiting)  # type: ignore[misc]
            assert "notes" not in bus.log.topics()
    async with EventBus(workspace=workspace, encryptor=AesGcmEncryptor(keys), clock=clock) as bus:
        position = await bus.position_of("schedule", "delayed")
        assert isinstance(position, GroupPosition)
        assert position.cursor.committed == 1


async def test_the_group_of_delayed_events_is_reserved(world: World) -> None:
    """Nobody subscribes to it, joins, seeks or pauses it, or deletes it while an event waits; the event is published after a crash."""
    bus = await world.open()
    await world.run(bus.publish(world.event(event_id="e"), delay=MINUTE))
    schedule = ("schedule", "delayed")

    async def handle(event: Event) -> None:
        raise AssertionError

    for refused in (
        bus.subscribe(*schedule, handle),
        bus.join(*schedule, handle),
        bus.seek(*schedule, 1),
        bus.admin.seek(*schedule, "latest", dry_run=True),
        bus.pause(*schedule),
        bus.resume(*schedule),
        bus.delete_group(*schedule),
    ):
        with pytest.raises(ReservedGroup, match="kept by the bus"):
            await world.run(refused)
    with pytest.raises(ReservedGroup):
        bus.subscriber("schedule", group="delayed")(handle)
    await world.run(bus.subscribe("schedule", "other", Recorder()))
    await world.kill()
    bus = await world.open()
    await world.clock.advance(90)

    assert [event_id for event_id, _ in await stored(world)] == ["e"]
    await world.close()
    bus = await world.open()
    await world.run(bus.delete_group(*schedule))
    assert schedule not in await bus.groups()


@pytest.mark.parametrize(
    "payload", [{}, {"meta": 7, "payload": {}}, {"meta": {}, "payload": {}}, {"meta": {"topic": "a b", "type": "T"}}]
)
async def test_a_record_that_holds_no_event_stops_no_other(world: World, payload: dict[str, Any]) -> None:
    """A record of that type that another program wrote is neither listed nor published, and the events beside it are."""
    bus = await world.open()
    due_ms = world.clock.now_ns() // 10**6 + 60_000
    for due, event_id in ((due_ms, "broken"), (10**17, "never")):
        extra = {"due_ms": due, "publishes": event_id, "publisher": None}
        meta = EventMeta("schedule", "DELAYED_HELD", "shared:home", f"held-{event_id}", extra=extra)
        await world.run(bus.log.append(Event(meta, payload)))
    await world.kill()
    bus = await world.open()
    await world.run(bus.publish(world.event(event_id="e"), delay=MINUTE))

    assert [each.event_id async for each in bus.delayed_events()] == ["e"]
    await world.clock.advance(300)

    assert [event_id for event_id, _ in await stored(world)] == ["e"]
