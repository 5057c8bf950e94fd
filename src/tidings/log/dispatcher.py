"""
The dispatcher: one reader of the log, in seq order, that calls every listener with each batch of committed records.

Listeners are called in the order they were added. Some know what decides who is told, such as the access book, by the records of a topic.
Such a record is told at once and begins a batch: so what was committed before it is delivered by the rights of before, what comes after it
by the rights that it gives or takes, and it is in force when the next request comes.

What listeners tell many clients of a batch costs about the same however long the batch is. So they are told of the first commit after a
silence at once, and of what follows it closely together, unless somebody waits for it.

A listener that raises has missed records and must not continue as if it had not: it is removed, and its ``on_failure`` is called,
whereupon an endpoint closes its connections. If one that decides raises, the dispatcher stops too: without the access book nobody can
say who may see what.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tidings.core.errors import TidingsError
from tidings.core.tasks import cancel_and_wait

from .errors import DispatcherStopped, LogClosed
from .interface import Log, Query
from .record import Record

logger = logging.getLogger(__name__)


@runtime_checkable
class Listener(Protocol):
    """What is called with committed records."""

    def committed(self, records: Sequence[Record]) -> None:
        """These records are durable, in seq order, right after those of the call before. Must not wait."""
        ...


class _Entry:
    """A listener as the dispatcher keeps it."""

    __slots__ = ("call", "finish", "is_deciding", "name", "on_failure", "problem")

    def __init__(
        self,
        name: str,
        listener: Listener,
        *,
        is_deciding: bool,
        finish: Callable[[], None] | None,
        on_failure: Callable[[str], None] | None,
    ) -> None:
        self.name = name
        self.call = listener.committed
        self.is_deciding = is_deciding
        self.finish = finish
        self.on_failure = on_failure
        self.problem: str | None = None


class Dispatcher:
    """
    Reads the log from a seq on and calls the listeners with what it reads.

    Args:
        log: The log to follow.
        since: The listeners know all records up to here.
        batch_count_max: Records per call; other tasks run between two batches.
        batch_bytes_max: About how many bytes of them.
        interval_s: How long it is at least from one batch to the next, as long as nothing is decided, nobody waits for a seq and less than a
            batch is there.
    """

    def __init__(
        self,
        log: Log,
        *,
        since: int = 0,
        batch_count_max: int = 512,
        batch_bytes_max: int = 1 << 20,
        interval_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._log = log
        self._interval_s = interval_s
        self._batch_count_max = batch_count_max
        self._batch_bytes_max = batch_bytes_max
        self._entries: list[_Entry] = []
        self._deciding: set[str] = set()
        """The topics whose records decide who is told."""
        self._held: list[Record] = []
        """What was read, and not told yet."""
        self._held_bytes = 0
        self._told_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._is_closed = False
        self.seq = since
        """Every listener was given all records up to this one."""
        self.problem: str | None = None
        """Why the dispatcher has stopped."""

    def add(
        self,
        name: str,
        listener: Listener,
        *,
        decides_by: str | None = None,
        finish: Callable[[], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """
        Add a listener behind those there are.

        Args:
            name: For logs and readiness.
            listener: What to call with the records from now on.
            decides_by: The records of this topic change what the listeners behind it may tell whom. If it fails, the dispatcher stops.
            finish: Called before such a record is told, of a listener that does not do everything at once: it is to be done with what it was told.
            on_failure: Called with the reason when the listener failed or the dispatcher stopped: no more records will come.
        """
        entry = _Entry(name, listener, is_deciding=decides_by is not None, finish=finish, on_failure=on_failure)
        self._entries.append(entry)
        if decides_by is not None:
            self._deciding.add(decides_by)

    def start(self) -> None:
        """Start to follow the log."""
        assert self._task is None
        self._task = asyncio.get_running_loop().create_task(self._run(), name="tidings-dispatcher")

    async def close(self) -> None:
        """Stop. Whoever waits for a seq gets ``DispatcherStopped``. Closing twice is fine."""
        self._is_closed = True
        task, self._task = self._task, None
        await cancel_and_wait(task)
        self._let_go()
        self._end_waiting()

    @property
    def lag(self) -> int:
        """How many committed seqs the listeners have not been given yet."""
        return max(0, self._log.position.seq - self.seq)

    @property
    def problems(self) -> list[str]:
        """Why it stopped, and which listeners failed."""
        own = [] if self.problem is None else [self.problem]
        return own + [f"{entry.name}: {entry.problem}" for entry in self._entries if entry.problem is not None]

    async def reached(self, seq: int) -> None:
        """
        Wait until every listener was given the records up to ``seq``.

        Raises:
            DispatcherStopped: It ended before.
        """
        if self._held and self.seq < seq <= self._held[-1].seq:
            self._tell_held()
        if self.seq >= seq:
            return
        if self._is_closed or self.problem is not None:
            raise DispatcherStopped(seq, self.problem)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (seq, waiter)
        self._waiting.append(entry)
        try:
            await waiter
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

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
            page = await self._log.read(
                query, limit=self._batch_count_max - len(self._held), bytes_max=self._batch_bytes_max
            )
            query = page.next
            if page.records:
                self._take(page.records, is_more=not page.at_end)
                # A steady stream of commits must not starve other tasks.
                await asyncio.sleep(0)
            if page.at_end and self.problem is None:
                known = self._held[-1].seq if self._held else self.seq
                await self._log.wait(known if query.since is None else max(known, query.since))

    def _take(self, records: list[Record], *, is_more: bool) -> None:
        """Tell of them, now or when it is time, and of each that decides in a batch that it begins."""
        is_decided = False
        for record in records:
            if record.topic in self._deciding:
                self._tell_held()
                self._have_finished(record)
                is_decided = True
            self._held.append(record)
            self._held_bytes += len(record.payload_json)
        if (
            is_more
            or is_decided
            or self._waiting
            or len(self._held) >= self._batch_count_max
            or self._held_bytes >= self._batch_bytes_max
        ):
            self._tell_held()
            return
        loop = asyncio.get_running_loop()
        due_s = self._told_s + self._interval_s()
        if loop.time() >= due_s:
            self._tell_held()
        elif self._timer is None:
            self._timer = loop.call_at(due_s, self._tell_held)

    def _tell_held(self) -> None:
        """Call the listeners, unless one that decides has failed: what comes then is told to nobody."""
        records = self._held
        self._let_go()
        if not records or self.problem is not None:
            return
        self._told_s = asyncio.get_running_loop().time()
        for entry in self._entries:
            if entry.problem is None:
                try:
                    entry.call(records)
                except Exception as error:  # noqa: BLE001 - it has missed records, whatever it raised; the others must not
                    self._remove(entry, records, error)
                    if self.problem is not None:
                        return
        self.seq = records[-1].seq
        self._wake()

    def _have_finished(self, record: Record) -> None:
        """Nobody goes on with what is before this record by what it decides."""
        for entry in self._entries:
            if entry.finish is not None and entry.problem is None:
                try:
                    entry.finish()
                except Exception as error:  # noqa: BLE001 - as for what it is told
                    self._remove(entry, [record], error)

    def _let_go(self) -> None:
        """Forget what is held: it was told, or never will be."""
        self._held = []
        self._held_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _remove(self, entry: _Entry, records: list[Record], error: Exception) -> None:
        entry.problem = f"failed at seq {records[0].seq} to {records[-1].seq}: {type(error).__name__}: {error}"
        logger.error("listener %s %s; it gets no more records", entry.name, entry.problem, exc_info=error)
        _report(entry, entry.problem)
        if entry.is_deciding:
            self._fail(f"{entry.name} failed, and nothing may be delivered without it")

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self._let_go()
        logger.error("the dispatcher has stopped: %s", problem)
        for entry in self._entries:
            if entry.problem is None:
                _report(entry, problem)

    def _wake(self) -> None:
        if not self._waiting:
            return
        reached = [entry for entry in self._waiting if entry[0] <= self.seq]
        if reached:
            self._waiting = [entry for entry in self._waiting if entry[0] > self.seq]
            for _, waiter in reached:
                if not waiter.done():
                    waiter.set_result(None)

    def _end_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for seq, waiter in waiting:
            if not waiter.done():
                waiter.set_exception(DispatcherStopped(seq, self.problem))


def _report(entry: _Entry, problem: str) -> None:
    if entry.on_failure is not None:
        try:
            entry.on_failure(problem)
        except Exception:
            logger.exception("listener %s failed again when its failure was reported", entry.name)
