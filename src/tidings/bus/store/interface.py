"""
What a bus needs of the place where its groups' progress is stored.

A log engine brings a store with it. ``files`` is the one beside the embedded log, ``memory`` the one for a log in memory. Only
stores know of files, folders and threads; the rest of the bus awaits the methods below.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from tidings.log.record import Record
from tidings.log.retention import Needs

from .dead_letters import EVERY, Attempt, DeadLetter, DeadLetterFilter, DeadLetterState, Reason


class Cursor:
    """
    What one group has acknowledged: everything up to ``committed``, and ranges beyond it, because workers finish out of order.

    ``committed`` moves over ranges that join up, and never moves back.

    Args:
        committed: Everything up to this offset is acknowledged; -1 for nothing.
        ranges: Acknowledged ranges beyond, both ends included, as ``ranges`` gave them.
    """

    __slots__ = ("_by_end", "_by_start", "committed")

    def __init__(self, committed: int = -1, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self.committed = committed
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        for first, last in ranges:
            start = max(first, committed + 1)
            if start <= last:
                self._by_start[start] = last
                self._by_end[last] = start
        self._absorb()

    def ack(self, offset: int) -> bool:
        """Acknowledge one offset; whether it was not before."""
        if offset == self.committed + 1:
            self.committed = offset
            if self._by_start:
                self._absorb()
            return True
        if offset in self:
            return False
        first = self._by_end.pop(offset - 1, offset)
        last = self._by_start.pop(offset + 1, offset)
        self._by_start[first] = last
        self._by_end[last] = first
        return True

    def skip(self, first: int, last: int) -> None:
        """Skip offsets that hold nothing (both ends included), so that ``committed`` can move on across them."""
        touching = [(start, end) for start, end in self._by_start.items() if start <= last + 1 and end >= first - 1]
        for start, end in touching:
            del self._by_start[start], self._by_end[end]
            first, last = min(first, start), max(last, end)
        if first <= self.committed + 1:
            self.committed = max(self.committed, last)
        else:
            self._by_start[first] = last
            self._by_end[last] = first

    def copy(self) -> Cursor:
        """The cursor as it is now."""
        return Cursor(self.committed, self._by_start.items())

    def _absorb(self) -> None:
        while (last := self._by_start.pop(self.committed + 1, None)) is not None:
            del self._by_end[last]
            self.committed = last

    def __contains__(self, offset: int) -> bool:
        if offset <= self.committed:
            return True
        return any(first <= offset <= last for first, last in self._by_start.items())

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The acknowledged ranges beyond ``committed``, in order."""
        return sorted(self._by_start.items())

    @property
    def early_count(self) -> int:
        """How many offsets beyond ``committed`` are acknowledged."""
        return sum(last - first + 1 for first, last in self._by_start.items())

    @property
    def highest(self) -> int:
        """The highest offset acknowledged."""
        return max(self._by_end, default=self.committed)


class GroupPosition(NamedTuple):
    """What is stored of a group."""

    cursor: Cursor
    attempts: dict[int, int]
    """Failed deliveries by offset, of events that will be tried again."""
    paused: bool = False
    set_at: str = ""
    """Time at which the position was last set: the group was created, or moved. Empty in files of earlier versions."""


class Claims(Protocol):
    """
    Which events a group's workers are handling right now, kept where a killed process leaves it: a slot for each worker.

    After a crash the slots name the events that may have caused it, with their attempts. So a handler that kills the process is
    counted like any other failure, and its event becomes a dead letter instead of a crash loop.
    """

    def begin(self, slots: int) -> None:
        """Forget what was left over, which the caller has stored, and make so many slots."""
        ...

    def take(self, slot: int, offset: int, attempt: int) -> None:
        """The worker of this slot is about to handle an event."""
        ...

    def taker(self, slot: int) -> Callable[[int, int], object]:
        """``take`` for one slot: what a busy worker calls for every event, with offset and attempt."""
        ...

    def clear(self, slot: int) -> None:
        """The worker of this slot has finished, one way or another."""
        ...

    def left_over(self) -> dict[int, int]:
        """What was being handled when the last process ended: attempts by offset. May block."""
        ...

    def close(self) -> None:
        """All workers have stopped, and have cleared their slots; a slot that is still taken names what stopped its worker."""
        ...


class GroupStore(abc.ABC):
    """Offsets, dead letters and claims of the groups of one log."""

    def __init__(self) -> None:
        self.changing = asyncio.Lock()
        """Held while a group is created, moved or removed, and while records are dropped: between a look at what the log has and
        the position that is stored, nothing may be dropped."""

    # Offsets

    @abc.abstractmethod
    async def groups(self, topic: str | None = None) -> list[tuple[str, str]]:
        """Topic and name of every group that is stored, or of those of one topic, sorted."""

    @abc.abstractmethod
    async def load(self, topic: str, group: str) -> GroupPosition | None:
        """
        The position of a group; ``None`` if it is new.

        Raises:
            CursorDamaged: There is one, and it cannot be read.
            EpochMismatch: It counts in another life of the log.
        """

    @abc.abstractmethod
    async def is_paused(self, topic: str, group: str) -> bool:
        """Whether a group was stored as paused, as far as that can be read: its position itself may be of no use."""

    @abc.abstractmethod
    async def save(self, topic: str, group: str, position: GroupPosition, *, sync: bool = True) -> None:
        """Store a group's position. Without ``sync`` it survives the process, but perhaps not a power cut."""

    @abc.abstractmethod
    async def remove(self, topic: str, group: str) -> None:
        """Forget a group: its claims, then its position. Its dead letters stay."""

    # Claims

    @abc.abstractmethod
    def claims(self, topic: str, group: str) -> Claims:
        """The claims of a group."""

    @abc.abstractmethod
    async def left_over(self, claims: Claims) -> dict[int, int]:
        """``Claims.left_over`` without blocking the loop."""

    # Dead letters

    @abc.abstractmethod
    async def add_dead_letter(
        self, record: Record, group: str, error: BaseException, attempts: list[Attempt], reason: Reason
    ) -> DeadLetter:
        """
        Store a dead letter; durable when this returns. Adding one that is still open changes nothing.

        Raises:
            OSError: It could not be stored; the caller tries again.
        """

    @abc.abstractmethod
    async def dead_letters(
        self, topic: str, ids: Sequence[str] | None = None, wanted: DeadLetterFilter | None = None
    ) -> list[DeadLetter]:
        """
        The dead letters of a topic that match (without ``wanted``: all that are open), among those named, in the order they are
        named in; or among all, in the order of their events.

        Raises:
            UnknownDeadLetter: One is named that does not exist. One that does not match is skipped.
        """

    @abc.abstractmethod
    async def dead_letter_topics(self) -> list[str]:
        """The topics that have dead letters, or had, sorted."""

    @abc.abstractmethod
    async def dead_letter_state(self, topic: str, letter_id: str) -> DeadLetterState | None:
        """The state of one dead letter; cheaper than reading it."""

    @abc.abstractmethod
    async def request_redrive(self, topic: str, ids: Sequence[str]) -> list[DeadLetter]:
        """
        Ask for dead letters to be redriven; returns those that now are asked for. Those that were redriven or dropped stay so.

        Raises:
            UnknownDeadLetter: One of them does not exist. None was asked for.
        """

    @abc.abstractmethod
    async def begin_redrive(self, topic: str, letter_id: str) -> None:
        """A dead letter is about to be handed to its group."""

    @abc.abstractmethod
    async def finish_redrive(self, topic: str, letter_id: str, error: BaseException | None = None) -> None:
        """A dead letter was redriven, or failed again."""

    @abc.abstractmethod
    async def drop_dead_letters(self, topic: str, ids: Sequence[str]) -> None:
        """
        Give dead letters up for good.

        Raises:
            UnknownDeadLetter: One of them does not exist.
        """

    async def dead_letter(self, topic: str, letter_id: str) -> DeadLetter:
        """One dead letter, in whatever state."""
        (letter,) = await self.dead_letters(topic, [letter_id], DeadLetterFilter(states=EVERY))
        return letter

    # Retention

    @abc.abstractmethod
    async def needs(self, topic: str | None = None) -> Needs:
        """Which records groups and dead letters still need, of one topic or of all. What it says of one topic survives a power cut."""

    @contextlib.asynccontextmanager
    async def needs_of(self, topic: str) -> AsyncIterator[Needs]:
        """Which records of a topic are needed; while the context is open nobody begins to need more. For ``Log.drop``."""
        async with self.changing:
            yield await self.needs(topic)
