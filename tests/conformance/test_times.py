"""Reading by time of writing, also when the clock that gave it was wrong."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta, timezone

import pytest

from tests.conformance.support import OpenEngine, append_all, event, read_seqs
from tidings.log import Log, Query
from tidings.testing import VirtualClock

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """So long after the clock's start."""
    return START + timedelta(seconds=seconds)


@pytest.fixture
async def timed(open_engine: OpenEngine, clock: VirtualClock) -> Log:
    """A log of six records, written two at a time at 0, 10 and 20 seconds, one each in topics a and b."""
    log = await open_engine(clock=clock)
    for _ in range(3):
        await append_all(log, [event("a"), event("b")])
        clock.jump(10)
    return log


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 1000])
async def test_from_time_is_included_and_to_time_excluded(timed: Log, limit: int, backwards: bool) -> None:
    """Bounds by time, alone and together, at every border, both ways, for all topics and for one."""
    seconds = [None, -5, 0, 0.000001, 5, 10, 20, 20.000001, 99]
    for topic, begin, end in itertools.product([None, "a", "b", "none"], seconds, seconds):
        expected = [
            seq
            for seq, written in enumerate([0, 0, 10, 10, 20, 20], start=1)
            if (begin is None or written >= begin) and (end is None or written < end) and topic in (None, "ba"[seq % 2])
        ]
        query = Query(
            topic=topic,
            from_time=None if begin is None else at(begin),
            to_time=None if end is None else at(end),
            backwards=backwards,
        )

        assert await read_seqs(timed, query, limit=limit) == (expected[::-1] if backwards else expected), query


async def test_times_join_with_other_bounds(timed: Log) -> None:
    """Bounds by time hold together with those by seq and offset."""
    assert await read_seqs(timed, Query(since=3, from_time=at(0), to_time=at(20))) == [4]
    assert await read_seqs(timed, Query(topic="a", from_offset=1, to_time=at(20))) == [3]
    assert await read_seqs(timed, Query(topic="b", until=5, from_time=at(10))) == [4]


async def test_a_time_counts_wherever_it_is_told(timed: Log) -> None:
    """The same moment told in another zone is the same bound."""
    tokyo = timezone(timedelta(hours=9))

    assert await read_seqs(timed, Query(from_time=at(10).astimezone(tokyo), to_time=at(20).astimezone(tokyo))) == [3, 4]


@pytest.mark.parametrize("bound", ["from_time", "to_time"])
async def test_a_time_without_a_zone_is_not_guessed(timed: Log, bound: str) -> None:
    """A bound that could mean any of two dozen moments is refused."""
    naive = START.replace(tzinfo=None)

    with pytest.raises((TypeError, ValueError)):
        await timed.read(Query(from_time=naive) if bound == "from_time" else Query(to_time=naive))


@pytest.mark.parametrize("topic", [None, "a"])
async def test_a_clock_that_goes_back_hides_nothing(
    open_engine: OpenEngine, clock: VirtualClock, topic: str | None
) -> None:
    """Records written while the clock was behind are found from the last good time on, in order, none left out."""
    log = await open_engine(clock=clock)
    for jump_seconds in (0, 10, -3600, 1800, 3600):
        await append_all(log, [event("a")])
        clock.jump(jump_seconds)
    # Written at 0, 0, 10, 10, 10: the clock said 0, 0, 10, -3590, -1790.

    assert await read_seqs(log, Query(topic=topic, from_time=at(10))) == [3, 4, 5]
    assert await read_seqs(log, Query(topic=topic, to_time=at(10))) == [1, 2]
    assert await read_seqs(log, Query(topic=topic, from_time=at(-3600), to_time=at(0))) == []


@pytest.mark.parametrize("topic", [None, "a"])
async def test_going_on_from_a_time_finds_what_comes(
    open_engine: OpenEngine, clock: VirtualClock, topic: str | None
) -> None:
    """A reader that began at a time, before or after there were records, goes on with what is appended."""
    log = await open_engine(clock=clock)
    early = await log.read(Query(topic=topic, from_time=at(5)))
    await append_all(log, [event("a")])
    clock.jump(10)
    await append_all(log, [event("a")])

    page = await log.read(early.next)
    assert [record.seq for record in page.records] == [2]
    clock.jump(-3600)
    await append_all(log, [event("a")])

    assert await read_seqs(log, page.next) == [3]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 1000])
@pytest.mark.parametrize("topic", [None, "a"])
async def test_times_bound_partitions_too(
    open_engine: OpenEngine, clock: VirtualClock, topic: str | None, limit: int, backwards: bool
) -> None:
    """Records of a partition outside the time asked for stay out, on every page, however small the pages."""
    log = await open_engine(clock=clock)
    for n in range(12):
        await append_all(log, [event("a", {"n": n}, partitions=["p"] if n % 3 else [])])
        clock.jump(1)
    # Written at 0 to 11 seconds as seqs 1 to 12; all but 1, 4, 7 and 10 name the partition.

    for begin, end, expected in [
        (5, None, [6, 8, 9, 11, 12]),
        (None, 5, [2, 3, 5]),
        (4, 9, [5, 6, 8, 9]),
        (50, None, []),
    ]:
        query = Query(
            topic=topic,
            partitions=("p",),
            from_time=None if begin is None else at(begin),
            to_time=None if end is None else at(end),
            backwards=backwards,
        )

        assert await read_seqs(log, query, limit=limit) == (expected[::-1] if backwards else expected)


@pytest.mark.parametrize("is_first", [False, True])
async def test_a_clock_a_century_ahead_does_not_stamp_what_comes_after(
    open_engine: OpenEngine, clock: VirtualClock, is_first: bool
) -> None:
    """Its records get the time of the one before; the next ones get the true time, and are found by it."""
    log = await open_engine(clock=clock)
    if not is_first:
        await append_all(log, [event("a")])
    century = 100 * 365.25 * 24 * 3600
    clock.jump(century)
    await append_all(log, [event("a")])
    clock.jump(10 - century)
    await append_all(log, [event("a")])

    page = await log.read(Query())
    assert all(record.meta.written_at < "2027" for record in page.records)
    assert await read_seqs(log, Query(from_time=at(5))) == [page.records[-1].seq]
    info = log.topic("a")
    assert info is not None
    assert info.segments[-1].last_written_at < "2027"
