"""
A subscription: what happened since a cursor, then what happens, without a gap and without a repeat.

The order is what makes it so. First a receiver is registered with the bus, and with that the newest seq is noted: ``current_seq``. What came up to there is
read from history; what comes after waits in the receiver meanwhile. If more comes than it holds, history closes the gap as well. So a
happening is missed only if it was never written down, and then that is said (``Lagged``).

From then on a subscriber may be as many commands behind as the bus's capacity; with more, the oldest are missed, each as a whole. A single command
is never too large: what of it the receiver does not hold is read from history.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final, Protocol

from tidings.core.clock import Clock, within
from tidings.log.errors import EpochMismatch, LogClosed
from tidings.log.interface import Position

from .bus import CAPACITY, Envelope, HappeningsBus, HappeningStream
from .coalescing import Coalescer, Coalescing
from .errors import CursorTooOld, HappeningsClosed, Lagged, check_seq
from .filters import EVERYTHING, HappeningFilter
from .mailbox import Gap

logger = logging.getLogger(__name__)

_PAGE_COUNT_MAX: Final = 1000


class History(Protocol):
    """The happenings that were written down and are still kept."""

    @property
    def epoch(self) -> str:
        """Names one life of the log; cursors of another are refused."""
        ...

    @property
    def trimmed_through(self) -> int:
        """The highest seq that is no longer kept; 0 if all are."""
        ...

    @property
    def oldest_seq(self) -> int:
        """The lowest seq that is kept; 0 if there is none."""
        ...

    async def read(self, since: int, limit: int) -> list[Envelope]:
        """
        The next happenings after ``since``, in order, about ``limit``: a few more if they lie together, fewer only if there are no more.

        Everything that the bus delivered before the call, and that is written down, is there.

        Raises:
            CursorTooOld: ``since`` lies before ``trimmed_through``.
        """
        ...

    async def archive(self, since: int, limit: int) -> list[Envelope]:
        """
        The same from all that is kept anywhere, whatever was trimmed.

        Raises:
            CursorTooOld: What comes after ``since`` is kept nowhere.
        """
        ...


class HappeningSubscription(HappeningStream[Envelope]):
    """
    One subscriber's stream. Made by ``Happenings.subscribe``. After ``Lagged``, which is said once, it goes on.

    Args:
        bus: Where happenings come from.
        history: Where those before come from.
        clock: For the windows of ``coalesce``.
        since: Begin after this seq. Without it, only what happens from now on is delivered.
        filter: What to deliver.
        coalesce: How to hold back what is alike. What comes from history is not held back.

    Raises:
        InvalidCursor: ``since`` can be no seq.
        CursorTooOld: History no longer has what comes after ``since``.
        EpochMismatch: ``since`` is a position in another life of the log.
        InvalidCoalescing: No label is named.
    """

    def __init__(
        self,
        bus: HappeningsBus,
        history: History,
        clock: Clock,
        *,
        since: int | Position | None = None,
        filter: HappeningFilter | None = None,
        coalesce: Coalescing | None = None,
    ) -> None:
        self._history = history
        self._clock = clock
        self._filter = filter or EVERYTHING
        self._coalescer = None if coalesce is None else Coalescer(coalesce)
        if isinstance(since, Position):
            if since.epoch != history.epoch:
                raise EpochMismatch(since.epoch, history.epoch)
            since = since.seq
        if since is not None:
            check_seq(since)
        self._bus = bus
        self._receiver = bus.subscribe(filter, reads_history=True)
        self.current_seq: Final = bus.last_seq
        """The newest seq when this began: state that is read from now on includes all up to it, and all after it is delivered."""
        if since is not None and since < history.trimmed_through:
            self._receiver.close()
            raise CursorTooOld(since, history.oldest_seq, self.current_seq)
        if since is not None and since > self.current_seq:
            logger.warning("a subscriber begins after seq %d, but the newest is %d", since, self.current_seq)
        self._passed_seq = self.current_seq if since is None else since
        """Up to here everything was looked at; nothing up to here is delivered any more."""
        self._history_until = self.current_seq
        """Up to here history is read, the receiver has what comes after."""
        self._is_catching_up = since is not None
        self._gap: Gap | None = None
        """What is to be read from history before the receiver goes on."""
        self._missed_count = 0
        self._ready: deque[Envelope] = deque()

    @property
    def epoch(self) -> str:
        """The epoch of the seqs."""
        return self._history.epoch

    async def recv_many(self, limit: int = CAPACITY) -> list[Envelope]:
        """
        What has come, at least one and at most ``limit``; waits if there is nothing.

        Raises:
            Lagged, HappeningsClosed: As of ``recv``.
            CursorTooOld: What was to be replayed was dropped meanwhile; nothing more will come.
        """
        while not self._ready:
            if self._gap is not None:
                await self._read_gap(self._gap)
            elif self._is_catching_up:
                await self._read_history()
            else:
                self._raise_lag()
                await self._read_live()
        if len(self._ready) <= limit:
            found = list(self._ready)
            self._ready.clear()
            return found
        return [self._ready.popleft() for _ in range(limit)]

    def close(self) -> None:
        """End it: nothing more is received."""
        self._receiver.close()

    async def _read_history(self) -> None:
        """Bring the next page from history, or find that the receiver has all that follows."""
        if self._passed_seq >= self._history_until:
            self._meet_receiver()
            return
        is_gap = self._history_until > self.current_seq
        try:
            page = await self._history.read(self._passed_seq, _PAGE_COUNT_MAX)
        except CursorTooOld:
            if not is_gap:
                self.close()
                raise
            page = []  # what is left of the gap counts as missed
        except LogClosed:  # the ledger was closed while this was behind: a cursor goes on from here
            self.close()
            raise HappeningsClosed from None
        if len(page) < _PAGE_COUNT_MAX or page[-1].seq >= self._history_until:
            self._passed_seq = self._history_until
            page = [each for each in page if each.seq <= self._history_until]
        else:
            self._passed_seq = page[-1].seq
        matches = self._filter.matches
        wanted = page if self._filter.is_empty else [each for each in page if matches(each.happening)]
        if is_gap:
            self._missed_count -= len(wanted)
        self._ready.extend(wanted)

    def _meet_receiver(self) -> None:
        """Go over to the receiver; if it has lost some meanwhile, history has to be read up to the oldest that it holds."""
        try:
            self._take_live()
        except Lagged as lag:
            self._missed_count += lag.missed_count
            self._history_until = max(self._history_until, lag.oldest_available_seq - 1)
            return
        except HappeningsClosed:
            if not self._missed_count:
                raise
        self._is_catching_up = False
        self._raise_lag()

    async def _read_gap(self, gap: Gap) -> None:
        """Bring the next page of a command that the receiver does not hold."""
        try:
            page = await self._history.archive(gap.first_seq - 1, _PAGE_COUNT_MAX)
        except (CursorTooOld, LogClosed):
            self._gap = None
            raise self._lagged(gap.size) from None
        matches = self._filter.matches
        found = [each for each in page if each.seq <= gap.last_seq and matches(each.happening)]
        count = gap.size - len(found)
        if count and page and page[-1].seq < gap.last_seq:
            self._gap = Gap(page[-1].seq + 1, gap.last_seq, count)
        else:
            self._gap = None
        if self._gap is None:
            self._missed_count += count  # history does not have them
        self._deliver(found)

    def _raise_lag(self) -> None:
        if self._missed_count:
            missed_count, self._missed_count = self._missed_count, 0
            raise self._lagged(missed_count)

    async def _read_live(self) -> None:
        """Wait for something to deliver from the receiver or from the coalescer."""
        arrival = self._receiver.arrival()
        ends_at = None if self._coalescer is None else self._coalescer.ends_at
        if ends_at is None:
            await arrival
        elif (seconds := ends_at - self._clock.monotonic()) > 0:
            await within(self._clock, seconds, arrival)
        try:
            self._take_live()
        except Lagged as lag:
            raise self._lagged(lag.missed_count) from None

    def _take_live(self) -> None:
        try:
            taken = self._receiver.take(_PAGE_COUNT_MAX)
        except HappeningsClosed:
            if self._coalescer is None or not (held := self._coalescer.drain()):
                raise
            self._ready.extend(held)
            return
        if not taken:
            self._gap = self._receiver.gap()
        self._deliver(taken)

    def _deliver(self, taken: list[Envelope]) -> None:
        """Hand on what came live."""
        coalescer = self._coalescer
        fresh = taken
        if taken and taken[0].seq <= self._passed_seq:  # a cursor from the future
            fresh = [each for each in taken if each.seq > self._passed_seq]
        if coalescer is None:
            self._ready.extend(fresh)
            return
        now = self._clock.monotonic()
        # What is over goes first: a happening that comes now belongs to the next window.
        self._ready.extend(coalescer.flush(now))
        for envelope in fresh:
            self._ready.extend(coalescer.observe(envelope, now))

    def _lagged(self, missed_count: int) -> Lagged:
        self._bus.missed_count += missed_count
        return Lagged(missed_count, self._history.oldest_seq, self._bus.last_seq)
