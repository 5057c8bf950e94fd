"""A page is bounded in records and in bytes, whatever the log holds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.conformance.support import append_all, event, numbered, read_all
from tidings.core.events import Event
from tidings.log import Log, Query


async def append_measured(log: Log, events: Iterable[Event]) -> dict[int, int]:
    """Append events of one topic one by one; the length of each line by its seq."""
    sizes: dict[int, int] = {}
    before = 0
    for one in events:
        done = await log.append(one)
        after = log.topics()[one.meta.topic].size_bytes
        sizes[done.seq] = after - before
        before = after
    return sizes


@pytest.mark.req("F66")
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("topic", [None, "a"])
@pytest.mark.parametrize("limit", [1, 7, 20, 21])
async def test_pages_join_without_gap_or_overlap(log: Log, limit: int, topic: str | None, backwards: bool) -> None:
    """Whatever the page size, the pages of a query add up to what one large page gives."""
    await append_all(log, [event("ab"[n % 3 == 2], {"n": n}) for n in range(30)])
    query = Query(topic=topic, backwards=backwards)

    whole = await read_all(log, query)
    paged = await read_all(log, query, limit=limit)

    assert len(whole) == (30 if topic is None else 20)
    assert [record.seq for record in paged] == [record.seq for record in whole]


@pytest.mark.req("F66")
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("topic", [None, "a"])
@pytest.mark.parametrize("lines", [1, 2, 5])
async def test_a_page_is_bounded_in_bytes(log: Log, lines: int, topic: str | None, backwards: bool) -> None:
    """A page holds no more lines than fit into its bytes, and the pages still join up."""
    sizes = await append_measured(log, numbered("a", 12))
    bytes_max = lines * max(sizes.values())
    query = Query(topic=topic, backwards=backwards)

    found: list[int] = []
    at_end = False
    while not at_end:
        page = await log.read(query, bytes_max=bytes_max)
        assert len(page.records) <= lines
        assert sum(sizes[record.seq] for record in page.records) <= bytes_max
        found += [record.seq for record in page.records]
        query, at_end = page.next, page.at_end

    assert found == (list(range(12, 0, -1)) if backwards else list(range(1, 13)))


@pytest.mark.req("F66")
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("bytes_max", [1, 500])
async def test_a_record_larger_than_a_page_still_comes(log: Log, bytes_max: int, backwards: bool) -> None:
    """However small the page, each one that has something to give gives at least one record."""
    sizes = [10, 100_000, 10, 200_000, 10]
    await append_all(log, [event("a", {"blob": "x" * size}) for size in sizes])
    query = Query(topic="a", backwards=backwards)

    found: list[int] = []
    at_end = False
    while not at_end:
        page = await log.read(query, bytes_max=bytes_max)
        assert page.records or page.at_end
        assert len(page.records) == 1 or all(len(record.payload["blob"]) == 10 for record in page.records)
        found += [len(record.payload["blob"]) for record in page.records]
        query, at_end = page.next, page.at_end

    assert found == (sizes[::-1] if backwards else sizes)


@pytest.mark.req("F66")
async def test_large_records_make_short_pages(log: Log) -> None:
    """With the default bounds, a page over megabytes of payload stays near its four megabytes."""
    await append_all(log, [event("a", {"n": n, "blob": "x" * 1_000_000}) for n in range(10)])

    page = await log.read(Query(topic="a"))

    assert 1 <= len(page.records) <= 4
    assert not page.at_end
    assert [record.payload["n"] for record in await read_all(log, Query(topic="a"))] == list(range(10))


async def test_a_cursor_can_be_kept_and_used_later(log: Log) -> None:
    """What ``next`` says is plain data: a reader that stored it goes on after others have read and written."""
    await append_all(log, numbered("a", 10))
    page = await log.read(Query(topic="a"), limit=4)

    await append_all(log, numbered("b", 5))
    await read_all(log, Query())
    await append_all(log, numbered("a", 2))

    assert [record.offset for record in await read_all(log, page.next, limit=3)] == [4, 5, 6, 7, 8, 9, 10, 11]
    assert [record.offset for record in await read_all(log, page.next, limit=3)] == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("limit", [1, 10, 64])
async def test_reads_cross_segment_borders(log: Log, limit: int) -> None:
    """A log of many records reads the same in pages of any size, forwards and backwards, from any place."""
    await append_all(log, [event("ab"[n % 2], {"n": n}) for n in range(500)])

    for since in (0, 1, 249, 499):
        forwards = [record.seq for record in await read_all(log, Query(since=since), limit=limit)]
        assert forwards == list(range(since + 1, 501))
    backwards = [record.offset for record in await read_all(log, Query(topic="b", backwards=True), limit=limit)]
    assert backwards == list(range(249, -1, -1))
