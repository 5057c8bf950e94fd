"""
Keeping the groups' places: taken up when a group starts, stored while it moves, sealed when it leaves.

A place is stored a little after it has moved, and synced more seldom still: what a crash takes is the news that events are
done, so they come again, and none is lost. A group that leaves, and a bus that closes, have their places on the disk first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, TypeVar
from weakref import WeakSet

from tidings.core.clock import Clock
from tidings.core.errors import SettingsError, TidingsError
from tidings.log.embedded.disk import Disk
from tidings.log.errors import PositionTrimmed
from tidings.log.interface import Log

from .claims import Claims
from .cursor import Cursor
from .errors import UnknownGroup
from .group import Group
from .offsets import GroupPlace, OffsetStore
from .places import bounds, segment_at
from .settings import BusSettings
from .standing import stored_place

__all__ = ["CursorKeeper", "in_thread"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


async def in_thread(disk: Disk, job: Callable[[], _T]) -> _T:
    """Blocking file work, beside the loop or in it, as the disk says."""
    return await disk.threads.run(job)


class CursorKeeper:
    """
    The places of one bus's groups. It may be started again after it was stopped.

    Args:
        disk, folder, clock: Where the offset files are, and what time it is.
        settings: How often places are stored and synced.
        log: The log that the bus has open; raises when there is none.
        key: Seals the files against edits.
    """

    offsets: OffsetStore

    def __init__(
        self,
        *,
        disk: Disk,
        folder: Path,
        clock: Clock,
        settings: BusSettings,
        log: Callable[[], Log],
        key: bytes | None,
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._clock = clock
        self._settings = settings
        self._log = log
        self._key = key
        self.moving = asyncio.Lock()
        """Held while a group is created or removed, or its place is set. Whoever drops segments holds it too: between the look at what the
        log has and the place that is stored, nothing may go."""
        self._saving = asyncio.Lock()
        """Held while an offset file is written: a save that began earlier must not end later."""
        self._dirty: dict[Group, None] = {}
        """Groups whose place has changed, in that order: a simulated run must be the same each time."""
        self._unsynced: dict[Group, None] = {}
        self._left: WeakSet[Group] = WeakSet()
        """Groups that have left: whoever was about to store their place must not, as it may have been set since."""
        self._task: asyncio.Task[None] | None = None

    def start(self, epoch: str) -> None:
        """Begin to store places, counted in this life of the log."""
        self.offsets = OffsetStore(self._disk, self._folder, self._clock, epoch, self._key)
        self._task = asyncio.create_task(self._keep(), name="cursors")

    async def stop(self, groups: Iterable[Group]) -> None:
        """Seal the places of these groups, which must have come to rest, and forget what was to be stored."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for group in groups:
            try:
                await self._save(group, sync=True)
            except OSError as error:
                logger.error("the cursor of group %s cannot be stored; events come again: %s", group.name, error)
        self._dirty.clear()
        self._unsynced.clear()

    def mark(self, group: Group) -> None:
        """The group's place has changed. Whoever marks need not again before the place is stored: ``is_change_wanted`` says so."""
        self._dirty[group] = None

    async def let_go(self, group: Group) -> None:
        """Seal the place of a group that leaves."""
        try:
            await self._save(group, sync=True)
        finally:
            self._left.add(group)
            self._dirty.pop(group, None)
            self._unsynced.pop(group, None)

    async def take_up(
        self, topic: str, name: str, start: int | Literal["earliest", "latest"], claims: Claims
    ) -> GroupPlace:
        """
        Where a group stands; ``start`` says where a new one does. What a crash interrupted is counted, and stored, before
        anything is handed out.

        Raises:
            CursorDamaged, EpochMismatch: The place is not known, or of another history.
            PositionTrimmed: Events that the group has not seen were dropped.
            SettingsError: ``start`` is beyond the topic's end.
        """
        async with self.moving:
            return await in_thread(self._disk, lambda: self._take_up(topic, name, start, claims))

    def _take_up(self, topic: str, name: str, start: int | Literal["earliest", "latest"], claims: Claims) -> GroupPlace:
        place = self.offsets.load(topic, name)
        if place is None:
            first_kept, end = bounds(self._log(), topic)
            match start:
                case "earliest":
                    first = first_kept
                case "latest":
                    first = end
                case first:
                    self.check_offset("start", topic, first)
            place = GroupPlace(Cursor(first - 1), {}, paused=False)
        cursor, attempts, is_paused = place
        if cursor.committed + 1 < (first_kept := bounds(self._log(), topic)[0]):
            raise PositionTrimmed(topic, cursor.committed + 1, first_kept)
        for offset, attempt in claims.left_over().items():
            if offset not in cursor:
                attempts[offset] = max(attempts.get(offset, 0), attempt)
        segment = segment_at(self._log(), topic, cursor.committed + 1)
        self.offsets.save(topic, name, cursor, attempts, segment=segment, paused=is_paused)
        return place

    async def move(self, topic: str, name: str, offset: int, *, is_paused: bool) -> None:
        """
        Set the place of a group that is not running: ``offset`` is the next it will get.

        Raises:
            SettingsError, PositionTrimmed: As ``check_offset`` does.
        """
        async with self.moving, self._saving:
            self.check_offset("offset", topic, offset)
            segment = segment_at(self._log(), topic, offset)
            await in_thread(
                self._disk, lambda: self.offsets.move(topic, name, offset, segment=segment, paused=is_paused)
            )

    async def remove(self, topic: str, name: str, claims: Path) -> None:
        """Forget a group that is not running, and what it had claimed. Who subscribes meanwhile waits, and makes a new one."""

        def job() -> None:
            self._disk.remove(claims)
            self.offsets.remove(topic, name)

        async with self.moving, self._saving:
            await in_thread(self._disk, job)

    def groups(self) -> list[tuple[str, str]]:
        """Topic and name of every group that has a place."""
        return self.offsets.groups()

    async def place_of(self, topic: str, name: str) -> GroupPlace | TidingsError:
        """Where a group that is not running stands, or why that is not known."""
        return await in_thread(self._disk, lambda: stored_place(self.offsets, topic, name))

    async def flush(self) -> None:
        """Have the places of running groups on the disk, as far as the disk takes them."""
        await self._save_all(self._dirty | self._unsynced, sync=True)

    async def check_known(self, topic: str, name: str) -> None:
        """
        Make sure that a group has a place.

        Raises:
            UnknownGroup: It has none.
        """
        if (topic, name) not in await in_thread(self._disk, self.offsets.groups):
            raise UnknownGroup(topic, name)

    async def is_paused(self, topic: str, name: str) -> bool:
        """Whether a group that is not running was told to stand still."""
        return await in_thread(self._disk, lambda: self.offsets.is_paused(topic, name))

    def check_offset(self, what: str, topic: str, offset: int) -> None:
        """
        A group stands within its topic, or right after it. A place beyond would tell recovery, which takes cursors for
        evidence, that events were lost.

        Raises:
            SettingsError: The offset, which is called ``what``, is beyond the topic's end.
            PositionTrimmed: The topic no longer has it.
        """
        if type(offset) is not int or offset < 0:
            raise SettingsError(what, f"must be a whole number from 0, not {offset!r}")
        first, end = bounds(self._log(), topic)
        if offset > end:
            raise SettingsError(what, f"topic {topic!r} ends before offset {end}; {offset} is beyond it")
        if offset < first:
            raise PositionTrimmed(topic, offset, first)

    async def _keep(self) -> None:
        """Write the cursors that moved, now and then; sync them more seldom."""
        synced_at = self._clock.monotonic()
        while True:
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
            if group in self._left:
                return
            # Copies: the file is written in a thread, while the group goes on.
            cursor, attempts, is_paused = group.cursor.copy(), dict(group.attempts), group.is_paused
            segment = segment_at(self._log(), group.topic, cursor.committed + 1)

            def job() -> None:
                self.offsets.save(
                    group.topic, group.name, cursor, attempts, segment=segment, paused=is_paused, sync=sync
                )

            await in_thread(self._disk, job)
