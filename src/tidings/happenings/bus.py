"""
The happenings bus: one emits, everybody who listens has it, each at its own pace.

``emit`` hands a happening to every receiver that wants it and returns; it waits for nobody. A receiver holds as many as the bus's capacity;
one that reads more slowly than that loses the oldest and is told how many.

The unit of a receiver that can read history is one command, whatever its number of happenings: such a receiver holds as many commands as the
capacity, loses whole commands, and any one command reaches it whole. Happenings of a command beyond what a receiver holds in memory are a
``Gap``, to be read from history.

Seqs are given in the order of emission, and receivers get them in that order. Whoever writes happenings down first, as the ledger does, reserves
their seqs, and publishes them when they are written: what is emitted meanwhile stays behind them. The bus is used from one event loop's
thread.
"""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, Self, TypeVar

from .errors import HappeningsClosed, Lagged
from .filter_index import FilterIndex
from .filters import EVERYTHING, HappeningFilter
from .happening import AnyHappening
from .mailbox import Envelope as Envelope
from .mailbox import Gap, Mailbox, Unit, by_unit, units_of

CAPACITY: Final = 1024
"""How many happenings a receiver holds unless the bus is told otherwise."""
_MATCHINGS_MAX: Final = 3
"""How often very many happenings are matched with the filters in a thread, if receivers come or go meanwhile; then it is done at once."""
ItemT = TypeVar("ItemT")
_Matched = list[tuple[Mailbox, Sequence[Envelope]]]
"""What filtered mailboxes accept."""


class _Reservation:
    """Seqs whose happenings are being written down."""

    __slots__ = ("count", "first_seq", "matched", "units")

    def __init__(self, first_seq: int, count: int) -> None:
        self.first_seq = first_seq
        self.count = count
        self.units: list[Unit] | None = None
        """None while it is open."""
        self.matched: tuple[int, _Matched] | None = None
        """What filtered mailboxes accept of it, for this version of the index."""


class HappeningsBus:
    """
    Gives out seqs and delivers to receivers.

    Args:
        capacity: How many happenings each receiver holds; more than 0.
        last_seq: The highest seq that was ever given out; 0 at first.
        covers: Whether seqs must be kept from being given again after a restart, and if so, who sees to that. Called with the newest seq whenever
            a plain ``emit`` has one that nothing on disk speaks of, again while such a one waits; it is delivered once ``cover`` was told of it.
    """

    def __init__(
        self, *, capacity: int = CAPACITY, last_seq: int = 0, covers: Callable[[int], None] | None = None
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a receiver must hold at least one happening, not {capacity}")
        self.capacity: Final = capacity
        self.last_seq = last_seq
        """The seq of the newest happening that receivers were given; 0 if there never was one."""
        self.missed_count = 0
        """How many happenings subscriptions have told that they missed, all together."""
        self._minted_seq = last_seq
        self._covered_seq = last_seq
        self._covers = covers
        self._waiting: deque[Envelope | _Reservation] = deque()
        self._plain_waiting_count = 0
        self._reservations: dict[int, _Reservation] = {}
        self._unfiltered: dict[Mailbox, None] = {}
        self._filtered: dict[Mailbox, None] = {}
        self._index: FilterIndex[Mailbox] = FilterIndex()
        self._index_version = 0
        """Changes with every receiver with a filter that comes or goes."""
        self._held: deque[AnyHappening] | None = None
        """Plain emits that wait for their seqs, while it is not known how many are taken before them."""
        self._is_closed = False

    @property
    def minted_seq(self) -> int:
        """The highest seq that was given out, also to what is not delivered yet."""
        return self._minted_seq

    @property
    def covered_seq(self) -> int:
        """Up to here no seq is given again, even after a restart."""
        return self._covered_seq

    @property
    def receiver_count(self) -> int:
        """How many receivers there are."""
        return len(self._unfiltered) + len(self._filtered)

    def emit(self, happening: AnyHappening) -> None:
        """
        Tell everybody who listens. Never waits and never fails; without a listener, or after ``close``, nothing remains but the seq.

        The happening is not written anywhere. What was reserved before it is delivered before it; of those that wait for that the newest are kept,
        as many as a receiver holds.
        """
        if self._held is not None:
            self._held.append(happening)
            if len(self._held) > self.capacity:
                self._miss_plain(self._held.popleft())
            return
        self._minted_seq = seq = self._minted_seq + 1
        if self._is_closed:
            return
        envelope = Envelope(seq, happening)
        is_uncovered = self._covers is not None and seq > self._covered_seq
        if not (is_uncovered or self._waiting):
            self._deliver(((envelope,),))
            return
        self._waiting.append(envelope)
        self._plain_waiting_count += 1
        if self._plain_waiting_count > self.capacity:
            self._miss_oldest_waiting()
        if is_uncovered and self._covers is not None:
            self._covers(seq)

    def hold(self) -> None:
        """Give no seqs to plain emits until ``resume``: happenings are being made that come before them. Of those that wait the newest are kept."""
        self._held = deque()

    def resume(self) -> None:
        """Emit what was held."""
        held, self._held = self._held or (), None
        for happening in held:
            self.emit(happening)

    def reserve(self, count: int) -> int:
        """
        Take the next seqs for happenings that are about to be written down.

        Returns:
            The first of ``count`` seqs in a row.
        """
        reservation = _Reservation(self._minted_seq + 1, count)
        self._minted_seq += count
        self._reservations[reservation.first_seq] = reservation
        self._waiting.append(reservation)
        return reservation.first_seq

    def publish(self, first_seq: int, happenings: Sequence[AnyHappening], ends: Sequence[int] | None = None) -> None:
        """
        Deliver what was written down under the seqs reserved from ``first_seq`` on, as soon as everything before it is.

        If there are fewer than were reserved, the rest is abandoned.

        Args:
            first_seq: As ``reserve`` gave it.
            happenings: Those of one command, or of several.
            ends: Of several commands, the number of happenings up to and with each, rising; none given: they are of one command.
        """
        reservation = self._reservations.pop(first_seq)
        assert len(happenings) <= reservation.count
        reservation.units = units_of(first_seq, happenings, ends)
        self._covered_seq = max(self._covered_seq, first_seq + len(happenings) - 1)
        self._release()

    async def publish_many(
        self, first_seq: int, happenings: Sequence[AnyHappening], ends: Sequence[int] | None = None
    ) -> None:
        """``publish`` of very many happenings: what takes long is done in a thread, and what is emitted meanwhile stays behind them."""
        units = await asyncio.to_thread(units_of, first_seq, happenings, ends)
        matched: _Matched | None = None
        for _ in range(_MATCHINGS_MAX):
            version = self._index_version
            matched = await asyncio.to_thread(self._match, units)
            if version == self._index_version:
                break
            matched = None  # a receiver came or went: what it accepts is not known
        reservation = self._reservations.pop(first_seq)
        assert len(happenings) <= reservation.count
        reservation.units = units
        reservation.matched = None if matched is None else (self._index_version, matched)
        self._covered_seq = max(self._covered_seq, first_seq + len(happenings) - 1)
        self._release()

    def _match(self, units: Sequence[Unit]) -> _Matched | None:
        """Return what each filtered mailbox accepts; none if receivers came or went meanwhile. May run in another thread."""
        envelopes = units[0] if len(units) == 1 else [envelope for unit in units for envelope in unit]
        try:
            return list(self._index.matching_batches(envelopes)) if envelopes and self._index else []
        except (RuntimeError, KeyError):  # changed while it was looked through
            return None

    def abandon(self, first_seq: int) -> None:
        """Give up a reservation: the write failed. Its seqs are left out, and no cursor ever stands on one."""
        self._reservations.pop(first_seq).units = []
        self._release()

    def cover(self, seq: int) -> None:
        """Hear that seqs up to this one are written down as used."""
        self._covered_seq = max(self._covered_seq, seq)
        self._release()

    def subscribe(self, filter: HappeningFilter | None = None, *, reads_history: bool = False) -> Receiver:
        """
        A receiver of everything from now on that passes the filter.

        Args:
            filter: What to receive.
            reads_history: Whether who reads it can read a gap from history (``Receiver.gap``). Then it holds whole commands.
        """
        filter = filter or EVERYTHING
        mailbox = Mailbox(self.capacity, reads_history=reads_history)
        if self._is_closed:
            mailbox.close()
        elif filter.is_empty:
            self._unfiltered[mailbox] = None
        else:
            self._filtered[mailbox] = None
            self._index_version += 1
            mailbox.index_number = self._index.add(filter, mailbox)
        return Receiver(self, mailbox)

    def close(self) -> None:
        """Deliver nothing more. Receivers give what they still hold, and then end."""
        self._is_closed = True
        self._waiting.clear()
        for mailbox in (*self._unfiltered, *self._filtered):
            self._remove(mailbox)

    def _remove(self, mailbox: Mailbox) -> None:
        if mailbox.is_closed:
            return
        mailbox.close()
        if mailbox.index_number is None:
            del self._unfiltered[mailbox]
        else:
            del self._filtered[mailbox]
            self._index_version += 1
            self._index.remove(mailbox.index_number)

    def _release(self) -> None:
        """Deliver what waits up to the first that must wait on."""
        ready: list[Unit] = []
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, Envelope):
                if self._covers is not None and first.seq > self._covered_seq:
                    self._covers(self._minted_seq)
                    break
                ready.append((first,))
                self._plain_waiting_count -= 1
            elif first.units is None:
                break
            elif first.matched is not None and first.units:
                if ready:
                    self._deliver(ready)
                    ready = []
                version, matched = first.matched
                self._deliver(first.units, matched if version == self._index_version else None)
            else:
                ready.extend(first.units)
            self._waiting.popleft()
        # No record speaks of seqs that were abandoned, and a restart may give them out: ``last_seq`` never stands on one.
        if ready:
            self._deliver(ready)

    def _deliver(self, units: Sequence[Unit], matched: _Matched | None = None) -> None:
        self.last_seq = units[-1][-1].seq
        if self._unfiltered:
            happening_count = sum(map(len, units))
            for mailbox in self._unfiltered:
                mailbox.put(units, happening_count)
        if self._index:
            if matched is None:
                envelopes = units[0] if len(units) == 1 else [envelope for unit in units for envelope in unit]
                found = self._index.matching_batches(envelopes)
            else:
                found = iter(matched)
            split: Sequence[Envelope] = ()
            parts: Sequence[Unit] = ()
            for mailbox, accepted in found:
                if accepted is not split:  # many mailboxes share a list
                    split, parts = accepted, by_unit(accepted, units)
                mailbox.put(parts, len(accepted))

    def _miss_oldest_waiting(self) -> None:
        """Give up the oldest plain emit that waits, when there are as many as a receiver holds: who wanted it has missed it."""
        place, envelope = next((place, each) for place, each in enumerate(self._waiting) if isinstance(each, Envelope))
        del self._waiting[place]
        self._plain_waiting_count -= 1
        self._miss_plain(envelope.happening)

    def _miss_plain(self, happening: AnyHappening) -> None:
        for mailbox in (*self._unfiltered, *self._index.matching(happening)):
            mailbox.missed_count += 1
            mailbox.wake()


class HappeningStream(abc.ABC, Generic[ItemT]):
    """
    What a subscriber reads, one task at a time, also as an iterator that ends with the stream.

    Close it when done, or use it as a context manager; one that nobody refers to any more is closed by itself.
    """

    @abc.abstractmethod
    async def recv_many(self, limit: int = CAPACITY) -> list[ItemT]:
        """
        What has come, at least one and at most ``limit``; waits if there is nothing.

        Raises:
            Lagged, HappeningsClosed: As of ``recv``.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End it: nothing more is received."""

    async def recv(self) -> ItemT:
        """
        The next one, as soon as there is one.

        Raises:
            Lagged: Some happenings were missed.
            HappeningsClosed: Everything was read, and nothing more will come.
        """
        return (await self.recv_many(1))[0]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        try:
            return await self.recv()
        except HappeningsClosed:
            raise StopAsyncIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Receiver(HappeningStream[Envelope]):
    """One listener's own view: everything that passes its filter, in order. After ``Lagged`` it goes on with the oldest that is left."""

    def __init__(self, bus: HappeningsBus, mailbox: Mailbox) -> None:
        self._bus = bus
        self._mailbox = mailbox

    async def recv_many(self, limit: int = CAPACITY) -> list[Envelope]:
        while not (taken := self.take(limit)):
            await self.arrival()
        return taken

    def try_recv(self) -> Envelope | None:
        """
        The next happening if there is one now.

        Raises:
            Lagged, HappeningsClosed: As of ``recv``.
        """
        return next(iter(self.take(1)), None)

    def take(self, limit: int) -> list[Envelope]:
        """
        What has come, at most ``limit``; nothing if there is nothing yet.

        Raises:
            Lagged, HappeningsClosed: As of ``recv``.
        """
        mailbox = self._mailbox
        if mailbox.missed_count:
            missed_count, mailbox.missed_count = mailbox.missed_count, 0
            raise Lagged(missed_count, self.oldest_seq, self._bus.last_seq)
        if not mailbox.units and mailbox.is_closed:
            raise HappeningsClosed
        return mailbox.take(limit)

    @property
    def oldest_seq(self) -> int:
        """The seq of what is read next; 0 if there is nothing yet."""
        match self._mailbox.first():
            case Gap(first_seq=seq) | Envelope(seq=seq):
                return seq
        return 0

    def gap(self) -> Gap | None:
        """Take the gap that is read next; None if happenings are, or nothing is there yet, or some were missed before it."""
        first = self._mailbox.first()
        if not isinstance(first, Gap) or self._mailbox.missed_count:
            return None
        self._mailbox.units.popleft()
        return first

    def arrival(self) -> asyncio.Future[None]:
        """A future that is done as soon as ``take`` has something to give or to say."""
        mailbox = self._mailbox
        waiter = mailbox.waiter
        if waiter is None or waiter.done():  # done, though nobody woke it: cancelled
            waiter = mailbox.waiter = asyncio.get_running_loop().create_future()
            if mailbox.units or mailbox.missed_count or mailbox.is_closed:
                mailbox.wake()
        return waiter

    def close(self) -> None:
        """Receive nothing more. What is held can still be read."""
        self._bus._remove(self._mailbox)

    def __del__(self) -> None:
        self.close()
