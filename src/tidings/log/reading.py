"""
Reading any log: by record, by page, from the end, and on into what is not written yet.

Built on ``read`` and ``wait`` only, so it holds for every engine. Each of these keeps at most one
page in memory, whatever the length of the log (``last`` also keeps the records it was asked for).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Final

from msgspec.structs import replace

from .errors import LogClosed
from .interface import Page, Query, ReadableLog
from .record import Record

PAGE_RECORDS_MAX: Final = 1000
PAGE_BYTES_MAX: Final = 4 << 20


async def pages(
    log: ReadableLog, query: Query, limit: int = PAGE_RECORDS_MAX, bytes_max: int = PAGE_BYTES_MAX
) -> AsyncIterator[Page]:
    """
    Read page after page until nothing more is there.

    Every page is given out, also one on which a filter left nothing: its ``next`` is how far the reader is.
    A log that is written faster than it is read has no end; give ``until`` where one is needed.

    Raises:
        PositionTrimmed, EpochMismatch, CorruptLog, LogClosed: as for ``Log.read``.
    """
    while True:
        page = await log.read(query, limit=limit, bytes_max=bytes_max)
        yield page
        if page.at_end:
            return
        query = page.next


async def records(log: ReadableLog, query: Query) -> AsyncIterator[Record]:
    """
    The records that a query finds, as they stand when reading begins: it ends, whatever is appended meanwhile.

    Raises:
        PositionTrimmed, EpochMismatch, CorruptLog, LogClosed: as for ``Log.read``.
    """
    query = _as_of_now(log, query)
    at_end = False
    while not at_end:
        page = await log.read(query, limit=PAGE_RECORDS_MAX, bytes_max=PAGE_BYTES_MAX)
        for record in page.records:
            yield record
        query, at_end = page.next, page.at_end


async def tail(log: ReadableLog, query: Query) -> AsyncIterator[Record]:
    """
    The records that a query finds, then each further one as it is committed: none twice, none left out.

    Ends when the log is closed.

    Raises:
        ValueError: The query has an upper bound or reads backwards; ``records`` is for those.
        PositionTrimmed: Retention has overtaken this reader.
        EpochMismatch, CorruptLog: as for ``Log.read``.
    """
    if query.backwards or (query.until, query.to_offset, query.to_time) != (None, None, None):
        raise ValueError("a tail reads forwards and has no upper bound")
    try:
        while True:
            # Looked up before reading: whatever is committed during or after the read is above it, so waiting
            # for more than this cannot sleep through anything.
            seen = log.position.seq
            page = await log.read(query, limit=PAGE_RECORDS_MAX, bytes_max=PAGE_BYTES_MAX)
            for record in page.records:
                yield record
            query = page.next
            if page.at_end:
                if query.since is None and query.from_offset is None:
                    # Nothing is there yet. Without a bound "from the oldest kept" would be asked again later,
                    # and what came and was dropped in between would be passed over in silence.
                    query = replace(query, since=seen)
                await log.wait(seen, query.topic)
    except LogClosed:
        return


async def last(log: ReadableLog, n: int, topic: str | None = None, partitions: Iterable[str] = ()) -> list[Record]:
    """
    The last ``n`` records, oldest first; fewer if there are fewer.

    Args:
        log: Where to read.
        n: How many at most. All of them are held in memory.
        topic: Only records of this topic.
        partitions: Only records that name at least one of these.

    Raises:
        CorruptLog, LogClosed: as for ``Log.read``.
    """
    if n < 0:
        raise ValueError(f"cannot give the last {n} records")
    found: list[Record] = []
    query = Query(topic=topic, partitions=tuple(partitions), backwards=True)
    at_end = False
    while len(found) < n and not at_end:
        page = await log.read(query, limit=min(n - len(found), PAGE_RECORDS_MAX), bytes_max=PAGE_BYTES_MAX)
        found += page.records
        query, at_end = page.next, page.at_end
    found.reverse()
    return found


async def count(log: ReadableLog, query: Query) -> int:
    """
    How many records a query finds, as they stand when counting begins. Reads them all.

    Raises:
        PositionTrimmed, EpochMismatch, CorruptLog, LogClosed: as for ``Log.read``.
    """
    query = _as_of_now(log, query)
    total = 0
    async for page in pages(log, query):
        total += len(page.records)
    return total


def _as_of_now(log: ReadableLog, query: Query) -> Query:
    """The query, ending at what is committed now at the latest."""
    committed = log.position.seq
    return replace(query, until=committed if query.until is None else min(query.until, committed))
