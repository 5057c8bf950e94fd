"""
Threads for handlers that are plain functions.

A group has its own, as many as it has workers: a handler that blocks holds up its group and nobody else. They are daemons: one
that never comes back must not keep the process from ending. One that has nothing to do for a while goes.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

__all__ = ["Handler", "HandlerThreads", "as_async"]

Handler = Callable[[Any], Awaitable[object] | object]

_IDLE_S: Final = 10.0


class _Call(NamedTuple):
    function: Callable[[], object]
    answer: asyncio.Future[object]
    loop: asyncio.AbstractEventLoop


class HandlerThreads:
    """
    Runs plain functions beside the loop.

    Args:
        name: What the threads are called.
        count_max: At most so many. A call beyond that waits for one of them.
    """

    def __init__(self, name: str, count_max: int) -> None:
        self._name = name
        self._count_max = count_max
        self._count = 0
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._at_work = 0
        """Calls that were made and have not ended, also those that nobody waits for any more."""

    async def run(self, function: Callable[[Any], object], argument: object) -> object:
        """What the function returns. Who stops waiting does not stop the function."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()
        context = contextvars.copy_context()
        self._at_work += 1
        with self._lock:
            self._calls.put(_Call(lambda: context.run(function, argument), answer, loop))
            is_one_more = self._count < min(self._at_work, self._count_max)
            self._count += is_one_more
        if is_one_more:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return await answer

    def stop(self) -> None:
        """Start nothing more. What is being run ends by itself, or with the process."""
        with self._lock:
            for _ in range(self._count):
                self._calls.put(None)
            self._count = 0

    def _next(self) -> _Call | None:
        """The next call; ``None`` if the thread is to end."""
        while True:
            try:
                return self._calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._calls.empty():
                        self._count -= 1
                        return None

    def _work(self) -> None:
        while (call := self._next()) is not None:
            if call.answer.cancelled():  # nobody waits for it, and it has not begun
                outcome: object = None
            else:
                outcome = _outcome(call.function)
            try:
                call.loop.call_soon_threadsafe(self._tell, call.answer, outcome)
            except RuntimeError:  # the loop was closed: nobody is left to be told
                return
            del call, outcome  # not to be held while waiting for the next

    def _tell(self, answer: asyncio.Future[object], outcome: object) -> None:
        self._at_work -= 1
        if answer.done():
            return
        if isinstance(outcome, _Raised):
            answer.set_exception(outcome.error)
        else:
            answer.set_result(outcome)


class _Raised(NamedTuple):
    error: BaseException


def _outcome(function: Callable[[], object]) -> object:
    try:
        return function()
    except StopIteration as error:  # cannot pass through a coroutine
        raised = RuntimeError("the handler raised StopIteration")
        raised.__cause__ = error
        return _Raised(raised)
    except BaseException as error:  # noqa: BLE001 - belongs to the one who waits
        return _Raised(error)


def is_async(handler: Handler) -> bool:
    """Whether a handler is a coroutine function, or an object with an async ``__call__``."""
    call = getattr(handler, "__call__", handler)  # noqa: B004 - an object with an async __call__ is a handler too
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


def as_async(handler: Handler, threads: HandlerThreads) -> Callable[[Any], Awaitable[object]]:
    """A plain function runs in a thread: it must not hold up everybody else."""
    if is_async(handler):
        return handler  # type: ignore[return-value]

    async def in_thread(event: Any) -> object:
        answer = await threads.run(handler, event)
        return await answer if inspect.isawaitable(answer) else answer

    return in_thread
