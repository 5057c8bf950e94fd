"""Appending gives every event one place, in the order it was asked for."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta, timezone

import pytest

from tests.conformance.support import OpenEngine, append_all, event, numbered, read_all
from tidings.core.errors import InvalidName, InvalidPayload
from tidings.core.events import Actor, Capability, Device, Event, EventMeta, EventType, QoS, SecurityBand
from tidings.log import Appended, Duplicate, Log, Query, Refused
from tidings.log.reading import records
from tidings.testing import VirtualClock


async def test_an_empty_log_stands_at_zero(log: Log) -> None:
    """Before the first event the position is seq 0 of some epoch, and there are no topics."""
    assert log.position.seq == 0
    assert log.position.epoch
    assert log.topics() == {}


@pytest.mark.req("F16", "F20", "S3")
async def test_places_count_from_their_beginnings(log: Log) -> None:
    """Seqs count from 1 over all topics, offsets from 0 within each."""
    verdicts = [await log.append(event(topic)) for topic in ("a", "b", "a", "a", "b")]

    assert [(verdict.seq, verdict.offset) for verdict in verdicts] == [(1, 0), (2, 0), (3, 1), (4, 2), (5, 1)]
    assert all(isinstance(verdict, Appended) for verdict in verdicts)
    assert log.position.seq == 5


async def test_an_acknowledged_event_can_be_read_at_once(log: Log) -> None:
    """When append returns, the record is in the log, with the place and id it was acknowledged under."""
    done = await log.append(event("a", {"n": 1}))

    (record,) = await read_all(log, Query(topic="a"))

    assert (record.seq, record.offset, record.meta.event_id) == (done.seq, done.offset, done.event_id)
    assert record.payload == {"n": 1}


@pytest.mark.req("F6", "F14")
async def test_a_record_says_what_the_event_said(log: Log) -> None:
    """Every part of an envelope and any JSON payload come back as they were handed in."""
    payload = {
        "text": 'Grüße, "東京" \\ \u2028 \x7f \U0001f4e8',
        "numbers": [0, -1, 2**64 - 1, -(2**63), 0.1, -1.5e300],
        "nothing": None,
        "truth": [True, False],
        "nested": {"": [{}, [], {"a": {"b": []}}]},
    }
    said = EventMeta(
        topic="write.ingest",
        type="HIPPO_ENCODE",
        space_id="shared:household/ü",
        event_id="order-17",
        ts=datetime(2026, 3, 4, 5, 6, 7, 891011, timezone(timedelta(hours=2))),
        actor={"user_id": "alice", "caps": ["WRITE"]},
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
        idem_key="once/1",
        ttl_sec=60,
        device="phone1",
        partitions=["beta", "alpha", "beta"],
        band="AMBER",
        priority=7,
        qos={"priority": 7, "latency_budget_ms": 50},
        extra={"x_note": [1, {"deep": None}]},
    )

    await log.append(Event(said, payload))
    (record,) = await read_all(log, Query())
    meta = record.meta

    assert record.payload == payload
    assert (meta.topic, meta.type, meta.space_id, meta.event_id) == (
        "write.ingest",
        "HIPPO_ENCODE",
        "shared:household/ü",
        "order-17",
    )
    assert meta.time == said.ts
    assert meta.ts == "2026-03-04T03:06:07.891011Z"
    assert meta.actor == {"user_id": "alice", "caps": ["WRITE"]}
    assert (meta.trace_id, meta.idem_key, meta.ttl_sec) == (said.trace_id, "once/1", 60)
    assert meta.device == "phone1"
    assert meta.partitions == ("alpha", "beta")
    assert (meta.band, meta.priority) == ("AMBER", 7)
    assert meta.qos == {"priority": 7, "latency_budget_ms": 50}
    assert meta.extra == {"x_note": [1, {"deep": None}]}


@pytest.mark.req("F10", "F11", "F12")
async def test_structured_parts_are_stored_as_json(log: Log) -> None:
    """Actor, device, band, capabilities and QoS given as typed values come back as plain JSON."""
    actor = Actor(user_id="alice", caps=(Capability.WRITE, Capability.RECALL), agent_id="planner")
    device = Device(device_id="phone1", platform="ios")

    await log.append(event(actor=actor, device=device, band=SecurityBand.RED, qos=QoS(priority=9, routing="fast-path")))
    (record,) = await read_all(log, Query())

    assert record.meta.actor == {"user_id": "alice", "caps": ["WRITE", "RECALL"], "agent_id": "planner"}
    assert record.meta.device == {"device_id": "phone1", "platform": "ios"}
    assert record.meta.band == "RED"
    assert record.meta.qos == {"priority": 9, "routing": "fast-path"}


@pytest.mark.req("F5")
async def test_what_is_left_out_stays_out(log: Log) -> None:
    """Optional parts that were not given are absent from the record, not invented."""
    await log.append(event())
    (record,) = await read_all(log, Query())
    meta = record.meta

    assert (meta.actor, meta.trace_id, meta.idem_key, meta.ttl_sec) == (None, None, None, None)
    assert (meta.device, meta.band, meta.priority, meta.qos, meta.extra) == (None, None, None, None, None)
    assert meta.partitions == ()


@pytest.mark.req("F1")
async def test_an_event_type_can_stand_for_topic_and_type(log: Log) -> None:
    """The older form of an envelope names the topic by an event type, which is stored as its plain name."""
    await log.append(Event(EventMeta(topic=EventType.WORKSPACE_BROADCAST, space_id="family-001"), {}))
    (record,) = await read_all(log, Query(topic="WORKSPACE_BROADCAST"))

    assert (record.topic, record.meta.type) == ("WORKSPACE_BROADCAST", "WORKSPACE_BROADCAST")


@pytest.mark.req("F3")
async def test_the_log_names_events_that_have_no_id(log: Log) -> None:
    """An event without an id gets one of the usual shape, told in the verdict and kept in the event."""
    first, second = event(), event()

    done = [await log.append(first), await log.append(second)]

    assert all(re.fullmatch(r"ev-[0-9a-f]{32}", verdict.event_id) for verdict in done)
    assert done[0].event_id != done[1].event_id
    assert [first.meta.event_id, second.meta.event_id] == [verdict.event_id for verdict in done]
    assert [record.meta.event_id for record in await read_all(log, Query())] == [v.event_id for v in done]


async def test_a_producer_may_name_its_events(log: Log) -> None:
    """An id given by the producer is kept as it is, up to its full length and in any script."""
    ids = ["a", "ev-" + "0" * 32, "x" * 256, "Bestellung № 17 ✓", "../../etc/passwd"]

    verdicts = await append_all(log, [event(event_id=event_id) for event_id in ids])

    assert [verdict.event_id for verdict in verdicts] == ids
    assert [record.meta.event_id for record in await read_all(log, Query())] == ids


async def test_many_events_keep_their_order(log: Log) -> None:
    """A batch over several topics is stored in the order given, one verdict for each event."""
    events = [event("abc"[n % 3], {"n": n}) for n in range(100)]

    verdicts = await append_all(log, events)
    records = await read_all(log, Query())

    assert [verdict.seq for verdict in verdicts] == list(range(1, 101))
    assert [verdict.offset for verdict in verdicts] == [n // 3 for n in range(100)]
    assert [record.payload["n"] for record in records] == list(range(100))


async def test_verdicts_stay_with_their_events_however_long_the_list(log: Log) -> None:
    """More events than a commit takes, of several kinds, with some refused: each verdict is its own event's."""

    def one(n: int) -> Event:
        match n % 7:
            case 3:
                return event("a", {"n": n}, event_id=f"given-{n}")
            case 5:
                return event("a", {"n": float("nan")})
            case 6:
                return event("b", {"n": n}, partitions=("p",))
            case _:
                return event("a", {"n": n})

    events = [one(n) for n in range(10_000)]
    events[4_321] = events[3]  # on its way already

    verdicts = await log.append_many(events)

    by_seq = {record.seq: record async for record in records(log, Query())}
    for n, (given, verdict) in enumerate(zip(events, verdicts, strict=True)):
        if n == 4_321:
            assert verdict == Duplicate(verdicts[3].seq, verdicts[3].offset, "given-3")  # type: ignore[union-attr]
        elif n % 7 == 5:
            assert isinstance(verdict, Refused)
        else:
            assert isinstance(verdict, Appended)
            record = by_seq.pop(verdict.seq)
            assert (record.payload["n"], record.offset, record.meta.event_id) == (n, verdict.offset, verdict.event_id)
            assert given.meta.event_id == verdict.event_id
    assert by_seq == {}


async def test_an_empty_batch_is_fine(log: Log) -> None:
    """Appending nothing gives no verdicts and writes nothing."""
    assert await log.append_many([]) == []
    assert log.position.seq == 0


async def test_a_refused_event_does_not_hold_up_its_batch(log: Log) -> None:
    """Events around refused ones are stored, without a gap in seqs or offsets."""
    verdicts = await log.append_many(
        [event("a"), event("a", {"n": float("nan")}), event("no/slash"), event("a"), event("a", space_id="")]
    )

    match verdicts:
        case [
            Appended(seq=1, offset=0),
            Refused(InvalidPayload(field="payload.n")),
            Refused(InvalidName(field="meta.topic")),
            Appended(seq=2, offset=1),
            Refused(InvalidName(field="meta.space_id")),
        ]:
            pass
        case _:
            pytest.fail(f"{verdicts}")
    assert [record.offset for record in await read_all(log, Query(topic="a"))] == [0, 1]
    assert log.position.seq == 2


async def test_a_batch_of_refusals_writes_nothing(log: Log) -> None:
    """If every event is refused, there is a verdict for each and the log is as before."""
    verdicts = await log.append_many([event("..")] * 3)

    assert [type(verdict) for verdict in verdicts] == [Refused] * 3
    assert log.position.seq == 0
    assert log.topics() == {}


async def test_what_happens_to_an_event_later_does_not_reach_the_log(log: Log) -> None:
    """A payload changed after it was acknowledged is stored as it was."""
    payload = {"items": [1]}
    await log.append(event("a", payload))

    payload["items"].append(2)

    (record,) = await read_all(log, Query())
    assert record.payload == {"items": [1]}


async def test_the_time_of_writing_never_goes_back(open_engine: OpenEngine, clock: VirtualClock) -> None:
    """With a clock that is set back, records keep the last time of writing until the clock has caught up."""
    log = await open_engine(clock=clock)
    for jump_seconds in (0, 10, -3600, 5, 3600):
        clock.jump(jump_seconds)
        await log.append(event())

    start = datetime(2026, 1, 1, tzinfo=UTC)
    seconds = [(record.meta.written_time - start).total_seconds() for record in await read_all(log, Query())]

    assert seconds == [0, 10, 10, 10, 15]


async def test_the_event_s_own_time_is_not_the_time_of_writing(open_engine: OpenEngine, clock: VirtualClock) -> None:
    """An event from last year keeps its time; the log notes beside it when it was written."""
    log = await open_engine(clock=clock)
    happened = datetime(1999, 12, 31, 23, 59, 59, 999999, UTC)

    await log.append(event(ts=happened))
    (record,) = await read_all(log, Query())

    assert record.meta.time == happened
    assert record.meta.written_time == datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.req("F20", "S3")
async def test_concurrent_appends_get_each_place_once(log: Log) -> None:
    """Hundreds of appends at once over several topics: each seq once, offsets dense in every topic."""
    topics = [f"t{n % 7}" for n in range(400)]

    verdicts = await asyncio.gather(*(log.append(event(topic, {"n": n})) for n, topic in enumerate(topics)))

    assert sorted(verdict.seq for verdict in verdicts) == list(range(1, 401))
    for topic in set(topics):
        offsets = [verdict.offset for verdict, of in zip(verdicts, topics, strict=True) if of == topic]
        assert sorted(offsets) == list(range(len(offsets)))
    by_seq = {record.seq: record for record in await read_all(log, Query())}
    for n, verdict in enumerate(verdicts):
        record = by_seq[verdict.seq]
        assert (record.topic, record.offset, record.payload) == (topics[n], verdict.offset, {"n": n})


async def test_concurrent_batches_stay_in_order(log: Log) -> None:
    """Events of one batch keep their order although others are appended at the same time."""
    batches = [[event("ab"[n % 2], {"batch": batch, "n": n}) for n in range(20)] for batch in range(20)]

    await asyncio.gather(*(append_all(log, batch) for batch in batches))

    for batch in range(20):
        records = [record for record in await read_all(log, Query()) if record.payload["batch"] == batch]
        assert [record.payload["n"] for record in records] == list(range(20))


async def test_seq_and_offset_rise_together(log: Log) -> None:
    """Within a topic a later offset always has a later seq, under concurrent producers too."""
    await asyncio.gather(*(log.append(event("ab"[n % 2])) for n in range(100)))

    for topic in "ab":
        records = await read_all(log, Query(topic=topic))
        assert [record.offset for record in records] == list(range(50))
        assert sorted(record.seq for record in records) == [record.seq for record in records]


async def test_topics_tell_their_bounds(log: Log) -> None:
    """Each topic is listed with its first and next offset, its seqs and a size."""
    await append_all(log, [*numbered("a", 3), *numbered("b", 2), *numbered("a", 1)])

    a, b = (log.topics()[topic] for topic in "ab")

    assert (a.topic, a.first_offset, a.next_offset, a.first_seq, a.last_seq) == ("a", 0, 4, 1, 6)
    assert (b.topic, b.first_offset, b.next_offset, b.first_seq, b.last_seq) == ("b", 0, 2, 4, 5)
    assert a.size_bytes == 2 * b.size_bytes > 0
    assert a.size_bytes == sum(segment.size_bytes for segment in a.segments)


async def test_an_open_log_takes_events(log: Log) -> None:
    """A log that was just opened says that it can be written and that nothing is wrong."""
    health = log.health()

    assert health.is_writable
    assert not health.is_storage_full
    assert health.problem is None


async def test_two_logs_are_two_lives(open_engine: OpenEngine) -> None:
    """Each new log has an epoch of its own, and gives out ids that the other one never will."""
    one, other = await open_engine(), await open_engine()

    ids = {(await log.append(event())).event_id for log in (one, other)}

    assert one.position.epoch != other.position.epoch
    assert len(ids) == 2
