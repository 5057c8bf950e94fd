"""
Dead letters of a running bus: storing what a group gives up on, and redriving it when asked.

A request is stored before anything is tried, so it survives a crash; a group that starts looks for requests that were left. Each
group's dead letters are redriven one after another, beside its other work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from tidings.core.clock import Clock
from tidings.log.errors import LogError, PositionTrimmed
from tidings.log.interface import Log
from tidings.log.record import Record

from .cursors import bounds
from .group import Group, ProcessEnded
from .retry import record_at
from .store import Attempt, DeadLetter, DeadLetterFilter, DeadLetterState, GroupStore, Reason
from .store.dead_letters import record_of

logger = logging.getLogger(__name__)

_STORE_AGAIN_WAIT_S: Final = 1.0
_REQUESTED: Final[tuple[DeadLetterState, ...]] = ("requested", "trying")


class DeadLetterQueue:
    """
    The dead letters of one running bus.

    Args:
        log, store, clock: Where events and dead letters are, and what time it is.
        on_dead_letter: Called with each dead letter, once it is stored.
    """

    def __init__(self, log: Log, store: GroupStore, clock: Clock, on_dead_letter: Callable[[DeadLetter], None]) -> None:
        self._log = log
        self._store = store
        self._clock = clock
        self._on_dead_letter = on_dead_letter
        self._tasks: dict[Group, asyncio.Task[None]] = {}
        self._wanted: set[Group] = set()

    def stop(self) -> list[asyncio.Task[None]]:
        """Redrive nothing more; returns the tasks that are ending, for the caller to await beside the groups' own end."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        return tasks

    def release(self, group: Group) -> None:
        """Redrive nothing more with a group that leaves; what was requested waits until it is back."""
        if (task := self._tasks.pop(group, None)) is not None:
            task.cancel()

    async def add(
        self, record: Record, group: str, error: BaseException, attempts: list[Attempt], reason: Reason
    ) -> DeadLetter:
        """Store a dead letter, however long the store takes to accept it: the cursor moves past the event after this."""
        while True:
            try:
                letter = await self._store.add_dead_letter(record, group, error, attempts, reason)
            except OSError as problem:
                logger.error("a dead letter of group %s cannot be stored, and is tried again: %s", group, problem)
                await self._clock.sleep(_STORE_AGAIN_WAIT_S)
                continue
            self._on_dead_letter(letter)
            return letter

    def redrive(self, group: Group) -> None:
        """Have a group try the dead letters that were requested, if there are any. One that is paused does so when it is resumed."""
        if group.is_paused:
            return
        self._wanted.add(group)
        if group not in self._tasks:
            self._tasks[group] = asyncio.create_task(self._redrive_requested(group))

    async def _redrive_requested(self, group: Group) -> None:
        """Redrive what was requested, one after another, until nothing is left."""
        try:
            while group in self._wanted:
                self._wanted.discard(group)
                wanted = DeadLetterFilter(group=group.name, states=_REQUESTED)
                # Read once for all of them. Who requests more says so, and then it is read again.
                for letter in await self._store.dead_letters(group.topic, None, wanted):
                    if group.is_paused:
                        return
                    # While those before it were tried, somebody may have dropped it.
                    if await self._store.dead_letter_state(letter.topic, letter.id) in _REQUESTED:
                        await self._redrive_one(group, letter)
        except (LogError, OSError) as error:
            logger.error("the dead letters of group %s wait for the next start: %s", group.name, error)
        finally:
            # Nothing was awaited since ``_wanted`` was last read, so no request is missed.
            self._tasks.pop(group, None)
            self._wanted.discard(group)

    async def _redrive_one(self, group: Group, letter: DeadLetter) -> None:
        topic, store = letter.topic, self._store
        if letter.tries > group.settings.backoff.retries_max:
            await store.finish_redrive(topic, letter.id, ProcessEnded())
            return
        record = record_of(letter) or await record_at(self._log, topic, letter.offset)
        if record is None:
            gone = PositionTrimmed(topic, letter.offset, bounds(self._log, topic)[0])
            await store.finish_redrive(topic, letter.id, gone)
            return
        await store.begin_redrive(topic, letter.id)
        error = await group.redrive(record, letter.retries + letter.redrives + 2, is_suspect=letter.tries > 0)
        await store.finish_redrive(topic, letter.id, error)
