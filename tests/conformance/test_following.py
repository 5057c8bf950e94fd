"""Waiting and following: a reader at the end hears of what comes, once, and of nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tests.conformance.support import (
    SECONDS_MAX,
    OpenEngine,
    append_all,
    drop_sealed,
    event,
    numbered,
    read_all,
)
from tidings.log import Log, LogSettings, Page, Position, Query, Record
from tidings.log.errors import PositionTrimmed
from tidings.log.reading import count, last, pages, records, tail


async def take(source: AsyncIterator[Record], number: int) -> list[Record]:
    """The next so many records of a tail."""
    async with asyncio.timeout(SECONDS_MAX):
        return [await anext(source) for _ in range(number)]


async def test_waiting_for_what_is_there_returns_at_once(log: Log) -> None:
    """A wait for a seq that was passed answers with the highest seq committed."""
    await append_all(log, numbered("a", 3))

    async with asyncio.timeout(SECONDS_MAX):
        assert [await log.wait(after) for after in (0, 1, 2)] == [3, 3, 3]


async def test_a_waiter_is_woken_by_a_commit(log: Log) -> None:
    """A wait at the end returns when the next record is committed, not before."""
    await append_all(log, numbered("a", 3))
    waiter = asyncio.create_task(log.wait(3))
    await read_all(log, Query())
    assert not waiter.done()

    await log.append(event("a"))

    async with asyncio.timeout(SECONDS_MAX):
        assert await waiter == 4


async def test_a_waiter_is_not_woken_by_too_little(log: Log) -> None:
    """A wait beyond the end sleeps through records that do not reach it."""
    waiter = asyncio.create_task(log.wait(5))
    for _ in range(5):
        await log.append(event("a"))
    await read_all(log, Query())
    assert not waiter.done()

    await log.append(event("a"))

    async with asyncio.timeout(SECONDS_MAX):
        assert await waiter == 6


async def test_a_waiter_hears_of_its_topic_only(log: Log) -> None:
    """A wait for a topic, existing or new, is not woken by others."""
    await append_all(log, [event("a"), event("b")])
    for_a, for_new = (asyncio.create_task(log.wait(2, topic)) for topic in ("a", "new"))
    await append_all(log, numbered("b", 5))
    await read_all(log, Query())
    assert not for_a.done()
    assert not for_new.done()

    await log.append(event("a"))
    async with asyncio.timeout(SECONDS_MAX):
        assert await for_a >= 8
    assert not for_new.done()
    await log.append(event("new"))
    async with asyncio.timeout(SECONDS_MAX):
        assert await for_new >= 9


async def test_a_topic_s_records_count_by_seq(log: Log) -> None:
    """A wait for a topic compares with the seq of that topic's last record, not with the log's."""
    await append_all(log, [event("a"), event("b")])

    async with asyncio.timeout(SECONDS_MAX):
        assert await log.wait(0, "a") >= 1
    waiter = asyncio.create_task(log.wait(1, "a"))
    await read_all(log, Query())
    assert not waiter.done()
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)


async def test_many_waiters_are_all_woken(log: Log) -> None:
    """One commit wakes everyone who waited for it."""
    waiters = [asyncio.create_task(log.wait(0, topic)) for topic in (None, "a") for _ in range(50)]
    await asyncio.sleep(0)

    await log.append(event("a"))

    async with asyncio.timeout(SECONDS_MAX):
        assert set(await asyncio.gather(*waiters)) == {1}


@pytest.mark.parametrize("replayed", [0, 1, 50])
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (Query(), lambda n: True),
        (Query(topic="a"), lambda n: n % 3 == 0),
        (Query(partitions=("p",)), lambda n: n % 4 == 0),
        (Query(topic="a", partitions=("p",)), lambda n: n % 12 == 0),
    ],
    ids=["all", "topic", "partition", "both"],
)
async def test_a_tail_sees_each_record_once_across_the_border(
    log: Log, replayed: int, query: Query, expected: Any
) -> None:
    """From replay into live, under concurrent producers, a tail gives every record in order, none twice."""
    total = 240

    async def produce(begin: int, step: int) -> None:
        for n in range(begin, total, step):
            await log.append(event("abb"[n % 3], {"n": n}, partitions=["p"] if n % 4 == 0 else []))

    for n in range(replayed):
        await log.append(event("abb"[n % 3], {"n": n}, partitions=["p"] if n % 4 == 0 else []))
    wanted = [n for n in range(total) if expected(n)]

    following = asyncio.create_task(take(tail(log, query), len(wanted)))
    await asyncio.gather(*(produce(replayed + lane, 5) for lane in range(5)))
    seen = await following

    assert sorted(record.payload["n"] for record in seen) == wanted
    assert [record.seq for record in seen] == sorted({record.seq for record in seen})


async def test_a_tail_can_start_at_a_position(log: Log) -> None:
    """A tail with a lower bound begins after it, or at it, as the bound says."""
    await append_all(log, numbered("a", 5))

    by_seq, by_offset = tail(log, Query(since=3)), tail(log, Query(topic="a", from_offset=4))
    assert [record.seq for record in await take(by_seq, 2)] == [4, 5]
    assert [record.seq for record in await take(by_offset, 1)] == [5]
    await log.append(event("a"))
    assert [record.seq for record in await take(by_seq, 1)] == [6]
    assert [record.seq for record in await take(by_offset, 1)] == [6]


async def test_a_tail_may_wait_for_a_topic_that_is_not_there(log: Log) -> None:
    """A tail of a topic without records begins with its first one."""
    following = asyncio.create_task(take(tail(log, Query(topic="later")), 1))
    await append_all(log, numbered("a", 3))
    await log.append(event("later"))

    assert [record.offset for record in await following] == [0]


async def test_two_tails_do_not_disturb_each_other(log: Log) -> None:
    """A slow follower misses nothing because a quick one is ahead."""
    quick, slow = tail(log, Query()), tail(log, Query())
    await append_all(log, numbered("a", 3))
    await take(quick, 3)
    await append_all(log, numbered("a", 3))
    await take(quick, 3)

    assert [record.seq for record in await take(slow, 6)] == [1, 2, 3, 4, 5, 6]


async def test_a_tail_that_was_overtaken_is_told(open_engine: OpenEngine) -> None:
    """If retention drops what a tail has not read, from before or after it began, it is told, not led on."""
    log = await open_engine(LogSettings(journal_bytes=1 << 20, segment_lines_max=5))
    from_the_start = tail(log, Query())
    waiting = asyncio.create_task(take(from_the_start, 1))
    await asyncio.sleep(0)
    await log.append(event("a"))
    assert [record.seq for record in await waiting] == [1]

    await append_all(log, numbered("a", 20))
    await drop_sealed(log)

    with pytest.raises(PositionTrimmed):
        await take(from_the_start, 20)


class _Held:
    """A log whose waiters are woken, but kept from going on until they are released."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.released = asyncio.Event()

    @property
    def position(self) -> Position:
        return self._log.position

    async def read(self, query: Query, *, limit: int = 1000, bytes_max: int = 4 << 20) -> Page:
        return await self._log.read(query, limit=limit, bytes_max=bytes_max)

    async def wait(self, after: int, topic: str | None = None) -> int:
        seq = await self._log.wait(after, topic)
        await self.released.wait()
        return seq


@pytest.mark.parametrize("topic", [None, "a"])
async def test_a_tail_that_saw_nothing_yet_is_told_too(open_engine: OpenEngine, topic: str | None) -> None:
    """Records that came and went while a tail waited for its first one are not passed over in silence."""
    log = await open_engine(LogSettings(journal_bytes=1 << 20, segment_lines_max=5))
    held = _Held(log)
    following = asyncio.create_task(take(tail(cast("Log", held), Query(topic=topic)), 1))
    await read_all(log, Query())

    await append_all(log, numbered("a", 20))
    await drop_sealed(log)
    held.released.set()

    with pytest.raises(PositionTrimmed) as caught:
        await following
    assert caught.value.asked == 0


@pytest.mark.parametrize("query", [Query(backwards=True), Query(until=5), Query(topic="a", to_offset=5)], ids=str)
async def test_a_tail_has_no_end(log: Log, query: Query) -> None:
    """A query with an upper bound, or backwards, is no tail."""
    with pytest.raises(ValueError, match="tail"):
        await anext(tail(log, query))


async def test_records_ends_although_the_log_grows(log: Log) -> None:
    """Iterating gives what was there at the start, even if every record read is answered by a new one."""
    await append_all(log, numbered("a", 2500))
    seen: list[int] = []

    async for record in records(log, Query(topic="a")):
        seen.append(record.seq)
        if record.seq % 100 == 0:
            await log.append(event("a"))

    assert seen == list(range(1, 2501))


async def test_records_goes_both_ways(log: Log) -> None:
    """Iterating backwards gives the same records, turned round."""
    await append_all(log, numbered("a", 30))

    forwards = [record.seq async for record in records(log, Query(since=3, until=20))]
    backwards = [record.seq async for record in records(log, Query(since=3, until=20, backwards=True))]

    assert forwards == list(range(4, 21))
    assert backwards == forwards[::-1]


@pytest.mark.req("F66")
async def test_pages_are_bounded_and_complete(log: Log) -> None:
    """Paging by hand gives pages within the bounds; the last one says so."""
    await append_all(log, numbered("a", 25))

    found = [page async for page in pages(log, Query(), limit=10)]

    assert all(len(page.records) <= 10 for page in found)
    assert [page.at_end for page in found] == [False] * (len(found) - 1) + [True]
    assert [record.seq for page in found for record in page.records] == list(range(1, 26))


@pytest.mark.parametrize(
    ("n", "where", "expected"),
    [
        (0, {}, []),
        (1, {}, [12]),
        (5, {}, [8, 9, 10, 11, 12]),
        (50, {}, list(range(1, 13))),
        (2, {"topic": "a"}, [9, 11]),
        (3, {"partitions": ["p"]}, [4, 8, 12]),
        (2, {"topic": "b", "partitions": ["p"]}, [8, 12]),
        (2, {"topic": "none"}, []),
    ],
    ids=str,
)
async def test_the_last_few_come_oldest_first(log: Log, n: int, where: dict[str, Any], expected: list[int]) -> None:
    """The last n records of the log, a topic or a partition."""
    await append_all(log, [event("ba"[seq % 2], partitions=["p"] if seq % 4 == 0 else []) for seq in range(1, 13)])

    assert [record.seq for record in await last(log, n, **where)] == expected


async def test_a_negative_number_of_records_is_refused(log: Log) -> None:
    """There is no asking for fewer than none."""
    with pytest.raises(ValueError, match="-1"):
        await last(log, -1)


async def test_counting_counts_what_a_query_finds(log: Log) -> None:
    """Counting takes the same bounds as reading."""
    await append_all(log, [event("ba"[seq % 2], partitions=["p"] if seq % 4 == 0 else []) for seq in range(1, 13)])

    assert await count(log, Query()) == 12
    assert await count(log, Query(topic="a")) == 6
    assert await count(log, Query(partitions=("p",), since=4)) == 2
    assert await count(log, Query(topic="none")) == 0
