"""
Dead letters of a running bus: storing what a group gives up on, and redriving it when asked.

A request is stored before anything is tried, so it survives a crash; a group that starts looks for requests that were left. Each
group's dead letters are redriven one after another, beside its other work. Those that no member may see wait, and hold up no others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from tidings.core.clock import Clock
from tidings.log.errors import LogError, PositionTrimmed
from tidings.log.interface import Log
from tidings.log.record import Record

from .cursors import bounds
from .group import Group, ProcessEnded
from .handlers import NotTried
from .members import Handover
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
        if group in self._tasks:
            group.members.wake()  # it may wait for a member
        else:
            self._tasks[group] = asyncio.create_task(self._redrive_requested(group))

    def is_redriving(self, group: Group) -> bool:
        """Whether a group has letters before it that were requested."""
        return group in self._tasks

    async def redriven(self, group: Group) -> None:
        """Wait until a group has tried what was requested."""
        if (task := self._tasks.get(group)) is not None:
            await asyncio.wait([task])

    async def _redrive_requested(self, group: Group) -> None:
        """Redrive what was requested until nothing is left, or the group is paused."""
        try:
            while group in self._wanted and not group.is_paused:
                self._wanted.discard(group)
                wanted = DeadLetterFilter(group=group.name, states=_REQUESTED)
                # Read once for all of them. Who requests more says so, and then it is read again.
                await self._redrive_all(group, deque(await self._store.dead_letters(group.topic, None, wanted)))
        except (LogError, OSError) as error:
            logger.error("the dead letters of group %s wait for the next start: %s", group.name, error)
        finally:
            # Nothing was awaited since ``_wanted`` was last read, so no request is missed.
            self._tasks.pop(group, None)
            self._wanted.discard(group)

    async def _redrive_all(self, group: Group, letters: deque[DeadLetter]) -> None:
        """Redrive them one after another; as with events, the group looks past some that no member with room may see."""
        waiting: list[tuple[DeadLetter, Record]] = []
        begun: set[str] = set()
        count_max = group.settings.workers if group.members.sole is None else 1
        while not group.is_paused:
            while letters and len(waiting) < count_max:
                letter = letters.popleft()
                if (record := await self._record_of(letter)) is not None:
                    waiting.append((letter, record))
            if not waiting:
                return
            if group.members.sole is not None:
                at, handover = 0, None
            elif (found := _choose(group, waiting)) is not None:
                at, handover = found
            elif group in self._wanted:
                return
            else:
                group.members.warn_if_nobody_may_see(waiting[0][1], group.name)
                await group.members.changed()
                continue
            try:
                await self._redrive_one(group, *waiting[at], handover, begun)
            except NotTried:
                if group.is_closing:
                    return
            else:
                del waiting[at]

    async def _record_of(self, letter: DeadLetter) -> Record | None:
        """Its event; if that is gone, the dead letter is given up."""
        record = record_of(letter) or await record_at(self._log, letter.topic, letter.offset)
        if record is None:
            gone = PositionTrimmed(letter.topic, letter.offset, bounds(self._log, letter.topic)[0])
            await self._store.finish_redrive(letter.topic, letter.id, gone)
        return record

    async def _redrive_one(
        self, group: Group, letter: DeadLetter, record: Record, handover: Handover | None, begun: set[str]
    ) -> None:
        topic, store = letter.topic, self._store
        try:
            if await store.dead_letter_state(topic, letter.id) not in _REQUESTED:
                return  # dropped while those before it were tried
            # A member elsewhere cannot end this process, so no interrupted try is its doing.
            is_local = handover is None or handover.member.is_local
            if is_local and letter.tries > group.settings.backoff.retries_max:
                await store.finish_redrive(topic, letter.id, ProcessEnded())
                return
            if letter.id not in begun:
                begun.add(letter.id)
                await store.begin_redrive(topic, letter.id)
            attempt = letter.retries + letter.redrives + 2
            error = await group.redrive(record, attempt, handover, is_suspect=is_local and letter.tries > 0)
        finally:
            if handover is not None:
                handover.end()
        await store.finish_redrive(topic, letter.id, error)


def _choose(group: Group, waiting: list[tuple[DeadLetter, Record]]) -> tuple[int, Handover] | None:
    """The first of them that a member with room may see, and the way to that member."""
    for at, (_, record) in enumerate(waiting):
        if (member := group.members.choose(record)) is not None:
            return at, Handover(member)
    return None
