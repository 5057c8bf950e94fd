"""
The happenings bus: one emits, everybody who listens has it, each at its own pace.

``emit`` hands a happening to every receiver that wants it and returns; it waits for nobody. A receiver holds as many as the bus's capacity;
one that reads more slowly than that loses the oldest and is told how many.

Seqs are given in the order of emission, and receivers get them in that order. Whoever writes happenings down first, as the ledger does, reserves
their seqs, and publishes them when they are written: what is emitted meanwhile stays behind them. The bus is used from one event loop's
thread.
"""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from .errors import HappeningsClosed, Lagged
from .filter_index import FilterIndex
from .filters import EVERYTHING, HappeningFilter
from .happening import AnyHappening, to_json

CAPACITY: Final = 1024
"""How many happenings a receiver holds unless the bus is told otherwise."""


ItemT = TypeVar("ItemT")


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


class _Mailbox:
    """What a receiver has yet to read. The bus knows the mailbox and not the receiver, so that one which is forgotten is let go."""

    __slots__ = ("capacity", "envelopes", "index_number", "is_closed", "missed_count", "waiter")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.envelopes: deque[Envelope] = deque(maxlen=capacity)
        self.missed_count = 0
        self.waiter: asyncio.Future[None] | None = None
        self.index_number: int | None = None
        self.is_closed = False

    def put(self, envelopes: Sequence[Envelope]) -> None:
        held = self.envelopes
        overflow = len(held) + len(envelopes) - self.capacity
        if overflow > 0:
            self.missed_count += overflow
        held.extend(envelopes)
        if self.waiter is not None:
            self.wake()

    def wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        self.is_closed = True
        self.wake()


class _Reservation:
    """Seqs whose happenings are being written down."""

    __slots__ = ("count", "envelopes", "first_seq")

    def __init__(self, first_seq: int, count: int) -> None:
        self.first_seq = first_seq
        self.count = count
        self.envelopes: list[Envelope] | None = None
        """None while it is open."""


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
        self._unfiltered: dict[_Mailbox, None] = {}
        self._filtered: dict[_Mailbox, None] = {}
        self._index: FilterIndex[_Mailbox] = FilterIndex()
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
        self._minted_seq = seq = self._minted_seq + 1
        if self._is_closed:
            return
        envelope = Envelope(seq, happening)
        is_uncovered = self._covers is not None and seq > self._covered_seq
        if not (is_uncovered or self._waiting):
            self._deliver((envelope,))
            return
        self._waiting.append(envelope)
        self._plain_waiting_count += 1
        if self._plain_waiting_count > self.capacity:
            self._miss_oldest_waiting()
        if is_uncovered and self._covers is not None:
            self._covers(seq)

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

    def publish(self, first_seq: int, happenings: Sequence[AnyHappening]) -> None:
        """
        Deliver what was written down under the seqs reserved from ``first_seq`` on, as soon as everything before it is.

        If there are fewer than were reserved, the rest is abandoned.
        """
        reservation = self._reservations.pop(first_seq)
        assert len(happenings) <= reservation.count
        reservation.envelopes = [Envelope(seq, each) for seq, each in enumerate(happenings, first_seq)]
        self._covered_seq = max(self._covered_seq, first_seq + len(happenings) - 1)
        self._release()

    def abandon(self, first_seq: int) -> None:
        """Give up a reservation: the write failed. Its seqs are left out, and no cursor ever stands on one."""
        self._reservations.pop(first_seq).envelopes = []
        self._release()

    def cover(self, seq: int) -> None:
        """Hear that seqs up to this one are written down as used."""
        self._covered_seq = max(self._covered_seq, seq)
        self._release()

    def subscribe(self, filter: HappeningFilter | None = None) -> Receiver:
        """A receiver of everything from now on that passes the filter."""
        filter = filter or EVERYTHING
        mailbox = _Mailbox(self.capacity)
        if self._is_closed:
            mailbox.close()
        elif filter.is_empty:
            self._unfiltered[mailbox] = None
        else:
            self._filtered[mailbox] = None
            mailbox.index_number = self._index.add(filter, mailbox)
        return Receiver(self, mailbox)

    def close(self) -> None:
        """Deliver nothing more. Receivers give what they still hold, and then end."""
        self._is_closed = True
        self._waiting.clear()
        for mailbox in (*self._unfiltered, *self._filtered):
            self._remove(mailbox)

    def _remove(self, mailbox: _Mailbox) -> None:
        if mailbox.is_closed:
            return
        mailbox.close()
        if mailbox.index_number is None:
            del self._unfiltered[mailbox]
        else:
            del self._filtered[mailbox]
            self._index.remove(mailbox.index_number)

    def _release(self) -> None:
        """Deliver what waits up to the first that must wait on."""
        ready: list[Envelope] = []
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, Envelope):
                if self._covers is not None and first.seq > self._covered_seq:
                    self._covers(self._minted_seq)
                    break
                ready.append(first)
                self._plain_waiting_count -= 1
            elif first.envelopes is None:
                break
            else:
                ready.extend(first.envelopes)
            self._waiting.popleft()
        # No record speaks of seqs that were abandoned, and a restart may give them out: ``last_seq`` never stands on one.
        if ready:
            self._deliver(ready)

    def _deliver(self, envelopes: Sequence[Envelope]) -> None:
        self.last_seq = envelopes[-1].seq
        for mailbox in self._unfiltered:
            mailbox.put(envelopes)
        if self._index:
            for mailbox, accepted in self._index.matching_batches(envelopes):
                mailbox.put(accepted)

    def _miss_oldest_waiting(self) -> None:
        """Give up the oldest plain emit that waits, when there are as many as a receiver holds: who wanted it has missed it."""
        place, envelope = next((place, each) for place, each in enumerate(self._waiting) if isinstance(each, Envelope))
        del self._waiting[place]
        self._plain_waiting_count -= 1
        for mailbox in (*self._unfiltered, *self._index.matching(envelope.happening)):
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

    def __init__(self, bus: HappeningsBus, mailbox: _Mailbox) -> None:
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
        held = mailbox.envelopes
        if mailbox.missed_count:
            missed_count, mailbox.missed_count = mailbox.missed_count, 0
            raise Lagged(missed_count, held[0].seq if held else 0, self._bus.last_seq)
        if not held and mailbox.is_closed:
            raise HappeningsClosed
        if len(held) <= limit:
            taken = list(held)
            held.clear()
            return taken
        return [held.popleft() for _ in range(limit)]

    def arrival(self) -> asyncio.Future[None]:
        """A future that is done as soon as ``take`` has something to give or to say."""
        mailbox = self._mailbox
        waiter = mailbox.waiter
        if waiter is None or waiter.done():  # done, though nobody woke it: cancelled
            waiter = mailbox.waiter = asyncio.get_running_loop().create_future()
            if mailbox.envelopes or mailbox.missed_count or mailbox.is_closed:
                mailbox.wake()
        return waiter

    def close(self) -> None:
        """Receive nothing more. What is held can still be read."""
        self._bus._remove(self._mailbox)

    def __del__(self) -> None:
        self.close()
