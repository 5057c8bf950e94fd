"""
History: happenings as they are read back from the ledger's records.

A seq is found by bisection over the records' offsets, since every record has one and they never go back; where readers left off is remembered,
so that reading page after page searches once.

Two bounds are different things. ``trimmed_through`` is what subscribers may ask for: the window that the settings keep, by age and
by count. ``archive`` goes as far back as the log does, and with a lake behind the log, as far as that.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from datetime import datetime, timedelta
from typing import Final

from tidings.core.clock import Clock, datetime_of
from tidings.happenings.bus import Envelope
from tidings.happenings.errors import CursorTooOld
from tidings.log.errors import PositionTrimmed
from tidings.log.interface import Log, Query
from tidings.log.record import Record

from .marks import Marks
from .records import LEDGER_TOPIC, HappeningReader, is_ours, read_record
from .settings import LedgerSettings

_PLACES_MAX: Final = 1000
_PAGE_RECORDS: Final = 1000
_MOMENTS_COUNT: Final = 256


class _StoredTimes:
    """When this process stored which seqs, by the monotonic clock: a few hundred moments of the age that history is kept for."""

    def __init__(self, age_s_max: float) -> None:
        self._age_s_max = age_s_max
        self._moments: deque[tuple[float, float, int]] = deque()
        """Begin and end of a span, and the highest seq that was stored by its end."""
        self.first_seq: int | None = None

    def add(self, first_seq: int, last_seq: int, now_s: float) -> None:
        """Record that these seqs were stored now."""
        if self.first_seq is None:
            self.first_seq = first_seq
        if self._moments and now_s - self._moments[-1][0] < self._age_s_max / _MOMENTS_COUNT:
            begin_s, _, _ = self._moments.pop()
            self._moments.append((begin_s, now_s, last_seq))
        else:
            self._moments.append((now_s, now_s, last_seq))
        self.older(now_s)

    def older(self, now_s: float) -> int | None:
        """Return the highest seq that was stored longer ago than the age; ``None`` if none of this process was."""
        limit_s = now_s - self._age_s_max
        moments = self._moments
        while len(moments) > 1 and moments[1][1] < limit_s:
            moments.popleft()
        return moments[0][2] if moments and moments[0][1] < limit_s else None


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
        self._opened_s, self._opened_ns = clock.monotonic(), clock.now_ns()
        age_s_max = settings.history_age_s_max
        self._stored = None if age_s_max is None else _StoredTimes(age_s_max)
        self._per_record = 1.0
        """How many happenings a record had, of those read last."""
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

    def stored(self, first_seq: int, last_seq: int) -> None:
        """Record that happenings with these seqs were stored now."""
        if self._stored is not None:
            self._stored.add(first_seq, last_seq, self._clock.monotonic())

    async def read(self, since: int, limit: int) -> list[Envelope]:
        """
        The next happenings after ``since``, in order, about ``limit``: whole records, and fewer only if there are no more.

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
            first = await self._record_from()
            oldest_seq = 0 if first is None else read_record(first).seq
            raise CursorTooOld(since, oldest_seq, self.last_seq) from None

    async def _read_on(self, since: int, limit: int) -> list[Envelope]:
        offset = self._places.pop(since, None)
        is_searched = offset is None
        if offset is None:
            offset = await self._find(since)
        found: list[Envelope] = []
        query = Query(topic=LEDGER_TOPIC, from_offset=offset)
        read = self._reader.read
        while True:
            # As many records as will do, from what the last ones held: what is read beyond that is thrown away.
            wanted = int((limit - len(found)) / self._per_record) + 1
            page = await self._log.read(query, limit=min(_PAGE_RECORDS, wanted))
            before = len(found)
            for record in page.records:
                seq, happenings = read(record)
                if is_searched and seq > since + 1 and record.offset > 0:
                    raise CursorTooOld(since, seq, self.last_seq)  # it is the first there is, and others were before it
                is_searched = False
                if seq <= since:  # the first of the records, or one that has none
                    happenings = happenings[since + 1 - seq :]
                    seq = since + 1
                found += [Envelope(number, each) for number, each in enumerate(happenings, seq)]
                if len(found) >= limit:
                    self._leave_off(found[-1].seq, record.offset + 1)
                    self._per_record = max(1.0, (len(found) - before) / (record.offset - page.records[0].offset + 1))
                    return found
            if page.at_end:
                return found
            self._per_record = max(1.0, (len(found) - before) / max(1, len(page.records)))
            query = page.next

    def _leave_off(self, seq: int, offset: int) -> None:
        """Remember where what comes after a seq begins."""
        self._places[seq] = offset
        if len(self._places) > _PLACES_MAX:
            self._places.popitem(last=False)

    async def first_kept_offset(self) -> int:
        """The offset of the first record with history that subscribers may ask for."""
        through = self.trimmed_through
        if through >= self.last_seq:
            return self._log.topics()[LEDGER_TOPIC].next_offset
        return await self._find(through)

    async def _find(self, since: int) -> int:
        """The offset of the last record that begins at most one after ``since``, or of the first there is."""
        info = self._log.topics()[LEDGER_TOPIC]
        low, high = info.first_offset, info.next_offset
        if low > 0 and not await self._begins_by(low, since + 1):  # it lies before what the log has
            oldest = await self._record_from()
            low, high = (low if oldest is None else oldest.offset), low
        while high - low > 1:
            middle = (low + high) // 2
            if await self._begins_by(middle, since + 1):
                low = middle
            else:
                high = middle
        return low

    async def _begins_by(self, offset: int, seq: int) -> bool:
        """Whether the record at an offset has this seq or a lower one."""
        record = await self._record_from(offset)
        return record is not None and read_record(record).seq <= seq

    async def _record_from(self, offset: int | None = None, from_time: datetime | None = None) -> Record | None:
        """The first of the ledger's records at this offset or time, or later."""
        query = Query(topic=LEDGER_TOPIC, from_offset=offset, from_time=from_time)
        while True:
            page = await self._log.read(query, limit=1)
            if page.records and is_ours(page.records[0]):
                return page.records[0]
            if page.at_end:
                return None
            query = page.next

    async def window_start(self) -> int:
        """The highest seq that the settings no longer keep. It ends a command, and the last command is kept whole or not at all."""
        count_max = self._settings.history_count_max
        through = 0
        if count_max is not None:
            through = max(0, self.last_seq - count_max)
        if self._stored is not None and self.last_seq > through:
            through = max(through, min(await self._too_old(self._stored), self.last_seq))
        return await self._whole(through)

    async def _too_old(self, stored: _StoredTimes) -> int:
        """
        Return the highest seq that is older than history is kept for.

        Age is time that passed: setting the wall clock makes nothing older. What an earlier process stored was as old when this one began as
        the clock said then, 0 at least, and has aged since.
        """
        age_s_max = self._settings.history_age_s_max
        assert age_s_max is not None
        now_s = self._clock.monotonic()
        if (older := stored.older(now_s)) is not None:
            return older
        earlier_seq = self.last_seq if stored.first_seq is None else stored.first_seq - 1
        age_left_s = age_s_max - (now_s - self._opened_s)
        if age_left_s < 0:
            return earlier_seq
        since = datetime_of(self._opened_ns) - timedelta(seconds=age_left_s)
        first = await self._record_from(self._log.topics()[LEDGER_TOPIC].first_offset, since)
        return earlier_seq if first is None else min(read_record(first).seq - 1, earlier_seq)

    async def _whole(self, through: int) -> int:
        """The highest seq up to this one that ends a command: history is trimmed by whole commands."""
        if not 0 < through < self.last_seq:
            return through
        record = await self._record_from(await self._find(through))
        assert record is not None
        stored = read_record(record)
        begin = stored.of or stored.seq
        return through if begin > through else begin - 1
