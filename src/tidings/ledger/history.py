"""
History: happenings as they are read back from the ledger's records.

A seq is found by bisection over the records' offsets, since every record has one and they never go back; where readers left off is remembered,
so that reading page after page searches once.

Two bounds are different things. ``trimmed_through`` is what subscribers may ask for: the window that the settings keep, by age and
by count. ``archive`` goes as far back as the log does, and with a lake behind the log, as far as that.
"""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta
from typing import Final

from tidings.core.clock import Clock, datetime_of
from tidings.happenings.bus import Envelope
from tidings.happenings.errors import CursorTooOld
from tidings.log.errors import PositionTrimmed
from tidings.log.interface import Log, Query
from tidings.log.record import Record

from .marks import Marks
from .records import LEDGER_TOPIC, HappeningReader, read_record
from .settings import LedgerSettings

_PLACES_MAX: Final = 1000
_PAGE_RECORDS: Final = 1000


class LedgerHistory:
    """
    The happenings of one ledger that were written down.

    Args:
        log: Where the records are.
        marks: How far history was trimmed.
        settings: How much is kept.
        clock: What time it is.
    """

    def __init__(self, log: Log, marks: Marks, settings: LedgerSettings, clock: Clock) -> None:
        self._log = log
        self._settings = settings
        self._clock = clock
        self._reader = HappeningReader()
        self._places: OrderedDict[int, int] = OrderedDict()
        """Offsets at which the records after a seq begin, of those that somebody is about to ask for."""
        self.marks = marks

    @property
    def epoch(self) -> str:
        """The epoch of the log."""
        return self._log.position.epoch

    @property
    def trimmed_through(self) -> int:
        """The highest seq that subscribers can no longer have."""
        return self.marks.trimmed_through

    @property
    def last_seq(self) -> int:
        """The highest seq in any record."""
        return self.marks.told_seq

    @property
    def oldest_seq(self) -> int:
        """The lowest seq that they may still have; 0 if there is none."""
        return self.trimmed_through + 1 if self.last_seq > self.trimmed_through else 0

    async def read(self, since: int, limit: int) -> list[Envelope]:
        """
        The next happenings after ``since``, in order, at most ``limit``; fewer only if there are no more.

        Raises:
            CursorTooOld: ``since`` lies before ``trimmed_through``.
            LogError: The log cannot be read.
        """
        if since < self.trimmed_through:
            raise CursorTooOld(since, self.oldest_seq, self.last_seq)
        return await self.archive(since, limit)

    async def archive(self, since: int, limit: int) -> list[Envelope]:
        """
        The same, from all records that log and lake still have, whatever subscribers may ask for.

        Raises:
            CursorTooOld: The log no longer has them, and there is no lake that does.
            LogError: The log cannot be read.
        """
        if since >= self.last_seq:
            return []
        self._reader.begin()
        try:
            return await self._read_on(since, limit)
        except PositionTrimmed:
            raise CursorTooOld(since, await self._first_seq(), self.last_seq) from None

    async def _read_on(self, since: int, limit: int) -> list[Envelope]:
        offset = self._places.pop(since, None)
        if offset is None:
            offset = await self._find(since)
        found: list[Envelope] = []
        query = Query(topic=LEDGER_TOPIC, from_offset=offset)
        read, room = self._reader.read, limit
        while True:
            page = await self._log.read(query, limit=min(_PAGE_RECORDS, room))
            for record in page.records:
                seq, happenings = read(record)
                if seq <= since:  # the first of the records, or one that has none
                    happenings = happenings[since + 1 - seq :]
                    seq = since + 1
                for each in happenings:
                    found.append(Envelope(seq, each))
                    seq += 1
                if len(found) >= limit:
                    self._leave_off(found, limit, record.offset)
                    return found[:limit]
            if page.at_end:
                return found
            query, room = page.next, limit - len(found)

    def _leave_off(self, found: list[Envelope], limit: int, offset: int) -> None:
        """Remember where the next page begins: with this record, if not all of it was given, else with the one after."""
        self._places[found[limit - 1].seq] = offset if len(found) > limit else offset + 1
        if len(self._places) > _PLACES_MAX:
            self._places.popitem(last=False)

    async def _find(self, since: int) -> int:
        """The offset of a record before which nothing lies after ``since``."""
        first, high = await self._first(), self._log.topics()[LEDGER_TOPIC].next_offset
        low = first.offset
        if low > 0 and read_record(first).seq > since + 1:
            raise CursorTooOld(since, read_record(first).seq, self.last_seq)
        # All that lies after ``since`` is at ``low`` or later, and the record at ``high``, if there is one, begins after it.
        while high - low > 1:
            middle = (low + high) // 2
            page = await self._log.read(Query(topic=LEDGER_TOPIC, from_offset=middle), limit=1)
            if not page.records or read_record(page.records[0]).seq > since + 1:
                high = middle
            else:
                low = middle
        return low

    async def _first(self) -> Record:
        """The first record that can be read."""
        page = await self._log.read(Query(topic=LEDGER_TOPIC), limit=1)
        return page.records[0]

    async def _first_seq(self) -> int:
        return read_record(await self._first()).seq

    async def window_start(self) -> int:
        """The highest seq that the settings no longer keep."""
        count_max, age_s_max = self._settings.history_count_max, self._settings.history_age_s_max
        through = 0
        if count_max is not None:
            through = max(0, self.last_seq - count_max)
        if age_s_max is not None and self.last_seq > through:
            since = datetime_of(self._clock.now_ns()) - timedelta(seconds=age_s_max)
            page = await self._log.read(Query(topic=LEDGER_TOPIC, from_time=since), limit=1)
            kept_from = read_record(page.records[0]).seq if page.records else self.last_seq + 1
            through = max(through, min(kept_from - 1, self.last_seq))
        return through
