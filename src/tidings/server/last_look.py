"""
Asking once more, right before an event is stored.

A publish is looked at when it comes in. Then it may wait: for the full window of a group, for room on the disk. What it was allowed
then may be revoked by now, and its token may have expired. So the bus of a node stands on a ``LookingLog``, which asks again in the
last moment, in the same step in which the log takes the event: whoever lost the right while waiting is refused, and nothing is stored.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

from tidings.core.events import Event
from tidings.log.around import LogAround
from tidings.log.interface import Appended, Authorise, Duplicate, Verdict

__all__ = ["LookingLog", "asked_again"]

_ASK: Final[contextvars.ContextVar[Callable[[Event], None] | None]] = contextvars.ContextVar(
    "tidings_last_look", default=None
)


@contextlib.contextmanager
def asked_again(ask: Callable[[Event], None]) -> Iterator[None]:
    """
    While this holds, whatever is stored from here is asked for first; other tasks are not concerned.

    Args:
        ask: Given the event; raises if it must not be stored after all. What it raises is the publisher's answer.
    """
    token = _ASK.set(ask)
    try:
        yield
    finally:
        _ASK.reset(token)


class LookingLog(LogAround):
    """A log that asks before it takes an event."""

    def append(
        self, event: Event, *, authorise: Authorise | None = None, from_reserve: bool = False
    ) -> Coroutine[Any, Any, Appended | Duplicate]:
        """Store one event, if nobody objects now. See ``Log.append``."""
        return super().append(event, authorise=authorise or _ASK.get(), from_reserve=from_reserve)

    async def append_many(self, events: Sequence[Event], *, authorise: Authorise | None = None) -> list[Verdict]:
        """Store events in order, but for those that somebody objects to now. See ``Log.append_many``."""
        return await super().append_many(events, authorise=authorise or _ASK.get())
