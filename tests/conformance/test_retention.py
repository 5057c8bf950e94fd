"""What retention drops is gone for readers, who are told, and never for the counting of places."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.conformance.support import (
    OpenEngine,
    all_full_segments_sealed,
    append_all,
    drop_sealed,
    event,
    numbered,
    plan_to_drop_sealed,
    read_all,
    read_seqs,
    topics_but_digests,
)
from tidings.log import Appended, Duplicate, Log, LogSettings, Query, TopicRetention
from tidings.log.errors import IdConflict, PositionTrimmed
from tidings.log.retention import Needs, RetentionPlan, SegmentDecision, plan_retention
from tidings.testing import VirtualClock

CUT = LogSettings(journal_bytes=1 << 20, segment_lines_max=10)


@pytest.fixture
async def cut(open_engine: OpenEngine) -> Log:
    """A log of 25 records in topic a (seqs 1 to 25) and 5 in b (26 to 30), ten to a segment."""
    log = await open_engine(CUT)
    await append_all(log, [*numbered("a", 25), *numbered("b", 5)])
    return log


@pytest.mark.req("F29")
async def test_segments_end_at_a_number_of_lines(cut: Log) -> None:
    """A segment takes as many lines as the settings say; the next line opens the next one."""
    await all_full_segments_sealed(cut)
    segments = cut.topics()["a"].segments

    assert [(s.number, s.first_offset, s.last_offset, s.lines) for s in segments] == [
        (1, 0, 9, 10),
        (2, 10, 19, 10),
        (3, 20, 24, 5),
    ]
    assert [(s.first_seq, s.last_seq) for s in segments] == [(1, 10), (11, 20), (21, 25)]
    assert [s.is_sealed for s in segments] == [True, True, False]
    assert {s.topic for s in segments} == {"a"}


async def test_a_full_segment_stays_active_until_it_is_followed(open_engine: OpenEngine) -> None:
    """With exactly as many lines as fit there is one segment, and it is the active one."""
    log = await open_engine(CUT)
    await append_all(log, numbered("a", 10))

    assert [(s.number, s.lines, s.is_sealed) for s in log.topics()["a"].segments] == [(1, 10, False)]
    await append_all(log, numbered("a", 1))
    await all_full_segments_sealed(log)
    assert [(s.number, s.lines, s.is_sealed) for s in log.topics()["a"].segments] == [(1, 10, True), (2, 1, False)]


@pytest.mark.req("F30")
async def test_segments_end_at_a_number_of_bytes(open_engine: OpenEngine) -> None:
    """A line that would make a segment too large opens the next one, and one too large for any has its own."""
    log = await open_engine(LogSettings(journal_bytes=1 << 20, segment_bytes_max=1_000_000))
    sizes = [400_000, 400_000, 400_000, 3_000_000, 10, 400_000]
    await append_all(log, [event("a", {"blob": "x" * size}) for size in sizes])
    await all_full_segments_sealed(log)

    segments = log.topics()["a"].segments

    assert [s.lines for s in segments] == [2, 1, 1, 2]
    assert all(s.size_bytes <= 1_000_000 for s in segments if s.lines > 1)


async def test_a_segment_tells_when_it_was_written(open_engine: OpenEngine, clock: VirtualClock) -> None:
    """A segment knows the times of its first and last record, which is what it ages by."""
    log = await open_engine(CUT, clock=clock)
    for _ in range(12):
        await log.append(event("a"))
        clock.jump(60)

    first, second = log.topics()["a"].segments

    assert (first.first_written_at, first.last_written_at) == (
        "2026-01-01T00:00:00.000000Z",
        "2026-01-01T00:09:00.000000Z",
    )
    assert (second.first_written_at, second.last_written_at) == (
        "2026-01-01T00:10:00.000000Z",
        "2026-01-01T00:11:00.000000Z",
    )


@pytest.mark.req("F73")
async def test_dropped_records_are_gone_and_the_rest_stays(cut: Log) -> None:
    """Carrying out a plan removes the sealed segments it names, and nothing of the active ones."""
    plan = await drop_sealed(cut)

    assert [(d.segment.topic, d.segment.number) for d in plan.drops] == [("a", 1), ("a", 2)]
    assert await read_seqs(cut, Query()) == list(range(21, 31))
    assert [record.offset for record in await read_all(cut, Query(topic="a"))] == [20, 21, 22, 23, 24]
    assert [record.offset for record in await read_all(cut, Query(topic="b"))] == [0, 1, 2, 3, 4]


@pytest.mark.req("F73")
async def test_groups_that_have_passed_a_segment_let_it_go(cut: Log) -> None:
    """A plan by consumption drops what every group has passed, and that alone."""
    await all_full_segments_sealed(cut)
    segments = [segment for topic in cut.topics().values() for segment in topic.segments]
    floors = {"a": {"quick": 24, "slow": 12}}

    await cut.drop(
        plan_retention(
            segments, {"*": TopicRetention(consumed=True)}, now=datetime(2026, 1, 1, tzinfo=UTC), needs=Needs(floors)
        )
    )

    assert cut.topics()["a"].first_offset == 10


@pytest.mark.req("S29")
async def test_a_partition_that_has_not_moved_on_keeps_its_events(open_engine: OpenEngine) -> None:
    """No segment goes while a partition named in it still needs it; what is kept can be read."""
    log = await open_engine(CUT)
    await append_all(log, numbered("a", 10, partitions=["p"]))
    await append_all(log, numbered("a", 10, partitions=["p", "q"]))
    await append_all(log, numbered("a", 5))
    await all_full_segments_sealed(log)
    rules = {"a": TopicRetention(size_bytes_max=0)}
    now = datetime(2026, 1, 1, tzinfo=UTC)

    for floors, kept_from in [({}, 1), ({"p": 9}, 1), ({"p": 10}, 11), ({"p": 20}, 11), ({"p": 20, "q": 20}, 21)]:
        await log.drop(plan_retention(log.topics()["a"].segments, rules, now=now, partition_floors=floors))

        assert await read_seqs(log, Query()) == list(range(kept_from, 26))
        assert await read_seqs(log, Query(partitions=("p",))) == list(range(kept_from, 21))


@pytest.mark.req("F20", "S3")
async def test_places_are_never_used_again(cut: Log) -> None:
    """After a drop counting goes on where it was, in every topic and over all."""
    await drop_sealed(cut)

    a, b, new = await append_all(cut, [event("a"), event("b"), event("new")])

    assert [(done.seq, done.offset) for done in (a, b, new)] == [(31, 25), (32, 5), (33, 0)]
    assert cut.position.seq == 33
    info = cut.topics()["a"]
    assert (info.first_offset, info.next_offset, info.first_seq, info.last_seq) == (20, 26, 21, 31)
    assert [segment.number for segment in info.segments] == [3]


async def test_a_topic_shrinks_by_what_was_dropped(cut: Log) -> None:
    """The size that a plan promises to free is the size that the topic loses."""
    before = cut.topics()["a"].size_bytes

    plan = await drop_sealed(cut)

    assert before - cut.topics()["a"].size_bytes == plan.freed_bytes > 0


async def test_carrying_a_plan_out_twice_changes_nothing(cut: Log) -> None:
    """Segments of a plan that are gone already are passed over."""
    plan = await drop_sealed(cut)
    before = cut.position, topics_but_digests(cut)

    await cut.drop(plan)

    assert (cut.position, topics_but_digests(cut)) == before


async def test_a_plan_cannot_drop_the_active_segment(cut: Log) -> None:
    """A plan that names the active segment, or a topic or segment that never was, does it no harm."""
    await all_full_segments_sealed(cut)
    before = cut.position, topics_but_digests(cut)
    active = cut.topics()["a"].segments[-1]
    no_such = plan_retention([], {}, now=datetime(2026, 1, 1, tzinfo=UTC))

    await cut.drop(no_such)
    await cut.drop(RetentionPlan((SegmentDecision(segment=active, drops=True, reason="a mistake"),)))

    assert (cut.position, topics_but_digests(cut)) == before
    assert len(await read_all(cut, Query())) == 30


async def test_a_kept_segment_is_not_touched(cut: Log) -> None:
    """Decisions to keep are no drops, whatever else the plan says."""
    plan = await plan_to_drop_sealed(cut)
    first, *rest = plan.decisions
    kept = RetentionPlan((first, *(SegmentDecision(segment=d.segment, drops=False, reason="kept") for d in rest)))

    await cut.drop(kept)

    assert cut.topics()["a"].first_offset == 10


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("from_offset", [0, 19])
async def test_an_offset_that_was_dropped_is_reported(cut: Log, from_offset: int, backwards: bool) -> None:
    """Reading a topic from an offset that is gone tells where it begins now."""
    await drop_sealed(cut)

    with pytest.raises(PositionTrimmed) as caught:
        await cut.read(Query(topic="a", from_offset=from_offset, backwards=backwards))

    assert (caught.value.topic, caught.value.asked, caught.value.first) == ("a", from_offset, 20)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("topic", [None, "a"])
@pytest.mark.parametrize("since", [0, 19])
async def test_a_seq_that_was_dropped_is_reported(cut: Log, since: int, topic: str | None, backwards: bool) -> None:
    """Reading after a seq when records after it are gone tells up to which seq they are."""
    await drop_sealed(cut)

    with pytest.raises(PositionTrimmed) as caught:
        await cut.read(Query(topic=topic, since=since, backwards=backwards))

    assert (caught.value.topic, caught.value.asked, caught.value.first) == (None, since, 20)


@pytest.mark.parametrize(
    ("query", "first"),
    [
        (Query(), 21),
        (Query(topic="a"), 21),
        (Query(since=20), 21),
        (Query(since=22), 23),
        (Query(topic="a", from_offset=20), 21),
        (Query(topic="a", since=20), 21),
        (Query(topic="b", since=0), 26),
        (Query(topic="b", from_offset=0), 26),
        (Query(from_time=datetime(2020, 1, 1, tzinfo=UTC)), 21),
        (Query(topic="a", from_time=datetime(2020, 1, 1, tzinfo=UTC)), 21),
        (Query(until=25), 21),
    ],
    ids=str,
)
async def test_a_reader_that_lost_nothing_is_not_troubled(cut: Log, query: Query, first: int) -> None:
    """Without a lower bound, above what was dropped, in another topic, or by time, reading goes on as ever."""
    await drop_sealed(cut)

    assert (await read_seqs(cut, query, limit=3))[0] == first


async def test_a_reader_between_two_pages_is_told(cut: Log) -> None:
    """If what comes next is dropped between two pages, the next one says so."""
    queries = (Query(), Query(since=0), Query(topic="a"), Query(topic="a", since=0), Query(topic="a", from_offset=0))
    standing = [(await cut.read(query, limit=5)).next for query in queries]

    await drop_sealed(cut)

    for query in standing:
        with pytest.raises(PositionTrimmed) as caught:
            await cut.read(query)
        assert caught.value.asked == 5


async def test_a_reader_past_what_was_dropped_goes_on(cut: Log) -> None:
    """A reader that had read everything that went notices nothing, wherever it once began."""
    queries = (Query(), Query(since=0), Query(topic="a"), Query(topic="a", since=0), Query(topic="a", from_offset=0))
    standing = [(await cut.read(query, limit=20)).next for query in queries]

    await drop_sealed(cut)

    assert [(await read_seqs(cut, query))[0] for query in standing] == [21] * 5


async def test_paging_over_all_topics_goes_on_past_what_another_topic_dropped(open_engine: OpenEngine) -> None:
    """A reader that began at the oldest record kept is not told of drops it knew of; of new ones it is."""
    log = await open_engine(CUT)
    await append_all(log, [*numbered("b", 5), *numbered("a", 25), *numbered("b", 5)])
    await drop_sealed(log, "a")

    page = await log.read(Query(), limit=1)
    assert [record.seq for record in page.records] == [1]
    assert await read_seqs(log, page.next, limit=3) == [2, 3, 4, 5, *range(26, 36)]

    await append_all(log, numbered("a", 10))
    await drop_sealed(log, "a")
    with pytest.raises(PositionTrimmed):
        await log.read(page.next)


async def test_a_backwards_reader_ends_where_the_log_begins(cut: Log) -> None:
    """Reading backwards stops at the oldest record kept."""
    await drop_sealed(cut)

    assert await read_seqs(cut, Query(backwards=True), limit=4) == list(range(30, 20, -1))
    assert await read_seqs(cut, Query(topic="a", backwards=True), limit=4) == [25, 24, 23, 22, 21]


async def test_waiting_counts_dropped_records_too(cut: Log) -> None:
    """A seq that was committed and dropped was still reached."""
    await drop_sealed(cut)

    assert await cut.wait(29) == 30
    assert await cut.wait(0, "a") >= 25


async def test_ids_go_with_their_records(cut: Log) -> None:
    """Unless they are to be kept, ids and keys of dropped records are free again; others are not."""
    log = cut
    await append_all(log, [event("c", {"n": n}, event_id=f"e{n}", idem_key=f"k{n}") for n in range(15)])
    await drop_sealed(log, "c")

    by_id = await log.append(event("c", {"n": "other"}, event_id="e0"))
    by_key = await log.append(event("c", {"n": "another"}, idem_key="k1"))
    kept = await log.append(event("c", {"n": 12}, event_id="e12"))

    assert isinstance(by_id, Appended)
    assert isinstance(by_key, Appended)
    assert isinstance(kept, Duplicate)


@pytest.mark.parametrize("partitions", [[], ["p"]])
async def test_ids_can_outlive_their_records(open_engine: OpenEngine, partitions: list[str]) -> None:
    """With kept ids (always for records that name partitions) a late retry is a duplicate, other content a conflict."""
    log = await open_engine(CUT)
    first = await append_all(
        log,
        [event("c", {"n": n, "x": 1.0}, event_id=f"e{n}", idem_key=f"k{n}", partitions=partitions) for n in range(15)],
    )
    await drop_sealed(log, "c", keep_ids=not partitions)
    assert await read_seqs(log, Query()) == [11, 12, 13, 14, 15]

    for n in (0, 9, 12):
        again = Duplicate(first[n].seq, first[n].offset, f"e{n}")
        assert await log.append(event("c", {"x": 1, "n": n}, event_id=f"e{n}", partitions=partitions)) == again
        assert await log.append(event("c", {"n": n, "x": 1}, idem_key=f"k{n}", partitions=partitions)) == again
        with pytest.raises(IdConflict) as by_id:
            await log.append(event("c", {"n": -1}, event_id=f"e{n}", partitions=partitions))
        with pytest.raises(IdConflict) as by_key:
            await log.append(event("c", {"n": -1}, idem_key=f"k{n}", partitions=partitions))
        assert (by_id.value.field, by_id.value.seq) == ("meta.event_id", first[n].seq)
        assert (by_key.value.field, by_key.value.seq) == ("meta.idem_key", first[n].seq)
    assert log.position.seq == 15


async def test_ids_made_by_the_log_can_outlive_their_records(open_engine: OpenEngine) -> None:
    """An event that the log named is still known after its record went, if ids are kept."""
    log = await open_engine(CUT)
    events = numbered("c", 15)
    first = await append_all(log, events)
    await drop_sealed(log, keep_ids=True)

    again = await log.append_many(events)

    assert again == [Duplicate(done.seq, done.offset, done.event_id) for done in first]


async def test_ids_made_by_the_log_go_with_their_records(open_engine: OpenEngine) -> None:
    """Without kept ids, an event whose record is gone is stored anew, under the id it has."""
    log = await open_engine(CUT)
    events = numbered("c", 15)
    first = await append_all(log, events)
    await drop_sealed(log)

    again = await log.append(events[0])

    assert again == Appended(16, 15, first[0].event_id)


async def test_kept_ids_survive_further_drops(open_engine: OpenEngine) -> None:
    """Ids that were kept once stay known when more is dropped later without keeping."""
    log = await open_engine(CUT)
    await append_all(log, [event("c", {"n": n}, event_id=f"e{n}") for n in range(15)])
    await drop_sealed(log, keep_ids=True)
    await append_all(log, [event("c", {"n": n}, event_id=f"e{n}") for n in range(15, 25)])
    await drop_sealed(log, keep_ids=False)

    old = await log.append(event("c", {"n": 3}, event_id="e3"))
    newer = await log.append(event("c", {"n": 13}, event_id="e13"))

    assert isinstance(old, Duplicate)
    assert isinstance(newer, Appended)


async def test_appending_goes_on_while_segments_are_dropped(open_engine: OpenEngine) -> None:
    """Drops between appends neither lose nor repeat what is still to be kept."""
    log = await open_engine(CUT)
    for round_ in range(10):
        await append_all(log, numbered("ab"[round_ % 2], 15))
        await drop_sealed(log)

    kept = await read_all(log, Query())

    assert log.position.seq == 150
    assert [record.seq for record in kept] == sorted(record.seq for record in kept)
    for topic in "ab":
        info = log.topics()[topic]
        of_topic = [record for record in kept if record.topic == topic]
        assert [record.offset for record in of_topic] == list(range(info.first_offset, info.next_offset))
        assert info.next_offset == 75
