"""
Lanes: where blocking disk work runs, one job at a time, in order.

``ThreadLane`` is a thread parked on a raw lock, the cheapest hand-over there is (two per commit). ``InlineLane``
runs the job in the event loop: the simulated world needs every disk call to come in the same order each time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

__all__ = ["InlineLane", "Lane", "ThreadLane"]

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


class ThreadLane:
    """A thread of its own."""

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
