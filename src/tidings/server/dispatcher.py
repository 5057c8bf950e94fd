"""
The dispatcher: one reader of the log, in seq order, for everybody who is told of commits.

Listeners are called one after another with the same records, before any of them sees a record further on. The first listener is
the access book: so a revocation at seq r is in force before a record above r is delivered to anybody.

A listener that raises has missed something, and must not go on as if it had not: it is taken out, and told so (``failed``),
whereupon a door ends its conversations. A listener that is ``essential`` (the access book) takes the dispatcher with it: without
the book nobody can say who may see what, so nothing is delivered any more, and the node is not ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tidings.core.errors import TidingsError
from tidings.log.errors import LogClosed
from tidings.log.interface import Log, Query
from tidings.log.record import Record

from .errors import DispatcherStopped

__all__ = ["Dispatcher", "Listener"]

logger = logging.getLogger(__name__)


@runtime_checkable
class Listener(Protocol):
    """Somebody who is told what was committed."""

    def committed(self, records: Sequence[Record]) -> None:
        """These records are durable, in seq order, right after those of the call before. Must not wait."""
        ...


class _Seat:
    """One listener's place in the row."""

    __slots__ = ("call", "is_essential", "name", "on_failure", "problem")

    def __init__(
        self, name: str, listener: Listener, *, is_essential: bool, on_failure: Callable[[str], None] | None
    ) -> None:
        self.name = name
        self.call = listener.committed
        self.is_essential = is_essential
        self.on_failure = on_failure
        self.problem: str | None = None


class Dispatcher:
    """
    Reads the log from a seq on and hands the records round.

    Args:
        log: The log to follow.
        since: Everything up to here was handed out already.
        batch_count_max: Records handed out at once; the loop gets a turn between batches.
        batch_bytes_max: About how many bytes of them.
    """

    def __init__(self, log: Log, *, since: int = 0, batch_count_max: int = 512, batch_bytes_max: int = 1 << 20) -> None:
        self._log = log
        self._batch_count_max = batch_count_max
        self._batch_bytes_max = batch_bytes_max
        self._seats: list[_Seat] = []
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._is_closed = False
        self.seq = since
        """Every listener was given all records up to this one."""
        self.problem: str | None = None
        """Why nothing is handed out any more."""

    def add(
        self,
        name: str,
        listener: Listener,
        *,
        is_essential: bool = False,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """
        Seat a listener behind those there are; from now on it is told.

        Args:
            name: For logs and readiness.
            listener: Whom to tell.
            is_essential: If it fails, nothing is handed out any more.
            on_failure: Called with the reason when it has failed: end what depends on having heard everything.
        """
        self._seats.append(_Seat(name, listener, is_essential=is_essential, on_failure=on_failure))

    def start(self) -> None:
        """Begin to follow."""
        assert self._task is None
        self._task = asyncio.get_running_loop().create_task(self._run(), name="tidings-dispatcher")

    async def close(self) -> None:
        """Stop following. Whoever waits for a seq is told. Closing twice is fine."""
        self._is_closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._end_waiting()

    @property
    def lag(self) -> int:
        """How many committed seqs were not handed out yet."""
        return max(0, self._log.position.seq - self.seq)

    @property
    def problems(self) -> list[str]:
        """What is wrong: its own end, and listeners that failed."""
        own = [] if self.problem is None else [self.problem]
        return own + [f"{seat.name}: {seat.problem}" for seat in self._seats if seat.problem is not None]

    async def reached(self, seq: int) -> None:
        """
        Wait until every listener was given the records up to ``seq``.

        Raises:
            DispatcherStopped: It ended before.
        """
        if self.seq >= seq:
            return
        if self._is_closed or self.problem is not None:
            raise DispatcherStopped(seq, self.problem)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (seq, turn)
        self._waiting.append(place)
        try:
            await turn
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    async def _run(self) -> None:
        try:
            await self._follow()
        except LogClosed:
            if not self._is_closed:
                self._fail("the log was closed")
        except (TidingsError, OSError) as error:
            self._fail(f"reading the log failed: {error}")
        finally:
            self._end_waiting()

    async def _follow(self) -> None:
        query = Query(since=self.seq)
        while self.problem is None:
            page = await self._log.read(query, limit=self._batch_count_max, bytes_max=self._batch_bytes_max)
            query = page.next
            if page.records:
                self._hand_out(page.records)
                # Commits without end must not keep connections from being served.
                await asyncio.sleep(0)
            if page.at_end and self.problem is None:
                await self._log.wait(self.seq if query.since is None else max(self.seq, query.since))

    def _hand_out(self, records: list[Record]) -> None:
        for seat in self._seats:
            if seat.problem is not None:
                continue
            try:
                seat.call(records)
            except Exception as error:  # noqa: BLE001 - whatever it is: it has missed records, and the others must not
                self._unseat(seat, records, error)
                if seat.is_essential:
                    return
        self.seq = records[-1].seq
        self._wake()

    def _unseat(self, seat: _Seat, records: list[Record], error: Exception) -> None:
        seat.problem = f"failed at seq {records[0].seq} to {records[-1].seq}: {type(error).__name__}: {error}"
        logger.error("listener %s %s; it is told of no more commits", seat.name, seat.problem, exc_info=error)
        if seat.on_failure is not None:
            try:
                seat.on_failure(seat.problem)
            except Exception:
                logger.exception("listener %s could not even be told that it failed", seat.name)
        if seat.is_essential:
            self._fail(f"{seat.name} failed, and nothing may be delivered without it")

    def _fail(self, problem: str) -> None:
        self.problem = problem
        logger.error("the dispatcher has stopped: %s", problem)
        for seat in self._seats:
            if seat.problem is None and seat.on_failure is not None:
                try:
                    seat.on_failure(problem)
                except Exception:
                    logger.exception("listener %s could not be told that the dispatcher stopped", seat.name)

    def _wake(self) -> None:
        if not self._waiting:
            return
        reached = [place for place in self._waiting if place[0] <= self.seq]
        if reached:
            self._waiting = [place for place in self._waiting if place[0] > self.seq]
            for _, turn in reached:
                if not turn.done():
                    turn.set_result(None)

    def _end_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for seq, turn in waiting:
            if not turn.done():
                turn.set_exception(DispatcherStopped(seq, self.problem))
