"""
What a receiver of happenings has yet to read, by command: the unit in which it holds happenings and misses them.

Happenings of a command beyond what a mailbox holds in memory are a ``Gap``, to be read from history.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import chain, count
from typing import Any, Final, NamedTuple, cast

from .happening import AnyHappening, to_json

_ALONE_FACTOR: Final = 16
"""An idle receiver holds a single command of up to so many times its capacity in memory; a larger one is read from history."""


class Envelope(NamedTuple):
    """A happening and its place in the order of all."""

    seq: int
    happening: AnyHappening
    resume_seq: int | None = None
    """Where a subscriber that coalesces goes on after this one (``since``) so that nothing is missed; others go on after ``seq``."""

    def to_json(self) -> dict[str, Any]:
        """The envelope as JSON has it."""
        form: dict[str, Any] = {"seq": self.seq, "happening": to_json(self.happening)}
        if self.resume_seq is not None:
            form["resume_seq"] = self.resume_seq
        return form


Unit = Sequence[Envelope]
"""What one command emits, or the part of it that passes a filter: at least one."""


class Gap(NamedTuple):
    """Happenings of one command that a receiver does not hold: they are in history."""

    first_seq: int
    last_seq: int
    size: int
    """How many of them pass the receiver's filter."""


class Mailbox:
    """
    What a receiver has yet to read, by command. The bus knows the mailbox and not the receiver, so that one which is forgotten is let go.

    Args:
        capacity: How many commands it holds, and how many happenings: a command beyond that becomes a ``Gap``, unless it is the only one and has
            at most ``_ALONE_FACTOR`` times as many.
        reads_history: Whether its receiver can read a gap. Without, each happening counts by itself, and the oldest make way.
    """

    __slots__ = (
        "begun",
        "capacity",
        "happening_count",
        "has_large",
        "index_number",
        "is_closed",
        "missed_count",
        "reads_history",
        "units",
        "waiter",
    )

    def __init__(self, capacity: int, *, reads_history: bool) -> None:
        self.capacity = capacity
        self.reads_history = reads_history
        self.units: deque[Unit | Gap] = deque()
        self.begun = 0
        """How many happenings of the first unit were taken."""
        self.has_large = False
        """Whether a unit may be a gap, or of several happenings."""
        self.happening_count = 0
        """How many happenings it holds in memory."""
        self.missed_count = 0
        self.waiter: asyncio.Future[None] | None = None
        self.index_number: int | None = None
        self.is_closed = False

    def put(self, units: Sequence[Unit], count: int) -> None:
        """Add commands, each with what of it passes the filter; ``count`` happenings in all."""
        held = self.units
        if count > len(units):
            self.has_large = True
        if len(held) + count > self.capacity or self.happening_count + count > self.capacity:
            self._put_beyond(units, count)
        else:
            held.extend(units)
            self.happening_count += count
        if self.waiter is not None:
            self.wake()

    def _put_beyond(self, units: Sequence[Unit], count: int) -> None:
        """Add commands where there is not room for all in memory."""
        held, capacity = self.units, self.capacity
        if count == len(units) > capacity:  # nothing that is held stays
            for unit in held:
                self._miss(unit)
            held.clear()
            self.missed_count += count - capacity
            units, count = units[-capacity:], capacity
        if count == len(units) or not self.reads_history:
            held.extend(units)
            self.happening_count += count
        else:
            for unit in units:
                size = len(unit)
                room = capacity - self.happening_count if held else _ALONE_FACTOR * capacity
                if 1 < size > room:
                    held.append(Gap(unit[0].seq, unit[-1].seq, size))
                else:
                    held.append(unit)
                    self.happening_count += size
        if self.reads_history:
            for _ in range(len(held) - capacity):
                self._miss(held.popleft())
        else:
            self._miss_oldest(self.happening_count - capacity)

    def _miss(self, unit: Unit | Gap) -> None:
        if isinstance(unit, Gap):
            self.missed_count += unit.size
        else:
            left = len(unit) - self.begun
            self.missed_count += left
            self.happening_count -= left
        self.begun = 0

    def _miss_oldest(self, count: int) -> None:
        """Miss so many happenings, also in the midst of a command."""
        while count > 0:
            unit = self.units[0]
            left = len(unit) - self.begun
            if left <= count:
                self._miss(self.units.popleft())
            else:
                self.begun += count
                self.missed_count += count
                self.happening_count -= count
            count -= left

    def first(self) -> Envelope | Gap | None:
        """What is read next."""
        if not self.units:
            return None
        unit = self.units[0]
        return unit if isinstance(unit, Gap) else unit[self.begun]

    def take(self, limit: int) -> list[Envelope]:
        """Take what is held up to the next gap, at most ``limit``."""
        units = self.units
        if not self.has_large and len(units) <= limit:
            taken = [*chain.from_iterable(cast("deque[Unit]", units))]
            units.clear()
            self.happening_count = 0
            return taken
        taken = []
        while units and len(taken) < limit:
            unit = units[0]
            if isinstance(unit, Gap):
                break
            room = limit - len(taken)
            if self.begun or len(unit) > room:
                part = unit[self.begun : self.begun + room]
                taken += part
                self.begun += len(part)
                if self.begun < len(unit):
                    break
                self.begun = 0
            else:
                taken += unit
            units.popleft()
        self.happening_count -= len(taken)
        self.has_large = self.has_large and bool(units)
        return taken

    def wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        self.is_closed = True
        self.wake()


def units_of(first_seq: int, happenings: Sequence[AnyHappening], ends: Sequence[int] | None) -> list[Unit]:
    """Return the happenings with their seqs, by command. ``ends`` as of ``publish``."""
    envelopes = list(map(Envelope, count(first_seq), happenings))
    if ends is None:
        return [envelopes] if envelopes else []
    if len(ends) == len(envelopes) and [*ends] == [*range(1, len(ends) + 1)]:
        return [*zip(envelopes)]  # one each
    units: list[Unit] = []
    begin = 0
    for end in ends:
        if end > begin:
            units.append(envelopes[begin:end])
            begin = end
    assert begin == len(envelopes)
    return units


def by_unit(envelopes: Sequence[Envelope], units: Sequence[Unit]) -> Sequence[Unit]:
    """Return the parts of ``envelopes`` that belong to each unit, where there are any."""
    if len(units) == 1:
        return (envelopes,)
    ends = [unit[-1].seq for unit in units]
    parts: list[Unit] = []
    begin = 0
    while begin < len(envelopes):
        end_seq = ends[bisect_left(ends, envelopes[begin].seq)]
        end = begin + 1
        while end < len(envelopes) and envelopes[end].seq <= end_seq:
            end += 1
        parts.append(envelopes[begin:end])
        begin = end
    return parts
