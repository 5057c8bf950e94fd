"""
A clock that stands still until a test moves it, so that a day passes in moments and always alike.

Time is kept in whole nanoseconds: a thousand steps of a millisecond are exactly one second. Sleepers
wake in the order of their deadlines (at the same deadline, in the order they lay down), and all that
one of them sets off is done before the next one wakes.

The clock sees tasks of its own event loop. It cannot see work in threads or beyond a socket: while
somebody sleeps in virtual time, ``run_until`` moves on without waiting for those, unless ``is_busy_outside`` says
that they are at work. With nobody asleep it gives them real time to report.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar

from tidings.core.errors import TidingsError

T = TypeVar("T")

_NS: Final = 1_000_000_000
_START_NS: Final = 1_767_225_600 * _NS  # the first moment of 2026
_YEAR_SECONDS: Final = 366 * 86_400.0
_ROUNDS_MAX: Final = 100_000
_BLIND_ROUNDS: Final = 100
_STALE_COUNT_MIN: Final = 256
_OUTSIDE_ROUND_S: Final = 0.0005
_OUTSIDE_SECONDS_MAX: Final = 5.0


class NeverFinished(TidingsError):
    """Virtual time went as far as it may, and what was waited for is still not done."""

    code = "testing.never_finished"
    text = "{problem}, {elapsed_seconds} s after the virtual clock was started"
    problem: str
    elapsed_seconds: float


class VirtualClock:
    """
    A ``Clock`` that tests drive: by hand with ``advance``, or by itself with ``run_until``.

    Args:
        start_ns: What ``now_ns`` says at first; ``monotonic`` starts at 0.
        wakes_max: How many sleepers one ``advance`` or ``run_until`` may wake before it gives up.
        is_busy_outside: Whether something that the loop cannot see is at work: then time stands still, at most five real
            seconds for one step.
    """

    def __init__(
        self,
        start_ns: int = _START_NS,
        *,
        wakes_max: int = 1_000_000,
        is_busy_outside: Callable[[], bool] = lambda: False,
    ) -> None:
        self._wall_base_ns = start_ns
        self._elapsed_ns = 0
        self._wakes_max = wakes_max
        self._is_busy_outside = is_busy_outside
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._sleeps_count = 0
        self._stale_count = 0
        self._is_driven = False
        self._next_sleep: asyncio.Future[None] | None = None

    def now_ns(self) -> int:
        """Nanoseconds since 1970 in UTC, as started, advanced and jumped."""
        return self._wall_base_ns + self._elapsed_ns

    def monotonic(self) -> float:
        """Seconds advanced since the clock was made; jumps do not show."""
        return self._elapsed_ns / _NS

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock was moved this far; without a positive time, only let others run."""
        if math.isnan(seconds):
            raise ValueError("cannot sleep for NaN seconds")
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        sleeper = asyncio.get_running_loop().create_future()
        delay_ns = seconds * _NS
        if delay_ns == math.inf:
            await sleeper
            return
        # At least a nanosecond: a loop that sleeps for what is left until a deadline must get there,
        # however small the rest.
        due_ns = self._elapsed_ns + max(1, round(delay_ns))
        self._sleeps_count += 1
        heapq.heappush(self._sleepers, (due_ns, self._sleeps_count, sleeper))
        if self._next_sleep is not None and not self._next_sleep.done():
            self._next_sleep.set_result(None)
        try:
            await sleeper
        except asyncio.CancelledError:
            self._note_stale()
            raise

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward, or back if negative; nobody wakes, ``monotonic`` stays."""
        self._wall_base_ns += round(seconds * _NS)

    async def advance(self, seconds: float) -> None:
        """
        Let this much time pass, waking in turn everyone whose time comes, also those who begin to sleep meanwhile.

        Raises:
            NeverFinished: More sleepers than ``wakes_max`` woke on the way, or tasks never stop running.
            RuntimeError: Another task is driving this clock.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"time passes forward and ends: cannot advance by {seconds} s")
        until_ns = self._elapsed_ns + round(seconds * _NS)
        with self._driving():
            await self._settle()
            for _ in range(self._wakes_max):
                due_ns = self._next_due_ns()
                if due_ns is None or due_ns > until_ns:
                    self._elapsed_ns = until_ns
                    return
                self._wake_next()
                await self._settle()
        raise self._never(f"{self._wakes_max} sleepers woke and time is still short of its aim")

    async def run_until(
        self,
        awaitable: Awaitable[T],
        *,
        seconds_max: float = _YEAR_SECONDS,
        outside_seconds_max: float = _OUTSIDE_SECONDS_MAX,
    ) -> T:
        """
        Wait for ``awaitable``, moving time to the next sleeper whenever all tasks are blocked.

        Args:
            awaitable: What to wait for; it is cancelled if this call fails.
            seconds_max: How much virtual time it may take.
            outside_seconds_max: With nobody asleep, how long in real time to wait for threads and sockets.

        Returns:
            What the awaitable returns.

        Raises:
            NeverFinished: It took more virtual time, more wakes or more real time than it may.
            RuntimeError: Another task is driving this clock.
        """
        task = asyncio.ensure_future(awaitable)
        try:
            with self._driving():
                await self._drive(task, self._elapsed_ns + round(seconds_max * _NS), outside_seconds_max)
        except (NeverFinished, RuntimeError, asyncio.CancelledError):
            task.cancel()
            # A moment to unwind, so that its clean-up is over before the caller hears of it.
            await asyncio.wait({task}, timeout=0)
            raise
        return await task

    async def _drive(self, task: asyncio.Future[T], until_ns: int, outside_seconds_max: float) -> None:
        wakes = 0
        while True:
            await self._settle(task)
            if task.done():
                return
            due_ns = self._next_due_ns()
            if due_ns is None:
                if not await self._is_moved_from_outside(task, outside_seconds_max):
                    raise self._never("every task is blocked and nobody sleeps")
                continue
            if due_ns > until_ns:
                raise self._never("the virtual time allowed is over")
            if wakes == self._wakes_max:
                raise self._never(f"{wakes} sleepers woke and it is still not done")
            wakes += 1
            self._wake_next()

    async def _is_moved_from_outside(self, task: asyncio.Future[T], seconds: float) -> bool:
        self._next_sleep = asyncio.get_running_loop().create_future()
        try:
            either: set[asyncio.Future[T] | asyncio.Future[None]] = {task, self._next_sleep}
            done, _ = await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._next_sleep.cancel()
            self._next_sleep = None
        return bool(done)

    async def _settle(self, task: asyncio.Future[T] | None = None) -> None:
        """Let the loop run until every task is blocked and nobody is busy outside, or until ``task`` is done."""
        loop = asyncio.get_running_loop()
        latest = loop.time() + _OUTSIDE_SECONDS_MAX
        await self._settle_tasks(task)
        while self._is_busy_outside() and loop.time() < latest and not (task is not None and task.done()):
            await asyncio.sleep(_OUTSIDE_ROUND_S)
            await self._settle_tasks(task)

    async def _settle_tasks(self, task: asyncio.Future[T] | None) -> None:
        # Nothing public says whether callbacks wait to be run. The loops of asyncio keep them in this
        # queue; on others (uvloop) a fixed number of rounds has to do.
        ready = getattr(asyncio.get_running_loop(), "_ready", None)
        idle_rounds = 0
        for done_rounds in range(1, _ROUNDS_MAX + 1):
            await asyncio.sleep(0)
            if task is not None and task.done():
                return
            if ready is None:
                if done_rounds == _BLIND_ROUNDS:
                    return
                continue
            # Twice in a row: what a task has just sent to a local socket is seen by the loop only when
            # it polls, which it does between two rounds.
            idle_rounds = 0 if ready else idle_rounds + 1
            if idle_rounds == 2:
                return
        raise self._never(f"tasks are still busy after {_ROUNDS_MAX} rounds of the loop without a pause")

    def _next_due_ns(self) -> int | None:
        sleepers = self._sleepers
        while sleepers and sleepers[0][2].done():
            heapq.heappop(sleepers)
            self._stale_count = max(0, self._stale_count - 1)
        return sleepers[0][0] if sleepers else None

    def _wake_next(self) -> None:
        due_ns, _, sleeper = heapq.heappop(self._sleepers)
        self._elapsed_ns = due_ns
        sleeper.set_result(None)

    def _note_stale(self) -> None:
        # Timeouts that never strike are cancelled sleeps with far deadlines: without this, the heap would
        # keep each of them until its time comes.
        self._stale_count += 1
        if self._stale_count >= _STALE_COUNT_MIN and self._stale_count * 2 > len(self._sleepers):
            self._sleepers = [entry for entry in self._sleepers if not entry[2].done()]
            heapq.heapify(self._sleepers)
            self._stale_count = 0

    @contextlib.contextmanager
    def _driving(self) -> Iterator[None]:
        # Two drivers would each take the other for a busy task, and move time under each other's feet.
        if self._is_driven:
            raise RuntimeError("this clock is already being driven; a task under run_until should sleep instead")
        self._is_driven = True
        try:
            yield
        finally:
            self._is_driven = False

    def _never(self, problem: str) -> NeverFinished:
        return NeverFinished(problem, self.monotonic())
