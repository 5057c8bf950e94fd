"""
What became of handing an event out, as one value: the handler's answer, or what it raised.

Handlers, filters and hooks are other people's code. Whatever they raise is a failed attempt; it must not end the worker that
called them. Three things are not theirs: the end of the process (``SystemExit``, ``KeyboardInterrupt``), the cancellation of
the task that called them, and the closing of its coroutine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from .errors import InvalidAnswer
from .events import Ack, Nack

__all__ = ["NotTried", "ProcessEnding", "ends_process", "is_failure", "judged", "outcome_of"]


class NotTried(Exception):
    """Raised in place of an answer: nobody has tried the event, so nothing is counted, and it comes again."""


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


def ends_process(awaited: asyncio.Future[object]) -> bool:
    """Whether what was awaited has ended with what ends the process."""
    if not awaited.done() or awaited.cancelled():
        return False
    return isinstance(awaited.exception(), SystemExit | KeyboardInterrupt)
