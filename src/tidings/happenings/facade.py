"""Happenings as users of the ledger have them: subscribe, emit, read history."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from tidings.core.clock import Clock
from tidings.log.interface import Position

from .bus import Envelope, HappeningsBus
from .coalescing import Coalescing
from .errors import check_seq
from .filters import HappeningFilter
from .happening import AnyHappening, check
from .subscription import HappeningSubscription, History

_PAGE_COUNT_MAX: Final = 1000


class Happenings:
    """
    ``ledger.happenings``.

    Args:
        bus: Where happenings are emitted.
        history: Those that were written down.
        clock: For coalescing.
        store: Writes happenings down, has the bus publish them, and returns the seq of the first.
    """

    def __init__(
        self,
        bus: HappeningsBus,
        history: History,
        clock: Clock,
        store: Callable[[Sequence[AnyHappening]], Awaitable[int]],
    ) -> None:
        self._bus = bus
        self._history = history
        self._clock = clock
        self._store = store

    @property
    def last_seq(self) -> int:
        """The seq of the newest happening; 0 if there never was one."""
        return self._bus.last_seq

    @property
    def oldest_seq(self) -> int:
        """The lowest seq that history still has; 0 if there is none."""
        return self._history.oldest_seq

    @property
    def receiver_count(self) -> int:
        """How many are subscribed."""
        return self._bus.receiver_count

    @property
    def missed_count(self) -> int:
        """How many happenings subscribers missed because they were too slow, and were told so, since the ledger was opened."""
        return self._bus.missed_count

    def subscribe(
        self,
        *,
        since: int | Position | None = None,
        filter: HappeningFilter | None = None,
        coalesce: Coalescing | None = None,
    ) -> HappeningSubscription:
        """
        Follow what happens; with ``since``, beginning with what happened after that seq.

        Raises:
            InvalidCursor: ``since`` can be no seq.
            CursorTooOld: History no longer has what comes after ``since``.
            EpochMismatch: ``since`` is a position in another life of the log.
            InvalidCoalescing: No label is named.
        """
        return HappeningSubscription(
            self._bus, self._history, self._clock, since=since, filter=filter, coalesce=coalesce
        )

    def emit(self, happening: AnyHappening) -> None:
        """
        Tell everybody who is subscribed now. Never waits, never fails, is not written down.

        Raises:
            InvalidHappening: It is no happening, or has a field of another type than its variant declares.
        """
        check(happening)
        self._bus.emit(happening)

    async def emit_durable(self, happening: AnyHappening, *further: AnyHappening) -> int:
        """
        Write happenings down, then tell everybody.

        Returns:
            The seq of the first; the others follow right after it.

        Raises:
            LedgerError: They could not be written down, and nobody was told.
        """
        return await self._store((happening, *further))

    async def history(
        self, since: int = 0, until: int | None = None, filter: HappeningFilter | None = None
    ) -> AsyncIterator[Envelope]:
        """
        What was written down after ``since`` up to and including ``until``, or to the newest there is now.

        It goes as far back as the log does, or the lake behind it, however little of that a subscriber may ask for.

        Raises:
            InvalidCursor: ``since`` can be no seq.
            CursorTooOld: What comes after ``since`` is kept nowhere.
        """
        check_seq(since)
        until = self.last_seq if until is None else until
        while since < until:
            page = await self._history.archive(since, _PAGE_COUNT_MAX)
            for envelope in page:
                if envelope.seq > until:
                    return
                if filter is None or filter.matches(envelope.happening):
                    yield envelope
            if len(page) < _PAGE_COUNT_MAX:
                return
            since = page[-1].seq
