"""
Dead letters in a running bus: burying what a group gives up on, and handing it to the group again when asked.

A request is in the letter's file before anything is tried, so it survives a crash; a group that starts looks for requests that
it was left. Each group's letters are tried one after another, beside its other work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from tidings.core.clock import Clock
from tidings.log.embedded.disk import Disk
from tidings.log.encryption import Encryptor
from tidings.log.errors import LogError, PositionTrimmed
from tidings.log.interface import Log
from tidings.log.record import Record

from .cursor_keeper import in_thread
from .dead_letters import DeadLetterStore
from .group import Group, ProcessEnded
from .letters import Attempt, DeadLetter, LetterFilter, LetterState, Reason, record_of
from .places import bounds
from .subscription import SubscriptionRegistry
from .waiting_retries import record_at

__all__ = ["Redrives"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_BURY_AGAIN_WAIT_S = 1.0
_ASKED_FOR: Final[tuple[LetterState, ...]] = ("requested", "trying")


class Redrives:
    """
    The dead letters of one bus. It may be started again after it was stopped.

    Args:
        disk, folder, clock: Where the letters are, and what time it is.
        letter_disk: The same disk, for new letters.
        log: The log that the bus has open; raises when there is none.
        registry: Where the groups are found that letters go to.
        encryptor: Seals what letters of encrypted spaces say.
        on_bury: Told the letter, once it is on the disk.
    """

    letters: DeadLetterStore

    def __init__(
        self,
        *,
        disk: Disk,
        letter_disk: Disk,
        folder: Path,
        clock: Clock,
        log: Callable[[], Log],
        registry: SubscriptionRegistry,
        encryptor: Encryptor | None,
        on_bury: Callable[[DeadLetter], None],
    ) -> None:
        self._disk = disk
        self._letter_disk = letter_disk
        self._folder = folder
        self._clock = clock
        self._log = log
        self._registry = registry
        self._encryptor = encryptor
        self._on_bury = on_bury
        self._tasks: dict[Group, asyncio.Task[None]] = {}
        self._wanted: set[Group] = set()

    def start(self) -> None:
        """Look at the files afresh."""
        self.letters = DeadLetterStore(
            self._disk, self._folder, self._clock, self._encryptor, letter_disk=self._letter_disk
        )

    def stop(self) -> list[asyncio.Task[None]]:
        """Try no more letters; returns what is on its way out, for the caller to await beside the groups' own end."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        return tasks

    def let_go(self, group: Group) -> None:
        """Try no more letters with a group that leaves; those asked for wait until it is back."""
        if (task := self._tasks.pop(group, None)) is not None:
            task.cancel()

    async def bury(
        self, record: Record, group: str, error: BaseException, attempts: list[Attempt], reason: Reason
    ) -> DeadLetter:
        """Store a dead letter, however long the disk takes to accept it: the cursor passes the event after this."""
        while True:
            try:
                letter = await self._run(lambda: self.letters.bury(record, group, error, attempts, reason))
            except OSError as problem:
                logger.error("a dead letter of group %s cannot be stored, and is tried again: %s", group, problem)
                await self._clock.sleep(_BURY_AGAIN_WAIT_S)
                continue
            self._on_bury(letter)
            return letter

    async def choose(self, topic: str, letter_ids: Sequence[str] | None, wanted: LetterFilter) -> list[DeadLetter]:
        """The letters of a topic that fit, among those named or among all; see ``DeadLetterStore.choose``."""
        return await self._run(lambda: self.letters.choose(topic, letter_ids, wanted))

    async def letter(self, topic: str, letter_id: str) -> DeadLetter:
        """One letter, in whatever state."""
        return await self._run(lambda: self.letters.get(topic, letter_id))

    async def redrive(
        self, topic: str, letter_ids: Sequence[str] | None, *, group: str | None, dry_run: bool
    ) -> list[DeadLetter]:
        """Ask for letters to be tried again: those named, or all; of a group only, if one is given. Returns those that are, or would be."""
        chosen = await self.choose(topic, None if letter_ids is None else list(letter_ids), LetterFilter(group=group))
        if dry_run:
            return chosen
        asked = await self._run(lambda: self.letters.request(topic, [letter.id for letter in chosen]))
        for subscription in self._registry.list(topic):
            if subscription.group_state is not None:
                self.spawn(subscription.group_state)
        return asked

    async def drop(self, topic: str, letter_ids: Sequence[str]) -> None:
        """Give letters up for good."""
        await self._run(lambda: self.letters.drop(topic, list(letter_ids)))

    def spawn(self, group: Group) -> None:
        """Have the group try the letters that were asked for, if there are any. One that is paused does so when it is resumed."""
        if group.is_paused:
            return
        self._wanted.add(group)
        if group not in self._tasks:
            self._tasks[group] = asyncio.create_task(self._redrive_requested(group))

    async def _redrive_requested(self, group: Group) -> None:
        """Hand a group's letters that were asked for to it, one after another, until none is left."""
        try:
            while group in self._wanted:
                self._wanted.discard(group)
                wanted = LetterFilter(group=group.name, states=_ASKED_FOR)
                # The file is read once for all of them. Who asks for more says so, and then it is read again.
                for letter in await self.choose(group.topic, None, wanted):
                    if group.is_paused:
                        return
                    if await self._is_asked_for(letter):
                        await self._redrive_one(group, letter)
        except (LogError, OSError) as error:
            logger.error("the dead letters of group %s wait for the next start: %s", group.name, error)
        finally:
            # Nothing is awaited since the last look at what is wanted: nobody can have asked in vain.
            self._tasks.pop(group, None)
            self._wanted.discard(group)

    async def _is_asked_for(self, letter: DeadLetter) -> bool:
        """Whether it still is: while those before it were tried, somebody may have dropped it."""
        return await self._run(lambda: self.letters.state(letter.topic, letter.id)) in _ASKED_FOR

    async def _redrive_one(self, group: Group, letter: DeadLetter) -> None:
        topic, letter_id = letter.topic, letter.id
        if letter.tries > group.settings.backoff.retries_max:
            problem = ProcessEnded()
            await self._run(lambda: self.letters.finish(topic, letter_id, problem))
            return
        record = record_of(letter) or await record_at(self._log(), topic, letter.offset)
        if record is None:
            gone = PositionTrimmed(topic, letter.offset, bounds(self._log(), topic)[0])
            await self._run(lambda: self.letters.finish(topic, letter_id, gone))
            return
        await self._run(lambda: self.letters.begin(topic, letter_id))
        error = await group.redrive(record, letter.retries + letter.redrives + 2, is_suspect=letter.tries > 0)
        await self._run(lambda: self.letters.finish(topic, letter_id, error))

    async def _run(self, job: Callable[[], _T]) -> _T:
        return await in_thread(self._disk, job)
