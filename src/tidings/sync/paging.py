"""
Reading committed events for sync clients: pages by partition, single records, and what retention has dropped.

What the log no longer has comes from an ``Archive``, if there is one; if not, the answer says up to which seq events may be
missing, instead of looking complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import msgspec

from tidings.core.names import PARTITION_COUNT_MAX
from tidings.log.errors import PositionTrimmed
from tidings.log.interface import Log, Page, Query
from tidings.log.record import Record

_BYTES_MAX: Final = 4 << 20


class Archive(Protocol):
    """Where dropped records went."""

    async def read(self, query: Query, limit: int) -> Page:
        """The archived records that a query finds, in seq order, as ``Log.read`` would have given them."""
        ...


class HistorySlice(msgspec.Struct, frozen=True):
    """Part of a partition's history."""

    records: list[Record]
    has_more: bool
    pruned_through: int | None = None
    """Records up to here may be missing."""


class Pages:
    """Reads one log, and its archive."""

    def __init__(self, log: Log, archive: Archive | None = None) -> None:
        self._log = log
        self._archive = archive

    async def read(
        self, topic: str, partitions: tuple[str, ...], since: int, until: int, limit: int, bytes_max: int = _BYTES_MAX
    ) -> HistorySlice:
        """
        The events after ``since`` up to ``until`` that name at least one of the partitions, in order.

        Raises:
            CorruptLog, LogClosed: as for ``Log.read``.
        """
        if since >= until:
            return HistorySlice([], False)
        slices = []
        for start in range(0, len(partitions), PARTITION_COUNT_MAX):  # one query names no more than one event may
            query = Query(
                topic=topic, partitions=partitions[start : start + PARTITION_COUNT_MAX], since=since, until=until
            )
            slices.append(await self._read(query, limit, bytes_max))
        return slices[0] if len(slices) == 1 else _merged(slices, limit)

    async def _read(self, query: Query, limit: int, bytes_max: int) -> HistorySlice:
        try:
            return await self._from_log(query, limit, bytes_max)
        except PositionTrimmed as trimmed:
            dropped_through = trimmed.first
        rest = msgspec.structs.replace(query, since=max(query.since or 0, dropped_through))
        if self._archive is None:
            kept = await self._from_log(rest, limit, bytes_max)
            return HistorySlice(kept.records, kept.has_more, dropped_through)
        upper = dropped_through if query.until is None else min(dropped_through, query.until)
        old = await self._archive.read(msgspec.structs.replace(query, until=upper), limit)
        while not old.records and not old.at_end:
            old = await self._archive.read(old.next, limit)
        if not old.at_end or len(old.records) >= limit:
            return HistorySlice(old.records, True)
        if query.until is not None and query.until <= dropped_through:
            return HistorySlice(old.records, False)
        kept = await self._from_log(rest, limit - len(old.records), bytes_max)
        return HistorySlice(old.records + kept.records, kept.has_more)

    async def _from_log(self, query: Query, limit: int, bytes_max: int) -> HistorySlice:
        # One more than asked for: only that tells whether there is more. A filter may leave pages empty on the way.
        records: list[Record] = []
        at_end = False
        while len(records) <= limit and not at_end:
            page = await self._log.read(query, limit=limit + 1 - len(records), bytes_max=bytes_max)
            records += page.records
            query, at_end = page.next, page.at_end
            bytes_max -= sum(len(record.payload_json) for record in page.records)
            if records and bytes_max <= 0:
                break
        return HistorySlice(records[:limit], len(records) > limit or not at_end)

    async def last_seq(self, topic: str, partition: str, until: int) -> int:
        """
        The seq of the partition's last event up to ``until``; 0 if it never had one.

        Where events were dropped that may have been the partition's, at least the seq of the last one dropped is given: a
        watermark must not fall back.
        """
        page = await self._log.read(
            Query(topic=topic, partitions=(partition,), until=until, backwards=True), limit=1, bytes_max=1
        )
        while not page.records and not page.at_end:
            page = await self._log.read(page.next, limit=1, bytes_max=1)
        if page.records:
            return page.records[0].seq
        info = self._log.topic(topic)
        if info is None or info.first_offset == 0:
            return 0
        return max(0, info.first_seq - 1)

    async def find(self, event_ids: Iterable[str]) -> dict[str, Record]:
        """The records with these ids, of any topic, by id; also those that only the archive has."""
        wanted = tuple(dict.fromkeys(event_ids))
        if not wanted:
            return {}
        query = Query(event_ids=wanted)
        found: dict[str, Record] = {}
        at_end = False
        while not at_end:
            page = await self._log.read(query, limit=len(wanted))
            found.update((record.meta.event_id, record) for record in page.records)
            query, at_end = page.next, page.at_end
        missing = tuple(event_id for event_id in wanted if event_id not in found)
        if missing and self._archive is not None and self._has_dropped():
            old = await self._archive.read(Query(event_ids=missing), len(missing))
            found.update((record.meta.event_id, record) for record in old.records)
        return found

    def _has_dropped(self) -> bool:
        return any(info.first_offset > 0 for info in self._log.topics().values())


def _merged(slices: list[HistorySlice], limit: int) -> HistorySlice:
    """Several reads of the same range as one: each event once, and none beyond what all of them have looked at."""
    horizon = min((part.records[-1].seq for part in slices if part.has_more and part.records), default=None)
    by_seq = {record.seq: record for part in slices for record in part.records}
    seqs = sorted(seq for seq in by_seq if horizon is None or seq <= horizon)
    pruned = [part.pruned_through for part in slices if part.pruned_through is not None]
    return HistorySlice(
        [by_seq[seq] for seq in seqs[:limit]],
        len(seqs) > limit or any(part.has_more for part in slices),
        max(pruned, default=None),
    )
