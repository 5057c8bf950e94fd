"""Waiting for commits: whoever reads live sleeps here until there is something new."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from .state import TopicState

__all__ = ["CommitWaiters"]


class CommitWaiters:
    """Futures to be woken by the next commit, of any topic or of one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._any: list[asyncio.Future[None]] = []
        self._by_topic: dict[str, list[asyncio.Future[None]]] = {}

    async def wait(self, topic: str | None) -> None:
        """Sleep until the next commit (in ``topic``, if given), or until the log is closed."""
        waiting = self._any if topic is None else self._by_topic.setdefault(topic, [])
        turn: asyncio.Future[None] = self._loop.create_future()
        waiting.append(turn)
        try:
            await turn
        finally:
            if turn.cancelled() and turn in waiting:
                waiting.remove(turn)

    def wake(self, topics: Iterable[TopicState]) -> None:
        """Something was committed in these topics."""
        if self._any:
            _finish(self._any)
        if self._by_topic:
            for topic in topics:
                if (waiting := self._by_topic.pop(topic.name, None)) is not None:
                    _finish(waiting)

    def close(self) -> None:
        """Wake everybody: there will be no more commits."""
        _finish(self._any)
        for waiting in self._by_topic.values():
            _finish(waiting)
        self._by_topic.clear()


def _finish(waiting: list[asyncio.Future[None]]) -> None:
    turns = waiting.copy()
    waiting.clear()
    for turn in turns:
        if not turn.done():
            turn.set_result(None)
