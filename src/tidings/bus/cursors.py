"""
Positions of running groups: loaded when a group starts, stored while it moves, stored and synced when it leaves.

A position is stored a little after it has moved, and synced less often: what a crash loses is that events were acknowledged, so they
are delivered again, and none is lost. A group that leaves, and a bus that closes, have their positions on the disk first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from typing import Literal
from weakref import WeakSet

from tidings.core.clock import Clock, format_utc
from tidings.core.errors import SettingsError
from tidings.core.tasks import cancel_and_wait
from tidings.log.errors import PositionTrimmed
from tidings.log.interface import Log
from tidings.log.retention import Needs

from .group import Group
from .settings import BusSettings
from .store import Claims, Cursor, DeadLetterFilter, GroupPosition, GroupStore

logger = logging.getLogger(__name__)


def bounds(log: Log, topic: str) -> tuple[int, int]:
    """The first offset that a topic still has, and the one that its next event gets."""
    info = log.topic(topic)
    return (0, 0) if info is None else (info.first_offset, info.next_offset)


def check_offset(log: Log, name: str, topic: str, offset: int) -> None:
    """
    Make sure that a group may go on at an offset: within its topic, or right after it. A position beyond would make recovery, which
    takes cursors for evidence, believe that events were lost.

    Raises:
        SettingsError: The offset, which is called ``name``, is beyond the topic's end.
        PositionTrimmed: The topic no longer has it.
    """
    if type(offset) is not int or offset < 0:
        raise SettingsError(name, f"must be a whole number from 0, not {offset!r}")
    first, end = bounds(log, topic)
    if offset > end:
        raise SettingsError(name, f"topic {topic!r} ends before offset {end}; {offset} is beyond it")
    if offset < first:
        raise PositionTrimmed(topic, offset, first)


class CursorSaver:
    """
    The positions of one running bus's groups. Also tells retention which records are needed (``RecordHolders``).

    Args:
        log, store: Where the events are, and where positions are stored.
        clock, settings: What time it is, and how often positions are stored and synced.
    """

    def __init__(self, log: Log, store: GroupStore, clock: Clock, settings: BusSettings) -> None:
        self._log = log
        self._store = store
        self._clock = clock
        self._settings = settings
        self._saving = asyncio.Lock()
        """Held while a position is written: a save that began earlier must not end later."""
        self._dirty: dict[Group, None] = {}
        """Groups whose position has changed, in that order: a simulated run must be the same each time."""
        self._unsynced: dict[Group, None] = {}
        self._changed = asyncio.Event()
        self._released: WeakSet[Group] = WeakSet()
        """Groups that have left: whoever was about to store their position must not, as it may have been set since."""
        self._task = asyncio.create_task(self._save_regularly(), name="cursors")

    async def stop(self, groups: Iterable[Group]) -> None:
        """Store the positions of these groups, which must have stopped."""
        await cancel_and_wait(self._task)
        for group in groups:
            try:
                await self._save(group, sync=True)
            except OSError as error:
                logger.error("the cursor of group %s cannot be stored; events are redelivered: %s", group.name, error)
        self._dirty.clear()
        self._unsynced.clear()

    def mark(self, group: Group) -> None:
        """The group's position has changed. It need not be marked again before it is stored: ``is_change_wanted`` says so."""
        self._dirty[group] = None
        self._changed.set()

    async def release(self, group: Group) -> None:
        """Store the position of a group that leaves."""
        try:
            await self._save(group, sync=True)
        finally:
            self._released.add(group)
            self._dirty.pop(group, None)
            self._unsynced.pop(group, None)

    async def load(
        self, topic: str, name: str, start: int | Literal["earliest", "latest"], claims: Claims
    ) -> GroupPosition:
        """
        The position of a group that starts; ``start`` is that of a new one. What a crash interrupted is counted as an attempt, and
        stored, before anything is delivered.

        Raises:
            CursorDamaged, EpochMismatch: The position cannot be read, or is of another history.
            PositionTrimmed: Events that the group has not seen were dropped.
            SettingsError: ``start`` is beyond the topic's end.
        """
        async with self._store.changing:
            position = await self._store.load(topic, name)
            interrupted = await self._store.left_over(claims)
            first_kept, end = bounds(self._log, topic)
            if position is None:
                match start:
                    case "earliest":
                        first = first_kept
                    case "latest":
                        first = end
                    case first:
                        check_offset(self._log, "start", topic, first)
                position = GroupPosition(Cursor(first - 1), {})
            cursor, attempts = position.cursor, position.attempts
            if cursor.committed + 1 < first_kept:
                raise PositionTrimmed(topic, cursor.committed + 1, first_kept)
            if position.set_at:
                await self._pass_given_up(topic, name, position)
            else:
                position = position._replace(set_at=self._now())
            for offset, attempt in interrupted.items():
                if offset not in cursor:
                    attempts[offset] = max(attempts.get(offset, 0), attempt)
            await self._store.save(topic, name, position)
            return position

    async def _pass_given_up(self, topic: str, name: str, position: GroupPosition) -> None:
        """
        Count events that became dead letters as done: after a crash, letters can be stored of which the position does not know yet. Letters
        from before the position was set are left out: their events are delivered again.
        """
        for letter in await self._store.dead_letters(topic, None, DeadLetterFilter(group=name)):
            if letter.failed_at > position.set_at and letter.offset not in position.cursor:
                position.cursor.ack(letter.offset)
                position.attempts.pop(letter.offset, None)

    def _now(self) -> str:
        return format_utc(self._clock.now_ns()).decode()

    async def move(self, topic: str, name: str, offset: int, *, is_paused: bool) -> None:
        """
        Set the position of a group that is not running: ``offset`` is the next it will get.

        Raises:
            SettingsError, PositionTrimmed: As ``check_offset`` does.
        """
        async with self._store.changing, self._saving:
            check_offset(self._log, "offset", topic, offset)
            await self._store.save(topic, name, GroupPosition(Cursor(offset - 1), {}, is_paused, self._now()))

    async def remove(self, topic: str, name: str) -> None:
        """Forget a group that is not running. Who subscribes meanwhile waits, and makes a new one."""
        async with self._store.changing, self._saving:
            await self._store.remove(topic, name)

    async def flush(self) -> None:
        """Have the positions of running groups on the disk, as far as the disk takes them."""
        await self._save_all(self._dirty | self._unsynced, sync=True)

    async def needs(self) -> Needs:
        """Which records of all topics are needed now."""
        await self.flush()
        return await self._store.needs()

    def needs_of(self, topic: str) -> AbstractAsyncContextManager[Needs]:
        """Which records of a topic are needed; while the context is open nobody begins to need more."""
        return self._store.needs_of(topic)

    async def _save_regularly(self) -> None:
        synced_at = self._clock.monotonic()
        while True:
            if not self._dirty and not self._unsynced:
                self._changed.clear()
                await self._changed.wait()
                synced_at = self._clock.monotonic()
            await self._clock.sleep(self._settings.cursor_interval_ms / 1000)
            is_sync = self._clock.monotonic() - synced_at >= self._settings.cursor_sync_interval_ms / 1000
            if is_sync:
                synced_at = self._clock.monotonic()
            await self._save_all(self._dirty | (self._unsynced if is_sync else {}), sync=is_sync)

    async def _save_all(self, groups: dict[Group, None], *, sync: bool) -> None:
        for group in groups:
            self._dirty.pop(group, None)
            group.is_change_wanted = True
            if sync:
                self._unsynced.pop(group, None)
            else:
                self._unsynced[group] = None
        for group in groups:
            try:
                await self._save(group, sync=sync)
            except OSError as error:
                self._dirty[group] = None
                logger.error("the cursor of group %s cannot be stored: %s", group.name, error)

    async def _save(self, group: Group, *, sync: bool) -> None:
        async with self._saving:
            if group not in self._released:
                # Copies: the store writes while the group goes on.
                position = GroupPosition(group.cursor.copy(), dict(group.attempts), group.is_paused, group.set_at)
                await self._store.save(group.topic, group.name, position, sync=sync)
