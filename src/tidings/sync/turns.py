"""Taking turns by name: whoever needs several names waits for all of them, and others' names go on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

__all__ = ["Turns"]


class Turns:
    """Locks that exist while somebody wants them."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._wanted: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def of(self, names: Iterable[str]) -> AsyncIterator[None]:
        """Hold all these names. They are taken in one order by everybody, so that nobody waits for ever."""
        async with contextlib.AsyncExitStack() as held:
            for name in sorted(set(names)):
                lock = self._locks.setdefault(name, asyncio.Lock())
                self._wanted[name] = self._wanted.get(name, 0) + 1
                held.callback(self._leave, name)
                await held.enter_async_context(lock)
            yield

    def _leave(self, name: str) -> None:
        self._wanted[name] -= 1
        if not self._wanted[name]:
            del self._wanted[name], self._locks[name]

    def __len__(self) -> int:
        return len(self._locks)
