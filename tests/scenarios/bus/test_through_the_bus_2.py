"""What publishers and groups are promised, shown on a bus: refusals, commit before delivery, order, delays, files."""

from __future__ import annotations

import enum
import errno
import itertools
import json
import random
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from tests.scenarios.bus.support import BUS, GROUP, SETTINGS, TOPIC, Recorder, World, soon
from tidings.bus import EventBus, ReceivedEvent
from tidings.bus.errors import CursorDamaged
from tidings.core.errors import (
    InvalidEvent,
    InvalidName,
    InvalidPayload,
    InvalidTimestamp,
    SettingsError,
    TidingsError,
)
from tidings.core.events import Event, EventMeta, EventType
from tidings.filters import CompoundFilter, CustomFunctionFilter, Filter, JSONPathFilter, SimpleFilter
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.interface import Appended, Duplicate, Refused
from tidings.log.keys import DerivedKeys
from tidings.log.record import Record
from tidings.log.segment import encode_line
from tidings.log.settings import LogSettings
from tidings.middleware import MetricsMiddleware, MiddlewareError, PolicyDenied, PolicyMiddleware, TracingMiddleware
from tidings.types import Ack, Actor, Device, Nack, QoS, SecurityBand


async def subscribe(world: World, handler: Any, group: str = GROUP, topic: str = TOPIC, **options: Any) -> None:
    assert world.bus is not None
    await world.run(world.bus.subscribe(topic=topic, group=group, handler=handler, **options))


# What is refused


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


NAMES: Final[list[Any]] = ["", "a/b", "../up", "/etc/passwd", "a..b", "a b", "a\n", "ä", "a__b", "_a", "-rf", "x" * 129]
TEXTS: Final[list[Any]] = ["", "a\x00", "a\nb", "\ud800", "x" * 300, 7, b"a", ["a"]]
BAD: Final[list[tuple[type[InvalidEvent], str, dict[str, Any]]]] = [
    *((InvalidName, "meta.topic", {"topic": name}) for name in [*NAMES, 7, b"a", None, ["a"]]),
    (InvalidName, "meta.topic", {"topic": "a/b", "type": "", "space_id": "", "payload": {1}}),
    *((InvalidName, "meta.type", {"type": name}) for name in [*NAMES, 7, b"a"]),
    *((InvalidName, "meta.space_id", {"space_id": text}) for text in TEXTS),
    *((InvalidName, "meta.event_id", {"event_id": text}) for text in TEXTS),
    *((InvalidName, "meta.idem_key", {"idem_key": text}) for text in TEXTS),
    *((InvalidName, "meta.partitions", {"partitions": given}) for given in ["one", 7, [""], [7], ["x" * 300]]),
    *((InvalidTimestamp, "meta.ts", {"ts": ts}) for ts in [datetime(2026, 1, 1), "2026-01-01", 7]),  # noqa: DTZ001 - meant
    *((InvalidTimestamp, "meta.ts", {"ts": datetime(year, 1, 1, tzinfo=UTC)}) for year in (1960, 2262, 9999)),
    *((InvalidEvent, "meta.ttl_sec", {"ttl_sec": ttl}) for ttl in [-1, 1.5, "60", True, 2**64]),
    (InvalidEvent, "meta.trace_id", {"trace_id": "\ud800"}),
    *((InvalidEvent, "meta.band", {"band": band}) for band in ["PINK", "green", 7, ["GREEN"]]),
    *((InvalidEvent, "meta.priority", {"priority": given}) for given in [1.5, [1], True]),
    *((InvalidEvent, "meta.qos", {"qos": given}) for given in ["fast", [1], {"priority": 2**70}]),
    *((InvalidEvent, "meta.actor", {"actor": given}) for given in [object(), {"user_id": {1}}]),
    *((InvalidEvent, "meta.extra", {"extra": given}) for given in ["text", ["a"], {"event_id": "mine"}, {7: 1}]),
    (InvalidEvent, "meta.device.at[0]", {"device": {"at": [float("nan")]}}),
    *((InvalidPayload, "payload", {"payload": given}) for given in [[], "text", 7, True, b"{}", None]),
    *(
        (InvalidPayload, "payload.a", {"payload": {"a": given}})
        for given in [{1}, b"a", object(), 1j, len, {1: 2}, 2**64]
    ),
    (InvalidPayload, "payload.list[1].deep", {"payload": {"list": [1, {"deep": float("nan")}]}}),
    (InvalidPayload, "payload.a", {"payload": {"a": float("inf")}}),
    *((InvalidPayload, "payload", {"payload": nested(depth)}) for depth in (129, 10_000)),
    (InvalidPayload, "payload", {"payload": {"blob": "x" * (9 << 20)}}),
]


def spoilt(parts: dict[str, Any]) -> Event:
    envelope: dict[str, Any] = {"topic": TOPIC, "type": "NOTED", "space_id": "shared:home"} | parts
    payload = envelope.pop("payload", {"n": 0})
    return Event(EventMeta(**envelope), payload)


@pytest.mark.req("F6", "F7", "F8", "F13", "F18")
@pytest.mark.parametrize("is_observed", [False, True], ids=["bare", "observed"])
@pytest.mark.parametrize(("kind", "field", "parts"), BAD, ids=[f"{field}-{n}" for n, (_, field, _) in enumerate(BAD)])
async def test_a_bad_event_is_refused_by_the_name_of_its_part(
    world: World, kind: type[InvalidEvent], field: str, parts: dict[str, Any], is_observed: bool
) -> None:
    """Alone it raises, in a list it is ``Refused``; either way nothing of it is stored, and its neighbours are."""
    bus = await world.open(*[TracingMiddleware(), MetricsMiddleware()] if is_observed else [])
    got = Recorder()
    await subscribe(world, got)
    before = bus.log.position

    with pytest.raises(kind) as caught:
        await world.run(bus.publish(spoilt(parts)))
    (alone,) = await world.run(bus.publish_many([spoilt(parts)]))
    assert bus.log.position == before
    assert bus.log.topics() == {}
    verdicts = await world.run(bus.publish_many([world.event(0), spoilt(parts), world.event(1)]))
    await world.until(world.drained())

    assert caught.value.field == field
    assert not caught.value.retryable
    for verdict in (alone, verdicts[1]):
        assert isinstance(verdict, Refused)
        assert (type(verdict.error), str(verdict.error)) == (type(caught.value), str(caught.value))
    assert [type(verdict) for verdict in verdicts] == [Appended, Refused, Appended]
    assert sorted(event.payload["n"] for event in got.events) == [0, 1]
    assert list(bus.log.topics()) == [TOPIC]


@pytest.mark.req("F18", "F82")
async def test_a_policy_may_refuse_a_publish_and_an_attempt(world: World) -> None:
    """A check of one's own refuses events before the log has them, alone and in a list, or before the handler has."""
    bus = await world.open(
        PolicyMiddleware(on_publish=lambda ctx: "no odd ones" if ctx.event.payload["n"] % 2 else None, name="even"),
        PolicyMiddleware(lambda ctx: ctx.event.payload["n"] != 4, name="not_four"),
    )
    got = Recorder()
    await subscribe(world, got)

    with pytest.raises(MiddlewareError, match="no odd ones") as caught:
        await world.run(bus.publish(world.event(1)))
    with pytest.raises(InvalidName):  # nobody is asked about what has no place to go to
        await world.run(bus.publish(world.event(1, topic="a/b")))
    verdicts = await world.run(bus.publish_many([world.event(n) for n in range(2, 7)]))
    await world.until(world.drained())

    assert isinstance(caught.value.cause, PolicyDenied)
    assert not caught.value.retryable
    assert [type(verdict) for verdict in verdicts] == [Appended, Refused, Appended, Refused, Appended]
    assert sorted([event.payload["n"] async for event in bus.replay(TOPIC)]) == [2, 4, 6]
    assert sorted(event.payload["n"] for event in got.events) == [2, 6]
    (letter,) = await bus.dead_letters(TOPIC)
    assert (letter.event["payload"], letter.reason) == ({"n": 4}, "denied")
    assert "not_four" in letter.error


# What is stored


class Mine(enum.StrEnum):
    PARCEL_ARRIVED = enum.auto()


@pytest.mark.req("F1", "F3", "F4", "F5", "F10", "F11", "F14")
async def test_what_was_left_out_and_what_was_given_reach_every_group_alike(world: World) -> None:
    """
    An id and a time are given once, for all groups and later processes. The event that a handler gets is the one that was
    published: equal to it, and with its types.
    """
    bus = await world.open()
    short = Event(EventMeta(topic=TOPIC, type=Mine.PARCEL_ARRIVED, space_id="shared:home"), {"n": 0})
    full = world.event(
        1,
        actor=Actor(user_id="ann", agent_id="agent-1"),
        device=Device(device_id="phone-1", platform="ios"),
        qos=QoS(priority=7, deadline_ms=50),
        band=SecurityBand.AMBER,
    )
    await world.run(bus.publish(short))
    await world.run(bus.publish_many([full]))
    one, two = Recorder(), Recorder()
    await subscribe(world, one, "one")
    await world.until(world.drained(group="one"))
    await world.close()
    await world.open()
    await subscribe(world, two, "two")
    await world.until(world.drained(group="two"))

    assert [event.meta for event in one.events] == [event.meta for event in two.events]
    first, second = (event.meta for event in two.events)
    assert re.fullmatch(r"ev-[0-9a-f]{32}", first.event_id)
    assert first.event_id != second.event_id
    assert first.ts.utcoffset() == timedelta(0)
    assert timedelta(0) <= datetime.now(UTC) - first.ts < timedelta(minutes=5)
    assert (first.type, first.type.name) == ("parcel_arrived",) * 2
    assert two.events[0] == Event(short.meta, {"n": 0}), (
        "its id was made when it was stored, and is known to its publisher"
    )
    assert (two.events[1].meta, two.events[1].payload) == (full.meta, full.payload)
    assert second.type is EventType.ACTION_EXECUTED
    assert (first.actor, first.trace_id, first.idem_key, first.ttl_sec) == (None, None, None, None)
    assert [type(part) for part in (second.actor, second.device, second.qos)] == [Actor, Device, QoS]
    assert second.band is SecurityBand.AMBER


@pytest.mark.req("F19", "F32")
@pytest.mark.parametrize("by_list", [False, True], ids=["one_by_one", "by_list"])
async def test_no_group_sees_what_a_power_cut_could_take_away(world: World, by_list: bool) -> None:
    """Were the power cut at the moment a handler of any group is called, the event would still be there."""
    bus = await world.open()
    cut: list[tuple[int, World]] = []

    async def handler(event: ReceivedEvent) -> Ack:
        cut.append((event.offset, World(disk=world.disk.after_crash("lose_all"))))
        return Ack()

    for group in ("one", "two", "three"):
        await subscribe(world, handler, group)
    await (world.run(bus.publish_many([world.event(n) for n in range(4)])) if by_list else world.publish(4))
    for group in ("one", "two", "three"):
        await world.until(world.drained(group=group))

    assert sorted(offset for offset, _ in cut) == sorted([*range(4)] * 3)
    for offset, after in cut:
        survivor = await after.open()
        assert offset in [event.offset async for event in survivor.replay(TOPIC)]
        await after.close()


@pytest.mark.req("F19", "F32")
@pytest.mark.parametrize("by_list", [False, True], ids=["one_by_one", "by_list"])
async def test_an_event_that_cannot_be_synced_is_seen_by_nobody(world: World, by_list: bool) -> None:
    """When the disk fails the publisher is told, health is red, and no group hears of the event."""
    bus = await world.open()
    got = Recorder()
    await subscribe(world, got)
    await world.publish(1)
    world.disk.fail_next("sync", errno.EIO, path_contains="journal", times=100)

    with pytest.raises(TidingsError):
        await world.run(bus.publish_many([world.event(1)]) if by_list else bus.publish(world.event(1)))
    await world.clock.advance(1)

    assert got.offsets == [0]
    assert not bus.health().is_writable
    assert bus.health().problem


@pytest.mark.req("F16", "F20", "F21", "F46", "F53")
async def test_every_group_gets_the_topic_in_its_order(world: World) -> None:
    """A quick group, a slow one, a latecomer with a small window and one that comes back: all get every event in order."""
    bus = await world.open()
    groups = {name: Recorder() for name in ("quick", "slow", "back", "late")}

    async def slow(event: ReceivedEvent) -> Ack:
        await world.clock.sleep(0.05)
        return await groups["slow"](event)

    await subscribe(world, groups["quick"], "quick")
    await subscribe(world, slow, "slow", max_inflight=300)
    away = await world.run(bus.subscribe(TOPIC, "back", groups["back"]))
    for first in range(0, 120, 20):
        await world.publish(10, first=first)
        await world.run(bus.publish_many([world.event(n) for n in range(first + 10, first + 20)]))
        if first == 40:
            await world.run(bus.unsubscribe(away))
            await subscribe(world, groups["late"], "late", max_inflight=5)
        if first == 80:
            await subscribe(world, groups["back"], "back")
    for name, recorder in groups.items():
        await world.until(world.drained(group=name))
        assert recorder.offsets == [event.payload["n"] for event in recorder.events] == list(range(120)), name


# When it is tried again


class Latest(random.Random):
    """Chance that always draws the longest wait."""

    def uniform(self, a: float, b: float) -> float:
        return b


@pytest.mark.req("F44", "F57", "F59", "F60")
@pytest.mark.parametrize("order", ["none", "key", "strict"])
@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({}, [0.5, 1.0, 2.0, 4.0, 8.0]),
        ({"max_retries": 9}, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]),
        ({"backoff_base": 2.0, "backoff_mult": 3.0, "backoff_max": 10.0, "max_retries": 4}, [2.0, 6.0, 10.0, 10.0]),
        ({"backoff_base": 1.0, "backoff_mult": 1.0, "max_retries": 3}, [1.0, 1.0, 1.0]),
        ({"max_retries": 0}, []),
    ],
    ids=["defaults", "long", "own_curve", "steady", "never"],
)
async def test_the_waits_between_tries_follow_the_curve(
    world: World, options: dict[str, Any], waits: list[float], order: str
) -> None:
    """The longest waits are those of the curve, up to its maximum; then the event is a dead letter, at that moment."""
    world.rng = Latest()
    bus = await world.open()
    times: list[float] = []

    async def handler(_: ReceivedEvent) -> Nack:
        times.append(world.clock.monotonic())
        return Nack()

    await subscribe(world, handler, order=order, **options)
    await world.publish(1)
    await world.until(world.drained())

    assert [later - earlier for earlier, later in itertools.pairwise(times)] == pytest.approx(waits)
    (letter,) = await bus.dead_letters(TOPIC)
    assert letter.retries == len(waits)
    assert letter.failed_at == letter.attempts[-1].at


# Filters


FILTERS: Final[dict[str, tuple[list[Filter], list[int]]]] = {
    "all": ([], [0, 1, 2, 3, 4, 5]),
    "exact": ([SimpleFilter("payload.n", 3)], [3]),
    "more": ([SimpleFilter("payload.n", 3, "gt")], [4, 5]),
    "regex": ([SimpleFilter("payload.word", "^(three|four)$", "regex")], [3, 4]),
    "of_meta": ([SimpleFilter("meta.actor.user_id", "ann")], [0, 2, 4]),
    "path": ([JSONPathFilter("$.payload.items[*].kind", "egg")], [1, 3, 5]),
    "function": ([CustomFunctionFilter(lambda event: event.payload["n"] in (0, 5))], [0, 5]),
    "both": (
        [CompoundFilter("AND", [SimpleFilter("payload.n", 0, "gt"), SimpleFilter("payload.n", 4, "lt")])],
        [1, 2, 3],
    ),
    "either": ([CompoundFilter("OR", [SimpleFilter("payload.n", 1), SimpleFilter("payload.n", 4)])], [1, 4]),
    "not": ([CompoundFilter("NOT", [SimpleFilter("payload.n", 2)])], [0, 1, 3, 4, 5]),
    "each": ([SimpleFilter("payload.n", 1, "gt"), SimpleFilter("payload.n", 4, "lt")], [2, 3]),
}


@pytest.mark.req("F50", "F85", "F86", "F87", "F88", "F89")
@pytest.mark.parametrize("batch", [1, 4])
async def test_every_subscription_has_its_own_filters(world: World, batch: int) -> None:
    """Groups of one topic with filters of every kind get what passes theirs, and are done with all of it."""
    bus = await world.open()
    got: dict[str, list[int]] = {name: [] for name in FILTERS}

    def handler(name: str) -> Any:
        async def handle(given: Any) -> Ack:
            got[name].extend(event.payload["n"] for event in (given if batch > 1 else [given]))
            return Ack()

        return handle

    for name, (filters, _) in FILTERS.items():
        await subscribe(world, handler(name), name, advanced_filters=filters, batch_count_max=batch)
    for n, word in enumerate(["none", "one", "two", "three", "four", "five"]):
        payload = {"n": n, "word": word, "items": [{"kind": "tea"}, {"kind": "egg" if n % 2 else "jam"}]}
        await world.run(bus.publish(world.event(payload=payload, actor={"user_id": "bob" if n % 2 else "ann"})))
    for name in FILTERS:
        await world.until(world.drained(group=name))

    assert got == {name: expected for name, (_, expected) in FILTERS.items()}
    assert await bus.dead_letters(TOPIC) == []


@pytest.mark.req("F90")
@pytest.mark.parametrize("groups", [1, 3])
async def test_filters_look_at_the_same_content_once(
    world: World, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    """
    Of a thousand events with ten different contents a filter that finds nothing decodes ten payloads, in every group its own;
    one that asks about the envelope decodes none.
    """
    bus = await world.open()
    decoded: list[int] = []

    def payload(record: Record) -> Any:
        decoded.append(record.seq)
        return json.loads(bytes(record.payload_json))

    monkeypatch.setattr(Record, "payload", property(payload))
    for n in range(groups):
        by_content = [JSONPathFilter("$.payload.items[*].kind", "egg")]
        await subscribe(world, Recorder(), f"content-{n}", advanced_filters=by_content)
    by_envelope = [SimpleFilter("meta.actor.user_id", "bob")]
    await subscribe(world, Recorder(), "envelope", advanced_filters=by_envelope)
    for _ in range(10):
        events = [world.event(payload={"items": [{"kind": f"tea {n % 10}"}]}) for n in range(100)]
        await world.run(bus.publish_many(events))
    for name in [*(f"content-{n}" for n in range(groups)), "envelope"]:
        await world.until(world.drained(group=name))

    assert len(decoded) == 10 * groups


# Files


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def use(bus: EventBus, got: list[Any], count: int = 3, **payload: Any) -> None:
    """Publish events of which the second becomes a dead letter."""

    async def handler(event: ReceivedEvent) -> Ack | Nack:
        got.append(event.payload)
        return Nack("never") if event.payload["n"] == 1 else Ack()

    await bus.subscribe(TOPIC, GROUP, handler, max_retries=0)
    for n in range(count):
        meta = EventMeta(topic=TOPIC, type="NOTED", space_id=f"space-{n % 2}")
        await bus.publish(Event(meta, {"n": n} | payload))
    await soon(lambda: bus.lag(TOPIC, GROUP) == 0)


@pytest.mark.req("F75")
@pytest.mark.parametrize("by_name", [False, True])
async def test_middlewares_take_part_however_they_are_given(tmp_path: Path, by_name: bool) -> None:
    """Listed by position or by name, a middleware hears of every publish."""
    metrics = MetricsMiddleware()
    made = EventBus(middlewares=[metrics], workspace=tmp_path) if by_name else EventBus([metrics], workspace=tmp_path)
    async with made as bus:
        await use(bus, [])
    assert metrics.registry.get_sample_value("events_publish_count", {"topic": TOPIC}) == 3


@pytest.mark.req("F26", "F27", "F28", "F33", "F35", "F36", "F38")
async def test_the_files_are_where_the_layout_says(tmp_path: Path) -> None:
    """Log, cursor and dead letters of a bus that was used can be found by name and read as JSON, and nothing lies about."""
    async with EventBus(workspace=tmp_path / "w") as bus:
        await use(bus, [])

    files = files_below(tmp_path)
    assert {name.split("/")[1] for name in files} == {".bus"}, "all below one folder"
    wal, offsets, dlq = (
        {name: data for name, data in files.items() if name.startswith(f"w/.bus/{folder}/")}
        for folder in ("wal", "offsets", "dlq")
    )
    assert list(wal) == [f"w/.bus/wal/{TOPIC}.00000001.jsonl"]
    lines = [json.loads(line) for data in wal.values() for line in data.splitlines()]
    stored = [(line["offset"], line["meta"]["topic"], line["payload"]) for line in lines]
    assert stored == [(n, TOPIC, {"n": n}) for n in range(3)]
    cursor = json.loads(offsets[f"w/.bus/offsets/{TOPIC}__{GROUP}.json"])
    assert (cursor["committed"], cursor["segment"]) == (2, 1)
    assert datetime.fromisoformat(cursor["ts"])
    (line,) = dlq[f"w/.bus/dlq/{TOPIC}.dlq.jsonl"].splitlines()
    letter = json.loads(line)["letter"]
    assert (letter["offset"], letter["error"], letter["retries"]) == (1, "never", 0)
    assert letter["event"]["payload"] == {"n": 1}


async def test_sealed_payloads_are_nowhere_in_the_open(tmp_path: Path) -> None:
    """With an encryptor no file holds a payload's text, dead letters included; handlers and re-drives get it all the same."""
    encryptor = AesGcmEncryptor(DerivedKeys(bytes(range(32))))
    got: list[Any] = []
    async with EventBus(workspace=tmp_path, encryptor=encryptor) as bus:
        await use(bus, got, secret="swordfish")
        await bus.redrive(TOPIC)
        await soon(lambda: len(got) == 4)

    assert got == [{"n": n, "secret": "swordfish"} for n in (0, 1, 2, 1)]
    files = files_below(tmp_path)
    assert files[f".bus/wal/{TOPIC}.00000001.jsonl"]
    assert files[f".bus/dlq/{TOPIC}.dlq.jsonl"]
    assert [name for name, data in files.items() if b"swordfish" in data] == []


@pytest.mark.req("F39")
async def test_spaces_can_have_folders_of_their_own(tmp_path: Path) -> None:
    """With space-scoped paths no file holds events of two spaces; groups get the topic in order, also after a restart."""
    settings = LogSettings(layout="space", journal_bytes=1 << 20)
    got: list[Any] = []
    async with EventBus(workspace=tmp_path, log_settings=settings) as bus:
        await use(bus, got, 6)
    again = Recorder()
    async with EventBus(workspace=tmp_path, log_settings=settings) as bus:
        await bus.subscribe(TOPIC, "late", again)
        await soon(lambda: bus.lag(TOPIC, "late") == 0)

    folders: dict[str, set[str]] = {}
    for name, data in files_below(tmp_path / ".bus" / "wal").items():
        if name.endswith(".jsonl"):
            spaces = {json.loads(line)["meta"]["space_id"] for line in data.splitlines()}
            folders.setdefault(name.rpartition("/")[0], set()).update(spaces)
    assert sorted(map(sorted, folders.values())) == [["space-0"], ["space-1"]]
    assert [payload["n"] for payload in got] == again.offsets == list(range(6))


@pytest.mark.req("F29", "F30")
@pytest.mark.parametrize(
    ("limits", "text", "lines"),
    [
        ({"segment_lines_max": 4}, "", [4, 4, 2]),
        ({"segment_bytes_max": 1_000_000}, "x" * 300_000, [3, 3, 3, 1]),
        ({"segment_bytes_max": 100_000_000}, "x" * 300_000, [10]),
    ],
    ids=["lines", "1 MB", "100 MB"],
)
async def test_a_full_segment_is_followed_by_a_new_one(
    world: World, limits: dict[str, Any], text: str, lines: list[int]
) -> None:
    """A bus with a limit on lines or on bytes cuts its files there; a group reads across them, in order."""
    settings = LogSettings(journal_bytes=1 << 20, journal_count_max=2, **limits)
    bus = await world.open(log_settings=settings)
    got = Recorder()
    await subscribe(world, got)
    for n in range(10):
        await world.run(bus.publish(world.event(payload={"n": n, "text": text})))
    await world.until(world.drained())
    await world.close()

    files = sorted((BUS / "wal").joinpath(name) for name in world.disk.names(BUS / "wal") if name.startswith(TOPIC))
    assert [file.name for file in files] == [f"{TOPIC}.{n:08}.jsonl" for n in range(1, len(lines) + 1)]
    assert [world.disk.read_all(file).count(b"\n") for file in files] == lines
    assert got.offsets == list(range(10))


@pytest.mark.req("F30")
@pytest.mark.parametrize("size", [999_999, 100_000_001])
async def test_a_byte_limit_out_of_range_is_refused_by_the_bus(tmp_path: Path, size: int) -> None:
    """Below 1 MB or above 100 MB a bus does not start, and makes no file."""
    bus = EventBus(workspace=tmp_path / "w", log_settings=LogSettings(segment_bytes_max=size))
    with pytest.raises(SettingsError, match="segment_bytes_max"):
        await bus.start()
    assert not (tmp_path / "w").exists()


@pytest.mark.req("F70")
async def test_publishing_and_restarting_again_and_again_comes_to_the_same(world: World) -> None:
    """Each life sends all events once more, cuts and restores the same segments, and is killed: nothing is stored twice."""
    settings = LogSettings(segment_lines_max=3, journal_bytes=1 << 20, journal_count_max=2)
    got = Recorder()
    contents: list[bytes] = []
    for life in range(4):
        bus = await world.open(log_settings=settings)
        await subscribe(world, got)
        sent = [await world.run(bus.publish(world.event(n, event_id=f"e{n}"))) for n in range(10)]
        await world.until(world.drained())
        stored = [json.dumps(dict(event.payload)).encode() async for event in bus.replay(TOPIC)]
        assert [verdict.offset for verdict in sent] == list(range(10))
        assert {type(verdict) for verdict in sent} == {Appended if life == 0 else Duplicate}
        contents.append(b"".join(stored))
        if life == 2:
            await world.close()
        else:
            await world.kill()
    segments = [world.disk.read_all(BUS / "wal" / f"{TOPIC}.{n:08}.jsonl") for n in range(1, 5)]

    assert len(set(contents)) == 1
    assert [data.count(b"\n") for data in segments] == [3, 3, 3, 1]
    assert sorted(set(got.offsets)) == list(range(10))


@pytest.mark.req("F31")
async def test_default_limits_make_few_files_and_write_each_once(world: World) -> None:
    """A bus left at its defaults starts a second file after 50,000 events, and never touches the first again."""
    bus = await world.open(log_settings=SETTINGS)
    first, second = (BUS / "wal" / f"{TOPIC}.{n:08}.jsonl" for n in (1, 2))
    for _ in range(10):
        await world.run(bus.publish_many([world.event(n) for n in range(5000)]))
    await world.publish(1)
    await world.until(lambda: world.disk.exists(second))
    calls = world.disk.calls
    await world.publish(100)
    await world.close()

    assert world.disk.read_all(first).count(b"\n") == 50_000
    assert world.disk.read_all(second).count(b"\n") == 101
    touched = [call.op for call in world.disk.trace if call.number > calls and call.path == first]
    assert set(touched) <= {"sync"}


@pytest.mark.req("F74")
async def test_events_of_a_later_version_are_handled_and_those_of_this_one_carry_more(world: World) -> None:
    """Keys that a later writer adds to an event are passed over by a group of today; keys in ``extra`` reach those who ask."""
    bus = await world.open()
    await world.publish(3, extra={"mood": "calm"})
    await world.close()
    file = BUS / "wal" / f"{TOPIC}.00000001.jsonl"
    lines = world.disk.read_all(file).splitlines()
    later = [
        line[18:]
        .replace(b',"ts":', b',"tone":{"of":["voice"]},"ts":')
        .replace(b'"payload":', b'"sealed_by":7,"payload":')
        for line in lines
    ]
    world.disk.write_all(file, b"".join(encode_line(line) for line in later))
    world.disk.remove(BUS / "checkpoint.json")  # it knows the file's old size

    bus = await world.open()
    got = Recorder()
    await subscribe(world, got)
    await world.publish(1, first=3)
    await world.until(world.drained())

    assert [(event.offset, event.payload) for event in got.events] == [(n, {"n": n}) for n in range(4)]
    assert [event.meta.extra for event in got.events] == [{"mood": "calm"}] * 3 + [None]
    assert await bus.dead_letters(TOPIC) == []


@pytest.mark.req("F137")
async def test_an_edited_cursor_is_noticed_by_a_bus_with_a_key(world: World) -> None:
    """Whoever sets a group on by hand, checksum and all, lacks the key: it is refused, and no event is passed over."""
    key = bytes(range(32))
    bus = await world.open(offsets_key=key)
    await subscribe(world, Recorder())
    await world.publish(2)
    await world.until(world.drained())
    await world.run(bus.unsubscribe(bus.get_subscriptions()[0]))
    await world.publish(2, first=2)
    await world.close()
    file = BUS / "offsets" / f"{TOPIC}__{GROUP}.json"
    own = world.disk.read_all(file)
    content = {name: value for name, value in json.loads(own).items() if name != "crc"} | {"committed": 3}
    world.disk.write_all(file, encode_line(json.dumps(content).encode()[1:]))

    await world.open(offsets_key=key)
    with pytest.raises(CursorDamaged):
        await subscribe(world, Recorder())
    await world.close()
    world.disk.write_all(file, own)
    await world.open(offsets_key=key)
    got = Recorder()
    await subscribe(world, got)
    await world.until(world.drained())
    assert got.offsets == [2, 3]


async def test_health_names_a_group_that_stands_still(world: World) -> None:
    """A group whose backlog cannot be read loses nothing, and health says which group it is and why."""
    await world.open()
    await world.publish(3)
    await world.close()
    bus = await world.open()
    assert bus.health().problem is None
    world.disk.fail_next("open", errno.EIO, path_contains="wal", times=10)
    got = Recorder()
    await subscribe(world, got)
    await world.clock.advance(1)

    assert re.search(f"{GROUP}.*Input/output error", bus.health().problem or "")
    assert (got.offsets, bus.lag(TOPIC, GROUP)) == ([], 3)
