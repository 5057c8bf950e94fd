"""Reading finds exactly what lies within the bounds, and says how to go on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.conformance.support import OpenEngine, append_all, drop_sealed, event, numbered, read_all, read_seqs
from tidings.log import Log, LogSettings, Query
from tidings.log.errors import EpochMismatch

# Topics of the records of a small log, by seq from 1: a has offsets 0 to 3, b 0 and 1.
TOPICS = "aababa"
OF_A = [1, 2, 4, 6]


@pytest.fixture
async def small(log: Log) -> Log:
    """A log of six records in two topics."""
    await append_all(log, [event(topic, {"n": n}) for n, topic in enumerate(TOPICS)])
    return log


@pytest.mark.req("S28")
async def test_without_bounds_everything_comes_in_order(small: Log) -> None:
    """A query for nothing in particular gives all records of all topics by seq."""
    records = await read_all(small, Query())

    assert [record.seq for record in records] == [1, 2, 3, 4, 5, 6]
    assert "".join(record.topic for record in records) == TOPICS


async def test_a_topic_is_read_alone(small: Log) -> None:
    """A query for a topic gives its records by offset."""
    records = await read_all(small, Query(topic="a"))

    assert [record.seq for record in records] == OF_A
    assert [record.offset for record in records] == [0, 1, 2, 3]


@pytest.mark.req("F37", "S28")
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 1000])
async def test_since_is_excluded_and_until_included(small: Log, limit: int, backwards: bool) -> None:
    """Bounds by seq, alone and together, at every border, both ways, for all topics and for one."""
    bounds = [None, 0, 1, 3, 6, 7, 10**12]
    for topic, since, until in itertools.product([None, "a", "b", "none"], bounds, bounds):
        expected = [
            seq
            for seq, of in enumerate(TOPICS, start=1)
            if (since is None or seq > since) and (until is None or seq <= until) and topic in (None, of)
        ]
        query = Query(topic=topic, since=since, until=until, backwards=backwards)

        assert await read_seqs(small, query, limit=limit) == (expected[::-1] if backwards else expected), query


@pytest.mark.req("F37")
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 1000])
async def test_from_offset_is_included_and_to_offset_excluded(small: Log, limit: int, backwards: bool) -> None:
    """Bounds by offset, alone and together, at every border and both ways."""
    bounds = [None, 0, 1, 3, 4, 5, 10**12]
    for from_offset, to_offset in itertools.product(bounds, bounds):
        expected = list(range(4))[from_offset or 0 : to_offset]
        query = Query(topic="a", from_offset=from_offset, to_offset=to_offset, backwards=backwards)

        found = [record.offset for record in await read_all(small, query, limit=limit)]

        assert found == (expected[::-1] if backwards else expected), query


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"from_offset": 1, "until": 4}, [2, 4]),
        ({"since": 2, "to_offset": 3}, [4]),
        ({"since": 1, "from_offset": 2}, [4, 6]),
        ({"since": 4, "from_offset": 1}, [6]),
        ({"until": 5, "to_offset": 1}, [1]),
        ({"since": 6, "from_offset": 0}, []),
        ({"since": 4, "to_offset": 2}, []),
    ],
    ids=str,
)
async def test_bounds_are_joined_by_and(
    small: Log, bounds: dict[str, Any], expected: list[int], backwards: bool
) -> None:
    """Bounds by seq and by offset hold together."""
    query = Query(topic="a", backwards=backwards, **bounds)

    assert await read_seqs(small, query, limit=1) == (expected[::-1] if backwards else expected)


@pytest.mark.parametrize("query", [Query(), Query(topic="a"), Query(topic="a", from_offset=0), Query(since=0)], ids=str)
async def test_an_empty_log_is_at_its_end(log: Log, query: Query) -> None:
    """Reading an empty log gives an empty page that is the end."""
    page = await log.read(query)

    assert page.records == []
    assert page.at_end


@pytest.mark.parametrize(
    "query",
    [
        Query(),
        Query(topic="a"),
        Query(topic="new"),
        Query(since=6),
        Query(topic="a", from_offset=4),
        Query(topic="a", since=6),
        Query(topic="new", since=3),
        Query(topic="new", from_offset=0),
    ],
    ids=str,
)
async def test_the_end_is_where_the_next_read_begins(small: Log, query: Query) -> None:
    """Going on from the last page finds what was appended since, and only that."""
    page = await small.read(query)
    assert page.at_end

    fresh = await append_all(small, [event("a"), event("new"), event("b"), event("a"), event("new")])

    wanted = [done.seq for done, topic in zip(fresh, ["a", "new", "b", "a", "new"], strict=True)
              if query.topic in (None, topic)]  # fmt: skip
    assert await read_seqs(small, page.next, limit=2) == wanted


@pytest.mark.parametrize(
    ("query", "expected"),
    [(Query(since=8), [9, 10]), (Query(topic="a", from_offset=6), [9, 10]), (Query(topic="a", since=8), [9, 10])],
    ids=str,
)
async def test_a_bound_beyond_the_end_waits_for_its_record(small: Log, query: Query, expected: list[int]) -> None:
    """A position that is not reached yet gives nothing now, and later what lies beyond it, not before."""
    page = await small.read(query)
    assert (page.records, page.at_end) == ([], True)
    await append_all(small, numbered("a", 1))
    page = await small.read(page.next)
    assert (page.records, page.at_end) == ([], True)
    await append_all(small, numbered("a", 3))

    assert await read_seqs(small, page.next) == expected


@pytest.mark.parametrize("topic", [None, "a", "none"])
@pytest.mark.parametrize("limit", [1, 4, 1000])
async def test_reading_backwards_ends_for_good(small: Log, topic: str | None, limit: int) -> None:
    """When a backwards reader has come to the oldest record, nothing that is appended later reaches it."""
    query = Query(topic=topic, backwards=True)
    at_end = False
    while not at_end:
        page = await small.read(query, limit=limit)
        query, at_end = page.next, page.at_end

    await append_all(small, [event("a"), event("none")])

    assert await read_all(small, query) == []


async def test_a_backwards_reader_is_not_disturbed_by_appends(small: Log) -> None:
    """Records appended between two pages of a backwards reader do not shift what it reads."""
    first = await small.read(Query(backwards=True), limit=2)
    await append_all(small, numbered("a", 3))
    rest = await read_seqs(small, first.next, limit=1)

    assert [record.seq for record in first.records] + rest == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("bounds", [{"from_offset": 0}, {"to_offset": 1}], ids=str)
async def test_offsets_need_a_topic(small: Log, bounds: dict[str, Any]) -> None:
    """An offset without a topic means nothing, and is refused."""
    with pytest.raises(ValueError, match="topic"):
        await small.read(Query(**bounds))


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_page_has_room_for_something(small: Log, limit: int) -> None:
    """A page of no records would never get anywhere, and is refused."""
    with pytest.raises(ValueError, match="limit"):
        await small.read(Query(), limit=limit)


@pytest.mark.parametrize("topic", [None, "a"])
async def test_a_position_of_another_life_is_refused(open_engine: OpenEngine, topic: str | None) -> None:
    """A query that names the epoch of another log is told so; with the right epoch it is answered."""
    log, other = await open_engine(), await open_engine()
    await log.append(event("a"))
    epoch = log.position.epoch

    with pytest.raises(EpochMismatch) as caught:
        await log.read(Query(topic=topic, since=0, epoch=other.position.epoch))

    assert (caught.value.given, caught.value.current) == (other.position.epoch, epoch)
    page = await log.read(Query(topic=topic, since=0, epoch=epoch))
    assert [record.seq for record in page.records] == [1]
    assert page.next.epoch == epoch


async def test_a_record_is_the_same_whichever_way_it_is_found(small: Log) -> None:
    """By topic, over all, backwards or alone, a record reads the same."""
    everything = {record.seq: record for record in await read_all(small, Query())}

    for seq, record in everything.items():
        ways = [
            Query(since=seq - 1, until=seq),
            Query(topic=record.topic, from_offset=record.offset, to_offset=record.offset + 1),
            Query(until=seq, since=seq - 1, backwards=True),
        ]
        for query in ways:
            (found,) = await read_all(small, query)
            assert (found.seq, found.offset, found.meta) == (record.seq, record.offset, record.meta)
            assert bytes(found.payload_json) == bytes(record.payload_json)


async def test_one_topic_is_what_the_table_of_all_says_of_it(open_engine: OpenEngine) -> None:
    """``topic`` answers as ``topics`` does, also for a topic of which all sealed segments were dropped, and ``None`` for one that is not there."""
    log = await open_engine(LogSettings(journal_bytes=1 << 20, segment_lines_max=5))
    await append_all(log, [*numbered("a", 12), *numbered("b", 3)])
    await drop_sealed(log, "a")

    topics = log.topics()
    assert {name: log.topic(name) for name in topics} == topics
    assert topics["a"].first_offset == 10
    assert log.topic("c") is None
    assert log.dropped_through_seq == 10
