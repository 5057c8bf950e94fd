"""
Lanes: where blocking disk work runs, one job at a time, in order; and threads, which say how it is done.

``OsThreads`` does it in threads. ``NoThreads`` does it in the event loop, so that a simulated disk sees its calls in the same
order every time. ``tidings.testing`` has a third kind, in which a seed decides who goes on at each disk call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

__all__ = ["InlineLane", "Lane", "NoThreads", "OsThreads", "ThreadLane", "Threads", "to_the_end"]

_T = TypeVar("_T")
Job = Callable[[], None]
Done = Callable[[BaseException | None], None]


class Lane(Protocol):
    """Runs blocking jobs beside the event loop."""

    def run(self, job: Job, done: Done) -> None:
        """Run ``job``; then, in the loop, ``done`` with the exception it raised or ``None``. One at a time."""
        ...

    def close(self) -> None:
        """Stop. No job may be running."""
        ...


class Threads(Protocol):
    """How the blocking calls of a disk are made without holding up the event loop."""

    @property
    def is_inline(self) -> bool:
        """Whether they are made in the event loop after all."""
        ...

    def lane(self, name: str) -> Lane:
        """A lane of its own. Called in the loop that is told when a job is done."""
        ...

    async def run(self, job: Callable[[], _T]) -> _T:
        """Run one job, beside whatever else is running. Who is cancelled waits for its end."""
        ...

    def lock(self) -> AbstractContextManager[object]:
        """A lock that one job may take several times, for state that several jobs share."""
        ...


class ThreadLane:
    """A thread of its own, parked on a raw lock: the cheapest hand-over there is (two per commit)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._go = threading.Lock()
        self._go.acquire()
        self._next: tuple[Job, Done] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Job, done: Done) -> None:
        assert self._next is None, "a lane takes one job at a time"
        self._next = (job, done)
        self._go.release()

    def _work(self) -> None:
        while True:
            self._go.acquire()
            if self._next is None:
                return
            job, done = self._next
            error: BaseException | None = None
            try:
                job()
            except BaseException as caught:  # noqa: BLE001 - whatever it is belongs to the one who waits
                error = caught
            self._next = None
            try:
                self._loop.call_soon_threadsafe(done, error)
            except RuntimeError:  # the loop was closed under us: nobody is left to be told
                return

    def close(self) -> None:
        self._go.release()
        self._thread.join()


class InlineLane:
    """The event loop itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def run(self, job: Job, done: Done) -> None:
        self._loop.call_soon(self._work, job, done)

    def _work(self, job: Job, done: Done) -> None:
        error: BaseException | None = None
        try:
            job()
        except BaseException as caught:  # noqa: BLE001 - whatever it is belongs to the one who waits
            error = caught
        done(error)

    def close(self) -> None:
        pass


async def to_the_end(work: asyncio.Future[_T]) -> _T:
    """
    Wait for work in a thread. Who is cancelled waits all the same: a thread cannot be called back, and what it writes must not
    come later than what its caller does next.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


class OsThreads:
    """The machine's own threads."""

    __slots__ = ()
    is_inline = False

    def lane(self, name: str) -> Lane:
        return ThreadLane(asyncio.get_running_loop(), f"tidings-log-{name}")

    async def run(self, job: Callable[[], _T]) -> _T:
        return await to_the_end(asyncio.get_running_loop().run_in_executor(None, job))

    def lock(self) -> AbstractContextManager[object]:
        return threading.RLock()


class NoThreads:
    """None: everything happens in the loop, in one order, and holds it up. For simulations."""

    __slots__ = ()
    is_inline = True

    def lane(self, name: str) -> Lane:
        return InlineLane(asyncio.get_running_loop())

    async def run(self, job: Callable[[], _T]) -> _T:
        return job()

    def lock(self) -> AbstractContextManager[object]:
        return threading.RLock()
