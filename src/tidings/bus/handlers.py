"""
Calling handlers: their answers and errors as values, their deadlines, and threads for those that are plain functions.

Handlers, filters and hooks are other people's code. Whatever they raise is a failed attempt; it must not end the worker that
called them. Three things are not theirs: the end of the process (``SystemExit``, ``KeyboardInterrupt``), the cancellation of
the task that called them, and the closing of its coroutine.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidings.core.clock import Clock

from .errors import HandlerTimeout, InvalidAnswer
from .events import Ack, Nack, ReceivedEvent

if TYPE_CHECKING:
    from .members import Member

Handler = Callable[..., Awaitable[object] | object]
"""What users subscribe; see ``payloads`` for its parameters. It returns ``Ack``, ``Nack`` or nothing, or raises."""
AsyncHandler = Callable[[Any], Awaitable[object]]
"""What is called: one parameter, and awaited."""

_IDLE_S: Final = 10.0

HANDLING: Final[contextvars.ContextVar[ReceivedEvent | None]] = contextvars.ContextVar("tidings_handling", default=None)
"""The event whose handler this code was started by; of a list, the first."""


def is_in_handler() -> bool:
    """
    Whether this code runs for a handler that somebody waits for: its own publishing must not wait for handlers.

    A task that a handler has started is part of it for as long as the handler is at work, and no longer.
    """
    event = HANDLING.get()
    return event is not None and event.is_at_work


# Outcomes


class NotTried(Exception):
    """Raised in place of an answer: nobody has tried the event, so nothing is counted, and it is delivered again."""

    def __str__(self) -> str:
        return "the event was given back untried"


class ProcessEnding(asyncio.CancelledError):
    """A task is cancelled because a handler that it waits for has ended the process. The attempt counts."""


def is_failure(error: BaseException) -> bool:
    """Whether what came out of foreign code is a failure of that code; if not, it must be raised on."""
    if isinstance(error, Exception):
        return True
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop is running: the coroutine is being closed
        return False
    if task is None:
        return False
    # Something that the handler awaited was cancelled, or the task itself was.
    return task.cancelling() == 0 if isinstance(error, asyncio.CancelledError) else True


async def outcome_of(running: Awaitable[object]) -> object:
    """What a handler answers or raises, as a value."""
    try:
        return await running
    except BaseException as error:
        if not is_failure(error):
            raise
        return error


def judged(outcome: object) -> Ack | Nack | BaseException:
    """An outcome as what it means: done, not done, or failed. A handler that returns nothing has acknowledged."""
    if outcome is None:
        return Ack()
    kind = type(outcome)  # not what the object says of itself: asking it may raise
    return outcome if issubclass(kind, Ack | Nack | BaseException) else InvalidAnswer(outcome)  # type: ignore[return-value]


# Handlers in tasks of their own


class HandlerTasks:
    """
    Handlers that run in tasks of their own, so that one can be cancelled without touching the worker that waits for it.

    One timer watches the deadline of all of them: a timeout for each event would cost more than the event.

    Args:
        clock: What time it is.
        deadline_ms: How long a handler may take; without it, as long as it likes.
        on_timeout: Told of each that took longer.
    """

    def __init__(self, clock: Clock, deadline_ms: int | None, on_timeout: Callable[[], None]) -> None:
        self._clock = clock
        self._deadline_ms = deadline_ms
        self._on_timeout = on_timeout
        self._started: dict[asyncio.Task[object], tuple[float, Member | None]] = {}
        self._withdrawn: dict[asyncio.Task[object], BaseException] = {}
        """What counts in place of the answer of a task that was cancelled here."""

    async def run(self, running: Coroutine[Any, Any, object], member: Member | None = None) -> object:
        """
        What became of one delivery; errors are values here, and so is running out of time.

        A handler that goes on after it was cancelled is waited for: a worker has one handler at work and no more. Its answer
        comes too late all the same.
        """
        task = asyncio.create_task(running)
        self._started[task] = (self._clock.monotonic(), member)
        try:
            outcome = await outcome_of(task)
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and isinstance(task.exception(), SystemExit | KeyboardInterrupt):
                raise ProcessEnding from None
            raise
        finally:
            instead = self._withdrawn.pop(task, None)
            del self._started[task]
        if isinstance(instead, HandlerTimeout):
            self._on_timeout()
        return outcome if instead is None else instead

    def withdraw(self, member: Member) -> None:
        """Cancel the handlers of a member; their events count as not tried."""
        for task, (_, owner) in list(self._started.items()):
            if owner is member:
                self._cancel(task, NotTried(), "the member leaves")

    async def watch(self, deadline_ms: int) -> None:
        """Cancel the handlers that are past their deadline, for as long as the group runs."""
        while True:
            await self._clock.sleep(deadline_ms / 4000)
            latest = self._clock.monotonic() - deadline_ms / 1000
            for task, (started, _) in list(self._started.items()):
                if started <= latest:
                    self._cancel(task, HandlerTimeout(deadline_ms), f"not answered within {deadline_ms} ms")

    def _cancel(self, task: asyncio.Task[object], outcome: BaseException, reason: str) -> None:
        if task not in self._withdrawn:
            self._withdrawn[task] = outcome
            task.cancel(reason)


# Threads for plain functions


class _Call(NamedTuple):
    function: Callable[[], object]
    answer: asyncio.Future[object]
    loop: asyncio.AbstractEventLoop


class HandlerThreads:
    """
    Runs plain functions beside the loop.

    A group has its own threads, as many as it has workers: a handler that blocks holds up its group and nobody else. They
    are daemons: one that never comes back must not keep the process from ending. One that has nothing to do for a while goes.

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

    @property
    def is_at_work(self) -> bool:
        """Whether a function runs, or waits for a thread."""
        return self._at_work > 0

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
            calls = self._calls
        if is_one_more:
            threading.Thread(target=self._work, args=(calls,), name=self._name, daemon=True).start()
        return await answer

    def stop(self) -> None:
        """Have the threads end, each after the call that it is at, if that ends. Who calls after this gets new ones."""
        with self._lock:
            for _ in range(self._count):
                self._calls.put(None)
            self._count = 0
            self._calls = queue.SimpleQueue()

    def _next(self, calls: queue.SimpleQueue[_Call | None]) -> _Call | None:
        """The next call; ``None`` if the thread is to end."""
        while True:
            try:
                return calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if calls is not self._calls:
                        return None
                    if calls.empty():
                        self._count -= 1
                        return None

    def _work(self, calls: queue.SimpleQueue[_Call | None]) -> None:
        while (call := self._next(calls)) is not None:
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


def as_async(handler: Handler, threads: HandlerThreads) -> AsyncHandler:
    """A plain function runs in a thread: it must not hold up everybody else."""
    if is_async(handler):
        return handler  # type: ignore[return-value]

    async def in_thread(event: Any) -> object:
        answer = await threads.run(handler, event)
        return await answer if inspect.isawaitable(answer) else answer

    return in_thread
