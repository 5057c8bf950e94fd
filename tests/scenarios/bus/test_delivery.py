"""What a group gets, when, and how often."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.scenarios.bus.support import GROUP, TOPIC, Recorder, World
from tidings.bus import BusSettings, KeyMemory, ReceivedEvent, TopicPolicy, once
from tidings.bus.errors import UnknownGroup
from tidings.core.clock import datetime_of
from tidings.core.errors import InvalidTimestamp, SettingsError
from tidings.middleware import Decision, HandleContext, Middleware, Outcome
from tidings.types import Ack, Nack


async def subscribe(world: World, handler: Any, group: str = GROUP, topic: str = TOPIC, **options: Any) -> None:
    assert world.bus is not None
    await world.run(world.bus.subscribe(topic=topic, group=group, handler=handler, **options))


@pytest.mark.req("F16", "F20", "F21", "F46", "F53")
async def test_every_group_gets_every_event_once_in_order(world: World) -> None:
    """Two groups of a topic each get all of its events, in order, whatever the other does."""
    await world.open()
    one, two = Recorder(), Recorder()
    await subscribe(world, one, "one")
    await subscribe(world, two, "two")

    assert await world.publish(20) == list(range(20))
    await world.until(world.drained(group="one"))
    await world.until(world.drained(group="two"))

    assert one.offsets == two.offsets == list(range(20))
    assert {event.attempt for event in one.events} == {1}


@pytest.mark.req("F45", "F52", "F54", "F68")
async def test_a_group_goes_on_where_it_left_off(world: World) -> None:
    """After a restart a group gets exactly what it has not acknowledged, also what came while it was away."""
    await world.open()
    before = Recorder()
    await subscribe(world, before)
    await world.publish(5)
    await world.until(world.drained())
    await world.close()
    await world.open()
    await world.publish(3, first=5)
    after = Recorder()

    await subscribe(world, after)
    await world.until(world.drained())

    assert before.offsets == [0, 1, 2, 3, 4]
    assert after.offsets == [5, 6, 7]


@pytest.mark.parametrize(("start", "expected"), [("earliest", [0, 1, 2, 3]), ("latest", [3]), (1, [1, 2, 3])])
async def test_a_new_group_begins_where_it_is_told(world: World, start: str | int, expected: list[int]) -> None:
    """A new group begins at the start of the topic, at its end, or at an offset; one with a place ignores the option."""
    bus = await world.open()
    await world.publish(3)
    got = Recorder()

    await subscribe(world, got, start=start)
    await world.publish(1, first=3)
    await world.until(world.drained())
    await world.run(bus.unsubscribe(bus.get_subscriptions()[0]))
    again = Recorder()
    await subscribe(world, again, start="earliest")
    await world.publish(1, first=4)
    await world.until(world.drained())

    assert got.offsets == expected
    assert again.offsets == [4]


async def test_a_place_beyond_the_end_of_the_topic_is_refused(world: World) -> None:
    """A group cannot begin, or be set, beyond what was published; and nothing is left of the try."""
    bus = await world.open()
    await world.publish(3)

    with pytest.raises(SettingsError, match="beyond"):
        await subscribe(world, Recorder(), start=9)

    got = Recorder()
    await subscribe(world, got)
    with pytest.raises(SettingsError, match="beyond"):
        await bus.seek(TOPIC, GROUP, 9)
    await world.until(world.drained())
    await world.close()
    await world.open()

    assert got.offsets == [0, 1, 2]


@pytest.mark.req("F43", "F47")
async def test_workers_share_the_events_of_a_group(world: World) -> None:
    """Workers handle events side by side, each event with one of them."""
    await world.open()
    at_once, most, got = 0, 0, []

    async def slow(event: ReceivedEvent) -> Ack:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await world.clock.sleep(1)
        at_once -= 1
        got.append(event.offset)
        return Ack()

    await subscribe(world, slow, workers=4)
    await world.publish(12)
    started = world.clock.monotonic()
    await world.until(world.drained())

    assert sorted(got) == list(range(12))
    assert most == 4
    assert world.clock.monotonic() - started < 4


@pytest.mark.req("F54", "F126")
async def test_the_mark_waits_for_the_first_gap(world: World) -> None:
    """Later events that are done do not move the mark past an earlier one; after a crash only the gap comes again."""
    await world.open()
    release = asyncio.Event()
    first: list[int] = []

    async def handler(event: ReceivedEvent) -> Ack:
        first.append(event.offset)
        if event.offset == 1:
            await release.wait()
        return Ack()

    await subscribe(world, handler, workers=3)
    await world.publish(6)
    await world.until(lambda: world.group().cursor.early_count == 4)
    assert world.group().cursor.committed == 0
    assert world.group().cursor.ranges == [(2, 5)]
    await world.clock.advance(0.2)  # the cursor is written
    await world.kill()

    await world.open()
    again = Recorder()
    await subscribe(world, again)
    await world.until(world.drained())

    assert again.offsets == [1]
    assert again.attempts_of(1) == [2], "the attempt that the crash cut short counts"


@pytest.mark.req("F55", "F56", "F59", "F60", "F126")
@pytest.mark.parametrize("answer", [Nack("not now"), RuntimeError("not now")], ids=["nack", "raise"])
async def test_a_failing_event_is_tried_six_times_and_buried(world: World, answer: Nack | Exception) -> None:
    """A first delivery and five retries, for a Nack as for a raised error; then a dead letter, and the group moves on."""
    bus = await world.open()
    seen: list[tuple[int, int]] = []

    async def handler(event: ReceivedEvent) -> Ack | Nack:
        seen.append((event.offset, event.attempt))
        if event.offset != 1:
            return Ack()
        if isinstance(answer, Exception):
            raise answer
        return answer

    await subscribe(world, handler)
    await world.publish(3)
    await world.until(world.drained())
    letters = await bus.dead_letters(TOPIC)

    assert [attempt for offset, attempt in seen if offset == 1] == [1, 2, 3, 4, 5, 6]
    assert seen[:3] == [(0, 1), (1, 1), (2, 1)], "what fails holds nobody up"
    assert [(letter.offset, letter.group, letter.retries) for letter in letters] == [(1, GROUP, 5)]
    assert [attempt.error for attempt in letters[0].attempts] == ["not now"] * 6


@pytest.mark.req("F57", "F58")
async def test_retries_come_within_their_growing_caps(world: World) -> None:
    """The delays before the retries are drawn from zero up to 0.5, 1, 2, 4 and 8 seconds, and differ."""
    await world.open()
    times: list[float] = []

    async def handler(_: ReceivedEvent) -> Nack:
        times.append(world.clock.monotonic())
        return Nack()

    await subscribe(world, handler)
    delays: list[list[float]] = []
    for n in range(20):
        times.clear()
        await world.publish(1, first=n)
        await world.until(world.drained())
        delays.append([later - earlier for earlier, later in itertools.pairwise(times)])

    for retry, cap in enumerate([0.5, 1, 2, 4, 8]):
        drawn = [each[retry] for each in delays]
        assert max(drawn) <= cap
        assert max(drawn) > cap * 0.6
        assert min(drawn) < cap * 0.4


async def test_a_nack_may_name_its_own_delay(world: World) -> None:
    """A handler that knows when it will be ready says so, and is not called before."""
    await world.open()
    times: list[float] = []

    async def handler(_: ReceivedEvent) -> Ack | Nack:
        times.append(world.clock.monotonic())
        return Ack() if len(times) == 2 else Nack("busy", delay_s=60)

    await subscribe(world, handler)
    await world.publish(1)
    await world.until(world.drained())

    assert times[1] - times[0] == pytest.approx(60)


async def test_strict_order_lets_nothing_overtake(world: World) -> None:
    """In strict order a retry holds up what comes after it, whatever the number of workers asked for."""
    await world.open()
    got = Recorder(fails=lambda event: event.offset == 1 and event.attempt < 3)

    await subscribe(world, got, order="strict", workers=4)
    await world.publish(4)
    await world.until(world.drained())

    assert got.offsets == [0, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("batch", [1, 3])
async def test_order_by_key_is_kept_while_keys_go_in_parallel(world: World, batch: int) -> None:
    """Events of one key come one after another, retries included; another key does not wait for them."""
    await world.open()
    got: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
    done: list[int] = []

    async def one(event: ReceivedEvent) -> Ack:
        key = event.payload["n"] % 4
        got[key].append(event.offset)
        await world.clock.sleep(0.01)
        if event.offset == 4 and event.attempt < 4:
            raise RuntimeError("again")
        done.append(event.offset)
        return Ack()

    async def many(events: list[ReceivedEvent]) -> list[Any]:
        return list(await asyncio.gather(*(one(event) for event in events), return_exceptions=True))

    handler = one if batch == 1 else many
    await subscribe(world, handler, order="key", workers=4, batch_count_max=batch, key_of=lambda e: e.payload["n"] % 4)
    await world.publish(16)
    await world.until(world.drained())

    if batch == 1:
        assert got[0] == [0, 4, 4, 4, 4, 8, 12]
    assert [offset for offset in done if offset % 4 == 1] == [1, 5, 9, 13]
    assert sorted(done) == list(range(16))
    assert got[0].index(12) > max(at for at, offset in enumerate(got[0]) if offset == 4)
    assert done.index(1) < done.index(4)


@pytest.mark.parametrize("batch", [1, 2])
async def test_a_handler_past_its_deadline_is_stopped_and_the_event_tried_again(world: World, batch: int) -> None:
    """An event not acknowledged in time goes back, counts as tried, and is handled by whoever is free."""
    await world.open(settings=BusSettings(topics={TOPIC: TopicPolicy(ack_deadline_ms=1000)}))
    attempts: list[int] = []

    async def handler(given: Any) -> Ack:
        event = given[0] if batch > 1 else given
        attempts.append(event.attempt)
        if event.attempt == 1:
            await asyncio.Event().wait()
        return Ack()

    await subscribe(world, handler, workers=2, batch_count_max=batch)
    await world.publish(1)
    await world.until(world.drained(), seconds_max=5)

    assert attempts == [1, 2]
    assert world.group().stats.timed_out == 1


@pytest.mark.req("F62", "F126")
@pytest.mark.parametrize("policy", ["drop", "dead_letter"])
async def test_an_expired_event_is_dropped_or_buried_by_the_topics_policy(world: World, policy: Any) -> None:
    """An event older than its ttl_sec never reaches the handler; the topic says whether it is dropped or buried."""
    bus = await world.open(settings=BusSettings(topics={TOPIC: TopicPolicy(expired=policy)}))
    await world.publish(1, ttl_sec=10)
    await world.publish(1, first=1, ttl_sec=1000)
    await world.clock.advance(60)
    got = Recorder()

    await subscribe(world, got)
    await world.until(world.drained())
    letters = await bus.dead_letters(TOPIC, reason="expired")

    assert got.offsets == [1]
    assert world.group().stats.expired == 1
    assert [letter.offset for letter in letters] == ([0] if policy == "dead_letter" else [])


async def test_one_event_with_an_age_among_many_without_expires(world: World) -> None:
    """Groups that keep up with plain events look at the age of the one that has a limit, wherever it stands in the commit."""
    bus = await world.open()
    got: list[int] = []
    opened = asyncio.Event()

    async def handler(event: ReceivedEvent) -> Ack:
        await opened.wait()
        got.append(event.offset)
        return Ack()

    subscription = await world.run(bus.subscribe(topic=TOPIC, group=GROUP, handler=handler, workers=1))
    await world.until(lambda: world.group().is_live)
    for first in (0, 4, 8):
        events = [world.event(n) for n in range(first, first + 4)]
        if first == 4:
            events[1].meta.ttl_sec = 10
        await world.run(bus.publish_many(events))
    await world.clock.advance(60)
    opened.set()
    await world.until(world.drained())

    assert got == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert subscription.group_state is not None
    assert subscription.group_state.stats.expired == 1


@pytest.mark.req("F135")
async def test_urgent_events_are_taken_first(world: World) -> None:
    """Among the events that wait, the one with the highest priority is next; equals keep their order."""
    bus = await world.open()
    got = Recorder()
    await subscribe(world, got, by_priority=True)
    await bus.pause(TOPIC, GROUP)
    metas: list[dict[str, Any]] = [{}, {"priority": 9}, {"priority": "low"}, {"priority": 9}, {"qos": {"priority": 7}}]
    for n, meta in enumerate(metas):
        await world.publish(1, first=n, **meta)
    await world.until(lambda: world.group().pending == 5)

    await bus.resume(TOPIC, GROUP)
    await world.until(world.drained())

    assert got.offsets == [1, 3, 4, 0, 2]


@pytest.mark.req("F135")
async def test_events_without_a_priority_have_their_topics(world: World) -> None:
    """A topic's policy says how urgent its events are where they do not say so themselves."""
    bus = await world.open(settings=BusSettings(topics={TOPIC: TopicPolicy(priority=8)}))
    got = Recorder()
    await subscribe(world, got, by_priority=True)
    await bus.pause(TOPIC, GROUP)
    metas: list[dict[str, Any]] = [{"priority": 7}, {}, {"priority": 9}, {"priority": "unheard of"}]
    for n, meta in enumerate(metas):
        await world.publish(1, first=n, **meta)
    await world.until(lambda: world.group().pending == 4)

    await bus.resume(TOPIC, GROUP)
    await world.until(world.drained())

    assert got.offsets == [2, 1, 3, 0]


@pytest.mark.req("F64")
async def test_a_handler_acts_once_for_each_key(world: World) -> None:
    """A key that was acknowledged is acknowledged again without the handler; one that failed is tried again."""
    bus = await world.open()
    acted: list[tuple[int, int]] = []

    async def act(event: ReceivedEvent) -> Ack:
        acted.append((event.offset, event.attempt))
        if event.attempt == 1:
            raise RuntimeError("not yet")
        await world.clock.sleep(1)
        return Ack()

    await subscribe(world, once(act, KeyMemory(100)), backoff_base=5.0)
    await world.publish(1, idem_key="same")
    await world.until(world.drained())
    await world.run(bus.seek(TOPIC, GROUP, 0))
    await world.until(world.drained())

    assert acted == [(0, 1), (0, 2)]


@pytest.mark.req("F64")
async def test_the_same_key_of_another_space_is_another_event(world: World) -> None:
    """Keys belong to their space: a handler that acts once acts once for each of them."""
    await world.open()
    got = Recorder()
    await subscribe(world, once(got))
    for space in ("shared:a", "shared:b"):
        await world.publish(1, idem_key="same", space_id=space)
    await world.until(world.drained())

    assert got.offsets == [0, 1]


@pytest.mark.parametrize("is_first_good", [True, False])
async def test_two_groups_that_act_once_with_one_memory_do_not_fail_each_other(
    world: World, is_first_good: bool
) -> None:
    """The second waits for the first: it acknowledges what that has done, or does it itself; none becomes a dead letter."""
    bus = await world.open()
    acted: list[str] = []

    async def act(event: ReceivedEvent) -> None:
        acted.append(event.group)
        await world.clock.sleep(60)
        if len(acted) == 1 and not is_first_good:
            raise RuntimeError("not yet")

    handler = once(act)
    for group in ("a", "b"):
        await world.run(bus.subscribe(TOPIC, group, handler, max_retries=1, backoff_base=0.0))
    await world.publish(1, idem_key="same")
    await world.until(world.drained(group="a"))
    await world.until(world.drained(group="b"))

    assert acted == (["a"] if is_first_good else ["a", "b"])
    assert await world.run(bus.dead_letters(TOPIC)) == []


@pytest.mark.req("F133")
async def test_batches_are_answered_one_by_one(world: World) -> None:
    """A batch handler gets up to so many events, and answers for each; what it refuses comes again alone."""
    bus = await world.open()
    batches: list[list[int]] = []

    async def handler(events: list[ReceivedEvent]) -> list[Ack | Nack]:
        batches.append([event.offset for event in events])
        return [Nack("odd") if event.offset == 3 and event.attempt < 3 else Ack() for event in events]

    await subscribe(world, handler, batch_count_max=5)
    await bus.pause(TOPIC, GROUP)
    await world.publish(12)
    await world.until(lambda: world.group().pending == 12)
    await bus.resume(TOPIC, GROUP)
    await world.until(world.drained())

    assert batches[0] == [0, 1, 2, 3, 4]
    assert [batch for batch in batches if 3 in batch] == [[0, 1, 2, 3, 4], [3], [3]]
    assert max(map(len, batches)) == 5
    assert sorted({offset for batch in batches for offset in batch}) == list(range(12))


async def test_a_paused_group_gets_nothing_until_it_is_resumed_also_after_a_restart(world: World) -> None:
    """Pausing lasts: through a restart, a seek, and while publishers go on unhindered."""
    bus = await world.open()
    got = Recorder()
    await subscribe(world, got, max_inflight=2)
    await bus.pause(TOPIC, GROUP)
    await world.publish(10)
    await world.close()
    bus = await world.open()
    await subscribe(world, got, max_inflight=2)
    await world.clock.advance(10)
    assert got.events == []
    await world.run(bus.seek(TOPIC, GROUP, 4))
    await world.clock.advance(10)
    assert got.events == []
    await world.close()
    bus = await world.open()
    await world.run(bus.seek(TOPIC, GROUP, 6))  # while it does not run
    await subscribe(world, got, max_inflight=2)
    await world.clock.advance(10)
    assert got.events == []

    await bus.resume(TOPIC, GROUP)
    await world.until(world.drained())

    assert got.offsets == list(range(6, 10))


async def test_seeking_moves_one_group_only(world: World) -> None:
    """Set back, a group gets events again from there on; other groups notice nothing; an unknown one is refused."""
    bus = await world.open()
    one, two = Recorder(), Recorder()
    await subscribe(world, one, "one")
    await subscribe(world, two, "two")
    await world.publish(5)
    await world.until(world.drained(group="one"))

    await world.run(bus.seek(TOPIC, "one", 3))
    await world.until(world.drained(group="one"))
    with pytest.raises(UnknownGroup):
        await bus.seek(TOPIC, "three", 0)

    assert one.offsets == [0, 1, 2, 3, 4, 3, 4]
    assert two.offsets == [0, 1, 2, 3, 4]


@pytest.mark.req("F37")
async def test_replaying_by_offset_and_by_time_moves_no_cursor(world: World) -> None:
    """Any stretch of a topic can be read again while its groups stay where they are."""
    bus = await world.open()
    got = Recorder()
    await subscribe(world, got)
    moments: list[datetime] = []
    for n in range(6):
        moments.append(datetime_of(world.clock.now_ns()))
        await world.publish(1, first=n)
        await world.clock.advance(60)
    place = world.group().cursor.committed

    by_offset = [event.payload["n"] async for event in bus.replay(TOPIC, from_offset=1, to_offset=4)]
    by_time = [event.payload["n"] async for event in bus.replay(TOPIC, from_time=moments[2], to_time=moments[4])]

    assert by_offset == [1, 2, 3]
    assert by_time == [2, 3]
    assert world.group().cursor.committed == place == 5
    assert got.offsets == [0, 1, 2, 3, 4, 5]


@pytest.mark.req("F123")
async def test_what_happened_yesterday_can_be_replayed_whenever_it_was_written(world: World) -> None:
    """Bounds on when events happened find those that were written late too, in the order of their offsets, for every topic."""
    bus = await world.open()
    midnight = datetime(2026, 3, 2, tzinfo=UTC)
    hours = [-30, -24, -1, 3, -12, 30, 0]  # in the order of writing; the fifth came late
    for n, hour in enumerate(hours):
        for topic in (TOPIC, "hippo"):
            await world.publish(1, first=n, topic=topic, ts=midnight + timedelta(hours=hour))
    got = Recorder()
    await subscribe(world, got)
    await world.until(world.drained())
    place = world.group().cursor.committed
    yesterday: dict[str, Any] = {"happened_from": midnight - timedelta(days=1), "happened_to": midnight}

    for topic in (TOPIC, "hippo"):
        found = [(event.offset, event.payload["n"]) async for event in bus.replay(topic, **yesterday)]
        assert found == [(1, 1), (2, 2), (4, 4)]
    later = [event.offset async for event in bus.replay(TOPIC, happened_from=midnight, from_offset=4)]
    assert later == [5, 6]
    assert (world.group().cursor.committed, len(got.events)) == (place, len(hours))
    with pytest.raises(InvalidTimestamp):
        [event async for event in bus.replay(TOPIC, happened_from=datetime(2026, 3, 2))]  # noqa: DTZ001 - meant


@pytest.mark.req("F63")
async def test_the_envelope_reaches_the_handler_as_it_was_published(world: World) -> None:
    """Time, actor, trace, key and all the rest round trip; so does the payload."""
    bus = await world.open()
    got = Recorder()
    await subscribe(world, got)
    event = world.event(
        payload={"deep": {"list": [1, "två", None]}},
        actor={"user_id": "alice"},
        device={"device_id": "phone-1"},
        trace_id="trace-1",
        idem_key="key-1",
        ttl_sec=60,
        partitions=("p",),
        band="GREEN",
        priority=7,
        qos={"priority": 3},
        extra={"x": 1},
    )

    await world.run(bus.publish(event))
    await world.until(world.drained())

    assert got.events[0].meta == event.meta
    assert got.events[0].payload == event.payload
    assert (got.events[0].group, got.events[0].topic, got.events[0].seq) == (GROUP, TOPIC, 1)


async def test_what_a_handler_changes_no_other_group_sees(world: World) -> None:
    """Each group has its own copy of an event."""
    await world.open()
    seen: list[object] = []

    async def spoil(event: ReceivedEvent) -> Ack:
        event.payload["n"] = "spoilt"  # type: ignore[index]
        return Ack()

    async def look(event: ReceivedEvent) -> Ack:
        seen.append(event.payload["n"])
        return Ack()

    await subscribe(world, spoil, "one")
    await subscribe(world, look, "two")
    await world.publish(1)
    await world.until(world.drained(group="two"))

    assert seen == [0]


class _Diary(Middleware):
    """Notes what it is told, and when."""

    def __init__(self, notes: list[object]) -> None:
        self.notes = notes

    def before_handle(self, ctx: HandleContext) -> Decision | None:
        self.notes.append(("before", ctx.offset))
        return Decision.skip("not wanted") if ctx.offset == 1 else None

    def after_handle(self, ctx: HandleContext, outcome: Outcome) -> None:
        self.notes.append((outcome.kind.value, ctx.offset))


@pytest.mark.req("F133")
async def test_middleware_hears_how_each_event_of_a_batch_ended(world: World) -> None:
    """What the batch handler answers for an event is what the middleware is told of it, after the handler, last one first."""
    notes: list[object] = []
    bus = await world.open(_Diary(notes))

    async def handler(events: list[ReceivedEvent]) -> list[Ack | Nack]:
        notes.append([event.offset for event in events])
        return [Nack("later") if event.offset == 2 and event.attempt == 1 else Ack() for event in events]

    await subscribe(world, handler, batch_count_max=4)
    await bus.pause(TOPIC, GROUP)
    await world.publish(4)
    await world.until(lambda: world.group().pending == 4)
    await bus.resume(TOPIC, GROUP)
    await world.until(world.drained())

    first, second = notes[:9], notes[9:]
    assert first == [
        *[("before", 0), ("before", 1), ("skipped", 1), ("before", 2), ("before", 3)],
        [0, 2, 3],
        *[("acked", 3), ("retry", 2), ("acked", 0)],
    ]
    assert second == [("before", 2), [2], ("acked", 2)]


async def test_a_batch_handler_that_raises_is_told_as_an_error_of_each_event(world: World) -> None:
    """An error of the batch handler reaches the middleware for every event it was given."""
    notes: list[object] = []
    await world.open(_Diary(notes))
    calls = 0

    async def handler(events: list[ReceivedEvent]) -> Ack:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("no")
        return Ack()

    await subscribe(world, handler, batch_count_max=4)
    await world.publish(1)
    await world.until(world.drained())

    assert notes == [("before", 0), ("retry", 0), ("before", 0), ("acked", 0)]


@pytest.mark.parametrize("keys", [(1, 1.0), ((1, "a"), [1.0, "a"])])
async def test_equal_numbers_are_one_key(world: World, keys: tuple[object, ...]) -> None:
    """With order="key", events whose keys are 1 and 1.0 are handled one after another, as deduplication compares them."""
    bus = await world.open()
    running = most = 0

    async def handle(event: ReceivedEvent) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await world.clock.sleep(1)
        running -= 1

    await world.run(
        bus.subscribe(TOPIC, GROUP, handle, order="key", workers=64, key_of=lambda event: keys[event.payload["n"]])
    )
    await world.publish(len(keys))
    await world.clock.advance(5)

    assert most == 1
