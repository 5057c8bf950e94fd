"""
The local store for the event loop: a thread of its own does the disk's work, one transaction after another.

Drafts that are handed in while the thread is busy share the next transaction, and so one wait for the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from tidings.wire.sync_frames import SubmitItem

from .database import Database, StoredDraft
from .drafts import Verdict
from .errors import ClientError

P = ParamSpec("P")
T = TypeVar("T")

_Answers = list[StoredDraft | Verdict]
_Add = tuple[Sequence[SubmitItem], asyncio.Future[_Answers]]


class ClientStore:
    """
    A ``Database`` that the event loop can wait for. Made by ``open``.

    Args:
        is_inline: Do the disk's work in the loop's thread, so that a simulated run is the same every time.
    """

    def __init__(self, path: Path | str, *, is_inline: bool = False) -> None:
        self.path = str(path) if str(path) == ":memory:" else str(Path(path).absolute())
        self.drafts_stored: Callable[[Sequence[StoredDraft]], None] = lambda drafts: None
        """Called in the loop with drafts that are on disk, before whoever submitted them goes on, or was cancelled."""
        self._database: Database | None = None
        self._thread = None if is_inline else ThreadPoolExecutor(1, thread_name_prefix="tidings-client-store")
        self._adds: list[_Add] = []
        self._adding: asyncio.Task[None] | None = None

    async def open(self, client_id: str) -> None:
        """
        Open the file, or make it.

        Raises:
            StoreBusy, StoreMismatch, StoreUnusable: It cannot be opened.
        """
        self._database = await self._run(lambda: Database(self.path, client_id))

    async def close(self) -> None:
        """Finish what was begun, and close the file."""
        if self._adding is not None:
            await asyncio.wait({self._adding})
        if self._database is not None:
            await self._run(self._database.close)
            self._database = None
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    async def call(self, method: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one method of the database. It is carried out even if the caller is cancelled meanwhile."""
        database = self._database
        assert database is not None, "the store is open"
        return await self._run(lambda: method(database, *args, **kwargs))

    async def add_drafts(self, items: Sequence[SubmitItem], *, count_max: int, bytes_max: int) -> _Answers:
        """Keep drafts (``Database.add_drafts``), in one transaction with others that are waiting."""
        answer: asyncio.Future[_Answers] = asyncio.get_running_loop().create_future()
        self._adds.append((items, answer))
        if self._adding is None or self._adding.done():
            self._adding = asyncio.create_task(self._add_waiting(count_max, bytes_max), name="tidings-client-drafts")
        return await answer

    async def _add_waiting(self, count_max: int, bytes_max: int) -> None:
        while self._adds:
            adds, self._adds = self._adds, []
            if await self._add_together(adds, count_max, bytes_max):
                continue
            # One of them is at fault, and the others should not hear of it.
            for add in adds:
                await self._add_together([add], count_max, bytes_max)

    async def _add_together(self, adds: Sequence[_Add], count_max: int, bytes_max: int) -> bool:
        together = [item for items, _ in adds for item in items]
        try:
            answers = await self.call(Database.add_drafts, together, count_max=count_max, bytes_max=bytes_max)
        except ClientError as error:
            if len(adds) > 1:
                return False
            if not adds[0][1].done():
                adds[0][1].set_exception(error)
            return True
        self.drafts_stored([answer for answer in answers if isinstance(answer, StoredDraft)])
        for items, answer in adds:
            if not answer.done():  # the caller may have been cancelled
                answer.set_result(answers[: len(items)])
            del answers[: len(items)]
        return True

    async def _run(self, job: Callable[[], T]) -> T:
        if self._thread is None:
            return job()
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)
